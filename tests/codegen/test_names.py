"""Names in generated code: a program and everything in it may be called anything, in C++ as in Triton, which interprets here.

In: programs under names of helpers, of keywords and of nothing at all. Out: failures that name the program.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serrate import ir, jit, ops
from serrate.codegen.names import names_of, renamed
from serrate.codegen.triton.module import HELPER, _prelude
from serrate.lower.pipeline import lower
from serrate.lower.stages import stages
from serrate.runtime.launch import CppExecutable
from serrate.runtime.triton import TritonExecutable
from serrate.schedule.plan import LaunchOptions
from serrate.schedule.strategies import plan
from serrate.schedule.target import CPU, GPU
from serrate.tensor import JaggedTensor

ROWS = JaggedTensor.from_lengths(torch.linspace(-2, 2, 15).reshape(5, 3), [2, 0, 3])
NAMES = (
    *("tanh", "largest", "product", "floor_divide", "owner", "power"),
    *("sr_largest", "tl", "triton", "range", "float", "position", "T0", "d1", "_", "for", "None", "a b", "a-b", "1x", ""),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("backend", "name"), [*(("triton", n) for n in NAMES), *(("cpp", n) for n in ("load", "double", "a b", "1x", ""))]
)
def test_a_program_may_have_any_name(backend: str, name: str) -> None:
    with ir.Fusion(name) as f:
        x, offsets = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        f.output(ops.tanh(ops.amax(ops.as_nested(x, offsets), 1)))
    got = f.compile(backend)(ROWS.values, ROWS.offsets)
    for row, found in zip(ROWS.unbind(), got, strict=True):
        if len(row):
            torch.testing.assert_close(found, torch.tanh(row.amax(0)))


WORDS = (
    *("double", "for", "template", "and_eq", "operator", "load", "store", "f32", "pointer", "given", "threads", "end", "k", "v1"),
    *("v2", "extent0", "count", "lambda", "None", "range", "tl", "triton", "position", "sr_largest", "float"),
    *("x", "x_at", "x_all", "x_here", "x_stream", "x_next"),
)


@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("first", range(0, len(WORDS), 10))
def test_everything_in_a_program_may_have_any_name(backend: str, first: int) -> None:
    with ir.Fusion("softmax") as f:
        x, offsets = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, offsets), dim=1))
    (naive,) = stages(f)
    target = GPU if backend == "triton" else CPU
    loops = lower(plan(naive, "maskless", target, tile=4, keep_rows=False).apply(naive), "softmax", (), target)
    # A given word meets another part of the program each time.
    names = sorted(set(names_of(loops)))
    odd = renamed(loops, dict(zip(names, WORDS[first:] + WORDS[:first], strict=False)))
    assert len(set(names_of(odd)) & set(WORDS)) >= len(names) - len(loops.arrays)
    sizes = {"n0": ROWS.values.shape[0], "n1": ROWS.offsets.shape[0]}
    given = {"T0": ROWS.values, "T1": ROWS.offsets}
    tensors = [given.get(t.name, torch.zeros_like(ROWS.values)) for t in loops.tensors]
    if backend == "triton":
        made: TritonExecutable | CppExecutable = TritonExecutable(odd, [LaunchOptions()] * len(odd.kernels))
    else:
        made = CppExecutable(odd, frozenset(odd.arrays))
    made(tensors, [ROWS.offsets for _ in loops.arrays], [sizes[s.name] for s in loops.symbols])
    out = tensors[loops.tensors.index(loops.outputs[0])]
    torch.testing.assert_close(out, torch.cat([torch.softmax(row, 0) for row in ROWS.unbind()]))


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
    source = jit(lambda x: torch.maximum(torch.tanh(x), x * 2.0), backend="triton").source(ROWS)
    printed = {name for name in _prelude()[1] if f"def {name}(" in source}
    called = {name for name in _prelude()[1] if source.count(f"{name}(") > 1 or f"{name})" in source}
    assert f"{HELPER}largest" in printed and printed == called
    assert HELPER not in jit(lambda x: x + 1, backend="triton", strategy="maskless").source(ROWS).split("def ", 1)[0]


@pytest.mark.parametrize("name", ["_", ""])
def test_names_that_a_gpu_assembler_refuses_are_changed(name: str) -> None:
    with ir.Fusion(name) as f:
        x = f.input((None, 3), torch.float32)
        f.output(ops.exp(x))
    (executable,) = f.compile("triton", "maskless").executables(torch.zeros(2, 3))
    assert "def program__(" in executable.source
