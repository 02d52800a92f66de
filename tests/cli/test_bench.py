"""`serrate bench` as a user meets it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from serrate.cli import app, bench


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})


def test_without_names_it_says_what_there_is() -> None:
    listed = run()
    assert listed.exit_code == 0
    assert all(name in listed.output for name in bench.BENCHMARKS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "unknown benchmark 'nothing'"),
        (["cpu", "--only", "some"], "--only some: there are sum, mean"),
        (["cpu", "--lengths", "long"], "--lengths long: there are uniform"),
        (["cpu", "--dtype", "int8"], "--dtype int8: there are float32, bfloat16"),
        (["spine", "--only", "mean"], "--only mean: there are sum, pointwise"),
        (["kernels", "--only", "sum"], "--only sum: there are jagged_dense_add, jagged_sum"),
    ],
)
def test_a_name_that_there_is_not_is_refused_with_those_there_are(arguments: list[str], said: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert said in " ".join(refused.output.replace("│", " ").split())


def test_peers_are_listed_with_their_version_or_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"fbgemm_gpu"}
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in missing else real(name, *more))
    listed = run("--peers")
    assert listed.exit_code == 0
    lines = {line.split("│")[2].strip(): line for line in listed.output.splitlines() if line.count("│") == 5}
    assert "missing" in lines["fbgemm-gpu-cpu"] and "pip install 'serrate[peers]'" in lines["fbgemm-gpu-cpu"]
    assert "missing" not in lines["torch"] and "pip" not in lines["torch"]


def test_the_cpu_table_shows_the_limit_ours_and_peers_and_writes_them(tmp_path: Path) -> None:
    chosen = ("--only", "sum", "--lengths", "exponential", "--dtype", "float32", "--no-compiled")
    shown = run("cpu", "--quick", "--rounds", "2", *chosen, "--out", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    assert "embedding_bag" in shown.output and "hand C++" in shown.output
    (cell,) = json.loads((tmp_path / "cpu.json").read_text())["cells"]
    assert (cell["task"], cell["dtype"], cell["lengths"], cell["goal"]) == ("sum", "float32", "exponential", 90)
    assert cell["ours"] > 0 and cell["limit"] > 0 and {"NestedTensor", "padded + mask", "segment_reduce"} <= set(cell["peers"])
    assert "| sum | exponential" in (tmp_path / "cpu.md").read_text()
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "cpu-float32.png").stat().st_size > 0
    else:
        # The line is broken where the terminal ends.
        assert "pip install 'serrate[bench]'" in " ".join(shown.output.split())


def test_calls_are_shown_beyond_their_kernel(tmp_path: Path) -> None:
    shown = run("calls", "--quick", "--rounds", "1", "--only", "sum", "--out", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    lines = {line["method"]: line for line in json.loads((tmp_path / "calls.json").read_text())["lines"]}
    assert (
        lines["jit"]["goal"] == 30
        and lines["jit"]["beyond"] == lines["jit"]["microseconds"] - lines["the kernel"]["microseconds"]
    )
    assert lines["new lengths: jit"]["microseconds"] > 0


@pytest.mark.slow
def test_the_tuner_is_shown_with_its_regret_and_its_cost(tmp_path: Path) -> None:
    shown = run("tuner", "--quick", "--rounds", "2", "--only", "jagged_sum", "--lengths", "giant", "--out", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    assert "regret" in shown.output and "tuning, s" in shown.output and "geometric mean" in shown.output
    (line,) = json.loads((tmp_path / "tuner.json").read_text())["lines"]
    assert line["candidates"] >= 3 and line["fastest_ms"] > 0 and line["tuning_s"] > 0


@pytest.mark.slow
def test_kernels_are_shown_beside_their_bar_and_with_what_calls_cost(tmp_path: Path) -> None:
    chosen = ("--only", "jagged_sum", "--only", "grouped_gemm", "--lengths", "exponential")
    shown = run("kernels", "--quick", "--rounds", "1", *chosen, "--out", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    assert "hand C++" in shown.output and "later calls" in shown.output
    lines = json.loads((tmp_path / "kernels.json").read_text())["lines"]
    speeds, starts = [line for line in lines if "ratio" in line], [line for line in lines if "first" in line]
    assert [(each["example"], each["against"], each["goal"]) for each in speeds] == [
        ("jagged_sum", "hand C++", 1.1),
        ("grouped_gemm", "torch", 1.0),
    ]
    assert all(each["ratio"] == each["ours"] / each["bar"] and not each["fault"] for each in speeds)
    assert [each["example"] for each in starts] == ["jagged_sum", "grouped_gemm"]
    assert all(each["first"] > 0 and each["later"] > 0 and not each["fault"] for each in starts)


@pytest.mark.slow
def test_conversions_between_layouts_are_measured_on_processes(tmp_path: Path) -> None:
    shown = run("distributed", "--quick", "--rounds", "2", "--out", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    (line,) = json.loads((tmp_path / "distributed.json").read_text())["lines"]
    assert line["milliseconds"]["to aligned"] > 0 and line["ratios"]["to unaligned"] > 0
