"""Tracing: a Python function over JaggedTensors and Tensors becomes a fusion.

In: a function and its arguments. Out: a fusion, and the tensors that its inputs are. Traces are specialised on dtypes, ranks and
which arguments share a structure, and on sizes as requested; never on lengths or on the number of rows.
"""

from __future__ import annotations

import enum
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from serrate import modes
from serrate.errors import DtypeError, SerrateError, TraceError
from serrate.frontend import torch_names
from serrate.frontend.capture import captured, capturing
from serrate.frontend.classes import answering
from serrate.frontend.leaves import Leaf, Leaves, leaves_of, mapped, refuse_nested
from serrate.frontend.ragged_inputs import ragged_view
from serrate.frontend.random_numbers import random_numbers_refused
from serrate.ir.expr import Symbol
from serrate.ir.fusion import Fusion
from serrate.ir.values import DTYPES
from serrate.ir.view import Size, SymbolicRaggedSize, TensorView, is_user_file, standing_for, user_line
from serrate.tensor import JaggedTensor
from serrate.tensor.foreign_names import IDIOMS, idiom_of, instead_of
from serrate.tensor.torch_private import version

_ = torch_names  # imported for its side effects
TensorView.instead["is_nested"] = instead_of("is_nested")
TensorView.advice.update(
    (name, idiom_of(name) if idiom.traced else f"call it outside of the function; there, {idiom_of(name)}")
    for name, idiom in IDIOMS.items()
)

Key = tuple[Any, ...]
Pattern = tuple[int | None, ...]


@dataclass(frozen=True)
class TracedFunction:
    """A traced function: its fusion, and the form of its result."""

    fusion: Fusion
    rebuild: Callable[[Sequence[Any]], Any]
    constants: tuple[torch.Tensor, ...] = ()
    """Tensors created while tracing, constant over calls: the last inputs of the fusion, except for seeds."""
    copied: tuple[int, ...] = ()
    """The results that are such a tensor: each call returns its own copy."""
    sizes: Pattern = ()
    """The sizes of the other inputs, flattened; None where they may vary from call to call."""
    fixed: frozenset[int] = frozenset()
    """The sizes among these whose value the function used: the trace is specialised to them."""


# --- arguments -----------------------------------------------------------------------------------------------------------


BY_VALUE = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    range,
    enum.Enum,
)
"""Types of arguments that are compared by value."""


def described(value: Any) -> Key:
    """A key for a non-tensor value, so that two are equal iff they are the same argument: 1, 1.0 and True differ, and so do 0.0
    and -0.0, but NaN equals NaN."""
    kind = type(value)
    return (kind, repr(value) if kind is complex or (kind is float and (value == 0 or value != value)) else value)


def _same(a: JaggedTensor, b: JaggedTensor) -> bool:
    # On a device, offsets are not compared: structures with the same shape may differ, and a late answer would change the
    # signature. If such structures are used together, the program checks that they agree.
    if a.structure is b.structure:
        return True
    # Rows without gaps may also be given by starts: an equal structure described by different tensors.
    packed = [[rows.starts is None for rows in each.structure.rows] for each in (a, b)]
    return packed[0] == packed[1] and a.structure.known_equal(b.structure)


T = TypeVar("T")


class ByStructure(Generic[T]):
    """A map from the structures among some leaves to values. Only structures whose shapes agree are compared."""

    def __init__(self) -> None:
        self._by_id: dict[int, T] = {}
        self._new: list[tuple[JaggedTensor, T]] = []
        """Structures whose shapes were not needed yet: most calls have only one structure."""
        self._found: dict[Key, list[tuple[JaggedTensor, T]]] = {}

    def find(self, leaf: JaggedTensor) -> T | None:
        """The value for the structure of a leaf."""
        if not self._by_id:
            return None
        own = self._by_id.get(id(leaf.structure))
        if own is not None:
            return own
        for other, each in self._new:
            self._found.setdefault(self._shapes(other), []).append((other, each))
        self._new.clear()
        return next((own for other, own in self._found.get(self._shapes(leaf), ()) if _same(other, leaf)), None)

    def add(self, leaf: JaggedTensor, own: T) -> None:
        """Adds a value for the structure of a leaf."""
        self._by_id[id(leaf.structure)] = own
        self._new.append((leaf, own))

    @staticmethod
    def _shapes(leaf: JaggedTensor) -> Key:
        structure, sizes = leaf.structure, leaf.values.shape
        return tuple(
            (dim, sizes[dim] if rows.contiguous else None, *(level.shape[0] for level in rows.offsets))
            for dim, rows in zip(structure.dims, structure.rows, strict=True)
        )


class StructureNumbers(ByStructure[int]):
    """Numbers the structures of leaves in the order in which they come; the same structure has one number.

    >>> numbers, jt = StructureNumbers(), JaggedTensor.from_lengths(torch.zeros(3), [1, 2])
    >>> [numbers(jt), numbers(jt[:1]), numbers(jt.with_values(torch.ones(3)))]
    [0, 1, 0]
    """

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __call__(self, leaf: JaggedTensor) -> int:
        number = self.find(leaf)
        if number is None:
            number = self._count
            self._count += 1
            self.add(leaf, number)
        return number


