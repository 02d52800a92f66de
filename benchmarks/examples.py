"""The example kernels as benchmark cases: arguments, expected results, and baselines.

In: an example's name, a distribution of lengths and sizes. Out: a `Case` with the kernel and its arguments, the result of plain
torch, and the baseline: hand-written C++ for memory-bound kernels, torch's matrix product per group for compute-bound ones. The
baseline allocates its result with `torch.empty` in every call, as the kernels do.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmarks import limits, native
from benchmarks.data import Ragged, padded, ragged
from benchmarks.handwritten import CHUNK, LONG
from benchmarks.limits import Traffic
from benchmarks.methods import Call
from serrate import JaggedTensor, Structure

FOLDER = Path(__file__).resolve().parents[1] / "examples"
HAND, TORCH = "hand C++", "torch"
GOALS = {HAND: 1.1, TORCH: 1.0}
"""The goal for a kernel's time, relative to its baseline."""
EPSILON = 1e-6
ALPHA = 0.5
PADDING = {"uniform": 1.2, "exponential": 8.0, "bimodal": 8.875, "giant": 8.0}
"""The approximate ratio of longest row to mean length in a dense batch."""
GIANT_ROWS = 16
"""Rows of a dense batch with one giant row: with more, almost all of it would be padding."""


@dataclass(frozen=True)
class Sizes:
    """Rows for memory-bound kernels, with a dense batch of `dense` floats; groups and sequences for matrix products."""

    rows: int = 2560
    mean: int = 128
    features: int = 64
    dense_rows: int = 4096
    dense: int = 12 << 20
    groups: int = 64
    tokens: int = 16384
    width: int = 128
    sequences: int = 32
    length: int = 128
    heads: int = 4
    dim: int = 64


QUICK = Sizes(24, 12, 16, 16, 4096, groups=4, tokens=128, width=32, sequences=4, length=16, heads=2, dim=16)
TINY = Sizes(4, 3, 16, 4, 15, groups=4, tokens=12, width=16, sequences=4, length=3, heads=1, dim=16)
"""With uniform lengths: four rows of three."""


@dataclass(frozen=True)
class Case:
    """One example on one set of rows.

    `absolute`: the absolute tolerance, in addition to the relative one. `others` are timed but not judged. `limit`: for
    memory-bound kernels, the time to move their bytes.
    """

    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    wanted: Callable[[], Tensor]
    absolute: float
    against: str
    bar: Call
    others: Mapping[str, Call] = field(default_factory=dict)
    limit: limits.Limit | None = None

    @property
    def goal(self) -> float:
        return GOALS[self.against]

    def call(self) -> Any:
        """The kernel as a user calls it, including allocation of the result and all code before and after its loops."""
        return self.kernel(*self.arguments)

    def is_right(self, result: Any, wanted: Tensor) -> bool:
        values = result.values if isinstance(result, JaggedTensor) else result
        return values.shape == wanted.shape and torch.allclose(values, wanted, rtol=1e-3, atol=self.absolute)


def case(name: str, distribution: str, sizes: Sizes) -> Case:
    """The data of one cell, and everything measured on it."""
    torch.manual_seed(0)
    return EXAMPLES[name](distribution, sizes)


