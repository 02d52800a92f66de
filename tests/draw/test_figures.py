"""Pictures: everything is there, nothing overlaps, text stays in its box, edges stay out of boxes, output is the same again."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serrate import ir, ops
from serrate.draw import Drawing, draw_domains, draw_fusion, draw_loops
from serrate.draw.figures import label
from serrate.errors import DomainError
from serrate.ir import Fusion, IterDomain, IterType, combine, cover, merge, partition, restrict, split
from serrate.ir.domains import ParallelType
from tests.analysis.chains import Chain, build, chains

SVG = "{http://www.w3.org/2000/svg}"
ADVANCE = 0.62
"""The widest character of the fonts that the pictures ask for, relative to the font size."""


def check(picture: Drawing) -> None:
    """All that has to hold of every picture."""
    root = ElementTree.fromstring(picture.svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    places = picture.rectangles
    for (a, (ax, ay, aw, ah)), (b, (bx, by, bw, bh)) in itertools.combinations(places.items(), 2):
        assert ax + aw <= bx or bx + bw <= ax or ay + ah <= by or by + bh <= ay, f"{a} and {b} overlap"
    for x, y, w, h in places.values():
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
    _check_text(root, width)
    for edge, path in zip(picture.edges, picture.paths, strict=True):
        ends = {edge.upper, edge.lower}
        for (x1, y1), (x2, y2) in itertools.pairwise(path):
            for key, (x, y, w, h) in places.items():
                inside = min(y1, y2) < y + h and y < max(y1, y2) and min(x1, x2) < x + w and x < max(x1, x2)
                straight = x1 == x2 and x < x1 < x + w and min(y1, y2) < y + h and y < max(y1, y2)
                assert key in ends or not (inside or straight), f"an edge runs through {key}"


def _check_text(root: ElementTree.Element, width: float) -> None:
    """Every text lies inside a rectangle that was drawn before it."""
    size = float(root.attrib["font-size"])
    drawn: list[tuple[float, ...]] = []
    for node in root:
        if node.tag == f"{SVG}rect":
            drawn.append(tuple(float(node.attrib[k]) for k in ("x", "y", "width", "height")))
        if node.tag == f"{SVG}text":
            long = len(node.text or "") * size * ADVANCE
            x = float(node.attrib["x"]) - (long / 2 if node.attrib.get("text-anchor") == "middle" else 0)
            y = float(node.attrib["y"])
            assert any(rx <= x and x + long <= rx + rw and ry <= y - size * 0.75 and y <= ry + rh for rx, ry, rw, rh in drawn), (
                f"{node.text!r} runs out of its box"
            )


def rows() -> tuple[IterDomain, IterDomain, ir.RaggedIterDomain]:
    d = IterDomain(325, name="i")
    return d, *partition(d, [0, 127, 127, 325], names=("c", "r"))


def test_domains_and_transforms_are_all_there() -> None:
    _, c, r = rows()
    o, n = split(r, 64)
    picture = draw_domains([combine(c, o), n])
    check(picture)
    for text in ("i", "325", "c", "r", "[127, 0, 198]", "ro", "[2, 0, 4]", "cro", "partition", "split 64", "combine"):
        assert f">{text}<" in picture.svg
        assert text in picture.dot
    assert picture.dot.startswith("digraph {") and picture.dot.count("->") == len(picture.edges)
    assert picture._repr_svg_() == picture.svg


def test_logical_domains_are_above_loops_and_loops_are_in_order() -> None:
    d = IterDomain(15, name="d")
    o, n = split(d, 6)
    loops = [*split(n, 4), *split(o, 2)]
    picture = draw_domains(loops)
    check(picture)
    found = {b.cells[0].lines[0]: picture.rectangles[b.key] for b in picture.boxes if b.cells}
    bottom = [found[loop.name] for loop in loops]
    assert len({y for _, y, _, _ in bottom}) == 1 and bottom == sorted(bottom)
    assert found["d"][1] < found["do"][1] < bottom[0][1]


def test_labels() -> None:
    d, c, r = rows()
    made = {
        "split 4": split(d, 4)[0],
        "split 4 outside": split(d, 4, inner=False)[0],
        "merge": merge(d, IterDomain(2)),
        "partition": c,
        "cover": cover(r, 200),
        "restrict 2 9": restrict(d, 2, 9),
    }
    for text, domain in made.items():
        assert domain.definition is not None
        assert label(domain.definition) == text


def test_guarded_domains_are_marked() -> None:
    d = IterDomain(6, name="d")
    plain, marked = draw_domains(split(d, 4)), draw_loops([d], split(d, 4))
    for picture in (plain, marked):
        check(picture)
    assert "stroke-dasharray" not in plain.svg and "needs a guard" not in plain.svg
    assert ">guard<" in marked.svg and "needs a guard" in marked.svg
    assert "guard: i0*4 + i1 &lt; 6  (4 may not divide 6)" in marked.svg
    assert "dashed" in marked.dot and "dashed" not in plain.dot
    assert "no guards are needed" in draw_loops([d], split(d, 3)).svg


def test_long_names_of_arrays_are_given_once() -> None:
    _, c, r = rows()
    o, n = split(r, 64)
    picture = draw_loops([c, r], [combine(c, o), n])
    check(picture)
    assert "A1 = offsets[0, 127, 127, 325]" in picture.svg


def test_kinds_have_colours_and_a_legend() -> None:
    _, c, r = rows()
    others = [IterDomain(1, IterType.BROADCAST), IterDomain(9, IterType.REDUCTION), IterDomain(4).parallelize(ParallelType.LANES)]
    picture = draw_domains([c, r, *others])
    check(picture)
    for kind in ("regular", "component", "ragged", "broadcast", "reduction"):
        assert f">{kind}<" in picture.svg
    assert ".lanes<" in picture.svg
    assert ">ragged<" not in draw_domains([IterDomain(4)]).svg


def test_many_rows_are_shortened() -> None:
    offsets = list(range(0, 1001, 10))
    _, r = partition(IterDomain(1000), offsets)
    picture = draw_domains([r])
    check(picture)
    assert "[10, 10, 10, 10" in picture.svg and "… 100 rows]" in picture.svg


def softmax() -> Fusion:
    with ir.Fusion("softmax") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        w = f.input((4,), torch.float32)
        f.output(ops.softmax(ops.as_nested(x, offsets), dim=1) * w + 1.0)
    return f


def test_a_fusion() -> None:
    f = softmax()
    picture = draw_fusion(f)
    check(picture)
    for view in (*f.inputs, *f.outputs):
        assert f">{view.tensor.name} " in picture.svg
    for text in ("softmax over r0", "view: partition", "exp_diff", "add(·, 1.0)", "T1[c + 1] - T1[c]", "T0 float32 input"):
        assert f">{text}<" in picture.svg
    targets = {t.name for definition in f.definitions for t in definition.statement.targets}
    assert targets <= {b.key for b in picture.boxes}
    assert any(e.dashed and e.upper == "T1" for e in picture.edges), "offsets belong to the view"


def test_more_fusions() -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 8), torch.float32), f.input((4,), torch.int64)
        w = f.input((3, 8, 5), torch.float32)
        rows_ = ops.as_nested(x, offsets)
        f.output(ops.as_flattened(ops.matmul(rows_, w)), ops.sum(x), ops.mean(rows_, 1), ops.set(rows_))
    picture = draw_fusion(f)
    check(picture)
    for text in ("sum of products over d1", "view: combine", "scalar", "set"):
        assert f">{text}<" in picture.svg, text


def test_the_same_program_gives_the_same_picture() -> None:
    def once() -> tuple[str, ...]:
        d = IterDomain(15, name="d")
        o, n = split(d, 6)
        pictures = draw_loops([d], [*split(o, 2), *split(n, 4)]), draw_fusion(softmax())
        return tuple(text for p in pictures for text in (p.svg, p.dot))

    assert once() == once()


def test_save(tmp_path: Path) -> None:
    picture = draw_domains(split(IterDomain(6), 4))
    assert picture.save(tmp_path / "a.svg").read_text() == picture.svg
    assert picture.save(tmp_path / "a.dot").read_text() == picture.dot
    with pytest.raises(DomainError, match=r"ends in .svg, .dot, .gv"):
        picture.save(tmp_path / "a.png")
    with pytest.raises(DomainError, match="at least one domain"):
        draw_domains([])


def test_text_is_escaped() -> None:
    picture = draw_domains([IterDomain(4, name='a<b>&"c"')], notes=["x < 3 & y"])
    check(picture)
    assert r"a<b>&\"c\"" in picture.dot


@settings(max_examples=80, deadline=None)
@given(chains, st.integers(0, 500))
def test_random_chains(chain: Chain, seed: int) -> None:
    built = build(chain, seed)
    assume(built is not None)
    assert built is not None
    check(draw_loops(built.logical, built.loop))
