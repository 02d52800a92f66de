"""Functions of torch that are compositions of others, on ragged tensors: eager, traced and with gradients, row by row.

In: rows, some of them empty. Out: failures where a row differs from plain torch on that row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from serrate import JaggedTensor, Structure, jit
from serrate.errors import CallError, DtypeError, RaggedSizeError, SerrateError, ShapeError

pytestmark = pytest.mark.usefixtures("reference")

LENGTHS = [2, 0, 3, 1]
BOUNDS = torch.tensor([-1.0, 0.0, 0.5, 0.5, 1.0])
Function = Callable[[Any], Any]


def rows(*features: int, dtype: torch.dtype = torch.float64) -> JaggedTensor:
    generator = torch.Generator().manual_seed(sum(features))
    values = torch.randn(sum(LENGTHS), *features, generator=generator, dtype=torch.float64)
    return JaggedTensor.from_lengths((values * 2).round() if dtype is not torch.float64 else values, LENGTHS).to(dtype)


class Case(NamedTuple):
    """A function of a ragged tensor, the same of one row, and the features and the dtype of the tensor."""

    ragged: Function
    row: Function
    features: tuple[int, ...] = (4,)
    dtype: torch.dtype = torch.float64
    dense: bool = False
    """Whether the result has one element for each row."""


FIRST = torch.tensor([[[0]]])
LOCAL = {
    "diff": Case(lambda x: torch.diff(x, dim=1), lambda r: torch.diff(r, dim=0)),
    "diff, a method": Case(lambda x: x.diff(dim=1), lambda r: r.diff(dim=0), ()),
    "diff of differences": Case(lambda x: torch.diff(x, 2, 1), lambda r: r.diff(2, 0)),
    "diff, none": Case(lambda x: torch.diff(x, 0, 1), lambda r: r.diff(0, 0)),
    "diff of features": Case(torch.diff, torch.diff),
    "diff of bools": Case(lambda x: torch.diff(x, dim=1), lambda r: torch.diff(r, dim=0), (), torch.bool),
    "diff with more": Case(lambda x: x.diff(dim=1, prepend=x[:, :1], append=x), lambda r: r.diff(dim=0, prepend=r[:1], append=r)),
    "isin": Case(
        lambda x: torch.isin(x, torch.tensor([[1, 0], [-2, 7]])),
        lambda r: torch.isin(r, torch.tensor([1, 0, -2])),
        dtype=torch.int64,
    ),
    "isin, not": Case(
        lambda x: torch.isin(x, BOUNDS, invert=True), lambda r: torch.isin(r, BOUNDS, invert=True), (), torch.float32
    ),
    "isin a number": Case(lambda x: torch.isin(x, 1), lambda r: torch.isin(r, 1), dtype=torch.int32),
    "isin nothing": Case(lambda x: torch.isin(x, torch.empty(0)), lambda r: torch.isin(r, torch.empty(0)), dtype=torch.float32),
    "bucketize": Case(lambda x: torch.bucketize(x, BOUNDS), lambda r: torch.bucketize(r, BOUNDS)),
    "bucketize, right": Case(
        lambda x: torch.bucketize(x, BOUNDS, right=True), lambda r: torch.bucketize(r, BOUNDS, right=True), (), torch.float32
    ),
    "bucketize, of integers": Case(
        lambda x: torch.bucketize(x, BOUNDS, out_int32=True),
        lambda r: torch.bucketize(r, BOUNDS, out_int32=True),
        dtype=torch.int64,
    ),
    "bucketize, NaN": Case(
        lambda x: torch.bucketize(x / x * 0.5, BOUNDS), lambda r: torch.bucketize(r / r * 0.5, BOUNDS), (), torch.float32
    ),
    "one_hot": Case(lambda x: F.one_hot(x.abs(), 9), lambda r: F.one_hot(r.abs(), 9), (), torch.int64),
    "one_hot of features": Case(lambda x: F.one_hot(x.abs(), 9), lambda r: F.one_hot(r.abs(), 9), (2,), torch.int64),
    "nanmean": Case(lambda x: torch.nanmean(x / x, -1), lambda r: torch.nanmean(r / r, -1), dtype=torch.float32),
    "nanmean of rows": Case(lambda x: x.sqrt().nanmean(1), lambda r: r.sqrt().nanmean(0), dense=True),
    "take_along_dim": Case(
        lambda x: torch.take_along_dim(x, x.argsort(1), 1), lambda r: torch.take_along_dim(r, r.argsort(0), 0)
    ),
    "take_along_dim of features": Case(lambda x: x.take_along_dim(x.argsort(-1), -1), lambda r: r.sort(-1).values),
    "take_along_dim, broadcast": Case(
        lambda x: x.unsqueeze(2).take_along_dim(x.argsort(-1).unsqueeze(2).expand(-1, -1, 3, -1), -1),
        lambda r: r.unsqueeze(1).take_along_dim(r.argsort(-1).unsqueeze(1).expand(-1, 3, -1), -1),
    ),
    "hstack": Case(lambda x: torch.hstack([x, x * 2, x]), lambda r: torch.cat([r, r * 2, r])),
    "column_stack": Case(lambda x: torch.column_stack([x, x * 2]), lambda r: torch.cat([r, r * 2]), ()),
    "dstack": Case(lambda x: torch.dstack([x, x * 2]), lambda r: torch.stack([r, r * 2], 1), ()),
    "dstack of features": Case(lambda x: torch.dstack([x, x * 2]), lambda r: torch.cat([r, r * 2], 1)),
    "expand": Case(lambda x: x.unsqueeze(2).expand(-1, -1, 5, 4), lambda r: r.unsqueeze(1).expand(-1, 5, 4)),
    "expand by a sequence": Case(lambda x: x.unsqueeze(-1).expand((-1, -1, 4, 3)), lambda r: r.unsqueeze(-1).expand(-1, 4, 3)),
    "expand to nothing": Case(lambda x: x.unsqueeze(2).expand(-1, -1, 0), lambda r: r.unsqueeze(1).expand(-1, 0), ()),
    "repeat": Case(lambda x: x.repeat(1, 2, 3), lambda r: r.repeat(2, 3)),
    "tile": Case(lambda x: torch.tile(x, (2,)), lambda r: torch.tile(r, (2,))),
    "tile rows": Case(lambda x: x.tile(3, 1), lambda r: r.tile(3, 1)),
    "repeat_interleave": Case(lambda x: torch.repeat_interleave(x, 3, dim=1), lambda r: r.repeat_interleave(3, 0)),
    "repeat_interleave of features": Case(lambda x: x.repeat_interleave(2, -1), lambda r: r.repeat_interleave(2, -1)),
    "movedim": Case(lambda x: torch.movedim(x, 2, 3), lambda r: torch.movedim(r, 1, 2), (2, 3)),
    "new tensors": Case(
        lambda x: x * x.new_ones(2, 4)[0] + x.new_zeros((4,)) + x.new_full((), 2) + x.new_empty(4, dtype=torch.float32) * 0,
        lambda r: r + 2,
    ),
    "new tensors with the sizes of rows": Case(lambda x: x + x.new_ones(x.shape[0], 1, 4), lambda r: r + 1),
    "numel": Case(lambda x: x * x.numel() + x[..., 0].sum(1).numel(), lambda r: r * 24 + 4),
    "num_rows": Case(lambda x: x * x.num_rows + x.num_groups, lambda r: r * 4 + 4),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", LOCAL)
def test_each_row_is_as_in_torch(name: str, traced: bool) -> None:
    case = LOCAL[name]
    x = rows(*case.features, dtype=case.dtype)
    found = (jit(case.ragged) if traced else case.ragged)(x)
    wanted = [case.row(row) for row in x.unbind()]
    parts = list(found) if case.dense else found.unbind()
    for got, want in zip(parts, wanted, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in LOCAL if LOCAL[name].dtype is torch.float64 and "bucketize" not in name])
def test_gradients_are_those_of_torch(name: str) -> None:
    case = LOCAL[name]
    x = rows(*case.features).abs().add(0.1).requires_grad_()
    values = x.values.detach().clone().requires_grad_()
    found = jit(case.ragged)(x)
    parts = [case.row(row) for row in values.split(LENGTHS)]
    (wanted,) = torch.autograd.grad(sum(part.square().nansum() for part in parts), values)
    total = (found if case.dense else found.values).square().nansum()
    torch.testing.assert_close(torch.autograd.grad(total, x.values)[0], wanted)


NORMS: dict[str, Callable[[Any], Any]] = {
    **{f"norm {p}": (lambda x, p=p: x.norm(p, -1)) for p in (0.5, 1, 1.5, 2, 3, float("inf"))},
    "norm of all": lambda x: (x * 0).norm(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1, eps=0.5),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x * 2 + 1, dim=-1),
}


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms_where_all_is_zero(name: str) -> None:
    """They were NaN; torch's are 0."""
    values = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    x, dense = JaggedTensor.from_lengths(values.clone(), [1, 0, 3]).requires_grad_(), values.clone().requires_grad_()
    found, wanted = jit(NORMS[name])(x), NORMS[name](dense)
    torch.testing.assert_close(found.values if isinstance(found, JaggedTensor) else found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x.values), torch.autograd.grad(wanted.sum(), dense))


