"""Addresses in Triton: 32 bits only where they suffice, right in tensors of more than 2^31 elements, and masks that leave their
constants alone.

Nothing large is allocated: Triton's interpreter, which computes in the types that the source asks for, runs one program of a grid
and records which elements it would read and write.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from hypothesis import example, given
from hypothesis import strategies as st
from triton.runtime import interpreter

from serrate import ir, ops
from serrate.codegen.triton.addresses import is_narrow, reach
from serrate.ir.expr import Environment, Expr, Symbol, const, maximum, minimum, symbol
from serrate.lower.pipeline import lower
from serrate.lower.stages import stages
from serrate.runtime.triton import TritonExecutable
from serrate.schedule.plan import LaunchOptions
from serrate.schedule.strategies import plan
from serrate.schedule.target import GPU
from tests import triton_memory

# --- which parts have 32 bits --------------------------------------------------------------------------------------------

LAST = {symbol("lane", 0, 63): 63, symbol("column", 0, 1023): 1023, symbol("k", 0, 15): 15}
WIDE = symbol("row")
FACTORS = st.sampled_from([1, 2, 3, 128, 2**20, 2**21, 2**24, 2**25, 2**26 - 1, 2**26, 2**31 - 1, 2**31, 2**33]).flatmap(
    lambda n: st.sampled_from([n, -n])
)


def combined(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: p[0] + p[1]),
        pairs.map(lambda p: p[0] * p[1]),
        pairs.map(lambda p: minimum(*p)),
        pairs.map(lambda p: maximum(*p)),
        st.tuples(inner, FACTORS).map(lambda p: p[0] * p[1]),
        st.tuples(inner, FACTORS).map(lambda p: p[0] + p[1]),
        st.tuples(inner, st.sampled_from([3, 64])).map(lambda p: p[0] // p[1]),
        st.tuples(inner, st.sampled_from([3, 64])).map(lambda p: p[0] % p[1]),
    )


EXPRESSIONS = st.recursive(st.sampled_from([*LAST, WIDE, const(5)]), combined, max_leaves=6)


@example(const(5 * 2**31 - 5), 0)
@given(EXPRESSIONS, st.sampled_from([0, 1, 7]))
def test_what_has_32_bits_does_not_overflow(e: Expr, row: int) -> None:
    """Every combination of first and last positions, computed by numpy in the types of the generated code, and exactly."""
    corners = np.meshgrid(*([0, 1, last] for last in LAST.values()))
    given = {s: c.reshape(-1) for s, c in zip(LAST, corners, strict=True)}
    kind = np.int32 if is_narrow(e, LAST) else np.int64
    typed: dict[Symbol, Any] = {s: c.astype(kind) for s, c in given.items()}
    exact: dict[Symbol, Any] = {s: c.astype(object) for s, c in given.items()}
    right = e.evaluate(Environment({**exact, WIDE: row}))
    if np.abs(np.asarray(right)).max() < 2**62:
        with np.errstate(all="raise"):
            found = e.evaluate(Environment({**typed, WIDE: np.int64(row)}))
        assert (np.asarray(found) == right).all()
    if (most := reach(e, LAST)) is not None:
        assert np.abs(np.asarray(right)).max() <= most < 2**31


def test_lanes_are_widened_where_32_bits_are_too_few() -> None:
    lane, _, k = LAST
    assert is_narrow(WIDE * 2**40 + lane * (2**31 // 63), LAST)
    assert not is_narrow(WIDE + lane * (2**31 // 63 + 1), LAST)
    # Two terms that fit may not fit together.
    assert is_narrow(lane * 2**24 + k * 2**26, LAST)
    assert not is_narrow(lane * 2**24 + k * 2**27, LAST)
    assert is_narrow(lane + (2**31 - 64), LAST) and not is_narrow(lane + (2**31 - 63), LAST)
    # What 64 bits are needed for is not computed in 32.
    assert is_narrow(minimum(WIDE, lane) * 2**40, LAST)
    assert reach(WIDE + lane, LAST) is None and reach(lane * 2, LAST) == 126


# --- elements that a program reads and writes ----------------------------------------------------------------------------


def triton_of(f: ir.Fusion, strategy: str = "maskless", **options: int) -> TritonExecutable:
    (naive,) = stages(f)
    loops = lower(plan(naive, strategy, GPU, **options).apply(naive), "program", (), GPU)
    return TritonExecutable(loops, [LaunchOptions()] * len(loops.kernels))


class Elements:
    """The elements of every tensor that were read and written, in the order of the calls."""

    def __init__(self, bases: Mapping[str, tuple[int, int]]) -> None:
        self.read: dict[str, list[list[int]]] = {name: [] for name in bases}
        self.written: dict[str, list[list[int]]] = {name: [] for name in bases}
        self._bases = bases

    def record(self, into: dict[str, list[list[int]]], pointers: Any, mask: Any) -> bool:
        """Whether the pointers are those of a tensor, rather than of an array of offsets."""
        places = [int(place) for place in pointers[np.broadcast_to(mask, pointers.shape)]]
        for name, (base, size) in self._bases.items():
            if base - 2**46 <= int(pointers.reshape(-1)[0]) < base + 2**46:
                into[name].append([(place - base) // size for place in places])
                return True
        return False


@contextmanager
def recorded(bases: Mapping[str, tuple[int, int]]) -> Iterator[Elements]:
    builder, found = type(interpreter.interpreter_builder), Elements(bases)
    load, store = builder.create_masked_load, builder.create_masked_store

    def read(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        if not found.record(found.read, pointers.data, mask.data):
            return load(self, pointers, mask, other, *rest)
        kind = pointers.get_element_ty()
        return interpreter.TensorHandle(np.zeros(pointers.data.shape, interpreter._get_np_dtype(kind)), kind)

    def write(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return None if found.record(found.written, pointers.data, mask.data) else store(self, pointers, value, mask, *rest)

    with mock.patch.object(builder, "create_masked_load", read), mock.patch.object(builder, "create_masked_store", write):
        yield found


def elements(program: TritonExecutable, at: int, numbers: Mapping[str, int], **arrays: torch.Tensor) -> Elements:
    """What the program at a position of the first kernel's grid reads and writes. Tensors are addresses without memory."""
    launch = program._printed.launches[0]
    function = getattr(program._module, launch.function)
    bases = {t.name: (k << 48, t.dtype.itemsize) for k, t in enumerate(launch.tensors, 1)}
    given: list[Any] = []
    for t in launch.tensors:
        kind = tl.pointer_type(tl.str_to_ty(f"*{'fp32' if t.dtype == torch.float32 else 'u8'}", None).element_ty)
        given.append(tl.tensor(interpreter.TensorHandle(np.array([bases[t.name][0]], np.uint64), kind), kind))
    for a in launch.arrays:
        triton_memory.check_accesses(launch.function, a.name, arrays[a.name])
        given.append(interpreter._implicit_cvt(arrays[a.name]))
    given += [interpreter._implicit_cvt(numbers[str(s)]) for s in launch.symbols]
    interpreter.interpreter_builder.set_grid_dim(at + 1, 1, 1)
    interpreter.interpreter_builder.set_grid_idx(at, 0, 0)
    scope = interpreter._patch_lang(function.fn)
    try:
        with recorded(bases) as found:
            function.rewrite()(*given)
    finally:
        scope.restore()
    return found