class FusionInputs:
    """The inputs of a traced fusion, in order: values, the tensors that describe each structure. A function of a call's form."""

    def __init__(self, leaves: Leaves) -> None:
        self.leaves: list[int | None] = []
        """For each input, the leaf whose values it is; None if it describes a structure."""
        self.ragged_dims: list[Collection[int]] = []
        """For each input, the dims that hold or count rows; no trace is specialised on their sizes."""
        self.ragged = [k for k, leaf in enumerate(leaves) if isinstance(leaf, JaggedTensor)]
        """Which leaves are ragged."""
        self.described: list[tuple[int, int]] = []
        """The first leaf of each structure, and the first input that describes the structure."""
        seen = ByStructure[bool]()
        for k, leaf in enumerate(leaves):
            self.leaves.append(k)
            self.ragged_dims.append(leaf.structure.dims if isinstance(leaf, JaggedTensor) else ())
            if isinstance(leaf, JaggedTensor) and not seen.find(leaf):
                seen.add(leaf, True)
                self.described.append((k, len(self.leaves)))
                for _ in leaf.structure.buffers():
                    self.leaves.append(None)
                    self.ragged_dims.append((0,))
        first = {k for k, _ in self.described}
        self._first = [k in first for k in range(len(leaves))]
        self._placed = [(k, self.ragged.index(k) if k in first else None) for k in range(len(leaves))]

    def tensors(self, leaves: Leaves) -> list[torch.Tensor]:
        """The inputs of a call with these leaves."""
        found: list[torch.Tensor] = []
        for leaf, first in zip(leaves, self._first, strict=True):
            if isinstance(leaf, JaggedTensor):
                found.append(leaf._values)
                if first:
                    _describe(leaf, found)
            else:
                found.append(leaf)
        return found

    def placed(self, values: Sequence[Any], ragged: Sequence[JaggedTensor]) -> list[torch.Tensor]:
        """As `tensors`, given the leaves with the values of the ragged ones in their place; and these."""
        found: list[torch.Tensor] = []
        for k, place in self._placed:
            found.append(values[k])
            if place is not None:
                _describe(ragged[place], found)
        return found


def _describe(leaf: JaggedTensor, found: list[torch.Tensor]) -> None:
    """Appends the tensors that describe the rows of a leaf."""
    for rows in leaf._structure._rows:
        found += rows.offsets if rows.starts is None else rows.buffers()


# --- tracing -------------------------------------------------------------------------------------------------------------


