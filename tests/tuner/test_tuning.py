"""Calls that are tuned: who is measured when, what is remembered, and that results and arguments are what they should be."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, engine, ir, ops, settings
from serrate.compiled import Compiled
from serrate.errors import CallError, SettingError
from serrate.fusion_stage import FusionStage
from serrate.runtime.arguments import BoundCall
from serrate.runtime.dispatch import Prepared
from serrate.runtime.launch import CppExecutable
from serrate.schedule.plan import ORDERS, Plan
from serrate.schedule.target import Target
from serrate.tuner import measure, record, tuner
from serrate.tuner.buckets import Bucket
from serrate.tuner.buffers import CopiedBuffers
from serrate.tuner.candidates import Candidate
from serrate.tuner.measure import ProgramMeasurer, agrees
from serrate.tuner.record import Records, Tuning
from serrate.tuner.search import EFFORTS, SPENT, Effort, Halving

Lengths = Sequence[int]


class Measured:
    """Stands in for measuring: every strategy takes the time that is written here."""

    def __init__(self) -> None:
        self.seconds = {"maskless": 3e-3, "masked": 2e-3, "persistent_dynamic": 1e-3}
        self.searches = 0
        self.threads: set[str] = set()

    def measurer(self, *args: object) -> ProgramMeasurer:
        self.searches += 1
        self.threads.add(threading.current_thread().name)
        outer = self

        class Fake(ProgramMeasurer):
            def run(self, candidate: Candidate, repeats: int) -> float:
                return outer.seconds[candidate.strategy] * (1.0 if not candidate.options and not candidate.lanes else 1.5)

        return Fake(*args)  # type: ignore[arg-type]


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, private_cache: Path) -> Iterator[Path]:
    """Programs are tuned as they are for users, but without variants of strategies and in no hurry, with an empty cache."""
    monkeypatch.setenv("SERRATE_TUNE", "first_call")
    monkeypatch.setitem(EFFORTS, "quick", Effort("quick", 60.0, 60.0, Halving(steps=0)))
    settings.reload()
    record.forget()
    yield private_cache
    record.forget()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tuned: Path) -> Measured:
    made = Measured()
    monkeypatch.setattr(engine, "ProgramMeasurer", made.measurer)
    monkeypatch.setattr("serrate.tuner.measure._compiled", lambda executables, seconds: {})
    return made


def rows(lengths: Lengths = (3, 0, 7, 2), features: int = 4) -> JaggedTensor:
    torch.manual_seed(0)
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), features), list(lengths))


def doubled_sums(jt: JaggedTensor) -> torch.Tensor:
    return (jt * 2).sum(dim=1)


def row_sums(jt: JaggedTensor) -> torch.Tensor:
    out = torch.empty([jt.num_rows, jt.values.size(1)])
    for b in hl.tile(jt.num_rows):
        for m in hl.tile(jt.values.size(1)):
            total = hl.zeros([b, m])
            for k in hl.tile(jt.max_length):
                total = total + jt[b, k, m].sum(1)
            out[b, m] = total
    return out


def fusion() -> ir.Fusion:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    return f


def by_loop(jt: JaggedTensor) -> torch.Tensor:
    found, start = [], 0
    for length in jt.lengths.tolist():
        found.append(jt.values[start : start + length].sum(0))
        start += length
    return torch.stack(found)


class Called(NamedTuple):
    """A program of one front end: how it is called, what is known about it, its plan, and what it multiplies sums by."""

    call: Callable[[JaggedTensor], torch.Tensor]
    tunings: Callable[[JaggedTensor], list[Tuning]]
    plan: Callable[[JaggedTensor], Plan]
    factor: float


def _jit() -> Called:
    jitted = serrate.jit(doubled_sums)
    return Called(jitted, jitted.tunings, jitted.plan, 2.0)


def _kernel() -> Called:
    kernel = serrate.kernel(row_sums)
    return Called(kernel, kernel.tunings, lambda jt: kernel.on("cpp").variants(jt)[0].plan, 1.0)


def _fusion() -> Called:
    compiled = fusion().compile()
    assert isinstance(compiled, Compiled)
    return Called(
        lambda jt: compiled(jt.values, jt.offsets),
        lambda jt: compiled.tunings(jt.values, jt.offsets),
        lambda jt: compiled.plan(jt.values, jt.offsets),
        1.0,
    )


FRONT_ENDS = {"jit": _jit, "kernel": _kernel, "fusion": _fusion}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_first_call_measures_and_no_later_one(front_end: str, measured: Measured) -> None:
    call, tunings, _, factor = FRONT_ENDS[front_end]()
    jt, alike = rows(), rows((2, 3, 7, 0))
    for _ in range(3):
        torch.testing.assert_close(call(jt), factor * by_loop(jt))
        torch.testing.assert_close(call(alike), factor * by_loop(alike))
    assert measured.searches == 1
    (found,) = tunings(jt)
    assert found.source == "measured" and found.chosen.strategy == "persistent_dynamic"
    assert {each.candidate.strategy for each in found.tried} == {"maskless", "masked", "persistent_dynamic"}
    assert found.gain is not None and found.gain >= 3


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_another_process_measures_nothing(front_end: str, measured: Measured) -> None:
    FRONT_ENDS[front_end]().call(rows())
    record.forget()
    call, tunings, _, factor = FRONT_ENDS[front_end]()
    torch.testing.assert_close(call(rows()), factor * by_loop(rows()))
    assert measured.searches == 1
    assert [found.source for found in tunings(rows())] == ["remembered"]
    assert [found.chosen.strategy for found in tunings(rows())] == ["persistent_dynamic"]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_plan_that_runs_is_the_chosen_one(front_end: str, measured: Measured) -> None:
    call, _, plan, _ = FRONT_ENDS[front_end]()
    assert plan(rows()).strategy == "maskless"
    call(rows())
    assert plan(rows()).strategy == "persistent_dynamic"


def test_other_sizes_other_lengths_and_other_features_are_measured_anew(measured: Measured) -> None:
    call = serrate.jit(doubled_sums)
    call(rows())
    for k, jt in enumerate((rows((3, 0, 7, 2) * 50), rows((700, 0, 0, 1) * 50), rows((3, 0, 7, 2), features=8)), 2):
        call(jt)
        assert measured.searches == k


def test_a_new_bucket_starts_with_the_plan_of_the_nearest(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    call = serrate.jit(doubled_sums)
    call(rows())
    monkeypatch.setenv("SERRATE_TUNE", "never")
    settings.reload()
    (found,) = call.tunings(rows((9, 30, 2, 8) * 9))
    assert (found.source, found.chosen.strategy) == ("nearest", "persistent_dynamic")
    assert call.plan(rows((9, 30, 2, 8) * 9)).strategy == "persistent_dynamic"
    monkeypatch.setenv("SERRATE_TUNE", "first_call")
    settings.reload()
    call(rows((9, 30, 2, 8) * 9))
    (found,) = call.tunings(rows((9, 30, 2, 8) * 9))
    assert [each.candidate.strategy for each in found.tried[:2]] == ["maskless", "persistent_dynamic"]


@pytest.mark.parametrize("options", [{"tune": "never"}, {"effort": "none"}, {"strategy": "maskless"}])
def test_who_does_not_want_it_is_not_measured(options: dict[str, str], measured: Measured) -> None:
    serrate.jit(doubled_sums, **options)(rows())
    serrate.kernel(row_sums, **options)(rows())
    assert measured.searches == 0


def test_the_environment_decides_where_the_program_does_not(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERRATE_TUNE", "never")
    settings.reload()
    serrate.jit(doubled_sums)(rows())
    assert measured.searches == 0
    serrate.jit(doubled_sums, tune="first_call")(rows())
    assert measured.searches == 1
    for name, value in (("SERRATE_TUNE", "always"), ("SERRATE_EFFORT", "much")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(SettingError, match=name):
                settings.reload()


@pytest.mark.parametrize("make", [serrate.jit, serrate.kernel])
def test_unknown_words_are_refused(make: Callable[..., object]) -> None:
    with pytest.raises(CallError, match="tune='sometimes'"):
        make(tune="sometimes")
    with pytest.raises(CallError, match="effort='ful': did you mean 'full'"):
        make(effort="ful")
    with pytest.raises(CallError, match="effort="):
        serrate.tuning(effort="none")


def test_operators_are_measured_only_when_asked(measured: Measured) -> None:
    jt = rows()
    before = torch.softmax(jt, dim=1)
    assert measured.searches == 0
    with serrate.tuning():
        # Although this call has a binding.
        inside = torch.softmax(jt, dim=1)
        assert measured.searches == 1
        torch.softmax(jt, dim=1)
    torch.softmax(jt, dim=1)
    assert measured.searches == 1
    torch.testing.assert_close(inside.values, before.values)


def test_what_was_measured_inside_is_used_outside(measured: Measured, tuned: Path) -> None:
    jt = rows((5, 6, 7))
    with serrate.tuning():
        jt.cumsum(dim=1)
    (records,) = record._records.values()
    (found,) = records.known.values()
    assert found.program == "cumsum" and found.source == "measured"


@pytest.mark.parametrize("mode", [serrate.no_sync, serrate.batch_invariant])
def test_modes_in_which_nothing_is_measured(mode: Callable[[], object], measured: Measured) -> None:
    call, kernel = serrate.jit(doubled_sums), serrate.kernel(row_sums)
    with mode():  # type: ignore[attr-defined]
        call(rows())
        kernel(rows())
    assert measured.searches == 0
    call(rows())
    kernel(rows())
    assert measured.searches == 2


def test_asking_for_plans_and_sources_measures_nothing(measured: Measured) -> None:
    call, kernel = serrate.jit(doubled_sums), serrate.kernel(row_sums)
    for each in (call.plan, call.source, call.explain, call.tunings, kernel.source, kernel.explain, kernel.tunings):
        each(rows())
    assert measured.searches == 0
    call(rows())
    kernel(rows())
    assert measured.searches == 2


@pytest.mark.parametrize("make", [lambda: serrate.jit(doubled_sums), lambda: serrate.kernel(row_sums)])
def test_the_user_can_measure_again(make: Callable[[], serrate.Kernel], measured: Measured) -> None:
    call = make()
    call(rows())
    measured.seconds["masked"] = 0.1e-3
    call(rows())
    assert [found.chosen.strategy for found in call.tunings(rows())] == ["persistent_dynamic"]
    (found,) = call.tune(rows())
    assert found.chosen.strategy == "masked" and measured.searches == 2
    torch.testing.assert_close(call(rows()) / (1 if isinstance(call, serrate.Kernel) else 2), by_loop(rows()))
    assert measured.searches == 2


def test_a_hint_changes_what_is_tried_first_and_what_is_chosen_without_measuring(measured: Measured) -> None:
    jt = rows((5, 6, 5, 6) * 8)
    hinted = jt.with_hint(distribution="giant")
    for call in (serrate.jit(doubled_sums, tune="never"), serrate.kernel(row_sums, tune="never")):
        assert [found.chosen.strategy for found in call.tunings(jt)] == ["maskless"]
        assert [found.chosen.strategy for found in call.tunings(hinted)] == ["persistent_dynamic"]
    for call in (serrate.jit(doubled_sums), serrate.kernel(row_sums)):
        call(jt)
        call(hinted)
        order = [[each.candidate.strategy for each in call.tunings(data)[0].tried[:3]] for data in (jt, hinted)]
        assert order[0] == ["maskless", "masked", "persistent_dynamic"]
        assert order[1][0] == "persistent_dynamic"
        assert call.tunings(jt)[0].bucket != call.tunings(hinted)[0].bucket


def test_a_remembered_plan_that_is_not_legal_is_reported_and_not_used(measured: Measured, tuned: Path) -> None:
    serrate.jit(doubled_sums)(rows())
    (records,) = record._records.values()
    (found,) = records.known.values()
    wrong = Candidate("persistent_dynamic", (("no_such_option", 3),))
    Records(records.key, tuned).put(Tuning(found.program, found.key, found.bucket, wrong))
    record.forget()
    with pytest.warns(UserWarning, match="no_such_option"):
        torch.testing.assert_close(serrate.jit(doubled_sums)(rows()), 2 * by_loop(rows()))


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """A process that has not warned yet, and what it logs."""
    monkeypatch.setattr(tuner, "_warned", threading.Event())
    caplog.set_level(logging.INFO, "serrate.tune")
    return caplog


def waits(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The levels and the functions of records about calls that waited."""
    found = [(each.levelname, each.getMessage()) for each in caplog.records if "waited" in each.getMessage()]
    assert all("SERRATE_TUNE" in text and "SERRATE_EFFORT" in text and re.search(r"waited \d+\.\d s", text) for _, text in found)
    return [(level, text.split("a call of ")[1].split()[0]) for level, text in found]


