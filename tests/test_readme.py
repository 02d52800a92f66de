"""What the documentation shows, runs: every Python block of README.md and docs/, and every example.

In: the Markdown files and examples/*.py. Out: a failure with the line of the document that did not run.
A block that is not meant to run says so in its info string: ```python no-run.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from serrate import settings
from tests.conftest import FULL

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.is_file()]
EXAMPLES = sorted((ROOT / "examples").glob("[a-z]*.py"))
TRAINING = [path for path in EXAMPLES if path.name.startswith("train_")]
"""Examples that take up to a minute; `tests/nn/test_training.py` runs them on small sizes."""

_FENCE = re.compile(r"^(?P<indent>[ ]*)(?P<ticks>`{3,})(?P<info>[^`]*)$")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_of(document: str) -> str:
    """The document's runnable blocks as one program, each line at its number in the document, so that tracebacks agree."""
    lines = document.splitlines()
    program = [""] * len(lines)
    opening: re.Match[str] | None = None
    start = 0
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if opening is None:
            opening, start = fence, number + 1
        elif not fence["info"].strip() and len(fence["ticks"]) >= len(opening["ticks"]):
            if _runs(opening["info"]):
                # Blocks inside lists are indented.
                program[start:number] = textwrap.dedent("\n".join(lines[start:number])).split("\n") if number > start else []
            opening = None
    if opening is not None:
        raise ValueError(f"the block that opens on line {start} is never closed")
    return "\n".join(program) + "\n"


def _runs(info: str) -> bool:
    words = info.split()
    return words[:1] == ["python"] and "no-run" not in words


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_document_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A real file, because kernels are compiled from their source; in a folder of its own, because documents may write files.
    program = tmp_path / f"{path.stem}.py"
    program.write_text(python_of(path.read_text()))
    monkeypatch.chdir(tmp_path)
    if ".tune(" in program.read_text():
        # What it measures is not for other tests to find.
        monkeypatch.setenv("SERRATE_CACHE_DIR", str(tmp_path / "cache"))
        settings.reload()
    runpy.run_path(str(program), run_name="document")


@pytest.mark.parametrize("path", EXAMPLES if FULL else [path for path in EXAMPLES if path not in TRAINING], ids=_name)
def test_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; the first, and all where time does not matter, in one that has imported nothing yet."""
    if FULL or path == EXAMPLES[0]:
        run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=600)
        assert run.returncode == 0, f"{_name(path)}\n{run.stdout}\n{run.stderr}"
        return
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")


def test_blocks_share_one_program_and_keep_their_lines() -> None:
    document = textwrap.dedent(
        """\
        # Title
        ```python
        x = 1
        ```
        ```python no-run
        x = 1 / 0
        ```
        ```console
        $ serrate demo
        ```
        1. In a list:
           ```python
           if x:
               y = x + 1
           ```
        """
    )
    program = python_of(document)
    namespace: dict[str, object] = {}
    exec(program, namespace)
    assert namespace["y"] == 2
    assert "1 / 0" not in program
    assert [number for number, line in enumerate(program.splitlines(), 1) if line] == [3, 13, 14]


def test_a_block_that_is_never_closed_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 1 is never closed"):
        python_of("```python\nx = 1\n")
