"""The tasks of the GPU table: what serrate runs for each, called as a user would, what must be moved or multiplied, and a check.

In: lengths, a dtype, a device. Out: a `Work`: calls on random data of those lengths. Results are compared with torch, row by row,
for a sample of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

import serrate
from benchmarks.data import lengths, offsets
from benchmarks.examples import example
from serrate import JaggedTensor, ir, ops
from serrate.nn.experts import apply_experts, combine

LENGTHS = ("uniform", "exponential", "zipf", "giant")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEADS = 16


@dataclass(frozen=True)
class Data:
    """Rows back to back on a device; the host knows their lengths, for checks only."""

    values: Tensor
    offsets: Tensor
    lengths: Tensor

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def tensor(self, *, told: bool = False) -> JaggedTensor:
        """The rows; if `told`, with the longest and shortest length, as by a caller who knows them."""
        least, most = (int(self.lengths.min()), self.longest) if told else (None, None)
        return JaggedTensor.from_csr(self.values, self.offsets, max_length=most, min_length=least)

    def rows(self, values: Tensor, which: Sequence[int]) -> list[Tensor]:
        bounds = self.offsets.tolist()
        return [values[bounds[k] : bounds[k + 1]] for k in which]

    def sample(self) -> list[int]:
        """Some rows, and the longest."""
        last = len(self.lengths) - 1
        return sorted({0, min(1, last), last // 2, last, int(self.lengths.argmax())})


def _alone(x: JaggedTensor) -> tuple[JaggedTensor]:
    return (x,)


@dataclass(frozen=True)
class Work:
    """One cell. `call` takes what `arguments` makes of the rows; `moved` bytes and `flops` are the least that must be moved and
    computed. `operands` are what peers need besides the rows.
    """

    data: Data
    call: Callable[..., Any]
    check: Callable[[Any], None]
    moved: float = 0.0
    flops: float = 0.0
    ragged: bool = True
    """Whether `call` reads offsets from its argument, so that they can be new in each call."""
    operands: tuple[Any, ...] = ()
    arguments: Callable[[JaggedTensor], tuple[Any, ...]] = _alone


@dataclass(frozen=True)
class GpuTask:
    """A task: how its work is made from data, and how much data. `features` is 0 for rows of plain numbers."""

    make: Callable[[Data], Work]
    rows: int = 4096
    mean: int = 256
    features: tuple[int, ...] = (128,)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    lengths: tuple[str, ...] = LENGTHS


def lengths_of(distribution: str, rows: int, mean: float) -> Tensor:
    """Lengths by the name of their distribution; `zipf` has a few very long rows and many short ones."""
    if distribution != "zipf":
        return lengths(distribution, rows, mean)
    shares = torch.arange(1, rows + 1, dtype=torch.float64) ** -1.1
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    return (shares / shares.sum() * rows * mean).round().clamp(min=1).long()[order]


def data_of(task: GpuTask, distribution: str, dtype: str, device: str, *, rows: int) -> Data:
    counts = lengths_of(distribution, rows, task.mean)
    torch.manual_seed(0)
    values = torch.randn((int(counts.sum()), *task.features), device=device, dtype=DTYPES[dtype])
    return Data(values, offsets(counts).to(device), counts)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    narrow = dtype != torch.float32
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2 if narrow else 1e-3, atol=1e-1 if narrow else 5e-3)


# --- rows ----------------------------------------------------------------------------------------------------------------


def by_row(body: Callable[[Any], Any], row: Callable[[Tensor], Tensor], moved: float, data: Data) -> Work:
    """Work whose result has one row, or one element, for each row. `moved` is relative to the size of the rows."""

    def check(got: Any) -> None:
        for k, x in zip(data.sample(), data.rows(data.values, data.sample()), strict=True):
            own = got[k] if isinstance(got, Tensor) else data.rows(got.values, [k])[0]
            close(own, row(x.double()), data.values.dtype)

    return Work(data, serrate.jit(body), check, moved * data.values.nbytes)


def _rows(body: Callable[[Any], Any], row: Callable[[Tensor], Tensor], moved: float) -> Callable[[Data], Work]:
    return partial(by_row, body, row, moved)


def _example(name: str, row: Callable[[Tensor], Tensor], moved: float) -> Callable[[Data], Work]:
    """The kernel of an example, which is called as it is."""

    def make(data: Data) -> Work:
        return replace(by_row(lambda x: x, row, moved, data), call=example(name).jagged)

    return make


def _layer_norm(row: Tensor) -> Tensor:
    return functional.layer_norm(row, list(row.shape))


def _features_norm(x: Any) -> Any:
    return functional.layer_norm(x, (x.shape[-1],))


# --- padding and moves ---------------------------------------------------------------------------------------------------


def to_padded(data: Data) -> Work:
    def check(got: Tensor) -> None:
        for k, x in zip(data.sample(), data.rows(data.values, data.sample()), strict=True):
            assert torch.equal(got[k, : len(x)], x) and not got[k, len(x) :].any()

    longest = data.longest
    moved = data.values.nbytes + len(data.lengths) * longest * data.values[:1].nbytes
    return Work(data, serrate.jit(lambda x: x.to_padded(max_length=longest)), check, moved)


def jagged_dense(data: Data) -> Work:
    """jagged + dense -> dense: reads both, writes as much as the dense one has."""
    shape = (len(data.lengths), data.longest, *data.values.shape[1:])
    dense = torch.randn(shape, device=data.values.device, dtype=data.values.dtype)

    def check(got: Tensor) -> None:
        for k, x in zip(data.sample(), data.rows(data.values, data.sample()), strict=True):
            close(got[k, : len(x)], dense[k, : len(x)] + x, data.values.dtype)
            assert torch.equal(got[k, len(x) :], dense[k, len(x) :])

    function = serrate.jit(lambda x, dense: dense + x.to_padded(max_length=dense.shape[1]))
    moved = data.values.nbytes + 2 * dense.nbytes
    return Work(data, function, check, moved, operands=(dense,), arguments=lambda x: (x, dense))


def from_padded(data: Data) -> Work:
    shape = (len(data.lengths), data.longest, *data.values.shape[1:])
    dense, total = torch.randn(shape, device=data.values.device, dtype=data.values.dtype), len(data.values)

    def check(got: JaggedTensor) -> None:
        for k, x in zip(data.sample(), data.rows(got.values, data.sample()), strict=True):
            assert torch.equal(x, dense[k, : len(x)])

    def call(x: JaggedTensor) -> JaggedTensor:
        return JaggedTensor.from_padded(dense, structure=x.structure, total=total)

    return Work(data, call, check, 2 * data.values.nbytes, operands=(dense,))


PARTS = 8


def block_permute(data: Data) -> Work:
    """Rows of parts x experts, regrouped to experts x parts: whole rows move."""
    count = len(data.lengths) // PARTS
    bounds = data.offsets.tolist()
    parts = offsets(torch.full((PARTS,), count)).to(data.values.device)
    function = serrate.jit(lambda x: x.permute(1, 0, *range(2, 2 + data.values.ndim)))

    def arguments(x: JaggedTensor) -> tuple[JaggedTensor]:
        return (JaggedTensor.from_csr(x.values, (parts, x.offsets)),)

    def check(got: JaggedTensor) -> None:
        order = [part * count + k for k in range(count) for part in range(PARTS)]
        begin = 0
        for row in order[: 2 * PARTS]:
            size = bounds[row + 1] - bounds[row]
            assert torch.equal(got.values[begin : begin + size], data.values[bounds[row] : bounds[row + 1]])
            begin += size

    return Work(data, function, check, 2 * data.values.nbytes, arguments=arguments)


def _table(data: Data) -> tuple[Tensor, Data]:
    """A table, and ragged numbers of its rows."""
    width, count = 128, min(1 << 20, 16 * len(data.values))
    table = torch.randn(count, width, device=data.values.device, dtype=data.values.dtype)
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(0, count, (len(data.values),), generator=generator).to(data.values.device)
    return table, Data(picked, data.offsets, data.lengths)


def gather(data: Data) -> Work:
    """Rows of a table at ragged indices."""
    table, indices = _table(data)
    picked = indices.values
    function = serrate.jit(lambda i, table: functional.embedding(i, table))

    def check(got: JaggedTensor) -> None:
        assert torch.equal(got.values[:1000], table[picked[:1000]])

    moved = picked.nbytes + 2 * len(picked) * table[:1].nbytes
    return Work(indices, function, check, moved, operands=(table,), arguments=lambda i: (i, table))


def embedding_bag(data: Data) -> Work:
    """Sums of rows of a table at ragged indices."""
    table, bags = _table(data)
    function = serrate.jit(lambda i, table: functional.embedding_bag(i, table, mode="sum"))

    def check(got: Tensor) -> None:
        for k in bags.sample():
            close(got[k], table[bags.rows(bags.values, [k])[0]].double().sum(0), table.dtype)

    moved = bags.values.nbytes + (len(bags.values) + len(bags.lengths)) * table[:1].nbytes
    return Work(bags, function, check, moved, operands=(table,), arguments=lambda i: (i, table))


# --- matrix products and attention ---------------------------------------------------------------------------------------


def grouped_matmul(width: int, data: Data) -> Work:
    groups, depth = len(data.lengths), data.values.shape[1]
    weights = torch.randn(groups, depth, width, device=data.values.device, dtype=data.values.dtype) / depth**0.5
    function = serrate.jit(lambda x, w: x @ w)

    def check(got: JaggedTensor) -> None:
        for k in data.sample():
            (x,), (own,) = data.rows(data.values, [k]), data.rows(got.values, [k])
            close(own[:64], x[:64].float() @ weights[k].float(), data.values.dtype)

    flops = 2.0 * len(data.values) * depth * width
    return Work(data, function, check, flops=flops, operands=(weights,), arguments=lambda x: (x, weights))


def attention(causal: bool, data: Data) -> Work:
    k, v = (torch.randn_like(data.values) for _ in range(2))
    size = data.values.shape[-1]

    @serrate.jit
    def function(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    def check(got: JaggedTensor) -> None:
        for at in data.sample():
            own, keys, values = (data.rows(x, [at])[0][:, :2].transpose(0, 1).float() for x in (data.values, k, v))
            if own.shape[1] <= 8192:
                want = functional.scaled_dot_product_attention(own, keys, values, is_causal=causal).transpose(0, 1)
                close(data.rows(got.values, [at])[0][:, :2], want, data.values.dtype)

    flops = 4.0 * float((data.lengths.double() ** 2).sum()) * HEADS * size / (2 if causal else 1)

    def arguments(q: JaggedTensor) -> tuple[JaggedTensor, ...]:
        return q, q.with_values(k), q.with_values(v)

    return Work(data, function, check, flops=flops, operands=(k, v, causal), arguments=arguments)


def grouped_example(width: int, data: Data) -> Work:
    return replace(grouped_matmul(width, data), call=example("grouped_gemm").jagged_per_group)


def hstu(data: Data) -> Work:
    """The kernel of an example: causal attention with SiLU."""
    k, v = (torch.randn_like(data.values) for _ in range(2))
    alpha, scale = data.values.shape[-1] ** -0.5, 1.0 / 64

    def check(got: JaggedTensor) -> None:
        for at in data.sample():
            own, keys, values = (data.rows(x, [at])[0][:, :2].transpose(0, 1).float() for x in (data.values, k, v))
            if own.shape[1] <= 8192:
                scores = functional.silu(own @ keys.transpose(1, 2) * alpha).tril() * scale
                close(data.rows(got.values, [at])[0][:, :2], (scores @ values).transpose(0, 1), data.values.dtype)

    flops = 2.0 * float((data.lengths.double() ** 2).sum()) * HEADS * data.values.shape[-1]

    def arguments(q: JaggedTensor) -> tuple[Any, ...]:
        return q, q.with_values(k), q.with_values(v), alpha, scale

    return Work(data, example("jagged_hstu_attention").jagged, check, flops=flops, operands=(k, v), arguments=arguments)


def decode(data: Data) -> Work:
    """One query for each sequence over all of its keys and values: bound by their bytes."""
    v = torch.randn_like(data.values)
    q = torch.randn(len(data.lengths), *data.values.shape[1:], device=v.device, dtype=v.dtype)[:, :, None]

    @serrate.jit
    def function(q: Any, k: Any, v: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2))

    def check(got: Tensor) -> None:
        for at in data.sample():
            keys, values = (data.rows(x, [at])[0].transpose(0, 1).float() for x in (data.values, v))
            close(got[at], functional.scaled_dot_product_attention(q[at].float(), keys, values), v.dtype)

    return Work(data, function, check, 2 * v.nbytes, operands=(q, v), arguments=lambda k: (q, k, k.with_values(v)))


def experts(data: Data) -> Work:
    """A feed-forward layer of experts for tokens in any order: grouped by expert, two products, back in order."""
    (count, width), groups = data.values.shape, len(data.lengths)
    hidden, device, dtype = width, data.values.device, data.values.dtype
    up, down = (torch.randn(groups, width, hidden, device=device, dtype=dtype) / width**0.5 for _ in range(2))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    choice = torch.repeat_interleave(torch.arange(groups), data.lengths)[order].to(device)
    with ir.Fusion("experts") as f:
        x, keys = f.input((None, width), dtype), f.input((None,), torch.int64)
        first, second = (f.input((groups, *w.shape[1:]), dtype) for w in (up, down))
        bounds, places = ops.group_by(keys, groups)
        rows = ops.as_nested(ops.index(x, places), bounds)
        worked = ops.matmul(ops.relu(ops.matmul(rows, first)), second)
        f.output(ops.index(ops.as_flattened(worked), ops.invert(places)))
    program = f.compile()

    def check(got: Tensor) -> None:
        for n in range(0, count, max(1, count // 20)):
            hidden_row = torch.relu(data.values[n].float() @ up[choice[n]].float()).to(dtype)
            close(got[n], hidden_row.float() @ down[choice[n]].float(), dtype)

    return Work(
        data,
        program,
        check,
        flops=4.0 * count * width * hidden,
        ragged=False,
        operands=(choice, up, down),
        arguments=lambda _: (data.values, choice, up, down),
    )


CHOICES = 2


def mixture(hidden: int, data: Data) -> Work:
    """The feed-forward layer of a mixture of experts: each token goes to two experts (SwiGLU), whose results are weighted."""
    (count, width), groups = data.values.shape, len(data.lengths)
    device, dtype, tokens = data.values.device, data.values.dtype, count // CHOICES
    x = data.values[:tokens]
    gate, up = (torch.randn(groups, width, hidden, device=device, dtype=dtype) / width**0.5 for _ in range(2))
    down = torch.randn(groups, hidden, width, device=device, dtype=dtype) / hidden**0.5
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    choice = torch.repeat_interleave(torch.arange(groups), data.lengths)[order][: tokens * CHOICES].view(-1, CHOICES).to(device)
    weights = torch.rand(tokens, CHOICES, device=device, dtype=dtype)

    @serrate.jit
    def function(x: Any, choice: Any, weights: Any, gate: Any, up: Any, down: Any) -> Any:
        bounds, places = ops.group_by(choice.flatten(), groups)
        rows = ops.as_nested(ops.index(x, ops.floor_divide(places, CHOICES)), bounds)
        return combine(ops.as_flattened(apply_experts(rows, gate, up, down, "swiglu")), places, weights, CHOICES)

    def check(got: Tensor) -> None:
        for n in range(0, tokens, max(1, tokens // 20)):
            row, want = x[n].float(), torch.zeros(width, device=device)
            for expert, weight in zip(choice[n].tolist(), weights[n].float(), strict=True):
                own = functional.silu(row @ gate[expert].float()) * (row @ up[expert].float())
                want += weight * (own.to(dtype).float() @ down[expert].float())
            close(got[n], want, dtype)

    operands = (x, choice, weights, gate, up, down)
    flops = 6.0 * tokens * CHOICES * width * hidden
    return Work(data, function, check, flops=flops, ragged=False, operands=operands, arguments=lambda _: operands)


TASKS: dict[str, GpuTask] = {
    "sum": GpuTask(_rows(lambda x: x.sum(1), lambda row: row.sum(0), 1)),
    "mean": GpuTask(_rows(lambda x: x.mean(1), lambda row: row.mean(0), 1)),
    "max": GpuTask(_rows(lambda x: x.amax(1), lambda row: row.amax(0), 1)),
    "softmax": GpuTask(_rows(lambda x: torch.softmax(x, 1), lambda row: torch.softmax(row, 0), 2)),
    "layer norm": GpuTask(_rows(lambda x: ops.layer_norm(x, (1, 2)), _layer_norm, 2)),
    "layer norm over features": GpuTask(_rows(_features_norm, lambda row: functional.layer_norm(row, row.shape[-1:]), 2)),
    "pointwise": GpuTask(_rows(lambda x: torch.relu(x * 2.0 + 1.0), lambda row: torch.relu(row * 2 + 1), 2)),
    "1-D sum": GpuTask(_rows(lambda x: x.sum(1), lambda row: row.sum(0), 1), 32768, 2048, (), ("float32",)),
    "1-D softmax": GpuTask(
        _rows(lambda x: torch.softmax(x, 1), lambda row: torch.softmax(row, 0), 2), 32768, 2048, (), ("float32",)
    ),
    "short 1-D sum": GpuTask(_rows(lambda x: x.sum(1), lambda row: row.sum(0), 1), 1 << 21, 32, (), ("float32",)),
    "short 1-D softmax": GpuTask(
        _rows(lambda x: torch.softmax(x, 1), lambda row: torch.softmax(row, 0), 2), 1 << 21, 32, (), ("float32",)
    ),
    "to_padded": GpuTask(to_padded, 2048, 2048, (), ("float32",)),
    "jagged + dense": GpuTask(jagged_dense, 2048, 2048, (), ("float32",)),
    "from_padded": GpuTask(from_padded, 2048, 2048, (), ("float32",)),
    "block permute": GpuTask(block_permute),
    "gather of rows": GpuTask(gather, 4096, 256, ()),
    "embedding bag": GpuTask(embedding_bag, 1 << 16, 16, ()),
    "grouped matmul": GpuTask(partial(grouped_matmul, 2048), 64, 1024, (4096,), ("bfloat16",)),
    "grouped matmul, 128 groups": GpuTask(partial(grouped_matmul, 1536), 128, 256, (2048,), ("bfloat16",)),
    "grouped matmul, 8 groups": GpuTask(partial(grouped_matmul, 2048), 8, 1024, (2048,), ("bfloat16",)),
    "grouped matmul, 256 groups": GpuTask(partial(grouped_matmul, 2048), 256, 128, (2048,), ("bfloat16",)),
    **{
        f"attention {size}{', causal' if causal else ''}": GpuTask(
            partial(attention, causal), 64, 1024, (HEADS, size), ("bfloat16",), ("uniform", "exponential")
        )
        for size in (64, 128)
        for causal in (False, True)
    },
    **{
        f"HSTU {size}, kernel": GpuTask(hstu, 64, 1024, (HEADS, size), ("bfloat16",), ("uniform", "exponential"))
        for size in (64, 128)
    },
    # The example adds up in the dtype of its rows, which 16 bits are too few for.
    "sum, kernel": GpuTask(_example("jagged_sum", lambda row: row.sum(0), 1), dtypes=("float32",)),
    "softmax, kernel": GpuTask(_example("jagged_softmax", lambda row: torch.softmax(row, 0), 2)),
    "layer norm, kernel": GpuTask(_example("jagged_layer_norm", _layer_norm, 2), dtypes=("float32",)),
    "grouped matmul, kernel": GpuTask(partial(grouped_example, 2048), 64, 1024, (4096,), ("bfloat16",)),
    "decode attention": GpuTask(decode, 256, 4096, (HEADS, 128), ("bfloat16",)),
    "experts": GpuTask(experts, 64, 512, (2048,), ("bfloat16",)),
    "mixture of experts": GpuTask(partial(mixture, 1408), 64, 2048, (2048,), ("bfloat16",)),
}
