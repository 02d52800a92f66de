"""Joining, cutting and reordering against the same on lists of lists, over every composition.

In: random ragged tensors with their models. Out: failures where a result, its gradient or its error differs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import serrate
from serrate.errors import CallError, DeviceError, DtypeError, SerrateError, ShapeError, StructureMismatch, SyncError
from serrate.tensor import JaggedTensor, Structure, no_sync
from tests.tensor.models import EVERY_KIND, KINDS, ROWS_FIRST, check_sound, flat, listed, ragged

SMALL = st.one_of(st.none(), st.integers(-4, 4))
RANGES = st.builds(slice, SMALL, SMALL)
Drawn = tuple[JaggedTensor, list[Any]]


def joined(models: list[Any], depth: int) -> Any:
    if depth == 0:
        return [item for model in models for item in model]
    return [joined(list(each), depth - 1) for each in zip(*models, strict=True)]


def cut(model: Any, key: slice, depth: int) -> Any:
    return model[key] if depth == 0 else [cut(each, key, depth - 1) for each in model]


def merged(model: Any, depth: int) -> Any:
    if depth == 0:
        return [item for each in model for item in each]
    return [merged(each, depth - 1) for each in model]


def stacked(models: list[Any], depth: int) -> Any:
    return list(models) if depth == 0 else [stacked(list(each), depth - 1) for each in zip(*models, strict=True)]


def coordinates(model: Any, at: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    if not isinstance(model, list):
        return {at: model}
    return {place: number for k, each in enumerate(model) for place, number in coordinates(each, (*at, k)).items()}


def check(jt: JaggedTensor, make: Any, wanted: Any) -> None:
    """What `make` makes of the tensor is what is wanted, with a gradient of 1 for each time that an element is in it."""
    values = jt.values.clone().requires_grad_()
    found = make(JaggedTensor(values, jt.structure))
    check_sound(found)
    assert listed(found) == wanted
    taken = found if isinstance(found, Tensor) else found.contiguous().values
    taken.sum().backward()
    counts = [0.0] * values.numel()
    for number in flat(wanted):
        counts[int(number)] += 1
    assert values.grad is not None
    assert values.grad.reshape(-1).tolist() == counts


@pytest.mark.sampled(1)
@EVERY_KIND
@given(key=RANGES, data=st.data())
def test_cat_along_every_dim(kind: str, key: slice, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    at = data.draw(st.integers(0, jt.ndim - 1))
    keys = (*(slice(None),) * at, key)
    spelled = data.draw(st.sampled_from([serrate.cat, torch.cat, torch.concat, torch.concatenate]))
    wanted = joined([model, cut(model, key, at), model], at)
    check(jt, lambda jt: spelled([jt, jt[keys], jt], dim=at - jt.ndim if key.start else at), wanted)


@given(ragged("one level", "gaps", "padded", "rows of dim 1"), st.integers(0, 3))
def test_dense_tensors_are_rows_of_one_length(drawn: Drawn, length: int) -> None:
    jt, model = drawn
    dim = jt.structure.dims[0]
    count = jt.structure.num_rows()
    shape = (*jt.values.shape[:dim], count, length, *jt.values.shape[dim + 1 :])
    dense = -torch.arange(torch.Size(shape).numel(), dtype=jt.dtype).reshape(shape)
    assert listed(serrate.cat([dense, jt, dense], dim=dim + 1)) == joined([dense.tolist(), model, dense.tolist()], dim + 1)
    found = torch.cat([jt, dense], dim=dim)
    check_sound(found)
    assert listed(found) == joined([model, dense.tolist()], dim)


@EVERY_KIND
@given(key=RANGES, data=st.data())
def test_stack_of_ragged_tensors_is_one_level_more(kind: str, key: slice, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    if jt.structure.dims[0] > 0:
        check(jt, lambda jt: torch.stack([jt, jt]), [model, model])
        return
    check(jt, lambda jt: torch.stack([jt, jt[key]]), [model, model[key]])
    found = serrate.stack([jt, jt[key], jt])
    assert found.structure.levels == jt.structure.levels + 1
    assert found.structure.lengths(0).tolist() == [len(jt), len(model[key]), len(jt)]


@given(ragged(*KINDS), st.data())
def test_stack_along_regular_dims(drawn: Drawn, data: st.DataObject) -> None:
    jt, model = drawn
    at = data.draw(st.integers(1, jt.ndim))
    check(jt, lambda jt: serrate.stack([jt, jt.contiguous()], dim=at), stacked([model, model], at))
    check(jt, lambda jt: torch.stack([jt, jt], dim=at - jt.ndim - 1), stacked([model, model], at))


@given(ragged(*KINDS), st.data())
def test_cuts_are_those_of_torch(drawn: Drawn, data: st.DataObject) -> None:
    jt, model = drawn
    at = data.draw(st.sampled_from([k for k, dim in enumerate(jt.dims) if dim.level is None]))
    size = jt.size(at)
    assert isinstance(size, int)
    number = data.draw(st.integers(1, 4))
    bounds = data.draw(st.lists(st.integers(0, size), max_size=3).map(sorted))
    whole = torch.arange(size)
    for function, how in (
        (torch.split, number),
        (torch.split, torch.tensor([0, *bounds, size]).diff().tolist()),
        (torch.chunk, number),
        (torch.tensor_split, number),
        (torch.tensor_split, bounds),
    ):
        found, wanted = function(jt, how, dim=at), function(whole, how)
        assert len(found) == len(wanted)
        first = 0
        for piece, numbers in zip(found, wanted, strict=True):
            check_sound(piece)
            assert listed(piece) == cut(model, slice(first, first + len(numbers)), at)
            assert not jt.values.numel() or not piece.values.numel() or _shares(piece, jt)
            first += len(numbers)
    assert [listed(piece) for piece in jt.split(number)] == [listed(piece) for piece in torch.split(jt, number)]


def _shares(piece: JaggedTensor, jt: JaggedTensor) -> bool:
    return piece.values.untyped_storage().data_ptr() == jt.values.untyped_storage().data_ptr()


@given(ragged(*KINDS), st.data())
def test_unbind_of_other_dims(drawn: Drawn, data: st.DataObject) -> None:
    jt, model = drawn
    at = data.draw(st.sampled_from([k for k, dim in enumerate(jt.dims) if dim.level is None]))

    def at_number(model: Any, number: int, depth: int) -> Any:
        return model[number] if depth == 0 else [at_number(each, number, depth - 1) for each in model]

    size = jt.size(at)
    assert isinstance(size, int)
    found = torch.unbind(jt, at)
    assert [listed(piece) for piece in found] == [at_number(model, number, at) for number in range(size)]


@EVERY_KIND
@given(data=st.data())
def test_permute(kind: str, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    order = data.draw(st.permutations(range(jt.ndim)))
    axes = [jt.dims[k].axis for k in order]
    levels = [[jt.dims[k].level for k in order if jt.dims[k].axis == axis] for axis in range(len(jt.structure.rows))]
    inside = [axes[axes.index(axis) : len(axes) - axes[::-1].index(axis)] for axis in range(len(levels))]
    # Only regular dims come between the dim that counts rows and the ragged ones, which stay in order.
    stays = all(own[0] is None and own[1:] == sorted(own[1:]) for own in levels) and all(
        set(own) <= {axis, None} for axis, own in enumerate(inside)
    )
    try:
        found = torch.permute(jt, tuple(order))
    except ShapeError as error:
        told = ("a ragged dim must follow the dim that counts its rows", "only regular dims may come between the dims")
        assert not stays and any(text in str(error) for text in told)
        return
    wanted = {tuple(place[k] for k in order): number for place, number in coordinates(model).items()}
    check_sound(found)
    assert coordinates(listed(found)) == wanted
    sizes = [jt.size(k) for k in order]
    assert all(size == found.size(k) for k, size in enumerate(sizes) if isinstance(size, int) and jt.dims[order[k]].axis is None)
    if stays and (found.structure.ahead is None or all(rows.packed for rows in jt.structure.rows)):
        assert found.values.data_ptr() == jt.values.data_ptr()
    assert coordinates(listed(found.permute([order.index(k) for k in range(jt.ndim)]))) == coordinates(model)


@given(ragged("nested equal", "three levels"))
def test_counts_change_places_where_parts_are_equal(drawn: Drawn) -> None:
    jt, model = drawn
    sizes = {len(parts) for parts in model}
    if len(sizes) > 1:
        with pytest.raises(ShapeError, match="only equal counts can be swapped"):
            jt.transpose(0, 1)
        return
    wanted = [list(parts) for parts in zip(*model, strict=True)]
    check(jt, lambda jt: jt.transpose(0, 1), wanted)


def test_three_counts_change_places() -> None:
    lengths = torch.tensor([[1, 2], [0, 3], [2, 1], [1, 1]])
    jt = JaggedTensor.from_lengths(torch.arange(11.0), (torch.tensor([2, 2]), lengths))
    model = listed(jt)
    for order in ((2, 0, 1, 3), (1, 2, 0, 3), (2, 1, 0, 3), (0, 2, 1, 3)):
        wanted = {tuple(place[k] for k in order): number for place, number in coordinates(model).items()}
        found = jt.permute(*order)
        check_sound(found)
        assert coordinates(listed(found)) == wanted
        assert found.structure.lengths(0).tolist() == [2, 2]


def test_ranks_and_experts_need_no_host() -> None:
    with no_sync(strict=True):
        offsets = torch.tensor([[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]])
        tokens = JaggedTensor.from_csr(torch.arange(200), offsets, validate=False)
        found = tokens.permute(1, 0, 2)
        assert found.structure.lengths(0).tolist() == [2] * 4
        assert found.lengths.tolist() == [30, 25, 0, 35, 40, 25, 30, 15]
        assert found.flatten(1, 2).lengths.tolist() == [55, 35, 65, 45]
        assert found.values[:55].tolist() == [*range(30), *range(100, 125)]
        unread = JaggedTensor.from_csr(torch.arange(4), (torch.tensor([0, 1, 2]), torch.tensor([0, 1, 4])), validate=False)
        with pytest.raises(SyncError, match="permute needs lengths on the host"):
            unread.permute(1, 0, 2)


@given(ragged("product packed", "product padded"))
def test_rectangles_are_turned(drawn: Drawn) -> None:
    jt, model = drawn
    if jt.structure.levels == 1:
        return
    found = jt.transpose(1, 2)
    assert found.structure.lengths(0).tolist() == jt.structure.lengths(1).tolist()
    wanted = {(a, c, b, *rest): number for (a, b, c, *rest), number in coordinates(model).items()}
    assert coordinates(listed(found)) == wanted
    assert listed(found.transpose(1, 2)) == model


@EVERY_KIND
@given(data=st.data())
def test_flatten(kind: str, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    at = data.draw(st.integers(0, jt.ndim - 2))
    outer, inner = jt.dims[at : at + 2]
    if inner.axis is not None and inner.level is None:
        with pytest.raises(ShapeError, match=f"flatten: dim {at + 1} counts rows"):
            jt.flatten(at, at + 1)
        return
    one, other = jt.structure.order(jt.values.dim())[at : at + 2]
    if other != one + 1:
        with pytest.raises(ShapeError, match=f"flatten: dims {at} to {at + 1} are not adjacent in the values"):
            jt.flatten(at, at + 1)
        return
    check(jt, lambda jt: torch.flatten(jt, at, at + 1), merged(model, at))
    if outer.level is not None and inner.level is not None and jt.format == "csr":
        assert jt.flatten(at, at + 1).values.data_ptr() == jt.values.data_ptr()


@ROWS_FIRST
@given(data=st.data())
def test_flatten_all(kind: str, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    check(jt, lambda jt: jt.flatten(), flat(model))


def test_what_torch_spells_otherwise() -> None:
    jt = JaggedTensor.from_lengths(torch.arange(24.0).reshape(4, 2, 3), [1, 3])
    swapped = jt.transpose(2, 3)
    for same in (torch.transpose(jt, 2, 3), torch.swapaxes(jt, -1, -2), torch.swapdims(jt, 2, 3), torch.movedim(jt, 3, 2)):
        assert torch.equal(same.values, swapped.values)
    assert str(torch.movedim(jt, (2, 3), (0, 1)).shape) == "(2, 3, 2, r0)"
    assert str(torch.moveaxis(jt, -1, 0).shape) == "(3, 2, r0, 2)"
    with pytest.raises(ShapeError, match="movedim: dims 4 of 4 cannot go to 0"):
        torch.movedim(jt, 4, 0)


def test_hints_and_offsets_of_what_is_joined() -> None:
    wide, narrow = (
        JaggedTensor.from_csr(torch.zeros(3), torch.tensor([0, 1, 3], dtype=dtype)) for dtype in (torch.int64, torch.int32)
    )
    for dim in (0, 1):
        assert serrate.cat([wide, narrow], dim).offsets.dtype is torch.int64
        assert serrate.cat([narrow, narrow], dim).offsets.dtype is torch.int32
    assert serrate.stack([narrow, narrow]).structure.offsets[0].dtype is torch.int32
    told = wide.with_hint(reuse="high")
    assert serrate.cat([told, told]).hints.reuse == "high"
    assert serrate.cat([told, wide]).hints.reuse is None


def test_joining_rows_needs_no_host() -> None:
    with no_sync(strict=True):
        one, two = (
            JaggedTensor.from_csr(torch.arange(5), torch.tensor(offsets), max_length=4, validate=False)
            for offsets in ([0, 1, 5], [0, 4, 5])
        )
        assert serrate.cat([one, two]).lengths.tolist() == [1, 4, 4, 1]
        assert serrate.cat([one, two]).max_length == 4
        assert serrate.cat([one, two], dim=1).values.tolist() == [0, 0, 1, 2, 3, 1, 2, 3, 4, 4]
        assert serrate.stack([one, two]).structure.max_length(0) == 2
        assert serrate.cat([one[..., None], one[..., None]], dim=2).values.shape == (5, 2)
        with pytest.raises(SyncError, match="stack needs lengths on the host"):
            serrate.stack([one, two], dim=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_every_dtype(dtype: torch.dtype) -> None:
    values = (torch.arange(5) % 2).to(dtype)
    jt = JaggedTensor.from_lengths(values, [[2, 0], [1, 2]])
    for found in (
        serrate.cat([jt, jt]),
        serrate.cat([jt, jt], 1),
        serrate.cat([jt, jt], 2),
        serrate.stack([jt]),
        jt.permute(1, 0, 2),
    ):
        assert found.dtype is dtype
    assert listed(serrate.cat([jt, jt], 2)) == [
        [values[:2].tolist() * 2, []],
        [values[2:3].tolist() * 2, values[3:].tolist() * 2],
    ]


JT = JaggedTensor.from_lengths(torch.zeros(5, 2), [3, 2])
ROWS = Structure.from_lengths(torch.tensor([3, 2]))
BOTH = JaggedTensor(torch.zeros(5, 5), Structure.independent(ROWS, Structure.from_lengths(torch.tensor([1, 4]), dim=1)))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: serrate.cat([]),
            CallError,
            "cat takes at least one JaggedTensor, got 0 tensors and no JaggedTensor: use torch.cat",
        ),
        (lambda: serrate.cat([JT, 3]), CallError, "cat takes tensors: item 1 is of type int"),
        (
            lambda: serrate.cat([JT, JT.to(torch.float64)]),
            DtypeError,
            "cat takes tensors of one dtype: tensor 1 is torch.float64",
        ),
        (lambda: serrate.stack([JT, JT.to("meta")]), DeviceError, "stack takes tensors on one device: tensor 1 is on meta"),
        (
            lambda: serrate.cat([JT, JT[..., 0]]),
            ShapeError,
            "cat: tensor 1 of shape (2, r0) does not fit tensor 0 of shape (2, r0, 2)",
        ),
        (lambda: serrate.cat([JT, JT[..., :1]]), ShapeError, "cat: tensor 1 of shape (2, r0, 1) does not fit tensor 0"),
        (
            lambda: serrate.cat([JT, JT[:1]], dim=1),
            StructureMismatch,
            "cat along ragged dim 1: tensor 1 has 1 rows, tensor 0 has 2",
        ),
        (lambda: serrate.cat([JT, JT[:, :1]], dim=2), StructureMismatch, "cat: tensor 1 must have the rows of tensor 0"),
        (lambda: serrate.cat([JT, JT], dim=3), ShapeError, "dim 3 does not exist: the tensor has 3 dims"),
        (lambda: serrate.cat([JT, torch.zeros(2, 2)]), ShapeError, "cat: tensor 1 has 2 dims, but the ragged tensors have 3"),
        (lambda: serrate.stack([JT, torch.zeros(2, 2, 2)]), CallError, "stack: tensor 1 is dense"),
        (lambda: serrate.stack([JT, JT], dim=5), ShapeError, "dim 5 does not exist: the stacked tensor has 4 dims"),
        (lambda: torch.tensor_split(JT, 2, 1), ShapeError, "tensor_split: dim 1 is ragged and has a different size in every row"),
        (lambda: JT.split([1, 2]), ShapeError, "split: dim 0 of size 2 cannot be split like this"),
        (lambda: torch.unbind(JT, 1), ShapeError, "unbind: dim 1 is ragged"),
        (lambda: JT.permute(0, 1), ShapeError, "permute takes each of the 3 dims once, got (0, 1)"),
        (lambda: JT.permute(1, 0, 2), ShapeError, "permute: dim 1 is ragged and cannot come before"),
        (lambda: BOTH.permute(0, 2, 1, 3), ShapeError, "permute: only regular dims may come between the dims [0, 1], which hold"),
        (
            lambda: serrate.stack([JT, JT])[:, :1].permute(1, 2, 0, 3),
            ShapeError,
            "permute: dim 2 is ragged and cannot come before",
        ),
    ],
)
def test_mistakes(make: Any, error: type[SerrateError], message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_rows_of_other_levels_must_agree() -> None:
    one, two = (JaggedTensor.from_lengths(torch.zeros(3), (torch.tensor(p), torch.tensor([1, 1, 1]))) for p in ([1, 2], [2, 1]))
    with pytest.raises(
        StructureMismatch, match="must have the lengths of tensor 0 on the other levels: 2 > 3 > 3, not 2 > 3 > 3"
    ):
        serrate.cat([one, two], dim=2)
    rows, columns = Structure.from_lengths(torch.tensor([2, 1])), Structure.from_lengths(torch.tensor([1, 1]), dim=1)
    both = JaggedTensor(torch.zeros(3, 2), Structure.independent(rows, columns))
    other = JaggedTensor(torch.zeros(3, 2), Structure.independent(rows, Structure.from_lengths(torch.tensor([0, 2]), dim=1)))
    with pytest.raises(StructureMismatch, match="in dims that are not joined"):
        serrate.cat([both, other])
