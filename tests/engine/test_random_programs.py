"""Random small programs on random structures: the reference against torch, strategies and tile sizes against each other.

In: hypothesis. Out: the program that fails, as the list of steps that makes it. A node has a place (`position`, `row` or
`group`: what it has one value for) and may be one wide; binary operations broadcast from the coarser to the finer.
"""

from __future__ import annotations

import functools
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
from serrate.tensor import JaggedTensor
from tests.engine.cases import REDUCERS
from tests.engine.oracle import FULL, STRATEGIES, Rows, compare, one_thread

PLACES = ["position", "row", "group"]
"""Finest first. With one level there are no groups."""

UNARY: dict[str, Any] = {
    "relu": (ops.relu, torch.relu),
    "tanh": (ops.tanh, torch.tanh),
    "sigmoid": (ops.sigmoid, torch.sigmoid),
    "scale": (lambda x: ops.add(ops.mul(x, 0.7), 0.3), lambda x: x * 0.7 + 0.3),
    "exp": (lambda x: ops.exp(ops.tanh(x)), lambda x: torch.exp(torch.tanh(x))),
    "square": (lambda x: ops.square(ops.tanh(x)), lambda x: torch.tanh(x) ** 2),
}
BINARY: dict[str, Any] = {
    "add": (ops.add, torch.add),
    "sub": (ops.sub, torch.sub),
    # Bounded on one side, so that products of products stay of the size of their operands.
    "mul": (lambda a, b: ops.mul(ops.tanh(a), b), lambda a, b: torch.tanh(a) * b),
    "maximum": (ops.maximum, torch.maximum),
    "where": (lambda a, b: ops.where(ops.gt(a, b), a, b), lambda a, b: torch.where(a > b, a, b)),
}
REDUCE = ["sum", "mean", "amax", "amin", "logsumexp", "var"]
NORMAL = ["softmax", "log_softmax", "layer_norm", "rms_norm"]


@dataclass(frozen=True)
class Step:
    """One node: a function of earlier nodes, over the dims `over` if it reduces."""

    function: str
    operands: tuple[int, ...]
    over: str = ""
    """`rows`, `groups` or `features`."""


@dataclass(frozen=True)
class Program:
    """Steps over the input (node 0); `outputs` are nodes."""

    levels: int
    width: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    levels = draw(st.sampled_from([1, 1, 2]))
    width = draw(st.sampled_from([1, 2, 5]))
    places, widths = ["position"], [width]
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["unary", "binary", "binary", "reduce", "reduce", "normal"]))
        a = draw(st.integers(max(0, len(places) - 3), len(places) - 1))
        if kind == "unary":
            steps.append(Step(draw(st.sampled_from(sorted(UNARY))), (a,)))
            places.append(places[a])
            widths.append(widths[a])
        elif kind == "binary":
            b = draw(st.integers(0, len(places) - 1))
            steps.append(Step(draw(st.sampled_from(sorted(BINARY))), (a, b)))
            places.append(min(places[a], places[b], key=PLACES.index))
            widths.append(max(widths[a], widths[b]))
        else:
            wanted = ["features", "rows", "rows", *(["groups"] if levels == 2 else [])]
            over = draw(st.sampled_from(wanted))
            # Ragged dims are there to be reduced only while a node still has one value for each position.
            if places[a] != "position":
                over = "features"
            name = draw(st.sampled_from(REDUCE if kind == "reduce" else NORMAL))
            steps.append(Step(name, (a,), over))
            kept = kind == "normal"
            places.append(places[a] if kept or over == "features" else {"rows": "row", "groups": "group"}[over])
            widths.append(widths[a] if kept or over != "features" else 1)
    last = len(places) - 1
    outputs = draw(st.lists(st.integers(1, last), max_size=1).map(lambda extra: tuple(dict.fromkeys([last, *extra]))))
    return Program(levels, width, tuple(steps), outputs)


@st.composite
def structures(draw: st.DrawFn, levels: int) -> Rows:
    length = st.one_of(st.just(0), st.integers(0, 4), st.integers(5, 17))
    if levels == 1:
        return Rows(tuple(draw(st.lists(length, max_size=6))))
    groups = draw(st.lists(st.integers(0, 3), max_size=4))
    return Rows(tuple(draw(st.lists(length, min_size=sum(groups), max_size=sum(groups)))), tuple(groups))


# --- as a fusion -------------------------------------------------------------------------------------------------------


def _dims(program: Program, over: str) -> tuple[int, ...]:
    """Dims of [component, ragged, features] or [group, row, position, features]."""
    if over == "features":
        return (program.levels + 1,)
    return (program.levels,) if over == "rows" else (1, 2)


def record(program: Program) -> ir.Fusion:
    fusion = ir.Fusion("random_program")
    with fusion:
        x = fusion.input((None, program.width), torch.float64)
        offsets = [fusion.input((None,), torch.int64) for _ in range(program.levels)]
        nodes: list[TensorView] = [functools.reduce(ops.as_nested, offsets, x)]
        for step in program.steps:
            operands = [nodes[k] for k in step.operands]
            if step.function in UNARY:
                nodes.append(UNARY[step.function][0](*operands))
            elif step.function in BINARY:
                nodes.append(BINARY[step.function][0](*operands))
            elif step.function in REDUCE:
                nodes.append(getattr(ops, step.function)(operands[0], _dims(program, step.over), keepdim=True))
            else:
                extra = {"eps": 1e-3} if step.function.endswith("norm") else {}
                nodes.append(getattr(ops, step.function)(operands[0], _dims(program, step.over), **extra))
        fusion.output(*(nodes[k] for k in program.outputs))
    return fusion


