"""Keys of tile kernels: a ragged tensor indexed by one asks the key to read or write.

In: a key of `jt[...]`. Out: the lane key in it, if there is one.
"""

from __future__ import annotations

from typing import Any


class LaneKey:
    """A tile, or a value with an index for each of its lanes: it knows itself how lanes read and write ragged rows."""

    __slots__ = ()

    def read_rows(self, jt: Any, key: Any) -> Any:
        """What `jt[key]` is."""
        raise NotImplementedError

    def write_rows(self, jt: Any, key: Any, x: Any) -> None:
        """Does `jt[key] = x`."""
        raise NotImplementedError


def lane_key(key: Any) -> LaneKey | None:
    """The first lane key of an index, or None.

    >>> lane_key((0, slice(None))) is None
    True
    """
    if isinstance(key, LaneKey):
        return key
    if type(key) is tuple:
        for each in key:
            if isinstance(each, LaneKey):
                return each
    return None
