"""The tables of tile kernels: every bar is right, every ragged form is there, and what is wrong is not timed."""

from __future__ import annotations

import dataclasses
import io
import re
import time

import pytest
import torch
from rich.console import Console

from benchmarks import kernels
from benchmarks.data import DISTRIBUTIONS
from benchmarks.examples import EXAMPLES, FOLDER, HAND, QUICK, TINY, case
from serrate import JaggedTensor, Kernel

BY_HAND = ("jagged_dense_add", "jagged_sum", "jagged_mean", "jagged_softmax", "jagged_layer_norm")


def test_every_ragged_form_of_every_example_is_measured() -> None:
    form = re.compile(r"@serrate\.kernel\n+def (jagged\w*)\(")
    found = [(path.stem, each) for path in FOLDER.glob("*.py") for each in form.findall(path.read_text())]
    measured = {(kernel.__module__, kernel.__name__) for kernel in (case(name, "uniform", TINY).kernel for name in EXAMPLES)}
    assert measured == {(f"example_{name}", each) for name, each in found}
    assert all(isinstance(case(name, "uniform", TINY).kernel, Kernel) for name in EXAMPLES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lengths", DISTRIBUTIONS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_bar_and_ours_do_the_same(name: str, lengths: str) -> None:
    it = case(name, lengths, QUICK)
    wanted = it.wanted()
    assert it.is_right(it.bar(), wanted)
    assert it.is_right(it.call(), wanted)
    assert all(it.is_right(call(), wanted) for call in it.others.values())
    assert not it.is_right(it.bar() + 1, wanted)


@pytest.mark.parametrize("name", BY_HAND)
def test_hand_written_loops_are_right_where_rows_are_cut(name: str) -> None:
    it = case(name, "giant", dataclasses.replace(QUICK, rows=64, mean=160, dense=400_000))
    assert it.against == HAND and it.goal == 1.1
    assert it.arguments[0].values.shape[0] > 4096, "half of it is in one row"
    assert it.is_right(it.bar(), it.wanted())


@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_are_timed_on_four_rows_of_three(name: str) -> None:
    arguments = case(name, "uniform", TINY).arguments
    ragged = next(each for each in arguments if isinstance(each, JaggedTensor))
    assert ragged.structure.lengths(0).tolist() == [3, 3, 3, 3]


def test_a_wrong_result_a_fault_and_one_that_takes_too_long_are_shown_and_not_timed() -> None:
    it = case("jagged_sum", "uniform", QUICK)
    wanted = it.wanted()

    def fails(*_: object) -> None:
        raise RuntimeError("not today\nnor tomorrow")

    assert kernels.tried(dataclasses.replace(it, kernel=lambda _: wanted + 1), wanted, 60)[0] == "wrong result"
    assert kernels.tried(dataclasses.replace(it, kernel=fails), wanted, 60)[0] == "RuntimeError: not today"
    assert "not done after" in kernels.tried(dataclasses.replace(it, kernel=lambda _: time.sleep(30)), wanted, 0.2)[0]
    line = kernels.speed("jagged_sum", "uniform", dataclasses.replace(it, kernel=lambda _: wanted + 1), 1, 60)
    assert (line.ours, line.ratio, line.fault) == (None, None, "wrong result") and line.bar > 0


def test_a_wrong_bar_is_an_error() -> None:
    it = case("jagged_sum", "uniform", QUICK)
    with pytest.raises(AssertionError, match=r"hand C\+\+ for jagged_sum on uniform lengths: wrong result"):
        kernels.speed("jagged_sum", "uniform", dataclasses.replace(it, bar=lambda: torch.zeros(1)), 1, 60)


def test_the_table_says_what_is_met() -> None:
    slow = kernels.speed("jagged_flash_attention causal", "uniform", case("grouped_gemm", "uniform", QUICK), 1, 60)
    fast = dataclasses.replace(slow, lengths="giant", ratio=0.99)
    for width, with_others in ((80, False), (140, True)):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(kernels._speed_table([dataclasses.replace(slow, ratio=1.01), fast], console.width))
        shown = console.export_text()
        lines = [line.split() for line in shown.splitlines() if line.strip().startswith("jagged_flash")]
        assert [line[2] for line in lines] == ["uniform", "giant"]
        assert "no" in lines[0] and "yes" in lines[1]
        assert ("one torch.mm" in shown) == with_others and "…" not in shown