@functools.cache
def example(name: str) -> ModuleType:
    """An example as a module; examples are scripts, not a package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- memory --------------------------------------------------------------------------------------------------------------


def _by_hand(
    kernel: Callable[..., Any],
    arguments: tuple[Any, ...],
    wanted: Callable[[], Tensor],
    absolute: float,
    loop: Callable[[Tensor], None],
    shape: tuple[int, ...],
    limit: limits.Limit,
) -> Case:
    """A case whose baseline is a loop that fills a given output."""

    def bar() -> Tensor:
        out = torch.empty(shape)
        loop(out)
        return out

    return Case(kernel, arguments, wanted, absolute, HAND, bar, limit=limit)


def _loop(function: Any, *arguments: Tensor | int | float | None) -> Callable[[Tensor], None]:
    """A C++ function with all arguments bound except its result, marked by None."""
    at = arguments.index(None)
    before, behind = ([_argument(each) for each in part] for part in (arguments[:at], arguments[at + 1 :]))

    # addresses alone keep no tensor alive
    def loop(out: Tensor, _keep: object = arguments) -> None:
        function(*before, native.pointer(out), *behind)

    return loop


def _argument(value: Tensor | int | float | None) -> Any:
    if isinstance(value, Tensor):
        return native.pointer(value)
    assert value is not None
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_longlong(value)


def _partials(data: Ragged, per_chunk: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros((data.longest // CHUNK + 1) * per_chunk, dtype=dtype)


def _rows(distribution: str, sizes: Sizes) -> tuple[Ragged, JaggedTensor, ctypes.CDLL]:
    data = ragged(distribution, sizes.rows, sizes.mean, sizes.features)
    return data, _jagged(data), native.load("handwritten.cpp", f"FEATURES={sizes.features}")


def _jagged(data: Ragged) -> JaggedTensor:
    return JaggedTensor.from_csr(data.values, data.offsets)


def _dense_add(distribution: str, sizes: Sizes) -> Case:
    rows = min(GIANT_ROWS, sizes.dense_rows) if distribution == "giant" else sizes.dense_rows
    data = ragged(distribution, rows, sizes.dense / (rows * PADDING[distribution]), None)
    dense = torch.randn(rows, data.longest)
    library = native.load("kernels.cpp", f"FEATURES={sizes.features}")
    loop = _loop(library.dense_add, data.values, data.offsets, rows, dense, data.longest, None)
    traffic = Traffic(read=data.values.nbytes + dense.nbytes, written=dense.nbytes)
    limit = limits.of_traffic(traffic, data.values, data.offsets)
    arguments = (_jagged(data), dense)
    kernel = example("jagged_dense_add").jagged
    return _by_hand(kernel, arguments, lambda: padded(data).add_(dense), 1e-5, loop, (rows, data.longest), limit)


def _sum(distribution: str, sizes: Sizes) -> Case:
    data, jt, library = _rows(distribution, sizes)
    loop = _loop(library.sum, data.values, data.offsets, data.rows, None, _partials(data, sizes.features))
    limit = limits.of_traffic(Traffic(read=data.values.nbytes), data.values, data.offsets)

    def wanted() -> Tensor:
        return torch.stack([row.sum(0) for row in data.split()])

    # summing a hundred thousand normal values in another order changes the result by hundredths
    return _by_hand(example("jagged_sum").jagged, (jt,), wanted, 5e-2, loop, (data.rows, sizes.features), limit)


def _mean(distribution: str, sizes: Sizes) -> Case:
    data, most = ragged(distribution, sizes.rows, sizes.mean, sizes.features), sizes.features
    counts = torch.randint(most // 2, most + 1, (data.rows,))
    jt = JaggedTensor(data.values, Structure.from_lengths(data.lengths).with_columns(counts, packed=False))
    library = native.load("kernels.cpp", f"FEATURES={most}")
    loop = _loop(library.mean, data.values, data.offsets, counts, data.rows, None, _partials(data, most))
    limit = limits.of_traffic(Traffic(read=data.values.nbytes), data.values, data.offsets)

    def wanted() -> Tensor:
        means = torch.stack([row.mean(0) for row in data.split()])
        return means.masked_fill_(torch.arange(most) >= counts[:, None], 0.0)

    return _by_hand(example("jagged_mean").jagged, (jt, most), wanted, 1e-4, loop, (data.rows, most), limit)


def _softmax(distribution: str, sizes: Sizes) -> Case:
    data, jt, library = _rows(distribution, sizes)
    scratch = torch.zeros(torch.get_num_threads() * LONG * sizes.features)
    loop = _loop(library.softmax, data.values, data.offsets, data.rows, None, _partials(data, 2 * sizes.features), scratch)

    def wanted() -> Tensor:
        return torch.cat([torch.softmax(row, 0) for row in data.split()])

    # results are never near zero, and a giant row's elements are tiny
    return _by_hand(example("jagged_softmax").jagged, (jt,), wanted, 0.0, loop, tuple(data.values.shape), _twice(data))


def _layer_norm(distribution: str, sizes: Sizes) -> Case:
    data, jt, library = _rows(distribution, sizes)
    loop = _loop(library.layer_norm, data.values, data.offsets, data.rows, EPSILON, None, _partials(data, 3, torch.float64))

    def wanted() -> Tensor:
        return torch.cat([functional.layer_norm(row, list(row.shape), eps=EPSILON) for row in data.split()])

    kernel = example("jagged_layer_norm").jagged
    return _by_hand(kernel, (jt, EPSILON), wanted, 1e-4, loop, tuple(data.values.shape), _twice(data))


def _twice(data: Ragged) -> limits.Limit:
    """Values read and written; a row that does not fit a core's private cache is read twice."""
    traffic = Traffic(read=data.values.nbytes, written=data.values.nbytes, twice=int(data.lengths.argmax()))
    return limits.of_traffic(traffic, data.values, data.offsets)


# --- products ------------------------------------------------------------------------------------------------------------


def _groups(distribution: str, sizes: Sizes) -> tuple[Ragged, list[tuple[int, int]]]:
    data = ragged(distribution, sizes.groups, sizes.tokens / sizes.groups, sizes.width)
    return data, _bounds(data)


def _bounds(data: Ragged) -> list[tuple[int, int]]:
    return list(itertools.pairwise(data.offsets.tolist()))


def _alike(data: Ragged, *values: Tensor) -> tuple[JaggedTensor, ...]:
    """Ragged tensors of one structure."""
    first = _jagged(data)
    return tuple(first.with_values(each) for each in values)


def _weights(*shape: int) -> Tensor:
    return torch.randn(shape) / math.sqrt(shape[-2])


def _of_torch(kernel: Callable[..., Any], arguments: tuple[Any, ...], loop: Call, **others: Call) -> Case:
    """A case whose baseline is torch itself, and is correct by definition."""
    return Case(kernel, arguments, loop, 1e-4, TORCH, loop, others)


