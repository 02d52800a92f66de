"""Operations that change how a tensor is seen and move nothing: nesting, flattening, orders of dims, dims of extent 1.

In: a `TensorView`. Out: a view of the same memory under other logical domains (`set` makes a copy).
"""

from __future__ import annotations

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.broadcast import index_into
from serrate.frontend.ops.common import dim_of
from serrate.ir.domains import COORDINATE, RaggedIterDomain
from serrate.ir.expr import Array, RunningSum
from serrate.ir.fusion import TensorView
from serrate.ir.tile import Store
from serrate.ir.transforms import combine, partition
from serrate.ir.values import Role, Tensor


def as_nested(
    x: TensorView, offsets: TensorView | None = None, *, lengths: TensorView | None = None, ragged_dim: int = 0
) -> TensorView:
    """Views dim `ragged_dim` as (component, ragged) by K+1 offsets or K lengths; no data moves.

    Applied to the component dim of a nested tensor it nests again: documents > sentences > words.

    >>> from serrate import ir
    >>> with ir.Fusion() as f:
    ...     x, off = f.input((None, 4), torch.float32), f.input((4,), torch.int64)
    ...     print(as_nested(x, off).shape)
    (3, 'r0', 4)
    """
    fusion = x.fusion
    given = offsets if offsets is not None else lengths
    if given is None or (offsets is not None and lengths is not None):
        raise ShapeError("as_nested: give offsets or lengths, one of them")
    if given.ndim != 1 or given.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"as_nested: {'offsets' if offsets is not None else 'lengths'} must be 1-D int32 or int64, got {given}")
    if given.tensor.role is not Role.INPUT:
        raise ShapeError("as_nested: offsets must be an input of the fusion")
    dim = dim_of(x, ragged_dim)
    domain = x.domains[dim]
    if isinstance(domain, RaggedIterDomain):
        raise ShapeError(f"as_nested: dim {dim} is ragged; nest the component dim, or partition before nesting")
    names = (fusion.fresh("c"), fusion.fresh("r"))
    array = Array(given.tensor.name)
    if offsets is not None:
        count = given.domains[0].extent_expr - 1
    else:
        count = given.domains[0].extent_expr
        array = Array(f"sum({array.name}[c])", recipe=RunningSum(array[COORDINATE], COORDINATE, count))
    component, ragged = partition(domain, array, count, names=names)
    logical = (*x.domains[:dim], component, ragged, *x.domains[dim + 1 :])
    return fusion.view(Tensor(fusion.fresh("T"), x.dtype, logical, x.tensor.storage, x.tensor.role, base=x.tensor.memory))


def as_flattened(x: TensorView, *, component_dim: int = 0, ragged_dim: int = 1) -> TensorView:
    """Views a (component, ragged) pair as the one dim it was made from; the inverse of `as_nested`."""
    c, r = dim_of(x, component_dim), dim_of(x, ragged_dim)
    flat = combine(x.domains[c], x.domains[r])
    logical = [d for k, d in enumerate(x.domains) if k != r]
    logical[c if c < r else c - 1] = flat
    return x.fusion.view(
        Tensor(x.fusion.fresh("T"), x.dtype, tuple(logical), x.tensor.storage, x.tensor.role, base=x.tensor.memory)
    )


def set(x: TensorView) -> TensorView:
    """A copy of `x` with the same structure."""
    out = x.fusion.tensor(x.dtype, x.domains)
    return x.fusion.define([out], x.domains, Store(out, x.domains, x.at(index_into(x, x.domains))))[0]
