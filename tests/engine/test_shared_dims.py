"""Tensors that meet themselves: one dim is indexed twice in one result, and indices that are dense beside rows that are not.

In: gathers whose indices have dims of what they index. Out: failures where they differ from plain torch.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from serrate import JaggedTensor, Structure, jit

LENGTHS = [3, 0, 4, 2]
ROWS = JaggedTensor.from_lengths(torch.randn(9, 4), LENGTHS)
PICKED = ROWS.with_values(torch.randint(0, 4, (9,)))


def test_a_table_looked_up_by_itself() -> None:
    table = torch.randint(0, 4, (5, 4))
    assert torch.equal(jit(lambda t: F.embedding(t, t))(table), F.embedding(table, table))
    assert torch.equal(jit(lambda t: t[:, t])(table[:4]), table[:4][:, table[:4]])


def test_features_picked_by_the_rows_themselves() -> None:
    def pick(x: JaggedTensor) -> JaggedTensor:
        return x[:, :, x.sum(2).long() * 0 + 1]

    found = jit(pick)(ROWS)
    assert str(found.shape) == "(4, r0, 4, r1)"
    assert torch.equal(found.values, ROWS.values[:, torch.ones(9, dtype=torch.long)])


def test_features_picked_by_rows_of_two_levels() -> None:
    words = JaggedTensor(torch.rand(7, 4), Structure.from_lengths(torch.tensor([2, 1]), torch.tensor([1, 4, 2])))
    picked = words.with_values(torch.randint(0, 4, (7,)))
    found = jit(lambda x, i: x[:, :, :, i])(words, picked)
    assert torch.equal(found.values, words.values[:, picked.values])


@pytest.mark.parametrize("run", [lambda f: f, jit], ids=["eager", "jit"])
def test_positions_of_each_row_gathered_by_dense_indices(run) -> None:
    rows = JaggedTensor.from_lengths(torch.randn(9, 4), [3, 1, 3, 2])
    last = torch.tensor([[2, 0], [0, 0], [2, 1], [1, 1]])[:, :, None].expand(4, 2, 4).contiguous()
    found = run(lambda x, i: torch.gather(x, 1, i))(rows, last)
    assert torch.equal(found, torch.stack([row.gather(0, last[k]) for k, row in enumerate(rows.unbind())]))
    with pytest.raises(IndexError, match=r"gather: index\[0\]\[0\]\[0\] = 3 is out of range"):
        run(lambda x, i: torch.gather(x, 1, i))(rows, last + 1)
