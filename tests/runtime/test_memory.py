"""Memory for large results: reused, bounded, and given back."""

from __future__ import annotations

import gc

import pytest
import torch

from serrate.cli.peak import held
from serrate.runtime import memory

MIB = 1 << 20
CPU = torch.device("cpu")


def _empty(mib: int) -> torch.Tensor:
    return memory.empty((mib * MIB,), torch.uint8, CPU)


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    gc.collect()
    memory.trim()


def test_memory_that_is_gone_is_used_again() -> None:
    first = _empty(8)
    place = first.data_ptr()
    view = first[MIB:]
    del first
    assert memory.kept() == 0, "a view keeps its memory"
    del view
    assert memory.kept() == 8 * MIB
    assert _empty(8).data_ptr() == place


def test_memory_is_used_by_one_at_a_time() -> None:
    for _ in range(3):
        one, other = _empty(8).fill_(1), _empty(8).fill_(2)
        assert one.data_ptr() != other.data_ptr() and one.eq(1).all()
        del one, other
    assert memory.kept() == 16 * MIB


def test_what_was_used_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LIMIT", 20 * MIB)
    held = {size: _empty(size) for size in (4, 8, 16)}
    places = {size: t.data_ptr() for size, t in held.items()}
    for size in (4, 8, 16):
        del held[size]
    # 4 + 8 + 16 are more than 20, so the oldest two are gone
    assert memory.kept() == 16 * MIB
    assert _empty(16).data_ptr() == places[16]


def test_more_than_all_that_may_be_kept_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LIMIT", 4 * MIB)
    _empty(8)
    assert memory.kept() == 0


def test_trim_says_how_much_it_was() -> None:
    _empty(8)
    assert memory.trim() == 8 * MIB
    assert memory.kept() == 0


def test_small_tensors_are_torchs() -> None:
    memory.empty((MIB // 2,), torch.uint8, CPU)
    assert memory.kept() == 0


def test_a_result_that_the_garbage_collector_frees_may_come_back_at_any_time() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own, self.result = self, _empty(4)

    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    try:
        # The collector runs at each of the next allocations in turn, also while another block is being given back.
        for turn in range(240):
            gc.disable()
            plain = _empty(4)
            Cycle()
            gc.set_threshold(1 + turn % 60)
            gc.enable()
            del plain
    finally:
        gc.set_threshold(*before)
        gc.enable()
        gc.unfreeze()
    assert memory.kept() >= 4 * MIB


def test_a_result_takes_no_more_memory_than_it_needs() -> None:
    before = held()
    whole = _empty(7).fill_(1)
    after = held()
    assert before is None or after is None or after - before < 7.6 * MIB, "a huge page of which a half is used"
    assert whole.numel() == 7 * MIB
