"""Checked mode: detects two lanes, of one program or of two, that write different values to one address.

In: every store of a kernel. Out: a `RaceError` that names both lines. Iterations of an outermost loop over tiles are programs,
which run in any order; a single program runs in order, and may overwrite its own stores.
"""

from __future__ import annotations

from types import CodeType

from torch import Tensor

from serrate.errors import RaceError
from serrate.frontend.kernel.machine import current, line_at, user_frame


class Writes:
    """The writes since the grid loop began, by address."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[int, float, tuple[CodeType, int] | None]] = {}

    def new_phase(self) -> None:
        """Begins a new grid loop: everything before it is complete."""
        self._last.clear()

    def note(self, tensor: Tensor, where: tuple[Tensor, ...], data: Tensor) -> None:
        """Checks one store, lane by lane."""
        program = current("a store").program
        frame = user_frame()
        place = None if frame is None else (frame.f_code, frame.f_lasti)
        memory = tensor.untyped_storage().data_ptr()
        addresses = [int(tensor.storage_offset())] * data.numel()
        for index, stride in zip(where, tensor.stride(), strict=True):
            addresses = [a + i * int(stride) for a, i in zip(addresses, index.reshape(-1).tolist(), strict=True)]
        here: dict[int, float] = {}
        for address, value in zip(addresses, data.reshape(-1).tolist(), strict=True):
            before = here.get(address)
            if before is not None and not _same(before, value):
                raise RaceError(_message(f"two lanes of one store write {before} and {value}", tensor, address, place, place))
            here[address] = value
        for address, value in here.items():
            found = self._last.get((memory, address))
            if found is not None and found[0] != program and not _same(found[1], value):
                what = f"program {found[0]} writes {found[1]} and program {program} writes {value}"
                raise RaceError(_message(what, tensor, address, found[2], place))
            self._last[memory, address] = (program, value, place)


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


def _message(what: str, tensor: Tensor, address: int, *places: tuple[CodeType, int] | None) -> str:
    lines = "".join(line_at(*place) for place in dict.fromkeys(places) if place is not None)
    return (
        f"{what} to one element (number {address} of the memory of a tensor of shape {tuple(tensor.shape)}), in any order:{lines}"
    )
