"""Rows by the number of the row that every position is in, as graph and ragged libraries give them.

In: one number for each position, which do not decrease. Out: the offsets of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serrate.errors import DtypeError, ShapeError, StructureError
from serrate.tensor.sync import host_copy, on_host


def offsets_of(row_ids: Tensor, num_rows: int | None) -> Tensor:
    """Where each row starts and the last one ends; without `num_rows` the last number says how many rows there are.

    Numbers are looked at on a CPU only; on a device those below 0 or past the rows make offsets that do not fit the values.

    >>> offsets_of(torch.tensor([0, 0, 2]), num_rows=4)
    tensor([0, 2, 2, 3, 3])
    """
    if row_ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"row_ids must be int32 or int64, got {row_ids.dtype}: convert them with .to(torch.int64)")
    if row_ids.dim() != 1:
        raise ShapeError(f"row_ids must be 1-D, one number for each position, got shape {tuple(row_ids.shape)}")
    if on_host(row_ids):
        _check(row_ids, num_rows)
    if num_rows is None:
        num_rows = int(host_copy(row_ids[-1:], "from_row_ids").sum()) + 1 if row_ids.shape[0] else 0
    rows = torch.arange(num_rows + 1, dtype=row_ids.dtype, device=row_ids.device)
    return torch.searchsorted(row_ids.contiguous(), rows, out_int32=row_ids.dtype is torch.int32)


def _check(row_ids: Tensor, num_rows: int | None) -> None:
    falls = row_ids[1:] < row_ids[:-1]
    if falls.any():
        at = int(falls.nonzero()[0]) + 1
        raise StructureError(
            f"row_ids must not decrease: row_ids[{at}] = {int(row_ids[at])} < row_ids[{at - 1}] = {int(row_ids[at - 1])}; "
            "sort them, and the values with them"
        )
    if row_ids.shape[0] and row_ids[0] < 0:
        raise StructureError(f"row_ids must not be negative: row_ids[0] = {int(row_ids[0])}")
    if row_ids.shape[0] and num_rows is not None and row_ids[-1] >= num_rows:
        raise StructureError(f"row_ids must be below num_rows={num_rows}: row_ids[{row_ids.shape[0] - 1}] = {int(row_ids[-1])}")
