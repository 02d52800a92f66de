"""What offsets, lengths, counts and starts must be for rows to exist.

In: what the user gave, one tensor per level, outermost first. Out: what was measured on the way, or an error. Numbers are
judged by a handful of them: the shortest and the longest length, the first offset and the last. On a CPU that is one pass; on
a device the handful is computed there and judged when it arrives. Only when something is wrong `mistakes` looks for the words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from serrate.errors import CallError, DeviceError, DtypeError, ShapeError, StructureError
from serrate.tensor.checks import mistakes
from serrate.tensor.checks.deferred import arrives, later
from serrate.tensor.sync import host_copy, on_host

Validate = bool | Literal["deferred"] | None
"""When numbers are checked: None at once on a CPU and deferred elsewhere; True at once, with a host copy; False never."""

LARGEST = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}
"""The dtypes of offsets and lengths, each with the largest number it holds."""


class Moment(Enum):
    """When numbers are checked."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


class Found(NamedTuple):
    """What checking the numbers of one level has told."""

    shortest: int
    longest: int
    end: int
    """What the rows hold together: the last of the offsets, the sum of the lengths."""
    lengths: Tensor | None
    """The lengths, if the level was given as 1-D offsets."""


def moment(validate: Validate, tensor: Tensor) -> Moment:
    """When the numbers of a tensor are checked.

    >>> moment(None, torch.zeros(2)), moment(None, torch.zeros(2, device="meta"))
    (<Moment.NOW: 'now'>, <Moment.NEVER: 'never'>)
    """
    if validate is None and on_host(tensor):
        return Moment.NOW
    if validate is True or validate is False:
        return Moment.NOW if validate else Moment.NEVER
    if validate is None or validate == "deferred":
        # Nothing is computed for a check that would never report.
        return Moment.LATER if arrives(tensor) else Moment.NEVER
    raise CallError(f"validate={validate!r} is not one of None, True, False and 'deferred'")


def check_values_form(values: Tensor) -> None:
    """Checks that values are a tensor with a dim that rows can share.

    >>> check_values_form(torch.tensor(1.0))
    Traceback (most recent call last):
    serrate.errors.ShapeError: values must have at least one dim, whose positions the rows share; got a scalar
    """
    if not isinstance(values, Tensor):
        way = "from_numpy(values, offsets)" if hasattr(values, "__array__") else "from_list(rows) or from_nested_list(numbers)"
        raise CallError(f"values must be a tensor, got {type(values).__name__}: use torch.as_tensor(values), or {way}")
    if values.layout is not torch.strided or values.is_nested:
        if values.is_nested:
            raise CallError("values must be a plain tensor, got a NestedTensor: take its values and offsets")
        raise DtypeError(f"values must be strided, got {values.layout}: convert them with .to_dense()")
    if values.is_quantized:
        raise DtypeError(f"values must not be quantized, got {values.dtype}: convert them with .dequantize()")
    if values.dim() == 0:
        raise ShapeError("values must have at least one dim, whose positions the rows share; got a scalar")


def check_dim(dim: int, values: Tensor | None = None) -> None:
    """Checks that rows can be of this dim, of these values if they are there.

    >>> check_dim(2, torch.zeros(4, 2))
    Traceback (most recent call last):
    serrate.errors.ShapeError: dim=2 of the values does not exist: they have shape (4, 2)
    """
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise CallError(f"dim must be an int, got {type(dim).__name__}")
    if dim < 0:
        raise ShapeError(f"dim={dim}: the dim of the values is counted from the first, 0")
    if values is not None and dim >= values.dim():
        raise ShapeError(f"dim={dim} of the values does not exist: they have shape {tuple(values.shape)}")


