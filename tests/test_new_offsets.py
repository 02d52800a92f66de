"""Calls with new offsets: a program that an earlier call left serves them only if it was made for their form.

In: kernels, traced functions and eager operators, called with rows like those of earlier calls and then with others. Out:
failures that name the change. The oracle slices the values row by row, in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, Structure
from serrate.errors import GradientError, ShapeError, StructureError, StructureMismatch
from serrate.runtime.dispatch import BINDINGS
from serrate.tiles.specialise import LoopPrograms

FIRST = [3, 0, 2, 4]


def sums_kernel() -> Any:
    @serrate.kernel
    def row_sums(jt):
        out = torch.empty([jt.num_rows, jt.values.size(1)], dtype=jt.values.dtype)
        for tile_b in hl.tile(jt.num_rows):
            total = hl.zeros([tile_b, jt.values.size(1)], dtype=jt.values.dtype)
            for tile_k in hl.tile(jt.max_length):
                total = total + jt[tile_b, tile_k, :].sum(1)
            out[tile_b, :] = total
        return out

    return row_sums


def eager_sums() -> Any:
    return lambda jt: jt.sum(dim=1)


def jit_sums() -> Any:
    return serrate.jit(lambda jt: jt.sum(dim=1))


WAYS: dict[str, Callable[[], Any]] = {"kernel": sums_kernel, "jit": jit_sums, "eager": eager_sums}


def ragged(
    lengths: Sequence[int], width: int = 3, dtype: torch.dtype = torch.float32, index: torch.dtype = torch.int64
) -> tuple[JaggedTensor, torch.Tensor]:
    """A ragged tensor with offsets of its own, and the sums of its rows."""
    values = torch.randn(sum(lengths), width).to(dtype)
    bounds = [sum(lengths[:k]) for k in range(len(lengths) + 1)]
    return JaggedTensor.from_csr(values, torch.tensor(bounds, dtype=index)), sums(values, bounds)


def sums(values: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    rows = [values[a:b].sum(0) for a, b in pairwise(bounds)]
    return torch.stack(rows) if rows else values.new_zeros(0, *values.shape[1:])


def warmed(way: str) -> Any:
    """A function that was called with two batches of one form."""
    call = WAYS[way]()
    for lengths in (FIRST, [1, 5, 2]):
        jt, wanted = ragged(lengths)
        torch.testing.assert_close(call(jt), wanted)
    return call


@pytest.fixture
def new_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that were called without a program for the form and sizes of the call."""
    found: list[str] = []
    new = LoopPrograms._new

    def noted(self: LoopPrograms, *args: Any) -> Any:
        found.append(self.name)
        return new(self, *args)

    monkeypatch.setattr(LoopPrograms, "_new", noted)
    yield found


