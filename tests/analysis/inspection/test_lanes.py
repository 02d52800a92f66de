"""Counts of lanes against the reference backend, which runs the same programs lane by lane, and against plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, ir, ops
from serrate.analysis.inspection import lanes
from serrate.analysis.inspection.lanes import LaneCount, count_lanes
from serrate.codegen import reference
from serrate.ir.loops import LoopProgram
from serrate.lower.pipeline import lower
from serrate.report.collect import StageFacts
from serrate.runtime.memory import whole
from serrate.schedule.strategies import SCHEDULES
from serrate.tuner.candidates import Candidate

LENGTHS = [10, 0, 37, 1, 64, 5, 0, 20, 3]


def rows(lengths: list[int] = LENGTHS) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), 3), lengths)


def sums(jt: JaggedTensor) -> StageFacts:
    with ir.Fusion("sums") as f:
        x, offsets = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    (facts,) = f.compile("triton", "maskless").facts(jt.values, jt.offsets)
    return facts


def softmax(jt: JaggedTensor) -> StageFacts:
    with ir.Fusion("softmax") as f:
        x, offsets = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, offsets), dim=1))
    (facts,) = f.compile("triton", "maskless").facts(jt.values, jt.offsets)
    return facts


@serrate.kernel
def norms(x: Any) -> Any:
    out = torch.empty(x.num_rows)
    for b in hl.tile(x.num_rows):
        acc = hl.zeros([b])
        for k in hl.tile(x.max_length):
            acc = acc + (x[b, k, :] ** 2).sum(-1).sum(-1)
        out[b] = torch.sqrt(acc)
    return out


def of_kernel(jt: JaggedTensor) -> StageFacts:
    (facts,) = norms.on("triton").facts(jt)
    return facts


def lowered(facts: StageFacts, strategy: str) -> tuple[LoopProgram, dict[Any, torch.Tensor], dict[Any, int]]:
    program = lower(facts.planned(Candidate(strategy)).apply(facts.program), "p", (), facts.target)
    arrays, numbers = facts.data(program)
    return program, {array: whole(found) for array, found in arrays.items()}, numbers


def run_and_count(
    monkeypatch: pytest.MonkeyPatch, program: LoopProgram, arrays: dict[Any, torch.Tensor], numbers: dict[Any, int]
) -> LaneCount:
    """Runs a program on zeros, and counts the lanes of every block and those that exist."""
    counted = [0, 0]
    run = reference._Interpreter.block

    def counting(self: Any, node: Any) -> None:
        exists = self.mask(node.guard, node.lanes).expand([lane.size for lane in node.lanes])
        counted[0] += exists.numel()
        counted[1] += int(exists.sum())
        run(self, node)

    monkeypatch.setattr(reference._Interpreter, "block", counting)
    tensors = {t: torch.zeros([4096 for _ in t.storage], dtype=t.dtype) for t in program.tensors}
    reference.run(program, tensors, arrays, numbers)
    return LaneCount(*counted)


@pytest.mark.parametrize("strategy", SCHEDULES)
@pytest.mark.parametrize("made", [sums, softmax, of_kernel])
def test_lanes_are_those_that_the_reference_visits(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[JaggedTensor], StageFacts], strategy: str
) -> None:
    program, arrays, numbers = lowered(made(rows()), strategy)
    found = count_lanes(program, arrays, numbers, in_order=False)
    assert found.exact
    assert found == run_and_count(monkeypatch, program, arrays, numbers)
    assert 0 < found.waste < 1


def test_loops_that_end_with_their_rows_waste_nothing() -> None:
    with ir.Fusion("sums") as f:
        x, offsets = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    jt = rows()
    (facts,) = f.compile("cpp", "maskless").facts(jt.values, jt.offsets)
    program, arrays, numbers = lowered(facts, "maskless")
    found = count_lanes(program, arrays, numbers, in_order=True)
    assert found.waste == 0
    # Each element is added once; the sums of each row are set and stored.
    assert sum(LENGTHS) * 3 <= found.visited <= sum(LENGTHS) * 3 + 4 * 3 * len(LENGTHS)


@pytest.mark.parametrize("length", [0, 5, 9])
def test_rows_of_a_smaller_result_are_not_visited(length: int) -> None:
    @serrate.kernel
    def doubled(x: Any, out: Any) -> None:
        for b in hl.grid(x.size(0)):
            for k in hl.tile(x.size(1)):
                out[b, k] = x[b, k] * 2

    (facts,) = doubled.on("cpp").facts(torch.ones(9, 32), torch.empty(length, 32))
    program, arrays, numbers = lowered(facts, "maskless")
    found = count_lanes(program, arrays, numbers, in_order=True)
    assert found.existing == found.visited == length * 32


def test_samples_are_about_right(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [int(n) for n in torch.randint(0, 200, (400,), generator=torch.Generator().manual_seed(1))]
    program, arrays, numbers = lowered(sums(rows(lengths)), "maskless")
    exact = count_lanes(program, arrays, numbers, in_order=False)
    monkeypatch.setattr(lanes, "MOST_POSITIONS", 100)
    monkeypatch.setattr(lanes, "MOST_LANES", 1 << 17)
    sampled = count_lanes(program, arrays, numbers, in_order=False)
    assert exact.exact and not sampled.exact
    assert sampled.waste == pytest.approx(exact.waste, abs=0.05)
    assert sampled.visited == pytest.approx(exact.visited, rel=0.05)