def check_form(name: str, tensors: Sequence[Tensor], total: int | None = None) -> None:
    """Checks what shapes, dtypes and devices tell; reads no number. `name` is `offsets`, `lengths`, `starts` or `counts`.

    >>> check_form("offsets", [torch.tensor([0.0, 2.0])])
    Traceback (most recent call last):
    serrate.errors.DtypeError: offsets must be int32 or int64, got torch.float32: convert them with .to(torch.int64)
    """
    if not tensors:
        raise StructureError(f"a structure needs at least one level of {name}, got none")
    nested = name in ("offsets", "lengths")
    for level, tensor in enumerate(tensors):
        of = name if len(tensors) == 1 else f"{name} of level {level}"
        if not isinstance(tensor, Tensor):
            raise CallError(f"{of} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in LARGEST:
            raise DtypeError(f"{of} must be int32 or int64, got {tensor.dtype}: convert them with .to(torch.int64)")
        if tensor.layout is not torch.strided:
            raise DtypeError(f"{of} must be strided, got {tensor.layout}: convert them with .to_dense()")
        if tensor.dim() != 1 and not (nested and tensor.dim() == 2):
            must = "1-D, or 2-D with one row for each component" if nested else "1-D"
            raise StructureError(f"{of} must be {must}, got {tensor.dim()}-D of shape {tuple(tensor.shape)}")
        if name == "offsets" and tensor.shape[-1] == 0:
            raise StructureError(f"{of} must hold at least the 0 that opens the first row, got shape {tuple(tensor.shape)}")
        if level and tensor.device != tensors[0].device:
            raise DeviceError(f"{of} are on {tensor.device}, but those of level 0 are on {tensors[0].device}: move one of them")
    if name == "offsets" and total is not None and total > LARGEST[tensors[-1].dtype]:
        raise StructureError(f"int32 offsets cannot count {total} positions: convert them with .to(torch.int64)")


# --- offsets ---


def check_offsets(tensors: Sequence[Tensor], total: int | None) -> list[Found]:
    """Checks the numbers in offsets that are on the host; `total` is the number of positions the values have, if known.

    >>> check_offsets([torch.tensor([0, 4, 9, 7])], 7)
    Traceback (most recent call last):
    serrate.errors.StructureError: offsets must not decrease: offsets[3] = 7 < offsets[2] = 9
    """
    found: list[Found] = []
    for position, level in enumerate(tensors):
        lengths, few = _few_of_offsets(level)
        first, end, shortest, longest = [number.item() for number in few] if len(few) == 4 else (*map(int, few), 0, 0)
        wanted = mistakes.wanted("offsets", tensors, position, total)
        if first or shortest < 0 or (wanted is not None and end != wanted) or _may_wrap(level, lengths, longest):
            mistakes.explain_offsets(tensors, total)
        found.append(Found(int(shortest), int(longest), int(end), lengths if level.dim() == 1 else None))
    return found


def check_offsets_later(tensors: Sequence[Tensor], total: int | None, known: KnownLengths) -> list[Tensor]:
    """The same for offsets on a device, whose numbers are judged when they arrive. Gives the lengths of every tensor."""
    all_lengths: list[Tensor] = []
    numbers: list[Tensor] = []
    parts: list[int] = []
    for level in tensors:
        lengths, few = _few_of_offsets(level)
        if level.dtype is torch.int32 and lengths.numel():
            # Differences of int32 may wrap around unseen, but not of numbers that are all positive.
            few = (*few, level.amin())
        all_lengths.append(lengths)
        numbers += few
        parts.append(len(few))

    def judge(found: list[int]) -> None:
        at = 0
        measured: list[tuple[int, int]] = []
        for position, count in enumerate(parts):
            first, end, *extremes = found[at : at + count]
            shortest, longest, *least = extremes or (0, 0)
            wanted = mistakes.wanted("offsets", tensors, position, total)
            if first or shortest < 0 or (wanted is not None and end != wanted) or (least and least[0] < 0):
                mistakes.explain_offsets([level.cpu() for level in tensors], total)
                raise StructureError(
                    f"offsets were wrong when they were checked, and were written to since: they began with {first}, "
                    f"ended at {end}, and the shortest row had length {shortest}"
                )
            measured.append((shortest, longest))
            at += count
        known.check(tensors, measured)

    later(numbers, judge)
    return all_lengths


def _few_of_offsets(level: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The lengths; and the first offset, the last one, the shortest and the longest length (no lengths: only the first two)."""
    lengths = level.diff()
    if level.dim() == 1:
        first, end = level[0], level[-1]
    else:
        first, end = level[:, 0].any(), level[:, -1].sum()
    if lengths.numel() == 0:
        return lengths, (first, end)
    return lengths, (first, end, *lengths.aminmax())


def _may_wrap(level: Tensor, lengths: Tensor, longest: float) -> bool:
    """Whether differences have wrapped around: impossible where so many of the longest fit, or where no offset is negative."""
    return lengths.numel() * longest > LARGEST[level.dtype] and bool((level < 0).any())


# --- lengths ---


def check_lengths(tensors: Sequence[Tensor], total: int | None) -> list[Found]:
    """Checks the numbers in lengths that are on the host; `total` is the number of positions the values have, if known.

    >>> check_lengths([torch.tensor([2, -1])], 1)
    Traceback (most recent call last):
    serrate.errors.StructureError: lengths must not be negative: lengths[1] = -1
    """
    found: list[Found] = []
    for position, level in enumerate(tensors):
        count = level.numel()
        shortest, longest, end = [number.item() for number in (*level.aminmax(), level.sum())] if count else (0, 0, 0)
        wanted = mistakes.wanted("lengths", tensors, position, total)
        if shortest < 0 or (wanted is not None and end != wanted) or count * longest > LARGEST[torch.int64]:
            mistakes.explain_lengths(tensors, total)
        found.append(Found(int(shortest), int(longest), int(end), None))
    return found


def check_lengths_later(tensors: Sequence[Tensor], total: int | None, known: KnownLengths) -> None:
    """The same for lengths on a device, whose numbers are judged when they arrive."""
    levels = [level for level in tensors if level.numel()]
    numbers = [number for level in levels for number in (*level.aminmax(), level.sum())]

    def judge(found: list[int]) -> None:
        measured: list[tuple[int, int]] = []
        told = iter(found)
        for position, level in enumerate(tensors):
            shortest, longest, end = (next(told), next(told), next(told)) if level.numel() else (0, 0, 0)
            wanted = mistakes.wanted("lengths", tensors, position, total)
            many = level.numel() * longest > LARGEST[torch.int64]
            if shortest < 0 or (wanted is not None and end != wanted) or many:
                mistakes.explain_lengths([level.cpu() for level in tensors], total)
                raise StructureError(
                    "lengths were wrong when they were checked, and were written to since: "
                    f"the shortest was {shortest} and they summed to {end}"
                )
            measured.append((shortest, longest))
        known.check(tensors, measured)

    if numbers:
        later(numbers, judge)
    else:
        judge([])


# --- lengths that the caller knows ---


class KnownLengths(NamedTuple):
    """The longest and the shortest length of levels, as far as the caller gave them; one pair for each level of the chain."""

    longest: Sequence[int | None]
    shortest: Sequence[int | None]

    def check(self, tensors: Sequence[Tensor], measured: Sequence[tuple[int, int]]) -> None:
        """Raises if what was given is not what was measured, (shortest, longest) of every spelled tensor."""
        level = 0
        for tensor, (shortest, longest) in zip(tensors, measured, strict=True):
            # The outer of the two levels that a 2-D tensor stands for is known from its shape, and checked there.
            level += tensor.dim() - 1
            check_extreme("max_length", self.longest[level], "longest", longest)
            check_extreme("min_length", self.shortest[level], "shortest", shortest)
            level += 1


def known_of(longest: Any, shortest: Any, levels: int) -> KnownLengths:
    """Lengths that the caller knows, of the innermost level or of every level, as one for each level.

    >>> known_of(5, (1, 0), 2)
    KnownLengths(longest=(None, 5), shortest=(1, 0))
    """
    return KnownLengths(_per_level("max_length", longest, levels), _per_level("min_length", shortest, levels))


def check_extreme(name: str, given: int | None, longest: str, found: int) -> None:
    """Checks a length the caller supplied as metadata against the one found in the offsets.

    >>> check_extreme("max_length", 5, "longest", 7)
    Traceback (most recent call last):
    serrate.errors.StructureError: max_length=5 was given, but the longest row has length 7
    """
    if given is not None and given != found:
        raise StructureError(f"{name}={given} was given, but the {longest} row has length {found}")


def _per_level(name: str, given: Any, levels: int) -> Sequence[int | None]:
    if given is None or isinstance(given, int):
        return (given,) if levels == 1 else (*(None,) * (levels - 1), given)
    if not isinstance(given, Sequence) or not all(each is None or isinstance(each, int) for each in given):
        raise CallError(f"{name} must be an int, or one int or None for each level; got {given!r}")
    if len(given) != levels:
        raise StructureError(f"{name} was given for {len(given)} levels, but the structure has {levels}")
    return given


# --- counts of columns, starts of rows, extents of values ---


def check_counts(counts: Tensor, when: Moment, most: int | None) -> None:
    """Checks numbers of columns; `most` is what the caller says the largest is, if anything.

    >>> check_counts(torch.tensor([2, -1]), Moment.NOW, None)
    Traceback (most recent call last):
    serrate.errors.StructureError: counts must not be negative: counts[1] = -1
    """

    def judge(found: list[int]) -> None:
        if found[0] < 0:
            mistakes.explain_negative("counts", "counts", counts.cpu())
        if most is not None and most != found[1]:
            raise StructureError(f"max_length={most} was given, but the row with the most columns has {found[1]}")

    if counts.numel():
        judged(counts.aminmax(), judge, when, "validating counts")


def check_starts(starts: Tensor, sizes: Tensor, extent: int | None, when: Moment) -> None:
    """Checks that rows of these sizes lie in order, without overlap, within `extent` positions if that is known.

    >>> check_starts(torch.tensor([0, 2]), torch.tensor([3, 1]), None, Moment.NOW)
    Traceback (most recent call last):
    serrate.errors.StructureError: rows must not overlap and must be in order: row 0 ends at 3, row 1 starts at 2
    """
    if starts.shape != sizes.shape:
        raise StructureError(f"as many starts as rows are needed: {starts.shape[0]} starts, but {sizes.shape[0]} rows")
    if starts.numel() == 0:
        return
    # In int64, where the end of a row that wraps around is negative.
    ends = starts.long() + sizes

    def judge(found: list[int]) -> None:
        first, end, least, *between = found
        if first < 0 or least < 0 or (extent is not None and end > extent) or (between and between[0] < 0):
            mistakes.explain_starts(starts.cpu(), ends.cpu(), extent)

    between = () if starts.numel() == 1 else ((starts[1:] - ends[:-1]).amin(),)
    judged((starts[0].long(), ends[-1], ends.amin(), *between), judge, when, "validating starts")


def check_rectangles(lengths: Tensor, counts: Tensor) -> None:
    """Checks that rows of these lengths with so many columns have no more elements together than can be counted.

    >>> check_rectangles(torch.tensor([2**32]), torch.tensor([2**32]))
    Traceback (most recent call last):
    serrate.errors.StructureError: rows by columns must be what int64 holds: they are 1.845e+19 elements together
    """
    total = float((lengths.double() * counts.double()).sum())
    if total >= 2.0**63:
        raise StructureError(f"rows by columns must be what int64 holds: they are {total:.4g} elements together")


def judged(numbers: Sequence[Tensor], judge: Callable[[list[int]], None], when: Moment, why: str) -> None:
    """Has a few numbers judged now, which reads them on the host, or when they arrive there.

    >>> judged([torch.tensor(3)], print, Moment.NOW, "validating counts")
    [3]
    """
    if when is Moment.LATER:
        later(numbers, judge)
    elif when is Moment.NOW:
        judge([int(host_copy(number, why)) for number in numbers])
