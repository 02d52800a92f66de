"""The buffers that candidates run on while they are timed.

In: the tensors of a call. Out: the tensors for one run. The caller's tensors are only read: outputs are scratch memory, and
what a program changes in place is a copy, restored before each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from serrate.runtime import memory
from serrate.runtime.dispatch import Prepared
from serrate.runtime.memory import InMemory


class Buffers(Protocol):
    """The buffers that a program runs on."""

    def tensors(self, ready: Prepared) -> list[InMemory]:
        """The tensors of a program, in its order."""

    def written(self) -> list[torch.Tensor]:
        """The results."""

    def restore(self) -> None:
        """Restores inputs that earlier runs overwrote."""

    def clear(self) -> None:
        """Resets the results before a candidate runs: a program need not write every element."""


class OutputBuffers:
    """For stages of fusions: inputs are only read, and every candidate writes to the same outputs."""

    def __init__(self, inputs: Sequence[torch.Tensor], device: torch.device) -> None:
        self._inputs, self._device = list(inputs), device
        self._outputs: list[torch.Tensor] = []

    def tensors(self, ready: Prepared) -> list[InMemory]:
        shapes = ready.shapes[: ready.outputs]
        if [(tuple(t.shape), t.dtype) for t in self._outputs] != list(shapes):
            self._outputs = [memory.empty(shape, dtype, self._device) for shape, dtype in shapes]
        scratch = memory.scratch(ready.shapes[ready.outputs :], self._device)
        return [*self._inputs, *self._outputs, *(() if scratch is None else scratch()), *ready.private]

    def written(self) -> list[torch.Tensor]:
        return self._outputs

    def restore(self) -> None:
        """Inputs are only read."""

    def clear(self) -> None:
        for output in self._outputs:
            output.zero_()


class CopiedBuffers:
    """For device loops, which store to the caller's tensors: runs store to copies of them."""

    def __init__(
        self, given: Sequence[torch.Tensor], written: Sequence[bool], device: torch.device, *, accumulates: bool, copies: bool
    ) -> None:
        """`given` are the tensors that the call passes to the program, and `written` says which of them it stores to.
        `accumulates`: the program reads, or adds to, what it stores. `copies`: tensors that it only reads are copied too."""
        changed = {t.untyped_storage().data_ptr() for t, stored in zip(given, written, strict=True) if stored}
        copied: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._given: list[torch.Tensor] = []
        for tensor in given:
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            if place not in changed and not copies:
                self._given.append(tensor.detach())
                continue
            if place not in copied:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                copied[place] = (whole, whole.clone())
            own = copied[place][1].untyped_storage()
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._given.append(view.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride()))
        self._written = [t for t, stored in zip(self._given, written, strict=True) if stored]
        self._device = device
        self._changed = [pair for place, pair in copied.items() if place in changed]
        read = {t.untyped_storage().data_ptr() for t, stored in zip(given, written, strict=True) if not stored}
        self._reads_own = accumulates or bool(read & changed)
        """Whether the program reads what it writes: then every run must start from the original contents."""

    def tensors(self, ready: Prepared) -> list[InMemory]:
        scratch = memory.scratch(ready.shapes, self._device)
        return [*self._given, *(() if scratch is None else scratch()), *ready.private]

    def written(self) -> list[torch.Tensor]:
        return self._written

    def restore(self) -> None:
        if self._reads_own:
            self.clear()

    def clear(self) -> None:
        for original, copy in self._changed:
            copy.copy_(original)
