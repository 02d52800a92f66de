"""Reductions that no stage has heard of, defined here by lift and combine alone, on every backend, strategy and tile.

Expected results come from Python loops over the elements of each row, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from serrate import ir, ops
from serrate.errors import ScheduleError
from serrate.frontend.ops.reducing import reduced
from serrate.ir.reductions import Reduction, State, States, softmax
from serrate.ir.values import Value, argument, call, constant
from serrate.lower.stages import stages
from serrate.schedule.primitives import reorder, rfactor, split, swizzle

LENGTHS = (5, 0, 1, 13, 2, 7)
OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
BACKENDS = ("reference", "cpp", "triton")
PLANS: tuple[tuple[str, dict[str, int]], ...] = (
    ("maskless", {"tile": 4}),
    ("masked", {"tile": 4, "rows": 2}),
    ("persistent_dynamic", {"tile": 2, "chunk": 4}),
)


def _f(function: str, *args: Value) -> Value:
    return call(function, *args, dtype=args[0].dtype)


def _zero(dtype: torch.dtype) -> float:
    return 0


def _one(dtype: torch.dtype) -> float:
    return 1


# --- first and last: three states, the order is all there is to it ---------------------------------------------------------


def _lift_ends(x: Value) -> States:
    return constant(1.0, x.dtype), x, x


def _combine_ends(a: States, b: States) -> States:
    zero = constant(0.0, a[0].dtype)
    some, more = call("gt", a[0], zero, dtype=torch.bool), call("gt", b[0], zero, dtype=torch.bool)
    first = call("where", some, a[1], b[1], dtype=a[1].dtype)
    return _f("add", a[0], b[0]), first, call("where", more, b[2], a[2], dtype=a[2].dtype)


ENDS = Reduction("ends", (State("count", _zero), State("first", _zero), State("last", _zero)), _lift_ends, _combine_ends)


def _ends(xs: Sequence[float]) -> tuple[float, ...]:
    return (len(xs), xs[0], xs[-1]) if xs else (0, 0, 0)


# --- products of 2x2 matrices: every state needs all the others as they were, and the order matters ------------------------


def _lift_matrix(x: Value) -> States:
    return constant(1.0, x.dtype), x, _f("mul", x, constant(0.5, x.dtype)), constant(0.0, x.dtype)


def _combine_matrices(a: States, b: States) -> States:
    def entry(i: int, j: int) -> Value:
        return _f("add", _f("mul", a[2 * i], b[j]), _f("mul", a[2 * i + 1], b[2 + j]))

    return entry(0, 0), entry(0, 1), entry(1, 0), entry(1, 1)


MATRICES = Reduction(
    "matrices", (State("a", _one), State("b", _zero), State("c", _zero), State("d", _one)), _lift_matrix, _combine_matrices
)


def _matrices(xs: Sequence[float]) -> tuple[float, ...]:
    a, b, c, d = 1.0, 0.0, 0.0, 1.0
    for x in xs:
        a, b, c, d = a + b * 0.5 * x, a * x, c + d * 0.5 * x, c * x
    return a, b, c, d


# --- complex products: said to commute, so that lanes may take every n-th element ------------------------------------------


def _lift_turn(x: Value) -> States:
    return _f("cos", x), _f("sin", x)


def _combine_turns(a: States, b: States) -> States:
    real = _f("sub", _f("mul", a[0], b[0]), _f("mul", a[1], b[1]))
    return real, _f("add", _f("mul", a[0], b[1]), _f("mul", a[1], b[0]))


TURNS = Reduction("turns", (State("real", _one), State("imaginary", _zero)), _lift_turn, _combine_turns, commutative=True)


def _turns(xs: Sequence[float]) -> tuple[float, ...]:
    return math.cos(math.fsum(xs)), math.sin(math.fsum(xs))


# --- the last element: one state, no operator ------------------------------------------------------------------------------


def _lift_last(x: Value) -> States:
    return (_f("add", x, constant(10.0, x.dtype)),)


def _combine_last(a: States, b: States) -> States:
    return (call("where", call("ne", b[0], constant(0.0, b[0].dtype), dtype=torch.bool), b[0], a[0], dtype=a[0].dtype),)


LAST = Reduction("last", (State("last", _zero),), _lift_last, _combine_last)


def _last(xs: Sequence[float]) -> tuple[float, ...]:
    return (xs[-1] + 10 if xs else 0.0,)


OWN: dict[str, tuple[Reduction, Callable[[Sequence[float]], tuple[float, ...]]]] = {
    "ends": (ENDS, _ends),
    "matrices": (MATRICES, _matrices),
    "turns": (TURNS, _turns),
    "last": (LAST, _last),
}


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _program(kind: Reduction, width: int | None, dims: tuple[int, ...]) -> ir.Fusion:
    with ir.Fusion(kind.name) as f:
        x = f.input((None,) if width is None else (None, width), torch.float32)
        offsets = f.input((None,), torch.int64)
        f.output(*reduced(kind, ops.as_nested(x, offsets), dims, torch.float32, torch.float32))
    return f


def _rows(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[a:b] for a, b in zip(OFFSETS.tolist(), OFFSETS.tolist()[1:], strict=False)]


def _expected(f: Callable[[Sequence[float]], tuple[float, ...]], x: torch.Tensor, dims: tuple[int, ...]) -> list[torch.Tensor]:
    """What every state is, from lists of the elements that are reduced together."""
    rows = _rows(x)
    if x.ndim == 1:
        found: Any = [f(row.tolist()) for row in rows] if dims == (1,) else f(x.tolist())
    elif dims == (1,):
        found = [[f(row[:, k].tolist()) for k in range(x.shape[1])] for row in rows]
    elif dims == (1, 2):
        found = [f(row.reshape(-1).tolist()) for row in rows]
    elif dims == (2,):
        found = [f(line.tolist()) for line in x]
    elif dims == (0,):
        reach = range(max(LENGTHS))
        found = [[f([float(r[p, k]) for r in rows if p < len(r)]) for k in range(x.shape[1])] for p in reach]
    else:
        found = f(x.reshape(-1).tolist())
    return list(torch.tensor(found).unbind(-1))


SHAPES: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "rows": (3, (1,)),
    "rows_of_numbers": (None, (1,)),
    "rows_and_columns": (3, (1, 2)),
    "columns": (3, (2,)),
    "across_rows": (3, (0,)),
    "everything": (3, (0, 1, 2)),
}


SOME = (
    ("ends", "rows"),
    ("matrices", "rows_and_columns"),
    ("turns", "rows"),
    ("ends", "everything"),
    ("last", "rows_of_numbers"),
)
CASES = [pytest.param(n, s, marks=() if (n, s) in SOME else pytest.mark.slow) for n in OWN for s in SHAPES]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "shape"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_lift_and_combine_are_enough(name: str, backend: str, shape: str) -> None:
    (kind, plain), (width, dims) = OWN[name], SHAPES[shape]
    x = _values(int(OFFSETS[-1]), *(() if width is None else (width,)))
    wanted = _expected(plain, x, dims)
    for strategy, options in PLANS:
        results = _program(kind, width, dims).compile(backend, strategy=strategy, **options)(x, OFFSETS)
        for found, right in zip(results if isinstance(results, tuple) else (results,), wanted, strict=True):
            given = found if isinstance(found, torch.Tensor) else found.values
            torch.testing.assert_close(given, right.to(given.dtype))


def test_rows_of_usual_tiles() -> None:
    lengths = (3000, 1, 5000)
    x, offsets = _values(sum(lengths)) * 0.01, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    for kind, plain in (OWN["ends"], OWN["matrices"]):
        for strategy in ("maskless", "masked", "persistent_dynamic"):
            found = torch.stack(_program(kind, None, (1,)).compile("cpp", strategy=strategy)(x, offsets), -1)
            right = [plain(row.tolist()) for row in x.split(lengths)]
            torch.testing.assert_close(found, torch.tensor(right), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_statistics_have_any_number_of_totals(backend: str) -> None:
    """What attention carries: the maximum, the sum of powers, and powers times something."""
    x, weight = _values(int(OFFSETS[-1]), 2), _values(int(OFFSETS[-1]), 2).flip(0)
    x[3] = -math.inf
    with ir.Fusion("weighed") as f:
        a, w, offsets = f.input((None, 2), torch.float32), f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        rows, weights = ops.as_nested(a, offsets), ops.as_nested(w, offsets)
        one = constant(1.0, torch.float32)
        f.output(*reduced(softmax(2), rows, (1,), torch.float32, torch.float32, one, weights.at(rows.domains)))
    powers = [(row - row.amax(0)).exp() if len(row) else row for row in _rows(x)]
    maxima = [row.amax(0) if len(row) else torch.full((2,), torch.finfo(torch.float32).min) for row in _rows(x)]
    totals = [p.sum(0) for p in powers]
    weighed = [(p * w).sum(0) for p, w in zip(powers, _rows(weight), strict=True)]
    for strategy, options in PLANS:
        results = f.compile(backend, strategy=strategy, **options)(x, weight, OFFSETS)
        for found, right in zip(results, (maxima, totals, weighed), strict=True):
            torch.testing.assert_close(found, torch.stack(right))


def _phase(kind: Reduction) -> Any:
    """A program that reduces rows and their columns, and the name of the phase that does."""
    program = stages(_program(kind, 4, (1, 2)))[0]
    return program, program.phases[0].name


def test_order_is_kept_where_it_matters() -> None:
    program, name = _phase(ENDS)
    with pytest.raises(ScheduleError, match="depends on the order of elements"):
        reorder(program, name, "c0", "d1", "r0")
    with pytest.raises(ScheduleError, match="d1 is not the outermost loop it reduces"):
        rfactor(program, name, "d1")
    rfactor(program, name, "r0")
    cut = split(split(program, name, "d1", 4), name, "d1i", 2)
    with pytest.raises(ScheduleError, match="cannot be permuted"):
        swizzle(cut, name, "d1ii", "d1io")
    program, name = _phase(TURNS)
    reorder(program, name, "c0", "d1", "r0")
    rfactor(program, name, "d1")


def test_definitions_can_be_read() -> None:
    assert ENDS.text.splitlines()[0] == "lift(x) = 1.0, x, x"
    assert "count = add(a.count, b.count)" in ENDS.text
    assert softmax(2).text.startswith("lift(x, weight1, weight2) = x, weight1, weight2")
    a, b = argument("a", torch.float32), argument("b", torch.float32)
    assert [str(v) for v in TURNS.combine((a, b), (b, a))] == ["sub(mul(a, b), mul(b, a))", "add(mul(a, a), mul(b, b))"]
