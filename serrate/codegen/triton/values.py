"""Dtypes, functions, reductions and numbers as Triton writes them.

In: their names in the IR. Out: text.
"""

from __future__ import annotations

import math

import torch

from serrate.codegen.expressions import OPERATORS
from serrate.ir.loops import Lanes
from serrate.ir.values import LIBRARY_BINARY, LIBRARY_UNARY

TYPES: dict[torch.dtype, str] = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
LIBDEVICE_UNARY = ("tanh", *(name for name in LIBRARY_UNARY if name != "digamma"))
DIVISIONS = ("floordiv", "rem", "fmod")
"""Functions of integers whose operands must have the same signedness."""
LIBDEVICE_BINARY = ("pow", "fmod", *LIBRARY_BINARY)
"""Functions of floating point that the device's math library has under these names."""
FUNCTIONS: dict[str, str] = {
    **{n: f"tl.{n}({{0}})" for n in ("exp", "log", "rsqrt", "erf", "floor", "ceil", "abs", "sin", "cos")},
    **{n: f"libdevice.{n}({{0}})" for n in LIBDEVICE_UNARY},
    **{n: f"libdevice.{n}({{0}}, {{1}})" for n in LIBDEVICE_BINARY},
    **{n: f"sr_{n}({{0}}, {{1}})" for n in ("bitand", "bitor", "bitxor", "shl", "shr", "gcd")},
    "digamma": "sr_digamma({0})",
    "sqrt": "tl.sqrt_rn({0})",
    **OPERATORS,
    # The interpreter supports `&` of two blocks or of two scalars, but not of one of each.
    "logical_and": "tl.where({0}, {1}, False).to(tl.int1)",
    "logical_or": "tl.where({0}, True, {1}).to(tl.int1)",
    "logical_not": "tl.where({0}, False, True).to(tl.int1)",
    "reciprocal": "(1.0 / {0})",
    "where": "tl.where({0}, {1}, {2})",
    "maximum": "sr_largest({0}, {1})",
    "minimum": "sr_smallest({0}, {1})",
    "relu": "tl.where({0} < 0, 0, {0})",
    "sigmoid": "sr_sigmoid({0})",
    "silu": "sr_silu({0})",
    "gelu": "({0} * 0.5 * (1.0 + tl.erf({0} * 0.7071067811865476)))",
    "floordiv": "sr_whole_div({0}, {1})",
    "rem": "sr_whole_rem({0}, {1})",
    "random_bits": "sr_random_bits({0}, {1}, {2})",
    "exp_below": "sr_exp_below({0}, {1})",
    "exp_diff": "sr_exp_diff({0}, {1})",
}
SPECIAL: dict[tuple[str, str], str] = {
    # The sum of two bits is 0 if both are 1.
    ("add", "truth"): FUNCTIONS["logical_or"],
    ("mul", "truth"): FUNCTIONS["logical_and"],
    ("bitand", "truth"): FUNCTIONS["logical_and"],
    ("bitor", "truth"): FUNCTIONS["logical_or"],
    ("bitxor", "truth"): FUNCTIONS["ne"],
    ("floor", "integer"): "{0}",
    ("ceil", "integer"): "{0}",
    ("pow", "integer"): "sr_whole_power({0}, {1})",
    ("sqrt", "double"): "tl.sqrt({0})",
    ("sigmoid", "double"): "tl.sigmoid({0})",
    ("silu", "double"): "({0} * tl.sigmoid({0}))",
    # `/` of float32 is an approximation on a GPU.
    ("div", "single"): "tl.div_rn({0}, {1})",
    ("reciprocal", "single"): "tl.div_rn(1.0, {0})",
    ("exp_below", "double"): "tl.exp({0} - {1})",
    ("exp_diff", "double"): "tl.exp({0} - sr_finite({1}))",
    ("digamma", "single"): "sr_digamma({0}).to(tl.float32)",
}
"""Functions that are written differently for truth values, integers, float64 or float32."""
POWERS = ("exp_diff", "exp_below")
"""Exponentials of differences from a maximum."""
COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "sr_largest({0}, {1})",
    "min": "sr_smallest({0}, {1})",
    "any": "{0} | ({1})",
    "all": "{0} & ({1})",
}
SCANNED = {
    "sum": "sr_total",
    "prod": "sr_product",
    "max": "sr_largest",
    "min": "sr_smallest",
    "any": "sr_either",
    "all": "sr_both",
}
REDUCERS = {
    "sum": "tl.sum({0}, {1})",
    "prod": "tl.reduce({0}, {1}, sr_product)",
    "max": "tl.reduce({0}, {1}, sr_largest)",
    "min": "tl.reduce({0}, {1}, sr_smallest)",
    "any": "tl.reduce({0}, {1}, sr_either)",
    "all": "tl.reduce({0}, {1}, sr_both)",
}


def kind_of(dtype: torch.dtype) -> str:
    """The version of a function for a dtype."""
    if dtype == torch.bool:
        return "truth"
    if not dtype.is_floating_point:
        return "integer"
    return "double" if dtype == torch.float64 else "single"


def shape_of(lanes: Lanes) -> str:
    """The shape of a block."""
    return f"[{', '.join(str(lane.size) for lane in lanes)}]"


def number_text(value: float | int | bool) -> str:
    """A constant."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, float) and value == 0 and math.copysign(1, value) < 0:
        # Triton makes a constant that equals zero from zero bits.
        return "(tl.full([], 0.0, tl.float32) * -1.0)"
    return repr(value)
