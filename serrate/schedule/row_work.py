"""Row work: the facts about a program's use of its rows that determine warps, stages and block sizes on a GPU.

In: a few facts, which strategies collect from the phases of a fusion, and `sizes.py` from the block statements of a kernel. Out:
sizes. Both use the same rules, so a kernel is as fast as an operator that computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serrate.schedule.heuristic import NUMBERS, Carried
from serrate.schedule.target import Target


@dataclass(frozen=True)
class RowWork:
    """Facts about a program's use of its rows."""

    carried: Carried
    """What a worker carries from one block of a row to the next."""
    over_features: bool = False
    """Whether rows have statistics over all of their features, such as the moments of a layer norm. A worker then takes whole
    rows rather than some of their columns, in half-size blocks and with many warps: threads hold few elements and few sums, and
    two workers share a multiprocessor. (8192 elements in 8 warps took all registers of a multiprocessor.)"""
    sixteen_bits: bool = False
    """Whether the elements of rows that a caller passes have 16 bits."""
    numbers: bool = False
    """Whether rows are plain numbers, without features, and the caller has not chosen sizes for them."""

    @property
    def halvings(self) -> int:
        """How often a GPU halves the blocks in which it reduces rows. Arithmetic on 16-bit elements takes as many registers as on
        32-bit ones, and half the time to load them; for statistics over features, see `over_features`. (Layer norm of 16 bits on
        an H200, in percent of a copy's speed, with uniform, exponential and Zipf lengths: 2048 elements in 8 warps 81, 62 and 48;
        4096 in 16 warps 73, 67 and 42, in 4 warps 79, 60 and 49; 8192 in 8 warps 72, 66 and 48: the first is best on average.)"""
        return 0 if self.carried == "nothing" else self.sixteen_bits + self.over_features

    def in_blocks(self, target: Target, *, pieces: bool = False) -> Target:
        """The target with blocks for this work. `pieces` of rows with statistics over features combine lanes in every block, so
        their blocks are large. (Layer norm on an H200, in percent of a copy's speed, with Zipf and giant lengths: 57 and 66 with
        half blocks, 62 and 70 with whole ones; of 16 bits 42 and 52 with quarters, 52 and 67 with whole ones.)"""
        if not target.factors_blocks or (pieces and self.over_features):
            return target
        return replace(target, block=target.block >> self.halvings)

    def in_narrow_columns(self, target: Target) -> Target:
        """The target with the columns of a worker that reads whole rows twice. Between the two reads, the rows of all workers
        should stay in the cache, so of 32-bit elements a worker takes half as many columns. (Softmax on an H200, in percent of a
        copy's speed, with uniform and exponential lengths: 89 and 74, and 91 and 83 with half; of 16 bits: 65 and 56, and 61 and
        56 with half.)"""
        halves = self.carried == "statistics" and not self.sixteen_bits and not self.over_features
        return replace(target, column_bytes=target.column_bytes // 2) if halves and target.factors_blocks else target

    def warps(self, target: Target, *, small: bool) -> int:
        """The number of warps: few for simple reductions, which only wait for memory; many for statistics over features, whose
        blocks all warps reduce together. `small` blocks are half as large."""
        if self.numbers and self.carried != "nothing":
            return NUMBERS[self.carried].warps
        if self.over_features:
            return (2 if small and self.sixteen_bits else 4) * target.warps
        return max(target.warps // 2, 1) if small or self.carried == "sums" else target.warps

    def stages(self, target: Target) -> int:
        """The number of blocks in flight: several for programs that only reduce; statistics leave no shared memory for them."""
        return 1 if self.carried == "statistics" or self.over_features else target.stages

    def positions(self, across: int, target: Target) -> int:
        """How many positions of a row are in one block, with `across` elements each, of a target with blocks for this work."""
        if self.numbers and self.carried != "nothing":
            return NUMBERS[self.carried].tile
        simple = self.carried == "sums" and not self.over_features
        return max((target.simple_block if simple else target.block) // across, 1)

    def in_same_blocks(self, *, is_stored: bool) -> bool:
        """Whether a loop takes the blocks in which rows are reduced: those that reduce, and a pass after statistics, which reads
        again what the first has read. After sums, stores take as much as is stored at once."""
        return self.carried == "statistics" or self.over_features or (self.carried == "sums" and not is_stored)


def column_lanes(itemsize: int, target: Target) -> int:
    """The lanes of the innermost dim of a worker that shares the columns of rows with others."""
    return max(target.column_bytes // itemsize, 1)
