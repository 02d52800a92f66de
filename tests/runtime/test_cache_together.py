"""Many processes with one empty cache: every variant is built once, answers are right, and a killed process does no harm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serrate.cli.cache import entries
from serrate.runtime import cache_folder
from tests.runtime.together import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """A file with one line for each run of the compiler that a script `CXX` starts."""
    real, calls = shutil.which("g++") or shutil.which("clang++"), tmp_path / "calls"
    if real is None:
        pytest.skip("needs a C++ compiler")
    calls.touch()
    script = tmp_path / "counting-compiler"
    # Generated functions have the digest of their program in their name.
    script.write_text(
        f"""#!/bin/sh
if [ "$1" != --version ]; then
  for source; do :; done
  echo call $(grep -o 'void [a-z_]*_[0-9a-f]\\{{8\\}}(void' "$source" | grep -o '[0-9a-f]\\{{8\\}}(' | tr -d '(') >> "{calls}"
fi
exec {real} "$@"
"""
    )
    script.chmod(0o700)
    return script


def run(folder: Path, script: Path, *arguments: object) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SERRATE_CACHE_DIR": str(folder),
        "CXX": str(script),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.runtime.together", *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def check_usable(folder: Path, programs: int) -> None:
    """All entries are sound, and what killed processes left is found and removed."""
    held = entries(folder)
    assert len(held) == programs
    for entry in held:
        assert cache_folder.get(entry.path.parent, entry.path.name)
    for path in cache_folder.leftovers(folder / "programs"):
        cache_folder.discard(path)
    left = {path.name for path in (folder / "programs").iterdir()}
    assert left == {entry.path.name for entry in held} | {cache_folder.LOCKS}


def test_processes_that_start_together_build_every_variant_once(tmp_path: Path, counted: Path) -> None:
    run(tmp_path / "cache", counted, 8, 1, "live")
    assert len((tmp_path / "calls").read_text().splitlines()) == len(STRATEGIES)
    check_usable(tmp_path / "cache", len(STRATEGIES))


@pytest.mark.slow
def test_processes_that_tune_together_build_every_candidate_once(tmp_path: Path, counted: Path) -> None:
    run(tmp_path / "cache", counted, 8, 1, "tune")
    built = [digest for line in (tmp_path / "calls").read_text().splitlines() for digest in line.split()[1:]]
    assert len(built) == len(set(built)) == len(entries(tmp_path / "cache")) > 3


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killing_one_of_many_processes_leaves_a_usable_cache(tmp_path: Path, counted: Path, rounds: int) -> None:
    run(tmp_path / "cache", counted, 8, rounds, "kill")
    check_usable(tmp_path / "cache", rounds * len(STRATEGIES))
    built = len((tmp_path / "calls").read_text().splitlines())
    # Only what the victim was building is built a second time.
    assert rounds * len(STRATEGIES) <= built <= rounds * (len(STRATEGIES) + 1)
