"""Facts about programs that transforms and printers need: indices, guards.

In: domains and programs. Out: index expressions, guards, brute-force visit counts.
"""

from serrate.analysis.allocation import Allocation, allocation
from serrate.analysis.guards import Guard, guards, visits
from serrate.analysis.indices import Indices

__all__ = ["Guard", "Indices", "guards", "visits"]
