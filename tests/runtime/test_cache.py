"""Built programs on disk: one compiler run for many programs, checked entries, clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serrate import ir, ops
from serrate.engine import Compiled, prebuild
from serrate.errors import CacheError, CompilerError, CompilerMissing
from serrate.runtime import cache, compiler
from serrate.runtime.compiler import Compiler, find_compiler

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
    assert len([d for d in (private_cache / "programs").iterdir() if d.is_dir()]) == 5


def test_a_built_program_is_found_again(private_cache: Path, compilations: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = program(3.0)(*ARGS)
    monkeypatch.setattr(cache, "_loaded", {})
    assert torch.equal(program(3.0)(*ARGS), first)
    assert len(compilations) == 1


def test_a_damaged_library_is_an_error_not_a_miss(
    private_cache: Path, compilations: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program(4.0)(*ARGS)
    (entry,) = [d for d in (private_cache / "programs").iterdir() if d.is_dir()]
    damaged = entry / "program.so.new"
    damaged.write_bytes(b"not a library")
    damaged.replace(entry / "program.so")
    monkeypatch.setattr(cache, "_loaded", {})
    with pytest.raises(CacheError, match="not what was built"):
        program(4.0)(*ARGS)


def test_the_folder_is_private(private_cache: Path, compilations: list[Path]) -> None:
    program(5.0)(*ARGS)
    assert (private_cache / "programs").stat().st_mode & 0o777 == 0o700


def test_a_failed_build_keeps_its_source(private_cache: Path) -> None:
    broken = cache.Unit("broken", 'extern "C" void broken(void* const*, const long long*) { nonsense }')
    with pytest.raises(CompilerError, match="source is kept at") as caught:
        cache.functions([broken], "", find_compiler())
    path = Path(str(caught.value).split("kept at ")[1].splitlines()[0])
    assert "nonsense" in path.read_text()


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompilerMissing, match="CXX names 'no-such-compiler'"):
        compiler._describe("no-such-compiler", ())


def test_denormal_numbers_survive_loading(private_cache: Path, compilations: list[Path]) -> None:
    """A library linked with fast-math would switch the whole process to flush-to-zero when it is loaded."""
    program(6.0)(*ARGS)
    assert float(torch.tensor(1e-40) * 0.5) > 0
