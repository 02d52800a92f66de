"""Programs compile for GPUs that need not be there: NVIDIA's sm_80 and sm_90, AMD's gfx942. All examples and operations with
SERRATE_TEST_FULL=1, else a few."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.codegen.gpu_targets import CALLS, COMPOSED, EXAMPLES, FUSIONS, PRODUCTS
from tests.conftest import FULL

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = [
    "sm_80/jagged_mean/maskless",
    "sm_90/jagged_dense_bmm/masked",
    "gfx942/jagged_layer_norm/persistent_dynamic",
    "sm_90/composed/columns of the next dim beside rows",
    "sm_90/product/resident",
    "sm_90/cat_promoted, one level/masked",
    *CALLS,
    *(name for start in (17, 400, 741) for name in FUSIONS[start : start + 3]),
]
EVERY = (CALLS, PRODUCTS, COMPOSED, EXAMPLES, FUSIONS)
PARTS = [[name for kind in EVERY for name in kind[part::30]] for part in range(30)] if FULL else [SAMPLE]


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_programs_compile(part: int) -> None:
    """In a process of its own: this one interprets."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.codegen.gpu_targets", *PARTS[part]]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
