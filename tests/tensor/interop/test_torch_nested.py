"""NestedTensors of both layouts, there and back, against torch's own rows.

In: samples of every composition. Out: failures where rows differ, memory is not shared as promised, or gradients are lost.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from serrate.errors import CallError, CopyError, CopyWarning, FormatError
from serrate.tensor import JaggedTensor, Structure
from tests.tensor.compositions import (
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

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def rows_of(tensor: Tensor) -> list[Any]:
    return [row.tolist() for row in tensor.unbind()]


def shares(one: Tensor, other: Tensor) -> bool:
    return one.numel() == 0 or one.data_ptr() == other.data_ptr()


@given(samples((one_level, gaps, padded)))
def test_jagged_layout_shares_rows_and_gaps(sample: Sample) -> None:
    jt = sample.jt
    there = jt.to_torch_nested(copy=False)
    assert there.layout is torch.jagged
    assert rows_of(there) == sample.rows
    assert shares(there.values(), jt.values)
    back = JaggedTensor.from_torch_nested(there, copy=False)
    assert back.tolist() == sample.rows
    assert shares(back.values, jt.values)
    assert back.structure == jt.structure
    if jt.structure.format == "csr":
        assert back.offsets.data_ptr() == jt.offsets.data_ptr()


@given(samples((later_dim,)))
def test_jagged_layout_of_a_later_dim(sample: Sample) -> None:
    jt = sample.jt
    there = jt.to_torch_nested(copy=False)
    # torch counts rows in dim 0, and the dims before the ragged one come after it.
    assert there.dim() == jt.ndim and there.size(0) == jt.num_rows
    assert rows_of(there) == [[each[row] for each in sample.rows] for row in range(jt.num_rows)]
    back = JaggedTensor.from_torch_nested(there, copy=False)
    assert shares(back.values, jt.values) and back.tolist() == rows_of(there)


def test_a_transposed_ragged_dim_is_read_in_place() -> None:
    values = torch.arange(28.0).view(7, 4)
    plain = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 2, 7]))
    jt = JaggedTensor.from_torch_nested(plain.transpose(1, 2), copy=False)
    assert str(jt.shape) == "(3, 4, r0)"
    assert jt.values.data_ptr() == values.data_ptr() and jt.values.is_contiguous()
    assert [row.tolist() for row in jt] == [row.T.tolist() for row in plain.unbind()]
    again = jt.to_torch_nested(copy=False)
    assert rows_of(again) == rows_of(plain.transpose(1, 2))
    assert rows_of(again.transpose(1, 2)) == rows_of(plain)


def test_lengths_of_torch_are_gaps_here() -> None:
    values = torch.arange(30.0).view(3, 5, 2)
    narrow = torch.nested.narrow(values, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 3]), layout=torch.jagged)
    jt = JaggedTensor.from_torch_nested(narrow, copy=False)
    assert jt.format == "gaps" and jt.values.data_ptr() == values.data_ptr()
    assert jt.tolist() == rows_of(narrow)
    assert rows_of(jt.to_torch_nested()) == rows_of(narrow)
    held = torch.nested.nested_tensor_from_jagged(torch.arange(7.0), torch.tensor([0, 3, 7]), lengths=torch.tensor([2, 3]))
    assert JaggedTensor.from_torch_nested(held).tolist() == [[0, 1], [3, 4, 5]]


def test_tensors_of_one_structure_can_be_added_in_torch() -> None:
    jt = JaggedTensor.from_lengths(torch.arange(3.0), [2, 1])
    both = jt.to_torch_nested() + jt.with_values(jt.values * 10).to_torch_nested()
    assert rows_of(both) == [[0, 11], [22]]


@given(samples((one_level, packed_columns)))
def test_strided_layout_shares_rows_back_to_back(sample: Sample) -> None:
    jt = sample.jt
    there = jt.to_torch_nested("strided", copy=False)
    assert there.layout is torch.strided and there.is_nested
    assert rows_of(there) == sample.rows
    if not sample.rows:
        return
    assert shares(there.values(), jt.values)
    back = JaggedTensor.from_torch_nested(there, copy=False)
    assert shares(back.values, jt.values)
    # Counts that are all the same are an inner dim in torch, and come back as one.
    assert back.tolist() == sample.rows


@given(samples((gaps, padded, later_dim, padded_columns), dtypes=(torch.float32, torch.int64)))
def test_strided_layout_copies_the_rest_and_says_so(sample: Sample) -> None:
    jt = sample.jt
    if jt.num_rows == 0:
        return
    with pytest.warns(CopyWarning, match="to_torch_nested copied the values: "):
        there = jt.to_torch_nested("strided")
    with pytest.raises(CopyError, match=r"to_torch_nested: copy=False, but .*: allow the copy with copy=True"):
        jt.to_torch_nested("strided", copy=False)
    wanted = sample.rows
    if jt.structure.dims == (1,):
        wanted = [[each[row] for each in sample.rows] for row in range(jt.num_rows)]
    assert rows_of(there) == wanted
    assert JaggedTensor.from_torch_nested(there).tolist() == wanted


def test_strided_tensors_that_are_not_contiguous_are_copied() -> None:
    plain = torch.nested.nested_tensor([torch.arange(8.0).view(2, 4), torch.arange(12.0).view(3, 4)])
    turned = plain.transpose(1, 2)
    with pytest.warns(CopyWarning, match="the rows of the NestedTensor are not contiguous"):
        jt = JaggedTensor.from_torch_nested(turned)
    assert jt.tolist() == rows_of(turned)
    with pytest.raises(CopyError):
        JaggedTensor.from_torch_nested(turned, copy=False)


@pytest.mark.parametrize("layout", ["jagged", "strided"])
@pytest.mark.parametrize("gapped", [False, True])
def test_gradients_flow_both_ways(layout: str, gapped: bool) -> None:
    values = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)

    def build(values: Tensor) -> JaggedTensor:
        if gapped:
            return JaggedTensor.from_starts(values, [0, 3], [2, 4])
        return JaggedTensor.from_lengths(values, [2, 0, 5])

    def there_and_back(values: Tensor) -> Tensor:
        return JaggedTensor.from_torch_nested(build(values).to_torch_nested(layout, copy=None)).contiguous().values * 3

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CopyWarning)
        assert torch.autograd.gradcheck(there_and_back, values)


@pytest.mark.parametrize("layout", ["jagged", "strided"])
def test_copies_when_asked(layout: str) -> None:
    jt = JaggedTensor.from_lengths(torch.arange(3.0), [2, 1])
    there = jt.to_torch_nested(layout, copy=True)
    assert there.values().data_ptr() != jt.values.data_ptr()
    assert JaggedTensor.from_torch_nested(there, copy=True).values.data_ptr() != there.values().data_ptr()


@given(samples((nested, equal_parts, nested_gaps, independent), dtypes=(torch.float32,)))
def test_what_torch_cannot_hold_is_refused(sample: Sample) -> None:
    for layout in ("jagged", "strided"):
        with pytest.raises(
            FormatError, match=r"to_torch_nested: the format cannot hold (nested rows of \d levels|rows of the dims 0 and 1)"
        ):
            sample.jt.to_torch_nested(layout)


def test_other_refusals() -> None:
    columns = Structure.from_lengths(torch.tensor([1, 2])).with_columns(torch.tensor([2, 1]))
    with pytest.raises(FormatError, match="the format cannot hold rows with columns: use to_torch_nested\\(layout='strided'\\)"):
        JaggedTensor(torch.zeros(4), columns).to_torch_nested()
    deep = Structure.from_lengths(torch.tensor([2]), torch.tensor([1, 2])).with_columns(torch.tensor([2, 1]))
    with pytest.raises(
        FormatError, match=r"the format cannot hold nested rows of 2 levels with columns: convert the tensors of jt.unbind\(\)"
    ):
        JaggedTensor(torch.zeros(4), deep).to_torch_nested("strided")
    with pytest.raises(CallError, match="layout='csr' is not one of 'jagged', 'strided'"):
        JaggedTensor.from_list([torch.zeros(1)]).to_torch_nested("csr")
    with pytest.raises(CallError, match="from_torch_nested takes a NestedTensor, got Tensor"):
        JaggedTensor.from_torch_nested(torch.zeros(2))
    with pytest.raises(FormatError, match="dim 3 of the NestedTensor is ragged"):
        JaggedTensor.from_torch_nested(torch.nested.nested_tensor([torch.zeros(1, 1, 2), torch.zeros(1, 1, 3)]))
    with pytest.raises(FormatError, match="the rows of the NestedTensor are scalars"):
        JaggedTensor.from_torch_nested(torch.nested.nested_tensor([torch.tensor(1.0)]))