def test_gradients_of_distances_within_rows() -> None:
    """The code that the message about cdist shows: an element's distance to itself is 0."""
    x = rows(4).requires_grad_()
    values = x.values.detach().clone().requires_grad_()
    found = torch.linalg.vector_norm(x.unsqueeze(2) - x.unsqueeze(1), dim=-1).values.sum()
    wanted = sum(torch.cdist(row, row).sum() for row in values.split(LENGTHS))
    torch.testing.assert_close(torch.autograd.grad(found, x.values)[0], torch.autograd.grad(wanted, values)[0])


def test_rows_of_several_tensors() -> None:
    x = rows(4)
    for function in (lambda: torch.vstack([x, x]), lambda: jit(lambda x: torch.vstack([x, x]))(x)):
        assert [row.tolist() for row in function()] == [row.tolist() for row in (*x, *x)]


def test_dense_tensors_in_traced_functions() -> None:
    a, b = torch.randn(3), torch.randn(2, 3)
    functions: list[Function] = [
        lambda x, a, b: torch.hstack([a, a]),
        lambda x, a, b: torch.vstack([a, b]),
        lambda x, a, b: torch.dstack([a, a]),
        lambda x, a, b: torch.column_stack([a, a]),
        lambda x, a, b: a.expand(4, -1),
        lambda x, a, b: a.expand(2, b.shape[0], 3),
        lambda x, a, b: b[:, :1].expand(b.shape),
        lambda x, a, b: a.repeat(2, 2),
        lambda x, a, b: torch.take_along_dim(b, b.argsort(1)[:1], 1),
        lambda x, a, b: torch.isin(3, b.long()),
        lambda x, a, b: torch.bucketize(b, a.sort().values),
        lambda x, a, b: torch.diff(b, dim=0, append=b),
    ]
    for k, function in enumerate(functions):
        found, wanted = jit(function)(rows(4), a, b), function(None, a, b)
        assert found.shape == wanted.shape, k
        torch.testing.assert_close(found, wanted)


