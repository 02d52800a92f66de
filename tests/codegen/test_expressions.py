"""Index expressions in every backend: printed, built and run, they are the integers that Python says they are.

In: random expressions, and programs whose loops need floor division, xor and the search of one row of offsets. Out: failures
where a backend computes another number.
"""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
import torch

import serrate.codegen.cpp as cpp
from serrate.codegen.cpp.values import index_text
from serrate.engine import build
from serrate.ir import IterDomain, ParallelType, merge, partition, regroup, resize, split, swizzle
from serrate.ir.expr import Array, Environment, Expr, maximum, minimum, search, symbol
from serrate.ir.tile import GRID, LANES, SERIAL, Phase, Store, TileProgram, nest
from serrate.ir.values import Role, Tensor, read
from serrate.runtime.arrays import derive
from serrate.runtime.compiler import find_compiler
from serrate.schedule.plan import Plan

BACKENDS = ["reference", "cpp", "triton"]
SYMBOLS = [symbol("x", 0, 40), symbol("y", -30, 30), symbol("z", -5, 90), symbol("p", 1, 4), symbol("q", 1, 3)]
PARTS = Array("parts", (0, 3, 7, 0, 0, 5, 0, 2, 2))


def random_expression(rng: random.Random, depth: int) -> Expr:
    if depth == 0:
        return rng.choice(SYMBOLS) + rng.randint(-3, 3)
    a, b = random_expression(rng, depth - 1), random_expression(rng, depth - 1)
    size = rng.choice((2, 3, 4, 7, 8, SYMBOLS[-1], SYMBOLS[-2] * SYMBOLS[-1]))
    operations = [
        a + b,
        a - b * 2,
        a * b,
        a // size,
        a % size,
        a ^ b,
        minimum(a, b),
        maximum(a, b),
        search(PARTS, 2, a, b % 3 * 3),
    ]
    return rng.choice(operations)


def test_random_expressions_in_cpp(tmp_path: Path) -> None:
    rng = random.Random(7)
    expressions = [random_expression(rng, rng.randint(1, 4)) for _ in range(300)]
    prelude = (Path(cpp.__file__).parent / "prelude.h").read_text()
    data = f"static const i64 parts[] = {{{', '.join(map(str, PARTS.data or ()))}}};"
    body = "\n".join(f"  out[{k}] = {index_text(e, {PARTS: 'parts'})};" for k, e in enumerate(expressions))
    source, library = tmp_path / "expressions.cpp", tmp_path / "expressions.so"
    source.write_text(f'{prelude}\n{data}\nextern "C" void run(i64 x, i64 y, i64 z, i64 p, i64 q, i64* out) {{\n{body}\n}}\n')
    find_compiler().build(source, library)
    run = ctypes.CDLL(str(library)).run
    out = (ctypes.c_longlong * len(expressions))()
    for _ in range(40):
        at = [rng.randint(*s.bounds) for s in SYMBOLS]  # type: ignore[arg-type]
        run(*map(ctypes.c_longlong, at), out)
        assert list(out) == [clamped(e, at) for e in expressions]


def clamped(e: Expr, at: list[int]) -> int:
    """The value where a position past the end belongs to the last part, as generated code says."""

    def last(array: Array, count: int, position: int, first: int) -> int:
        return sum(end <= position for end in (array.data or ())[first + 1 : first + count])

    return int(e.evaluate(Environment(dict(zip(SYMBOLS, at, strict=True)), search=last)))