ROWS = 2**30 + 5
"""Rows of a tensor whose number fits 32 bits, and whose elements do not."""


def flat(first: int, count: int, width: int) -> list[int]:
    return [*range(first * width, (first + count) * width)]


def test_the_last_block_of_more_elements_than_32_bits_count() -> None:
    with ir.Fusion("relu") as f:
        f.output(ops.relu(f.input((None, 3), torch.float32)))
    found = elements(triton_of(f), ROWS // 512, {"n0": ROWS})
    last = flat(ROWS - 5, 5, 3)
    assert found.read == {"T0": [last], "T1": []} and found.written == {"T0": [], "T1": [last]}


def test_the_second_part_of_joined_rows() -> None:
    """Where it begins is a product of two numbers that fit 32 bits."""
    with ir.Fusion("cat") as f:
        x, y = f.input((None, 4), torch.float32), f.input((None, 4), torch.float32)
        f.output(ops.cat([x, y], 0))
    program = triton_of(f)
    block = int(program.source.split("_next = tl.arange(")[1].split(",")[0])
    at = ROWS // block
    found = elements(program, at, {"n0": ROWS, "n1": 2 * block})
    begin = ROWS - at * block
    assert found.read == {"T0": [flat(at * block, begin, 4)], "T1": [flat(0, block - begin, 4)], "T2": []}
    assert found.written["T2"] == [flat(at * block, block, 4)]


def test_a_row_far_from_the_first() -> None:
    """Its last block is read once, all others twice."""
    with ir.Fusion("softmax") as f:
        x, offsets = f.input((None, 128), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, offsets), dim=1))
    begin, end, block = 2**32 - 3, 2**32 + 200, 128
    found = elements(triton_of(f), 3, {"n0": end, "n1": 3}, T1=torch.tensor([0, begin, end]))
    *first, second = found.read["T0"]
    columns = sorted({place % 128 for place in second})
    assert sorted(itertools.chain(*first)) == [row * 128 + column for row in range(begin, end) for column in columns]
    assert sorted(second) == [row * 128 + column for row in range(begin, begin + block) for column in columns]
    assert columns[-1] == 127


def test_lanes_times_a_stride_that_does_not_fit() -> None:
    """The rows of a matrix that are lanes of one block are 2^26 elements apart."""
    width = 2**26
    with ir.Fusion("product") as f:
        x, offsets = f.input((None, 64), torch.float32), f.input((None,), torch.int64)
        w = f.input((64, width), torch.float32)
        f.output(ops.matmul(ops.as_nested(x, offsets), w))
    program = triton_of(f)
    assert "sr_wide(" in program.source.split("def program")[1]
    found = elements(program, 0, {"n0": 3, "n1": 2}, T1=torch.tensor([0, 3]))
    assert {place // width for place in itertools.chain(*found.read["T2"])} == {*range(64)}


# --- masks ---------------------------------------------------------------------------------------------------------------


def test_masks_leave_the_lanes_of_addresses_alone() -> None:
    """LLVM takes constants out of products of lanes only if nothing else uses these lanes."""
    with ir.Fusion("sum") as f:
        x, offsets = f.input((None, 128), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    source = triton_of(f, tile=64).source
    assert "r0i_next = tl.arange(64, 128)" in source and "r0i[:, None] * 128" in source
    assert "(r0i_next[:, None] < " in source and "(r0i[:, None] < " not in source


def test_masks_leave_the_lanes_of_factored_rows_alone() -> None:
    with ir.Fusion("softmax") as f:
        x, offsets = f.input((None, 128), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, offsets), dim=1))
    source = triton_of(f, tile=64).source
    assert "r0ii[None, :, None] * 128" in source and "r0io[:, None, None] * 1024" in source
    masks = re.findall(r"mask=\((.*?) < ", source)
    assert masks and all("r0ii_next[" in mask and "r0io_next[" in mask for mask in masks)
    assert not any("r0ii[" in mask or "r0io[" in mask for mask in masks)


def test_lanes_that_no_address_multiplies_are_compared_themselves() -> None:
    with ir.Fusion("sum") as f:
        x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    assert "_next" not in triton_of(f).source
