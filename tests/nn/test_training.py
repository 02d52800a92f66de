"""The training examples on small sizes: losses are those of the padded torch models, and new lengths build nothing."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from serrate import JaggedTensor, engine
from tests.conftest import FULL

STEPS = 200 if FULL else 50
FOLDER = Path(__file__).resolve().parents[2] / "examples"
SMALL: dict[str, dict[str, Any]] = {
    "train_transformer": {"rows": 10, "short": (2, 5), "long": (12, 15), "width": 16, "heads": 2, "hidden": 32, "layers": 1},
    "train_recommender": {"users": 10, "items": 30, "short": (2, 5), "long": (12, 15), "width": 16, "layers": 1},
    "train_moe": {"rows": 10, "short": (2, 5), "long": (12, 15), "width": 16, "hidden": 8, "experts": 4, "layers": 1},
}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the examples share; they are scripts that import it from their folder."""
    monkeypatch.syspath_prepend(str(FOLDER))
    torch.manual_seed(0)
    return importlib.import_module("_training")


@pytest.mark.parametrize("name", SMALL)
def test_losses_are_those_of_the_padded_model(name: str, training: Any) -> None:
    example = importlib.import_module(name)
    sizes = example.Sizes(**SMALL[name])
    ours, padded = training.side_by_side([example.Ragged(sizes), example.Padded(sizes)], example.batches(20, sizes), lr=3e-3)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(padded.losses), rtol=2e-3, atol=2e-3)
    assert ours.losses[-1] < ours.losses[0]


def resident() -> int:
    """Bytes of memory that the process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", ["train_recommender", *(pytest.param(n, marks=pytest.mark.slow) for n in SMALL)])
def test_steps_with_new_lengths_build_nothing_and_hold_no_memory(
    name: str, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = importlib.import_module(name)
    sizes = example.Sizes(**SMALL[name])
    step, building, held = 0, list[int](), list[int]()
    build = engine.build

    def counted(*args: Any, **kwargs: Any) -> Any:
        building.append(step)
        return build(*args, **kwargs)

    monkeypatch.setattr(engine, "build", counted)

    def batches() -> Iterator[Any]:
        nonlocal step
        lengths = set()
        for batch in example.batches(STEPS, sizes):
            rows = batch if isinstance(batch, JaggedTensor) else batch[0]
            lengths.add(tuple(rows.lengths.tolist()))
            if step in (STEPS // 2, STEPS - 1):
                held.append(resident())
            yield batch
            step += 1
        assert len(lengths) > 0.9 * STEPS

    (run,) = training.side_by_side([example.Ragged(sizes)], batches(), lr=3e-3)
    assert len(run.losses) == STEPS
    assert max(building, default=0) < 10, f"programs were built in steps {sorted(set(building))}"
    assert held[1] - held[0] < 8 << 20
