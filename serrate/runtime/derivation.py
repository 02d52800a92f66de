"""Arrays derived from offsets on a GPU: where the pieces of rows begin, the row of each piece, short rows in order.

In: the arrays of a program that `can_derive`, and the tensors of a call that they are derived from. Out: the arrays, computed in
a few launches, in one allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serrate.codegen.triton.derived import BLOCK, COMPONENTS, can_derive, print_derived, table_size
from serrate.ir.expr import Array, Symbol, const
from serrate.ir.recipes import RunningSum
from serrate.ir.size_functions import numbers_function
from serrate.runtime.host_code import DerivationCode, DerivationKernels, DerivationSizes, derivation_code
from serrate.runtime.launch import Numbers, Tensors
from serrate.runtime.memory import ALIGNMENT, Scratch, address
from serrate.runtime.triton import (
    Grid,
    PreparedLaunch,
    SizedLaunches,
    TritonFunction,
    is_hooked,
    load,
    prepare_all,
    stream_reader,
)

FEW_BLOCKS = 64
"""The most blocks of a table for which every block computes the running sum that it searches: they run at the same time."""

__all__ = ["Derivation", "can_derive"]


class Derivation:
    """Arrays, all of which `can_derive`, computed in a few launches, in one allocation.

    `names` are the tensors that they are derived from. Programs over the same rows often derive the same arrays: `text` and
    `numbers` tell whether they do.
    """

    def __init__(self, arrays: Sequence[Array], symbols: Sequence[Symbol]) -> None:
        printed = print_derived(tuple(arrays))
        self.text, self.names = printed.text, tuple(a.name for a in printed.inputs)
        made = (*printed.sums, *printed.tables)
        self.order = tuple(made.index(array) for array in arrays)
        """Where each array is among those that are made."""
        self._sums = len(printed.sums)
        one = const(1)
        sizes = [_recipe(a).count + one for a in printed.sums] + [table_size(a) for a in printed.tables]
        self.numbers = numbers_function([*sizes, *printed.symbols], tuple(symbols))
        """Everything besides tensors that the arrays depend on, as a function of the values of all symbols."""
        self._count = len(made)
        module, first = load(printed.text, "derived"), len(printed.inputs)
        inputs, symbols_of = [*range(first)], [*range(len(printed.symbols) + first)]
        count = first + 1 + len(made)

        def prepared(name: str, memory: Sequence[int]) -> PreparedLaunch:
            return PreparedLaunch(TritonFunction(getattr(module, name), {}), memory, symbols_of, count)

        # All memory: the inputs, partial sums, sums, tables.
        sums, tables = [*range(first + 1, first + 1 + self._sums)], [*range(first + 1 + self._sums, count)]
        self._block_sums = prepared("block_sums", [*inputs, first]) if sums else None
        self._running_sums = prepared("running_sums", [*inputs, first, *sums]) if sums else None
        self._tables = prepared("tables", [*inputs, *sums, *tables]) if tables else None
        self._all_arrays = prepared("all_arrays", [*inputs, *sums, *tables]) if sums and tables else None
        self._kernels = (self._block_sums, self._running_sums, self._tables, self._all_arrays)
        self._is_prepared = False
        self._symbols = len(printed.symbols)
        self._code: dict[torch.device, DerivationCode] = {}

    def __call__(self, inputs: Tensors, numbers: Numbers, device: torch.device) -> list[Scratch]:
        """The arrays that are made, given the tensors that they are derived from and `numbers`."""
        code = self._code.get(device)
        made = None if code is None else code(numbers, inputs)
        return self._launched(inputs, numbers, device) if made is None else made

    def _launched(self, inputs: Tensors, numbers: Numbers, device: torch.device) -> list[Scratch]:
        """As `__call__`, without host code: the first time, and where that cannot serve a call."""
        sizes, symbols = numbers[: self._count], [*numbers[self._count :], *[t.numel() for t in inputs]]
        launches, components = self._launches_for(sizes)
        # Partial sums of blocks of components come first. Without components, code may still ask for the length of the first.
        counts = [self._sums * components or 1, *[size if size > 2 else 2 for size in sizes]]
        places, room = [], 0
        for count in counts:
            places.append(room)
            room += count * 8 + ALIGNMENT - 1 & -ALIGNMENT
        memory = (torch.zeros if min(sizes) < 2 else torch.empty)(room, dtype=torch.uint8, device=device)
        base = memory.data_ptr()
        made = [Scratch(memory, place, (count,), torch.int64) for place, count in zip(places, counts, strict=True)]
        addresses = [address(t) for t in inputs]
        addresses += [base + place for place in places]
        SizedLaunches(launches, symbols, device)(addresses, lambda: [*inputs, *made])
        if not self._is_prepared:
            prepare_all([each for each in self._kernels if each is not None], [*inputs, *made], symbols)
            self._is_prepared = True
        if device.type == "cuda":
            self._generate(device)
        return made[1:]

    def _generate(self, device: torch.device) -> None:
        """Generates host code, if all kernels are compiled."""
        loaded = [None if each is None else each.kernel.compiled.get((device, ())) for each in self._kernels]
        if all(each is None or own is not None for own, each in zip(loaded, self._kernels, strict=True)):
            self._code[device] = derivation_code(
                len(self.names),
                self._sums,
                self._count - self._sums,
                self._symbols,
                DerivationKernels(*loaded),
                device,
                sizes=DerivationSizes(COMPONENTS, BLOCK, FEW_BLOCKS),
                stream=stream_reader(device),
                is_hooked=is_hooked,
            )

    def _launches_for(self, sizes: Numbers) -> tuple[list[tuple[PreparedLaunch, Grid]], int]:
        """The launches that make arrays of these sizes, and the number of blocks of components."""
        components = -(-(max(sizes[: self._sums], default=1) - 1) // COMPONENTS) or 1
        blocks, tables = -(-max(sizes[self._sums :], default=0) // BLOCK), self._count - self._sums
        if self._all_arrays is not None and components == 1 and 0 < blocks <= FEW_BLOCKS:
            return [(self._all_arrays, (blocks, tables))], 1
        found: list[tuple[PreparedLaunch, Grid]] = []
        if self._running_sums is not None and self._block_sums is not None:
            grid = (components, self._sums)
            found += [(self._block_sums, grid), (self._running_sums, grid)][0 if components > 1 else 1 :]
        if self._tables is not None and blocks:
            found.append((self._tables, (blocks, tables)))
        return found, components


def _recipe(array: Array) -> RunningSum:
    assert isinstance(array.recipe, RunningSum)
    return array.recipe
