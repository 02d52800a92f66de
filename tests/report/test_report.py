"""What `explain` says, as data, as text and as a page."""

from __future__ import annotations

import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, ir, jit, ops
from serrate.engine import CompiledStage
from serrate.report import Report
from serrate.schedule.strategies import SCHEDULES
from serrate.tuner.buckets import Bucket
from serrate.tuner.candidates import Candidate
from serrate.tuner.record import ProgramKey, Tuning
from serrate.tuner.search import Tried
from tests.report.browser import BROWSER, measured

LENGTHS = [3, 0, 17, 40, 8, 0, 25, 1, 9, 31]


def rows(width: int = 4) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.ones(sum(LENGTHS), width), LENGTHS)


@serrate.kernel
def norms(x: Any, scale: float = 1.0) -> Any:
    out = torch.empty(x.num_rows)
    for b in hl.tile(x.num_rows):
        acc = hl.zeros([b])
        for k in hl.tile(x.max_length):
            acc = acc + (x[b, k, :] ** 2).sum(-1).sum(-1)
        out[b] = torch.sqrt(acc) * scale
    return out


@jit
def softmax(x: Any) -> Any:
    return torch.softmax(x, 1)


def fused() -> Report:
    with ir.Fusion("sums") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    return f.compile("cpp").explain(rows().values, rows().offsets)


REPORTS = {"kernel": lambda: norms.explain(rows()), "jit": lambda: softmax.explain(rows()), "fusion": fused}


@pytest.mark.parametrize("kind", REPORTS)
def test_kernels_functions_and_fusions_have_the_same_report(kind: str) -> None:
    report = REPORTS[kind]()
    (dim,) = report.rows[0].dims
    assert (dim.rows, dim.total, dim.max_length, dim.empty_rows) == (10, sum(LENGTHS), 40, 2)
    assert dim.mean_length == pytest.approx(statistics.mean(LENGTHS))
    assert dim.variance == pytest.approx(statistics.pvariance(LENGTHS))
    assert sum(each.rows for each in dim.histogram) == 10
    (stage,) = report.stages
    assert stage.backend == "cpp" and stage.strategy in SCHEDULES and stage.why
    assert {trial.strategy for trial in stage.trials} == set(SCHEDULES)  # it is not a library call
    assert [trial.strategy for trial in stage.trials if trial.chosen] == [stage.strategy]
    assert all(trial.lanes is not None and trial.lanes.existing > sum(LENGTHS) for trial in stage.trials)
    assert stage.kept and stage.proven and all(bound.reason for bound in (*stage.kept, *stage.proven))
    assert not {bound.what for bound in stage.kept} & {bound.what for bound in stage.proven}
    assert stage.tiles and all(tile.why for tile in stage.tiles)
    assert 'extern "C" void' in stage.source
    text = str(report)
    for part in (*stage.plan, *map(str, stage.tiles), *map(str, stage.kept), stage.why, "guards proven away", "█"):
        assert part in text, part
    assert json.loads(json.dumps(report.as_dict()))["stages"][0]["strategy"] == stage.strategy


def test_rows_are_named_by_their_arguments() -> None:
    a, b = rows(), rows()
    report = jit(lambda first, second, third: (first + second, third.sum(1))).explain(a, a * 2, b)
    assert [each.name for each in report.rows] == ["first, second", "third"]


def test_the_reason_for_a_plan_says_where_it_comes_from() -> None:
    asked = serrate.kernel(norms.fn, strategy="masked").explain(rows())
    assert (asked.stages[0].strategy, asked.stages[0].why) == ("masked", "it was requested")
    with serrate.batch_invariant():
        assert "batch_invariant" in softmax.explain(rows()).stages[0].why
    long = JaggedTensor.from_lengths(torch.ones(400_010, 4), [400_000, 10])
    giant = jit(lambda x: x.sum(1), tune="never").explain(long)
    assert giant.stages[0].strategy == "persistent_dynamic" and "would wait for it" in giant.stages[0].why


def test_a_schedule_by_hand_is_the_only_candidate() -> None:
    with ir.Fusion("doubled") as f:
        x = f.input((None, 64), torch.float32)
        y = ops.mul(x, 2.0)
        y.split(1, 16)
        f.output(y)
    (stage,) = f.compile("cpp").explain(torch.ones(3, 64)).stages
    assert stage.why == "it was scheduled by hand"
    assert [(trial.name, trial.chosen) for trial in stage.trials] == [("by_hand", True)]


