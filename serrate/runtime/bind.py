"""Binding: the arguments of a call to the declared inputs of a fusion, checked.

In: the tensors of a call. Out: a `BoundCall`. All errors in the arguments of a fusion are found here, before anything runs.
Checks that depend on lengths run once for each tensor of offsets.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from serrate.analysis.vectors import MustDivide
from serrate.errors import CallError, DeviceError, ShapeError, StructureError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Expr, Symbol, element
from serrate.ir.fusion import (
    AtLeastLongest,
    Check,
    Equal,
    Fusion,
    Offsets,
    PositionInside,
    Products,
    RowsInside,
    RowsOfOffsets,
)
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain, offsets_array, running_sum
from serrate.ir.recipes import Largest
from serrate.ir.transforms import Merge
from serrate.ir.traversal import arrays_of, traverse
from serrate.ir.view import users_level
from serrate.runtime.arguments import (
    NOTHING_KNOWN,
    Arguments,
    BoundCall,
    KnownRows,
    Number,
    known_key,
    known_longest,
    known_total,
    known_variation,
)
from serrate.tensor import Structure
from serrate.tensor.checks.agreement import require_same_offsets
from serrate.tensor.checks.deferred import poll
from serrate.tensor.checks.validate import (
    NO_KNOWN_LENGTHS,
    CheckTime,
    check_lengths,
    check_products,
    check_starts,
    check_time,
    defer_offsets_check,
    run_check,
)
from serrate.tensor.sync import host_copy, is_host


class SimpleChecks(NamedTuple):
    """Checks for which nothing is read from tensors, if offsets were checked when they were constructed."""

    offsets: tuple[tuple[int, Number], ...]
    """The arguments that hold offsets, and the total that each must have."""
    sizes: tuple[Callable[[BoundCall], None], ...]
    """Raise if sizes differ that must be equal."""


class Binder(Arguments):
    """Everything about a fusion's arguments that can be worked out before the first call."""

    def __init__(self, fusion: Fusion) -> None:
        self.name = fusion.name
        self.inputs = tuple(view.tensor for view in fusion.inputs)
        self.seeds = len(fusion.seeds)
        """How many of the inputs, the last ones, are drawn and not given."""
        symbols: list[Symbol] = []
        self._forms: list[Form] = []
        for tensor in self.inputs:
            fixed, unknown = [], []
            for dim, domain in enumerate(tensor.storage):
                extent = domain.extent_expr
                if extent.value is not None:
                    fixed.append((dim, extent.value))
                elif isinstance(extent, Symbol) and extent not in symbols:
                    symbols.append(extent)
                    unknown.append(dim)
                # Any other extent follows from earlier inputs: a tensor that one program saved for another.
            self._forms.append((tensor.dtype, len(tensor.storage), tuple(fixed), tuple(unknown)))
        super().__init__([tensor.name for tensor in self.inputs], symbols)
        self._found, self._sizes_of = _numbers_of_arguments(self._forms)
        self.partitions = _partitions(fusion)
        self._steps = self._check_steps(fusion)
        self.simple_checks = self._simple_checks(fusion)
        """The checks of a call if all of them are simple; otherwise None."""
        self._told: set[int] = set()
        # What was prepared for one structure must never run for another, so nothing that describes rows may be missing here.
        self.offsets = tuple(sorted({self._place[a.name] for a in _describing(fusion) if a.name in self._place}))
        self._offsets_of: dict[int, Array] = {}
        self._places_of: dict[int, tuple[int, Expr | None]] = {}

    def bind(self, args: Sequence[torch.Tensor], known: KnownRows = NOTHING_KNOWN) -> BoundCall:
        """Checks the arguments and binds them; what depends on lengths is left to `check`."""
        if len(args) != len(self.inputs):
            raise CallError(f"{self.name} takes {len(self.inputs) - self.seeds} arguments, got {len(args) - self.seeds}")
        found = self._found(*args)
        return self._bind_one_by_one(args, known) if found is None else BoundCall(tuple(args), *found, known)

    def rebind(self, args: Sequence[torch.Tensor], known: KnownRows, device: torch.device) -> BoundCall:
        """As `bind`, for arguments of which only the sizes of dims that hold rows are new since another call."""
        return BoundCall(tuple(args), self._sizes_of(*args), device, known)

    def _bind_one_by_one(self, args: Sequence[torch.Tensor], known: KnownRows) -> BoundCall:
        """As `bind`, where an argument is wrong, which this says, or must be copied."""
        numbers: list[int] = []
        device = torch.device("cpu")
        clean = True
        for k, arg in enumerate(args):
            dtype, rank, fixed, unknown = self._forms[k]
            if not isinstance(arg, torch.Tensor) or arg.dtype is not dtype or arg.ndim != rank:
                raise CallError(f"argument {k} of {self.name} must be a {dtype} tensor with {rank} dims, got {_described(arg)}")
            if k == 0:
                device = arg.device
            if arg.device != device:
                raise DeviceError(f"argument {k} of {self.name} is on {arg.device}, argument 0 on {device}; move one of them")
            shape = arg.shape
            for dim, size in fixed:
                if shape[dim] != size:
                    raise ShapeError(f"argument {k} of {self.name}: dim {dim} must be {size}, got {shape[dim]}")
            for dim in unknown:
                numbers.append(shape[dim])
            clean = clean and arg.is_contiguous()
        given = tuple(args) if clean else tuple(self._packed(k, a) for k, a in enumerate(args))
        return BoundCall(given, tuple(numbers), device, known)

    def _packed(self, k: int, arg: torch.Tensor) -> torch.Tensor:
        """The argument with its elements side by side; says so, once, where that takes a copy."""
        if arg.is_contiguous():
            return arg
        if k not in self._told:
            self._told.add(k)
            warnings.warn(
                f"argument {k} of {self.name} ({arg.dtype}, shape {list(arg.shape)}) is not contiguous and is copied at every "
                "call; call .contiguous() once before",
                stacklevel=users_level(),
            )
        return arg.contiguous()

    def _rows_of_longest(self, array: Array) -> tuple[Array, Expr] | None:
        """The offsets whose longest row an array holds, and the extent that they end at."""
        recipe = array.recipe
        if isinstance(recipe, Largest):
            for (offsets, *inner), total in self.partitions:
                length = element(offsets, recipe.coordinate + 1) - element(offsets, recipe.coordinate)
                if not inner and recipe.term == length:
                    return offsets, total
        return None

    def _longest_of(self, call: BoundCall, array: Array, why: str) -> int | None:
        """What an array holds that is the longest row of offsets: a structure may know that without a host copy."""
        found = self._rows_of_longest(array)
        if found is None or not self.ready(call, found[0]):
            return None
        place = self.place_of(found[0])
        if place is not None and place in call.known.levels:
            rows, level = call.known.levels[place]
            return rows.max_length(level, why)
        return self.structure(call, (found[0],), found[1]).max_length(why=why)

    def _longest_reader(self, array: Array) -> Callable[[BoundCall], int | None] | None:
        found = self._rows_of_longest(array)
        place = None if found is None else self.place_of(found[0])
        if place is None:
            return None

        def read(call: BoundCall) -> int | None:
            known = call.known.levels.get(place) if call.device.type == "cpu" else None
            return None if known is None else known_longest(*known)

        return read

    def offsets_of(self, ragged: RaggedIterDomain) -> Array:
        """The array of a ragged domain's offsets, worked out once."""
        found = self._offsets_of.get(ragged.uid)
        if found is None:
            found = self._offsets_of[ragged.uid] = offsets_array(ragged)
        return found

    def check(self, call: BoundCall) -> None:
        """Everything that depends on lengths that are there; done once for each tensor of offsets."""
        if call.computed is None:
            for step in self._steps:
                step(call)
        else:
            steps = self._steps if call.unchecked is None else call.unchecked
            call.unchecked = [step for step in steps if not step(call)]

    def _check_steps(self, fusion: Fusion) -> list[Callable[[BoundCall], bool]]:
        """Every check of a call. Offsets that a domain is made with are checked also where the fusion does not ask for it."""
        rows = self._checked_rows(fusion)
        steps = [self._when_ready(chain, self._rows_step(chain, total)) for chain, total in rows]
        for check in fusion.checks:
            if not isinstance(check, Offsets):
                steps.append(self._when_ready(_arrays(check), functools.partial(self._require, check)))
        return steps

    def _checked_rows(self, fusion: Fusion) -> list[tuple[tuple[Array, ...], Expr]]:
        """All offsets that are checked, with the extents that they must end at."""
        # What is derived from no argument holds in every call.
        made = [(chain, total) for chain, total in self.partitions if any(array.sources for array in chain)]
        return list(dict.fromkeys((*made, *(((c.offsets,), c.extent) for c in fusion.checks if isinstance(c, Offsets)))))

    def _simple_checks(self, fusion: Fusion) -> SimpleChecks | None:
        sizes = [check for check in fusion.checks if not isinstance(check, Offsets)]
        if not all(isinstance(check, Equal) and _compares_sizes(check) for check in sizes):
            return None
        found = [(None if len(chain) > 1 else self.place_of(chain[0]), total) for chain, total in self._checked_rows(fusion)]
        if any(place is None for place, _ in found):
            return None
        offsets = tuple((place, self.number_reader(total)) for place, total in found if place is not None)
        return SimpleChecks(offsets, tuple(functools.partial(self._require, check) for check in sizes))

    def _when_ready(self, arrays: Sequence[Array], step: Callable[[BoundCall], None]) -> Callable[[BoundCall], bool]:
        """A step that is left out in stages that come before something that it needs is computed; returns whether it was done."""
        needed = {source.name for array in arrays for source in array.sources} - self._place.keys()

        def run(call: BoundCall) -> bool:
            if needed and not (call.computed and needed <= call.computed.keys()):
                return False
            step(call)
            return True

        return run

    def _rows_step(self, chain: tuple[Array, ...], total: Expr) -> Callable[[BoundCall], None]:
        place = self.place_of(chain[0]) if len(chain) == 1 else None
        size = self.number_reader(total)

        def step(call: BoundCall) -> None:
            known = None if place is None else call.known.levels.get(place)
            if known is not None and known_total(*known) == size(call):
                return
            if call.computed and chain[0].name in call.computed and len(chain) == 1 and not is_host(call.device):
                # Without a structure: most calls need none, because no result has these rows.
                offsets = self.array(call, chain[0])
                poll()
                defer_offsets_check((offsets,), size(call), NO_KNOWN_LENGTHS)
                call.checked[id(offsets)] = offsets
                return
            with _named("as_nested"):
                self.structure(call, chain, total)

        return step

    def _require(self, check: Check, call: BoundCall) -> None:
        if isinstance(check, RowsOfOffsets):
            self._check_rows_of_offsets(call, check)
        elif isinstance(check, RowsInside):
            with _named("as_nested"):
                self._check_rows_inside(call, check)
        elif isinstance(check, Products):
            with _named("as_product"):
                self._check_products(call, check)
        elif isinstance(check, PositionInside):
            extent = self.extent(call, check.extent)
            if not -extent <= check.position < extent:
                raise ShapeError(f"{check.what} {check.position}; there are {extent}")
        elif isinstance(check, AtLeastLongest):
            longest, reach = self.longest(call, check.ragged), self.extent(call, check.extent)
            if reach < longest:
                raise ShapeError(f"{check.what} has {reach} positions; the longest row has {longest}")
        elif isinstance(check, Equal) and isinstance(check.left, Array) and isinstance(check.right, Array):
            left, right = self.array(call, check.left), self.array(call, check.right)
            require_same_offsets(left, right, check.what)
        elif isinstance(check, Equal):
            assert isinstance(check.left, Expr) and isinstance(check.right, Expr)
            a, b = self.extent(call, check.left), self.extent(call, check.right)
            if a != b:
                raise ShapeError(f"{check.what} differ: {a} and {b}")

    def check_vectors(self, call: BoundCall, checks: Sequence[MustDivide]) -> None:
        """Loops that were vectorized by hand must be whole vectors; where only a call tells, it is asked here."""
        for check in checks:
            if check.rows is None:
                values = [self.extent(call, check.value)]
            else:
                sums = self.array(call, running_sum(check.rows, check.value))
                values = host_copy(sums, f"whether {check.what} are whole vectors").diff().tolist()
            for value in values:
                if value % check.size:
                    raise ShapeError(f"a loop is vectorized, but {check.size} does not divide {value}, {check.what}")

    def _check_rows_of_offsets(self, call: BoundCall, check: RowsOfOffsets) -> None:
        rows = self.array(call, check.offsets).reshape(-1, self.extent(call, check.count) + 1)
        if isinstance(check.domain, RaggedIterDomain):
            ends = self.array(call, offsets_array(check.domain)).diff()[: len(rows)]
        else:
            ends = torch.full((len(rows),), self.extent(call, check.domain.extent_expr), device=rows.device)
        falls, apart = rows[:, 1:] < rows[:, :-1], rows[:, -1] != ends

        def verify(found: list[int]) -> None:
            starts, falling, other = found
            if starts:
                k = int(rows[:, 0].nonzero()[0])
                raise StructureError(f"as_nested: offsets must start at 0 in every row: offsets[{k}][0] = {int(rows[k, 0])}")
            if falling:
                k, j = falls.nonzero()[0].tolist()
                before, after = int(rows[k, j]), int(rows[k, j + 1])
                raise StructureError(
                    f"as_nested: offsets must not decrease: offsets[{k}][{j + 1}] = {after} < offsets[{k}][{j}] = {before}"
                )
            if other:
                k = int(apart.nonzero()[0])
                raise StructureError(
                    f"as_nested: offsets must end at the extent: offsets[{k}] ends at {int(rows[k, -1])}, not {int(ends[k])}"
                )

        numbers = [rows[:, 0].any(), falls.any(), apart.any()]
        run_check([n.long() for n in numbers], verify, check_time(None, rows), "validating offsets")

    def _check_rows_inside(self, call: BoundCall, check: RowsInside) -> None:
        starts, lengths = self.array(call, check.starts), self.array(call, check.lengths)
        when = check_time(None, starts)
        if when is CheckTime.NOW:
            check_lengths([lengths], None)
        check_starts(starts, lengths, self.extent(call, check.extent), when)

    def _check_products(self, call: BoundCall, check: Products) -> None:
        rows, columns = self.array(call, check.rows), self.array(call, check.columns)
        for name, offsets in (("rows", rows), ("columns", columns)):
            try:
                call.remember((offsets,), "products", lambda offsets=offsets: Structure.from_offsets(offsets))  # type: ignore[misc]
            except StructureError as error:
                raise StructureError(f"{name}: {error}") from None
        lengths, widths = rows.diff().long(), columns.diff().long()
        when, extent = check_time(None, rows), self.extent(call, check.extent)
        if check.packed and when is CheckTime.NOW:
            check_products(lengths, widths)
        sizes = lengths * widths if check.packed else lengths
        if check.starts is not None:
            check_starts(self.array(call, check.starts), sizes, extent, when)
            return

        def verify(found: list[int]) -> None:
            if found[0] != extent:
                held = "rows by columns are" if check.packed else "rows are"
                raise StructureError(f"{held} {found[0]} elements together, but the dim has {extent}")

        run_check([sizes.sum()], verify, when, "validating products")

    def levels(self, call: BoundCall, logical: Sequence[IterDomain]) -> tuple[torch.Tensor, ...]:
        """The offsets of every level of rows, outermost first: what a structure is made of.

        Parts of equal number in every component are a level of their own.
        """
        found: list[torch.Tensor] = []
        for domain in logical:
            if not isinstance(domain, RaggedIterDomain):
                continue
            made, outer = domain.component.definition, []
            while isinstance(made, Merge) and self.has_equal_parts(domain, logical):
                count, parts = (self.extent(call, d.extent_expr) for d in made.inputs)
                outer.append(torch.arange(count + 1, device=call.device) * parts)
                made = made.inputs[0].definition
            found += reversed(outer)
            found.append(self.array(call, self.offsets_of(domain)))
        return tuple(x.to(found[-1].dtype) for x in found)

    @staticmethod
    def has_equal_parts(domain: RaggedIterDomain, logical: Sequence[IterDomain]) -> bool:
        """Whether the rows of a domain are parts, of equal number in every component."""
        component = domain.component
        return isinstance(component.definition, Merge) and all(d.uid != component.uid for d in logical)

    def structure(self, call: BoundCall, chain: tuple[Array, ...], total: Expr) -> Structure:
        """The structure that a chain of offsets describes, validated once for each tensor."""
        if call.computed is None:
            return self.structure_of(call, tuple([self.array(call, a) for a in chain]), self.extent(call, total))
        found: Structure | None = call.memo.get((chain, total))
        if found is None:
            found = self.structure_of(call, tuple([self.array(call, a) for a in chain]), self.extent(call, total))
            call.memo[chain, total] = found
        return found

    def structures(self, fusion: Fusion, call: BoundCall) -> list[tuple[str, Structure]]:
        """The structures that arguments describe, each with the name of its offsets."""
        given = [(chain, total) for chain, total in _partitions(fusion) if all(self.place_of(a) is not None for a in chain)]
        return [(chain[-1].name, self.structure(call, chain, total)) for chain, total in given]

    def structure_of(self, call: BoundCall, tensors: tuple[torch.Tensor, ...], size: int) -> Structure:
        """The structure of offsets, outermost first, over `size` positions."""
        validate = call.validate(tensors)
        return call.remember(tensors, known_key(size), lambda: Structure.from_offsets(*tensors, total=size, validate=validate))

    def known_longest(self, call: BoundCall, ragged: RaggedIterDomain) -> int | None:
        """The length of the longest row, if nothing needs to be copied to the host to say it."""
        place, total = self._offsets_place(ragged)
        if place in call.known.levels:
            return known_longest(*call.known.levels[place])
        if place < 0 and not is_host(call.device):
            return None
        if total is not None:
            return self.structure(call, (self.offsets_of(ragged),), total).known_max_length()
        return self.longest(call, ragged) if is_host(call.device) else None

    def known_variation(self, call: BoundCall, ragged: RaggedIterDomain) -> float | None:
        """The standard deviation of the lengths of rows over their mean, if nothing needs to be copied to the host to say it."""
        place, total = self._offsets_place(ragged)
        if place in call.known.levels:
            return known_variation(*call.known.levels[place])
        if total is None or not is_host(call.device):
            return None
        return known_variation(*self.structure(call, (self.offsets_of(ragged),), total).at(-1))

    def longest(self, call: BoundCall, ragged: RaggedIterDomain) -> int:
        """The length of the longest row."""
        why = f"the longest row of {ragged.name}"
        place, total = self._offsets_place(ragged)
        if place in call.known.levels:
            rows, level = call.known.levels[place]
            return rows.max_length(level, why)
        if total is not None:
            return self.structure(call, (self.offsets_of(ragged),), total).max_length(why=why)
        offsets = self.array(call, self.offsets_of(ragged))
        return call.remember((offsets,), "longest", lambda: int(host_copy(offsets, why).diff().max()) if len(offsets) > 1 else 0)

    def _offsets_place(self, ragged: RaggedIterDomain) -> tuple[int, Expr | None]:
        """The argument that holds the offsets of a domain, -1 if none does; and the extent that they must end at, if known."""
        found = self._places_of.get(ragged.uid)
        if found is None:
            array = self.offsets_of(ragged)
            place = self.place_of(array)
            total = next((t for chain, t in self.partitions if chain == (array,)), None)
            found = self._places_of[ragged.uid] = (-1 if place is None else place, total)
        return found


