"""How pictures of domains and fusions are made: a layered layout and two writers.

In: boxes and edges between them. Out: positions without overlaps, SVG, graphviz source. `serrate.ir.figures` says what to draw.
"""

from serrate.ir.drawing.layout import Box, Edge, Placed, place
from serrate.ir.drawing.picture import Drawing, Legend

__all__ = ["Box", "Drawing", "Edge", "Legend", "Placed", "place"]
