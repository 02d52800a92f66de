"""What notebooks show: well-formed, small, complete for few rows, honest for many, and without a forbidden copy.

In: tensors of every composition and large ones. Out: failures where the picture is malformed, large or wrong.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate.tensor import JaggedTensor, Structure, no_sync
from serrate.tensor.display.picture import picture
from tests.tensor.models import KINDS, ragged
from tests.tensor.shown import SHOWN, unread

SVG = "{http://www.w3.org/2000/svg}"


def parsed(html: str) -> ElementTree.Element:
    found = ElementTree.fromstring(html).find(SVG + "svg")
    assert found is not None
    return found


def boxes(svg: ElementTree.Element, *, holes: bool = False) -> list[tuple[float, float]]:
    """Widths and heights of what is drawn for rows, or for holes."""
    found = [box for box in svg.iter(SVG + "rect") if box.attrib["fill"].startswith("url(#holes-") is holes]
    return [(float(box.attrib["width"]), float(box.attrib["height"])) for box in found]


def texts(svg: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in svg.iter(SVG + "text")]


@pytest.mark.parametrize("name", SHOWN)
def test_every_composition_is_drawn(name: str) -> None:
    jt = SHOWN[name][0]
    html = jt._repr_html_()
    svg = parsed(html)
    assert f"<b>JaggedTensor</b> {jt.shape}" in html
    assert len([text for text in texts(svg) if re.match(r"[\d,]+ rows?: r\d", text)]) == len(jt.structure.rows)
    assert bool(boxes(svg, holes=True)) is (jt.format != "csr")
    height = float(svg.attrib["height"])
    for box in svg.iter(SVG + "rect"):
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= 640
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


@given(st.lists(st.integers(0, 50), min_size=1, max_size=24))
def test_bars_are_as_long_as_rows(lengths: list[int]) -> None:
    svg = parsed(JaggedTensor.from_lengths(torch.zeros(sum(lengths)), lengths)._repr_html_())
    widths = [width for width, _ in boxes(svg)]
    filled = [length for length in lengths if length]
    assert len(widths) == len(filled)
    for width, length in zip(widths, filled, strict=True):
        assert width / max(widths) == pytest.approx(length / max(filled), abs=0.01)
    assert texts(svg)[1:] == [text for row, length in enumerate(lengths) for text in (str(row), str(length))]


def test_padded_rows_end_where_their_room_ends() -> None:
    svg = parsed(SHOWN["padded"][0]._repr_html_())
    (short, _), (long, _) = boxes(svg)
    holes = [width for width, _ in boxes(svg, holes=True)]
    assert [short + holes[0], long + holes[2]] == pytest.approx([holes[1], holes[1]], abs=0.2)
    assert "66.7% of the values are holes, hatched" in SHOWN["padded"][0]._repr_html_()


def test_rows_with_columns_are_rectangles() -> None:
    svg = parsed(SHOWN["product"][0]._repr_html_())
    assert [width / height for width, height in boxes(svg)] == pytest.approx([2 / 3, 4 / 2], abs=0.01)
    assert texts(svg)[1:] == ["0: 3x2", "1: 0x5", "2: 2x4"]
    padded = parsed(SHOWN["product, columns padded"][0]._repr_html_())
    assert [width / height for width, height in boxes(padded, holes=True)] == pytest.approx([3 / 3, 1 / 2], abs=0.01)


def test_nested_rows_are_grouped() -> None:
    shown = texts(parsed(SHOWN["nested"][0]._repr_html_()))
    assert shown == [
        "2 rows: r0 (dim 1) 2 to 3 parts, r1 (dim 2) 0 to 4 positions",
        *("0: 2 parts", "0", "4", "1", "4"),
        *("1: 3 parts", "0", "1", "1", "0", "2", "2"),
    ]


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", [False, True])
def test_large_tensors_are_sampled(levels: int, columns: bool) -> None:
    lengths = [torch.full((20**level,), 20) for level in range(1, levels)]
    lengths.append(torch.randint(0, 9, (20**levels,), generator=torch.Generator().manual_seed(2)))
    if levels == 1:
        lengths = [torch.arange(1000)]
    structure = Structure.from_lengths(*lengths)
    if columns:
        structure = structure.with_columns(torch.full_like(lengths[-1], 3))
    jt = JaggedTensor(torch.zeros(1).expand(structure.total_elements()), structure)
    html = jt._repr_html_()
    assert len(html) < 12_000
    notes = [text for text in texts(parsed(html)) if "evenly picked" in text]
    assert notes
    if levels == 1 and not columns:
        assert notes == ["(24 of 1,000 rows, longest first, evenly picked)"]
        assert texts(parsed(html))[1:3] == ["999", "999"] and texts(parsed(html))[-3:-1] == ["0", "0"]


def test_everything_is_said_and_escaped() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(4, requires_grad=True), [1, 3]).with_hint(reuse="high")
    html = jt._repr_html_()
    said = "(2, r0) · torch.float32 · cpu · reuse=high · requires_grad · 4 positions · padding would be 33.3% holes"
    assert f"<b>JaggedTensor</b> {said}</div>" in html
    assert "<script" not in html and "<style" not in html and "http" not in html.replace("http://www.w3.org/2000/svg", "")


def test_two_pictures_on_a_page_do_not_share_a_name() -> None:
    one, other = (re.findall(r'id="(holes-\w+)"', SHOWN[name][0]._repr_html_()) for name in ("gaps", "padded"))
    assert one and other and one != other
    assert picture((3,), Structure.from_lengths(torch.tensor([1, 2]))) == picture(
        (3,), Structure.from_lengths(torch.tensor([1, 2]))
    )


def test_unread_lengths_are_not_read() -> None:
    for jt in (unread("meta"), unread("cpu")):
        with no_sync(strict=True):
            html = jt._repr_html_()
        assert "the lengths are not on the host" in html and "svg" not in html
        ElementTree.fromstring(html)
    assert "svg" in unread("cpu")._repr_html_()


@given(ragged(*KINDS))
def test_any_composition_is_drawn_inside_its_frame(drawn: tuple[JaggedTensor, list[Any]]) -> None:
    svg = parsed(drawn[0]._repr_html_())
    for box in svg.iter(SVG + "rect"):
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0 and x + width <= 640 and y >= 0 and y + height <= float(svg.attrib["height"])
