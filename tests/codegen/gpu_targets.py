"""`python -m tests.codegen.gpu_targets TARGET/NAME/STRATEGY...`: programs compiled by Triton for GPUs, which need not be there.

In: names of examples and of the operations' cases. Out: nothing, or the error of the first program that does not compile for its
target, or that asks for more shared memory than a block can have there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from serrate import JaggedTensor, Kernel, jit
from serrate.codegen.triton.module import Launch
from serrate.runtime import device_library
from serrate.runtime import triton as runtime
from serrate.runtime.derivation import Derivation
from serrate.runtime.launch import Execute
from serrate.runtime.memory import Scratch, whole
from serrate.runtime.triton import TritonExecutable, TritonFunction, fewer_stages
from tests.engine.across_cases import ACROSS
from tests.engine.cases import CASES, NESTED_CASES
from tests.engine.composed import reducible
from tests.engine.movement_cases import MOVEMENT, STRUCTURE
from tests.engine.oracle import ONE_LEVEL, TWO_LEVELS, Case, arguments, compiled, pick
from tests.engine.test_compositions import STRUCTURES, tensor_of
from tests.language.kinds import LENGTHS, ran
from tests.language.test_examples import NAMES, example

POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def kinds_of(launch: Launch, number: str) -> list[str]:
    """The types of a kernel's arguments, as Triton writes them, if numbers have this one."""
    boxes = [f"tensordesc<{POINTERS[d.tensor.dtype][1:]}[{d.block[0]}, {d.block[1]}]>" for d in launch.descriptors]
    pointers = [POINTERS[t.dtype] for t in launch.tensors] + ["*i64"] * len(launch.arrays)
    return [*pointers, *boxes, *[number] * len(launch.symbols)]


class Target(NamedTuple):
    """A GPU, and the bytes of shared memory that one block may have there."""

    target: GPUTarget
    shared: int

    def activate(self) -> None:
        """Makes it the current GPU of Triton, which helpers ask what functions there are."""
        driver.set_active(SimpleNamespace(get_current_target=lambda: self.target))


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 << 10),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 << 10),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 << 10),
}
STRATEGIES = ("maskless", "masked", "persistent_dynamic")
OPERATIONS: dict[str, tuple[Case, int]] = {
    **{f"{name}, one level": (case, 1) for name, case in {**CASES, **MOVEMENT, **STRUCTURE, **ACROSS}.items()},
    **{f"{name}, two levels": (case, 2) for name, case in NESTED_CASES.items()},
}
LIBRARY: dict[str, tuple[Any, ...]] = {
    "group_by": (torch.zeros(3000, dtype=torch.int32), 60),
    "group_and_invert": (torch.zeros(3000, dtype=torch.int32), 60),
    "invert": (torch.arange(3000),),
}
CALLS = [f"{target}/library/{name}" for target in TARGETS for name in LIBRARY]
PRODUCTS = [f"{target}/product/{how}" for target in TARGETS for how in ("boxes", "pointers", "resident")]
COMPOSED = [f"{target}/composed/{name}" for target in TARGETS for name in STRUCTURES]
EXAMPLES = [f"{target}/{name}/{strategy}" for target in TARGETS for name in NAMES for strategy in STRATEGIES]
FUSIONS = [f"{target}/{name}/{pick(STRATEGIES, name, target)}" for target in TARGETS for name in OPERATIONS]


