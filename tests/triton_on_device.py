"""Triton programs for CPU tensors, compiled and run on a GPU: tensors are copied there and, where written, back.

In: the runtime's Triton executables. Out: the same, which take CPU tensors too. So one test serves both processes: the
one that interprets Triton, and the one that compiles it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from serrate.ir.loops import LoopProgram, Write, nodes
from serrate.runtime import triton as runtime


def install(device: torch.device) -> None:
    """Replaces the two functions of the runtime that launch kernels, unless they are replaced already."""
    if not hasattr(runtime.TritonExecutable.bound, "__wrapped__"):
        runtime.TritonExecutable.bound = bound_on(device, runtime.TritonExecutable.bound)  # type: ignore[method-assign]
        runtime.derived_on_device = derived_on(device, runtime.derived_on_device)


def bound_on(device: torch.device, plain: Callable[..., Any]) -> Callable[..., Any]:
    """`TritonExecutable.bound`, for tensors on the device or on a CPU."""

    @functools.wraps(plain)
    def bound(self: Any, arrays: Sequence[torch.Tensor], symbols: Sequence[int]) -> Callable[[Sequence[Any]], None]:
        here: list[Callable[[Sequence[Any]], None]] = []
        written = _written(self.program)

        def run(tensors: Sequence[Any]) -> None:
            if not any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in tensors):
                if not here:
                    here.append(plain(self, arrays, symbols))
                here[0](tensors)
                return
            copies = _Copies(device)
            moved = [copies.of(t) for t in tensors]
            plain(self, [copies.of(a) for a in arrays], symbols)(moved)
            for k in written:
                # `.data`: a program does not count as a write, which torch would count as a new version of the tensor.
                tensors[k].data.copy_(moved[k])

        return run

    return bound


def derived_on(device: torch.device, plain: Callable[..., Any]) -> Callable[..., Any]:
    """`derived_on_device`, for tensors on the device or on a CPU."""

    @functools.wraps(plain)
    def derived(arrays: Any, tensors: Mapping[str, torch.Tensor], symbols: Any, where: torch.device) -> Any:
        if where.type != "cpu":
            return plain(arrays, tensors, symbols, where)
        copies = _Copies(device)
        found = plain(arrays, {name: copies.of(t) for name, t in tensors.items()}, symbols, device)
        return {array: made.cpu() for array, made in found.items()}

    return derived


def _written(program: LoopProgram) -> list[int]:
    """The places of the tensors that a program writes."""
    found = {n.tensor for kernel in program.kernels for n in nodes(kernel.body) if isinstance(n, Write)}
    return [k for k, tensor in enumerate(program.tensors) if tensor in found]


class _Copies:
    """Copies of whole storages, so that tensors that share memory still do, with the same strides and alignment."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[call-overload]
            self._storages[storage.data_ptr()] = whole.to(self._device, copy=True)
        copied = self._storages[storage.data_ptr()].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return empty.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
