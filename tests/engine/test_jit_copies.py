"""Traced functions and kernels are copied and pickled like functions; copies of modules that hold them are independent."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import serrate
import serrate.language as hl
from serrate import JaggedTensor

ROWS = JaggedTensor.from_lengths(torch.arange(24.0).view(6, 4), [2, 0, 4])


@serrate.jit
def activated(x: Any, weight: Any) -> Any:
    return torch.relu(x @ weight)


@serrate.kernel
def doubled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        out[tile] = x[tile] * 2
    return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.inner = nn.Linear(4, 4)
        self.function, self.module, self.method, self.kernel = activated, serrate.jit(self.inner), serrate.jit(self.own), doubled

    def own(self, x: Any) -> Any:
        return x * self.weight.sum(0)

    @serrate.jit
    def decorated(self, x: Any) -> Any:
        return x * self.weight[0]

    def forward(self, x: JaggedTensor) -> Any:
        every = (self.function(x, self.weight), self.module(x), self.method(x), self.decorated(x))
        return torch.cat([*(each.values for each in every), self.kernel(x.values)])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_of_a_module_are_independent(duplicate: Any) -> None:
    layer = Layer()
    wanted = layer(ROWS)  # compiled programs cannot be copied
    made = duplicate(layer)
    torch.testing.assert_close(made(ROWS), wanted)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert made(ROWS)[:24].count_nonzero() == 0
    torch.testing.assert_close(layer(ROWS), wanted)


def test_functions_of_a_module_are_pickled_by_name() -> None:
    for each in (activated, doubled, Layer.decorated):
        assert pickle.loads(pickle.dumps(each)) is each and copy.deepcopy(each) is each


def test_a_traced_module_says_where_its_parameters_are() -> None:
    traced = serrate.jit(nn.Linear(2, 2))
    with pytest.raises(AttributeError, match=r"no attribute 'parameters', but its module has one: write jitted\.fn\.p"):
        traced.parameters()
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = traced.nothing
