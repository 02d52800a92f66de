"""Kernels with a gradient: a forward and a backward kernel as one differentiable function of torch.

In: a kernel, and a function that computes gradients: it gets the kernel's arguments, then its results, then the gradients of its
results, and returns one gradient for each argument that is a floating-point tensor. Out: results that torch's autograd records.
If gradients of gradients are wanted, the backward kernel is itself called with gradients, so it needs a backward kernel too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from serrate.errors import CallError, GradientError
from serrate.tensor import JaggedTensor

Gradient = torch.Tensor | JaggedTensor | None


def requires_gradient(args: Sequence[Any]) -> bool:
    """Whether the gradient of an argument is recorded."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor | JaggedTensor) and x.requires_grad for x in args)


class KernelPair:
    """A kernel and its backward kernel."""

    def __init__(
        self, name: str, forward: Callable[..., Any], function: Callable[..., Any], backward: Callable[..., Any]
    ) -> None:
        self.name, self.forward, self.backward = name, forward, backward
        self._signature = inspect.signature(function)

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the kernel, and records its gradients if an argument requires one."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise GradientError(
                f"{self.name}: a kernel with backward= takes arguments by position, not {', '.join(bound.kwargs)}"
            )
        given = bound.args
        for k, x in enumerate(given):
            if isinstance(x, list | tuple | dict) and requires_gradient(_inside(x)):
                raise GradientError(f"{self.name}: argument {k} contains a tensor that requires grad: pass it as an argument")
        if not requires_gradient(given):
            return self.forward(*given)
        call = _KernelCall(self, given)
        made = _apply(call, *(_values(x) for x in given if _has_values(x)))
        results = tuple(x if like is None else like.with_values(x) for x, like in zip(made, call.ragged, strict=True))
        return results if call.several else results[0]

    def gradients(self, given: Sequence[Any], results: Sequence[Any], upstream: Sequence[Any]) -> list[torch.Tensor | None]:
        """The gradient of each floating-point tensor among the arguments, checked."""
        found = self.backward(*given, *results, *upstream)
        found = found if isinstance(found, tuple) else (found,)
        wanted = [x for x in given if _is_floating(x)]
        if len(found) != len(wanted):
            raise GradientError(
                f"{self.name}: its backward kernel must return one gradient for each of the {len(wanted)} floating-point tensors "
                f"among its arguments (None for zero), got {len(found)}"
            )
        return [self._checked(k, x, g) for k, (x, g) in enumerate(zip(wanted, found, strict=True))]

    def _checked(self, k: int, x: Any, gradient: Gradient) -> torch.Tensor | None:
        if gradient is None:
            return None
        values, wanted = _values(gradient), _values(x)
        if isinstance(gradient, JaggedTensor) and not isinstance(x, JaggedTensor):
            raise GradientError(f"{self.name}: gradient {k} of its backward kernel is ragged, and the argument is not")
        if values.shape != wanted.shape:
            raise GradientError(
                f"{self.name}: gradient {k} of its backward kernel has the shape {list(values.shape)}, and the values of the "
                f"argument {list(wanted.shape)}"
            )
        return values


def check_backward(backward: object) -> None:
    """Raises unless this can compute gradients."""
    if not callable(backward):
        raise CallError(f"backward= is a kernel or a function that returns gradients, got {backward!r}")


def _inside(container: Any) -> list[Any]:
    parts = container.values() if isinstance(container, dict) else container
    return [each for x in parts for each in (_inside(x) if isinstance(x, list | tuple | dict) else (x,))]


def _values(x: torch.Tensor | JaggedTensor) -> torch.Tensor:
    return x.values if isinstance(x, JaggedTensor) else x


def _has_values(x: object) -> bool:
    return isinstance(x, torch.Tensor | JaggedTensor)


def _is_floating(x: Any) -> bool:
    return _has_values(x) and bool(x.dtype.is_floating_point)


class _KernelCall:
    """One call: what runs, and what its results look like."""

    def __init__(self, pair: KernelPair, given: Sequence[Any]) -> None:
        self.pair = pair
        self.given = [None if _has_values(x) else x for x in given]
        """The arguments that are not tensors."""
        self.rows = [(x if isinstance(x, JaggedTensor) else None) for x in given if _has_values(x)]
        self.places = [k for k, x in enumerate(given) if _has_values(x)]
        self.ragged: list[JaggedTensor | None] = []
        self.several = False

    def arguments(self, values: Sequence[torch.Tensor]) -> list[Any]:
        """The arguments of the kernel, with these values."""
        found = list(self.given)
        for k, own, like in zip(self.places, values, self.rows, strict=True):
            found[k] = own if like is None else like.with_values(own)
        return found


class _KernelFunction(torch.autograd.Function):
    """Runs the kernel, and later its backward kernel."""

    @staticmethod
    def forward(ctx: Any, call: _KernelCall, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = call.pair.forward(*call.arguments(values))
        call.several = isinstance(made, tuple)
        results = made if isinstance(made, tuple) else (made,)
        if not all(isinstance(x, torch.Tensor | JaggedTensor) for x in results):
            raise GradientError(f"{call.pair.name}: a kernel with gradients must return tensors, got {made!r}")
        call.ragged = [x if isinstance(x, JaggedTensor) else None for x in results]
        found = tuple(map(_values, results))
        if any(x.data_ptr() == y.data_ptr() and x.numel() for x in found for y in values):
            raise GradientError(f"{call.pair.name}: a kernel with gradients must return new tensors, not its arguments")
        ctx.call, ctx.count = call, len(values)
        ctx.save_for_backward(*values, *found)
        ctx.mark_non_differentiable(*(x for x in found if not x.dtype.is_floating_point))
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _KernelCall = ctx.call
        stored = ctx.saved_tensors
        given = call.arguments(stored[: ctx.count])
        results = [x if like is None else like.with_values(x) for x, like in zip(stored[ctx.count :], call.ragged, strict=True)]
        arriving = [
            g.contiguous() if like is None else like.with_values(g.contiguous())
            for g, like in zip(upstream, call.ragged, strict=True)
        ]
        found = iter(call.pair.gradients(given, results, arriving))
        return (None, *(next(found) if x.dtype.is_floating_point else None for x in stored[: ctx.count]))


_apply: Callable[..., tuple[torch.Tensor, ...]] = _KernelFunction.apply
