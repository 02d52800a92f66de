"""The only place in this package that touches private torch API, each use with its reason.

In: a class and how it comes apart and together. Out: its registration with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

# torch has no public pytree module (as of 2.13); `torch.export.register_dataclass` is public but takes
# only dataclasses and would make a leaf of the structure. `torch.func` and `torch.export` see containers only through this.
from torch.utils._pytree import register_pytree_node


def register_container(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
) -> None:
    """Makes a class a node of torch's pytrees; `flatten` gives its leaves and what is needed beside them to rebuild it.

    >>> from torch.utils._pytree import tree_map
    >>> class Pair:
    ...     def __init__(self, a, b):
    ...         self.a, self.b = a, b
    >>> register_container(Pair, lambda pair: ([pair.a, pair.b], None), lambda leaves, context: Pair(*leaves))
    >>> tree_map(lambda leaf: leaf + 1, Pair(1, 2)).b
    3
    """
    register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
