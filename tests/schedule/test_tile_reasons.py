"""Every tile size of a plan comes with the reason for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, ir, ops
from serrate.compiled import Compiled
from serrate.engine import BACKENDS
from serrate.ir.tile import TileProgram
from serrate.lower.stages import stages
from serrate.schedule.strategies import SCHEDULES, plan


def softmax() -> ir.Fusion:
    with ir.Fusion("softmax") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, offsets), dim=1))
    return f


def product() -> ir.Fusion:
    with ir.Fusion("product") as f:
        x, offsets, w = f.input((None, 64), torch.float32), f.input((None,), torch.int64), f.input((64, 48), torch.float32)
        f.output(ops.matmul(ops.as_nested(x, offsets), w))
    return f


@pytest.mark.parametrize("made", [softmax, product])
@pytest.mark.parametrize("strategy", SCHEDULES)
@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_every_tile_has_a_reason(made: Callable[[], ir.Fusion], strategy: str, backend: str) -> None:
    for program in stages(made()):
        assert isinstance(program, TileProgram)
        found = plan(program, strategy, BACKENDS[backend])
        assert {t.size for t in found.tiles} == {s.args[2] for s in found.steps if s.primitive == "split"}
        assert all(t.why for t in found.tiles), found.tiles


def test_what_is_asked_for_is_said() -> None:
    args = (torch.ones(6, 4), torch.tensor([0, 2, 6]))
    tiles = Compiled(softmax(), "cpp", "maskless", tile=16).plan(*args).tiles
    assert {str(t) for t in tiles} == {"r0 by 16: requested"}


def test_the_tiles_of_a_kernel_have_reasons() -> None:
    @serrate.kernel(lanes={"tk": 64})
    def sums(x):
        out = torch.empty(x.num_rows)
        for tb in hl.tile(x.num_rows):
            acc = hl.zeros([tb])
            for tk in hl.tile(x.max_length):
                acc = acc + x[tb, tk].sum(1)
            out[tb] = acc
        return out

    jt = JaggedTensor.from_lengths(torch.ones(5), [2, 3])
    (variant,) = sums.on("reference").variants(jt)
    assert [str(t) for t in variant.plan.tiles] == ["tk by 64: requested"]
    (masked,) = serrate.kernel(sums.fn, strategy="masked").on("reference").variants(jt)
    assert "tb by 8: 8 rows are processed together, as lanes" in map(str, masked.plan.tiles)
