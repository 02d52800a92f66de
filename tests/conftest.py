"""What every test shares: one cache of built programs, the hypothesis profiles, the thread count, and who is skipped.

In: the environment (`SERRATE_TEST_FULL`, `SERRATE_TEST_UNSAMPLED`, `SERRATE_TEST_PART`, `SERRATE_CACHE_DIR`, `TRITON_INTERPRET`).
Out: settings made before any test is imported, and fixtures. A process either interprets Triton or compiles it. The one that
interprets is the default; it sees no GPU and skips `gpu` tests. With `TRITON_INTERPRET=0` a process needs a GPU, and runs only
`gpu` and `triton` tests.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FULL = os.environ.get("SERRATE_TEST_FULL") == "1"
SAMPLED = not FULL and os.environ.get("SERRATE_TEST_UNSAMPLED") != "1"
"""Whether `sampled` tests are sampled; mutations are held against all of them."""

PART, PARTS = map(int, os.environ.get("SERRATE_TEST_PART", "1/1").split("/"))
"""Which part of the tests this run is, and how many parts there are: "2/3" runs a third of them."""

# Before torch and serrate are imported, because both read the environment then. One folder for all workers and runs: a program is
# built once and found by the others.
os.environ.setdefault("SERRATE_CACHE_DIR", str(ROOT / "build" / "test-cache"))
# Plans are the heuristic's choice, so that tests are fast and their results are the same everywhere; tests of the tuner say
# otherwise themselves.
os.environ.setdefault("SERRATE_TUNE", "never")
# Generated code may bring its own OpenMP run-time, which torch.set_num_threads does not reach.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Triton decides when it is imported whether it compiles or interprets.
INTERPRETED = os.environ.setdefault("TRITON_INTERPRET", "1") not in ("", "0")
if INTERPRETED:
    # The same tests, whether or not there is a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from serrate import settings  # noqa: E402

# serrate may have been imported by a plugin before the variable was set.
settings.reload()
# The test workers already share the cores.
torch.set_num_threads(2)
if INTERPRETED:
    from tests import triton_interpreter, triton_memory

    triton_interpreter.install()
    triton_memory.install()
elif torch.cuda.is_available():
    from tests import triton_on_device

    triton_on_device.install(torch.device("cuda"))

hypothesis.settings.register_profile("fast", max_examples=14, deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", max_examples=140, deadline=None)
hypothesis.settings.load_profile("full" if FULL else "fast")


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("SERRATE_")}


SETTINGS = _settings()
"""What is set from outside, and above."""


def _left_out(items: list[pytest.Item]) -> set[str]:
    """All but one of 8n of the tests that are `sampled(n)`, by name; of those with several parameters, at least one of every
    first parameter runs."""
    groups: dict[tuple[str, int], list[str]] = {}
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled:
            several = isinstance(item, pytest.Function) and hasattr(item, "callspec") and len(item.callspec.params) > 1
            group = item.nodeid.partition("-" if several else "[")[0]
            groups.setdefault((group, sampled.args[0]), []).append(item.nodeid)
    ranked = ((sorted(names, key=lambda name: zlib.crc32(name.encode())), n) for (_, n), names in groups.items())
    return {name for names, n in ranked for name in names[max(1, len(names) // (8 * n)) :]}


def pytest_configure() -> None:
    if not INTERPRETED and not torch.cuda.is_available():
        raise pytest.UsageError("TRITON_INTERPRET=0 runs the tests that need a GPU, and no CUDA device was found")


def _is_for_triton(item: pytest.Item) -> bool:
    """Whether a test runs Triton programs: it is marked, or has the backend among its parameters."""
    parameters = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    named = any(isinstance(p, str) and p.split()[:1] == ["triton"] for p in parameters)
    return named or item.get_closest_marker("triton") is not None


def pytest_report_header(config: pytest.Config) -> str | None:
    """Says that tests are left out: they are too many to list them as skipped."""
    return "sampled: tests with many parameters run for some of them (SERRATE_TEST_FULL=1: all)" if _samples(config) else None


def _samples(config: pytest.Config) -> bool:
    """Whether `sampled` tests are sampled in this run. Tests that the command names run with all their parameters."""
    return SAMPLED and not any("::" in name for name in config.args)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests of the other process or of other parts, and parameters that are not in the sample. Skips, with the reason,
    tests that this machine or this kind of run cannot run."""
    left_out = _left_out(items) if _samples(config) else set()

    def belongs(item: pytest.Item) -> bool:
        is_of_part = zlib.crc32(item.nodeid.encode()) % PARTS == PART - 1
        is_of_process = INTERPRETED or _is_for_triton(item) or item.get_closest_marker("gpu") is not None
        return is_of_part and is_of_process and item.nodeid not in left_out

    # Thousands of them would hide those that are skipped.
    config.hook.pytest_deselected(items=[item for item in items if not belongs(item)])
    items[:] = filter(belongs, items)
    for item in items:
        if item.get_closest_marker("slow") and not FULL:
            item.add_marker(pytest.mark.skip(reason="slow: set SERRATE_TEST_FULL=1"))
        if item.get_closest_marker("gpu") and INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-gpu"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None]:
    """What a test wrote into the environment is gone when its fixtures are; so is what serrate had read of it."""
    yield
    left = _settings()
    for name in left.keys() | SETTINGS.keys():
        os.environ.pop(name, None)
    os.environ.update(SETTINGS)
    settings.reload()
    if not INTERPRETED:
        _stop_if_device_is_lost()
    assert left == SETTINGS, "the test left other settings in the environment than it found"


def _stop_if_device_is_lost() -> None:
    """Ends the process if a kernel has faulted: every later CUDA call in it would fail too. xdist reports the test as crashed and
    starts another worker."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit(f"the CUDA device is in error: {error}", 1)


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
