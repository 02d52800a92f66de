"""Loops as people write them by hand: exact per row, masked over rows, persistent workers; and with what the container offers.

In: the same sums of a ragged batch and a dense row, written in three ways. Out: a failure where one gives other numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import serrate as helion
import serrate.language as hl
from tests.language.kinds import LENGTHS, TILES, ran

pytestmark = pytest.mark.sampled(2)


@helion.kernel()
def by_tiles(jt: hl.JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = torch.zeros([jt.num_rows, dense.size(0)], dtype=jt.dtype)
    for tile_row in hl.tile(jt.num_rows):
        for tile_col in hl.tile(jt.max_length):
            out[tile_row, tile_col] = jt[tile_row, tile_col] + dense[tile_col]
        for tile_col in hl.tile(jt.max_length, out.size(1)):
            out[tile_row, tile_col] = dense[tile_col]
    return out


@helion.kernel(jagged_strategy="maskless")
def exact(jt: hl.JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = dense.expand(jt.num_rows, -1).clone()
    for row_id in hl.grid(jt.num_rows):
        M_row = jt.lengths[row_id]
        if M_row > 0:
            for tile_col in hl.tile(M_row):
                values = jt.values[jt.offsets[row_id] + tile_col.index]
                out[row_id, tile_col] = values + dense[tile_col]
    return out


@helion.kernel(strategy="masked", autotune_effort="none")
def masked(jt: hl.JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = torch.zeros([jt.num_rows, dense.size(0)], dtype=jt.dtype)
    for tile_row in hl.tile(jt.num_rows):
        lengths = jt.lengths[tile_row]
        max_len = lengths.amax()
        for tile_col in hl.tile(0, max_len):
            values = hl.load(
                jt.values,
                [jt.offsets[tile_row][:, None] + tile_col.index[None, :]],
                extra_mask=tile_col.index[None, :] < lengths[:, None],
            )
            out[tile_row, tile_col] = values + dense[tile_col]
        for tile_col in hl.tile(max_len, out.size(1)):
            out[tile_row, tile_col] = dense[tile_col].unsqueeze(0) + hl.zeros([tile_row, tile_col])
    return out


@helion.kernel(strategy="persistent_dynamic")
def persistent(jt: hl.JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = dense.expand(jt.num_rows, -1).clone()
    num_workers = hl.device_num_sms()
    block = hl.register_block_size(jt.max_length)
    rows, firsts = jt.tile_list(int(block))
    for worker_id in hl.grid(num_workers):
        tile_idx = worker_id
        while tile_idx < jt.total_tiles(int(block)):
            row = rows[tile_idx]
            cols = firsts[tile_idx] + hl.arange(block)
            mask = cols < jt.lengths[row]
            values = hl.load(jt.values, [jt.offsets[row] + cols], extra_mask=mask)
            hl.store(out, [row, cols], values + hl.load(dense, [cols], extra_mask=mask), extra_mask=mask)
            tile_idx += num_workers
    return out


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("kernel", [by_tiles, exact, masked, persistent], ids=lambda k: k.__name__)
def test_every_way_gives_the_same(kernel: Any, kind: str, tile: Any) -> None:
    lengths = LENGTHS[kind]
    jt = helion.JaggedTensor.from_lengths(torch.randn(sum(lengths)), lengths)
    dense = torch.randn(max(lengths, default=0) + 3)
    wanted = dense.expand(len(lengths), -1).clone()
    for row, own in zip(wanted, jt.unbind(), strict=True):
        row[: len(own)] += own
    torch.testing.assert_close(ran(kernel, tile)(jt, dense), wanted)


def test_the_decorator_keeps_what_it_was_given() -> None:
    assert exact.config.strategy == "maskless" and masked.config.strategy == "masked"
    assert by_tiles.fn.__name__ == by_tiles.__name__ == "by_tiles"
    assert repr(by_tiles) == "<kernel by_tiles>"


def test_tiles_of_one_block_size_may_stand_side_by_side() -> None:
    """Two dims of one registered block: a condition stays with the dim it came from."""

    @helion.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        out = torch.zeros(n)
        block = hl.register_block_size(n)
        for t in hl.tile(n, block_size=block):
            acc = hl.zeros([t])
            for u in hl.tile(n, block_size=block):
                acc = acc + torch.where(t.index[:, None] >= u.index[None, :], x[u][None, :] + 1, 0.0).sum(1)
            out[t] = acc
        return out

    x = torch.randn(7)
    for tile in TILES:
        torch.testing.assert_close(ran(k, tile)(x), (x + 1).cumsum(0))


def test_a_tile_is_its_positions_in_arithmetic() -> None:
    @helion.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(0) - 1)
        for t in hl.tile(out.size(0)):
            out[t] = x[t + 1] - x[t]
        return out

    x = torch.randn(6)
    torch.testing.assert_close(k.interpreted(tile=2)(x), x.diff())
