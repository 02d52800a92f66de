"""An emulated CUDA device: calls run as on a GPU, and Triton's interpreter runs the kernels that they launch.

In: a torch built for CPUs, and `TRITON_INTERPRET=1`. Out: `install`, after which tensors on `cuda` have results. Kernels get
addresses, as on a GPU, so what the host computes for a launch (sizes, grids, places in scratch) is tested, not only kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import fake_device
from serrate.runtime import triton as runtime
from serrate.tensor.checks import deferred
from tests import triton_interpreter

launched: list[str] = []
"""The names of the kernels that were launched."""


def install() -> None:
    """Makes the device. Cannot be undone in a process."""
    fake_device.install()
    triton_interpreter.install()
    runtime.TritonFunction._compiled_and_launched = _launched  # type: ignore[method-assign]
    runtime.TritonFunction.prepare = _prepared  # type: ignore[method-assign]
    deferred._copy_to_host = lambda numbers: (numbers.cpu(), None)


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor at an address, of which the interpreter reads only that and the dtype; without elements at 0."""
    if not address:
        return torch.empty(0, dtype=dtype, device="cpu")
    size = dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8, count=size).view(dtype)


def _launcher(function: Any, dtypes: Sequence[torch.dtype], blocks: Sequence[tuple[tuple[int, int], torch.dtype]]) -> Any:
    """The launcher of a kernel that takes tensors of these dtypes, then matrices, then numbers."""

    def run(x: int, y: int, z: int, stream: int, _function: Any, _metadata: Any, *arguments: Any) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        given = arguments[3:]
        tensors = [_at(address, dtype) for address, dtype in zip(given, dtypes, strict=False)]
        matrices = given[len(dtypes) : len(dtypes) + len(blocks)]
        boxes = [
            TensorDescriptor(_at(matrix.data_ptr(), dtype), list(matrix.shape), list(matrix.strides), list(block))
            for matrix, (block, dtype) in zip(matrices, blocks, strict=True)
        ]
        launched.append(function.__name__)
        function[x, y, z](*tensors, *boxes, *given[len(dtypes) + len(blocks) :])

    return run


def _kernel(function: Any, tensors: Sequence[torch.Tensor], matrices: Sequence[runtime.Matrix]) -> Any:
    dtypes = [t.dtype for t in tensors]
    return _launcher(function, dtypes, [(m.block, dtypes[m.position]) for m in matrices])


def _launched(
    self: runtime.TritonFunction,
    grid: tuple[int, int, int],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    matrices: Sequence[runtime.Matrix],
) -> Any:
    run = _kernel(self.function, tensors, matrices)
    boxes = [runtime.MatrixInMemory(tensors[m.position].data_ptr(), m.shape) for m in matrices]
    run(*grid, 0, None, None, None, None, None, *[t.data_ptr() for t in tensors], *boxes, *numbers)
    return SimpleNamespace(run=run, function=None, packed_metadata=None)


def _prepared(
    self: runtime.TritonFunction, tensors: Sequence[Any], numbers: Sequence[int], matrices: Sequence[runtime.Matrix] = ()
) -> None:
    run = _kernel(self.function, [runtime.whole(t) for t in tensors], matrices)
    self.compiled.setdefault((fake_device.DEVICE, runtime.wide(numbers)), runtime.LoadedKernel(run, None, None))
