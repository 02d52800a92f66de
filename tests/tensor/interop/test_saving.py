"""Ragged tensors in pickles, copies, files of torch and of safetensors, and in memory that processes share.

In: samples of every composition. Out: failures where what comes back differs, is shared when it must not be, or is not checked.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from serrate import keyed, load_safetensors, save_safetensors
from serrate.errors import CallError, DtypeError, FormatError, SerrateError, ShapeError, StructureError
from serrate.tensor import JaggedTensor, KeyedJaggedTensor, Structure
from serrate.tensor.interop.saving import load_rows, load_structure, load_tensor
from serrate.tensor.rows import rows_of
from tests.tensor.compositions import ALL_DTYPES, Sample, numbered, samples

safetensors = pytest.importorskip("safetensors.torch")


def saved_and_loaded(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def same(one: JaggedTensor, other: JaggedTensor) -> bool:
    return (
        torch.equal(one.values, other.values)
        and one.dtype == other.dtype
        and one.structure == other.structure
        and one.structure.form == other.structure.form
        and one.format == other.format
        and one.hints == other.hints
    )


@given(samples())
def test_pickles_and_files_of_torch(sample: Sample) -> None:
    jt = sample.jt.with_hint(reuse="high")
    for again in (pickle.loads(pickle.dumps(jt)), saved_and_loaded(jt), saved_and_loaded({"x": [jt]})["x"][0]):
        assert same(again, jt) and again.tolist() == sample.rows
        assert jt.values.numel() == 0 or again.values.data_ptr() != jt.values.data_ptr()


@given(samples())
def test_copies(sample: Sample) -> None:
    jt = sample.jt.with_hint(reuse="high")
    shallow, deep = copy.copy(jt), copy.deepcopy(jt)
    assert shallow is not jt and shallow.values is jt.values and shallow.structure is jt.structure
    assert same(deep, jt) and deep.structure is jt.structure
    assert jt.values.numel() == 0 or deep.values.data_ptr() != jt.values.data_ptr()


def test_deep_copies_respect_what_is_copied_already() -> None:
    values = torch.zeros(3)
    jt = JaggedTensor.from_lengths(values, [1, 2])
    again = copy.deepcopy([jt, jt, values])
    assert again[0] is again[1]
    assert again[0].values is again[2]
    assert copy.deepcopy(jt.structure) is copy.copy(jt.structure) is jt.structure


def test_gradients_are_asked_for_again() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(3), [1, 2]).requires_grad_()
    assert saved_and_loaded(jt).requires_grad and pickle.loads(pickle.dumps(jt)).requires_grad


def test_structures_stay_shared_within_one_file() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(3), [1, 2])
    one, other = saved_and_loaded([jt, jt.with_values(torch.ones(3))])
    assert one.structure is other.structure


@pytest.mark.parametrize(
    ("offsets", "columns", "starts", "kind", "message"),
    [
        ([0, 5, 3], None, None, StructureError, "offsets must not decrease"),
        ([0, 2, 9], None, None, ShapeError, "the rows hold 9 positions together, but values of shape (3,) have 3"),
        ([1, 2, 3], None, None, StructureError, "offsets must start at 0"),
        ([0, 1, 2], [0, 1, 2, 2], None, FormatError, "rows and the counts of their columns differ in number"),
        ([0, 1, 2], None, [0, 9], ShapeError, "the rows reach position 10"),
        ([0, 1, 2], None, [-1, 2], StructureError, "starts must not be negative"),
        ([0, 1, 2], None, [0, 2**63 - 1], StructureError, "rows must end within int64: row 1"),
        ([0, 2**32], [0, 2**32], None, StructureError, "rows with columns must not have more elements than int64 can hold"),
    ],
)
def test_damaged_files_are_refused(
    offsets: list[int], columns: list[int] | None, starts: list[int] | None, kind: type[Exception], message: str
) -> None:
    levels = tuple(torch.tensor(level) for level in (offsets, columns) if level is not None)
    rows = rows_of(levels, 1, True, None if starts is None else torch.tensor(starts), None, {})
    jt = JaggedTensor.from_lengths(torch.zeros(3), [1, 2])
    jt._structure = Structure((rows,))
    for load in (saved_and_loaded, lambda jt: pickle.loads(pickle.dumps(jt))):
        with pytest.raises(SerrateError) as caught:
            load(jt)
        assert isinstance(caught.value, kind) and message in str(caught.value)


class Crafted:
    """What pickles as a call of one of the functions that `torch.load` may call, with any arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.parts = function, args

    def __reduce__(self) -> Any:
        return self.parts


