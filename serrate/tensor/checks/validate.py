"""Validates offsets, lengths, counts and starts.

In: the user's tensors, one per level, outermost first. Out: the lengths measured on the way, or an error. A few numbers decide:
the shortest and longest length, the first and last offset. On a CPU they take one pass; on a device they are computed there and
verified when they arrive. Only if they are wrong does `mistakes` search for the position to name in the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from serrate.errors import CallError, DeviceError, DtypeError, ShapeError, StructureError
from serrate.ir.view import TensorView
from serrate.tensor.checks import mistakes
from serrate.tensor.checks.deferred import can_report, defer, defer_arrival, summary
from serrate.tensor.sync import host_copy, on_host

Validate = bool | Literal["deferred"] | None
"""When to check contents: None, immediately on a CPU, else deferred; True, immediately, with a host copy; False, never."""

LARGEST = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}
"""The dtypes of offsets and lengths, each with its largest value."""


class CheckTime(Enum):
    """When the contents of offsets and lengths are checked."""

    NOW = "now"
    DEFERRED = "deferred"
    NEVER = "never"


class MeasuredLengths(NamedTuple):
    """The measurements of a check on one level."""

    shortest: int
    longest: int
    end: int
    """The rows' total: the last offset, or the sum of the lengths."""
    lengths: Tensor | None
    """The lengths, if the level was given as 1-D offsets."""


def check_time(validate: Validate, tensor: Tensor) -> CheckTime:
    """When the contents of a tensor are checked.

    >>> check_time(None, torch.zeros(2)), check_time(None, torch.zeros(2, device="meta"))
    (<CheckTime.NOW: 'now'>, <CheckTime.NEVER: 'never'>)
    """
    if validate is None and on_host(tensor):
        return CheckTime.NOW
    if validate is True or validate is False:
        return CheckTime.NOW if validate else CheckTime.NEVER
    if validate is None or validate == "deferred":
        # Compute nothing for a check that would never report.
        return CheckTime.DEFERRED if can_report(tensor) else CheckTime.NEVER
    raise CallError(f"validate={validate!r} is not one of None, True, False and 'deferred'")


def check_values_layout(values: Tensor) -> None:
    """Checks that values are a dense, strided tensor with at least one dim.

    >>> check_values_layout(torch.tensor(1.0))
    Traceback (most recent call last):
    serrate.errors.ShapeError: values must have at least one dim, whose positions the rows share; got a scalar
    """
    if isinstance(values, TensorView):
        raise CallError(
            "a JaggedTensor cannot be constructed from traced tensors: write ops.as_nested(values, offsets), or construct it "
            "before the call"
        )
    if not isinstance(values, Tensor):
        constructor = (
            "from_numpy(values, offsets)" if hasattr(values, "__array__") else "from_list(rows) or from_nested_list(numbers)"
        )
        raise CallError(f"values must be a tensor, got {type(values).__name__}: use torch.as_tensor(values), or {constructor}")
    if values.layout is not torch.strided or values.is_nested:
        if values.is_nested:
            raise CallError("values must be a plain tensor, got a NestedTensor: take its values and offsets")
        raise DtypeError(f"values must be strided, got {values.layout}: convert them with .to_dense()")
    if values.is_quantized:
        raise DtypeError(f"values must not be quantized, got {values.dtype}: convert them with .dequantize()")
    if values.dim() == 0:
        raise ShapeError("values must have at least one dim, whose positions the rows share; got a scalar")


def check_dim(dim: int, values: Tensor | None = None) -> None:
    """Checks that `dim` can be partitioned: a dim of `values`, if given.

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


def check_layout(name: str, tensors: Sequence[Tensor], total: int | None = None) -> None:
    """Checks shapes, dtypes and devices, not contents. `name` is `offsets`, `lengths`, `starts` or `counts`.

    >>> check_layout("offsets", [torch.tensor([0.0, 2.0])])
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
            raise StructureError(f"{of} must have at least one element, the leading 0; got shape {tuple(tensor.shape)}")
        if level and tensor.device != tensors[0].device:
            raise DeviceError(f"{of} are on {tensor.device}, but those of level 0 are on {tensors[0].device}: move one of them")
    if name == "offsets" and total is not None and total > LARGEST[tensors[-1].dtype]:
        raise StructureError(f"int32 offsets cannot count {total} positions: convert them with .to(torch.int64)")


# --- offsets ---


