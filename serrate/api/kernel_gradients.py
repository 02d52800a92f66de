"""Kernels with a gradient: a forward and a backward kernel as one `autograd.Function`.

In: a kernel, and a function that computes gradients: it gets the kernel's arguments, then its results, then the gradients of its
results, and returns one gradient for each argument that is a floating-point tensor. Out: results that torch's autograd records.
If gradients of gradients are wanted, the backward kernel is itself called with gradients, so it needs a backward kernel too.

With `backward="auto"` there is no such function: each device loop is recorded as an operation that stores to its results, and its
gradient is that of the fusion it is lifted to (`tiles/lift.py`). torch records the Python code around the loops as usual.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from serrate.autograd.adjoint import gradients
from serrate.autograd.saved import Backward, backward_of
from serrate.errors import CallError, GradientError, StrategyError
from serrate.ir.values import Tensor
from serrate.ir.view import users_level
from serrate.tensor import JaggedTensor
from serrate.tiles.host import CompiledKernel
from serrate.tiles.launch_site import LaunchSite
from serrate.tiles.lift import LiftedLoop, NotLifted
from serrate.tiles.sources import Items, flattened
from serrate.tiles.stage import LoopStage, Options

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
        given = tuple(map(_packed, given))
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
        if isinstance(gradient, JaggedTensor) and not isinstance(x, JaggedTensor):
            raise GradientError(f"{self.name}: gradient {k} of its backward kernel is ragged, and the argument is not")
        wanted, values = x.with_gradient(gradient) if isinstance(x, JaggedTensor) else (x, _values(gradient))
        if values.shape != wanted.shape:
            raise GradientError(
                f"{self.name}: gradient {k} of its backward kernel has the shape {list(values.shape)}, and the values of the "
                f"argument {list(wanted.shape)}"
            )
        return values


def check_backward(backward: object) -> None:
    """Raises unless this can compute gradients."""
    if not callable(backward) and backward != "auto":
        raise CallError(f'backward= is a kernel or a function that returns gradients, or "auto"; got {backward!r}')


def _inside(container: Any) -> list[Any]:
    parts = container.values() if isinstance(container, dict) else container
    return [each for x in parts for each in (_inside(x) if isinstance(x, list | tuple | dict) else (x,))]


def _packed(x: Any) -> Any:
    """A ragged argument with its rows back to back, as gradients have them, if it has one ragged dim. Packing is recorded, so
    gaps get no gradient."""
    return x.contiguous() if isinstance(x, JaggedTensor) and x.requires_grad and len(x.jagged_dims) == 1 else x


def _values(x: torch.Tensor | JaggedTensor) -> torch.Tensor:
    return x.values if isinstance(x, JaggedTensor) else x


def _has_values(x: object) -> bool:
    return isinstance(x, torch.Tensor | JaggedTensor)


def _is_floating(x: Any) -> bool:
    return _has_values(x) and bool(x.dtype.is_floating_point)


class _KernelCall:
    """One call: its programs, and the form of its results."""

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


# --- derived gradients -------------------------------------------------------------------------------------------------------


class DerivedGradients:
    """A kernel whose gradients are derived from its loops."""

    def __init__(self, function: Callable[..., Any], kernel: Callable[[], CompiledKernel]) -> None:
        self.name, self._function, self._kernel = function.__name__, function, kernel
        self._hosts: dict[CompiledKernel, Callable[..., Any]] = {}
        self._loops: dict[LoopStage, _RecordedLoop] = {}

    def are_wanted(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the gradient of an argument is recorded."""
        return requires_gradient(_inside([*args, *kwargs.values()]))

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the kernel, and records its loops."""
        kernel = self._kernel()
        kernel.refresh()
        if kernel not in self._hosts:
            self._hosts[kernel] = kernel.with_launches(self._launch, measure=True)
        return self._hosts[kernel](*map(_packed, args), **{name: _packed(x) for name, x in kwargs.items()})

    def _launch(self, site: LaunchSite, given: dict[str, Any]) -> None:
        """A device loop: recorded if something that it reads requires a gradient."""
        plain = {name: _detached(value) for name, value in given.items()}
        if not requires_gradient(_inside(given)):
            site(plain)
            return
        stage, items = site.asked(plain)
        if stage not in self._loops:
            self._loops[stage] = _RecordedLoop(self.name, stage, self._lifted(stage))
        self._loops[stage](site, plain, items, flattened(given))

    def _lifted(self, stage: LoopStage) -> LiftedLoop:
        try:
            return stage.lifted
        except NotLifted as error:
            code = self._function.__code__
            text = linecache.getline(code.co_filename, error.line).strip() if error.line is not None else ""
            where = f"line {error.line} ({text})" if text else "one of its loops"
            raise GradientError(
                f'{self.name}: backward="auto" cannot differentiate {where}: {error.reason}. Write a backward kernel, and pass '
                "it: @serrate.kernel(backward=...)"
            ) from None


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor | JaggedTensor):
        return value.detach() if value.requires_grad else value
    if type(value) is dict:
        return {key: _detached(each) for key, each in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value


class BackwardProgram:
    """The backward program of a loop for some gradients, which computes everything from inputs."""

    def __init__(self, part: Backward, options: Options) -> None:
        self.part, self._options = part, options
        self.strategy = None if options.alone else options.strategy
        """The kernel's own strategy, unless it turns out not to apply to this program."""

    @functools.cached_property
    def _named(self) -> Callable[..., Any]:
        return self.part.fusion.compile(self._options.backend, self.strategy, policy=self._options.policy)

    @functools.cached_property
    def _usual(self) -> Callable[..., Any]:
        return self.part.fusion.compile(self._options.backend, policy=self._options.policy)

    @property
    def program(self) -> Any:
        """The backward program, under the named strategy or under the usual plan."""
        return self._usual if self.strategy is None else self._named

    def __call__(self, *args: torch.Tensor) -> list[torch.Tensor]:
        """The gradients that are not zero whatever arrives."""
        if all(place is None for place in self.part.found):
            return []
        try:
            made = self.program(*args)
        except StrategyError:
            if self.strategy is None:
                raise
            self.strategy = None
            made = self._usual(*args)
        return [x.values if isinstance(x, JaggedTensor) else x for x in (made if isinstance(made, tuple) else (made,))]


