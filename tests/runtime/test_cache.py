"""Built programs on disk: one compiler run for many programs, checked entries, clear errors."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serrate import ir, ops, settings
from serrate.cli.cache import CacheEntry, entries, remove
from serrate.compiled import Compiled, prebuild
from serrate.errors import CacheError, CacheWarning, CompilerError, CompilerMissing
from serrate.runtime import cache, cache_folder, compiler
from serrate.runtime.cache_folder import leftovers
from serrate.runtime.compiler import Compiler, find_compiler

ROOT = Path(__file__).resolve().parents[2]
ARGS = (torch.arange(12.0).reshape(6, 2), torch.tensor([0, 2, 2, 6]))


def program(scale: float) -> Compiled:
    with ir.Fusion("scaled") as f:
        x, offsets = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.mul(ops.as_nested(x, offsets), scale), 1))
    return Compiled(f, "cpp")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources that the compiler was called on."""
    called: list[Path] = []
    build = Compiler.build

    def counted(self: Compiler, source: Path, library: Path) -> None:
        called.append(source)
        build(self, source, library)

    monkeypatch.setattr(Compiler, "build", counted)
    monkeypatch.setattr(cache, "_loaded", {})
    return called


def test_many_programs_share_one_run_of_the_compiler(private_cache: Path, compilations: list[Path]) -> None:
    programs = [program(float(k)) for k in range(5)]
    prebuild(*((p, ARGS) for p in programs))
    assert len(compilations) == 1
    for k, p in enumerate(programs):
        assert torch.equal(p(*ARGS), torch.tensor([[2.0, 4.0], [0.0, 0.0], [28.0, 32.0]]) * k)
    assert len(compilations) == 1
    assert len(entries(private_cache)) == 5


