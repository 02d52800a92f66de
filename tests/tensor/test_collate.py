"""Batches of samples that differ in size, alone and through the workers of a DataLoader.

In: samples of tensors, numbers, dicts and tuples; worker processes that build and compute. Out: failures where a batch differs
from its samples, or where a process that was forked after OpenMP ran computes nothing or something else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import serrate
from serrate import JaggedTensor, collate
from serrate.errors import CallError, ShapeError, StructureError
from tests.tensor.compositions import gaps, nested, one_level, padded, samples


class Pair(NamedTuple):
    tokens: Tensor
    label: int


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.sampled_from([(), (3,), (2, 3)]))
def test_tensors_become_rows(lengths: list[int], inner: tuple[int, ...]) -> None:
    rows = [torch.randn(length, *inner) for length in lengths]
    batch = collate(rows)
    assert isinstance(batch, JaggedTensor)
    assert all(torch.equal(one, other) for one, other in zip(batch, rows, strict=True))


def test_nesting_is_kept() -> None:
    def sample(length: int) -> dict[str, Any]:
        tokens = torch.arange(length)
        return {
            "tokens": tokens,
            "pair": (tokens * 2, length / 2),
            "named": Pair(tokens, length),
            "items": [torch.tensor(length), f"{length}"],
            "words": [tokens[:1]],
        }

    batch = collate([sample(2), sample(0), sample(3)])
    assert batch["tokens"].tolist() == [[0, 1], [], [0, 1, 2]]
    assert isinstance(batch["pair"], tuple) and batch["pair"][0].tolist() == [[0, 2], [], [0, 2, 4]]
    assert batch["pair"][1].tolist() == [1, 0, 1.5]
    assert isinstance(batch["named"], Pair) and batch["named"].label.tolist() == [2, 0, 3]  # type: ignore[attr-defined]
    scalars, words = batch["items"]
    assert scalars.tolist() == [2, 0, 3] and words == ["2", "0", "3"]
    assert batch["words"][0].tolist() == [[0], [], [0]]


def test_the_kind_of_a_batch_does_not_depend_on_its_samples() -> None:
    assert isinstance(collate([torch.zeros(2), torch.zeros(2)]), JaggedTensor)


@given(
    st.sampled_from([one_level, nested, gaps, padded]).flatmap(
        lambda make: st.lists(samples((make,), (torch.float32,)), min_size=1, max_size=3)
    )
)
def test_ragged_samples_follow_one_another(found: list[Any]) -> None:
    tensors = [sample.jt for sample in found]
    first = tensors[0]
    if all(jt.ndim == first.ndim and jt.values.shape[1:] == first.values.shape[1:] for jt in tensors):
        assert collate(tensors).tolist() == [row for sample in found for row in sample.rows]


def test_wrong_batches() -> None:
    with pytest.raises(CallError, match="a batch needs at least one sample"):
        collate([])
    with pytest.raises(
        CallError, match="samples must be of one kind: sample 1 is a number or a string, sample 0 is a tensor with dims"
    ):
        collate([torch.zeros(1), 2])
    with pytest.raises(CallError, match="sample 1 is a tensor with dims, sample 0 is a JaggedTensor"):
        collate([JaggedTensor.from_list([torch.zeros(1)]), torch.zeros(1)])
    with pytest.raises(CallError, match="sample 1 is a scalar tensor, sample 0 is a tensor with dims"):
        collate([torch.zeros(1), torch.tensor(1.0)])
    with pytest.raises(CallError, match=r"samples must agree in their keys: sample 1 has \['b'\], sample 0 has \['a'\]"):
        collate([{"a": 1}, {"b": 1}])
    with pytest.raises(CallError, match="samples must agree in their number of items: sample 1 has 2, sample 0 has 1"):
        collate([(1,), (1, 2)])
    with pytest.raises(ShapeError, match="rows must agree in every dim after the first"):
        collate([torch.zeros(1, 2), torch.zeros(1, 3)])
    one = JaggedTensor.from_lengths(torch.zeros(3), [1, 2])
    with pytest.raises(CallError, match="samples must agree in their levels: sample 1 has 2, sample 0 has 1"):
        collate([one, JaggedTensor.from_nested_list([[[1.0]]])])
    with pytest.raises(
        CallError, match=r"samples must agree in their dtype: sample 1 has torch.int64, sample 0 has torch.float32"
    ):
        collate([one, one.to(torch.int64)])
    with pytest.raises(StructureError, match="may not have columns: sample 0 is Structure"):
        collate([JaggedTensor.from_lengths(torch.zeros(2, 3), [1, 2], dim=1)])


# --- workers ---


@serrate.jit
def program(jt: JaggedTensor) -> Any:
    return torch.softmax(jt * 2 + 1, dim=1)


def wanted(row: Tensor) -> Tensor:
    return torch.softmax(row * 2 + 1, dim=0)


class Rows(Dataset[Tensor]):
    """Rows long enough that a program is worth several threads."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < 8:
            raise IndexError(index)
        return torch.randn(200 * index, generator=torch.Generator().manual_seed(index))


def collate_and_compute(rows: list[Tensor]) -> dict[str, Any]:
    batch = collate(rows)
    return {"rows": batch, "softmax": program(batch), "process": torch.utils.data.get_worker_info().id}  # type: ignore[union-attr]


@pytest.mark.parametrize(("start", "persistent"), [("fork", False), ("fork", True), ("spawn", False)])
def test_workers_build_compute_and_return(start: str, persistent: bool) -> None:
    # In the parent first, so that threads of OpenMP exist when workers are forked.
    rows = list(Rows())
    for got, row in zip(program(collate(rows)), rows, strict=True):
        torch.testing.assert_close(got, wanted(row))
    loader = DataLoader(
        Rows(),
        batch_size=2,
        num_workers=2,
        collate_fn=collate_and_compute,
        multiprocessing_context=start,
        persistent_workers=persistent,
        timeout=120,
    )
    for _ in range(2 if persistent else 1):
        batches = list(loader)
        assert {batch["process"] for batch in batches} == {0, 1}
        for index, batch in enumerate(batches):
            assert batch["rows"].is_shared()
            for k in range(2):
                row = Rows()[2 * index + k]
                assert torch.equal(batch["rows"][k], row)
                torch.testing.assert_close(batch["softmax"][k], wanted(row))
            # What came back is whole: the parent computes on it too.
            for got, row in zip(program(batch["rows"]), batch["rows"], strict=True):
                torch.testing.assert_close(got, wanted(row))