CHANGES: dict[str, dict[str, Any]] = {
    "other lengths": {"lengths": [4, 2, 0, 3]},
    "another total": {"lengths": [7, 1, 1, 9]},
    "more rows": {"lengths": [2] * 40},
    "one row": {"lengths": [5]},
    "one position": {"lengths": [1]},
    "one position among empty rows": {"lengths": [0, 1, 0]},
    "empty rows": {"lengths": [0, 0, 0]},
    "one empty row": {"lengths": [0]},
    "no rows": {"lengths": []},
    "one row that is most of the work": {"lengths": [3, 70_000, 0, 2]},
    "another width": {"lengths": FIRST, "width": 5},
    "a width of one": {"lengths": FIRST, "width": 1},
    "another dtype": {"lengths": FIRST, "dtype": torch.float64},
    "int32 offsets": {"lengths": FIRST, "index": torch.int32},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_calls_that_differ_from_earlier_ones(way: str, change: str) -> None:
    call = warmed(way)
    for _ in range(2):
        jt, wanted = ragged(**CHANGES[change])
        torch.testing.assert_close(call(jt), wanted, rtol=1e-4, atol=1e-3)
        # And back: what the change left behind does not serve the calls before it.
        jt, wanted = ragged(FIRST)
        torch.testing.assert_close(call(jt), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_offsets_that_are_written_to(way: str) -> None:
    call = warmed(way)
    values, offsets = torch.randn(9, 3), torch.tensor([0, 3, 3, 9])
    jt = JaggedTensor.from_csr(values, offsets)
    for bounds in ([0, 3, 3, 9], [0, 1, 8, 9], [0, 9, 9, 9]):
        offsets.copy_(torch.tensor(bounds))
        torch.testing.assert_close(call(jt), sums(values, bounds))


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("bounds", [[0, 5, 3, 9], [0, 3, 3, 12], [-1, 3, 3, 9], [2, 3, 3, 9]])
@pytest.mark.parametrize("way", WAYS)
def test_offsets_that_are_corrupted_after_they_were_checked(way: str, bounds: list[int], seen: bool) -> None:
    call = warmed(way)
    offsets = torch.tensor([0, 3, 3, 9])
    jt = JaggedTensor.from_csr(torch.randn(9, 3), offsets)
    if seen:
        call(jt)
    offsets.copy_(torch.tensor(bounds))
    with pytest.raises((StructureError, ShapeError)):
        call(jt)


@pytest.mark.parametrize("way", WAYS)
def test_offsets_that_nobody_has_checked(way: str) -> None:
    call = warmed(way)
    values = torch.randn(9, 3)
    for bounds in ([0, 3, 3, 9], [0, 4, 8, 9]):
        unchecked = Structure.from_offsets(torch.tensor(bounds), validate=False)
        torch.testing.assert_close(call(JaggedTensor(values, unchecked)), sums(values, bounds))
    wrong = Structure.from_offsets(torch.tensor([0, 7, 3, 9]), validate=False)
    with pytest.raises(StructureError):
        call(JaggedTensor(values, wrong))


@pytest.mark.parametrize("way", WAYS)
def test_rows_with_gaps_do_not_run_programs_for_rows_without(way: str) -> None:
    call = warmed(way)
    values, starts, lengths = torch.randn(12, 3), [1, 4, 8], [2, 0, 3]
    wanted = torch.stack([values[a : a + n].sum(0) for a, n in zip(starts, lengths, strict=True)])
    for _ in range(2):
        jt = JaggedTensor.from_starts(values, torch.tensor(starts), torch.tensor(lengths))
        torch.testing.assert_close(call(jt), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_recorded_or_refused_with_new_offsets(way: str) -> None:
    call = warmed(way)
    jt, _ = ragged([2, 2, 5])
    jt = jt.with_values(jt.values.requires_grad_())
    if way == "kernel":
        with pytest.raises(GradientError):
            call(jt)
    else:
        (gradient,) = torch.autograd.grad(call(jt).sum(), jt.values)
        torch.testing.assert_close(gradient, torch.ones_like(gradient))
    jt, wanted = ragged([2, 2, 5])
    with torch.no_grad():
        torch.testing.assert_close(call(jt.with_values(jt.values.requires_grad_())), wanted)


def test_tangents_are_refused_with_new_offsets() -> None:
    call = warmed("kernel")
    jt, _ = ragged([2, 2, 5])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(GradientError):
        call(jt.with_values(torch.autograd.forward_ad.make_dual(jt.values, torch.ones_like(jt.values))))


def added() -> Any:
    @serrate.kernel
    def add(a, b):
        out = torch.zeros_like(a.values)
        result = a.with_values(out)
        for tile_b in hl.tile(a.num_rows):
            for tile_k in hl.tile(a.max_length):
                result[tile_b, tile_k] = a[tile_b, tile_k] + b[tile_b, tile_k]
        return out

    return add


def test_tensors_of_one_structure_and_of_two() -> None:
    """Past the end of a row of `b` there is 0, also where a program was made for tensors that share their rows."""
    call = added()

    def wanted(a: JaggedTensor, b: JaggedTensor, first: list[int], second: list[int]) -> torch.Tensor:
        rows = []
        for x, y in zip(a.values.split(first), b.values.split(second), strict=True):
            row = x.clone()
            n = min(len(x), len(y))
            row[:n] += y[:n]
            rows.append(row)
        return torch.cat(rows)

    def of(lengths: list[int]) -> JaggedTensor:
        return JaggedTensor.from_lengths(torch.randn(sum(lengths)), torch.tensor(lengths))

    for lengths in ([3, 0, 2], [1, 4, 2], [2, 2, 2]):
        a = of(lengths)
        shared = a.with_values(torch.randn(sum(lengths)))
        torch.testing.assert_close(call(a, shared), wanted(a, shared, lengths, lengths))
        other = lengths[::-1]
        b = of(other)
        torch.testing.assert_close(call(a, b), wanted(a, b, lengths, other))
        equal = of(lengths)
        torch.testing.assert_close(call(a, equal), wanted(a, equal, lengths, lengths))


def test_jit_tells_equal_structures_from_different_ones() -> None:
    call = serrate.jit(lambda a, b: a + b)
    for lengths in ([3, 0, 2], [1, 4, 2]):
        a, b = (JaggedTensor.from_lengths(torch.randn(sum(lengths)), torch.tensor(lengths)) for _ in range(2))
        assert torch.equal(call(a, b).values, a.values + b.values)
        other = JaggedTensor.from_lengths(torch.randn(sum(lengths)), torch.tensor(lengths[::-1]))
        with pytest.raises(StructureMismatch):
            call(a, other)


def test_sizes_that_a_loop_needs_at_compile_time() -> None:
    @serrate.kernel
    def spread(jt, n):
        out = torch.zeros([jt.num_rows, n])
        for tile_b in hl.tile(jt.num_rows):
            total = hl.zeros([tile_b])
            for tile_k in hl.tile(jt.max_length):
                total = total + jt[tile_b, tile_k].sum(1)
            out[tile_b, :] = hl.zeros([tile_b, n]) + total[:, None]
        return out

    for lengths, n in (([3, 0, 2], 2), ([1, 4], 2), ([1, 4], 3), ([2, 2, 1], 3), ([5, 1], 2), ([5], 1), ([5, 2], 4)):
        values = torch.randn(sum(lengths))
        wanted = torch.stack([row.sum().repeat(n) for row in values.split(lengths)])
        torch.testing.assert_close(spread(JaggedTensor.from_lengths(values, torch.tensor(lengths)), n), wanted)


def test_lengths_that_a_loop_needs_at_compile_time(new_programs: list[str]) -> None:
    @serrate.kernel
    def counted(jt):
        out = torch.zeros([jt.num_rows])
        for tile_b in hl.tile(jt.num_rows):
            out[tile_b] = (hl.zeros([tile_b, jt.max_length]) + 1.0).sum(1) + jt[tile_b, :].sum(1)
        return out

    for lengths in ([3, 0, 2], [1, 3], [4, 1], [2, 2], [4, 0, 3]):
        values = torch.randn(sum(lengths))
        wanted = torch.stack([max(lengths) + row.sum() for row in values.split(lengths)])
        torch.testing.assert_close(counted(JaggedTensor.from_lengths(values, torch.tensor(lengths))), wanted)
    assert new_programs.count("counted") == 3, "one for each longest length"


def test_a_number_and_its_class_are_told_apart() -> None:
    @serrate.kernel
    def scaled(x, kind):
        out = torch.empty_like(x)
        for tile in hl.tile(x.size(0)):
            out[tile] = x[tile] * (2 if kind is float else kind)
        return out

    x = torch.randn(5)
    for kind, factor in ((float, 2), (3.0, 3), (float, 2), (4, 4)):
        torch.testing.assert_close(scaled(x, kind), x * factor)


def test_new_offsets_need_no_new_program(new_programs: list[str]) -> None:
    call = warmed("kernel")
    new_programs.clear()
    for lengths in ([4, 2, 0, 3], [7, 1, 1, 9, 2], [2] * 40, [0, 0]):
        jt, wanted = ragged(lengths)
        torch.testing.assert_close(call(jt), wanted)
    assert new_programs == []


TIMES = 3
"""A call with new rows, the next one, which leaves a binding, and one that finds it."""


@pytest.mark.parametrize("way", WAYS)
def test_rows_in_rotation(way: str) -> None:
    """More rows than bindings are kept for, each as often as it takes to leave a binding."""
    call = warmed(way)
    given = [ragged([k % 7, 3, (5 * k) % 4][: 1 + k % 3]) for k in range(BINDINGS + 6)]
    for first in (0, 1):
        for jt, wanted in given[first:]:
            for _ in range(TIMES - first):
                torch.testing.assert_close(call(jt), wanted)


@pytest.mark.parametrize("written", range(TIMES + 1))
@pytest.mark.parametrize("way", WAYS)
def test_offsets_that_are_written_to_between_calls(way: str, written: int) -> None:
    call = warmed(way)
    values, offsets = torch.randn(9, 3), torch.tensor([0, 3, 3, 9])
    jt = JaggedTensor.from_csr(values, offsets)
    for bounds in ([0, 3, 3, 9], [0, 1, 8, 9], [0, 9, 9, 9]):
        for time in range(TIMES + 1):
            if time == written:
                offsets.copy_(torch.tensor(bounds))
            torch.testing.assert_close(call(jt), sums(values, offsets.tolist()))


def test_results_have_the_structure_of_their_argument() -> None:
    double = serrate.jit(lambda jt: jt * 2)
    for lengths in ([3, 0, 2], [1, 4, 2]):
        plain = JaggedTensor.from_lengths(torch.randn(sum(lengths), 2), torch.tensor(lengths))
        for jt in (plain, plain.with_hint(distribution="uniform")):
            for _ in range(TIMES):
                got = double(jt)
                assert got.structure is jt.structure
                assert got.hints == jt.hints
                assert torch.equal(got.values, jt.values * 2)


def test_nested_rows_and_rows_of_two_dims() -> None:
    double = serrate.jit(lambda jt: jt * 2)
    for k in range(3):
        nested = Structure.from_offsets(torch.tensor([0, 2, 3]), torch.tensor([0, 1 + k, 4, 9]))
        columns = Structure.from_offsets(torch.tensor([0, 1 + k, 4]), dim=1)
        both = Structure.independent(Structure.from_offsets(torch.tensor([0, 5 - k, 9])), columns)
        for structure in (nested, both):
            jt = JaggedTensor(torch.randn(9, 4), structure)
            for _ in range(TIMES):
                got = double(jt)
                assert got.structure is structure and torch.equal(got.values, jt.values * 2)


def test_sums_of_the_outer_rows() -> None:
    """The result has only the outer level of its argument's rows."""
    inner_sums = serrate.jit(lambda jt: jt.sum(dim=2))
    for k in range(3):
        words = torch.tensor([0, 1 + k, 4, 9])
        jt = JaggedTensor(torch.arange(9.0), Structure.from_offsets(torch.tensor([0, 2, 3]), words))
        for _ in range(TIMES):
            got = inner_sums(jt)
            assert got.values.tolist() == sums(jt.values, words.tolist()).tolist()
            assert got.offsets.tolist() == [0, 2, 3]


def test_random_numbers_follow_the_seed_whatever_was_called_before() -> None:
    jt, _ = ragged([4, 1, 3])
    noise = serrate.jit(lambda jt: torch.rand_like(jt))
    noise(ragged([2, 2])[0])
    found = []
    for _ in range(TIMES):
        torch.manual_seed(3)
        found.append(noise(jt).values)
    assert all(torch.equal(each, found[0]) for each in found) and found[0].unique().numel() == found[0].numel()


def test_memory_that_a_result_is_written_into() -> None:
    for lengths in ([3, 0, 2], [1, 4, 2]):
        jt, _ = ragged(lengths)
        values = jt.values
        for k in range(TIMES):
            before = values.clone()
            jt += k
            assert jt.values is values and torch.equal(values, before + k)


@pytest.mark.parametrize("way", WAYS)
def test_threads_with_rows_of_their_own(way: str) -> None:
    call = warmed(way)
    # Drawn before: a function that is traced in one thread may not see random numbers drawn in another.
    given = [[ragged([(seed + k) % 5, 2, seed, k][: 2 + k % 3], width=3 if k % 4 else 4) for k in range(12)] for seed in range(4)]

    def work(own: list[tuple[JaggedTensor, torch.Tensor]]) -> None:
        for jt, wanted in own:
            for _ in range(TIMES):
                torch.testing.assert_close(call(jt), wanted)

    with ThreadPoolExecutor(len(given)) as pool:
        for done in [pool.submit(work, own) for own in given]:
            done.result()


def test_gradients_with_new_rows() -> None:
    scaled = serrate.jit(lambda jt, w: (jt * w).sum(dim=1))
    for lengths in ([3, 0, 2], [1, 4, 2], [2, 2]):
        values, w = torch.randn(sum(lengths), 3), torch.randn(3)
        jt = JaggedTensor.from_lengths(values, torch.tensor(lengths))
        weights = torch.randn(len(lengths), 3)
        for _ in range(TIMES):
            mine, own = values.clone().requires_grad_(), w.clone().requires_grad_()
            (scaled(jt.with_values(mine), own) * weights).sum().backward()
            spread = weights.repeat_interleave(torch.tensor(lengths), 0)
            torch.testing.assert_close(mine.grad, spread * w)
            torch.testing.assert_close(own.grad, (spread * values).sum(0))
