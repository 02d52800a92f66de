"""Candidates: the plans that may be tried for a program.

In: a program, a target and the heuristic's choice. Out: candidates. `Space.openings` has every strategy once, and every library
call that computes exactly the program; `Space.variants` has the neighbours of a candidate: other tile sizes, other warps. A
candidate may turn out to be illegal when it is planned or built; the reason is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from serrate.ir.tile import TileProgram
from serrate.schedule.plan import ORDERS
from serrate.schedule.sizes import sizes
from serrate.schedule.strategies import NAMED, STRATEGIES
from serrate.schedule.strategies.common import multiplies
from serrate.schedule.strategies.library import LIBRARY
from serrate.schedule.target import Target
from serrate.tensor.hints import NO_HINTS, Hints

Sizes = tuple[tuple[str, int], ...]
Options = tuple[tuple[str, int | str], ...]
HOST = "host"
"""The strategy name of candidates for the tunables of a kernel's host code."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with options, from which a plan is made.

    >>> print(Candidate("masked", (("rows", 16),)), Candidate("maskless", lanes=(("k", 64),)))
    masked(rows=16) maskless(k=64)
    >>> print(Candidate("library", (("call", "mm"),)))
    library(call=mm)
    """

    strategy: str
    options: Options = ()
    """Options of the strategy, in the order in which they were given."""
    lanes: Sizes = ()
    """Tile sizes of a kernel, by axis name."""
    threads: int | None = None
    order: str = ORDERS[0]
    """As in `Plan`: both are numbers that the same code is given."""

    @property
    def compiled(self) -> Candidate:
        """The candidate with the same code."""
        return self if self.threads is None and self.order == ORDERS[0] else replace(self, threads=None, order=ORDERS[0])

    def as_dict(self) -> dict[str, Any]:
        """As JSON; `candidate_of` reads it.

        >>> candidate_of(Candidate("masked", (("rows", 16),)).as_dict())
        Candidate(strategy='masked', options=(('rows', 16),), lanes=(), threads=None, order='blocked')
        """
        own = {"options": dict(self.options), "lanes": dict(self.lanes), "threads": self.threads, "order": self.order}
        return {"strategy": self.strategy, **own}

    def __str__(self) -> str:
        named: list[tuple[str, object]] = [*self.options, *self.lanes]
        named += [] if self.threads is None else [("threads", self.threads)]
        named += [] if self.order == ORDERS[0] else [("order", self.order)]
        given = ", ".join(f"{name}={value}" for name, value in named)
        return f"{self.strategy}({given})" if given else self.strategy


def candidate_of(given: Mapping[str, Any]) -> Candidate:
    """A candidate from JSON; raises ValueError if it is not one."""
    strategy, options, lanes = given.get("strategy"), given.get("options"), given.get("lanes")
    if strategy not in (*STRATEGIES, HOST) or not isinstance(options, dict) or not isinstance(lanes, dict):
        raise ValueError(f"not a candidate: {given!r}")
    numbers = [size for name, size in options.items() if name not in NAMED or size not in NAMED[name]]
    if any(not isinstance(size, int) for size in (*numbers, *lanes.values())):
        raise ValueError(f"the options of a candidate are numbers, or names of library calls: {given!r}")
    threads, order = given.get("threads"), given.get("order")
    if order not in ORDERS or not isinstance(threads, int | None):
        raise ValueError(f"not a candidate: {given!r}")
    return Candidate(strategy, tuple(options.items()), tuple(lanes.items()), threads, order)


@dataclass(frozen=True)
class TileGroup:
    """Axes of a kernel with the same extent, whose tiles change together."""

    names: tuple[str, ...]
    usual: int
    most: int | None
    """The extent, if it is compiled in."""


ON_CPU: dict[str, dict[str, tuple[int | bool, ...]]] = {
    "maskless": {"keep_rows": (True, False), "tile": (32, 512)},
    "masked": {"rows": (4, 16)},
    "persistent_dynamic": {"chunk": (512, 4096), "tile": (64,)},
}
ON_GPU: dict[str, dict[str, tuple[int | bool, ...]]] = {
    "maskless": {"warps": (2, 8), "tile": (64, 512), "short": (True,)},
    "masked": {"rows": (16, 64), "warps": (2, 8)},
    "persistent_dynamic": {"chunk": (1024, 8192), "warps": (2, 8), "uncut": (4096,), "resident": (1, 2)},
}
"""Values of each option that are tried, one option at a time; none of them is the default everywhere."""
VARIED = frozenset(name for table in (ON_CPU, ON_GPU) for options in table.values() for name in options)
"""All options that are varied."""
OF_KERNELS = frozenset(("rows", "chunk", "warps"))
"""The options that matter to kernels, whose tiles are set by axis."""
OF_PRODUCTS = frozenset(("resident",))
"""The options that matter only to matrix products."""
FACTORS = (0.25, 4)
"""The factors by which the tile of a kernel is scaled."""

LIKELY = {"giant": "persistent_dynamic", "uniform": "masked", "exponential": "maskless", "bimodal": "maskless"}
"""The strategy to try first for lengths that the user says are distributed like this."""


@dataclass(frozen=True)
class Space:
    """The candidates for one program.

    >>> from serrate.schedule.target import CPU
    >>> space = Space(Candidate("maskless", (("keep_rows", True),)), CPU)
    >>> print(*space.openings())
    maskless(keep_rows=True) masked persistent_dynamic
    >>> print(*space.openings(Hints(distribution="giant")))
    maskless(keep_rows=True) persistent_dynamic masked
    >>> print(*space.variants(Candidate("masked")))
    masked(rows=4) masked(rows=16)
    """

    usual: Candidate
    """The choice without measuring; always the first."""
    target: Target
    groups: tuple[TileGroup, ...] = ()
    """For a kernel: the axes whose tile sizes may vary."""
    threads: int = 1
    """How many threads a CPU runs now."""
    calls: tuple[str, ...] = ()
    """The library functions that compute exactly this program."""
    varied: frozenset[str] = VARIED
    """The options that matter to this program, and that the user left open."""

    def openings(self, hints: Hints = NO_HINTS) -> list[Candidate]:
        """The usual choice, library calls, for which nothing is compiled, and every other strategy once; the one that hints make
        likely comes first of these."""
        others = [name for name in STRATEGIES if name not in (self.usual.strategy, LIBRARY)]
        others.sort(key=lambda name: name != LIKELY.get(hints.distribution or ""))
        return [self.usual, *(Candidate(LIBRARY, (("call", name),)) for name in self.calls), *map(Candidate, others)]

    def variants(self, candidate: Candidate) -> list[Candidate]:
        """The candidate with one thing changed."""
        found: list[Candidate] = []
        options, given = dict(candidate.options), dict(candidate.lanes)
        table = (ON_GPU if self.target.many_workers else ON_CPU).get(candidate.strategy, {})
        for name, values in table.items():
            for value in values if name in self.varied else ():
                if options.get(name) != value:
                    found.append(replace(candidate, options=tuple((options | {name: value}).items())))
        for group in self.groups:
            size = given.get(group.names[0], group.usual)
            for factor in FACTORS:
                scaled = max(1, int(size * factor))
                scaled = scaled if group.most is None else min(scaled, group.most)
                if scaled != size:
                    lanes = given | dict.fromkeys(group.names, scaled)
                    found.append(replace(candidate, lanes=tuple(lanes.items())))
        return found

    def sharings(self, candidate: Candidate, hints: Hints = NO_HINTS) -> list[Candidate]:
        """The candidate with other ways of sharing its work between threads, unless a library does so. These need no
        compilation."""
        if self.target.many_workers or self.threads == 1 or candidate.strategy == LIBRARY:
            return []
        orders = [order for order in ORDERS if order != candidate.order]
        if hints.access_pattern == "random":
            orders.sort(key=lambda order: order != "interleaved")
        return [*(replace(candidate, order=order) for order in orders), replace(candidate, threads=1)]

    def everything(self, hints: Hints = NO_HINTS) -> list[Candidate]:
        """Every opening, each followed by its variants."""
        found = (
            c for opening in self.openings(hints) for c in (opening, *self.variants(opening), *self.sharings(opening, hints))
        )
        return list(dict.fromkeys(found))


def space_of(
    program: TileProgram,
    usual: Candidate,
    target: Target,
    threads: int,
    fixed: Iterable[str] = (),
    calls: tuple[str, ...] = (),
    overridden: frozenset[str] = frozenset(),
) -> Space:
    """The candidates for a program. The user chose the tiles of the `fixed` axes of a kernel, and the `overridden` options.
    `calls` are library functions that compute the program."""
    if not program.axes:
        varied = VARIED if multiplies(program) else VARIED - OF_PRODUCTS
        return Space(usual, target, threads=threads, calls=calls, varied=varied - overridden)
    chosen = sizes(program, 1, target)
    groups: dict[tuple[object, object], TileGroup] = {}
    for axis in program.axes:
        if not axis.looped or axis.block is not None or axis.name in fixed or chosen[axis.name] == 1:
            continue
        key = (axis.begin, axis.end)
        known = groups.get(key)
        names = (axis.name,) if known is None else (*known.names, axis.name)
        groups[key] = TileGroup(names, chosen[names[0]], axis.size)
    return Space(usual, target, tuple(groups.values()), threads=threads, varied=OF_KERNELS - overridden)
