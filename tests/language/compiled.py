"""`python -m tests.language.compiled NAME...`: examples and some fusions compiled by Triton for a GPU, which need not be there.

In: names of examples. Out: nothing, or the error of the first program that does not compile.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from serrate import Kernel, ir, ops
from serrate.errors import BackendError
from serrate.runtime.memory import Scratch
from serrate.runtime.triton import Derivation, TritonExecutable
from tests.engine.oracle import FULL
from tests.language.kinds import LENGTHS, ran
from tests.language.test_examples import example

POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
TARGET = GPUTarget("cuda", 90, 32)


class Compiled(Exception):
    """Raised in the place of a launch: there is no GPU to run on."""


def compile_only(self: TritonExecutable, *_: object) -> None:
    """Compiles every kernel of a program."""
    for launch, ready in zip(self._printed.launches, self._launches, strict=True):
        kinds = [POINTERS[t.dtype] for t in launch.tensors] + ["*i64"] * len(launch.arrays) + ["i64"] * len(launch.symbols)
        _compile(ready.kernel.function, kinds, self.warps)
    raise Compiled


def _compile(kernel: Any, kinds: list[str], warps: int) -> None:
    signature = dict(zip(kernel.arg_names, kinds, strict=True))
    triton.compile(ASTSource(kernel, signature, {}), target=TARGET, options={"num_warps": warps})


def compile_derived(self: Derivation, *_: object) -> list[Scratch]:
    """Compiles the kernels that derive arrays; what they would hold does not matter, because no program runs."""
    for kernel in (self._running_sums, self._owners):
        if kernel is not None:
            _compile(kernel.function, ["i64" if name.startswith("n") else "*i64" for name in kernel.function.arg_names], 4)
    return [Scratch(torch.zeros(2, dtype=torch.int64), 0, (2,), torch.int64) for _ in self._order]


def run_examples(names: list[str]) -> None:
    for name in names:
        for strategy in ("maskless", "masked", "persistent_dynamic cut"):

            def run(kernel: Kernel, strategy: str = strategy) -> object:
                return ran(kernel, f"triton {strategy}")

            try:
                example(name).check(LENGTHS["bimodal"], run)
            except Compiled:
                continue
            raise AssertionError(f"{name}, {strategy}: nothing was compiled")


def run_fusions() -> None:
    """Reductions of rows under the plan that a GPU runs when nothing is known."""
    operations: list[Callable[[Any], Any]] = [
        lambda x: ops.sum(x, 1),
        lambda x: ops.softmax(x, 1),
        lambda x: ops.layer_norm(x, (1, 2)),
        lambda x: ops.argmax(x, 1),
    ]
    every = list(itertools.product(operations, (torch.float32, torch.bfloat16)))
    for operation, dtype in every if FULL else every[3:4]:
        with ir.Fusion("program") as f:
            x, offsets = f.input((None, 128), dtype), f.input((None,), torch.int64)
            f.output(operation(ops.as_nested(x, offsets)))
        try:
            f.compile("triton", "persistent_dynamic")(torch.zeros(9, 128, dtype=dtype), torch.tensor([0, 4, 9]))
        except Compiled:
            continue
        raise AssertionError("nothing was compiled")


def main(names: list[str]) -> None:
    TritonExecutable.bound = compile_only  # type: ignore[method-assign, assignment]
    Derivation.__call__ = compile_derived  # type: ignore[method-assign, assignment]
    run_examples(names)
    run_fusions()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BackendError as error:
        raise SystemExit(str(error)) from error
