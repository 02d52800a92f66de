"""Leaves: the tensors among the arguments of a call, including those in lists, tuples, dicts and keyed tensors.

In: arguments. Out: their tensors in order, or the same arguments with every tensor replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from serrate.errors import CallError
from serrate.frontend.keyed import TracedKeyed
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor, KeyedJaggedTensor

Leaf = JaggedTensor | torch.Tensor
Leaves = Sequence[Leaf]
"""The tensors among the arguments of a call, in order."""


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """The tensors among arguments, in order.

    >>> leaves_of([torch.tensor(1), 2], {"more": (torch.tensor(3),)})
    [tensor(1), tensor(3)]
    """
    found: list[Leaf] = []
    mapped(args, found.append)
    mapped(kwargs, found.append)
    return found


def refuse_nested(leaves: Leaves) -> None:
    """Raises for torch's own nested tensors, of either layout."""
    if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in leaves):
        raise CallError("torch's nested tensors are not operands: convert with JaggedTensor.from_torch_nested(nt) first")


def causal_variant(value: Any) -> str | None:
    """The variant of a `CausalBias` of torch, None for other values. It is a tensor only in name: it marks where the diagonal of
    a causal mask starts, whatever the lengths."""
    bias = sys.modules.get("torch.nn.attention.bias")  # takes a second to import, so only a caller's own import counts
    return value.variant.name.lower() if bias is not None and isinstance(value, bias.CausalBias) else None


def mapped(value: Any, change: Callable[[Leaf], Any]) -> Any:
    """Arguments with `change` applied to every tensor.

    >>> mapped(([torch.tensor(1)], 2), float)
    ([1.0], 2)
    """
    if isinstance(value, TensorView):
        # Already traced; while tracing, `isinstance` takes it for a ragged tensor.
        return value
    if isinstance(value, JaggedTensor | torch.Tensor):
        return causal_variant(value) or change(value)
    if isinstance(value, KeyedJaggedTensor):
        return TracedKeyed(value, change)
    if isinstance(value, list | tuple):
        items = [mapped(each, change) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: mapped(each, change) for name, each in value.items()}
    return value
