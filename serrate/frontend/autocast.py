"""`torch.autocast`: which operations take other dtypes than those of their operands.

In: the name of an operation of torch's, and its operands. Out: the operands, cast as torch's autocast does it on the device where
the tensors of the traced call are. The state is read while tracing, and is part of what a trace is found by.
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
"""Operations that are done in the lower precision."""
FLOAT32 = {
    "cpu": frozenset(f"prod {_LOSSES}".split()),
    "cuda": frozenset(f"{_WIDE_RANGE} {_LOSSES} {_LOSSES_CUDA}".split()),
}
"""Operations that are done in float32, by the type of device; all others take what they are given."""

State = tuple[torch.dtype | None, ...]


def state() -> State:
    """The dtype of autocast for each type of device; None where it is off. Nothing at all if it is off everywhere.

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
    """The dtype that autocast gives the operands of an operation; None for that which they have."""
    dtypes = state()
    device = next((a.fusion.device for a in _views(args)), None) if dtypes else None
    if device not in DEVICES or dtypes[DEVICES.index(device)] is None:
        return None
    if name in LOWER:
        return dtypes[DEVICES.index(device)]
    # The reciprocal of a tensor, in torch, and then a product.
    divided = device == "cuda" and name == "div" and not isinstance(args[0], TensorView)
    return torch.float32 if divided or name in FLOAT32[device] else None


def operands(value: Any, dtype: torch.dtype) -> Any:
    """Arguments of an operation in another dtype: floating point ones, but not float64, as in torch."""
    if isinstance(value, TensorView):
        eligible = value.dtype.is_floating_point and value.dtype != torch.float64
        return cast(value, dtype) if eligible and value.dtype != dtype else value
    if isinstance(value, list | tuple):
        return type(value)([operands(each, dtype) for each in value])
    return {key: operands(each, dtype) for key, each in value.items()} if isinstance(value, dict) else value


def _views(args: tuple[Any, ...]) -> list[TensorView]:
    inside = (each for a in args for each in (a if isinstance(a, list | tuple) else (a,)))
    return [each for each in inside if isinstance(each, TensorView)]
