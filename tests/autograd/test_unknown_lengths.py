"""Programs and their gradients under the plans for rows whose lengths the host does not know, as on a GPU, interpreted.

The oracle is the reference backend, which is held against differences elsewhere, and knows no plans.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import serrate
from serrate import JaggedTensor, jit
from tests.autograd import cases
from tests.autograd.cases import CASES
from tests.autograd.test_gradients import on_values

pytestmark = [pytest.mark.triton, pytest.mark.sampled(1), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def values_and_gradients(name: str, backend: str) -> list[torch.Tensor]:
    case, (_, given) = CASES[name], on_values(name, "reference")
    wrapped = []
    for argument, x in zip(case.arguments, given, strict=True):
        # Offsets of its own: whether they are equal cannot be seen without reading them.
        with mock.patch.object(cases, "OFFSETS", cases.OFFSETS.clone()):
            wrapped.append(argument.wrapped(x if x.dtype == torch.int64 else x.float()))
    with serrate.no_sync(strict=backend == "triton"):
        result = jit(case.function, backend=backend)(*wrapped)
        values = result.values if isinstance(result, JaggedTensor) else result
        weights = torch.linspace(-1, 2, values.numel()).reshape(values.shape)
        gradients = torch.autograd.grad((values * weights).sum(), [x for x in given if x.requires_grad])
    return [values.detach(), *gradients]


NEED_LENGTHS = (
    "slice",
    "every other position",
    "pad",
    "cat along rows",
    "select a row",
    "rows by number",
    "topk of rows",
    "rows with gaps",
)
"""Results have as many elements as lengths say: these copy them to the host."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in NEED_LENGTHS])
def test_plans_for_unknown_lengths(name: str) -> None:
    for got, want in zip(values_and_gradients(name, "triton"), values_and_gradients(name, "reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
