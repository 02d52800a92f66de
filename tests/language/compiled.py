"""`python -m tests.language.compiled NAME...`: examples compiled by Triton for a GPU, which need not be there.

In: names of examples. Out: nothing, or the error of the first program that does not compile.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from serrate import Kernel
from serrate.errors import BackendError
from serrate.runtime.triton import TritonExecutable
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
        signature = dict(zip(ready.kernel.arg_names, kinds, strict=True))
        triton.compile(ASTSource(ready.kernel, signature, {}), target=TARGET, options={"num_warps": self.warps})
    raise Compiled


def main(names: list[str]) -> None:
    TritonExecutable.__call__ = compile_only  # type: ignore[method-assign]
    for name in names:
        for strategy in ("maskless", "masked", "persistent_dynamic cut"):

            def run(kernel: Kernel, strategy: str = strategy) -> object:
                return ran(kernel, f"triton {strategy}")

            try:
                example(name).check(LENGTHS["bimodal"], run)
            except Compiled:
                continue
            raise AssertionError(f"{name}, {strategy}: nothing was compiled")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BackendError as error:
        raise SystemExit(str(error)) from error
