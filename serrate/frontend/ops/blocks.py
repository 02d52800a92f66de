"""Block permutations: the dims that index rows change order, and whole rows move.

In: a `TensorView` whose rows are indexed by two dims or more (experts and source ranks). Out: the same rows under the same dims
in another order, or under one of them alone; data moves.
"""

from __future__ import annotations

from collections.abc import Sequence

from serrate.errors import ShapeError
from serrate.frontend.ops.common import counted, counting, dim_of
from serrate.frontend.ops.structure import set, viewed
from serrate.frontend.shapes import shown
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expr import Array, Expr, maximum
from serrate.ir.fusion import Equal
from serrate.ir.memory_order import in_order
from serrate.ir.ragged import RaggedIterDomain, offsets_array
from serrate.ir.ragged_transforms import regroup as domain_regroup
from serrate.ir.recipes import RunningSum
from serrate.ir.reordered import reordered
from serrate.ir.storage import storage_of
from serrate.ir.tile import Store
from serrate.ir.transforms import merge
from serrate.ir.values import Tensor
from serrate.ir.view import TensorView


def regroup(x: TensorView, group_dim: int = 0, component_dim: int = 1, ragged_dim: int = 2) -> TensorView:
    """[group, component, rows of each] -> [component, rows of all groups]: a block permutation, which moves data.

    Every group must have the same number of components; for nested rows this is checked at each call.

    >>> import torch
    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((2, 4), torch.float32), f.input((2, 3), torch.int64)
    ...     f.output(regroup(ops.as_nested(x, offsets, ragged_dim=1)))
    >>> rows = f.evaluate(torch.arange(8.0).reshape(2, 4), torch.tensor([[0, 1, 4], [0, 2, 4]])).unbind()
    >>> [r.tolist() for r in rows]
    [[0.0, 4.0, 5.0], [1.0, 2.0, 3.0, 6.0, 7.0]]
    """
    g, c, r = (dim_of("regroup", x, d) for d in (group_dim, component_dim, ragged_dim))
    if not g < c < r:
        raise ShapeError(f"regroup: expected dims in the order group, component, ragged, got {g}, {c}, {r}")
    if counting(x, r) == [g, c]:
        x = equal_parts("regroup", x, r)
    component, joined = domain_regroup(x.domains[g], x.domains[c], x.domains[r])
    logical = [joined if k == r else component if k == c else d for k, d in enumerate(x.domains) if k != g]
    out = x.fusion.tensor(x.dtype, logical)
    # Iterates over the old rows: each is contiguous in both orders.
    return x.fusion.define([out], x.domains, Store(out, tuple(logical), x.at(x.domains)))[0]


def permute(x: TensorView, *dims: int) -> TensorView:
    """The dims of `x` in another order. A ragged dim must stay after the dim of its components.

    No data moves, unless two dims that index the same rows are swapped (experts and source ranks): then whole rows move, and
    every component must have the same number of parts.
    """
    order = [dim_of("permute", x, d) for d in (dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims)]
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(f"permute: expected every dim of {x.ndim} once, got {order}")
    for k, dim in enumerate(order):
        counter = next((c for c in counting(x, dim) if c in order[k + 1 :]), None)
        # Dims that index the same rows may be swapped; the rows must stay after all of them.
        if counter is not None and not counted(x, dim):
            raise ShapeError(
                f"permute: dim {dim} of {shown(x)} is ragged and must stay after dim {counter}, which counts its rows; got the "
                f"order {tuple(order)}"
            )
    moved, changed = _moved_blocks(x, order)
    return moved if changed else viewed(x, [x.domains[d] for d in order])


def transpose(x: TensorView, dim0: int, dim1: int) -> TensorView:
    """Swaps two dims of `x`; data moves only if both index rows, and then as whole rows."""
    a, b = dim_of("transpose", x, dim0), dim_of("transpose", x, dim1)
    order = list(range(x.ndim))
    order[a], order[b] = b, a
    return permute(x, *order)


def _moved_blocks(x: TensorView, order: Sequence[int]) -> tuple[TensorView, bool]:
    """`x` with its dims in another order, if that reorders dims that index rows; and whether it does."""
    changed = False
    for r in range(x.ndim):
        if not x.domains[r].is_ragged or counted(x, r):
            continue
        counts = counting(x, r)
        wanted = [d for d in order if d in counts]
        if len(counts) > 1 and wanted != counts:
            x, changed = _moved(equal_parts("permute", x, r), r, wanted), True
    if not changed:
        return x, False
    return viewed(x, [x.domains[d] for d in order]), True


def _moved(x: TensorView, r: int, counts: Sequence[int]) -> TensorView:
    """The rows of dim `r`, reordered so that they are indexed by `counts` in that order."""
    rows = x.domains[r]
    assert isinstance(rows, RaggedIterDomain)
    owner, order = rows.component.uid, [x.domains[d] for d in counts]
    logical = tuple(reordered(d, order) if isinstance(d, RaggedIterDomain) and d.component.uid == owner else d for d in x.domains)
    out = x.fusion.tensor(x.dtype, logical)
    return x.fusion.define([out], x.domains, Store(out, logical, x.at(x.domains)))[0]


def equal_parts(name: str, x: TensorView, r: int) -> TensorView:
    """`x` viewed so that the dims that index the rows of dim `r` are regular; equal numbers of parts are checked at each call."""
    counts = counting(x, r)
    if not any(x.domains[k].is_ragged for k in counts):
        return x
    x = x if in_order(x.tensor) else set(x)
    fusion, logical = x.fusion, list(x.domains)
    owner = x.domains[counts[0]]
    if owner.is_ragged or counts != list(range(counts[0], counts[-1] + 1)):
        raise ShapeError(f"{name}: dims {counts} of {shown(x)} count rows and must be adjacent, outermost first")
    for k in counts[1:]:
        part = x.domains[k]
        if not isinstance(part, RaggedIterDomain):
            owner = merge(owner, part)
            continue
        below = part.definition.inputs[0] if part.definition is not None else part
        size = below.extent_expr // maximum(owner.extent_expr, 1)
        _require_equally_many(name, x, k, part, size)
        logical[k] = IterDomain(size, name=fusion.fresh("c"), pairing=part.pairing)
        owner = merge(owner, logical[k])
    for k, each in enumerate(x.domains):
        if isinstance(each, RaggedIterDomain) and counting(x, k) == counts:
            logical[k] = _owned_by(owner, each, fusion.fresh("r"))
    seen = Tensor(fusion.fresh("T"), x.dtype, tuple(logical), storage_of(logical), x.tensor.role, base=x.tensor.memory)
    return fusion.view(seen)


def _owned_by(owner: IterDomain, rows: RaggedIterDomain, name: str) -> RaggedIterDomain:
    """The same rows, in the same order, under another component of the same extent."""
    return RaggedIterDomain(
        rows.extent_expr,
        name=name,
        pairing=rows.pairing,
        component=owner,
        length=rows.length,
        row_start=rows.row_start,
        bound=rows.host_bound,
    )


def _require_equally_many(name: str, x: TensorView, dim: int, part: RaggedIterDomain, size: Expr) -> None:
    count = part.component.extent_expr
    equal = Array(f"equal({size}, {count})", recipe=RunningSum(size, COORDINATE, count))
    what = (
        f"{name}: every row must have the same number of parts in dim {dim} of {shown(x, later=True)}: its parts and equal ones"
    )
    x.fusion.checks.append(Equal(offsets_array(part), equal, what))
