"""Pictures: a layout with colours and text, as SVG and as graphviz source.

In: boxes, edges, a legend, notes. Out: a `Drawing`. The background is transparent, and all text is on a light fill, so that a
picture is legible on light and dark pages.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from serrate.draw.layout import Box, Cell, Edge, PlacedBoxes, place
from serrate.errors import DomainError

FONT_SIZE = 13.0
CHARACTER = 8.1
"""The width of a character: a little more than monospace fonts have at this size, rounded up to whole pixels."""
LINE = 17.0
PADDING = 9.0
MARGIN = 12.0
FONTS = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
INK, EDGE, GROUND, BORDER, GUARD = "#0f172a", "#7a8290", "#f8fafc", "#94a3b8", "#dc2626"
COLOURS: dict[str, tuple[str, str]] = {
    "regular": ("#dbeafe", "#2563eb"),
    "component": ("#dcfce7", "#15803d"),
    "ragged": ("#ffedd5", "#c2410c"),
    "broadcast": ("#e5e7eb", "#6b7280"),
    "reduction": ("#fce7f3", "#be185d"),
}
"""Ground and border of each kind of domain."""

Rectangle = tuple[float, float, float, float]
"""Left, top, width, height."""


@dataclass(frozen=True)
class Legend:
    """The legend below a picture: a swatch for each kind of domain in it, and notes."""

    kinds: tuple[str, ...]
    guarded: bool
    notes: tuple[str, ...] = ()

    @property
    def entries(self) -> tuple[str, ...]:
        return (*self.kinds, *(("needs a guard",) if self.guarded else ()))


def text_width(lines: Sequence[str]) -> float:
    """The width of the lines, with a margin on both sides."""
    return max((len(line) for line in lines), default=0) * CHARACTER + 2 * PADDING


def cell_size(cell: Cell) -> tuple[float, float]:
    return text_width(cell.lines), len(cell.lines) * LINE + PADDING


def domain_box(key: str, cell: Cell) -> Box:
    """A box that is one cell."""
    width, height = cell_size(cell)
    return Box(key, width, height, (cell,))


def pill(key: str, label: str) -> Box:
    """A small rounded box with a label."""
    return Box(key, text_width([label]), LINE + 6, title=label, pill=True)


def titled_box(key: str, title: str, cells: Sequence[Cell]) -> Box:
    """A box with a title and cells side by side below it."""
    sizes = [cell_size(c) for c in cells]
    inner = sum(w for w, _ in sizes) + 4.0 * max(len(cells) - 1, 0)
    width = max(text_width([title]), inner + 8.0)
    height = LINE + 8.0 + max((h for _, h in sizes), default=0.0) + (6.0 if cells else 0.0)
    return Box(key, width, height, tuple(cells), title)


class Drawing:
    """A picture of domains or of a fusion: `svg`, `dot`, `save`; notebooks show it by themselves."""

    def __init__(self, boxes: Sequence[Box], edges: Sequence[Edge], legend: Legend, last: Sequence[str] = ()) -> None:
        self.boxes, self.edges, self.legend = tuple(boxes), tuple(edges), legend
        self._placed: PlacedBoxes = place(self.boxes, self.edges, last)
        self._legend = _legend_lines(legend, self._placed.width)

    @property
    def width(self) -> float:
        return max([self._placed.width, *(w for w, _ in self._legend_sizes())]) + 2 * MARGIN

    @property
    def height(self) -> float:
        below = sum(h for _, h in self._legend_sizes())
        return self._placed.height + 2 * MARGIN + (below + 2 * MARGIN if below else 0.0)

    def _legend_sizes(self) -> list[tuple[float, float]]:
        widths = [sum(_swatch_width(e) for e in row) + 2 * PADDING for row in self._legend]
        return [(w, LINE + 6) for w in widths] + [(text_width([n]), LINE) for n in self._notes()]

    def _notes(self) -> list[str]:
        room = max(int(self._placed.width / CHARACTER) - 3, 70)
        found: list[str] = []
        for note in self.legend.notes:
            found += textwrap.wrap(note, room, subsequent_indent="    ", break_long_words=True) or [""]
        return found

    @property
    def rectangles(self) -> dict[str, Rectangle]:
        """Where each box is, by key."""
        left = MARGIN + (self.width - 2 * MARGIN - self._placed.width) / 2
        corners = self._placed.corners
        return {b.key: (corners[b.key][0] + left, corners[b.key][1] + MARGIN, b.width, b.height) for b in self.boxes}

    @property
    def paths(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """The points of each edge, from top to bottom."""
        left = MARGIN + (self.width - 2 * MARGIN - self._placed.width) / 2
        return tuple(tuple((x + left, y + MARGIN) for x, y in path) for path in self._placed.paths)

    @property
    def svg(self) -> str:
        """The picture as SVG."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(self.width)}" height="{_n(self.height)}" '
            f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" font-family="{escape(FONTS)}" font-size="{_n(FONT_SIZE)}">'
        ]
        places = self.rectangles
        pills = {b.key for b in self.boxes if b.pill}
        for edge, path in zip(self.edges, self.paths, strict=True):
            parts.append(_path(path, edge.dashed, arrow=edge.lower not in pills))
        for box in self.boxes:
            parts += _box(box, places[box.key])
        parts += self._legend_svg()
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _legend_svg(self) -> Iterator[str]:
        if not self._legend and not self.legend.notes:
            return
        top, height = self._placed.height + 2 * MARGIN, sum(h for _, h in self._legend_sizes()) + MARGIN
        yield _rectangle((MARGIN, top, self.width - 2 * MARGIN, height), GROUND, BORDER, radius=6)
        y = top + MARGIN / 2
        for row in self._legend:
            x = MARGIN + PADDING
            for entry in row:
                swatch = (x, y + 5, 14.0, 14.0)
                fill, border = COLOURS.get(entry, (GROUND, GUARD))
                yield _rectangle(swatch, fill, border, dashed=entry not in COLOURS)
                yield _text(x + 20, y + 16.5, entry)
                x += _swatch_width(entry)
            y += LINE + 6
        for note in self._notes():
            yield _text(MARGIN + PADDING, y + LINE - 4, note)
            y += LINE

    @property
    def dot(self) -> str:
        """The picture as graphviz source."""
        lines = ["digraph {", '  node [fontname="monospace" fontsize=11];']
        for box in self.boxes:
            if box.pill:
                lines.append(f"  {_quoted(box.key)} [shape=oval label={_quoted(box.title)}];")
            else:
                texts = [*([box.title] if box.title else []), *("\n".join(c.lines) for c in box.cells)]
                kind = box.cells[0].colour if len(box.cells) == 1 and not box.title else None
                fill, border = COLOURS[kind] if kind else (GROUND, BORDER)
                marked = any(c.marked for c in box.cells)
                style = f'style="filled{",dashed" if marked else ""}" fillcolor="{fill}" color="{GUARD if marked else border}"'
                label = _quoted("\n".join(texts))
                lines.append(f"  {_quoted(box.key)} [shape=box {style} label={label}];")
        for edge in self.edges:
            dashed = " [style=dashed]" if edge.dashed else ""
            lines.append(f"  {_quoted(edge.upper)} -> {_quoted(edge.lower)}{dashed};")
        return "\n".join([*lines, "}"]) + "\n"

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> Path:
        """Writes the picture; the name ends in .svg, .dot or .gv."""
        path = Path(path)
        texts = {".svg": self.svg, ".dot": self.dot, ".gv": self.dot}
        if path.suffix not in texts:
            raise DomainError(f"save: expected a name that ends in {', '.join(texts)}, got {path.name!r}")
        path.write_text(texts[path.suffix], encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return f"<drawing of {len(self.boxes)} boxes; save('picture.svg') or .svg>"


def _legend_lines(legend: Legend, width: float) -> list[list[str]]:
    """The entries in rows that fit the picture's width, at least one per row."""
    rows: list[list[str]] = []
    for entry in legend.entries:
        if rows and sum(_swatch_width(e) for e in (*rows[-1], entry)) + 2 * PADDING <= max(width, 420.0):
            rows[-1].append(entry)
        else:
            rows.append([entry])
    return rows


def _swatch_width(entry: str) -> float:
    return len(entry) * CHARACTER + 20 + 16


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _n(value: float) -> str:
    """A number as SVG has it: no more digits than can be seen."""
    return f"{value:.1f}".removesuffix(".0")


def _rectangle(place: Rectangle, fill: str, border: str, *, radius: float = 3, dashed: bool = False) -> str:
    x, y, w, h = map(_n, place)
    how = f' stroke-dasharray="5 3" stroke-width="{2}"' if dashed else ""
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{_n(radius)}" fill="{fill}" stroke="{border}"{how}/>'


def _text(x: float, y: float, text: str, *, middle: bool = False, bold: bool = False) -> str:
    how = (' text-anchor="middle"' if middle else "") + (' font-weight="bold"' if bold else "")
    return f'<text x="{_n(x)}" y="{_n(y)}" fill="{INK}"{how} xml:space="preserve">{escape(text, quote=False)}</text>'


def _path(points: Sequence[tuple[float, float]], dashed: bool, *, arrow: bool) -> str:
    """Straight inside a row, curved between rows."""
    commands = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for (x1, y1), (x2, y2) in itertools.pairwise(points):
        if x1 == x2:
            commands.append(f"V{_n(y2)}")
        else:
            half = (y1 + y2) / 2
            commands.append(f"C{_n(x1)} {_n(half)} {_n(x2)} {_n(half)} {_n(x2)} {_n(y2)}")
    how = ' stroke-dasharray="3 3"' if dashed else ""
    line = f'<path d="{"".join(commands)}" fill="none" stroke="{EDGE}" stroke-width="1.4"{how}/>'
    if not arrow:
        return line
    x, y = points[-1]
    head = f"M{_n(x - 4)} {_n(y - 7)}L{_n(x)} {_n(y)}L{_n(x + 4)} {_n(y - 7)}Z"
    return f'{line}\n<path d="{head}" fill="{EDGE}"/>'


def _box(box: Box, place: Rectangle) -> Iterator[str]:
    x, y, w, h = place
    if box.pill:
        yield _rectangle(place, GROUND, BORDER, radius=h / 2)
        yield _text(x + w / 2, y + h / 2 + 4.5, box.title, middle=True)
    elif box.title:
        yield _rectangle(place, GROUND, BORDER, radius=5)
        yield _text(x + w / 2, y + LINE, box.title, middle=True, bold=True)
        sizes = [cell_size(c) for c in box.cells]
        left = x + (w - sum(cw for cw, _ in sizes) - 4.0 * (len(sizes) - 1)) / 2
        tall = max((ch for _, ch in sizes), default=0.0)
        for cell, (cw, _) in zip(box.cells, sizes, strict=True):
            yield from _cell(cell, (left, y + LINE + 8.0, cw, tall))
            left += cw + 4.0
    else:
        yield from _cell(box.cells[0], place)


def _cell(cell: Cell, place: Rectangle) -> Iterator[str]:
    fill, border = COLOURS[cell.colour]
    yield _rectangle(place, fill, GUARD if cell.marked else border, dashed=cell.marked)
    x, y, w, _ = place
    for k, line in enumerate(cell.lines):
        yield _text(x + w / 2, y + PADDING / 2 + LINE * (k + 1) - 4.5, line, middle=True, bold=k == 0)
