"""Checked mode: detects two lanes, of one program or of two, that write different values to one address, and programs that read
what others change.

In: every load and store of a kernel. Out: a `RaceError` that names both lines. Iterations of an outermost loop over tiles are
programs, which run in any order; a single program runs in order, and may read and overwrite its own stores.
"""

from __future__ import annotations

from types import CodeType
from typing import TypeAlias, cast

import torch
from torch import Tensor

from serrate.errors import RaceError
from serrate.frontend.kernel.machine import current, line_at, user_frame

Place: TypeAlias = tuple[CodeType, int] | None
"""Where in the user's code."""


class Accesses:
    """The reads and writes since the grid loop began, by address."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[int, float, Place]] = {}
        self._changed: dict[tuple[int, int], tuple[int, Place]] = {}
        self._read: dict[tuple[int, int], dict[int, Place]] = {}
        """At most two readers of each address: one of them is not the program that stores."""

    def new_phase(self) -> None:
        """Begins a new grid loop: everything before it is complete."""
        self._last.clear()
        self._changed.clear()
        self._read.clear()

    def note_read(self, tensor: Tensor, where: tuple[Tensor, ...], count: int) -> None:
        """Checks one load."""
        program, place, memory = current("a load").program, _place(), tensor.untyped_storage().data_ptr()
        for address in set(_addresses(tensor, where, count)):
            found = self._changed.get((memory, address))
            if found is not None and found[0] != program:
                what = f"program {found[0]} stores and program {program} reads"
                raise RaceError(_message(what, tensor, address, found[1], place))
            readers = self._read.setdefault((memory, address), {})
            if len(readers) < 2:
                readers.setdefault(program, place)

    def note(self, tensor: Tensor, where: tuple[Tensor, ...], data: Tensor, *, add: bool = False) -> None:
        """Checks one store, lane by lane, before it is made. Atomic adds conflict with reads only."""
        program, place, memory = current("a store").program, _place(), tensor.untyped_storage().data_ptr()
        addresses = _addresses(tensor, where, data.numel())
        held = tensor[where] if where else tensor.reshape(-1)[: data.numel()]
        here: dict[int, float] = {}
        for address, value, old in zip(addresses, data.reshape(-1).tolist(), held.reshape(-1).tolist(), strict=True):
            before = here.get(address)
            if before is not None and not _same(before, value) and not add:
                raise RaceError(_message(f"two lanes of one store write {before} and {value} to", tensor, address, place, place))
            here[address] = value
            if value if add else not _same(old, value):
                reader = next(((q, at) for q, at in self._read.get((memory, address), {}).items() if q != program), None)
                if reader is not None:
                    what = f"program {reader[0]} reads and program {program} stores"
                    raise RaceError(_message(what, tensor, address, reader[1], place))
                self._changed[memory, address] = (program, place)
        if add:
            return
        for address, value in here.items():
            found = self._last.get((memory, address))
            if found is not None and found[0] != program and not _same(found[1], value):
                what = f"program {found[0]} writes {found[1]} and program {program} writes {value} to"
                raise RaceError(_message(what, tensor, address, found[2], place))
            self._last[memory, address] = (program, value, place)


def _place() -> Place:
    frame = user_frame()
    return None if frame is None else (frame.f_code, frame.f_lasti)


def _addresses(tensor: Tensor, where: tuple[Tensor, ...], count: int) -> list[int]:
    """The positions in memory of the elements of an index that selects so many, in elements."""
    found = torch.full((count,), int(tensor.storage_offset()), dtype=torch.int64, device="cpu")
    for index, stride in zip(where, tensor.stride(), strict=True):
        found = found + index.reshape(-1).long() * int(stride)
    return cast(list[int], found.tolist())


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


def _message(what: str, tensor: Tensor, address: int, *places: Place) -> str:
    lines = "".join(line_at(*place) for place in dict.fromkeys(places) if place is not None)
    return f"{what} one element (number {address} of the memory of a tensor of shape {tuple(tensor.shape)}), in any order:{lines}"
