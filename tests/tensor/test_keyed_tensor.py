"""`serrate.keyed`: features by name, in the documented layout of TorchRec's KeyedJaggedTensor, against nested lists.

In: rows for several keys. Out: failures where the layout, a key's rows, or a message differ.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import serrate
from serrate import JaggedTensor, KeyedJaggedTensor, keyed
from serrate.errors import CallError, DtypeError, PackageMissing, StructureError, StructureMismatch, SyncError, UnknownKey
from serrate.tensor.keyed_tensor import concat

Features = dict[str, list[list[int]]]
ROWS = st.integers(0, 4).flatmap(
    lambda samples: st.dictionaries(
        st.sampled_from(["user", "item", "ads", "clicks", "city"]),
        st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=samples, max_size=samples),
        min_size=1,
    )
)


def flattened(rows: Features) -> list[int]:
    """The values in TorchRec's order: key by key, sample by sample."""
    return [number for own in rows.values() for row in own for number in row]


def lengths_of(rows: Features) -> list[int]:
    return [len(row) for own in rows.values() for row in own]


def made(rows: Features, weights: bool = False, index: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    values = torch.tensor(flattened(rows), dtype=torch.int64)
    lengths = torch.tensor(lengths_of(rows), dtype=index)
    per_key = [len(own) for own in rows.values()]
    return KeyedJaggedTensor.from_lengths(rows, values, lengths, weights=values * 0.5 if weights else None, rows_per_key=per_key)


def check(found: KeyedJaggedTensor, rows: Features, weights: bool = False) -> None:
    """Everything that a keyed tensor says of its rows."""
    assert found.keys() == tuple(rows) and list(found) == list(rows) and len(found) == len(rows)
    assert found.values.tolist() == flattened(rows)
    assert found.lengths.tolist() == lengths_of(rows)
    assert found.offsets.tolist() == [0, *itertools.accumulate(lengths_of(rows))]
    assert found.rows_per_key == tuple(len(own) for own in rows.values())
    assert {key: jt.tolist() for key, jt in found.items()} == rows
    assert found.jagged.tolist() == list(rows.values())
    if weights:
        half = {key: [[number * 0.5 for number in row] for row in own] for key, own in rows.items()}
        assert {key: found.weights_of(key).tolist() for key in found} == half
        assert all(found.weights_of(key).structure is found[key].structure for key in found)


@given(ROWS, st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_keys_are_views_of_one_tensor(rows: Features, index: torch.dtype, weights: bool) -> None:
    found = made(rows, weights, index)
    check(found, rows, weights)
    assert found.offsets.dtype == index
    for key in found:
        assert found[key] is found[key]
        assert found[key].values.untyped_storage().data_ptr() == found.values.untyped_storage().data_ptr()
    from_offsets = KeyedJaggedTensor.from_offsets(rows, found.values, found.offsets)
    check(from_offsets, rows)
    assert from_offsets.offsets.data_ptr() == found.offsets.data_ptr()


@given(ROWS)
def test_a_dict_of_lists_or_tensors_is_joined(rows: Features) -> None:
    parts = {key: JaggedTensor.from_nested_list(own, dtype=torch.int64) if any(own) else _empty(own) for key, own in rows.items()}
    weights = {key: jt.with_values(jt.values * 0.5) for key, jt in parts.items()}
    check(keyed(parts, weights=weights), rows, weights=True)
    again = keyed(dict(made(rows).items()))
    check(again, rows)


def _empty(rows: list[list[int]]) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.zeros(0, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64))


def test_values_that_lie_back_to_back_are_shared() -> None:
    one = keyed({"a": [[1, 2], []], "b": [[3], [4]]})
    assert keyed(dict(one.items())).values.data_ptr() == one.values.data_ptr()
    swapped = keyed({"b": one["b"], "a": one["a"]})
    check(swapped, {"b": [[3], [4]], "a": [[1, 2], []]})
    gaps = JaggedTensor.from_starts(torch.arange(5), [0, 3], [1, 2])
    check(keyed({"a": gaps, "b": one["b"]}), {"a": [[0], [3, 4]], "b": [[3], [4]]})


@given(ROWS, st.data(), st.booleans())
def test_some_keys_in_any_order(rows: Features, data: st.DataObject, weights: bool) -> None:
    found = made(rows, weights)
    chosen = data.draw(st.lists(st.sampled_from(list(rows)), unique=True))
    if not chosen:
        return
    check(found[chosen], {key: rows[key] for key in chosen}, weights)
    cut = data.draw(st.integers(0, len(rows)))
    for part, keys in zip(found.split([cut, len(rows) - cut]), (list(rows)[:cut], list(rows)[cut:]), strict=True):
        if keys:
            check(part, {key: rows[key] for key in keys}, weights)


def test_neighbouring_keys_are_views_and_others_are_moved_as_blocks() -> None:
    size = 1 << 17  # large enough for the compiled mover
    rows = JaggedTensor.from_lengths(torch.arange(4 * size), torch.full((4 * 8,), size // 8))
    found = KeyedJaggedTensor(["a", "b", "c", "d"], rows, weights=torch.arange(4 * size) * 2.0)
    near = found[["b", "c"]]
    assert near.values.data_ptr() == found["b"].values.data_ptr()
    assert found[["a", "b", "c", "d"]] is found
    moved = found[["d", "a", "c"]]
    want = torch.cat([torch.arange(k * size, (k + 1) * size) for k in (3, 0, 2)])
    assert torch.equal(moved.values, want)
    assert moved.weights is not None and torch.equal(moved.weights, want * 2.0)


@given(ROWS, st.booleans())
def test_tensors_are_joined_by_keys_and_batched_by_samples(rows: Features, weights: bool) -> None:
    other = {f"other {key}": own[::-1] for key, own in rows.items()}
    check(concat([made(rows, weights), made(other, weights)]), rows | other, weights)
    samples = [rows, {key: own[::-1] for key, own in rows.items()}, {key: own[:1] for key, own in rows.items()}]
    together = {key: [row for sample in samples for row in sample[key]] for key in rows}
    check(serrate.collate([made(sample, weights) for sample in samples]), together, weights)


def test_a_data_loader_batches_keyed_samples() -> None:
    samples = [keyed({"user": [[k]], "item": [list(range(k))]}) for k in range(1, 5)]
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=2, collate_fn=serrate.collate)
    first, second = loader
    check(first, {"user": [[1], [2]], "item": [[0], [0, 1]]})
    check(second, {"user": [[3], [4]], "item": [[0, 1, 2], [0, 1, 2, 3]]})


@given(ROWS, st.booleans())
def test_copies_are_equal(rows: Features, weights: bool) -> None:
    found = made(rows, weights)
    for copy in (pickle.loads(pickle.dumps(found)), found.to(torch.int32).to(torch.int64), found.to("cpu")):
        check(copy, rows, weights)
        assert torch.equal(copy, found)
    assert not torch.equal(found, made({f"{key}.": own for key, own in rows.items()}, weights))
    if flattened(rows):
        assert not torch.equal(found, KeyedJaggedTensor(rows, found.flat.with_values(found.values + 1), weights=found.weights))
    assert found.to("cpu") is found


def test_torch_sees_its_tensors() -> None:
    from torch.utils._pytree import tree_leaves, tree_map

    found = keyed({"a": [[1, 2], []]}, weights={"a": [[0.5, 1.0], []]})
    assert len(tree_leaves(found)) == 2
    doubled = tree_map(lambda leaf: leaf * 2, found)
    assert doubled["a"].tolist() == [[2, 4], []] and doubled.weights.tolist() == [1.0, 2.0]
    assert found.share_memory_().values.is_shared()


def test_offsets_that_are_written_to_change_the_keys() -> None:
    found = KeyedJaggedTensor.from_offsets(["a", "b"], torch.arange(4), torch.tensor([0, 1, 2, 3, 4]))
    assert found["a"].tolist() == [[0], [1]]
    found.offsets[1] = 0
    assert found["a"].tolist() == [[], [0, 1]]


def test_gradients_meet_in_the_values() -> None:
    values = torch.ones(4, requires_grad=True)
    found = KeyedJaggedTensor.from_lengths(["a", "b"], values, torch.tensor([1, 0, 1, 2]))
    (found[["b", "a"]].values * torch.arange(4.0)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [3, 0, 1, 2]


class Quacks:
    """The methods of TorchRec's KeyedJaggedTensor that its documentation lists."""

    def __init__(self, keys: list[str], values: torch.Tensor, **parts: Any) -> None:
        self._keys, self._values, self._parts = keys, values, parts

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def weights_or_none(self) -> torch.Tensor | None:
        return self._parts.get("weights")

    def lengths(self) -> torch.Tensor:
        return self._parts["lengths"] if "lengths" in self._parts else self._parts["offsets"].diff()

    def offsets_or_none(self) -> torch.Tensor | None:
        return self._parts.get("offsets")

    def stride(self) -> int:
        return max(self.stride_per_key())

    def stride_per_key(self) -> list[int]:
        strides = self._parts.get("stride_per_key_per_rank")
        return [len(self.lengths()) // len(self._keys)] * len(self._keys) if strides is None else [sum(own) for own in strides]


# The example of TorchRec's documentation: two features of three samples.
#            0       1       2
# "F1"    [V0,V1]   None    [V2]
# "F2"     [V3]     [V4]  [V5,V6,V7]
DOCUMENTED: Features = {"F1": [[0, 1], [], [2]], "F2": [[3], [4], [5, 6, 7]]}


@pytest.mark.parametrize(
    "parts",
    [{"lengths": torch.tensor([2, 0, 1, 1, 1, 3])}, {"offsets": torch.tensor([0, 2, 2, 3, 4, 5, 8])}],
    ids=["lengths", "offsets"],
)
def test_torchrecs_tensor_is_shared(parts: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    there = Quacks(["F1", "F2"], torch.arange(8), weights=torch.arange(8) * 0.5, **parts)
    found = keyed(there)
    check(found, DOCUMENTED, weights=True)
    assert found.values.data_ptr() == there.values().data_ptr()
    layout = found.layout()
    assert layout.keys == ["F1", "F2"] and layout.stride_per_key == [3, 3]
    assert layout.lengths.tolist() == [2, 0, 1, 1, 1, 3] and layout.offsets.tolist() == [0, 2, 2, 3, 4, 5, 8]
    monkeypatch.setitem(sys.modules, "torchrec", types.SimpleNamespace(KeyedJaggedTensor=Quacks))
    back = found.to_torchrec()
    assert back.keys() == ["F1", "F2"] and back.values().data_ptr() == there.values().data_ptr()
    assert back.stride() == 3 and back._parts["stride"] == 3 and torch.equal(keyed(back), found)


def test_torchrecs_variable_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = torch.tensor([1, 1, 2])
    found = keyed(Quacks(["a", "b"], torch.arange(4), lengths=lengths, stride_per_key_per_rank=[[1, 1], [1]]))
    check(found, {"a": [[0], [1]], "b": [[2, 3]]})
    monkeypatch.setitem(sys.modules, "torchrec", types.SimpleNamespace(KeyedJaggedTensor=Quacks))
    assert found.to_torchrec().stride_per_key() == [2, 1]
    with pytest.raises(StructureMismatch, match=r"different numbers of rows, 'a' 2, 'b' 1: use k.rows_per_key"):
        _ = found.batch_size


def test_a_keyed_tensor_prints_as_a_table() -> None:
    found = keyed({"user": [[1, 2, 3, 4, 5], [6]], "genre": [[], []]}, weights={"user": [[1.0] * 5, [1.0]], "genre": [[], []]})
    assert repr(found).splitlines() == [
        "KeyedJaggedTensor(2 keys, batch 2, dtype=torch.int64, device=cpu, weights=torch.float32)",
        "  key    rows  values  values[:4]",
        "  user      2       6  1, 2, 3, 4",
        "  genre     2       0",
    ]
    with serrate.no_sync(strict=True):
        assert repr(found).splitlines()[1:3] == ["  key    rows", "  user      2"]
    many = keyed({f"k{k}": [[k]] for k in range(20)})
    assert repr(many).splitlines()[-1] == "  ... 8 more: k12, k13, k14, k15, k16, k17, k18, k19"


def test_mistakes() -> None:
    values, lengths = torch.arange(4), torch.tensor([1, 0, 1, 2])
    found = KeyedJaggedTensor.from_lengths(["user", "item"], values, lengths)
    with pytest.raises(UnknownKey, match=r"^there is no key 'usr': did you mean 'user'\? Choose from user, item$"):
        found["usr"]
    with pytest.raises(KeyError):
        found[["user", "shop"]]
    with pytest.raises(CallError, match=r"takes a key or a list of keys, got int; the keys are \['user', 'item'\]"):
        found[0]  # type: ignore[index]
    with pytest.raises(CallError, match="has no weights: pass them to"):
        found.weights_of("user")
    with pytest.raises(CallError, match=r"sizes \[1, 2\] must sum to the 2 keys"):
        found.split([1, 2])
    with pytest.raises(StructureError, match="4 rows do not divide among 3 keys: pass rows_per_key="):
        KeyedJaggedTensor.from_lengths(["a", "b", "c"], values, lengths)
    with pytest.raises(
        StructureError, match=r"rows_per_key=\[1, 1\] must have one number for each of 2 keys and sum to the 4 rows"
    ):
        KeyedJaggedTensor.from_lengths(["a", "b"], values, lengths, rows_per_key=[1, 1])
    with pytest.raises(StructureError, match="lengths must sum to the number of values"):
        KeyedJaggedTensor.from_lengths(["a", "b"], values[:3], lengths)
    with pytest.raises(StructureError, match=r"a weight for each of 4 values, got \(3,\)"):
        KeyedJaggedTensor.from_lengths(["a", "b"], values, lengths, weights=torch.ones(3))
    with pytest.raises(CallError, match="a key must not repeat: 'a' occurs twice"):
        KeyedJaggedTensor.from_lengths(["a", "a"], values, lengths)
    with pytest.raises(CallError, match="keys must be strings, got 'user'"):
        KeyedJaggedTensor.from_lengths("user", values, lengths)
    with pytest.raises(CallError, match="pass at least one key"):
        keyed({})
    with pytest.raises(CallError, match="keyed takes a dict of ragged tensors or a TorchRec KeyedJaggedTensor, got list"):
        keyed([1, 2])
    with pytest.raises(CallError, match="'a' is a dense tensor: make rows of it"):
        keyed({"a": torch.zeros(2, 2)})
    with pytest.raises(StructureMismatch, match=r"'b' has 1 rows, but 'a' has 2; .* or pass same_batch=False"):
        keyed({"a": [[1], [2]], "b": [[3]]})
    check(keyed({"a": [[1], [2]], "b": [[3]]}, same_batch=False), {"a": [[1], [2]], "b": [[3]]})
    one = JaggedTensor.from_lengths(torch.zeros(1), [1])
    with pytest.raises(DtypeError, match="all keys need the same inner dims, dtype and device: 'b'"):
        keyed({"a": one, "b": one.to(torch.int64)})
    with pytest.raises(CallError, match=r"weights need the keys of the features, \['a'\], got \['b'\]"):
        keyed({"a": one}, weights={"b": one})
    with pytest.raises(StructureMismatch, match="the weights of 'a' must have its rows"):
        keyed({"a": [[1, 2]]}, weights={"a": [[1.0]]})
    with pytest.raises(CallError, match="concat: 'item', 'user' would occur twice"):
        concat([found, found])
    with pytest.raises(CallError, match="collate: samples must agree in their keys: sample 1 has"):
        serrate.collate([found, found[["user"]]])
    with pytest.raises(CallError, match="relu does not take a KeyedJaggedTensor: use it on k"):
        torch.relu(found)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="has no truth value"):
        bool(found)
    with pytest.raises(PackageMissing, match="to_torchrec needs the package torchrec"):
        found.to_torchrec()
    later = KeyedJaggedTensor(["a", "b"], JaggedTensor.from_csr(values, torch.tensor([0, 1, 1, 2, 4]), validate=False))
    with serrate.no_sync(strict=True), pytest.raises(SyncError, match="needs lengths on the host"):
        later["a"]
