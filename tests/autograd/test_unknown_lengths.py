"""Programs and their gradients under the plans for rows whose lengths the host does not know, as on a GPU, interpreted.

The oracle is the reference backend, which is held against differences elsewhere, and knows no plans.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from serrate import JaggedTensor, engine, jit
from tests.autograd.cases import CASES
from tests.autograd.test_gradients import on_values

pytestmark = [pytest.mark.triton, pytest.mark.sampled(2), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
WORKERS = 132


@pytest.fixture(autouse=True)
def unknown_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine.choose

    def choose(rows: Any, target: Any, _: int, **options: Any) -> Any:
        known = rows if rows is None or not target.many_workers else dataclasses.replace(rows, longest=None)
        return plain(known, target, WORKERS, **options)

    monkeypatch.setattr(engine, "choose", choose)


def values_and_gradients(name: str, backend: str) -> list[torch.Tensor]:
    case, (_, given) = CASES[name], on_values(name, "reference")
    wrapped = [a.wrapped(x if x.dtype == torch.int64 else x.float()) for a, x in zip(case.arguments, given, strict=True)]
    result = jit(case.function, backend=backend)(*wrapped)
    values = result.values if isinstance(result, JaggedTensor) else result
    weights = torch.linspace(-1, 2, values.numel()).reshape(values.shape)
    gradients = torch.autograd.grad((values * weights).sum(), [x for x in given if x.requires_grad])
    return [values.detach(), *gradients]


@pytest.mark.parametrize("name", CASES)
def test_plans_for_unknown_lengths(name: str) -> None:
    for got, want in zip(values_and_gradients(name, "triton"), values_and_gradients(name, "reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
