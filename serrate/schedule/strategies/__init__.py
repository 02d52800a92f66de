"""Strategies: how a (component, ragged) pair becomes loops. One file each; a strategy is a function that records a plan.

In: a naive tile program and a target. Out: a plan. Adding a strategy is adding a module here and a line to `STRATEGIES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from serrate.analysis.library_calls import FUNCTIONS
from serrate.errors import StrategyError, choices
from serrate.ir.tile import TileProgram
from serrate.schedule.plan import Plan
from serrate.schedule.strategies.library import LIBRARY, library
from serrate.schedule.strategies.masked import masked
from serrate.schedule.strategies.maskless import maskless
from serrate.schedule.strategies.persistent_dynamic import persistent_dynamic
from serrate.schedule.target import Target

Strategy = Callable[..., Plan]

SCHEDULES: dict[str, Strategy] = {"maskless": maskless, "masked": masked, "persistent_dynamic": persistent_dynamic}
"""The strategies that arrange loops, and apply to every program."""
STRATEGIES: dict[str, Strategy] = {**SCHEDULES, LIBRARY: library}
NAMED = {"call": FUNCTIONS}
"""Options that are names, and what they may be; all others are numbers."""


def check(strategy: str, sizes: Mapping[str, object]) -> None:
    """Raises unless the strategy exists and takes these options."""
    if strategy not in STRATEGIES:
        raise StrategyError(f"unknown strategy {strategy!r}: {choices(strategy, STRATEGIES)}")
    taken = [name for name in inspect.signature(STRATEGIES[strategy]).parameters if name not in ("program", "target", "lanes")]
    for name, size in sizes.items():
        if name not in taken:
            raise StrategyError(f"{strategy} takes {', '.join(taken)}; got {name}")
        if name in NAMED:
            if size is not None and size not in NAMED[name]:
                raise StrategyError(f"{strategy}: {name}={size!r}: {choices(str(size), NAMED[name])}")
        elif size is not None and not isinstance(size, bool) and (not isinstance(size, int) or size < 1):
            raise StrategyError(f"{strategy}: {name} must be at least 1, got {size!r}")


def plan(program: TileProgram, strategy: str, target: Target, lanes: Mapping[str, int] | None = None, **sizes: int | str) -> Plan:
    """The plan that a strategy makes for a program on a target; `lanes` of a kernel's axes, by name."""
    check(strategy, sizes)
    return STRATEGIES[strategy](program, target, **sizes, **({"lanes": lanes} if program.axes else {}))
