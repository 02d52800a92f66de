"""Schedules made by hand run on every backend and give what the unscheduled program gives; what cannot run is refused.

In: small fusions, scheduled with the methods of `TensorView`. Out: failures that name the backend and the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from serrate import ir, ops
from serrate.errors import DomainError, ScheduleError, ShapeError, StructureMismatch
from serrate.ir import Fusion, IterType, ParallelType, merge, split
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor

pytestmark = pytest.mark.triton
BACKENDS = ("reference", "cpp", "triton")

OFFSETS = torch.tensor([0, 5, 5, 6, 23, 30])


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def data(result: Any) -> torch.Tensor:
    found: torch.Tensor = result.values if isinstance(result, JaggedTensor) else result
    return found


def agrees(f: Fusion, *args: torch.Tensor, backends: tuple[str, ...] = BACKENDS) -> None:
    """The scheduled program gives what the unscheduled one does, on every backend."""
    assert f.schedule is not None
    wanted = data(f.evaluate(*args))
    for backend in backends:
        compiled = f.compile(backend)
        plan = compiled.plan(*args)  # type: ignore[attr-defined]
        assert plan.strategy == "by_hand"
        torch.testing.assert_close(
            data(compiled(*args)), wanted, rtol=1e-5, atol=1e-5, msg=lambda m, b=backend, p=plan: f"{b}: {p}\n{m}"
        )


def rows(f: Fusion, width: int = 4) -> TensorView:
    x, offsets = f.input((None, width), torch.float32), f.input((None,), torch.int64)
    return ops.as_nested(x, offsets)


def named(f: Fusion, name: str) -> TensorView:
    return next(t for t in f.tensors if t.tensor.name == name)


def extents(view: TensorView) -> list[str]:
    return [str(d.extent) for d in view.loops]


def row_sum() -> tuple[Fusion, TensorView]:
    with Fusion("row_sum") as f:
        total = ops.sum(rows(f), 1)
        f.output(total)
    return f, total


# --- what runs -----------------------------------------------------------------------------------------------------------


def test_row_sum() -> None:
    f, total = row_sum()
    total.split(1, 8).parallelize(0, "block_x").parallelize(2, "thread_x").parallelize(3, "vectorize")
    agrees(f, values(30, 4), OFFSETS)


def test_softmax() -> None:
    with Fusion("softmax") as f:
        y = ops.softmax(rows(f), 1)
        f.output(y)
    y.split(1, 8).parallelize(0, "block_x").parallelize(2, "thread_x").parallelize(3, "lanes")
    statistics = named(f, "T3").inline_at(y, 1)
    statistics.split(1, 16).parallelize(2, "lanes").parallelize(3, "lanes")
    agrees(f, values(30, 4), OFFSETS)
    steps = [str(step) for step in f.compile("reference").plan(values(30, 4), OFFSETS).steps]  # type: ignore[attr-defined]
    assert steps[-1] == "fuse T3 T11 1"
    assert "mark T3 c0 grid" in steps, "shared loops run as the consumer's do"


def test_the_example_of_the_architecture_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    example = page.split("## Scheduling by hand")[1].split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {"ir": ir, "ops": ops, "torch": torch}
    exec(example, scope)
    assert scope["statistics"].tensor.name == "T3"
    agrees(scope["f"], values(30, 4), OFFSETS)


def test_pointwise() -> None:
    with Fusion("pointwise") as f:
        y = ops.relu(rows(f) * 2 + 1)
        f.output(y)
    y.combine(0, 1).merge(0, 1).split(0, 16).parallelize(0, "grid").parallelize(1, "lanes")
    assert extents(y) == ["(n0*4 + 15) // 16", "16"]
    agrees(f, values(30, 4), OFFSETS)


def test_two_level_sum() -> None:
    with Fusion("two_level") as f:
        x = f.input((None, 4), torch.float32)
        words, sentences = f.input((None,), torch.int64), f.input((None,), torch.int64)
        total = ops.sum(ops.as_nested(ops.as_nested(x, words), sentences), (1, 2))
        f.output(total)
    total.combine(1).split(1, 8).parallelize(0, "grid").parallelize(2, "lanes").parallelize(3, "lanes")
    agrees(f, values(30, 4), OFFSETS, torch.tensor([0, 2, 2, 5]))


@pytest.mark.parametrize("parts", [False, True])
def test_grouped_matmul(parts: bool) -> None:
    with Fusion("grouped") as f:
        x, offsets = f.input((None, 8), torch.float32), f.input((None,), torch.int64)
        y = ops.matmul(ops.as_nested(x, offsets), f.input((None, 8, 6), torch.float32))
        f.output(y)
    y.split(1, 16).split(3, 16).split(5, 16)
    if parts:
        y.combine(0, 1).reorder([0, 2, 4, 1, 3, 5]).parallelize(0, "block_x").parallelize(1, "block_y")
    else:
        y.reorder({3: 2, 5: 3}).parallelize(0, "block_x").parallelize(1, "block_y")
    for axis in (-1, -2, -3):
        y.parallelize(axis, "thread_x")
    agrees(f, values(30, 8), OFFSETS, values(5, 8, 6))
    assert "@" in f.compile("reference").source(values(30, 8), OFFSETS, values(5, 8, 6))  # type: ignore[attr-defined]


def test_split_then_merge_and_merge_then_split() -> None:
    for steps, loops in (
        (lambda y: y.split(1, 4).merge(0), ["4", "4"]),
        (lambda y: y.merge(0).split(0, 4), ["3", "4"]),
    ):
        with Fusion() as f:
            y = ops.exp(f.input((2, 5), torch.float32))
            f.output(y)
        steps(y)
        assert extents(y) == loops
        agrees(f, values(2, 5))
        y.parallelize(0, "grid").parallelize(1, "lanes")
        agrees(f, values(2, 5))


def test_rfactor_cuts_rows() -> None:
    f, total = row_sum()
    partial = total.split(1, 8).rfactor(2)
    assert [d.iter_type for d in partial.loops] == [
        IterType.ITERATION,
        IterType.ITERATION,
        IterType.REDUCTION,
        IterType.ITERATION,
    ]
    assert [d.name for d in total.domain.reduced] == ["r0o"]
    assert [d.name for d in partial.domain.allocation] == ["c0r0o", "d1"]
    partial.combine(0, 1).parallelize(0, "grid").parallelize(1, "lanes").parallelize(2, "lanes")
    total.parallelize(0, "grid").parallelize(2, "lanes")
    agrees(f, values(30, 4), OFFSETS)


def test_rfactor_keeps_lanes() -> None:
    f, total = row_sum()
    partial = total.split(1, 8).rfactor([1])
    total.parallelize(0, "grid").parallelize(1, "lanes").parallelize(2, "lanes")
    partial.inline_at(total, 1).parallelize(2, "lanes").parallelize(3, "lanes")
    agrees(f, values(30, 4), OFFSETS)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # Triton's interpreter takes the logarithm of an empty row
def test_rfactor_of_several_states() -> None:
    with Fusion() as f:
        y = ops.logsumexp(rows(f), 1)
        f.output(y)
    states = named(f, "T3")
    partial = states.split(1, 4).rfactor(2)
    partial.parallelize(0, "grid").parallelize(3, "lanes")
    agrees(f, values(30, 4), OFFSETS)


def test_memory_of_six_as_two_by_four() -> None:
    with Fusion() as f:
        inner = ops.exp(f.input((6,), torch.float32))
        f.output(inner * 2)
    inner.set_allocation(split(inner.domains[0], 4))
    assert [d.extent for d in inner.domain.allocation] == [2, 4]
    agrees(f, values(6))
    compiled: Any = f.compile("reference")
    shapes = [shape for shape, _ in compiled.stages[0].prepared(compiled.binder.bind((values(6),))).shapes]
    assert shapes == [(6,), (2, 4)]


def test_memory_merged_and_in_another_order() -> None:
    with Fusion() as f:
        inner = ops.exp(f.input((3, 5, 2), torch.float32))
        f.output(inner * 2)
    a, b, c = inner.domains
    outer, rest = split(merge(a, c), 4)
    inner.set_allocation([rest, b, outer])
    assert f.steps == (
        ("allocate", ("T1", "reorder", "d0", "d2", "d1")),
        ("allocate", ("T1", "merge", "d0", "d2")),
        ("allocate", ("T1", "split", "d0d2", 4, 1)),
        ("allocate", ("T1", "reorder", "d0d2i", "d1", "d0d2o")),
    )
    agrees(f, values(3, 5, 2))


def test_caches() -> None:
    f, total = row_sum()
    x = f.inputs[0]
    copy, before = x.cache_after(), total.cache_before()
    f.verify()
    assert [v.tensor.name for v in f.producers(total)] == [before.tensor.name]
    assert f.reaches(copy, before) and f.consumers(x) == (copy,)
    copy.split(0, 8).parallelize(0, "grid").parallelize(1, "lanes").parallelize(2, "lanes")
    before.split(1, 8).parallelize(0, "grid").parallelize(2, "lanes").parallelize(3, "lanes")
    agrees(f, values(30, 4), OFFSETS)


def test_a_cache_of_rows_fused_into_their_reader() -> None:
    with Fusion() as f:
        nested = rows(f)
        total = ops.sum(nested, 1)
        f.output(total)
    total.split(1, 4).parallelize(0, "grid").parallelize(2, "lanes").parallelize(3, "lanes")
    copy = nested.cache_after().split(1, 4).parallelize(2, "lanes").parallelize(3, "lanes").inline_at(total, 2)
    assert f.consumers(copy) == (total,)
    agrees(f, values(30, 4), OFFSETS)


def test_partition_by_numbers() -> None:
    with Fusion() as f:
        y = ops.exp(f.input((10,), torch.float32))
        f.output(y)
    y.partition(0, [0, 3, 3, 10]).parallelize(0, "grid")
    assert str(y.loops[1]) == "ragged.d0r{[3, 0, 7]}"
    agrees(f, values(10))


def test_partition_by_the_offsets_of_the_math() -> None:
    with Fusion() as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        y = ops.exp(x)
        total = ops.sum(ops.as_nested(y, offsets), 1)
        f.output(total)
    y.partition(0, offsets).split(1, 4).parallelize(2, "lanes").parallelize(3, "lanes")
    total.split(1, 4).parallelize(0, "grid").parallelize(2, "lanes").parallelize(3, "lanes")
    agrees(f, values(30, 4), OFFSETS)


@pytest.mark.parametrize("kinds", [("grid", "grid"), ("grid", "serial"), ("serial", "serial"), ("serial", "grid")])
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("count", [4, 5, 6])
def test_a_split_component_ends_with_its_rows(kinds: tuple[str, str], inner: bool, count: int) -> None:
    f, total = row_sum()
    total.split(0, 2, inner).parallelize(0, kinds[0]).parallelize(1, kinds[1]).parallelize(-1, "lanes")
    offsets = OFFSETS[:count].clone()
    if kinds == ("serial", "grid") and not inner:
        with pytest.raises(ScheduleError, match="the loop over c0o cannot end where the components of r0 do"):
            f.compile()
    else:
        agrees(f, values(int(offsets[-1]), 4), offsets)


def test_more_positions_than_elements() -> None:
    with Fusion() as f:
        y = ops.exp(rows(f))
        f.output(y)
    y.resize(1, 2, 1).resize(2, 1, 3).split(1, 4).parallelize(0, "grid").parallelize(2, "lanes").parallelize(3, "lanes")
    assert extents(y)[3] == "8"
    agrees(f, values(30, 4), OFFSETS)


def test_positions_in_another_order() -> None:
    f, total = row_sum()
    total.split(1, 8)
    with pytest.raises(ScheduleError, match="swizzle: T3 keeps d1 and reduces r0i; a kept loop cannot depend on a reduced one"):
        total.swizzle(2, 3)
    total.swizzle(3, 2).parallelize(0, "grid").parallelize(3, "lanes")
    assert [d.name for d in total.loops] == ["c0", "r0o", "r0ix", "d1"]
    agrees(f, values(30, 4), OFFSETS)
    total.parallelize(2, "lanes")
    agrees(f, values(30, 4), OFFSETS)


def test_inlining_follows_the_consumer() -> None:
    with Fusion() as f:
        x = f.input((None, 8), torch.float32)
        inner = ops.sum(x, 1)
        y = ops.exp(x) / ops.sum(x, 1, keepdim=True)
        f.output(y, inner)
    y.split(0, 4).parallelize(0, "grid").parallelize(1, "serial").parallelize(2, "lanes")
    total = f.producers(f.producers(y)[1])[0]
    total.inline_at(y, 2).parallelize(2, "lanes")
    assert [d.name for d in total.loops] == ["d0o", "d0i", "d1"]
    compiled: Any = f.compile("reference")
    results = f.evaluate(values(7, 8))
    for got, wanted in zip(compiled(values(7, 8)), results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_splits_of_a_split_component_end_with_its_rows() -> None:
    f, total = row_sum()
    total.split(0, 2, inner=False).split(1, 2, inner=False).parallelize(-1, "lanes")
    for count in (1, 2, 4, 6):
        agrees(f, values(int(OFFSETS[count - 1]), 4), OFFSETS[:count].clone(), backends=("reference", "cpp"))


def test_a_loop_of_one_position_ends_nothing() -> None:
    f, total = row_sum()
    total.split(0, 2, inner=False).split(1, 1).parallelize(1, "grid")
    with pytest.raises(ScheduleError, match="the loop over c0o cannot end where the components of r0 do"):
        f.compile("reference")


def test_what_stands_between_a_tensor_and_its_consumer() -> None:
    with Fusion() as f:
        x = rows(f)
        largest = ops.amax(x, 1, keepdim=True)
        other = ops.exp(x)
        y = ops.mul(ops.sub(x, largest), other)
        f.output(y)
    y.parallelize(0, "grid").parallelize(2, "lanes")
    other.split(1, 4)
    named(f, "T3").inline_at(y, 1).parallelize(-1, "lanes")
    agrees(f, values(30, 4), OFFSETS)
    assert "  delay T3 T7" in f.compile("reference").plan(values(30, 4), OFFSETS).lines  # type: ignore[attr-defined]


def test_memory_read_through_a_view_at_rows_of_another_structure() -> None:
    with Fusion() as f:
        x, first, second = f.input((6,), torch.float32), f.input((None,), torch.int64), f.input((None,), torch.int64)
        inner = ops.exp(x)
        f.output(ops.add(ops.as_nested(x, first), ops.as_nested(inner, second)))
    inner.set_allocation(split(inner.domains[0], 4))
    offsets = torch.tensor([0, 1, 1, 6])
    agrees(f, values(6), offsets, offsets.clone())


def test_two_tensors_inside_one() -> None:
    with Fusion() as f:
        x = rows(f)
        y = ops.mul(ops.sub(x, ops.amax(x, 1, keepdim=True)), ops.amin(x, 1, keepdim=True))
        f.output(y)
    y.parallelize(0, "grid").parallelize(2, "lanes")
    for name in ("T3", "T6"):
        named(f, name).inline_at(y, 1).parallelize(-1, "lanes")
    agrees(f, values(30, 4), OFFSETS)


def test_a_strategy_may_still_be_named() -> None:
    f, total = row_sum()
    total.split(1, 8)
    compiled: Any = f.compile("reference", strategy="maskless")
    assert compiled.plan(values(30, 4), OFFSETS).strategy == "maskless"


def test_a_compiled_program_keeps_the_schedule_it_was_compiled_with() -> None:
    f, total = row_sum()
    total.split(1, 8)
    compiled: Any = f.compile("reference")
    total.split(1, 2)
    assert not any("split T3 r0o" in line for line in compiled.plan(values(30, 4), OFFSETS).lines)


def test_the_schedule_of_what_nothing_needs_is_left_out() -> None:
    with Fusion() as f:
        x = rows(f)
        unused, y = ops.exp(x), ops.relu(x)
        f.output(y)
    unused.split(1, 4)
    y.split(1, 4)
    agrees(f, values(30, 4), OFFSETS)


# --- random schedules ----------------------------------------------------------------------------------------------------


def _change(draw: st.DrawFn, view: TensorView) -> None:
    """One random change of loops, legal or not."""
    axis = draw(st.integers(0, len(view.loops) - 1))
    factor, inner = draw(st.integers(1, 5)), draw(st.booleans())
    kind = draw(st.sampled_from(["split", "merge", "combine", "reorder", "resize", "swizzle", "split"]))
    if kind == "split":
        view.split(axis, factor, inner)
    elif kind == "merge":
        view.merge(axis)
    elif kind == "combine":
        view.combine(axis)
    elif kind == "resize":
        view.resize(axis, factor - 1, int(inner))
    elif kind == "swizzle":
        view.swizzle(axis, draw(st.integers(0, len(view.loops) - 1)))
    else:
        view.reorder(draw(st.permutations(range(len(view.loops)))))


@st.composite
def scheduled(draw: st.DrawFn) -> Fusion:
    """A program over rows with a random schedule; steps that are refused are left out."""
    with Fusion("random") as f:
        x = rows(f, draw(st.sampled_from([3, 4])))
        y = draw(st.sampled_from([lambda: ops.sum(x, 1), lambda: ops.sum(x, 2), lambda: ops.relu(x), lambda: ops.sum(x)]))()
        f.output(y)
    for _ in range(draw(st.integers(1, 5))):
        with contextlib.suppress(ScheduleError, DomainError, StructureMismatch):
            _change(draw, y)
    for axis, domain in enumerate(y.loops):
        known = not domain.is_ragged and isinstance(domain.extent, int)
        y.parallelize(axis, draw(st.sampled_from(["serial", "grid", "lanes"] if known else ["serial", "grid"])))
    return f


@given(scheduled(), st.lists(st.integers(0, 6), max_size=6))
def test_random_schedules_agree_or_are_refused(f: Fusion, lengths: list[int]) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    args = values(int(offsets[-1]), int(str(f.inputs[0].shape[1]))), offsets
    try:
        f.compile("reference")
    except ScheduleError:
        return
    agrees(f, *args, backends=("reference",))
    clone = f.clone()
    assert clone.steps == f.steps
    agrees(clone, *args, backends=("reference",))


@st.composite
def composed(draw: st.DrawFn) -> Fusion:
    """Two reductions and their readers, with random changes, caches, factored reductions and shared loops."""
    with Fusion("composed") as f:
        x = rows(f)
        largest = ops.amax(x, 1, keepdim=True)
        total = ops.sum(ops.exp(ops.sub(x, largest)), 1, keepdim=True)
        y = ops.div(ops.sub(x, largest), total)
        f.output(y)
    views = [v for v in f.tensors if f.definition_of(v.tensor) is not None]
    for view in draw(st.lists(st.sampled_from(views), max_size=1)):
        with contextlib.suppress(ScheduleError):
            views.append(draw(st.sampled_from([view.cache_after, view.cache_before]))())
    for view in draw(st.lists(st.sampled_from(views), max_size=5)):
        with contextlib.suppress(ScheduleError, DomainError, StructureMismatch):
            _change(draw, view)
    for view in draw(st.lists(st.sampled_from(views), max_size=2)):
        reduced = [k for k, d in enumerate(view.loops) if d.iter_type is IterType.REDUCTION]
        with contextlib.suppress(ScheduleError):
            views.append(view.rfactor(draw(st.lists(st.sampled_from(reduced or [0]), max_size=2))))
    for view in draw(st.lists(st.sampled_from(views), max_size=4)):
        consumer = draw(st.sampled_from(views))
        with contextlib.suppress(ScheduleError):
            view.inline_at(consumer, draw(st.integers(1, len(consumer.loops))))
    for view in views:
        for axis, domain in enumerate(view.loops):
            known = not domain.is_ragged and isinstance(domain.extent, int) and axis != 0
            if draw(st.booleans()):
                view.parallelize(axis, "lanes" if known else "grid" if axis == 0 else "serial")
    return f


@given(composed(), st.lists(st.integers(0, 6), max_size=6))
def test_random_schedules_of_several_tensors_agree_or_are_refused(f: Fusion, lengths: list[int]) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    f.verify()
    try:
        f.compile("reference")
    except ScheduleError:
        return
    if f.schedule is not None:
        agrees(f, values(int(offsets[-1]), 4), offsets, backends=("reference",))


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda y: y.split(7, 2), r"split: axis must be a position in the loops T3\[.*\], got 7"),
        (lambda y: y.split(0, 0), "split: a factor must be at least 1, got 0"),
        (lambda y: y.merge(0), r"merge: T3 reduces r0 and keeps c0; one loop cannot do both"),
        (lambda y: y.merge(0, 2), r"merge: takes a loop and the one inside it, got axes 0 and 2 of .*; reorder first"),
        (lambda y: y.merge(2), r"merge: takes a loop and the one inside it, got axes 2 and 3"),
        (lambda y: y.combine(0), "combine: T3 reduces r0 and keeps c0; one loop cannot do both"),
        (lambda y: y.reorder([1, 0, 2]), "reorder: the length of r0 depends on c0, which must stay outside it, in T3"),
        (lambda y: y.reorder([0, 1]), r"reorder: expected each of 3 axes of .* once, got \[0, 1\]"),
        (lambda y: y.reorder({0: 1, 2: 1}), r"reorder: two axes of .* cannot have one place, got \{0: 1, 2: 1\}"),
        (lambda y: y.parallelize(0, "fast"), r"parallelize: 'fast' is not a parallel type: choose from serial, grid, lanes"),
        (lambda y: y.parallelize(0, "grid").split(0, 2), "split: c0 of T3 is grid already; parallelize last"),
        (lambda y: y.partition(2, [0, 3]), r"partition: offsets must end at the extent 4, got 3"),
        (lambda y: y.partition(0, [0, 3]), r"partition: i.c0\{n1 - 1\} of T3 has an extent known only at run time"),
        (lambda y: y.resize(1, -1, 0), "resize: r0 of T3 must not lose positions, got -1 and 0"),
        (lambda y: y.resize(0, 1, 0), "resize: c0 of T3 selects the rows of r0, whose ends must be kept"),
        (lambda y: y.swizzle(2, 1), "swizzle: ragged.r0.* is ragged; only regular domains"),
        (lambda y: y.swizzle(1, 2), "swizzle: T3 keeps d1 and reduces r0"),
        (lambda y: y.rfactor(0), "rfactor: c0 is not reduced in T3"),
        (lambda y: y.rfactor(1), "rfactor: both stages need something to reduce; .* not all"),
        (lambda y: y.rfactor([]), "rfactor: both stages need something to reduce; .* not none"),
        (lambda y: y.inline_at(y, 1), "inline_at: T3 is not computed from T3"),
        (lambda y: y.set_allocation([]), "set_allocation: T3 is an output, whose memory the caller owns"),
        (lambda y: y.fusion.inputs[0].split(0, 2), r"split: T0 is an input, which no loops compute; cache_after\(\) makes"),
        (lambda y: y.fusion.inputs[0].cache_before(), "cache_before: T0 is an input, which no statement computes"),
        (lambda y: y.cache_after(), "cache_after: nothing reads T3"),
        (lambda y: y.split(1, 2).cache_before(), "cache_before: T3 has a schedule already; cache first"),
    ],
)
def test_misuse_is_refused_at_once(step: Callable[[TensorView], object], message: str) -> None:
    _, total = row_sum()
    with pytest.raises((ScheduleError, DomainError), match=message):
        step(total)


def test_sentences_stay_outside_their_words() -> None:
    with Fusion() as f:
        words, sentences = rows(f), f.input((None,), torch.int64)
        total = ops.sum(ops.as_nested(words, sentences), (1, 2))
        f.output(total)
    assert [d.name for d in total.loops] == ["c1", "r1", "r0", "d1"]
    with pytest.raises(ScheduleError, match="reorder: the length of r0 depends on r1, which must stay outside it"):
        total.reorder([0, 2, 1, 3])


def test_offsets_that_nothing_checks_are_refused() -> None:
    with Fusion() as f:
        x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
        y = ops.exp(x)
        f.output(y)
    with pytest.raises(ScheduleError, match="partition: T1 does not partition an extent of n0 anywhere in the program"):
        y.partition(0, offsets)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda y: y.parallelize(0, "lanes"), r"i.c0\{n1 - 1\} cannot be lanes: its extent is not known; split it first"),
        (lambda y: y.parallelize(0, ParallelType.MESH), "a mesh of processes, and this program is compiled for one process"),
        (
            lambda y: y.parallelize(1, "block_x"),
            "phase T3 reduces r0, so it cannot be spread over workers; rfactor it first",
        ),
        (lambda y: y.split(0, 2).parallelize(1, "lanes"), "the length of r0 depends on c0i, which must stay outside it"),
    ],
)
def test_what_cannot_run_is_refused_when_compiled(step: Callable[[TensorView], object], message: str) -> None:
    f, total = row_sum()
    step(total)
    with pytest.raises(ScheduleError, match=message):
        f.compile("reference")


def test_lanes_come_in_powers_of_two_on_a_gpu() -> None:
    f, total = row_sum()
    total.split(1, 6).parallelize(2, "lanes")
    f.compile("cpp")
    with pytest.raises(ScheduleError, match=r"i?r?\.?r0i\{6\} cannot be lanes: this target needs a power of two"):
        f.compile("triton")


def test_a_partial_result_is_no_part_of_the_math() -> None:
    _, total = row_sum()
    partial = total.split(1, 8).rfactor(2)
    with pytest.raises(ScheduleError, match="T3_r0o is a partial result of a schedule"):
        ops.exp(partial)


def test_memory_must_hold_everything() -> None:
    with Fusion() as f:
        inner = ops.exp(f.input((6, 2), torch.float32))
        f.output(inner * 2)
    with pytest.raises(ScheduleError, match=r"set_allocation: \[.*\] cannot be made from the dims of T1, .*, or of its memory"):
        inner.set_allocation(split(inner.domains[0], 4))
    with pytest.raises(DomainError, match="set_allocation: expected domains"):
        inner.set_allocation([6, 2])  # type: ignore[list-item]


def test_loops_that_are_not_there_cannot_be_shared() -> None:
    with Fusion() as f:
        x = rows(f)
        y = ops.sub(x, ops.sum(x, 1, keepdim=True))
        f.output(y)
    with pytest.raises(ScheduleError, match=r"inline_at: T3\[.*\] has no loop r0 of its own to share with T5"):
        named(f, "T3").inline_at(y, 2)
    with pytest.raises(ScheduleError, match=r"inline_at: position must name some of the loops .* from 1 on, got 0"):
        named(f, "T3").inline_at(y, 0)


def test_a_product_of_rows_that_lie_apart() -> None:
    """Combined rows with gaps between them are looked up one by one: a block of them has no one distance."""
    with Fusion("apart") as f:
        x, w = f.input((None, 4), torch.float32), f.input((4, 3), torch.float32)
        starts, lengths = f.input((None,), torch.int64), f.input((None,), torch.int64)
        y = ops.matmul(ops.as_nested(x, starts=starts, lengths=lengths), w)
        f.output(y)
    y.combine(0, 1).split(0, 8).parallelize(0, "grid").parallelize(1, "lanes").parallelize(2, "lanes").parallelize(3, "lanes")
    args = (values(14, 4), values(4, 3), torch.tensor([1, 6, 9]), torch.tensor([3, 0, 4]))
    want = torch.cat([args[0][1:4], args[0][9:13]]) @ args[1]
    for backend in ("reference", "cpp"):
        torch.testing.assert_close(f.compile(backend)(*args).values, want)


# --- vectors -------------------------------------------------------------------------------------------------------------


def doubled(shape: tuple[int | None, ...]) -> tuple[Fusion, TensorView]:
    with Fusion() as f:
        y = ops.mul(f.input(shape, torch.float32), 2.0)
        f.output(y)
    return f, y


def test_a_vector_runs_on_from_row_to_row_of_contiguous_memory() -> None:
    f, y = doubled((2, 6))
    y.merge(0).split(0, 4).parallelize(1, "vectorize")
    agrees(f, values(2, 6))
    f, y = doubled((2, 6))
    y.split(1, 4).parallelize(2, "vectorize")
    with pytest.raises(
        ScheduleError, match="d1i of T1 cannot be vectorized, because of T1: 4 does not divide 6, the extent of d1"
    ):
        f.compile("reference")


def test_vectors_of_extents_that_only_a_call_knows() -> None:
    f, y = doubled((None, 6))
    y.merge(0).split(0, 4).parallelize(1, "vectorize")
    agrees(f, values(2, 6))
    with pytest.raises(ShapeError, match="4 does not divide 18"):
        f.compile("reference")(values(3, 6))


def test_vectors_of_rows() -> None:
    f, total = row_sum()
    total.split(1, 2).parallelize(2, "vectorize")
    with pytest.raises(ScheduleError, match=r"r0i of T3 cannot be vectorized, because of T0: neighbours along d0 are apart"):
        f.compile("reference")
    with Fusion() as f:
        y = ops.mul(rows(f, 3), 2.0)
        f.output(y)
    y.merge(1).split(1, 2).parallelize(2, "vectorize")
    agrees(f, values(10, 3), torch.tensor([0, 4, 4, 10]))
    with pytest.raises(ShapeError, match="2 does not divide 9"):
        f.compile("reference")(values(9, 3), torch.tensor([0, 3, 9]))


@pytest.mark.parametrize(
    ("stored", "legal"),
    [
        (lambda a, b: [a, b], True),
        (lambda a, b: [b, a], False),
        (lambda a, b: [split(b, 4)[0], a, split(b, 4)[1]], True),  # tiles of four columns
        (lambda a, b: [split(b, 2)[0], a, split(b, 2)[1]], False),  # tiles of two
        (lambda a, b: [a, *split(b, 2)], True),
        (lambda a, b: [a, *split(b, 3)], False),  # nine places for eight
        (lambda a, b: [merge(a, b)], True),
    ],
)
def test_vectors_see_how_an_intermediate_is_stored(stored: Callable[..., list[ir.IterDomain]], legal: bool) -> None:
    with Fusion() as f:
        t = ops.exp(f.input((3, 8), torch.float32))
        y = ops.mul(t, 2.0)
        f.output(y)
    t.split(1, 4)
    t.set_allocation(stored(*t.domains))
    y.split(1, 4).parallelize(2, "vectorize")
    if legal:
        agrees(f, values(3, 8))
    else:
        with pytest.raises(ScheduleError, match=r"d1i of T2 cannot be vectorized, because of T1: "):
            f.compile("reference")