Form = tuple[torch.dtype, int, tuple[tuple[int, int], ...], tuple[int, ...]]
"""Of an argument: its dtype, its rank, dims of a fixed size, and dims whose size is a symbol."""


def _numbers_of_arguments(
    forms: Sequence[Form],
) -> tuple[Callable[..., tuple[tuple[int, ...], torch.device] | None], Callable[..., tuple[int, ...]]]:
    """A function of the arguments: the values of symbols, and the device; None if an argument does not have its form, or is not
    contiguous. And one that returns only the values. Generated, because every call with new rows or sizes asks."""
    conditions: list[str] = []
    numbers: list[str] = []
    for k, (_, rank, fixed, unknown) in enumerate(forms):
        conditions += [f"isinstance(a{k}, Tensor)", f"a{k}.dtype is dtypes[{k}]", f"len(s{k} := a{k}.shape) == {rank}"]
        conditions += [f"s{k}[{dim}] == {size}" for dim, size in fixed]
        conditions += [f"a{k}.is_contiguous()", *([f"a{k}.device == a0.device"] if k else [])]
        numbers += [f"s{k}[{dim}]" for dim in unknown]
    arguments = ", ".join(f"a{k}" for k in range(len(forms)))
    values = f"({''.join(f'{n}, ' for n in numbers)})"
    found = f"({values}, {'a0.device' if forms else 'cpu'})"
    names = {"Tensor": torch.Tensor, "dtypes": [dtype for dtype, *_ in forms], "cpu": torch.device("cpu")}
    checked: Callable[..., Any] = eval(f"lambda {arguments}: {found} if {' and '.join(conditions) or 'True'} else None", names)
    shapes = f"({''.join(f'a{k}.shape[{dim}], ' for k, (_, _, _, unknown) in enumerate(forms) for dim in unknown)})"
    return checked, eval(f"lambda {arguments}: {shapes}", {})


