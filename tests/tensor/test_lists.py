"""Nested lists of numbers and tensors, there and back.

In: samples of every composition with their rows in lists. Out: failures where `tolist`, `mask` or `from_nested_list` differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate.errors import CallError, SerrateError, StructureError, SyncError
from serrate.tensor import JaggedTensor, no_sync
from tests.tensor.compositions import ALL_DTYPES, Sample, gaps, nested, one_level, padded, samples

NUMBERS = st.recursive(st.lists(st.integers(-5, 5), max_size=4), lambda inner: st.lists(inner, max_size=3), max_leaves=6)


def depth(item: Any) -> int:
    return 0 if not isinstance(item, list) else 1 + max((depth(part) for part in item), default=0)


def even(item: Any, left: int) -> bool:
    """Whether every number is at the bottom of the same depth; an empty list may end a branch early."""
    if not isinstance(item, list):
        return left == 0
    return left > 0 and all(even(part, left - 1) for part in item)


@given(samples())
def test_every_composition_as_numbers(sample: Sample) -> None:
    assert sample.jt.tolist() == sample.rows


@given(NUMBERS)
def test_nested_lists_of_any_depth_come_back(rows: list[Any]) -> None:
    if not even(rows, depth(rows)):
        with pytest.raises(SerrateError):
            JaggedTensor.from_nested_list(rows)
    elif depth(rows) >= 2 or not rows:
        jt = JaggedTensor.from_nested_list(rows, dtype=torch.int32)
        assert jt.tolist() == rows
        assert (jt.dtype, jt.ndim) == (torch.int32, max(depth(rows), 2))


def test_dtypes_and_devices_of_numbers() -> None:
    assert JaggedTensor.from_nested_list([[1, 2], [3]]).dtype == torch.int64
    assert JaggedTensor.from_nested_list([[1, 2.5], []]).dtype == torch.get_default_dtype()
    assert JaggedTensor.from_nested_list([[True], []]).dtype == torch.bool
    assert JaggedTensor.from_nested_list([[], []]).dtype == torch.get_default_dtype()
    for dtype in ALL_DTYPES:
        assert JaggedTensor.from_nested_list([[1, 0], [1]], dtype=dtype).dtype == dtype
    there = JaggedTensor.from_nested_list([[1], [2, 3]], device="meta")
    assert (there.values.device.type, there.offsets.device.type, there.max_length) == ("meta", "meta", 2)
    moved = JaggedTensor.from_nested_list([[torch.ones(2)]], device="meta", dtype=torch.float16)
    assert (moved.values.device.type, moved.offsets.device.type, moved.dtype) == ("meta", "meta", torch.float16)


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        ([], "(0, r0)"),
        ([[], []], "(2, r0)"),
        ([[[]], []], "(2, r0, r1)"),
        ([[[1.5], []], []], "(2, r0, r1)"),
        ([torch.zeros(2, 3)], "(1, r0, 3)"),
        ([[torch.zeros(2, 3)]], "(1, r0, r1, 3)"),
    ],
)
def test_the_depth_is_that_of_the_deepest_list(rows: list[Any], shape: str) -> None:
    assert str(JaggedTensor.from_nested_list(rows).shape) == shape


def test_gradients_reach_tensors_in_lists() -> None:
    row = torch.ones(2, requires_grad=True)
    JaggedTensor.from_nested_list([[row], []], dtype=torch.float64).values.sum().backward()
    assert row.grad is not None and row.grad.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        ([1, 2], StructureError, "a list of plain numbers has no rows: give a list of lists, or use torch.tensor"),
        ([["a"]], CallError, "the leaves of a nested list must be tensors or numbers: leaf 0 is of type str"),
        (
            [[1], [torch.ones(1)]],
            CallError,
            "the leaves of a nested list must be tensors or numbers: leaf 1 is of type Tensor",
        ),
        ([[torch.ones(1)], [1]], CallError, "rows must be tensors: rows[1] is of type int"),
        (
            [[1], [[2]]],
            StructureError,
            "every branch of a nested list must have the same depth: at depth 2 item 0 is of type int, but another is a list",
        ),
    ],
)
def test_wrong_lists(rows: list[Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        JaggedTensor.from_nested_list(rows)
    assert str(caught.value) == message


@given(samples(dtypes=(torch.int64,)))
def test_masks_say_where_padded_values_exist(sample: Sample) -> None:
    jt = sample.jt
    mask = jt.mask()
    marked = jt.with_values(torch.ones_like(jt.values)).to_padded(fill=0)
    ragged = max(jt.jagged_dims) + 1
    assert mask.shape == marked.shape[:ragged]
    wanted = marked.bool()
    assert torch.equal(mask.view(*mask.shape, *(1 for _ in marked.shape[ragged:])).expand(marked.shape), wanted)


@given(samples((one_level, nested, gaps, padded)))
def test_masks_take_padded_values_back(sample: Sample) -> None:
    jt = sample.jt
    back = JaggedTensor.from_padded(jt.to_padded(fill=0), mask=jt.mask())
    assert torch.equal(back.values, jt.contiguous().values)


def test_numbers_and_masks_are_host_facts() -> None:
    for name in ("tolist", "mask"):
        jt = JaggedTensor.from_csr(torch.zeros(3), torch.tensor([0, 1, 3]), validate=False)
        with no_sync(strict=True), pytest.raises(SyncError, match=f"{name} needs lengths on the host"):
            getattr(jt, name)()
