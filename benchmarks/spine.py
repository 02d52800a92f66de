"""The five works that have hand-written C++ to be compared with: the CPU table, of these and in float32 alone.

Comes in: the options of the CPU table. Goes out: the same, as spine.json and spine-float32.png.
"""

from __future__ import annotations

import dataclasses

from benchmarks import cpu
from benchmarks.options import Options, chosen
from benchmarks.tasks import SPINE


def main(options: Options) -> bool:
    """Measures, prints and writes; whether ours ran and was right everywhere."""
    only = tuple(chosen("--only", options.only, SPINE))
    return cpu.main(dataclasses.replace(options, only=only, dtypes=("float32",)), "spine")
