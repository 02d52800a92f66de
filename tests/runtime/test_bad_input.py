"""Thousands of random inputs, much of them bad: a right answer or a clear error, never a fault.

In: `bad_input.py`, run in processes of their own: a sample as it is, all of them with generated C++ built by the sanitizers. Out:
the seed of the first input that was not treated well, and what happened.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.codegen.test_sanitize import ROOT, run_sanitized
from tests.conftest import FULL

MODULE = "tests.runtime.bad_input"
SAMPLE = 100
PROCESSES, INPUTS = 5, 2100
"""More than 10,000 inputs under the sanitizers."""


def test_a_sample() -> None:
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-m", MODULE, "0", str(SAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.sanitize
@pytest.mark.skipif(not FULL, reason="ten thousand inputs: make sanitize")
@pytest.mark.parametrize("part", range(PROCESSES))
def test_under_sanitizers(part: int) -> None:
    done = run_sanitized(str(part * INPUTS), str(INPUTS), "sanitize", module=MODULE)
    assert done.returncode == 0, done.stderr[-4000:]
