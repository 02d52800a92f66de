"""The dump and the pictures in docs/ir.md are what the compiler makes today; SERRATE_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import re
from textwrap import indent

import pytest
import torch

from serrate import ir, ops
from serrate.draw import Drawing, draw_loops
from serrate.ir.reductions import REDUCTIONS
from serrate.lower.stages import stages
from tests.pages import DOCS, check_dumps, check_picture

PAGE = DOCS / "ir.md"


def routed() -> ir.Fusion:
    with ir.Fusion("route") as f:
        tokens, weights = f.input((None, 8), torch.float32), f.input((3, 8, 8), torch.float32)
        expert = f.input((None,), torch.int64)
        offsets, order = ops.group_by(expert, 3)
        rows = ops.as_nested(ops.index(tokens, order), offsets)
        y = ops.as_flattened(ops.matmul(rows, weights))
        f.output(ops.index(y, ops.invert(order)))
    return f


def guards() -> Drawing:
    i = ir.IterDomain(15, name="i")
    outer, inner = ir.split(i, 6)
    return draw_loops([i], [*ir.split(outer, 2), *ir.split(inner, 4)])


def tiles() -> Drawing:
    c, r = ir.partition(ir.IterDomain(325, name="i"), [0, 127, 127, 325], names=("c", "r"))
    tile, lane = ir.split(r, 64)
    return draw_loops([c, r], [*ir.split(ir.combine(c, tile), 4), lane])


def softmax() -> Drawing:
    with ir.Fusion("softmax") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, offsets), dim=1))
    drawing: Drawing = f.draw()
    return drawing


PICTURES = {"guards": guards, "tiles": tiles, "softmax": softmax}


def test_ir_page_shows_real_stages() -> None:
    shown = (f"stage {k}\n" + str(stage).rstrip("\n").replace("\n\n", "\n") for k, stage in enumerate(stages(routed())))
    reductions = "\n".join(f"{kind}\n" + indent(kind.text, "  ") for kind in REDUCTIONS.values())
    check_dumps(PAGE, {"stages": "\n".join(shown) + "\n", "reductions": reductions + "\n"})


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_is_drawn(name: str) -> None:
    check_picture(DOCS / "images" / f"{name}.svg", PICTURES[name]().svg)


def test_every_picture_of_the_page_is_drawn_here() -> None:
    assert set(re.findall(r"\(images/(\w+)\.svg\)", PAGE.read_text())) == set(PICTURES)
