"""The CPU table for the five tasks with a hand-written baseline, in float32 only.

In: the options of the CPU table. Out: the same outputs, as spine.json and spine-float32.png.
"""

from __future__ import annotations

import dataclasses

from benchmarks import cpu
from benchmarks.options import Options, chosen
from benchmarks.tasks import SPINE


def main(options: Options) -> bool:
    """Measures, prints and writes; returns whether serrate ran and was correct everywhere."""
    only = tuple(chosen("--only", options.only, SPINE))
    return cpu.main(dataclasses.replace(options, only=only, dtypes=("float32",)), "spine")
