"""Plots as SVG: columns of a histogram, and bars with parts.

In: labels and numbers. Out: SVG text, coloured by the style sheet of the page it is on (`page.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from serrate.tensor.display.describe import Bin

WIDTH = 680.0
"""The height of a histogram."""
BAR_WIDTH = 460.0
LINE = 26.0
CHARACTER = 7.4
"""The width of a character of a label."""


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart."""

    label: str
    parts: tuple[tuple[float, str], ...]
    """Sizes, each with the class of its colour."""
    text: str
    """Written after the bar."""
    marked: bool = False


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars, the longest as long as there is room for.

    >>> svg = bars("times", [Bar("masked", ((3.0, "time"),), "3 ms"), Bar("maskless", ((1.0, "time"),), "1 ms", marked=True)])
    >>> svg.count("<rect"), "3 ms" in svg
    (2, True)
    """
    left = 14 + max((len(row.label) for row in rows), default=0) * CHARACTER
    right = 14 + max((len(row.text) for row in rows), default=0) * CHARACTER
    room, most = max(BAR_WIDTH - left - right, 200.0), max((sum(size for size, _ in row.parts) for row in rows), default=0.0)
    shapes: list[str] = []
    for k, row in enumerate(rows):
        y, x = k * LINE, left
        strong = ' class="strong"' if row.marked else ""
        shapes.append(f'<text{strong} x="{left - 8:.1f}" y="{y + 17:.1f}" text-anchor="end">{escape(row.label)}</text>')
        for size, kind in row.parts:
            width = room * size / most if most else 0.0
            if width:
                shapes.append(f'<rect class="{kind}" x="{x:.1f}" y="{y + 5:.1f}" width="{max(width, 1.0):.1f}" height="16"/>')
            x += width
        shapes.append(f'<text{strong} x="{x + 8:.1f}" y="{y + 17:.1f}">{escape(row.text)}</text>')
    return _svg(title, left + room + right, max(len(rows), 1) * LINE, shapes)


def columns(title: str, bins: Sequence[Bin]) -> str:
    """A histogram of lengths, one column for each bin.

    >>> columns("lengths", [Bin(0, 9, 3), Bin(10, 19, 0)]).count("<rect")
    1
    """
    height, most = 150.0, max((each.rows for each in bins), default=0) or 1
    step = WIDTH / max(len(bins), 1)
    shapes = [f'<line class="axis" x1="0" y1="{height + 20}" x2="{WIDTH}" y2="{height + 20}"/>']
    for k, each in enumerate(bins):
        size, middle = height * each.rows / most, (k + 0.5) * step
        if each.rows:
            tall = max(size, 1.5)
            shapes.append(
                f'<rect class="rows" x="{k * step + step * 0.1:.1f}" y="{20 + height - tall:.1f}" width="{step * 0.8:.1f}" '
                f'height="{tall:.1f}"><title>{each.rows:,} rows of {each.low:,} to {each.high:,}</title></rect>'
            )
        shapes.append(f'<text x="{middle:.1f}" y="{14 + height - size:.1f}" text-anchor="middle">{each.rows:,}</text>')
        label = _short(each.low) if each.low == each.high else f"{_short(each.low)}–{_short(each.high)}"
        shapes.append(f'<text class="dim" x="{middle:.1f}" y="{height + 36:.1f}" text-anchor="middle">{label}</text>')
    return _svg(title, WIDTH, height + 42, shapes)


def _short(number: int) -> str:
    """A number of at most four characters or so.

    >>> _short(999), _short(131072)
    ('999', '131k')
    """
    for unit, size in (("M", 10**6), ("k", 10**4)):
        if number >= size:
            return f"{number / (size if unit == 'M' else 1000):.3g}{unit}"
    return str(number)


def _svg(title: str, width: float, height: float, shapes: Sequence[str]) -> str:
    # A plot grows with its card, but not until its text is larger than that around it.
    size = f'style="max-width:{1.2 * width:.0f}px" viewBox="0 0 {width:.1f} {height:.1f}"'
    head = f'<svg class="chart" role="img" {size} xmlns="http://www.w3.org/2000/svg">'
    return "\n".join((head, f"<title>{escape(title)}</title>", *shapes, "</svg>"))
