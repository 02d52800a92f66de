"""Offsets that a program computes on a device: checked there in one launch, without a structure; errors surface at a later call.

In: a device that is not there, in a process of its own. Out: failures if a check is left out or repeated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CALLS = """
import ctypes
import torch
from benchmarks import fake_device
fake_device.install()
import serrate
from serrate import ir, ops

checks, end = [], [10]

def summary(*given):
    checks.append(given)
    fake_device._summary(*given)

def groups(*given):
    offsets, count, _ = given[-3:]
    (ctypes.c_int64 * (count + 1)).from_address(offsets)[:] = [0] * count + end

fake_device.KERNELS |= {"summary": summary, "place_groups": groups}

def grouped(returns_rows):
    with ir.Fusion("grouped") as f:
        x, keys = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        bounds, places = ops.group_by(keys, 4)
        rows = ops.as_nested(ops.index(x, places), bounds)
        f.output(rows * 2 if returns_rows else ops.sum(rows, 1))
    return f.compile()

args = torch.empty(10, 2, device="cuda"), torch.empty(10, dtype=torch.int64, device="cuda")
for returns_rows in (False, True):
    program = grouped(returns_rows)
    for _ in range(4):
        checks.clear()
        program(*args)
        assert len(checks) == 1, (returns_rows, len(checks))
serrate.wait_for_checks()
end[0] = 7
try:
    for _ in range(2):
        program(*args)
except serrate.errors.StructureError as error:
    assert "offsets" in str(error) and "7" in str(error) and "10" in str(error) and "asynchronously" in str(error), error
else:
    raise AssertionError("wrong offsets went unnoticed")
"""


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="stands in for a GPU only where torch has none")
def test_computed_offsets_are_checked_once_per_call() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "SERRATE_TUNE": "never", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", CALLS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
