"""The interpreter: runs a kernel's function as written, with concrete tiles in its loops.

In: an instrumented function (`source.py`), block sizes, arguments. Out: the function's result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from serrate.errors import DeviceError, GradientError, KernelError
from serrate.frontend.kernel.machine import TORCH, current, running
from serrate.frontend.kernel.values import Lanes
from serrate.interpret.functions import getitem
from serrate.interpret.loops import LoopRun
from serrate.interpret.machine import Interpreting
from serrate.interpret.memory import load, store
from serrate.interpret.races import Accesses
from serrate.interpret.source import AnnotatedKernel, noted
from serrate.interpret.values import ConcreteValue
from serrate.tensor import JaggedTensor
from serrate.tensor.torch_private import has_tangent

PACKAGE = str(Path(__file__).parent.parent)


class _Indexing(TorchFunctionMode):
    """Lets tiles index plain torch tensors while a kernel runs."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.__getitem__ and (_has_lanes(args[1]) or _by_a_kernel(args[0], sys._getframe(1))):
            return getitem(args[0], args[1]) if isinstance(args[0], ConcreteValue) else load(args[0], args[1])
        if function is torch.Tensor.__setitem__ and (_has_lanes(args[1]) or isinstance(args[2], Lanes)):
            return store(args[0], args[1], args[2])
        return function(*args, **(kwargs or {}))


def _has_lanes(key: Any) -> bool:
    return isinstance(key, Lanes) or (isinstance(key, (tuple, list)) and any(isinstance(k, Lanes) for k in key))


def _by_a_kernel(x: Any, caller: FrameType) -> bool:
    """Whether the user's code indexes a plain tensor in a loop over tiles, where reads out of bounds give 0."""
    if not isinstance(x, torch.Tensor) or not current("an index").depth:
        return False
    return not caller.f_code.co_filename.startswith((PACKAGE, TORCH))


def prepare(function: Callable[..., Any]) -> AnnotatedKernel:
    """The instrumented function, compiled once."""
    return noted(function, lambda is_while: LoopRun(current("a loop of a kernel"), is_while))


def interpret(
    source: AnnotatedKernel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    block_sizes: Sequence[int | None] = (),
    block: int | str | None = None,
    check: bool = False,
) -> Any:
    """Runs a kernel. `block` is the size of every block that `block_sizes` leaves open; "whole" means the extent of its loop."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, (torch.Tensor, JaggedTensor)):
            _check(each)
    run = Interpreting(tuple(block_sizes), block, Accesses() if check else None, source.first, source.last)
    with running(run), _Indexing():
        result = source.function(*args, **kwargs)
    for each in result if isinstance(result, tuple) else [result]:
        if isinstance(each, Lanes):
            kind = "tile value" if isinstance(each, ConcreteValue) else "tile"
            raise KernelError(
                f"a kernel must return tensors, but this one returns a {kind}: store it to a tensor created before the loop"
            )
    return result


def _check(x: torch.Tensor | JaggedTensor) -> None:
    if x.device.type != "cpu":
        raise DeviceError(f"the kernel interpreter runs on a CPU, but an argument is on {x.device}: move it with .cpu()")
    if x.requires_grad and torch.is_grad_enabled():
        raise GradientError(
            "this kernel has no gradient: write @serrate.kernel(backward=...), or call it under torch.no_grad() or with detached "
            "tensors"
        )
    if has_tangent(x.values if isinstance(x, JaggedTensor) else x):
        raise GradientError("a kernel has no forward-mode gradient, but an argument has a tangent: call it with detached tensors")
