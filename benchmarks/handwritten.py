"""The baseline: hand-written C++ for some tasks, compiled at run time.

In: a task. Out: a method that fills and returns one reused output: the baseline is the loops, not the allocator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import native
from benchmarks.methods import Call, Method
from benchmarks.tasks import Task

# as in handwritten.cpp
LONG = 2048
CHUNK = 1024


def method(task: Task) -> Method | None:
    """The hand-written loop, if there is one: in float32, with features."""
    make = _LOOPS.get(task.name)
    if make is None or task.data.values.dtype != torch.float32:
        return None
    return Method("hand C++", lambda: make(task))


def _call(function: Any, out: Tensor, *arguments: Tensor | int | float) -> Call:
    """The call with all arguments prepared; a float becomes a C float, an int is 64 bits wide."""
    ready = [_argument(each) for each in arguments]
    keep = arguments  # addresses alone do not keep tensors alive

    def call(_keep: object = keep) -> Tensor:
        function(*ready)
        return out

    return call


def _argument(value: Tensor | int | float) -> Any:
    if isinstance(value, Tensor):
        return native.pointer(value)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_longlong(value)


def _library(task: Task) -> ctypes.CDLL:
    return native.load("handwritten.cpp", f"FEATURES={task.data.values.shape[1]}")


def _partials(task: Task, per_chunk: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros((task.data.longest // CHUNK + 1) * per_chunk, dtype=dtype)


def _sum(task: Task) -> Call:
    data, features = task.data, task.data.values.shape[1]
    out = torch.zeros(data.rows, features)
    return _call(_library(task).sum, out, data.values, data.offsets, data.rows, out, _partials(task, features))


def _pointwise(task: Task) -> Call:
    values, (scale, bias) = task.data.values, task.operands
    out = torch.zeros_like(values)
    return _call(_library(task).pointwise, out, values, bias, float(scale), values.shape[0], out)


def _softmax(task: Task) -> Call:
    data, features = task.data, task.data.values.shape[1]
    out, partials = torch.zeros_like(data.values), _partials(task, 2 * features)
    scratch = torch.zeros(torch.get_num_threads() * LONG * features)
    return _call(_library(task).softmax, out, data.values, data.offsets, data.rows, out, partials, scratch)


def _layer_norm(task: Task) -> Call:
    data, epsilon = task.data, float(task.operands[0])
    out, partials = torch.zeros_like(data.values), _partials(task, 3, torch.float64)
    return _call(_library(task).layer_norm, out, data.values, data.offsets, data.rows, epsilon, out, partials)


def _grouped_matmul(task: Task) -> Call:
    data, weights = task.data, task.operands[0]
    groups, inner, outer = weights.shape
    if outer % 32:
        raise ValueError(f"columns must be a multiple of 32, the width of a register tile; got {outer}")
    library = native.load("grouped_matmul.cpp", f"INNER={inner}", f"OUTER={outer}")
    out = torch.zeros(data.values.shape[0], outer)
    return _call(library.grouped_matmul, out, data.values, weights, data.offsets, groups, out)


_LOOPS: dict[str, Callable[[Task], Call]] = {
    "sum": _sum,
    "pointwise": _pointwise,
    "softmax": _softmax,
    "layer norm": _layer_norm,
    "grouped matmul": _grouped_matmul,
}
