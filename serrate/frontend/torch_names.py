"""torch's functions, methods and operators on traced tensors.

In: nothing. Out: `TensorView.operators`, filled; `torch.softmax(x, dim=1)`, `x.sum(1)` and `x + 1` then record operations. Each
has torch's own signature; plain tensors among the arguments become inputs of the trace.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional

from serrate.errors import CallError
from serrate.frontend import autocast, ops
from serrate.frontend.capture import captured
from serrate.frontend.dtypes import Dtypes, dtypes_of
from serrate.frontend.ops.common import InvalidOperand, Operand, python_number
from serrate.frontend.ops.elementwise import typed, under_mode
from serrate.frontend.signatures import composed, drawing, losses, pointwise, reducing, shaping
from serrate.frontend.signatures import functional as of_networks
from serrate.ir.view import TensorView
from serrate.tensor.torch_private import GROUPED_MM

OF_ONE = (  # noqa: SIM905  a list of words reads better without quotes
    "neg abs exp log sqrt rsqrt reciprocal sigmoid tanh erf floor ceil square isnan logical_not sin cos sign trunc "
    "isinf isfinite log1p expm1 exp2 log2 log10 tan atan asin acos sinh cosh asinh acosh atanh erfc erfinv lgamma digamma "
    "sgn signbit frac deg2rad rad2deg sinc bitwise_not"
).split()
OF_TWO = (  # noqa: SIM905
    "mul pow lt le gt ge eq ne maximum minimum logical_and logical_or logical_xor floor_divide remainder fmod matmul "
    "atan2 hypot copysign fmax fmin logaddexp logaddexp2 xlogy ldexp float_power gcd lcm bitwise_and bitwise_or bitwise_xor "
    "bitwise_left_shift bitwise_right_shift"
).split()

CHANGED = (  # noqa: SIM905
    "add sub div round clamp clamp_min clamp_max masked_fill nan_to_num lerp addcmul addcdiv relu relu6 hardtanh hardsigmoid "
    "hardswish silu mish elu celu selu leaky_relu threshold softplus logsigmoid softsign tanhshrink "
    "softshrink hardshrink gelu"
).split()
"""Functions of `signatures.pointwise` that read each element only where they write it."""

REDUCING = (  # noqa: SIM905
    "sum prod mean nansum amax amin aminmax any all count_nonzero argmax argmin max min norm softmax "
    "log_softmax softmin logsumexp cumsum cumprod cummax cummin isclose where rsub positive"
).split()
"""More functions with torch's result dtypes."""

ALIASES = {
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "fix": "trunc",
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "tan2")},
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "view": "reshape",
    "concat": "cat",
    "concatenate": "cat",
    "row_stack": "vstack",
    "moveaxis": "movedim",
}

SPECIAL = {
    **{name: name for name in ("erf", "erfc", "erfinv", "digamma", "sinc", "exp2", "expm1", "log1p")},
    "expit": "sigmoid",
    "gammaln": "lgamma",
    "psi": "digamma",
}
"""Functions of one tensor in `torch.special`, and ours."""

NAMES = {
    "where_method": "where",
    "functional_softmax": "softmax",
    "functional_log_softmax": "log_softmax",
    "torch_dropout": "dropout",
    "torch_alpha_dropout": "alpha_dropout",
}
"""Functions of ours that torch has under the name of another, for messages."""

NUMPY = {"axis": "dim", "keepdims": "keepdim"}
"""numpy's argument names that torch accepts."""