def test_a_strategy_that_cannot_run_says_why() -> None:
    @serrate.kernel
    def carried(x: Any) -> Any:
        out = torch.zeros(x.num_rows)
        for b in hl.tile(x.num_rows):
            acc, scale = hl.zeros([b]), hl.full([b], 1.0, torch.float32)
            for _ in hl.grid(2):
                for t in hl.tile(x.max_length):
                    acc = acc + (x[b, t, :].sum(-1) * scale[:, None]).sum(1)
                scale = scale * 0.5
            out[b] = acc
        return out

    trials = {trial.strategy: trial for trial in carried.explain(rows()).stages[0].trials}
    assert "cannot run" in trials["persistent_dynamic"].reason and "carries" in trials["persistent_dynamic"].reason
    assert trials["persistent_dynamic"].lanes is None and trials["maskless"].chosen


def measured_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if plans had been measured."""
    tried = (
        Tried(Candidate("maskless"), 2.5e-3, 5),
        Tried(Candidate("masked"), 1e-3, 7),
        Tried(Candidate("persistent_dynamic"), None, 0, "it takes too long"),
        Tried(Candidate("masked", (("rows", 16),)), 1.25e-3, 2, "dropped after 2 samples"),
    )
    key = ProgramKey("", (), "cpp", "", "")
    known = Tuning("softmax", key, Bucket((), None, None), Candidate("masked"), tried, 1.0, "quick", "measured")
    monkeypatch.setattr(CompiledStage, "tuning", lambda *_: known)


def test_what_was_measured_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_tuning(monkeypatch)
    stage = softmax.explain(rows()).stages[0]
    assert stage.why == "it is the fastest of 3 candidates that were timed, 2.50x the usual one"
    assert [(t.name, t.seconds, t.reason) for t in stage.trials] == [
        ("maskless", 2.5e-3, ""),
        ("masked", 1e-3, ""),
        ("persistent_dynamic", None, "it takes too long"),
        ("masked(rows=16)", 1.25e-3, "dropped after 2 samples"),
    ]
    text = str(softmax.explain(rows()))
    assert re.search(r"\* masked +1 ms; .* lanes are holes", text) and "1.25 ms; dropped after 2 samples" in text


class _Page(HTMLParser):
    """Checks that elements are closed, and notes everything that a page could load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "rect", "line", "path", "br", "circle", "polygon"):
            self.open.append(tag)
        self.loaded += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]
        self.loaded += [tag] if tag in ("script", "link", "iframe", "object", "img") else []

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line", "path", "circle", "polygon"):
            assert self.open.pop() == tag, tag


def test_a_page_is_whole_and_loads_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured_tuning(monkeypatch)
    report = softmax.explain(rows(), html=tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    page.close()
    assert page.open == [] and page.loaded == []
    assert "@import" not in text and "url(" not in text and "prefers-color-scheme: dark" in text
    assert "r0 &lt; T1[c0 + 1] - T1[c0]" in text, "source and conditions are escaped"
    assert report.stages[0].drawing in text


@pytest.mark.skipif(BROWSER is None, reason="needs a browser, such as chromium")
@pytest.mark.parametrize(("width", "dark"), [(1100, False), (420, True)])
def test_a_browser_lays_the_page_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int, dark: bool) -> None:
    measured_tuning(monkeypatch)
    softmax.explain(rows(), html=tmp_path / "report.html")
    found = measured((tmp_path / "report.html").read_text(encoding="utf-8"), tmp_path, width, dark=dark)
    assert found["wide"] == 0, "nothing is wider than the window"
    assert found["cut"] == [], "no label of a plot is cut off"
    assert found["bars"] > 10 and found["height"] > 1000
    assert {"Time per candidate", "Lanes per strategy", "Domains", "Source"} <= set(found["headings"])
    assert found["resources"] == []
    ground, ink = ([int(n) for n in re.findall(r"\d+", found[name])[:3]] for name in ("ground", "ink"))
    assert (sum(ground) < sum(ink)) is dark
