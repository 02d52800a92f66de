"""Reductions of one level of nested rows, with others kept: what has a meaning, row by row, and what is refused.

In: nested rows. Out: failures that name backend and strategy. Rows of different lengths have no sum; positions across rows do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from serrate import JaggedTensor, Structure, ir, jit, ops
from serrate.errors import ShapeError
from tests.engine.oracle import BACKENDS, STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:var:UserWarning")

T = torch.tensor
EVERY = pytest.mark.parametrize(("backend", "strategy"), list(itertools.product(BACKENDS, STRATEGIES)))
WORDS = JaggedTensor(
    torch.randn(11, 2, generator=torch.Generator().manual_seed(5)), Structure.from_lengths(T([2, 1, 0, 3]), T([3, 0, 5, 1, 1, 1]))
)
DEEP = JaggedTensor(torch.arange(10.0), Structure.from_lengths(T([2, 1]), T([2, 0, 3]), T([1, 2, 3, 0, 4])))


def across(reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Sentence k of every document that has one, all its words, reduced together."""
    documents = [document.unbind() for document in WORDS.unbind()]
    longest = max(map(len, documents))
    return torch.stack([reduce(torch.cat([d[k] for d in documents if len(d) > k])) for k in range(longest)])


@pytest.mark.sampled(2)
@EVERY
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "prod", "var"])
def test_words_and_documents_with_sentences_kept(name: str, backend: str, strategy: str) -> None:
    reduce = getattr(torch, name)
    got = jit(lambda x: getattr(x, name)((0, 2)), backend=backend, strategy=strategy)(WORDS)
    torch.testing.assert_close(got, across(lambda x: reduce(x, 0)), rtol=1e-4, atol=1e-5, equal_nan=True)


@EVERY
def test_sentences_without_words(backend: str, strategy: str) -> None:
    """What is inside is regular: dim 1 is like any ragged dim."""
    sentences = WORDS.sum(2)
    want = torch.stack([document.sum(0) for document in sentences.unbind()])
    torch.testing.assert_close(jit(lambda x: x.sum(1), backend=backend, strategy=strategy)(sentences), want)


def test_dims_that_are_kept_as_1() -> None:
    got = jit(lambda x: x.sum((0, 2), keepdim=True))(WORDS)
    assert got.shape == (1, 3, 1, 2)
    torch.testing.assert_close(got[0, :, 0], across(lambda x: x.sum(0)))


def test_two_levels_inside() -> None:
    got = jit(lambda x: x.sum((0, 2, 3)))(DEEP)
    torch.testing.assert_close(got, DEEP.sum(3).sum(2).sum(0))


Reduce = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("jt", "reduce", "message"),
    [
        (
            WORDS,
            lambda x: x.sum(1),
            r"sum: dim 1 of \(4, r0, r1, 2\) counts the rows of dim 2, which differ in length, so it cannot be reduced alone; "
            r"reduce dim 2 as well, or dims \(0, 1\) together, position by position",
        ),
        (WORDS, lambda x: x.amax(0), r"max: dim 0 of \(4, r0, r1, 2\) counts the rows of dim 2"),
        (WORDS, lambda x: x.mean((1, 3)), r"sum: dim 1 of \(4, r0, r1, 2\) counts the rows of dim 2"),
        (DEEP, lambda x: x.sum((0, 1)), r"dim 1 of \(2, r0, r1, r2\) counts the rows of dim 3, .* dims \(0, 1, 2\) together"),
        (WORDS, lambda x: x.logsumexp((0, 2)), r"while dim 1 between them is kept; reduce dim 2 first"),
    ],
)
def test_rows_of_different_lengths_have_no_sum(jt: JaggedTensor, reduce: Reduce, message: str) -> None:
    for run in (reduce, jit(reduce)):
        with pytest.raises(ShapeError, match=message):
            run(jt)


def test_what_the_message_proposes_works() -> None:
    assert WORDS.sum((1, 2)).shape == (4, 2)
    assert WORDS.sum((0, 1)).shape == (5, 2)
    with ir.Fusion() as f:
        x, offsets = f.input((2, 4), torch.float32), f.input((2, 3), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets, ragged_dim=1), (0, 1)))
    assert f.evaluate(torch.arange(8.0).view(2, 4), T([[0, 1, 4], [0, 2, 4]])).tolist() == [11.0, 14.0, 3.0]