def test_moved_dims_are_views() -> None:
    x = rows(2, 3)
    for moved in (x.movedim(2, 3), torch.movedim(x, 2, 3)):
        assert isinstance(moved, JaggedTensor) and str(moved.shape) == "(4, r0, 3, 2)"
        assert moved.values.data_ptr() == x.values.data_ptr()


def test_the_rows_of_positions() -> None:
    program = jit(lambda x: (x.row_ids(), x.values * x.row_ids().unsqueeze(1)))
    for lengths in (LENGTHS, [0, 4], [1, 1, 1]):
        x = JaggedTensor.from_lengths(torch.ones(sum(lengths), 2), lengths)
        found, scaled = program(x)
        assert torch.equal(found, x.row_ids()) and torch.equal(scaled, x.values * x.row_ids()[:, None])


def test_numbers_of_nested_rows() -> None:
    x = JaggedTensor(torch.arange(6.0), Structure.from_lengths(torch.tensor([2, 1]), torch.tensor([1, 3, 2])))
    found = jit(lambda x: (x * x.num_rows, x * x.num_groups, x * x.numel()))(x)
    assert [each.values[-1].item() for each in found] == [5.0 * x.num_rows, 5.0 * x.num_groups, 5.0 * x.numel()]


def test_new_sizes_do_not_trace_again() -> None:
    traces: list[int] = []

    @jit
    def function(x: Any) -> Any:
        traces.append(1)
        return x.mean(1) + x.new_zeros(x.shape[0], 1) + x.numel() + x.num_rows

    for count in (3, 4, 5, 6):
        x = JaggedTensor.from_lengths(torch.ones(2 * count, 2), [2] * count)
        torch.testing.assert_close(function(x), x.mean(1) + x.numel() + x.num_rows)
    assert len(traces) <= 2


