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

_SAME = (  # noqa: SIM905  a list of words reads better without quotes
    # Operations that torch has under the same name with the same arguments, as functions and as methods.
    "neg abs exp log sqrt rsqrt reciprocal sigmoid tanh relu erf floor ceil square isnan logical_not sin cos sign trunc round "
    "isinf isfinite log1p expm1 exp2 log2 log10 add sub mul div pow lt le gt ge eq ne maximum minimum logical_and logical_or "
    "logical_xor floor_divide remainder fmod lerp addcmul sum prod mean amax amin any all var argmax argmin logsumexp softmax "
    "log_softmax cumsum cumprod where clamp matmul gather select flip permute transpose unsqueeze unflatten stack cat "
    "softplus leaky_relu elu"
).split()


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


def _max(x: TensorView, *args: Any, **kwargs: Any) -> Any:
    """`torch.max`: of everything, along a dim, or of two tensors, as torch tells them apart."""
    return _extremum(ops.max, ops.amax, ops.maximum, x, args, kwargs)


def _min(x: TensorView, *args: Any, **kwargs: Any) -> Any:
    """`torch.min`, likewise."""
    return _extremum(ops.min, ops.amin, ops.minimum, x, args, kwargs)


def _extremum(
    along: Callable[..., Any], whole: Callable[..., Any], each: Callable[..., Any], x: Any, args: Any, kwargs: Any
) -> Any:
    if not args and not kwargs:
        return whole(x)
    if "other" in kwargs or (args and isinstance(args[0], TensorView)):
        return each(x, *args, *kwargs.values())
    return along(x, *args, **kwargs)


def _squeeze(x: TensorView, dim: int | None = None) -> TensorView:
    return ops.squeeze(x, dim)


def _flatten(x: TensorView, start_dim: int = 0, end_dim: int = -1) -> TensorView:
    return ops.flatten(x, start_dim, end_dim)


def _reshape(x: TensorView, *shape: Any) -> TensorView:
    return ops.reshape(x, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)


def _index_select(x: TensorView, dim: int, index: TensorView) -> TensorView:
    return ops.index(x, index, dim)


def _embedding(indices: TensorView, weight: TensorView, *options: Any, **more: Any) -> TensorView:
    if any(o not in (None, False) for o in (*options, *more.values())):
        raise ShapeError("embedding: padding_idx, max_norm, scale_grad_by_freq and sparse are not taken; pass the table as it is")
    return ops.embedding(indices, weight)


def _getitem(x: TensorView, key: Any) -> TensorView:
    """`x[...]`: numbers select, slices cut, None adds a dim, a tensor of integers picks; as in torch, dim by dim."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [k for k in keys if not isinstance(k, TensorView)]:
        place = next(k for k, each in enumerate(keys) if each is Ellipsis)
        taken = len([k for k in keys if k is not None and k is not Ellipsis])
        keys[place : place + 1] = [slice(None)] * (x.ndim - taken)
    dim = 0
    for each in keys:
        if each is None:
            x, dim = ops.unsqueeze(x, dim), dim + 1
        elif isinstance(each, slice):
            if each.step not in (None, 1):
                raise ShapeError(f"a slice of a traced tensor takes steps of 1, got {each.step}")
            if each.start is not None or each.stop is not None:
                x = ops.slice(x, dim, each.start, each.stop)
            dim += 1
        elif isinstance(each, TensorView):
            x, dim = ops.index(x, each, dim), dim + each.ndim
        elif isinstance(each, int):
            x = ops.select(x, dim, each)
        else:
            raise ShapeError(f"a traced tensor is indexed by integers, slices, None and tensors of integers, got {each!r}")
    return x


def _to(x: TensorView, dtype: torch.dtype) -> TensorView:
    return ops.cast(x, dtype)


def _size(x: TensorView, dim: int | None = None) -> Any:
    return x.shape if dim is None else x.shape[dim]


def _all_names() -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = {}
    for name in _SAME:
        operation = getattr(ops, name)
        found[name] = operation
        for owner in (torch, torch.Tensor, functional):
            if hasattr(owner, name):
                found[getattr(owner, name)] = operation
    found.update(
        {
            "to": _to,
            "max": _max,
            "min": _min,
            torch.max: _max,
            torch.min: _min,
            "squeeze": _squeeze,
            torch.squeeze: _squeeze,
            "flatten": _flatten,
            torch.flatten: _flatten,
            "reshape": _reshape,
            "view": _reshape,
            torch.reshape: _reshape,
            "topk": ops.topk,
            torch.topk: ops.topk,
            "index_select": _index_select,
            torch.index_select: _index_select,
            functional.embedding: _embedding,
            "getitem": _getitem,
            torch.Tensor.__getitem__: _getitem,
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

ELEMENTWISE = frozenset(
    getattr(ops, name)
    for name in (  # noqa: SIM905  a list of words reads better without quotes
        "neg abs exp log sqrt rsqrt reciprocal sigmoid tanh relu erf floor ceil square sin cos sign trunc round log1p expm1 exp2 "
        "log2 log10 add sub mul div pow maximum minimum floor_divide remainder fmod lerp addcmul clamp silu gelu softplus "
        "leaky_relu elu logical_not logical_and logical_or logical_xor lt le gt ge eq ne"
    ).split()
)
"""Operations that read each element where they write it, and so may write over what they read."""
