"""Capture: plain torch tensors used together with traced ones, and torch functions called while tracing.

In: a tensor that is not traced. Out: the traced tensor that represents it, an input of the fusion being traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from serrate.errors import CallError, InPlaceError, TraceError
from serrate.frontend.leaves import Leaf, leaves_of, mapped
from serrate.ir.view import IN_PLACE, Size, TensorView, user_line

_current: ContextVar[Callable[[Leaf], TensorView] | None] = ContextVar("capture", default=None)


def refuse_eager(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises if an operation is called on plain tensors outside a traced function or a fusion."""
    if _current.get() is not None or any(isinstance(each, TensorView) for each in (*args, *kwargs.values())):
        return
    given = leaves_of(args, kwargs)
    if given:
        raise CallError(
            f"ops.{name} records a step of a program and does not run on a {type(given[0]).__name__}: call it inside a "
            "@serrate.jit function, or on the inputs of an ir.Fusion"
        )


def records_gradients() -> bool:
    """False under `torch.no_grad()` in a traced function. What a fusion records does not depend on the mode around it."""
    return _current.get() is None or torch.is_grad_enabled()


def is_tracing() -> bool:
    """Whether a function is being traced, so that ragged tensors that are not arguments are captured."""
    return _current.get() is not None


def captured(value: Any) -> Any:
    """Arguments of an operation, with every plain tensor replaced by a traced one."""
    return mapped(value, _captured)


def _captured(leaf: Leaf) -> TensorView:
    capture = _current.get()
    if capture is None:
        raise CallError(
            f"a {type(leaf).__name__} is used with a tensor of a fusion ({user_line()}): make it an input of the fusion and "
            "pass it in the call"
        )
    return capture(leaf)


_DRAWN = (
    "rand rand_like randn randn_like randint randint_like randperm normal bernoulli multinomial poisson dropout alpha_dropout"
)
_DRAWN_IN_PLACE = "random_ normal_ uniform_ bernoulli_ exponential_ bernoulli multinomial"
RANDOM = frozenset(
    [
        *(getattr(torch, name) for name in _DRAWN.split()),
        *(getattr(torch.Tensor, name) for name in _DRAWN_IN_PLACE.split()),
        torch.nn.functional.dropout,
        torch.nn.functional.alpha_dropout,
    ]
)
"""Functions whose result differs from call to call."""

_ASKED = "shape dtype device ndim layout requires_grad is_leaf grad_fn grad itemsize nbytes is_cpu is_cuda is_sparse is_quantized"
_METHODS = (
    "size dim numel nelement stride is_contiguous is_floating_point is_complex element_size get_device __len__ __hash__ __repr__"
)
FACTS = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _ASKED.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        torch.is_floating_point,
        torch.numel,
        torch.result_type,
    ]
)
"""Properties of a tensor that can be read without its elements."""


def _computed(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of torch's own function, which sees symbolic sizes as numbers: the trace is specialised to them."""
    return function(*_numbers(tuple(args)), **_numbers(dict(kwargs)))


def _numbers(value: Any) -> Any:
    if isinstance(value, Size):
        return int(value)
    if isinstance(value, slice):
        return slice(_numbers(value.start), _numbers(value.stop), _numbers(value.step))
    if isinstance(value, dict):
        return {name: _numbers(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_numbers(each) for each in value)
    return value


def _writes(function: Any) -> bool:
    """Whether a torch function writes to its first argument."""
    name = getattr(function, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


_WRITING = frozenset((*IN_PLACE, "__idiv__", "__setitem__"))


class TensorCapture(TorchFunctionMode):
    """While a function is traced, also traces operations on tensors that are not arguments, so that every call runs them again.
    Tensors created from scratch (`torch.arange(4)`) are the same in every call, and are computed immediately."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, torch.Tensor] = {}
        self.overwritten: dict[int, torch.Tensor] = {}
        """Tensors into which traced tensors were written: their contents are known only at run time."""
        self.paused = False
        """Whether the current operation was not issued by the traced function."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return _computed(function, args, kwargs)
        if any(id(leaf) in self.overwritten for leaf in leaves_of(args, kwargs)):
            self._refuse(function, "uses a tensor into which a traced one was written")
        if TensorView in types:
            if _writes(function):
                return self._written(function, *args)
            return TensorView.__torch_function__(function, types, args, kwargs)
        given = leaves_of(args, kwargs)
        if function in FACTS:
            for leaf in given:
                if id(leaf) not in self.made:
                    # The answer may decide what is traced; as an input, the tensor becomes part of the trace's key.
                    view = _captured(leaf)
                    for domain in view.domains:
                        if not domain.is_ragged:
                            view.fusion.fixed(domain.extent_expr)
            return _computed(function, args, kwargs)
        if all(id(leaf) in self.made for leaf in given):
            return self._at_once(function, args, kwargs)
        if _writes(function):
            self._refuse(function, "writes to a tensor that is not an argument")
        if any(not isinstance(leaf, torch.Tensor) for leaf in given):
            return _computed(function, args, kwargs)
        if function not in TensorView.operators:
            raise TraceError(
                f"{resolve_name(function)} of a tensor that is not an argument cannot be traced ({user_line()}); compute it "
                "before the call and pass the result as an argument"
            )
        return TensorView.operators[function](*args, **kwargs)

    def _written(self, function: Any, own: Any, *others: Any) -> Any:
        """`total += x.sum(1)` on a tensor created in the function, which is traced from then on."""
        # Python's `+=` arrives here as `add_`.
        name = getattr(function, "__name__", "").removesuffix("_")
        if name not in IN_PLACE.values() or len(others) != 1 or id(own) not in self.made:
            self._refuse(function, "writes to a tensor that is not an argument")
        result = _captured(own).written(name, others[0])
        self.overwritten[id(own)] = own
        return result

    def _refuse(self, function: Any, what: str) -> NoReturn:
        # Must not be a TypeError, for which torch's operators fall back to the out-of-place version.
        raise InPlaceError(
            f"{resolve_name(function)} {what} in place ({user_line()}), which cannot be traced; compute a new tensor and return "
            "it"
        )

    def _at_once(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function in RANDOM and function in TensorView.operators:
            return TensorView.operators[function](*args, **kwargs)
        if function in RANDOM:
            raise TraceError(
                f"random numbers drawn while tracing would be the same in every call ({user_line()}); draw them "
                "before the call and pass them as an argument"
            )
        result = _computed(function, args, kwargs)
        for leaf in leaves_of((result,), {}):
            if isinstance(leaf, torch.Tensor):
                self.made[id(leaf)] = leaf
        return result


@contextmanager
def capturing(capture: Callable[[Leaf, bool], TensorView]) -> Iterator[None]:
    """Installs `capture`, which returns the traced tensor for a plain one; the flag: whether the function created it."""
    watching = TensorCapture()

    def aside(leaf: Leaf) -> TensorView:
        watching.paused = True
        try:
            return capture(leaf, id(leaf) in watching.made)
        finally:
            watching.paused = False

    token = _current.set(aside)
    try:
        with watching:
            yield
    finally:
        _current.reset(token)
