"""Gradients of programs against differences (`torch.autograd.gradcheck`): all kinds of statements, with rows of length zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from serrate import JaggedTensor, jit
from tests.autograd.cases import CASES

CHEAP = (
    "a product with a vector, summed over rows",
    "a dense operand longer than the rows",
    "sum across rows",
    "matmul with a weight for each row",
    "softmax over rows",
    "layer norm",
    "embedding",
    "cross entropy",
    "cat along rows",
    "sorted rows",
    "cumprod",
    "rows with gaps",
    "nested: both levels",
)
"""What is also differentiated twice, and compiled, in the default run."""
SLOW = ("attention", "causal attention", "attention of heads", "grouped queries")
"""What takes the reference backend long."""


def sample(*cheap: str) -> list[Any]:
    return [name if name in cheap else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def on_values(name: str, backend: str | None) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The case as a function of plain tensors, and those."""
    case = CASES[name]
    program = jit(case.function, backend=backend)
    generator = torch.Generator().manual_seed(len(name))
    given = [argument.values(generator) for argument in case.arguments]

    def run(*values: torch.Tensor) -> Any:
        found = program(*(a.wrapped(v) for a, v in zip(case.arguments, values, strict=True)))
        return found.values if isinstance(found, JaggedTensor) else found

    return run, given


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sample(*(name for name in CASES if name not in SLOW)))
def test_gradients_are_those_of_differences(name: str) -> None:
    run, given = on_values(name, "reference")
    assert torch.autograd.gradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("name", [pytest.param("attention", marks=pytest.mark.slow), "grouped queries"])
def test_gradients_of_attention(name: str) -> None:
    run, given = on_values(name, "cpp")
    assert torch.autograd.gradcheck(run, given, fast_mode=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sample(*CHEAP))
def test_second_gradients_are_those_of_differences(name: str) -> None:
    run, given = on_values(name, "reference")
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sample(*CHEAP))
@pytest.mark.parametrize("backend", ["cpp", pytest.param("triton", marks=pytest.mark.slow)])
def test_backends_agree_with_the_reference(name: str, backend: str) -> None:
    found = []
    for each in ("reference", backend):
        run, given = on_values(name, each)
        result = run(*given)
        weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).reshape(result.shape)
        found.append(torch.autograd.grad((result * weights).sum(), [x for x in given if x.requires_grad]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("name", ["embedding", "layer norm", pytest.param("attention", marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_threads_or_repetition(name: str) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            run, given = on_values(name, "cpp")
            found.append(torch.autograd.grad(run(*given).square().sum(), [x for x in given if x.requires_grad]))
    finally:
        torch.set_num_threads(before)
    for each in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], each, strict=True))
