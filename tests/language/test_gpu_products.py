"""Kernels with matrix products on a GPU: they get the blocks and warps of the matching operators, and compute what torch does.

The plans are made without a GPU and run by Triton's interpreter. The oracle is plain torch, group by group.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional

import serrate
import serrate.language as hl
from serrate import Config, JaggedTensor
from serrate.schedule.plan import Plan
from serrate.tiles.stage import Variant

pytestmark = pytest.mark.triton
CUT = Config(strategy="persistent_dynamic")


@serrate.kernel(config=CUT)
def grouped(x: JaggedTensor, w: torch.Tensor) -> JaggedTensor:
    groups, depth, width = w.shape
    out = x.with_values(torch.empty([x.total_elements, width], dtype=x.dtype, device=x.device))
    for tile_g, tile_m, tile_n in hl.tile([groups, x.max_length, width]):
        acc = hl.zeros([tile_g, tile_m, tile_n])
        for tile_k in hl.tile(depth):
            acc = acc + x[tile_g, tile_m, tile_k] @ w[tile_g, tile_k, tile_n]
        out[tile_g, tile_m, tile_n] = acc.to(out.dtype)
    return out


@serrate.kernel(config=CUT)
def gated(x: JaggedTensor, gate: torch.Tensor, up: torch.Tensor) -> JaggedTensor:
    groups, depth, width = gate.shape
    out = x.with_values(torch.empty([x.total_elements, width], dtype=x.dtype, device=x.device))
    for g in hl.grid(groups):
        for tile_m, tile_n in hl.tile([x.max_length, width]):
            left = hl.zeros([tile_m, tile_n])
            right = hl.zeros([tile_m, tile_n])
            for tile_k in hl.tile(depth):
                left = left + x[g, tile_m, tile_k] @ gate[g, tile_k, tile_n]
                right = right + x[g, tile_m, tile_k] @ up[g, tile_k, tile_n]
            out[g, tile_m, tile_n] = (functional.silu(left) * right).to(out.dtype)
    return out


@serrate.kernel(config=CUT)
def weighted(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor, alpha: float, scale: float) -> JaggedTensor:
    out = torch.empty_like(v)
    for b in hl.grid(q.num_rows):
        for tile_q in hl.tile(q.max_length):
            acc = hl.zeros([tile_q, v.size(2)])
            for tile_k in hl.tile(0, tile_q.end):
                scores = functional.silu(q[b, tile_q] @ k[b, tile_k].T * alpha) * scale
                acc = acc + torch.where(tile_q.index[:, None] >= tile_k.index[None, :], scores, 0.0) @ v[b, tile_k]
            out[b, tile_q] = acc.to(out.dtype)
    return out


def ragged(lengths: list[int], width: int, seed: int) -> JaggedTensor:
    return JaggedTensor.from_lengths(
        torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed)), torch.tensor(lengths)
    )


def made(kernel: Any, *args: Any) -> Variant:
    (found,) = kernel.on("triton").variants(*args)
    return found


def sizes(plan: Plan) -> dict[str, int]:
    return {t.loop.removesuffix("i").removesuffix("r"): t.size for t in plan.tiles}


def test_a_product_fills_the_registers_with_its_sums() -> None:
    x, w = ragged([300, 0, 150], 512, 0), torch.zeros(3, 512, 600)
    plan = made(grouped, x, w).plan
    assert sizes(plan) == {"m": 128, "n": 256, "k": 64}
    assert plan.warps == 8


def test_two_products_share_the_registers() -> None:
    x, w = ragged([300, 0, 150], 512, 0), torch.zeros(3, 512, 600)
    assert sizes(made(gated, x, w, w).plan) == {"m": 128, "n": 128, "k": 64}


def test_chained_products_have_small_blocks_and_few_warps() -> None:
    q = ragged([300, 0, 150], 64, 0)
    plan = made(weighted, q, q, q, 1.0, 1.0).plan
    assert sizes(plan) == {"q": 64, "k": 64}
    assert plan.warps == 4


def test_numbers_of_the_caller_are_read_before_all_loops() -> None:
    q = ragged([3, 4], 64, 0)
    source = made(weighted, q, q, q, 1.0, 1.0).executable.source
    reads = re.findall(r"^( *)\w+ = tl\.load\(numbers", source, re.MULTILINE)
    assert len(reads) == 2 and {len(indent) for indent in reads} == {4}


@pytest.mark.parametrize(("depth", "width"), [(70, 300), (64, 256), (1, 1), (129, 17)], ids=str)
def test_products_of_odd_sizes(depth: int, width: int) -> None:
    lengths = [150, 0, 1, 128, 129]
    x, w = ragged(lengths, depth, 1), torch.randn(len(lengths), depth, width, generator=torch.Generator().manual_seed(2))
    rows = [row.double() @ own.double() for row, own in zip(x.values.split(lengths), w, strict=True)]
    torch.testing.assert_close(grouped.on("triton")(x, w).values.double(), torch.cat(rows), rtol=1e-4, atol=1e-4)
    rows = [functional.silu(own) * own for own in rows]
    torch.testing.assert_close(gated.on("triton")(x, w, w).values.double(), torch.cat(rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [16, 33, 128])
def test_chained_products_over_several_blocks(width: int) -> None:
    lengths = [150, 0, 1, 64, 65]
    q = ragged(lengths, width, 1)
    k, v = (q.with_values(ragged(lengths, width, seed).values) for seed in (2, 3))
    rows = []
    for own_q, own_k, own_v in zip(*(x.values.double().split(lengths) for x in (q, k, v)), strict=True):
        rows.append((functional.silu(own_q @ own_k.T * 0.3) * 0.1).tril() @ own_v)
    got = weighted.on("triton")(q, k, v, 0.3, 0.1).values.double()
    torch.testing.assert_close(got, torch.cat(rows), rtol=1e-4, atol=1e-4)
