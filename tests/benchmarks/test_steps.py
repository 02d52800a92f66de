"""A loop of training-like steps with new lengths in every step builds nothing after the first ones, and keeps nothing.

The oracle of a step is torch, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

from benchmarks import steps
from serrate import engine, settings
from tests.conftest import INTERPRETED

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The programs that were built, and the kernels that Triton compiled."""
    found: list[str] = []
    plain = engine.build

    def noted(program: Any, chosen: Any, name: str, *rest: Any) -> Any:
        found.append(name)
        return plain(program, chosen, name, *rest)

    monkeypatch.setattr(engine, "build", noted)
    if not INTERPRETED:
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **given: found.append(str(given.get("repr"))))
    yield found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_right(device: str) -> None:
    batches, model = steps.Batches(3, torch.device(device)), steps.Model(torch.device(device))
    for k in range(3):
        batch = batches[k]
        wanted = [model.of_row(row) for row in batch.unbind()]
        torch.testing.assert_close(model(batch), torch.stack(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_thousand_steps_build_nothing_and_keep_nothing(device: str, builds: list[str]) -> None:
    steps.run(torch.device(device), 20, 10)
    builds.clear()
    found = steps.run(torch.device(device), 1000)
    assert builds == []
    # Caches are full by the middle of the loop; which batches they hold changes their size a little.
    assert found.objects_added < 1000
    assert found.bytes_added < 1 << 20


@pytest.mark.skipif(not INTERPRETED, reason="the device runs all steps")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_steps_under_the_interpreter_build_nothing(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERRATE_BACKEND", "triton")
    settings.reload()
    monkeypatch.setattr(steps, "ROWS", 6)
    steps.run(torch.device("cpu"), 3, 2)
    builds.clear()
    steps.run(torch.device("cpu"), 6, 2)
    assert builds == []
