"""Tracing: a Python function over JaggedTensors and Tensors becomes a fusion.

In: a function and example arguments. Out: a fusion, and how arguments become its inputs. Traces are specialised on dtypes,
ranks, inner shapes and which arguments share a structure; never on lengths or on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from serrate.errors import TraceError
from serrate.frontend import ops, torch_names
from serrate.ir.fusion import Fusion
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor

_ = torch_names  # imported for what it installs

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Trace:
    """A traced function: its fusion, and the shape of what it returns."""

    fusion: Fusion
    rebuild: Callable[[Sequence[Any]], Any]


def key_of(args: Sequence[Any]) -> Key:
    """What a trace is specialised on: two calls with equal keys run the same fusion."""
    key: list[Any] = []
    jagged = [a for a in args if isinstance(a, JaggedTensor)]
    rows = {len(a) for a in jagged}
    for arg in args:
        if isinstance(arg, JaggedTensor):
            offsets = arg.structure.offsets
            first = next(k for k, other in enumerate(jagged) if _same(other, arg))
            key.append((arg.values.dtype, arg.values.shape[1:], len(offsets), offsets[0].dtype, first))
        elif isinstance(arg, torch.Tensor):
            key.append((arg.dtype, _static(arg, rows)))
        else:
            key.append((type(arg), arg))
    return tuple(key)


def _same(a: JaggedTensor, b: JaggedTensor) -> bool:
    # Not by numbers on a device: there a guess would be wrong where two structures happen to have one shape, and to be told
    # later would change what a call is specialised on. Where such structures meet, the program checks that they agree.
    return a.structure is b.structure or a.structure.known_equal(b.structure)


def _static(arg: torch.Tensor, rows: set[int]) -> tuple[int | None, ...]:
    """Extents a trace may rely on: all but a first one that counts rows."""
    shape: tuple[int | None, ...] = tuple(arg.shape)
    return (None, *shape[1:]) if arg.ndim >= 2 and shape[0] in rows and shape[0] != 1 else shape


def tensors_of(args: Sequence[Any]) -> list[torch.Tensor]:
    """The inputs of the fusion, in order: values, and the offsets of each structure once."""
    out: list[torch.Tensor] = []
    seen: list[JaggedTensor] = []
    for arg in args:
        if isinstance(arg, JaggedTensor):
            out.append(arg.values)
            if not any(_same(other, arg) for other in seen):
                out.extend(arg.structure.offsets)
                seen.append(arg)
        elif isinstance(arg, torch.Tensor):
            out.append(arg)
    return out


def trace(function: Callable[..., Any], args: Sequence[Any]) -> Trace:
    """Calls `function` on traced arguments and records what it does."""
    fusion = Fusion(name=_identifier(function))
    rows = {len(a) for a in args if isinstance(a, JaggedTensor)}
    seen: list[tuple[JaggedTensor, list[TensorView]]] = []
    with fusion:
        given = [_argument(fusion, arg, rows, seen) for arg in args]
        result = function(*given)
        leaves: list[TensorView] = []
        form = _flatten(result, leaves, fusion)
        fusion.output(*leaves)
    return Trace(fusion, lambda values: _unflatten(form, iter(values)))


def _identifier(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "program")
    return name if name.isidentifier() else "program"


def _argument(fusion: Fusion, arg: Any, rows: set[int], seen: list[tuple[JaggedTensor, list[TensorView]]]) -> Any:
    if isinstance(arg, torch.Tensor):
        return fusion.input(_static(arg, rows), arg.dtype)
    if not isinstance(arg, JaggedTensor):
        return arg
    values = fusion.input((None, *arg.values.shape[1:]), arg.values.dtype)
    offsets = next((views for other, views in seen if _same(other, arg)), None)
    if offsets is None:
        offsets = [fusion.input((None,), o.dtype) for o in arg.structure.offsets]
        seen.append((arg, offsets))
    view = values
    for level in reversed(offsets):
        view = ops.as_nested(view, level, ragged_dim=0)
    return view


def _flatten(result: Any, leaves: list[TensorView], fusion: Fusion) -> Any:
    """The form of a result: an int for each tensor, containers as they are."""
    if isinstance(result, TensorView):
        if result.fusion is not fusion:
            raise TraceError("a traced function returned a tensor of another trace")
        leaves.append(result)
        return len(leaves) - 1
    if isinstance(result, tuple | list):
        return type(result)(_flatten(r, leaves, fusion) for r in result)
    if isinstance(result, dict):
        return {k: _flatten(v, leaves, fusion) for k, v in result.items()}
    raise TraceError(
        "a traced function must return tensors computed from its arguments (or tuples, lists, dicts of them), "
        f"got {type(result).__name__}"
    )


def _unflatten(form: Any, values: Any) -> Any:
    if isinstance(form, int):
        return next(values)
    if isinstance(form, dict):
        return {k: _unflatten(v, values) for k, v in form.items()}
    return type(form)(_unflatten(f, values) for f in form)
