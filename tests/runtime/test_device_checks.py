"""Offsets that a device looks at in one launch: under Triton's interpreter, with the memory of the host in the device's place.

In: right and wrong offsets. Out: failures that show numbers other than those counted in Python, or an error that is missing.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from serrate import Structure, wait_for_checks
from serrate.codegen.triton.offsets import BLOCK, UNSET
from serrate.errors import StructureError
from serrate.runtime import device_checks
from serrate.runtime.device_checks import LEVELS, SLOTS, Slots, summarise
from serrate.tensor.checks import deferred, validate

CPU = torch.device("cpu")
OFFSETS = {
    "one row": [0, 5],
    "empty rows": [0, 0, 0],
    "several": [0, 3, 3, 10, 11],
    "decreasing": [0, 9, 4, 12],
    "not from 0": [2, 3, 3],
    "negative": [-4, 3, -7],
    "a block": [k * (k % 3 + 1) for k in range(BLOCK + 1)],
    "more than a block": [*range(0, 2 * BLOCK, 2), 5 * BLOCK, 5 * BLOCK + 1],
    "as far apart as int64 allows": [0, (1 << 63) - 1, 0],
}


def counted(offsets: list[int]) -> list[int]:
    lengths = [b - a for a, b in pairwise(offsets)]
    return [offsets[0], offsets[-1], min(lengths), max(lengths)]


@pytest.fixture(autouse=True)
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    made = Slots(CPU)
    monkeypatch.setattr(device_checks, "_slots", lambda device: made)
    return made


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_numbers(name: str, dtype: torch.dtype) -> None:
    offsets = OFFSETS[name]
    if dtype == torch.int32 and max(map(abs, offsets)) >= 1 << 31:
        return
    arrival = summarise([torch.tensor(offsets, dtype=dtype)])
    assert arrival is not None and arrival(False) == counted(offsets)


def test_levels_in_one_slot() -> None:
    levels = [OFFSETS["several"], OFFSETS["decreasing"], OFFSETS["one row"]]
    arrival = summarise([torch.tensor(level) for level in levels])
    assert arrival is not None and arrival(False) == [number for level in levels for number in counted(level)]


def test_offsets_that_are_looked_at_another_way() -> None:
    plain = torch.tensor([0, 3, 4, 8])
    for levels in ([plain[:1]], [plain[::2]], [plain.reshape(2, 2)], [plain, plain[:1]], [plain] * (LEVELS + 1)):
        assert summarise(levels) is None
    assert summarise([plain[1:]]) is not None, "not aligned"


def test_numbers_that_have_not_arrived(slots: Slots) -> None:
    start = slots.take()
    assert start is not None
    arrival = slots.arrival(start, 4)
    slots.memory[start : start + 3] = 7
    assert arrival(False) is None
    slots.memory[start + 3] = 8
    assert arrival(False) == [7, 7, 7, 8]
    assert slots.memory.eq(UNSET).all()


def test_slots_are_used_again() -> None:
    offsets = torch.tensor([0, 2, 5])
    for _ in range(3):
        arrivals = [summarise([offsets]) for _ in range(SLOTS)]
        assert summarise([offsets]) is None
        assert all(arrival is not None and arrival(False) == [0, 5, 2, 3] for arrival in arrivals)


WRONG = {
    "a decrease": ([0, 4, 9, 7], "offsets must not decrease: offsets[3] = 7 < offsets[2] = 9"),
    "a first offset": ([1, 4], "offsets must start at 0: offsets[0] = 1"),
    "an end": ([0, 4], "offsets must end at the number of values: they end at 4, but the values have 7 positions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "summary", summarise)
    monkeypatch.setattr(deferred, "_copy_to_host", None)
    offsets, message = WRONG[name]
    Structure.from_offsets(torch.tensor([0, 3, 7]), total=7, validate="deferred")
    Structure.from_offsets(torch.tensor(offsets), total=7, validate="deferred")
    with pytest.raises(StructureError, match=message.replace("[", r"\[")):
        wait_for_checks()


def test_a_longest_length_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "summary", summarise)
    Structure.from_offsets(torch.tensor([0, 3, 7]), max_length=4, validate="deferred")
    wait_for_checks()
    Structure.from_offsets(torch.tensor([0, 3, 7]), max_length=5, validate="deferred")
    with pytest.raises(StructureError, match="max_length=5 was given, but the longest row has length 4"):
        wait_for_checks()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_numbers_that_were_computed_are_sent(dtype: torch.dtype, slots: Slots) -> None:
    free = len(slots._free)
    for numbers in ([7], [0, -3], [1, 2, 3, torch.iinfo(dtype).max]):
        arrival = device_checks.report([torch.tensor(n, dtype=dtype) for n in numbers])
        assert arrival is not None and len(slots._free) == free - 1
        assert arrival(False) == numbers and len(slots._free) == free
    assert not (slots.memory != UNSET).any(), "a slot is handed out again without numbers of an earlier check"


def test_a_number_that_marks_a_slot_as_empty_arrives() -> None:
    arrival = device_checks.report([torch.tensor(UNSET)])
    assert arrival is not None and arrival(False) == [UNSET + 1]


def test_other_numbers_are_sent_another_way(slots: Slots) -> None:
    one = torch.tensor(1)
    for numbers in ([one] * 5, [torch.tensor(1.0)], [one, one.int()], [torch.zeros(2, dtype=torch.int64)]):
        assert device_checks.report(numbers) is None
    slots._free.clear()
    assert device_checks.report([one]) is None
