"""Regressions: minimal kernels that once failed, or gave other results than the interpreter or torch.

In: kernels of a few lines, each called as it was when it failed. Out: a failure for each backend that is wrong again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, Structure
from serrate.errors import KernelError, StrategyError

BACKENDS = ("reference", "cpp", "triton")
Given = Callable[[], tuple[Any, ...]]


def ragged(lengths: list[int], *inner: int) -> JaggedTensor:
    torch.manual_seed(0)
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), *inner), lengths)


def same(function: Any, backend: str, *calls: Given, lanes: dict[str, int] | None = None) -> None:
    """Every call, one after the other on one kernel, against the interpreter; arguments are made anew."""
    kernel = serrate.kernel(function.fn, config=function.config, **({"lanes": lanes} if lanes else {}))
    for given in calls:
        wanted, found = function.interpreted(tile=1)(*given()), kernel.on(backend)(*given())
        for w, f in zip(*((x if isinstance(x, tuple) else (x,)) for x in (wanted, found)), strict=True):
            pair = [x.values if isinstance(x, JaggedTensor) else x for x in (f, w)]
            torch.testing.assert_close(*pair, equal_nan=True)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_slice_of_a_dim_that_changes(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.size(1))
        for t in hl.tile(x.size(1)):
            out[t] = x[:, t].sum(0)
        return out

    same(k, backend, lambda: (torch.ones(3, 4),), lambda: (torch.ones(5, 4),))


def test_a_number_that_is_sometimes_a_row_count(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, n: int) -> torch.Tensor:
        out = torch.zeros(8)
        for t in hl.tile(n):
            out[t] = x[t]
        return out

    same(k, backend, lambda: (torch.ones(3), 3), lambda: (torch.ones(3), 2), lambda: (torch.ones(5), 1))


def test_a_block_that_is_also_a_length(backend: str) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> torch.Tensor:
        block = 4
        out = torch.zeros(2, dtype=torch.int64)
        for g in hl.grid(2):
            out[g] = jt.total_tiles(block) + hl.arange(block).sum()
        return out

    same(k, backend, lambda: (ragged([5, 4]),), lambda: (ragged([4, 4]),))


@pytest.mark.parametrize("lanes", [{"b": 1, "t": 1}, {"b": 3, "t": 1}])
def test_a_dense_sum_beside_a_ragged_one(backend: str, lanes: dict[str, int]) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, two = torch.zeros(jt.num_rows), torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            own, all_of_it = hl.zeros([b]), hl.zeros([b])
            for t in hl.tile(dense.size(1)):
                own = own + jt[b, t].sum(1)
                all_of_it = all_of_it + dense[b, t].sum(1)
            out[b], two[b] = own, all_of_it
        return out, two

    same(k, backend, lambda: (ragged([2, 0, 5]), torch.ones(3, 7)), lanes=lanes)


def test_a_counter_beside_a_ragged_sum(backend: str) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, counts = torch.zeros(jt.num_rows), torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            own, count = hl.zeros([b]), hl.zeros([b])
            for t in hl.tile(n, block_size=1):
                own = own + jt[b, t].sum(1)
                count = count + 1
            out[b], counts[b] = own, count
        return out, counts

    same(k, backend, lambda: (ragged([2, 0, 5]), 7))


def test_two_tensors_change_places(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for t in hl.tile(x.size(0)):
            a, b = x[t], y[t]
            x[t] = b
            y[t] = a
        return x, y

    same(k, backend, lambda: (torch.arange(5.0), torch.arange(5.0) + 10))


def test_a_sum_of_what_is_then_emptied(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros(2)
        for g in hl.grid(2):
            acc = hl.zeros([])
            for t in hl.tile(x.size(1)):
                acc = acc + x[g, t].sum()
                x[g, t] = hl.zeros([t])
            out[g] = acc
        return out, x

    same(k, backend, lambda: (torch.ones(2, 5),))


def test_a_branch_changes_a_value(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in hl.tile(x.size(0), block_size=2):
            y = x[t]
            if t.begin > 1:
                y = y * 2
            out[t] = y
        return out

    same(k, backend, lambda: (torch.ones(5),))


def test_a_branch_without_rows_does_not_rest(backend: str) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, n: int) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for t in hl.tile(n, block_size=2):
                if t.begin > 1:
                    acc = acc * 0.5 + jt[b, t].sum(1)
                else:
                    acc = acc + 1
            out[b] = acc
        return out

    same(k, backend, lambda: (ragged([2, 0, 5]), 8))


@pytest.mark.parametrize("packed", [False, True])
def test_columns_that_a_row_does_not_have(backend: str, packed: bool) -> None:
    @serrate.kernel
    def k(wide: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(wide.num_rows, 4)
        for b, m in hl.tile([wide.num_rows, 4]):
            own = hl.zeros([b, m])
            for t in hl.tile(5):
                own = own + (wide[b, t, m] + 1).sum(1)
            out[b, m] = own
        return out

    def given() -> tuple[JaggedTensor]:
        structure = Structure.from_lengths(torch.tensor([3, 2])).with_columns(torch.tensor([1, 4]), packed=packed)
        return (JaggedTensor(torch.arange(11.0) if packed else torch.arange(20.0).view(5, 4), structure),)

    same(k, backend, given)


def test_a_number_left_of_a_comparison(backend: str) -> None:
    @serrate.kernel
    def k(limit: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape)
        for b in hl.grid(x.size(0)):
            for t in hl.tile(x.size(1)):
                out[b, t] = torch.where(limit[b] > x[b, t], 1.0, 2.0) + torch.where(limit[b] == x[b, t], 4.0, 8.0)
        return out

    same(k, backend, lambda: (torch.tensor([1.0, 4.0]), torch.arange(6.0).view(2, 3)))


def test_a_whole_number_times_bools(backend: str) -> None:
    @serrate.kernel
    def k(count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.int64)
        for b in hl.grid(x.size(0)):
            for t in hl.tile(x.size(1)):
                out[b, t] = (x[b, t] > 1) * count[b] + (x[b, t] > 2)
        return out

    same(k, backend, lambda: (torch.tensor([2, 3]), torch.arange(6.0).view(2, 3)))


def test_bits_of_whole_numbers(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in hl.tile(x.size(0)):
            out[t] = (x[t] & y[t]) + (x[t] ^ 3) + (x[t] | y[t])
        return out

    same(k, backend, lambda: (torch.arange(5), torch.arange(5) * 3))


def test_a_gather_and_a_scatter_of_one_lane(backend: str) -> None:
    @serrate.kernel
    def k(target: JaggedTensor, index: JaggedTensor, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(target.total_elements)
        for b in hl.tile(target.num_rows):
            for t in hl.tile(5):
                out[target[b, t]] = x[index[b, t]]
        return out

    def given() -> tuple[JaggedTensor, JaggedTensor, torch.Tensor]:
        target = ragged([2, 0, 5]).with_values(torch.arange(7).flip(0))
        return target, target.with_values(torch.arange(7) % 3), torch.arange(7.0)

    same(k, backend, given, lanes={"b": 8, "t": 1})


def test_what_the_last_iteration_left(backend: str) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, before = torch.zeros(jt.num_rows), torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            total, last = hl.zeros([b]), hl.full([b], 1.0)
            for t in hl.tile(n, block_size=3):
                last = total
                total = total + jt[b, t].sum(1)
            out[b], before[b] = total, last
        return out, before

    same(k, backend, lambda: (ragged([5]), 6), lambda: (ragged([5, 2]), 0))


@pytest.mark.parametrize("n", [0, 3])
def test_a_sum_of_the_last_iteration(backend: str, n: int) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, begins = torch.zeros(x.size(0)), torch.zeros(x.size(0), dtype=torch.int64)
        for b in hl.tile(x.size(0)):
            last, begin = hl.full([b], 1.0), 7
            for t in hl.tile(n, block_size=1):
                last = x[b, t].sum(1)
                begin = t.begin
            out[b], begins[b] = last, begin
        return out, begins

    same(k, backend, lambda: (torch.arange(6.0).view(2, 3), n))


def test_exact_quotients(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape)
        for b in hl.tile(x.size(0)):
            for t in hl.tile(x.size(1)):
                out[b, t] = (x[b, t] / d[b][:, None]).floor()
        return out

    numbers = torch.arange(1.0, 60.0)
    same(k, backend, lambda: (numbers[:, None] * torch.arange(4.0), numbers))


def test_a_gather_and_a_scatter_of_two_structures(backend: str) -> None:
    @serrate.kernel
    def k(target: JaggedTensor, own: JaggedTensor, other: JaggedTensor, table: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(target.total_elements, table.size(1))
        for b in hl.tile(target.num_rows):
            for t, m in hl.tile([7, table.size(1)]):
                x = other[b, t][:, :, None] * 0.5 + own[b, t][:, :, None] + table[target[b, t], m]
                out[target[b, t], m] = x
        return out

    def given() -> tuple[JaggedTensor, JaggedTensor, JaggedTensor, torch.Tensor]:
        own = ragged([1, 7, 1])
        return own.with_values(torch.arange(9).flip(0)), own, ragged([4, 6, 5]), torch.randn(9, 3)

    same(k, backend, given, lanes={"b": 3, "t": 1, "m": 2})


def test_math_on_constants(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in hl.tile(x.size(0)):
            out[t] = x[t] + hl.full([], 0.7) * hl.full([], 0.3)
        return out

    same(k, backend, lambda: (torch.arange(5.0),))


def test_parts_made_of_constants(backend: str) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> JaggedTensor:
        out = torch.empty_like(jt)
        for b in hl.grid(jt.num_rows):
            for m in hl.tile(jt.size(2)):
                for t in hl.tile(jt.max_length):
                    factor = hl.full([m], 0.7) * hl.full([m], 0.5) * hl.full([m], 3.0)
                    out[b, t, m] = jt[b, t, m] * 0.5 + factor[None, :]
        return out

    same(k, backend, lambda: (ragged([2, 0, 5], 3),))


CUT = {"strategy": "persistent_dynamic", "lanes": {"chunk": 2}}


def cut_or_refused(function: Any, backend: str, given: Given) -> None:
    """Rows in pieces give what whole rows give, or are refused with the reason."""
    wanted = function.interpreted(tile=1)(*given())
    try:
        found = serrate.kernel(function.fn, **CUT).on(backend)(*given())
    except StrategyError as error:
        assert "cannot cut" in str(error)
        return
    torch.testing.assert_close(found, wanted)


def test_pieces_of_two_structures(backend: str) -> None:
    @serrate.kernel
    def k(a: JaggedTensor, other: JaggedTensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.zeros(a.num_rows), torch.zeros(a.num_rows)
        for b in hl.tile(a.num_rows):
            s, u = hl.zeros([b]), hl.zeros([b])
            for t in hl.tile(n):
                s = s + a[b, t].sum(1)
                u = u + other[b, t].sum(1)
            x[b], y[b] = s, u
        return x, y

    cut_or_refused(k, backend, lambda: (ragged([2, 0, 5]), ragged([4, 3, 6]), 7))


def test_pieces_beside_a_dense_sum(backend: str) -> None:
    @serrate.kernel
    def k(a: JaggedTensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.zeros(a.num_rows), torch.zeros(a.num_rows)
        for b in hl.tile(a.num_rows):
            s, u = hl.zeros([b]), hl.zeros([b])
            for t in hl.tile(dense.size(1)):
                s = s + a[b, t].sum(1)
                u = u + dense[b, t].sum(1)
            x[b], y[b] = s, u
        return x, y

    cut_or_refused(k, backend, lambda: (ragged([2, 0, 5]), torch.ones(3, 7)))


def test_pieces_with_a_part_made_of_constants(backend: str) -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows, jt.size(2))
        for b in hl.grid(jt.num_rows):
            for m in hl.tile(jt.size(2)):
                acc = hl.zeros([m])
                for t in hl.tile(jt.max_length):
                    factor = hl.full([m], 0.7) * hl.full([m], 0.5) * hl.full([m], 3.0)
                    acc = acc + (jt[b, t, m] * 0.5 + factor[None, :]).sum(0)
                out[b, m] = acc
        return out

    cut_or_refused(k, backend, lambda: (ragged([2, 0, 5], 3),))


@pytest.mark.parametrize("masked", ["rows", "columns", "depth"])
def test_masks_of_a_product_by_indices_that_were_read(backend: str, masked: str) -> None:
    """An index from memory, and a mask on it, in each of the three dims of a product."""

    @serrate.kernel
    def rows(a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out = torch.full([index.size(0), b.size(1)], 9.0)
        for m, n in hl.tile([index.size(0), b.size(1)]):
            acc, j = hl.zeros([m, n]), index[m]
            for k in hl.tile(a.size(1)):
                acc = acc + hl.load(a, [j, k], extra_mask=(j < 4)[:, None]) @ b[k, n]
            out[m, n] = acc
        return out

    @serrate.kernel
    def columns(a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out = torch.full([a.size(0), index.size(0)], 9.0)
        for m, n in hl.tile([a.size(0), index.size(0)]):
            acc, j = hl.zeros([m, n]), index[n]
            for k in hl.tile(a.size(1)):
                acc = acc + a[m, k] @ hl.load(b, [k, j], extra_mask=(j < 4)[None, :])
            out[m, n] = acc
        return out

    @serrate.kernel
    def depth(a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out = torch.full([a.size(0), b.size(1)], 9.0)
        for m, n in hl.tile([a.size(0), b.size(1)]):
            acc = hl.zeros([m, n])
            for k in hl.tile(index.size(0)):
                j = index[k]
                acc = acc + hl.load(a, [m, j], extra_mask=(j < 4)[None, :]) @ b[k, n]
            out[m, n] = acc
        return out

    torch.manual_seed(0)
    given = (torch.randn(6, 6), torch.randn(6, 6), torch.tensor([0, 5, 2, 4, 1, 3]))
    same({"rows": rows, "columns": columns, "depth": depth}[masked], backend, lambda: given)


@serrate.kernel
def softmax(jt: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(jt)
    for b in hl.tile(jt.num_rows):
        top, total = hl.full([b], float("-inf")), hl.zeros([b])
        for t in hl.tile(jt.max_length):
            x = jt[b, t]
            new = torch.maximum(top, x.amax(1))
            total = total * torch.exp(top - new) + torch.exp(x - new[:, None]).sum(1)
            top = new
        for t in hl.tile(jt.max_length):
            out[b, t] = torch.exp(jt[b, t] - top[:, None]) / total[:, None]
    return out


@pytest.mark.parametrize("lanes", [{"b": 4}, {"b": 2, "t": 2, "t2": 2}, {"b": 4, "t": 1, "t2": 1}], ids=str)
def test_powers_of_rows_side_by_side(backend: str, lanes: dict[str, int]) -> None:
    same(softmax, backend, lambda: (ragged([3, 2, 0, 5]),), lanes=lanes)


@pytest.mark.parametrize("strategy", ["maskless", "masked", "persistent_dynamic"])
def test_powers_under_every_strategy(backend: str, strategy: str) -> None:
    jt = ragged([3, 0, 70, 2, 1, 9])
    wanted = torch.cat([row.softmax(0) for row in jt.unbind()])
    torch.testing.assert_close(serrate.kernel(softmax.fn, strategy=strategy).on(backend)(jt).values, wanted)


@pytest.mark.parametrize("lanes", [{"b": 4, "t": 4, "m": 1}, {"b": 4, "t": 1, "m": 1}, {"b": 2, "t": 1, "m": 4}], ids=str)
def test_rectangles_side_by_side_one_column_at_a_time(backend: str, lanes: dict[str, int]) -> None:
    """Rows end where the longest of them ends; how many columns each has is known only inside the loop over columns."""

    @serrate.kernel
    def k(wide: JaggedTensor, n: int) -> torch.Tensor:
        out = torch.zeros(wide.num_rows)
        for b in hl.tile(wide.num_rows):
            total = hl.zeros([b])
            for t, m in hl.tile([n, 4]):
                total = total + wide[b, t, m].sum(2).sum(1)
            out[b] = total
        return out

    structure = Structure.from_lengths(torch.tensor([3, 0, 2])).with_columns(torch.tensor([2, 4, 3]))
    same(k, backend, lambda: (JaggedTensor(torch.arange(12.0), structure), 4), lanes=lanes)


def test_expand_to_a_size(backend: str) -> None:
    """Also to a size that varies from call to call."""

    @serrate.kernel
    def k(x, w, n):
        out = torch.zeros(2, x.size(0))
        for t in hl.tile(x.size(0)):
            out[0, t] = x[t][:, None].expand(-1, w.size(0)).sum(1)
            out[1, t] = torch.broadcast_to(x[t][:, None], [t, n]).sum(1)
        return out

    for rows, n in ((4, 2), (5, 3), (1, 1)):
        found = k.on(backend)(torch.ones(3), torch.zeros(rows, 2), n)
        assert found.tolist() == [[rows] * 3, [n] * 3]


def test_vectors_are_multiplied(backend: str) -> None:
    @serrate.kernel
    def k(x, y, w):
        out = torch.zeros(3, x.size(0))
        for r in hl.grid(x.size(0)):
            total = hl.zeros([])
            for t in hl.tile(x.size(1)):
                total = total + x[r, t] @ y[t]
            out[0, r] = total
            out[1, r] = torch.dot(x[r, :], y[:])
        for m in hl.tile(x.size(0)):
            out[2, m] = (x[m, :] @ w[:, :])[:, 0]
        return out

    x, y, w = torch.randn(4, 7), torch.randn(7), torch.randn(7, 1)
    wanted = torch.stack([x @ y, x @ y, (x @ w)[:, 0]])
    torch.testing.assert_close(k.on(backend)(x, y, w), wanted, rtol=1e-4, atol=1e-5)


def test_slices_that_vary(backend: str) -> None:
    @serrate.kernel
    def k(x, low, high):
        out = torch.zeros(2, x.size(0))
        for t in hl.tile(x.size(0)):
            out[0, t] = x[t, low:high].sum(1)
            out[1, t] = x[t, : x.size(1) // 2].sum(1)
        return out

    for width, low, high in ((4, 0, 2), (6, 1, 2), (5, -2, 5)):
        x = torch.randn(3, width)
        wanted = torch.stack([x[:, low:high].sum(1), x[:, : width // 2].sum(1)])
        torch.testing.assert_close(k.on(backend)(x, low, high), wanted)


def test_negative_arguments_count_from_the_end(backend: str) -> None:
    """Whether or not the argument has varied."""

    @serrate.kernel
    def k(x, n, less):
        out = torch.zeros(2, x.size(0))
        for t in hl.tile(x.size(0)):
            out[0, t] = x[t, n]
            out[1, t] = x[t, n - less]
        return out

    x = torch.randn(3, 4)
    for n, less in ((-1, 2), (0, 1), (1, 1), (-1, 3), (-4, -1), (3, 0)):
        assert torch.equal(k.on(backend)(x, n, less), torch.stack([x[:, n], x[:, n - less]]))


def test_names_that_statements_bind(backend: str) -> None:
    """Functions, imports and match statements bind names, as assignments do."""

    @serrate.kernel
    def k(x, case):
        import math as m

        def half(v):
            return v / 2

        out = torch.zeros(3, x.size(0))
        for t in hl.tile(x.size(0)):
            out[0, t] = half(x[t]) + m.pi
            count = hl.zeros([t])
            for _ in hl.grid(4):
                match case:
                    case 1:
                        count = count + 1
                    case other:
                        count = count + other
            out[1, t] = count
        return out

    x = torch.randn(5)
    for case in (1, 3):
        found = k.on(backend)(x, case)
        torch.testing.assert_close(found[0], x / 2 + torch.pi)
        assert found[1].tolist() == [4.0 * case] * 5


@pytest.mark.parametrize("what", ["slice", "range", "full", "features"])
def test_values_without_elements_are_refused(backend: str, what: str) -> None:
    """They once had one element, which was read from past the end of the tensor."""

    @serrate.kernel
    def k(x, n):
        out = torch.zeros(x.size(0))
        for t in hl.tile(x.size(0)):
            if what == "slice":
                out[t] = x[t, 2:2].sum(1)
            elif what == "range":
                out[t] = x[t, hl.arange(n)].sum(1)
            elif what == "full":
                out[t] = hl.full([t, n], 1.0).sum(1)
            else:
                out[t] = x[t, :].sum(1)
        return out

    with pytest.raises(KernelError, match="one of its dims has size 0"):
        k.on(backend)(torch.ones(2, 0 if what == "features" else 3), 0)


def test_products_of_narrow_integers_are_summed_in_32_bits(backend: str) -> None:
    @serrate.kernel
    def k(x, w):
        out = torch.zeros(x.size(0), w.size(1), dtype=torch.int32)
        for m, n in hl.tile([x.size(0), w.size(1)], block_size=[4, 4]):
            acc = hl.zeros([m, n], dtype=torch.int32)
            for d in hl.tile(x.size(1), block_size=8):
                acc += hl.dot(x[m, d], w[d, n])
            out[m, n] = acc
        return out

    x, w = (torch.full(shape, 100, dtype=torch.int8) for shape in ((5, 16), (16, 6)))
    assert k.on(backend)(x, w).tolist() == [[160000] * 6] * 5


def test_the_end_of_a_loop_that_runs_no_iteration(backend: str) -> None:
    @serrate.kernel
    def k(n):
        out = torch.zeros(3, n.size(0))
        for r in hl.grid(n.size(0)):
            i = 0
            while i < n[r]:
                i = i + 1
            else:
                out[0, r] = 9
            for _ in hl.grid(n[r]):
                i = i + 10
            else:
                out[1, r] = i
                for j in range(2):
                    i = i + j
                else:
                    out[2, r] = i
        return out

    found = k.on(backend)(torch.tensor([0, 1, 2]))
    assert found.tolist() == [[9, 9, 9], [0, 11, 22], [1, 12, 23]]


def test_integers_times_a_number_have_the_default_dtype(backend: str) -> None:
    """As in torch, for arguments and for literals."""

    @serrate.kernel
    def k(x, y, scale):
        out = torch.zeros(2, x.size(0), dtype=torch.bool)
        for t in hl.tile(x.size(0)):
            out[0, t] = x[t] * scale == y[t]
            out[1, t] = x[t] * 0.1 == y[t]
        return out

    for kind in (torch.int64, torch.int32, torch.uint8):
        x = torch.arange(1, 5, dtype=kind)
        assert k.on(backend)(x, x * 0.1, 0.1).all()
