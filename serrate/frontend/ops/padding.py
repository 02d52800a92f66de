"""Conversion between ragged rows and a padded dense tensor.

In: a ragged `TensorView`, or a dense one with offsets or lengths. Out: the other of the two. Each is one copy, and fuses with its
consumers: `dense + to_padded(x)` reads both operands once and never materialises the padded tensor.
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
    """Makes every ragged dim regular, as long as the longest row; positions past a row's end hold `fill`.

    `max_length` sets the size of the last ragged dim instead; longer rows are truncated. With one level of rows, the fill may be
    a one-element tensor.

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
    """`x` with its ragged dims replaced by regular ones; longer rows are truncated, shorter ones filled."""
    ragged = [d for d in x.domains if isinstance(d, RaggedIterDomain)]
    padded = {d.uid: room for d, room in zip(ragged, rooms, strict=True)}
    domains = tuple(padded.get(d.uid, d) for d in x.domains)
    places = tuple(
        Place(index_of(new), (new,)) if new.uid != old.uid else old for old, new in zip(x.domains, domains, strict=True)
    )
    if not isinstance(fill, TensorView):
        return pulled(x.fusion, x.dtype, domains, x.at(places, held_by(x.dtype, fill)))
    if len(ragged) > 1 or any(d.extent != 1 for d in fill.domains):
        raise ShapeError(f"to_padded: a tensor fill must have one element, and works for one level of rows; got {fill}")
    fill = typed(fill, x.dtype)
    length = Place(ragged[0].length_of(index_of(ragged[0].component)), (ragged[0].component,))
    inside = call("lt", position(rooms[0]), computed(length), dtype=torch.bool)
    return pulled(x.fusion, x.dtype, domains, call("where", inside, x.at(places), fill.at((None,) * fill.ndim), dtype=x.dtype))


def _room(x: TensorView, ragged: RaggedIterDomain, size: int | None) -> IterDomain:
    """The regular dim that replaces a ragged one: of a given size, or as long as the longest row."""
    extent = longest(ragged.length, ragged.component.extent_expr) if size is None else const(size)
    return IterDomain(extent, name=x.fusion.fresh("d"))


def held_by(dtype: torch.dtype, fill: Number) -> Number:
    """The fill converted to a dtype; raises if the dtype cannot hold it."""
    if not dtype.is_floating_point and (fill not in (0, 1) if dtype == torch.bool else not float(fill).is_integer()):
        raise DtypeError(f"to_padded: fill={fill} does not fit {dtype}: use another fill, or cast first")
    number: Number = torch.tensor(fill, dtype=dtype, device="cpu").item()
    return 0 if repr(number) in ("0", "0.0", "False") else number


def from_padded(x: TensorView, offsets: TensorView | None = None, *, lengths: TensorView | None = None) -> TensorView:
    """The rows of a dense `[B, L, ...]`, given B+1 offsets or B lengths; positions past a row's end are not read.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, lengths = f.input((None, None), torch.float32), f.input((None,), torch.int64)
    ...     f.output(from_padded(x, lengths=lengths))
    >>> f.evaluate(torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])).unbind()
    (tensor([0.]), tensor([3., 4.]))
    """
    given = offsets if lengths is None else lengths
    if given is None or (offsets is not None and lengths is not None):
        raise ShapeError("from_padded: pass either offsets or lengths")
    if given.dtype not in (torch.int32, torch.int64) or given.ndim != 1:
        raise ShapeError(f"from_padded: offsets and lengths must be 1-D int32 or int64, got {given}")
    if x.ndim < 2 or x.domains[0].is_ragged or x.domains[1].is_ragged:
        raise ShapeError(f"from_padded: expected a dense tensor [B, L, ...], got {shown(x)}")
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
