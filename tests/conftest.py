"""What every test shares: one cache of built programs, the hypothesis profiles, the thread count, and who is skipped.

In: the environment (`SERRATE_TEST_FULL`, `SERRATE_CACHE_DIR`). Out: settings made before any test is imported, and fixtures.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FULL = os.environ.get("SERRATE_TEST_FULL") == "1"

# Before torch and serrate are imported, because both read the environment then. One folder for all workers and runs: a program is
# built once and found by the others.
os.environ.setdefault("SERRATE_CACHE_DIR", str(ROOT / "build" / "test-cache"))
# Generated code may bring its own OpenMP run-time, which torch.set_num_threads does not reach.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Triton decides when it is imported whether it compiles or interprets; tensors are on the CPU here, so it interprets.
os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from serrate import settings  # noqa: E402
from tests import triton_interpreter  # noqa: E402

# serrate may have been imported by a plugin before the variable was set.
settings.reload()
# The test workers already share the cores.
torch.set_num_threads(2)
triton_interpreter.install()

hypothesis.settings.register_profile("fast", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=200, deadline=None)
hypothesis.settings.load_profile("full" if FULL else "fast")


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("SERRATE_")}


SETTINGS = _settings()
"""What is set from outside, and above."""


def _left_out(items: list[pytest.Item]) -> set[str]:
    """All but one of n of the tests that are `sampled(n)`, by name; at least one runs of every first parameter, mostly a case."""
    groups: dict[tuple[str, int], list[str]] = {}
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled:
            groups.setdefault((item.nodeid.partition("-")[0], sampled.args[0]), []).append(item.nodeid)
    ranked = ((sorted(names, key=lambda name: zlib.crc32(name.encode())), n) for (_, n), names in groups.items())
    return {name for names, n in ranked for name in names[max(1, len(names) // n) :]}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with the reason, what this machine or this kind of run does not do."""
    left_out = set() if FULL else _left_out(items)
    for item in items:
        if item.nodeid in left_out:
            item.add_marker(pytest.mark.skip(reason="not in the sample: set SERRATE_TEST_FULL=1"))
        if item.get_closest_marker("slow") and not FULL:
            item.add_marker(pytest.mark.skip(reason="slow: set SERRATE_TEST_FULL=1"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None]:
    """What a test wrote into the environment is gone when its fixtures are; so is what serrate had read of it."""
    yield
    left = _settings()
    for name in left.keys() | SETTINGS.keys():
        os.environ.pop(name, None)
    os.environ.update(SETTINGS)
    settings.reload()
    assert left == SETTINGS, "the test left other settings in the environment than it found"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference backend is the default until the test ends, so that nothing is compiled."""
    monkeypatch.setenv("SERRATE_BACKEND", "reference")
    settings.reload()


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, not made yet, in force until the test ends."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SERRATE_CACHE_DIR", str(folder))
    settings.reload()
    return folder
