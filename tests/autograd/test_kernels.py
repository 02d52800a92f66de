"""Kernels with a backward kernel are differentiable functions of torch; without one, gradients are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.errors import CallError, GradientError, StructureMismatch

LENGTHS = [3, 0, 2]


@serrate.kernel
def weighted_sums_backward(jt: Any, weight: Any, out: Any, grad: Any) -> Any:
    """y[b] = weight * the sum of row b: gradients of the rows and of the weight."""
    rows, by_row = torch.empty_like(jt.values), torch.empty_like(out)
    given = JaggedTensor.from_csr(rows, jt.offsets)
    for b in hl.tile(jt.num_rows):
        total = hl.zeros([b])
        for k in hl.tile(jt.max_length):
            total = total + jt[b, k].sum(1)
            given[b, k] = (grad[b] * weight[0])[:, None] + jt[b, k] * 0
        by_row[b] = total * grad[b]
    return given, by_row.sum()[None]


@serrate.kernel(backward=weighted_sums_backward)
def weighted_sums(jt: Any, weight: Any) -> Any:
    out = torch.empty(jt.num_rows)
    for b in hl.tile(jt.num_rows):
        total = hl.zeros([b])
        for k in hl.tile(jt.max_length):
            total = total + jt[b, k].sum(1)
        out[b] = total * weight[0]
    return out


@serrate.kernel
def cubes(x: Any) -> Any:
    out = torch.empty_like(x)
    for t in hl.tile(x.size(0)):
        out[t] = x[t] * x[t] * x[t]
    return out


def by_rows(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.sum() for row in values.split(LENGTHS)]) * weight[0]


def test_gradients_are_those_of_the_backward_kernel() -> None:
    values, weight = torch.arange(5.0).requires_grad_(), torch.tensor([2.0], requires_grad=True)
    upstream = torch.tensor([1.0, 10.0, -3.0])
    result = weighted_sums(JaggedTensor.from_lengths(values, LENGTHS), weight)
    found = torch.autograd.grad(result, (values, weight), upstream)
    expected = by_rows(values, weight)
    torch.testing.assert_close(result, expected)
    for ours, wanted in zip(found, torch.autograd.grad(expected, (values, weight), upstream), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_without_gradients_the_kernel_runs_alone() -> None:
    jt, weight = JaggedTensor.from_lengths(torch.arange(5.0), LENGTHS), torch.tensor([2.0], requires_grad=True)
    assert not weighted_sums(jt, weight.detach()).requires_grad
    with torch.no_grad():
        assert not weighted_sums(jt, weight).requires_grad
    assert weighted_sums(jt, weight=weight).requires_grad
    assert weighted_sums.backward is weighted_sums_backward
    assert "total" in weighted_sums.program(jt, weight.detach())


def test_ragged_results_and_several_of_them() -> None:
    def backward(jt: Any, twice: Any, thrice: Any, one: Any, other: Any) -> Any:
        assert isinstance(one, JaggedTensor) and one.structure is jt.structure
        return one.values * 2 + other.values * 3

    @serrate.kernel(backward=backward)
    def multiples(jt: Any) -> Any:
        twice, thrice = torch.empty_like(jt.values), torch.empty_like(jt.values)
        for t in hl.tile(twice.size(0)):
            twice[t], thrice[t] = jt.values[t] * 2, jt.values[t] * 3
        return jt.with_values(twice), jt.with_values(thrice)

    jt = JaggedTensor.from_lengths(torch.arange(5.0), LENGTHS).requires_grad_()
    twice, thrice = multiples(jt)
    (twice.values.sum() + 10 * thrice.values.sum()).backward()
    assert jt.grad is not None and jt.grad.values.tolist() == [32.0] * 5
    assert jt.grad.structure is jt.structure


def test_gradients_of_gradients_need_a_backward_kernel_of_the_backward_kernel() -> None:
    def second(x: Any, out: Any, grad: Any, found: Any, upstream: Any) -> Any:
        return 6 * x * grad * upstream, None, 3 * x * x * upstream

    @serrate.kernel(backward=second)
    def first(x: Any, out: Any, grad: Any) -> Any:
        found = torch.empty_like(x)
        for t in hl.tile(x.size(0)):
            found[t] = x[t] * x[t] * 3 * grad[t]
        return found

    twice, once = (serrate.kernel(cubes.fn, backward=each) for each in (first, lambda x, out, grad: 3 * x * x * grad))
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(twice, x) and torch.autograd.gradgradcheck(twice, x)
    assert torch.autograd.gradcheck(once, x) and torch.autograd.gradgradcheck(once, x), "functions of torch are recorded too"
    alone = serrate.kernel(cubes.fn, backward=serrate.kernel(first.fn))
    (found,) = torch.autograd.grad(alone(x).sum(), x)
    torch.testing.assert_close(found, 3 * x.detach() ** 2)
    with pytest.raises(GradientError, match="this kernel has no gradient"):
        torch.autograd.grad(alone(x).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda x, out, grad: (grad, grad), "one gradient for each of the 1 floating-point tensors .* got 2"),
        (
            lambda x, out, grad: grad[:1],
            r"gradient 0 of its backward kernel has the shape \[1\], and the values of the argument \[3\]",
        ),
        (lambda x, out, grad: JaggedTensor.from_lengths(grad, [3]), "is ragged, and the argument is not"),
    ],
)
def test_gradients_that_do_not_fit(backward: Any, message: str) -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(GradientError, match=message):
        serrate.kernel(cubes.fn, backward=backward)(x).sum().backward()


def test_calls_that_cannot_be_recorded() -> None:
    @serrate.kernel(backward=lambda xs, grad: grad)
    def nothing(xs: Any) -> None:
        return None

    @serrate.kernel(backward=lambda x, out, grad: grad)
    def itself(x: Any) -> Any:
        return x

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(GradientError, match="argument 0 contains a tensor that requires grad: pass it as an argument"):
        nothing([x])
    with pytest.raises(GradientError, match="must return tensors, got None"):
        nothing(x)
    with pytest.raises(GradientError, match="must return new tensors, not its arguments"):
        itself(x)
    with pytest.raises(CallError, match='backward= is a kernel or a function that returns gradients, or "auto"; got 3'):
        serrate.kernel(backward=3)


def _doubled(jt: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(jt)
    for b in hl.tile(jt.num_rows):
        for k in hl.tile(jt.max_length):
            out[b, k] = jt[b, k] * 2
    return out


@pytest.mark.parametrize("backward", ["auto", lambda jt, out, grad: grad * 2, lambda jt, out, grad: grad.values * 2])
@pytest.mark.parametrize("stored", ["view", "padded"])
def test_arguments_with_gaps(backward: Any, stored: str) -> None:
    kernel = serrate.kernel(_doubled, backward=backward)
    if stored == "view":
        x = JaggedTensor.from_lengths(torch.randn(8), [4, 1, 3]).requires_grad_()
        given, wanted = x[:, 1:], [[0, 2, 2, 2], [0], [0, 2, 2]]
    else:
        x = given = JaggedTensor.from_padded(torch.randn(3, 4), torch.tensor([4, 0, 2]), format="padded").requires_grad_()
        wanted = [[2, 2, 2, 2], [], [2, 2]]
    found = kernel(given)
    assert found.tolist() == (given.detach() * 2).tolist()
    found.sum().backward()
    assert x.grad is not None and x.grad.tolist() == wanted


def test_a_backward_function_must_return_the_rows_of_the_argument() -> None:
    kernel = serrate.kernel(_doubled, backward=lambda jt, out, grad: JaggedTensor.from_lengths(grad.values, [1, 2, 2]))
    x = JaggedTensor.from_lengths(torch.randn(5), [3, 0, 2]).requires_grad_()
    with pytest.raises(StructureMismatch, match=re.escape("[1, 2, 2], not [3, 0, 2]")):
        kernel(x).values.sum().backward()
