"""Tile programs: how they read, and which ones lowering would not understand.

In: small programs written out by hand. Out: failures of `verify` and of the text form.
"""

from __future__ import annotations

import pytest
import torch

from serrate.errors import VerificationError
from serrate.ir import IterDomain, ParallelType, RaggedIterDomain, combine, partition, split
from serrate.ir.reductions import reduction
from serrate.ir.tile import (
    GRID,
    LANES,
    SERIAL,
    Accumulate,
    Loop,
    Phase,
    Statement,
    Store,
    TileProgram,
    chain,
    map_leaves,
    nest,
    verify,
    walk,
)
from serrate.ir.values import Role, Tensor, call, constant, read

D = IterDomain(10, name="d")
C, R = partition(D, [0, 3, 8, 10], names=("c", "r"))
X = Tensor("X", torch.float32, (C, R), (D,), Role.INPUT)
S = Tensor("S", torch.float32, (C,), (C,))
Y = Tensor("Y", torch.float32, (C, R), (D,), Role.OUTPUT)

TOTAL = Accumulate((S,), (C,), reduction("sum"), (read(X, (C, R)),), (R,))
SCALE = Store(Y, (C, R), call("div", read(X, (C, R)), read(S, (C,)), dtype=torch.float32))
COPY = Store(Y, (C, R), read(X, (C, R)))


def program(*phases: Phase) -> TileProgram:
    return TileProgram("p", (X,), (Y,), phases)


def copied(*loops: tuple[IterDomain, object]) -> TileProgram:
    return program(Phase("Y", nest(loops, COPY)))  # type: ignore[arg-type]


NORMALISE = program(Phase("S", nest(((C, GRID), (R, SERIAL)), TOTAL)), Phase("Y", nest(((C, GRID), (R, SERIAL)), SCALE)))


def test_text() -> None:
    assert str(NORMALISE) == (
        "program p\n"
        "  input  X: float32[i.c{3}, ragged.r{[3, 5, 2]}]\n"
        "  output Y: float32[i.c{3}, ragged.r{[3, 5, 2]}]\n"
        "  phase S:\n"
        "    grid i.c{3}:\n"
        "      serial ragged.r{[3, 5, 2]}:\n"
        "        S[c] sum= X[c, r] over r\n"
        "  phase Y:\n"
        "    grid i.c{3}:\n"
        "      serial ragged.r{[3, 5, 2]}:\n"
        "        Y[c, r] = div(X[c, r], S[c])\n"
    )


def test_text_of_whole_states_and_broadcast_dims() -> None:
    m, t = (Tensor(name, torch.float32, (C,), (C,)) for name in "MT")
    merged = Accumulate((m, t), (None,), reduction("softmax"), (read(m, (C,)), read(t, (C,))), (C,), merge=True)
    assert str(merged) == "M[0], T[0] merge softmax= M[c], T[c] over c"


@pytest.mark.parametrize(
    "legal",
    [
        NORMALISE,
        copied((C, GRID), (R, SERIAL)),
        copied((C, GRID), (R, LANES)),
        copied((D, LANES)),
        copied((C, SERIAL), *zip(split(R, 2), (SERIAL, LANES), strict=True)),
        copied((combine(C, split(R, 2)[0]), GRID), (split(R, 2)[1], LANES)),
    ],
    ids=str,
)
def test_legal_programs_pass(legal: TileProgram) -> None:
    verify(legal)


def test_reading_before_writing_is_refused() -> None:
    with pytest.raises(VerificationError, match="phase Y: S is read before it is written"):
        verify(NORMALISE.with_phases(NORMALISE.phases[::-1]))
    with pytest.raises(VerificationError, match="phase Y: S is read before it is written"):
        verify(NORMALISE.with_phases(NORMALISE.phases[1:]))


@pytest.mark.parametrize(
    "kinds", [(LANES, SERIAL), (SERIAL, GRID), (LANES, GRID)], ids=lambda kinds: " around ".join(k.value for k in kinds)
)
def test_loops_of_the_wrong_order_are_refused(kinds: tuple[object, object]) -> None:
    outer, inner = split(D, 4)
    with pytest.raises(VerificationError, match=r"loops around `Y\[c, r\] = X\[c, r\]` are not grid, then serial, then lanes"):
        verify(copied((outer, kinds[0]), (inner, kinds[1])))


def test_loops_of_another_kind_are_refused() -> None:
    with pytest.raises(VerificationError, match="loops run as grid, serial or lanes, got vectorize"):
        verify(copied((C, GRID), (R, ParallelType.VECTORIZE)))


def test_rows_whose_length_depends_on_a_lane_are_refused() -> None:
    with pytest.raises(VerificationError, match=r"the extent of ragged.r\{\[3, 5, 2\]\} depends on a lane"):
        verify(copied((C, LANES), (R, LANES)))


def test_an_output_that_is_never_written_is_refused() -> None:
    with pytest.raises(VerificationError, match="output Y is never written"):
        verify(NORMALISE.with_phases(NORMALISE.phases[:1]))


def test_what_phases_read_and_write() -> None:
    first, second = NORMALISE.phases
    assert (first.reads, first.writes, first.leaves) == ({X}, {S}, (TOTAL,))
    assert (second.reads, second.writes) == ({X, S}, {Y})
    assert NORMALISE.scratch == (S,)


def test_walk_gives_the_loops_around_each_statement() -> None:
    (phase,) = copied((C, GRID), (R, SERIAL)).phases
    found = [(s, [loop.domain for loop in loops]) for s, loops in walk(phase.body)]
    assert [loops for _, loops in found] == [[], [C], [C, R]]
    assert found[-1][0] is COPY


def test_chain_is_for_perfect_nests() -> None:
    (phase,) = copied((C, GRID), (R, SERIAL)).phases
    found = chain(phase)
    assert found is not None
    assert ([loop.domain for loop in found[0]], found[1]) == ([C, R], COPY)
    two: tuple[Statement, ...] = (Loop(C, GRID, (COPY, COPY)),)
    assert chain(Phase("two", two)) is None
    assert chain(Phase("none", ())) is None
    assert chain(Phase("empty", (Loop(C, GRID, ()),))) is None


def test_map_leaves_keeps_the_loops() -> None:
    (phase,) = copied((C, GRID), (R, SERIAL)).phases
    zero = Store(Y, (C, R), constant(0.0, torch.float32))
    assert Phase("Y", map_leaves(phase.body, lambda _: zero)).leaves == (zero,)
    assert isinstance(R, RaggedIterDomain)
