"""numpy arrays with offsets, and rows as arrays of objects, there and back.

In: samples of every composition. Out: failures where rows differ or memory is not shared as promised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from serrate.errors import CallError, CopyError, CopyWarning, DtypeError, GradientError, StructureError, SyncError
from serrate.tensor import JaggedTensor, no_sync
from tests.tensor.compositions import ALL_DTYPES, Sample, equal_parts, nested, one_level, samples

HELD = tuple(dtype for dtype in ALL_DTYPES if dtype is not torch.bfloat16)


def numbers(item: Any) -> Any:
    return [numbers(part) for part in item] if item.dtype == object else item.tolist()


def leaves(item: Any) -> list[Any]:
    return [leaf for part in item for leaf in leaves(part)] if item.dtype == object else [item]


@given(samples(dtypes=HELD))
def test_rows_of_every_composition_share_the_values(sample: Sample) -> None:
    jt = sample.jt
    rows = jt.to_numpy(copy=False)
    assert rows.dtype == object
    assert numbers(rows) == sample.rows
    for row in leaves(rows):
        assert row.size == 0 or np.shares_memory(row, jt.values.numpy())
    for row in leaves(jt.to_numpy(copy=True)):
        assert not np.shares_memory(row, jt.values.numpy())


@given(samples((one_level, nested, equal_parts), dtypes=HELD))
def test_values_and_offsets_are_shared(sample: Sample) -> None:
    jt = sample.jt
    values, offsets = jt.values.numpy(), [level.numpy() for level in jt.structure.offsets]
    back = JaggedTensor.from_numpy(values, offsets if len(offsets) > 1 else offsets[0], copy=False)
    assert back.tolist() == sample.rows
    assert back.values.numel() == 0 or back.values.data_ptr() == jt.values.data_ptr()
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(back.structure.offsets, jt.structure.offsets, strict=True))
    copied = JaggedTensor.from_numpy(values, offsets if len(offsets) > 1 else offsets[0], copy=True)
    assert copied.values.numel() == 0 or copied.values.data_ptr() != jt.values.data_ptr()


@given(samples((one_level, nested), dtypes=HELD))
def test_rows_in_separate_arrays_are_put_together(sample: Sample) -> None:
    rows = sample.jt.to_numpy()
    if not leaves(rows):
        return
    for given_rows in (rows, list(rows)):
        with pytest.warns(CopyWarning, match="from_numpy copied the values: rows in separate arrays must be concatenated"):
            back = JaggedTensor.from_numpy(given_rows)
        assert back.tolist() == sample.rows and back.dtype == sample.jt.dtype
    with pytest.raises(CopyError):
        JaggedTensor.from_numpy(rows, copy=False)


def test_separate_arrays_of_any_order(recwarn: pytest.WarningsRecorder) -> None:
    rows = [np.arange(3)[::-1], np.arange(2, dtype=">i8")]
    assert JaggedTensor.from_numpy(rows, copy=True).tolist() == [[2, 1, 0], [0, 1]]
    assert not recwarn.list


def test_an_array_of_lists_of_numbers() -> None:
    assert JaggedTensor.from_numpy(np.array([[1, 2], [3]], dtype=object), copy=True).tolist() == [[1, 2], [3]]


@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint32", "uint64", "int16", ">i4", ">i8"])
def test_offsets_of_every_integer_dtype(dtype: str) -> None:
    jt = JaggedTensor.from_numpy(np.arange(3), np.array([0, 1, 3], dtype=dtype))
    assert jt.tolist() == [[0], [1, 2]]
    assert JaggedTensor.from_numpy(np.arange(3), np.array([3, 1, 0], dtype=dtype)[::-1]).tolist() == [[0], [1, 2]]


def test_offsets_may_be_plain_numbers() -> None:
    assert JaggedTensor.from_numpy(np.arange(3), [0, 1, 3]).tolist() == [[0], [1, 2]]
    assert JaggedTensor.from_numpy(np.arange(3), [[0, 2], [0, 1, 3]]).tolist() == [[[0], [1, 2]]]


def test_arrays_that_tensors_cannot_step_through_are_copied() -> None:
    for array, reason in (
        (np.arange(3)[::-1], "tensors cannot have this array's strides"),
        (np.arange(3, dtype=">i4"), "its byte order is not this machine's"),
    ):
        with pytest.warns(CopyWarning, match=f"from_numpy copied the values: {reason}"):
            assert JaggedTensor.from_numpy(array, [0, 1, 3]).values.tolist() == array.tolist()
        with pytest.raises(CopyError, match=reason):
            JaggedTensor.from_numpy(array, [0, 1, 3], copy=False)
    every_other = np.arange(6)[::2]
    assert JaggedTensor.from_numpy(every_other, [0, 1, 3], copy=False).tolist() == [[0], [2, 4]]


def test_read_only_arrays_are_shared(recwarn: pytest.WarningsRecorder) -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert JaggedTensor.from_numpy(array, [0, 1, 3], copy=False).values.data_ptr() == array.ctypes.data
    assert not recwarn.list


def test_refusals() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(3), [1, 2])
    with pytest.raises(DtypeError, match=r"to_numpy: numpy has no dtype for torch.bfloat16: convert first"):
        jt.to(torch.bfloat16).to_numpy()
    with pytest.raises(GradientError, match="to_numpy: numpy keeps no gradients"):
        jt.clone().requires_grad_().to_numpy()
    with pytest.raises(DtypeError, match="from_numpy: a tensor cannot hold <U1: convert the array to numbers first"):
        JaggedTensor.from_numpy(np.array(["a", "b"]), [0, 2])
    with pytest.raises(DtypeError, match="a tensor cannot hold"):
        JaggedTensor.from_numpy(np.zeros(2, dtype=np.longdouble), [0, 2])
    with pytest.raises(CallError, match="a single array needs offsets="):
        JaggedTensor.from_numpy(np.zeros(3))
    with pytest.raises(CallError, match="offsets= go with one array of values, got list"):
        JaggedTensor.from_numpy([1, 2], [0, 2])
    with pytest.raises(StructureError, match="they end at 2, but the values have 3 positions"):
        JaggedTensor.from_numpy(np.zeros(3), [0, 2])
    with pytest.raises(DtypeError, match=r"offsets must be int32 or int64, got torch.float64"):
        JaggedTensor.from_numpy(np.zeros(3), np.array([0.0, 3.0]))


def test_rows_are_host_facts() -> None:
    jt = JaggedTensor.from_csr(torch.zeros(3), torch.tensor([0, 1, 3]), validate=False)
    with no_sync(strict=True), pytest.raises(SyncError, match="to_numpy needs lengths on the host"):
        jt.to_numpy()
