"""Options of benchmarks.

In: the options of `serrate bench`. Out: a frozen `Options`, with names checked against the known ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class UnknownName(ValueError):
    """An option with an unknown name."""


@dataclass(frozen=True)
class Options:
    """The tasks, lengths and dtypes to run (all by default), how long to measure, and where to write results.

    `patience`: the time limit in seconds for torch.compile per peer, if `compiled`. `jobs`: how many processes compile what a GPU
    runs before anything is timed.
    """

    rounds: int = 15
    quick: bool = False
    only: tuple[str, ...] = ()
    lengths: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    compiled: bool = True
    patience: float = 60.0
    out: Path = Path("build/benchmarks")
    jobs: int = 1


def chosen(option: str, wanted: Sequence[str], known: Iterable[str]) -> list[str]:
    """The selected names, in the order of the known ones; all of them by default.

    >>> chosen("--dtype", [], ["float32", "bfloat16"])
    ['float32', 'bfloat16']
    >>> chosen("--dtype", ["float3"], ["float32", "bfloat16"])
    Traceback (most recent call last):
    benchmarks.options.UnknownName: --dtype float3: there are float32, bfloat16
    """
    names = list(known)
    for each in wanted:
        if each not in names:
            raise UnknownName(f"{option} {each}: there are {', '.join(names)}")
    return [name for name in names if name in wanted] if wanted else names
