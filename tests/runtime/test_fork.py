"""Workers forked after the parent has used its threads can compute: what a DataLoader does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import serrate
from serrate import JaggedTensor, ops


@serrate.jit
def _sums(rows: Any) -> Any:
    return rows.sum(1)


class _Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, k: int) -> torch.Tensor:
        rows = JaggedTensor.from_lengths(torch.ones(4096 * (k + 1), 16), torch.tensor([4096 * k, 0, 4096]))
        result: torch.Tensor = _sums(rows)
        return result


def test_data_loader_workers_compute_after_the_parent_has() -> None:
    assert float(_Rows()[3][0, 0]) == 3 * 4096
    loaded = list(DataLoader(_Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60))
    assert [float(t[0, 0]) for t in loaded] == [4096.0 * k for k in range(6)]
    assert all(float(t[2, 0]) == 4096 for t in loaded)


@serrate.jit
def _moved(rows: Any, table: Any) -> Any:
    keys = ops.argmax(ops.index(table, ops.as_flattened(rows)), 1)
    offsets, permutation = ops.group_by(keys, 3)
    return ops.sum(ops.as_nested(ops.index(ops.as_flattened(rows), permutation), offsets), 1), ops.cumsum(
        ops.cat([rows, rows], 1), 1
    )


class _Tokens(Dataset[list[int]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: int) -> list[int]:
        rows = JaggedTensor.from_lengths(torch.arange(5 + k) % 3, torch.tensor([2 + k, 0, 3]))
        sums, scanned = _moved(rows, torch.eye(3))
        return [*sums.tolist(), int(scanned.values[-1]), *scanned.offsets.tolist()]


def test_routing_and_scans_work_in_workers() -> None:
    alone = [_Tokens()[k] for k in range(4)]
    assert alone[0] == [0, 2, 2, 6, 0, 4, 4, 10]
    loaded = list(DataLoader(_Tokens(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60))
    assert loaded == alone
