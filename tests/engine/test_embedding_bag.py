"""`F.embedding_bag` and `F.cross_entropy` with their options, against plain torch row by row.

In: bags of indices and rows of logits, some empty. Out: failures where a result differs from torch's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from serrate import JaggedTensor, Structure, jit
from serrate.errors import CallError

LENGTHS = [3, 0, 5, 1, 4]
IDS = torch.tensor([1, 4, 4, 0, 2, 7, 7, 3, 2, 2, 2, 2, 6])
TABLE = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.rand(13, generator=torch.Generator().manual_seed(1))
RUNS = pytest.mark.parametrize(
    "run", [lambda f: f, jit, lambda f: jit(f, backend="reference")], ids=["eager", "jit", "reference"]
)


@pytest.mark.sampled(3)
@RUNS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bags_are_pooled_as_in_torch(run: Any, dtype: torch.dtype) -> None:
    ids, table = JaggedTensor.from_lengths(IDS, LENGTHS), TABLE.to(dtype)
    weights = ids.with_values(WEIGHTS.to(dtype))
    options: list[dict[str, Any]] = [{}, {"mode": "sum"}, {"mode": "max"}, {"mode": "mean", "padding_idx": 2}]
    options += [{"mode": "max", "padding_idx": 2}, {"mode": "sum", "padding_idx": -1}]

    def every(ids: Any, table: Any, weights: Any) -> list[Any]:
        weighted = F.embedding_bag(ids, table, mode="sum", per_sample_weights=weights)
        return [*(F.embedding_bag(ids, table, **each) for each in options), weighted]

    def in_torch(**each: Any) -> torch.Tensor:
        given = {k: v.to(torch.float64) if isinstance(v, torch.Tensor) else v for k, v in each.items()}
        return F.embedding_bag(IDS, table.double(), ids.offsets, include_last_offset=True, **given)

    want = [*(in_torch(**each) for each in options), in_torch(mode="sum", per_sample_weights=weights.values)]
    for got, exact in zip(run(every)(ids, table, weights), want, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, exact.to(dtype))


def test_bags_by_offsets_are_called_as_in_torch() -> None:
    starts, ends = torch.tensor([0, 3, 3, 8, 9]), torch.tensor([0, 3, 3, 8, 9, 13])
    bags = jit(lambda ids, table, starts: F.embedding_bag(ids, table, starts, mode="sum"))
    torch.testing.assert_close(bags(IDS, TABLE, starts), F.embedding_bag(IDS, TABLE, starts, mode="sum"))
    closed = jit(
        lambda ids, t, ends, w: F.embedding_bag(ids, t, ends, mode="sum", include_last_offset=True, per_sample_weights=w)
    )
    want = F.embedding_bag(IDS, TABLE, ends, mode="sum", include_last_offset=True, per_sample_weights=WEIGHTS)
    torch.testing.assert_close(closed(IDS, TABLE, ends, WEIGHTS), want)
    dense = IDS[:12].view(4, 3)
    torch.testing.assert_close(jit(lambda ids, t: F.embedding_bag(ids, t))(dense, TABLE), F.embedding_bag(dense, TABLE))


def test_bags_of_two_levels() -> None:
    words = JaggedTensor(IDS, Structure.from_lengths(torch.tensor([2, 0, 3]), torch.tensor(LENGTHS)))
    found = F.embedding_bag(words, TABLE, mode="mean")
    assert str(found.shape) == "(3, r0, 6)"
    want = F.embedding_bag(IDS, TABLE, words.structure.offsets[-1], mode="mean", include_last_offset=True)
    torch.testing.assert_close(found.values, want)


def test_bags_that_are_refused() -> None:
    ids = JaggedTensor.from_lengths(IDS, LENGTHS)
    with pytest.raises(IndexError, match=r"embedding_bag: index\[2\]\[2\] = 7 is out of range: there are 7 positions"):
        F.embedding_bag(ids, TABLE[:7])
    with pytest.raises(CallError, match="per_sample_weights work with mode='sum', got mode='max'"):
        F.embedding_bag(ids, TABLE, mode="max", per_sample_weights=ids.with_values(WEIGHTS))
    with pytest.raises(CallError, match="mode must be 'sum', 'mean' or 'max', got 'most'"):
        F.embedding_bag(ids, TABLE, mode="most")


@pytest.mark.sampled(3)
@RUNS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_with_smoothing_and_weights(run: Any, reduction: str) -> None:
    logits = JaggedTensor.from_lengths(torch.randn(13, 4), LENGTHS)
    classes = logits.with_values(torch.tensor([0, 3, -100, 1, 2, 2, 0, 1, -100, 3, 3, 0, 1]))
    shares, weight = logits.with_values(torch.rand(13, 4).softmax(1)), torch.rand(4) + 0.5

    def every(x: Any, classes: Any, shares: Any, weight: Any) -> list[Any]:
        smooth = {"reduction": reduction, "label_smoothing": 0.2}
        return [
            F.cross_entropy(x, classes, weight, reduction=reduction),
            F.cross_entropy(x, classes, **smooth),
            F.cross_entropy(x, classes, weight, **smooth),
            F.cross_entropy(x, shares, weight, **smooth),
            F.cross_entropy(x, shares, reduction=reduction),
        ]

    found = run(every)(logits, classes, shares, weight)
    flat = logits.values, classes.values, shares.values, weight
    for got, exact in zip(found, every(*flat), strict=True):
        torch.testing.assert_close(got.values if isinstance(got, JaggedTensor) else got, exact)


@RUNS
def test_cross_entropy_over_the_candidates_of_each_row(run: Any) -> None:
    logits = JaggedTensor.from_lengths(torch.randn(12), [3, 2, 6, 1])
    chosen = torch.tensor([2, 0, 5, -100])
    for smoothing in (0.0, 0.1):

        def cost(x: Any, target: Any, smoothing: float = smoothing) -> Any:
            return F.cross_entropy(x, target, reduction="none", label_smoothing=smoothing)

        found = run(cost)(logits, chosen)
        want = [cost(row[None], t[None]) for row, t in zip(logits.unbind(), chosen, strict=True)]
        torch.testing.assert_close(found, torch.cat(want))
    average = (
        sum(F.cross_entropy(row[None], t[None], reduction="sum") for row, t in zip(logits.unbind(), chosen, strict=True)) / 3
    )
    torch.testing.assert_close(run(F.cross_entropy)(logits, chosen), average)
    with pytest.raises(IndexError, match="cross_entropy: target"):
        run(F.cross_entropy)(logits, torch.tensor([2, 2, 5, 0]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["maskless", "masked", "persistent_dynamic"])
def test_wide_tables_are_pooled_in_blocks_of_columns(strategy: str, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(3)
    table = torch.randn(50, 300, generator=made).to(dtype)
    lengths = torch.tensor([0, 1, 700, 3, 0, 40])
    ids = JaggedTensor.from_lengths(torch.randint(0, 50, (int(lengths.sum()),), generator=made).int(), lengths)
    for mode in ("sum", "mean", "max"):
        found = jit(lambda ids, table, mode=mode: F.embedding_bag(ids, table, mode=mode), strategy=strategy)(ids, table)
        bags = [table[row.long()].double() for row in ids.unbind()]
        pool = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[mode]
        want = torch.stack([pool(bag, 0) if len(bag) else torch.zeros(300, dtype=torch.float64) for bag in bags])
        # Hundreds of numbers are added one after the other: sums near zero keep the errors of what they passed through.
        torch.testing.assert_close(found, want.to(dtype), rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-3)
