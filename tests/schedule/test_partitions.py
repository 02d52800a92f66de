"""Loops partitioned by a schedule: ragged ones again, components, and loops under others; by numbers and by runtime offsets.

In: fusions whose loops are partitioned by hand, then changed further. Out: failures that name the backend. Plain torch is the
oracle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from serrate import ops
from serrate.errors import DomainError, ScheduleError, StructureMismatch
from serrate.ir import Fusion
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor

pytestmark = pytest.mark.triton
T = torch.tensor
Change = Callable[[TensorView], object]
BACKENDS = ("reference", "cpp", "triton")

ROWS, PARTS = T([0, 3, 3, 10]), T([[0, 1, 3, 3], [0, 0, 0, 0], [0, 2, 4, 7]])
GROUPS = T([[0, 1, 3, 7], [0, 0, 2, 7]])
CHANGES: dict[str, Change] = {
    "as it is": lambda y: y,
    "tiles": lambda y: y.split(2, 2).parallelize(3, "lanes").parallelize(0, "grid"),
    "parts on the grid": lambda y: y.parallelize(0, "grid").parallelize(1, "grid"),
    "component and part merged": lambda y: y.merge(0),
    "one list of all parts": lambda y: y.merge(0).combine(0),
    "tiles of all parts of a row": lambda y: y.split(2, 2).combine(1).parallelize(0, "grid").parallelize(2, "lanes"),
    "one list of all tiles": lambda y: y.split(2, 2).combine(1).combine(0).split(0, 3).parallelize(0, "grid"),
}


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def check(f: Fusion, want: torch.Tensor, *args: torch.Tensor) -> None:
    for backend in BACKENDS:
        found: Any = f.compile(backend)(*args)
        found = found.values if isinstance(found, JaggedTensor) else found
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5, msg=lambda m, b=backend: f"{b}: {m}")


@pytest.mark.parametrize("name", CHANGES)
def test_a_ragged_loop_partitioned_again_by_numbers(name: str) -> None:
    with Fusion() as f:
        y = ops.exp(f.input((10,), torch.float32))
        f.output(y)
    y.partition(0, ROWS).partition(1, PARTS)
    assert [str(d) for d in y.loops] == ["i.d0c{3}", "i.d0rc{3}", "ragged.d0rr{[[1, 2, 0], [0, 0, 0], [2, 2, 3]]}"]
    CHANGES[name](y)
    x = values(10)
    check(f, x.exp(), x)


@pytest.mark.parametrize("name", CHANGES)
def test_a_ragged_loop_partitioned_again_by_offsets_of_the_math(name: str) -> None:
    with Fusion() as f:
        x, rows, parts = f.input((None,), torch.float32), f.input((None,), torch.int64), f.input((None, 4), torch.int64)
        y = ops.exp(ops.as_nested(x, rows))
        total = ops.sum(ops.as_nested(y, parts, ragged_dim=1), 2)
        f.output(total)
    y.partition(1, parts)
    CHANGES[name](y)
    data = values(10)
    sizes = PARTS.diff().flatten().tolist()
    want = torch.stack([piece.exp().sum() for piece in data.split(sizes)]).view(3, 3)
    check(f, want, data, ROWS, PARTS)


@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_a_loop_partitioned_under_another(name: str, numbers: bool) -> None:
    with Fusion() as f:
        x, offsets = f.input((2, 7), torch.float32), f.input((2, 4), torch.int64)
        y = ops.exp(x)
        total = ops.sum(ops.as_nested(y, offsets, ragged_dim=1), 2)
        f.output(total)
    y.partition(1, GROUPS.tolist() if numbers else offsets)
    CHANGES[name](y)
    data = values(2, 7)
    pieces = [row.exp().split(bounds.diff().tolist()) for row, bounds in zip(data, GROUPS, strict=True)]
    want = torch.stack([torch.stack([piece.sum() for piece in row]) for row in pieces])
    check(f, want, data, GROUPS)


@pytest.mark.parametrize("numbers", [True, False])
def test_a_loop_partitioned_under_two_others(numbers: bool) -> None:
    bounds = T([[[0, 1, 4], [0, 0, 4], [0, 4, 4]], [[0, 3, 4], [0, 2, 4], [0, 1, 4]]])
    with Fusion() as f:
        x, offsets = f.input((2, 3, 4), torch.float32), f.input((2, 3, 3), torch.int64)
        y = ops.exp(x)
        f.output(ops.sum(ops.as_nested(y, offsets, ragged_dim=2), 3))
    y.partition(2, bounds if numbers else offsets)
    assert [str(d.extent) for d in (*y.loops[:3], *y.loops[3].owners)] == ["2", "3", "2", "12"]  # rows of all three
    data = values(2, 3, 4)
    rows = [row.exp().split(b.diff().tolist()) for row, b in zip(data.view(6, 4), bounds.view(6, 3), strict=True)]
    check(f, torch.stack([torch.stack([piece.sum() for piece in row]) for row in rows]).view(2, 3, 2), data, bounds)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y,
        lambda y: y.split(2, 4).parallelize(3, "lanes").parallelize(0, "grid"),
        lambda y: y.split(1, 2),
        lambda y: y.combine(1).split(1, 4).parallelize(2, "lanes"),
        lambda y: y.combine(0),
    ],
)
@pytest.mark.parametrize("numbers", [True, False])
def test_a_component_loop_partitioned_keeps_its_rows(change: Change, numbers: bool) -> None:
    with Fusion() as f:
        x, rows, groups = f.input((None,), torch.float32), f.input((4,), torch.int64), f.input((None,), torch.int64)
        y = ops.exp(ops.as_nested(x, rows))
        total = ops.sum(ops.as_nested(y, groups), (1, 2))
        f.output(total)
    y.partition(0, [0, 1, 1, 3] if numbers else groups)
    change(y)
    data = values(10)
    check(f, torch.stack([data[:3].exp().sum(), T(0.0), data[3:].exp().sum()]), data, ROWS, T([0, 1, 1, 3]))


def test_a_tensor_computed_inside_another_is_partitioned_as_that_is() -> None:
    with Fusion() as f:
        y = ops.exp(f.input((2, 7), torch.float32))
        z = ops.mul(y, 2.0)
        f.output(z)
    z.partition(1, GROUPS).split(2, 4).parallelize(0, "grid")
    y.inline_at(z, 4)
    assert [d.name for d in y.loops] == [d.name for d in z.loops] == ["d0", "d1c", "d1ro", "d1ri"]
    data = values(2, 7)
    check(f, data.exp() * 2, data)


PROGRAMS: list[tuple[Callable[[TensorView], TensorView], Callable[[torch.Tensor], torch.Tensor]]] = [
    (ops.exp, torch.exp),
    (lambda x: ops.sum(x, 1), lambda x: x.sum(1)),
    (lambda x: ops.sum(x, 0), lambda x: x.sum(0)),
    (lambda x: ops.sum(x, (0, 1)), lambda x: x.sum((0, 1))),
]


@st.composite
def partitioned(draw: st.DrawFn) -> tuple[Fusion, torch.Tensor, torch.Tensor]:
    """A program over [G, N, D] with random partitions of its loops and other changes; steps that are refused are left out."""
    x = values(*draw(st.tuples(st.integers(1, 3), st.integers(0, 7), st.integers(1, 3))))
    program, same = draw(st.sampled_from(PROGRAMS))
    with Fusion("random") as f:
        y = program(f.input(tuple(x.shape), torch.float32))
        f.output(y)

    def boundaries(length: int, parts: int) -> list[int]:
        cuts = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
        return [0, *cuts, length]

    for _ in range(draw(st.integers(1, 4))):
        axis = draw(st.integers(0, len(y.loops) - 1))
        loop, parts = y.loops[axis], draw(st.integers(1, 3))
        kind = draw(st.sampled_from(["partition", "partition", "partition under", "split", "combine", "merge"]))
        with contextlib.suppress(ScheduleError, DomainError, StructureMismatch):
            if kind == "split":
                y.split(axis, draw(st.integers(1, 4)))
            elif kind in ("combine", "merge"):
                getattr(y, kind)(axis)
            elif loop.is_ragged:
                rows = [int(loop.extent_for_component(k)) for k in range(int(loop.owners[0].extent))]  # type: ignore[attr-defined]
                y.partition(axis, [boundaries(length, parts) for length in rows])
            elif kind == "partition under" and axis and not y.loops[axis - 1].is_ragged:
                y.partition(axis, [boundaries(int(loop.extent), parts) for _ in range(int(y.loops[axis - 1].extent))])
            else:
                y.partition(axis, boundaries(int(loop.extent), parts))
    return f, x, same(x)


@given(partitioned())
def test_random_partitions_agree_or_are_refused(made: tuple[Fusion, torch.Tensor, torch.Tensor]) -> None:
    f, x, want = made
    try:
        compiled = f.compile("reference")
    except ScheduleError:
        return
    torch.testing.assert_close(compiled(x), want)


# --- what is refused -----------------------------------------------------------------------------------------------------


def test_offsets_that_may_not_fit_are_refused() -> None:
    with Fusion() as f:
        x, rows, parts = f.input((10,), torch.float32), f.input((4,), torch.int64), f.input((3, 4), torch.int64)
        y = ops.exp(ops.as_nested(x, rows))
        f.output(y)
    for numbers in ([[0, 1, 3], [0, 0, 0], [0, 2, 7]], [0, 10]):
        with pytest.raises(
            ScheduleError, match=r"partition: ragged.r0\{.*\} of T\d has lengths known only at run time; \[0, .*\] may not"
        ):
            y.partition(1, numbers)
    with pytest.raises(ScheduleError, match=r"partition: T2 does not partition rows of T1\[.*\] anywhere in the program"):
        y.partition(1, parts)


def test_rows_of_numbers_that_do_not_fit_are_refused() -> None:
    with Fusion() as f:
        y = ops.sum(f.input((2, 7), torch.float32), 0)
        f.output(y)
    with pytest.raises(
        ScheduleError, match="partition: offsets of d0 of T1 have 1 leading dims, but only 0 loops are outside it"
    ):
        y.partition(0, [[0, 1, 2]])
    with pytest.raises(ScheduleError, match="partition: T1 keeps d1 and reduces d0; a kept loop cannot depend on a reduced one"):
        y.partition(1, GROUPS)
    with pytest.raises(DomainError, match="expected one row of offsets for each of 2 components, got 1"):
        y.partition(1, [[0, 7]])
    y.partition(1, [0, 3, 7])
    with pytest.raises(DomainError, match="every component must have 2 parts, got the offsets"):
        y.partition(2, [[0, 1, 3], [0, 4]])
