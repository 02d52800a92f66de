"""`make mutate`: breaks one line of the compiler at a time and sees whether a test fails.

In: the mutations of `places.py`, or those whose path or number is named on the command line. Out: a line for each (killed by
which test, or survived), a summary, and status 1 if any survived. Each mutation is applied to a copy of the tree.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.mutation.places import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("serrate", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "README.md", "Makefile", "CONTRIBUTING.md")
CACHE = ROOT / "build" / "mutation-cache"
LIMIT = 600
"""Seconds after which a mutated run is stopped: a hang is noticed, too."""
PRELOADED = ("torch", "numpy", "hypothesis", "triton", "triton.language")
"""Imported once, before the forks: most of a short run is spent on these."""


@dataclass(frozen=True)
class Outcome:
    """The end of a mutated run: the test that failed, or None; `broken` if no test could run, which proves nothing."""

    killer: str | None
    broken: bool = False


def stale() -> list[str]:
    """The mutations whose line does not stand exactly once in its file, or whose tests do not exist."""
    found = []
    for number, mutation in enumerate(MUTATIONS):
        count = (ROOT / mutation.path).read_text().count(mutation.before)
        if count != 1:
            found.append(f"{number}: {mutation.path} has {mutation.before!r} {count} times")
        files = [test.partition("::")[0] for test in mutation.tests if test.startswith("tests/")]
        found += [f"{number}: no {file}" for file in files if not (ROOT / file).is_file()]
    return found


def snapshot(folder: Path) -> None:
    """Copies what tests need of the tree: it may be edited while mutations run."""
    for name in COPIED:
        # Modification times are kept, so that compiled bytecode stays valid.
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)


class Run:
    """Tests on a copy of a tree, with a mutation or without one, in a process of their own."""

    def __init__(self, tree: Path, tests: Sequence[str], mutation: Mutation | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mutation-"))
        shutil.copytree(tree, self.folder, dirs_exist_ok=True)
        if mutation is not None:
            path = self.folder / mutation.path
            path.write_text(path.read_text().replace(mutation.before, mutation.after))
        # A mutated cache could leave wrong programs under right names; all others are named by the text they are built from.
        own = mutation is not None and mutation.path.startswith(("serrate/runtime/cache", "serrate/runtime/compiler"))
        self.cache = self.folder / "cache" if own else CACHE
        self.tests = tests
        self.start = time.monotonic()
        self.process: BaseProcess = multiprocessing.get_context("fork").Process(target=self._test)
        self.process.start()

    def _test(self) -> None:
        os.setsid()
        output = os.open(self.folder / "output.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.folder)
        os.environ.update(PYTHONPATH=str(self.folder), SERRATE_CACHE_DIR=str(self.cache))
        for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "serrate")]:
            del sys.modules[name]
        sys.path[:] = [str(self.folder), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        status = pytest.main(["-x", "-q", "-n", "0", "--tb=no", "-p", "no:cacheprovider", *self.tests])
        sys.stdout.flush()
        # Not through exit functions, which belong to the parent.
        os._exit(int(status))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def outcome(self) -> Outcome:
        """The end of the process, which is ending or has run for too long; removes the copy."""
        self.process.join(max(LIMIT - self.seconds, 1))
        late = self.process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, 9)
        self.process.join()
        text = (self.folder / "output.txt").read_text()
        shutil.rmtree(self.folder, ignore_errors=True)
        status = self.process.exitcode or 0
        failed = [line.split(" - ")[0].split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if late:
            return Outcome("a run that does not end")
        if status < 0:
            return Outcome(f"signal {-status}")
        if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            return Outcome(None, broken=True)
        return Outcome(None if status == 0 else failed[0] if failed else f"status {status}")


def outcomes(
    tree: Path, mutations: Sequence[tuple[int, Mutation]], workers: int
) -> Iterator[tuple[int, Mutation, Outcome, float]]:
    """The mutations with their outcomes, as they come; so many at a time."""
    waiting = deque(mutations)
    running: dict[int, tuple[int, Mutation, Run]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            number, mutation = waiting.popleft()
            run = Run(tree, mutation.tests, mutation)
            running[run.process.sentinel] = (number, mutation, run)
        ended = wait(list(running), timeout=1)
        for sentinel in [s for s, (_, _, run) in running.items() if s in ended or run.seconds > LIMIT]:
            number, mutation, run = running.pop(sentinel)
            seconds = run.seconds
            yield number, mutation, run.outcome(), seconds


def main(wanted: Sequence[str]) -> int:
    if wrong := stale():
        print("\n".join(["the list is out of date:", *wrong]))
        return 2
    chosen = [(n, m) for n, m in enumerate(MUTATIONS) if not wanted or str(n) in wanted or any(w in m.path for w in wanted)]
    os.environ |= {"OMP_NUM_THREADS": "2", "TRITON_INTERPRET": "1", "SERRATE_TEST_UNSAMPLED": "1"}
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    survived: list[int] = []
    killers: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder)
        snapshot(tree)
        for number, mutation, outcome, seconds in outcomes(tree, chosen, int(os.environ.get("WORKERS", "2"))):
            end = "NO TEST RAN" if outcome.broken else f"killed by {outcome.killer}" if outcome.killer else "SURVIVED"
            change = f"{mutation.before.strip()!r} -> {mutation.after.strip()!r}"
            print(f"{number:3} {seconds:5.0f} s  {mutation.path}: {change}: {end}", flush=True)
            if outcome.killer is None:
                survived.append(number)
            elif "::" in outcome.killer:
                killers.add(outcome.killer)
        # A test that always fails proves nothing.
        always = Run(tree, sorted(killers)).outcome() if killers else Outcome(None)
    if always != Outcome(None):
        print(f"fails without any mutation: {always.killer}")
        return 2
    print(f"{len(chosen)} mutations, {len(chosen) - len(survived)} killed, survived: {sorted(survived) or 'none'}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
