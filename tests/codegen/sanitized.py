"""Runs cases with generated C++ built by the compiler's sanitizers; started by `test_sanitize.py` in a process of its own.

In: on the command line, points as JSON: [case, strategy, options, dtype, features, levels], or, behind `composed`, those of
compositions: [operation, composition, strategy, options, dtype, dims]. Out: status 0, or the sanitizer's
report on stderr after the name of the point. The process must have libasan preloaded: torch's own memory then lies between
poisoned zones, so that one element past the end of an argument, a result or an array of offsets is an error.
"""

from __future__ import annotations

import functools
import json
import sys

import torch

from serrate.runtime import launch
from serrate.runtime.compiler import find_compiler
from tests.engine.cases import CASES, NESTED_CASES
from tests.engine.composed import LENGTHS, run
from tests.engine.oracle import ONE_LEVEL, TWO_LEVELS, Rows, arguments, check, compiled

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g", "-fno-omit-frame-pointer")
LONG = Rows((400, 0, 3, 61, 1))
"""Several blocks of a row, the last of them partial."""


def main() -> None:
    launch.find_compiler = functools.partial(find_compiler, FLAGS)  # type: ignore[attr-defined]
    for point in json.loads(sys.argv[1]):
        name, strategy, options, dtype_name, features, levels, stream = point
        print(point, file=sys.stderr, flush=True)
        # Results written past the cache take other instructions.
        launch.last_level_cache = lambda stream=stream: -1 if stream else 1 << 40  # type: ignore[assignment]
        case = (CASES if levels == 1 else NESTED_CASES)[name]
        dtype = getattr(torch, dtype_name)
        structures = {**ONE_LEVEL, "long": LONG} if levels == 1 else TWO_LEVELS
        program = compiled(case, "cpp", strategy, tuple(sorted(options.items())), dtype, tuple(features), levels)
        for where, rows in structures.items():
            given = arguments(case, rows, dtype, tuple(features), where)
            check(case, program(*given.call), given, f"{name} on {where}")


def composed() -> None:
    launch.find_compiler = functools.partial(find_compiler, FLAGS)  # type: ignore[attr-defined]
    for operation, composition, strategy, options, dtype_name, dims in json.loads(sys.argv[2]):
        print(operation, composition, strategy, options, dtype_name, dims, file=sys.stderr, flush=True)
        way = (strategy, tuple((name, value) for name, value in options))
        run(operation, composition, "cpp", way, getattr(torch, dtype_name), tuple(dims), list(LENGTHS))


def overrun() -> None:
    """Values that are one position shorter than the program was told: the sanitizer must see the read."""
    launch.find_compiler = functools.partial(find_compiler, FLAGS)  # type: ignore[attr-defined]
    program = compiled(CASES["sum_rows"], "cpp", "maskless", (), torch.float32, (5,))
    whole, offsets = torch.ones(8, 5), torch.tensor([0, 3, 8])
    run = program.ready(whole, offsets)
    run([torch.ones(7, 5), offsets])


if __name__ == "__main__":
    {"overrun": overrun, "composed": composed}.get(sys.argv[1], main)()
