"""library: a program that is exactly one vendor library call runs as that call.

for c: for r[c]: for n: for k: s   ->   out = mm(x, w) by rows

The tuner chooses a call only if measurements favour it; the heuristic never does. Nothing about a call is scheduled: the library
decides how threads share the work, and therefore the bits.
"""

from __future__ import annotations

from serrate.analysis.library_calls import FUNCTIONS, library_calls
from serrate.errors import ScheduleError, StrategyError
from serrate.ir.tile import TileProgram
from serrate.schedule.plan import Plan, Recorder
from serrate.schedule.target import Target

LIBRARY = "library"
"""The name of the strategy."""

ON_DEVICE = frozenset(("grouped_mm", "varlen_attn"))
"""Functions that read offsets on a GPU. The others read them on the host, and offsets on a GPU are never copied there."""
ONLY_ON_GPU = frozenset(("varlen_attn",))


def functions(program: TileProgram, target: Target) -> tuple[str, ...]:
    """The functions that compute exactly this program on a target."""
    if not target.many_workers:
        return tuple(name for name in library_calls(program) if name not in ONLY_ON_GPU)
    return tuple(name for name, call in library_calls(program).items() if name in ON_DEVICE or not call.rows)


def library(program: TileProgram, target: Target, call: str | None = None, lanes: object = None) -> Plan:
    """A plan with one step: the whole program is a call of this function, by default of the first that computes it."""
    if program.axes:
        raise StrategyError(
            f"{program.name}: a kernel is not recognised as a library call; name another strategy, or write it as a function "
            "for serrate.jit"
        )
    usual = functions(program, target)
    recorder = Recorder(program)
    try:
        recorder.do("call", call or (usual[0] if usual else FUNCTIONS[0]))
    except ScheduleError as error:
        raise StrategyError(f"{LIBRARY}: {error}; name another strategy, or none") from None
    return recorder.plan(LIBRARY)
