"""`SERRATE_LOG`: standard loggers below `serrate`, by level and by topic; progress only on a terminal."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from serrate import logs, settings

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import torch
from serrate import JaggedTensor, jit
@jit(backend="cpp")
def doubled(jt):
    return (jt * 2.0).sum(dim=1)
print(doubled(JaggedTensor.from_lengths(torch.ones(3, 2), [1, 2])).tolist())
"""


def enabled(monkeypatch: pytest.MonkeyPatch, asked: str) -> set[tuple[str, int]]:
    """The topics that are on, with the lowest level that is logged."""
    monkeypatch.setenv("SERRATE_LOG", asked)
    settings.reload()
    return {(topic, logs.logger(topic).getEffectiveLevel()) for topic in logs.TOPICS}


def test_a_level_is_for_all_topics_and_a_topic_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert enabled(monkeypatch, "info") == {(t, logging.INFO) for t in logs.TOPICS}
    found = dict(enabled(monkeypatch, "error,plan"))
    assert found.pop("plan") == logging.DEBUG
    assert set(found.values()) == {logging.ERROR}
    monkeypatch.delenv("SERRATE_LOG")
    settings.reload()
    assert all(logs.logger(t).level == logging.NOTSET for t in logs.TOPICS), "what was set is undone"
    assert not logging.getLogger("serrate").handlers


def run(tmp_path: Path, more: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(ROOT), "SERRATE_CACHE_DIR": str(tmp_path / "cache"), **environment}
    return subprocess.run([sys.executable, "-c", more + PROGRAM], env=given, capture_output=True, text=True, timeout=100)


def test_records_go_to_stderr_once(tmp_path: Path) -> None:
    shown = run(tmp_path, SERRATE_LOG="plan,source,cache")
    assert shown.stdout == "[[2.0, 2.0], [4.0, 4.0]]\n"
    assert shown.stderr.count("serrate.plan: ") == shown.stderr.count("serrate.plan: doubled: ") == 1
    assert shown.stderr.count('extern "C" void doubled') == 1
    assert "serrate.cache: compiled doubled in" in shown.stderr
    own = run(tmp_path, "import logging; logging.basicConfig(format='own %(message)s');", SERRATE_LOG="plan,cache")
    assert own.stderr.startswith("own ") and "serrate.plan" not in own.stderr, "the program's own handlers come first"
    assert "compiled" not in own.stderr, "the first process has built it"


def test_progress_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    here, there = pty.openpty()
    given = {**os.environ, "PYTHONPATH": str(ROOT), "SERRATE_CACHE_DIR": str(tmp_path), "TERM": "xterm", "SERRATE_LOG": ""}
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=there, text=True)
    os.close(there)
    written = b""
    while True:
        try:
            read = os.read(here, 4096)
        except OSError:
            break
        if not read:
            break
        written += read
    os.close(here)
    output, _ = process.communicate(timeout=100)
    assert output == "[[2.0, 2.0], [4.0, 4.0]]\n"
    assert b"compiling doubled" in written
