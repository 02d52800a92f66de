"""Runs tile kernels with generated C++ built by the compiler's sanitizers; started by `test_sanitize.py` in a process of its own.

In: on the command line, examples (`jagged_sum@masked`: a name and a strategy), random programs (`rows:7`: a kind and a seed),
or `overrun`. Out: status 0, or the sanitizer's report on stderr after the name. The process must have libasan preloaded.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from random import Random
from typing import Any

import torch

import serrate
import serrate.language as hl
from serrate import Kernel
from serrate.errors import StrategyError
from serrate.runtime import launch
from serrate.runtime.compiler import find_compiler
from serrate.tiles import stage
from tests.codegen.sanitized import FLAGS
from tests.language.kinds import LENGTHS
from tests.language.programs import write
from tests.language.test_examples import example

KINDS = ([65, 0, 3, 17, 1], *(LENGTHS[k] for k in ("exponential", "zeros", "all_zero", "empty")))


def examples(name: str, strategy: str) -> None:
    """All forms of an example, on rows of several blocks and on none."""
    made: dict[Kernel, Kernel] = {}

    def run(kernel: Kernel) -> Any:
        if kernel not in made:
            made[kernel] = serrate.kernel(kernel.fn, config=kernel.config, strategy=strategy)

        def one(*args: Any) -> Any:
            try:
                return made[kernel].on("cpp")(*args)
            except StrategyError:
                return kernel.on("cpp")(*args)

        return one

    module = example(name)
    for lengths in KINDS:
        torch.manual_seed(0)
        module.check(lengths, run)


def program(kind: str, seed: int) -> None:
    """A random program under one of its plans, and as it is."""
    made = write(Random(seed), kind)
    for plan in ({}, made.plans[seed % len(made.plans)]):
        # Rows that a program does not let be cut are refused, with the reason.
        with contextlib.suppress(StrategyError):
            made.kernel(plan).on("cpp")(*made.arguments())


def overrun() -> None:
    """Values that are shorter than the program was told: the sanitizer must see the read."""

    @serrate.kernel
    def k(jt: serrate.JaggedTensor, out: torch.Tensor) -> None:
        for b in hl.tile(jt.num_rows):
            total = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                total = total + jt[b, t].sum(1)
            out[b] = total

    bound = stage.bound

    def shortened(*args: Any, **kwargs: Any) -> Any:
        binding = bound(*args, **kwargs)
        return lambda leaves: binding([t[:60].clone() if t.numel() == 64 else t for t in leaves])

    stage.bound = shortened  # type: ignore[attr-defined]
    k.on("cpp")(serrate.JaggedTensor.from_lengths(torch.ones(64), [30, 34]), torch.empty(2))


def main() -> None:
    launch.find_compiler = functools.partial(find_compiler, FLAGS)  # type: ignore[attr-defined]
    for name in sys.argv[1:]:
        print(name, file=sys.stderr, flush=True)
        kind, _, seed = name.partition(":")
        if name == "overrun":
            overrun()
        elif seed:
            program(kind, int(seed))
        else:
            examples(*name.split("@"))


if __name__ == "__main__":
    main()
