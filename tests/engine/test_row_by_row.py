"""Running extremes, losses, products of heads, sorted rectangles: each against torch, row by row.

In: ragged tensors of one level, nested, and of rectangles. Out: failures that name backend, strategy and row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serrate import JaggedTensor, Structure, jit
from serrate.errors import CallError, ShapeError, StructureMismatch
from tests.engine.oracle import BACKENDS, STRATEGIES

# Triton's interpreter computes where nothing exists, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

T = torch.tensor
EVERY = pytest.mark.parametrize(("backend", "strategy"), list(itertools.product(BACKENDS, STRATEGIES)))
ON_BACKENDS = pytest.mark.parametrize("backend", BACKENDS)
NAN, INF = float("nan"), float("inf")


def leaves(rows: Any) -> Iterator[Tensor]:
    """The innermost rows of nested ones."""
    if isinstance(rows, Tensor):
        yield rows
    else:
        for each in rows.unbind() if isinstance(rows, JaggedTensor) else rows:
            yield from leaves(each)


def same(got: JaggedTensor, want: list[Tensor], **tolerance: float) -> None:
    found = list(leaves(got))
    assert len(found) == len(want)
    for k, (a, b) in enumerate(zip(found, want, strict=True)):
        torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m, k=k: f"row {k}: {m}", **tolerance)


def rectangles(packed: bool = True, *features: int) -> JaggedTensor:
    structure = Structure.from_lengths(T([3, 0, 2, 1])).with_columns(T([2, 5, 4, 0]), packed=packed)
    shape = (14, *features) if packed else (6, 6, *features)
    return JaggedTensor(torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(2)).float(), structure)


NESTED = JaggedTensor(torch.randn(10, 2), Structure.from_lengths(T([2, 1, 0, 2]), T([3, 0, 5, 1, 1])))


# --- running extremes ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@EVERY
@pytest.mark.parametrize("name", ["cummax", "cummin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_running_extremes(name: str, dtype: torch.dtype, backend: str, strategy: str) -> None:
    rows = torch.randint(0, 4, (40, 3), generator=torch.Generator().manual_seed(1)).to(dtype)
    jt = JaggedTensor.from_lengths(rows, [3, 0, 30, 7])
    reference = getattr(torch, name)
    for dim in (1, 2):
        got = jit(lambda x, dim=dim: tuple(reference(x, dim)), backend=backend, strategy=strategy)(jt)
        for k in range(2):
            same(got[k], [reference(row, dim - 1)[k] for row in jt.unbind()])


@ON_BACKENDS
@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_running_extremes_of_what_is_no_number(name: str, backend: str) -> None:
    jt = JaggedTensor.from_lengths(T([1.0, NAN, 2.0, NAN, -INF, -INF, INF, 0.0, -0.0, INF, NAN]), [4, 2, 5])
    reference = getattr(torch, name)
    got = jit(lambda x: tuple(reference(x, 1)), backend=backend)(jt)
    for k in range(2):
        same(got[k], [reference(row, 0)[k] for row in jt.unbind()])


def test_running_extremes_have_names_and_compositions() -> None:
    jt = JaggedTensor.from_lengths(T([1.0, 3.0, 2.0]), [2, 1])
    assert torch.cummax(jt, 1).values.tolist() == jt.cummax(1).values.tolist() == [[1.0, 3.0], [2.0]]
    assert jt.cummin(dim=1).indices.tolist() == [[0, 0], [0]]
    same(NESTED.cummax(2).values, [row.cummax(0).values for row in leaves(NESTED)])
    for packed in (True, False):
        box = rectangles(packed)
        for dim in (1, 2):
            same(box.cummin(dim).indices, [row.cummin(dim - 1).indices for row in box.unbind()])
    with pytest.raises(ShapeError, match=r"cummax: dim 0 of \(2, r0\) counts rows of different lengths"):
        jt.cummax(0)


# --- infinities ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@EVERY
def test_rows_with_several_infinities(backend: str, strategy: str) -> None:
    rows = [[INF, INF, 1.0], [-INF, -INF], [INF, -INF], [1.0, INF, 2.0, INF], [-INF, 3.0, -INF], []]
    jt = JaggedTensor.from_list([T(row).reshape(-1, 1).repeat(1, 300) for row in rows])
    got = jit(lambda x: torch.logsumexp(x, 1), backend=backend, strategy=strategy)(jt)
    torch.testing.assert_close(got, torch.stack([row.logsumexp(0) for row in jt.unbind()]))


# --- cross entropy -------------------------------------------------------------------------------------------------------


def _classes(lengths: list[int]) -> tuple[JaggedTensor, JaggedTensor]:
    generator = torch.Generator().manual_seed(7)
    logits = JaggedTensor.from_lengths(torch.randn(sum(lengths), 5, generator=generator) * 3, lengths)
    wanted = torch.randint(0, 5, (sum(lengths),), generator=generator)
    wanted[1::3] = -100
    return logits, logits.with_values(wanted)


@pytest.mark.sampled(5)
@EVERY
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_cross_entropy(reduction: str, ignored: int, backend: str, strategy: str) -> None:
    logits, wanted = _classes([4, 0, 9, 1])
    if ignored != -100:
        wanted = wanted.with_values(wanted.values.clamp(min=0))
    weight = torch.linspace(0.5, 2, 5)
    for given in (None, weight):
        want = F.cross_entropy(logits.values, wanted.values, given, ignore_index=ignored, reduction=reduction)

        def loss(x: Any, y: Any, w: Any) -> Any:
            return F.cross_entropy(x, y, w, ignore_index=ignored, reduction=reduction)

        got = jit(loss, backend=backend, strategy=strategy)(logits, wanted, given)
        torch.testing.assert_close(got.values if reduction == "none" else got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_cross_entropy_of_other_dtypes(dtype: torch.dtype) -> None:
    logits, wanted = _classes([4, 0, 9, 1])
    logits = logits.to(dtype)
    got, want = F.cross_entropy(logits, wanted), F.cross_entropy(logits.values.double(), wanted.values)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


def test_cross_entropy_of_awkward_rows() -> None:
    logits, wanted = _classes([2, 1])
    ignored = wanted.with_values(torch.full((3,), -100))
    assert F.cross_entropy(logits, ignored).isnan(), "nothing is counted"
    assert F.cross_entropy(logits, ignored, reduction="sum") == 0
    with pytest.raises(IndexError, match=r"cross_entropy: target: index\[0\]\[1\] = 9 "):
        F.cross_entropy(logits, wanted.with_values(T([0, 9, 1])), reduction="none")
    nested = JaggedTensor(logits.values, Structure.from_lengths(T([1, 1]), T([2, 1])))
    torch.testing.assert_close(F.cross_entropy(nested, nested.with_values(wanted.values)), F.cross_entropy(logits, wanted))


def test_cross_entropy_refuses() -> None:
    logits, wanted = _classes([2, 1])
    with pytest.raises(
        ShapeError, match=r"cross_entropy of \(2, r0, 5\) and \(2, r0, 5\): the last dim of the logits holds the classes"
    ):
        F.cross_entropy(logits, logits.long())
    with pytest.raises(ShapeError, match=r"and the target must have .* the same dims if it holds probabilities"):
        F.cross_entropy(logits, wanted.float())
    with pytest.raises(ShapeError, match=r"weight must have one value for each class, got \(4,\)"):
        F.cross_entropy(logits, wanted, torch.ones(4))
    with pytest.raises(CallError, match=r"label_smoothing must be between 0 and 1, got 1\.5"):
        F.cross_entropy(logits, wanted, label_smoothing=1.5)
    with pytest.raises(CallError, match="reduction must be 'mean', 'sum' or 'none', got 'max'"):
        F.cross_entropy(logits, wanted, reduction="max")
    with pytest.raises(StructureMismatch, match="the rows differ"):
        F.cross_entropy(logits, JaggedTensor.from_lengths(wanted.values, [1, 2]))


# --- products of heads ---------------------------------------------------------------------------------------------------


def _heads(lengths: list[int], features: int = 4) -> JaggedTensor:
    values = torch.randn(3, sum(lengths), features, generator=torch.Generator().manual_seed(sum(lengths) + features))
    return JaggedTensor(values, Structure.from_lengths(T(lengths), dim=1))


def _row(jt: JaggedTensor, head: int) -> list[Tensor]:
    return list(leaves(jt[head]))


@pytest.mark.sampled(1)
@EVERY
def test_products_of_heads(backend: str, strategy: str) -> None:
    query, key = _heads([3, 0, 5]), _heads([3, 0, 5])
    value = _heads([3, 0, 5], 2)
    for keys in (query, key):
        scores = jit(lambda q, k: q @ k.transpose(-1, -2), backend=backend, strategy=strategy)(query, keys)
        assert str(scores.shape) == "(3, 3, r0, r1)"
        for head in range(3):
            pairs = zip(_row(query, head), _row(keys, head), strict=True)
            same(scores[head], [a @ b.mT for a, b in pairs], rtol=1e-4, atol=1e-5)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    got = jit(attend, backend=backend, strategy=strategy)(query, key, value)
    for head in range(3):
        rows = zip(*(_row(each, head) for each in (query, key, value)), strict=True)
        same(got[head], [torch.softmax(q @ k.mT, -1) @ v for q, k, v in rows], rtol=1e-4, atol=1e-5)


@ON_BACKENDS
def test_products_that_contract_rows(backend: str) -> None:
    x, y = _heads([3, 0, 5]), _heads([3, 0, 5], 2)
    got = jit(lambda a, b: a.transpose(-1, -2) @ b, backend=backend)(x, y)
    want = torch.stack([torch.stack([a.mT @ b for a, b in zip(_row(x, h), _row(y, h), strict=True)]) for h in range(3)])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@ON_BACKENDS
def test_products_of_nested_rows(backend: str) -> None:
    other = NESTED.with_values(NESTED.values.flip(0))
    got = jit(lambda a, b: a @ b.transpose(-1, -2), backend=backend)(NESTED, other)
    assert str(got.shape) == "(4, r0, r1, r2)"
    want = [a @ b.mT for a, b in zip(leaves(NESTED), leaves(other), strict=True)]
    same(got, want, rtol=1e-4, atol=1e-5)


def test_products_of_heads_that_do_not_fit() -> None:
    few = JaggedTensor(torch.randn(2, 8, 4), Structure.from_lengths(T([3, 0, 5]), dim=1))
    with pytest.raises(ShapeError, match=r"matmul of \(3, 3, r0, 4\) and \(2, 3, 4, r0\), dim 0: the sizes differ: 3 and 2"):
        jit(lambda a, b: a @ b.transpose(-1, -2))(_heads([3, 0, 5]), few)
    with pytest.raises(ShapeError, match="dim 1: the sizes differ: 3 and 2"):
        jit(lambda a, b: a @ b.transpose(-1, -2))(_heads([3, 0, 5]), _heads([3, 5]))


# --- sorted rectangles ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@EVERY
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dim", [1, 2])
def test_sorted_rectangles(dim: int, packed: bool, backend: str, strategy: str) -> None:
    for jt in (rectangles(packed), rectangles(packed, 3)):
        for descending in (False, True):

            def run(x: Any, descending: bool = descending) -> Any:
                return tuple(torch.sort(x, dim, descending))

            got = jit(run, backend=backend, strategy=strategy)(jt)
            for k in range(2):
                same(got[k], [row.sort(dim=dim - 1, descending=descending, stable=True)[k] for row in jt.unbind()])


@ON_BACKENDS
@pytest.mark.parametrize("dim", [1, 2])
def test_best_of_rectangles(dim: int, backend: str) -> None:
    jt = rectangles()
    got = jit(lambda x: tuple(torch.topk(x, 2, dim)), backend=backend)(jt)
    for k in range(2):
        same(
            got[k],
            [
                row.sort(dim=dim - 1, descending=True, stable=True)[k].narrow(dim - 1, 0, min(2, row.shape[dim - 1]))
                for row in jt.unbind()
            ],
        )


@ON_BACKENDS
def test_best_of_nested_rows(backend: str) -> None:
    got = jit(lambda x: torch.topk(x, 2, 2).values, backend=backend)(NESTED)
    assert str(got.shape) == "(4, r0, r1, 2)"
    same(got, [row.sort(0, True).values[:2] for row in leaves(NESTED)])
    same(jit(lambda x: torch.argsort(x, 2), backend=backend)(NESTED), [row.argsort(0) for row in leaves(NESTED)])
    total = jit(lambda x: torch.topk(x, 2, 2).values.sum(2), backend=backend)(NESTED)
    torch.testing.assert_close(total.values, torch.stack([row.sort(0, True).values[:2].sum(0) for row in leaves(NESTED)]))


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_values_used_twice_at_each_of_many_steps(backend: str) -> None:
    """The compiler visits every value once, not once for each of the 2^40 paths to it: it would never end."""

    def residuals(x: Any) -> Any:
        for _ in range(40):
            x = x + x * x * 0.01
        return x.sum(1)

    jt = JaggedTensor.from_lengths(torch.randn(8), [3, 0, 5])
    got = jit(residuals, backend=backend)(jt)
    values = jt.values
    for _ in range(40):
        values = values + values * values * 0.01
    torch.testing.assert_close(got, torch.stack([row.sum() for row in values.split([3, 0, 5])]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gather_with_indices_of_fewer_features(backend: str) -> None:
    """As in torch, the result has the shape of the indices; they are not read past their only feature."""
    rows, at = JaggedTensor.from_lengths(torch.randn(5, 2), [3, 2]), torch.tensor([[2], [0], [0], [1], [0]])
    gather = jit(lambda x, k: torch.gather(x, 1, k), backend=backend)
    found = gather(rows, rows.with_values(at))
    assert torch.equal(found.values, rows.values[[2, 0, 0, 4, 3], :1])
    dense = torch.tensor([[[1], [0]], [[0], [1]]])
    assert torch.equal(
        gather(rows, dense), torch.stack([row[k, :1] for row, k in zip(rows.unbind(), dense[..., 0], strict=True)])
    )
    one = JaggedTensor.from_lengths(torch.randn(5, 1), [3, 2])
    with pytest.raises(ShapeError, match="dim 2 has size 1 in only one of them"):
        gather(one, one.with_values(at.expand(5, 2).contiguous()))
