"""A layered layout: boxes in rows from top to bottom, edges between neighbouring rows only.

In: boxes with sizes, edges from upper to lower ones. Out: a position for every box and a path for every edge.

The steps are simple: the row of a box is its longest path from the top; an edge across several rows gets a free slot in each of
them, so it never crosses a box; boxes in a row are sorted by the mean position of their neighbours, alternately downwards and
upwards, a few times; then each moves towards that mean as far as its neighbours in the row allow. Ties are broken by position in
the input, so the same input gives the same picture.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

GAP = 26.0
"""The gap between neighbours in a row."""
ROW_GAP = 30.0
"""The gap between rows."""
SWEEPS = 12


@dataclass(frozen=True)
class Cell:
    """A coloured field inside a box: lines of text on one colour."""

    lines: tuple[str, ...]
    colour: str
    marked: bool = False
    """Drawn with the mark of a guard."""


@dataclass(frozen=True)
class Box:
    """A box to draw. With a `title` the cells stand side by side below it; without, the only cell is the box."""

    key: str
    width: float
    height: float
    cells: tuple[Cell, ...] = ()
    title: str = ""
    pill: bool = False
    """Small and rounded: an operation rather than a tensor or domain."""


@dataclass(frozen=True)
class Edge:
    """From the upper box to the lower one; dashed if the lower one only reads the upper."""

    upper: str
    lower: str
    dashed: bool = False


@dataclass(frozen=True)
class PlacedBoxes:
    """A finished layout: upper left corners of boxes by key, points of edges from top to bottom."""

    corners: dict[str, tuple[float, float]]
    paths: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


@dataclass(eq=False)
class _Slot:
    """A box, or the place where an edge passes a row."""

    key: str
    width: float
    height: float
    rank: int
    order: int
    x: float = 0.0
    """The position of its middle."""
    upper: list[_Slot] = field(default_factory=list)
    lower: list[_Slot] = field(default_factory=list)
    chain: list[_Slot] = field(default_factory=list)
    """All slots of the edge that passes here, ends included, so that it can be drawn straight."""

    @property
    def wanted(self) -> float:
        """The preferred position: aligned with its neighbours; for an edge, with the rest of the edge."""
        near = self.chain or [*self.upper, *self.lower]
        return _middle(near, self.x)


def place(boxes: Sequence[Box], edges: Sequence[Edge], last: Sequence[str] = ()) -> PlacedBoxes:
    """Positions for all boxes. Those named in `last` share the lowest row, in that order, if nothing is below them."""
    ranks = _ranks(boxes, edges, last)
    slots = {b.key: _Slot(b.key, b.width, b.height, ranks[b.key], k) for k, b in enumerate(boxes)}
    chains = [_chain(slots, edge, k) for k, edge in enumerate(edges)]
    rows: list[list[_Slot]] = [[] for _ in range(max(ranks.values(), default=0) + 1)]
    everything = list({id(s): s for s in (*slots.values(), *(s for chain in chains for s in chain))}.values())
    for slot in everything:
        rows[slot.rank].append(slot)
    fixed = {key: k for k, key in enumerate(last) if ranks.get(key) == len(rows) - 1}
    _order(rows, fixed)
    _spread(rows)
    return _measured(rows, slots, chains)


def _ranks(boxes: Sequence[Box], edges: Sequence[Edge], last: Sequence[str]) -> dict[str, int]:
    ranks = {b.key: 0 for b in boxes}
    for _ in boxes:
        changed = False
        for edge in edges:
            if ranks[edge.lower] <= ranks[edge.upper]:
                ranks[edge.lower] = ranks[edge.upper] + 1
                changed = True
        if not changed:
            break
    has_lower = {e.upper for e in edges}
    lowest = max(ranks.values(), default=0)
    for key in last:
        if key not in has_lower and key in ranks:
            ranks[key] = lowest
    return ranks


def _chain(slots: dict[str, _Slot], edge: Edge, number: int) -> list[_Slot]:
    """The slots an edge goes through, its ends among them, tied to each other."""
    upper, lower = slots[edge.upper], slots[edge.lower]
    between = [_Slot(f"{number}/{r}", 6.0, 0.0, r, len(slots) + number) for r in range(upper.rank + 1, lower.rank)]
    chain = [upper, *between, lower]
    for slot in between:
        slot.chain = chain
    for a, b in itertools.pairwise(chain):
        a.lower.append(b)
        b.upper.append(a)
    return chain


def _order(rows: list[list[_Slot]], fixed: dict[str, int]) -> None:
    """Orders each row by the middle of its neighbours in the row before (and, on the way back, after)."""
    for row in rows:
        row.sort(key=lambda s: s.order)
        _number(row)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            row.sort(key=lambda s: (_middle(s.upper if down else s.lower, s.x), s.x))
            _number(row)
        # The loops stand in the order they run in; what is between them stays between.
        bottom = rows[-1]
        named = sorted((s for s in bottom if s.key in fixed), key=lambda s: fixed[s.key])
        rest = [s for s in bottom if s.key not in fixed]
        bottom[:] = [*named, *rest]
        _number(bottom)


def _number(row: Sequence[_Slot]) -> None:
    for k, slot in enumerate(row):
        slot.x = float(k)


def _middle(near: Sequence[_Slot], otherwise: float) -> float:
    return sum(s.x for s in near) / len(near) if near else otherwise


def _spread(rows: list[list[_Slot]]) -> None:
    """Gives every slot its x: side by side first, then nearer to its neighbours, never out of order or too close."""
    for row in rows:
        x = 0.0
        for slot in row:
            slot.x = x + slot.width / 2
            x += slot.width + GAP
        for slot in row:
            slot.x -= (x - GAP) / 2
    for sweep in range(4 * SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            _settle(row, [s.wanted for s in row])


def _settle(row: Sequence[_Slot], wanted: Sequence[float]) -> None:
    """Moves each slot to its preferred position; slots that would overlap move together to the mean of theirs."""
    blocks: list[tuple[list[_Slot], float]] = []
    for slot, want in zip(row, wanted, strict=True):
        blocks.append(([slot], want))
        while len(blocks) > 1 and _right(blocks[-2]) + GAP > _left(blocks[-1]):
            (left, a), (right, b) = blocks[-2:]
            shift = _distance(left[0], [*left, *right], right[0])
            blocks[-2:] = [([*left, *right], (a * len(left) + (b - shift) * len(right)) / (len(left) + len(right)))]
    for slots, x in blocks:
        for slot in slots:
            slot.x = x + _distance(slots[0], slots, slot)


def _distance(first: _Slot, slots: Sequence[_Slot], other: _Slot) -> float:
    """The smallest distance between the middles of two slots of a block."""
    inside = list(slots)[slots.index(first) : slots.index(other) + 1]
    return sum(s.width + GAP for s in inside) - GAP - first.width / 2 - other.width / 2 if first is not other else 0.0


def _left(block: tuple[list[_Slot], float]) -> float:
    return block[1] - block[0][0].width / 2


def _right(block: tuple[list[_Slot], float]) -> float:
    slots, x = block
    return x + _distance(slots[0], slots, slots[-1]) + slots[-1].width / 2


def _measured(rows: list[list[_Slot]], slots: dict[str, _Slot], chains: Sequence[Sequence[_Slot]]) -> PlacedBoxes:
    """Corners and paths, with the upper left corner of everything at (0, 0)."""
    left = min((s.x - s.width / 2 for row in rows for s in row), default=0.0)
    right = max((s.x + s.width / 2 for row in rows for s in row), default=0.0)
    tops: list[float] = []
    heights = [max((s.height for s in row), default=0.0) for row in rows]
    y = 0.0
    for height in heights:
        tops.append(y)
        y += height + ROW_GAP

    def middle(slot: _Slot) -> float:
        return tops[slot.rank] + heights[slot.rank] / 2

    corners = {key: (s.x - s.width / 2 - left, middle(s) - s.height / 2) for key, s in slots.items()}
    paths = []
    for chain in chains:
        points: list[tuple[float, float]] = []
        for k, slot in enumerate(chain):
            x, top, height = slot.x - left, tops[slot.rank], heights[slot.rank]
            if k > 0:
                points.append((x, top))
            if k == len(chain) - 1:
                points.append((x, middle(slot) - slot.height / 2))
            elif k == 0:
                points += [(x, middle(slot) + slot.height / 2), (x, top + height)]
            else:
                points.append((x, top + height))
        paths.append(tuple(points))
    return PlacedBoxes(corners, tuple(paths), right - left, max(y - ROW_GAP, 0.0))
