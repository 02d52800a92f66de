"""Assignments whose source shares memory with their target: all elements are read before any is written.

In: ragged tensors that are written from shifted or transposed views of themselves. Out: differences from a copy made before.
"""

from __future__ import annotations

import pytest
import torch

from serrate import JaggedTensor


def rows(*features: int) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.arange(5.0 * torch.Size(features).numel()).view(5, *features), [2, 0, 3])


@pytest.mark.parametrize("into", [slice(1, None), slice(None, -1)])
def test_features_shifted(into: slice) -> None:
    source = slice(None, -1) if into.start else slice(1, None)
    x, wanted = rows(4), rows(4).values
    wanted[:, into] = wanted[:, source].clone()
    x[..., into] = x[..., source]
    assert torch.equal(x.values, wanted)


def test_a_plain_view_of_the_values() -> None:
    x, wanted = rows(4), rows(4).values
    wanted[:, 1:] = wanted[:, :-1].clone()
    x[..., 1:] = x.with_values(x.values[:, :-1])
    assert torch.equal(x.values, wanted)


def test_transposed() -> None:
    x = rows(3, 3)
    wanted = x.values.transpose(1, 2).clone()
    x.copy_(x.with_values(x.values.transpose(1, 2)))
    assert torch.equal(x.values, wanted)


def test_positions_shifted_along_rows() -> None:
    x = rows(2)
    wanted = torch.cat([x.values[[0, 0]], x.values[[2, 2, 3]]])
    x[:, 1:] = x[:, :-1]
    assert torch.equal(x.values, wanted)
