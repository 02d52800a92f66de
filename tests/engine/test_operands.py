"""Operands at the edge: numpy's numbers and arrays, integers of more than 64 bits, dtypes that programs do not compute with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from serrate import JaggedTensor, Structure, errors, jit, ops, settings
from serrate.errors import StructureMismatch
from tests.engine.oracle import BACKENDS

ROWS = [2, 0, 1]


def ragged(dtype: torch.dtype = torch.float32) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.tensor([1, 2, 3]).to(dtype), ROWS)


def both(call: Callable[..., Any], *args: Any) -> list[Any]:
    """What a call gives at once, and traced."""
    return [call(*args), jit(call)(*args)]


@pytest.mark.parametrize("number", [np.float32(2.5), np.float64(2.5), np.int64(3), np.bool_(True)], ids=repr)
def test_numbers_of_numpy_are_numbers(number: Any) -> None:
    for call, plain in (
        (lambda x: x * number, lambda v: v * number.item()),
        (lambda x: number + x, lambda v: number.item() + v),
        (lambda x: x > number, lambda v: v > number.item()),
        (lambda x: torch.clamp(x, max=number), lambda v: v.clamp(max=number.item())),
    ):
        for got in both(call, ragged()):
            wanted = plain(torch.tensor([1.0, 2.0, 3.0]))
            assert got.dtype == wanted.dtype
            assert torch.equal(got.values, wanted)


def test_arrays_of_numpy_are_refused_by_name() -> None:
    for call in (lambda x: x + np.ones(3), lambda x: np.ones(3) + x, lambda x: x == np.ones(3)):
        for run in (call, jit(call)):
            with pytest.raises(errors.CallError, match="from_numpy"):
                run(ragged())


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**63) - 1, 10**30], ids=str)
def test_integers_of_more_than_64_bits(number: int) -> None:
    for got in both(lambda x: x * number, ragged()):
        assert torch.equal(got.values, torch.tensor([1.0, 2.0, 3.0]) * float(number))
    for call in (lambda x: x + number, lambda x: x < number, lambda x: torch.where(x > 1, x, number)):
        for run in (call, jit(call)):
            with pytest.raises(errors.DtypeError, match=f"at most 64 bits, got {number}"):
                run(ragged(torch.int64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_floats_meet_integers_of_more_than_64_bits_as_floats(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERRATE_BACKEND", backend)
    settings.reload()
    number, plain = 2**70 + 1, torch.tensor([1.0, 2.0, 3.0])
    for got in both(
        lambda x: (x * number, number - x, x < number, x.clamp(-number, number), torch.where(x > 1, x, number)), ragged()
    ):
        wanted = (plain * 2.0**70, 2.0**70 - plain, plain > 0, plain, torch.tensor([2.0**70, 2.0, 3.0]))
        assert all(torch.equal(g.values, w) for g, w in zip(got, wanted, strict=True))
    for run in (lambda x: x + 10**400, jit(lambda x: x < 10**400)):
        with pytest.raises(errors.DtypeError, match="no dtype can hold an integer of 1329 bits"):
            run(ragged())


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.int32, 2**40), (torch.int64, 2**70), (torch.uint8, -1000), (torch.float16, 70000.0), (torch.int32, float("inf"))],
    ids=str,
)
def test_a_fill_that_the_dtype_cannot_hold(dtype: torch.dtype, number: float) -> None:
    plain = torch.tensor([1, 2, 3]).to(dtype)
    with pytest.raises((RuntimeError, OverflowError)):
        torch.full_like(plain, number)
    with pytest.raises(errors.DtypeError, match="does not fit"):
        jit(lambda x: torch.full_like(x, number))(ragged(dtype))
    for fill in (2.5, True, 7):
        assert torch.equal(jit(lambda x, f=fill: torch.full_like(x, f))(ragged(dtype)).values, torch.full_like(plain, fill))


def test_truths_are_not_divided() -> None:
    for call in (lambda x: x // x, lambda x: x % True, torch.fmod, lambda x: torch.div(x, x, rounding_mode="trunc")):
        arguments = (ragged(torch.bool), ragged(torch.bool)) if call is torch.fmod else (ragged(torch.bool),)
        for run in (call, jit(call)):
            with pytest.raises(errors.DtypeError, match=r"[bB]ool"):
                run(*arguments)
    for got in both(lambda x: x // 2.0, ragged(torch.bool)):
        assert torch.equal(got.values, torch.tensor([True] * 3) // 2.0)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_dtypes_that_programs_do_not_compute_with(dtype: torch.dtype) -> None:
    for call in (lambda x: x + 1, lambda x: x * x, torch.exp, lambda x: x.sum(1), lambda x: x == x):
        for run in (call, jit(call)):
            with pytest.raises(errors.DtypeError, match="convert it first"):
                run(ragged(dtype))


@pytest.mark.parametrize(("left", "right"), [(torch.float32, torch.float64), (torch.int64, torch.float32)], ids=str)
def test_products_of_two_dtypes_are_refused(left: torch.dtype, right: torch.dtype) -> None:
    x = JaggedTensor.from_lengths(torch.ones(3, 2, dtype=left), ROWS)
    for run in (torch.matmul, jit(torch.matmul)):
        with pytest.raises(errors.DtypeError, match="dtypes must be equal"):
            run(x, torch.ones(2, 2, dtype=right))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_products_of_integers_wrap_as_in_torch(dtype: torch.dtype, backend: str) -> None:
    values = torch.arange(12).reshape(3, 4).to(dtype)
    weight = torch.arange(100, 120).reshape(4, 5).to(dtype)
    x = JaggedTensor.from_lengths(values, ROWS)
    product = jit(lambda x, w: x @ w, backend=backend)(x, weight)
    assert product.dtype == dtype
    assert torch.equal(product.values, values @ weight)
    linear = jit(torch.nn.functional.linear, backend=backend)(x, weight.T.contiguous())
    assert torch.equal(linear.values, values @ weight)


def test_products_of_integers_on_triton() -> None:
    x = JaggedTensor.from_lengths(torch.arange(6, dtype=torch.int32).reshape(3, 2), ROWS)
    weight = torch.tensor([[1, -2], [3, 4]], dtype=torch.int32)
    assert torch.equal(jit(torch.matmul, backend="triton")(x, weight).values, x.values @ weight)


def test_no_dims_are_all_dims() -> None:
    x = JaggedTensor.from_lengths(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), ROWS)
    for name in ("sum", "mean", "amax", "amin", "var", "nansum"):
        for got in both(lambda x, name=name: getattr(torch, name)(x, ()), x):
            assert torch.equal(got, getattr(torch, name)(x.values, ()))
    for got in both(lambda x: torch.any(x, ()), x):
        assert torch.equal(got.values, torch.any(x.values, ()))


def test_the_largest_size_of_nothing_is_0() -> None:
    x = JaggedTensor.from_lengths(torch.tensor([[1.0, -2.0], [3.0, -4.0], [5.0, 6.0]]), ROWS)
    for got in both(lambda x: torch.norm(x, torch.inf, 1), x):
        assert torch.equal(got, torch.tensor([[3.0, 4.0], [0.0, 0.0], [5.0, 6.0]]))


BOX = Structure.from_lengths(torch.tensor([3, 0, 2, 1])).with_columns(torch.tensor([2, 5, 4, 0]))
PARTS = Structure.from_offsets(torch.tensor([[0, 3, 3], [0, 5, 7]]))


@pytest.mark.parametrize(
    ("structure", "size", "function"),
    [
        (BOX, 14, lambda x: x + x.transpose(1, 2)),
        (BOX, 14, lambda x: x + ops.slice(x, 1, 1)),
        (BOX, 14, lambda x: x + ops.slice(x, 2, 1)),
        (BOX, 14, lambda x: torch.where(x > 0, ops.pad(x, 1, 0, 1), x)),
        (PARTS, 10, lambda x: x + ops.slice(x, 2, 1)),
        (PARTS, 10, lambda x: ops.pad(x, 2, 1, 0) * x),
    ],
)
def test_rows_of_one_structure_and_other_lengths_do_not_meet(structure: Structure, size: int, function: object) -> None:
    jt = JaggedTensor(torch.arange(float(size)), structure)
    with pytest.raises(StructureMismatch, match="the rows differ"):
        jit(function)(jt)
