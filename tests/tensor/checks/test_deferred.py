"""Checks that report late: when, with what words, once, and never by waiting.

In: wrong and right structures checked the way a device checks them, on the CPU; events that arrive when the test says so.
Out: failures where a mistake is not told, told too early, told twice, or told without the user's line.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import serrate
from serrate.errors import SerrateError, ShapeError, StructureError, StructureMismatch, SyncError
from serrate.tensor import JaggedTensor, Structure, no_sync, wait_for_checks
from serrate.tensor.checks import deferred
from serrate.tensor.sync import host_copy

T = torch.tensor


class Event:
    """An event that happens when the test lets it."""

    def __init__(self) -> None:
        self.happened = False
        self.waited = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.waited = self.happened = True


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test starts and ends without checks that have not reported."""
    # Tests of other files leave some behind on a device, all of them right.
    wait_for_checks()
    assert deferred.pending() == 0
    yield
    left = deferred.pending()
    deferred._reset_after_fork()
    assert left == 0


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events of all checks made in a test, none of which has happened."""
    made: list[Event] = []

    def sent(packed: torch.Tensor) -> tuple[torch.Tensor, Event]:
        made.append(Event())
        return packed, made[-1]

    monkeypatch.setattr(deferred, "_copy_to_host", sent)
    return made


LATE: dict[str, tuple[Callable[[], object], type[SerrateError], str]] = {
    "a decrease": (
        lambda: Structure.from_offsets(T([0, 4, 9, 7]), validate="deferred"),
        StructureError,
        "offsets must not decrease: offsets[3] = 7 < offsets[2] = 9",
    ),
    "a first offset": (
        lambda: Structure.from_offsets(T([1, 4]), validate="deferred"),
        StructureError,
        "offsets must start at 0: offsets[0] = 1",
    ),
    "a first offset of no row": (
        lambda: Structure.from_offsets(T([3]), validate="deferred"),
        StructureError,
        "offsets must start at 0: offsets[0] = 3",
    ),
    "an end": (
        lambda: JaggedTensor.from_csr(torch.zeros(5), T([0, 4]), validate="deferred"),
        StructureError,
        "offsets must end at the number of values: they end at 4, but the values have 5 positions",
    ),
    "a chain": (
        lambda: Structure.from_offsets(T([0, 2, 4]), T([0, 1, 2, 3]), validate="deferred"),
        StructureError,
        "offsets of level 0 must end at the number of parts of level 1: they end at 4, but level 1 has 3 parts",
    ),
    "2-D offsets": (
        lambda: Structure.from_offsets(T([[0, 2], [1, 2]]), validate="deferred"),
        StructureError,
        "offsets must start at 0: offsets[1, 0] = 1",
    ),
    "int32 that wraps around": (
        lambda: Structure.from_offsets(T([0, 2**30, -(2**31), -(2**30), 0, 2**30], dtype=torch.int32), validate="deferred"),
        StructureError,
        f"offsets must not decrease: offsets[2] = {-(2**31)} < offsets[1] = {2**30}",
    ),
    "a negative length": (
        lambda: Structure.from_lengths(T([2, -1]), validate="deferred"),
        StructureError,
        "lengths must not be negative: lengths[1] = -1",
    ),
    "lengths without end": (
        lambda: Structure.from_lengths(T([2**62] * 4), validate="deferred"),
        StructureError,
        f"lengths must not sum to more than int64 can hold: they sum to {2**64}",
    ),
    "a sum": (
        lambda: JaggedTensor.from_lengths(torch.zeros(4), T([2, 1]), validate="deferred"),
        StructureError,
        "lengths must sum to the number of values: they sum to 3, but the values have 4 positions",
    ),
    "starts": (
        lambda: Structure.from_starts(T([0, 2]), T([3, 1]), validate="deferred"),
        StructureError,
        "rows must not overlap and must be in order: row 0 ends at 3, row 1 starts at 2",
    ),
    "the last start": (
        lambda: JaggedTensor.from_starts(torch.zeros(6), T([0, 4]), T([3, 3]), validate="deferred"),
        StructureError,
        "rows must lie inside the values: row 1 ends at 7, but there are 6 positions",
    ),
    "counts": (
        lambda: Structure.from_lengths(T([2, 1])).with_columns(T([2, -1]), validate="deferred"),
        StructureError,
        "counts must not be negative: counts[1] = -1",
    ),
    "a longest length": (
        lambda: Structure.from_offsets(T([0, 3, 3, 7]), max_length=5, validate="deferred"),
        StructureError,
        "max_length=5 was given, but the longest row has length 4",
    ),
    "a shortest length": (
        lambda: Structure.from_lengths(T([3, 4]), min_length=2, validate="deferred"),
        StructureError,
        "min_length=2 was given, but the shortest row has length 3",
    ),
    "a level's longest": (
        lambda: Structure.from_offsets(T([0, 2, 2]), T([0, 3, 7]), max_length=(1, None), validate="deferred"),
        StructureError,
        "max_length=1 was given, but the longest row has length 2",
    ),
}


@pytest.mark.parametrize("what", LATE)
def test_a_mistake_is_told_late_with_the_words_of_an_early_one(what: str) -> None:
    build, error, message = LATE[what]
    build()
    assert deferred.pending() >= 1
    with pytest.raises(error) as caught:
        wait_for_checks()
    line = build.__code__.co_firstlineno
    assert str(caught.value) == (
        f"{message} (detected asynchronously on cpu, for the call at {__file__}:{line}; "
        "anything computed with these rows since then may be wrong)"
    )
    wait_for_checks()


RIGHT: list[Callable[[], object]] = [
    lambda: JaggedTensor.from_csr(torch.zeros(0), T([0]), validate="deferred"),
    lambda: JaggedTensor.from_csr(torch.zeros(0), T([0, 0, 0]), validate="deferred"),
    lambda: JaggedTensor.from_csr(torch.zeros(7), T([0, 3, 3, 7], dtype=torch.int32), max_length=4, validate="deferred"),
    lambda: JaggedTensor.from_csr(torch.zeros(3), T([[0, 1, 3]]), max_length=(2, 2), validate="deferred"),
    lambda: JaggedTensor.from_csr(torch.zeros(0), torch.zeros(0, 3, dtype=torch.int64), validate="deferred"),
    lambda: JaggedTensor.from_lengths(torch.zeros(0), torch.zeros(0, dtype=torch.int64), validate="deferred"),
    lambda: JaggedTensor.from_lengths(torch.zeros(3), (T([1, 0, 1]), T([1, 2])), validate="deferred"),
    lambda: JaggedTensor.from_starts(torch.zeros(9), T([0, 8]), T([3, 1]), validate="deferred"),
    lambda: JaggedTensor.from_starts(
        torch.zeros(9), torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), validate="deferred"
    ),
    lambda: Structure.from_lengths(T([2, 0])).with_columns(T([0, 5]), max_length=5, validate="deferred"),
]


@pytest.mark.parametrize("build", RIGHT)
def test_right_structures_pass_late(build: Callable[[], object]) -> None:
    build()
    wait_for_checks()
    assert deferred.pending() == 0


@given(st.lists(st.integers(-3, 9), min_size=1, max_size=8), st.integers(0, 9), st.sampled_from([torch.int32, torch.int64]))
def test_late_and_early_checks_find_the_same(numbers: list[int], total: int, dtype: torch.dtype) -> None:
    offsets = T(numbers, dtype=dtype)
    found: list[str | None] = []
    for validate in (True, "deferred"):
        try:
            Structure.from_offsets(offsets, total=total, validate=validate)  # type: ignore[arg-type]
            wait_for_checks()
            found.append(None)
        except StructureError as error:
            found.append(str(error).partition(" (detected asynchronously")[0])
    assert found[0] == found[1]


def test_no_lengths_need_no_device_to_be_wrong() -> None:
    with pytest.raises(StructureError, match=r"they sum to 0, but the values have 4 positions$"):
        JaggedTensor.from_lengths(torch.zeros(4), torch.zeros(0, dtype=torch.int64), validate="deferred")


def test_lengths_that_only_the_values_can_disprove_are_checked_with_them() -> None:
    structure = Structure.from_offsets(T([0, 3, 7]), validate=False)
    gaps = Structure.from_starts(T([0, 5]), T([3, 2]), validate=False)
    padded = Structure.from_lengths(T([1, 2]), validate=False).with_columns(T([1, 4]), packed=False, validate=False)
    for wrong, values, message in (
        (structure, torch.zeros(8), "the rows hold 7 positions together, but values of shape (8,) have 8"),
        (gaps, torch.zeros(6), "the rows reach position 7, but values of shape (6,) have 6"),
        (padded, torch.zeros(3, 3), "the rows have up to 4 columns, but dim 1 of values of shape (3, 3) has 3"),
    ):
        with pytest.raises(ShapeError) as caught, no_sync(strict=True):
            JaggedTensor(values, wrong)
        assert str(caught.value).startswith(message)
        with no_sync(strict=True):
            # What was taken from the values is remembered, and asked of the device once.
            JaggedTensor(values, wrong)
            assert deferred.pending() == 0


def test_nothing_is_told_before_it_arrives_and_nobody_waits(events: list[Event]) -> None:
    Structure.from_offsets(T([0, 2, 1]), validate="deferred")
    Structure.from_offsets(T([0, 3]), validate="deferred")
    assert len(events) == deferred.pending() == 2
    events[1].happened = True
    with no_sync():
        Structure.from_offsets(T([0, 1]))
    assert deferred.pending() == 2 and not events[0].waited
    events[0].happened = True
    with pytest.raises(StructureError, match=r"must not decrease.*detected asynchronously"):
        Structure.from_offsets(T([0, 1]))
    assert deferred.pending() == 0


@pytest.mark.parametrize(
    "touch",
    [
        lambda: Structure.from_lengths(T([1])),
        lambda: JaggedTensor.from_csr(torch.zeros(1), T([0, 1])),
        lambda: Structure.from_lengths(T([1])).with_columns(T([1])),
        lambda: host_copy(T([1]), "a test"),
    ],
)
def test_the_next_construction_or_host_copy_tells(touch: Callable[[], object]) -> None:
    deferred.defer([T(1)], _refuse("wrong"))
    with pytest.raises(StructureError, match="detected asynchronously"):
        touch()


def test_the_end_of_no_sync_tells() -> None:
    with pytest.raises(StructureError, match="detected asynchronously"), no_sync():
        deferred.defer([T(1)], _refuse("wrong"))


def test_an_error_of_the_context_is_not_covered_up() -> None:
    with pytest.raises(ZeroDivisionError), no_sync():
        Structure.from_offsets(T([0, 3, 2]), validate="deferred")
        _ = 1 / 0
    with pytest.raises(StructureError):
        wait_for_checks()


def test_several_mistakes_are_told_together() -> None:
    deferred.defer([T(1)], _refuse("first"))
    deferred.defer([T(1)], _refuse("second"))
    with pytest.raises(StructureError, match=r"^first") as caught:
        wait_for_checks()
    (note,) = caught.value.__notes__
    assert note.startswith("also: second")


def _refuse(words: str) -> Callable[[list[int]], None]:
    def verify(_: list[int]) -> None:
        raise StructureError(words)

    return verify


def test_offsets_written_to_since_are_still_told(events: list[Event]) -> None:
    offsets = T([0, 3, 2])
    Structure.from_offsets(offsets, validate="deferred")
    offsets.copy_(T([0, 2, 3]))
    with pytest.raises(StructureError, match="offsets were wrong when they were checked, and have been overwritten since"):
        wait_for_checks()
    assert events[0].waited


def test_the_default_on_a_device_is_deferred_and_elsewhere_at_once() -> None:
    with pytest.raises(StructureError) as caught:
        Structure.from_offsets(T([0, 3, 2]))
    assert "late" not in str(caught.value)
    with pytest.raises(StructureError, match="detected asynchronously"), no_sync(strict=True):
        # Strict rules treat the CPU as a device.
        JaggedTensor.from_csr(torch.zeros(4), T([0, 3, 2]))
    with no_sync(strict=True), pytest.raises(SyncError, match="validating offsets"):
        Structure.from_offsets(T([0, 3, 2]), validate=True)


def test_unchecked_and_unreadable_numbers_queue_nothing() -> None:
    Structure.from_offsets(T([0, 3, 2]), validate=False)
    Structure.from_offsets(T([0, 3, 2], device="meta"))
    Structure.from_lengths(T([0, 3, -2], device="meta"))
    assert deferred.pending() == 0


def test_nothing_is_queued_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    Structure.from_offsets(T([0, 3, 2]), validate="deferred")
    assert deferred.pending() == 0


def test_a_forked_process_leaves_reports_to_its_parent() -> None:
    Structure.from_offsets(T([0, 3, 2]), validate="deferred")
    child = os.fork()
    if child == 0:
        os._exit(deferred.pending())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(StructureError):
        wait_for_checks()


def test_waiting_checks_keep_no_values(events: list[Event]) -> None:
    values = torch.zeros(7)
    with no_sync(strict=True):
        JaggedTensor(values, Structure.from_offsets(T([0, 7]), validate=False))
    gone = weakref.ref(values)
    del values
    gc.collect()
    assert deferred.pending() == 1 and gone() is None
    wait_for_checks()


# --- structures that must agree ---


def two(other: list[int]) -> tuple[Structure, Structure]:
    return Structure.from_lengths(T([3, 5]), validate=False), Structure.from_lengths(T(other), validate=False)


def test_structures_agree_by_their_numbers_on_a_cpu() -> None:
    assert Structure.agrees(*two([3, 5]), "both")
    assert not Structure.agrees(*two([5, 3]), "both")
    assert deferred.pending() == 0


def test_structures_agree_late_on_a_device_once_for_a_pair(events: list[Event]) -> None:
    one, other = two([5, 3])
    with no_sync(strict=True):
        assert one.agrees(one, "both") and not events
        assert not one.agrees(Structure.from_lengths(T([8]), validate=False), "both") and not events
        assert one.agrees(other, "the operands of add")
        assert one.agrees(other, "the operands of mul")
        assert len(events) == 1
    with pytest.raises(StructureMismatch, match=r"^the operands of add differ: lengths \[3, 5\] and \[5, 3\] \(detected"):
        wait_for_checks()


def test_a_compared_structure_is_not_kept() -> None:
    one, other = two([3, 5])
    with no_sync(strict=True):
        assert one.agrees(other, "both")
    rows = weakref.ref(other.rows[0])
    compared: dict[int, object] = one.rows[0].derived("compared on the device", dict)
    assert len(compared) == 1
    del other
    gc.collect()
    assert rows() is None and not compared
    wait_for_checks()


def test_programs_check_late_that_structures_agree() -> None:
    @serrate.jit
    def add(a, b):  # type: ignore[no-untyped-def]
        return a + b

    def jagged(lengths: list[int]) -> JaggedTensor:
        return JaggedTensor.from_lengths(torch.ones(8), T(lengths))

    one, same, other = jagged([3, 5]), jagged([3, 5]), jagged([5, 3])
    with no_sync(strict=True):
        assert add(one, same).values.tolist() == [2] * 8
    with (
        pytest.raises(StructureMismatch, match=r"lengths \[3, 5\] and \[5, 3\] \(detected .*test_deferred"),
        no_sync(strict=True),
    ):
        add(one, other)
    with pytest.raises(StructureMismatch) as caught:
        add(one, jagged([5, 3]))
    assert "late" not in str(caught.value)


def test_two_structures_of_one_shape_are_not_taken_for_one() -> None:
    @serrate.jit
    def both(a, b):  # type: ignore[no-untyped-def]
        return a.sum(1) + 10 * b.sum(1)

    one = JaggedTensor.from_lengths(torch.ones(8), T([3, 5]))
    other = JaggedTensor.from_lengths(torch.ones(8), T([5, 3]))
    with no_sync(strict=True):
        assert both(one, other).tolist() == [53, 35]


# --- on a GPU ---


@pytest.mark.gpu
def test_a_gpu_tells_late_and_never_waits() -> None:
    good, bad = (T(numbers, device="cuda") for numbers in ([0, 3, 3, 7], [0, 4, 3, 7]))
    values = torch.ones(7, 2, device="cuda")
    JaggedTensor.from_csr(values, good)
    wait_for_checks()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with no_sync():
            for _ in range(3):
                JaggedTensor.from_csr(values, good, max_length=4, min_length=0)
                JaggedTensor.from_lengths(values, good.diff())
                JaggedTensor.from_starts(values, good[:-1], good.diff())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wait_for_checks()
    assert deferred.pending() == 0
    JaggedTensor.from_csr(values, bad)
    with pytest.raises(StructureError, match=r"must not decrease: offsets\[2\] = 3 < offsets\[1\] = 4 \(detected .* cuda:0"):
        wait_for_checks()
    one, other = (Structure.from_offsets(T(numbers, device="cuda")) for numbers in ([0, 3, 7], [0, 4, 7]))
    assert one.agrees(other, "both")
    with pytest.raises(StructureMismatch, match="detected asynchronously"):
        wait_for_checks()


@pytest.mark.gpu
def test_a_captured_graph_queues_nothing() -> None:
    values, offsets = torch.ones(7, device="cuda"), T([0, 3, 7], device="cuda")
    JaggedTensor.from_csr(values, offsets)
    wait_for_checks()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jt = JaggedTensor.from_csr(values, offsets)
        doubled = jt.values * 2
        assert deferred.pending() == 0
    graph.replay()
    torch.cuda.synchronize()
    assert doubled.sum().item() == 14