class Compilation:
    """Compiles every kernel that is launched, and runs none: results are zeros."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.count = 0
        target.activate()

    def executed(self, program: TritonExecutable) -> Execute:
        for launch, ready in zip(program._printed.launches, program._launches, strict=True):
            self._compile(ready.kernel, kinds_of(launch, "i64"))
        first, last = len(program.program.inputs), len(program.program.tensors)

        def run(_: list[int], memory: Callable[[], Sequence[Any]]) -> None:
            for each in memory()[first:last]:
                whole(each).zero_()

        return run

    def launched(self, kernel: TritonFunction, tensors: Sequence[Any], numbers: Sequence[int]) -> None:
        self._compile(kernel, [POINTERS[t.dtype] for t in tensors] + ["i64"] * len(numbers))

    def derived(self, derivation: Derivation) -> list[Scratch]:
        for launch in (derivation._block_sums, derivation._running_sums, derivation._tables, derivation._all_arrays):
            if launch is not None:
                names = launch.kernel.function.arg_names
                self._compile(launch.kernel, ["i64" if name.startswith("n") else "*i64" for name in names])
        return [Scratch(torch.zeros(2, dtype=torch.int64), 0, (2,), torch.int64) for _ in range(1 + max(derivation.order))]

    def _compile(self, kernel: Any, kinds: list[str]) -> None:
        signature = dict(zip(kernel.function.arg_names, kinds, strict=True))
        source = ASTSource(kernel.function, signature, {})
        found = []
        for options in fewer_stages(kernel._options):
            found.append(triton.compile(source, target=self._target.target, options=options).metadata.shared)
            if found[-1] <= self._target.shared:
                break
        assert found[-1] <= self._target.shared, f"{found} bytes of shared memory"
        self.count += 1


def compile_program(name: str) -> None:
    target, program, strategy = name.split("/")
    compilation = Compilation(TARGETS[target])
    runtime._copy_engine = lambda: strategy == "boxes" or (strategy == "resident" and target == "sm_90")
    TritonExecutable.sized = lambda self, *_: compilation.executed(self)  # type: ignore[method-assign]
    Derivation.__call__ = lambda self, *_: compilation.derived(self)  # type: ignore[method-assign, assignment]
    if program == "library":
        TritonFunction.__call__ = lambda self, _, tensors, numbers, __: compilation.launched(self, tensors, numbers)  # type: ignore[method-assign]
        device_library.FUNCTIONS[strategy](*LIBRARY[strategy])
        assert compilation.count, "nothing was compiled"
    elif program == "product":
        values, weights = torch.zeros(300, 128, dtype=torch.bfloat16), torch.zeros(2, 128, 9 * 256, dtype=torch.bfloat16)
        operands = JaggedTensor.from_csr(values, torch.tensor([0, 170, 300])), weights
        fusion, tensors = jit(lambda x, w: x @ w, backend="triton").compiled(*operands)
        options = {"strategy": "persistent_dynamic", "resident": 1} if strategy == "resident" else {}
        fusion.fusion.compile("triton", **options)(*tensors)
        assert compilation.count, "nothing was compiled"
    elif program == "composed":
        jt = tensor_of(strategy)
        for dim in reducible(jt):
            jit(lambda x, dim=dim: torch.softmax(x, dim), backend="triton")(jt)
        assert compilation.count, "nothing was compiled"
    elif program in NAMES:
        example(program).check(LENGTHS["bimodal"], lambda kernel: both(kernel, strategy))
        assert compilation.count or strategy == "persistent_dynamic", "nothing was compiled"
    else:
        case, levels = OPERATIONS[program]
        dtype, features = pick(case.dtypes, name), pick(case.features, name)
        rows = (ONE_LEVEL if levels == 1 else TWO_LEVELS)["mixed"]
        given = arguments(case, rows, dtype, features, name)
        compiled(case, "triton", strategy, (), dtype, features, levels)(*given.call)


def both(kernel: Kernel, strategy: str) -> Callable[..., Any]:
    """Compiles the kernel with Triton, and returns what the interpreter makes of it, so that the example goes on."""
    cut = f"{strategy} cut" if strategy == "persistent_dynamic" else strategy

    def run(*args: Any) -> Any:
        # Rows that a kernel does not let be cut are refused, with the reason.
        with contextlib.suppress(pytest.skip.Exception):
            ran(kernel, f"triton {cut}")(*args)
        return kernel.interpreted()(*args)

    return run


def main(names: Sequence[str]) -> None:
    for name in names:
        try:
            compile_program(name)
        except Exception as error:
            raise SystemExit(f"{name}: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
