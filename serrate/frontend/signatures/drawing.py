"""Functions that draw random numbers, under torch's signatures.

In: traced tensors and torch's options. Out: traced tensors. A function that has nothing to draw returns its argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from serrate.errors import CallError
from serrate.frontend import ops
from serrate.frontend.ops.common import Operand, refuse_in_place
from serrate.frontend.ops.movement import pulled
from serrate.frontend.ops.random import require_probability
from serrate.ir.domains import IterDomain
from serrate.ir.fusion import current_fusion
from serrate.ir.values import constant
from serrate.ir.view import TensorView


def rand(*size: Any, **options: Any) -> TensorView:
    return ops.rand_like(_shaped("rand", torch.rand, size, options))


def randn(*size: Any, **options: Any) -> TensorView:
    return ops.randn_like(_shaped("randn", torch.randn, size, options))


def randint(low: Any = None, high: Any = None, size: Any = None, **options: Any) -> TensorView:
    if size is None:
        low, high, size = 0, low, high
    low = 0 if low is None else low
    return ops.randint_like(_shaped("randint", torch.randint, (low, high, size), options), low, high)


def _shaped(name: str, function: Callable[..., torch.Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> TensorView:
    """A tensor of the shape and dtype that one of torch's functions gives; nothing reads its elements."""
    fusion = current_fusion()
    device = options.pop("device", None)
    if device is not None and (fusion.device is None or torch.device(device).type != fusion.device.type):
        raise CallError(f"{name}: the program runs on {fusion.device}, not on {device}")
    _refuse(name, {k: v for k, v in options.items() if k not in ("dtype", "size")})
    model = function(*args, **options, device="meta")
    domains = [IterDomain(size, name=fusion.fresh("d")) for size in model.shape]
    return pulled(fusion, model.dtype, domains, constant(0, model.dtype))


def rand_like(input: TensorView, *, dtype: torch.dtype | None = None, **options: Any) -> TensorView:
    _refuse("rand_like", options)
    return ops.rand_like(input, dtype)


def randn_like(input: TensorView, *, dtype: torch.dtype | None = None, **options: Any) -> TensorView:
    _refuse("randn_like", options)
    return ops.randn_like(input, dtype)


def randint_like(
    input: TensorView, low: int | None = None, high: int | None = None, *, dtype: torch.dtype | None = None, **options: Any
) -> TensorView:
    _refuse("randint_like", options)
    if high is None:
        low, high = 0, low
    if high is None:
        raise CallError("randint_like: pass high, or low and high")
    return ops.randint_like(input, low or 0, high, dtype)


def bernoulli(input: TensorView, p: float | None = None, *, generator: Any = None) -> TensorView:
    _refuse("bernoulli", {"generator": generator})
    if p is not None:
        require_probability("bernoulli", p)
    return ops.bernoulli(input, p)


def dropout(input: TensorView, p: Operand = 0.5, training: bool = True, inplace: bool = False) -> TensorView:
    refuse_in_place("dropout", inplace)
    if not isinstance(p, TensorView):
        require_probability("dropout", p)
        if not training or p == 0:
            return input
    return ops.dropout(input, p)


def torch_dropout(input: TensorView, p: Operand, train: bool) -> TensorView:
    return dropout(input, p, train)


def alpha_dropout(input: TensorView, p: float = 0.5, training: bool = False, inplace: bool = False) -> TensorView:
    refuse_in_place("alpha_dropout", inplace)
    require_probability("alpha_dropout", p)
    return ops.alpha_dropout(input, p) if training and p > 0 else input


def torch_alpha_dropout(input: TensorView, p: float, train: bool) -> TensorView:
    return alpha_dropout(input, p, train)


_IGNORED = {"layout": torch.strided, "memory_format": torch.preserve_format, "pin_memory": False, "requires_grad": False}
"""The options of torch's `..._like` functions, each with its only supported value; `device` may also be the input's."""


def _refuse(name: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value is not None and option == "generator":
            raise CallError(f"{name}: numbers are drawn from torch's default generator, which torch.manual_seed sets; pass none")
        if option == "device" and value is not None:
            raise CallError(f"{name}: the result is on the device of its input; move it, with .to({str(value)!r})")
        if option not in (*_IGNORED, "device", "generator"):
            raise CallError(f"{name} got an unexpected argument {option!r}; it takes dtype")
        if value is not None and option in _IGNORED and value != _IGNORED[option]:
            raise CallError(f"{name}: {option}={value} is not supported in a compiled program")
