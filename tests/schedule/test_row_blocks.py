"""Memory of ragged intermediates, set by a schedule: rows in blocks, and rows that a worker holds one at a time.

In: fusions scheduled by hand. Out: failures that name the backend. Plain torch, row by row, is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from serrate import analysis, ops
from serrate.errors import ScheduleError
from serrate.ir import Fusion, IterDomain, cover, merge, split
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor

pytestmark = pytest.mark.triton
T = torch.tensor
BACKENDS = ("reference", "cpp", "triton")
ROWS = T([0, 3, 3, 10])


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def split_rows(x: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    return [x[a:b] for a, b in pairwise(offsets.tolist())]


def check(f: Fusion, want: torch.Tensor, *args: torch.Tensor, backends: Sequence[str] = BACKENDS) -> None:
    for backend in backends:
        found: Any = f.compile(backend)(*args)
        found = found.values if isinstance(found, JaggedTensor) else found
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5, msg=lambda m, b=backend: f"{b}: {m}")


# --- rows in blocks --------------------------------------------------------------------------------------------------------

Stored = Callable[[IterDomain, IterDomain, IterDomain], list[IterDomain]]


def row_sums(width: int = 2) -> tuple[Fusion, TensorView, TensorView]:
    with Fusion() as f:
        x, offsets = f.input((None, width), torch.float32), f.input((None,), torch.int64)
        inner = ops.exp(ops.as_nested(x, offsets))
        total = ops.sum(inner, 1)
        f.output(total)
    return f, inner, total


@pytest.mark.parametrize(
    ("stored", "sizes"),
    [
        (lambda c, r, d: [c, *split(r, 4), d], [3, 4, 2]),
        (lambda c, r, d: [d, c, *split(r, 4)], [2, 3, 4]),
        (lambda c, r, d: [c, split(r, 4)[0], d, split(r, 4)[1]], [3, 2, 4]),
        (lambda c, r, d: [c, *split(merge(r, d), 4)], [6, 4]),
        (lambda c, r, d: [c, *split(split(r, 4)[0], 2), split(r, 4)[1], d], [2, 2, 4, 2]),
        (lambda c, r, d: [c, r, d], [10, 2]),
    ],
    ids=["blocks of rows", "columns first", "columns inside blocks", "blocks of rows and columns", "blocks of blocks", "packed"],
)
def test_rows_are_stored_in_blocks(stored: Stored, sizes: list[int]) -> None:
    f, inner, _ = row_sums()
    inner.set_allocation(stored(*inner.domains))
    x = values(10, 2)
    check(f, torch.stack([row.exp().sum(0) for row in split_rows(x, ROWS)]), x, ROWS)
    compiled: Any = f.compile("cpp")
    ((_, _), (shape, _)) = compiled.stages[0].prepared(compiled.binder.bind((x, ROWS))).shapes
    assert list(shape) == sizes


def test_blocks_are_where_the_analysis_says() -> None:
    """Rows of 100, 150 and 262 in blocks of 128 start at 0, 128 and 384, and span 768 places."""
    f, inner, total = row_sums()
    c, r, d = inner.domains
    inner.set_allocation([c, *split(r, 128), d])
    total.split(1, 128).parallelize(0, "grid").parallelize(2, "lanes").parallelize(3, "lanes")
    inner.split(1, 128).parallelize(0, "grid").parallelize(2, "lanes").parallelize(3, "lanes")
    offsets, x = T([0, 100, 250, 512]), values(512, 2)
    check(f, torch.stack([row.exp().sum(0) for row in split_rows(x, offsets)]), x, offsets)
    assert str(analysis.allocation([c, *split(r, 128), d]).elements) == "sum((T1[c + 1] - T1[c] + 127) // 128)[n1 - 1]*256"
    compiled: Any = f.compile("cpp")
    assert compiled.stages[0].prepared(compiled.binder.bind((x, offsets))).shapes[1][0] == (768 // 128, 128, 2)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 5), st.integers(1, 3), st.permutations(range(4)))
@settings(max_examples=15)
def test_any_blocks_in_any_order(lengths: list[int], size: int, outer: int, order: list[int]) -> None:
    f, inner, _ = row_sums()
    c, r, d = inner.domains
    tile, lane = split(r, size)
    blocks, within = split(tile, outer)
    # Blocks follow the dim that counts their rows.
    dims = [[c, blocks], [within], [lane], [d]]
    inner.set_allocation([each for k in order for each in dims[k]])
    offsets = T([0, *lengths]).cumsum(0)
    x = values(sum(lengths), 2)
    want = torch.stack([row.exp().sum(0) for row in split_rows(x, offsets)]) if lengths else torch.zeros(0, 2)
    check(f, want, x, offsets, backends=("reference",))


@pytest.mark.parametrize("kind", ["chain", "parts", "product"])
def test_blocks_of_nested_rows_and_products(kind: str) -> None:
    x, outer = values(10, 4), T([0, 1, 3]) if kind == "chain" else T([[0, 1, 3, 3], [0, 0, 0, 0], [0, 2, 4, 7]])
    with Fusion() as f:
        rows = ops.as_nested(f.input((None, 4), torch.float32), f.input((None,), torch.int64))
        if kind == "product":
            inner = ops.matmul(rows, ops.transpose(rows, 1, 2))
        else:
            levels = f.input((None, *outer.shape[1:]), torch.int64)
            inner = ops.exp(ops.as_nested(rows, levels, ragged_dim=0 if kind == "chain" else 1))
        f.output(ops.sum(inner, 2))
    *counts, last = inner.domains[:3]
    inner.set_allocation([*counts, *split(last, 4), *inner.domains[3:]])
    assert [str(d.extent) for d in inner.domain.allocation][1:] == (["4"] if kind == "product" else ["4", "4"])
    pieces = split_rows(x, ROWS)
    if kind == "product":
        check(f, torch.cat([(row @ row.T).sum(1) for row in pieces]), x, ROWS)
    elif kind == "chain":
        check(f, torch.stack([row.exp().sum(0) for row in pieces]), x, ROWS, outer)
    else:
        parts = [p.exp().sum(0) for row, o in zip(pieces, outer, strict=True) for p in split_rows(row, o)]
        check(f, torch.stack(parts).view(3, 3, 4), x, ROWS, outer)


@pytest.mark.parametrize(
    "stored",
    [
        lambda c, r, d: [c, split(r, 4)[0], d],
        lambda c, r, d: [*split(r, 4), d],
        lambda c, r, d: [*split(c, 2), r, d],
        lambda c, r, d: [c, cover(r, 7), d],
    ],
    ids=["without lanes", "without components", "components that do not exist", "padded"],
)
def test_memory_that_does_not_hold_all_rows_is_refused(stored: Stored) -> None:
    _, inner, _ = row_sums()
    with pytest.raises(
        ScheduleError, match=r"set_allocation: \[.*\] cannot be made from the dims of T3, .* by splits, merges and combines"
    ):
        inner.set_allocation(stored(*inner.domains))


# --- held rows -------------------------------------------------------------------------------------------------------------


def softmax(*levels: tuple[int | None, ...]) -> tuple[Fusion, TensorView, TensorView, TensorView]:
    """Exponentials, their sum over each row, and their quotients; `levels` are the shapes of more offsets."""
    with Fusion() as f:
        x = ops.as_nested(f.input((None, 2), torch.float32), f.input((None,), torch.int64))
        for shape in levels:
            x = ops.as_nested(x, f.input(shape, torch.int64), ragged_dim=len(shape) - 1)
        rows = x.ndim - 2
        terms = ops.exp(x)
        total = ops.sum(terms, rows, keepdim=True)
        y = ops.div(terms, total)
        f.output(y)
    return f, terms, total, y


def _whole(terms: TensorView, total: TensorView, y: TensorView) -> None:
    y.parallelize(0, "grid")
    total.inline_at(y, 1)
    terms.inline_at(y, 1)


def _in_tiles(terms: TensorView, total: TensorView, y: TensorView) -> None:
    for view, size in ((y, 4), (total, 2), (terms, 8)):
        view.split(1, size).parallelize(2, "lanes")
    y.parallelize(0, "grid")
    total.inline_at(y, 1)
    terms.inline_at(y, 1)


def _of_split_components(terms: TensorView, total: TensorView, y: TensorView) -> None:
    for view in (y, total, terms):
        view.split(0, 2)
    y.parallelize(0, "grid")
    total.inline_at(y, 2)
    terms.inline_at(y, 2)


Schedule = Callable[[TensorView, TensorView, TensorView], None]


@pytest.mark.parametrize("schedule", [_whole, _in_tiles, _of_split_components])
def test_rows_that_other_loops_read_are_held_one_at_a_time(schedule: Schedule) -> None:
    f, terms, total, y = softmax()
    schedule(terms, total, y)
    for view in (terms, total, y):
        view.parallelize(-1, "lanes")
    x = values(10, 2)
    want = torch.cat([row.softmax(0) for row in split_rows(x, ROWS)])
    check(f, want, x, ROWS, backends=("reference", "cpp"))
    compiled: Any = f.compile("cpp")
    assert any("hold T3" in line for line in compiled.plan(x, ROWS).lines)
    (row,) = compiled.stages[0].prepared(compiled.binder.bind((x, ROWS))).private
    assert row.shape == (7, 2), "as long as the longest row"
    with pytest.raises(ScheduleError, match="T3 would be held row by row inside T6, and this target has no memory for rows"):
        f.compile("triton")(x, ROWS)


@pytest.mark.parametrize(
    ("shape", "offsets"), [((None,), T([0, 1, 3])), ((None, 3), T([[0, 1, 3], [0, 0, 0], [0, 3, 7]]))], ids=["chain", "parts"]
)
def test_nested_rows_are_held(shape: tuple[int | None, ...], offsets: torch.Tensor) -> None:
    f, terms, total, y = softmax(shape)
    y.parallelize(0, "grid")
    total.inline_at(y, 2)
    terms.inline_at(y, 2)
    for view in (terms, total, y):
        view.parallelize(-1, "lanes")
    x = values(10, 2)
    bounds = ROWS if offsets.ndim == 1 else T([0, 1, 3, 3, 3, 6, 10])
    want = torch.cat([row.softmax(0) for row in split_rows(x, bounds)])
    check(f, want, x, ROWS, offsets, backends=("reference", "cpp"))


def test_a_row_of_sums_is_held() -> None:
    with Fusion() as f:
        x = ops.as_nested(f.input((None, 3), torch.float32), f.input((None,), torch.int64))
        sums = ops.sum(x, 2)
        y = ops.sub(sums, ops.amax(sums, 1, keepdim=True))
        f.output(y)
    y.parallelize(0, "grid")
    for view in reversed([v for v in f.tensors if v.tensor.name in ("T3", "T4")]):
        view.inline_at(y, 1)
    data = values(10, 3)
    want = torch.cat([row.sum(1) - row.sum(1).amax() for row in split_rows(data, ROWS) if len(row)])
    check(f, want, data, ROWS, backends=("reference", "cpp"))


def test_rows_are_held_only_by_loops_that_select_one() -> None:
    f, terms, total, y = softmax()
    for view in (y, total, terms):
        view.split(0, 2).parallelize(-1, "lanes")
    y.parallelize(0, "grid").parallelize(1, "grid")
    total.parallelize(0, "grid").parallelize(1, "grid")
    terms.inline_at(total, 1)
    with pytest.raises(ScheduleError, match="fuse: T3 is written and read by separate loops"):
        f.compile("cpp")


def test_held_rows_are_read_where_they_are_computed() -> None:
    f, terms, total, y = softmax()
    y.parallelize(0, "grid").parallelize(-1, "lanes")
    total.parallelize(0, "grid").parallelize(-1, "lanes")
    terms.parallelize(-1, "lanes").inline_at(total, 1)
    with pytest.raises(ScheduleError, match="T3 is held row by row where it is computed, and T6 reads it elsewhere"):
        f.compile("cpp")(values(10, 2), ROWS)
