"""Values: interned nodes.

In: nodes made twice. Out: failures where two different nodes are taken for one.
"""

from __future__ import annotations

import gc

from serrate.ir.domains import IterDomain
from serrate.ir.expr import const
from serrate.ir.values import Place, computed, index_of


def test_a_place_depends_on_the_domains_that_its_expression_names() -> None:
    """A second program must not get a node of the first one, with domains of the first one."""
    for _ in range(2):
        one, other = IterDomain(4, name="d"), IterDomain(4, name="d")
        place = Place(index_of(one) + 2, (one, other))
        assert [d.uid for d in place.domains] == [one.uid]
        same, value = computed(Place(const(2), (one,))), computed(Place(const(2), (other,)))
        assert same is value and value.place.domains == ()
        gc.collect()
