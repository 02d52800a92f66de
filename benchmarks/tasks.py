"""Tasks on ragged data: their inputs, expected results, and the bytes they must move.

In: a task's name, a distribution of lengths, a dtype and sizes. Out: a `Task`, its result in plain torch, row by row, and the
traffic from which the limit is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmarks.data import DISTRIBUTIONS, Ragged, padded, ragged
from benchmarks.limits import Traffic
from serrate.runtime.launch import last_level_cache

EPSILON = 1e-5
SCALE = 1.5
PARTS = 16
"""Groups of a block permutation: rows are blocks, `PARTS` of them per component."""

BACKWARD = " + backward"
"""The end of the names of tasks that also compute gradients."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Sizes:
    """The sizes used in the tables; 1-D tasks have no features and longer rows."""

    rows: int = 4096
    mean: int = 128
    features: int = 64
    mean_flat: int = 512
    groups: int = 64
    tokens: int = 8192
    width: int = 512
    sequences: int = 32
    length: int = 256
    heads: int = 8
    bags: int = 16384
    bag: int = 20
    entries: int = 1_000_000


QUICK = Sizes(rows=256, groups=16, tokens=1024, width=128, sequences=8, length=64, bags=256, entries=10_000)


@dataclass(frozen=True)
class Task:
    """One task on one set of rows; `operands` are its other inputs."""

    name: str
    data: Ragged
    operands: tuple[Any, ...] = ()

    @property
    def kind(self) -> str:
        """The task's name without its rank, and without its backward pass: a 1-D sum is a sum."""
        return self.name.removeprefix("1-D ").removesuffix(BACKWARD)

    @property
    def inputs(self) -> int:
        """The size of the inputs in bytes."""
        read = 0 if self.name == "from_padded" else self.data.values.nbytes
        return read + sum(each.nbytes for each in self.operands if isinstance(each, Tensor))


@dataclass(frozen=True)
class TaskSpec:
    """What is known about a task before there is data.

    `goal`: the goal in percent of the limit. `absolute`: the absolute tolerance, in addition to the relative one; softmax gets
    none, because its results are never near zero and a giant row's elements are tiny; summing a hundred thousand normal values in
    another order changes the result by hundredths. `never_behind`: a peer that it must never be slower than.
    """

    goal: float
    absolute: float
    lengths: tuple[str, ...] = DISTRIBUTIONS
    never_behind: str = ""


# Tasks that pad every row, or have a weight per group, skip the giant row: it would be padded to all of memory, or be a dense
# product.
_NO_GIANT = tuple(each for each in DISTRIBUTIONS if each != "giant")

TASKS = {
    "sum": TaskSpec(90, 5e-2),
    "mean": TaskSpec(90, 1e-4),
    "max": TaskSpec(90, 0.0),
    "two-level sum": TaskSpec(90, 5e-2),
    "pointwise": TaskSpec(90, 1e-5),
    "from_padded": TaskSpec(90, 0.0, _NO_GIANT),
    "to_padded": TaskSpec(80, 0.0, _NO_GIANT),
    "jagged + dense": TaskSpec(80, 1e-5, _NO_GIANT),
    "1-D jagged + dense": TaskSpec(80, 1e-5, _NO_GIANT),
    "layer norm": TaskSpec(70, 1e-4),
    "softmax": TaskSpec(65, 0.0),
    "logsumexp": TaskSpec(65, 1e-4),
    "1-D sum": TaskSpec(65, 5e-2),
    "1-D softmax": TaskSpec(45, 0.0),
    "block permute": TaskSpec(80, 0.0),
    "embedding bag": TaskSpec(90, 1e-4, never_behind="embedding_bag"),
    "grouped matmul": TaskSpec(100 / 1.15, 1e-4, _NO_GIANT, never_behind="torch.mm per group"),
    "attention": TaskSpec(70, 1e-4, never_behind="SDPA per sequence"),
    "causal attention": TaskSpec(70, 1e-4, never_behind="SDPA per sequence"),
    "sum + backward": TaskSpec(85, 0.0),
    "pointwise + backward": TaskSpec(85, 1e-5),
    "softmax + backward": TaskSpec(60, 1e-5),
    "layer norm + backward": TaskSpec(55, 1e-4),
    "embedding bag + backward": TaskSpec(60, 1e-4),
    "grouped matmul + backward": TaskSpec(100 / 1.2, 1e-3, _NO_GIANT),
    "attention + backward": TaskSpec(60, 1e-3, _NO_GIANT),
    "causal attention + backward": TaskSpec(60, 1e-3, _NO_GIANT),
}
_OF_PRODUCTS = ("grouped matmul", "attention", "causal attention")
PRODUCTS = (*_OF_PRODUCTS, *(name + BACKWARD for name in _OF_PRODUCTS))
"""Tasks whose limit is a dense float32 product."""
SPINE = ("sum", "pointwise", "softmax", "layer norm", "grouped matmul")
"""The tasks that also have a hand-written baseline."""


