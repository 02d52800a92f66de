"""`jt[key]` and `jt[key] = x` against the same keys on lists of lists, over every composition.

In: random ragged tensors with their models, and random keys. Out: failures where a result, its gradient or its error differs.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serrate.errors import (
    CallError,
    DtypeError,
    RaggedSizeError,
    RowError,
    SerrateError,
    ShapeError,
    StructureMismatch,
    SyncError,
)
from serrate.tensor import JaggedTensor, Structure, no_sync
from serrate.tensor.rows import rows_of
from tests.tensor.models import EVERY_KIND, KINDS, ROWS_FIRST, check_sound, flat, listed, ragged

SMALL = st.one_of(st.none(), st.integers(-4, 4))
SLICES = st.builds(slice, SMALL, SMALL, st.sampled_from([None, None, None, 1, 2, 3, -1, -2]))
PLAIN_SLICES = st.builds(slice, SMALL, SMALL)


def picked(model: Any, keys: list[Any]) -> Any:
    """What keys leave of lists of lists: the rules of Python, one key for each level of lists."""
    if not keys:
        return model
    key, *rest = keys
    if key is None:
        return [picked(model, rest)]
    if isinstance(key, int):
        return picked(model[key], rest)
    chosen = model[key] if isinstance(key, slice) else [model[each] for each in key]
    return [picked(each, rest) for each in chosen]


def gradient_counts(jt: JaggedTensor, take: Any) -> list[float]:
    """How often each element of the storage is in what is taken, told by the gradient of its sum."""
    values = jt.values.clone().requires_grad_()
    found = take(JaggedTensor(values, jt.structure))
    taken = found if isinstance(found, Tensor) else found.contiguous().values
    taken.sum().backward()
    return [0.0] * values.numel() if values.grad is None else values.grad.reshape(-1).tolist()


def check(jt: JaggedTensor, key: Any, wanted: Any) -> None:
    found = jt[key]
    check_sound(found)
    assert listed(found) == wanted
    assert found.dtype == jt.dtype
    counts = [0.0] * jt.values.numel()
    for number in flat(wanted):
        counts[int(number)] += 1
    assert gradient_counts(jt, lambda jt: jt[key]) == counts


def places(model: Any, depth: int, at: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """The numbers that lead to every item `depth` lists down."""
    if depth == 0:
        return [at]
    return [found for number, each in enumerate(model) for found in places(each, depth - 1, (*at, number))]


@ROWS_FIRST
@given(data=st.data())
def test_row_ids_and_positions(kind: str, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    levels = jt.structure.levels
    found = places(model, levels + 1)
    for level in range(levels):
        assert jt.positions(level).tolist() == [place[level + 1] for place in found]
        own = min(level, jt.structure.rows[0].depth - 1)
        rows = {place: number for number, place in enumerate(places(model, own + 1))}
        assert jt.row_ids(level).tolist() == [rows[place[: own + 1]] for place in found]
    assert (jt.row_ids().dtype, jt.positions().dtype) == (torch.int64, torch.int64)
    assert jt.row_ids().tolist() == jt.row_ids(levels - 1).tolist()


def test_row_ids_of_several_dims_are_those_of_a_level() -> None:
    both = Structure.independent(
        Structure.from_lengths(torch.tensor([2, 1])), Structure.from_lengths(torch.tensor([1, 3]), dim=1)
    )
    jt = JaggedTensor(torch.zeros(3, 4), both)
    assert (jt.row_ids(0).tolist(), jt.row_ids(1).tolist()) == ([0, 0, 1], [0, 1, 1, 1])
    assert (jt.positions(0).tolist(), jt.positions().tolist()) == ([0, 1, 0], [0, 0, 1, 2])


@st.composite
def keyed(draw: st.DrawFn, *kinds: str) -> tuple[JaggedTensor, list[Any], list[Any]]:
    jt, model = draw(ragged(*kinds))
    keys: list[Any] = []
    tensor_at = draw(st.integers(0, 5))
    for at, dim in enumerate(jt.dims[: draw(st.integers(1, jt.ndim))]):
        size = jt.size(at)
        if dim.ragged is None and isinstance(size, int) and size > 0 and at == tensor_at:
            keys.append(draw(st.lists(st.integers(-size, size - 1), max_size=4)))
        elif at and isinstance(size, int):
            # Lists that are empty further out cannot tell that a number is too large for a regular dim.
            keys.append(draw(st.one_of(SLICES, st.integers(-size, size - 1)) if size else SLICES))
        else:
            keys.append(draw(st.one_of(SLICES, SLICES, st.integers(-3, 3))))
    return jt, model, keys


@EVERY_KIND
@given(data=st.data())
def test_keys_are_those_of_lists(kind: str, data: st.DataObject) -> None:
    jt, model, keys = data.draw(keyed(kind))
    key = tuple(keys) if len(keys) > 1 else keys[0]
    columns = any(rows.columns is not None for rows in jt.structure.rows)
    try:
        wanted = picked(model, keys)
    except IndexError:
        with pytest.raises(RowError):
            jt[key]
        return
    try:
        jt[key]
    except RowError:
        # A row without positions still has columns, or rows of another dim behind it, which a list of no lists cannot tell.
        assert columns or jt.structure.dims[-1] > 0
        return
    check(jt, key, wanted)


@pytest.mark.sampled(1)
@EVERY_KIND
@given(key=SLICES, data=st.data())
def test_one_slice_on_every_dim(kind: str, key: slice, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    at = data.draw(st.integers(0, jt.ndim - 1))
    check(jt, (*(slice(None),) * at, key), picked(model, [slice(None)] * at + [key]))
    check(jt, (..., key), picked(model, [slice(None)] * (jt.ndim - 1) + [key]))


@EVERY_KIND
@given(one=PLAIN_SLICES, two=PLAIN_SLICES, data=st.data())
def test_ranges_of_rows_are_views_and_need_no_host(kind: str, one: slice, two: slice, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    rows = jt.structure.rows[0]
    at = next(k for k, dim in enumerate(jt.dims) if dim.axis == 0 and dim.level == rows.depth - 1)
    before = (slice(None),) * at
    with no_sync(strict=True):
        once = jt[(*before, one)]
        twice = once[(*before, two)]
    for found in (once, twice):
        check_sound(found)
        assert found.values.data_ptr() == jt.values.data_ptr()
    assert listed(twice) == picked(picked(model, [*before, one]), [*before, two])
    assert once.format == jt.format or one.start or jt.format == "csr"


@pytest.mark.sampled(1)
@EVERY_KIND
@given(data=st.data())
def test_rows_by_number_and_by_boolean(kind: str, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    count = len(jt)
    numbers = data.draw(st.lists(st.integers(-count, count - 1), max_size=6)) if count else []
    booleans = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    wanted = [model[each] for each in numbers]
    as_tensor = torch.tensor(numbers, dtype=data.draw(st.sampled_from([torch.int64, torch.int32, torch.int8])))
    check(jt, data.draw(st.sampled_from([numbers, as_tensor])), wanted)
    chosen = [row for row, kept in zip(model, booleans, strict=True) if kept]
    check(jt, torch.tensor(booleans, dtype=torch.bool) if not booleans or data.draw(st.booleans()) else booleans, chosen)


@given(ragged(*KINDS), st.data())
def test_new_dims(drawn: tuple[JaggedTensor, list[Any]], data: st.DataObject) -> None:
    jt, model = drawn
    at = data.draw(st.integers(0, jt.ndim))
    keys = [*(slice(None),) * at, None]
    check(jt, tuple(keys), picked(model, keys))


def masked(model: Any, choose: Any, depth: int) -> Any:
    """Lists without the items at `depth` lists down that `choose` rejects; it is asked once for each, in order."""
    if depth == 0:
        return [each for each in model if choose()]
    return [masked(each, choose, depth - 1) for each in model]


@pytest.mark.sampled(1)
@ROWS_FIRST
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_ragged_masks(kind: str, data: st.DataObject, seed: int) -> None:
    jt, model = data.draw(ragged(kind))
    rows = jt.structure.rows[0]
    generator = torch.Generator().manual_seed(seed)
    if rows.columns is None:
        mask = JaggedTensor(torch.rand(jt.values.shape[0], generator=generator) < 0.5, jt.structure)
    else:
        lengths = rows.inner_lengths()
        mask = JaggedTensor.from_lengths(torch.rand(int(lengths.sum()), generator=generator) < 0.5, lengths)
    kept = iter(flat(listed(mask)))
    check(jt, mask, masked(model, lambda: next(kept), rows.depth))
    if rows.columns is None:
        assert listed(jt[mask.contiguous()]) == listed(jt[mask])
    found = jt[mask].structure.offsets
    assert [found[level].tolist() for level in range(rows.depth - 1)] == [rows.offsets[k].tolist() for k in range(rows.depth - 1)]


def test_a_mask_may_stand_for_inner_rows() -> None:
    values = torch.arange(10.0).reshape(2, 5)
    jt = JaggedTensor.from_lengths(values, [3, 2], dim=1)
    mask = JaggedTensor.from_lengths(torch.tensor([True, False, True, False, True]), [3, 2])
    assert listed(jt[:, mask]) == [[[0, 2], [4]], [[5, 7], [9]]]
    with pytest.raises(ShapeError, match="dim 0 does not count rows"):
        jt[mask]


def numbers_written(jt: JaggedTensor, key: Any) -> set[float]:
    jt[key] = -1.0
    before = torch.arange(jt.values.numel(), dtype=torch.float64)
    return set(before[jt.values.reshape(-1) == -1].tolist())


@EVERY_KIND
@given(key=PLAIN_SLICES, data=st.data())
def test_numbers_are_written_where_the_key_is(kind: str, key: slice, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    at = data.draw(st.integers(0, jt.ndim - 1))
    rows = jt.structure.rows[jt.dims[at].axis or 0]
    written = {*flat(picked(model, [slice(None)] * at + [key]))}
    if jt.dims[at].level == rows.depth and (rows.packed or (key.start or 0) < 0):
        # Columns that move are a copy.
        return
    assert numbers_written(jt, (*(slice(None),) * at, key)) == written


@pytest.mark.sampled(1)
@EVERY_KIND
@given(data=st.data())
def test_ragged_and_dense_tensors_are_written(kind: str, data: st.DataObject) -> None:
    jt, model = data.draw(ragged(kind))
    key = data.draw(PLAIN_SLICES)
    before = set(flat(model))
    others = JaggedTensor(-jt.values - 1, jt.structure)[key]
    jt[key] = others.contiguous() if data.draw(st.booleans()) else others.to(torch.float32)
    holes = set(range(jt.values.numel())) - before
    changed = {*flat(picked(model, [key]))}
    wanted = [-n - 1 if n in changed else n for n in range(jt.values.numel())]
    assert jt.values.reshape(-1).tolist() == wanted
    assert all(jt.values.reshape(-1)[int(hole)] == hole for hole in holes)
    dense = JaggedTensor(torch.arange(jt.values.numel()).reshape(jt.values.shape), jt.structure)
    if jt.values.numel():
        jt[...] = dense.to_padded(fill=-1)
        assert listed(jt) == model
    one = torch.full((1,) * jt.ndim, 5.0)
    jt[...] = one
    assert set(flat(listed(jt))) <= {5.0}


def test_writes() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(5, 2), [3, 2])
    jt[1] = torch.tensor([1.0, 2.0])
    assert jt.values.tolist() == [[0, 0]] * 3 + [[1, 2]] * 2
    jt[..., 0] = 7
    assert jt.values[:, 0].tolist() == [7] * 5
    jt[..., 1] = jt[..., 0]
    assert jt.values[:, 1].tolist() == [7] * 5
    jt[:, :1] = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    assert jt.values[[0, 3]].tolist() == [[1, 2], [3, 4]]
    jt[:, 1:] = torch.tensor([5.0, 6.0])
    assert jt.values[[1, 2, 4]].tolist() == [[5, 6]] * 3
    mask = JaggedTensor.from_lengths(torch.tensor([True, False, False, False, True]), [3, 2])
    jt[mask] = 0
    assert jt.values[[0, 4]].tolist() == [[0, 0]] * 2 and jt.values[1].tolist() == [5, 6]
    jt[mask] = torch.tensor([8.0, 9.0])
    assert jt.values[[0, 4]].tolist() == [[8, 9]] * 2
    jt[0, 1, 0] = -1
    assert jt.values[1].tolist() == [-1, 6]
    jt[[False, True]] = 3
    assert jt.values[3:].tolist() == [[3, 3]] * 2 and jt.values[0].tolist() == [8, 9]


def test_masks_are_written_into_storage_with_holes() -> None:
    jt = JaggedTensor.from_starts(torch.zeros(8), [1, 5], [3, 2])
    mask = JaggedTensor.from_lengths(torch.tensor([True, False, True, False, True]), [3, 2])
    jt[mask] = 1
    assert jt.values.tolist() == [0, 1, 0, 1, 0, 0, 1, 0]
    jt[JaggedTensor(torch.ones(8, dtype=torch.bool), jt.structure)] = 2
    assert jt.values.tolist() == [0, 2, 2, 2, 0, 2, 2, 0]
    scores = JaggedTensor(torch.zeros(5), Structure.from_lengths(torch.tensor([1, 1])).with_columns(torch.tensor([2, 3])))
    scores[scores.with_values(torch.tensor([False, True, True, False, False]))] = 4
    assert scores.values.tolist() == [0, 4, 4, 0, 0]
    wide = JaggedTensor(
        torch.zeros(2, 3), Structure.from_lengths(torch.tensor([1, 1])).with_columns(torch.tensor([2, 3]), packed=False)
    )
    wide[scores.with_values(torch.tensor([False, True, True, False, False]))] = 4
    assert wide.values.tolist() == [[0, 4, 0], [4, 0, 0]]


def test_masks_of_one_dim_leave_holes_of_another() -> None:
    columns = Structure.from_starts(torch.tensor([0, 2]), torch.tensor([1, 1]), dim=1)
    jt = JaggedTensor(torch.zeros(2, 4), Structure.independent(Structure.from_lengths(torch.tensor([1, 1])), columns))
    jt[JaggedTensor.from_lengths(torch.tensor([False, True]), [1, 1])] = 1
    assert jt.values.tolist() == [[0, 0, 0, 0], [1, 0, 1, 0]]


def test_gradients_go_through_writes() -> None:
    values, row = torch.ones(5, dtype=torch.float64, requires_grad=True), torch.ones(2, dtype=torch.float64, requires_grad=True)
    jt = JaggedTensor.from_lengths(values * 2, [3, 2])
    jt[1] = row * 5
    jt[:, :1] = 0
    jt.values.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0, 2, 2, 0, 0]
    assert row.grad is not None and row.grad.tolist() == [0, 5]


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.uint8, torch.bool, torch.complex64],
)
def test_every_dtype(dtype: torch.dtype) -> None:
    values = (torch.arange(8) % 2).to(dtype)
    jt = JaggedTensor.from_starts(values, [0, 4], [3, 3])
    mask = JaggedTensor.from_lengths(torch.tensor([True, False, False, False, True, True]), [3, 3])
    assert listed(jt[:, 1:]) == [values[1:3].tolist(), values[5:7].tolist()]
    assert jt[:, 1].tolist() == values[[1, 5]].tolist()
    assert listed(jt[:, ::2]) == [values[0:3:2].tolist(), values[4:7:2].tolist()]
    assert listed(jt[mask]) == [values[:1].tolist(), values[5:7].tolist()]
    jt[:, :1] = 1
    jt[mask] = jt[1][1]
    assert all(found.dtype is dtype for found in (jt[0], jt[:, 1], jt[mask], jt[[1]]))
    jt[:, :2] = jt[:, 1:].contiguous()
    assert values.tolist() == [0, 0, 0, 1, 1, 1, 1, 1] or dtype is not None


@pytest.mark.parametrize("packed", [True, False])
def test_rows_and_columns_of_rectangles(packed: bool) -> None:
    structure = Structure.from_lengths(torch.tensor([3, 1, 2])).with_columns(torch.tensor([2, 3, 2]), packed=packed)
    rows = [torch.arange(6.0).reshape(3, 2), torch.arange(6.0, 9.0).reshape(1, 3), torch.arange(9.0, 13.0).reshape(2, 2)]
    whole = torch.cat([torch.nn.functional.pad(row, (0, 4 - row.shape[1]), value=-1) for row in rows])
    jt = JaggedTensor(torch.cat([row.reshape(-1) for row in rows]) if packed else whole, structure)
    for index in (0, 1, -1, -2):
        found = jt[:, :, index]
        check_sound(found)
        assert listed(found) == [row[:, index].tolist() for row in rows]
    for index in (0, -1):
        found = jt[:, index]
        check_sound(found)
        assert listed(found) == [row[index].tolist() for row in rows]
    with pytest.raises(RowError, match="position 2 does not exist in every row: row 0 has length 2"):
        jt[:, :, 2]


def test_the_first_sentence_of_every_document() -> None:
    words = JaggedTensor.from_nested_list([[torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([4, 5, 6])]])
    assert listed(words[:, 0]) == [[1, 2], [4, 5, 6]]
    assert str(words[:, 0].shape) == "(2, r0)"
    assert listed(words[:, -1]) == [[3], [4, 5, 6]]
    assert listed(words[:, :1]) == [[[1, 2]], [[4, 5, 6]]]
    assert words[:, 0].values.data_ptr() == words.values.data_ptr()
    with pytest.raises(RowError) as caught:
        words[:, 1]
    assert str(caught.value) == (
        "position 1 does not exist in every row: row 1 has length 1; use a slice, which may be shorter, or the padded values"
    )


def test_what_is_known_on_the_host_spares_the_copy() -> None:
    offsets = torch.tensor([0, 2, 5])
    with no_sync(strict=True):
        jt = JaggedTensor.from_csr(torch.arange(5), offsets, min_length=2, max_length=3, validate=False)
        assert jt[:, 1].tolist() == [1, 3]
        assert jt[:, :2].max_length == jt[:, :2].min_length == 2
        ranks = JaggedTensor.from_csr(torch.arange(5), torch.tensor([[0, 2], [0, 3]]), validate=False)
        assert ranks[:, 0].lengths.tolist() == [2, 3]
        assert ranks[:, :1].structure.lengths(0).tolist() == [1, 1]
        unread = JaggedTensor.from_csr(torch.arange(5), offsets, validate=False)
        for key, why in (
            ((slice(None), 1), r"jt\[:, i\]"),
            ([0], r"jt\[rows\]"),
            ((slice(None), slice(None, None, 2)), r"jt\[:, a:b\]"),
        ):
            with pytest.raises(SyncError, match=f"{why} needs lengths on the host"):
                unread[key]
        with pytest.raises(SyncError, match=r"jt\[mask\] needs lengths on the host"):
            unread[unread.with_values(torch.ones(5, dtype=torch.bool))]
        unread[:, :1] = 0
        assert unread.values.tolist() == [0, 1, 0, 3, 4]


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (3, RowError, "row 3 does not exist: the tensor has 3 rows"),
        ([0, -4], RowError, "jt[rows]: row -4 does not exist: there are 3"),
        ((..., 2), RowError, "position 2 does not exist: the dim has 2"),
        ((slice(None), 3), RowError, "position 3 does not exist in every row: row 0 has length 3; use a slice"),
        ((0, 0, 0, 0), ShapeError, "jt[key]: 4 dims are indexed, but the tensor has 3"),
        ((..., ...), CallError, "jt[key]: ... may appear only once, got 2"),
        (([0], slice(None), [0]), CallError, "jt[key]: only one tensor of indices, booleans or a mask at a time"),
        (
            (slice(None), [True, False]),
            CallError,
            "jt[:, rows]: a ragged dim takes an int, a slice, a ragged mask or position numbers",
        ),
        ((slice(None), [0, 2]), RowError, "position 2 does not exist in every row: row 2 has length 2; use a slice"),
        (True, CallError, "jt[key]: a single boolean is not an index"),
        ("rows", CallError, "jt[key]: str is not an index"),
        (1.5, CallError, "jt[key]: float is not an index"),
        ([1.5], CallError, "jt[key]: an index must be integers or booleans, got torch.float32"),
        ([[0]], CallError, "jt[key]: an index must be 1-D, got shape (1, 1)"),
        ([True], ShapeError, "jt[rows]: a mask needs one boolean per row: it has 1, but there are 3"),
        (slice(None, None, 0), ShapeError, "a slice cannot have step 0"),
    ],
)
def test_wrong_keys(key: Any, error: type[SerrateError], message: str) -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(9, 2), [3, 4, 2])
    with pytest.raises(error) as caught:
        jt[key]
    assert str(caught.value).startswith(message)


def test_sizes_of_ragged_dims_are_no_indices() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(9, 2), [3, 4, 2])
    for use in (lambda size: jt[size], lambda size: jt[:size], int, range):
        with pytest.raises(RaggedSizeError, match="r0 is the size of a ragged dim"):
            use(jt.size(1))


def test_wrong_masks() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(5, 2), [3, 2])
    with pytest.raises(
        StructureMismatch, match=r"the mask must have the same rows as the tensor: the mask has 2 > 5, the tensor 2 > 5"
    ):
        jt[JaggedTensor.from_lengths(torch.ones(5, dtype=torch.bool), [2, 3])]
    with pytest.raises(DtypeError, match=r"a ragged index must be a mask of torch\.bool, got torch\.int64"):
        jt[JaggedTensor.from_lengths(torch.ones(5, dtype=torch.int64), [3, 2])]
    with pytest.raises(ShapeError, match=r"a mask has one boolean per position, got shape \(2, r0, 2\)"):
        jt[jt.with_values(jt.values > 0)]
    scores = JaggedTensor(torch.zeros(5), Structure.from_lengths(torch.tensor([1, 1])).with_columns(torch.tensor([2, 3])))
    with pytest.raises(ShapeError, match="a mask over columns would leave rows with columns of different lengths"):
        scores[scores.with_values(scores.values > 0)]


@pytest.mark.parametrize(
    ("key", "x", "error", "message"),
    [
        ((slice(None), 0), 1, CallError, "jt[key] = x: the key selects a copy"),
        ((slice(None), slice(None, None, 2)), 1, CallError, "jt[key] = x: the key selects a copy"),
        ([1, 0], 1, CallError, "jt[rows] = x takes row numbers in increasing order without repeats"),
        (0, torch.zeros(4, 2), ShapeError, "jt[key] = x: x of shape (4, 2) does not fit: the key selects shape (3, 2)"),
        (..., torch.zeros(3), ShapeError, "jt[key] = x: x of shape (3,) does not fit: every position holds shape (2,)"),
        (..., torch.zeros(5, 2), ShapeError, "jt[key] = x: a tensor must have the dims after the ragged ones, or all 3"),
        (..., "one", CallError, "jt[key] = x: x must be a number, a tensor or a ragged tensor, got str"),
        (0, JaggedTensor.from_lengths(torch.zeros(3), [3]), ShapeError, "jt[key] = x: the key selects no ragged dim"),
        (..., JaggedTensor.from_lengths(torch.zeros(5, 2), [2, 3]), StructureMismatch, "jt[key] = x: x must have the rows"),
        (..., JaggedTensor.from_lengths(torch.zeros(5), [3, 2]), ShapeError, "jt[key] = x: the key selects 3 dims"),
    ],
)
def test_wrong_writes(key: Any, x: Any, error: type[SerrateError], message: str) -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(5, 2), [3, 2])
    with pytest.raises(error) as caught:
        jt[key] = x
    assert str(caught.value).startswith(message)


def test_numbers_of_every_kind_index_rows() -> None:
    numpy = pytest.importorskip("numpy")
    jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
    assert jt[numpy.int64(1)].tolist() == jt[torch.tensor(1)].tolist() == [3, 4]
    assert listed(jt[numpy.array([1, 0])]) == listed(jt[range(1, -1, -1)]) == [[3, 4], [0, 1, 2]]
    assert jt[numpy.int64(1) :].lengths.tolist() == [2]
    assert random.Random(0).choice(jt) is not None


def test_ranges_and_writes_read_no_number() -> None:
    # Tensors on the meta device hold no numbers: whoever reads one raises.
    values, offsets = torch.zeros(7, 2, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
    jt = JaggedTensor.from_csr(values, offsets, min_length=1, max_length=3)
    pairs = JaggedTensor.from_csr(values, torch.zeros(2, 3, dtype=torch.int64, device="meta"))
    with no_sync():
        assert str(jt[:, :2][:, -1:].shape) == "(3, r0, 2)"
        assert jt[:, 0].shape == (3, 2)
        assert str(jt[..., 1].shape) == "(3, r0)"
        assert str(pairs[:, 0].shape) == str(pairs[:, -1, ..., None].shape).replace(", 1)", ")") == "(2, r0, 2)"
        assert str(pairs[:, :1, 1:].shape) == "(2, r0, r1, 2)"
        jt[:, -1:] = 0
        jt[jt.with_values(values[:, 0] > 8)] = -1
        jt[..., 0] = jt[..., 1]
        assert torch.cat([jt, jt], dim=1).values.shape == torch.cat([jt, jt]).values.shape == (14, 2)
        assert torch.cat([pairs, pairs], dim=1).values.shape == (14, 2)
        assert str(torch.stack([jt, jt]).shape) == "(2, r0, r1, 2)"
        assert torch.cat([jt, jt], dim=2).values.shape == (7, 4)
        assert str(pairs.permute(1, 0, 2, 3).flatten(1, 2).shape) == "(2, r0, 2)"
        assert jt.row_ids().shape == jt.positions().shape == (7,)


@pytest.mark.gpu
def test_ranges_and_writes_do_not_wait_for_the_device() -> None:
    values = torch.arange(14.0, device="cuda").reshape(7, 2)
    offsets = torch.tensor([0, 3, 4, 7], device="cuda")
    pairs = torch.tensor([[0, 3], [0, 4]], device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with no_sync():
            jt = JaggedTensor.from_csr(values, offsets, min_length=1, max_length=3)
            found = jt[:, :2][:, -1:]
            first = jt[:, 0]
            column = jt[..., 1]
            part = JaggedTensor.from_csr(values, pairs)[:, 0]
            jt[:, -1:] = 0
            jt[jt.with_values(values[:, 0] > 8)] = -1
            joined = torch.cat([jt, jt]), torch.cat([jt, jt], dim=1), torch.stack([jt, jt]), torch.cat([jt, jt], dim=2)
            ids = jt.row_ids(), jt.positions()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert [row.shape[0] for row in found] == [1, 1, 1]
    assert first[:, 0].tolist() == [0, 6, 8] and part.lengths.tolist() == [3, 4]
    assert column.lengths.tolist() == [3, 1, 3]
    assert values[:, 0].tolist() == [0, 2, 0, 0, 8, -1, 0]
    assert [each.values.shape[0] for each in joined] == [14, 14, 14, 7]
    assert ids[0].tolist() == [0, 0, 0, 1, 2, 2, 2] and ids[1].tolist() == [0, 1, 2, 0, 0, 1, 2]


@pytest.mark.gpu
@given(keyed(*KINDS))
def test_keys_are_those_of_lists_on_a_gpu(drawn: tuple[JaggedTensor, list[Any], list[Any]]) -> None:
    jt, _, keys = drawn
    key = tuple(keys) if len(keys) > 1 else keys[0]
    try:
        wanted = listed(jt[key])
    except RowError:
        with pytest.raises(RowError):
            jt.to("cuda")[key]
        return
    there = JaggedTensor(jt.values.cuda(), jt.structure.to("cuda"))
    unread = Structure(
        tuple(rows_of(r.offsets, r.depth, r.packed, r.starts, r.room, {}) for r in there.structure.rows), jt.structure.dims
    ).transposed(jt.structure.ahead)
    for moved in (there, JaggedTensor(there.values, unread)):
        found = moved[key]
        check_sound(found)
        assert found.device.type == "cuda" and listed(found) == wanted
