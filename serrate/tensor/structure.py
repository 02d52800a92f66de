"""The layout of a ragged tensor without its data: which dims of the values are partitioned into rows, and how.

In: offsets, lengths, or starts and lengths; of one dim or of several. Out: an immutable `Structure` with its metadata.

    nested        Structure.from_offsets(documents, sentences)            one dim, rows of rows
    independent   Structure.independent(rows, columns)                    two dims, each with rows of its own
    product       Structure.from_offsets(queries).with_columns(keys)      two ragged dims of the same components
    with gaps     Structure.from_starts(starts, lengths)                  rows that do not follow one another
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from serrate.errors import DeviceError, ShapeError, StructureError
from serrate.tensor.chain import chain_from_lengths, chain_from_offsets
from serrate.tensor.rows import Rows, per_level
from serrate.tensor.sync import host_copy, on_host
from serrate.tensor.validate import (
    check_counts,
    check_extreme,
    check_form,
    check_lengths,
    check_offsets,
    check_starts,
    check_values_form,
)

PerLevel = int | Sequence[int | None] | None
"""A length known to the caller: of the innermost level, or one for each level (None where it is not known)."""


@dataclass(frozen=True, slots=True)
class Dim:
    """What one dim of a ragged tensor is."""

    values_dim: int
    """The dim of the values it is found in."""
    axis: int | None = None
    """Which partition it belongs to; None for a dim that is as it is in the values."""
    level: int | None = None
    """The level of that partition whose lengths it has; None for the dim that counts the outermost rows."""
    ragged: int | None = None
    """How many ragged dims come before it, if it is ragged."""


class Structure:
    """Which dims of the values are partitioned into rows, and how: one `Rows` for each such dim.

    Structures are equal if they describe the same rows in the same places, whatever tensors say so; the hash uses shapes
    only. The tensors handed in are kept, not copied: do not write into them afterwards. The constructor trusts its caller;
    `from_offsets`, `from_lengths` and `from_starts` check.

    >>> Structure.from_offsets(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))
    Structure(2 > 3 > 9)
    """

    __slots__ = ("__weakref__", "_dims", "_rows")

    _rows: tuple[Rows, ...]
    _dims: tuple[int, ...]

    def __init__(self, rows: tuple[Rows, ...], dims: tuple[int, ...] = (0,)) -> None:
        self._rows = rows
        self._dims = dims

    # --- making one ---

    @classmethod
    def from_offsets(
        cls,
        *offsets: Tensor,
        dim: int = 0,
        total: int | None = None,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: bool | None = None,
    ) -> Structure:
        """A structure from row offsets, outermost level first, of dim `dim` of the values.

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
                total = check_offsets(host, total)
        chain = chain_from_offsets(offsets, total)
        rows = Rows(chain, host=() if host is None else chain if offsets[0].is_cpu else chain_from_offsets(host, total))
        return cls._checked(rows, offsets, 1, dim, total, max_length, min_length, checked=host is not None)

    @classmethod
    def from_lengths(
        cls,
        *lengths: Tensor,
        dim: int = 0,
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
                total = check_lengths(host, total)
        chain = chain_from_lengths(lengths, total)
        rows = Rows(chain, host=() if host is None else chain if lengths[0].is_cpu else chain_from_lengths(host, total))
        return cls._checked(rows, lengths, 0, dim, total, max_length, min_length, checked=host is not None)

    @classmethod
    def from_starts(
        cls,
        starts: Tensor,
        *lengths: Tensor,
        dim: int = 0,
        extent: int | None = None,
        room: int | None = None,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: bool | None = None,
    ) -> Structure:
        """Rows that may leave gaps between them: where each innermost row starts, and the lengths of every level.

        Rows lie in order and do not overlap. `extent` is the number of positions of the values; `room` says that the storage
        is padded, row k starting at `k * room`.

        >>> Structure.from_starts(torch.tensor([0, 8]), torch.tensor([3, 5]))
        Structure(2 > 8, with gaps)
        """
        packed = cls.from_lengths(
            *lengths, dim=dim, max_length=max_length, min_length=min_length, validate=False if validate is False else None
        )
        rows = packed._rows[0]
        if validate is not False:
            check_form("starts", (starts,))
            if validate or (on_host(starts) and rows.readable()):
                why = "validating starts"
                check_starts(host_copy(starts, why), rows.host_sizes(why), extent)
        gaps = Rows(rows.offsets, starts=starts.contiguous(), room=room, host=tuple(rows._host.values()))
        gaps._facts.update(rows._facts)
        return cls((gaps,), packed._dims)

    @classmethod
    def independent(cls, *structures: Structure) -> Structure:
        """Structures of different dims of the same values, together.

        >>> rows = Structure.from_offsets(torch.tensor([0, 3, 8, 10]))
        >>> Structure.independent(rows, Structure.from_offsets(torch.tensor([0, 1, 4]), dim=1))
        Structure(3 > 10, 2 > 4 of dim 1)
        """
        if not structures:
            raise StructureError("independent: give the structures of at least two dims, got none")
        found = sorted(
            ((dim, k, rows) for k, s in enumerate(structures) for dim, rows in zip(s._dims, s._rows, strict=True)),
            key=lambda each: each[:2],
        )
        for (dim, k, rows), (after, j, _) in pairwise(found):
            if after < dim + rows.takes:
                raise StructureError(
                    f"independent: structures {k} and {j} both partition dim {after}: give one of them another dim="
                )
        if len({s.device for s in structures}) > 1:
            raise DeviceError(f"independent: the structures are on {', '.join(str(s.device) for s in structures)}: move them")
        return cls(tuple(rows for _, _, rows in found), tuple(dim for dim, _, _ in found))

    def with_columns(
        self, counts: Tensor, *, packed: bool = True, max_length: int | None = None, validate: bool | None = None
    ) -> Structure:
        """The same rows, each a rectangle: `counts[k]` columns for every position of innermost row k.

        `packed` rows take `lengths[k] * counts[k]` positions; otherwise the columns are the first `counts[k]` positions of
        the next dim of the values.

        >>> scores = Structure.from_lengths(torch.tensor([3, 0, 2])).with_columns(torch.tensor([2, 5, 4]))
        >>> scores, scores.total_elements()
        (Structure(3 > 5 x columns), 14)
        """
        if len(self._rows) > 1 or self._rows[0].columns is not None:
            raise StructureError(f"with_columns: {self} has other ragged dims already; begin with the rows of one dim")
        rows = self._rows[0]
        host: Tensor | None = None
        if validate is not False:
            check_form("counts", (counts,))
            if counts.device != rows.device:
                raise DeviceError(f"counts are on {counts.device}, but the rows are on {rows.device}: move one of them")
            number = rows.num_rows(rows.depth - 1)
            if counts.shape != (number,):
                raise StructureError(f"counts must have one element for each of {number} rows, got shape {tuple(counts.shape)}")
            if validate or on_host(counts):
                host = host_copy(counts, "validating counts")
                check_counts(host)
        columns = chain_from_lengths([counts], None)[0].to(rows.offsets[0].dtype if host is not None else torch.int64)
        offsets = rows.offsets if columns.dtype == rows.offsets[0].dtype else tuple(o.long() for o in rows.offsets)
        wide = Rows(offsets, columns=columns, packed=packed, starts=rows.starts, room=rows.room)
        wide._facts.update(rows._facts)
        if max_length is not None:
            wide.note("max", wide.depth, max_length)
        return Structure((wide,), self._dims)

    @classmethod
    def _checked(
        cls,
        rows: Rows,
        given: Sequence[Tensor],
        one_more: int,
        dim: int,
        total: int | None,
        max_length: PerLevel,
        min_length: PerLevel,
        *,
        checked: bool,
    ) -> Structure:
        if dim < 0:
            raise ShapeError(f"dim={dim}: the dim of the values is counted from the first, 0")
        if total is not None:
            rows.note("total", rows.depth - 1, total)
        _note_uniform(rows, given, one_more)
        for name, longest, known, pick in (
            ("max_length", "longest", max_length, torch.max),
            ("min_length", "shortest", min_length, torch.min),
        ):
            if known is None:
                continue
            for level, length in enumerate(per_level(name, known, rows.levels)):
                if length is None:
                    continue
                if checked:
                    lengths = rows.host_lengths(level, "validating lengths")
                    check_extreme(name, length, longest, int(pick(lengths)) if lengths.numel() else 0)
                rows.note(name[:3], level, length)
        return cls((rows,), (dim,))

    # --- what it says ---

    @property
    def rows(self) -> tuple[Rows, ...]:
        """How each partitioned dim of the values comes apart, in the order of dims."""
        return self._rows

    @property
    def dims(self) -> tuple[int, ...]:
        """Which dims of the values are partitioned."""
        return self._dims

    @property
    def offsets(self) -> tuple[Tensor, ...]:
        """The offsets of every ragged dim, in the order of dims: those of nested rows outermost first."""
        if len(self._rows) == 1:
            return self._rows[0].offsets
        return tuple(level for rows in self._rows for level in rows.offsets)

    @property
    def starts(self) -> tuple[Tensor | None, ...]:
        """Where rows start, for each partitioned dim; None where they lie back to back."""
        return tuple(rows.starts for rows in self._rows)

    @property
    def levels(self) -> int:
        """How many ragged dims there are."""
        return sum(rows.levels for rows in self._rows)

    @property
    def device(self) -> torch.device:
        """Where the offsets are."""
        return self._rows[0].device

    @property
    def form(self) -> tuple[object, ...]:
        """What a program may be specialised on: everything but numbers of rows and lengths."""
        return tuple((dim, *rows.form) for dim, rows in zip(self._dims, self._rows, strict=True))

    @property
    def format(self) -> str:
        """How rows are stored: `csr` back to back, `padded` each with the same room, `gaps` otherwise."""
        if all(rows.contiguous for rows in self._rows):
            return "csr"
        return "padded" if all(rows.room is not None for rows in self._rows) else "gaps"

    def dims_of(self, ndim: int) -> tuple[Dim, ...]:
        """What every dim of a ragged tensor is whose values have `ndim` dims.

        >>> [d.ragged for d in Structure.from_lengths(torch.tensor([1, 2])).dims_of(2)]
        [None, 0, None]
        """
        found: list[Dim] = []
        at = ragged = 0
        for axis, (dim, rows) in enumerate(zip(self._dims, self._rows, strict=True)):
            found += [Dim(k) for k in range(at, dim)]
            found.append(Dim(dim, axis))
            for level in range(rows.levels):
                found.append(Dim(dim + (level >= rows.depth and not rows.packed), axis, level, ragged))
                ragged += 1
            at = dim + rows.takes
        return (*found, *(Dim(k) for k in range(at, ndim)))

    def lengths(self, level: int = -1) -> Tensor:
        """The length of every row of a level, on the structure's device.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).lengths()
        tensor([3, 0, 4])
        """
        rows, own = self.at(level)
        return rows.lengths(own)

    def offsets_as(self, dtype: torch.dtype, level: int = -1) -> Tensor:
        """The offsets of a level as int32 or int64; the other one is made once and kept.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).offsets_as(torch.int32)
        tensor([0, 3, 3, 7], dtype=torch.int32)
        """
        rows, own = self.at(level)
        if dtype not in (torch.int32, torch.int64):
            raise StructureError(f"offsets are int32 or int64, not {dtype}")
        if dtype is torch.int32 and rows.total(own, "offsets_as") > torch.iinfo(dtype).max:
            raise StructureError(f"offsets that end at {rows.total(own, 'offsets_as')} do not fit int32: use int64")
        return rows.derived(("offsets as", dtype, own), lambda: rows.offsets[own].to(dtype))

    def host_offsets(self, level: int = -1, *, why: str = "host_offsets") -> Tensor:
        """The offsets of a level on the CPU: copied once, then remembered. `why` names the operation in a SyncError.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).host_offsets().tolist()
        [0, 3, 3, 7]
        """
        rows, own = self.at(level)
        return rows.host_offsets(own, why)

    def num_rows(self, level: int = -1) -> int:
        """How many rows a level has; never needs a host copy.

        >>> words = Structure.from_offsets(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))
        >>> words.num_rows(), words.num_rows(level=0)
        (3, 2)
        """
        rows, own = self.at(level)
        return rows.num_rows(own)

    def total_elements(self, level: int | None = None, *, why: str = "total_elements") -> int:
        """How many positions there are: all of the tensor's, or those that the rows of one level hold together.

        >>> words = Structure.from_offsets(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))
        >>> words.total_elements(), words.total_elements(level=0)
        (9, 3)
        """
        if level is not None:
            rows, own = self.at(level)
            return rows.total(own, why)
        total = 1
        for rows in self._rows:
            total *= rows.elements(why)
        return total

    def max_length(self, level: int = -1, *, why: str = "max_length") -> int:
        """The longest row of a level; 0 for an empty batch.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).max_length()
        4
        """
        rows, own = self.at(level)
        return rows.max_length(own, why)

    def known_max_length(self, level: int = -1) -> int | None:
        """The longest row of a level if it costs nothing to say: given by the caller, looked up before, or on a CPU.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).known_max_length()
        4
        """
        rows, own = self.at(level)
        known = rows.known("max", own)
        if known is None and on_host(rows.offsets[own]):
            return rows.max_length(own, "max_length")
        return None if known is None else int(known)

    def min_length(self, level: int = -1, *, why: str = "min_length") -> int:
        """The shortest row of a level; 0 for an empty batch.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).min_length()
        0
        """
        rows, own = self.at(level)
        return rows.min_length(own, why)

    def sparsity(self, level: int = -1, *, why: str = "sparsity") -> float:
        """Mean length over longest length: 1 where padding would waste nothing, which includes a batch without elements.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 8])).sparsity()  # doctest: +ELLIPSIS
        0.533...
        """
        rows, own = self.at(level)
        room = rows.num_rows(own) * rows.max_length(own, why)
        return rows.total(own, why) / room if room else 1.0

    def variance(self, level: int = -1, *, why: str = "variance") -> float:
        """The population variance of the lengths of a level; 0 for an empty batch.

        >>> Structure.from_offsets(torch.tensor([0, 3, 4])).variance()
        1.0
        """
        rows, own = self.at(level)
        return rows.variance(own, why)

    def knows_total(self) -> bool:
        """Whether `total_elements()` would answer without a host copy.

        >>> Structure.from_offsets(torch.tensor([0, 3]), validate=False).knows_total()
        False
        """
        return all(rows.known(*rows.elements_fact) is not None for rows in self._rows)

    def at(self, level: int) -> tuple[Rows, int]:
        """The rows that a level of the structure is found in, and its number among theirs."""
        if len(self._rows) == 1:
            rows = self._rows[0]
            count = rows.levels
            if -count <= level < count:
                return rows, level % count
        count = self.levels
        if not -count <= level < count:
            raise ShapeError(f"level {level} does not exist: the structure has {count}, counted from the outermost as level 0")
        level %= count
        for rows in self._rows:
            if level < rows.levels:
                return rows, level
            level -= rows.levels
        raise AssertionError("every level is found in some rows")

    # --- another like it ---

    def to(self, device: torch.device | str) -> Structure:
        """The same structure on another device, with what is known of it; itself if it is there already.

        >>> Structure.from_offsets(torch.tensor([0, 3])).to("meta").max_length()
        3
        """
        rows = tuple(r.to(device) for r in self._rows)
        return self if rows[0] is self._rows[0] else Structure(rows, self._dims)

    def replace(self, axis: int, rows: Rows) -> Structure:
        """The same structure with other rows in one partitioned dim."""
        return Structure((*self._rows[:axis], rows, *self._rows[axis + 1 :]), self._dims)

    def back_to_back(self) -> Structure:
        """The same rows without gaps between them, their columns packed: what the format `csr` is.

        >>> Structure.from_starts(torch.tensor([0, 8]), torch.tensor([3, 5])).back_to_back()
        Structure(2 > 8)
        """
        if all(rows.contiguous for rows in self._rows):
            return self
        dims, gone = [], 0
        for dim, rows in zip(self._dims, self._rows, strict=True):
            dims.append(dim - gone)
            gone += rows.takes - 1
        return Structure(tuple(rows.back_to_back() for rows in self._rows), tuple(dims))

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
        for dim, rows in zip(self._dims, self._rows, strict=True):
            if values.dim() < dim + rows.takes:
                raise ShapeError(f"dim {dim + rows.takes - 1} of the values is ragged, but they have shape {tuple(values.shape)}")
            _check_extent(values, dim, rows)

    def same_rows(self, other: Structure, *, why: str = "comparing two structures") -> bool:
        """Whether both have the same rows, wherever these are stored: such tensors can be added.

        >>> gaps = Structure.from_starts(torch.tensor([0, 8]), torch.tensor([3, 5]))
        >>> back_to_back = Structure.from_lengths(torch.tensor([3, 5]))
        >>> gaps.same_rows(back_to_back), gaps == back_to_back
        (True, False)
        """
        if self is other:
            return True
        if len(self._rows) != len(other._rows) or self._dims != other._dims:
            return False
        return all(mine.same_rows(theirs, why) for mine, theirs in zip(self._rows, other._rows, strict=True))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure):
            return NotImplemented
        return self._dims == other._dims and self._rows == other._rows

    def __hash__(self) -> int:
        return hash((self._dims, self._rows))

    def __repr__(self) -> str:
        texts = [f"{rows!r} of dim {dim}" if dim else repr(rows) for dim, rows in zip(self._dims, self._rows, strict=True)]
        return f"Structure({', '.join(texts)})"

    def __copy__(self) -> Structure:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Structure:
        # Nobody writes into a structure, so copies of what holds it may hold the same one.
        return self


