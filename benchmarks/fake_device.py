"""A fake CUDA device: tensors on it, and launches of Triton kernels that do nothing.

In: a torch that was built for CPUs. Out: `install`, after which programs run as on a GPU up to the launch of each kernel, so that
the host's time for a call can be measured without one. Results of kernels are garbage; offsets are still checked.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import driver

from benchmarks.native import compiler
from serrate.codegen.triton.offsets import NUMBERS
from serrate.ir.fusion import NOTHING
from serrate.runtime import device_checks
from serrate.runtime import triton as runtime
from serrate.tensor.checks import deferred

DEVICE = torch.device("cuda", 0)
WORKERS = 132
"""The multiprocessors of the device, as many as an H200 has."""
launches: list[int] = [0]
"""How many kernels were launched."""
stream: list[int] = [0]
"""The address of the current stream."""
waits: list[Any] = []
"""The stream of each `wait_stream`."""
kept_for: list[Any] = []
"""The stream of each `record_stream`."""


def install() -> None:
    """Makes the device. Cannot be undone in a process."""
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise RuntimeError("the device stands in for a GPU only in a torch that was built for CPUs")
    torch.ops.load_library(str(_built()))  # type: ignore[no-untyped-call]
    replacements: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: None,
        "device_count": lambda: 1,
        "current_stream": lambda *_: SimpleNamespace(cuda_stream=stream[0], wait_stream=waits.append),
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=WORKERS, name="none", total_memory=1 << 37),
        "get_device_name": lambda *_: "none",
    }
    for name, function in replacements.items():
        setattr(torch.cuda, name, function)
    torch.Tensor.record_stream = lambda self, on: kept_for.append(on)  # type: ignore[method-assign, assignment]
    driver.set_active(SimpleNamespace(get_current_stream=lambda index: 0))
    runtime.TritonFunction._compiled_and_launched = _launched  # type: ignore[method-assign]
    runtime.TritonFunction.prepare = _prepared  # type: ignore[method-assign]
    deferred._copy_to_host = _copied
    _unpinned_slots()


@functools.cache
def _built() -> Path:
    """The library with the operations of the device, which is built once for a torch."""
    torch_folder = Path(torch.__file__).parent
    source = Path(__file__).with_name("fake_cuda.cpp")
    flags = ("-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}")
    key = hashlib.sha256("\0".join([source.read_text(), torch.__version__, *flags]).encode()).hexdigest()[:16]
    target = Path(__file__).resolve().parents[1] / "build" / f"fake_cuda-{key}.so"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            subprocess.run([compiler(), *flags, str(source), "-o", str(made), "-ltorch_cpu", "-lc10"], check=True)
            made.replace(target)  # other processes find all of it or nothing
    return target


def _launched(
    self: runtime.TritonFunction,
    grid: tuple[int, int, int],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    matrices: Sequence[runtime.Matrix],
) -> Any:
    """What Triton compiles: a kernel that does nothing, except that the check of offsets reports what it would."""
    run = KERNELS.get(self.function.__name__, _nothing)
    run(*grid, 0, None, None, None, None, None, *[t.data_ptr() for t in tensors], *matrices, *numbers)
    return SimpleNamespace(run=run, function=None, packed_metadata=None)


def _prepared(
    self: runtime.TritonFunction, tensors: Sequence[Any], numbers: Sequence[int], matrices: Sequence[runtime.Matrix] = ()
) -> None:
    """The same, without a launch."""
    run = KERNELS.get(self.function.__name__, _nothing)
    self.compiled.setdefault((DEVICE, runtime.wide(numbers)), runtime.LoadedKernel(run, None, None))


def _nothing(*_: Any) -> None:
    launches[0] += 1


def _summary(*given: Any) -> None:
    launches[0] += 1
    offsets, found, count = given[-3:]
    numbers = (ctypes.c_int64 * count).from_address(offsets)
    # Only hints read the extremes, and there are no hints.
    (ctypes.c_int64 * NUMBERS).from_address(found)[:] = [numbers[0], numbers[count - 1], 0, 0]


def _report(*given: Any) -> None:
    launches[0] += 1
    ctypes.memmove(given[-1], NO_MISTAKE, 8 * NUMBERS)


def _count_keys(*given: Any) -> None:
    launches[0] += 1
    grouped[0] = given[-3]


def _place_groups(*given: Any) -> None:
    """Offsets that are legal, whatever the keys: all of them are in the last group."""
    launches[0] += 1
    offsets, count, _ = given[-3:]
    (ctypes.c_int64 * (count + 1)).from_address(offsets)[:] = [0] * count + [grouped[0]]


grouped: list[int] = [0]
"""How many keys were counted last."""
KERNELS = {"summary": _summary, "report": _report, "count_keys": _count_keys, "place_groups": _place_groups}
"""Kernels whose results the host reads."""
NO_MISTAKE = (ctypes.c_int64 * NUMBERS)(*[NOTHING] * NUMBERS)


def _unpinned_slots() -> None:
    """Slots for the numbers of checks in plain memory of the host."""
    here = device_checks.Slots(torch.device("cpu"))
    here.device = DEVICE
    device_checks._slots = functools.cache(lambda device: here)


def _copied(packed: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Numbers of a check that arrive at once, and say that nothing is wrong."""
    return packed.cpu().fill_(NOTHING), None
