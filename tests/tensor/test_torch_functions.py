"""torch's small names on a ragged tensor: casts, copies of its form, comparisons, a dim more or less, padding to a length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate import JaggedTensor, no_sync
from serrate.errors import CallError, ShapeError, SyncError
from tests.tensor.compositions import Sample, samples


def ragged() -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.arange(10.0).view(5, 2), [2, 0, 3]).with_hint(reuse="high")


@pytest.mark.parametrize("name", ["float", "double", "half", "bfloat16", "int", "long", "bool"])
def test_casts(name: str) -> None:
    jt = ragged()
    cast = getattr(jt, name)()
    assert cast.dtype == getattr(jt.values, name)().dtype
    assert (cast.structure, cast.hints) == (jt.structure, jt.hints)


@given(samples())
def test_copies_of_the_form_have_its_rows(sample: Sample) -> None:
    jt = sample.jt
    for like in (torch.zeros_like(jt), torch.full_like(jt, 1), torch.empty_like(jt, dtype=torch.int64)):
        assert like.structure is jt.structure
        assert like.values.shape == jt.values.shape
    assert torch.empty_like(jt, dtype=torch.int64).dtype is torch.int64


@given(samples())
def test_equal_looks_at_what_exists(sample: Sample) -> None:
    jt = sample.jt
    assert torch.equal(jt, jt.clone())
    assert torch.equal(jt, jt.contiguous())
    if jt.numel():
        other = jt.with_values(~jt.values if jt.dtype is torch.bool else jt.values + 1)
        assert not torch.equal(jt, other)
    assert not torch.equal(jt, JaggedTensor.from_lengths(torch.zeros(99, 7), [98, 1]))


def test_equal_and_allclose() -> None:
    jt = ragged()
    near = jt.with_values(jt.values * (1 + 1e-6))
    assert torch.allclose(jt, near)
    assert not torch.equal(jt, near)
    assert not torch.allclose(jt, near, rtol=0, atol=1e-9)
    with pytest.raises(CallError, match=r"torch\.equal compares two ragged tensors, got a Tensor"):
        torch.equal(jt, jt.to_padded())
    with no_sync(strict=True), pytest.raises(SyncError, match=r"^torch\.equal needs"):
        torch.equal(jt, near)


def test_one_dim_more_or_less() -> None:
    jt = ragged()
    for more in (jt.unsqueeze(-1), jt.unsqueeze(3), torch.unsqueeze(jt, -1)):
        assert str(more.shape) == "(3, r0, 2, 1)"
        assert more.squeeze(-1).tolist() == torch.squeeze(more, 3).tolist() == jt.tolist()
    assert jt.squeeze(2) is jt
    assert jt.unsqueeze(0).shape[0] == 1
    for dim, message in ((0, "counts rows"), (1, "is ragged")):
        with pytest.raises(ShapeError, match=f"squeeze: dim {dim} {message}"):
            jt.squeeze(dim)
    with pytest.raises(ShapeError, match="dim 5 does not exist"):
        jt.unsqueeze(5)


def test_torch_functions_are_the_methods() -> None:
    jt, order = ragged(), torch.tensor([2, 0])
    assert torch.index_select(jt, 0, order).tolist() == jt.index_select(0, order).tolist() == jt[order].tolist()
    assert jt.index_select(-1, torch.tensor([1])).tolist() == jt[..., 1:].tolist()
    assert torch.equal(torch.select(jt, 2, 1), jt[..., 1])
    assert torch.equal(jt.select(0, 2), jt[2])
    assert [len(piece) for piece in jt.chunk(2)] == [len(piece) for piece in torch.chunk(jt, 2)] == [2, 1]
    assert (torch.numel(jt), jt.cpu() is jt, torch.clone(jt).tolist() == jt.tolist()) == (10, True, True)
    assert not torch.detach(jt.clone().requires_grad_()).requires_grad


@given(samples(), st.integers(0, 9))
def test_padding_to_a_length_cuts_or_fills(sample: Sample, room: int) -> None:
    jt = sample.jt
    whole, dim = jt.to_padded(1), jt.jagged_dims[-1]
    missing = list(whole.shape)
    missing[dim] = max(room - whole.shape[dim], 0)
    wanted = torch.cat([whole, whole.new_ones(missing)], dim).narrow(dim, 0, room)
    assert jt.to_padded(1, max_length=room).equal(wanted)


def test_padding_to_a_known_length_needs_no_host() -> None:
    jt = JaggedTensor.from_csr(torch.ones(3), torch.tensor([0, 1, 3]), max_length=2, validate=False)
    with no_sync(strict=True):
        assert jt.to_padded(max_length=4).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    with pytest.raises(ShapeError, match="max_length must not be negative, got -1"):
        jt.to_padded(max_length=-1)
