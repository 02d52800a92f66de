"""`torch.autocast`: which operations cast their operands.

In: the name of a torch operation, and its operands. Out: the operands, cast as torch's autocast would on the device of the traced
call. The autocast state is read while tracing, and is part of the trace's cache key.
"""

from __future__ import annotations

from typing import Any

import torch

from serrate.frontend.ops.elementwise import cast
from serrate.ir.view import TensorView
from serrate.tensor.torch_private import is_any_autocast_enabled

DEVICES = ("cpu", "cuda")
_PRODUCTS = "matmul mm bmm mv addmm addmv addbmm baddbmm addr einsum linear scaled_dot_product_attention"
_LOSSES = "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss hinge_embedding_loss"
_LOSSES_CUDA = "kl_div binary_cross_entropy_with_logits soft_margin_loss"
_WIDE_RANGE = (
    "exp expm1 log log10 log2 log1p reciprocal rsqrt pow rpow rdiv tan sinh cosh asin acos erfinv softplus prod sum cumprod "
    "cumsum softmax softmin log_softmax functional_softmax functional_log_softmax logsumexp layer_norm rms_norm group_norm norm "
    "vector_norm normalize cosine_similarity dist cdist pdist renorm"
)
LOWER = frozenset(_PRODUCTS.split())
"""Operations that run in the lower precision."""
FLOAT32 = {
    "cpu": frozenset(f"prod {_LOSSES}".split()),
    "cuda": frozenset(f"{_WIDE_RANGE} {_LOSSES} {_LOSSES_CUDA}".split()),
}
"""Operations that run in float32, by device type; all others keep their dtypes."""

State = tuple[torch.dtype | None, ...]


def state() -> State:
    """Autocast's dtype for each device type, None where it is off; an empty tuple if it is off everywhere.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     state()
    (torch.bfloat16, None)
    >>> state()
    ()
    """
    return _state() if is_any_autocast_enabled() else ()


def _state() -> State:
    return tuple(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in DEVICES)


def wanted(name: str, args: tuple[Any, ...]) -> torch.dtype | None:
    """The dtype that autocast casts an operation's operands to; None to leave them unchanged."""
    dtypes = state()
    found = next((a.fusion.device for a in _views(args)), None) if dtypes else None
    device = None if found is None else found.type
    if device not in DEVICES or dtypes[DEVICES.index(device)] is None:
        return None
    if name in LOWER:
        return dtypes[DEVICES.index(device)]
    # In torch this is the reciprocal of the tensor, followed by a product.
    divided = device == "cuda" and name == "div" and not isinstance(args[0], TensorView)
    return torch.float32 if divided or name in FLOAT32[device] else None


def operands(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point arguments of an operation, except float64, as in torch."""
    if isinstance(value, TensorView):
        eligible = value.dtype.is_floating_point and value.dtype != torch.float64
        return cast(value, dtype) if eligible and value.dtype != dtype else value
    if isinstance(value, list | tuple):
        return type(value)([operands(each, dtype) for each in value])
    return {key: operands(each, dtype) for key, each in value.items()} if isinstance(value, dict) else value


def _views(args: tuple[Any, ...]) -> list[TensorView]:
    inside = (each for a in args for each in (a if isinstance(a, list | tuple) else (a,)))
    return [each for each in inside if isinstance(each, TensorView)]