def test_a_dividend_that_may_be_negative_is_rounded_down() -> None:
    x, y = SYMBOLS[:2]
    assert index_text(x // 4, {}) == "x / 4"
    assert index_text(y // 4, {}) == "floor_divide(y, 4)"
    assert index_text(x % 4, {}) == "x % 4"
    assert index_text((y - 1) % 4, {}) == "floor_rest(y + 3, 4)"
    assert index_text(x ^ y, {}) == "x ^ y"
    assert index_text(search(PARTS, 2, x, x * 3), {PARTS: "parts"}) == "owner(parts + (x * 3), 2, x)"


def run(
    loops: list[IterDomain],
    target: list[IterDomain],
    source: list[IterDomain],
    backend: str,
    inner: ParallelType = SERIAL,
) -> list[list[float]]:
    """out[target] = x[source] under the loops; x counts from 1 and out is -1 where nothing is written."""
    out = Tensor("out", torch.float32, tuple(target), tuple(target), Role.OUTPUT)
    x = Tensor("x", torch.float32, tuple(source), tuple(source), Role.INPUT)
    kinds = tuple((d, GRID if k == 0 else inner) for k, d in enumerate(loops))
    phase = Phase("out", nest(kinds, Store(out, tuple(target), read(x, tuple(source)))))
    program = build(TileProgram("moved", (x,), (out,), (phase,)), Plan("by hand", ()), "moved", backend, lambda array: True)
    given = torch.arange(1.0, 1 + number(source[0]) * number(source[1])).reshape(number(source[0]), number(source[1]))
    made = torch.full((number(target[0]), number(target[1])), -1.0)
    program([given, made], [derive(a, {}, {}, torch.device("cpu")) for a in program.program.arrays], [])
    return made.tolist()  # type: ignore[no-any-return]


def number(domain: IterDomain) -> int:
    assert isinstance(domain.extent, int)
    return domain.extent


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_before_the_first(backend: str) -> None:
    a, b = IterDomain(2, name="a"), IterDomain(3, name="b")
    assert run([resize(merge(a, b), 2, 3)], [a, b], [a, b], backend) == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inner", [SERIAL, LANES])
def test_inner_positions_before_the_first(inner: ParallelType, backend: str) -> None:
    # Wide enough for the lanes to be a power of two, as Triton wants them.
    a, b = IterDomain(3, name="a"), IterDomain(5, name="b")
    wanted = torch.arange(1.0, 16).reshape(3, 5).tolist()
    assert run([a, resize(b, 2, 1)], [a, b], [a, b], backend, inner) == wanted
    assert run([resize(a, 1, 1), resize(b, 0, 3)], [a, b], [a, b], backend, inner) == wanted
    assert run([a, resize(b, 3, 0)], [a, b], [a, b], backend, inner) == wanted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inner", [SERIAL, LANES])
@pytest.mark.parametrize("size", [7, 8, 13, 14])
def test_outer_parts_inside_inner_ones(size: int, inner: ParallelType, backend: str) -> None:
    """A step of the innermost loop is several positions, and the end lies between two steps."""
    a, b = IterDomain(3, name="a"), IterDomain(size, name="b")
    outer, rest = split(b, 4, inner=False)
    assert run([a, rest, outer], [a, b], [a, b], backend, inner) == torch.arange(1.0, 1 + 3 * size).reshape(3, size).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_swizzled(backend: str) -> None:
    a, b = IterDomain(2, name="a"), IterDomain(4, name="b")
    x = swizzle(a, b)[1]
    assert run([a, b], [a, x], [a, b], backend) == [[1, 2, 3, 4], [6, 5, 8, 7]]
    assert run([a, *split(x, 3)], [a, b], [a, b], backend) == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inner", [SERIAL, LANES])
def test_the_part_of_a_row_is_found_in_that_row(inner: ParallelType, backend: str) -> None:
    g, d = IterDomain(2, name="g"), IterDomain(8, name="d")
    c, _ = partition(d, [[0, 1, 1, 8], [0, 2, 4, 8]], under=[g])
    for loops in ([g, d], [d, g]):
        assert run(loops, [g, d], [g, c], backend, inner) == [[1, 3, 3, 3, 3, 3, 3, 3], [4, 4, 5, 5, 6, 6, 6, 6]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_regrouped(backend: str) -> None:
    g, d = IterDomain(2, name="g"), IterDomain(5, name="d")
    c, r = partition(d, [[0, 1, 1, 5], [0, 2, 4, 5]], under=[g])
    moved = regroup(g, c, r)[1]
    assert run([c, moved], [g, d], [g, d], backend) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert run([*split(c, 2), *split(moved, 2)], [g, d], [g, d], backend) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
