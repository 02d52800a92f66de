"""Peers that do not pad: torch's operations on segments, bags and flat values.

In: a task. Out: methods for it, the longer ones also under torch.compile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.data import Ragged
from benchmarks.methods import Call, Method, both, simple
from benchmarks.tasks import Task, attend, permuted


def methods(task: Task, compiled: bool) -> list[Method]:
    data, values = task.data, task.data.values
    if task.kind in ("sum", "mean", "max"):
        found = [_bag(data, task.kind), _segments(data, task.kind)]
        return found if task.kind == "max" else [*found, _index_add(data, task.kind)]
    if task.kind == "two-level sum":
        return _two_levels(task)
    if task.kind == "embedding bag":
        (table,) = task.operands
        return [
            simple(
                "embedding_bag",
                lambda: functional.embedding_bag(values, table, data.offsets, mode="sum", include_last_offset=True),
            ),
            simple("segment_reduce", lambda: torch.segment_reduce(table[values], "sum", offsets=data.offsets)),
        ]
    if task.kind == "pointwise":
        return both("flat values", _flat_pointwise, lambda: (values, *task.operands), compiled=compiled)
    if task.kind in _COMPOSED:
        arguments = lambda: (values, data.offsets, row_of(data), *task.operands)  # noqa: E731
        return both("segments", _COMPOSED[task.kind], arguments, compiled=compiled)
    if task.kind == "to_padded":
        return [Method("pad_sequence", lambda: _pad_sequence(data))]
    if task.kind == "jagged + dense":
        return [Method("index_put_", lambda: _index_put(task))]
    if task.kind == "block permute":
        return [Method("split and cat", lambda: _split_and_cat(data)), Method("index_select", lambda: _by_index(data))]
    if task.kind == "grouped matmul":
        return _products(task)
    if task.kind.endswith("attention"):
        return [Method("SDPA per sequence", lambda: _per_sequence(task), torch.cat)]
    return []


def row_of(data: Ragged) -> Tensor:
    """The row of every position."""
    return torch.repeat_interleave(torch.arange(data.rows), data.lengths)


def _per_sequence(task: Task) -> Call:
    rows = [torch.split(x, task.data.lengths.tolist()) for x in (task.data.values, *task.operands)]
    return lambda: [attend(task, *each) for each in zip(*rows, strict=True)]


# --- reductions ----------------------------------------------------------------------------------------------------------


def _bag(data: Ragged, mode: str) -> Method:
    table = data.values if data.values.dim() == 2 else data.values[:, None]

    def prepare() -> Call:
        indices = torch.arange(table.shape[0])
        return lambda: functional.embedding_bag(indices, table, data.offsets, mode=mode, include_last_offset=True)

    return Method("embedding_bag", prepare, lambda result: result.view(data.rows, *data.values.shape[1:]))


def _segments(data: Ragged, mode: str) -> Method:
    return simple("segment_reduce", lambda: torch.segment_reduce(data.values, mode, offsets=data.offsets))


def _index_add(data: Ragged, mode: str) -> Method:
    def prepare() -> Call:
        values, rows = data.values, row_of(data)
        lengths = data.lengths.view(-1, *(1 for _ in values.shape[1:])).to(values.dtype)

        def call() -> Tensor:
            total = values.new_zeros(data.rows, *values.shape[1:]).index_add_(0, rows, values)
            return total / lengths if mode == "mean" else total

        return call

    return Method("index_add_", prepare)


def _two_levels(task: Task) -> list[Method]:
    data, documents = task.data, task.operands[0]

    def twice() -> Tensor:
        sentences = torch.segment_reduce(data.values, "sum", offsets=data.offsets)
        return torch.segment_reduce(sentences, "sum", offsets=documents)

    # sums of sums are sums over merged rows, if a user notices and merges the offsets
    joined = Ragged(data.distribution, data.values, data.offsets[documents])
    return [simple("segment_reduce twice", twice), _bag(joined, "sum"), _index_add(joined, "sum")]


# --- composed of segments ------------------------------------------------------------------------------------------------


def _flat_pointwise(values: Tensor, scale: float, bias: Tensor) -> Tensor:
    return torch.relu(values * scale + bias)


def _summed(values: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    return values.new_zeros(offsets.shape[0] - 1, *values.shape[1:]).index_add_(0, rows, values)


def _softmax(values: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    exponentials = (values - torch.segment_reduce(values, "max", offsets=offsets)[rows]).exp()
    return exponentials / _summed(exponentials, offsets, rows)[rows]


def _logsumexp(values: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    top = torch.segment_reduce(values, "max", offsets=offsets)
    return _summed((values - top[rows]).exp(), offsets, rows).log() + top


def _layer_norm(values: Tensor, offsets: Tensor, rows: Tensor, epsilon: float) -> Tensor:
    counts = (offsets.diff() * values.shape[1]).to(values.dtype)

    def per_row(terms: Tensor) -> Tensor:
        return (_summed(terms.sum(1), offsets, rows) / counts)[rows, None]

    centred = values - per_row(values)
    return centred * torch.rsqrt(per_row(centred * centred) + epsilon)


_COMPOSED: dict[str, Callable[..., Tensor]] = {"softmax": _softmax, "logsumexp": _logsumexp, "layer norm": _layer_norm}


# --- movement and products -----------------------------------------------------------------------------------------------


def _pad_sequence(data: Ragged) -> Call:
    rows = list(data.split())
    return lambda: pad_sequence(rows, batch_first=True)


def _index_put(task: Task) -> Call:
    data, dense = task.data, task.operands[0]
    rows = row_of(data)
    places = torch.arange(len(rows)) - data.offsets[rows]
    return lambda: dense.clone().index_put_((rows, places), data.values, accumulate=True)


def _split_and_cat(data: Ragged) -> Call:
    lengths, order = data.lengths.tolist(), permuted(data.rows)

    def call() -> Tensor:
        blocks = torch.split(data.values, lengths)
        return torch.cat([blocks[block] for block in order])

    return call


def _by_index(data: Ragged) -> Call:
    bounds = data.offsets.tolist()
    index = torch.cat([torch.arange(bounds[block], bounds[block + 1]) for block in permuted(data.rows)])
    return lambda: data.values.index_select(0, index)


def _products(task: Task) -> list[Method]:
    tokens, weights = task.data.values, task.operands[0]
    bounds, ends = task.data.offsets.tolist(), task.data.offsets[1:].to(torch.int32)

    def per_group() -> Tensor:
        out = tokens.new_empty(tokens.shape[0], weights.shape[2])
        for group, (start, end) in enumerate(itertools.pairwise(bounds)):
            torch.mm(tokens[start:end], weights[group], out=out[start:end])
        return out

    def grouped() -> Any:
        return functional.grouped_mm(tokens, weights, offs=ends)

    missing = "" if hasattr(functional, "grouped_mm") else f"not in torch {torch.__version__}"
    return [simple("torch.mm per group", per_group), Method("F.grouped_mm", lambda: grouped, reason=missing)]