def check_offsets(tensors: Sequence[Tensor], total: int | None) -> list[MeasuredLengths]:
    """Checks offsets on the host; `total` is the number of positions in the values, if known.

    >>> check_offsets([torch.tensor([0, 4, 9, 7])], 7)
    Traceback (most recent call last):
    serrate.errors.StructureError: offsets must not decrease: offsets[3] = 7 < offsets[2] = 9
    """
    found: list[MeasuredLengths] = []
    for position, level in enumerate(tensors):
        lengths, few = _summarize_offsets(level)
        first, end, shortest, longest = [number.item() for number in few] if len(few) == 4 else (*map(int, few), 0, 0)
        expected = mistakes.expected_end("offsets", tensors, position, total)
        if first or shortest < 0 or (expected is not None and end != expected) or _may_wrap(level, lengths, longest):
            mistakes.explain_offsets(tensors, total)
        found.append(MeasuredLengths(int(shortest), int(longest), int(end), lengths if level.dim() == 1 else None))
    return found


def defer_offsets_check(tensors: Sequence[Tensor], total: int | None, known: KnownLengths) -> Sequence[Tensor | None]:
    """As `check_offsets`, deferred, for offsets on a device. Returns the lengths of every tensor that it has computed."""
    nothing = [None for _ in tensors]
    if not can_report(tensors[0]):
        return nothing
    all_lengths: list[Tensor] = []
    numbers: list[Tensor] = []
    arrival = summary(tensors)
    parts: list[int] = [4 for _ in tensors] if arrival is not None else []
    for level in tensors if arrival is None else ():
        lengths, few = _summarize_offsets(level)
        if level.dtype is torch.int32 and lengths.numel():
            # int32 differences may wrap around undetected, but not if no offset is negative.
            few = (*few, level.amin())
        all_lengths.append(lengths)
        numbers += few
        parts.append(len(few))

    def verify(found: list[int]) -> None:
        at = 0
        measured: list[tuple[int, int]] = []
        for position, count in enumerate(parts):
            first, end, *extremes = found[at : at + count]
            shortest, longest, *least = extremes or (0, 0)
            expected = mistakes.expected_end("offsets", tensors, position, total)
            if first or shortest < 0 or (expected is not None and end != expected) or (least and least[0] < 0):
                mistakes.explain_offsets([level.cpu() for level in tensors], total)
                raise StructureError(
                    f"offsets were wrong when they were checked, and have been overwritten since: they started with {first}, "
                    f"ended at {end}, and the shortest row had length {shortest}"
                )
            measured.append((shortest, longest))
            at += count
        known.check(tensors, measured)

    if arrival is not None:
        defer_arrival(arrival, tensors[0].device, verify)
        return nothing
    defer(numbers, verify)
    return all_lengths


