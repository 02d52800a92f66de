"""`serrate cache`: counts what serrate built, and deletes that and nothing else.

In: cache folders made by hand in the layout of the runtime. Out: checks on the text printed and on what is left on disk.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serrate.cli import app, cache
from serrate.errors import CacheError
from serrate.runtime import cache_folder

DIGESTS = ("0123456789abcdef", "f" * 64)

runner = CliRunner(env={"COLUMNS": "300"})


def build(folder: Path, digest: str, size: int = 100, age: float = 0.0) -> Path:
    """An entry as the runtime leaves it: a source and a library, of `size` bytes in all."""
    entry = folder / "programs" / digest
    entry.mkdir(parents=True)
    written = time.time() - age
    for name, count in (("program.cpp", size // 4), ("program.so", size - size // 4)):
        (entry / name).write_bytes(b"x" * count)
        os.utime(entry / name, (written, written))
    return entry


@pytest.mark.parametrize("command", [["cache", "info"], ["cache", "clear", "--yes"]])
def test_a_folder_that_does_not_exist_is_empty_and_stays_so(private_cache: Path, command: list[str]) -> None:
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert str(private_cache) in result.output
    assert not private_cache.exists()


def test_info_counts_programs_files_bytes_and_age(private_cache: Path) -> None:
    build(private_cache, DIGESTS[0], size=1024, age=3 * 86400 + 60)
    build(private_cache, DIGESTS[1], size=512, age=2 * 3600 + 60)
    result = runner.invoke(app, ["cache", "info"])
    assert result.exit_code == 0, result.output
    rows = dict(line.split(maxsplit=1) for line in result.output.splitlines()[1:] if line.strip())
    assert {name: value.strip() for name, value in rows.items()} == {
        "programs": "2",
        "plans": "0",
        "damaged": "2; they are rebuilt when needed",
        "files": "4",
        "size": "1.5 KiB",
        "oldest": "3 days",
        "newest": "2 hours",
    }


def test_clear_deletes_the_programs_and_nothing_else(private_cache: Path, tmp_path: Path) -> None:
    for digest in DIGESTS:
        build(private_cache, digest)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    programs = private_cache / "programs"
    # A link with an entry's name, a link inside an entry, and names that are not digests.
    (programs / ("a" * 16)).symlink_to(outside)
    (programs / DIGESTS[0] / "link").symlink_to(outside)
    for name in ("notes", "cafe"):
        (programs / name).mkdir()
        (programs / name / "mine.txt").write_text("kept")
    (programs / ("b" * 16)).write_text("a file, not a folder")
    (private_cache / "thesis.tex").write_text("kept")
    result = runner.invoke(app, ["cache", "clear", "--yes"])
    assert result.exit_code == 0, result.output
    assert "2 programs" in result.output
    assert sorted(path.name for path in programs.iterdir()) == ["a" * 16, "b" * 16, "cafe", "notes"]
    assert all((programs / name / "mine.txt").read_text() == "kept" for name in ("notes", "cafe"))
    assert (private_cache / "thesis.tex").read_text() == "kept"
    assert (outside / "precious").read_text() == "kept"


@pytest.mark.parametrize(("answer", "left"), [("n\n", 1), ("y\n", 0)])
def test_clear_asks_first(private_cache: Path, answer: str, left: int) -> None:
    build(private_cache, DIGESTS[0])
    result = runner.invoke(app, ["cache", "clear"], input=answer)
    assert "Delete 1 program (100 B)" in result.output
    assert result.exit_code == left
    assert len(cache.entries(private_cache)) == left


def test_clear_finishes_what_an_interrupted_clear_left(private_cache: Path) -> None:
    build(private_cache, DIGESTS[0])
    build(private_cache, DIGESTS[0] + ".removing")
    result = runner.invoke(app, ["cache", "clear", "--yes"])
    assert result.exit_code == 0, result.output
    assert list((private_cache / "programs").iterdir()) == []


def test_entries_come_oldest_first(private_cache: Path) -> None:
    new = build(private_cache, DIGESTS[0], age=10)
    old = build(private_cache, DIGESTS[1], age=1000)
    assert [entry.path for entry in cache.entries(private_cache)] == [old, new]


def test_removing_what_another_process_removed_is_no_error(private_cache: Path) -> None:
    build(private_cache, DIGESTS[0])
    (entry,) = cache.entries(private_cache)
    cache.remove(entry.path)
    cache.remove(entry.path)
    assert not entry.path.exists()


def test_a_cache_folder_that_is_a_file_is_named(private_cache: Path) -> None:
    private_cache.write_text("not a folder")
    with pytest.raises(CacheError, match="SERRATE_CACHE_DIR"):
        cache.entries(private_cache)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**40, "3.0 TiB")]
)
def test_format_bytes(count: int, text: str) -> None:
    assert cache.format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "under a minute"), (60, "1 minute"), (7300, "2 hours"), (86400, "1 day"), (10**7, "115 days")]
)
def test_format_age(seconds: float, text: str) -> None:
    assert cache.format_age(seconds) == text


def test_clear_removes_what_interrupted_and_failed_builds_left(private_cache: Path) -> None:
    programs = private_cache / "programs"
    programs.mkdir(parents=True)
    (programs / "building-abandoned").mkdir()
    (programs / "building-abandoned" / "in-use.lock").touch()
    (programs / "failed-0123.cpp").write_text("nonsense")
    (programs / "notes.txt").write_text("kept")
    with cache_folder.building(programs) as busy:
        result = runner.invoke(app, ["cache", "clear", "--yes"])
        assert result.exit_code == 0, result.output
        assert "2 leftovers" in result.output
        # A build that is running is not a leftover.
        assert sorted(path.name for path in programs.iterdir()) == sorted([busy.name, "notes.txt"])
