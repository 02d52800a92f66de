"""The layout of ragged rows without their data: which positions belong to which row, on one level or on nested levels.

In: offsets or lengths, one tensor per level. Out: an immutable `Structure` with its metadata and a place for derived arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from serrate.errors import DeviceError, ShapeError, StructureError
from serrate.tensor.chain import chain_from_lengths, chain_from_offsets
from serrate.tensor.sync import host_copy, on_host
from serrate.tensor.validate import check_extreme, check_form, check_lengths, check_offsets, check_values_form

_T = TypeVar("_T")
_Facts = dict[tuple[str, int], float]

PerLevel = int | Sequence[int | None] | None
"""A length known to the caller: of the innermost level, or one for each level (None where it is not known)."""


class Structure:
    """A chain of offsets, outermost first. A model of what it means:

        def rows(offsets, positions):                    # positions: the values, or anything as long
            first, *inner = offsets                      # level 0 counts the parts of level 1, the last level positions
            parts = rows(inner, positions) if inner else positions
            return [parts[a:b] for a, b in zip(first, first[1:])]

    Build one with `from_offsets` or `from_lengths`. The constructor itself trusts its caller: 1-D contiguous offsets of one
    dtype, the same on the CPU as `host` if the caller has them there, and lengths it knows. It checks nothing.
    The tensors handed in are kept, not copied: do not write into them afterwards.

    >>> Structure.from_offsets(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))
    Structure(2 > 3 > 9)
    """

    __slots__ = ("__weakref__", "_facts", "_host", "_memo", "_offsets")

    _offsets: tuple[Tensor, ...]
    _facts: _Facts
    _host: dict[int, Tensor]
    _memo: dict[Hashable, object]

    def __init__(
        self,
        offsets: tuple[Tensor, ...],
        *,
        host: tuple[Tensor, ...] = (),
        total_elements: int | None = None,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
    ) -> None:
        self._offsets = offsets
        self._facts = {}
        self._host = dict(enumerate(host))
        self._memo = {}
        if total_elements is not None:
            self._facts["total_elements", len(offsets) - 1] = total_elements
        if max_length is not None:
            self._supply("max_length", max_length)
        if min_length is not None:
            self._supply("min_length", min_length)

    @classmethod
    def from_offsets(
        cls,
        *offsets: Tensor,
        total: int | None = None,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: bool | None = None,
    ) -> Structure:
        """A structure from row offsets, outermost level first.

        2-D offsets `[M, K+1]` stand for two levels: M components of K parts each, every row starting at 0 and counting
        from the start of its component. They give the same structure as the chain that says the same.
        `total` is the number of positions the values have. `validate=None` checks the numbers where they can be read
        without a copy (on a CPU) and elsewhere only shapes and dtypes; `True` copies them to the host; `False` checks nothing.

        >>> ranks = Structure.from_offsets(torch.tensor([[0, 50, 127], [0, 0, 0], [0, 100, 198]]), total=325)
        >>> ranks == Structure.from_offsets(torch.tensor([0, 2, 4, 6]), torch.tensor([0, 50, 127, 127, 127, 227, 325]))
        True
        """
        host: tuple[Tensor, ...] | None = None
        if validate is not False:
            check_form("offsets", offsets)
            if validate or on_host(offsets[0]):
                host = tuple(host_copy(level, "validating offsets") for level in offsets)
                check_offsets(host, total)
                total = int(host[-1][..., -1].sum())
        structure = cls(chain_from_offsets(offsets, total), total_elements=total, max_length=max_length, min_length=min_length)
        structure._note_uniform(offsets, one_more=1)
        if host is not None:
            structure._host.update(enumerate(structure.offsets if offsets[0].is_cpu else chain_from_offsets(host, total)))
            structure._check_supplied(max_length, min_length)
        return structure

    @classmethod
    def from_lengths(
        cls,
        *lengths: Tensor,
        total: int | None = None,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: bool | None = None,
    ) -> Structure:
        """A structure from the lengths of each level, outermost first; 2-D lengths `[M, K]` stand for two levels.

        Offsets of int32 lengths are int32 where the total is known to fit, int64 otherwise. The other arguments are those
        of `from_offsets`.

        >>> Structure.from_lengths(torch.tensor([3, 0, 4])).offsets
        (tensor([0, 3, 3, 7]),)
        """
        host: tuple[Tensor, ...] | None = None
        if validate is not False:
            check_form("lengths", lengths)
            if validate or on_host(lengths[0]):
                host = tuple(host_copy(level, "validating lengths") for level in lengths)
                check_lengths(host, total)
                total = int(host[-1].sum())
        offsets = chain_from_lengths(lengths, total)
        structure = cls(offsets, total_elements=total, max_length=max_length, min_length=min_length)
        structure._note_uniform(lengths, one_more=0)
        if host is not None:
            structure._host.update(enumerate(structure.offsets if lengths[0].is_cpu else chain_from_lengths(host, total)))
            structure._check_supplied(max_length, min_length)
        return structure

    @property
    def offsets(self) -> tuple[Tensor, ...]:
        """The offsets of every level, outermost first."""
        return self._offsets

    @property
    def levels(self) -> int:
        """How many ragged dims there are."""
        return len(self._offsets)

    @property
    def device(self) -> torch.device:
        """Where the offsets are."""
        return self._offsets[0].device

    def lengths(self, level: int = -1) -> Tensor:
        """The length of every row of a level, on the structure's device.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).lengths()
        tensor([3, 0, 4])
        """
        level = self._level(level)
        return self.derived(("lengths", level), self._offsets[level].diff)

    def host_offsets(self, level: int = -1, *, why: str = "host_offsets") -> Tensor:
        """The offsets of a level on the CPU: copied once, then remembered. `why` names the operation in a SyncError.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).host_offsets().tolist()
        [0, 3, 3, 7]
        """
        level = self._level(level)
        if level not in self._host:
            self._host[level] = host_copy(self._offsets[level], why)
        return self._host[level]

    def num_rows(self, level: int = -1) -> int:
        """How many rows a level has; never needs a host copy.

        >>> words = Structure.from_offsets(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))
        >>> words.num_rows(), words.num_rows(level=0)
        (3, 2)
        """
        return self._offsets[self._level(level)].shape[0] - 1

    def total_elements(self, level: int = -1, *, why: str = "total_elements") -> int:
        """How many positions (or parts, on an outer level) the rows of a level hold together.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).total_elements()
        7
        """
        level = self._level(level)
        if level < self.levels - 1:
            return self.num_rows(level + 1)
        return int(self._fact("total_elements", level, lambda: int(self.host_offsets(level, why=why)[-1])))

    def max_length(self, level: int = -1, *, why: str = "max_length") -> int:
        """The longest row of a level; 0 for an empty batch.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).max_length()
        4
        """
        level = self._level(level)
        return int(self._fact("max_length", level, lambda: _extreme(self._host_lengths(level, why), torch.max)))

    def known_max_length(self, level: int = -1) -> int | None:
        """The longest row of a level if it costs nothing to say: given by the caller, looked up before, or on a CPU.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).known_max_length()
        4
        """
        known = self._facts.get(("max_length", self._level(level)))
        if known is None and on_host(self._offsets[self._level(level)]):
            return self.max_length(level)
        return None if known is None else int(known)

    def min_length(self, level: int = -1, *, why: str = "min_length") -> int:
        """The shortest row of a level; 0 for an empty batch.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).min_length()
        0
        """
        level = self._level(level)
        return int(self._fact("min_length", level, lambda: _extreme(self._host_lengths(level, why), torch.min)))

    def sparsity(self, level: int = -1, *, why: str = "sparsity") -> float:
        """Mean length over longest length: 1 where padding would waste nothing, which includes a batch without elements.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 8])).sparsity()  # doctest: +ELLIPSIS
        0.533...
        """
        room = self.num_rows(level) * self.max_length(level, why=why)
        return self.total_elements(level, why=why) / room if room else 1.0

    def variance(self, level: int = -1, *, why: str = "variance") -> float:
        """The population variance of the lengths of a level; 0 for an empty batch.

        >>> Structure.from_offsets(torch.tensor([0, 3, 4])).variance()
        1.0
        """
        level = self._level(level)
        if self.num_rows(level) == 0:
            return 0.0
        return self._fact("variance", level, lambda: float(self._host_lengths(level, why).double().var(correction=0)))

    def knows_total(self) -> bool:
        """Whether `total_elements()` would answer without a host copy.

        >>> Structure.from_offsets(torch.tensor([0, 3]), validate=False).knows_total()
        False
        """
        return ("total_elements", self.levels - 1) in self._facts

    def derived(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` returned the first time this key was asked for: the memo of arrays computed from this structure.

        >>> structure = Structure.from_offsets(torch.tensor([0, 3, 3, 7]))
        >>> structure.derived("halves", lambda: structure.lengths() // 2) is structure.derived("halves", torch.Tensor)
        True
        """
        if key not in self._memo:
            self._memo[key] = make()
        return cast(_T, self._memo[key])

    def to(self, device: torch.device | str) -> Structure:
        """The same structure on another device, with what is known of it; itself if it is there already.

        >>> Structure.from_offsets(torch.tensor([0, 3])).to("meta").max_length()
        3
        """
        offsets = tuple(level.to(device) for level in self._offsets)
        if offsets[0] is self._offsets[0]:
            return self
        moved = _restore(offsets, self._facts)
        moved._host.update(enumerate(self._offsets) if on_host(self._offsets[0]) else self._host)
        return moved

    def check_values(self, values: Tensor) -> None:
        """Raises unless these values can be this structure's: same device, as many positions as the rows hold together.

        A total that only a host copy could tell is taken from the values and remembered.

        >>> Structure.from_lengths(torch.tensor([3, 1])).check_values(torch.zeros(5, 8))
        Traceback (most recent call last):
        serrate.errors.ShapeError: the rows hold 4 positions together, but values of shape (5, 8) have 5
        """
        check_values_form(values)
        if values.device != self.device:
            raise DeviceError(f"values are on {values.device}, but offsets and lengths are on {self.device}: move one of them")
        count = values.shape[0]
        if not self.knows_total() and not on_host(self._offsets[-1]):
            self._facts["total_elements", self.levels - 1] = count
        if count != (total := self.total_elements()):
            raise ShapeError(f"the rows hold {total} positions together, but values of shape {tuple(values.shape)} have {count}")

    def narrow(self, start: int, stop: int, *, level: int = 0, why: str = "narrow") -> tuple[Structure, int, int]:
        """The rows `start` to `stop` of a level as a structure that begins at that level, and where their positions lie.

        >>> words = Structure.from_offsets(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))
        >>> words.narrow(1, 2)
        (Structure(1 > 1 > 5), 4, 9)
        >>> words.narrow(0, 2, level=1)
        (Structure(2 > 4), 0, 4)
        """
        cut: list[Tensor] = []
        host: list[Tensor] = []
        for depth in range(self._level(level), self.levels):
            known, here = self.host_offsets(depth, why=why)[start : stop + 1], self._offsets[depth]
            host.append(known - known[0])
            cut.append(host[-1] if here.is_cpu else here[start : stop + 1] - here[start])
            start, stop = int(known[0]), int(known[-1])
        return Structure(tuple(cut), host=tuple(host), total_elements=stop - start), start, stop

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure):
            return NotImplemented
        if self.levels != other.levels or self.device != other.device:
            return False
        pairs = list(zip(self._offsets, other._offsets, strict=True))
        if any(mine.shape != theirs.shape for mine, theirs in pairs):
            return False
        why = "comparing two structures"
        return all(
            mine is theirs or _same_numbers(self.host_offsets(level, why=why), other.host_offsets(level, why=why))
            for level, (mine, theirs) in enumerate(pairs)
        )

    def __hash__(self) -> int:
        return hash(tuple(level.shape[0] for level in self._offsets))

    def __repr__(self) -> str:
        total = str(self.total_elements()) if self.knows_total() else "?"
        return f"Structure({' > '.join([*(str(self.num_rows(level)) for level in range(self.levels)), total])})"

    def __reduce__(self) -> tuple[object, ...]:
        # Derived arrays stay behind: they may hold what cannot be pickled, and can be made again.
        return _restore, (self._offsets, self._facts)

    def _level(self, level: int) -> int:
        levels = len(self._offsets)
        if not -levels <= level < levels:
            raise ShapeError(f"level {level} does not exist: the structure has {levels}, counted from the outermost as level 0")
        return level % levels

    def _fact(self, name: str, level: int, measure: Callable[[], float]) -> float:
        fact = self._facts.get((name, level))
        if fact is None:
            fact = self._facts[name, level] = measure()
        return fact

    def _host_lengths(self, level: int, why: str) -> Tensor:
        return self.host_offsets(level, why=why).diff()

    def _supply(self, name: str, given: PerLevel) -> None:
        if isinstance(given, int):
            self._facts[name, len(self._offsets) - 1] = given
            return
        for level, length in enumerate(_per_level(name, given, self.levels)):
            if length is not None:
                self._facts[name, level] = length

    def _note_uniform(self, tensors: Sequence[Tensor], one_more: int) -> None:
        # The outer level of a 2-D tensor has rows of one length, known from the shape; so it never needs a host copy.
        if len(tensors) == self.levels:
            return
        level = 0
        for tensor in tensors:
            if tensor.dim() == 2 and tensor.shape[0] > 0:
                self._facts["max_length", level] = self._facts["min_length", level] = tensor.shape[1] - one_more
            level += tensor.dim()

    def _check_supplied(self, max_length: PerLevel, min_length: PerLevel) -> None:
        for name, given, longest, pick in (
            ("max_length", max_length, "longest", torch.max),
            ("min_length", min_length, "shortest", torch.min),
        ):
            for level, length in enumerate(_per_level(name, given, self.levels)):
                if length is not None:
                    check_extreme(name, length, longest, _extreme(self._host[level].diff(), pick))


def _restore(offsets: tuple[Tensor, ...], facts: _Facts) -> Structure:
    structure = Structure(offsets)
    structure._facts.update(facts)
    return structure


def _per_level(name: str, given: PerLevel, levels: int) -> Sequence[int | None]:
    if given is None or isinstance(given, int):
        return (*(None,) * (levels - 1), given)
    if len(given) != levels:
        raise StructureError(f"{name} was given for {len(given)} levels, but the structure has {levels}")
    return given


def _extreme(lengths: Tensor, pick: Callable[[Tensor], Tensor]) -> int:
    return int(pick(lengths)) if lengths.numel() else 0


def _same_numbers(mine: Tensor, theirs: Tensor) -> bool:
    if mine.dtype != theirs.dtype:
        return torch.equal(mine.long(), theirs.long())
    return torch.equal(mine, theirs)
