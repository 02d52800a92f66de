"""Facts about programs that transforms and printers need: indices, guards, the domain graph, allocation, contiguity.

In: domains and programs. Out: index expressions, guards, brute-force visit counts, which domains are one index, places and
holes, what holes must hold, which accesses may be wide. What no compilation needs is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from serrate.analysis.guards import Guard, guards
from serrate.analysis.indices import Indices
from serrate.analysis.vectors import check_vectorized

if TYPE_CHECKING:
    from serrate.analysis.brute_force import visits
    from serrate.analysis.contiguity import WideAccess, contiguous, merge_groups, wide_access
    from serrate.analysis.graph import DomainGraph
    from serrate.analysis.holes import Correctness, CorrectnessKind, correctness
    from serrate.analysis.iteration import same_iteration, split_commutes
    from serrate.analysis.memory import Allocation, allocation

_HOMES = {
    **dict.fromkeys(("Allocation", "allocation"), "memory"),
    **dict.fromkeys(("Correctness", "CorrectnessKind", "correctness"), "holes"),
    **dict.fromkeys(("WideAccess", "contiguous", "merge_groups", "wide_access"), "contiguity"),
    **dict.fromkeys(("same_iteration", "split_commutes"), "iteration"),
    "DomainGraph": "graph",
    "visits": "brute_force",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Allocation",
    "Correctness",
    "CorrectnessKind",
    "DomainGraph",
    "Guard",
    "Indices",
    "WideAccess",
    "allocation",
    "check_vectorized",
    "contiguous",
    "correctness",
    "guards",
    "merge_groups",
    "same_iteration",
    "split_commutes",
    "visits",
    "wide_access",
]
