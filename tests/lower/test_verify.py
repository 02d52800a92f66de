"""What a legal loop program is: every rule, and a program that breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from serrate import ir, ops
from serrate.errors import VerificationError
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr, Less, const, symbol
from serrate.ir.loops import (
    Assign,
    Bind,
    Declare,
    Dot,
    For,
    If,
    Lane,
    Local,
    LoopKernel,
    LoopProgram,
    Node,
    Reduce,
    Running,
    While,
    Write,
    held,
    load,
    number,
)
from serrate.ir.tile import GRID, SERIAL
from serrate.ir.values import Role, Tensor, constant
from serrate.lower.pipeline import loops_of, passes
from serrate.lower.stages import stages
from serrate.lower.verify import verify_loops
from serrate.schedule.strategies import plan
from serrate.schedule.target import CPU, GPU

N = symbol("n")


def tensor(name: str, role: Role) -> Tensor:
    dims = (IterDomain(N, name=f"{name}_0"), IterDomain(8, name=f"{name}_1"))
    return Tensor(name, torch.float32, dims, dims, role)


X, Y, KEPT = tensor("x", Role.INPUT), tensor("y", Role.OUTPUT), tensor("kept", Role.SCRATCH)
C, R = symbol("c", 0), symbol("r", 0)
D, K = Lane(symbol("d", 0, 7), 8), Lane(symbol("k", 0, 3), 4)
TOTAL = Local("total", torch.float32, (D,))
COUNT = Local("count", torch.int64, ())


def loop(s: Expr, *body: Node, grid: bool = False) -> For:
    return For(s, N, GRID if grid else SERIAL, body, N)  # type: ignore[arg-type]


def program(*body: Node, before: tuple[Node, ...] = ()) -> LoopProgram:
    kernels = (*((LoopKernel("first", before),) if before else ()), LoopKernel("p", body))
    return LoopProgram("p", kernels, (X,), (Y,), (KEPT,), (), (N,))


DECLARED: tuple[Node, ...] = (Declare(TOTAL, 0.0), Declare(COUNT, 0))
ADDS = Reduce((D,), (), TOTAL, "sum", load(X, (R, D.symbol)))
STORES = Write((D,), (), Y, (C, D.symbol), held(TOTAL))
GUARDED = replace(STORES, guard=(Less(D.symbol + C, N),))


def worker(*body: Node) -> LoopProgram:
    return program(loop(C, *DECLARED, *body, grid=True))


LEGAL = {
    "a sum": worker(loop(R, ADDS), STORES),
    "a guard": worker(loop(R, ADDS), GUARDED),
    "a number that is an index": worker(
        Assign((), (), COUNT, constant(1, torch.int64)), replace(STORES, index=(symbol("count"), D.symbol))
    ),
    "a branch": worker(If((Less(C, N),), (STORES,), ())),
    "an unbounded loop": worker(While((Bind(R, C + 1, (), ()),), (Less(R, N),), (ADDS,)), STORES),
    "grids side by side": program(loop(C, loop(R, grid=True), loop(symbol("q", 0), grid=True), grid=True)),
    "scratch": program(
        loop(C, *DECLARED, Write((D,), (), Y, (C, D.symbol), load(KEPT, (C, D.symbol))), grid=True),
        before=(loop(C, *DECLARED, replace(STORES, tensor=KEPT), grid=True),),
    ),
}

ILLEGAL: dict[str, tuple[LoopProgram, str]] = {
    "a symbol of no loop": (worker(ADDS, STORES), "r is used before it is known"),
    "a symbol after its loop": (worker(loop(R, ADDS), replace(STORES, index=(R, D.symbol))), "r is used before it is known"),
    "a guard by an unknown": (worker(replace(STORES, guard=(Less(R, N),))), "r is used before it is known"),
    "a guard of a read by an unknown": (
        worker(replace(ADDS, value=load(X, (C, D.symbol), (Less(R, N),)))),
        "r is used before it is known",
    ),
    "a block that is not declared": (program(loop(C, STORES, grid=True)), "total is used before it is declared"),
    "a block of another branch": (
        program(loop(C, If((Less(C, N),), DECLARED, ()), STORES, grid=True)),
        "total is used before it is declared",
    ),
    "a block of other lanes": (
        worker(replace(ADDS, local=Local("total", torch.float32, (K,)), lanes=(K,), value=load(X, (C, K.symbol)))),
        "total<k:4> is declared as total<d:8>",
    ),
    "a block of another dtype": (
        worker(Assign((D,), (), Local("total", torch.float64, (D,)), constant(0.0, torch.float64))),
        "total is declared as torch.float32",
    ),
    "a lane twice": (worker(replace(STORES, lanes=(D, D))), "must be distinct and not empty"),
    "a lane that writes in turn": (
        worker(Assign((D, K), (), TOTAL, load(X, (C, K.symbol)))),
        "several lanes would write one element",
    ),
    "a block written nowhere": (worker(Reduce((K,), (), TOTAL, "sum", load(X, (C, K.symbol)))), "along d is undefined"),
    "a float in an integer": (
        worker(Reduce((D,), (), COUNT, "sum", load(X, (C, D.symbol)))),
        "count is torch.int64, but is assigned a float",
    ),
    "a grid in a serial loop": (program(loop(R, loop(C, grid=True))), "may be nested only in grid loops"),
    "a grid in a branch": (program(If((Less(const(0), N),), (loop(C, grid=True),), ())), "may be nested only in grid loops"),
    "a write to an argument": (worker(replace(STORES, tensor=X)), "x is written, but is neither a result nor scratch"),
    "a tensor of another program": (worker(replace(STORES, tensor=tensor("z", Role.OUTPUT))), "z is not a tensor of the program"),
    "too few indices": (worker(replace(STORES, index=(C,))), "y has 2 dims in memory, but 1 indices"),
    "an operator that blocks do not have": (
        worker(loop(R, replace(ADDS, operator="welford"))),
        "unknown block operator welford",
    ),
    "a product of two lanes": (
        worker(Dot((D, K), (), TOTAL, load(X, (C, D.symbol)), load(X, (C, K.symbol)))),
        "a product needs lanes (rows, columns, depth)",
    ),
    "a running value along its own carry": (
        worker(Running((D,), (), TOTAL, TOTAL, D, "sum", load(X, (C, D.symbol)))),
        "a lane of its statement that its carry lacks",
    ),
    "scratch that another worker writes": (
        worker(replace(STORES, tensor=KEPT), replace(STORES, value=load(KEPT, (C, D.symbol)))),
        "kept is read before a kernel has written it",
    ),
    "a name after the branch that makes it": (
        worker(If((Less(C, N),), (Bind(R, C + 1, (), ()),), ()), replace(STORES, index=(R, D.symbol))),
        "r is used before it is known",
    ),
    "a number before it is worked out": (
        program(loop(C, Declare(TOTAL, 0.0), Write((), (), Y, (symbol("count"), C), number(C)), grid=True)),
        "count is used before it is known",
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_programs_pass(name: str) -> None:
    verify_loops(LEGAL[name], complete=True)


@pytest.mark.parametrize("name", ILLEGAL)
def test_programs_that_break_a_rule_are_refused(name: str) -> None:
    broken, message = ILLEGAL[name]
    with pytest.raises(VerificationError) as raised:
        verify_loops(broken, complete=True)
    assert message in str(raised.value)


@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_pass_that_breaks_a_program_is_noticed(target: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from serrate.lower import pipeline

    with ir.Fusion() as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    (naive,) = stages(f)
    scheduled = plan(naive, "maskless", CPU).apply(naive)  # type: ignore[arg-type]

    def forgets(program: LoopProgram) -> LoopProgram:
        def without(body: tuple[Node, ...]) -> tuple[Node, ...]:
            inner = (replace(n, body=without(n.body)) if isinstance(n, For) else n for n in body)
            return tuple(n for n in inner if not isinstance(n, Declare))

        kernels = tuple(replace(k, body=without(k.body)) for k in program.kernels)
        return replace(program, kernels=kernels)

    monkeypatch.setattr(pipeline, "keep_in_bounds", forgets)
    with pytest.raises(VerificationError, match="is used before it is declared"):
        pipeline.lower(scheduled, "f", (), target)  # type: ignore[arg-type]


def test_a_pass_with_nothing_to_do_returns_what_it_was_given() -> None:
    with ir.Fusion() as f:
        x = f.input((None, 4), torch.float32)
        f.output(ops.relu(x))
    (naive,) = stages(f)
    program = loops_of(plan(naive, "maskless", CPU).apply(naive), "f", ())  # type: ignore[arg-type]
    for name, each in passes(CPU):
        assert (each(program) is program) == (name != "collect"), name
