"""A picture of loops with their guards marked.

In: logical domains and the loops made from them. Out: a `Drawing`, the guarded domains marked and the guards written below.
"""

from __future__ import annotations

from collections.abc import Sequence

from serrate.analysis.guards import guards
from serrate.ir.domains import IterDomain
from serrate.ir.draw import draw as draw_domains
from serrate.ir.drawing import Drawing


def draw(logical: Sequence[IterDomain], loop: Sequence[IterDomain]) -> Drawing:
    """The way from `logical` domains to loops; domains whose bound the loops must check are marked.

    >>> from serrate.ir import IterDomain, split
    >>> d = IterDomain(6)
    >>> "i0*4 + i1 &lt; 6" in draw([d], split(d, 4)).svg
    True
    """
    found = guards(logical, loop)
    loops = ", ".join(f"i{k} = {d.name}" for k, d in enumerate(loop))
    notes = [f"loops: {loops}", *(f"guard: {g}" for g in found)] if found else ["no guards are needed"]
    return draw_domains([*loop, *logical], [g.domain for g in found], notes)
