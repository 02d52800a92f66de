"""Finds the first wrong number in offsets, lengths or starts: slow, and run only after a check has failed.

In: tensors on the host that failed a check. Out: an error that says what is wrong, what was passed and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serrate.errors import StructureError


def explain_offsets(tensors: Sequence[Tensor], total: int | None) -> None:
    """Raises for the first mistake in offsets, outermost first.

    >>> explain_offsets([torch.tensor([1, 4])], 4)
    Traceback (most recent call last):
    serrate.errors.StructureError: offsets must start at 0: offsets[0] = 1
    """
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
        _explain_end("offsets", tensors, level, int(tensor[..., -1].sum()), total)


def explain_lengths(tensors: Sequence[Tensor], total: int | None) -> None:
    """Raises for the first mistake in lengths, outermost first.

    >>> explain_lengths([torch.tensor([2, 1])], 4)
    Traceback (most recent call last):
    serrate.errors.StructureError: lengths must sum to the number of values: they sum to 3, but the values have 4 positions
    """
    for level, tensor in enumerate(tensors):
        of = _named("lengths", tensors, level)
        explain_negative(of, "lengths", tensor)
        # Python ints, because the sum may overflow int64.
        end = sum(tensor.reshape(-1).tolist())
        if end > torch.iinfo(torch.int64).max:
            raise StructureError(f"{of} must not sum to more than int64 can hold: they sum to {end}")
        _explain_end("lengths", tensors, level, end, total)


def explain_negative(of: str, name: str, tensor: Tensor) -> None:
    """Raises if a number is negative.

    >>> explain_negative("counts", "counts", torch.tensor([2, -1]))
    Traceback (most recent call last):
    serrate.errors.StructureError: counts must not be negative: counts[1] = -1
    """
    negative = tensor < 0
    if negative.any():
        index = negative.nonzero()[0].tolist()
        raise StructureError(f"{of} must not be negative: {_index(name, index)} = {int(tensor[tuple(index)])}")


def explain_starts(starts: Tensor, ends: Tensor, extent: int | None) -> None:
    """Raises for the first row that does not start after the row before it, or does not end within `extent` positions.

    >>> explain_starts(torch.tensor([0, 4]), torch.tensor([3, 7]), 6)
    Traceback (most recent call last):
    serrate.errors.StructureError: rows must lie inside the values: row 1 ends at 7, but there are 6 positions
    """
    explain_negative("starts", "starts", starts)
    if (ends < 0).any():
        row = int((ends < 0).nonzero()[0])
        raise StructureError(f"rows must end within int64: row {row} starts at {int(starts[row])}, and its end overflows")
    wrong = ends[:-1] > starts[1:]
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise StructureError(
            f"rows must not overlap and must be in order: row {row} ends at {int(ends[row])}, "
            f"row {row + 1} starts at {int(starts[row + 1])}"
        )
    if extent is not None and int(ends[-1]) > extent:
        raise StructureError(
            f"rows must lie inside the values: row {ends.shape[0] - 1} ends at {int(ends[-1])}, but there are {extent} positions"
        )


def expected_end(name: str, tensors: Sequence[Tensor], level: int, total: int | None) -> int | None:
    """What a level's offsets must end at, or its lengths sum to: the number of rows below it, or of positions in the values.

    >>> expected_end("offsets", [torch.tensor([0, 2]), torch.tensor([0, 4, 9])], 0, 9)
    2
    """
    if level == len(tensors) - 1:
        return total
    # A 2-D tensor stands for two levels, so the level above it counts its rows, not its entries.
    below = tensors[level + 1]
    return below.shape[0] - (1 if name == "offsets" and below.dim() == 1 else 0)


def _explain_end(name: str, tensors: Sequence[Tensor], level: int, end: int, total: int | None) -> None:
    must = expected_end(name, tensors, level, total)
    if must is None or end == must:
        return
    verb = "end at" if name == "offsets" else "sum to"
    innermost = level == len(tensors) - 1
    target = "the number of values" if innermost else f"the number of parts of level {level + 1}"
    what = f"the values have {total} positions" if innermost else f"level {level + 1} has {must} parts"
    raise StructureError(f"{_named(name, tensors, level)} must {verb} {target}: they {verb} {end}, but {what}")


def _named(name: str, tensors: Sequence[Tensor], level: int) -> str:
    return name if len(tensors) == 1 else f"{name} of level {level}"


def _index(name: str, index: Sequence[int]) -> str:
    return f"{name}[{', '.join(map(str, index))}]"
