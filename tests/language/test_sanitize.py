"""Generated C++ of tile kernels under the address and undefined-behaviour sanitizers: every read and write is inside its tensor.

In: an example; all of them, and random programs, under SERRATE_TEST_FULL=1. Out: the sanitizer's report of the first bad
access.
"""

from __future__ import annotations

import pytest

from tests.codegen.test_sanitize import run_sanitized
from tests.conftest import FULL
from tests.language.programs import KINDS
from tests.language.test_examples import NAMES

pytestmark = pytest.mark.sanitize

MODULE = "tests.language.sanitized"
SAMPLE = ("moe_matmul@persistent_dynamic",)
"""The example of the short run: gathers and scatters."""
ALL = [(f"{name}@{strategy}",) for name in NAMES for strategy in ("maskless", "masked", "persistent_dynamic")]


@pytest.mark.parametrize("names", ALL if FULL else [SAMPLE], ids=", ".join)
def test_examples(names: tuple[str, ...]) -> None:
    done = run_sanitized(*names, module=MODULE)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    kinds = dict.fromkeys(KINDS)
    done = run_sanitized(*(f"{kind}:{seed}" for kind in kinds), module=MODULE)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_the_sanitizer_sees_an_overrun() -> None:
    done = run_sanitized("overrun", module=MODULE)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
