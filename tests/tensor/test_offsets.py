"""Rows by the number of the row that every position is in, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate import JaggedTensor, no_sync
from serrate.errors import DtypeError, ShapeError, StructureError, SyncError


@given(st.lists(st.sampled_from([0, 0, 1, 2, 5]), max_size=6), st.sampled_from([torch.int32, torch.int64]))
def test_row_ids_and_back(lengths: list[int], dtype: torch.dtype) -> None:
    jt = JaggedTensor.from_lengths(torch.arange(sum(lengths)), lengths)
    back = JaggedTensor.from_row_ids(jt.values, jt.row_ids().to(dtype), len(lengths))
    assert back.values is jt.values
    assert back.lengths.tolist() == lengths
    assert back.offsets.dtype is dtype
    while lengths and not lengths[-1]:
        lengths.pop()
    assert JaggedTensor.from_row_ids(jt.values, jt.row_ids().tolist()).lengths.tolist() == lengths


@pytest.mark.parametrize(
    ("row_ids", "num_rows", "kind", "message"),
    [
        ([0, 2, 1], None, StructureError, r"must not decrease: row_ids\[2\] = 1 < row_ids\[1\] = 2; sort them"),
        ([-1, 0, 1], None, StructureError, r"must not be negative: row_ids\[0\] = -1"),
        ([0, 1, 3], 3, StructureError, r"must be below num_rows=3: row_ids\[2\] = 3"),
        ([0, 1], None, ShapeError, r"one element for each of 3 positions, got shape \(2,\)"),
        ([[0], [1], [2]], None, ShapeError, r"must be 1-D, one number for each position, got shape \(3, 1\)"),
        ([0.0, 1.0, 2.0], None, DtypeError, r"must be int32 or int64, got torch\.float32"),
    ],
)
def test_mistakes(row_ids: list[int], num_rows: int | None, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        JaggedTensor.from_row_ids(torch.arange(3), row_ids, num_rows)


def test_the_number_of_rows_is_a_host_fact() -> None:
    values, row_ids = torch.arange(3), torch.tensor([0, 0, 1])
    with no_sync(strict=True):
        with pytest.raises(SyncError, match=r"^from_row_ids needs"):
            JaggedTensor.from_row_ids(values, row_ids)
        jt = JaggedTensor.from_row_ids(values, row_ids, num_rows=2)
    assert jt.tolist() == [[0, 1], [2]]
