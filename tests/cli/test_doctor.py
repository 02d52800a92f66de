"""`serrate doctor`: each fault is a row with advice, and only a machine where nothing runs gives exit status 1.

In: the real machine, and faults made by hand (missing and broken compilers, other versions). Out: checks on rows and exit status.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import serrate
from serrate import settings
from serrate.cli import app, doctor, main
from serrate.cli.doctor import Status
from serrate.errors import SerrateError

# Wide enough that no row folds.
runner = CliRunner(env={"COLUMNS": "500"})

needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def fake_compiler(path: Path, body: str) -> str:
    """A command that tells its version like a compiler, and otherwise runs `body`."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit\n{body}\n')
    path.chmod(0o755)
    return str(path)


def row(output: str, name: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith(name)]
    return line


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"serrate {serrate.__version__}\n"


def test_a_named_mistake_is_a_message_and_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise SerrateError("offsets[3] = 7 < offsets[2] = 9")

    monkeypatch.setattr("serrate.cli.app", fail)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert capsys.readouterr().err == "error: offsets[3] = 7 < offsets[2] = 9\n"


@needs_compiler
def test_this_machine_passes(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    settings.reload()
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert torch.__version__ in row(result.output, "torch")
    assert "builds and loads OpenMP code" in row(result.output, "C++ compiler")
    assert str(private_cache) in row(result.output, "cache")
    assert "reference, cpp" in row(result.output, "backends")


def test_a_compiler_that_does_not_exist_leaves_the_reference(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    settings.reload()
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "'no-such-compiler -O2', which was not found" in row(result.output, "C++ compiler")
    assert "unset CXX" in row(result.output, "C++ compiler")
    assert row(result.output, "backends").startswith("backends that run here: reference")
    assert "cpp" not in row(result.output, "backends")


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    finding = doctor.check_compiler(None)
    assert finding.status is Status.WARN
    assert "install g++ or clang++" in finding.advice


@needs_compiler
def test_a_compiler_command_may_have_several_words() -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    finding = doctor.check_compiler(f"env {compiler}")
    assert finding.status is Status.OK, finding


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            "echo 'in file probe.cpp' >&2; echo 'probe.cpp:1: error: no such header' >&2; exit 1",
            "probe.cpp:1: error: no such header",
        ),
        ('for last; do :; done; echo junk > "$last"', "cannot be loaded"),
        ("exit 0", "cannot be loaded"),
    ],
    ids=["refuses", "builds junk", "builds nothing"],
)
def test_a_compiler_that_does_not_work_says_how(tmp_path: Path, body: str, fault: str) -> None:
    finding = doctor.check_compiler(fake_compiler(tmp_path / "cxx", body))
    assert finding.status is Status.WARN
    assert "(fake 1.0)" in finding.found
    assert fault in finding.found


@needs_compiler
def test_a_compiler_without_openmp_is_found_out(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    drop = f'for word; do shift; [ "$word" = -fopenmp ] || set -- "$@" "$word"; done; exec {compiler} "$@"'
    finding = doctor.check_compiler(fake_compiler(tmp_path / "cxx", drop))
    assert finding.status is Status.WARN
    assert "ignored -fopenmp" in finding.found


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "1.13.0", "unknown"])
def test_an_unsupported_torch_is_the_one_failure(private_cache: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert f"{version}, supported are 2.11 to 2.15" in row(result.output, "torch")
    assert "pip install 'torch>=2.11,<2.16'" in row(result.output, "torch")
    assert "none" in row(result.output, "backends")


@pytest.mark.parametrize("version", ["2.11.0", "2.15.3+cu130", "2.13.0a0+git1234"])
def test_supported_torch_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.check_torch().status is Status.OK


def test_a_torch_that_cannot_be_imported_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> object:
        raise OSError(f"lib{name}.so: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", refuse)
    finding = doctor.check_torch()
    assert finding.status is Status.FAIL
    assert "libtorch.so" in finding.found
    assert doctor.check_gpu().status is Status.ABSENT


def test_brackets_in_a_row_are_printed(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.Finding("triton", Status.WARN, "found [this]", "pip install 'serrate[gpu]'")
    monkeypatch.setattr(doctor, "check_triton", lambda gpu: finding)
    line = row(runner.invoke(app, ["doctor"]).output, "triton")
    assert finding.found in line
    assert finding.advice in line


@pytest.mark.parametrize(("gpu", "status"), [(True, Status.WARN), (False, Status.ABSENT)])
def test_triton_is_missed_only_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, gpu: bool, status: Status) -> None:
    def refuse(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", refuse)
    finding = doctor.check_triton(gpu)
    assert finding.status is status
    assert "pip install 'serrate[gpu]'" in finding.advice


@pytest.mark.parametrize(
    ("version", "status"), [("3.5.1", Status.WARN), ("3.6.0", Status.OK), ("3.9.0", Status.OK), ("3.10.0", Status.WARN)]
)
def test_triton_versions(monkeypatch: pytest.MonkeyPatch, version: str, status: Status) -> None:
    class Triton:
        __version__ = version

    monkeypatch.setattr("importlib.import_module", lambda name: Triton)
    assert doctor.check_triton(gpu=False).status is status


def test_a_cache_folder_that_cannot_be_written_is_a_row(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    finding = doctor.check_cache(blocked / "cache")
    assert finding.status is Status.WARN
    assert "SERRATE_CACHE_DIR" in finding.advice


@pytest.mark.gpu
def test_a_gpu_is_named() -> None:
    assert torch.cuda.get_device_name(0) in doctor.check_gpu().found
