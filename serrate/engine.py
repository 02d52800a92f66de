"""The engine joins the stages: fusion -> naive program -> plan -> loop program -> executable -> results.

In: fusions and arguments. Out: results. The whole compiler is `build`, read top to bottom. Importing this module installs
`Fusion.evaluate` and `Fusion.compile`.
"""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

import torch

from serrate import settings
from serrate.errors import BackendError, CompilerMissing
from serrate.ir import fusion as fusion_module
from serrate.ir.domains import RaggedIterDomain
from serrate.ir.expr import Array
from serrate.ir.fusion import Fusion
from serrate.ir.loops import LoopProgram
from serrate.ir.tile import TileProgram
from serrate.ir.values import Role, Tensor
from serrate.lower.naive import naive
from serrate.lower.pipeline import lower
from serrate.runtime import memory
from serrate.runtime.bind import Binder, Call
from serrate.runtime.launch import CppExecutable, Executable, ReferenceExecutable
from serrate.schedule.heuristic import Rows, choose
from serrate.schedule.plan import Plan
from serrate.schedule.strategies import STRATEGIES, plan
from serrate.schedule.target import CPU, GPU, Target
from serrate.tensor import JaggedTensor

log = logging.getLogger("serrate")

BACKENDS: dict[str, Target] = {"reference": CPU, "cpp": CPU, "triton": GPU}


def build(program: TileProgram, chosen: Plan, name: str, backend: str, wide: frozenset[Array]) -> Executable:
    """The compiler in one function: schedule, lower, print, build."""
    scheduled = chosen.apply(program)
    loops = lower(scheduled, name, header=(f"{name}: {chosen.strategy}", *(f"  {step}" for step in chosen.steps)))
    return _executable(loops, backend, wide, chosen)


def _executable(loops: LoopProgram, backend: str, wide: frozenset[Array], chosen: Plan) -> Executable:
    if backend == "reference":
        return ReferenceExecutable(loops)
    if backend == "cpp":
        return CppExecutable(loops, wide)
    from serrate.runtime.triton import TritonExecutable  # triton is an extra: only its own backend may need it

    return TritonExecutable(loops, wide, chosen.warps)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def default_backend(device: torch.device) -> str:
    """What runs on a device when nothing is asked for."""
    asked = settings.current().backend
    if asked is not None:
        return asked
    if device.type == "cuda":
        return "triton"
    if device.type != "cpu":
        raise BackendError(f"no backend runs on {device.type}; move the tensors to a CPU or a CUDA device")
    from serrate.runtime.compiler import find_compiler

    try:
        find_compiler()
    except CompilerMissing as error:
        _warn_once(f"{error}. Running on the reference backend, which is slow.")
        return "reference"
    return "cpp"


