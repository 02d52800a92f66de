"""Every program is built under every strategy on a CPU and a GPU, and prints the same text in every process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from tests.codegen.sources import chosen_sources, fusions, sources
from tests.conftest import FULL, ROOT


def digests(seed: int, step: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.codegen.sources", str(step)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_text_of_a_program_does_not_depend_on_the_process() -> None:
    """Sets of names have another order in each process; programs are found on disk by their text."""
    step = 1 if FULL else 50
    first, second = (digests(seed, step).splitlines() for seed in (1, 3))
    assert first == second and len(first) > 10


@pytest.mark.parametrize("part", range(20))
@pytest.mark.sampled(7)
def test_every_program_is_built(part: int) -> None:
    """Under each strategy, and under each plan that is chosen for rows of some lengths on a GPU."""
    count = 0
    for _, fusion in itertools.islice(fusions(), part, None, 20):
        count += sum(1 for _ in itertools.chain(sources(fusion), chosen_sources(fusion)))
    assert count > 100
