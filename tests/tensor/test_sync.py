"""Host copies: who makes them, who needs none, and what `no_sync()` says to those who do.

In: structures whose lengths are unread (on the meta device, or on the CPU under strict rules). Out: failures where a copy
slips through or is refused without need.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import pytest
import torch

from serrate.errors import SyncError
from serrate.tensor import JaggedTensor, Structure, no_sync
from serrate.tensor.sync import host_copy

READERS: dict[str, Callable[[JaggedTensor], object]] = {
    "max_length": lambda jt: jt.max_length,
    "min_length": lambda jt: jt.min_length,
    "sparsity": lambda jt: jt.sparsity,
    "variance": lambda jt: jt.variance,
    "to_padded": lambda jt: jt.to_padded(),
    "unbind": lambda jt: jt.unbind(),
    "to_list": lambda jt: jt.to_list(),
    "describe": lambda jt: jt.describe(),
    "jt[i]": lambda jt: jt[0],
    "jt[a:b]": lambda jt: jt[:1],
    "comparing two structures": lambda jt: jt.structure == unread(jt.device).structure,
}


def unread(device: torch.device | str = "cpu") -> JaggedTensor:
    return JaggedTensor.from_csr(torch.zeros(7, 2, device=device), torch.tensor([0, 3, 3, 7], device=device), validate=False)


@pytest.mark.parametrize("why", READERS)
def test_every_reader_is_refused_by_name(why: str) -> None:
    with no_sync(strict=True), pytest.raises(SyncError) as caught:
        READERS[why](unread())
    assert str(caught.value) == (
        f"{why} needs lengths on the host, and no_sync() forbids the copy from cpu: "
        "do it once before, which is remembered, or give max_length=, min_length= and total= where the structure is built"
    )
    with no_sync(), pytest.raises(SyncError, match="forbids the copy from meta"):
        READERS[why](unread("meta"))
    with no_sync():
        READERS[why](unread())


def test_construction_and_shape_facts_need_no_copy() -> None:
    with no_sync(strict=True):
        jt = JaggedTensor.from_csr(torch.zeros(7, 2), torch.tensor([0, 3, 3, 7]))
        assert (len(jt), jt.num_rows, jt.total_elements, jt.ndim) == (3, 3, 7, 3)
        assert jt.lengths.tolist() == [3, 0, 4]
        assert "lengths=not on the host" in repr(jt)
        assert hash(jt.structure) and jt.structure == jt.detach().structure
        square = JaggedTensor.from_csr(torch.zeros(7), torch.tensor([[0, 3], [0, 4]]))
        assert square.structure.max_length(0) == 1
        assert JaggedTensor.from_lengths(torch.zeros(7), torch.tensor([3, 0, 4])).offsets.tolist() == [0, 3, 3, 7]


def test_supplied_metadata_spares_the_copy() -> None:
    with no_sync(strict=True):
        jt = JaggedTensor.from_csr(torch.ones(7), torch.tensor([0, 3, 3, 7]), max_length=4, min_length=0)
        assert jt.to_padded().tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
        assert (jt.max_length, jt.min_length, jt.sparsity) == (4, 0, pytest.approx(7 / 12))


def test_rows_given_as_a_list_are_known_on_the_host() -> None:
    with no_sync(strict=True):
        jt = JaggedTensor.from_nested_list([[torch.ones(2), torch.ones(1)], [torch.ones(3)]])
        assert [len(part) for part in jt.unbind()] == [2, 1]
        assert jt[1:].max_length == 3


def test_what_was_read_once_is_remembered() -> None:
    jt = unread()
    jt.unbind()
    with no_sync(strict=True):
        assert jt.max_length == 4
        assert jt[1:].max_length == 4


def test_padded_values_need_their_total() -> None:
    x, lengths = torch.ones(3, 4), torch.tensor([3, 0, 4])
    with no_sync(strict=True):
        with pytest.raises(SyncError, match="from_padded needs lengths on the host"):
            JaggedTensor.from_padded(x, lengths)
        assert JaggedTensor.from_padded(x, lengths, total=7).values.tolist() == [1] * 7


def test_validation_by_request_is_a_copy() -> None:
    with no_sync(), pytest.raises(SyncError, match="validating offsets needs lengths on the host"):
        Structure.from_offsets(torch.tensor([0, 1], device="meta"), validate=True)
    with no_sync(), pytest.raises(SyncError, match="validating lengths needs lengths on the host"):
        Structure.from_lengths(torch.tensor([0, 1], device="meta"), validate=True)


def test_the_context_ends_and_nests() -> None:
    tensor = torch.zeros(1)
    with no_sync(strict=True):
        with no_sync(), pytest.raises(SyncError):
            host_copy(tensor, "a test")
        with pytest.raises(SyncError):
            host_copy(tensor, "a test")
    assert host_copy(tensor, "a test") is not None
    with pytest.raises(ZeroDivisionError), no_sync(strict=True):
        _ = 1 / 0
    assert host_copy(tensor, "a test") is not None


def test_the_context_stays_in_its_own() -> None:
    with no_sync(strict=True):
        assert contextvars.Context().run(host_copy, torch.zeros(1), "elsewhere") is not None


@pytest.mark.gpu
def test_nothing_hides_a_copy_from_the_device() -> None:
    offsets = torch.tensor([0, 3, 3, 7], device="cuda")
    values = torch.ones(7, 2, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with no_sync():
            jt = JaggedTensor.from_csr(values, offsets, max_length=4, min_length=0)
            padded = jt.to_padded()
            back = JaggedTensor.from_padded(padded, jt.lengths, total=7)
            back.values.sum().backward()
            nested = JaggedTensor.from_csr(values, torch.zeros(2, 3, dtype=torch.int64, device="cuda"))
            assert "not on the host" in repr(nested)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(back.values, values) and torch.equal(back.offsets, offsets)
    assert [len(row) for row in jt] == [3, 0, 4]
    with no_sync():
        assert jt[1:].max_length == 4
