"""A picture of loops with their guards marked.

In: logical domains and the loops made from them. Out: a `Drawing`, the guarded domains marked and the guards written below.
"""

from __future__ import annotations

from collections.abc import Sequence

from serrate.analysis.guards import Guard, guards
from serrate.ir.domains import IterDomain
from serrate.ir.drawing import Drawing
from serrate.ir.figures import draw as draw_domains

LONG_NAME = 12
"""Names of arrays with more characters are shortened in guards."""


def draw(logical: Sequence[IterDomain], loop: Sequence[IterDomain]) -> Drawing:
    """The way from `logical` domains to loops; domains whose bound the loops must check are marked.

    >>> from serrate.ir import IterDomain, split
    >>> d = IterDomain(6)
    >>> "i0*4 + i1 &lt; 6" in draw([d], split(d, 4)).svg
    True
    """
    found = guards(logical, loop)
    loops = ", ".join(f"i{k} = {d.name}" for k, d in enumerate(loop))
    notes = [f"loops: {loops}", *_with_short_names(found)] if found else ["no guards are needed"]
    return draw_domains([*loop, *logical], [g.domain for g in found], notes)


def _with_short_names(found: Sequence[Guard]) -> list[str]:
    """The guards as text; arrays whose names are long (a derived one is named by how it is made) are named once, below."""
    arrays = {a.name for g in found for a in g.condition.left.arrays | g.condition.right.arrays}
    lines = [f"guard: {g}" for g in found]
    # A long name can contain a shorter one, so the longest goes first.
    for k, name in enumerate(sorted((n for n in arrays if len(n) > LONG_NAME), key=lambda n: (-len(n), n))):
        lines = [line.replace(name, f"A{k}") for line in lines]
        lines.append(f"A{k} = {name}")
    return lines
