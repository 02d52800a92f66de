"""Analyses on which the compiler bases its decisions: indices, guards, contiguity, vectors. `inspection` is for users and tests.

In: domains and programs. Out: index expressions, guards, legal wide accesses. `inspection`, loaded on first use, counts visits by
brute force, finds domains that share an index, lays out memory with its holes, and determines what holes must contain.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from serrate.analysis.contiguity import WideAccess, contiguous, merge_groups, wide_access
from serrate.analysis.guards import Guard, guards
from serrate.analysis.indices import Indices
from serrate.analysis.vectors import check_vectorized

if TYPE_CHECKING:
    from serrate.analysis.inspection.allocation import Allocation, allocation
    from serrate.analysis.inspection.brute_force import visits
    from serrate.analysis.inspection.graph import DomainGraph
    from serrate.analysis.inspection.holes import Correctness, CorrectnessKind, correctness
    from serrate.analysis.inspection.iteration import same_iteration, split_commutes

_HOMES = {
    **dict.fromkeys(("Allocation", "allocation"), "inspection.allocation"),
    **dict.fromkeys(("Correctness", "CorrectnessKind", "correctness"), "inspection.holes"),
    **dict.fromkeys(("same_iteration", "split_commutes"), "inspection.iteration"),
    "DomainGraph": "inspection.graph",
    "visits": "inspection.brute_force",
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
