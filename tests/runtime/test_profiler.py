"""A profiler shows programs by name, with the strategy they run under.

In: calls inside `torch.profiler.profile`. Out: failures where the trace does not name what ran.
"""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from serrate import JaggedTensor, jit

ROWS = JaggedTensor.from_lengths(torch.randn(8, 3), [3, 0, 4, 1])


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_programs_are_shown_by_name_and_strategy(backend: str) -> None:
    def weigh(x: JaggedTensor) -> JaggedTensor:
        return torch.softmax(x * 2, 1)

    run = jit(weigh, backend=backend)
    run(ROWS)
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        run(ROWS)
    names = [event.name for event in watched.events()]
    assert f"serrate: weigh ({run.plan(ROWS).strategy})" in names
