"""Random programs that move rows about: sliced, padded, joined, turned round, picked, scanned, normalised, in any order.

In: hypothesis. Out: the program that fails, as the list of steps that makes it. A node is rows of some lengths, two features
wide; nodes that come from the same number of rows can be joined position by position.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from serrate import ir
from serrate.frontend import ops
from serrate.ir.view import TensorView
from tests.engine.oracle import FULL, STRATEGIES, compare, one_thread
from tests.oracle.programs import OPTIONS

WIDTH = 2
UNARY: dict[str, Any] = {
    "tanh": (ops.tanh, torch.tanh),
    "flip": (lambda x: ops.flip(x, 1), lambda r: r.flip(0)),
    "flip_features": (lambda x: ops.flip(x, 2), lambda r: r.flip(1)),
    "cumsum": (lambda x: ops.cumsum(ops.tanh(x), 1), lambda r: torch.tanh(r).cumsum(0)),
    "softmax": (lambda x: ops.softmax(x, 1), lambda r: torch.softmax(r, 0)),
    "centered": (lambda x: ops.sub(x, ops.mean(x, 1, keepdim=True)), lambda r: r - r.mean(0)),
    "tail": (lambda x: ops.slice(x, 1, 1), lambda r: r[1:]),
    "head": (lambda x: ops.slice(x, 1, None, 3), lambda r: r[:3]),
    "inside": (lambda x: ops.slice(x, 1, 1, -1), lambda r: r[1:-1]),
    "last": (lambda x: ops.slice(x, 1, -2), lambda r: r[-2:]),
    "pad": (lambda x: ops.pad(x, 1, 1, 2, 0.5), lambda r: torch.nn.functional.pad(r, (0, 0, 1, 2), value=0.5)),
}
JOINS = ["cat", "cat_rows"]
ACROSS: dict[str, Any] = {
    "centered_across": (lambda x: ops.sub(x, ops.mean(x, 0, keepdim=True)), lambda x: x - x.mean(0)),
    "softmax_across": (lambda x: ops.softmax(x, 0), lambda x: torch.softmax(x, 0)),
}


@dataclass(frozen=True)
class Step:
    function: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Steps over the input (node 0); every node of `outputs` is a result."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    # What each node's number of rows is called: only nodes of one name are joined position by position.
    counts = ["given"]
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["unary", "unary", "unary", "join", "across", "pick"]))
        a = draw(st.integers(max(0, len(counts) - 3), len(counts) - 1))
        if kind == "unary":
            steps.append(Step(draw(st.sampled_from(sorted(UNARY))), (a,)))
            counts.append(counts[a])
        elif kind == "across":
            steps.append(Step(draw(st.sampled_from(sorted(ACROSS))), (a,)))
            counts.append(counts[a])
        elif kind == "pick":
            steps.append(Step("pick", (a,)))
            counts.append("picked")
        else:
            name = draw(st.sampled_from(JOINS))
            others = [b for b in range(len(counts)) if name == "cat_rows" or counts[b] == counts[a]]
            b = draw(st.sampled_from(others))
            steps.append(Step(name, (a, b)))
            counts.append(counts[a] if name == "cat" else f"({counts[a]}+{counts[b]})")
    last = len(counts) - 1
    extra = draw(st.lists(st.integers(1, last), max_size=1))
    return Program(tuple(steps), tuple(dict.fromkeys([last, *extra])))


def record(program: Program) -> ir.Fusion:
    fusion = ir.Fusion("random_movement")
    with fusion:
        x, offsets = fusion.input((None, WIDTH), torch.float64), fusion.input((None,), torch.int64)
        picked = fusion.input((None,), torch.int64)
        nodes: list[TensorView] = [ops.as_nested(x, offsets)]
        for step in program.steps:
            operands = [nodes[k] for k in step.operands]
            if step.function == "pick":
                nodes.append(ops.index(operands[0], picked))
            elif step.function in JOINS:
                nodes.append(ops.cat(operands, 1 if step.function == "cat" else 0))
            else:
                nodes.append((UNARY | ACROSS)[step.function][0](*operands))
        fusion.output(*(nodes[k] for k in program.outputs))
    return fusion


def by_torch(program: Program, rows: list[Tensor], picked: list[int]) -> list[list[Tensor]]:
    nodes = [rows]
    for step in program.steps:
        first, *rest = (nodes[k] for k in step.operands)
        if step.function == "pick":
            nodes.append([_row(first, k) for k in picked])
        elif step.function == "cat":
            nodes.append([torch.cat([a, b]) for a, b in zip(first, rest[0], strict=True)])
        elif step.function == "cat_rows":
            nodes.append(first + rest[0])
        elif step.function in ACROSS:
            nodes.append(_across(first, ACROSS[step.function][1]))
        else:
            nodes.append([UNARY[step.function][1](r) for r in first])
    return [nodes[k] for k in program.outputs]


def _row(rows: list[Tensor], k: int) -> Tensor:
    """A row that is not there is empty."""
    return rows[k] if 0 <= k < len(rows) else rows[0][:0]


def _across(rows: list[Tensor], function: Any) -> list[Tensor]:
    out = [r.clone() for r in rows]
    for k in range(max(map(len, rows), default=0)):
        reach = [c for c, r in enumerate(rows) if len(r) > k]
        for c, value in zip(reach, function(torch.stack([rows[c][k] for c in reach])), strict=True):
            out[c][k] = value
    return out


LENGTH = st.one_of(st.just(0), st.integers(0, 4), st.integers(5, 13))


def _check_all(data: st.DataObject, backend: str) -> None:
    program = data.draw(programs())
    fusion = record(program)
    picks = any(step.function == "pick" for step in program.steps)
    calls = []
    for _ in range(3):
        lengths = data.draw(st.lists(LENGTH, min_size=int(picks), max_size=6))
        calls.append((lengths, data.draw(st.lists(st.integers(-1, 6), max_size=5))))
    for strategy in STRATEGIES:
        options = data.draw(OPTIONS[strategy])
        compiled = fusion.compile(backend, strategy, **options)
        for lengths, picked in calls:
            generator = torch.Generator().manual_seed(sum(lengths))
            x = torch.randn(sum(lengths), WIDTH, dtype=torch.float64, generator=generator)
            offsets = torch.tensor([0, *itertools.accumulate(lengths)])
            with one_thread():
                found = compiled(x, offsets, torch.tensor(picked, dtype=torch.int64))
            where = f"{backend}, {strategy} {options}: {program} on {lengths}, picked {picked}"
            wanted = by_torch(program, list(x.split(lengths)), picked)
            for k, (got, want) in enumerate(zip(found if isinstance(found, tuple) else (found,), wanted, strict=True)):
                bounds = [0, *itertools.accumulate(map(len, want))]
                assert got.offsets.tolist() == bounds, (
                    f"{where}, output {k}: offsets must be {bounds}, got {got.offsets.tolist()}"
                )
                compare(got.values, torch.cat([x[:0], *want]), f"{where}, output {k}", tolerance=(1e-7, 1e-8))


@pytest.mark.filterwarnings("ignore::UserWarning")
@hypothesis.settings(max_examples=400 if FULL else 25)
@hypothesis.given(st.data())
def test_reference_agrees_with_torch_under_every_plan(data: st.DataObject) -> None:
    _check_all(data, "reference")


@pytest.mark.filterwarnings("ignore::UserWarning")
@hypothesis.settings(max_examples=150 if FULL else 8)
@hypothesis.given(st.data())
def test_cpp_agrees_with_torch_under_every_plan(data: st.DataObject) -> None:
    _check_all(data, "cpp")
