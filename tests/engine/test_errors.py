"""Every mistake in a call or in a recording, with the class and the words a user gets.

In: wrong calls. Out: failures where a mistake passes, or where the message does not say what was got and what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate.compiled  # noqa: F401  installs Fusion.compile
from serrate import ir
from serrate.errors import (
    BackendError,
    CallError,
    DtypeError,
    SerrateError,
    ShapeError,
    StrategyError,
    StructureError,
    StructureMismatch,
)
from serrate.frontend import ops
from serrate.ir.view import TensorView
from tests.engine.oracle import BACKENDS

OFFSETS = torch.tensor([0, 3, 3, 8])
X = torch.arange(40, dtype=torch.float32).reshape(8, 5)


def fusion(body: Callable[..., Any], *inputs: tuple[tuple[int | None, ...], torch.dtype]) -> ir.Fusion:
    made = ir.Fusion("f")
    with made:
        x, offsets = made.input((None, 5), torch.float32), made.input((None,), torch.int64)
        made.output(body(ops.as_nested(x, offsets), *(made.input(*i) for i in inputs)))
    return made


def row_sum() -> ir.Fusion:
    return fusion(lambda x: ops.sum(x, 1))


def expect(error: type[SerrateError], words: list[str], function: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(error) as caught:
        function(*args)
    for word in words:
        assert word in str(caught.value), f"the message should say {word!r}: {caught.value}"


CALLS: dict[str, tuple[tuple[Any, ...], type[SerrateError], list[str]]] = {
    "too few": ((X,), CallError, ["f takes 2 arguments", "got 1"]),
    "too many": ((X, OFFSETS, X), CallError, ["f takes 2 arguments", "got 3"]),
    "not a tensor": ((X, [0, 3, 3, 8]), CallError, ["argument 1", "tensor", "list"]),
    "dtype": ((X.double(), OFFSETS), CallError, ["argument 0", "torch.float32", "torch.float64"]),
    "offsets dtype": ((X, OFFSETS.float()), CallError, ["argument 1", "torch.int64", "torch.float32"]),
    "dims": ((X[:, 0], OFFSETS), CallError, ["argument 0", "2 dims", "1"]),
    "extent": ((X[:, :4], OFFSETS), ShapeError, ["argument 0", "dim 1", "5", "4"]),
    "decreasing": (
        (X, torch.tensor([0, 5, 3, 8])),
        StructureError,
        ["offsets must not decrease: offsets[2] = 3 < offsets[1] = 5"],
    ),
    "not from 0": ((X, torch.tensor([1, 3, 8])), StructureError, ["offsets must start at 0: offsets[0] = 1"]),
    "too short": ((X, torch.tensor([0, 3, 7])), StructureError, ["end at 7", "8 positions"]),
    "too long": ((X, torch.tensor([0, 3, 9])), StructureError, ["end at 9", "8 positions"]),
    "no offsets": ((X, torch.tensor([], dtype=torch.int64)), StructureError, ["offsets must have at least one element"]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(name: str, backend: str) -> None:
    args, error, words = CALLS[name]
    program = row_sum().compile(backend)
    expect(error, words, program, *args)


def test_a_right_call_after_a_wrong_one() -> None:
    """What is remembered of offsets must not include that they were once accepted with other values."""
    program = row_sum().compile("reference")
    want = torch.stack([X[:3].sum(0), torch.zeros(5), X[3:].sum(0)])
    assert torch.equal(program(X, OFFSETS), want)
    expect(StructureError, ["end at 8", "7 positions"], program, X[:7], OFFSETS)
    assert torch.equal(program(X, OFFSETS), want)


def test_offsets_that_were_written_to_are_checked_again() -> None:
    program = row_sum().compile("reference")
    offsets = OFFSETS.clone()
    program(X, offsets)
    offsets[1] = 5
    expect(StructureError, ["must not decrease"], program, X, offsets)
    offsets[2] = 6
    assert torch.equal(program(X, offsets), torch.stack([X[:5].sum(0), X[5], X[6:].sum(0)]))


def test_no_gradient_is_asked_without_grad_mode() -> None:
    with torch.no_grad():
        assert not row_sum().compile("reference")(X.clone().requires_grad_(), OFFSETS).requires_grad


def _two(body: Callable[[TensorView, TensorView], TensorView]) -> ir.Fusion:
    made = ir.Fusion("f")
    with made:
        x, y = (made.input((None, 5), torch.float32) for _ in range(2))
        first, second = (made.input((None,), torch.int64) for _ in range(2))
        made.output(body(ops.as_nested(x, first), ops.as_nested(y, second)))
    return made


def test_two_structures_that_differ() -> None:
    program = _two(ops.add).compile("reference")
    other = torch.tensor([0, 4, 4, 8])
    assert torch.equal(program(X, X, OFFSETS, OFFSETS.clone()).values, X * 2)
    expect(StructureMismatch, ["add", "[3, 0, 5]", "[4, 0, 4]"], program, X, X, OFFSETS, other)
    expect(SerrateError, ["add", "3", "2"], program, X, X, OFFSETS, torch.tensor([0, 3, 8]))


F32 = torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_operands_that_do_not_fit(backend: str) -> None:
    program = fusion(ops.add, ((None, None, 5), F32)).compile(backend)
    assert program(X, OFFSETS, torch.ones(3, 5, 5)).values.equal(X + 1)
    expect(ShapeError, ["add", "4 positions", "longest row has 5"], program, X, OFFSETS, torch.ones(3, 4, 5))
    expect(ShapeError, ["add", "2"], program, X, OFFSETS, torch.ones(2, 5, 5))
    expect(ShapeError, ["add", "4"], program, X, OFFSETS, torch.ones(4, 5, 5))


def test_weights_that_do_not_fit() -> None:
    program = fusion(ops.matmul, ((None, 5, 2), F32)).compile("reference")
    expect(ShapeError, ["weights", "3", "2"], program, X, OFFSETS, torch.ones(2, 5, 2))
    shared = fusion(ops.matmul, ((None, 2), F32)).compile("reference")
    expect(ShapeError, ["matmul", "5", "4"], shared, X, OFFSETS, torch.ones(4, 2))


def test_unknown_names() -> None:
    expect(StrategyError, ["'fastest'", "maskless", "masked", "persistent_dynamic"], row_sum().compile, "reference", "fastest")
    expect(BackendError, ["'fortran'", "reference", "cpp"], row_sum().compile, "fortran")


RECORDINGS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], type[SerrateError], list[str]]] = {
    "dim": (lambda x: ops.sum(x, 3), (), ShapeError, ["dim 3", "dims 0 to 2"]),
    "extents": (ops.add, (((4,), F32),), ShapeError, ["add", "5", "4"]),
    "flat values": (ops.add, (((10, 5), F32),), ShapeError, ["add", "aligned with the ragged dim", "[1, L, ...]"]),
    "contracted": (ops.matmul, (((4, 2), F32),), ShapeError, ["contracted", "5", "4"]),
    "matmul dtype": (ops.matmul, (((5, 2), torch.float64),), DtypeError, ["torch.float32", "torch.float64"]),
    "linear dtype": (ops.linear, (((2, 5), torch.float64),), DtypeError, ["torch.float32", "torch.float64"]),
    "linear dims": (ops.linear, (((5,), F32),), ShapeError, ["linear", "weight"]),
    "matmul dims": (ops.matmul, (((4,), F32),), ShapeError, ["matmul", "5", "4"]),
    "where": (lambda x: ops.where(x, x, x), (), DtypeError, ["where", "bool", "torch.float32"]),
    "mean of ints": (
        lambda x: ops.mean(ops.cast(x, torch.int64), 1),
        (),
        DtypeError,
        ["mean", "floating-point", "int64", "convert"],
    ),
    "clamp": (ops.clamp, (), ShapeError, ["clamp", "min", "max"]),
    "ragged again": (lambda x, o: ops.as_nested(x, o, ragged_dim=1), (((None,), torch.int64),), ShapeError, ["dim 1", "ragged"]),
    "float offsets": (lambda x, o: ops.as_nested(ops.as_flattened(x), o), (((None,), F32),), DtypeError, ["offsets", "int64"]),
    "2-D offsets": (
        lambda x, o: ops.as_nested(ops.as_flattened(x), o),
        (((None, 4), torch.int64),),
        SerrateError,
        ["offsets", "1 leading", "0 precede"],
    ),
}


@pytest.mark.parametrize("name", RECORDINGS)
def test_wrong_recordings(name: str) -> None:
    body, inputs, error, words = RECORDINGS[name]
    expect(error, words, fusion, body, *inputs)


def test_an_output_of_another_fusion() -> None:
    other = row_sum()
    made = ir.Fusion("g")
    expect(ShapeError, ["another fusion"], made.output, other.outputs[0])


@pytest.mark.parametrize("options", [{"tile": 0}, {"tile": -1}, {"chunks": 3}, {"tile": 2.5}])
def test_wrong_options(options: dict[str, Any]) -> None:
    """An option is checked when the program is compiled, in words, not by whatever breaks first."""
    with pytest.raises((SerrateError, TypeError)) as caught:
        row_sum().compile("reference", "maskless", **options)(X, OFFSETS)
    assert isinstance(caught.value, SerrateError), repr(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_of_an_argument_is_said_once(backend: str) -> None:
    program = row_sum().compile(backend)
    strided = torch.arange(80, dtype=torch.float32).reshape(8, 10)[:, ::2]
    with pytest.warns(UserWarning, match="argument 0 .* is not contiguous"):
        first = program(strided, OFFSETS)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not contiguous")
        assert torch.equal(program(strided, OFFSETS), first)
    assert torch.equal(first[0], strided[:3].sum(0))
