"""Block permutations in traced programs: dims that count rows change places, and whole rows with them.

In: nested rows with as many parts everywhere. Out: failures that name the backend; the oracle moves rows one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from serrate import JaggedTensor, Structure, ir, jit, ops
from serrate.errors import ShapeError, StructureMismatch
from tests.engine.oracle import BACKENDS, STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

T = torch.tensor
LENGTHS = T([[3, 0], [1, 2], [0, 4]])
EVERY = pytest.mark.parametrize(("backend", "strategy"), list(itertools.product(BACKENDS, STRATEGIES)))


def parts_of(lengths: Tensor, *features: int) -> JaggedTensor:
    values = torch.randn(int(lengths.sum()), *features, generator=torch.Generator().manual_seed(3))
    return JaggedTensor(values, Structure.from_lengths(lengths))


def same(got: JaggedTensor, want: list[Any]) -> None:
    """Whether nested lists of rows are what they should be."""
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want)
        return
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        same(a, b)


@EVERY
def test_dims_that_count_rows_change_places(backend: str, strategy: str) -> None:
    jt = parts_of(LENGTHS, 2)
    rows = [parts.unbind() for parts in jt.unbind()]
    want = [[rows[g][c] for g in range(3)] for c in range(2)]
    for function in (lambda x: x.permute(1, 0, 2, 3), lambda x: x.transpose(0, 1)):
        got = jit(function, backend=backend, strategy=strategy)(jt)
        same(got, want)
        assert got.structure.same_rows(jt.permute(1, 0, 2, 3).structure)


@pytest.mark.sampled(1)
@EVERY
def test_in_the_middle_of_a_program(backend: str, strategy: str) -> None:
    jt = parts_of(LENGTHS, 2)
    rows = [parts.unbind() for parts in jt.unbind()]
    want = [[(rows[g][c] * 2).softmax(0) for g in range(3)] for c in range(2)]
    same(jit(lambda x: torch.softmax((x * 2).permute(1, 0, 2, 3), 2), backend=backend, strategy=strategy)(jt), want)
    sums = torch.stack([torch.stack([rows[g][c].sum(0) for g in range(3)]) for c in range(2)])
    total = jit(lambda x: x.permute(1, 0, 2, 3).sum(2), backend=backend, strategy=strategy)(jt)
    torch.testing.assert_close(total.values.view(sums.shape) if isinstance(total, JaggedTensor) else total, sums)


@EVERY
def test_regroup(backend: str, strategy: str) -> None:
    jt = parts_of(LENGTHS, 2)
    rows = [parts.unbind() for parts in jt.unbind()]
    want = [torch.cat([rows[g][c] for g in range(3)]) for c in range(2)]
    same(jit(lambda x: ops.regroup(x), backend=backend, strategy=strategy)(jt), want)
    same(jit(lambda x: ops.regroup(x + 1) * 2, backend=backend, strategy=strategy)(jt), [(row + 1) * 2 for row in want])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_dims_that_count_rows(backend: str, order: tuple[int, ...]) -> None:
    lengths = T([[[1, 0], [2, 3], [0, 1]], [[2, 2], [0, 0], [4, 1]]])
    structure = Structure.from_lengths(T([3, 3]), T([2] * 6), lengths.flatten())
    jt = JaggedTensor(torch.arange(16.0), structure)
    got = jit(lambda x: x.permute(*order, 3), backend=backend)(jt)
    want = jt.permute(*order, 3)
    assert got.structure.same_rows(want.structure)
    assert torch.equal(got.values, want.values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_storages(backend: str) -> None:
    gaps = JaggedTensor(torch.arange(20.0), Structure.from_starts(T([1, 5, 9, 12]), T([2, 2]), T([3, 0, 2, 4])))
    rectangles = Structure.from_lengths(T([2, 2]), T([3, 0, 2, 1])).with_columns(T([2, 5, 4, 3]))
    product = JaggedTensor(torch.arange(17.0), rectangles)
    beside = JaggedTensor(torch.arange(30.0).view(3, 10), Structure.from_lengths(T([2, 2]), T([3, 0, 2, 5]), dim=1))
    for jt, order in ((gaps, (1, 0, 2)), (product, (1, 0, 2, 3)), (beside, (0, 2, 1, 3)), (beside, (2, 1, 3, 0))):
        got, want = jit(lambda x, order=order: x.permute(order), backend=backend)(jt), jt.permute(order)
        assert str(got.shape) == str(want.shape)
        assert got.tolist() == want.tolist()
    turned = jit(lambda x: x.permute(1, 0, 3, 2), backend=backend)(product)
    assert turned.tolist() == product.permute(1, 0, 2, 3).permute(0, 1, 3, 2).tolist()


@pytest.mark.parametrize("lengths", [torch.zeros(0, 2, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64), T([[0, 0]])])
def test_nothing_to_move(lengths: Tensor) -> None:
    jt = parts_of(lengths, 3)
    got = jit(lambda x: x.permute(1, 0, 2, 3))(jt)
    assert got.values.shape == (0, 3)
    if lengths.numel():
        assert got.structure.same_rows(jt.permute(1, 0, 2, 3).structure)


def test_parts_that_are_not_equally_many_are_refused() -> None:
    jt = JaggedTensor(torch.zeros(6), Structure.from_lengths(T([1, 3]), T([1, 2, 0, 3])))
    for name, function in (("permute", lambda x: x.permute(1, 0, 2)), ("regroup", lambda x: ops.regroup(x))):
        message = (
            rf"{name}: every row must have the same number of parts in dim 1 of \(B, r0, r1\): .* lengths \[1, 3\] and \[2, 2\]"
        )
        with pytest.raises(StructureMismatch, match=message):
            jit(function)(jt)
    # The same program serves rows that have.
    fine = JaggedTensor(torch.zeros(6), Structure.from_lengths(T([2, 2]), T([1, 2, 0, 3])))
    assert jit(lambda x: x.permute(1, 0, 2))(fine).lengths.tolist() == [1, 0, 2, 3]


def test_rows_stay_behind_what_counts_them() -> None:
    jt = parts_of(LENGTHS, 2)
    for order in ((0, 2, 1, 3), (2, 0, 1, 3)):
        with pytest.raises(ShapeError, match=r"permute: dim 2 of \(3, r0, r1, 2\) is ragged and must stay after dim [01], which"):
            jit(lambda x, order=order: x.permute(order))(jt)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_by_offsets_of_several_dims(backend: str) -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((2, 4), torch.float32), f.input((2, 3), torch.int64)
        f.output(ops.permute(ops.as_nested(x, offsets, ragged_dim=1), 1, 0, 2))
    got = f.compile(backend)(torch.arange(8.0).view(2, 4), T([[0, 1, 4], [0, 2, 4]]))
    assert got.tolist() == [[[0.0], [4.0, 5.0]], [[1.0, 2.0, 3.0], [6.0, 7.0]]]


Meeting = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("name", "jt", "meet"),
    [
        ("permuted", parts_of(T([[1, 3], [2, 2]])), lambda x: x + x.permute(1, 0, 2)),
        ("turned", JaggedTensor(torch.ones(8), Structure.from_lengths(T([2, 1])).with_columns(T([3, 2]))), lambda x: x + x.mT),
    ],
)
def test_what_was_moved_has_other_rows(name: str, jt: JaggedTensor, meet: Meeting) -> None:
    """One structure, told by one set of offsets, and yet not the same rows."""
    with pytest.raises(StructureMismatch, match="lengths"):
        jit(meet)(jt)


def test_what_was_moved_meets_rows_that_are_alike() -> None:
    square = JaggedTensor(torch.arange(5.0), Structure.from_lengths(T([2, 1])).with_columns(T([2, 1])))
    assert jit(lambda x: x + x.mT)(square).tolist() == [[[0.0, 3.0], [3.0, 6.0]], [[8.0]]]
    even = parts_of(T([[1, 2], [2, 1]]))
    rows = [parts.unbind() for parts in even.unbind()]
    same(jit(lambda x: x + x.permute(1, 0, 2))(even), [[rows[a][b] + rows[b][a] for b in range(2)] for a in range(2)])


@pytest.mark.parametrize("options", [{}, {"rows": 3, "tile": 2}], ids=["chosen", "small"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_regroup_of_parts_of_rows_whose_number_is_not_known(backend: str, options: dict[str, int]) -> None:
    """What says that a part exists depends on the block of parts, also for reads that do not."""
    with ir.Fusion() as f:
        x, rows = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        parts = f.input((None, 3), torch.int64)
        f.output(ops.regroup(ops.as_nested(ops.as_nested(x, rows), parts, ragged_dim=1)))
    values = torch.arange(36.0).reshape(12, 3)
    got = f.compile(backend, "masked", **options)(
        values, torch.tensor([0, 4, 4, 12]), torch.tensor([[0, 1, 4], [0, 0, 0], [0, 6, 8]])
    )
    assert [r.tolist() for r in got.unbind()] == [
        [*values[0:1].tolist(), *values[4:10].tolist()],
        [*values[1:4].tolist(), *values[10:12].tolist()],
    ]
