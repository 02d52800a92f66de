"""Grouping by keys as Triton: a counting sort in three launches.

In: how many groups there are at most. Out: the source of a module with the kernels `count_keys`, `place_groups`, `order_keys`,
`order_and_invert` and `invert`. A program takes one block of keys. Keys outside all groups are one more group, the last.

    count_keys     of every block: how many keys of each group it has, and how many of the groups before
    place_groups   where the keys of each group and block begin, group by group and block by block; offsets of groups
    order_keys     sorts every block, and stores each position where its key belongs; `order_and_invert` also stores, for each
                   position, where that is
"""

from __future__ import annotations

from serrate.codegen.triton.module import with_helpers

BLOCK = 1024
"""Keys that are sorted at once."""
CHUNK = 4096
"""Counts that are summed at once."""


def print_grouping(groups: int) -> str:
    """The module's text for fewer than `groups` groups, a power of two."""
    keys = f"""    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, {BLOCK})
    position = block * {BLOCK} + lanes
    key = tl.load(keys + position, mask=position < size, other=0).to(tl.int64)
    key = tl.where((position < size) & (key >= 0) & (key < count), key, count).to(tl.int32)"""
    order = f"""{keys}
    ordered = tl.sort(key * {BLOCK} + lanes)
    key = ordered // {BLOCK}
    position = block * {BLOCK} + ordered % {BLOCK}
    rank = lanes - tl.load(before + block * {groups} + key)
    place = tl.load(places + key * blocks + block) + rank
    tl.store(permutation + place, position, mask=position < size)"""
    return with_helpers(f"""@triton.jit(do_not_specialize=["size", "count", "blocks"])
def count_keys(keys, counts, before, size, count, blocks):
{keys}
    group = tl.arange(0, {groups})
    found = tl.histogram(key, {groups})
    tl.store(counts + group * blocks + block, found)
    tl.store(before + block * {groups} + group, tl.cumsum(found) - found)


@triton.jit(do_not_specialize=["count", "blocks"])
def place_groups(counts, places, offsets, count, blocks):
    total = tl.full([], 0, tl.int64)
    for first in range(0, {groups} * blocks, {CHUNK}):
        k = first + tl.arange(0, {CHUNK})
        found = tl.load(counts + k, mask=k < {groups} * blocks, other=0).to(tl.int64)
        place = total + tl.cumsum(found) - found
        tl.store(places + k, place, mask=k < {groups} * blocks)
        tl.store(offsets + k // blocks, place, mask=(k % blocks == 0) & (k // blocks <= count))
        total += tl.sum(found)


@triton.jit(do_not_specialize=["size", "count", "blocks"])
def order_keys(keys, before, places, permutation, size, count, blocks):
{order}


@triton.jit(do_not_specialize=["size", "count", "blocks"])
def order_and_invert(keys, before, places, permutation, inverse, size, count, blocks):
{order}
    tl.store(inverse + position, place, mask=position < size)


@triton.jit(do_not_specialize=["size"])
def invert(permutation, inverse, size):
    position = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})
    place = tl.load(permutation + position, mask=position < size, other=0)
    place = tl.where(place < 0, place + size, place)
    tl.store(inverse + place, position, mask=(position < size) & (place >= 0) & (place < size))
""")
