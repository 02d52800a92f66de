"""Workers forked after the parent has used its threads can compute: what a DataLoader does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import serrate
from serrate import JaggedTensor


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
