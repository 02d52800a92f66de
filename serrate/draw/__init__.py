"""Pictures of domains and the transforms between them, of loops with their guards, and of fusions.

In: domains or a fusion. Out: a `Drawing`, as SVG or graphviz source. `figures` says what to draw, `layout` where each box goes,
`picture` writes it. No stage of the compiler uses any of this.
"""

from serrate.draw.figures import draw_domains, draw_fusion, draw_loops
from serrate.draw.picture import Drawing

__all__ = ["Drawing", "draw_domains", "draw_fusion", "draw_loops"]
