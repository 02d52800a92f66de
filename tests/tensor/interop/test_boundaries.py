"""Rows as attention kernels and grouped matrix products are told of them, with the real functions of torch.

In: samples, and torch's own kernels. Out: failures where boundaries or memory differ.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from serrate.errors import CopyWarning, FormatError, StructureError, SyncError
from serrate.tensor import JaggedTensor, no_sync
from tests.tensor.compositions import Sample, gaps, independent, later_dim, nested, one_level, packed_columns, padded, samples


@given(samples((one_level,)))
def test_cu_seqlens_are_shared(sample: Sample) -> None:
    jt = sample.jt
    values, cu_seqlens, longest = jt.to_cu_seqlens(copy=False)
    lengths = [len(row) for row in sample.rows]
    assert values is jt.values
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    assert longest == max(lengths, default=0)
    back = JaggedTensor.from_cu_seqlens(values, cu_seqlens, longest, copy=False)
    assert back.values is values and back.offsets.data_ptr() == cu_seqlens.data_ptr()
    assert back.tolist() == sample.rows


@given(samples((one_level,)))
def test_group_ends_are_shared(sample: Sample) -> None:
    values, ends = sample.jt.to_group_ends(copy=False)
    assert values is sample.jt.values and ends.dtype == torch.int32
    assert ends.tolist() == sample.jt.offsets.tolist()[1:]
    assert JaggedTensor.from_group_ends(values, ends, copy=False).tolist() == sample.rows


@pytest.mark.parametrize("bridge", ["to_cu_seqlens", "to_group_ends"])
@given(sample=samples((gaps, padded), dtypes=(torch.float32,)))
def test_gaps_are_closed_by_a_copy(bridge: str, sample: Sample) -> None:
    with pytest.warns(CopyWarning, match=f"{bridge} copied the values: the rows have gaps between them"):
        found = getattr(sample.jt, bridge)()
    assert found.values.tolist() == [position for row in sample.rows for position in row]


@pytest.mark.parametrize("bridge", ["to_cu_seqlens", "to_group_ends"])
@given(sample=samples((nested, later_dim, independent, packed_columns), dtypes=(torch.float32,)))
def test_other_compositions_are_refused(bridge: str, sample: Sample) -> None:
    with pytest.raises(FormatError, match=f"{bridge}: the format cannot hold "):
        getattr(sample.jt, bridge)()


def test_grouped_mm_takes_the_ends() -> None:
    jt = JaggedTensor.from_lengths(torch.randn(7, 16, dtype=torch.bfloat16), [2, 0, 5])
    weights = torch.randn(3, 16, 8, dtype=torch.bfloat16)
    values, ends = jt.to_group_ends()
    out = JaggedTensor.from_group_ends(torch.nn.functional.grouped_mm(values, weights, offs=ends), ends)
    for row, wanted, weight in zip(out, jt, weights, strict=True):
        torch.testing.assert_close(row, wanted @ weight)


def test_values_behind_the_last_end_belong_to_nobody() -> None:
    values = torch.arange(6)
    jt = JaggedTensor.from_group_ends(values, torch.tensor([2, 5]))
    assert jt.tolist() == [[0, 1], [2, 3, 4]] and jt.values.data_ptr() == values.data_ptr()
    with pytest.raises(StructureError, match="they end at 7, but the values have 6 positions"):
        JaggedTensor.from_group_ends(values, torch.tensor([2, 7]))
    with pytest.raises(StructureError, match="must not decrease"):
        JaggedTensor.from_group_ends(values, torch.tensor([3, 2]))


def test_max_seqlen_is_an_upper_bound() -> None:
    values, cu = torch.zeros(5), torch.tensor([0, 2, 5])
    assert JaggedTensor.from_cu_seqlens(values, cu, 8).max_length == 3
    with pytest.raises(StructureError, match="max_seqlen=2 was given, but the longest row has length 3"):
        JaggedTensor.from_cu_seqlens(values, cu, 2)
    there = JaggedTensor.from_cu_seqlens(values.to("meta"), cu.to("meta"), 3)
    with no_sync():
        assert there.max_length == there.to_cu_seqlens().max_seqlen == 3


def test_the_longest_is_a_host_fact() -> None:
    jt = JaggedTensor.from_csr(torch.zeros(3), torch.tensor([0, 1, 3]), validate=False)
    with no_sync(strict=True):
        assert jt.to_group_ends().ends.tolist() == [1, 3]
        with pytest.raises(SyncError, match="to_cu_seqlens needs lengths on the host"):
            jt.to_cu_seqlens()


def test_copies_when_asked_and_gradients() -> None:
    jt = JaggedTensor.from_starts(torch.ones(6, requires_grad=True), [0, 4], [2, 2])
    (jt.to_cu_seqlens(copy=True).values * 2).sum().backward()
    assert jt.values.grad is not None and jt.values.grad.tolist() == [2, 2, 0, 0, 2, 2]
    plain = JaggedTensor.from_lengths(torch.ones(3), [1, 2])
    assert plain.to_group_ends(copy=True).values.data_ptr() != plain.values.data_ptr()