@functools.cache
def spelled(
    operation: Callable[..., Any], name: str | None = None, function: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Wraps an operation as the torch function of that name: checks its arguments, and captures plain tensors among them.

    With `function`, torch's own, it accepts and returns the same dtypes as torch.
    """
    name = name or operation.__name__

    @functools.wraps(operation)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = tuple(map(python_number, captured(args)))
        named = {NUMPY.get(key, key): python_number(value) for key, value in captured(kwargs).items()}
        if named.get("out", run) is None:
            del named["out"]
        dtype = autocast.wanted(name, (*given, *named.values()))
        if dtype is not None:
            given, named = autocast.operands(given, dtype), autocast.operands(named, dtype)
        try:
            result = operation(*given, **named)
            # Checked last: the operation's own messages are clearer.
            dtypes = None if function is None else dtypes_of(name, function, given, named)
            return under_mode(result if dtypes is None else _with_dtypes(result, dtypes))
        except InvalidOperand as error:
            raise CallError(f"{name}: {error}") from None
        except TypeError as error:
            _refuse(name, operation, args, named, error)
            raise

    run.__name__ = name
    return run


def _with_dtypes(result: Any, dtypes: Dtypes) -> Any:
    if isinstance(dtypes, torch.dtype):
        return typed(result, dtypes)
    parts = [typed(part, dtype) for part, dtype in zip(result, dtypes, strict=True)]
    return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)


def _refuse(name: str, operation: Callable[..., Any], args: Any, kwargs: Any, error: TypeError) -> None:
    """Raises for arguments that the operation does not accept, naming those it does; leaves other errors alone."""
    signature = inspect.signature(operation)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        shown = [p for p in signature.parameters.values() if not p.name.startswith("_")]
        known = ", ".join(str(p).split(":")[0].split("=")[0].strip() for p in shown)
        complaint = str(error).split("() ", 1)[-1]
        raise CallError(f"{name} {complaint}; it takes {known}") from None


def _unary(operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: Any) -> Any:
        return operation(input)

    run.__name__ = operation.__name__
    return run


def _binary(operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: Operand, other: Operand) -> Any:
        return operation(input, other)

    run.__name__ = operation.__name__
    return run


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    def run(input: Any) -> Any:
        return ops.cast(input, dtype)

    run.__name__ = f"to_{str(dtype).removeprefix('torch.')}"
    return run


def _swapped(operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: Any, other: Any) -> Any:
        return operation(other, input)

    run.__name__ = f"r{operation.__name__}"
    return run


def _owned(module: Any) -> dict[str, Callable[..., Any]]:
    """The public functions of a module."""
    own = vars(module).items()
    return {k: f for k, f in own if inspect.isfunction(f) and f.__module__ == module.__name__ and not k.startswith("_")}


def _by_name() -> dict[str, Callable[..., Any]]:
    """Operations under their torch names: functions, methods and `torch.nn.functional`."""
    found = {name: _unary(getattr(ops, name)) for name in OF_ONE} | {name: _binary(getattr(ops, name)) for name in OF_TWO}
    for module in (pointwise, reducing, of_networks, losses, shaping, composed, drawing):
        found |= _owned(module)
    for name in ("where_method", "functional_softmax", "functional_log_softmax", "vector_norm"):
        del found[name]
    for name in ("matrix_transpose", "reversed_dims", "same", "torch_dropout", "torch_alpha_dropout"):
        del found[name]
    found |= {alias: found[name] for alias, name in ALIASES.items()}
    found["positive"] = shaping.same
    found |= {"t": shaping.reversed_dims, "contiguous": shaping.same, "detach": shaping.detach, "getitem": shaping.getitem}
    found["to_padded"] = ops.to_padded
    found |= {"half": _cast(torch.float16), "float": _cast(torch.float32), "double": _cast(torch.float64)}
    found |= {"bfloat16": _cast(torch.bfloat16), "int": _cast(torch.int32), "long": _cast(torch.int64)}
    found |= {"short": _cast(torch.int16), "char": _cast(torch.int8), "byte": _cast(torch.uint8), "bool": _cast(torch.bool)}
    return found


NOT_METHODS = (
    "isin",
    "bucketize",
    "one_hot",
    "hstack",
    "vstack",
    "row_stack",
    "dstack",
    "column_stack",
    *_owned(losses),
    "linear",
    "einsum",
    "grouped_mm",
    "pad",
    "cosine_similarity",
    "glu",
    "layer_norm",
    "rms_norm",
    "normalize",
    "embedding",
    "embedding_bag",
    "dropout",
    "alpha_dropout",
    "rand",
    "randn",
    "randint",
    "rand_like",
    "randn_like",
    "randint_like",
    "scaled_dot_product_attention",
)


def _typed_by(name: str) -> Callable[..., Any] | None:
    """The torch function that determines an operation's dtypes; None if its operands do."""
    name = ALIASES.get(name, name)
    if name not in (*OF_ONE, *OF_TWO, *CHANGED, *REDUCING) or name == "matmul":
        return None
    # Of two functions with one name, prefer the one with more arguments: `inplace` in functional, dims before dtypes elsewhere.
    owners = (functional, torch, torch.Tensor) if name in CHANGED else (torch, functional, torch.Tensor)
    found: Callable[..., Any] = next(getattr(owner, name) for owner in owners if hasattr(owner, name))
    return found


def _all_names() -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = {}
    for name, operation in _by_name().items():
        run = spelled(operation, name if operation.__name__ != name and name not in ALIASES else None, _typed_by(name))
        if name not in NOT_METHODS:
            found[name] = run
        for owner in (torch, torch.Tensor, functional):
            # `torch.int`, `torch.float` and the like are dtypes, not functions.
            if callable(getattr(owner, name, None)):
                found[getattr(owner, name)] = run
    spellings: dict[Any, Callable[..., Any]] = {
        "to_padded": ops.to_padded,
        "where": pointwise.where_method,
        torch.Tensor.where: pointwise.where_method,
        **{name: getattr(ops, name) for name in ("values", "lengths", "offsets", "with_values")},
        "structure": ops.structure_of,
        "T": shaping.reversed_dims,
        "mT": shaping.matrix_transpose,
        torch.Tensor.__getitem__: shaping.getitem,
        torch.dropout: drawing.torch_dropout,
        torch.alpha_dropout: drawing.torch_alpha_dropout,
    }
    if GROUPED_MM is not None:
        spellings[GROUPED_MM] = of_networks.grouped_mm
    found.update((name, spelled(operation, NAMES.get(operation.__name__))) for name, operation in spellings.items())
    typed: dict[Any, Callable[..., Any]] = {
        torch.linalg.vector_norm: reducing.vector_norm,
        **{getattr(torch.special, name): _unary(getattr(ops, own)) for name, own in SPECIAL.items()},
        torch.special.xlogy: _binary(ops.xlogy),
        torch.special.softmax: reducing.softmax,
        torch.special.log_softmax: reducing.log_softmax,
        torch.special.logsumexp: reducing.logsumexp,
        functional.softmax: reducing.functional_softmax,
        functional.log_softmax: reducing.functional_log_softmax,
    }
    found.update((f, spelled(operation, NAMES.get(operation.__name__), f)) for f, operation in typed.items())
    for name in ("T", "mT"):
        getter: Any = getattr(torch.Tensor, name)
        found[getter.__get__] = found[name]
    for method, name in (("__radd__", "add"), ("__rsub__", "sub"), ("__rmul__", "mul")):
        found[getattr(torch.Tensor, method)] = spelled(_swapped(_binary(getattr(ops, name))))
    for method, name in {
        **{f"__{n}__": n for n in ("pow", "matmul", "lt", "le", "gt", "ge", "eq", "ne", "neg", "abs")},
        "__floordiv__": "floor_divide",
        "__truediv__": "div",
        "__mod__": "remainder",
        "__and__": "bitwise_and",
        "__or__": "bitwise_or",
        "__xor__": "bitwise_xor",
        "__invert__": "bitwise_not",
        "__lshift__": "bitwise_left_shift",
        "__rshift__": "bitwise_right_shift",
    }.items():
        found[getattr(torch.Tensor, method)] = found[name]
    for method, name in {
        "__rpow__": "pow",
        "__rtruediv__": "div",
        "__rfloordiv__": "floor_divide",
        "__rmod__": "remainder",
        "__rlshift__": "bitwise_left_shift",
        "__rrshift__": "bitwise_right_shift",
    }.items():
        found[getattr(torch.Tensor, method)] = spelled(_swapped(found[name]))
    return found


TensorView.operators.update(_all_names())

ELEMENTWISE = frozenset(
    (
        *(TensorView.operators[name] for name in (*OF_ONE, *(n for n in OF_TWO if n != "matmul"), *CHANGED)),
        *(TensorView.operators[function] for function in (functional.dropout, functional.alpha_dropout)),
    )
)
"""Operations that read each element only where they write it, and so may run in place."""
