"""Host code: calls with new rows on an emulated device, whose results are those of plain torch.

In: programs of a user, each in a process in which the device is installed. Out: failures if a result is wrong, or if calls whose
program is known are not served by host code.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.runtime.on_fake_device import ROOT, needs_fake_device

PROGRAMS = (
    "sums layer_norm pointwise products attention nested lookups routing",
    "softmax two_tensors changed_offsets derivations kernels",
)  # fmt: skip


@needs_fake_device
@pytest.mark.parametrize("programs", PROGRAMS)
def test_calls_with_new_rows(programs: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SERRATE_TUNE": "never", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.on_emulated_device", *programs.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
