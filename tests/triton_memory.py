"""Memory checks for Triton's interpreter, of errors that a GPU does not report: accesses outside of tensors, and data races.

In: the interpreter, and the modules of the runtime that allocate. Out: the same, patched so that

- every unmasked lane of a load, a store or an atomic must lie in the tensor that its pointer was made from,
- a program reads what it has stored only after a barrier, because another of its threads may have stored it,
- memory that nothing wrote holds garbage, which as an index is far out of bounds,
- so do quotients and remainders of integers divided by zero, which are undefined on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from serrate.runtime import memory
from serrate.runtime import triton as runtime

GARBAGE = 0x7F
"""Every byte of memory that nothing wrote: a large number as an integer of any width, and in floating point."""
MOST = 1 << 24
"""Bytes of an allocation that are filled with garbage; the rest of a large one costs too much time."""


class Pointer(tl.pointer_type):  # type: ignore[misc]
    """The type of pointers into the memory of one argument; all pointers made from it keep the type."""

    def __init__(self, element: tl.dtype, memory: Memory) -> None:
        super().__init__(element)
        self.memory = memory


class OutsideMemory(Exception):
    """A program of a kernel reads or writes outside of its tensors."""


class UnorderedRead(Exception):
    """A program of a kernel reads what another of its threads may not have stored yet."""


epoch = [0]
"""How many programs have begun and how many barriers they have passed: all threads see what was stored in earlier epochs."""


class Memory:
    """The bytes of a tensor that a kernel was given."""

    def __init__(self, kernel: str, argument: str, tensor: torch.Tensor) -> None:
        self.kernel, self.argument, self.shape = kernel, argument, tuple(tensor.shape)
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        self.room = (last + 1) * tensor.dtype.itemsize if tensor.numel() else 0
        self.first = np.uint64(tensor.data_ptr())
        self._epoch, self._stored = 0, list[np.ndarray]()
        """The addresses that were stored to in an epoch."""

    def order(self, is_read: bool, pointers: np.ndarray, mask: np.ndarray | None) -> None:
        """Notes a store; raises if a read finds what was stored in the same epoch."""
        if self._epoch != epoch[0]:
            self._epoch, self._stored = epoch[0], []
        if is_read and not self._stored:
            return
        places = np.ravel(pointers if mask is None else pointers[np.broadcast_to(mask, pointers.shape)])
        if not is_read:
            self._stored.append(places)
        elif np.isin(places, np.concatenate(self._stored)).any():
            program = interpreter.interpreter_builder.grid_idx
            raise UnorderedRead(f"{self.kernel}, program {program}, reads what it stores to {self.argument} without a barrier")

    def check(self, what: str, pointers: np.ndarray, mask: np.ndarray | None, size: int) -> None:
        """Raises unless all elements of `size` bytes lie here. Unsigned, places before the tensor are far past its end."""
        with np.errstate(over="ignore"):
            places = pointers - self.first
        farthest = places.max(initial=0) if mask is None else places.max(initial=0, where=mask)
        if int(farthest) + size > self.room and (mask is None or mask.any()):
            self._report(what, places, np.broadcast_to(True if mask is None else mask, places.shape), size)

    def _report(self, what: str, places: np.ndarray, mask: np.ndarray, size: int) -> None:
        signed = places.view(np.int64) if places.ndim else places.reshape(1).view(np.int64)
        mask = mask.reshape(signed.shape)
        outside = mask & ((signed < 0) | (signed > self.room - size))
        lane = tuple(int(k) for k in np.argwhere(outside)[0])
        place = int(signed[lane])
        how_far = f"{-place} bytes before" if place < 0 else f"{place - self.room} bytes past the end of"
        program = interpreter.interpreter_builder.grid_idx
        raise OutsideMemory(
            f"{self.kernel}, program {program}, {what}s outside of its memory: lane {list(lane)} of {list(signed.shape)}, and "
            f"{int(outside.sum()) - 1} others, {how_far} {self.argument} (shape {list(self.shape)}, {self.room} bytes)"
        )


def install() -> None:
    """Replaces functions of the interpreter, and `torch.empty` where the runtime allocates."""
    interpreter._implicit_cvt = functools.partial(_converted, interpreter._implicit_cvt)
    executor = interpreter.GridExecutor
    executor._init_args_hst = _named(executor._init_args_hst)
    builder = interpreter.InterpreterBuilder
    builder.set_grid_idx, builder.create_barrier = _begun(builder.set_grid_idx), _begun(builder.create_barrier)
    builder.create_masked_load = _checked(builder.create_masked_load, "read", 0, 1)
    builder.create_masked_store = _checked(builder.create_masked_store, "write", 0, 2)
    builder.create_atomic_rmw = _checked(builder.create_atomic_rmw, "write", 1, 3)
    builder.create_atomic_cas = _checked(builder.create_atomic_cas, "write", 0, None)
    builder.create_bitcast = _of_same_memory(builder.create_bitcast)
    builder.create_idiv = _undefined_for_zero(builder.create_idiv)
    builder.create_srem = _undefined_for_zero(builder.create_srem)
    builder.create_urem = _undefined_for_zero(builder.create_urem)
    for module in (memory, runtime):
        module.torch = _Torch()  # type: ignore[attr-defined]


def _begun(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What begins an epoch."""

    def begun(*arguments: Any) -> Any:
        epoch[0] += 1
        return plain(*arguments)

    return begun


