"""The operations of the front end as cases: how each is recorded, and one row of it by plain torch.

In: nothing. Out: `CASES`, `NESTED_CASES` (two levels) and `SPECIALS` (rows of infinities and NaN), by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serrate.frontend import ops
from tests.engine.oracle import (
    ANY,
    DENSE,
    FEATURE,
    FLOATS,
    INTEGERS,
    NUMBERS,
    PER_COMPONENT,
    ROWS,
    VECTOR,
    WIDE,
    Case,
    Extra,
)

Reducer = Callable[[Tensor, tuple[int, ...]], Tensor]


# --- reductions of one row, empty ones included ------------------------------------------------------------------------


def _each(function: Callable[[Tensor, int], Tensor]) -> Reducer:
    def run(x: Tensor, dims: tuple[int, ...]) -> Tensor:
        for d in sorted((d % x.dim() for d in dims), reverse=True):
            x = function(x, d)
        return x

    return run


def _extremum(function: Any, lowest: bool) -> Reducer:
    def run(x: Tensor, dims: tuple[int, ...]) -> Tensor:
        if all(x.shape[d] for d in dims):
            return function(x, dims)
        if x.dtype == torch.bool:
            identity: Any = not lowest
        elif x.dtype.is_floating_point:
            identity = float("-inf") if lowest else float("inf")
        else:
            identity = torch.iinfo(x.dtype).min if lowest else torch.iinfo(x.dtype).max
        kept = [n for k, n in enumerate(x.shape) if k not in {d % x.dim() for d in dims}]
        return torch.full(kept, identity, dtype=x.dtype)

    return run


def _var(x: Tensor, dims: tuple[int, ...], correction: int = 1) -> Tensor:
    mean = x.mean(dims, keepdim=True)
    count = 1
    for d in dims:
        count *= x.shape[d]
    return ((x - mean) ** 2).sum(dims) / max(count - correction, 0)


REDUCERS: dict[str, Reducer] = {
    "sum": lambda x, dims: x.sum(dims),
    "prod": _each(torch.prod),
    "mean": lambda x, dims: x.mean(dims),
    "amax": _extremum(torch.amax, True),
    "amin": _extremum(torch.amin, False),
    "any": _each(torch.any),
    "all": _each(torch.all),
    "var": _var,
    "logsumexp": lambda x, dims: torch.logsumexp(x, dims),
}
_DTYPES = {"mean": FLOATS, "var": FLOATS, "logsumexp": FLOATS}
_DATA = {"prod": "near_one", "all": "mostly_true", "var": "far"}


def _softmax(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    e = torch.exp(x - _extremum(torch.amax, True)(x, dims).reshape(_kept(x, dims))) if x.numel() else x
    return e / e.sum(dims, keepdim=True)


def _kept(x: Tensor, dims: tuple[int, ...]) -> list[int]:
    return [1 if k in {d % x.dim() for d in dims} else n for k, n in enumerate(x.shape)]


def _layer_norm(x: Tensor, dims: tuple[int, ...], eps: float = 1e-5) -> Tensor:
    return (x - x.mean(dims, keepdim=True)) / torch.sqrt(_var(x, dims, 0).reshape(_kept(x, dims)) + eps)


def _rms_norm(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dims, keepdim=True) + eps)


# --- the cases ---------------------------------------------------------------------------------------------------------


def _unary_cases() -> list[Case]:
    anything = {"neg": torch.neg, "abs": torch.abs, "relu": torch.relu, "square": torch.square, "isnan": torch.isnan}
    anything |= {"floor": torch.floor, "ceil": torch.ceil, "logical_not": torch.logical_not}
    floating = {"exp": torch.exp, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "erf": torch.erf}
    positive = {"log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal}
    cases = [Case(n, getattr(ops, n), f, dtypes=NUMBERS) for n, f in {**anything, **floating}.items()]
    cases += [Case(n, getattr(ops, n), f, dtypes=NUMBERS, data="positive") for n, f in positive.items()]
    cases += [
        Case("silu", ops.silu, F.silu),
        Case("gelu", ops.gelu, F.gelu),
        Case("gelu_tanh", lambda x: ops.gelu(x, "tanh"), lambda r: F.gelu(r, approximate="tanh")),
        Case("clamp", lambda x: ops.clamp(x, -0.5, 1), lambda r: r.clamp(-0.5, 1), dtypes=NUMBERS),
        Case("set", ops.set, lambda r: r, dtypes=(*NUMBERS, torch.bool)),
        Case("bool_not", ops.logical_not, torch.logical_not, dtypes=(torch.bool,)),
    ]
    for to in (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool):
        cast = functools.partial(ops.cast, dtype=to)
        name = f"cast_{str(to).removeprefix('torch.')}"
        cases.append(Case(name, cast, lambda r, to=to: r.to(to), dtypes=(*NUMBERS, torch.bool), own_dtype=True))
    return cases


def _binary_cases() -> list[Case]:
    pairs = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum, "minimum": torch.minimum}
    comparisons = {n: getattr(torch, n) for n in ("lt", "le", "gt", "ge", "eq", "ne")}
    both = {**pairs, **comparisons}
    cases = [Case(f"{n}_rows", getattr(ops, n), f, dtypes=NUMBERS, extras=(ROWS,)) for n, f in both.items()]
    cases += [Case(f"{n}_feature", getattr(ops, n), f, dtypes=NUMBERS, extras=(FEATURE,)) for n, f in pairs.items()]
    cases += [Case(f"{n}_component", getattr(ops, n), f, dtypes=NUMBERS, extras=(PER_COMPONENT,)) for n, f in pairs.items()]
    cases += [Case(f"{n}_dense", getattr(ops, n), f, dtypes=NUMBERS, extras=(DENSE,)) for n, f in pairs.items()]
    for name, extra in {"feature": FEATURE, "component": PER_COMPONENT, "dense": DENSE, "rows": ROWS}.items():
        cases.append(Case(f"rsub_{name}", lambda x, e: ops.sub(e, x), lambda r, e: e - r, dtypes=NUMBERS, extras=(extra,)))
    one = Extra((1, "L", "F"))
    cases += [
        Case("div_rows", ops.div, torch.div, dtypes=NUMBERS, extras=(ROWS,), data="positive"),
        Case("div_scalar", lambda x: ops.div(x, 4), lambda r: r / 4, dtypes=NUMBERS),
        Case("scalar_div", lambda x: ops.div(1.5, x), lambda r: 1.5 / r, dtypes=NUMBERS, data="positive"),
        Case("add_scalar", lambda x: ops.add(x, 2), lambda r: r + 2, dtypes=NUMBERS),
        Case("scalar_sub", lambda x: ops.sub(2.5, x), lambda r: 2.5 - r, dtypes=NUMBERS),
        Case("bool_add_int", lambda x: ops.add(x, 1), lambda r: r + 1, dtypes=(torch.bool,)),
        Case("lt_scalar", lambda x: ops.lt(x, 0.5), lambda r: r < 0.5, dtypes=NUMBERS),
        Case("pow_scalar", lambda x: ops.pow(x, 3), lambda r: r**3, dtypes=NUMBERS),
        Case("pow_rows", ops.pow, torch.pow, dtypes=FLOATS, extras=(ROWS,), data="positive"),
        Case("operators", lambda x, y: (x + 1.0) * y - x / 2.0, lambda r, y: (r + 1.0) * y - r / 2.0, extras=(ROWS,)),
        Case("shared_dense", ops.add, torch.add, extras=(one,)),
        Case("where_scalar", lambda x: ops.where(ops.gt(x, 0), x, -1.0), lambda r: torch.where(r > 0, r, -1.0), dtypes=NUMBERS),
        Case(
            "where_scalars",
            lambda x: ops.where(ops.gt(x, 0), 1, 0),
            lambda r: torch.where(r > 0, 1, 0),
            dtypes=NUMBERS,
        ),
        Case(
            "where_component",
            lambda x, e: ops.where(ops.gt(x, e), x, e),
            lambda r, e: torch.where(r > e, r, e.expand_as(r)),
            dtypes=NUMBERS,
            extras=(PER_COMPONENT,),
        ),
        Case(
            "logic",
            lambda x, y: ops.logical_or(ops.logical_and(x, y), ops.logical_not(x)),
            lambda r, y: torch.logical_or(torch.logical_and(r, y), torch.logical_not(r)),
            dtypes=(torch.bool, *NUMBERS),
            extras=(ROWS,),
        ),
    ]
    return cases


def _reduction_cases() -> list[Case]:
    cases = []
    for name, reduce in REDUCERS.items():
        dtypes = _DTYPES.get(name, (*NUMBERS, torch.bool))
        data = _DATA.get(name, "normal")
        operation = getattr(ops, name)

        def case(
            over: str,
            dims: tuple[int, ...],
            kind: str,
            features: Any,
            *,
            name: str = name,
            reduce: Reducer = reduce,
            dtypes: Any = dtypes,
            data: str = data,
            operation: Any = operation,
        ) -> Case:
            # A row has no component dim: its dim 0 is the ragged one.
            own = tuple(d - 1 if d > 0 else d for d in dims)
            return Case(
                f"{name}_{over}", lambda x: operation(x, dims), lambda r: reduce(r, own), kind, features, dtypes, data=data
            )

        cases += [
            case("rows", (1,), "component", ANY),
            case("features", (-1,), "ragged", WIDE),
            case("both", (1, -1), "component", WIDE),
        ]
        if name != "logsumexp":
            cases.append(
                Case(
                    f"{name}_everything",
                    operation,
                    lambda r, reduce=reduce: reduce(r, tuple(range(r.dim()))),
                    "whole",
                    ANY,
                    dtypes,
                    data=data,
                )
            )
        cases.append(
            Case(
                f"{name}_components",
                lambda x, operation=operation: operation(x, (0, 1)),
                lambda r, reduce=reduce: reduce(r, (0,)),
                "whole",
                VECTOR,
                dtypes,
                data=data,
            )
        )
    cases += [
        Case("var_population", lambda x: ops.var(x, 1, 0), lambda r: _var(r, (0,), 0), "component"),
        Case("sum_keepdim", lambda x: ops.sum(x, 1, keepdim=True), lambda r: r.sum(0, keepdim=True), "component", dtypes=NUMBERS),
        Case("sum_keepdim_back", lambda x: ops.sub(x, ops.mean(x, 1, keepdim=True)), lambda r: r - r.mean(0, keepdim=True)),
        Case("sum_square", lambda x: ops.sum(ops.square(x), 1), lambda r: (r * r).sum(0), "component", dtypes=NUMBERS),
        Case("max_of_sums", lambda x: ops.amax(ops.sum(x, -1), 1), _max_of_sums, "component", WIDE),
        Case("sum_of_max", lambda x: ops.sum(ops.amax(x, 1), -1), lambda r: REDUCERS["amax"](r, (0,)).sum(-1), "component", WIDE),
    ]
    return cases


def _max_of_sums(r: Tensor) -> Tensor:
    return REDUCERS["amax"](r.sum(-1), (0,))


def _wrapping_cases() -> list[Case]:
    """Integers that overflow: they wrap in torch, and must be computed so that they may."""
    unary = {"neg": torch.neg, "abs": torch.abs, "square": torch.square}
    binary = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
    cases = [Case(n, getattr(ops, n), f) for n, f in unary.items()]
    cases += [Case(n, getattr(ops, n), f, extras=(ROWS,)) for n, f in binary.items()]
    cases += [
        Case("pow", lambda x: ops.pow(x, 5), lambda r: r**5),
        Case("sum", lambda x: ops.sum(x, 1), lambda r: r.sum(0), "component"),
        Case("prod", lambda x: ops.prod(x, 1), lambda r: r.prod(0), "component"),
        Case("sum_features", lambda x: ops.sum(x, -1), lambda r: r.sum(-1), features=VECTOR),
    ]
    return [replace(case, name=f"{case.name}_wrapping", dtypes=INTEGERS, data="huge") for case in cases]


def _norm_cases() -> list[Case]:
    weight, bias = FEATURE, FEATURE
    cases = [
        Case("softmax_rows", lambda x: ops.softmax(x, 1), lambda r: torch.softmax(r, 0)),
        Case("softmax_features", lambda x: ops.softmax(x, -1), lambda r: torch.softmax(r, -1), features=WIDE),
        Case("softmax_both", lambda x: ops.softmax(x, (1, -1)), lambda r: _softmax(r, (0, -1)), features=WIDE),
        Case(
            "softmax_dtype",
            lambda x: ops.softmax(x, 1, torch.float32),
            lambda r: torch.softmax(r, 0, torch.float32),
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
        ),
        Case("log_softmax_rows", lambda x: ops.log_softmax(x, 1), lambda r: torch.log_softmax(r, 0)),
        Case("log_softmax_features", lambda x: ops.log_softmax(x, -1), lambda r: torch.log_softmax(r, -1), features=WIDE),
        Case("layer_norm_features", ops.layer_norm, lambda r: _layer_norm(r, (-1,)), features=WIDE, data="shifted"),
        Case("layer_norm_rows", lambda x: ops.layer_norm(x, 1), lambda r: _layer_norm(r, (0,)), data="shifted"),
        Case("layer_norm_both", lambda x: ops.layer_norm(x, (1, -1)), lambda r: _layer_norm(r, (0, -1)), features=WIDE),
        Case(
            "layer_norm_affine",
            lambda x, w, b: ops.layer_norm(x, -1, w, b),
            lambda r, w, b: _layer_norm(r, (-1,)) * w + b,
            features=WIDE,
            extras=(weight, bias),
        ),
        Case("rms_norm", lambda x: ops.rms_norm(x, -1, eps=1e-6), lambda r: _rms_norm(r, (-1,), 1e-6), features=WIDE),
        Case(
            "rms_norm_rows_weight",
            lambda x, w: ops.rms_norm(x, 1, w, eps=1e-3),
            lambda r, w: _rms_norm(r, (0,), 1e-3) * w,
            extras=(weight,),
        ),
    ]
    return cases


def _product_cases() -> list[Case]:
    shared, each = Extra(("D", 7)), Extra(("C", "D", 7))
    transposed, bias = Extra((7, "D")), Extra((7,))
    wide, scale = Extra(("D", 70)), FEATURE
    features = (*VECTOR, (520,))

    def product(r: Tensor, w: Tensor) -> Tensor:
        return r @ w

    return [
        Case("matmul_shared", ops.matmul, product, features=(*features, (2, 3)), extras=(shared,)),
        Case("matmul_wide", ops.matmul, product, features=features, extras=(wide,)),
        Case("matmul_each", ops.matmul, product, features=features, extras=(each,)),
        Case("matmul_operator", lambda x, w: x @ w, product, features=features, extras=(shared,)),
        Case("linear", ops.linear, lambda r, w: r @ w.T, features=(*features, (2, 3)), extras=(transposed,)),
        Case("linear_bias", ops.linear, lambda r, w, b: r @ w.T + b, features=features, extras=(transposed, bias)),
        Case(
            "matmul_bias_relu",
            lambda x, w, b: ops.relu(ops.add(ops.matmul(x, w), b)),
            lambda r, w, b: torch.relu(r @ w + b),
            features=features,
            extras=(shared, bias),
        ),
        Case(
            "norm_matmul",
            lambda x, s, w: ops.matmul(ops.layer_norm(x, -1, s), w),
            lambda r, s, w: (_layer_norm(r, (-1,)) * s) @ w,
            features=features,
            extras=(scale, shared),
            slack=4.0,
        ),
        Case(
            "matmul_each_sum",
            lambda x, w: ops.sum(ops.matmul(x, w), 1),
            lambda r, w: (r @ w).sum(0),
            "component",
            features,
            extras=(each,),
            slack=4.0,
        ),
        Case(
            "matmul_softmax",
            lambda x, w: ops.softmax(ops.matmul(x, w), 1),
            lambda r, w: torch.softmax(r @ w, 0),
            features=features,
            extras=(shared,),
            slack=6.0,
        ),
    ]


def _chain_cases() -> list[Case]:
    return [
        Case(
            "relu_affine",
            lambda x, a, b: ops.relu(ops.add(ops.mul(x, a), b)),
            lambda r, a, b: torch.relu(r * a + b),
            extras=(FEATURE, PER_COMPONENT),
            dtypes=NUMBERS,
        ),
        Case(
            "softmax_scaled",
            lambda x, b: ops.softmax(ops.add(ops.mul(x, 0.5), b), 1),
            lambda r, b: torch.softmax(r * 0.5 + b, 0),
            extras=(DENSE,),
        ),
        Case(
            "two_outputs",
            lambda x: (ops.relu(x), ops.exp(ops.mul(x, 0.5))),
            lambda r: (torch.relu(r), torch.exp(r * 0.5)),
        ),
        Case("two_sums", lambda x: (ops.sum(x, 1), ops.amax(x, 1)), lambda r: (r.sum(0), REDUCERS["amax"](r, (0,))), "component"),
        Case(
            "intermediate_output",
            lambda x: (y := ops.mul(x, 2.0), ops.softmax(y, 1)),
            lambda r: (r * 2, torch.softmax(r * 2, 0)),
        ),
        Case("same_output_twice", lambda x: (y := ops.mul(x, 2.0), y), lambda r: (r * 2, r * 2)),
        Case(
            "softmax_entropy",
            lambda x: ops.sum(ops.mul(ops.softmax(x, 1), ops.log_softmax(x, 1)), 1),
            lambda r: (torch.softmax(r, 0) * torch.log_softmax(r, 0)).sum(0),
            "component",
        ),
        Case(
            "softmax_twice",
            lambda x: ops.softmax(ops.softmax(x, 1), 1),
            lambda r: torch.softmax(torch.softmax(r, 0), 0),
        ),
        Case(
            "softmax_then_norm",
            lambda x: ops.layer_norm(ops.softmax(x, 1), -1),
            lambda r: _layer_norm(torch.softmax(r, 0), (-1,)),
            features=VECTOR,
        ),
        Case(
            "centered_square",
            lambda x: ops.sum(ops.square(ops.sub(x, ops.mean(x, 1, keepdim=True))), 1),
            lambda r: ((r - r.mean(0, keepdim=True)) ** 2).sum(0),
            "component",
        ),
        Case(
            "flattened_between",
            lambda x: ops.relu(ops.as_flattened(ops.mul(x, 2.0))),
            lambda r: torch.relu(r * 2.0),
            "whole",
            dtypes=NUMBERS,
        ),
        Case("flattened", ops.as_flattened, lambda r: r, "whole", dtypes=NUMBERS),
        Case("nested_only", lambda x: x, lambda r: r, dtypes=NUMBERS),
        Case(
            "flat_softmax",
            lambda x: ops.softmax(ops.as_flattened(x), 0),
            lambda r: torch.softmax(r, 0),
            "whole",
            features=VECTOR,
        ),
    ]


def _named(*groups: list[Case]) -> dict[str, Case]:
    cases = [case for group in groups for case in group]
    found = {case.name: case for case in cases}
    assert len(found) == len(cases), "two cases of one name"
    return found


CASES = _named(
    _unary_cases(),
    _binary_cases(),
    _reduction_cases(),
    _wrapping_cases(),
    _norm_cases(),
    _product_cases(),
    _chain_cases(),
)


def _nested_cases() -> list[Case]:
    """Two levels: [group, row, position, features]."""
    group = Extra(("C", 1, 1, "F"))
    small: Any = ((5,), (3,), (1,), (), (None,))
    some: Any = ((5,), (3,), (1,), (None,), (1025,))

    def reduced(name: str) -> list[Case]:
        reduce, operation = REDUCERS[name], getattr(ops, name)
        dtypes = _DTYPES.get(name, NUMBERS)
        data = _DATA.get(name, "normal")
        return [
            Case(f"{name}_positions", lambda x: operation(x, 2), lambda r: reduce(r, (0,)), "grouped", small, dtypes, data=data),
            Case(
                f"{name}_groups",
                lambda x: operation(x, (1, 2)),
                lambda r: reduce(r, (0,)),
                "component",
                small,
                dtypes,
                data=data,
                levels="groups",
            ),
            Case(
                f"{name}_groups_features",
                lambda x: operation(x, (1, 2, -1)),
                lambda r: reduce(r, (0, -1)),
                "component",
                some,
                dtypes,
                data=data,
                levels="groups",
            ),
            Case(f"{name}_last", lambda x: operation(x, -1), lambda r: reduce(r, (-1,)), "ragged", some, dtypes, data=data),
        ]

    cases = [case for name in ("sum", "amax", "mean", "var", "logsumexp", "prod") for case in reduced(name)]
    cases += [
        Case("relu", ops.relu, torch.relu, features=small, dtypes=NUMBERS),
        Case("set", ops.set, lambda r: r, features=small, dtypes=NUMBERS),
        Case("add_feature", ops.add, lambda r, e: r + e, features=small, extras=(FEATURE,), dtypes=NUMBERS),
        Case("add_rows", ops.add, lambda r, e: r + e, features=small, extras=(ROWS,), dtypes=NUMBERS),
        Case("add_group", ops.add, lambda r, e: r + e[0], features=small, extras=(group,), dtypes=NUMBERS, levels="groups"),
        Case("softmax_positions", lambda x: ops.softmax(x, 2), lambda r: torch.softmax(r, 0), features=small),
        Case("softmax_groups", lambda x: ops.softmax(x, (1, 2)), lambda r: torch.softmax(r, 0), features=small, levels="groups"),
        Case("layer_norm", ops.layer_norm, lambda r: _layer_norm(r, (-1,)), features=some),
        Case(
            "centered", lambda x: ops.sub(x, ops.mean(x, 2, keepdim=True)), lambda r: r - r.mean(0, keepdim=True), features=small
        ),
        Case(
            "centered_groups",
            lambda x: ops.sub(x, ops.mean(x, (1, 2), keepdim=True)),
            lambda r: r - r.mean(0, keepdim=True),
            features=small,
            levels="groups",
        ),
        Case(
            "sum_of_sums",
            lambda x: ops.sum(ops.sum(x, 2), 1),
            lambda r: r.sum(0),
            "component",
            features=small,
            levels="groups",
            dtypes=NUMBERS,
        ),
        Case("matmul_shared", ops.matmul, lambda r, w: r @ w, features=((5,), (64,)), extras=(Extra(("D", 7)),)),
    ]
    return cases


def _special_cases() -> list[Case]:
    """Rows of -inf, rows with one inf, NaN or -inf: the numbers of torch come out, whatever the tile."""
    names = ("amax", "amin", "sum", "mean", "logsumexp", "any", "all", "softmax", "log_softmax", "var")
    wanted = {**REDUCERS, "softmax": _softmax_by_torch(torch.softmax), "log_softmax": _softmax_by_torch(torch.log_softmax)}
    cases = []
    for name in names:
        operation, reduce = getattr(ops, name), wanted[name]
        same = name.endswith("softmax")
        rows = Case(
            f"{name}_rows", lambda x, f=operation: f(x, 1), lambda r, f=reduce: f(r, (0,)), "ragged" if same else "component"
        )
        features = Case(f"{name}_features", lambda x, f=operation: f(x, -1), lambda r, f=reduce: f(r, (-1,)), features=VECTOR)
        cases += [rows, features]
        if not same:
            cases.append(
                Case(
                    f"{name}_both",
                    lambda x, f=operation: f(x, (1, -1)),
                    lambda r, f=reduce: f(r, (0, -1)),
                    "component",
                    features=VECTOR,
                )
            )
    unary = ("exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh", "relu", "erf", "abs", "floor", "isnan", "square")
    cases += [Case(n, getattr(ops, n), getattr(torch, n)) for n in unary]
    cases += [
        Case("silu", ops.silu, F.silu),
        Case("clamp", lambda x: ops.clamp(x, -1.0, 1.0), lambda r: r.clamp(-1, 1)),
        Case("maximum", ops.maximum, torch.maximum, extras=(ROWS,)),
        Case("minimum", ops.minimum, torch.minimum, extras=(ROWS,)),
        Case("lt", ops.lt, torch.lt, extras=(ROWS,)),
        Case("ne", ops.ne, torch.ne, extras=(ROWS,)),
        Case(
            "softmax_and_logsumexp",
            lambda x: (ops.softmax(x, 1), ops.sub(x, ops.logsumexp(x, 1, keepdim=True))),
            lambda r: (torch.softmax(r, 0), r - torch.logsumexp(r, 0, keepdim=True)),
        ),
    ]
    return [replace(case, data="special") for case in cases]


def _softmax_by_torch(function: Any) -> Reducer:
    return lambda x, dims: function(x, dims[0])


NESTED_CASES = _named(_nested_cases())
SPECIALS = _named(_special_cases())
