"""Softmax statistics relative to a guessed maximum: where the guess serves, and where it does not."""

from __future__ import annotations

import math

import pytest
import torch

import serrate
from serrate import JaggedTensor

INF, NAN = math.inf, math.nan


def _rows(features: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Rows of forty positions, on which a guess from the first ones is near, far off, or none at all."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(40, *features, generator=generator)
    rows = {"near": plain, "a little above": plain.clone(), "far above": plain.clone(), "far below": plain.clone()}
    rows["a little above"][30] += 12
    rows["far above"][30] += 90
    rows["far below"][:16] += 200
    rows |= {
        "large": 3000 + plain,
        "larger": 60000 + 16 * plain,
        "head masked": plain.clone(),
        "masked": torch.full_like(plain, -INF),
    }
    rows["head masked"][:20] = -INF
    for name, places in {
        "inf": {33: INF},
        "inf first": {0: INF},
        "nan": {33: NAN},
        "nan first": {0: NAN},
        "inf and nan": {3: INF, 35: NAN},
        "nan and inf": {3: NAN, 35: INF},
        "-inf": {2: -INF, 37: -INF},
    }.items():
        rows[name] = plain.clone()
        for place, value in places.items():
            rows[name][place] = value
    return rows | {"one": plain[:1], "empty": plain[:0]}


TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("features", [(), (3,), (64,)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, torch.logsumexp], ids=lambda f: f.__name__)
def test_a_guess_never_shows(function: object, dtype: torch.dtype, features: tuple[int, ...]) -> None:
    rows = {name: row.to(dtype) for name, row in _rows(features).items()}
    jt = JaggedTensor.from_list(list(rows.values()))
    got = serrate.jit(lambda x: function(x, dim=1), backend="cpp", strategy="maskless")(jt)  # type: ignore[operator]
    for (name, row), mine in zip(rows.items(), got, strict=True):
        wanted = function(row.double(), dim=0).to(dtype)  # type: ignore[operator]
        torch.testing.assert_close(
            mine,
            wanted,
            rtol=TOLERANCE[dtype],
            atol=TOLERANCE[dtype],
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_there_is_a_guess() -> None:
    jt = JaggedTensor.from_list([torch.randn(40, 4), torch.randn(3, 4)])
    assert "fn_exp_near" in serrate.jit(lambda x: torch.logsumexp(x, dim=1), backend="cpp").source(jt)
    half = jt.to(torch.bfloat16)
    assert "fn_exp_rough" in serrate.jit(lambda x: torch.logsumexp(x, dim=1), backend="cpp").source(half)
    # a result of more bits needs exponentials of more bits
    assert "fn_exp_near" in serrate.jit(lambda x: torch.softmax(x, dim=1, dtype=torch.float32), backend="cpp").source(half)


def test_a_single_large_value_has_no_log_probability_above_zero() -> None:
    row = torch.zeros(301)
    row[7] = 3000
    jt = JaggedTensor.from_list([row.bfloat16(), torch.full((301,), 4000.0).bfloat16()])
    got = serrate.jit(lambda x: torch.log_softmax(x, dim=1), backend="cpp")(jt)
    assert got[0][7] == 0
    torch.testing.assert_close(got[1], torch.full((301,), -math.log(301)).bfloat16(), rtol=4e-3, atol=0)
