"""Products by letters, by groups and with vectors, against plain torch row by row.

In: ragged and dense tensors. Out: failures where `einsum`, `bmm`, `matmul` or `grouped_mm` differ from torch.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serrate import JaggedTensor, Structure, jit
from serrate.errors import ShapeError

LENGTHS, KEYS = [3, 0, 4, 1], [2, 3, 1, 0]
X, Y = (JaggedTensor.from_lengths(torch.randn(8, 5), LENGTHS) for _ in range(2))
K = JaggedTensor.from_lengths(torch.randn(6, 5), KEYS)
SCORES = JaggedTensor.from_lengths(torch.randn(8), LENGTHS)
HEADS = JaggedTensor.from_lengths(torch.randn(8, 2, 5), LENGTHS)
WEIGHT, EACH, ROWS = torch.randn(5, 6), torch.randn(4, 5, 6), torch.randn(4, 5)

CASES: list[tuple[str, tuple[Any, ...]]] = [
    ("bid,de->bie", (X, WEIGHT)),
    ("bid,bde->bie", (X, EACH)),
    ("de,bid->bie", (WEIGHT, X)),
    ("bid,bjd->bij", (X, K)),
    ("bid,bjd->bij", (X, X)),
    ("bjd,bid->bij", (K, X)),
    ("bid,bie->bde", (X, Y)),
    ("bid,bid->bi", (X, Y)),
    ("bid,bid->b", (X, Y)),
    ("bid,bid->", (X, Y)),
    ("bid,bd->bi", (X, ROWS)),
    ("bi,bid->bd", (SCORES, X)),
    ("bi,bid->bid", (SCORES, X)),
    ("bihd,bjd->bijh", (HEADS, K)),
    ("bihd,hde->bihe", (HEADS, torch.randn(2, 5, 3))),
    ("bid,bjd,bje->bie", (X, K, K)),
    ("bid->bi", (X,)),
    ("bid->bd", (X,)),
    ("bid,dz", (X, WEIGHT)),
    ("...d,de->...e", (X, WEIGHT)),
    ("bid,e->bie", (X, torch.randn(3))),
]


def row_by_row(equation: str, operands: tuple[Any, ...]) -> list[Tensor]:
    """The same without the letter of the rows' dim, for each row; dense operands without it are shared."""
    left, _, right = equation.partition("->")
    if not right and "->" not in equation:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    found = []
    for b in range(len(LENGTHS)):
        terms = left.replace("...", "bi").split(",")
        rows = [x[b] if "b" in letters else x for letters, x in zip(terms, operands, strict=True)]
        own = ",".join(letters.replace("b", "") for letters in terms)
        found.append(torch.einsum(f"{own}->{right.replace('...', 'bi').replace('b', '')}", *rows))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("equation", "operands"), CASES, ids=[f"{n}:{equation}" for n, (equation, _) in enumerate(CASES)])
@pytest.mark.parametrize("backend", ["reference", "cpp", "eager"])
def test_einsum(backend: str, equation: str, operands: tuple[Any, ...]) -> None:
    def run(*given: Any) -> Any:
        return torch.einsum(equation, *given)

    got = (run if backend == "eager" else jit(run, backend=backend))(*operands)
    want = row_by_row(equation, operands)
    if got.ndim == 0:
        torch.testing.assert_close(got, torch.stack(want).sum())
        return
    pieces = got.unbind()
    assert len(pieces) == len(want)
    for piece, row in zip(pieces, want, strict=True):
        torch.testing.assert_close(piece.to_padded() if isinstance(piece, JaggedTensor) else piece, row)


def test_einsum_of_three_levels() -> None:
    words = JaggedTensor(torch.randn(8, 5), Structure.from_lengths(torch.tensor([2, 0, 2]), torch.tensor(LENGTHS)))
    found = jit(lambda x, w: torch.einsum("dswk,ke->dswe", x, w))(words, WEIGHT)
    torch.testing.assert_close(found.values, words.values @ WEIGHT)
    torch.testing.assert_close(
        jit(lambda x: torch.einsum("dswk,dswk->ds", x, x))(words).values, (words * words).sum((2, 3)).values
    )


def test_equations_that_are_refused() -> None:
    for equation, operands, message in (
        ("bid,de->bie", (X,), "names 2 tensors, got 1"),
        ("bi,de->bie", (X, WEIGHT), "'bi' of 'bi,de->bie' does not name the 3 dims of (4, r0, 5)"),
        ("bid,dd->bi", (X, WEIGHT), "'dd' names a dim twice; diagonals are not supported"),
        ("bid,de->bix", (X, WEIGHT), "must name letters of the tensors once each, got 'x'"),
        ("bid,ed->bie", (X, WEIGHT), "the sizes differ: 5 and 6"),
    ):
        with pytest.raises(ShapeError, match=re.escape(message)):
            torch.einsum(equation, *operands)


@pytest.mark.parametrize("run", [lambda f: f, jit], ids=["eager", "jit"])
def test_vectors_and_batches(run: Any) -> None:
    vector = torch.randn(5)
    torch.testing.assert_close(run(torch.matmul)(X, vector).values, X.values @ vector)
    torch.testing.assert_close(run(lambda x, v: x @ v)(HEADS, vector).values, HEADS.values @ vector)
    for piece, row, weight in zip(run(torch.bmm)(X, EACH).unbind(), X.unbind(), EACH, strict=True):
        torch.testing.assert_close(piece, row @ weight)
    with pytest.raises(ShapeError, match=re.escape("bmm of (4, r0, 5) and (5, 6): both must have 3 dims; use matmul")):
        run(torch.bmm)(X, WEIGHT)


@pytest.mark.parametrize("run", [lambda f: f, jit], ids=["eager", "jit"])
def test_groups_by_rows(run: Any) -> None:
    for piece, row, weight in zip(run(F.grouped_mm)(X, EACH).unbind(), X.unbind(), EACH, strict=True):
        torch.testing.assert_close(piece, row @ weight)


def test_groups_by_offsets_in_every_dim() -> None:
    ends = torch.tensor([3, 3, 7, 8], dtype=torch.int32)
    groups = [slice(a, b) for a, b in zip([0, 3, 3, 7], ends.tolist(), strict=True)]
    run = jit(lambda a, b, offs: F.grouped_mm(a, b, offs=offs))
    a, b = torch.randn(8, 5), torch.randn(4, 5, 6)
    torch.testing.assert_close(run(a, b, ends), torch.cat([a[g] @ w for g, w in zip(groups, b, strict=True)]))
    a, b = torch.randn(4, 6, 5), torch.randn(5, 8)
    torch.testing.assert_close(run(a, b, ends), torch.cat([w @ b[:, g] for g, w in zip(groups, a, strict=True)], 1))
    a, b = torch.randn(6, 8), torch.randn(8, 5)
    torch.testing.assert_close(run(a, b, ends), torch.stack([a[:, g] @ b[g] for g in groups]))
