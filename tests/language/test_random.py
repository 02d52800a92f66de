"""`hl.rand` and `hl.randint`: functions of a seed and of positions, the same whatever runs a kernel and in what blocks.

The oracle is the Philox on Python integers of the operators' tests.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import serrate
import serrate.language as hl
from serrate import JaggedTensor, engine, jit, ops
from serrate.errors import KernelError
from tests.engine.test_random import words

pytestmark = pytest.mark.triton
LENGTHS = [3, 0, 7, 2]
SEED = 123456789012345


def bits(seed: int, *place: int) -> int:
    """The bits of a lane, dim by dim."""
    for at in place[:-1]:
        seed = words(seed, 1, word=1, first=at)[0] | words(seed, 1, word=2, first=at)[0] << 32
    return words(seed, 1, first=place[-1])[0]


def numbers(seed: int, lengths: list[int], width: int) -> Tensor:
    """One for each element of rows."""
    found = [bits(seed, b, k, d) >> 8 for b, n in enumerate(lengths) for k in range(n) for d in range(width)]
    return torch.tensor(found).view(-1, width) / 2**24


@serrate.kernel
def noise(jt: JaggedTensor, seed: Tensor) -> JaggedTensor:
    out = torch.empty_like(jt)
    for b in hl.tile(jt.num_rows):
        for k in hl.tile(jt.max_length):
            x = jt[b, k, :]
            out[b, k, :] = x + hl.rand(x.shape, seed)
    return out


@serrate.kernel
def by_offsets(values: Tensor, offsets: Tensor, seed: int) -> Tensor:
    out = torch.zeros_like(values)
    for b in hl.tile(offsets.shape[0] - 1):
        starts, ends = offsets[b], offsets[b.index + 1]
        for k in hl.jagged_tile(ends - starts):
            at = starts[:, None] + k.index[None, :]
            hl.store(out, [at], hl.rand([b, k], seed))
    return out


@serrate.kernel
def flat(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    drawn, whole = torch.empty_like(x), torch.empty_like(x, dtype=torch.int32)
    for t in hl.tile(x.shape[0]):
        drawn[t] = hl.rand([t], seed)
        whole[t] = hl.randint([t], -5, 7, seed)
    return drawn, whole


def ways(kernel: Any) -> dict[str, Any]:
    return {"interpreted": kernel.interpreted(), **{b: kernel.on(b) for b in ("reference", "cpp", "triton")}}


def test_rows() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(sum(LENGTHS), 3), torch.tensor(LENGTHS))
    want = numbers(SEED, LENGTHS, 3)
    for name, run in ways(noise).items():
        assert torch.equal(run(jt, torch.tensor(SEED)).values, want), name


def test_blocks_strategies_and_other_rows_do_not_matter() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(sum(LENGTHS), 3), torch.tensor(LENGTHS))
    want = numbers(SEED, LENGTHS, 3)
    for strategy in ("maskless", "masked", "persistent_dynamic"):
        assert torch.equal(serrate.kernel(noise.fn, strategy=strategy)(jt, torch.tensor(SEED)).values, want), strategy
    for block in (1, 2, 5):
        assert torch.equal(noise.interpreted(tile=block)(jt, torch.tensor(SEED)).values, want), block
    longer = JaggedTensor.from_lengths(torch.zeros(12, 3), torch.tensor([3, 9]))
    assert torch.equal(noise(longer, torch.tensor(SEED)).values[:3], want[:3])


def test_tiles_that_end_with_their_longest_row() -> None:
    offsets = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    want = torch.tensor([bits(SEED, b, k) >> 8 for b, n in enumerate(LENGTHS) for k in range(n)]) / 2**24
    for name, run in ways(by_offsets).items():
        assert torch.equal(run(torch.zeros(sum(LENGTHS)), offsets, SEED), want), name
    assert torch.equal(by_offsets.interpreted(tile=1)(torch.zeros(sum(LENGTHS)), offsets, SEED), want)


def test_one_dim_draws_what_the_operators_draw() -> None:
    want = torch.tensor([w >> 8 for w in words(SEED, 11)]) / 2**24
    whole = torch.tensor([(w * 12 >> 32) - 5 for w in words(SEED, 11)], dtype=torch.int32)
    for name, run in ways(flat).items():
        drawn, integers = run(torch.zeros(11), SEED)
        assert torch.equal(drawn, want) and torch.equal(integers, whole), name
    operator = jit(lambda x, seed: ops.rand_like(x, seed=seed))
    assert torch.equal(operator(torch.zeros(11), torch.tensor(SEED)), want)


def test_a_new_seed_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(sum(LENGTHS), 3), torch.tensor(LENGTHS))
    first, second = noise(jt, torch.tensor(1)).values, flat(torch.zeros(5), 1)[0]
    flat(torch.zeros(5), 2)  # a number that changes once is read from then on

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("built again")

    monkeypatch.setattr(engine, "build", refused)
    assert not torch.equal(noise(jt, torch.tensor(2)).values, first)
    assert not torch.equal(flat(torch.zeros(5), 3)[0], second)


def test_rows_are_independent() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(1 << 13, 16), torch.full((64,), 128))
    drawn = noise(jt, torch.tensor(7)).values.double().view(64, 128, 16)
    count = drawn.numel()
    assert abs(drawn.mean() - 0.5) < 5 / math.sqrt(12 * count)
    for one, other in (
        (drawn[1:], drawn[:-1]),
        (drawn[:, 1:], drawn[:, :-1]),
        (drawn[:, :, 1:], drawn[:, :, :-1]),
        (drawn[:-1, 1:], drawn[1:, :-1]),
    ):
        both = torch.stack([one.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / math.sqrt(count)


def test_what_is_refused() -> None:
    @serrate.kernel
    def wrong_seed(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for t in hl.tile(x.shape[0]):
            out[t] = hl.rand([t], 0.5)
        return out

    @serrate.kernel
    def wrong_bounds(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for t in hl.tile(x.shape[0]):
            out[t] = hl.randint([t], 3, 3, 1).to(torch.float32)
        return out

    @serrate.kernel
    def no_seed(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for t in hl.tile(x.shape[0]):
            out[t] = torch.nn.functional.dropout(x[t], 0.5)
        return out

    dropped = r"dropout is not part of the tile language: use torch\.where\(hl\.rand\(x\.shape, seed\) < p"
    with pytest.raises(KernelError, match=dropped):
        no_seed(torch.zeros(4))
    for kernel, message in ((wrong_seed, r"hl\.rand: a seed is a whole number, got 0\.5"), (wrong_bounds, "got 3 and 3")):
        for run in (kernel.interpreted(), kernel.on("cpp")):
            with pytest.raises(KernelError, match=message):
                run(torch.zeros(4))
    with pytest.raises(KernelError, match=r"hl\.rand can only be used inside"):
        hl.rand([4], 1)


@serrate.kernel
def by_rows(x: Tensor, seeds: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for b, k in hl.tile([x.shape[0], x.shape[1]]):
        out[b, k] = x[b, k] + hl.rand([k], seeds[b][:, None])
    return out


def test_rows_with_seeds_of_their_own_do_not_depend_on_the_batch() -> None:
    seeds = torch.tensor([5, 9, 5])
    want = torch.tensor([[w >> 8 for w in words(int(seed), 6)] for seed in seeds]) / 2**24
    for name, run in ways(by_rows).items():
        assert torch.equal(run(torch.zeros(3, 6), seeds), want), name