def _named(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the tensors among the arguments of a launch for `_converted`."""

    def arguments(self: Any, given: Any, named: Any) -> Any:
        found, others = plain(self, given, named)
        for name, each in (*zip(self.arg_names, found, strict=False), *others.items()):
            tensor = getattr(each, "base", each)
            if isinstance(tensor, torch.Tensor):
                check_accesses(self.fn.__name__, name, tensor)
        return found, others

    return arguments


def check_accesses(kernel: str, argument: str, tensor: torch.Tensor) -> None:
    """Marks a tensor, so that accesses through pointers made from it are checked."""
    tensor.checked_memory = Memory(kernel, argument, tensor)  # type: ignore[attr-defined]


def _converted(plain: Callable[[Any], Any], argument: Any) -> Any:
    """Converts an argument for the interpreter; a marked tensor becomes a checked pointer."""
    found, memory = plain(argument), getattr(argument, "checked_memory", None)
    if memory is not None:
        found.handle.dtype = Pointer(found.handle.dtype.element_ty, memory)
    return found


def _of_same_memory(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A pointer cast, as to the bytes of booleans: the result points into the same memory."""

    def bitcast(self: Any, given: Any, to: Any) -> Any:
        found = plain(self, given, to)
        if isinstance(given.dtype, Pointer):
            found.dtype = Pointer(found.dtype.element_ty, given.dtype.memory)
        return found

    return bitcast


def _checked(plain: Callable[..., Any], what: str, pointers: int, mask: int | None) -> Callable[..., Any]:
    """A checked access to memory; `pointers` and `mask` are the positions of these arguments."""

    def access(self: Any, *arguments: Any, **more: Any) -> Any:
        given = arguments[pointers]
        if not isinstance(given.dtype, Pointer):
            raise OutsideMemory(f"a program {what}s memory through a pointer that was not made from an argument")
        masked = None if mask is None else arguments[mask].data
        given.dtype.memory.check(what, given.data, masked, max(1, given.dtype.element_ty.primitive_bitwidth // 8))
        given.dtype.memory.order(what == "read", given.data, masked)
        return plain(self, *arguments, **more)

    return access


def _undefined_for_zero(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A division whose results are garbage where the divisor is 0; in numpy they are 0."""

    def divided(self: Any, left: Any, right: Any) -> Any:
        found = plain(self, left, right)
        if not right.data.all() and found.data.dtype.kind in "iu":
            garbage = np.full(1, GARBAGE, np.uint8).repeat(found.data.itemsize).view(found.data.dtype)[0]
            found.data = np.where(right.data == 0, garbage, found.data)
        return found

    return divided


class _Torch:
    """The module `torch`, whose `empty` holds garbage."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*sizes: Any, **options: Any) -> torch.Tensor:
        made = torch.empty(*sizes, **options)
        if made.device.type == "cpu" and made.numel():
            made.reshape(-1).view(torch.uint8)[:MOST] = GARBAGE
        return made
