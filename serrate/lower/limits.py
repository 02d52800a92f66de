"""Limits: upper bounds of the elements of a program's arrays, derived from the extents that contain their rows.

In: a scheduled tile program. Out: a limit for each array that a caller holds. `passes/keep_in_bounds.py` clamps reads to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from serrate.ir.domains import COORDINATE
from serrate.ir.expr import Array, Element, Expr, const, minimum
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain, longest
from serrate.ir.ragged_transforms import Spread
from serrate.ir.tile import Loop, TileProgram, walk
from serrate.ir.traversal import traverse
from serrate.ir.values import domains_in

Limits = Mapping[Array, Expr]
"""The upper bound of the elements of each array; `COORDINATE` in it is the index of the element."""


def is_held(array: Array) -> bool:
    """Whether an array is in memory that the caller holds and may change at any time."""
    return array.recipe is None and array.data is None and not array.local


def limits_of(program: TileProgram) -> dict[Array, Expr]:
    """The upper bound of the offsets, starts and lengths of rows: the extent that the rows lie in."""
    # In an order that is the same in every process, and so is the text of the bounds.
    used = [t for phase in program.phases for t in sorted(phase.reads | phase.writes, key=lambda t: t.name)]
    tensors = dict.fromkeys((*program.inputs, *program.outputs, *used))
    domains = [d for t in tensors for d in (*t.logical, *t.storage)]
    domains += [s.domain for phase in program.phases for s, _ in walk(phase.body) if isinstance(s, Loop)]
    # A loop over all positions finds their rows by search, so rows occur only in values.
    domains += [d for phase in program.phases for leaf in phase.leaves for v in leaf.values for d in domains_in(v)]
    reachable = {node: None for domain in domains for node in traverse(domain)}
    found: dict[Array, Expr] = {}
    for node in reachable:
        if isinstance(node, Partition | Spread):
            whole = node.inputs[0] if isinstance(node, Partition) else node.outputs[0]
            extent = settled(whole.extent_expr)
            bounds = {node.starts: extent}
            if isinstance(node, Partition) and node.lengths is not None:
                # a row ends where its extent does, wherever it starts
                bounds[node.lengths] = extent - node.starts[COORDINATE] if is_held(node.starts) else extent
            for array, bound in bounds.items():
                if is_held(array):
                    found[array] = minimum(found.get(array, bound), bound)
    for node in reachable:
        if isinstance(node, RaggedIterDomain):
            # Rows without a common extent, such as those of products: the end of the last, or the longest, as they were checked.
            read = dict.fromkeys(e for e in node.length.walk() if isinstance(e, Element))
            for array in dict.fromkeys(e.array for e in read):
                if is_held(array) and not array.signed and array not in found:
                    # An array of lengths has as many elements as there are rows; one of offsets has one more.
                    lengths = array[COORDINATE] in read and array[COORDINATE + 1] not in read
                    count = node.component.extent_expr
                    found[array] = longest(array[COORDINATE], count) if lengths else most_of(array, count)
    return found


def settled(extent: Expr) -> Expr:
    """An extent as it was when the program was prepared, which is when memory was allocated."""
    read = [e for e in extent.walk() if isinstance(e, Element) and is_held(e.array)]
    # Every element of every array matters: the length of a selected row as well as the end of the last row.
    return extent.substitute({e: longest(e, const(1)) for e in read}) if read else extent


def most_of(offsets: Array, count: Expr) -> Expr:
    """The end of the last of `count` rows, as it was when the program was prepared."""
    return longest(offsets[COORDINATE + 1], count)