# --- by torch ----------------------------------------------------------------------------------------------------------


class Eager:
    """The same steps with plain torch, one row after the other. A node is [values of its place, width]."""

    def __init__(self, rows: Rows) -> None:
        self.counts: dict[tuple[str, str], list[int]] = {("row", "position"): list(rows.lengths)}
        if rows.groups is not None:
            self.counts["group", "row"] = list(rows.groups)
            self.counts["group", "position"] = list(rows.merged.lengths)

    def spread(self, x: Tensor, place: str, to: str) -> Tensor:
        return x if place == to else x.repeat_interleave(torch.tensor(self.counts[place, to], dtype=torch.int64), 0)

    def rows(self, x: Tensor, place: str) -> tuple[Tensor, ...]:
        return x.split(self.counts[place, "position"])

    def run(self, program: Program, x: Tensor) -> list[Tensor]:
        nodes, places = [x], ["position"]
        for step in program.steps:
            operands = [nodes[k] for k in step.operands]
            place = min((places[k] for k in step.operands), key=PLACES.index)
            if step.function in UNARY:
                nodes.append(UNARY[step.function][1](*operands))
            elif step.function in BINARY:
                wide = [self.spread(nodes[k], places[k], place) for k in step.operands]
                nodes.append(BINARY[step.function][1](*wide))
            elif step.over == "features":
                nodes.append(_apply(step.function, operands[0], 1))
            else:
                owner = "row" if step.over == "rows" else "group"
                parts = [_apply(step.function, part, 0) for part in self.rows(operands[0], owner)]
                nodes.append(torch.cat([operands[0][:0], *parts]))
                place = owner if step.function in REDUCE else place
            places.append(place)
        return [nodes[k] for k in program.outputs]


def _apply(name: str, x: Tensor, dim: int) -> Tensor:
    if name in REDUCE:
        return REDUCERS[name](x, (dim,)).unsqueeze(dim)
    if name in ("softmax", "log_softmax"):
        return getattr(torch, name)(x, dim)
    if x.shape[dim] == 0:
        return x
    if name == "layer_norm":
        return (x - x.mean(dim, keepdim=True)) / torch.sqrt(x.var(dim, correction=0, keepdim=True) + 1e-3)
    return x / torch.sqrt((x * x).mean(dim, keepdim=True) + 1e-3)


# --- tests -------------------------------------------------------------------------------------------------------------


def arguments(program: Program, rows: Rows) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows.total)
    x = torch.randn(rows.total, program.width, dtype=torch.float64, generator=generator)
    offsets = [torch.tensor(rows.offsets)]
    return (x, *offsets, torch.tensor(rows.group_offsets)) if rows.groups is not None else (x, *offsets)


def check(program: Program, rows: Rows, got: Any, want: list[Tensor], where: str) -> None:
    for k, (a, b) in enumerate(zip(got if isinstance(got, tuple) else (got,), want, strict=True)):
        values = a.values if isinstance(a, JaggedTensor) else a
        compare(values.reshape(b.shape), b, f"{where}, output {k} of {program} on {rows}", tolerance=(1e-7, 1e-8))


def _options(**choices: list[Any]) -> Any:
    """None stands for an option that is not given."""
    drawn = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})
    return drawn.map(lambda options: {name: value for name, value in options.items() if value is not None})


TILES = [None, 1, 3, 64]
OPTIONS: dict[str, Any] = {
    "maskless": _options(tile=TILES, keep_rows=[True, False]),
    "masked": _options(tile=TILES, rows=[None, 1, 3, 16]),
    "persistent_dynamic": _options(tile=TILES, chunk=[None, 1, 3, 5, 64]),
}


def _check_all(data: st.DataObject, backend: str) -> None:
    program = data.draw(programs())
    some = [data.draw(structures(program.levels)) for _ in range(3)]
    fusion = record(program)
    for strategy in STRATEGIES:
        options = data.draw(OPTIONS[strategy])
        compiled = fusion.compile(backend, strategy, **options)
        for rows in some:
            args = arguments(program, rows)
            with one_thread():
                got = compiled(*args)
            check(program, rows, got, Eager(rows).run(program, args[0]), f"{backend}, {strategy} {options}")


@pytest.mark.filterwarnings("ignore::UserWarning")
@hypothesis.settings(max_examples=400 if FULL else 40)
@hypothesis.given(st.data())
def test_reference_agrees_with_torch_under_every_plan(data: st.DataObject) -> None:
    _check_all(data, "reference")


@pytest.mark.filterwarnings("ignore::UserWarning")
@hypothesis.settings(max_examples=150 if FULL else 10)
@hypothesis.given(st.data())
def test_cpp_agrees_with_torch_under_every_plan(data: st.DataObject) -> None:
    _check_all(data, "cpp")
