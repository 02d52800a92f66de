"""`Structure`: which dims of the values are partitioned into rows, and how; the layout of a ragged tensor without its data.

In: offsets, lengths, or starts and lengths, for one dim or several. Out: an immutable `Structure` with its metadata.

    nested        Structure.from_offsets(documents, sentences)            one dim, rows of rows
    independent   Structure.independent(rows, columns)                    two dims, each with rows of its own
    product       Structure.from_offsets(queries).with_columns(keys)      two ragged dims of the same components
    with gaps     Structure.from_starts(starts, lengths)                  rows that do not follow one another
    transposed    Structure.from_offsets(offsets).transposed(((1,),))     `[B, H, r0]`: a regular dim before the ragged one
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from serrate.errors import CallError, DeviceError, ShapeError, StructureError
from serrate.tensor.building import PerLevel, rows_from_lengths, rows_from_offsets, rows_from_starts, rows_with_columns
from serrate.tensor.checks.agreement import check_extent, rows_agree
from serrate.tensor.checks.validate import Validate, check_dim, check_offsets, check_values_layout
from serrate.tensor.rows import Rows
from serrate.tensor.sync import on_host


@dataclass(frozen=True, slots=True)
class Dim:
    """The kind of one dim of a ragged tensor."""

    values_dim: int
    """The dim of the values that stores it."""
    axis: int | None = None
    """The number of the partitioned dim it belongs to; None for a regular dim."""
    level: int | None = None
    """The level of that partitioned dim whose lengths are its size; None for the dim that counts the outermost rows."""
    ragged: int | None = None
    """Its number among the ragged dims, if it is ragged."""


Ahead = tuple[tuple[int, ...], ...]
"""For each partitioned dim of the values and each of its ragged dims: how many regular dims precede it in the tensor but follow
it in the values. `[B, H, r0, D]` with values `[total, H, D]` is `((1,),)`."""


@functools.lru_cache(1024)
def _dims_of(
    ndim: int, dims: tuple[int, ...], partitions: tuple[tuple[int, int, bool], ...], ahead: Ahead | None
) -> tuple[Dim, ...]:
    """The kind of every dim; `partitions` holds levels, depth and packed for each partitioned dim."""
    found: list[Dim] = []
    at = ragged = 0
    for axis, (dim, (levels, depth, packed)) in enumerate(zip(dims, partitions, strict=True)):
        found += [Dim(k) for k in range(at, dim)]
        found.append(Dim(dim, axis))
        at = first = dim + (2 if levels > depth and not packed else 1)
        for level in range(levels):
            if ahead is not None:
                found += [Dim(k) for k in range(at, first + ahead[axis][level])]
                at = first + ahead[axis][level]
            found.append(Dim(dim + (level >= depth and not packed), axis, level, ragged))
            ragged += 1
    return (*found, *(Dim(k) for k in range(at, ndim)))


@functools.lru_cache(1024)
def _order_of(dims: tuple[Dim, ...], canonical: tuple[Dim, ...]) -> tuple[int, ...]:
    return tuple(map(canonical.index, dims))


SERVED = 256
"""How many of the programs that have run on it a structure remembers."""


class Structure:
    """Which dims of the values are partitioned into rows, and how: one `Rows` for each such dim.

    Structures are equal if they describe the same rows at the same positions, whichever tensors describe them; the hash uses
    shapes only. The tensors passed in are kept, not copied: if they are written to in place, the structure describes the new
    rows, and programs check them again. The constructor trusts its caller; `from_offsets`, `from_lengths` and `from_starts`
    check.

    >>> Structure.from_offsets(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))
    Structure(2 > 3 > 9)
    """

    __slots__ = ("__weakref__", "_ahead", "_canonical", "_dims", "_extents", "_rows", "_served", "_transposed")

    _rows: tuple[Rows, ...]
    _ahead: Ahead | None
    _canonical: Structure | None
    """The structure in canonical order, with every ragged dim right after the dim that counts its rows; None if this one is, so
    that it is freed with its last reference and not by the garbage collector."""
    _transposed: weakref.WeakValueDictionary[Ahead, Structure] | None
    """The same rows in other orders of dims, one object each, because programs compare structures by identity."""
    _served: set[int] | None
    """The programs that have run on these rows, by id: only a second run creates a binding for further calls."""
    _dims: tuple[int, ...]
    _extents: tuple[tuple[int, int], ...] | None
    """Known extents of partitioned dims, as (dim, extent): rows back to back take all positions of their dim."""

    def __init__(
        self, rows: tuple[Rows, ...], dims: tuple[int, ...] = (0,), extents: tuple[tuple[int, int], ...] | None = None
    ) -> None:
        if not isinstance(rows, tuple):
            raise CallError(
                f"Structure(rows) takes a tuple of Rows, got {type(rows).__name__}: "
                "use Structure.from_offsets or Structure.from_lengths"
            )
        self._rows = rows
        self._dims = dims
        self._extents = extents
        self._ahead = None
        self._canonical = None
        self._transposed = None
        self._served = None

    def is_served(self, by: object) -> bool:
        """Whether a program is known to have run on these rows before; records this run."""
        served = self._served
        if served is None:
            self._served = {id(by)}
            return False
        if id(by) in served:
            return True
        if len(served) >= SERVED:
            served.clear()
        served.add(id(by))
        return False

    # --- constructors ---

    @classmethod
    def from_offsets(
        cls,
        *offsets: Tensor,
        dim: int = 0,
        total: int | None = None,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: Validate = None,
    ) -> Self:
        """A structure from row offsets, outermost level first, of dim `dim` of the values.

        2-D offsets `[M, K+1]` stand for two levels: M components of K parts each; every row starts at 0 and counts from the
        start of its component. They give the same structure as the equivalent chain of 1-D offsets.
        `total` is the number of positions in the values; `total`, `max_length` and `min_length` avoid a host copy later.
        Shapes and dtypes are checked immediately. With `validate=None`, contents are checked immediately on a CPU and
        asynchronously on a device, where errors surface at a later call (see `wait_for_checks`). `"deferred"` checks
        asynchronously everywhere, `True` copies to the host and checks immediately, `False` skips the checks.

        >>> ranks = Structure.from_offsets(torch.tensor([[0, 50, 127], [0, 0, 0], [0, 100, 198]]), total=325)
        >>> ranks == Structure.from_offsets(torch.tensor([0, 2, 4, 6]), torch.tensor([0, 50, 127, 127, 127, 227, 325]))
        True
        """
        if dim:
            check_dim(dim)
        rows, total = rows_from_offsets(offsets, total, max_length, min_length, validate)
        return cls((rows,), (dim,), None if total is None else ((dim, total),))

    @classmethod
    def from_lengths(
        cls,
        *lengths: Tensor,
        dim: int = 0,
        total: int | None = None,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: Validate = None,
    ) -> Self:
        """A structure from the lengths of each level, outermost first; 2-D lengths `[M, K]` stand for two levels.

        int32 lengths give int32 offsets if the total is known to fit, else int64. The other arguments are as for
        `from_offsets`.

        >>> Structure.from_lengths(torch.tensor([3, 0, 4])).offsets
        (tensor([0, 3, 3, 7]),)
        """
        if dim:
            check_dim(dim)
        rows, total = rows_from_lengths(lengths, total, max_length, min_length, validate)
        return cls((rows,), (dim,), None if total is None else ((dim, total),))

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
        validate: Validate = None,
    ) -> Self:
        """A structure whose rows may have gaps between them, from the start of each innermost row and the lengths of every level.

        Rows are in order and do not overlap. `extent` is the number of positions in the values; with `room`, storage is
        padded: row k starts at `k * room`.

        >>> Structure.from_starts(torch.tensor([0, 8]), torch.tensor([3, 5]))
        Structure(2 > 8, with gaps)
        """
        if dim:
            check_dim(dim)
        return cls((rows_from_starts(starts, lengths, extent, room, max_length, min_length, validate),), (dim,))

    @classmethod
    def independent(cls, *structures: Structure) -> Self:
        """Combines structures of different dims of the same values.

        >>> rows = Structure.from_offsets(torch.tensor([0, 3, 8, 10]))
        >>> Structure.independent(rows, Structure.from_offsets(torch.tensor([0, 1, 4]), dim=1))
        Structure(3 > 10, 2 > 4 of dim 1)
        """
        if not structures:
            raise StructureError("independent: pass the structures of at least two dims, got none")
        for k, structure in enumerate(structures):
            if not isinstance(structure, Structure):
                raise CallError(f"independent: pass structures; argument {k} is of type {type(structure).__name__}")
        found = sorted(
            ((dim, k, rows) for k, s in enumerate(structures) for dim, rows in zip(s._dims, s._rows, strict=True)),
            key=lambda each: each[:2],
        )
        for (dim, k, rows), (after, j, _) in pairwise(found):
            if after < dim + rows.storage_dims:
                raise StructureError(
                    f"independent: structures {k} and {j} both partition dim {after}: give one of them another dim="
                )
        devices = [str(s._rows[0].device) for s in structures]
        if len(set(devices)) > 1:
            raise DeviceError(f"independent: the structures are on {', '.join(devices)}: move them to one device")
        return cls(tuple(rows for _, _, rows in found), tuple(dim for dim, _, _ in found))

    def with_columns(
        self, counts: Tensor, *, packed: bool = True, max_length: int | None = None, validate: Validate = None
    ) -> Self:
        """Adds a second ragged dim owned by the same components: `counts[k]` columns for every position of innermost row k.

        `packed` rows take `lengths[k] * counts[k]` positions; otherwise the columns are the first `counts[k]` positions of
        the next dim of the values. `max_length` is the largest count; for `validate` see `from_offsets`.

        >>> scores = Structure.from_lengths(torch.tensor([3, 0, 2])).with_columns(torch.tensor([2, 5, 4]))
        >>> scores, scores.total_elements()
        (Structure(3 > 5 x columns), 14)
        """
        if len(self._rows) > 1 or self._rows[0].columns is not None:
            raise StructureError(f"with_columns: {self} already has other ragged dims; start from the rows of one dim")
        return type(self)((rows_with_columns(self._rows[0], counts, packed, max_length, validate),), self._dims)

    def transposed(self, ahead: Ahead | None) -> Structure:
        """The same rows in a tensor with regular dims between the dim that counts rows and the ragged ones; the values are
        the same. `ahead[axis][k]` of the dims after partition `axis` in the values come before its k-th ragged dim.

        >>> heads = Structure.from_lengths(torch.tensor([3, 2])).transposed(((1,),))
        >>> [dim.values_dim for dim in heads.dims_of(3)], heads
        ([0, 1, 0, 2], Structure(2 > 5, 1 dim before r0))
        """
        canonical = self.canonical
        if ahead is None or not any(map(any, ahead)):
            return canonical
        if canonical._transposed is None:
            canonical._transposed = weakref.WeakValueDictionary()
        found = canonical._transposed.get(ahead)
        if found is None:
            _check_ahead(ahead, canonical)
            found = Structure(canonical._rows, canonical._dims, canonical._extents)
            found._ahead, found._canonical = ahead, canonical
            canonical._transposed[ahead] = found
        return found

    # --- properties ---

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The rows of each partitioned dim of the values, in the order of dims."""
        return self._rows

    @property
    def dims(self) -> tuple[int, ...]:
        """Which dims of the values are partitioned."""
        return self._dims

    @property
    def ahead(self) -> Ahead | None:
        """How many regular dims come before ragged ones (see `transposed`); None in canonical order, in which every ragged dim
        directly follows the dim that counts its rows."""
        return self._ahead

    @property
    def canonical(self) -> Structure:
        """The same rows in canonical order: every ragged dim directly follows the dim that counts its rows.

        >>> rows = Structure.from_lengths(torch.tensor([3, 2]))
        >>> rows.transposed(((1,),)).canonical is rows
        True
        """
        return self if self._canonical is None else self._canonical

    def order(self, ndim: int) -> tuple[int, ...]:
        """For each dim of a tensor whose values have `ndim` dims, its number in canonical order.

        >>> Structure.from_lengths(torch.tensor([3, 2])).transposed(((1,),)).order(3)
        (0, 2, 1, 3)
        """
        return _order_of(self.dims_of(ndim), self.canonical.dims_of(ndim))

    @property
    def offsets(self) -> tuple[Tensor, ...]:
        """The offsets of every ragged dim, in the order of dims; for nested rows outermost first."""
        if len(self._rows) == 1:
            return self._rows[0].offsets
        return tuple(level for rows in self._rows for level in rows.offsets)

    def buffers(self) -> list[Tensor]:
        """The integer tensors that describe it, as programs take them.

        >>> Structure.from_lengths(torch.tensor([3, 0, 4])).buffers()
        [tensor([0, 3, 3, 7])]
        """
        return [buffer for rows in self._rows for buffer in rows.buffers()]

    @property
    def starts(self) -> tuple[Tensor | None, ...]:
        """The row starts of each partitioned dim; None if its rows lie back to back."""
        return tuple(rows.starts for rows in self._rows)

    @property
    def levels(self) -> int:
        """The number of ragged dims."""
        return sum(rows.levels for rows in self._rows)

    @property
    def device(self) -> torch.device:
        """The device of the offsets."""
        return self._rows[0].device

    @property
    def form(self) -> tuple[object, ...]:
        """What programs may be specialised on: everything but numbers of rows and lengths."""
        return (self._dims, self._ahead, *[rows.form for rows in self._rows])

    @property
    def format(self) -> str:
        """The storage format: `csr` (rows back to back), `padded` (every row takes the same space), or `gaps` (anything else)."""
        if all(rows.contiguous for rows in self._rows):
            return "csr"
        return "padded" if all(rows.room is not None for rows in self._rows) else "gaps"

    def dims_of(self, ndim: int) -> tuple[Dim, ...]:
        """The kind of every dim of a ragged tensor whose values have `ndim` dims.

        >>> [d.ragged for d in Structure.from_lengths(torch.tensor([1, 2])).dims_of(2)]
        [None, 0, None]
        """
        levels = tuple([(len(rows.offsets), rows.depth, rows.packed) for rows in self._rows])
        return _dims_of(ndim, self._dims, levels, self._ahead)

    def lengths(self, level: int = -1) -> Tensor:
        """The length of every row of a level, on the structure's device.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).lengths()
        tensor([3, 0, 4])
        """
        rows, own = self.at(level)
        return rows.lengths(own)

    def offsets_as(self, dtype: torch.dtype, level: int = -1) -> Tensor:
        """The offsets of a level as int32 or int64, converted once.

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
        """The offsets of a level on the CPU, copied once. `why` names the operation in a SyncError.

        >>> Structure.from_offsets(torch.tensor([0, 3, 3, 7])).host_offsets().tolist()
        [0, 3, 3, 7]
        """
        rows, own = self.at(level)
        return rows.host_offsets(own, why)

    def num_rows(self, level: int = -1) -> int:
        """The number of rows of a level; never needs a host copy.

        >>> words = Structure.from_offsets(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))
        >>> words.num_rows(), words.num_rows(level=0)
        (3, 2)
        """
        rows, own = self.at(level)
        return rows.num_rows(own)

    def total_elements(self, level: int | None = None, *, why: str = "total_elements") -> int:
        """The number of positions of the whole tensor, or the total length of one level's rows.

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
        """The longest length of a level if it needs no host copy: supplied by the caller, read before, or on a CPU.

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
        """Mean length divided by the longest: 1 if padding would waste nothing, also for a batch without elements.

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
        """Whether `total_elements()` needs no host copy.

        >>> Structure.from_offsets(torch.tensor([0, 3]), validate=False).knows_total()
        False
        """
        return all(rows.known(*rows.elements_fact) is not None for rows in self._rows)

    def at(self, level: int) -> tuple[Rows, int]:
        """The rows that a level of the structure belongs to, and its number within them."""
        if len(self._rows) == 1:
            rows = self._rows[0]
            count = rows.levels
            if -count <= level < count:
                return rows, level % count
        count = self.levels
        if not -count <= level < count:
            raise ShapeError(f"level {level} does not exist: the structure has {count}, and the outermost is level 0")
        level %= count
        for rows in self._rows:
            if level < rows.levels:
                return rows, level
            level -= rows.levels
        raise AssertionError("every level is found in some rows")

    # --- copies with changes ---

    def to(self, device: torch.device | str) -> Structure:
        """The same structure on another device, with its known facts; itself if it is already there.

        >>> Structure.from_offsets(torch.tensor([0, 3])).to("meta").max_length()
        3
        """
        if self._rows[0].offsets[0].device == device:
            return self
        rows = tuple(r.to(device) for r in self._rows)
        return self if rows[0] is self._rows[0] else self.with_rows(rows)

    def with_rows(self, rows: tuple[Rows, ...], dims: tuple[int, ...] | None = None) -> Structure:
        """Replaces the rows, keeping the number and order of ragged dims; `dims` also moves them to other dims of the values."""
        return Structure(rows, self._dims if dims is None else dims).transposed(self._ahead)

    def replace(self, axis: int, rows: Rows) -> Structure:
        """Replaces the rows of one partitioned dim."""
        return self.with_rows((*self._rows[:axis], rows, *self._rows[axis + 1 :]))

    def back_to_back(self) -> Structure:
        """The same rows without gaps, columns packed: the `csr` format.

        >>> Structure.from_starts(torch.tensor([0, 8]), torch.tensor([3, 5])).back_to_back()
        Structure(2 > 8)
        """
        if all(rows.contiguous for rows in self._rows):
            return self
        dims, gone = [], 0
        for dim, rows in zip(self._dims, self._rows, strict=True):
            dims.append(dim - gone)
            gone += rows.storage_dims - 1
        return self.with_rows(tuple(rows.back_to_back() for rows in self._rows), tuple(dims))

    def check_values(self, values: Tensor) -> None:
        """Raises unless the values fit this structure: same device, as many positions as the rows take.

        If the total is known only on the device, it is taken from the values.

        >>> Structure.from_lengths(torch.tensor([3, 1])).check_values(torch.zeros(5, 8))
        Traceback (most recent call last):
        serrate.errors.ShapeError: the rows hold 4 positions together, but values of shape (5, 8) have 5
        """
        check_values_layout(values)
        device = self._rows[0].offsets[0].device
        if values.device != device:
            raise DeviceError(f"values are on {values.device}, but offsets and lengths are on {device}: move one of them")
        shape = values.shape
        if self._ahead is not None:
            taken = zip(self._dims, self._rows, self._ahead, strict=True)
            least = max(dim + rows.storage_dims + max(before) for dim, rows, before in taken)
            if len(shape) < least:
                raise ShapeError(f"values of {self} need at least {least} dims, got shape {tuple(shape)}")
        if self._extents is not None and all(rows.unmodified() for rows in self._rows):
            for dim, extent in self._extents:
                if len(shape) <= dim or shape[dim] != extent:
                    break
            else:
                return
        for dim, rows in zip(self._dims, self._rows, strict=True):
            if len(shape) < dim + rows.storage_dims:
                raise ShapeError(f"dim {dim + rows.storage_dims - 1} of the values is ragged, but they have shape {tuple(shape)}")
            check_extent(values, dim, rows)
        if all(rows.contiguous for rows in self._rows):
            self._extents = tuple((dim, shape[dim]) for dim in self._dims)

    def fits(self, values: Tensor) -> bool:
        """Whether the rows are known to be valid and to fit these values; if not, call `check_values` and `check_rows`.

        >>> Structure.from_lengths(torch.tensor([3, 1])).fits(torch.zeros(4))
        True
        """
        extents, shape = self._extents, values.shape
        if extents is None or self._ahead is not None or self._rows[0].offsets[0].device != values.device:
            return False
        for rows in self._rows:
            if not rows.verified():
                return False
        return all(dim < len(shape) and shape[dim] == extent for dim, extent in extents)

    def check_rows(self, values: Tensor) -> None:
        """Raises unless rows on the host are valid and fit these values.

        Constructors check rows; this is for offsets that were written to in place since then.

        >>> offsets = torch.tensor([0, 3, 4])
        >>> structure = Structure.from_offsets(offsets)
        >>> _ = offsets.copy_(torch.tensor([0, 5, 4]))
        >>> structure.check_rows(torch.zeros(4))
        Traceback (most recent call last):
        serrate.errors.StructureError: offsets must not decrease: offsets[2] = 4 < offsets[1] = 5
        """
        for rows in self._rows:
            if not on_host(rows.offsets[0]):
                continue
            check_offsets(rows.offsets[: rows.depth], None)
            if rows.columns is not None:
                check_offsets([rows.columns], None)
            if rows.starts is not None and rows.starts.numel() and int(rows.starts.min()) < 0:
                raise StructureError(f"starts must not be negative: the smallest is {int(rows.starts.min())}")
        self.check_values(values)

    def same_rows(self, other: Structure, *, why: str = "comparing two structures") -> bool:
        """Whether both have the same rows, wherever they are stored and whatever the order of dims.

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

    def agrees(self, other: Structure, what: str) -> bool:
        """Whether both have the same rows, for operations on two ragged tensors; copies nothing to the host.

        On a CPU, contents are compared. On a device, only shapes are compared immediately; contents are compared there, once
        per pair, and a StructureMismatch that names `what` surfaces at a later call if they differ (see `wait_for_checks`).

        >>> one, other = (Structure.from_lengths(torch.tensor([3, 5])) for _ in range(2))
        >>> one.agrees(other, "the operands of add"), one.agrees(Structure.from_lengths(torch.tensor([8])), "operands")
        (True, False)
        """
        if self is other:
            return True
        if len(self._rows) != len(other._rows) or self._dims != other._dims:
            return False
        return all(rows_agree(mine, theirs, what) for mine, theirs in zip(self._rows, other._rows, strict=True))

    def difference_from(self, other: Structure) -> str:
        """How this structure differs from another, for messages: in its innermost lengths, if these are on the host and differ.

        >>> Structure.from_lengths(torch.tensor([3, 5])).difference_from(Structure.from_lengths(torch.tensor([5, 3])))
        'its lengths are [3, 5], not [5, 3]'
        """
        ends = [each._rows[-1] for each in (self, other)]
        lengths = [rows.inner_lengths().tolist() if rows.readable() and rows.device.type == "cpu" else [] for rows in ends]
        if lengths[0] != lengths[1] and all(len(each) <= 8 for each in lengths):
            return f"its lengths are {lengths[0]}, not {lengths[1]}"
        return f"it has {self}, not {other}"

    def known_equal(self, other: Structure) -> bool:
        """Whether both are known to have equal rows without a host copy: by their contents on a CPU, elsewhere only if the same
        tensor objects describe them. The order of dims may differ.

        >>> offsets = torch.zeros(3, dtype=torch.int64, device="meta")
        >>> Structure.from_offsets(offsets).known_equal(Structure.from_offsets(offsets))
        True
        >>> Structure.from_offsets(offsets).known_equal(Structure.from_offsets(offsets.clone()))
        False
        """
        if self is other:
            return True
        if all(on_host(rows.offsets[0]) for rows in (*self._rows, *other._rows)):
            return self.canonical == other.canonical
        return self._dims == other._dims and all(
            mine.same_tensors(theirs) for mine, theirs in zip(self._rows, other._rows, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure):
            return NotImplemented
        return self._dims == other._dims and self._ahead == other._ahead and self._rows == other._rows

    def __hash__(self) -> int:
        return hash((self._dims, self._rows))

    def __repr__(self) -> str:
        texts = [f"{rows!r} of dim {dim}" if dim else repr(rows) for dim, rows in zip(self._dims, self._rows, strict=True)]
        if self._ahead is not None:
            counts = [count for axis in self._ahead for count in axis]
            texts += [f"{n} dim{'s' if n > 1 else ''} before r{k}" for k, n in enumerate(counts) if n]
        return f"Structure({', '.join(texts)})"

    def __copy__(self) -> Structure:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Structure:
        # Structures are immutable, so copies may share them.
        return self


def _check_ahead(ahead: Ahead, canonical: Structure) -> None:
    if [len(axis) for axis in ahead] != [rows.levels for rows in canonical.rows]:
        raise StructureError(f"transposed: pass one count per ragged dim of {canonical}, got {ahead}")
    if any(axis != tuple(sorted(axis)) or axis[0] < 0 for axis in ahead):
        raise StructureError(f"transposed: counts must not be negative or decrease from a ragged dim to the next, got {ahead}")
    for axis, (dim, after) in enumerate(pairwise(canonical.dims)):
        if max(ahead[axis]) > after - dim - canonical.rows[axis].storage_dims:
            raise StructureError(
                f"transposed: a ragged dim cannot come after another partitioned dim, got {ahead} for {canonical}"
            )