def _summarize_offsets(level: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The lengths; and first offset, last offset, shortest and longest length (only the offsets if there are no lengths)."""
    lengths = level.diff()
    if level.dim() == 1:
        first, end = level[0], level[-1]
    else:
        first, end = level[:, 0].any(), level[:, -1].sum()
    if lengths.numel() == 0:
        return lengths, (first, end)
    return lengths, (first, end, *lengths.aminmax())


def _may_wrap(level: Tensor, lengths: Tensor, longest: float) -> bool:
    """Whether differences may have wrapped around: not if that many of the longest fit, nor without negative offsets."""
    return lengths.numel() * longest > LARGEST[level.dtype] and bool((level < 0).any())


# --- lengths ---


def check_lengths(tensors: Sequence[Tensor], total: int | None) -> list[MeasuredLengths]:
    """Checks lengths on the host; `total` is the number of positions in the values, if known.

    >>> check_lengths([torch.tensor([2, -1])], 1)
    Traceback (most recent call last):
    serrate.errors.StructureError: lengths must not be negative: lengths[1] = -1
    """
    found: list[MeasuredLengths] = []
    for position, level in enumerate(tensors):
        count = level.numel()
        shortest, longest, end = [number.item() for number in (*level.aminmax(), level.sum())] if count else (0, 0, 0)
        expected = mistakes.expected_end("lengths", tensors, position, total)
        if shortest < 0 or (expected is not None and end != expected) or count * longest > LARGEST[torch.int64]:
            mistakes.explain_lengths(tensors, total)
        found.append(MeasuredLengths(int(shortest), int(longest), int(end), None))
    return found


def defer_lengths_check(tensors: Sequence[Tensor], total: int | None, known: KnownLengths) -> None:
    """As `check_lengths`, deferred, for lengths on a device."""
    levels = [level for level in tensors if level.numel()]
    numbers = [number for level in levels for number in (*level.aminmax(), level.sum())]

    def verify(found: list[int]) -> None:
        measured: list[tuple[int, int]] = []
        numbers = iter(found)
        for position, level in enumerate(tensors):
            shortest, longest, end = (next(numbers), next(numbers), next(numbers)) if level.numel() else (0, 0, 0)
            expected = mistakes.expected_end("lengths", tensors, position, total)
            many = level.numel() * longest > LARGEST[torch.int64]
            if shortest < 0 or (expected is not None and end != expected) or many:
                mistakes.explain_lengths([level.cpu() for level in tensors], total)
                raise StructureError(
                    "lengths were wrong when they were checked, and have been overwritten since: "
                    f"the shortest was {shortest} and they summed to {end}"
                )
            measured.append((shortest, longest))
        known.check(tensors, measured)

    if numbers:
        defer(numbers, verify)
    else:
        verify([])


# --- lengths supplied by the caller ---


class KnownLengths(NamedTuple):
    """The longest and shortest length of each level, as far as the caller supplied them."""

    longest: Sequence[int | None]
    shortest: Sequence[int | None]

    def check(self, tensors: Sequence[Tensor], measured: Sequence[tuple[int, int]]) -> None:
        """Raises if these differ from the measured (shortest, longest) of every tensor passed in."""
        level = 0
        for tensor, (shortest, longest) in zip(tensors, measured, strict=True):
            # Of the two levels that a 2-D tensor stands for, the outer is known from its shape, and checked there.
            level += tensor.dim() - 1
            check_extreme("max_length", self.longest[level], "longest", longest)
            check_extreme("min_length", self.shortest[level], "shortest", shortest)
            level += 1


NO_KNOWN_LENGTHS = KnownLengths((None,), (None,))
"""A single level, of which the caller supplied nothing."""


def known_of(longest: Any, shortest: Any, levels: int) -> KnownLengths:
    """Lengths supplied for the innermost level or for every level, brought to one per level.

    >>> known_of(5, (1, 0), 2)
    KnownLengths(longest=(None, 5), shortest=(1, 0))
    """
    return KnownLengths(_per_level("max_length", longest, levels), _per_level("min_length", shortest, levels))


def check_extreme(name: str, given: int | None, longest: str, found: int) -> None:
    """Checks a length that the caller supplied against the measured one.

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


def check_counts(counts: Tensor, when: CheckTime, most: int | None) -> None:
    """Checks column counts; `most` is the largest count, if the caller supplied it.

    >>> check_counts(torch.tensor([2, -1]), CheckTime.NOW, None)
    Traceback (most recent call last):
    serrate.errors.StructureError: counts must not be negative: counts[1] = -1
    """

    def verify(found: list[int]) -> None:
        if found[0] < 0:
            mistakes.explain_negative("counts", "counts", counts.cpu())
        if most is not None and most != found[1]:
            raise StructureError(f"max_length={most} was given, but the row with the most columns has {found[1]}")

    if counts.numel():
        run_check(counts.aminmax(), verify, when, "validating counts")


def check_starts(starts: Tensor, sizes: Tensor, extent: int | None, when: CheckTime) -> None:
    """Checks that rows of these sizes are in order, do not overlap, and end within `extent` positions, if that is known.

    >>> check_starts(torch.tensor([0, 2]), torch.tensor([3, 1]), None, CheckTime.NOW)
    Traceback (most recent call last):
    serrate.errors.StructureError: rows must not overlap and must be in order: row 0 ends at 3, row 1 starts at 2
    """
    if starts.shape != sizes.shape:
        raise StructureError(f"starts must have one element per row: {starts.shape[0]} starts, but {sizes.shape[0]} rows")
    if starts.numel() == 0:
        return
    # In int64, where an end that overflows is negative.
    ends = starts.long() + sizes

    def verify(found: list[int]) -> None:
        first, end, least, *between = found
        if first < 0 or least < 0 or (extent is not None and end > extent) or (between and between[0] < 0):
            mistakes.explain_starts(starts.cpu(), ends.cpu(), extent)

    between = () if starts.numel() == 1 else ((starts[1:] - ends[:-1]).amin(),)
    run_check((starts[0].long(), ends[-1], ends.amin(), *between), verify, when, "validating starts")


def check_products(lengths: Tensor, counts: Tensor) -> None:
    """Checks that the total number of elements of rows with columns fits int64.

    >>> check_products(torch.tensor([2**32]), torch.tensor([2**32]))
    Traceback (most recent call last):
    serrate.errors.StructureError: rows with columns must not have more elements than int64 can hold: they have 1.845e+19
    """
    total = float((lengths.double() * counts.double()).sum())
    if total >= 2.0**63:
        raise StructureError(f"rows with columns must not have more elements than int64 can hold: they have {total:.4g}")


def run_check(numbers: Sequence[Tensor], verify: Callable[[list[int]], None], when: CheckTime, why: str) -> None:
    """Verifies a few numbers: now, which copies them to the host, or deferred.

    >>> run_check([torch.tensor(3)], print, CheckTime.NOW, "validating counts")
    [3]
    """
    if when is CheckTime.DEFERRED:
        defer(numbers, verify)
    elif when is CheckTime.NOW:
        verify([int(host_copy(number, why)) for number in numbers])