def make_task(task: str, distribution: str, dtype: torch.dtype, sizes: Sizes) -> Task:
    """The data of one cell."""
    if task.endswith(BACKWARD):
        return replace(make_task(task.removesuffix(BACKWARD), distribution, dtype, sizes), name=task)
    if task == "grouped matmul":
        return _grouped_matmul(distribution, dtype, sizes)
    if task in PRODUCTS:
        return _attention(task, distribution, dtype, sizes)
    if task == "embedding bag":
        return _embedding_bag(distribution, dtype, sizes)
    flat = task.startswith("1-D ")
    features, mean = (None, sizes.mean_flat) if flat else (sizes.features, sizes.mean)
    data = ragged(distribution, sizes.rows, mean, features, dtype)
    operands: tuple[Any, ...] = ()
    if task == "two-level sum":
        operands = (_documents(sizes.rows),)
    elif task == "pointwise":
        operands = (SCALE, torch.linspace(-1, 1, sizes.features).to(dtype))
    elif task == "layer norm":
        operands = (EPSILON,)
    elif task == "from_padded":
        operands = (padded(data),)
    elif task.endswith("jagged + dense"):
        operands = (torch.ones(data.rows, data.longest, *data.values.shape[1:], dtype=dtype),)
    return Task(task, data, operands)