class _RecordedLoop:
    """A device loop and its gradient."""

    def __init__(self, name: str, stage: LoopStage, lifted: LiftedLoop) -> None:
        self.name, self.stage, self.lifted = name, stage, lifted
        self._backward: dict[tuple[int, ...], BackwardProgram] = {}
        self._told: set[int] = set()

    def __call__(self, site: LaunchSite, plain: dict[str, Any], items: Items, given: Mapping[str, Any]) -> None:
        numbers = self.stage.environment(items)
        for axis, last, end, exact in self.lifted.limits:
            left = end.evaluate(numbers) - last.evaluate(numbers)
            if left < 0 or (exact and left > 0):
                where = "goes past the end of a tensor" if left < 0 else "leaves rows out"
                raise GradientError(f'{self.name}: backward="auto" cannot differentiate {axis}, which {where}')
        stored = [self._original(t, given, None) for t in self.lifted.stored]
        parts = [tuple(None if end is None else int(end.evaluate(numbers)) for end in shape) for shape in self.lifted.shapes]
        for x, part, whole in zip(stored, parts, self.lifted.whole, strict=True):
            if x.requires_grad and not (whole and part == tuple(x.shape)):
                raise GradientError(
                    f'{self.name}: backward="auto" cannot differentiate a store that may leave elements of a tensor as they are, '
                    "if that tensor has a gradient already: store to a new tensor, and combine the two after the loop"
                )
        inputs: dict[int, torch.Tensor] = {}
        sizes: dict[int, int] = {}
        for k, (kind, what) in enumerate(self.lifted.sources):
            if kind == "size":
                sizes[k] = int(what.evaluate(numbers))  # type: ignore[union-attr]
            else:
                inputs[k] = self.stage.source(self.lifted.sources[k], items)
                if kind == "tensor" and inputs[k].is_floating_point():
                    inputs[k] = self._original(what, given, inputs[k])
        wanted = [k for k, x in inputs.items() if x.requires_grad]
        floating = [k for k, x in enumerate(stored) if x.is_floating_point()]
        needed = self.backward(tuple(wanted)).part.inputs
        passed = [k for k in inputs if k in wanted or k in needed]
        call = _LoopCall(self, passed, [k for k in passed if k in needed], sizes, floating, parts)
        _record_loop(call, lambda: site(plain), *(inputs[k] for k in passed), *(stored[k] for k in floating))

    def _original(self, tensor: Any, given: Mapping[str, Any], other: torch.Tensor | None) -> torch.Tensor:
        """A tensor of the loop as the user has it, with its history."""
        path = self.stage.path(tensor)
        found = given.get(path[0])
        if isinstance(found, torch.Tensor) and len(path) == 1:
            return found
        if isinstance(found, JaggedTensor) and path[1:] == ("values",):
            return found.values
        assert other is not None
        return other

    def packed(self, k: int, x: torch.Tensor) -> torch.Tensor:
        """An input of the backward program with its elements side by side; says so, once, where that takes a copy. The kernel
        itself reads it in place."""
        if x.is_contiguous():
            return x
        if k not in self._told:
            self._told.add(k)
            what = self.lifted.sources[k].what
            name = ".".join(map(str, self.stage.path(what))) if isinstance(what, Tensor) else str(what)
            warnings.warn(
                f"{self.name}: {name} is not contiguous, and its gradients copy it at every call; call .contiguous() once before",
                stacklevel=users_level(),
            )
        return x.contiguous()

    def backward(self, wanted: tuple[int, ...]) -> BackwardProgram:
        """The backward program for gradients of these inputs."""
        if wanted not in self._backward:
            made = gradients(self.lifted.fusion, wanted)
            results = [view.tensor.memory.name for view in self.lifted.fusion.outputs]
            self._backward[wanted] = BackwardProgram(backward_of(made, results, "inputs"), self.stage.options)
        return self._backward[wanted]


