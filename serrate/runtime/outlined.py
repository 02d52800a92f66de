"""Calls with the outline of an earlier call, on a GPU: only rows, sizes and memory are new.

In: a call. Out: its results. Batches are new in every step of a training loop: host code serves them, and only what depends on
their rows is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from serrate.runtime.arguments import BoundCall, known_total
from serrate.runtime.bind import SimpleChecks
from serrate.tensor import JaggedTensor, Structure
from serrate.tensor.jagged import trusted
from serrate.tensor.structure import Ahead


class OutlinedResult(NamedTuple):
    """One result of such calls: the place of its tensor among those of the program, its shape, and where its rows are found."""

    place: int
    shape: Callable[[BoundCall], tuple[int, ...]]
    structure: tuple[object, ...] | None
    """As in `KnownRows.structures`; None for a result without rows."""
    ahead: Ahead | None
    """As in `Structure.transposed`."""


class OutlinedProgram(NamedTuple):
    """The program for such calls."""

    checks: SimpleChecks
    run: Callable[[BoundCall, Sequence[torch.Tensor]], tuple[torch.Tensor, ...] | None]
    """Runs the host code of the program."""
    results: tuple[OutlinedResult, ...]

    def __call__(self, call: BoundCall) -> list[torch.Tensor | JaggedTensor] | None:
        """The results; None for a call whose rows must be checked first, or that host code cannot serve."""
        known = call.known
        for place, total in self.checks.offsets:
            found = known.levels.get(place)
            if found is None or known_total(*found) != total(call):
                return None
        for check in self.checks.sizes:
            check(call)
        structures: list[Structure | None] = []
        for _, _, key, _ in self.results:
            structure = None if key is None else known.structures.get(key)
            if structure is None and key is not None:
                return None
            structures.append(structure)
        tensors = self.run(call, call.args)
        if tensors is None:
            return None
        made: list[torch.Tensor | JaggedTensor] = []
        for (place, shape_of, _, ahead), structure in zip(self.results, structures, strict=True):
            values, shape = tensors[place], shape_of(call)
            if values.shape != shape:
                values = values.view(shape)
            made.append(values if structure is None else trusted(values, structure.transposed(ahead)))
        return made
