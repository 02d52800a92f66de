"""Rows in pieces: split, chunk, slices with steps, padding and reversal along every dim, against nested Python lists.

In: rows of one and of two levels. Out: failures where a piece holds other elements than the same lists do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from serrate import JaggedTensor, Structure, jit
from serrate.errors import ShapeError

ROWS = JaggedTensor.from_lengths(torch.arange(10.0), [3, 0, 5, 2])
WORDS = JaggedTensor(torch.arange(10.0), Structure.from_lengths(torch.tensor([2, 0, 2]), torch.tensor([3, 0, 5, 2])))
RUNS = pytest.mark.parametrize(
    "run", [lambda f: f, jit, lambda f: jit(f, backend="reference")], ids=["eager", "jit", "reference"]
)


def lists(x: Any) -> Any:
    return x.tolist()


def every_row(nested: list[Any], depth: int, change: Callable[[list[float]], Any]) -> Any:
    """The innermost lists changed."""
    return change(nested) if depth == 0 else [every_row(one, depth - 1, change) for one in nested]


def chunked(row: list[float], chunks: int, k: int) -> list[float]:
    size = -(-len(row) // chunks)
    return row[k * size : (k + 1) * size]


@pytest.mark.sampled(1)
@RUNS
@pytest.mark.parametrize("rows", [ROWS, WORDS], ids=["one level", "two levels"])
def test_pieces_of_every_row(run: Any, rows: JaggedTensor) -> None:
    dim, depth = rows.ndim - 1, rows.ndim - 1
    wanted, last = lists(rows), (slice(None),) * (rows.ndim - 1)

    def pieces(x: Any) -> list[Any]:
        shorter, longer = F.pad(x, (-1, 0)), F.pad(x, (2, 1), value=7.0)
        return [
            *torch.split(x, [1, 2, 4], dim),
            *torch.chunk(x, 3, dim),
            x[(*last, slice(1, -1, 2))],
            x.flip(dim),
            shorter,
            longer,
        ]

    changes: list[Callable[[list[float]], Any]] = [lambda r: r[:1], lambda r: r[1:3], lambda r: r[3:7]]
    changes += [lambda r, k=k: chunked(r, 3, k) for k in range(3)]
    changes += [lambda r: r[1:-1:2], lambda r: r[::-1], lambda r: r[1:], lambda r: [7.0, 7.0, *r, 7.0]]
    for got, change in zip(run(pieces)(rows), changes, strict=True):
        assert lists(got) == every_row(wanted, depth, change)


def test_pieces_of_equal_size_reach_the_end_of_the_longest_row() -> None:
    assert [lists(piece) for piece in ROWS.split(2, 1)] == [
        [[0.0, 1.0], [], [3.0, 4.0], [8.0, 9.0]],
        [[2.0], [], [5.0, 6.0], []],
        [[], [], [7.0], []],
    ]


@RUNS
def test_whole_rows_in_pieces(run: Any) -> None:
    wanted = lists(ROWS)
    features = JaggedTensor.from_lengths(torch.randn(10, 5), [3, 0, 5, 2])

    def pieces(x: Any, y: Any) -> list[Any]:
        return [*torch.split(x, [1, 3]), *torch.chunk(x, 2), x[::3], x[1::2], x.flip(0), *torch.split(y, 2, 2)]

    *rows, a, b, c = run(pieces)(ROWS, features)
    expected = [wanted[:1], wanted[1:], wanted[:2], wanted[2:], wanted[::3], wanted[1::2], wanted[::-1]]
    assert [lists(piece) for piece in rows] == expected
    for piece, part in zip((a, b, c), features.values.split(2, 1), strict=True):
        assert torch.equal(piece.values, part)


def test_pieces_that_are_refused() -> None:
    with pytest.raises(ShapeError, match=re.escape("the sum of the sizes has 3 positions; the longest row has 5")):
        torch.split(ROWS, [1, 2], 1)
    with pytest.raises(ShapeError, match=re.escape("the number of parts of dim 1 of (4, r0) is not known while tracing")):
        jit(lambda x: torch.split(x, 2, 1))(ROWS)
    with pytest.raises(ShapeError, match=re.escape("the sizes [1, 2] do not sum to 4, the size of dim 0 of (4, r0)")):
        jit(lambda x: torch.split(x, [1, 2]))(ROWS)
    with pytest.raises(ShapeError, match="the step must be positive, got -1; use flip"):
        jit(lambda x: x[:, ::-1])(ROWS)