def again(it: Task) -> list[Task]:
    """The task, and copies of it if it is small, so that together they do not fit the cache.

    The limit is memory bandwidth, so the data has to come from memory.
    """
    times = min(-(-3 * last_level_cache() // it.inputs), 16) if it.inputs < last_level_cache() else 1
    return [it, *(replace(it, data=replace(it.data, values=it.data.values.clone())) for _ in range(times - 1))]


def _grouped_matmul(distribution: str, dtype: torch.dtype, sizes: Sizes) -> Task:
    data = ragged(distribution, sizes.groups, sizes.tokens / sizes.groups, sizes.width, dtype)
    weights = torch.randn(sizes.groups, sizes.width, sizes.width, generator=torch.Generator().manual_seed(2)) / sizes.width**0.5
    return Task("grouped matmul", data, (weights.to(dtype),))


def _attention(task: str, distribution: str, dtype: torch.dtype, sizes: Sizes) -> Task:
    data = ragged(distribution, sizes.sequences, sizes.length, sizes.heads * sizes.features, dtype)
    shape = (-1, sizes.heads, sizes.features)
    generator = torch.Generator().manual_seed(4)
    others = (torch.randn(data.values.shape, generator=generator).to(dtype).view(shape) for _ in range(2))
    return Task(task, replace(data, values=data.values.view(shape)), tuple(others))


def _embedding_bag(distribution: str, dtype: torch.dtype, sizes: Sizes) -> Task:
    """Bags of random rows of a table: together they are larger than the cache, so most rows come from memory."""
    bags = ragged(distribution, sizes.bags, sizes.bag, None)
    generator = torch.Generator().manual_seed(5)
    indices = torch.randint(0, sizes.entries, bags.values.shape, generator=generator)
    table = torch.randn(sizes.entries, sizes.features, generator=generator).to(dtype)
    return Task("embedding bag", replace(bags, values=indices), (table,))


def dense_product(it: Task) -> tuple[Tensor, Tensor]:
    """Operands of a dense product that takes as many additions and multiplications as the task."""
    if it.kind == "grouped matmul":
        return it.data.values, it.operands[0][0]
    lengths = it.data.lengths
    scores = int((lengths * (lengths + 1) // 2 if it.kind == "causal attention" else lengths * lengths).sum())
    rows = 2 * scores * it.data.values[0].numel() // 512**2
    return torch.ones(max(rows, 1), 512), torch.ones(512, 512)


def attend(task: Task, *rows: Tensor) -> Tensor:
    """torch's attention of one sequence: `[length, heads, features]` in and out."""
    query, key, value = (row.transpose(0, 1)[None] for row in rows)
    is_causal = task.name == "causal attention"
    return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)[0].transpose(0, 1)


def passes(it: Task) -> float:
    """How many times the FLOPs of a product its task takes: a product has two gradients; attention's backward pass multiplies
    five times, its forward pass twice."""
    if not it.name.endswith(BACKWARD):
        return 1.0
    return 3.0 if it.kind == "grouped matmul" else 3.5


# --- tasks with a backward pass --------------------------------------------------------------------------------------------


def forward(it: Task) -> Task:
    """The task without its backward pass."""
    return replace(it, name=it.name.removesuffix(BACKWARD))


def differentiated(it: Task) -> tuple[Tensor, ...]:
    """The inputs whose gradients are computed."""
    if it.kind == "embedding bag":
        return it.operands
    return (it.data.values, *it.operands) if it.kind in PRODUCTS else (it.data.values,)


def with_leaves(it: Task, leaves: tuple[Tensor, ...]) -> Task:
    """The task with other tensors for those inputs."""
    if it.kind == "embedding bag":
        return replace(it, operands=leaves)
    operands = leaves[1:] if it.kind in PRODUCTS else it.operands
    return replace(it, data=replace(it.data, values=leaves[0]), operands=operands)


def upstream(it: Task) -> Tensor:
    """The gradient of the task's result."""
    values, shape = it.data.values, list(it.data.values.shape)
    if it.kind == "embedding bag":
        values, shape = it.operands[0], [it.data.rows, it.operands[0].shape[1]]
    elif it.kind in _OF_A_ROW:
        shape[0] = it.data.rows
    return torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(values.dtype)


def flat(gradients: tuple[Tensor, ...]) -> Tensor:
    """All gradients as one tensor."""
    return torch.cat([g.reshape(-1) for g in gradients])


def _gradients(it: Task) -> Tensor:
    leaves = tuple(x.detach().float().requires_grad_() for x in differentiated(it))
    return flat(torch.autograd.grad(expected(with_leaves(forward(it), leaves)), leaves, upstream(it).float()))


def _documents(sentences: int) -> Tensor:
    """Offsets of documents of 1 to 15 sentences."""
    generator = torch.Generator().manual_seed(3)
    ends = torch.randint(1, 16, (sentences,), generator=generator).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends[ends < sentences], ends.new_tensor([sentences])])


def expected(it: Task) -> Tensor:
    """The result of plain torch, row by row, in float32; gradients for tasks with a backward pass."""
    if it.name.endswith(BACKWARD):
        return _gradients(it)
    if it.name in ("to_padded", "jagged + dense", "1-D jagged + dense"):
        dense = padded(it.data).float()
        return dense.add_(it.operands[0]) if it.operands else dense
    if it.kind == "embedding bag":
        return torch.stack([it.operands[0][row].float().sum(0) for row in it.data.split()])
    rows = [row.float() for row in it.data.split()]
    if it.kind == "block permute":
        return torch.cat([rows[block] for block in permuted(len(rows))])
    if it.kind == "two-level sum":
        parts = it.operands[0].diff().tolist()
        return torch.stack([each.sum(0) for each in torch.split(torch.stack([row.sum(0) for row in rows]), parts)])
    if it.kind == "grouped matmul":
        return torch.cat([row @ weight.float() for row, weight in zip(rows, it.operands[0], strict=True)])
    if it.kind in PRODUCTS:
        others = (torch.split(x.float(), it.data.lengths.tolist()) for x in it.operands)
        return torch.cat([attend(it, *each) for each in zip(rows, *others, strict=True)])
    if it.kind in _OF_A_ROW:
        return torch.stack([_OF_A_ROW[it.kind](row) for row in rows])
    return torch.cat([_ELEMENTS[it.kind](row, *it.operands) for row in rows])


def permuted(blocks: int) -> list[int]:
    """Reorders blocks from (group, component) order to (component, group) order."""
    return torch.arange(blocks).view(PARTS, -1).t().reshape(-1).tolist()


_OF_A_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda row: row.sum(0),
    "mean": lambda row: row.mean(0),
    "max": lambda row: row.amax(0),
    "logsumexp": lambda row: torch.logsumexp(row, 0),
}
_ELEMENTS: dict[str, Callable[..., Tensor]] = {
    "pointwise": lambda row, scale, bias: torch.relu(row * scale + bias.float()),
    "softmax": lambda row: torch.softmax(row, 0),
    "layer norm": lambda row, epsilon: functional.layer_norm(row, list(row.shape), eps=epsilon),
    "from_padded": lambda row, _: row,
}


