"""Generated C++ under the address and undefined-behaviour sanitizers: every read and write is inside its tensor.

In: a sample of the engine's cases, all of them under SERRATE_TEST_FULL=1. Out: the sanitizer's report of the first bad access.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine import test_composed as composed
from tests.engine.cases import CASES, NESTED_CASES
from tests.engine.oracle import FULL, STRATEGIES, VARIANTS, Case, pick

pytestmark = pytest.mark.sanitize

ROOT = Path(__file__).resolve().parents[2]
Point = tuple[str, str, dict[str, Any], str, tuple[int | None, ...], int, bool]

SAMPLE = (
    *("add_component", "where_component", "cast_int32", "bool_add_int"),
    *("sum_rows", "sum_everything", "amax_rows", "var_rows", "logsumexp_both", "softmax_rows", "layer_norm_both"),
    *("matmul_shared", "matmul_each", "norm_matmul", "two_outputs", "sum_wrapping", "mul_wrapping"),
)

COMPOSED = ("softmax", "sum of two", "var", "cumsum", "matmul, softmax")


def _point(case: Case, strategy: str, levels: int) -> Point:
    options, dtype, features = pick(
        list(itertools.product(VARIANTS[strategy], case.dtypes, case.features)), "sanitize", case.name, strategy, levels
    )
    stream = pick([False, True], case.name, strategy)
    return case.name, strategy, options, str(dtype).removeprefix("torch."), features, levels, stream


def points() -> list[Point]:
    if FULL:
        pairs = [(case, 1) for case in CASES.values()] + [(case, 2) for case in NESTED_CASES.values()]
        return [_point(case, strategy, levels) for case, levels in pairs for strategy in STRATEGIES]
    some = [(CASES[name], 1) for name in SAMPLE] + [
        (NESTED_CASES[n], 2) for n in ("sum_groups", "softmax_positions", "add_group")
    ]
    return [_point(case, pick(STRATEGIES, "sanitize", case.name), levels) for case, levels in some]


def composed_points() -> list[Any]:
    """Of compositions, those that run on cpp by default; a few of them, unless all are asked for."""
    found = [point for point in composed.points(full=False) if point[2] == "cpp"]
    shown = [(o, c, *way, str(dtype).removeprefix("torch."), dims) for o, c, _, way, dtype, dims in found]
    return shown if FULL else [point for point in shown if point[0] in COMPOSED][:: len(COMPOSED)]


def run_sanitized(*arguments: str, module: str = "tests.codegen.sanitized") -> subprocess.CompletedProcess[str]:
    """A module in a process of its own, with the sanitizer's library loaded before everything else."""
    compiler = os.environ.get("CXX", "g++")
    # The sanitizer looks for the function that throws when it is loaded, so what has it comes along.
    found = [_library(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    if not Path(found[0]).is_absolute():
        pytest.skip(f"{compiler} has no libasan.so to preload")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(path for path in found if Path(path).is_absolute()),
        # Python itself leaks at exit, and is not what is tested here; memory that is not there is an error of torch's. The
        # stack frames that gcc 13 sets apart to see uses after a return are not aligned to 64 bytes, as its own code expects.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
        "SERRATE_BACKEND": "cpp",
    }
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)


def _library(compiler: str, name: str) -> str:
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


CHUNK = 8 if FULL else 20
"""Points of one process: starting it costs as much as building two programs."""


@pytest.mark.parametrize("part", range(-(-len(points()) // CHUNK)))
def test_no_access_outside(part: int) -> None:
    done = run_sanitized(json.dumps(points()[part * CHUNK : (part + 1) * CHUNK]))
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(-(-len(composed_points()) // CHUNK)))
def test_no_access_outside_compositions(part: int) -> None:
    done = run_sanitized("composed", json.dumps(composed_points()[part * CHUNK : (part + 1) * CHUNK]))
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_sanitizer_sees_an_overrun() -> None:
    done = run_sanitized("overrun")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
