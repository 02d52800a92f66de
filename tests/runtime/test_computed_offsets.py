"""Offsets that a program computes on a GPU: checked there in one launch, without a structure; errors surface at a later call.

In: calls on a fake device, in a separate process. Out: failures if a check is left out or repeated.
"""

from __future__ import annotations

from tests.runtime.on_fake_device import needs_fake_device, run_on_fake_device

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


@needs_fake_device
def test_computed_offsets_are_checked_once_per_call() -> None:
    run_on_fake_device(CALLS)
