"""Records on disk: found again, written whole, and never trusted if they are damaged or belong to something else."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from serrate.errors import CacheWarning
from serrate.schedule.heuristic import RowStatistics
from serrate.tensor.hints import Hints
from serrate.tuner.buckets import Bucket, bucket_of
from serrate.tuner.candidates import Candidate
from serrate.tuner.record import ProgramKey, Records, Tuning, file_name, packed, unpacked
from serrate.tuner.search import Tried

KEY = ProgramKey("text", ("float32[2]", "int64[1]"), "cpp", "a processor, 2 threads", "a compiler")
BUCKET = Bucket((10, 17), 3, 1, Hints(reuse="high"))
CHOSEN = Candidate("masked", (("rows", 16),))
TRIED = (Tried(Candidate("maskless"), 2e-3, 5), Tried(CHOSEN, 1e-3, 5), Tried(Candidate("persistent_dynamic"), None, 0, "why"))
TUNING = Tuning("softmax", KEY, BUCKET, CHOSEN, TRIED, 1.5, "quick", "measured")


def test_a_record_is_what_it_was_after_it_was_written_and_read() -> None:
    assert unpacked(packed(TUNING)) == dataclasses.replace(TUNING, source="remembered")


def test_another_process_finds_a_record(tmp_path: Path) -> None:
    Records(KEY, tmp_path).put(TUNING)
    found = Records(KEY, tmp_path).known[BUCKET]
    assert (found.chosen, found.tried, found.source) == (CHOSEN, TRIED, "remembered")
    assert found.gain == 2.0


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ProgramKey)])
def test_every_field_of_the_key_matters(field: str, tmp_path: Path) -> None:
    other = {"arguments": ("float16[2]", "int64[1]"), "format": 2}.get(field, "other")
    Records(KEY, tmp_path).put(TUNING)
    assert not Records(dataclasses.replace(KEY, **{field: other}), tmp_path).known


def _file(folder: Path) -> Path:
    return Records(KEY, folder).folder / file_name(BUCKET)


def _without_digest(content: bytes) -> bytes:
    whole = json.loads(content)
    whole["tuning"]["chosen"]["strategy"] = "maskless"
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"[1, 2]",
        lambda content: b"\xff\xfe",
        _without_digest,
        lambda content: packed(dataclasses.replace(TUNING, key=dataclasses.replace(KEY, device="another"))),
        lambda content: packed(dataclasses.replace(TUNING, bucket=Bucket((1, 1), 0, 0))),
        lambda content: packed(dataclasses.replace(TUNING, chosen=Candidate("masked", (("rows", "x"),)))),  # type: ignore[arg-type]
    ],
    ids=["empty", "cut", "other json", "no text", "changed", "another device", "another bucket", "no number"],
)
def test_what_is_damaged_or_foreign_is_reported_and_replaced(damage, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    Records(KEY, tmp_path).put(TUNING)
    path = _file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(CacheWarning, match=f"{path} is not used"):
        records = Records(KEY, tmp_path)
    assert not records.known
    records.put(TUNING)
    assert Records(KEY, tmp_path).known[BUCKET].chosen == CHOSEN


def test_a_folder_that_others_can_write_to_is_not_read(tmp_path: Path) -> None:
    Records(KEY, tmp_path).put(TUNING)
    _file(tmp_path).parent.chmod(0o777)
    with pytest.warns(CacheWarning, match="other users"):
        assert not Records(KEY, tmp_path).known


def test_where_nothing_can_be_written_records_are_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("a file where a folder should be")
    records = Records(KEY, tmp_path)
    with pytest.warns(CacheWarning, match="only until this process ends"):
        records.put(TUNING)
    assert records.known[BUCKET] is TUNING


def test_records_are_private(tmp_path: Path) -> None:
    Records(KEY, tmp_path / "cache").put(TUNING)
    path = _file(tmp_path / "cache")
    assert [p.stat().st_mode & 0o077 for p in (path, path.parent, path.parent.parent)] == [0, 0, 0]
    assert not [p for p in path.parent.iterdir() if p.name.startswith("writing-")]


def _write_many(folder: str, k: int) -> None:
    records = Records(KEY, Path(folder))
    for n in range(50):
        records.put(dataclasses.replace(TUNING, spent=float(n), program=f"process {k}" * 200))


def test_a_reader_never_sees_half_a_record(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(str(tmp_path), k)) for k in range(3)]
    for each in writers:
        each.start()
    seen = 0
    while any(each.is_alive() for each in writers):
        # A warning would be an error here.
        seen += len(Records(KEY, tmp_path).known)
    for each in writers:
        each.join()
        assert each.exitcode == 0
    assert seen and BUCKET in Records(KEY, tmp_path).known


def test_one_process_at_a_time_measures_a_bucket(tmp_path: Path) -> None:
    first, second = Records(KEY, tmp_path), Records(KEY, tmp_path)
    with first.measuring(BUCKET, patience=1) as mine:
        assert mine
        with second.measuring(BUCKET, patience=0.05) as theirs:
            assert not theirs
        with second.measuring(Bucket((1,), None, None), patience=0.05) as theirs:
            assert theirs
        first.put(TUNING)
    with second.measuring(BUCKET, patience=1) as mine:
        # What the other wrote while this one waited.
        assert mine and second.known[BUCKET].chosen == CHOSEN


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    def hold() -> None:
        with Records(KEY, tmp_path).measuring(BUCKET, patience=1):
            os._exit(9)

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    process.join()
    with Records(KEY, tmp_path).measuring(BUCKET, patience=1) as mine:
        assert mine


def test_the_nearest_bucket(tmp_path: Path) -> None:
    records = Records(KEY, tmp_path)
    assert records.nearest(BUCKET) is None
    small, large = (bucket_of((n, 100 * n), RowStatistics(n, 100 * n, 200, 4), 0.5) for n in (100, 10_000))
    for bucket, strategy in ((small, "maskless"), (large, "masked")):
        records.put(dataclasses.replace(TUNING, bucket=bucket, chosen=Candidate(strategy)))
    near = records.nearest(bucket_of((9000, 800_000), RowStatistics(9000, 800_000, 200, 4), 0.5))
    assert near is not None and near.chosen.strategy == "masked"
    assert records.nearest(Bucket((1, 2, 3), 0, 0)) is None


@pytest.mark.parametrize(
    ("lengths", "longest", "apart"),
    [(0.1, 220, False), (0.1, 4000, True), (2.0, 200, True)],
    ids=["about as long", "much sparser", "much more varied"],
)
def test_sparsity_and_variance_of_lengths_make_buckets(lengths: float, longest: int, apart: bool) -> None:
    usual = bucket_of((1000,), RowStatistics(1000, 100_000, 200, 4), 0.15)
    other = bucket_of((1010,), RowStatistics(1010, 100_500, longest, 4), lengths + 0.02)
    assert (usual != other) is apart


def test_hints_make_buckets() -> None:
    assert bucket_of((8,), None, None, Hints(reuse="low")) != bucket_of((8,), None, None, Hints(reuse="high"))
