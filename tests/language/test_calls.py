"""Calls of compiled kernels: which of them make a program, which take the short way, and that none reads what is no longer so.

In: kernels called many times with something changed in between. Out: a failure where a result is another call's, where a program
is made again without need, or where a call that could be short is not.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import struct
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from benchmarks.examples import EXAMPLES, QUICK, Sizes, case, example
from serrate import Config, JaggedTensor, Kernel, Structure
from serrate.errors import DeviceError, GradientError, KernelError, ShapeError, StructureError
from serrate.runtime.launch import CppExecutable
from serrate.schedule.strategies import SCHEDULES
from serrate.tensor import no_sync
from serrate.tiles.specialise import LoopPrograms
from serrate.tiles.stage import LoopStage
from tests.conftest import FULL

SCALE: Any = 2.0
WEIGHTS: Any = torch.ones(3)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that programs are made for while a test runs."""
    found: list[str] = []
    make = LoopPrograms._make

    def noted(self: LoopPrograms, *args: Any) -> Any:
        found.append(self.name)
        return make(self, *args)

    monkeypatch.setattr(LoopPrograms, "_make", noted)
    yield found


@pytest.fixture
def new_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels called with sizes that no program had in it while a test runs."""
    found: list[str] = []
    new = LoopPrograms._new

    def noted(self: LoopPrograms, *args: Any) -> Any:
        found.append(self.name)
        return new(self, *args)

    monkeypatch.setattr(LoopPrograms, "_new", noted)
    yield found


def ragged(lengths: list[int], *inner: int, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), *inner).to(dtype), lengths)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Up to the rounding of a product that is added at once."""
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)


def fresh(kernel: Kernel) -> Kernel:
    """The same kernel, of which nothing was called yet."""
    return Kernel(kernel.fn, kernel.config)


# --- which calls make a program ------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", SCHEDULES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_new_lengths_make_no_program(name: str, strategy: str, made: list[str], new_sizes: list[str]) -> None:
    chosen: list[Sizes] = [
        dataclasses.replace(
            QUICK,
            rows=5 + n,
            mean=3 + n % 11,
            dense_rows=4 + n,
            dense=(4 + n) * (40 + 16 * (n % 5)),
            groups=3 + n % 7,
            tokens=(3 + n % 7) * (5 + n),
            sequences=3 + n % 5,
            length=4 + n % 13,
        )
        for n in range(50 if FULL else 12)
    ]
    kernel = None
    for n, sizes in enumerate(chosen):
        it = case(name, ("exponential", "giant", "uniform", "bimodal")[n % 4], sizes)
        kernel = kernel or Kernel(it.kernel.fn, Config(strategy=strategy))  # type: ignore[attr-defined]
        assert it.is_right(kernel(*it.arguments), it.wanted())
        if n == 0:
            assert len(made) == 1
    # A padded length is compiled in until it is seen to change; it is 1 in one of the calls, and then broadcasts.
    assert len(made) == len(new_sizes) == (3 if name == "jagged_dense_add" else 1)