@pytest.mark.parametrize(
    ("crafted", "kind"),
    [
        (lambda rows, values: Crafted(load_structure, (rows,), (-1,)), ShapeError),
        (lambda rows, values: Crafted(load_structure, (rows,), ("0",)), CallError),
        (lambda rows, values: Crafted(load_structure, (values,), (0,)), FormatError),
        (lambda rows, values: Crafted(load_tensor, values, rows, (None, None, None)), FormatError),
        (lambda rows, values: Crafted(load_tensor, [1.0], Structure((rows,)), (None, None, None)), FormatError),
        (lambda rows, values: Crafted(load_rows, rows.offsets, None, ("1", True, None), {}), FormatError),
    ],
)
def test_crafted_files_are_refused(crafted: Any, kind: type[SerrateError]) -> None:
    file = io.BytesIO()
    torch.save(crafted(rows_of((torch.tensor([0, 1, 3]),), 1, True, None, None, {}), torch.zeros(3)), file)
    file.seek(0)
    with pytest.raises(kind):
        torch.load(file, weights_only=True)


# --- safetensors ---

HELD = tuple(dtype for dtype in ALL_DTYPES if dtype is not torch.complex128)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sample=samples(dtypes=HELD))
def test_files_of_safetensors(tmp_path: Path, sample: Sample) -> None:
    jt, plain = sample.jt.with_hint(reuse="high"), torch.arange(4)
    path = tmp_path / "batch.safetensors"
    save_safetensors({"ragged": jt, "plain": plain, "doubled": jt.with_values(jt.values.clone())}, path, metadata={"by": "me"})
    found = load_safetensors(path)
    assert set(found) == {"ragged", "plain", "doubled"}
    again, doubled = found["ragged"], found["doubled"]
    assert isinstance(again, JaggedTensor) and isinstance(doubled, JaggedTensor)
    assert same(again, jt) and again.tolist() == sample.rows
    assert again.structure is doubled.structure
    assert isinstance(found["plain"], Tensor) and torch.equal(found["plain"], plain)
    # Other readers find the values under the same name.
    assert torch.equal(safetensors.load_file(path)["ragged"], jt.values)


@pytest.mark.parametrize("dtype", HELD)
def test_every_dtype_in_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    jt = JaggedTensor.from_lengths(numbered((5, 2), dtype), [2, 0, 3])
    save_safetensors({"x": jt}, tmp_path / "x")
    again = load_safetensors(tmp_path / "x")["x"]
    assert isinstance(again, JaggedTensor) and same(again, jt)


def test_tensors_that_share_memory_or_have_gaps_in_it_are_saved(tmp_path: Path) -> None:
    values = torch.arange(12.0).view(6, 2)
    jt = JaggedTensor.from_lengths(values[:, 0], [2, 4])
    save_safetensors({"a": jt, "b": values, "c": values[:3], "offsets": jt.offsets}, tmp_path / "x")
    found: dict[str, Any] = load_safetensors(tmp_path / "x")
    assert found["a"].tolist() == [[0, 2], [4, 6, 8, 10]]
    assert torch.equal(found["b"], values) and torch.equal(found["c"], values[:3])
    assert found["offsets"].tolist() == [0, 2, 6]


def test_files_load_onto_a_device(tmp_path: Path) -> None:
    save_safetensors({"x": JaggedTensor.from_lengths(torch.zeros(3), [1, 2]), "y": torch.zeros(2)}, tmp_path / "x")
    found: dict[str, Any] = load_safetensors(tmp_path / "x", device="meta")
    assert found["x"].device.type == found["x"].offsets.device.type == found["y"].device.type == "meta"
    assert found["x"].max_length == 2


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("same_batch", [False, True])
def test_keyed_tensors_in_safetensors(tmp_path: Path, weighted: bool, same_batch: bool) -> None:
    rows = {"user": [[4, 1], [2], []], "item": [[7], [], [0]] if same_batch else [[7]]}
    weights = {key: [[0.5 * k for k, _ in enumerate(row)] for row in each] for key, each in rows.items()} if weighted else None
    batch = keyed(rows, weights=weights, same_batch=same_batch)
    save_safetensors({"features": batch, "labels": torch.ones(3)}, tmp_path / "x")
    found = load_safetensors(tmp_path / "x")
    again = found["features"]
    assert isinstance(again, KeyedJaggedTensor) and set(found) == {"features", "labels"}
    assert again.keys() == batch.keys() and again.rows_per_key == batch.rows_per_key
    assert {key: again[key].tolist() for key in again} == rows
    if weights is None:
        assert again.weights is None
    else:
        assert {key: again.weights_of(key).tolist() for key in again} == weights


