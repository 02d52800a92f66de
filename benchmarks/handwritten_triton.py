"""Hand-written Triton of the same work: sums, softmax and layer norm over rows, grouped matrix products, attention.

In: values with rows back to back, and offsets on the device. Out: results like serrate's. These are kernels as one writes them
for a task: a program for each row and block of columns, or for each tile of a list. One very long row is one program's work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = 1.4426950408889634


# --- rows ----------------------------------------------------------------------------------------------------------------


@triton.jit
def _sum_kernel(values, offsets, out, width: tl.constexpr, tile: tl.constexpr, columns: tl.constexpr):
    row = tl.program_id(1)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    total = tl.zeros((columns,), tl.float32)
    for first in tl.range(begin, end, tile, num_stages=3):
        position = first + tl.arange(0, tile)
        inside = (position < end)[:, None]
        block = tl.load(values + position[:, None] * width + column[None, :], mask=inside, other=0.0)
        total += tl.sum(block.to(tl.float32), 0)
    tl.store(out + row * width + column, total)


def row_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """The sum of each row: `[rows, width]`."""
    rows, width = len(offsets) - 1, values.shape[1]
    columns = min(width, 64)
    out = torch.empty(rows, width, dtype=values.dtype, device=values.device)
    _sum_kernel[(width // columns, rows)](values, offsets, out, width, 64, columns, num_warps=2)
    return out


@triton.jit
def _softmax_kernel(values, offsets, out, width: tl.constexpr, tile: tl.constexpr, columns: tl.constexpr):
    """Statistics in one pass over the row, results in a second one that finds the row in the L2 cache."""
    row = tl.program_id(1)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    top = tl.full((columns,), float("-inf"), tl.float32)
    total = tl.zeros((columns,), tl.float32)
    for first in range(begin, end, tile):
        position = first + tl.arange(0, tile)
        inside = (position < end)[:, None]
        block = tl.load(values + position[:, None] * width + column[None, :], mask=inside, other=float("-inf"))
        scaled = block.to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, tl.max(scaled, 0))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(scaled - new_top[None, :]), 0)
        top = new_top
    shift = top + tl.log2(total)
    for first in range(begin, end, tile):
        position = first + tl.arange(0, tile)
        inside = (position < end)[:, None]
        place = position[:, None] * width + column[None, :]
        block = tl.load(values + place, mask=inside, other=0.0, eviction_policy="evict_first")
        result = tl.exp2(block.to(tl.float32) * 1.4426950408889634 - shift[None, :])
        tl.store(out + place, result, mask=inside, cache_modifier=".cs")


def row_softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """Softmax over each row, column by column."""
    rows, width = len(offsets) - 1, values.shape[1]
    columns = min(width, 32)
    out = torch.empty_like(values)
    _softmax_kernel[(width // columns, rows)](values, offsets, out, width, 128, columns, num_warps=4)
    return out


@triton.jit
def _layer_norm_kernel(values, offsets, out, width: tl.constexpr, tile: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, width)
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    sums = tl.zeros((tile, width), tl.float32)
    squares = tl.zeros((tile, width), tl.float32)
    for first in range(begin, end, tile):
        position = first + tl.arange(0, tile)
        inside = (position < end)[:, None]
        block = tl.load(values + position[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        sums += block
        squares += block * block
    count = ((end - begin) * width).to(tl.float32)
    mean = tl.sum(sums) / count
    scale = tl.rsqrt(tl.sum(squares) / count - mean * mean + 1e-5)
    for first in range(begin, end, tile):
        position = first + tl.arange(0, tile)
        inside = (position < end)[:, None]
        place = position[:, None] * width + column[None, :]
        block = tl.load(values + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(out + place, (block - mean) * scale, mask=inside, cache_modifier=".cs")


def row_layer_norm(values: Tensor, offsets: Tensor) -> Tensor:
    """Layer norm over all elements of each row."""
    out = torch.empty_like(values)
    _layer_norm_kernel[(len(offsets) - 1,)](values, offsets, out, values.shape[1], 32, num_warps=8)
    return out


# --- lists of tiles ------------------------------------------------------------------------------------------------------


def tiles_of_rows(offsets: Tensor, total: int, tile: int) -> tuple[Tensor, Tensor]:
    """The row of each tile of `tile` positions, and its number in the row; -1 after the last. Made on the device: the host knows
    only a bound."""
    counts = (offsets.diff() + tile - 1) // tile
    ends = counts.cumsum(0)
    listed = torch.arange(total // tile + len(counts), device=offsets.device)
    row = torch.searchsorted(ends, listed, right=True)
    exists = row < len(counts)
    row = row.clamp(max=len(counts) - 1)
    number = listed - (ends - counts)[row]
    return torch.where(exists, row, -1).int(), number.int()


@triton.jit
def _grouped_kernel(
    values,
    weights,
    out,
    offsets,
    tile_rows,
    tile_numbers,
    depth: tl.constexpr,
    width: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    group = tl.load(tile_rows + tl.program_id(1))
    if group >= 0:
        first = tl.load(offsets + group) + tl.load(tile_numbers + tl.program_id(1)) * block_m
        end = tl.load(offsets + group + 1)
        rows = first + tl.arange(0, block_m)
        columns = tl.program_id(0) * block_n + tl.arange(0, block_n)
        inside = rows < end
        inner = tl.arange(0, block_k)
        left = values + rows[:, None] * depth + inner[None, :]
        right = weights + group.to(tl.int64) * depth * width + inner[:, None] * width + columns[None, :]
        total = tl.zeros((block_m, block_n), tl.float32)
        for _ in range(0, depth, block_k):
            total = tl.dot(tl.load(left, mask=inside[:, None], other=0.0), tl.load(right), total)
            left += block_k
            right += block_k * width
        place = out + rows[:, None] * width + columns[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=inside[:, None])


def grouped_matmul(values: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Each group's rows times its own matrix: `[total, depth] @ [groups, depth, width]`."""
    (total, depth), width = values.shape, weights.shape[2]
    block_m, block_n, block_k = 128, min(width, 256), min(depth, 64)
    rows, numbers = tiles_of_rows(offsets, total, block_m)
    out = torch.empty(total, width, dtype=values.dtype, device=values.device)
    _grouped_kernel[(width // block_n, len(rows))](
        *(values, weights, out, offsets, rows, numbers, depth, width, block_m, block_n, block_k), num_warps=8, num_stages=3
    )
    return out


@triton.jit
def _attention_kernel(
    queries,
    keys,
    values,
    out,
    offsets,
    tile_rows,
    tile_numbers,
    scale,
    heads: tl.constexpr,
    size: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
    causal: tl.constexpr,
):
    """A tile of queries of one head, over the keys of its sequence; only the last blocks of keys are masked."""
    row = tl.load(tile_rows + tl.program_id(1))
    if row >= 0:
        begin = tl.load(offsets + row)
        length = (tl.load(offsets + row + 1) - begin).to(tl.int32)
        base = begin * heads * size + tl.program_id(0) * size
        first = tl.load(tile_numbers + tl.program_id(1)) * block_q
        here = first + tl.arange(0, block_q)
        feature = tl.arange(0, size)
        stride = heads * size
        place = base + here[:, None] * stride + feature[None, :]
        query = tl.load(queries + place, mask=(here < length)[:, None], other=0.0)
        top = tl.full((block_q,), float("-inf"), tl.float32)
        total = tl.zeros((block_q,), tl.float32)
        result = tl.zeros((block_q, size), tl.float32)
        end = tl.minimum(length, first + block_q) if causal else length
        unmasked = (tl.minimum(end, first) if causal else end) // block_k * block_k
        for k in range(0, unmasked, block_k):
            there = k + tl.arange(0, block_k)
            key = tl.load(keys + base + there[None, :] * stride + feature[:, None])
            score = tl.dot(query, key) * scale
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            faded = tl.exp2(top - new_top)
            total = total * faded + tl.sum(weight, 1)
            value = tl.load(values + base + there[:, None] * stride + feature[None, :])
            result = tl.dot(weight.to(value.dtype), value, result * faded[:, None])
            top = new_top
        for k in range(unmasked, end, block_k):
            there = k + tl.arange(0, block_k)
            exists = there < length
            key = tl.load(keys + base + there[None, :] * stride + feature[:, None], mask=exists[None, :], other=0.0)
            seen = exists[None, :] & (there[None, :] <= here[:, None]) if causal else exists[None, :]
            score = tl.where(seen, tl.dot(query, key) * scale, float("-inf"))
            # A query that has seen no key yet has no maximum; of two infinities the difference is NaN.
            new_top = tl.maximum(tl.maximum(top, tl.max(score, 1)), -1e38)
            weight = tl.exp2(score - new_top[:, None])
            faded = tl.exp2(top - new_top)
            total = total * faded + tl.sum(weight, 1)
            value = tl.load(values + base + there[:, None] * stride + feature[None, :], mask=exists[:, None], other=0.0)
            result = tl.dot(weight.to(value.dtype), value, result * faded[:, None])
            top = new_top
        tl.store(out + place, (result / total[:, None]).to(out.dtype.element_ty), mask=(here < length)[:, None])


def attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, causal: bool) -> Tensor:
    """Attention inside each sequence, `[total, heads, size]`."""
    total, heads, size = q.shape
    rows, numbers = tiles_of_rows(offsets, total, 128)
    out = torch.empty_like(q)
    _attention_kernel[(heads, len(rows))](
        *(q, k, v, out, offsets, rows, numbers, LOG2E * size**-0.5, heads, size, 128, 64, causal),
        num_warps=8 if size > 64 else 4,
        num_stages=3,
    )
    return out
