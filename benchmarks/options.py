"""What a benchmark may be told.

Comes in: the options of `serrate bench`. Goes out: a frozen `Options`, and names checked against those there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class UnknownName(ValueError):
    """An option names something that there is not."""


@dataclass(frozen=True)
class Options:
    """Names of works, lengths and dtypes to keep (all, if there are none); how long to measure, and where results go.

    `patience`: seconds that torch.compile may take for one peer, if `compiled` ones are asked for.
    """

    rounds: int = 15
    quick: bool = False
    only: tuple[str, ...] = ()
    lengths: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    compiled: bool = True
    patience: float = 60.0
    out: Path = Path("build/benchmarks")


def chosen(option: str, wanted: Sequence[str], known: Iterable[str]) -> list[str]:
    """The known names that are wanted, in the order that they are known in; all of them if none is.

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
