"""Rows padded to one length and back: a dense tensor that holds a fill where rows have ended, and rows read out of one.

In: a ragged `TensorView`, or a dense one and what describes rows. Out: the other of the two. Both are one copy, and fuse with
what is computed of them: `dense + to_padded(x)` reads each once and keeps nothing padded in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.ops.common import Number, require_equal
from serrate.frontend.ops.elementwise import typed
from serrate.frontend.ops.movement import pulled, rows_of
from serrate.frontend.shapes import shown
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expr import Array, const
from serrate.ir.fusion import AtLeastLongest
from serrate.ir.partition import partition
from serrate.ir.ragged import RaggedIterDomain, longest
from serrate.ir.values import Place, call, computed, index_of, position
from serrate.ir.view import TensorView


def to_padded(x: TensorView, fill: Number | TensorView = 0, *, max_length: int | None = None) -> TensorView:
    """Every ragged dim as a regular one, as long as the longest row; where a row has ended there is `fill`.

    `max_length` is the size of the last ragged dim instead: longer rows are cut there. The fill of one level of rows may be a
    tensor of one element.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(to_padded(ops.as_nested(x, offsets), fill=9.0))
    >>> f.evaluate(torch.arange(3.0), torch.tensor([0, 2, 2, 3]))
    tensor([[0., 1.],
            [9., 9.],
            [2., 9.]])
    """
    ragged = [d for d in x.domains if isinstance(d, RaggedIterDomain)]
    if not ragged:
        raise ShapeError(f"to_padded: {shown(x)} has no ragged dim")
    if max_length is not None and max_length < 0:
        raise ShapeError(f"to_padded: max_length must not be negative, got {max_length}")
    rooms = [_room(x, d, max_length if d is ragged[-1] else None) for d in ragged]
    return padded_over(x, rooms, fill)


def padded_over(x: TensorView, rooms: Sequence[IterDomain], fill: Number | TensorView) -> TensorView:
    """`x` with its ragged dims replaced by regular ones; rows that are longer are cut, others filled up."""
    ragged = [d for d in x.domains if isinstance(d, RaggedIterDomain)]
    padded = {d.uid: room for d, room in zip(ragged, rooms, strict=True)}
    domains = tuple(padded.get(d.uid, d) for d in x.domains)
    places = tuple(
        Place(index_of(new), (new,)) if new.uid != old.uid else old for old, new in zip(x.domains, domains, strict=True)
    )
    if not isinstance(fill, TensorView):
        return pulled(x.fusion, x.dtype, domains, x.at(places, held_by(x.dtype, fill)))
    if len(ragged) > 1 or any(d.extent != 1 for d in fill.domains):
        raise ShapeError(f"to_padded: a fill that is a tensor is one element, for one level of rows; got {fill}")
    fill = typed(fill, x.dtype)
    length = Place(ragged[0].length_of(index_of(ragged[0].component)), (ragged[0].component,))
    inside = call("lt", position(rooms[0]), computed(length), dtype=torch.bool)
    return pulled(x.fusion, x.dtype, domains, call("where", inside, x.at(places), fill.at((None,) * fill.ndim), dtype=x.dtype))


def _room(x: TensorView, ragged: RaggedIterDomain, size: int | None) -> IterDomain:
    """The regular dim that a ragged one becomes: of a given size, or as long as the longest row."""
    extent = longest(ragged.length, ragged.component.extent_expr) if size is None else const(size)
    return IterDomain(extent, name=x.fusion.fresh("d"))


def held_by(dtype: torch.dtype, fill: Number) -> Number:
    """The fill as values of a dtype hold it; refuses one that they cannot hold."""
    if not dtype.is_floating_point and (fill not in (0, 1) if dtype == torch.bool else not float(fill).is_integer()):
        raise DtypeError(f"to_padded: fill={fill} cannot be held by values of {dtype}: give another fill, or cast first")
    number: Number = torch.tensor(fill, dtype=dtype, device="cpu").item()
    return 0 if repr(number) in ("0", "0.0", "False") else number


def from_padded(x: TensorView, offsets: TensorView | None = None, *, lengths: TensorView | None = None) -> TensorView:
    """The rows of a dense `[B, L, ...]`, by B+1 offsets or by B lengths; what lies past a row is not read.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, lengths = f.input((None, None), torch.float32), f.input((None,), torch.int64)
    ...     f.output(from_padded(x, lengths=lengths))
    >>> f.evaluate(torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])).unbind()
    (tensor([0.]), tensor([3., 4.]))
    """
    given = offsets if lengths is None else lengths
    if given is None or (offsets is not None and lengths is not None):
        raise ShapeError("from_padded: give either offsets or lengths")
    if given.dtype not in (torch.int32, torch.int64) or given.ndim != 1:
        raise ShapeError(f"from_padded: offsets and lengths are int32 or int64 of one dim, got {given}")
    if x.ndim < 2 or x.domains[0].is_ragged or x.domains[1].is_ragged:
        raise ShapeError(f"from_padded: takes a dense tensor [B, L, ...], got {shown(x)}")
    fusion, array = x.fusion, Array(given.tensor.memory.name)
    if offsets is None:
        component, rows = rows_of(fusion, array[COORDINATE], given.domains[0].extent_expr, None)
    else:
        count = given.domains[0].extent_expr - 1
        flat = IterDomain(array[count], name=fusion.fresh("d"))
        component, rows = partition(flat, array, count, names=(fusion.fresh("c"), fusion.fresh("r")), program=fusion.identity)
    require_equal(fusion, "from_padded: the numbers of rows and of lengths", x.domains[0], component)
    fusion.checks.append(AtLeastLongest(x.domains[1].extent_expr, rows, "from_padded: the padded tensor"))
    domains = (component, rows, *x.domains[2:])
    return pulled(fusion, x.dtype, domains, x.at(domains))
