"""torch's spellings of the operations: functions, methods and operators of torch on traced tensors.

In: nothing. Out: `TensorView.operators`, filled; `torch.softmax(x, dim=1)`, `x.sum(1)` and `x + 1` then record operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from serrate.errors import ShapeError
from serrate.frontend import ops
from serrate.ir.view import TensorView

_UNARY = (
    "neg abs exp log sqrt rsqrt reciprocal sigmoid tanh relu erf floor ceil square isnan logical_not".split()  # noqa: SIM905
)
_BINARY = "add sub mul div pow lt le gt ge eq ne maximum minimum logical_and logical_or".split()  # noqa: SIM905
_REDUCE = "sum prod mean amax amin any all var logsumexp softmax log_softmax".split()  # noqa: SIM905


def _layer_norm(
    x: TensorView, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> TensorView:
    return ops.layer_norm(x, _trailing("layer_norm", x, normalized_shape), weight, bias, eps)


def _rms_norm(x: TensorView, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> TensorView:
    return ops.rms_norm(x, _trailing("rms_norm", x, normalized_shape), weight, eps)


def _trailing(name: str, x: TensorView, shape: Sequence[int]) -> tuple[int, ...]:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    found = tuple(x.shape[d] for d in dims)
    if found != tuple(shape):
        raise ShapeError(f"{name}: normalized_shape {tuple(shape)} is not the shape of the last dims, {found}")
    return dims


def _to(x: TensorView, dtype: torch.dtype) -> TensorView:
    return ops.cast(x, dtype)


def _size(x: TensorView, dim: int | None = None) -> Any:
    return x.shape if dim is None else x.shape[dim]


def _all_names() -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = {}
    for name in (*_UNARY, *_BINARY, *_REDUCE, "where", "clamp", "matmul", "select"):
        operation = getattr(ops, name)
        found[name] = operation
        for owner in (torch, torch.Tensor, functional):
            if hasattr(owner, name):
                found[getattr(owner, name)] = operation
    found.update(
        {
            "to": _to,
            "size": _size,
            "float": lambda x: ops.cast(x, torch.float32),
            "silu": ops.silu,
            "gelu": ops.gelu,
            torch.true_divide: ops.div,
            torch.multiply: ops.mul,
            torch.subtract: ops.sub,
            torch.negative: ops.neg,
            torch.special.expit: ops.sigmoid,
            functional.silu: ops.silu,
            functional.gelu: ops.gelu,
            functional.linear: ops.linear,
            functional.layer_norm: _layer_norm,
            functional.rms_norm: _rms_norm,
            torch.Tensor.__radd__: lambda a, b: ops.add(b, a),
            torch.Tensor.__rsub__: lambda a, b: ops.sub(b, a),
            torch.Tensor.__rmul__: lambda a, b: ops.mul(b, a),
        }
    )
    return found


TensorView.operators.update(_all_names())
