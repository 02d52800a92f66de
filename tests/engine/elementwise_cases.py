"""The smaller elementwise functions as cases: divisions, roundings, classifications, logarithms, activations.

In: nothing. Out: `ELEMENTWISE` and `SPECIAL_ELEMENTWISE` (infinities and NaN), by name, and `EDGES`: functions of torch's with
operands at which formulas that are right elsewhere go wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serrate.frontend import ops
from tests.engine.cases import _named
from tests.engine.oracle import FLOATS, INTEGERS, NUMBERS, PER_COMPONENT, ROWS, Case, Features

SMALL: tuple[Features, ...] = ((5,), (), (1,), (3, 4), (None,))
ALL = (*NUMBERS, torch.bool)


def floor_divide(a: Tensor, b: Any) -> Tensor:
    """As torch, but an integer divided by 0 gives 0."""
    b = torch.as_tensor(b)
    if a.dtype.is_floating_point or b.dtype.is_floating_point:
        return torch.floor_divide(a, b)
    return torch.where(b == 0, 0, torch.floor_divide(a, torch.where(b == 0, 1, b)))


def remainder(a: Tensor, b: Any) -> Tensor:
    """As torch, but an integer divided by 0 gives 0."""
    b = torch.as_tensor(b)
    if a.dtype.is_floating_point or b.dtype.is_floating_point:
        return torch.remainder(a, b)
    return torch.where(b == 0, 0, torch.remainder(a, torch.where(b == 0, 1, b)))


def _unary() -> list[Case]:
    anything = ("sin", "cos", "expm1", "exp2", "sign", "isinf", "isfinite")
    cases = [Case(name, getattr(ops, name), getattr(torch, name), dtypes=NUMBERS) for name in anything]
    cases += [Case(name, getattr(ops, name), getattr(torch, name), dtypes=NUMBERS) for name in ("trunc", "round")]
    cases += [
        Case(name, getattr(ops, name), getattr(torch, name), dtypes=NUMBERS, data="positive")
        for name in ("log1p", "log2", "log10")
    ]
    return [
        *cases,
        Case("softplus", ops.softplus, F.softplus),
        Case("softplus_beta", lambda x: ops.softplus(x, 2.0, 3.0), lambda r: F.softplus(r, 2.0, 3.0)),
        Case("leaky_relu", ops.leaky_relu, F.leaky_relu),
        Case("leaky_relu_steep", lambda x: ops.leaky_relu(x, 0.3), lambda r: F.leaky_relu(r, 0.3)),
        Case("elu", ops.elu, F.elu),
        Case("elu_alpha", lambda x: ops.elu(x, 0.5), lambda r: F.elu(r, 0.5)),
    ]


def _binary() -> list[Case]:
    return [
        Case("floor_divide_rows", ops.floor_divide, floor_divide, dtypes=NUMBERS, extras=(ROWS,), data="positive"),
        Case("floor_divide_integers", ops.floor_divide, floor_divide, dtypes=INTEGERS, extras=(ROWS,)),
        Case("floor_divide_huge", ops.floor_divide, floor_divide, dtypes=INTEGERS, extras=(ROWS,), data="huge"),
        Case("floor_divide_number", lambda x: ops.floor_divide(x, 2), lambda r: r // 2, dtypes=NUMBERS),
        Case("floor_divide_negative", lambda x: ops.floor_divide(x, -3), lambda r: r // -3, dtypes=NUMBERS),
        Case("floor_divide_zero", lambda x: ops.floor_divide(x, 0), lambda r: floor_divide(r, 0), dtypes=INTEGERS),
        Case("remainder_rows", ops.remainder, remainder, dtypes=NUMBERS, extras=(ROWS,), data="positive", slack=4.0),
        Case("remainder_integers", ops.remainder, remainder, dtypes=INTEGERS, extras=(ROWS,)),
        Case("remainder_huge", ops.remainder, remainder, dtypes=INTEGERS, extras=(ROWS,), data="huge"),
        Case("remainder_number", lambda x: ops.remainder(x, 3), lambda r: r % 3, dtypes=NUMBERS, slack=4.0),
        Case("remainder_negative", lambda x: ops.remainder(x, -2), lambda r: r % -2, dtypes=NUMBERS, slack=4.0),
        Case("lerp_rows", ops.lerp, torch.lerp, extras=(ROWS, ROWS)),
        Case("lerp_number", lambda x, y: ops.lerp(x, y, 0.3), lambda r, y: torch.lerp(r, y, 0.3), extras=(PER_COMPONENT,)),
        Case("addcmul", ops.addcmul, torch.addcmul, dtypes=NUMBERS, extras=(ROWS, PER_COMPONENT)),
        Case(
            "addcmul_value",
            lambda x, a, b: ops.addcmul(x, a, b, 3),
            lambda r, a, b: torch.addcmul(r, a, b, value=3),
            dtypes=NUMBERS,
            extras=(ROWS, ROWS),
            slack=2.0,
        ),
        Case("logical_xor", ops.logical_xor, torch.logical_xor, dtypes=ALL, extras=(ROWS,)),
    ]


def _special() -> list[Case]:
    names = "sin cos expm1 exp2 sign isinf isfinite trunc round log1p log2 log10"
    cases = [Case(name, getattr(ops, name), getattr(torch, name)) for name in names.split()]
    cases += [c for c in _unary() if "elu" in c.name or "softplus" in c.name]
    cases += [
        Case("floor_divide", lambda x: ops.floor_divide(x, 2.0), lambda r: torch.floor_divide(r, 2.0)),
        Case("remainder", lambda x: ops.remainder(x, 2.0), lambda r: torch.remainder(r, 2.0)),
        Case("lerp", ops.lerp, torch.lerp, extras=(ROWS, ROWS)),
    ]
    return [replace(case, data="special", dtypes=FLOATS) for case in cases]


def _shaped(cases: list[Case]) -> list[Case]:
    return [replace(case, features=SMALL) for case in cases]


ELEMENTWISE = _named(_shaped(_unary()), _shaped(_binary()))
SPECIAL_ELEMENTWISE = _named(_shaped(_special()))

_INFINITY, _NAN = float("inf"), float("nan")
_AWKWARD = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 8388609.0, -8388609.0, 1e10, -1e10, 1e-10, -1e-10, 1e-30, -1e-30]
_WIDE = [*_AWKWARD, 88.0, -88.0, 100.0, -100.0, 3e38, -3e38, 127.0, -149.0, -1.0, _INFINITY, -_INFINITY, _NAN]
EDGES: dict[str, tuple[Any, Any, tuple[list[float], ...]]] = {
    name: (getattr(ops, name), getattr(torch, name), (_WIDE,))
    for name in "sign trunc round isinf isfinite log1p expm1 exp2 log2 log10".split()  # noqa: SIM905
}
EDGES |= {
    "sin": (ops.sin, torch.sin, ([*_AWKWARD[:10], 1e5, -1e5],)),
    "cos": (ops.cos, torch.cos, ([*_AWKWARD[:10], 1e5, -1e5],)),
    "softplus": (ops.softplus, F.softplus, (_WIDE,)),
    "elu": (ops.elu, F.elu, (_WIDE,)),
    "leaky_relu": (ops.leaky_relu, F.leaky_relu, (_WIDE,)),
    # 0.1 is a little more than a tenth, so that it is in 1.0 nine times and a rest.
    "floor_divide": (
        ops.floor_divide,
        torch.floor_divide,
        ([1.0, 6.0, -1.0, 5.0, -5.0, 0.0, 5.0], [0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.3]),
    ),
    "floor_divide_by_infinity": (ops.floor_divide, torch.floor_divide, ([5.0, -5.0, 0.0], [_INFINITY] * 3)),
    "remainder": (ops.remainder, torch.remainder, ([1.0, 6.0, -1.0, 5.0, -5.0, 0.0], [0.1, 0.1, 0.1, 0.0, 0.0, 0.0])),
    "remainder_of_much": (ops.remainder, torch.remainder, ([1e10, -1e10, 1e20, 123456789.0], [3.0, 3.0, 7.0, 1.1])),
    "remainder_by_infinity": (ops.remainder, torch.remainder, ([5.0, -5.0, 0.0, 5.0], [_INFINITY] * 3 + [-_INFINITY])),
    "lerp_to_the_end": (
        lambda a, b: ops.lerp(a, b, 1.0),
        lambda a, b: torch.lerp(a, b, 1.0),
        ([1e8, -1e8, 1e30], [1.0, 3.0, 2.0]),
    ),
}