def _dense_bmm(distribution: str, sizes: Sizes) -> Case:
    data, bounds = _groups(distribution, sizes)
    dense, bias = _weights(data.rows, sizes.width, sizes.width), torch.randn(data.rows, sizes.width)

    def loop() -> Tensor:
        out = torch.empty(data.values.shape[0], sizes.width)
        for group, (start, end) in enumerate(bounds):
            torch.addmm(bias[group], data.values[start:end], dense[group], out=out[start:end])
        return out

    return _of_torch(example("jagged_dense_bmm").jagged, (_jagged(data), dense, bias), loop)


def _grouped_gemm(distribution: str, sizes: Sizes) -> Case:
    data, bounds = _groups(distribution, sizes)
    weight = _weights(sizes.width, sizes.width)

    def loop() -> Tensor:
        out = torch.empty(data.values.shape[0], sizes.width)
        for start, end in bounds:
            torch.mm(data.values[start:end], weight, out=out[start:end])
        return out

    # with a shared matrix, no loop over groups is needed
    together = {"one torch.mm": lambda: torch.mm(data.values, weight)}
    return _of_torch(example("grouped_gemm").jagged, (_jagged(data), weight), loop, **together)


def _grouped_gemm_per_group(distribution: str, sizes: Sizes) -> Case:
    data, bounds = _groups(distribution, sizes)
    weights = _weights(data.rows, sizes.width, sizes.width)

    def loop() -> Tensor:
        out = torch.empty(data.values.shape[0], sizes.width)
        for group, (start, end) in enumerate(bounds):
            torch.mm(data.values[start:end], weights[group], out=out[start:end])
        return out

    return _of_torch(example("grouped_gemm").jagged_per_group, (_jagged(data), weights), loop)


def _moe_matmul(distribution: str, sizes: Sizes) -> Case:
    data, bounds = _groups(distribution, sizes)
    tokens = data.values
    weights, order = _weights(data.rows, sizes.width, sizes.width), torch.randperm(tokens.shape[0])

    def loop() -> Tensor:
        out = torch.zeros(tokens.shape[0], sizes.width)
        for expert, (start, end) in enumerate(bounds):
            own = order[start:end]
            out[own] = torch.mm(tokens[own], weights[expert])
        return out

    routed = JaggedTensor.from_csr(order, data.offsets)
    return _of_torch(example("moe_matmul").jagged, (tokens, weights, routed), loop)


def _hstu_attention(distribution: str, sizes: Sizes) -> Case:
    data = ragged(distribution, sizes.sequences, sizes.length, sizes.heads * sizes.dim)
    bounds, scale = _bounds(data), 1.0 / data.longest
    q, k, v = (torch.randn(data.values.shape[0], sizes.heads, sizes.dim) for _ in range(3))

    def loop() -> Tensor:
        out = torch.empty_like(v)
        for start, end in bounds:
            own_q, own_k, own_v = (each[start:end].transpose(0, 1) for each in (q, k, v))
            scores = functional.silu(own_q @ own_k.transpose(1, 2) * ALPHA) * scale
            out[start:end] = (scores.tril() @ own_v).transpose(0, 1)
        return out

    ragged_ones = _alike(data, q, k, v)
    return _of_torch(example("jagged_hstu_attention").jagged, (*ragged_ones, ALPHA, scale), loop)


def _flash_attention(causal: bool, distribution: str, sizes: Sizes) -> Case:
    # one head, so longer sequences
    data = ragged(distribution, sizes.sequences, sizes.length * sizes.heads**0.5, sizes.dim)
    bounds, scale = _bounds(data), sizes.dim**-0.5
    q, k, v = (torch.randn_like(data.values) for _ in range(3))

    def loop() -> Tensor:
        out = torch.empty_like(v)
        for start, end in bounds:
            scores = torch.mm(q[start:end], k[start:end].T) * scale
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
            torch.mm(torch.softmax(scores, 1), v[start:end], out=out[start:end])
        return out

    def fused() -> Tensor:
        out = torch.empty_like(v)
        for start, end in bounds:
            own_q, own_k, own_v = (each[start:end].view(1, 1, end - start, -1) for each in (q, k, v))
            out[start:end] = functional.scaled_dot_product_attention(own_q, own_k, own_v, is_causal=causal)[0, 0]
        return out

    ragged_ones = _alike(data, q, k, v)
    kernel = example("jagged_flash_attention").jagged
    return _of_torch(kernel, (*ragged_ones, causal), loop, **{"scaled_dot_product_attention": fused})


EXAMPLES: dict[str, Callable[[str, Sizes], Case]] = {
    "jagged_dense_add": _dense_add,
    "jagged_sum": _sum,
    "jagged_mean": _mean,
    "jagged_softmax": _softmax,
    "jagged_layer_norm": _layer_norm,
    "jagged_dense_bmm": _dense_bmm,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm per group": _grouped_gemm_per_group,
    "moe_matmul": _moe_matmul,
    "jagged_hstu_attention": _hstu_attention,
    "jagged_flash_attention": functools.partial(_flash_attention, False),
    "jagged_flash_attention causal": functools.partial(_flash_attention, True),
}
"""Every ragged version of every example."""