def is_right(it: Task, result: Tensor, wanted: Tensor) -> bool:
    """Whether a result is correct, within the tolerance of its dtype."""
    relative, absolute = 1e-3, TASKS[it.name].absolute
    if (it.operands[0] if it.kind == "embedding bag" else it.data.values).dtype != torch.float32:
        # peers round every step to 16 bits, a large relative error near zero
        relative, absolute = 3e-2, max(absolute, 2e-2) if absolute else 0.0
    return result.shape == wanted.shape and torch.allclose(result.float(), wanted, rtol=relative, atol=absolute)


def traffic(it: Task) -> Traffic:
    """The bytes that must move; not used for matrix products, whose limit is another product."""
    values = it.data.values.nbytes
    if it.name.endswith(BACKWARD):
        return _both_ways(it)
    if it.kind in _OF_A_ROW or it.kind == "two-level sum":
        return Traffic(read=values)
    if it.kind == "embedding bag":
        return Traffic(read=values + it.data.values.numel() * it.operands[0][0].nbytes)
    if it.kind in ("softmax", "layer norm"):
        # a row that does not fit a core's private cache comes from memory or an outer cache in both passes
        return Traffic(read=values, written=values, twice=int(it.data.lengths.argmax()))
    if it.kind == "to_padded":
        return Traffic(read=values, written=it.data.padded_bytes)
    if it.kind == "jagged + dense":
        return Traffic(read=values + it.data.padded_bytes, written=it.data.padded_bytes)
    return Traffic(read=values, written=values)


def _both_ways(it: Task) -> Traffic:
    """The forward pass, the gradients that arrive, and those that are returned. Gradients of elements need the elements again."""
    there = traffic(forward(it))
    if it.kind == "embedding bag":
        return Traffic(there.read + upstream(it).nbytes, it.operands[0].nbytes)
    values = it.data.values.nbytes
    if it.kind in _OF_A_ROW:
        return Traffic(there.read, values)
    return Traffic(there.read + 2 * values, there.written + values, there.twice)
