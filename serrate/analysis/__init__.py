"""Facts about programs that transforms and printers need: indices, guards, the domain graph, allocation, contiguity.

In: domains and programs. Out: index expressions, guards, brute-force visit counts, which domains are one index, places and
holes, what holes must hold, which accesses may be wide, drawings.
"""

from serrate.analysis.allocation import Allocation, allocation
from serrate.analysis.brute_force import visits
from serrate.analysis.contiguity import WideAccess, contiguous, merge_groups, wide_access
from serrate.analysis.correctness import Correctness, CorrectnessKind, correctness
from serrate.analysis.drawing import draw
from serrate.analysis.graph import DomainGraph
from serrate.analysis.guards import Guard, guards
from serrate.analysis.indices import Indices
from serrate.analysis.iteration import same_iteration, split_commutes
from serrate.analysis.vectors import check_vectorized

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
    "draw",
    "guards",
    "merge_groups",
    "same_iteration",
    "split_commutes",
    "visits",
    "wide_access",
]
