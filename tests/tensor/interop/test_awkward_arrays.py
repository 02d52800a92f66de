"""Awkward Arrays, there and back, against what awkward itself says the lists are.

In: samples of every composition, and layouts of every kind. Out: failures where lists differ or memory is not shared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate.errors import CallError, CopyError, CopyWarning, DtypeError, FormatError, GradientError, SyncError
from serrate.tensor import JaggedTensor, no_sync
from tests.tensor.compositions import (
    ALL_DTYPES,
    Sample,
    equal_parts,
    gaps,
    independent,
    later_dim,
    nested,
    nested_gaps,
    one_level,
    packed_columns,
    padded,
    padded_columns,
    samples,
)

ak = pytest.importorskip("awkward")
HELD = tuple(dtype for dtype in ALL_DTYPES if dtype is not torch.bfloat16)


def leaf(array: Any) -> Any:
    layout = ak.to_layout(array)
    while not layout.is_numpy:
        layout = layout.content
    return layout.data


@given(samples((one_level, nested, equal_parts, packed_columns, padded_columns, gaps, nested_gaps, padded), dtypes=HELD))
def test_lists_share_the_values_both_ways(sample: Sample) -> None:
    jt = sample.jt
    array = jt.to_awkward(copy=False)
    assert ak.is_valid(array)
    assert array.to_list() == sample.rows
    assert jt.values.numel() == 0 or leaf(array).ctypes.data == jt.values.data_ptr()
    back = JaggedTensor.from_awkward(array, copy=False)
    assert back.tolist() == sample.rows and back.dtype == jt.dtype
    assert back.values.numel() == 0 or back.values.data_ptr() == jt.values.data_ptr()
    if jt.structure.rows[0].columns is None:
        assert back.structure == jt.structure
        assert back.values.shape == jt.values.shape
        assert jt.format != "csr" or back.offsets.data_ptr() == jt.offsets.data_ptr()
    if jt.values.numel():
        assert leaf(jt.to_awkward(copy=True)).ctypes.data != jt.values.data_ptr()
        assert JaggedTensor.from_awkward(array, copy=True).values.data_ptr() != jt.values.data_ptr()


@given(st.lists(st.lists(st.lists(st.integers(-9, 9), max_size=3), max_size=3), max_size=5), st.integers(0, 5))
def test_arrays_made_by_awkward_and_their_slices(rows: list[Any], start: int) -> None:
    array = ak.values_astype(ak.Array(rows), "int64")
    assert JaggedTensor.from_awkward(array[start:], copy=False).tolist() == rows[start:]
    assert JaggedTensor.from_awkward(array[::-1], copy=True).tolist() == rows[::-1]


def test_lists_in_order_are_gaps_and_others_are_copied() -> None:
    array = ak.Array([[0, 1], [2], [3, 4, 5]])
    kept = array[np.array([0, 2])]
    jt = JaggedTensor.from_awkward(kept, copy=False)
    assert (jt.format, jt.tolist()) == ("gaps", [[0, 1], [3, 4, 5]])
    assert jt.values.data_ptr() == leaf(array).ctypes.data
    with pytest.warns(CopyWarning, match="from_awkward copied the values: its lists are out of order"):
        assert JaggedTensor.from_awkward(array[np.array([2, 0, 0])]).tolist() == [[3, 4, 5], [0, 1], [0, 1]]
    with pytest.raises(CopyError):
        JaggedTensor.from_awkward(array[np.array([2, 0])], copy=False)


def test_regular_lists_are_inner_dims_or_parts_of_equal_count() -> None:
    numbers = ak.from_numpy(np.arange(12.0).reshape(6, 2), regulararray=True)
    inner = ak.unflatten(numbers, [4, 2])
    jt = JaggedTensor.from_awkward(inner, copy=False)
    assert str(jt.shape) == "(2, r0, 2)" and jt.tolist() == inner.to_list()
    outer = ak.to_regular(ak.Array([[[1], [2, 3]], [[], [4]]]), axis=1)
    assert JaggedTensor.from_awkward(outer, copy=False).tolist() == outer.to_list()
    for alone in (numbers, ak.from_numpy(np.arange(12.0).reshape(6, 2))):
        assert JaggedTensor.from_awkward(alone, copy=False).tolist() == numbers.to_list()


def test_items_behind_an_index_are_copied() -> None:
    content = ak.contents.NumpyArray(np.arange(4))
    indexed = ak.contents.IndexedArray(ak.index.Index64(np.array([3, 1, 0])), content)
    array = ak.Array(ak.contents.ListOffsetArray(ak.index.Index64(np.array([0, 1, 3])), indexed))
    with pytest.warns(CopyWarning, match="its items are reached through an index"):
        assert JaggedTensor.from_awkward(array).tolist() == [[3], [1, 0]]


def test_unused_masks_do_not_matter() -> None:
    content = ak.contents.UnmaskedArray(ak.contents.NumpyArray(np.arange(3)))
    array = ak.Array(ak.contents.ListOffsetArray(ak.index.Index64(np.array([0, 1, 3])), content))
    assert JaggedTensor.from_awkward(array, copy=False).tolist() == [[0], [1, 2]]


def test_empty_arrays() -> None:
    assert JaggedTensor.from_awkward(ak.Array([[], []])).tolist() == [[], []]
    assert JaggedTensor.from_awkward(ak.Array([[[]], []])).tolist() == [[[]], []]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, None], []], "1 of 2 items are None, and tensors cannot hold missing values: fill or drop them first"),
        ([[1], None], "1 of 2 items are None"),
        ([[{"x": 1}]], r"the array holds records: take one field with array\['name'\]"),
        ([[1, [2]]], "the array holds a union of types"),
        ([["a"]], "the array holds strings"),
    ],
)
def test_what_a_tensor_cannot_hold_is_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(FormatError, match=f"from_awkward: {message}"):
        JaggedTensor.from_awkward(ak.Array(rows))


def test_refusals() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(3), [1, 2])
    with pytest.raises(DtypeError, match=r"to_awkward: numpy has no dtype for torch.bfloat16"):
        jt.to(torch.bfloat16).to_awkward()
    with pytest.raises(GradientError, match="to_awkward: awkward keeps no gradients"):
        jt.clone().requires_grad_().to_awkward()
    with pytest.raises(CallError, match="from_awkward takes an array of lists, got an array of numbers"):
        JaggedTensor.from_awkward(ak.Array([1, 2]))
    with pytest.raises(CallError, match=r"from_awkward takes an ak.Array, got list"):
        JaggedTensor.from_awkward([[1]])
    with pytest.raises(DtypeError, match="from_awkward: a tensor cannot hold datetime64"):
        JaggedTensor.from_awkward(ak.Array([[np.datetime64("2020-01-01")]]))
    unread = JaggedTensor.from_csr(torch.zeros(3), torch.tensor([0, 1, 3]), validate=False)
    with no_sync(strict=True), pytest.raises(SyncError, match="to_awkward needs lengths on the host"):
        unread.to_awkward()


@given(samples((later_dim, independent), dtypes=(torch.float32,)))
def test_rows_of_other_dims_are_refused(sample: Sample) -> None:
    with pytest.raises(FormatError, match=r"to_awkward: the format cannot hold rows of (dim 1|the dims 0 and 1)"):
        sample.jt.to_awkward()