def test_a_built_program_is_found_again(private_cache: Path, compilations: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = program(3.0)(*ARGS)
    monkeypatch.setattr(cache, "_loaded", {})
    assert torch.equal(program(3.0)(*ARGS), first)
    assert len(compilations) == 1


def test_a_program_is_known_by_all_it_is_built_from(private_cache: Path, compilations: list[Path]) -> None:
    """Another prelude, another text, another flag of the compiler: each has a library of its own, in memory and on disk."""
    text = 'extern "C" void told(void* const* to, const long long*) { *(int*)to[0] = PRELUDE + FLAG + 1; }'
    wanted = {}
    for (prelude, flag), other in itertools.product(itertools.product((10, 20), (100, 200)), ("1", "2")):
        unit = cache.Unit("told", text.replace("+ 1", f"+ {other}"))
        wanted[(unit, f"enum {{ PRELUDE = {prelude} }};\n", find_compiler((f"-DFLAG={flag}",)))] = prelude + flag + int(other)
    for _ in range(2):
        for (unit, prelude_, with_flag), number in wanted.items():
            (function,) = cache.functions([unit], prelude_, with_flag)
            found = torch.zeros(1, dtype=torch.int32)
            function((ctypes.c_void_p * 1)(found.data_ptr()), None)
            assert found.item() == number
        cache._loaded.clear()
    assert len(compilations) == len(wanted)


@pytest.mark.parametrize("part", ["command", "version", "native", "features", "extra"])
def test_another_compiler_has_libraries_of_its_own(part: str) -> None:
    one = Compiler(("g++",), "1.0", ("-march=native",), "avx")
    other = replace(one, **{part: ("another",) if part in ("command", "native", "extra") else "another"})
    assert cache.Unit("f", "text").digest("prelude", one) != cache.Unit("f", "text").digest("prelude", other)


def _cut(entry: Path) -> None:
    library = entry / "program.so"
    library.write_bytes(library.read_bytes()[:-100])


def _emptied(entry: Path) -> None:
    for file in entry.iterdir():
        file.unlink()


def _linked(entry: Path) -> None:
    entry.symlink_to(entry.rename(entry.with_name("elsewhere")))


def _file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("not a folder")


def _another(entry: Path) -> None:
    shutil.rmtree(entry)
    text = 'extern "C" void told(void* const*, const long long*) {}'
    cache.functions([cache.Unit("told", text)], "", find_compiler())
    (other,) = (d for d in entry.parent.iterdir() if len(d.name) == 32)
    other.rename(entry)


def _another_that_says_otherwise(entry: Path) -> None:
    _another(entry)
    manifest = json.loads((entry / "manifest.json").read_text())
    (entry / "manifest.json").write_text(json.dumps({**manifest, "entry": entry.name}))


def _nonsense(entry: Path) -> None:
    cache_folder.discard(entry)
    cache_folder.put(entry.parent, entry.name, {"program.cpp": b"", "program.so": b"nonsense"})


def _outside(entry: Path) -> None:
    library = (entry / "program.so").rename(entry.parent / "program.so")
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    (entry / "manifest.json").write_text(json.dumps({"entry": entry.name, "files": {"../program.so": digest}}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (_cut, "has a damaged program.so"),
    "emptied": (_emptied, "is incomplete"),
    "without a library": (lambda entry: (entry / "program.so").unlink(), "is incomplete: program.so is missing"),
    "another format": (lambda entry: (entry / "manifest.json").write_text('["program.so"]'), "has a damaged manifest.json"),
    "not text": (lambda entry: (entry / "manifest.json").write_bytes(b"\xff\x00"), "has a damaged manifest.json"),
    "a link": (_linked, "is not a folder"),
    "a file": (_file, "is not a folder"),
    "another program": (_another, "is a copy of"),
    "another program that says otherwise": (_another_that_says_otherwise, "cannot be loaded"),
    "not a library": (_nonsense, "cannot be loaded"),
    "a file outside": (_outside, "has a damaged ../program.so"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_entry_is_reported_and_built_again(
    private_cache: Path, compilations: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    text = f'extern "C" void five(void* const* to, const long long*) {{ *(int*)to[0] = 5; }} // {damage}'

    def five() -> int:
        found = torch.zeros(1, dtype=torch.int32)
        cache.functions([cache.Unit("five", text)], "", find_compiler())[0]((ctypes.c_void_p * 1)(found.data_ptr()), None)
        return int(found)

    five()
    (name,) = (d.name for d in (private_cache / "programs").iterdir() if len(d.name) == 32)
    # The loader knows the libraries of this process by their paths and inodes.
    moved = tmp_path / "moved"
    shutil.copytree(private_cache, moved)
    monkeypatch.setenv("SERRATE_CACHE_DIR", str(moved))
    settings.reload()
    change, reason = DAMAGE[damage]
    change(moved / "programs" / name)
    cache._loaded.clear()
    compilations.clear()
    with pytest.warns(CacheWarning, match=f"{name} {reason}.*; it is not used, and built again"):
        assert five() == 5
    assert len(compilations) == 1
    cache._loaded.clear()
    assert five() == 5 and len(compilations) == 1, "what was built again is sound"


def test_the_folder_is_private(private_cache: Path, compilations: list[Path]) -> None:
    program(5.0)(*ARGS)
    assert (private_cache / "programs").stat().st_mode & 0o777 == 0o700


def test_a_failed_build_keeps_its_source(private_cache: Path) -> None:
    broken = cache.Unit("broken", 'extern "C" void broken(void* const*, const long long*) { nonsense }')
    with pytest.raises(CompilerError, match="source is kept at") as caught:
        cache.functions([broken], "", find_compiler())
    path = Path(str(caught.value).split("kept at ")[1].splitlines()[0])
    assert "nonsense" in path.read_text()
    assert not [d for d in path.parent.iterdir() if d.name.startswith("building-")]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(private_cache: Path, compilations: list[Path], mode: int) -> None:
    """Whoever can write there could leave a library that its owner would load."""
    programs = private_cache / "programs"
    programs.mkdir(parents=True)
    programs.chmod(mode)
    with pytest.raises(CacheError, match=r"can be written by other users .*chmod go-w"):
        program(7.0)(*ARGS)
    assert not compilations and not list(programs.iterdir())


def test_a_folder_that_others_can_exchange_is_refused(private_cache: Path, compilations: list[Path]) -> None:
    program(7.5)(*ARGS)
    private_cache.chmod(0o777)
    cache._loaded.clear()
    with pytest.raises(CacheError, match=r"can be written by everybody .*chmod o-w"):
        program(7.5)(*ARGS)
    private_cache.chmod(0o1777)
    program(7.5)(*ARGS)


def test_a_link_to_a_folder_that_others_can_exchange_is_refused(
    private_cache: Path, compilations: list[Path], tmp_path: Path
) -> None:
    open_to_all = tmp_path / "open"
    (open_to_all / "mine").mkdir(parents=True, mode=0o700)
    open_to_all.chmod(0o777)
    private_cache.symlink_to(open_to_all / "mine")
    with pytest.raises(CacheError, match=rf"{open_to_all} can be written by everybody"):
        program(7.75)(*ARGS)


def test_folders_are_made_private_whatever_the_umask(private_cache: Path, compilations: list[Path]) -> None:
    before = os.umask(0)
    try:
        program(8.0)(*ARGS)
    finally:
        os.umask(before)
    assert private_cache.stat().st_mode & 0o777 == 0o700
    assert (private_cache / "programs").stat().st_mode & 0o777 == 0o700


WANTED = torch.tensor([[2.0, 4.0], [0.0, 0.0], [28.0, 32.0]])


@pytest.mark.parametrize(("kind", "scale"), [("a file", 9.0), ("below a file", 9.25), ("cannot be made", 9.5)])
def test_a_folder_that_cannot_be_used_is_reported_and_done_without(
    private_cache: Path, compilations: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, scale: float
) -> None:
    (tmp_path / "file").write_text("not a folder")
    mistaken = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "cache",
        "cannot be made": Path("/proc/serrate"),
    }[kind]
    monkeypatch.setenv("SERRATE_CACHE_DIR", str(mistaken))
    settings.reload()
    with pytest.warns(CacheWarning, match="SERRATE_CACHE_DIR"):
        assert torch.equal(program(scale)(*ARGS), WANTED * scale)
    cache._loaded.clear()
    assert torch.equal(program(scale)(*ARGS), WANTED * scale)
    assert len(compilations) == 1, "the temporary folder is looked into again"


def test_a_full_disk_is_reported_and_done_without(private_cache: Path, compilations: list[Path], mount: Mount) -> None:
    folder = mount(private_cache, "size=64k")
    with pytest.warns(CacheWarning, match=f"{folder}.*No space left on device"):
        assert torch.equal(program(10.0)(*ARGS), WANTED * 10)
    assert not entries(folder)


def test_a_read_only_folder_is_read(private_cache: Path, compilations: list[Path], mount: Mount) -> None:
    folder = mount(private_cache, "size=16m")
    program(11.0)(*ARGS)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    cache._loaded.clear()
    assert torch.equal(program(11.0)(*ARGS), WANTED * 11)
    assert len(compilations) == 1
    with pytest.warns(CacheWarning, match="Read-only file system"):
        assert torch.equal(program(12.0)(*ARGS), WANTED * 12)


def test_a_folder_that_libraries_cannot_run_from(private_cache: Path, compilations: list[Path], mount: Mount) -> None:
    mount(private_cache, "size=16m,noexec")
    for scale in (13.0, 14.0, 15.0):
        assert torch.equal(program(scale)(*ARGS), WANTED * scale)
    cache._loaded.clear()
    assert torch.equal(program(14.0)(*ARGS), WANTED * 14)
    assert len(compilations) == 3


Mount = Callable[[Path, str], Path]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts a small file system of its own on a folder, where the machine allows that."""
    mounted: list[Path] = []

    def mount(folder: Path, options: str) -> Path:
        folder.mkdir(mode=0o700, exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting is not allowed here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_builds_beside_a_cache_that_is_cleared_again_and_again(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_loaded", {})
    script = """
import sys, torch
from tests.runtime.test_cache import ARGS, WANTED, program
from serrate.runtime import cache
for k in range(int(sys.argv[1]), int(sys.argv[1]) + 4):
    assert torch.equal(program(float(k))(*ARGS), WANTED * k)
"""
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    builders = [
        subprocess.Popen([sys.executable, "-c", script, str(start)], env={**os.environ, "PYTHONPATH": path})
        for start in (100, 102)
    ]
    while any(builder.poll() is None for builder in builders):
        for entry in (*entries(private_cache), *leftovers(private_cache / "programs")):
            remove(entry.path if isinstance(entry, CacheEntry) else entry)
        time.sleep(0.01)
    assert [builder.returncode for builder in builders] == [0, 0]


def test_leftovers_of_interrupted_builds_are_swept_out_by_the_next(private_cache: Path, compilations: list[Path]) -> None:
    programs = private_cache / "programs"
    programs.mkdir(parents=True, mode=0o700)
    killed = programs / "building-killed"
    killed.mkdir()
    (killed / "in-use.lock").touch()
    (programs / "failed-new.cpp").touch()
    (programs / "failed-old.cpp").touch()
    os.utime(programs / "failed-old.cpp", (0, 0))
    program(16.0)(*ARGS)
    assert not killed.exists() and not (programs / "failed-old.cpp").exists()
    assert (programs / "failed-new.cpp").exists(), "somebody may still want to read it"


def test_a_build_in_progress_is_not_a_leftover(tmp_path: Path) -> None:
    with cache_folder.building(tmp_path) as work:
        (work / "program.cpp").touch()
        assert leftovers(tmp_path) == []
        interrupted = tmp_path / f"{cache_folder.BUILDING}interrupted"
        shutil.copytree(work, interrupted)
        assert leftovers(tmp_path) == [interrupted]
    assert not work.exists()


def test_a_compiler_command_of_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    described = compiler._describe("env g++", ())
    assert described.command[0].endswith("env") and described.command[1:] == ("g++",)
    assert "g++" in described.version or "GCC" in described.version


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompilerMissing, match="CXX names 'no-such-compiler'"):
        compiler._describe("no-such-compiler", ())


def test_denormal_numbers_survive_loading(private_cache: Path, compilations: list[Path]) -> None:
    """A library linked with fast-math would switch the whole process to flush-to-zero when it is loaded."""
    program(6.0)(*ARGS)
    assert float(torch.tensor(1e-40) * 0.5) > 0
