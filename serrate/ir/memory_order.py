"""Whether a view's elements, in the order of its dims, are contiguous in memory.

In: a tensor. Out: a bool. Nesting, flattening, splitting and merging keep the order of elements; a permutation does not, so a
permuted result is copied before it is returned.
"""

from __future__ import annotations

from collections.abc import Sequence

from serrate.ir.domains import IterDomain
from serrate.ir.partition import Partition
from serrate.ir.ragged_transforms import Cover, Spread
from serrate.ir.storage import collapse
from serrate.ir.transforms import Transform
from serrate.ir.values import Tensor


def in_order(tensor: Tensor) -> bool:
    """Whether the logical dims have the same order in memory as in the tensor.

    Compares the origins of storage and logical dims: each domain is replaced by the domains it was derived from, in order, as far
    back as possible. Rows are stored where the dim that counts them stands, whatever regular dims come between the two. Dims of
    extent 1 are ignored.
    """
    return _roots(collapse(tensor.logical)) == _roots(tensor.storage)


def _roots(domains: Sequence[IterDomain]) -> list[int]:
    """The domains that `domains` were derived from, as far back as all outputs of a transform are adjacent and in order."""
    current = [d for d in domains if d.extent != 1]
    while True:
        for transform in dict.fromkeys(d.definition for d in current if d.definition is not None):
            if isinstance(transform, Cover | Spread) or (isinstance(transform, Partition) and transform.lengths is not None):
                # Rows with gaps between or after them are not contiguous.
                continue
            place = _together(current, transform)
            if place is not None:
                count = len([d for d in transform.outputs if d.extent != 1])
                current[place : place + count] = [d for d in transform.inputs if d.extent != 1]
                break
        else:
            return [d.uid for d in current]


def _together(current: list[IterDomain], transform: Transform) -> int | None:
    outputs = [d.uid for d in transform.outputs if d.extent != 1]
    for k in range(len(current) - len(outputs) + 1):
        if outputs and [d.uid for d in current[k : k + len(outputs)]] == outputs:
            return k
    return None
