"""Facts about programs that transforms and printers need: indices, guards.

In: domains and programs. Out: index expressions, guards, brute-force visit counts.
"""

from serrate.analysis.brute_force import visits
from serrate.analysis.guards import Guard, guards
from serrate.analysis.indices import Indices
from serrate.analysis.vectors import check_vectorized

__all__ = ["Guard", "Indices", "check_vectorized", "guards", "visits"]
