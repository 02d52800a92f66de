"""Every function, reduction, scan and library call of the IR has a derivative rule, and the rules are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from serrate import JaggedTensor, jit
from serrate.autograd.derivatives import ELEMENTWISE
from serrate.autograd.reductions import REDUCTIONS
from serrate.autograd.scans import LIBRARY, SCANS
from serrate.ir import reductions
from serrate.ir.values import FUNCTIONS
from serrate.runtime import library


def test_everything_has_an_entry() -> None:
    assert ELEMENTWISE.keys() == FUNCTIONS.keys()
    assert REDUCTIONS.keys() == reductions.REDUCTIONS.keys()
    assert LIBRARY.keys() == library.FUNCTIONS.keys()
    assert SCANS.keys() == {"sum", "prod", "max", "min"}


OF_TORCH = (
    "neg abs exp log sqrt rsqrt reciprocal sigmoid tanh relu erf square sin cos tan atan asin acos sinh cosh asinh acosh atanh "
    "erfc erfinv lgamma digamma log1p expm1 exp2 log2 log10 floor ceil round trunc"
)
ACTIVATIONS = "silu gelu softplus leaky_relu elu relu6 hardtanh selu celu mish logsigmoid"
UNARY = {
    **{name: getattr(torch, name) for name in OF_TORCH.split()},
    **{name: getattr(F, name) for name in ACTIVATIONS.split()},
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamp": lambda x: x.clamp(-0.25, 0.5),
    "square root by pow": lambda x: x**0.5,
    "cube": lambda x: x**3,
    "power": lambda x: x**2.5,
    "where": lambda x: torch.where(x > 0.3, x * 2, -x),
}
ABOVE_ONE = {"acosh"}
OF_TWO = "add sub mul div maximum minimum fmax fmin pow atan2 hypot copysign fmod remainder"
BINARY = {
    **{name: getattr(torch, name) for name in OF_TWO.split()},
    "xlogy": torch.xlogy,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=2),
}


def rows(values: torch.Tensor) -> JaggedTensor:
    return JaggedTensor.from_lengths(values, [2, 0, values.shape[0] - 2])


@pytest.mark.parametrize("name", UNARY)
def test_one_argument(name: str) -> None:
    x = torch.tensor([0.1, 0.2, 0.3, 0.45, 0.62, 0.9], dtype=torch.float64) + (name in ABOVE_ONE)
    check(UNARY[name], x)


@pytest.mark.parametrize("name", BINARY)
def test_two_arguments(name: str) -> None:
    x = torch.tensor([0.1, 1.2, 0.3, 2.45, 0.62, 1.9], dtype=torch.float64)
    check(BINARY[name], x, x.flip(0) + 0.25)


@pytest.mark.parametrize("function", [torch.fmax, torch.fmin])
def test_equal_numbers(function: Callable[..., Any]) -> None:
    x = torch.tensor([0.1, 1.2, 0.3, 2.45, 0.62, 1.9], dtype=torch.float64)
    check(function, x, torch.where(x > 1, x, x.flip(0)))


def check(function: object, *values: torch.Tensor) -> None:
    """torch differentiates the same function of plain tensors."""
    assert callable(function)
    found = []
    for ragged in (False, True):
        given = [v.clone().requires_grad_() for v in values]
        program = jit(function, backend="reference") if ragged else function
        result = program(*(rows(v) if ragged else v for v in given))
        flat = result.values if isinstance(result, JaggedTensor) else result
        first = torch.autograd.grad((flat * flat).sum(), given, create_graph=True, allow_unused=True)
        found.append([torch.zeros_like(x) if g is None else g for x, g in zip(given, first, strict=True)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_equal_extrema_share_a_gradient(reduce: str) -> None:
    x = torch.tensor([[1.0], [1.0], [0.0], [0.0], [0.0]], dtype=torch.float64, requires_grad=True)
    jt = JaggedTensor.from_lengths(x, [4, 1])
    (got,) = torch.autograd.grad(getattr(torch, reduce)(jt, 1).sum(), x)
    (want,) = torch.autograd.grad(sum(getattr(torch, reduce)(row, 0).sum() for row in x.split([4, 1])), x)
    torch.testing.assert_close(got, want)


def test_the_first_of_equal_maxima_gets_all_of_it() -> None:
    x = torch.tensor([[1.0], [1.0], [0.0], [2.0]], requires_grad=True)
    torch.max(JaggedTensor.from_lengths(x, [3, 1]), 1)[0].sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_products_with_zeros(zeros: int) -> None:
    x = torch.tensor([2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    x[:zeros] = 0
    x.requires_grad_()
    (got,) = torch.autograd.grad(JaggedTensor.from_lengths(x, [3, 1]).prod(1).sum(), x)
    (want,) = torch.autograd.grad(sum(row.prod() for row in x.split([3, 1])), x)
    torch.testing.assert_close(got, want)


def test_clamp_at_its_bounds_is_torch_s() -> None:
    x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0], requires_grad=True)
    (got,) = torch.autograd.grad(JaggedTensor.from_lengths(x, [2, 3]).clamp(0.0, 1.0).values.sum(), x)
    (want,) = torch.autograd.grad(x.clamp(0.0, 1.0).sum(), x)
    assert torch.equal(got, want)


AT_EDGES: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(torch, name) for name in ("log1p", "expm1", "sinc")},
    **{name: getattr(F, name) for name in ("elu", "celu", "selu", "softplus", "logsigmoid", "mish")},
    **{name: getattr(F, name) for name in ("relu6", "hardtanh", "hardsigmoid", "hardswish")},
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.detach() * 0 + 0.3, reduction="none"),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, x.detach() * 0 + 1, reduction="none"),
    "logaddexp": lambda x: torch.logaddexp(x, x.detach() * 0),
    "atan2": lambda x: torch.atan2(x, x.detach() * 0),
    "std": lambda x: x.unsqueeze(-1).std(-1, correction=0),  # of one element
}


@pytest.mark.parametrize("name", AT_EDGES)
def test_gradients_where_functions_change_their_form(name: str) -> None:
    """At 0 and at bounds, and where 1 + x or e^x is rounded to 1."""
    function = AT_EDGES[name]
    edges = [0.0, -0.0, 1e-9, -1e-9, 1e-30, 3e-8, -3e-8, 0.1, 0.5, 1.0, 3.0, 6.0, 17.0, 30.0, 80.0]
    signed = edges if name in ("log1p", "expm1") else [*edges, *(-x for x in edges)]
    x, theirs = (torch.tensor(signed, requires_grad=True) for _ in range(2))
    found, wanted = function(rows(x)).values, function(theirs)
    torch.testing.assert_close(found.detach(), wanted.detach())
    found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(x.grad, theirs.grad)


@pytest.mark.parametrize(
    "function",
    [torch.abs, torch.relu, lambda x: torch.sqrt(torch.abs(x)), lambda x: torch.abs(x) * torch.nan],
    ids=["abs", "relu", "sqrt of abs", "abs times nan"],
)
def test_gradients_at_nan_and_zero_are_those_of_torch(function: Any) -> None:
    values = torch.tensor([0.0, torch.nan, 1.0, -2.0, -0.0])
    found, wanted = JaggedTensor.from_lengths(values.clone(), [2, 3]).requires_grad_(), values.clone().requires_grad_()
    function(found).sum().backward()
    function(wanted).sum().backward()
    torch.testing.assert_close(found.grad.values, wanted.grad, rtol=0, atol=0, equal_nan=True)
