"""Archives of tuned plans: what comes out is what went in, damage is found before anything is written, and newer plans stay."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from serrate import settings
from serrate.cli import app
from serrate.errors import CacheError
from serrate.runtime import cache, cache_folder
from serrate.runtime.compiler import Compiler, find_compiler
from serrate.tuner.archive import export_archive, import_archive, records
from serrate.tuner.buckets import Bucket
from serrate.tuner.candidates import Candidate
from serrate.tuner.identity import compiler_identity
from serrate.tuner.record import ProgramKey, Records, Tuning

runner = CliRunner(env={"COLUMNS": "300"})
KEYS = [ProgramKey(text, ("float32[2]",), "cpp", "a processor, 2 threads", compiler_identity("cpp")) for text in ("a", "b")]


def plan(key: ProgramKey, size: int, strategy: str = "masked") -> Tuning:
    return Tuning(f"program_{key.text}", key, Bucket((size,), 3, 1), Candidate(strategy), (), 1.5, "quick", "measured")


def fill(folder: Path, *plans: Tuning, written: float | None = None) -> None:
    for each in plans:
        records = Records(each.key, folder)
        records.put(each)
        for path in records.folder.glob("*.json"):
            if written is not None:
                os.utime(path, (written, written))


def held(folder: Path) -> dict[tuple[str, Bucket], str]:
    """The chosen strategies, by program and bucket."""
    return {(t.program, t.bucket): t.chosen.strategy for _, t in records(folder) if t is not None}


def test_plans_move_to_another_folder(tmp_path: Path) -> None:
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "plans.zip"
    fill(here, plan(KEYS[0], 3), plan(KEYS[0], 4, "maskless"), plan(KEYS[1], 3))
    assert export_archive(here, archive).records == 3
    done = import_archive(there, archive)
    assert (done.added, done.replaced, done.same, done.kept, done.elsewhere) == (3, 0, 0, (), 0)
    assert held(there) == held(here) and len(held(there)) == 3
    assert Records(KEYS[0], there).known[Bucket((4,), 3, 1)].chosen == Candidate("maskless"), "and are found by the tuner"
    assert import_archive(there, archive).same == 3
    assert all((there / "tuned" / key.digest).stat().st_mode & 0o777 == 0o700 for key in KEYS)


@pytest.mark.parametrize(("age", "strategy"), [(100.0, "masked"), (-100.0, "maskless")])
def test_newer_plans_stay_and_are_named(tmp_path: Path, age: float, strategy: str) -> None:
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "plans.zip"
    fill(here, plan(KEYS[0], 3, "masked"), written=1e9 + age)
    fill(there, plan(KEYS[0], 3, "maskless"), written=1e9)
    export_archive(here, archive)
    done = import_archive(there, archive)
    assert set(held(there).values()) == {strategy}
    assert (done.replaced, done.kept) == ((1, ()) if age > 0 else (0, ("program_a",)))
    import_archive(there, archive, replace=True)
    assert set(held(there).values()) == {"masked"}


def test_damaged_plans_are_neither_exported_nor_kept(tmp_path: Path) -> None:
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "plans.zip"
    fill(here, plan(KEYS[0], 3), plan(KEYS[1], 3))
    (damaged,) = (here / "tuned" / KEYS[1].digest).glob("*.json")
    content = damaged.read_bytes()
    damaged.write_bytes(content.replace(b"masked", b"maskless"))
    done = export_archive(here, archive)
    assert done.records == 1 and done.unsound == (str(damaged),)
    fill(there, plan(KEYS[0], 3, "maskless"))
    (there_damaged,) = (there / "tuned").glob("*/*.json")
    there_damaged.write_bytes(b"{")
    assert import_archive(there, archive).replaced == 1
    assert list(held(there).values()) == ["masked"]


def _without_a_file(contents: dict[str, bytes]) -> None:
    contents.pop(next(name for name in contents if name.startswith("tuned/")))


def _with_another_file(contents: dict[str, bytes]) -> None:
    contents["tuned/../../escaped.json"] = b"{}"


def _outside(contents: dict[str, bytes]) -> None:
    """A sound record in another place, which the manifest lists."""
    name = next(name for name in contents if name.startswith("tuned/"))
    contents["../escaped.json"] = contents.pop(name)
    manifest = json.loads(contents["manifest.json"])
    manifest["files"]["../escaped.json"] = manifest["files"].pop(name)
    contents["manifest.json"] = json.dumps(manifest).encode()


def _changed(contents: dict[str, bytes]) -> None:
    name = next(name for name in contents if name.startswith("tuned/"))
    contents[name] = contents[name].replace(b"masked", b"maskless")


def _other_format(contents: dict[str, bytes]) -> None:
    contents["manifest.json"] = contents["manifest.json"].replace(b'"format": 1', b'"format": 99')


@pytest.mark.parametrize("damage", [_without_a_file, _with_another_file, _outside, _changed, _other_format, dict.clear])
def test_a_damaged_archive_changes_nothing(tmp_path: Path, damage: object) -> None:
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "plans.zip"
    fill(here, plan(KEYS[0], 3), plan(KEYS[1], 3))
    export_archive(here, archive)
    with zipfile.ZipFile(archive) as opened:
        contents = {name: opened.read(name) for name in opened.namelist()}
    assert callable(damage)
    damage(contents)
    with zipfile.ZipFile(archive, "w") as opened:
        for name, data in contents.items():
            opened.writestr(name, data)
    with pytest.raises(CacheError, match=r"plans.zip"):
        import_archive(there, archive)
    assert not there.exists() and not list(tmp_path.glob("**/escaped.json"))


@pytest.mark.parametrize("name", ["..", ".", "manifest.json", "in-use.lock", "program.so.1"])
def test_files_that_no_program_has_are_refused(private_cache: Path, tmp_path: Path, name: str) -> None:
    archive, content = tmp_path / "forged.zip", b"x"
    where = f"programs/{'a' * 32}/{name}"
    listed = {where: {"sha256": hashlib.sha256(content).hexdigest(), "written": 0.0}}
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("manifest.json", json.dumps({"format": 1, "files": listed}))
        made.writestr(where, content)
    with pytest.raises(CacheError, match="forged"):
        import_archive(tmp_path / "cache", archive, programs=True)
    assert not (tmp_path / "cache").exists()


def test_what_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plans.zip").write_bytes(b"PK, but no more")
    for name in ("plans.zip", "missing.zip"):
        with pytest.raises(CacheError, match=name):
            import_archive(tmp_path / "there", tmp_path / name)
    with pytest.raises(CacheError, match="cannot be written"):
        export_archive(tmp_path, tmp_path / "no folder" / "plans.zip")


def test_compiled_programs_move_only_if_asked(private_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_loaded", {})
    unit = cache.Unit("seven", 'extern "C" void seven(void* const* to, const long long*) { *(int*)to[0] = 7; } // archived')
    cache.functions([unit], "", find_compiler())
    fill(private_cache, plan(dataclasses.replace(KEYS[0], compiler="another"), 3))
    archive = tmp_path / "plans.zip"
    result = runner.invoke(app, ["cache", "export", str(archive), "--programs"])
    assert result.exit_code == 0 and "wrote 1 tuned plan and 1 compiled program" in result.output, result.output
    monkeypatch.setenv("SERRATE_CACHE_DIR", str(tmp_path / "there"))
    settings.reload()
    result = runner.invoke(app, ["cache", "import", str(archive)])
    assert result.exit_code == 0, result.output
    assert "1 tuned plan added" in result.output and "1 compiled program left out" in result.output
    assert "1 plan for other versions" in result.output
    assert not (tmp_path / "there" / "programs").exists()
    result = runner.invoke(app, ["cache", "import", str(archive), "--programs"])
    assert result.exit_code == 0 and "1 compiled program added" in result.output and "1 already there" in result.output
    monkeypatch.setattr(Compiler, "build", lambda *_: pytest.fail("it was imported"))
    cache._loaded.clear()
    found = torch.zeros(1, dtype=torch.int32)
    cache.functions([unit], "", find_compiler())[0]((ctypes.c_void_p * 1)(found.data_ptr()), None)
    assert found.item() == 7


def test_info_and_clear_know_tuned_plans(private_cache: Path) -> None:
    fill(private_cache, plan(KEYS[0], 3), plan(KEYS[1], 3))
    (private_cache / "tuned" / "notes.txt").write_text("kept")
    result = runner.invoke(app, ["cache", "info"])
    assert result.exit_code == 0 and "plans" in result.output and "damaged" not in result.output, result.output
    result = runner.invoke(app, ["cache", "clear", "--yes"])
    assert result.exit_code == 0 and "2 tuned plans" in result.output, result.output
    assert not held(private_cache) and (private_cache / "tuned" / "notes.txt").exists()


def test_the_folder_must_be_private(tmp_path: Path) -> None:
    fill(tmp_path / "here", plan(KEYS[0], 3))
    export_archive(tmp_path / "here", tmp_path / "plans.zip")
    there = tmp_path / "there" / "tuned"
    there.mkdir(parents=True)
    there.chmod(0o777)
    with pytest.raises(CacheError, match="can be written by other users"):
        import_archive(tmp_path / "there", tmp_path / "plans.zip")
    assert cache_folder.PROGRAMS == "programs" and not list(there.iterdir())