@serrate.kernel
def doubled(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    for i, j in hl.tile([x.size(0), x.size(1)]):
        out[i, j] = x[i, j] * 2
    return out


def test_a_size_that_changes_becomes_a_symbol(made: list[str], new_sizes: list[str]) -> None:
    kernel = fresh(doubled)
    for rows, columns in ((2, 3), (5, 3), (5, 4), (2, 9), (7, 3), (1, 1), (0, 5), (5, 0)):
        x = torch.randn(rows, columns)
        assert near(kernel(x, torch.empty_like(x)), x * 2)
    # Dims of size 1 broadcast, and have a program of their own.
    assert len(made) == len(new_sizes) == 3
    # Of two sizes that are the same in one call, each is itself in the next.
    x = torch.randn(3, 6)
    out = torch.zeros(3, 8)
    assert near(kernel(x, out)[:, :6], x * 2) and not out[:, 6:].any()


@serrate.kernel
def counted(x: torch.Tensor, n: int, m: int) -> torch.Tensor:
    out = torch.zeros(x.size(0), 1)
    for i in hl.tile(x.size(0)):
        out[i, 0] = x[i] * n + m
    return out


def test_integers_are_those_of_the_call(made: list[str]) -> None:
    kernel = fresh(counted)
    for rows, n, m in ((4, 4, 7), (9, 7, 9), (7, 7, 7), (3, 7, 7), (3, 2, 7), (7, 7, 3), (2, -1, -5)):
        x = torch.randn(rows)
        assert near(kernel(x, n, m)[:, 0], x * n + m)
    assert len(made) <= 3


@serrate.kernel
def sums(x: torch.Tensor, n: int) -> torch.Tensor:
    out = torch.zeros(x.size(0))
    for i in hl.tile(x.size(0)):
        out[i] = (x[i][:, None] * hl.arange(n)[None, :]).sum(1)
    return out


@serrate.kernel
def first_dims(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.size(0))
    for i in hl.tile(x.size(0)):
        out[i] = (x[i][:, None] * hl.arange(x.size(0))[None, :]).sum(1)
    return out


@serrate.kernel
def longest_rows(jt: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(jt.num_rows)
    for i in hl.tile(jt.num_rows):
        out[i] = (jt[i, 0][:, None] * hl.arange(jt.max_length)[None, :]).sum(1)
    return out


def test_a_size_that_must_be_compiled_in_has_a_program_for_each(made: list[str], new_sizes: list[str]) -> None:
    one, two, three = fresh(sums), fresh(first_dims), fresh(longest_rows)
    for rows, n in ((4, 4), (6, 6), (4, 4), (6, 4), (5, 6)):
        x = torch.randn(rows)
        torch.testing.assert_close(one(x, n), x * sum(range(n)))
        torch.testing.assert_close(two(x), x * sum(range(rows)))
        jt = ragged([n, 1, 2])
        torch.testing.assert_close(three(jt), torch.stack([row[0] for row in jt.unbind()]) * sum(range(n)))
    assert {name: made.count(name) for name in made} == {"sums": 2, "first_dims": 3, "longest_rows": 2}
    del new_sizes[:]
    for n in (4, 6):
        x = torch.randn(n)
        torch.testing.assert_close(one(x, n), x * sum(range(n)))
        torch.testing.assert_close(two(x), x * sum(range(n)))
    assert not new_sizes


@serrate.kernel
def two_blocks(x: torch.Tensor, same: bool) -> torch.Tensor:
    first = hl.register_block_size(8)
    second = first if same else hl.register_block_size(8)
    out = torch.zeros(x.size(0))
    for i in hl.tile(x.size(0), block_size=first):
        out[i] = x[i] + hl.zeros([second]).sum() + (1 if same else 2)
    return out


def test_values_that_are_equal_but_not_the_same_have_programs_of_their_own() -> None:
    @serrate.kernel
    def power(x: torch.Tensor, by: Any) -> torch.Tensor:
        out = torch.zeros(x.size(0))
        for i in hl.tile(x.size(0)):
            out[i] = x[i] * 2 if by is True else x[i] * (by + 4)
        return out

    x = torch.randn(5)
    for _ in range(2):
        for by in (1, True, 1.0, False, 0):
            assert near(power(x, by), x * 2 if by is True else x * (by + 4)), by
        for same in (True, False):
            assert near(two_blocks(x, same), x + (1 if same else 2))


# --- what is read at every call ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int32])
def test_dtypes_in_turn(dtype: torch.dtype, made: list[str]) -> None:
    @serrate.kernel
    def totals(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows, dtype=jt.dtype)
        for i in hl.tile(jt.num_rows):
            total = hl.zeros([i], dtype=jt.dtype)
            for j in hl.tile(jt.max_length):
                total = total + jt[i, j].sum(1)
            out[i] = total
        return out

    for lengths in ([2, 0, 3], [1], [4, 4, 4, 4]):
        for own in (torch.float32, dtype):
            jt = JaggedTensor.from_lengths(torch.randint(-9, 9, (sum(lengths),)).to(own), lengths)
            assert near(totals(jt), torch.stack([row.sum(dtype=own) for row in jt.unbind()]))
    assert len(made) == 4, "for each dtype, and for a result of one element"


def test_structures_in_turn(made: list[str]) -> None:
    @serrate.kernel
    def first(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for i in hl.tile(jt.num_rows):
            for j in hl.tile(jt.max_length):
                out[i] = out[i] + jt[i, j].sum(1)
        return out

    values = torch.randn(12)
    narrow = Structure.from_offsets(torch.tensor([0, 4, 12], dtype=torch.int32))
    gaps = Structure.from_starts(torch.tensor([1, 8]), torch.tensor([2, 3]))
    wide = Structure.from_offsets(torch.tensor([0, 9, 12]))
    for structure in (narrow, gaps, wide, narrow, gaps, wide):
        jt = JaggedTensor(values, structure)
        torch.testing.assert_close(first(jt), torch.stack([row.sum() for row in jt.unbind()]))
    assert len(made) == 3


def test_ragged_tensors_that_share_their_rows_or_do_not() -> None:
    @serrate.kernel
    def both(a: JaggedTensor, b: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(a.num_rows)
        for i in hl.tile(a.num_rows):
            total = hl.zeros([i])
            for j in hl.tile(a.max_length):
                total = total + a[i, j].sum(1)
            for j in hl.tile(b.max_length):
                total = total + b[i, j].sum(1) * 3
            out[i] = total
        return out

    def right(a: JaggedTensor, b: JaggedTensor) -> bool:
        wanted = [x.sum() + y.sum() * 3 for x, y in zip(a.unbind(), b.unbind(), strict=True)]
        return near(both(a, b), torch.stack(wanted))

    one, other = ragged([2, 0, 5]), ragged([4, 1, 2])
    alike = one.with_values(torch.randn(7))
    for _ in range(2):
        assert right(one, alike) and right(one, other) and right(other, one) and right(one, one) and right(alike, one)


def test_a_structure_in_the_place_of_one_that_is_gone() -> None:
    kernel = example("jagged_sum").jagged
    for n in range(200):
        jt = ragged([n % 7, 3 - n % 3, n % 5], 4)
        torch.testing.assert_close(kernel(jt), torch.stack([row.sum(0) for row in jt.unbind()]))
        del jt


def test_tensors_that_are_not_contiguous(new_sizes: list[str]) -> None:
    kernel = fresh(doubled)
    for _ in range(2):
        for x in (torch.randn(4, 3), torch.randn(3, 4).T, torch.randn(8, 3)[::2], torch.randn(1, 3).expand(4, 3)):
            room = torch.zeros(4, 6)
            for out in (torch.empty(4, 3), torch.empty(3, 4).T, room[:, ::2]):
                assert kernel(x, out) is out and near(out, x * 2)
            assert not room[:, 1::2].any()
    ragged_kernel = fresh(case("jagged_softmax", "uniform", QUICK).kernel)  # type: ignore[arg-type]
    for _ in range(2):
        jt = JaggedTensor.from_lengths(torch.randn(4, 6).T, [2, 4])
        torch.testing.assert_close(ragged_kernel(jt).values, torch.cat([row.softmax(0) for row in jt.unbind()]))


def test_tensors_that_are_resized() -> None:
    kernel = fresh(doubled)
    x, out = torch.randn(6, 3), torch.zeros(6, 3)
    for rows in (6, 4, 2, 8):
        x.resize_(rows, 3).normal_()
        out.resize_(rows, 3)
        assert near(kernel(x, out), x * 2)
    jt = ragged([3, 3], 4)
    softmax = fresh(case("jagged_softmax", "uniform", QUICK).kernel)  # type: ignore[arg-type]
    softmax(jt)
    out_of = jt.with_values(jt.values.clone())

    @serrate.kernel
    def into(x: JaggedTensor, out: JaggedTensor) -> None:
        for i, m in hl.tile([x.num_rows, 4]):
            for j in hl.tile(x.max_length):
                out[i, j, m] = x[i, j, m] * 2

    into(jt, out_of)
    into(jt, out_of)
    assert near(out_of.values, jt.values * 2)
    jt.values.resize_(5, 4)
    with pytest.raises(ShapeError, match="6 positions together, but values of shape \\(5, 4\\)"):
        into(jt, out_of)


def test_arguments_that_are_the_same_tensor() -> None:
    @serrate.kernel
    def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for i, j in hl.tile([x.size(0), x.size(1)]):
            x[i, j] = x[i, j] + y[i, j]
        return x

    for _ in range(2):
        x = torch.randn(5, 40)
        wanted = x * 2
        assert near(added(x, x), wanted)
        x, y = torch.randn(5, 40), torch.randn(5, 40)
        wanted = x + y
        assert near(added(x, y), wanted)
        # Large enough for stores that go past the cache.
        x = torch.randn(3000, 1000)
        wanted = x * 2
        assert near(added(x, x), wanted)


def test_what_is_closed_over_or_global_may_be_rebound(monkeypatch: pytest.MonkeyPatch, made: list[str]) -> None:
    factor, table = 30, torch.ones(4)

    @serrate.kernel
    def scaled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for i in hl.tile(x.size(0)):
            out[i] = x[i] * factor * SCALE + table[0] + WEIGHTS[1]
        return out

    def right() -> bool:
        x = torch.randn(6)
        return near(scaled(x), x * factor * SCALE + table[0] + WEIGHTS[1])

    here = sys.modules[__name__]
    assert right() and right()
    monkeypatch.setattr(here, "SCALE", 0.5)
    monkeypatch.setattr(here, "WEIGHTS", torch.randn(7))
    table = torch.randn(2)
    assert right() and len(made) == 1, "floats and tensors are given to the program"
    factor = 5
    assert right() and right() and len(made) == 2
    factor = 6
    assert right() and len(made) == 2, "an integer that has changed is given to it too"
    monkeypatch.setattr(here, "SCALE", 3)
    assert right() and right() and len(made) == 3
    table = torch.randn(2, dtype=torch.float64).float().double()
    monkeypatch.setattr(here, "SCALE", True)
    x = torch.randn(6)
    torch.testing.assert_close(scaled(x), (x * factor + table[0] + WEIGHTS[1]).float())


def test_a_name_of_python_may_become_a_global_one() -> None:
    lines = ["def kernel(x):", "    out = torch.empty_like(x)", "    for i in hl.tile(x.size(0)):"]
    text = "\n".join([*lines, "        out[i] = x[i] * len((1, 2))", "    return out", ""])
    linecache.cache["<a kernel of a test>"] = (len(text), None, text.splitlines(True), "<a kernel of a test>")
    names: dict[str, Any] = {"torch": torch, "hl": hl}
    exec(compile(text, "<a kernel of a test>", "exec"), names)
    kernel, x = serrate.kernel(names["kernel"]), torch.randn(3)
    assert near(kernel(x), x * 2) and near(kernel(x), x * 2)
    names["len"] = lambda pair: 7
    assert near(kernel(x), x * 7) and near(kernel(x), x * 7)
    del names["len"]
    assert near(kernel(x), x * 2)


BY = 2.0


def helped(x: Any) -> Any:
    return x * BY


def test_numbers_of_modules_objects_and_helping_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("numbers_of_a_test")
    module.factor = 2  # type: ignore[attr-defined]
    thing = types.SimpleNamespace(factor=3.0)

    @serrate.kernel
    def scaled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for i in hl.tile(x.size(0)):
            out[i] = helped(x[i]) * module.factor + thing.factor
        return out

    here = sys.modules[__name__]
    x = torch.randn(6)
    for by, own, other in ((2.0, 2, 3.0), (5.0, 2, 3.0), (5.0, 4, 3.0), (5.0, 4, -1.0), (2.0, 2, 3.0)):
        monkeypatch.setattr(here, "BY", by)
        module.factor, thing.factor = own, other  # type: ignore[attr-defined]
        for _ in range(2):
            assert near(scaled(x), x * by * own + other)


def test_containers_may_hold_something_else(made: list[str]) -> None:
    @serrate.kernel
    def total(parts: Any, named: dict[str, Any]) -> torch.Tensor:
        out = torch.zeros(parts[0].size(0))
        for i in hl.tile(parts[0].size(0)):
            sums = hl.zeros([i])
            for part in parts:
                sums = sums + part[i]
            for name in named:
                sums = sums + named[name] * len(name)
            out[i] = sums
        return out

    def right(count: int, kind: Callable[..., Any], named: dict[str, Any]) -> bool:
        parts = kind(torch.randn(5) for _ in range(count))
        wanted = torch.zeros(5)
        for part in (*parts, *(x * len(name) for name, x in named.items())):
            wanted = wanted + part
        return near(total(parts, named), wanted)

    for _ in range(2):
        assert right(2, list, {"a": 1.0}) and right(2, list, {"a": -3.0})
        assert right(3, list, {"a": 1.0}) and right(2, tuple, {"a": 1.0}) and right(2, list, {"bbb": 2.0, "a": 1.0})
        assert right(2, list, {"a": 2.0, "bbb": 1.0})
        assert right(2, list, {"a": 1})
    assert len(made) == 6


def test_later_calls_are_refused_as_first_ones_are() -> None:
    kernel = fresh(doubled)
    x = torch.randn(4, 3)
    kernel(x, torch.empty(4, 3))
    with pytest.raises(GradientError):
        kernel(x.clone().requires_grad_(), torch.empty(4, 3))
    with torch.no_grad():
        assert near(kernel(x.clone().requires_grad_(), torch.empty(4, 3)), x * 2)
        assert near(kernel(torch.nn.Parameter(x), torch.empty(4, 3)), x * 2)
    with pytest.raises(DeviceError):
        kernel(x.to("meta"), torch.empty(4, 3))
    assert near(kernel(x, torch.empty(4, 3)), x * 2)


# --- what functions and objects of the user's read -------------------------------------------------------------------------


class Factors:
    """Attributes of a class, of an object, and of one with slots."""

    __slots__ = ("own",)
    shared = 2.0

    def __init__(self, own: float) -> None:
        self.own = own


TABLE: list[float] = [2.0, 3.0]
SPACE = types.SimpleNamespace(factor=2.0, inner=types.SimpleNamespace(factor=5.0))
FACTORS = Factors(3.0)
OFFSET = torch.tensor(1.0)


def inmost(x: Any) -> Any:
    return x * 2


def by_class(x: Any) -> Any:
    return x * Factors.shared


def by_slot(x: Any) -> Any:
    return x * FACTORS.own


def by_list(x: Any) -> Any:
    return x * TABLE[0] + sum(TABLE)


def by_namespace(x: Any) -> Any:
    return x * SPACE.factor + SPACE.inner.factor


def by_default(x: Any, factor: float = 2.0) -> Any:
    return x * factor


def by_another(x: Any) -> Any:
    return inmost(x) + 1


def by_tensor(x: Any) -> Any:
    return x * OFFSET.item()


@pytest.mark.parametrize("helper", [by_class, by_slot, by_list, by_namespace, by_default, by_another, by_tensor])
def test_what_a_helping_function_reads_may_change(
    helper: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, made: list[str]
) -> None:
    @serrate.kernel
    def helped_by(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for i in hl.tile(x.size(0)):
            out[i] = helper(x[i])
        return out

    def right() -> bool:
        x = torch.randn(6)
        return near(helped_by(x), helper(x)) and near(helped_by(x), helper(x))

    here = sys.modules[__name__]
    assert right() and len(made) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Factors, "shared", 7.0)
        patch.setattr(here, "FACTORS", Factors(-1.0))
        patch.setattr(here, "TABLE", [9.0, 1.0, 1.0])
        patch.setattr(SPACE.inner, "factor", -2.0)
        patch.setattr(by_default, "__defaults__", (4.0,))
        patch.setattr(here, "inmost", lambda x: x * 3)
        patch.setattr(here, "OFFSET", torch.tensor(4.0))
        assert right() and len(made) == 2
        FACTORS.own, TABLE[1], SPACE.factor = 11.0, 5.0, 0.5
        OFFSET.add_(2)
        assert right()
    programs = len(made)
    assert right() and len(made) == programs, "what was as it is now has its program still"


def test_attributes_that_a_kernel_itself_reads_may_change() -> None:
    @serrate.kernel
    def scaled(x: torch.Tensor, factors: Any, space: Any) -> torch.Tensor:
        out = torch.empty_like(x)
        for i in hl.tile(x.size(0)):
            out[i] = x[i] * factors.own * Factors.shared + space.inner.factor
        return out

    factors, space = Factors(2.0), types.SimpleNamespace(inner=types.SimpleNamespace(factor=1.0))
    x = torch.randn(6)
    for own, inner in ((2.0, 1.0), (3.0, 1.0), (3.0, -1.0), (2.0, 1.0)):
        factors.own, space.inner.factor = own, inner
        for _ in range(2):
            assert near(scaled(x, factors, space), x * own * Factors.shared + inner)


def test_a_tensor_that_is_reached_through_an_object_is_refused_by_tiles() -> None:
    space = types.SimpleNamespace(weight=torch.ones(6))

    @serrate.kernel
    def scaled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for i in hl.tile(x.size(0)):
            out[i] = x[i] * space.weight[i]
        return out

    with pytest.raises(KernelError, match="comes from a function or an object: assign it to a variable"):
        scaled(torch.ones(6))


# --- offsets that are written to in place ----------------------------------------------------------------------------------


@serrate.kernel
def row_totals(jt: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(jt.num_rows)
    for i in hl.tile(jt.num_rows):
        total = hl.zeros([i])
        for j in hl.tile(jt.max_length):
            total = total + jt[i, j].sum(1)
        out[i] = total
    return out


@pytest.mark.parametrize("strategy", SCHEDULES)
def test_offsets_written_in_place_are_those_of_the_next_call(strategy: str, made: list[str], new_sizes: list[str]) -> None:
    kernel = Kernel(row_totals.fn, Config(strategy=strategy))
    values, offsets = torch.randn(40), torch.tensor([0, 10, 10, 40])
    jt = JaggedTensor.from_csr(values, offsets)
    for bounds in ([0, 10, 10, 40], [0, 39, 40, 40], [0, 0, 0, 40], [0, 1, 2, 40], [0, 10, 10, 40]):
        offsets.copy_(torch.tensor(bounds))
        wanted = torch.stack([values[a:b].sum() for a, b in itertools.pairwise(bounds)])
        assert near(kernel(jt), wanted) and near(kernel(jt.with_values(values)), wanted)
    assert len(made) == len(new_sizes) == 1


def test_starts_and_inner_offsets_written_in_place_are_those_of_the_next_call() -> None:
    values, starts, inner = torch.randn(12), torch.tensor([1, 8]), torch.tensor([0, 5, 5, 12])
    gaps = JaggedTensor(values, Structure.from_starts(starts, torch.tensor([2, 3])))
    nested = JaggedTensor(values, Structure.from_offsets(torch.tensor([0, 1, 3]), inner))

    @serrate.kernel
    def words(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_groups, 3)
        for g in hl.tile(jt.num_groups):
            for s in hl.tile(3):
                total = hl.zeros([g, s])
                for w in hl.tile(jt.max_length):
                    total = total + jt[g, s, w].sum(2)
                out[g, s] = total
        return out

    for first, second in ((1, 8), (0, 2), (4, 9)):
        starts.copy_(torch.tensor([first, second]))
        assert near(row_totals(gaps), torch.stack([values[first : first + 2].sum(), values[second : second + 3].sum()]))
    for at in ([0, 5, 5, 12], [0, 1, 12, 12], [0, 4, 8, 12]):
        inner.copy_(torch.tensor(at))
        a, b, c = (values[x:y].sum() for x, y in itertools.pairwise(at))
        assert near(words(nested), torch.stack([a, torch.tensor(0.0), torch.tensor(0.0), b, c, torch.tensor(0.0)]).view(2, 3))


def test_offsets_that_are_wrong_after_writing_are_refused() -> None:
    kernel = fresh(row_totals)
    offsets = torch.tensor([0, 2, 5, 9])
    jt = JaggedTensor.from_csr(torch.randn(9), offsets)
    kernel(jt)
    for bounds, kind, message in (
        ([0, 2, 5, 12], ShapeError, "the rows hold 12 positions together, but values of shape"),
        ([0, 7, 5, 9], StructureError, "offsets must not decrease"),
        ([-3, 2, 5, 9], StructureError, "offsets must start at 0"),
        ([0, 2, 5, 8], ShapeError, "the rows hold 8 positions together"),
    ):
        offsets.copy_(torch.tensor(bounds))
        for _ in range(2):
            with pytest.raises(kind, match=message):
                kernel(jt)
    offsets.copy_(torch.tensor([0, 9, 9, 9]))
    assert near(kernel(jt), torch.stack([jt.values.sum(), torch.tensor(0.0), torch.tensor(0.0)]))
    starts = torch.tensor([0, 4])
    gaps = JaggedTensor(torch.randn(9), Structure.from_starts(starts, torch.tensor([2, 3])))
    kernel(gaps)
    starts[1] = 7
    with pytest.raises(ShapeError, match="the rows reach position 10"):
        kernel(gaps)
    starts[1] = -1
    with pytest.raises(StructureError, match="starts must not be negative"):
        kernel(gaps)


def test_offsets_made_in_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        jt = JaggedTensor.from_lengths(torch.arange(5.0), torch.tensor([2, 0, 3]))
        for _ in range(3):
            assert row_totals(jt).tolist() == [1, 0, 9]


# --- torch's default device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SCHEDULES)
def test_calls_under_another_default_device(strategy: str) -> None:
    @serrate.kernel(strategy=strategy)
    def scaled(jt: JaggedTensor, by: float) -> torch.Tensor:
        out = torch.empty(jt.num_rows, device=jt.device)
        for i in hl.tile(jt.num_rows):
            total = hl.zeros([i])
            for j in hl.tile(jt.max_length):
                total = total + jt[i, j].sum(1)
            out[i] = total * by + hl.arange(5).sum()
        return out

    softmax = Kernel(example("jagged_softmax").jagged.fn, Config(strategy=strategy))
    jt, wide = ragged([2, 0, 30]), ragged([2, 0, 30], 4)
    wanted = torch.stack([row.sum() * 0.5 + 10 for row in jt.unbind()])
    rows = [row.softmax(0) for row in wide.unbind()]
    with torch.device("meta"):
        found = [scaled(jt, 0.5) for _ in range(3)] + [scaled.interpreted(tile=tile)(jt, 0.5) for tile in (1, "whole")]
        soft = [softmax(wide) for _ in range(3)]
    assert all(near(each, wanted) for each in found)
    assert all(near(mine, theirs) for each in soft for mine, theirs in zip(each.unbind(), rows, strict=True))


# --- threads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jagged_softmax", "jagged_layer_norm", "jagged_flash_attention"])
def test_threads_that_call_at_once(name: str, made: list[str]) -> None:
    kernel = fresh(case(name, "uniform", QUICK).kernel)  # type: ignore[arg-type]
    cases = [case(name, "exponential", dataclasses.replace(QUICK, rows=6 + n, sequences=3 + n)) for n in range(4)]
    wanted = [it.wanted() for it in cases]
    together = Barrier(4)

    def work(own: int) -> bool:
        together.wait()
        # Every thread has rows of its own, and from time to time those of another.
        turns = [(own + (n % 5 == 4)) % 4 for n in range(60)]
        return all(cases[k].is_right(kernel(*cases[k].arguments), wanted[k]) for k in turns)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert len(made) == 1


def test_asking_for_the_source_does_not_stop_calls_elsewhere() -> None:
    kernel = fresh(doubled)
    x = torch.randn(4, 3)
    kernel(x, torch.empty(4, 3))

    def ask(_: int) -> bool:
        return "doubled" in kernel.source(x, torch.empty(4, 3))

    def call(_: int) -> bool:
        return near(kernel(x, torch.zeros(4, 3)), x * 2)

    with ThreadPoolExecutor(2) as pool:
        asked, called = pool.map(ask, range(40)), pool.map(call, range(400))
        assert all(asked) and all(called)


def test_a_call_uses_as_many_threads_as_torch_does_then(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = fresh(doubled)
    small, large = torch.randn(4, 3), torch.randn(400, 300)
    given: list[tuple[int, ...]] = []
    load = CppExecutable.function

    def noted(self: CppExecutable) -> Callable[[bytes, bytes], None]:
        function = load(self)

        def call(pointers: bytes, numbers: bytes) -> None:
            given.append(struct.unpack(f"{len(numbers) // 8}q", numbers)[:2])
            function(pointers, numbers)

        return call

    monkeypatch.setattr(CppExecutable, "function", noted)
    for x in (small, large):
        kernel(x, torch.empty_like(x))
    given.clear()
    threads = torch.get_num_threads()
    try:
        for count in (2, 1, 2):
            torch.set_num_threads(count)
            for x in (small, large):
                assert near(kernel(x, torch.empty_like(x)), x * 2)
    finally:
        torch.set_num_threads(threads)
    assert given == [(1, 0), (2, 0), (1, 0), (1, 0), (1, 0), (2, 0)]


def test_a_kernel_may_call_another() -> None:
    @serrate.kernel
    def inner(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for i in hl.tile(x.size(0)):
            out[i] = x[i] + 1
        return out

    @serrate.kernel
    def outer(x: torch.Tensor) -> torch.Tensor:
        y = inner(x)
        out = torch.empty_like(x)
        for i in hl.tile(hl.specialize(y.size(0))):
            out[i] = y[i] * 2
        return inner(out)

    for rows in (3, 3, 8):
        x = torch.randn(rows)
        assert near(outer(x), (x + 1) * 2 + 1)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_later_calls_bind_nothing_whatever_their_memory_and_floats(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, scale: float, shift: float) -> torch.Tensor:
        out = torch.empty_like(x)
        for t in hl.tile(x.size(0)):
            out[t] = x[t] * scale + shift
        return out

    bound: list[int] = []
    bind = LoopStage.bind_or_run
    monkeypatch.setattr(LoopStage, "bind_or_run", lambda stage, items: (bound.append(1), bind(stage, items))[1])
    run = k.on(backend)
    for scale, shift in ((2.0, 1.0), (2.0, 1.0), (3.0, 1.0), (1.0, 3.0), (0.0, -0.0), (-0.0, -0.0)):
        x = torch.randn(4).abs()
        found = run(x, scale, shift)
        assert torch.equal(found, x * scale + shift)
        assert torch.equal(found.signbit(), (x * scale + shift).signbit())
    assert len(bound) == 1


@pytest.mark.triton
@pytest.mark.parametrize("name", ["jagged_sum", "jagged_softmax", "jagged_layer_norm", "grouped_gemm"])
def test_rows_of_unknown_lengths_take_no_host_copy_and_one_program(
    name: str, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    build = LoopStage._build
    monkeypatch.setattr(LoopStage, "_build", lambda stage, *given: (built.append(stage.name), build(stage, *given))[1])
    sized: list[object] = []
    size = LoopStage.sized
    monkeypatch.setattr(LoopStage, "sized", staticmethod(lambda call, made: (sized.append(made), size(call, made))[1]))
    function = example(name).jagged_per_group if name == "grouped_gemm" else example(name).jagged
    run = serrate.kernel(function.fn).on("triton")
    weights = (torch.randn(3, 4, 5),) if name == "grouped_gemm" else ()
    for lengths in ([2, 0, 7], [4, 4, 1], [0, 0, 9], [3, 1, 5]):
        values, offsets = torch.randn(9, 4), torch.tensor([0, *itertools.accumulate(lengths)])
        wanted = function.interpreted()(JaggedTensor.from_csr(values, offsets.clone()), *weights)
        with no_sync(strict=True):
            found = run(JaggedTensor.from_csr(values, offsets), *weights)
        parts = [x.values if isinstance(x, JaggedTensor) else x for x in (found, wanted)]
        torch.testing.assert_close(*parts)
    # All of these calls have the same numbers of rows and positions.
    assert len(made) == len(built) == len(sized) == 1


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_memory_under_two_names_is_refused_where_it_is_stored_to(backend: str) -> None:
    @serrate.kernel
    def k(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(y)
        for t in hl.tile(y.size(0)):
            before = y[t]
            x[t] = before * 0
            out[t] = before
        return out

    run = k.on(backend)
    whole = torch.arange(9.0)
    with pytest.raises(KernelError, match=r"x, which the kernel stores to, shares memory with y: .*y\.clone\(\)"):
        run(whole, whole.view(-1))
    assert run(torch.zeros(4), whole[:4].clone()).tolist() == [0, 1, 2, 3]
    # Also where the program is there already, and where only some elements are shared.
    for x, y in ((whole[:4], whole[:4]), (whole[:4], whole[3:7]), (whole[2:6], whole[:4])):
        with pytest.raises(KernelError, match="shares memory"):
            run(x, y)
    assert run(whole[:4], whole[4:8]).tolist() == [4, 5, 6, 7]
    assert run(torch.zeros(0), torch.zeros(0)).tolist() == []


@serrate.kernel
def stored_twice(x: torch.Tensor, out: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        out[t] = x[t] + 1
        out[t] = x[t] * 2


@serrate.kernel
def stored_again(x: torch.Tensor, out: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        for _ in hl.grid(3):
            out[t] = x[t] + 1


@serrate.kernel
def stored_later(x: torch.Tensor, out: torch.Tensor, turned: bool) -> None:
    for t in hl.tile(x.size(0)):
        if x.size(0) > 4:
            out[t] = x[t] + 1
        else:
            out[t] = x[t] * 2
        if turned:
            out[t] = -out[t]


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_one_memory_is_read_only_before_it_is_stored_to(backend: str) -> None:
    """A later read might return the old contents."""
    x, out = torch.arange(5.0), torch.zeros(5)
    for kernel, wanted in ((stored_twice, x * 2), (stored_again, x + 1)):
        with pytest.raises(KernelError, match=r"out, which the kernel stores to, shares memory with x"):
            kernel.on(backend)(x, x)
        kernel.on(backend)(x, out)
        assert torch.equal(out, wanted)
    for size, turned in ((5, False), (4, True), (5, True)):
        x = torch.arange(float(size))
        wanted = (x + 1 if size > 4 else x * 2) * (-1 if turned else 1)
        stored_later.on(backend)(x, x, turned)
        assert torch.equal(x, wanted)


@serrate.kernel
def stored_beside(x: torch.Tensor, out: torch.Tensor, n: int) -> None:
    for _ in hl.grid(1):
        for k in hl.grid(n):
            i = hl.arange(8)
            out[i + k] = x[i + k] + 1


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_one_memory_is_not_read_where_an_earlier_iteration_has_stored(backend: str) -> None:
    x, out = torch.arange(12.0), torch.zeros(12)
    with pytest.raises(KernelError, match=r"out, which the kernel stores to, shares memory with x"):
        stored_beside.on(backend)(x, x, 4)
    stored_beside.on(backend)(x, out, 4)
    assert torch.equal(out[:11], x[:11] + 1)


def test_an_argument_that_is_not_there() -> None:
    @serrate.kernel
    def k(x: torch.Tensor, bias: torch.Tensor | None = None, *, scale: float = 2.0) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in hl.tile(x.size(0)):
            v = x[t] * scale
            if bias is not None:
                v = v + bias[t]
            out[t] = v
        return out

    x = torch.arange(10.0)
    for run in (k, k.on("reference"), k.interpreted(tile=3)):
        for _ in range(2):
            assert torch.equal(run(x), 2 * x)
            assert torch.equal(run(x, x), 3 * x)
            assert torch.equal(run(x, None, scale=1.0), x)


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_a_loop_that_stores_nothing(backend: str) -> None:
    @serrate.kernel
    def optional(x: torch.Tensor, stored: bool) -> torch.Tensor:
        out = torch.zeros(x.size(0))
        for t in hl.tile(x.size(0)):
            doubled = x[t] * 2
            if stored:
                out[t] = doubled
        return out

    x = torch.arange(5.0)
    for stored in (False, True, False):
        assert torch.equal(optional.on(backend)(x, stored), x * 2 * stored)
