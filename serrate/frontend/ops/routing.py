"""Data-dependent grouping: the program computes row boundaries, which stay on the device.

In: keys, indices. Out: offsets and permutations as tensors of the fusion, for `as_nested` and `index`. A fusion is cut into
stages here (see `serrate.lower.stages`); nothing is copied to the host.
"""

from __future__ import annotations

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.ops.common import require_equal
from serrate.frontend.ops.elementwise import cast, ge, logical_and, lt, where
from serrate.frontend.ops.movement import index, slice
from serrate.frontend.ops.reductions import sum as sum_of
from serrate.frontend.ops.sorting import library, positions_of
from serrate.frontend.ops.structure import as_nested
from serrate.frontend.shapes import shown
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr
from serrate.ir.storage import storage_of
from serrate.ir.view import Size, TensorView


def group_by(keys: TensorView, count: int | Expr) -> tuple[TensorView, TensorView]:
    """Groups positions by key with a stable counting sort: returns the offsets of `count` groups, and the permutation that puts
    each group's positions side by side. Keys outside `0 .. count-1` come after all groups.

    >>> from serrate import ir
    >>> with ir.Fusion() as f:
    ...     f.output(*group_by(f.input((None,), torch.int64), 3))
    >>> f.evaluate(torch.tensor([2, 0, 2, 1]))
    (tensor([0, 1, 2, 4]), tensor([1, 3, 0, 2]))
    """
    if keys.ndim != 1 or keys.dtype == torch.bool or keys.dtype.is_floating_point:
        raise DtypeError(f"group_by: keys must be 1-D integers, got {keys.dtype} of shape {shown(keys)}")
    if isinstance(count, Size):
        count = int(count)
    if not isinstance(count, Expr) and (not isinstance(count, int) or count < 0):
        raise ShapeError(f"group_by: the number of groups must be a non-negative int, got {count!r}")
    fusion = keys.fusion
    offsets = fusion.tensor(torch.int64, (IterDomain(count + 1, name=fusion.fresh("d")),))
    permutation = fusion.tensor(torch.int64, keys.domains)
    keys = cast(keys, torch.int64)
    if all(d.host_bound is d.extent_expr for d in storage_of(keys.domains)):
        found = library("group_by", [offsets, permutation], [keys], count)
    else:
        found = library("group_first", [offsets, permutation], [keys, positions_of(keys, keys.domains)], count)
    return found[0], found[1]


def invert(permutation: TensorView) -> TensorView:
    """The inverse permutation: `index(index(x, p), invert(p))` is `x`."""
    if permutation.ndim != 1 or permutation.dtype != torch.int64:
        raise DtypeError(f"invert: a permutation must be 1-D int64, got {permutation}")
    return library("invert", [permutation.fusion.tensor(torch.int64, permutation.domains)], [permutation])[0]


def index_add(x: TensorView, indices: TensorView, count: int) -> TensorView:
    """Sums the rows of a dense `x` with the same index: `out[indices[n]] += x[n]` into `count` rows of zeros.

    Rows are grouped first, so sums run in order and give the same bits every time. An index out of range adds nothing.
    """
    if x.ndim < 1 or x.domains[0].is_ragged:
        raise ShapeError(f"index_add: expected a dense tensor, got {shown(x)}")
    if indices.ndim != 1:
        raise ShapeError(f"index_add: indices must have one dim, got {shown(indices)}")
    require_equal(x.fusion, "index_add: the numbers of rows and of indices", x.domains[0], indices.domains[0])
    inside = logical_and(ge(indices, 0), lt(indices, count))
    offsets, permutation = group_by(where(inside, indices, count), count + 1)
    return slice(sum_of(as_nested(index(x, permutation), offsets), 1), 0, 0, count)
