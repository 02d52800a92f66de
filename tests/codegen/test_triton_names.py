"""Names in generated Triton: a program may be called anything, and only the helpers that it calls are printed.

In: fusions under names of helpers, of Python and of nothing at all. Out: failures that name the program. Triton interprets here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serrate import ir, jit, ops
from serrate.codegen.triton.printer import HELPER, _prelude
from serrate.tensor import JaggedTensor

ROWS = JaggedTensor.from_lengths(torch.linspace(-2, 2, 15).reshape(5, 3), [2, 0, 3])
NAMES = (
    *("tanh", "largest", "product", "floor_divide", "owner", "power"),
    *("sr_tanh", "tl", "triton", "range", "float", "position", "T0", "d1", "_", "for", "None", "a b", "a-b", "1x", ""),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_may_have_any_name(name: str) -> None:
    with ir.Fusion(name) as f:
        x, offsets = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        f.output(ops.tanh(ops.amax(ops.as_nested(x, offsets), 1)))
    got = f.compile("triton")(ROWS.values, ROWS.offsets)
    for row, found in zip(ROWS.unbind(), got, strict=True):
        if len(row):
            torch.testing.assert_close(found, torch.tanh(row.amax(0)))


def test_functions_called_like_helpers() -> None:
    def largest(x: Any) -> Any:
        return torch.amax(x, 1)

    def product(x: Any) -> Any:
        return torch.prod(x, 1)

    def floor_divide(x: Any) -> Any:
        return x[:, 1:]

    for function in (largest, product, floor_divide, torch.tanh):
        got, want = (jit(function, backend=b)(ROWS) for b in ("triton", "reference"))
        both = [r if isinstance(r, torch.Tensor) else r.values for r in (got, want)]
        torch.testing.assert_close(*both)


def test_only_helpers_that_are_called_are_printed() -> None:
    source = jit(lambda x: torch.remainder(torch.tanh(x), 2.0), backend="triton").source(ROWS)
    printed = {name for name in _prelude()[1] if f"def {name}(" in source}
    called = {name for name in _prelude()[1] if source.count(f"{name}(") > 1 or f"{name})" in source}
    assert f"{HELPER}tanh" in printed and printed == called
    assert HELPER not in jit(lambda x: x + 1, backend="triton", strategy="maskless").source(ROWS).split("def ", 1)[0]