class Compiled:
    """A fusion compiled for one backend. Plans are chosen by strategy, or by the rows of a call when none is named."""

    def __init__(self, fusion: Fusion, backend: str | None = None, strategy: str | None = None, **options: Any) -> None:
        if backend is not None and backend not in BACKENDS:
            raise BackendError(f"no backend is called {backend!r}; there are {', '.join(BACKENDS)}")
        self.fusion, self.strategy, self.options = fusion, strategy, options
        self.backend = backend
        self.naive = naive(fusion)
        self.binder = Binder(fusion)
        self.outputs = {t.name: t for t in self.naive.outputs}
        self.rows = next((d for t in self._tensors() for d in reversed(t.logical) if isinstance(d, RaggedIterDomain)), None)
        self.product = any("mul(" in str(leaf) and "over" in str(leaf) for p in self.naive.phases for leaf in p.leaves)
        self._built: dict[Any, tuple[Plan, Executable]] = {}
        if strategy is not None:
            plan(self.naive, strategy, CPU)

    def _tensors(self) -> list[Tensor]:
        read = [r.tensor for d in self.fusion.definitions for v in d.statement.values for r in v.reads]
        return [*read, *(v.tensor for v in self.fusion.outputs)]

    def __call__(self, *args: Any) -> Any:
        return self.run(self.binder.bind(args))

    def run(self, call: Call) -> Any:
        """Runs a bound call and gives its results."""
        executable = self.executable(call)
        tensors = dict(call.tensors)
        for tensor in executable.program.outputs:
            tensors[tensor] = self._allocate(call, tensor)
        for tensor in executable.program.scratch:
            tensors[tensor] = self._allocate(call, tensor)
        arrays = {a: call.array(a) for a in executable.program.arrays}
        executable(tensors, arrays, call.symbols)
        results = [self.binder.result(call, v, self._memory(tensors, v.tensor)) for v in self.fusion.outputs]
        return results[0] if len(results) == 1 else tuple(results)

    def _memory(self, tensors: dict[Tensor, torch.Tensor], tensor: Tensor) -> torch.Tensor:
        own = tensor.memory
        return tensors[own] if own.role is Role.INPUT else tensors[self.outputs[own.name]]

    def _allocate(self, call: Call, tensor: Tensor) -> torch.Tensor:
        if tensor.role is Role.PRIVATE:
            row = next(d for d in tensor.logical if isinstance(d, RaggedIterDomain))
            sizes = [
                self.binder.longest(call, d) if isinstance(d, RaggedIterDomain) else call.size(d.extent_expr)
                for d in tensor.logical
                if d.uid != row.component.uid
            ]
        else:
            sizes = [call.size(d.host_bound) for d in tensor.storage]
        return memory.empty(sizes, tensor.dtype, call.device)

    def executable(self, call: Call) -> Executable:
        """The executable for a call, built the first time its plan is needed."""
        backend = self.backend or default_backend(call.device)
        strategy, options = self._choice(call, backend)
        wide = frozenset(a for a in self._arrays(call))
        key = (backend, strategy, tuple(sorted(options.items())), wide)
        if key not in self._built:
            chosen = plan(self.naive, strategy, BACKENDS[backend], **options)
            if "plan" in settings.current().log:
                log.warning("%s", chosen)
            built = build(self.naive, chosen, self.fusion.name, backend, self._all_wide(call, chosen))
            if "source" in settings.current().log:
                log.warning("%s", built.source)
            self._built[key] = (chosen, built)
        return self._built[key][1]

    def _choice(self, call: Call, backend: str) -> tuple[str, dict[str, Any]]:
        if self.strategy is not None:
            return self.strategy, self.options
        rows = None
        target = BACKENDS[backend]
        if self.rows is not None:
            known = call.device.type == "cpu"
            width = 1
            for tensor in self._tensors():
                if self.rows in tensor.logical:
                    width = max(
                        width, tensor.dtype.itemsize * call.size(tensor.storage[-1].extent_expr) if len(tensor.storage) > 1 else 4
                    )
            rows = Rows(
                call.size(self.rows.component.extent_expr),
                call.size(self.rows.host_bound),
                self.binder.longest(call, self.rows) if known else None,
                width,
            )
        workers = torch.get_num_threads() if target is CPU else 132
        strategy, options = choose(rows, target, workers, product=self.product)
        return strategy, {**options, **self.options}

    def _arrays(self, call: Call) -> list[Array]:
        """Arguments that serve as arrays and hold int64."""
        return [Array(name) for name, x in call.named.items() if x.dtype == torch.int64]

    def _all_wide(self, call: Call, chosen: Plan) -> frozenset[Array]:
        program = lower(chosen.apply(self.naive), "probe")
        return frozenset(a for a in program.arrays if call.array(a).dtype == torch.int64)

    def source(self, *args: Any) -> str:
        """The code that runs for these arguments."""
        return self.executable(self.binder.bind(args)).source

    def plan(self, *args: Any) -> Plan:
        """The plan that is used for these arguments."""
        call = self.binder.bind(args)
        self.executable(call)
        backend = self.backend or default_backend(call.device)
        strategy, options = self._choice(call, backend)
        key = (backend, strategy, tuple(sorted(options.items())), frozenset(self._arrays(call)))
        return self._built[key][0]


def evaluate(fusion: Fusion, *args: Any) -> Any:
    """Runs a fusion on the reference backend, a whole row at a time."""
    return Compiled(fusion, "reference", "maskless", keep_rows=False)(*args)


fusion_module.install(evaluate=evaluate, compile=Compiled)

__all__ = ["STRATEGIES", "Compiled", "JaggedTensor", "build", "evaluate"]
