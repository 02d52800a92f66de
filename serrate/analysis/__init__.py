"""Facts about programs that transforms and printers need: indices, guards, the domain graph, allocation, contiguity.

In: domains and programs. Out: index expressions, guards, brute-force visit counts, which domains are one index, places and
holes, what holes must hold, which accesses may be wide, drawings.
"""

from serrate.analysis.allocation import Allocation, allocation
from serrate.analysis.correctness import Correctness, CorrectnessKind, correctness
from serrate.analysis.graph import DomainGraph
from serrate.analysis.guards import Guard, guards, visits
from serrate.analysis.indices import Indices

__all__ = [
    "Allocation",
    "Correctness",
    "CorrectnessKind",
    "DomainGraph",
    "Guard",
    "Indices",
    "allocation",
    "correctness",
    "guards",
    "visits",
]