def _arrays(check: Check) -> tuple[Array, ...]:
    """The arrays that must be there before something can be checked."""
    if isinstance(check, Offsets):
        return (check.offsets,)
    if isinstance(check, RowsOfOffsets):
        own = (offsets_array(check.domain),) if isinstance(check.domain, RaggedIterDomain) else ()
        return (check.offsets, *own)
    if isinstance(check, RowsInside):
        return (check.starts, check.lengths)
    if isinstance(check, Products):
        return (check.rows, check.columns) if check.starts is None else (check.rows, check.columns, check.starts)
    if isinstance(check, PositionInside):
        return tuple(check.extent.arrays)
    if isinstance(check, AtLeastLongest):
        return (offsets_array(check.ragged),)
    return tuple(side for side in (check.left, check.right) if isinstance(side, Array))


def _compares_sizes(check: Equal) -> bool:
    """Whether a check compares sizes that no lengths determine."""
    return all(isinstance(side, Expr) and not side.arrays for side in (check.left, check.right))


class _named:
    """Errors that leave this begin with the operation that rows entered by."""

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, StructureError):
            raise StructureError(f"{self._operation}: {error}") from None


def _described(arg: object) -> str:
    if isinstance(arg, torch.Tensor):
        return f"{arg.dtype} with {arg.ndim}"
    return type(arg).__name__


def _domains(fusion: Fusion) -> list[IterDomain]:
    """Every domain that something in the fusion is computed, read or stored over."""
    domains = [d for t in fusion.every_tensor() for d in (*t.logical, *t.storage)]
    return domains + [d for definition in fusion.definitions for d in definition.domains]


def _describing(fusion: Fusion) -> set[Array]:
    """The arguments and computed tensors that rows are described by: offsets, lengths, starts and columns; indices only where
    the lengths of rows depend on them."""
    checked = {source for check in fusion.checks for array in _arrays(check) for source in array.sources}
    return {*arrays_of(_domains(fusion)), *(array for array in checked if not array.signed)}


def _partitions(fusion: Fusion) -> list[tuple[tuple[Array, ...], Expr]]:
    """Every array of offsets that a domain of the fusion is made with, with the extent it must end at.

    Also where only a view of the rows is used: their places follow from these offsets all the same.
    """
    found: dict[tuple[Array, ...], Expr] = {}
    for node in {node: None for domain in _domains(fusion) for node in traverse(domain)}:
        if isinstance(node, Partition) and node.covers and node.starts.data is None:
            found[(node.starts,)] = node.inputs[0].extent_expr
    return list(found.items())
