"""Loops that end where a row does, without the length of the longest row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given
from hypothesis import strategies as st

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.ir.expr import Array, Environment, Expr, Less, maximum, minimum, symbol
from serrate.ir.loops import For, LoopKernel, LoopProgram, Write, number
from serrate.ir.tile import GRID, SERIAL
from serrate.ir.values import Role, Tensor
from serrate.lower.passes.row_ends import row_ends

# --- the rewriting, by brute force ---------------------------------------------------------------------------------------

OFFSETS, OTHERS = Array("offsets"), Array("others")
LONGEST, TILE, ROW, PLACE = symbol("longest", 0), symbol("tile", 0), symbol("row", 0), symbol("place", 0)
LENGTH = OFFSETS[ROW + 1] - OFFSETS[ROW]
OTHER_LENGTH = OTHERS[ROW + 1] - OTHERS[ROW]
ATOMS = [LONGEST, LENGTH, OTHER_LENGTH, TILE, TILE * 3 + 3, LENGTH * 2 - LONGEST, TILE - LONGEST]

bounds: st.SearchStrategy[Expr] = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.builds(minimum, inner, inner),
        st.builds(maximum, inner, inner),
        st.builds(lambda e, size: (e + size - 1) // size, inner, st.sampled_from([2, 3])),
        st.builds(lambda e, size: e // size, inner, st.sampled_from([2, 3])),
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda e, factor, more: e * factor + more, inner, st.sampled_from([-1, 2]), st.integers(-2, 3)),
    ),
    max_leaves=6,
)
guards = st.lists(st.builds(Less, st.sampled_from([PLACE, TILE + PLACE]), bounds), min_size=1, max_size=3).map(tuple)


def program(extent: Expr, guard: tuple[Less, ...]) -> LoopProgram:
    out = Tensor("out", torch.float32, (), Role.OUTPUT)
    loop = For(PLACE, extent, SERIAL, (Write((), guard, out, (), number(PLACE, torch.float32)),), extent)
    body = (For(ROW, symbol("rows", 0), GRID, (loop,), symbol("rows", 0)),)
    return LoopProgram("p", (LoopKernel("p", body),), (), (out,), (), (), (), longest=((LONGEST, OFFSETS),))


def loop_of(made: LoopProgram) -> tuple[Expr, tuple[Less, ...]]:
    (grid,) = made.kernels[0].body
    assert isinstance(grid, For)
    (loop,) = grid.body
    assert isinstance(loop, For) and loop.bound is loop.extent
    (write,) = loop.body
    assert isinstance(write, Write)
    return loop.extent, write.guard


def visited(loop: tuple[Expr, tuple[Less, ...]], longest: int, length: int, other: int, tile: int) -> list[int]:
    """The positions at which the statement runs."""
    arrays = {OFFSETS: [4, 4 + length], OTHERS: [1, 1 + other]}

    def value(e: Expr, place: int) -> int:
        symbols = {LONGEST: longest, TILE: tile, ROW: 0, PLACE: place}
        return int(e.evaluate(Environment(symbols, lambda array, k: arrays[array][k])))

    extent, guard = loop
    return [k for k in range(value(extent, 0)) if all(value(g.left, k) < value(g.right, k) for g in guard)]


@given(bounds, guards)
def test_the_same_positions_are_visited(extent: Expr, guard: tuple[Less, ...]) -> None:
    plain = program(extent, guard)
    tight = loop_of(row_ends(plain))
    for longest in (0, 1, 5):
        for length in {0, longest // 2, longest}:
            for other in (0, 7):
                for tile in (0, 2):
                    numbers = (longest, length, other, tile)
                    assert visited(tight, *numbers) == visited(loop_of(plain), *numbers)


BLOCKS = [
    (minimum(LONGEST, LENGTH), LENGTH),
    (minimum((LENGTH + 7) // 8, (minimum(LONGEST, TILE * 8 + 8) + 7) // 8), minimum((LENGTH + 7) // 8, TILE + 1)),
    (minimum(LENGTH // 8, minimum((LONGEST + 7) // 8, TILE)), minimum(LENGTH // 8, TILE)),
    # not of the same rows, or not at least as large
    (minimum(LONGEST, OTHER_LENGTH), minimum(LONGEST, OTHER_LENGTH)),
    (minimum(LONGEST // 8, (LENGTH + 7) // 8), minimum(LONGEST // 8, (LENGTH + 7) // 8)),
    (minimum(LONGEST - 1, LENGTH), minimum(LONGEST - 1, LENGTH)),
    (minimum(LENGTH * 2 - LONGEST, LENGTH), minimum(LENGTH * 2 - LONGEST, LENGTH)),
    (
        minimum(minimum(TILE * 9 - minimum(LONGEST, TILE), LONGEST), LENGTH),
        minimum(TILE * 9 - minimum(LONGEST, TILE), LENGTH),
    ),
]


@pytest.mark.parametrize(("extent", "wanted"), BLOCKS, ids=[str(extent) for extent, _ in BLOCKS])
def test_bounds(extent: Expr, wanted: Expr) -> None:
    assert loop_of(row_ends(program(extent, (Less(PLACE, LENGTH),))))[0] is wanted


def test_conditions() -> None:
    first, second = Less(PLACE, minimum(LONGEST, TILE)), Less(PLACE, LENGTH)
    assert loop_of(row_ends(program(TILE, (first, second))))[1] == (Less(PLACE, TILE), second)
    assert loop_of(row_ends(program(TILE, (Less(PLACE, LONGEST), second))))[1] == (second,)
    apart = (Less(PLACE + TILE, LONGEST), second)
    assert loop_of(row_ends(program(TILE, apart)))[1] == apart


# --- kernels on rows of unknown lengths ----------------------------------------------------------------------------------


@serrate.kernel
def softmax(x: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(x)
    for b, d in hl.tile([x.num_rows, x.size(2)]):
        highest = hl.full([b, d], float("-inf"))
        for k in hl.tile(x.max_length):
            highest = torch.maximum(highest, x[b, k, d].amax(1))
        total = hl.zeros([b, d])
        for k in hl.tile(x.max_length):
            total = total + torch.exp(x[b, k, d] - highest[:, None, :]).sum(1)
        for k in hl.tile(x.max_length):
            out[b, k, d] = torch.exp(x[b, k, d] - highest[:, None, :]) / total[:, None, :]
    return out


@serrate.kernel
def causal(x: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(x)
    for b in hl.grid(x.num_rows):
        for q in hl.tile(x.max_length):
            acc = hl.zeros([q, x.size(2)])
            for k in hl.tile(0, q.end):
                scores = functional.silu(x[b, q] @ x[b, k].T)
                acc = acc + torch.where(q.index[:, None] >= k.index[None, :], scores, 0.0) @ x[b, k]
            out[b, q] = acc
    return out


@serrate.kernel
def later(x: JaggedTensor) -> JaggedTensor:
    """Every position adds up those from its own on."""
    out = torch.empty_like(x)
    for b in hl.grid(x.num_rows):
        for q in hl.tile(x.max_length):
            acc = hl.zeros([q, x.size(2)])
            for k in hl.tile(q.begin, x.max_length):
                own = torch.where(q.index[:, None] <= k.index[None, :], 1.0, 0.0)
                acc = acc + own @ x[b, k]
            out[b, q] = acc
    return out


def causal_row(row: torch.Tensor) -> torch.Tensor:
    return functional.silu(row @ row.T).tril() @ row


KERNELS: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": (softmax, functools.partial(torch.softmax, dim=0)),
    "causal": (causal, causal_row),
    "later": (later, lambda row: row.flip(0).cumsum(0).flip(0)),
}


@pytest.mark.triton
@pytest.mark.parametrize("strategy", [None, "maskless", "persistent_dynamic"])
@pytest.mark.parametrize("name", KERNELS)
def test_lengths_are_not_copied(name: str, strategy: str | None) -> None:
    kernel, row = KERNELS[name]
    run = serrate.kernel(kernel.fn, strategy=strategy).on("triton")
    for lengths in ([3, 0, 130, 64], [65, 1], [0, 0], [1, 63, 300]):
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        values = torch.randn(sum(lengths), 16, generator=torch.Generator().manual_seed(1))
        with serrate.no_sync(strict=True):
            got = run(JaggedTensor.from_csr(values, offsets, validate=False))
        for own, x in zip(got.values.split(lengths), values.split(lengths), strict=True):
            torch.testing.assert_close(own.double(), row(x.double()), rtol=1e-3, atol=1e-4)
