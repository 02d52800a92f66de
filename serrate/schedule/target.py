"""Targets: the facts about a machine that a schedule depends on.

In: nothing. Out: `CPU` and `GPU`, whose tile sizes strategies use. They decide speed, never meaning.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Sizes in elements unless said otherwise."""

    name: str
    power_of_two_lanes: bool
    """Whether the lanes of a block must come in powers of two."""
    many_workers: bool
    """Whether hundreds of workers take rows dynamically, so that there should be several times as many entries of work."""
    least_matmul: int
    """The fewest lanes that each dim of a block of a matrix product may have."""
    widest: int
    """The most lanes one dim may have."""
    gathered: int
    """The most lanes of rows that are looked up and summed: the sums should stay in registers from one row to the next."""
    column_bytes: int
    """Bytes of the innermost dim per worker, if all phases keep that dim: several workers share a row then. 0 for all of them."""
    block: int
    """Elements of a block of a reduction with several operators, which has overhead per block."""
    largest: int
    """The most elements of one block."""
    near_block: int
    """Elements of a block that several statements of a kernel read, so that it should stay in cache."""
    simple_block: int
    """Elements of a block of a simple reduction, such as a sum; 0 if a plain loop over the row is best."""
    store_bytes: int
    """Bytes of a block that is stored at once."""
    move_bytes: int
    """Bytes of a block that is stored as it was read."""
    chunk: int
    """Elements of a piece when a row is cut."""
    keeps_rows: bool
    """Whether a worker can keep a whole row in private memory, so that exponentials are computed once."""
    matmul: tuple[int, int, int]
    """Rows, columns and depth of one block of a matrix product."""
    row_product: tuple[int, int, int]
    """The same of a product that sums over rows."""
    sums: int
    """The most elements of the blocks of sums that a worker holds: several products that meet in one result share them."""
    gathers_operands: bool
    """Whether a product should read the rows of an operand at computed indices itself, rather than from a copy."""
    rounds_operands: bool
    """Whether an operand of products that is computed before them should have the 16 bits that they take in memory."""
    contraction: tuple[int, int]
    """The block of a ragged product in a contraction: positions of the kept and of the summed side."""
    rows_together: int
    """Rows that `masked` processes as lanes."""
    grouped: int
    """Positions of a block of several short rows."""
    ordered: int
    """Short rows that are ordered by their lengths before they are grouped: few, so that those of a group lie close together."""
    short_bytes: int
    """The most bytes of a row for which processing one row at a time leaves most lanes idle."""
    finish: int
    """Elements of a row's partial results that are combined in one block."""
    factors_blocks: bool
    """Whether each lane keeps its own partial result of a simple reduction until the row is done, because combining lanes is
    slow."""
    warps: int
    """Warps per program, on a GPU."""
    threads: int
    """Threads per program of the plan that is being made; 0 on a CPU, and where nothing depends on them."""
    at_once: int
    """How many positions of a row these threads read at once, if each of them keeps statistics of its own ones until the row is
    done; 0 where threads combine them in every block."""
    stages: int
    """Blocks of a row that a program which only reduces it keeps in flight, on a GPU."""
    tables: bool
    """Whether the component that owns a piece is looked up in a table, rather than searched for by every worker."""
    folds: bool
    """Whether the target can combine lanes by an arbitrary function; if not, folds become loops."""
    branches: bool
    """Whether a branch around a few statements is cheap."""
    lanes_in_order: bool
    """Whether the lanes of a block are a nest of loops, of which only the innermost is vectorized."""
    guesses_maxima: bool
    """Whether guessing the maximum of a row is cheaper than a pass over it."""


# 512 bytes of output at a time: a longer queue of pending stores would block the loads after them.
CPU = Target(
    name="cpu",
    power_of_two_lanes=False,
    many_workers=False,
    least_matmul=1,
    widest=1024,
    gathered=128,
    column_bytes=0,
    block=2048,
    largest=1 << 24,
    near_block=1024,
    simple_block=0,
    store_bytes=512,
    move_bytes=65536,
    chunk=131072,
    keeps_rows=True,
    matmul=(64, 32, 512),
    row_product=(128, 256, 128),
    sums=1 << 24,
    # Rows of a block must be evenly spaced: they would be copied for each block of columns.
    gathers_operands=False,
    # A product converts a block of an operand while copying it.
    rounds_operands=False,
    contraction=(128, 128),
    rows_together=8,
    grouped=1024,
    ordered=1024,
    short_bytes=32,
    finish=1,
    factors_blocks=False,
    warps=1,
    threads=0,
    at_once=0,
    stages=1,
    tables=False,
    folds=False,
    branches=True,
    lanes_in_order=True,
    guesses_maxima=True,
)
GPU = Target(
    name="gpu",
    power_of_two_lanes=True,
    many_workers=True,
    least_matmul=16,
    widest=1024,
    gathered=1024,
    column_bytes=256,
    block=8192,
    largest=16384,
    near_block=2048,
    simple_block=4096,
    store_bytes=8192,
    move_bytes=8192,
    chunk=131072,
    keeps_rows=False,
    matmul=(128, 256, 64),
    row_product=(128, 256, 64),
    sums=32768,
    gathers_operands=True,
    rounds_operands=True,
    contraction=(64, 64),
    rows_together=4,
    grouped=512,
    ordered=1024,
    short_bytes=512,
    finish=8192,
    factors_blocks=True,
    warps=4,
    threads=0,
    at_once=0,
    stages=3,
    tables=True,
    folds=True,
    branches=False,
    lanes_in_order=False,
    guesses_maxima=False,
)


def power_of_two_at_least(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(n - 1, 0).bit_length()
