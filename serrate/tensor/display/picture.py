"""A ragged tensor in a notebook: a line of facts, and its rows drawn to scale.

In: values and their structure. Out: HTML with an SVG: a bar per row, a rectangle per row with columns, holes hatched.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from html import escape

import torch
from torch import Tensor

from serrate.tensor.display.describe import padded_positions, percent
from serrate.tensor.hints import Hints
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Dim, Structure
from serrate.tensor.sync import may_copy

_WHY = "drawing rows"
_WIDTH, _LINE, _BAR, _INDENT = 640, 17, 11, 14
# Colours that are legible on light and dark pages.
_INK, _ROW, _EDGE = "#6e7781", "#e07b39", "#b4551a"
_FONT = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
_CHARACTER = 6.7
_MOST = {1: 24, 2: 6, 3: 3}
"""How many rows of each level are drawn, by the number of levels; beyond these, 2."""
_RECTANGLE, _CAPTION = 84, 15


def as_html(shape: tuple[object, ...], values: Tensor, structure: Structure, hints: Hints) -> str:
    """The HTML that a notebook shows for a ragged tensor; without the picture if the lengths are not on the host.

    >>> import torch
    >>> from serrate.tensor.hints import NO_HINTS
    >>> as_html((2, "r0"), torch.zeros(3), Structure.from_lengths(torch.tensor([1, 2])), NO_HINTS)[:62]
    '<div style="overflow-x:auto"><div><b>JaggedTensor</b> (2, r0) '
    """
    facts = [str(values.dtype), str(values.device)]
    if structure.format != "csr":
        facts.append(structure.format)
    facts += [f"{name}={word}" for name, word in hints.as_dict().items()]
    if values.requires_grad:
        facts.append("requires_grad")
    readable = all(rows.readable() or may_copy(rows.offsets[0]) for rows in structure.rows)
    drawn = "<div>the lengths are not on the host</div>"
    if readable:
        total, padded = structure.total_elements(why=_WHY), padded_positions(structure, _WHY)
        facts.append(f"{total:,} positions")
        if structure.format != "csr" and values.numel():
            regular = (values.shape[dim.values_dim] for dim in structure.dims_of(values.dim()) if dim.axis is None)
            facts.append(f"{percent(1 - total * math.prod(regular) / values.numel())} of the values are holes, hatched")
        elif padded:
            facts.append(f"padding would be {percent(1 - total / padded)} holes")
        drawn = picture(tuple(values.shape), structure)
    size = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    header = f"<div><b>JaggedTensor</b> {escape(size)} · {escape(' · '.join(facts))}</div>"
    return f'<div style="overflow-x:auto">{header}\n{drawn}</div>'


@dataclass
class _Canvas:
    """The SVG marks drawn so far, and the height they take."""

    hatch: str
    y: float = 0
    marks: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> None:
        bold = f' font-weight="{weight}"' if weight != "normal" else ""
        end = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.marks.append(f'<text x="{_at(x)}" y="{_at(y)}"{end}{bold}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, *, hole: bool = False) -> None:
        place = f'x="{_at(x)}" y="{_at(y)}" width="{_at(width)}" height="{_at(height)}"'
        paint = f'fill="url(#{self.hatch})" stroke="{_ROW}" stroke-opacity=".45"' if hole else f'fill="{_ROW}" stroke="{_EDGE}"'
        self.marks.append(f'<rect {place} {paint} stroke-width=".7"/>')

    def rule(self, x: float, top: float, bottom: float) -> None:
        self.marks.append(f'<path d="M{_at(x)} {_at(top)}V{_at(bottom)}" stroke="{_INK}" stroke-opacity=".5"/>')


def picture(values_shape: tuple[int, ...], structure: Structure) -> str:
    """The rows of every partitioned dim as an SVG.

    >>> print(picture((5,), Structure.from_lengths(torch.tensor([3, 2])))[:53])
    <svg xmlns="http://www.w3.org/2000/svg" width="640" h
    """
    # The pattern's id is derived from the picture, so that two pictures on one page do not share it.
    seed = repr((values_shape, structure)).encode()
    canvas = _Canvas(f"holes-{zlib.crc32(seed):08x}")
    dims = structure.dims_of(len(values_shape))
    for axis, (dim, rows) in enumerate(zip(structure.dims, structure.rows, strict=True)):
        canvas.y += 10 if axis else 2
        canvas.text(0, canvas.y + 12, _caption(axis, rows, dims), weight="bold")
        canvas.y += _LINE + 4
        _AxisPicture(canvas, rows, values_shape[dim : dim + 2]).draw()
    height = _at(canvas.y + 2)
    hatching = (
        f'<pattern id="{canvas.hatch}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path d="M2 0V5" stroke="{_ROW}" stroke-opacity=".5" stroke-width="1.5"/></pattern>'
    )
    head = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" font-family="{_FONT}" font-size="11"'
    body = "\n".join(canvas.marks)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head} fill="{_INK}">\n<defs>{hatching}</defs>\n{body}\n</svg>\n'


class _AxisPicture:
    """The rows of one partitioned dim, drawn one below the other and grouped by component."""

    def __init__(self, canvas: _Canvas, rows: Rows, extents: tuple[int, ...]) -> None:
        self.canvas, self.rows, self.extents = canvas, rows, extents
        self.offsets = [rows.host_offsets(level, _WHY) for level in range(rows.depth)]
        self.lengths = rows.host_lengths(rows.depth - 1, _WHY).long()
        self.counts = None if rows.columns is None else rows.host_lengths(rows.depth, _WHY).long()
        self.holes = _holes(rows, extents[0]) if rows.starts is not None else torch.zeros_like(self.lengths)
        self.most = _MOST.get(rows.depth, 2)
        self.indent = _INDENT * (rows.depth - 1)

    def draw(self) -> None:
        count = self.rows.num_rows(0)
        if self.rows.depth == 1 and self.counts is None and count > self.most:
            # A sorted sample shows the spread; in a large batch the order of rows seldom means anything.
            order = self.lengths.sort(descending=True, stable=True).indices
            picked = [int(order[k]) for k in _spaced(0, count, self.most)]
            self._rows(picked, 0)
            self._note(f"{self.most} of {count:,} rows, longest first, evenly picked", 0)
        else:
            self._level(0, 0, count)

    def _level(self, level: int, first: int, last: int) -> None:
        """Rows `first` to `last` of a level: as bars on the innermost level, otherwise as groups."""
        picked = _spaced(first, last, self.most)
        innermost = level == self.rows.depth - 1
        indent = _INDENT * level
        if innermost:
            self._rows([*picked], indent, first)
        else:
            for row in picked:
                start, stop = (int(bound) for bound in self.offsets[level][row : row + 2])
                top = self.canvas.y
                parts = f"{stop - start:,} part{'' if stop - start == 1 else 's'}"
                self.canvas.text(indent, self.canvas.y + 12, f"{row - first}: {parts}")
                self.canvas.y += _LINE
                self._level(level + 1, start, stop)
                if stop > start:
                    self.canvas.rule(indent + 4, top + _LINE, self.canvas.y - 2)
                self.canvas.y += 3
        if len(picked) < last - first:
            things = "rows" if innermost else "components"
            self._note(f"{len(picked)} of {last - first:,} {things}, evenly picked", indent)

    def _rows(self, picked: list[int], indent: float, first: int = 0) -> None:
        if self.counts is None:
            self._bars(picked, first)
        else:
            self._rectangles(picked, indent, first, self.counts)

    def _bars(self, picked: list[int], first: int) -> None:
        canvas, room = self.canvas, self._room()
        left = self.indent + 58
        for row in picked:
            length, hole = int(self.lengths[row]), int(self.holes[row])
            canvas.text(left - 8, canvas.y + 10, f"{row - first:,}", anchor="end")
            wide = length * room
            if length:
                canvas.box(left, canvas.y + 1, max(wide, 1), _BAR)
            else:
                canvas.rule(left, canvas.y + 1, canvas.y + 1 + _BAR)
            if hole:
                canvas.box(left + wide, canvas.y + 1, max(hole * room, 1), _BAR, hole=True)
            canvas.text(left + wide + hole * room + 6, canvas.y + 10, f"{length:,}")
            canvas.y += _BAR + 4

    def _room(self) -> float:
        """The width of one position, such that the longest row and the hole after it fill the picture."""
        longest = int((self.lengths + self.holes).max()) if len(self.lengths) else 0
        text = max(len(f"{longest:,}"), 4) * _CHARACTER + 12
        return (_WIDTH - self.indent - 58 - text) / max(longest, 1)

    def _rectangles(self, picked: list[int], indent: float, first: int, counts: Tensor) -> None:
        canvas = self.canvas
        width_of = self.extents[1] if self.rows.storage_dims == 2 else None
        sides = (self.lengths.max(), counts.max()) if len(counts) else (0, 0)
        unit = _RECTANGLE / max(int(sides[0]), int(sides[1]), width_of or 0, 1)
        x, top, deepest = indent + _INDENT, canvas.y, 0.0
        for row in picked:
            length, columns = int(self.lengths[row]), int(counts[row])
            caption = f"{row - first}: {length:,}x{columns:,}"
            high, wide, full = length * unit, columns * unit, (width_of or columns) * unit
            takes = max(full, len(caption) * _CHARACTER) + 14
            if x + takes > _WIDTH and x > indent + _INDENT:
                x, top, deepest = indent + _INDENT, top + deepest, 0.0
            canvas.text(x, top + 10, caption)
            if full > wide and length:
                canvas.box(x + wide, top + _CAPTION, full - wide, max(high, 1), hole=True)
            if length and columns:
                canvas.box(x, top + _CAPTION, max(wide, 1), max(high, 1))
            x += takes
            deepest = max(deepest, high + _CAPTION + 8)
        canvas.y = top + deepest

    def _note(self, text: str, indent: float) -> None:
        self.canvas.text(indent + 4, self.canvas.y + 12, f"({text})")
        self.canvas.y += _LINE


def _caption(axis: int, rows: Rows, dims: tuple[Dim, ...]) -> str:
    """The caption of an axis: every ragged dim with its shortest and longest length."""
    texts = []
    for k, dim in enumerate(dims):
        if dim.axis == axis and dim.level is not None:
            least, most = rows.min_length(dim.level, _WHY), rows.max_length(dim.level, _WHY)
            between = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            things = "columns" if dim.level == rows.depth else "parts" if dim.level < rows.depth - 1 else "positions"
            texts.append(f"r{dim.ragged} (dim {k}) {between} {things}")
    return f"{rows.num_rows(0):,} row{'' if rows.num_rows(0) == 1 else 's'}: {', '.join(texts)}"


def _holes(rows: Rows, extent: int) -> Tensor:
    """The size of the hole after each row: up to the next row, or to the end of the values."""
    where, sizes = rows.host_row_starts(_WHY).long(), rows.host_sizes(_WHY).long()
    after = torch.cat([where[1:], where.new_tensor([extent])])[: len(where)]
    return (after - where - sizes).clamp(min=0)


def _spaced(first: int, last: int, most: int) -> list[int]:
    count = last - first
    if count <= most:
        return list(range(first, last))
    return [first + round(k * (count - 1) / (most - 1)) for k in range(most)]


def _at(place: float) -> str:
    return f"{place:.1f}".removesuffix(".0")
