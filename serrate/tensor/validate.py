"""What offsets and lengths must be for rows to exist, and the messages for when they are not.

In: offsets or lengths as the user gave them, one tensor per level, outermost first. Out: nothing, or an error that says
what is wrong, what was got and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serrate.errors import CallError, DeviceError, DtypeError, ShapeError, StructureError

_INTEGERS = (torch.int32, torch.int64)


def check_values_form(values: Tensor) -> None:
    """Checks that values are a tensor with a dim that rows can share.

    >>> check_values_form(torch.tensor(1.0))
    Traceback (most recent call last):
    serrate.errors.ShapeError: values must have at least one dim, whose positions the rows share; got a scalar
    """
    if not isinstance(values, Tensor):
        raise CallError(f"values must be a tensor, got {type(values).__name__}")
    if values.dim() == 0:
        raise ShapeError("values must have at least one dim, whose positions the rows share; got a scalar")


def check_form(name: str, tensors: Sequence[Tensor]) -> None:
    """Checks what shapes, dtypes and devices tell; reads no number. `name` is `offsets` or `lengths`.

    >>> check_form("offsets", [torch.tensor([0.0, 2.0])])
    Traceback (most recent call last):
    serrate.errors.DtypeError: offsets must be int32 or int64, got torch.float32: convert them with .to(torch.int64)
    """
    if not tensors:
        raise StructureError(f"a structure needs at least one level of {name}, got none")
    for level, tensor in enumerate(tensors):
        of = _named(name, tensors, level)
        if not isinstance(tensor, Tensor):
            raise CallError(f"{of} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in _INTEGERS:
            raise DtypeError(f"{of} must be int32 or int64, got {tensor.dtype}: convert them with .to(torch.int64)")
        if tensor.dim() not in (1, 2):
            raise StructureError(
                f"{of} must be 1-D, or 2-D with one row for each component, got {tensor.dim()}-D of shape {tuple(tensor.shape)}"
            )
        if name == "offsets" and tensor.shape[-1] == 0:
            raise StructureError(f"{of} must hold at least the 0 that opens the first row, got shape {tuple(tensor.shape)}")
        if tensor.device != tensors[0].device:
            raise DeviceError(f"{of} are on {tensor.device}, but those of level 0 are on {tensors[0].device}: move one of them")


def check_offsets(tensors: Sequence[Tensor], total: int | None) -> int:
    """Checks the numbers in offsets that are on the host; `total` is the number of positions the values have, if known.

    Gives what the innermost offsets end at.

    >>> check_offsets([torch.tensor([0, 4, 9, 7])], 7)
    Traceback (most recent call last):
    serrate.errors.StructureError: offsets must not decrease: offsets[3] = 7 < offsets[2] = 9
    """
    end = 0
    for level, tensor in enumerate(tensors):
        of = _named("offsets", tensors, level)
        starts = tensor[..., 0].reshape(-1)
        if starts.any():
            row = int(starts.nonzero()[0])
            at = f"offsets[{row}, 0]" if tensor.dim() == 2 else "offsets[0]"
            raise StructureError(f"{of} must start at 0: {at} = {int(starts[row])}")
        falls = tensor[..., 1:] < tensor[..., :-1]
        if falls.any():
            *row_of, before = falls.nonzero()[0].tolist()
            here, there = _index("offsets", [*row_of, before + 1]), _index("offsets", [*row_of, before])
            low, high = int(tensor[(*row_of, before + 1)]), int(tensor[(*row_of, before)])
            raise StructureError(f"{of} must not decrease: {here} = {low} < {there} = {high}")
        end = int(tensor[..., -1].sum())
        _check_end(of, tensors, level, end, total)
    return end


def check_lengths(tensors: Sequence[Tensor], total: int | None) -> int:
    """Checks the numbers in lengths that are on the host; `total` is the number of positions the values have, if known.

    Gives what the innermost lengths sum to.

    >>> check_lengths([torch.tensor([2, -1])], 1)
    Traceback (most recent call last):
    serrate.errors.StructureError: lengths must not be negative: lengths[1] = -1
    """
    end = 0
    for level, tensor in enumerate(tensors):
        of = _named("lengths", tensors, level)
        _check_positive(of, "lengths", tensor)
        end = int(tensor.sum())
        _check_end(of, tensors, level, end, total)
    return end


def check_counts(counts: Tensor) -> None:
    """Checks numbers of columns that are on the host.

    >>> check_counts(torch.tensor([2, -1]))
    Traceback (most recent call last):
    serrate.errors.StructureError: counts must not be negative: counts[1] = -1
    """
    _check_positive("counts", "counts", counts)


def check_starts(starts: Tensor, sizes: Tensor, extent: int | None) -> None:
    """Checks that rows of these sizes lie in order, without overlap, within `extent` positions if that is known.

    >>> check_starts(torch.tensor([0, 2]), torch.tensor([3, 1]), None)
    Traceback (most recent call last):
    serrate.errors.StructureError: rows must not overlap and must be in order: row 0 ends at 3, row 1 starts at 2
    """
    if starts.shape != sizes.shape:
        raise StructureError(f"as many starts as rows are needed: {starts.shape[0]} starts, but {sizes.shape[0]} rows")
    _check_positive("starts", "starts", starts)
    ends = starts + sizes
    wrong = ends[:-1] > starts[1:]
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise StructureError(
            f"rows must not overlap and must be in order: row {row} ends at {int(ends[row])}, "
            f"row {row + 1} starts at {int(starts[row + 1])}"
        )
    if extent is not None and ends.numel() and int(ends[-1]) > extent:
        raise StructureError(
            f"rows must lie inside the values: row {ends.shape[0] - 1} ends at {int(ends[-1])}, but there are {extent} positions"
        )


def check_extreme(name: str, given: int | None, longest: str, found: int) -> None:
    """Checks a length the caller supplied as metadata against the one found in the offsets.

    >>> check_extreme("max_length", 5, "longest", 7)
    Traceback (most recent call last):
    serrate.errors.StructureError: max_length=5 was given, but the longest row has length 7
    """
    if given is not None and given != found:
        raise StructureError(f"{name}={given} was given, but the {longest} row has length {found}")


def _check_end(of: str, tensors: Sequence[Tensor], level: int, end: int, total: int | None) -> None:
    # A 2-D tensor stands for two levels, so what follows it is counted by its entries and not by its rows.
    innermost = level == len(tensors) - 1
    if innermost:
        wanted, what = total, f"the values have {total} positions"
    else:
        below = tensors[level + 1]
        entries = below.shape[0] - (1 if of.startswith("offsets") and below.dim() == 1 else 0)
        wanted, what = entries, f"level {level + 1} has {entries} parts"
    if wanted is not None and end != wanted:
        verb, got = ("end at", "they end at") if of.startswith("offsets") else ("sum to", "they sum to")
        target = "the number of values" if innermost else f"the number of parts of level {level + 1}"
        raise StructureError(f"{of} must {verb} {target}: {got} {end}, but {what}")


def _check_positive(of: str, name: str, tensor: Tensor) -> None:
    negative = tensor < 0
    if negative.any():
        index = negative.nonzero()[0].tolist()
        raise StructureError(f"{of} must not be negative: {_index(name, index)} = {int(tensor[tuple(index)])}")


def _named(name: str, tensors: Sequence[Tensor], level: int) -> str:
    return name if len(tensors) == 1 else f"{name} of level {level}"


def _index(name: str, index: Sequence[int]) -> str:
    return f"{name}[{', '.join(map(str, index))}]"
