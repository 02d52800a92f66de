"""Many processes that start at once with an empty cache: one measures, every variant is built once, all answers are right."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import serrate
from serrate import JaggedTensor, settings
from serrate.runtime.compiler import Compiler
from serrate.tuner import record
from serrate.tuner.measure import ProgramMeasurer
from serrate.tuner.search import EFFORTS, Effort, Halving

PROCESSES = 8


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, private_cache: Path, tmp_path: Path) -> Path:
    """An empty cache, and a folder with one file for every function that is compiled and for every measurer."""
    monkeypatch.setenv("SERRATE_TUNE", "first_call")
    settings.reload()
    record.forget()
    seen = tmp_path / "seen"
    seen.mkdir()
    build, run = Compiler.build, ProgramMeasurer._first

    def note(what: str) -> None:
        (seen / f"{what}-{os.getpid()}-{time.monotonic_ns()}").touch()

    def noted_build(self: Compiler, source: Path, library: Path) -> None:
        for name in re.findall(r'extern "C" void (\w+_[0-9a-f]{8})\(', source.read_text()):
            note(f"built-{name}")
        build(self, source, library)

    def noted_run(self: ProgramMeasurer, candidate: object) -> float:
        note("timed")
        return run(self, candidate)  # type: ignore[arg-type]

    monkeypatch.setattr(Compiler, "build", noted_build)
    monkeypatch.setitem(EFFORTS, "quick", Effort("quick", 60.0, 60.0, Halving(steps=0)))
    monkeypatch.setattr(ProgramMeasurer, "_first", noted_run)
    return seen


def sums(jt: JaggedTensor) -> torch.Tensor:
    return (jt * 3).sum(dim=1)


def call(results: Path) -> None:
    torch.set_num_threads(1)
    lengths = [5, 0, 9, 30, 2]
    values = torch.arange(46.0 * 3).view(46, 3)
    found = serrate.jit(sums)(JaggedTensor.from_lengths(values, lengths))
    wanted, start = [], 0
    for length in lengths:
        wanted.append(values[start : start + length].sum(0) * 3)
        start += length
    assert torch.equal(found, torch.stack(wanted))
    (results / f"right-{os.getpid()}").touch()


def started(results: Path, count: int) -> list[multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("fork")
    found: list[multiprocessing.process.BaseProcess] = [context.Process(target=call, args=(results,)) for _ in range(count)]
    for each in found:
        each.start()
    return found


def of(seen: Path, what: str) -> list[str]:
    return [path.name for path in seen.iterdir() if path.name.startswith(what)]


def test_each_variant_is_built_once_and_one_process_measures(watched: Path) -> None:
    for each in started(watched, PROCESSES):
        each.join(60)
        assert each.exitcode == 0
    assert len(of(watched, "right-")) == PROCESSES
    built = Counter(name.split("-")[1] for name in of(watched, "built-"))
    assert len(built) >= 2 and set(built.values()) == {1}
    assert len({name.split("-")[1] for name in of(watched, "timed-")}) == 1


def test_a_later_process_builds_and_times_nothing(watched: Path) -> None:
    for each in (*started(watched, 1),):
        each.join(60)
    before = len(of(watched, "built-")), len(of(watched, "timed-"))
    assert all(before)
    (second,) = started(watched, 1)
    second.join(60)
    assert (len(of(watched, "built-")), len(of(watched, "timed-"))) == before
    assert len(of(watched, "right-")) == 2


def test_a_process_that_is_killed_while_it_measures_leaves_the_work_to_the_others(watched: Path) -> None:
    first, *others = started(watched, 3)
    deadline = time.monotonic() + 30
    while not of(watched, "timed-") and time.monotonic() < deadline:
        time.sleep(0.01)
    measuring = {int(name.split("-")[1]) for name in of(watched, "timed-")}
    victim = next(each for each in (first, *others) if each.pid in measuring)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    for each in (first, *others):
        each.join(60)
        assert each.exitcode == (-signal.SIGKILL if each is victim else 0)
    assert len(of(watched, "right-")) == 2