def test_plain_files_of_safetensors(tmp_path: Path) -> None:
    safetensors.save_file({"x": torch.arange(3)}, tmp_path / "x")
    found = load_safetensors(tmp_path / "x")
    assert isinstance(found["x"], Tensor) and found["x"].tolist() == [0, 1, 2]


def test_wrong_names_and_files(tmp_path: Path) -> None:
    jt, path = JaggedTensor.from_lengths(torch.zeros(3), [1, 2]), tmp_path / "x"
    with pytest.raises(CallError, match="names that begin with 'serrate' and a dot are reserved"):
        save_safetensors({"serrate.0": jt}, path)
    with pytest.raises(CallError, match="'x' is a list, not a ragged, keyed or plain tensor"):
        save_safetensors({"x": [1]}, path)  # type: ignore[dict-item]
    with pytest.raises(CallError, match="the metadata key 'serrate' is reserved"):
        save_safetensors({"x": jt}, path, metadata={"serrate": ""})
    with pytest.raises(DtypeError, match=r"safetensors has no dtype for torch.complex128: convert the values first"):
        save_safetensors({"x": jt.to(torch.complex128)}, path)
    assert not path.exists()

    def damaged(change: dict[str, Any], entries: dict[str, Tensor]) -> None:
        form = {"dim": 0, "levels": 1, "depth": 1, "packed": True, "room": None}
        about = {"version": 1, "structures": [[form]], "tensors": {"x": {"structure": 0, "hints": {}}}, **change}
        safetensors.save_file(entries, path, metadata={"serrate": json.dumps(about)})

    good = {"x": torch.zeros(3), "serrate.0.0.offsets.0": torch.tensor([0, 1, 3])}
    damaged({}, good)
    assert isinstance(load_safetensors(path)["x"], JaggedTensor)
    damaged({"version": 2}, good)
    with pytest.raises(FormatError, match="has format version 2, but this serrate reads version 1"):
        load_safetensors(path)
    damaged({}, {"x": torch.zeros(3)})
    with pytest.raises(FormatError, match="do not match its metadata"):
        load_safetensors(path)
    damaged({}, {**good, "serrate.0.0.offsets.0": torch.tensor([0, 7, 3])})
    with pytest.raises(StructureError, match="offsets must not decrease"):
        load_safetensors(path)


# --- memory ---


def _write_and_answer(jt: JaggedTensor, queue: Any) -> None:
    jt.values.fill_(7)
    queue.put((jt.tolist(), jt.is_shared()))


@given(samples(dtypes=(torch.float32,)))
def test_shared_memory_holds_values_and_structure(sample: Sample) -> None:
    jt = JaggedTensor(sample.jt.values.clone(), pickle.loads(pickle.dumps(sample.jt.structure)))
    assert not jt.is_shared()
    assert jt.share_memory_() is jt and jt.is_shared()
    assert jt.tolist() == sample.rows
    assert all(level.is_shared() for level in jt.structure.offsets)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_another_process_writes_into_shared_memory(start: str) -> None:
    context = multiprocessing.get_context(start)
    jt = JaggedTensor.from_starts(torch.arange(5), [0, 3], [2, 1]).share_memory_()
    queue = context.Queue()
    process = context.Process(target=_write_and_answer, args=(jt, queue))
    process.start()
    seen = queue.get(timeout=60)
    process.join(60)
    assert seen == ([[7, 7], [7]], True)
    assert jt.values.tolist() == [7] * 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="pages can be locked here")
def test_pages_cannot_be_locked_without_a_device() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(3), [1, 2])
    assert not jt.is_pinned()
    with pytest.raises(RuntimeError):
        jt.pin_memory()


@pytest.mark.gpu
@given(samples(dtypes=(torch.float32,)))
def test_locked_pages_hold_values_and_structure(sample: Sample) -> None:
    pinned = sample.jt.pin_memory()
    assert pinned.is_pinned()
    assert same(pinned, sample.jt)
