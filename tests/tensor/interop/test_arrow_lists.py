"""pyarrow's arrays of lists, there and back, against what pyarrow itself says the lists are.

In: samples of every composition, and arrays of every kind of list. Out: failures where lists differ or memory is not shared.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate.errors import CallError, CopyError, CopyWarning, DtypeError, FormatError, GradientError, SyncError
from serrate.tensor import JaggedTensor, Structure, no_sync
from tests.tensor.compositions import (
    FLOATS,
    INTEGERS,
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

pa = pytest.importorskip("pyarrow")
HELD = tuple(dtype for dtype in (*FLOATS, *INTEGERS) if dtype is not torch.bfloat16)


def leaf(array: Any) -> Any:
    while pa.types.is_nested(array.type):
        array = array.values
    return array


def address(array: Any) -> int:
    found: int = leaf(array).buffers()[1].address
    return found


@given(samples((one_level, nested, equal_parts, packed_columns, padded_columns, gaps, nested_gaps, padded), dtypes=HELD))
def test_lists_share_the_values_both_ways(sample: Sample) -> None:
    jt = sample.jt
    array = jt.to_arrow(copy=False)
    array.validate(full=True)
    assert array.to_pylist() == sample.rows
    assert jt.values.numel() == 0 or address(array) == jt.values.data_ptr()
    back = JaggedTensor.from_arrow(array, copy=False)
    assert back.tolist() == sample.rows and back.dtype == jt.dtype
    assert back.values.numel() == 0 or back.values.data_ptr() == jt.values.data_ptr()
    if jt.structure.rows[0].columns is None:
        assert back.structure == jt.structure
        assert [level.dtype for level in back.structure.offsets] == [level.dtype for level in jt.structure.offsets]
        assert back.values.shape == jt.values.shape
    if jt.values.numel():
        assert address(jt.to_arrow(copy=True)) != jt.values.data_ptr()
        assert JaggedTensor.from_arrow(array, copy=True).values.data_ptr() != jt.values.data_ptr()


@pytest.mark.parametrize(("index", "name"), [(torch.int32, "list"), (torch.int64, "large_list")])
def test_offsets_are_shared_and_say_the_kind_of_list(index: torch.dtype, name: str) -> None:
    jt = JaggedTensor.from_lengths(torch.arange(3.0), torch.tensor([2, 1], dtype=index))
    array = jt.to_arrow()
    assert str(array.type) == f"{name}<item: float>"
    assert array.buffers()[1].address == jt.offsets.data_ptr()
    assert JaggedTensor.from_arrow(array).offsets.data_ptr() == jt.offsets.data_ptr()
    views = JaggedTensor.from_starts(torch.arange(5.0), torch.tensor([0, 3], dtype=index), torch.tensor([2, 1], dtype=index))
    assert str(views.to_arrow().type) == f"{name}_view<item: float>"


@given(samples((one_level, nested, gaps), dtypes=(torch.bool,)))
def test_bools_are_copied_both_ways(sample: Sample) -> None:
    with pytest.warns(CopyWarning, match="to_arrow copied the values: pyarrow packs bools into bits"):
        array = sample.jt.to_arrow()
    assert array.to_pylist() == sample.rows
    with pytest.warns(CopyWarning, match="from_arrow copied the values: pyarrow packs bools into bits"):
        assert JaggedTensor.from_arrow(array).tolist() == sample.rows
    with pytest.raises(CopyError):
        sample.jt.to_arrow(copy=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert JaggedTensor.from_arrow(array, copy=True).tolist() == sample.rows


KINDS = {
    "list": pa.list_(pa.int32()),
    "large list": pa.large_list(pa.int32()),
    "lists of lists": pa.list_(pa.large_list(pa.int32())),
    "fixed below": pa.list_(pa.list_(pa.int32(), 2)),
    "fixed above": pa.list_(pa.list_(pa.int32()), 2),
    "fixed alone": pa.list_(pa.int32(), 2),
    "fixed twice": pa.list_(pa.list_(pa.list_(pa.int32()), 2), 3),
    "list view": pa.list_view(pa.int32()),
    "views of lists": pa.list_view(pa.list_(pa.int32())),
    "lists of views": pa.list_(pa.large_list_view(pa.int32())),
}


def items(kind: Any) -> st.SearchStrategy[Any]:
    if not pa.types.is_nested(kind):
        return st.integers(-9, 9)
    size = kind.list_size if pa.types.is_fixed_size_list(kind) else None
    return st.lists(items(kind.value_type), min_size=size or 0, max_size=3 if size is None else size)


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data())
def test_every_kind_of_list_and_its_slices(name: str, data: st.DataObject) -> None:
    rows = data.draw(st.lists(items(KINDS[name]), max_size=6))
    array = pa.array(rows, type=KINDS[name])
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if "view" in name else "error", CopyWarning)
        assert JaggedTensor.from_arrow(array).tolist() == rows
        part = JaggedTensor.from_arrow(array[start:stop])
        assert part.tolist() == rows[start:stop]
        twice = JaggedTensor.from_arrow(array[start:][1:])
        assert twice.tolist() == rows[start:][1:]


def test_slices_share_the_values() -> None:
    array = pa.array([[1, 2], [3], [4, 5, 6]])
    jt = JaggedTensor.from_arrow(array[1:], copy=False)
    assert jt.values.data_ptr() == address(array) + 2 * 8
    assert jt.tolist() == [[3], [4, 5, 6]]


def test_views_in_order_are_gaps_and_others_are_copied() -> None:
    values = pa.array([0, 1, 2, 3, 4])
    gapped = pa.ListViewArray.from_arrays(pa.array([0, 3], pa.int32()), pa.array([2, 1], pa.int32()), values)
    jt = JaggedTensor.from_arrow(gapped, copy=False)
    assert (jt.format, jt.tolist()) == ("gaps", [[0, 1], [3]])
    mixed = pa.ListViewArray.from_arrays(pa.array([3, 0], pa.int32()), pa.array([2, 2], pa.int32()), values)
    with pytest.warns(CopyWarning, match="the views are out of order"):
        assert JaggedTensor.from_arrow(mixed).tolist() == [[3, 4], [0, 1]]


def test_chunks() -> None:
    chunks = pa.chunked_array([[[1, 2], []], [[3]]])
    with pytest.warns(CopyWarning, match="from_arrow copied the values: its 2 chunks are joined"):
        assert JaggedTensor.from_arrow(chunks).tolist() == [[1, 2], [], [3]]
    single = pa.chunked_array([[[1, 2], []]])
    assert JaggedTensor.from_arrow(single, copy=False).tolist() == [[1, 2], []]
    assert JaggedTensor.from_arrow(pa.chunked_array([], type=pa.list_(pa.float32()))).tolist() == []


def test_extension_arrays_are_what_they_store() -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2,))
    array = pa.ExtensionArray.from_storage(kind, pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)))
    assert JaggedTensor.from_arrow(array).tolist() == [[1, 2], [3, 4]]


def test_memory_outlives_its_owner() -> None:
    array = JaggedTensor.from_lengths(torch.arange(1000), [400, 600]).to_arrow()
    jt = JaggedTensor.from_arrow(pa.array([list(range(1000))]))
    torch.zeros(100_000)
    assert array.values.to_pylist() == jt.values.tolist() == list(range(1000))


@pytest.mark.parametrize(
    ("rows", "where"), [([[1, None], []], "1 of 2 items of int64"), ([[1], None, [2]], "1 of 3 items of list<item: int64>")]
)
def test_nulls_are_refused(rows: list[Any], where: str) -> None:
    with pytest.raises(
        FormatError, match=f"from_arrow: {where} are null, and tensors cannot hold nulls: fill or drop them first"
    ):
        JaggedTensor.from_arrow(pa.array(rows))


def test_nulls_outside_a_slice_do_not_matter() -> None:
    assert JaggedTensor.from_arrow(pa.array([None, [None], [1, 2]])[2:]).tolist() == [[1, 2]]


def test_refusals() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(3), [1, 2])
    with pytest.raises(DtypeError, match=r"to_arrow: numpy has no dtype for torch.bfloat16"):
        jt.to(torch.bfloat16).to_arrow()
    with pytest.raises(DtypeError, match=r"to_arrow: pyarrow has no type for torch.complex64"):
        jt.to(torch.complex64).to_arrow()
    with pytest.raises(GradientError, match="to_arrow: pyarrow keeps no gradients"):
        jt.clone().requires_grad_().to_arrow()
    with pytest.raises(DtypeError, match="from_arrow: a tensor cannot hold string"):
        JaggedTensor.from_arrow(pa.array([["a"]]))
    with pytest.raises(CallError, match="from_arrow takes an array of lists, got an array of int64"):
        JaggedTensor.from_arrow(pa.array([1, 2]))
    with pytest.raises(CallError, match="from_arrow takes a pyarrow array of lists, got list"):
        JaggedTensor.from_arrow([[1]])
    strided = JaggedTensor(torch.zeros(3, 4)[:, ::2], Structure.from_lengths(torch.tensor([1, 2])))
    with pytest.warns(CopyWarning, match="to_arrow copied the values: the values are not contiguous"):
        strided.to_arrow()
    unread = JaggedTensor.from_csr(torch.zeros(3), torch.tensor([0, 1, 3]), validate=False)
    with no_sync(strict=True), pytest.raises(SyncError, match="to_arrow needs lengths on the host"):
        unread.to_arrow()


@given(samples((later_dim, independent), dtypes=(torch.float32,)))
def test_rows_of_other_dims_are_refused(sample: Sample) -> None:
    with pytest.raises(FormatError, match=r"to_arrow: the format cannot hold rows of (dim 1|the dims 0 and 1)"):
        sample.jt.to_arrow()
