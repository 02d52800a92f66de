"""Checks that run on a GPU, in Triton, one launch each.

In: nothing. Out: the source of a module with two kernels. In `summary`, one program reads all offsets and writes what `validate`
needs: the first and the last offset, the shortest and the longest length. `report` writes numbers that other kernels computed.
"""

from __future__ import annotations

from serrate.codegen.triton.module import with_helpers

BLOCK = 4096
"""The number of lengths per block."""
NUMBERS = 4
"""How many numbers are written."""
UNSET = -(1 << 63)
"""A value that is never written, which marks memory that has not been written yet."""


def print_checks() -> str:
    """The module's text."""
    return with_helpers(f"""@triton.jit(do_not_specialize=["count"])
def summary(offsets, found, count):
    lanes = tl.arange(0, {BLOCK})
    shortest = tl.full([{BLOCK}], {-UNSET - 1}, tl.int64)
    longest = tl.full([{BLOCK}], {UNSET + 1}, tl.int64)
    for first in range(0, count - 1, {BLOCK}):
        k = first + lanes
        inside = k < count - 1
        length = tl.load(offsets + k + 1, mask=inside, other=0).to(tl.int64)
        length -= tl.load(offsets + k, mask=inside, other=0).to(tl.int64)
        shortest = tl.minimum(shortest, tl.where(inside, length, {-UNSET - 1}))
        longest = tl.maximum(longest, tl.where(inside, length, {UNSET + 1}))
    tl.store(found, tl.maximum(tl.load(offsets).to(tl.int64), {UNSET + 1}))
    tl.store(found + 1, tl.maximum(tl.load(offsets + count - 1).to(tl.int64), {UNSET + 1}))
    tl.store(found + 2, tl.maximum(tl.min(shortest), {UNSET + 1}))
    tl.store(found + 3, tl.max(longest))


@triton.jit
def report(a, b, c, d, found):
    tl.store(found, tl.maximum(tl.load(a).to(tl.int64), {UNSET + 1}))
    tl.store(found + 1, tl.maximum(tl.load(b).to(tl.int64), {UNSET + 1}))
    tl.store(found + 2, tl.maximum(tl.load(c).to(tl.int64), {UNSET + 1}))
    tl.store(found + 3, tl.maximum(tl.load(d).to(tl.int64), {UNSET + 1}))
""")