def _check_extent(values: Tensor, dim: int, rows: Rows) -> None:
    count = values.shape[dim]
    of = f"dim {dim} of values" if dim else "values"
    shape = tuple(values.shape)
    if rows.starts is not None:
        if rows.readable() and count < (needed := rows.reach("checking values")):
            raise ShapeError(f"the rows reach position {needed}, but {of} of shape {shape} have {count}")
    else:
        if not rows.readable() and rows.known(*rows.extent_fact) is None:
            rows.note(*rows.extent_fact, count)
        if count != (total := rows.extent("checking values")):
            raise ShapeError(f"the rows hold {total} positions together, but {of} of shape {shape} have {count}")
    if rows.takes == 2 and rows.readable() and values.shape[dim + 1] < (most := rows.max_length(rows.depth, "checking values")):
        raise ShapeError(f"the rows have up to {most} columns, but dim {dim + 1} of values of shape {shape} has fewer")


def _note_uniform(rows: Rows, tensors: Sequence[Tensor], one_more: int) -> None:
    # The outer level of a 2-D tensor has rows of one length, known from the shape; so it never needs a host copy.
    if len(tensors) == rows.depth:
        return
    level = 0
    for tensor in tensors:
        if tensor.dim() == 2 and tensor.shape[0] > 0:
            rows.note("max", level, tensor.shape[1] - one_more)
            rows.note("min", level, tensor.shape[1] - one_more)
        level += tensor.dim()