@dataclass(frozen=True)
class _LoopCall:
    """One launch. It holds no tensors: torch keeps those that are saved, for as long as it needs them."""

    loop: _RecordedLoop
    passed: list[int]
    """The inputs of the fusion that are recorded, or saved."""
    saved: list[int]
    """The inputs that the backward program needs."""
    sizes: dict[int, int]
    """The inputs that have a size and no contents."""
    floating: list[int]
    """The results that have gradients."""
    parts: list[tuple[int | None, ...]]
    """How much of each result is stored."""


class _LoopFunction(torch.autograd.Function):
    """Runs a device loop, which stores to its last arguments, and later the backward program of its fusion."""

    @staticmethod
    def forward(ctx: Any, call: _LoopCall, run: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        run()
        count = len(call.passed)
        inputs = dict(zip(call.passed, tensors, strict=False))
        ctx.call = call
        # The shapes of gradients that are zero.
        ctx.wanted = {k: (x.shape, x.dtype, x.device) for k, x in inputs.items() if x.requires_grad}
        ctx.save_for_backward(*(inputs[k] for k in call.saved))
        ctx.mark_dirty(*tensors[count:])
        return tensors[count:]

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _LoopCall = ctx.call
        inputs = dict(zip(call.saved, ctx.saved_tensors, strict=True))
        needed = [k for k, wants in zip(call.passed, ctx.needs_input_grad[2:], strict=False) if wants]
        program = call.loop.backward(tuple(needed))
        if not {*program.part.inputs} <= inputs.keys() | call.sizes.keys():
            # Fewer gradients are wanted than could have been, and that program takes its sizes from another input.
            needed = [*ctx.wanted]
            program = call.loop.backward(tuple(needed))
        arriving = {k: grad[tuple(slice(n) for n in call.parts[k])] for k, grad in zip(call.floating, upstream, strict=True)}
        for k in program.part.inputs:
            if k in call.sizes:
                inputs[k] = torch.empty(call.sizes[k], dtype=torch.uint8, device=call.loop.stage.device)
        given = [call.loop.packed(k, inputs[k]) for k in program.part.inputs] + [
            arriving[k].contiguous() for k in program.part.given
        ]
        found = program(*given)
        places = dict(zip(needed, program.part.found, strict=True))
        made = {k: _zeros(*ctx.wanted[k]) if place is None else found[place] for k, place in places.items()}
        return (None, None, *(made.get(k) for k in call.passed), *([None] * len(call.floating)))


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


_record_loop: Callable[..., tuple[torch.Tensor, ...]] = _LoopFunction.apply
