"""Long sums on a GPU: groups of blocks, each summed over its lanes, without a second block.

In: sums over rows of few and of many blocks, as generated Triton under its interpreter. Out: what a worker holds, and sums that
are compared with float64, row by row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, ir, ops
from serrate.lower.passes.long_sums import GROUP

pytestmark = pytest.mark.triton
Body = Callable[[Any], Any]
TILE = 2
LENGTHS = (GROUP * TILE, 0, 1, GROUP * TILE + 1, 3 * GROUP * TILE - 1, 7)
"""One group of blocks, none, part of one, and several."""


def rows() -> JaggedTensor:
    draw = torch.Generator().manual_seed(0)
    return JaggedTensor.from_lengths(torch.randn(sum(LENGTHS), 4, generator=draw) + 1, LENGTHS)


def fusion(body: Body) -> ir.Fusion:
    with ir.Fusion("totals") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(body(ops.as_nested(x, offsets)))
    return f


def blocks_in(source: str, lanes: str) -> set[str]:
    """The names of blocks with these lanes."""
    return set(re.findall(rf"(\w+) = tl\.full\(\[{lanes}\]", source))


@pytest.mark.parametrize(
    ("strategy", "body", "expected"),
    [
        ("maskless", lambda x: ops.sum(x, 1), lambda row: row.sum(0)),
        ("masked", lambda x: ops.sum(x, 1), lambda row: row.sum(0)),
        ("maskless", lambda x: ops.sum(x, (1, 2)), lambda row: row.sum()),
        ("maskless", lambda x: ops.sum(ops.neg(x) * x, 1) * ops.sum(x, 1), lambda row: -(row * row).sum(0) * row.sum(0)),
    ],
    ids=["sum", "sums of rows side by side", "sum over features", "two sums"],
)
def test_sums_of_few_and_many_groups(strategy: str, body: Body, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    jt = rows()
    exact = torch.stack([expected(row.double()) for row in jt.unbind()])
    got = fusion(body).compile("triton", strategy, tile=TILE)(jt.values, jt.offsets)
    torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=1e-4)


def test_a_group_is_summed_over_its_lanes_before_the_next_begins() -> None:
    jt = rows()
    source = fusion(lambda x: ops.sum(x, 1)).compile("triton", "maskless", tile=TILE).source(jt.values, jt.offsets)
    assert blocks_in(source, "2, 4") == {"T3_r0i_part"}
    assert source.count("T3_ = T3_ + tl.sum(T3_r0i_part, 0)") == 2  # a single group, and each of several


def test_a_sum_that_later_loops_read() -> None:
    @serrate.kernel
    def centred(jt: JaggedTensor) -> JaggedTensor:
        out = torch.empty_like(jt)
        for b in hl.tile(jt.num_rows):
            total = hl.zeros([b])
            for k, m in hl.tile([jt.max_length, jt.size(2)], block_size=[TILE, 4]):
                total = total + jt[b, k, m].sum([1, 2])
            for k, m in hl.tile([jt.max_length, jt.size(2)]):
                out[b, k, m] = jt[b, k, m] - total[:, None, None]
        return out

    jt = rows()
    expected = torch.cat([row.double() - row.double().sum() for row in jt.unbind()])
    torch.testing.assert_close(centred.on("triton")(jt).values.double(), expected, rtol=2e-6, atol=1e-4)
