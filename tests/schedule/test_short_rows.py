"""Rows that fit one piece are finished where they are read, and longer ones are cut: by their own length, in one program.

In: fusions of ragged tensors whose rows are shorter and longer than a part. Out: failures that name the operation and the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate import JaggedTensor, ir, jit, ops
from serrate.ir.expr import Array, const, symbol
from serrate.ir.ragged_transforms import lists_long_rows, ordered
from serrate.ir.tile import LANES, ByLength, Loop, statements
from serrate.runtime.arrays import derive
from serrate.schedule.plan import Plan
from serrate.schedule.strategies import plan
from serrate.schedule.target import CPU, GPU
from tests.engine.oracle import FULL

pytestmark = pytest.mark.sampled(2)

OPERATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": (lambda x: ops.softmax(x, 1), lambda row: row.softmax(0)),
    "log_softmax": (lambda x: ops.log_softmax(x, 1), lambda row: row.log_softmax(0)),
    "sum": (lambda x: ops.sum(x, 1), lambda row: row.sum(0)),
    "amax": (lambda x: ops.amax(x, 1), lambda row: row.amax(0) if len(row) else torch.full((4,), -torch.inf)),
    "centred": (lambda x: ops.sub(x, ops.mean(x, 1, keepdim=True)), lambda row: row - row.mean(0)),
    "var": (lambda x: ops.var(x, 1), lambda row: row.var(0)),
}


def compiled(name: str, backend: str, strategy: str, **options: int) -> Any:
    with ir.Fusion(name) as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(OPERATIONS[name][0](ops.as_nested(x, offsets)))
    return f.compile(backend, strategy=strategy, **options)


def arguments(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.randn(sum(lengths), 4, generator=torch.Generator().manual_seed(len(lengths))), offsets


def by_row(result: Any) -> list[torch.Tensor]:
    return list(result.unbind())


PART = 64
LENGTHS = [[3, 0, 200, 1, 64, 65, 7], [], [0, 0], [1], [500], [64, 64], [65], [0, 129, 0]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.filterwarnings("ignore:var")
def test_rows_of_every_length(name: str, backend: str, lengths: list[int]) -> None:
    if backend == "triton" and not FULL and lengths not in (LENGTHS[0], [0, 0]):
        pytest.skip("interpreted slowly; all lengths run in the full set")
    values, offsets = arguments(lengths)
    run = compiled(name, backend, "persistent_dynamic", tile=8, chunk=PART)
    got, whole = by_row(run(values, offsets)), by_row(compiled(name, backend, "maskless", tile=8)(values, offsets))
    for one, other, row in zip(got, whole, values.split(lengths), strict=True):
        torch.testing.assert_close(one, OPERATIONS[name][1](row), equal_nan=True)
        if 0 < len(row) <= PART:
            # A row that fits one piece is done as a whole row is, to the bit.
            assert torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.filterwarnings("ignore:var")
def test_groups_of_short_rows(name: str, lengths: list[int]) -> None:
    if not FULL and lengths not in (LENGTHS[0], [0, 0]):
        pytest.skip("interpreted slowly; all lengths run in the full set")
    values, offsets = arguments(lengths)
    run = compiled(name, "triton", "persistent_dynamic", tile=8, chunk=PART, rows=2)
    chosen = run.plan(values, offsets)
    assert chosen.short is not None and chosen.short.strategy == "masked"
    for one, row in zip(by_row(run(values, offsets)), values.split(lengths), strict=True):
        torch.testing.assert_close(one, OPERATIONS[name][1](row), equal_nan=True)


@pytest.mark.parametrize("dim", [1, 2])
def test_rows_of_a_product_are_not_grouped(dim: int) -> None:
    with ir.Fusion("program") as f:
        x = f.input((None,), torch.float32)
        q, k = (f.input((None,), torch.int64) for _ in range(2))
        f.output(ops.softmax(ops.as_product(x, q, k), dim))
    heights, widths = [2, 0, 3, 1], [3, 2, 4, 1]
    sizes = [h * w for h, w in zip(heights, widths, strict=True)]
    values = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1))
    run = f.compile("triton", "persistent_dynamic", rows=2, chunk=8, tile=8)
    got = run(values, *(torch.tensor([0, *each]).cumsum(0) for each in (heights, widths)))
    for one, part, h, w in zip(by_row(got), values.split(sizes), heights, widths, strict=True):
        torch.testing.assert_close(one, part.view(h, w).softmax(dim - 1))


@given(lengths=st.lists(st.integers(0, 40), max_size=9), part=st.sampled_from([1, 2, 8, 16]))
def test_any_lengths_and_parts(lengths: list[int], part: int) -> None:
    values, offsets = arguments(lengths)
    run = compiled("softmax", "reference", "persistent_dynamic", tile=1, chunk=part)
    for one, row in zip(by_row(run(values, offsets)), values.split(lengths), strict=True):
        torch.testing.assert_close(one, row.softmax(0))


def the_plan(make: Callable[[Any], Any], target: Any = CPU) -> tuple[Plan, Any]:
    with ir.Fusion("program") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(make(ops.as_nested(x, offsets)))
    naive = f.compile("reference").stages[0].naive
    return plan(naive, "persistent_dynamic", target, chunk=PART), naive


def test_a_plan_has_a_plan_for_short_rows_only_where_parts_leave_something() -> None:
    chosen, naive = the_plan(lambda x: ops.softmax(x, 1))
    assert chosen.short is not None and chosen.short.strategy == "maskless" and "rows of at most" in str(chosen)
    program = chosen.apply(naive)
    forks = [n for phase in program.phases for n in statements(phase.body) if isinstance(n, ByLength)]
    assert len(forks) == len(program.phases) and sum(bool(n.short) for n in forks) == 1
    assert {n.most for n in forks} == {chosen.most}
    for whole in (lambda x: ops.exp(x), lambda x: ops.sum(x, 0), lambda x: ops.sum(x, (0, 1))):
        assert the_plan(whole)[0].short is None


def test_on_a_gpu_short_rows_come_first_and_the_list_holds_only_long_ones() -> None:
    chosen, naive = the_plan(lambda x: ops.softmax(x, 1), GPU)
    assert chosen.short is not None and chosen.most is not None
    first, *others = chosen.apply(naive).phases
    assert [n.most for n in statements(first.body) if isinstance(n, ByLength)] == [chosen.most]
    domains = [phase.body[0].domain for phase in others if isinstance(phase.body[0], Loop)]
    assert len(domains) == len(others) and all(lists_long_rows(d) for d in domains)


def test_private_rows_are_no_longer_than_a_piece() -> None:
    lengths = [5, 100_000]
    values, offsets = arguments(lengths)
    run = compiled("softmax", "cpp", "persistent_dynamic", tile=8, chunk=PART)
    ready = run.stages[0].prepared(run.binder.bind((values, offsets)))
    assert [t.shape[0] for t in ready.private] == [PART]


@pytest.mark.triton
def test_short_rows_beside_work_that_is_not_by_rows() -> None:
    """Sums of rows, the sum of everything, and all elements doubled: the rows are still finished apart from longer ones."""
    lengths = LENGTHS[0]
    values, offsets = arguments(lengths)
    with ir.Fusion() as f:
        x, described = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        rows = ops.as_nested(x, described)
        f.output(ops.sum(rows, 1), ops.sum(x, 0), ops.mul(x, 2.0))
    run = f.compile("triton", strategy="persistent_dynamic", tile=8, chunk=PART, short_tile=4)
    assert run.plan(values, offsets).short is not None
    sums, total, doubled = run(values, offsets)
    torch.testing.assert_close(sums, torch.stack([row.sum(0) for row in values.split(lengths)]))
    torch.testing.assert_close(total, values.sum(0))
    assert torch.equal(doubled, values * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_read_what_short_rows_leave_in_sixteen_bits(dtype: torch.dtype) -> None:
    """A running sum rounded once for the product that reads it: each plan makes its own tensor for the rounded numbers."""

    def attended(x: Any, transposed: Any, softmax: Any) -> Any:
        return softmax(x.cumsum(-2) @ transposed / 9) @ x

    x = torch.randn(75, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = JaggedTensor.from_lengths(x, [5, 0, 69, 1])
    program = jit(lambda x: attended(x, x.transpose(1, 2), lambda y: torch.softmax(y, 2)), backend="triton")
    for own, row in zip(program(rows).unbind(), rows.double().unbind(), strict=True):
        wanted = attended(row, row.T, lambda y: torch.softmax(y, 1))
        torch.testing.assert_close(own.double(), wanted, rtol=1e-3, atol=1e-3 if dtype == torch.float32 else 1e-1)


Several = Callable[[Any, Any], tuple[Any, ...]]
APART: dict[str, tuple[Several, Several]] = {
    "two sums": (lambda x, y: (ops.sum(x, 1), ops.sum(y, 1)), lambda x, y: (x.sum(0), y.sum(0))),
    "two softmaxes": (
        lambda x, y: (ops.softmax(x, 1), ops.amax(y, 1), y - ops.mean(y, 1, keepdim=True)),
        lambda x, y: (x.softmax(0), y.amax(0), y - y.mean(0)),
    ),
    "a temporary of both": (
        lambda x, y: (x < ops.position(x, 1) * 0.01, ops.sum(y + ops.position(x, 1) * 0.01, 1)),
        lambda x, y: (x < torch.arange(len(x)) * 0.01, (y + torch.arange(len(y)) * 0.01).sum(0)),
    ),
}
"""Programs with loops over the rows of two tensors of the same lengths, and the same on one row of each."""


@pytest.mark.triton
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", APART)
def test_short_rows_of_several_tensors(name: str, rows: int) -> None:
    make, wanted = APART[name]
    lengths = [3, 200, 1, 64, 65, 7]
    with ir.Fusion() as f:
        first, second, offsets = f.input((None,), torch.float32), f.input((None,), torch.float32), f.input((None,), torch.int64)
        f.output(*make(ops.as_nested(first, offsets), ops.as_nested(second, offsets)))
    run = f.compile("triton", "persistent_dynamic", tile=8, chunk=PART, rows=rows)
    x, y = (torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    given = x, y, torch.tensor([0, *lengths]).cumsum(0)
    assert run.plan(*given).short is not None
    found = [by_row(each) for each in run(*given)]
    for k, row in enumerate(zip(x.double().split(lengths), y.double().split(lengths), strict=True)):
        for own, want in zip(found, wanted(*row), strict=True):
            torch.testing.assert_close(own[k].to(want.dtype), want, rtol=1e-5, atol=1e-5)


def test_a_block_of_positions_beside_other_lanes_is_not_larger_than_the_target_holds() -> None:
    with ir.Fusion() as f:
        x, described = f.input((None, None), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, described), 1))
    naive = f.compile("reference").stages[0].naive
    (phase,) = plan(naive, "maskless", GPU, tile=512).apply(naive).phases
    lanes = {n.domain.name: n.domain.extent_expr.value for n in statements(phase.body) if isinstance(n, Loop) and n.kind is LANES}
    # The positions are two lanes: those that threads read at once, and how often they do.
    assert lanes["d1i"] == GPU.column_bytes // 4 and math.prod(map(int, lanes.values())) == GPU.largest


NUMBERS = [[], [0], [0, 0, 3], [5, 1, 0, 64, 2, 300, 7, 0, 63, 65, 1, 1, 129, 4, 0, 33, 8, 2, 2, 31], [700]]


@pytest.mark.parametrize("lengths", NUMBERS, ids=lambda lengths: f"{len(lengths)} rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["sum", "softmax", "centred"])
def test_groups_of_numbers_ordered_by_length(name: str, dtype: torch.dtype, lengths: list[int]) -> None:
    make, wanted = OPERATIONS[name]
    with ir.Fusion(name) as f:
        x, offsets = f.input((None,), dtype), f.input((None,), torch.int64)
        f.output(make(ops.as_nested(x, offsets)))
    run = f.compile("triton", "persistent_dynamic", rows=4, chunk=64, tile=32, uncut=24)
    values, given = torch.randn(sum(lengths)).to(dtype), torch.tensor([0, *lengths]).cumsum(0)
    assert any(step.primitive == "order" for step in run.plan(values, given).short.steps)
    close = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for own, row in zip(by_row(run(values, given)), values.split(lengths), strict=True):
        torch.testing.assert_close(own.double(), wanted(row.double()), rtol=2 * close, atol=close)


def test_components_in_the_order_of_their_lengths_are_visited_once() -> None:
    array = Array("offsets", (0, 7, 7, 8, 10, 11))
    component, row = ir.partition(ir.IterDomain(11), array, const(5), names=("c", "r"))
    made = ordered(component, row, 4)
    order = derive(made.definition.order, {}, {}, torch.device("cpu"))
    assert order.tolist() == [1, 2, 3, 0, 4]
    places = derive(made.definition.to_outputs({component.uid: symbol("c")})[0].array, {}, {}, torch.device("cpu"))
    assert places[order].tolist() == list(range(5))
