"""Torch functions on tiles give torch's numbers, whatever the tile.

In: functions by name. Out: a failure where a tile gives another number, dtype or shape than the plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import serrate
import serrate.language as hl
from serrate.frontend.kernel.vocabulary import ELEMENTWISE, regroup
from tests.language.kinds import TILES, ran

X, Y = torch.linspace(0.1, 2.9, 12).view(4, 3), torch.linspace(-1.5, 1.5, 12).view(4, 3)
WHOLE_X, WHOLE_Y = torch.arange(12).view(4, 3), torch.arange(12).view(4, 3) % 4 + 1

UNARY: list[Callable[..., Any]] = [
    torch.exp, torch.exp2, torch.expm1, torch.log, torch.log2, torch.log1p, torch.sigmoid, torch.tanh, torch.sqrt,
    torch.rsqrt, torch.abs, torch.neg, torch.reciprocal, torch.square, torch.sin, torch.cos, torch.erf, torch.floor,
    torch.tan, torch.atan, torch.asinh, torch.lgamma, torch.digamma, torch.erfc, torch.sinh, torch.frac, torch.sinc,
    torch.ceil, torch.round, torch.trunc, torch.sign, torch.isnan, torch.isinf, torch.isfinite, torch.relu, F.silu, F.gelu,
    F.relu, F.softplus, F.elu, F.leaky_relu, F.mish, F.logsigmoid, F.selu, F.hardtanh, torch.logical_not,
    lambda x: F.gelu(x, approximate="tanh"), lambda x: x.clamp(0.5, 1), lambda x: torch.clamp(x, min=1.0),
    lambda x: x.to(torch.float64), lambda x: x.to(torch.bfloat16).float(), lambda x: x.long(), lambda x: x**2,
    lambda x: 2.0**x, lambda x: 1 / x, lambda x: 1 - x, lambda x: -x, lambda x: ~(x > 1),
    lambda x: (x > 1) & (x < 2) | (x == 0.1), lambda x: abs(x - 1), lambda x: x.masked_fill(x > 1, 0.0), lambda x: x // 0.3,
    lambda x: x % 0.7, lambda x: 5 % x,
]  # fmt: skip
BINARY: list[Callable[..., Any]] = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.pow, torch.atan2, torch.logaddexp,
    torch.hypot, torch.copysign, torch.fmax, torch.xlogy, torch.logaddexp2,
    torch.fmod, torch.remainder, torch.eq, torch.ne, torch.lt, torch.ge, lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.where(x > 1, x, 0.0), lambda x, y: torch.add(x, y, alpha=2), lambda x, y: torch.lerp(x, y, 0.3),
    lambda x, y: torch.clamp(x, min=y), torch.max, torch.min, lambda x, y: x[:, :, None] * y[:, None, :],
    lambda x, y: x.unsqueeze(1) - y.unsqueeze(2),
]  # fmt: skip
WHOLE: list[Callable[..., Any]] = [
    lambda x, y: x @ y.T, lambda x, y: torch.matmul(x.T, y), lambda x, y: torch.mm(x, y.t()),
    lambda x, y: torch.addmm(y @ y.T, x, y.T), lambda x, y: torch.bmm(x[None], y.transpose(0, 1)[None]),
    lambda x, y: torch.baddbmm((x @ y.T)[None], x[None], y.T[None]), lambda x, y: x @ y.sum(0), lambda x, y: x.cumsum(1),
    lambda x, y: torch.cumsum(x, 0), lambda x, y: x.cumprod(1), lambda x, y: torch.softmax(y, 1),
    lambda x, y: y.softmax(dim=0), lambda x, y: torch.logsumexp(y, 1), lambda x, y: y.max(1).values,
    lambda x, y: y.max(1).indices, lambda x, y: torch.min(y, 0)[0], lambda x, y: y.amax(dim=(0, 1)),
    lambda x, y: y.sum(axis=1), lambda x, y: y.mean(0, keepdim=True), lambda x, y: y.argmin(1), lambda x, y: (y > 0).any(1),
    lambda x, y: (y > 0).all(), lambda x, y: x.permute(1, 0), lambda x, y: x.reshape(12), lambda x, y: x.view(2, 2, 3),
    lambda x, y: x.flatten(), lambda x, y: x.mT, lambda x, y: x.reshape(2, 2, 3).sum(2),
    lambda x, y: x.unsqueeze(-1).squeeze(-1), lambda x, y: x[:, None, :].expand(4, 2, 3),
    lambda x, y: torch.zeros_like(x) + y, lambda x, y: torch.full_like(x, 2.0), lambda x, y: x.prod(1),
]  # fmt: skip


@serrate.kernel
def lanes(function: Callable[..., Any], operands: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
    for t, u in hl.tile([4, 3]):
        if out.ndim == 2:
            out[t, u] = function(*[x[t, u] for x in operands])
        else:
            for v in hl.tile(3):
                left, right = operands
                made = function(left[t, u], right[t, v])
                out[t, u, v] = made if made.axes[1] is u.axis else made.transpose(1, 2)
    return out


@pytest.mark.sampled(6)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("function", "operands"), [*((f, (X,)) for f in UNARY), *((f, (X, Y.abs())) for f in BINARY)])
def test_elementwise(function: Callable[..., Any], operands: tuple[torch.Tensor, ...], tile: Any) -> None:
    wanted = function(*operands)
    out = ran(lanes, tile)(function, operands, torch.empty_like(wanted))
    if wanted.dim() == 3:
        assert torch.allclose(out, wanted) or torch.allclose(out, wanted.transpose(1, 2))
    else:
        torch.testing.assert_close(out, wanted, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [lambda i, j: i // j, lambda i, j: i % j, lambda i, j: i & j, lambda i, j: i ^ j, lambda i, j: i << 1, lambda i, j: i / j],
)
def test_whole_numbers(function: Callable[..., Any]) -> None:
    wanted = function(WHOLE_X, WHOLE_Y)
    assert torch.equal(lanes.interpreted(tile=3)(function, (WHOLE_X, WHOLE_Y), torch.empty_like(wanted)), wanted)


@pytest.mark.parametrize("function", WHOLE)
def test_whole_tiles(function: Callable[..., Any]) -> None:
    @serrate.kernel
    def k(out: torch.Tensor) -> torch.Tensor:
        for _ in hl.grid(1):
            x, y = X[hl.arange(4), hl.arange(3)], Y[hl.arange(4), hl.arange(3)]
            found = function(x, y)
            assert tuple(found.shape) == tuple(out.shape) and found.dtype == out.dtype
            hl.store(out, [slice(None)] * out.dim(), found)
        return out

    wanted = function(X, Y)
    torch.testing.assert_close(k.interpreted()(torch.empty_like(wanted)), wanted)


def test_reshaping_keeps_conditions_where_they_belong() -> None:
    """Heads and their dim come out of one dim; the row's condition stays with its position."""

    @serrate.kernel
    def k(jt: serrate.JaggedTensor) -> torch.Tensor:
        out = torch.empty(2, 2)
        for b in hl.tile(2, block_size=2):
            for t in hl.tile(3, block_size=4):
                x = (jt[b, t] + 1).view(2, 4, 2, 3)
                out[b, :] = x.sum(3).sum(1)
        return out

    jt = serrate.JaggedTensor.from_lengths(torch.randn(4, 6), [3, 1])
    wanted = torch.stack([(row + 1).view(-1, 2, 3).sum((0, 2)) for row in jt.unbind()])
    torch.testing.assert_close(k.interpreted()(jt), wanted)


def test_groups_of_dims() -> None:
    assert regroup([2, 0, 3], [0]) == [([0, 1, 2], [0])]
    assert regroup([4, 6], [2, 2, 6]) == [([0], [0, 1]), ([1], [2])]
    assert regroup([1, 5], [5, 1]) == [([0], []), ([1], [0]), ([], [1])]
    assert regroup([2, 5], [2, 5, 1]) == [([0], [0]), ([1], [1]), ([], [2])]
    assert regroup([5], [1, 5]) == [([], [0]), ([0], [1])]


def test_names_are_of_torch() -> None:
    places = (torch, torch.Tensor, F, torch.special)
    assert [
        n
        for n in ELEMENTWISE
        if not any(hasattr(p, n.removeprefix("special_").replace("log_sigmoid", "logsigmoid")) for p in places)
    ] == []