def _input(fusion: Fusion, tensor: torch.Tensor, known_sizes: Iterator[int | None], ragged: Collection[int] = ()) -> TensorView:
    """Declares an input for a tensor with the next sizes, and records their values in this call."""
    if tensor.dtype not in DTYPES:
        raise DtypeError(
            f"{tensor.dtype} is not supported in compiled programs: convert it first, to one of {', '.join(map(str, DTYPES))}"
        )
    shape = [next(known_sizes, None if dim in ragged else size) for dim, size in enumerate(tensor.shape)]
    view = fusion.input(shape, tensor.dtype)
    for domain, size in zip(view.domains, tensor.shape, strict=True):
        if isinstance(domain.extent_expr, Symbol):
            fusion.sizes[domain.extent_expr] = size
    return view


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outside: Leaves = (),
    found: Callable[[Leaf], bool] | None = None,
    sizes: Pattern = (),
    generators: Sequence[Any] = (),
    asks: Iterable[tuple[dict[str, Any], str]] = (),
) -> TracedFunction:
    """Calls `function` on traced arguments and records what it does.

    `outside` are captured tensors that are inputs too. `found` is called for others that the function uses; they become further
    inputs, unless it reports that they cannot be found again in another call. `sizes` are those of the inputs, flattened, None
    for a symbol; sizes not listed are compiled in. `generators` are random number generators that the function reaches; using
    them is an error. `asks` are globals in which functions that it calls find `type` or `isinstance`.
    """
    fusion = Fusion(name=_identifier(function))
    fusion.device = next((leaf.device for leaf in (*leaves_of(args, kwargs), *outside)), None)
    known_sizes = iter(sizes)
    seen = ByStructure[list[TensorView]]()
    # An argument may also be a captured tensor, and a different one in the next call; so only captured ones go by identity.
    known: list[tuple[Leaf, TensorView]] = []
    made: dict[tuple[int, int], TensorView] = {}
    constants: list[tuple[torch.Tensor, TensorView]] = []

    def view(leaf: Leaf) -> TensorView:
        refuse_nested([leaf])
        if isinstance(leaf, JaggedTensor):
            return _ragged(fusion, leaf, seen, known_sizes)
        return _input(fusion, leaf, known_sizes)

    def capture(leaf: Leaf, made_here: bool) -> TensorView:
        before = next((v for other, v in known if other is leaf), None)
        if before is not None:
            return before
        if made_here and isinstance(leaf, torch.Tensor):
            # Copied now: the function may write to it later.
            place = (id(leaf), version(leaf))
            if place not in made:
                made[place] = fusion.input(tuple(leaf.shape), leaf.dtype)
                constants.append((leaf.detach().clone(), made[place]))
            return made[place]
        if found is None or not found(leaf):
            raise TraceError(
                f"a {type(leaf).__name__} used with a traced tensor ({user_line()}) is neither an argument nor reachable from "
                "the function's closure, globals or attributes; pass it as an argument"
            )
        known.append((leaf, view(leaf)))
        return known[-1][1]

    # One trace serves calls with and without gradients, so only modes that the function itself enters count.
    with fusion, modes.tracing(), _pointing(), torch.enable_grad():
        # The order of `leaves_of` is the order of the fusion's inputs.
        given, named = mapped(tuple(args), view), mapped(dict(kwargs), view)
        known += [(leaf, view(leaf)) for leaf in outside]
        leaves: list[TensorView] = []
        with random_numbers_refused(generators), capturing(capture), _standing_in(), answering(asks):
            result = function(*given, **named)
            form = _flatten(result, leaves, fusion)
        if not leaves:
            raise TraceError(f"a traced function must return tensors computed from its arguments, got {type(result).__name__}")
        fusion.output(*leaves)
    own = [v for _, v in constants]
    last = [*own, *fusion.seeds]
    first = [v for v in fusion.inputs if not any(v is other for other in last)]
    fusion.inputs[:] = [*first, *last]
    memories = {v.tensor.memory.name for v in own}
    copied = tuple(k for k, leaf in enumerate(leaves) if leaf.tensor.memory.name in memories)
    extents = [d.extent_expr for v in first for d in v.domains]
    return TracedFunction(
        fusion,
        itemgetter(form) if type(form) is int else lambda values: _unflatten(form, iter(values)),
        tuple(constant for constant, _ in constants),
        copied,
        tuple(extent.value for extent in extents),
        frozenset(k for k, extent in enumerate(extents) if extent in fusion.fixed_symbols),
    )


@contextmanager
def _pointing() -> Iterator[None]:
    """Adds the user's line to errors that pass through."""
    try:
        yield
    except SerrateError as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
        if frames and f":{frames[-1].lineno}:" not in str(error):
            error.add_note(f"traced at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}")
        raise


@contextmanager
def _standing_in() -> Iterator[None]:
    """Within this context, `isinstance` takes ragged traced tensors for JaggedTensors."""
    token = standing_for.set(JaggedTensor)
    try:
        yield
    finally:
        standing_for.reset(token)


def _identifier(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "program")
    return name if name.isidentifier() else "program"


def _ragged(
    fusion: Fusion, arg: JaggedTensor, seen: ByStructure[list[TensorView]], known_sizes: Iterator[int | None]
) -> TensorView:
    view = _input(fusion, arg.values, known_sizes, arg.structure.dims)
    buffers = seen.find(arg)
    if buffers is None:
        buffers = [_input(fusion, buffer, known_sizes, (0,)) for buffer in arg.structure.buffers()]
        seen.add(arg, buffers)
    return ragged_view(view, arg.structure, buffers)


class Plain(NamedTuple):
    """A value in a result that is not a tensor: the same in all calls of the trace, which depends on all it was made from."""

    value: Any


def _flatten(result: Any, leaves: list[TensorView], fusion: Fusion) -> Any:
    """The form of a result: an int for each tensor, containers and plain values unchanged."""
    result = captured(result) if isinstance(result, torch.Tensor | JaggedTensor) else result
    if isinstance(result, TensorView):
        if result.fusion is not fusion:
            raise TraceError("a traced function returned a tensor of another trace; return tensors computed in this call")
        leaves.append(result)
        return len(leaves) - 1
    if isinstance(result, tuple | list):
        items = [_flatten(r, leaves, fusion) for r in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    if isinstance(result, dict):
        return {k: _flatten(v, leaves, fusion) for k, v in result.items()}
    if isinstance(result, Size):
        return Plain(int(result))
    if isinstance(result, BY_VALUE) and not isinstance(result, SymbolicRaggedSize):
        return Plain(result)
    raise TraceError(
        "a traced function must return tensors computed from its arguments (or tuples, lists, dicts of them and plain values), "
        f"got {type(result).__name__}"
    )


def _unflatten(form: Any, values: Any) -> Any:
    if isinstance(form, int):
        return next(values)
    if isinstance(form, Plain):
        return form.value
    if isinstance(form, dict):
        return {k: _unflatten(v, values) for k, v in form.items()}
    items = [_unflatten(f, values) for f in form]
    return type(form)(*items) if hasattr(form, "_fields") else type(form)(items)
