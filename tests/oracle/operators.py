"""Elementwise operators, reductions and scans as a user writes them, for torch's rows and for ragged tensors alike.

In: nothing. Out: tables of functions by name. Each is called with torch's tensors to learn what is wanted (result, dtype, or
that it raises), and with ragged tensors to see what is got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]

DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

_ONE = (  # noqa: SIM905  a list of words reads better without quotes
    "neg abs exp log sqrt rsqrt reciprocal sigmoid tanh erf floor ceil round square isnan logical_not sin cos tan sign trunc "
    "isinf isfinite log1p expm1 exp2 log2 log10 relu selu nan_to_num bitwise_not positive"
).split()
_NETWORK = (  # noqa: SIM905
    "relu6 hardtanh hardsigmoid hardswish silu mish elu celu leaky_relu softplus logsigmoid softsign tanhshrink gelu"
).split()

UNARY: dict[str, Function] = {
    **{name: getattr(torch, name) for name in _ONE},
    **{name: getattr(F, name) for name in _NETWORK},
    "-x": lambda x: -x,
    "abs(x)": lambda x: abs(x),
    "~x": lambda x: ~x,
    "clamp_min": lambda x: x.clamp(min=1),
    "clamp_max": lambda x: torch.clamp(x, max=1.5),
    "clamp_both": lambda x: torch.clamp(x, 0, 3),
    "clip": lambda x: x.clip(-2, 2),
    "round_decimals": lambda x: torch.round(x, decimals=1),
    "hardtanh_0_6": lambda x: F.hardtanh(x, 0, 6),
    "hardtanh_fraction": lambda x: F.hardtanh(x, -1.5, 2.5),
    "threshold": lambda x: F.threshold(x, 1, 7),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu_alpha": lambda x: F.elu(x, 0.5),
    "leaky_relu_slope": lambda x: F.leaky_relu(x, 0.25),
    **{f"to_{name}": (lambda x, dtype=dtype: x.clamp(0, 100).to(dtype)) for name, dtype in DTYPES.items() if name != "bool"},
    "to_bool": lambda x: x.to(torch.bool),
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 1),
}

_TWO = (  # noqa: SIM905
    "add sub mul div pow lt le gt ge eq ne maximum minimum logical_and logical_or logical_xor floor_divide remainder fmod "
    "bitwise_and bitwise_or bitwise_xor rsub true_divide"
).split()

BINARY: dict[str, Function] = {
    **{name: getattr(torch, name) for name in _TWO},
    "a + b": lambda a, b: a + b,
    "a - b": lambda a, b: a - b,
    "a * b": lambda a, b: a * b,
    "a / b": lambda a, b: a / b,
    "a // b": lambda a, b: a // b,
    "a % b": lambda a, b: a % b,
    "a ** b": lambda a, b: a**b,
    "a & b": lambda a, b: a & b,
    "a | b": lambda a, b: a | b,
    "a ^ b": lambda a, b: a ^ b,
    "a < b": lambda a, b: a < b,
    "a == b": lambda a, b: a == b,
    "add_alpha": lambda a, b: torch.add(a, b, alpha=2),
    "add_alpha_fraction": lambda a, b: torch.add(a, b, alpha=0.5),
    "sub_alpha": lambda a, b: torch.sub(a, b, alpha=3),
    "div_floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "where": lambda a, b: torch.where(a > 1, a, b),
    "masked_fill": lambda a, b: a.masked_fill(a > 1, b),
    "clamp_tensor": lambda a, b: torch.clamp(a, b),
    "isclose": lambda a, b: torch.isclose(a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=2),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
    "max": lambda a, b: torch.max(a, b),
}
"""Operators of two tensors, or of a tensor and a number."""

SWAPPED: dict[str, Function] = {
    f"{name}, swapped": (lambda a, b, f=f: f(b, a))
    for name, f in BINARY.items()
    if (len(name) <= 6 and " " in name) or name in ("add", "where", "pow", "sub_alpha")
}

REDUCTIONS: dict[str, Function] = {
    "sum": lambda x, d: x.sum(d),
    "sum_float64": lambda x, d: x.sum(d, dtype=torch.float64),
    "sum_int32": lambda x, d: x.clamp(0, 9).sum(d, dtype=torch.int32),
    "nansum": lambda x, d: torch.nansum(x, d),
    "prod": lambda x, d: torch.prod(x, d),
    "mean": lambda x, d: x.mean(d),
    "mean_float": lambda x, d: x.mean(d, dtype=torch.float32),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d),
    "max": lambda x, d: x.max(d),
    "min": lambda x, d: x.min(d),
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d),
    "aminmax": lambda x, d: torch.aminmax(x, dim=d),
    "any": lambda x, d: x.any(d),
    "all": lambda x, d: x.all(d),
    "count_nonzero": lambda x, d: torch.count_nonzero(x, d),
    "var": lambda x, d: x.var(d),
    "std": lambda x, d: x.std(d, correction=0),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "norm": lambda x, d: torch.linalg.vector_norm(x, dim=d),
    "norm_1": lambda x, d: torch.linalg.vector_norm(x, 1, d),
    "norm_0": lambda x, d: torch.linalg.vector_norm(x, 0, d),
    "norm_3": lambda x, d: torch.norm(x, 3, d),
    "norm_inf": lambda x, d: torch.norm(x, torch.inf, d),
    "norm_minus_inf": lambda x, d: torch.norm(x, -torch.inf, d),
    "softmax": lambda x, d: torch.softmax(x, d),
    "log_softmax": lambda x, d: torch.log_softmax(x, d),
    "softmax_float": lambda x, d: torch.softmax(x, d, torch.float32),
    "cumsum": lambda x, d: torch.cumsum(x, d),
    "cumsum_float": lambda x, d: torch.cumsum(x, d, dtype=torch.float64),
    "cumprod": lambda x, d: torch.cumprod(x, d),
    "cummax": lambda x, d: torch.cummax(x, d),
    "cummin": lambda x, d: torch.cummin(x, d),
    "sort": lambda x, d: torch.sort(x, d),
    "topk": lambda x, d: torch.topk(x, 2, d),
}
"""Reductions, scans and orders over one dim."""
