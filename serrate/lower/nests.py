"""Nests: which statements can share one loop nest, on targets where lanes are loops.

In: block statements. Out: whether a statement can join those before it, and the private blocks they touch.
"""

from __future__ import annotations

from serrate.ir.loops import Assign, Block, Dot, Held, Load, Local, Reduce, Running, Write, values_of, written_by


def locals_of(node: Block) -> set[Local]:
    """The private blocks a statement reads or writes."""
    found = {v.local for value in values_of(node) for v in value.walk() if isinstance(v, Held)}
    return found | set(written_by(node))


def _loads(node: Block) -> list[Load]:
    return [v for value in values_of(node) for v in value.walk() if isinstance(v, Load)]


def _in_another_order(writer: Block, reader: Block) -> bool:
    """Whether a statement reads a private block along other lanes than another writes it, and so in other iterations."""
    if not isinstance(writer, Assign | Reduce | Running):
        return False
    return any(x.name == writer.local.name and x != writer.local for x in locals_of(reader))


def joins(group: list[Block], node: Block) -> bool:
    """Whether a statement may run in the same nest as the group before it, lane by lane."""
    first = group[0]
    if isinstance(node, Dot) or isinstance(first, Dot) or node.lanes != first.lanes or node.guard != first.guard:
        return False
    read = {v.local for value in values_of(node) for v in value.walk() if isinstance(v, Held)}
    if any(_in_another_order(one, other) for earlier in group for one, other in ((earlier, node), (node, earlier))):
        return False
    loaded = {v.tensor for value in values_of(node) for v in value.walk() if isinstance(v, Load)}
    for earlier in group:
        if isinstance(earlier, Reduce) and earlier.lanes != earlier.local.lanes:
            written = node.local if isinstance(node, Assign | Reduce) else None
            if earlier.local in read or written == earlier.local:
                return False
        if isinstance(earlier, Write) and earlier.tensor in loaded:
            return False
        # One lane must not overwrite what another has yet to read.
        if isinstance(node, Write) and any(v.index != node.index for v in _loads(earlier) if v.tensor == node.tensor):
            return False
        # A block that an earlier statement reads must not change before all its lanes have been read.
        if isinstance(node, Reduce) and node.lanes != node.local.lanes:
            own = {earlier.local} if isinstance(earlier, Assign | Reduce) else set()
            if node.local in locals_of(earlier) - own:
                return False
    return True