def test_new_tensors_of_ragged_ones() -> None:
    x = rows(4)
    made = x.new_tensor([1, 2])
    assert made.dtype == x.dtype and made.tolist() == [1, 2]
    assert x.new_zeros(2, 3, dtype=torch.int32).dtype == torch.int32 and x.new_full((1,), 3.0).tolist() == [3.0]
    with pytest.raises(RaggedSizeError, match="r0 is the size of a ragged dim"):
        x.new_zeros(x.shape)
    with pytest.raises(RaggedSizeError, match="r0 is the size of a ragged dim; for a tensor with the same rows, use zeros_like"):
        jit(lambda x: x + x.new_zeros(x.shape))(x)


def test_classes_that_are_not_there() -> None:
    with pytest.raises(IndexError, match=r"one_hot: index\[2\]\[1\] = 5 is out of range"):
        F.one_hot(JaggedTensor.from_lengths(torch.tensor([0, 1, 2, 5, 1, 1]), LENGTHS), 5)


REFUSED: dict[str, tuple[Function, type[SerrateError], str]] = {
    "diff of rows": (lambda x: torch.diff(x, dim=0), ShapeError, "counts rows of different lengths; use diff along a row"),
    "isin rows": (lambda x: torch.isin(x, x), CallError, "isin: test elements must be a number or a dense tensor"),
    "classes": (lambda x: F.one_hot(x.long()), CallError, "one_hot: num_classes is required"),
    "classes of floats": (lambda x: F.one_hot(x, 3), DtypeError, "one_hot: classes must be int64, got torch.float64"),
    "boundaries": (lambda x: torch.bucketize(x, BOUNDS[None]), ShapeError, "bucketize: boundaries must be a tensor of one dim"),
    "nanmean": (lambda x: torch.nanmean(x.long(), 1), DtypeError, "nanmean"),
    "expand": (lambda x: x.expand(-1, -1, 9), ShapeError, "does not have size 1, and cannot get size 9"),
    "expand in front": (lambda x: x.expand(2, -1, -1, -1), ShapeError, "has 3 dims, and there are 4 sizes"),
    "repeat in front": (lambda x: x.repeat(2, 1, 1, 1), ShapeError, "needs a number for each of its 3 dims"),
    "repeat": (lambda x: x.repeat(1, 0, 1), ShapeError, "a dim is repeated at least once"),
    "repeat rows": (lambda x: x.repeat_interleave(2, 0), ShapeError, "jt[torch.arange(len(jt)).repeat_interleave(k)]"),
    "repeat by a tensor": (lambda x: x.repeat_interleave(torch.tensor([1, 2]), 1), CallError, "a number of repeats and a dim"),
    "take_along_dim": (lambda x: torch.take_along_dim(x, x.long()), ShapeError, "take_along_dim: dim is required"),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, traced: bool) -> None:
    function, error, message = REFUSED[name]
    with pytest.raises(error) as caught:
        (jit(function) if traced else function)(rows(4))
    assert message in str(caught.value)


def test_rows_several_times() -> None:
    """As a message above says."""
    jt, k = rows(4), 2
    assert jt[torch.arange(len(jt)).repeat_interleave(k)].tolist() == [row.tolist() for row in jt for _ in range(k)]


def test_elements_of_other_rows() -> None:
    """As a message above says."""
    x, y = rows(), rows(dtype=torch.float64)[:, :1]
    found = jit(lambda x, y: (x.unsqueeze(2) == y.unsqueeze(1)).any(2))(x, y)
    for got, own, other in zip(found, x, y, strict=True):
        assert torch.equal(got, torch.isin(own, other))
