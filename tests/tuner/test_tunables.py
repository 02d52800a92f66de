"""Tunables of kernels: their values are chosen by measuring, and results do not depend on them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import settings
from serrate.errors import CallError
from serrate.tuner import record

USED: list[object] = []
"""The values of the tunables, call by call."""


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, private_cache: Path) -> Iterator[None]:
    monkeypatch.setenv("SERRATE_TUNE", "first_call")
    settings.reload()
    record.forget()
    USED.clear()
    yield
    record.forget()


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Slower the further `pause` is from 2."""
    pause = hl.register_tunable("pause", hl.IntegerFragment(0, 4, 4))
    USED.append(pause)
    time.sleep(0.003 * abs(pause - 2))
    out = torch.empty_like(x)
    for i in hl.tile(x.size(0)):
        out[i] = x[i] * 2
    return out


def in_place(x: torch.Tensor) -> None:
    way = hl.register_tunable("way", ("slow", "fast"))
    time.sleep(0.005 if way == "slow" else 0.0)
    USED.append(way)
    for i in hl.tile(x.size(0)):
        x[i] = x[i] + 1.0


def blocked(x: torch.Tensor) -> torch.Tensor:
    block = hl.register_tunable("block", hl.PowerOfTwoFragment(4, 16))
    USED.append(int(block))
    out = torch.empty_like(x)
    for i in hl.tile(x.size(0), block_size=block):
        out[i] = x[i] * 2
    return out


def test_the_fastest_value_is_found_and_remembered(tuned: None) -> None:
    kernel, x = serrate.kernel(doubled), torch.arange(10.0)
    for _ in range(3):
        assert torch.equal(kernel(x), x * 2)
    assert USED[0] == 4 and set(USED) == {0, 1, 2, 3, 4}
    assert USED[-1] == 2
    measured = len(USED)
    again = serrate.kernel(doubled)
    record.forget()
    again(x)
    again(x)
    assert USED[measured:] == [4, 2], "the first call of a process registers, the second knows"
    found = again.tunings(x)[0]
    assert found.chosen.lanes == (("pause", 2),) and found.source == "remembered"


def test_a_kernel_that_changes_its_arguments_changes_them_once_per_call(tuned: None) -> None:
    kernel, x = serrate.kernel(in_place), torch.zeros(5)
    for k in range(1, 4):
        kernel(x)
        assert x.tolist() == [float(k)] * 5
    assert USED[-1] == "fast"


def test_block_sizes_may_be_tunables(tuned: None) -> None:
    kernel, x = serrate.kernel(blocked), torch.arange(50.0)
    for _ in range(3):
        assert torch.equal(kernel(x), x * 2)
    assert set(USED) == {4, 8, 16}


def test_random_draws_do_not_depend_on_what_was_measured(tuned: None) -> None:
    @serrate.kernel
    def noisy(x: torch.Tensor) -> torch.Tensor:
        hl.register_tunable("n", (1, 2, 3))
        noise = torch.rand(x.size(0))
        out = torch.empty_like(x)
        for t in hl.tile(x.size(0)):
            out[t] = x[t] + noise[t]
        return out

    x = torch.zeros(20)
    torch.manual_seed(0)
    found = [noisy(x), noisy(x), torch.rand(3)]
    torch.manual_seed(0)
    for each in found:
        assert torch.equal(each, torch.rand(len(each)))


def test_values_that_the_kernel_refuses_are_not_chosen(tuned: None) -> None:
    @serrate.kernel
    def parts(x: torch.Tensor) -> torch.Tensor:
        n = hl.register_tunable("n", (1, 2, 5))
        if n == 2:
            raise ZeroDivisionError("not two")
        out = torch.zeros(n, x.size(0))
        for t in hl.tile(x.size(0)):
            out[0, t] = x[t] * 2
        return out

    for _ in range(3):
        assert parts(torch.ones(4)).shape == (1, 4)
    reasons = [each.reason for each in parts.tunings(torch.ones(4))[0].tried]
    assert any("not two" in why for why in reasons) and any("differ" in why for why in reasons)


def test_calls_that_record_gradients_tune_and_use_the_values(tuned: None) -> None:
    kernel, x = serrate.kernel(doubled, backward="auto"), torch.arange(10.0).requires_grad_()
    for _ in range(3):
        kernel(x).sum().backward()
    assert USED[0] == 4 and set(USED) == {0, 1, 2, 3, 4}
    assert USED[-1] == 2
    assert x.grad is not None and x.grad.tolist() == [6.0] * 10


def test_without_tuning_the_default_is_used() -> None:
    USED.clear()
    kernel, x = serrate.kernel(doubled, tune="never"), torch.arange(10.0)
    for _ in range(3):
        kernel(x)
    kernel.interpreted()(x)
    assert USED == [4] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hl.EnumFragment(()), "at least one"),
        (lambda: hl.IntegerFragment(4, 2), "between"),
        (lambda: hl.IntegerFragment(1, 5, 9), "between"),
        (lambda: hl.PowerOfTwoFragment(3, 8), "powers of two, got 3"),
    ],
)
def test_wrong_fragments_are_refused(make: object, message: str) -> None:
    with pytest.raises(CallError, match=message):
        make()  # type: ignore[operator]
