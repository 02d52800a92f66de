"""Runs a program in a process with the fake CUDA device of `benchmarks/fake_device.py`.

In: Python source, which calls `fake_device.install()` first. Out: a failure with the program's output if it raises.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
needs_fake_device = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch built for CPUs")


def run_on_fake_device(program: str) -> None:
    """Fails if the program raises."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "SERRATE_TUNE": "never", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
