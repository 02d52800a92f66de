"""`python -m tests.codegen.sources STEP`: a digest of the generated code of many programs.

In: a step. Out: a line for every STEPth operation or gradient: its name, and a digest of its C++ and Triton. Programs are found
on disk by their text, so every process must print the same lines.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Iterator

from serrate.autograd.adjoint import gradients
from serrate.autograd.saved import backward_of
from serrate.engine import build
from serrate.errors import GradientError, StrategyError
from serrate.ir.fusion import Fusion
from serrate.ir.tile import TileProgram
from serrate.lower.stages import stages
from serrate.schedule.heuristic import RowStatistics, choose
from serrate.schedule.prepare import row_facts
from serrate.schedule.strategies import plan
from serrate.schedule.target import CPU, GPU
from tests.engine.across_cases import ACROSS
from tests.engine.cases import CASES, NESTED_CASES
from tests.engine.movement_cases import MOVEMENT, STRUCTURE
from tests.engine.oracle import pick, recorded

ROWS, WORKERS, UNKNOWN = 4096, 132, 100
"""How many rows and workers plans are chosen for, and a size that programs do not know."""


def fusions() -> Iterator[tuple[str, Fusion]]:
    """Every operation, with one level of rows or two, and its gradient."""
    for levels, cases in ((1, {**CASES, **MOVEMENT, **STRUCTURE, **ACROSS}), (2, NESTED_CASES)):
        for name, case in cases.items():
            dtype = pick(case.dtypes, name)
            fusion = recorded(case, dtype, pick(case.features, name), levels)
            yield f"{name}, {levels} level(s)", fusion
            if not dtype.is_floating_point:
                continue
            try:
                backward = backward_of(gradients(fusion, (0,)), (), "auto").fusion
            except GradientError:
                continue
            if backward.outputs:
                yield f"gradient of {name}, {levels} level(s)", backward


def sources(fusion: Fusion) -> Iterator[str]:
    """The code of all stages, on a CPU and on a GPU, under two strategies; or why a strategy is refused."""
    for stage in stages(fusion):
        if not isinstance(stage, TileProgram):
            yield str(stage)
            continue
        for backend, target in (("cpp", CPU), ("triton", GPU)):
            for strategy in ("maskless", "persistent_dynamic"):
                try:
                    yield build(stage, plan(stage, strategy, target), stage.name, backend, lambda _: True).source
                except StrategyError as error:
                    yield str(error)


def chosen_sources(fusion: Fusion) -> Iterator[str]:
    """The Triton code of all stages under every plan that is chosen without measuring, for rows of many lengths."""
    for stage in stages(fusion):
        facts = row_facts(stage) if isinstance(stage, TileProgram) else None
        if not isinstance(stage, TileProgram) or facts is None:
            continue
        width = math.prod(extent.value or UNKNOWN for extent in facts.inner) * facts.itemsize
        plans = {}
        for mean, longest in itertools.product((4, 48, 300, 3000), (None, 1, 50)):
            rows = RowStatistics(ROWS, ROWS * mean, None if longest is None else longest * mean, width)
            chosen = choose(rows, GPU, WORKERS, product=facts.product, carried=facts.carried, mean=mean)
            plans[chosen.strategy, *sorted(chosen.options.items())] = chosen
        for strategy, options, _ in plans.values():
            yield build(stage, plan(stage, strategy, GPU, None, **options), stage.name, "triton", lambda _: True).source


def sampled_sources(step: int) -> Iterator[tuple[str, str]]:
    """The name and the code of every `step`th program."""
    for name, fusion in itertools.islice(fusions(), None, None, step):
        yield name, "\n".join(sources(fusion))


def main(step: int) -> None:
    for name, text in sampled_sources(step):
        print(f"{name}: {hashlib.sha256(text.encode()).hexdigest()[:16]}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
