"""Torch functions on traced values, by name.

In: a torch function or method, and its arguments. Out: a `Traced` value, or an error if the function is not part of the language.
Also masks as conditions on indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from serrate.frontend.kernel.machine import refuse
from serrate.frontend.kernel.random import random_bits
from serrate.frontend.kernel.vocabulary import ELEMENTWISE, instead, name_of
from serrate.ir.expr import Less, const
from serrate.ir.loops import Number
from serrate.ir.values import Call, Constant, Value, constant
from serrate.tiles import products, reducing, shaping
from serrate.tiles.elementwise import cast, elementwise
from serrate.tiles.values import Traced, TracedTensor, TracedTile

if TYPE_CHECKING:
    from serrate.tiles.trace import Trace


def dispatch(trace: Trace, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Applies a torch function to traced values."""
    name = name_of(function)
    if name == "__getitem__":
        return _getitem(trace, args[0], args[1])
    args = [_operand(trace, a) for a in args]
    kwargs = {k: _operand(trace, a) for k, a in kwargs.items()}
    if name in ELEMENTWISE or function is random_bits:
        return elementwise(trace, function, name, args, kwargs)
    found = FUNCTIONS.get(name)
    if found is None:
        refuse(f"{name} is not part of the tile language: {instead(name)}")
    if "axis" in kwargs:
        kwargs["dim"] = kwargs.pop("axis")
    try:
        return found(trace, *args, **kwargs)
    except TypeError as error:
        if "argument" in str(error) and type(error) is TypeError:
            refuse(f"{name}: {error}")
        raise


def _operand(trace: Trace, a: Any) -> Any:
    if isinstance(a, TracedTile):
        return a.index
    if isinstance(a, TracedTensor):
        return trace.load(a, (slice(None),) * a.ndim)
    if isinstance(a, Tensor):
        if a.dim() == 0 and a.device.type == "cpu":
            return Traced(constant(a.item(), a.dtype), ())
        refuse(f"a tensor of shape {tuple(a.shape)} is used with tile values: create it before the loop, and index it as x[tile]")
    return a


def _getitem(trace: Trace, x: Any, key: Any) -> Any:
    if isinstance(x, TracedTensor):
        return trace.load(x, key)
    if isinstance(x, Tensor):
        refuse(
            f"a tensor of shape {tuple(x.shape)} comes from a function or an object: "
            "assign it to a variable before the loop, as weight = module.weight, and use that"
        )
    return shaping.getitem(trace, x.index if isinstance(x, TracedTile) else x, key)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "permute": shaping.permute,
    "transpose": shaping.transpose,
    "swapaxes": shaping.transpose,
    "t": shaping.t,
    "unsqueeze": shaping.unsqueeze,
    "squeeze": shaping.squeeze,
    "expand": shaping.expand,
    "broadcast_to": shaping.expand,
    "reshape": shaping.reshape,
    "view": shaping.reshape,
    "flatten": shaping.flatten,
    "zeros_like": shaping.like(0),
    "ones_like": shaping.like(1),
    "full_like": shaping.full_like,
    "sum": reducing.sum,
    "prod": reducing.prod,
    "mean": reducing.mean,
    "amax": reducing.amax,
    "amin": reducing.amin,
    "max": reducing.max_like("max", torch.maximum),
    "min": reducing.max_like("min", torch.minimum),
    "argmax": reducing.arg("max"),
    "argmin": reducing.arg("min"),
    "any": reducing.truth("any"),
    "all": reducing.truth("all"),
    "softmax": reducing.softmax,
    "logsumexp": reducing.logsumexp,
    "cumsum": reducing.cumulative("sum"),
    "cumprod": reducing.cumulative("prod"),
    "matmul": products.product,
    "mm": products.product,
    "bmm": products.product,
    "addmm": products.addmm,
    "baddbmm": products.addmm,
    "dot": products.product,
}


def conditions_of(trace: Trace, mask: Traced) -> tuple[Less, ...]:
    """A mask as conditions on indices: integer comparisons directly, anything else by its value in each lane."""
    found = conjunction(trace, mask.value, mask)
    if found is not None:
        return found
    one = trace.index_of(cast(mask, torch.int64))
    return (Less(const(0), one),)


def conjunction(trace: Trace, value: Value, whole: Traced) -> tuple[Less, ...] | None:
    """A mask as a conjunction of index comparisons; None if it is not one."""
    if isinstance(value, Constant):
        return () if value.number else (Less(const(0), const(0)),)
    if not isinstance(value, Call):
        return None
    if value.function == "cast" and value.args[0].dtype == torch.bool:
        return conjunction(trace, value.args[0], whole)
    if value.function == "logical_and":
        parts = [conjunction(trace, a, whole) for a in value.args]
        return None if None in parts else tuple(c for p in parts for c in p)  # type: ignore[union-attr]
    if value.function not in ("lt", "le", "gt", "ge", "eq") or any(a.dtype != torch.int64 for a in value.args):
        return None
    sides = []
    for a in value.args:
        if isinstance(a, Number):
            sides.append(a.expr)
        elif isinstance(a, Constant):
            sides.append(const(int(a.number)))
        else:
            sides.append(trace.index_of(trace.part(a, whole)))
    left, right = sides
    if value.function == "eq":
        return (Less(left, right + 1), Less(right, left + 1))
    return {
        "lt": (Less(left, right),),
        "le": (Less(left, right + 1),),
        "gt": (Less(right, left),),
        "ge": (Less(right, left + 1),),
    }[value.function]
