"""Every operator over every pair of dtypes, against torch: what it gives, of which dtype, and what it refuses.

One program holds all operators that torch takes for a pair, so that a pair is one build. A sample by default; all pairs are slow.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from serrate import JaggedTensor, jit
from serrate.errors import SerrateError
from tests.oracle.operators import BINARY, DTYPES, REDUCTIONS, SWAPPED, UNARY, Function

LENGTHS = [3, 0, 2, 1]
FULL_ROWS = [3, 1, 2]
"""Rows that torch can reduce: it refuses the largest of nothing."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SAMPLE = 0.03
"""How many of the pairs run by default."""
BUILT = {("uint8", "uint8"), ("bool", "float32")}
"""Pairs that are built in C++ by default."""


def dividends(dtype: torch.dtype) -> Tensor:
    """Numbers at the edges of a dtype."""
    if dtype == torch.bool:
        return torch.tensor([True, False, True, True, False, True])
    if dtype == torch.uint8:
        return torch.tensor([1, 2, 255, 254, 128, 7], dtype=dtype)
    if dtype.is_floating_point:
        return torch.tensor([1.5, -2.0, 3.25, -0.75, 100.0, 0.5], dtype=dtype)
    return torch.tensor([1, -2, torch.iinfo(dtype).max, torch.iinfo(dtype).min, 5, -7], dtype=dtype)


def divisors(dtype: torch.dtype) -> Tensor:
    """Numbers that can be divided by."""
    if dtype == torch.bool:
        return torch.ones(6, dtype=torch.bool)
    if dtype == torch.uint8:
        return torch.tensor([255, 3, 2, 1, 10, 200], dtype=dtype)
    if dtype.is_floating_point:
        return torch.tensor([2.0, -1.5, 0.5, 3.0, -4.0, 1.25], dtype=dtype)
    return torch.tensor([3, 2, -3, 7, 1, 5], dtype=dtype)


def flat(result: Any) -> list[Any]:
    return [part for each in result for part in flat(each)] if isinstance(result, tuple) else [result]


def differs(want: Any, got: Any) -> str:
    """What is wrong with a result; nothing if all is right."""
    for w, g in zip(flat(want), flat(got), strict=True):
        g = g.values if isinstance(g, JaggedTensor) else g
        if (w.dtype, w.shape) != (g.dtype, g.shape):
            return f"got {g.dtype} {tuple(g.shape)}, want {w.dtype} {tuple(w.shape)}"
        close = TOLERANCES.get(w.dtype, 0)
        good = torch.isclose(g.double(), w.double(), close, close, equal_nan=True) if close else g == w
        if not good.all():
            return f"got {g.tolist()}, want {w.tolist()}"
    return ""


def check(
    functions: Mapping[str, Function],
    rows: Sequence[Any],
    ragged: Sequence[Any],
    backend: str,
    per_row: Callable[..., Any] | None = None,
) -> None:
    """Runs all functions on ragged arguments in one program, and compares each with torch's on the rows."""
    wanted: dict[str, Any] = {}
    refused: dict[str, Exception] = {}
    for name, function in functions.items():
        try:
            wanted[name] = function(*rows) if per_row is None else per_row(function, *rows)
        except (RuntimeError, TypeError, OverflowError) as error:
            refused[name] = error
    wrong = {}
    for name, reason in refused.items():
        try:
            jit(functions[name], backend="reference")(*ragged)
        except SerrateError:
            continue
        except Exception as error:
            if type(error) is not TypeError or type(reason) is not TypeError:
                wrong[name] = f"{type(error).__name__} leaks: {error}"
        else:
            wrong[name] = f"torch refuses it: {reason}"
    try:
        got = jit(lambda *args: tuple(functions[name](*args) for name in wanted), backend=backend)(*ragged)
        found = dict(zip(wanted, got, strict=True))
    except Exception:
        found = {}
        for name in wanted:
            try:
                found[name] = jit(functions[name], backend=backend)(*ragged)
            except Exception as error:
                wrong[name] = f"{type(error).__name__}: {error}"
    for name, result in found.items():
        if message := differs(wanted[name], result):
            wrong[name] = message
    assert not wrong, "\n".join(f"{name}: {message}" for name, message in wrong.items())


