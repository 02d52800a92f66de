"""Loops that begin with the last block of the loop before them: results for every length, what is read once, and which loops.

The oracle is plain torch in float64, row by row; Triton's interpreter checks the bounds of every access.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import given, settings
from hypothesis import strategies as st

import serrate
from serrate import JaggedTensor, ops
from serrate.codegen.triton.printer import print_triton
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Expr, Less, const, symbol
from serrate.ir.fusion import Fusion
from serrate.ir.loops import Assign, Declare, For, Lane, Local, LoopKernel, LoopProgram, Node, Reduce, Write, held, load
from serrate.ir.tile import GRID, SERIAL
from serrate.ir.values import Role, Tensor, Value, call
from serrate.lower.passes.reuse_last_block import reuse_last_block

pytestmark = pytest.mark.triton
Body = Callable[[Any], Any]


def rows(lengths: list[int], *inner: int, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    values = torch.randn(sum(lengths), *inner, generator=torch.Generator().manual_seed(0)).to(dtype)
    return JaggedTensor.from_lengths(values, torch.tensor(lengths))


def centred(x: Any) -> Any:
    """Two statistics, and a third loop that needs both."""
    shifted = x - x.amax(1, keepdim=True)
    return shifted / (1 + (shifted * shifted).sum(1, keepdim=True))


BODIES: dict[str, tuple[Body, Body]] = {
    "softmax": (lambda x: torch.softmax(x, 1), lambda row: torch.softmax(row, 0)),
    "log softmax": (lambda x: torch.log_softmax(x, 1), lambda row: torch.log_softmax(row, 0)),
    "layer norm": (lambda x: ops.layer_norm(x, (1, 2)), lambda row: functional.layer_norm(row, row.shape)),
    "scaled softmax": (lambda x: torch.softmax(x * 3, 1) * x, lambda row: torch.softmax(row * 3, 0) * row),
    "centred": (
        centred,
        lambda row: (row - row.amax(0)) / (1 + ((row - row.amax(0)) ** 2).sum(0)),
    ),
    "running": (
        lambda x: torch.cumsum(torch.softmax(x, 1), 1),
        lambda row: torch.cumsum(torch.softmax(row, 0), 0),
    ),
}


def compare(found: JaggedTensor, x: JaggedTensor, row: Body, tolerance: float) -> None:
    for own, one in zip(found.unbind(), x.unbind(), strict=True):
        wanted = row(one.double()) if len(one) else one.double()
        torch.testing.assert_close(own.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("strategy", ["maskless", "persistent_dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_length_around_a_block(name: str, strategy: str, dtype: torch.dtype) -> None:
    body, row = BODIES[name]
    x = rows([0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 0, 600], 48, dtype=dtype)
    found = serrate.jit(body, backend="triton", strategy=strategy)(x)
    compare(found, x, row, 1e-4 if dtype == torch.float32 else 3e-2)


@settings(max_examples=8)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.sampled_from([1, 5, 33]), st.sampled_from(list(BODIES)))
def test_any_lengths(lengths: list[int], width: int, name: str) -> None:
    body, row = BODIES[name]
    x = rows(lengths, width)
    compare(serrate.jit(body, backend="triton", strategy="maskless")(x), x, row, 1e-4)


def source_of(body: Body, strategy: str, width: int = 64) -> str:
    return serrate.jit(body, backend="triton", strategy=strategy).source(rows([70, 3], width)).split("\ndef ")[-1]


def test_the_last_block_is_loaded_once() -> None:
    """Exponentials are computed again: in the first loop, each thread subtracts a maximum of its own."""
    source = source_of(BODIES["softmax"][0], "maskless")
    first, others = re.split(r"\n    if \(0 < r0o_count\):\n", source)
    begun, rest = others.split("\n    for r0o_step in ")
    assert "T0_last" in first and "tl.load(" not in begun and "sr_exp_diff(T0_last, " in begun
    assert "tl.load(T0" in rest and "mask=" not in rest


def test_the_exponentials_of_the_last_block_are_computed_once() -> None:
    with Fusion("softmax") as f:
        numbers, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(numbers, offsets), 1))
    source = f.compile("triton", "maskless", tile=64).source(torch.zeros(600), torch.tensor([0, 600])).split("\ndef ")[-1]
    first, others = re.split(r"\n    if \(0 < r0o_count\):\n", source)
    begun, rest = others.split("\n    for r0o_step in ")
    assert "T0_last" in first and "tl.load(" not in begun and "exp" not in begun and "T0_last * " in begun
    assert "tl.load(T0" in rest and "mask=" not in rest


def test_rows_side_by_side_go_forward() -> None:
    """Their blocks end at different places, so that all would be masked."""
    assert "T0_last" not in source_of(BODIES["softmax"][0], "masked")


def test_a_loop_that_needs_its_elements_in_order_goes_forward() -> None:
    source = source_of(lambda x: torch.cumsum(x - x.mean(1, keepdim=True), 1), "maskless")
    assert "_back" not in source


# --- which loops are reversed --------------------------------------------------------------------------------------------------

N, C, R = symbol("n"), symbol("c", 0), symbol("r", 0)
K, D = Lane(symbol("k", 0, 3), 4), Lane(symbol("d", 0, 7), 8)
LENGTH = Array("lengths")[C]
ROW = Less(R * 4 + K.symbol, LENGTH)
TOTAL, PLACE = Local("total", torch.float32, (D,)), Local("place", torch.int64, (K,))


def tensor(name: str, role: Role, dtype: torch.dtype = torch.float32) -> Tensor:
    dims = (IterDomain(N, name=f"{name}_0"), IterDomain(8, name=f"{name}_1"))
    return Tensor(name, dtype, dims, dims, role)


X, Y, IDS = tensor("x", Role.INPUT), tensor("y", Role.OUTPUT), tensor("ids", Role.INPUT, torch.int64)
POWER = call("exp", load(X, (R * 4 + K.symbol, D.symbol)), dtype=torch.float32)
QUOTIENT = call("div", POWER, held(TOTAL), dtype=torch.float32)


def is_reversed(*second: Node, between: tuple[Node, ...] = ()) -> bool:
    """Whether a loop of these statements begins with the last block of a loop that sums powers."""
    extent = (LENGTH + 3) // 4
    sums, uses = (For(R, extent, SERIAL, body, extent) for body in ((Reduce((K, D), (ROW,), TOTAL, "sum", POWER),), second))
    kernel = LoopKernel("p", (For(C, N, GRID, (Declare(TOTAL, 0.0), sums, *between, uses), N),))
    program = LoopProgram("p", (kernel,), (X, IDS), (Y,), (), (), (N,))
    made = reuse_last_block(program)
    assert (made is program) == (str(made) == str(program))
    return made is not program


def store(place: Expr, value: Value = QUOTIENT, into: Tensor = Y) -> Write:
    return Write((K, D), (ROW,), into, (place, D.symbol), value)


def test_a_loop_that_stores_each_element_once_is_reversed() -> None:
    assert is_reversed(store(R * 4 + K.symbol))
    assert is_reversed(store(R * 7 + K.symbol * 2 + LENGTH))


def test_a_loop_with_masks_before_its_last_block_runs_forward() -> None:
    whole = store(R * 4 + K.symbol)
    assert not is_reversed(replace(whole, guard=(ROW, Less(R * 4 + K.symbol, N))))
    assert not is_reversed(replace(whole, guard=(ROW, Less(C, R * 4 + K.symbol))))


def test_the_last_store_to_an_element_stays_the_last() -> None:
    assert not is_reversed(store(K.symbol))
    assert not is_reversed(store(R * 3 + K.symbol))
    assert not is_reversed(store((R * 4 + K.symbol) // 2))
    looked_up = Assign((K,), (ROW,), PLACE, load(IDS, (R * 4 + K.symbol, const(0))))
    place = Array("place", local=True)[K.symbol]
    assert not is_reversed(Declare(PLACE, 0), looked_up, store(R * 4 + place))
    assert not is_reversed(replace(store(R * 4 + K.symbol), add=True))
    assert not is_reversed(store(R * 4 + K.symbol), store(R * 4 + K.symbol + 4))
    assert is_reversed(store(R * 4 + K.symbol), store(R * 4 + K.symbol))


def test_a_loop_that_reads_what_it_stores_runs_forward() -> None:
    stored = load(Y, (R * 4 + K.symbol + 4, D.symbol))
    assert not is_reversed(store(R * 4 + K.symbol, call("add", QUOTIENT, stored, dtype=torch.float32)))
    count = call("add", held(TOTAL), POWER, dtype=torch.float32)
    assert not is_reversed(Assign((D,), (), TOTAL, count))


def test_values_of_memory_that_changes_are_read_again() -> None:
    assert not is_reversed(store(R * 4 + K.symbol, into=X))
    assert not is_reversed(store(R * 4 + K.symbol), between=(Write((D,), (), X, (C, D.symbol), held(TOTAL)),))


def test_undefined_lanes_of_a_saved_block_do_not_count() -> None:
    saved, there = Local("saved", torch.float32, (K, D)), (Less(K.symbol, N),)
    power = call("exp", load(X, (C * 4 + K.symbol, D.symbol)), dtype=torch.float32)
    sums = (Assign((K, D), there, saved, power, undefined=True), Reduce((K, D), there, TOTAL, "sum", held(saved)))
    body = (Declare(TOTAL, 0.0), Declare(saved, None), *sums, Write((D,), (), Y, (C, D.symbol), held(TOTAL)))
    kernel = LoopKernel("p", (For(C, N, GRID, body, N),))
    source = print_triton(LoopProgram("p", (kernel,), (X,), (Y,), (), (), (N,))).text
    (added,) = re.findall(r"total = total \+ .*", source)
    assert "tl.where(" in added