def test_a_call_that_waits_says_so(measured: Measured, unwarned: pytest.LogCaptureFixture) -> None:
    """A training loop paused for seconds at steps with new lengths, and nothing said why."""
    call = serrate.jit(doubled_sums)
    for _ in range(2):
        call(rows())
    assert waits(unwarned) == [("WARNING", "doubled_sums")]
    call(rows((700, 0, 0, 1) * 50))
    serrate.jit(lambda jt: jt + 1)(rows())
    assert [level for level, _ in waits(unwarned)] == ["WARNING", "INFO", "INFO"]


def test_a_terminal_shows_the_wait_once(
    measured: Measured, unwarned: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, a status line has said it; logging would write a warning below it."""
    monkeypatch.setattr(tuner, "is_visible", lambda: True)
    serrate.jit(doubled_sums)(rows())
    assert waits(unwarned) == [("INFO", "doubled_sums")]


def test_only_calls_that_wait_unasked_say_so(measured: Measured, unwarned: pytest.LogCaptureFixture) -> None:
    serrate.jit(doubled_sums).tune(rows())
    with serrate.tuning():
        serrate.jit(lambda jt: jt + 1)(rows())
    serrate.jit(doubled_sums, tune="never")(rows((1, 2)))
    call = serrate.jit(doubled_sums, tune="background")
    call(rows((700, 0, 0, 1) * 50))
    for _ in range(1000):
        if call.tunings(rows((700, 0, 0, 1) * 50))[0].source == "measured":
            break
        time.sleep(0.01)
    assert measured.searches == 3 and waits(unwarned) == []


def test_in_the_background_the_first_call_does_not_wait(measured: Measured) -> None:
    call = serrate.jit(doubled_sums, tune="background")
    jt = rows()
    with engine.making:  # the thread cannot build anything yet
        torch.testing.assert_close(call(jt), 2 * by_loop(jt))
        assert [found.source for found in call.tunings(jt)] == ["usual"]
    deadline = time.monotonic() + 20
    while call.tunings(jt)[0].source != "measured":
        assert time.monotonic() < deadline
        call(jt)
        time.sleep(0.01)
    assert call.plan(jt).strategy == "persistent_dynamic"
    torch.testing.assert_close(call(jt), 2 * by_loop(jt))
    assert measured.searches == 1
    assert threading.main_thread().name in measured.threads  # arguments are copied by the caller


def test_the_choice_stays_so_the_bits_do(measured: Measured) -> None:
    jt = rows(tuple(range(40)))
    first = serrate.jit(doubled_sums)(jt)
    measured.seconds["masked"] = 1e-6
    for _ in range(3):
        assert torch.equal(serrate.jit(doubled_sums)(jt), first)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("threads", [None, 1])
def test_how_work_is_shared_changes_no_bit(order: str, threads: int | None) -> None:
    jt = rows((700, 3, 0, 4000, 12, 60) * 4)
    stage, call = _stage(jt)
    plain = stage.built(call, "cpp", Candidate("persistent_dynamic", (("chunk", 64),)))
    other = stage.built(call, "cpp", Candidate("persistent_dynamic", (("chunk", 64),), threads=threads, order=order))
    assert (other.plan.threads, other.plan.order) == (threads, order)
    results = [stage.run(call, call.args, stage.prepare(call, each)) for each in (plain, other)]
    out = len(call.args)
    assert torch.equal(results[0][out], results[1][out])
    torch.testing.assert_close(results[0][out], by_loop(jt), rtol=1e-4, atol=1e-3)


def _stage(jt: JaggedTensor) -> tuple[FusionStage, BoundCall]:
    compiled = fusion().compile("cpp")
    assert isinstance(compiled, Compiled)
    (stage,) = compiled.stages
    assert isinstance(stage, FusionStage)
    return stage, compiled.binder.bind([jt.values, jt.offsets])


class Ranks:
    """Stands in for torch.distributed, its store, and the clock."""

    def __init__(self, rank: int) -> None:
        self.rank, self.held, self.now = rank, dict[str, bytes](), 0.0
        self.arriving: dict[str, bytes] = {}
        """What rank 0 publishes a second after the start."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 1:
            self.held.update(self.arriving)

    def get_rank(self) -> int:
        return self.rank

    def set(self, name: str, value: bytes) -> None:
        self.held[name] = value

    def get(self, name: str) -> bytes:
        return self.held[name]

    def check(self, names: list[str]) -> bool:
        return all(name in self.held for name in names)


def test_all_ranks_use_the_choice_of_rank_zero(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Ranks(0)
    monkeypatch.setattr("serrate.tuner.ranks._group", lambda: group)
    monkeypatch.setattr("serrate.tuner.ranks.default_store", lambda: group)
    serrate.jit(doubled_sums)(rows())
    group.rank = 1
    # Another machine: nothing is on its disk, and it would measure something else.
    record.forget()
    for path in (settings.current().cache_dir / "tuned").rglob("*.json"):
        path.unlink()
    measured.seconds["masked"] = 1e-6
    call = serrate.jit(doubled_sums)
    for data in (rows(), rows((40, 2) * 90)):
        torch.testing.assert_close(call(data), 2 * by_loop(data))
        (found,) = call.tunings(data)
        assert (found.source, found.chosen.strategy) == ("rank 0", "persistent_dynamic")
    assert measured.searches == 1


def test_without_a_choice_of_rank_zero_the_others_run_the_usual_plan(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Ranks(3)
    monkeypatch.setattr("serrate.tuner.ranks._group", lambda: group)
    monkeypatch.setattr("serrate.tuner.ranks.default_store", lambda: group)
    monkeypatch.setattr("serrate.tuner.ranks.time", group)
    call = serrate.jit(doubled_sums)
    torch.testing.assert_close(call(rows()), 2 * by_loop(rows()))
    assert call.plan(rows()).strategy == "maskless" and measured.searches == 0
    waited = group.now
    for length in range(1, 200, 17):  # rank 0 may never run this program: it is waited for once
        call(rows((length, 3)))
    assert group.now == waited > 1


def test_the_others_wait_for_the_choice_of_rank_zero(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Ranks(0)
    monkeypatch.setattr("serrate.tuner.ranks._group", lambda: group)
    monkeypatch.setattr("serrate.tuner.ranks.default_store", lambda: group)
    monkeypatch.setattr("serrate.tuner.ranks.time", group)
    serrate.jit(doubled_sums)(rows())
    record.forget()
    for path in (settings.current().cache_dir / "tuned").rglob("*.json"):
        path.unlink()
    group.rank, group.arriving, group.held = 1, group.held, {}
    call = serrate.jit(doubled_sums)
    torch.testing.assert_close(call(rows()), 2 * by_loop(rows()))
    (found,) = call.tunings(rows())
    assert found.source == "rank 0" and 1 < group.now < 1.1


def test_what_rank_zero_finds_on_its_disk_reaches_the_others(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    serrate.jit(doubled_sums)(rows())
    record.forget()
    group = Ranks(0)
    monkeypatch.setattr("serrate.tuner.ranks._group", lambda: group)
    monkeypatch.setattr("serrate.tuner.ranks.default_store", lambda: group)
    serrate.jit(doubled_sums)(rows())
    assert measured.searches == 1 and group.held


# --- what must not reach the call ---------------------------------------------------------------------------------------


def test_a_fault_in_a_candidate_that_the_call_does_not_need(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = FusionStage.planned

    def faulty(self: FusionStage, chosen: Candidate, target: Target) -> Plan:
        if chosen.strategy == "masked":
            raise KeyError("a fault of the compiler")
        return planned(self, chosen, target)

    monkeypatch.setattr(FusionStage, "planned", faulty)
    call = serrate.jit(doubled_sums)
    torch.testing.assert_close(call(rows()), 2 * by_loop(rows()))
    reasons = {each.candidate.strategy: each.reason for each in call.tunings(rows())[0].tried}
    assert "a fault of the compiler" in reasons["masked"]


def test_copies_that_do_not_fit_in_memory(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no memory for a copy")

    monkeypatch.setattr("serrate.tiles.stage.CopiedBuffers", full)
    x = torch.arange(50.0)
    serrate.kernel(scaled)(x, 3.0)
    assert x.tolist() == [3.0 * k for k in range(50)]


def test_a_search_holds_up_no_other_thread(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    searching, others_ran = threading.Event(), threading.Event()
    measurer = measured.measurer

    def waiting(*args: object) -> ProgramMeasurer:
        searching.set()
        assert others_ran.wait(20)
        return measurer(*args)

    monkeypatch.setattr(engine, "ProgramMeasurer", waiting)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(serrate.jit(doubled_sums)(rows())))
    thread.start()
    assert searching.wait(20)
    # Another program is traced, built and run while the first one is measured.
    torch.testing.assert_close(serrate.jit(lambda jt: jt.sum(dim=1), tune="never")(rows()), by_loop(rows()))
    others_ran.set()
    thread.join(20)
    torch.testing.assert_close(found[0], 2 * by_loop(rows()))


def test_records_can_be_added_while_they_are_looked_through(tmp_path: Path) -> None:
    key = record.ProgramKey("text", (), "cpp", "device", "compiler")
    records, stop = Records(key, tmp_path), threading.Event()

    def add() -> None:
        for k in range(3000):
            records.keep(Tuning("p", key, Bucket((k,), None, None), Candidate("masked")))
        stop.set()

    thread = threading.Thread(target=add)
    thread.start()
    while not stop.is_set():
        records.nearest(Bucket((3,), None, None))
    thread.join()
    assert len(records.known) == 3000


def test_very_different_calls_do_not_share_a_plan(measured: Measured) -> None:
    serrate.jit(doubled_sums)(rows())
    large = serrate.jit(doubled_sums, tune="never")
    (found,) = large.tunings(rows((70,) * 5000))
    assert (found.source, found.chosen.strategy) == ("usual", "maskless")


@pytest.mark.parametrize("options", [{"tune": "never"}, {"effort": "none"}])
def test_who_asks_to_measure_is_obeyed(options: dict[str, str], measured: Measured) -> None:
    call = serrate.jit(doubled_sums, **options)
    assert call(rows()) is not None and measured.searches == 0
    (found,) = call.tune(rows())
    assert found.source == "measured" and measured.searches == 1
    with serrate.no_sync(), pytest.raises(CallError, match="no_sync"):
        call.tune(rows())


def test_the_tiles_that_a_user_fixes_are_part_of_the_key(measured: Measured) -> None:
    keys = set()
    for size in (2, 4, 4):
        kernel = serrate.kernel(row_sums, config=serrate.Config(lanes={"k": size}))
        kernel(rows())
        keys.add(kernel.tunings(rows())[0].key.digest)
    assert len(keys) == 2


def test_a_kernel_that_moves_within_its_file_keeps_its_records(measured: Measured, tmp_path: Path) -> None:
    keys = set()
    for lines in (0, 3):
        path = tmp_path / f"moved{lines}.py"
        path.write_text("import torch\nimport serrate.language as hl\n" + "\n" * lines + KERNEL)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = serrate.kernel(module.sums)
        kernel(torch.ones(3, 5))
        keys.add(kernel.tunings(torch.ones(3, 5))[0].key.digest)
    assert len(keys) == 1


KERNEL = """
def sums(x):
    out = torch.empty(x.size(0))
    for b in hl.tile(x.size(0)):
        total = hl.zeros([b])
        for k in hl.tile(x.size(1)):
            total = total + x[b, k].sum(1)
        out[b] = total
    return out
"""


# --- measuring itself ----------------------------------------------------------------------------------------------------


def scaled(x: torch.Tensor, factor: float) -> None:
    for i in hl.tile(x.size(0)):
        x[i] = x[i] * factor


def counted(index: torch.Tensor, out: torch.Tensor) -> None:
    for i in hl.tile(index.size(0)):
        hl.atomic_add(out, [index[i]], 1.0)


def test_measuring_leaves_arguments_alone(tuned: Path) -> None:
    jt = rows((30, 1, 70, 20))
    before, offsets = jt.values.clone(), jt.offsets.clone()
    torch.testing.assert_close(serrate.jit(doubled_sums)(jt), 2 * by_loop(jt))
    assert torch.equal(jt.values, before) and torch.equal(jt.offsets, offsets)


def test_programs_that_change_their_arguments_change_them_once(tuned: Path) -> None:
    x = torch.arange(1000.0)
    serrate.kernel(scaled)(x, 3.0)
    assert torch.equal(x, torch.arange(1000.0) * 3)
    index, out = torch.tensor([0, 1, 1, 3] * 25), torch.zeros(4)
    serrate.kernel(counted)(index, out)
    assert out.tolist() == [25.0, 50.0, 0.0, 25.0]


def test_copies_keep_views_of_one_memory_together() -> None:
    memory = torch.arange(10.0)
    buffers = CopiedBuffers([memory[2:5], memory[4:8]], [False, True], torch.device("cpu"), accumulates=False, copies=False)
    read, written = buffers._given
    written.fill_(9.0)
    assert read.tolist() == [2.0, 3.0, 9.0] and memory.tolist() == list(range(10))
    buffers.restore()
    assert read.tolist() == [2.0, 3.0, 4.0]


def test_builds_that_take_too_long_are_not_waited_for(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call goes on with what there is; the late one is found when it is wanted next."""
    late = threading.Event()
    load = measure.load_together

    def slow(executables: Sequence[CppExecutable]) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert late.wait(30)
        load(executables)

    monkeypatch.setattr(measure, "load_together", slow)
    monkeypatch.setitem(EFFORTS, "quick", Effort("quick", 0.5, 0.5, Halving(steps=0)))
    call, jt = serrate.jit(doubled_sums), rows()
    try:
        torch.testing.assert_close(call(jt), 2 * by_loop(jt))
    finally:
        late.set()
    (found,) = call.tunings(jt)
    assert found.chosen.strategy == "maskless"
    assert {each.reason for each in found.tried[1:]} == {SPENT}


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0001], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([float("nan"), 1.0], [float("nan"), 1.0], True),
        ([float("nan"), 1.0], [1.0, 1.0], False),
        ([float("inf"), 1.0], [float("inf"), 1.0], True),
        ([1e-6, 1000.0], [2e-6, 1000.0], True),
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 3], False),
    ],
)
def test_results_are_compared_up_to_rounding(found: list[float], wanted: list[float], same: bool) -> None:
    assert agrees(torch.tensor(found), torch.tensor(wanted)) is same


def test_a_plan_with_other_results_is_not_chosen(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the compiler: one strategy computes something else, and nothing is faster."""
    run = ProgramMeasurer._bound

    def faulty(self: ProgramMeasurer, ready: Prepared) -> Callable[[], None]:
        if ready.plan.strategy != "masked":
            return run(self, ready)
        self._buffers.tensors(ready)
        return lambda: [t.fill_(1.0) for t in self._buffers.written()] and None

    monkeypatch.setattr(ProgramMeasurer, "_bound", faulty)
    call, jt = serrate.jit(doubled_sums), rows()
    call(jt)
    (found,) = call.tunings(jt)
    reasons = {each.candidate: each.reason for each in found.tried}
    assert "differ" in reasons[Candidate("masked")]
    assert found.chosen.strategy != "masked"
