"""The order of a view's dims in memory: whether its elements, read dim by dim, lie side by side.

In: a tensor. Out: a bool. Nesting, flattening, splitting and merging keep the order of elements; a permutation does not,
so a permuted result is copied before it is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence

from serrate.ir.domains import IterDomain
from serrate.ir.partition import Partition
from serrate.ir.ragged_transforms import Cover, Spread
from serrate.ir.transforms import Transform
from serrate.ir.values import Tensor


def in_order(tensor: Tensor) -> bool:
    """Whether the logical dims follow each other in memory as they do in the tensor.

    What storage and logical dims are made of is compared: each domain is replaced by what it was made from (in order) as
    far back as possible, and dims of extent 1 do not matter.
    """
    return _roots(tensor.logical) == _roots(tensor.storage)


def _roots(domains: Sequence[IterDomain]) -> list[int]:
    """The domains that `domains` were made from, as far back as all outputs of a transform stand together in order."""
    current = [d for d in domains if d.extent != 1]
    while True:
        for transform in dict.fromkeys(d.definition for d in current if d.definition is not None):
            if isinstance(transform, Cover | Spread) or (isinstance(transform, Partition) and transform.lengths is not None):
                # Rows with gaps between or behind them do not lie side by side.
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
