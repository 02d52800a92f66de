"""Lookup and pooling of all keys of a keyed tensor, in one program, against a loop of `F.embedding_bag` over the keys.

In: keys with empty bags, tables of different sizes and widths. Out: failures where a key's result differs, or there is more than
one program.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from serrate import JaggedTensor, KeyedJaggedTensor, jit, keyed
from serrate.api.eager import _pooling
from serrate.errors import CallError, ShapeError

WIDTHS = {"user": 16, "item": 3, "history": 40}
SIZES = {"user": 7, "item": 50, "history": 11}
LENGTHS = {"user": [3, 0, 5, 1, 4], "item": [0, 0, 1, 2, 0], "history": [9, 1, 0, 0, 30]}


def features(index: torch.dtype = torch.int64, weights: torch.dtype | None = None) -> KeyedJaggedTensor:
    made = torch.Generator().manual_seed(0)
    parts = {
        key: JaggedTensor.from_lengths(
            torch.randint(0, SIZES[key], (sum(own),), generator=made).to(index), torch.tensor(own, dtype=index)
        )
        for key, own in LENGTHS.items()
    }
    if weights is None:
        return keyed(parts)
    weighing = {key: jt.with_values(torch.rand(len(jt.values), generator=made).to(weights)) for key, jt in parts.items()}
    return keyed(parts, weights=weighing)


def tables(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {key: torch.randn(SIZES[key], WIDTHS[key], generator=made).to(dtype) for key in WIDTHS}


def one_by_one(k: KeyedJaggedTensor, of: dict[str, torch.Tensor], modes: dict[str, str], **options: Any) -> dict[str, Any]:
    """Bag by bag in float64, from TorchRec's layout."""
    found, at, dtype = {}, 0, next(iter(of.values())).dtype
    lengths = iter(k.lengths.tolist())
    for key, rows in zip(k.keys(), k.rows_per_key, strict=True):
        bags = []
        for _ in range(rows):
            stop = at + next(lengths)
            weights = None if k.weights is None else k.weights[at:stop].double()
            bag, start = k.values[at:stop], torch.zeros(1, dtype=k.values.dtype)
            options["per_sample_weights"] = weights
            bags.append(F.embedding_bag(bag, of[key].double(), start, mode=modes[key], **options))
            at = stop
        found[key] = torch.cat(bags).to(dtype)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_all_keys_are_pooled_as_one_by_one(dtype: torch.dtype, index: torch.dtype) -> None:
    k, of = features(index), tables(dtype)
    modes = {"user": "mean", "item": "max", "history": "sum"}
    for mode in ("sum", "mean", "max", modes):
        want = one_by_one(k, of, modes if isinstance(mode, dict) else dict.fromkeys(of, mode))
        found = k.embedding_bag(of, mode=mode)
        assert list(found) == list(want)
        for key in want:
            torch.testing.assert_close(found[key], want[key])
    want = one_by_one(k, of, dict.fromkeys(of, "sum"), padding_idx=3)
    torch.testing.assert_close(k.embedding_bag(of, padding_idx=3), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_multiply_the_rows(dtype: torch.dtype) -> None:
    k, of = features(weights=dtype), tables(dtype)
    want = one_by_one(k, of, dict.fromkeys(of, "sum"))
    torch.testing.assert_close(k.embedding_bag(of), want)
    torch.testing.assert_close(jit(lambda k, of: k.embedding_bag(of), backend="reference")(k, of), want)
    with pytest.raises(CallError, match="per_sample_weights work with mode='sum'"):
        k.embedding_bag(of, mode="mean")


def test_results_side_by_side() -> None:
    k, of = features(), tables(torch.float32)
    found = k.embedding_bag(of, concat=True)
    assert found.shape == (5, sum(WIDTHS.values()))
    want = torch.cat(list(one_by_one(k, of, dict.fromkeys(of, "sum")).values()), 1)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(jit(lambda k, of: k.embedding_bag(of, concat=True))(k, of), want)


def test_keys_share_a_table_and_one_program_runs_them_all() -> None:
    k, shared = features(), torch.randn(50, 8)
    of = dict.fromkeys(WIDTHS, shared)
    torch.testing.assert_close(k.embedding_bag(of), one_by_one(k, of, dict.fromkeys(of, "sum")))
    compiled, _ = _pooling.compiled(k, of, "sum", None)
    assert len(compiled.stages) == 1


def test_traced_functions_take_keyed_tensors() -> None:
    k, of, bias = features(weights=torch.float32), tables(torch.float32), torch.randn(16)

    @jit
    def tower(k: Any, of: Any, bias: torch.Tensor) -> Any:
        user = k.embedding_bag(of)["user"] + bias
        return {
            "user": torch.relu(user),
            "longest": {key: bags.amax(1) for key, bags in k.items()},
            "w": k.weights_of("item") * 2,
        }

    found = tower(k, of, bias)
    want = one_by_one(k, of, dict.fromkeys(of, "sum"))["user"]
    torch.testing.assert_close(found["user"], torch.relu(want + bias))
    assert found["longest"]["user"].tolist() == [max(row, default=-(2**63)) for row in k["user"].tolist()]
    assert torch.equal(found["w"].values, k.weights_of("item").values * 2)
    other = keyed({key: jt[:3] for key, jt in k.items()}, weights={key: k.weights_of(key)[:3] for key in k})
    torch.testing.assert_close(tower(other, of, bias)["user"], torch.relu(want + bias)[:3])


def test_keys_with_different_numbers_of_rows() -> None:
    k = keyed({"user": [[1, 2], [3], []], "item": [[7]]}, same_batch=False)
    of = tables(torch.float32)
    torch.testing.assert_close(k.embedding_bag(of), one_by_one(k, of, {"user": "sum", "item": "sum"}))
    with pytest.raises(ShapeError, match=r"with concat=True all keys must have the same number of rows, got \(3, 1\)"):
        k.embedding_bag(of, concat=True)


def test_pooling_that_is_refused() -> None:
    k, of = features(), tables(torch.float32)
    with pytest.raises(CallError, match=r"no table for 'history'; the tables are \['user', 'item'\]"):
        k.embedding_bag({key: of[key] for key in ("user", "item")})
    with pytest.raises(
        CallError, match="the table of 'item' must be a tensor, got a module: pass the weight of this EmbeddingBag"
    ):
        k.embedding_bag(of | {"item": torch.nn.EmbeddingBag(9, 4)})
    for pooling in (KeyedJaggedTensor.embedding_bag, jit(lambda k, table: k.embedding_bag(table))):
        with pytest.raises(
            CallError, match=r"takes a dict with a table for each key, got a tensor; .* dict.fromkeys\(keyed, table\)"
        ):
            pooling(k, of["item"])
    with pytest.raises(CallError, match="no mode for 'item'"):
        k.embedding_bag(of, mode={"user": "sum"})
    with pytest.raises(IndexError, match=r"embedding_bag: index\[\d\]\[\d\] = \d+ is out of range: there are 2 positions"):
        k.embedding_bag(of | {"item": of["item"][:2]})
    with pytest.raises(CallError, match="has no weights"):
        jit(lambda k: k.weights_of("user"))(k)
    with pytest.raises(KeyError, match="there is no key 'users': did you mean 'user'"):
        jit(lambda k: k["users"] * 1.0)(k)
