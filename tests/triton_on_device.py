"""Triton kernels on CPU tensors, compiled and run on a GPU: memory is copied there and, where it was written, back.

In: the runtime's launches. Out: the same, which take CPU tensors too. So one test serves both processes: the one that
interprets Triton, and the one that compiles it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from serrate.runtime import triton as runtime
from serrate.runtime.memory import whole


def install(device: torch.device) -> None:
    """Replaces the function of the runtime that launches kernels, unless it is replaced already."""
    if not hasattr(runtime.TritonFunction.launch, "__wrapped__"):
        runtime.TritonFunction.launch = launch_on(device, runtime.TritonFunction.launch)  # type: ignore[method-assign]


def launch_on(device: torch.device, plain: Callable[..., None]) -> Callable[..., None]:
    """`TritonFunction.launch`, for tensors on the device or on a CPU."""

    @functools.wraps(plain)
    def launch(self: Any, grid: tuple[int, ...], tensors: Sequence[Any], *rest: Any) -> None:
        given = [whole(t) for t in tensors]
        if all(t.device.type != "cpu" or t.is_pinned() for t in given):
            plain(self, grid, given, *rest)
            return
        copies = Copies(device)
        plain(self, grid, [copies.of(t) for t in given], *rest)
        copies.back()

    return launch


class Copies:
    """Copies of whole storages, so that tensors that share memory still do, with the same strides and alignment."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By address: the bytes on the CPU, and on the device."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            here = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[call-overload]
            self._storages[storage.data_ptr()] = here, here.to(self._device, copy=True)
        there = self._storages[storage.data_ptr()][1].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return empty.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]

    def back(self) -> None:
        """Copies back what the device changed. For torch the tensors keep their versions, as after a launch."""
        for here, there in self._storages.values():
            found = there.cpu()
            if not torch.equal(here, found):
                here.copy_(found)
