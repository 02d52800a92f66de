"""Reading and writing ragged tensors of every composition by tiles.

In: nested, product, independent and padded tensors. Out: a failure where a lane reads or writes another place than its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, Structure
from tests.language.kinds import TILES, ran


@pytest.fixture(params=TILES)
def tile(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_nested_rows(tile: Any) -> None:
    """Three indices into two levels: documents, sentences, words; read, and written elsewhere."""

    @serrate.kernel
    def k(jt: JaggedTensor, out: torch.Tensor) -> tuple[torch.Tensor, JaggedTensor]:
        copy = torch.zeros_like(jt)
        for g, s, w in hl.tile(list(out.shape)):
            x = jt[g, s, w]
            out[g, s, w] = x
            copy[g, s, w] = x * 2
        return out, copy

    jt = JaggedTensor.from_lengths(torch.arange(1.0, 12.0), (torch.tensor([2, 0, 3]), torch.tensor([4, 4, 1, 0, 2])))
    out, copy = ran(k, tile)(jt, torch.full([3, 4, 5], -1.0))
    wanted = torch.zeros(3, 4, 5)
    for g, sentences in enumerate(jt.to_list()):
        for s, words in enumerate(sentences):
            wanted[g, s, : len(words)] = words
    assert torch.equal(out, wanted)
    assert torch.equal(copy.values, jt.values * 2)


def test_sums_of_nested_rows_skip_holes_of_both_levels(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, counted = torch.empty(jt.num_groups), torch.empty(jt.num_groups)
        for g in hl.tile(jt.num_groups):
            acc, count = hl.zeros([g]), hl.zeros([g])
            for s, w in hl.tile([5, jt.max_length]):
                acc = acc + (jt[g, s, w] + 1).sum([1, 2])
                count = count + (jt[g, s, w] * 0 + 1).sum(2).sum(1)
            total[g], counted[g] = acc, count
        return total, counted

    jt = JaggedTensor.from_lengths(torch.arange(11.0), (torch.tensor([2, 0, 3]), torch.tensor([4, 4, 1, 0, 2])))
    total, counted = ran(k, tile)(jt)
    assert counted.tolist() == [8, 0, 3]
    assert total.tolist() == [sum(range(8)) + 8, 0, 8 + 9 + 10 + 3]


@pytest.mark.parametrize("packed", [True, False])
def test_products_of_rows_and_columns(tile: Any, packed: bool) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, out: torch.Tensor) -> tuple[torch.Tensor, JaggedTensor]:
        copy = torch.zeros_like(jt)
        for b, r, c in hl.tile(list(out.shape)):
            out[b, r, c] = jt[b, r, c]
            copy[b, r, c] = jt[b, r, c]
        return out, copy

    lengths, counts = torch.tensor([3, 0, 2]), torch.tensor([2, 4, 4])
    structure = Structure.from_lengths(lengths).with_columns(counts, packed=packed)
    values = torch.randn(14) if packed else torch.randn(5, 4)
    jt = JaggedTensor(values, structure)
    out, copy = ran(k, tile)(jt, torch.full([3, 4, 5], -1.0))
    wanted = torch.zeros(3, 4, 5)
    for b in range(3):
        row = jt[b]
        wanted[b, : row.shape[0], : row.shape[1]] = row
    assert torch.equal(out, wanted)
    assert all(torch.equal(copy[b], jt[b]) for b in range(3))


def test_independent_rows_of_two_dims(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, out: torch.Tensor) -> torch.Tensor:
        for i, r, j, c in hl.tile(list(out.shape)):
            out[i, r, j, c] = jt[i, r, j, c]
        return out

    rows, columns = [3, 5, 2], [1, 3]
    structure = Structure.independent(
        Structure.from_lengths(torch.tensor(rows)), Structure.from_lengths(torch.tensor(columns), dim=1)
    )
    jt = JaggedTensor(torch.arange(1.0, 41.0).view(10, 4), structure)
    got = ran(k, tile)(jt, torch.full([3, 6, 2, 4], -1.0))
    wanted = torch.zeros(3, 6, 2, 4)
    for i, strip in enumerate(jt.values.split(rows)):
        for j, block in enumerate(strip.split(columns, 1)):
            wanted[i, : block.shape[0], j, : block.shape[1]] = block
    assert torch.equal(got, wanted)


def test_rows_with_gaps(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.empty(2, 4)
        for b, t in hl.tile([2, 4]):
            out[b, t] = jt[b, t]
            jt[b, t] = 0.0
        return out

    jt = JaggedTensor.from_starts(torch.arange(1.0, 9.0), [0, 4], [3, 2])
    assert ran(k, tile)(jt).tolist() == [[1, 2, 3, 0], [5, 6, 0, 0]]
    assert jt.values.tolist() == [0, 0, 0, 4, 0, 0, 7, 8]


def test_indices_of_every_kind(tile: Any) -> None:
    """Tiles, numbers, slices, None, an ellipsis, values of one and of two dims; two of one tile go together."""

    @serrate.kernel
    def k(x: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = torch.empty(4, 3), torch.empty(4, 2), torch.empty(4)
        d, e = torch.empty(4, 5), torch.empty(2, 4, 3)
        for t in hl.tile(4):
            index = order[t]
            a[t, :] = x[index, 1, :3]
            b[t, :] = x[t, ..., -1][:, 1:] if x.size(1) == 3 else 0
            c[t] = x[t, 0, t]
            for u in hl.tile(5):
                d[t, u] = x[(index[:, None] + u.index[None, :]) % 4, 2, u]
            e[:, t, :] = x[t, None, 0:2, 1].permute(2, 0, 1)
        return a, b, c, d, e

    x, order = torch.randn(4, 3, 5), torch.tensor([2, 0, 3, 1])
    a, b, c, d, e = ran(k, tile)(x, order)
    assert torch.equal(a, x[order, 1, :3])
    assert torch.equal(b, x[:, 1:, -1])
    assert torch.equal(c, x[range(4), 0, range(4)])
    assert torch.equal(d, torch.stack([x[(order + u) % 4, 2, u] for u in range(5)], 1))
    assert torch.equal(e, x[:, 0:2, 1].T[:, :, None].expand(2, 4, 3))


def test_one_row_by_its_number(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> JaggedTensor:
        out = torch.empty_like(jt)
        for g in hl.grid(jt.num_rows):
            for t in hl.tile(jt.lengths[g]):
                out[g, t] = jt[g, t] + jt.offsets[g]
        return out

    jt = JaggedTensor.from_lengths(torch.zeros(6), [2, 0, 4])
    assert ran(k, tile)(jt).tolist() == [[0, 0], [], [2, 2, 2, 2]]


def test_a_persistent_loop_over_the_list_of_tiles(tile: Any) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
        out = dense.clone()
        block = hl.register_block_size(4)
        rows, firsts = jt.tile_list(int(block))
        workers = hl.device_num_sms()
        for worker in hl.grid(workers):
            at = worker
            while at < jt.total_tiles(int(block)):
                position = firsts[at] + hl.arange(block)
                inside = position < jt.lengths[rows[at]]
                old = hl.load(out, [rows[at], position], extra_mask=inside)
                hl.store(out, [rows[at], position], old + jt[rows[at], position], extra_mask=inside)
                at += workers
        return out

    jt, dense = JaggedTensor.from_lengths(torch.randn(11), [2, 0, 8, 1]), torch.randn(4, 9)
    got = ran(k, tile)(jt, dense)
    torch.testing.assert_close(got, dense + jt.to_padded(0.0, max_length=9))


def test_atomic_add_adds_every_lane(tile: Any) -> None:
    @serrate.kernel
    def k(keys: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(3)
        for t in hl.tile(keys.size(0)):
            hl.atomic_add(out, [keys[t]], 1.0)
        return out

    assert ran(k, tile)(torch.tensor([0, 2, 2, 0, 2])).tolist() == [2, 0, 3]
