"""The vocabulary of kernels: torch's functions by name, and the rules for indices, shapes and products.

In: what the user wrote. Out: its normal form, or an error with the user's line. Values are not inspected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from serrate.frontend.kernel.machine import refuse
from serrate.ir.values import carried_dtype
from serrate.tensor.base import RaggedSize

# fmt: off
ELEMENTWISE = frozenset(
    [
        "abs", "absolute", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "bfloat16", "bitwise_and",
        "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "bool", "ceil", "clamp",
        "clamp_max", "clamp_min", "clip", "clone", "contiguous", "copysign", "cos", "cosh", "deg2rad", "detach",
        "digamma", "div", "divide", "double", "elu", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "float",
        "float_power", "floor", "floor_divide", "fmax", "fmin", "fmod", "frac", "gcd", "ge", "gelu", "gt", "half",
        "hardtanh", "hypot", "int", "isfinite", "isinf", "isnan", "lcm", "ldexp", "le", "leaky_relu", "lerp", "lgamma",
        "log", "log10", "log1p", "log2", "log_sigmoid", "logaddexp", "logaddexp2", "logical_and", "logical_not",
        "logical_or", "logical_xor", "long", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "multiply",
        "nan_to_num", "ne", "neg", "negative", "pow", "rad2deg", "reciprocal", "relu", "relu6", "remainder", "round",
        "rsqrt", "rsub", "selu", "sgn", "short", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh", "softplus",
        "softsign", "special_expit", "sqrt", "square", "sub", "subtract", "tan", "tanh", "to", "true_divide", "trunc",
        "type_as", "where", "xlogy",
    ]
)
# fmt: on
ALIASES = {
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__invert__": "bitwise_not",
    "__rsub__": "rsub",
}


def name_of(function: Callable[..., Any]) -> str:
    """The canonical name of a torch function, method or operator.

    >>> name_of(torch.Tensor.__and__), name_of(torch.exp)
    ('bitwise_and', 'exp')
    """
    name = getattr(function, "__name__", repr(function))
    if name in ALIASES:
        return ALIASES[name]
    if name.startswith("__") and name not in ("__getitem__", "__setitem__"):
        return name.strip("_")
    return name


def instead(name: str) -> str:
    """A replacement for a function that tiles do not support."""
    if name.endswith("_"):
        return f"tile values cannot be changed in place; write x = x.{name[:-1]}(...)"
    known = {
        "einsum": "use @, permute and sum",
        "cat": "store each part to a tensor made before the loop",
        "stack": "store each part to a tensor made before the loop",
        "var": "use (x - x.mean(dim, keepdim=True)).square().mean(dim)",
        "std": "use (x - x.mean(dim, keepdim=True)).square().mean(dim).sqrt()",
        "norm": "use x.square().sum(dim).sqrt()",
        "rand_like": "use hl.rand(x.shape, seed)",
        "randint_like": "use hl.randint(x.shape, low, high, seed)",
        "dropout": "use torch.where(hl.rand(x.shape, seed) < p, 0.0, x / (1 - p))",
    }
    return known.get(name, "call it on whole tensors before or after the loops, or write it with sums, maxima and torch.where")


def expand_keys(key: Any, count: int) -> list[Any]:
    """The keys of an index, one per dim plus any Nones; an ellipsis and missing keys become slices."""
    keys = list(key) if isinstance(key, (tuple, list)) else [key]
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > count:
        refuse(f"{used} indices for {count} dims")
    at = next((n for n, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[at : at + 1] = [slice(None)] * (count - used)
    return keys


def ragged_bound_hint(bound: Any) -> str:
    """A suggestion for a message, if a loop bound is the size of a ragged dim; empty for other bounds."""
    return ": use jt.max_length; each row still ends at its own length" if isinstance(bound, RaggedSize) else ""


def loop_bounds(what: str, begin_or_end: Any, end: Any, block_size: Any, *, step: bool) -> list[tuple[Any, Any, Any]]:
    """Begin, end and block size (or step) of each dim of an `hl.tile` or `hl.grid`.

    >>> loop_bounds("hl.tile", [2, 3], [8, 9], None, step=False)
    [(2, 8, None), (3, 9, None)]
    """
    single = not isinstance(begin_or_end, (list, tuple))
    firsts = [begin_or_end] if single else list(begin_or_end)
    ends = firsts if end is None else [end] if single else list(end)
    begins = [0] * len(firsts) if end is None else firsts
    sizes = list(block_size) if isinstance(block_size, (list, tuple)) else [block_size] * len(ends)
    if not len(begins) == len(ends) == len(sizes):
        refuse(
            f"{what}: {len(begins)} begins, {len(ends)} ends and {len(sizes)} {'steps' if step else 'block sizes'}: "
            "one for each dim"
        )
    return list(zip(begins, ends, sizes, strict=True))


def regroup(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Matches the dims of two shapes: the smallest runs with equally many elements.

    >>> regroup([2, 3, 8], [2, 3, 4, 2])
    [([0], [0]), ([1], [1]), ([2], [2, 3])]
    >>> regroup([2, 3], [6])
    [([0, 1], [0])]
    """

    def size(dims: list[int], shape: Sequence[int]) -> int:
        return math.prod(shape[d] for d in dims)

    if 0 in old and list(old) != list(new):
        return [(list(range(len(old))), list(range(len(new))))]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        # A dim of size 1 without a partner is added or removed on its own.
        if left and right and 1 in (old[i], new[j]) and old[i] != new[j]:
            left, right = ([], right) if new[j] == 1 else (left, [])
        i, j = i + len(left), j + len(right)
        while size(left, old) != size(right, new):
            if size(left, old) < size(right, new):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


def product_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype in which a matrix product of two dtypes accumulates. They must be equal, as in torch, except that values computed
    from 16-bit floats are float32, and may be multiplied with 16-bit ones."""
    if torch.bool in (a, b):
        refuse("a matrix product of bools is not supported: convert them first, with .to(torch.float32)")
    if a != b and {a, b} not in ({torch.float32, torch.float16}, {torch.float32, torch.bfloat16}):
        refuse(f"a matrix product of {a} and {b}: dtypes must be equal; convert one of them, with .to(...)")
    return carried_dtype(a if a == b else torch.float32) if a.is_floating_point else torch.int64


def dot_dtype(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    """The dtype of an `hl.dot` of these dtypes: float32 for 16-bit floats, int32 for integers of fewer than 32 bits.

    >>> dot_dtype(torch.bfloat16, torch.bfloat16), dot_dtype(torch.int8, torch.int16), dot_dtype(torch.int64, torch.int8)
    (torch.float32, torch.int32, torch.int64)
    """
    common = torch.promote_types(left, right)
    if common.is_floating_point:
        return carried_dtype(common)
    return torch.int32 if common.itemsize < 4 else common
