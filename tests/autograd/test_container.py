"""Operations of the container carry gradients: moving elements moves their gradients back, against rows of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from serrate import JaggedTensor

LENGTHS = [3, 0, 2]
Rows = Sequence[Tensor]

CASES: dict[str, tuple[Callable[[JaggedTensor], JaggedTensor | Tensor], Callable[[Rows], Sequence[Tensor]]]] = {
    "a row": (lambda x: x[0], lambda rows: [rows[0]]),
    "rows by slice": (lambda x: x[1:], lambda rows: rows[1:]),
    "rows by number": (lambda x: x[torch.tensor([2, 0, 2])], lambda rows: [rows[2], rows[0], rows[2]]),
    "positions": (lambda x: x[:, 1:].contiguous(), lambda rows: [row[1:] for row in rows]),
    "unbound rows": (lambda x: x.unbind()[2], lambda rows: [rows[2]]),
    "cat": (lambda x: torch.cat([x, x * 2]), lambda rows: [*rows, *(row * 2 for row in rows)]),
    "split": (lambda x: x.split(2)[0], lambda rows: rows[:2]),
    "to_padded": (lambda x: x.to_padded(), lambda rows: rows),
    "to_padded and back": (lambda x: JaggedTensor.from_padded(x.to_padded(), torch.tensor(LENGTHS)), lambda rows: rows),
    "permute": (lambda x: x.transpose(1, 2).transpose(1, 2).contiguous(), lambda rows: rows),
    "dtype": (lambda x: x.double(), lambda rows: rows),
    "a NestedTensor and back": (lambda x: JaggedTensor.from_torch_nested(x.to_torch_nested()), lambda rows: rows),
    "another format": (lambda x: x.to_format("padded").contiguous(), lambda rows: rows),
    "a mask": (lambda x: x[(x > 0).any(dim=-1)], lambda rows: [row[(row > 0).any(-1)] for row in rows]),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_move_back(name: str) -> None:
    ragged, plain = CASES[name]
    values = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = ragged(JaggedTensor.from_lengths(values, LENGTHS))
    moved = found.values if isinstance(found, JaggedTensor) else found
    (got,) = torch.autograd.grad(moved.square().sum(), values)
    (want,) = torch.autograd.grad(sum(row.square().sum() for row in plain(values.split(LENGTHS))), values)
    torch.testing.assert_close(got, want)
