"""The bar: hand-written C++ for each work, compiled at run time.

Comes in: the work's tensors. Goes out: a callable that fills and returns one reused output: the loops are the bar, not the
allocator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import native
from benchmarks.data import Ragged

# as in handwritten.cpp
LONG = 2048
CHUNK = 1024


def _library(features: int) -> ctypes.CDLL:
    return native.load("handwritten.cpp", f"FEATURES={features}")


def _partials(data: Ragged, per_chunk: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros((data.longest // CHUNK + 1) * per_chunk, dtype=dtype)


def sum_ragged(data: Ragged) -> Callable[[], Tensor]:
    features = data.values.shape[1]
    library, out, partials = _library(features), torch.zeros(data.rows, features), _partials(data, features)

    def call() -> Tensor:
        rows = ctypes.c_longlong(data.rows)
        library.sum(
            native.pointer(data.values), native.pointer(data.offsets), rows, native.pointer(out), native.pointer(partials)
        )
        return out

    return call


def pointwise(data: Ragged, scale: float, bias: Tensor) -> Callable[[], Tensor]:
    library, out = _library(data.values.shape[1]), torch.zeros_like(data.values)

    def call() -> Tensor:
        total = ctypes.c_longlong(data.values.shape[0])
        library.pointwise(native.pointer(data.values), native.pointer(bias), ctypes.c_float(scale), total, native.pointer(out))
        return out

    return call


def softmax(data: Ragged) -> Callable[[], Tensor]:
    features = data.values.shape[1]
    library, out, partials = _library(features), torch.zeros_like(data.values), _partials(data, 2 * features)
    scratch = torch.zeros(torch.get_num_threads() * LONG * features)

    def call() -> Tensor:
        rows = ctypes.c_longlong(data.rows)
        inputs = (native.pointer(data.values), native.pointer(data.offsets), rows)
        library.softmax(*inputs, native.pointer(out), native.pointer(partials), native.pointer(scratch))
        return out

    return call


def layer_norm(data: Ragged, epsilon: float) -> Callable[[], Tensor]:
    library, out, partials = _library(data.values.shape[1]), torch.zeros_like(data.values), _partials(data, 3, torch.float64)

    def call() -> Tensor:
        inputs = (native.pointer(data.values), native.pointer(data.offsets), ctypes.c_longlong(data.rows))
        library.layer_norm(*inputs, ctypes.c_float(epsilon), native.pointer(out), native.pointer(partials))
        return out

    return call


def grouped_matmul(data: Ragged, weights: Tensor) -> Callable[[], Tensor]:
    groups, inner, outer = weights.shape
    if outer % 32:
        raise ValueError(f"columns must be a multiple of 32, the width of a register tile; got {outer}")
    library = native.load("grouped_matmul.cpp", f"INNER={inner}", f"OUTER={outer}")
    out = torch.zeros(data.values.shape[0], outer)

    def call() -> Tensor:
        inputs = (native.pointer(data.values), native.pointer(weights), native.pointer(data.offsets), ctypes.c_longlong(groups))
        library.grouped_matmul(*inputs, native.pointer(out))
        return out

    return call