def cases(names: Sequence[tuple[str, ...]], built: set[tuple[str, ...]]) -> list[Any]:
    """Each with the reference and with C++; most are slow."""
    found = []
    for key in names:
        for backend in ("reference", "cpp"):
            sampled = zlib.crc32(repr(key).encode()) % 1000 < SAMPLE * 1000
            fast = key in built or (backend == "reference" and sampled)
            found.append(pytest.param(*key, backend, id="-".join((*key, backend)), marks=() if fast else pytest.mark.slow))
    return found


PAIRS = list(itertools.product(DTYPES, DTYPES))
ONE = [(name,) for name in DTYPES]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("left", "right", "backend"), cases(PAIRS, BUILT))
def test_operators_of_two_tensors(left: str, right: str, backend: str) -> None:
    a, b = dividends(DTYPES[left]), divisors(DTYPES[right])
    check(BINARY, (a, b), (JaggedTensor.from_lengths(a, LENGTHS), JaggedTensor.from_lengths(b, LENGTHS)), backend)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("left", "right", "backend"), cases(PAIRS, {("uint8", "int64")}))
def test_a_tensor_without_dims_promotes_as_in_torch(left: str, right: str, backend: str) -> None:
    a, b = dividends(DTYPES[left]), divisors(DTYPES[right])[0]
    own = {name: f for name, f in (BINARY | SWAPPED).items() if name not in ("a // b, swapped", "a % b, swapped")}
    if (left, right) == ("int8", "uint8"):
        del own["masked_fill"]  # torch refuses the number, 255
    check(own, (a, b), (JaggedTensor.from_lengths(a, LENGTHS), b), backend)


NUMBERS: dict[str, Any] = {
    "True": True,
    "3": 3,
    "-2": -2,
    "2.5": 2.5,
    "300": 300,
    "numpy float32": np.float32(2.5),
    "numpy float64": np.float64(2.5),
    "numpy int8": np.int8(3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("left", "number", "backend"), cases(list(itertools.product(DTYPES, NUMBERS)), {("uint8", "300")}))
def test_operators_of_a_tensor_and_a_number(left: str, number: str, backend: str) -> None:
    a, b = dividends(DTYPES[left]), NUMBERS[number]
    # A number there is a dim; what is true minus a scaled truth is told apart by torch alone.
    without = {"max", "a // b, swapped", "a % b, swapped"} | ({"sub_alpha"} if b is True else set())
    own = {name: f for name, f in (BINARY | SWAPPED).items() if name not in without}
    check(own, (a, b), (JaggedTensor.from_lengths(a, LENGTHS), b), backend)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "backend"), cases(ONE, {("uint8",)}))
def test_operators_of_one_tensor(dtype: str, backend: str) -> None:
    a = dividends(DTYPES[dtype])
    check(UNARY, (a,), (JaggedTensor.from_lengths(a, LENGTHS),), backend)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(("dtype", "backend"), cases(ONE, {("uint8",)}))
def test_reductions_and_scans(dtype: str, backend: str, dim: int) -> None:
    x = torch.stack([dividends(DTYPES[dtype]), divisors(DTYPES[dtype])], 1)

    def joined(parts: Sequence[Any]) -> Any:
        if isinstance(parts[0], tuple):
            return tuple(joined(each) for each in zip(*parts, strict=True))
        return torch.cat(parts) if dim == 2 or parts[0].ndim == 2 else torch.stack(parts)

    def per_row(function: Function, x: Tensor) -> Any:
        return joined([function(row) for row in x.split(FULL_ROWS)])

    # Which of several equal ones comes first is open where torch sorts.
    left_out = ({"topk"} if dim == 1 else set()) | ({"sort", "topk"} if dtype == "bool" else set())

    def over(function: Function) -> Function:
        # A row has no dim that counts rows.
        return lambda x: function(x, dim - 1 if isinstance(x, Tensor) else dim)

    named = {name: over(f) for name, f in REDUCTIONS.items() if name not in left_out}
    check(named, (x,), (JaggedTensor.from_lengths(x, FULL_ROWS),), backend, per_row)
