"""Keyed features by the documented layout of a KeyedJaggedTensor: lengths and values key by key.

In: random lengths for several keys. Out: failures where a key's rows, or the joined tensors, differ.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate.errors import CallError, CopyError, CopyWarning, DtypeError, FormatError, StructureError, SyncError
from serrate.tensor import JaggedTensor, no_sync

KEYED = st.integers(0, 4).flatmap(
    lambda samples: st.lists(st.lists(st.integers(0, 3), min_size=samples, max_size=samples), min_size=1, max_size=4)
)


@given(KEYED, st.sampled_from([torch.int32, torch.int64]))
def test_keys_share_one_tensor_of_values(lengths: list[list[int]], index: torch.dtype) -> None:
    flat = [length for own in lengths for length in own]
    keys = [f"feature {k}" for k in range(len(lengths))]
    values, weights = torch.arange(sum(flat)), torch.arange(sum(flat)) * 0.5
    tensor = torch.tensor(flat, dtype=index)
    found, weighing = JaggedTensor.from_keyed(keys, values, tensor, weights=weights, copy=False)
    rest = iter(range(sum(flat)))
    for key, own in zip(keys, lengths, strict=True):
        rows = [list(itertools.islice(rest, length)) for length in own]
        assert found[key].tolist() == rows
        assert weighing[key].tolist() == [[number * 0.5 for number in row] for row in rows]
        assert weighing[key].structure is found[key].structure
        assert found[key].offsets.dtype == index
        assert found[key].values.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    back = JaggedTensor.to_keyed(found, weights=weighing, copy=False)
    assert back.keys == keys
    assert torch.equal(back.values, values) and (not flat or back.values.data_ptr() == values.data_ptr())
    assert back.lengths.tolist() == flat
    assert back.offsets.tolist() == [0, *itertools.accumulate(flat)]
    assert back.weights is not None and torch.equal(back.weights, weights)


def test_keys_with_different_numbers_of_samples() -> None:
    found = JaggedTensor.from_keyed(["a", "b"], torch.arange(4), torch.tensor([1, 1, 2]), rows_per_key=[2, 1])
    assert (found["a"].tolist(), found["b"].tolist()) == ([[0], [1]], [[2, 3]])


def test_tensors_that_lie_apart_are_copied() -> None:
    apart = {
        "a": JaggedTensor.from_lengths(torch.arange(3), [1, 2]),
        "b": JaggedTensor.from_starts(torch.arange(5), [0, 3], [1, 2]),
    }
    with pytest.warns(CopyWarning, match="to_keyed copied the values: the values of the keys do not lie back to back in memory"):
        joined = JaggedTensor.to_keyed(apart)
    assert joined.values.tolist() == [0, 1, 2, 0, 3, 4]
    assert joined.weights is None
    with pytest.raises(CopyError):
        JaggedTensor.to_keyed(apart, copy=False)


def test_swapped_keys_are_not_taken_for_neighbours() -> None:
    found = JaggedTensor.from_keyed(["a", "b"], torch.arange(4), torch.tensor([1, 0, 1, 2]))
    joined = JaggedTensor.to_keyed({"b": found["b"], "a": found["a"]}, copy=True)
    assert (joined.keys, joined.values.tolist(), joined.lengths.tolist()) == (["b", "a"], [1, 2, 3, 0], [1, 2, 1, 0])


def test_gradients_meet_in_the_values() -> None:
    values = torch.ones(4, requires_grad=True)
    found = JaggedTensor.from_keyed(["a", "b"], values, torch.tensor([1, 0, 1, 2]))
    (JaggedTensor.to_keyed(found, copy=True).values * torch.arange(4.0)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0, 1, 2, 3]


def test_wrong_keys() -> None:
    values, lengths = torch.arange(4), torch.tensor([1, 0, 1, 2])
    with pytest.raises(StructureError, match="4 lengths do not divide among 3 keys: give rows_per_key="):
        JaggedTensor.from_keyed(["a", "b", "c"], values, lengths)
    with pytest.raises(StructureError, match=r"rows_per_key=\[1, 1\] must have one number for each of 2 keys and sum to the 4"):
        JaggedTensor.from_keyed(["a", "b"], values, lengths, rows_per_key=[1, 1])
    with pytest.raises(StructureError, match="lengths must sum to the number of values"):
        JaggedTensor.from_keyed(["a", "b"], values[:3], lengths)
    with pytest.raises(CallError, match="a key must not repeat"):
        JaggedTensor.from_keyed(["a", "a"], values, lengths)
    with pytest.raises(CallError, match="give at least one key"):
        JaggedTensor.to_keyed({})
    one = JaggedTensor.from_lengths(torch.zeros(1), [1])
    with pytest.raises(DtypeError, match="all keys need the same inner dims, dtype and device: 'b'"):
        JaggedTensor.to_keyed({"a": one, "b": one.to(torch.int64)})
    with pytest.raises(FormatError, match="weights need the keys and the rows of the values"):
        JaggedTensor.to_keyed({"a": one}, weights={"b": one})
    with no_sync(strict=True), pytest.raises(SyncError, match="from_keyed needs lengths on the host"):
        JaggedTensor.from_keyed(["a", "b"], values, lengths)
