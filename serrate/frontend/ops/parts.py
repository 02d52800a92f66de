"""The parts of a ragged tensor inside a program (values, lengths, offsets, positions), and masks computed from positions.

In: a `TensorView`. Out: dense `TensorView`s, or a ragged one of the same structure around other values.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from serrate.errors import ShapeError, TraceAttributeError, TraceError
from serrate.frontend.ops.common import counting, dim_of, require_equal
from serrate.frontend.ops.movement import pulled
from serrate.frontend.ops.structure import set, viewed
from serrate.frontend.shapes import both, shown
from serrate.ir.domains import IterDomain
from serrate.ir.memory_order import in_order
from serrate.ir.ragged import RaggedIterDomain, offsets_array
from serrate.ir.storage import storage_of
from serrate.ir.values import Place, Tensor, call, computed, constant, index_of
from serrate.ir.values import position as position_of
from serrate.ir.view import Size, TensorView, user_line


def values(x: TensorView) -> TensorView:
    """The elements of all rows, back to back, as `jt.values`; no data moves unless the rows have gaps.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None, 4), torch.float32), f.input((4,), torch.int64)
    ...     print(values(ops.as_nested(x, offsets)).shape)
    (n0, 4)
    """
    _ragged("values", x)
    whole = x if in_order(x.tensor) else set(x)
    return viewed(whole, whole.tensor.storage)


def with_values(x: TensorView, values: TensorView) -> TensorView:
    """The rows of `x` around other values: as many in dim 0, with any further dims; the inverse of `values`."""
    rows = _ragged("with_values", x)
    last = next(k for k, d in enumerate(x.domains) if d.uid == rows.uid)
    ragged = [k for k, d in enumerate(x.domains) if d.is_ragged]
    own = {*ragged, *(k for dim in ragged for k in counting(x, dim))}
    ahead = [k for k in range(last) if k not in own]
    storage = storage_of([x.domains[k] for k in sorted(own)])
    if len(storage) != 1 or 0 in ahead or values.ndim <= len(ahead) or any(d.is_ragged for d in values.domains):
        raise ShapeError(
            f"with_values of {both(x, values)}: the new values must be dense, with the elements of all rows in dim 0"
        )
    fusion = x.fusion
    require_equal(fusion, f"with_values of {both(x, values)}: the numbers of elements", storage[0], values.domains[0])
    values = values if in_order(values.tensor) and len(values.tensor.storage) == values.ndim else set(values)
    inner = iter(values.domains[1:])
    logical = (*(x.domains[k] if k in own else next(inner) for k in range(last + 1)), *inner)
    stored = (*storage, *values.domains[1:])
    return fusion.view(Tensor(fusion.fresh("T"), values.dtype, logical, stored, values.tensor.role, base=values.tensor.memory))


def lengths(x: TensorView) -> TensorView:
    """The lengths of the innermost rows, as `jt.lengths`."""
    return _lengths(x, _ragged("lengths", x))


def _lengths(x: TensorView, rows: RaggedIterDomain) -> TensorView:
    length = rows.length_of(index_of(rows.component))
    return pulled(x.fusion, torch.int64, (rows.component,), computed(Place(length, (rows.component,))))


def offsets(x: TensorView) -> TensorView:
    """The offsets of the innermost rows, as `jt.offsets`: one more than rows."""
    return _offsets(x, _ragged("offsets", x))


def _offsets(x: TensorView, rows: RaggedIterDomain) -> TensorView:
    ends = IterDomain(rows.component.extent_expr + 1, name=x.fusion.fresh("d"))
    return pulled(x.fusion, torch.int64, (ends,), computed(Place(offsets_array(rows)[index_of(ends)], (ends,))))


class ViewStructure:
    """`jt.structure` while tracing: lengths and offsets of every level, as tensors of the program."""

    __slots__ = ("_rows", "_view")

    def __init__(self, view: TensorView) -> None:
        self._view = view
        self._rows = [d for d in view.domains if isinstance(d, RaggedIterDomain)]

    @property
    def levels(self) -> int:
        """The number of ragged dims."""
        return len(self._rows)

    @property
    def offsets(self) -> tuple[TensorView, ...]:
        """The offsets of every ragged dim, in the order of dims."""
        return tuple(_offsets(self._view, rows) for rows in self._rows)

    def lengths(self, level: int = -1) -> TensorView:
        """The length of every row of a level."""
        return _lengths(self._view, self._level(level))

    def num_rows(self, level: int = -1) -> Size | int:
        """The number of rows of a level."""
        count = self._level(level).component.extent_expr
        return Size(count, self._view.fusion) if count.value is None else count.value

    def _level(self, level: int) -> RaggedIterDomain:
        if not -self.levels <= level < self.levels:
            raise ShapeError(
                f"level {level} does not exist: the structure has {self.levels}, counted from the outermost as level 0"
            )
        return self._rows[level]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ViewStructure):
            return NotImplemented
        known = [(d.pairing, d.length) for d in self._rows] == [(d.pairing, d.length) for d in other._rows]
        if not known:
            raise TraceError(
                f"whether two structures are equal is not known while tracing ({user_line()}); compare them before the call"
            )
        return True

    __hash__ = None  # type: ignore[assignment]  # equality may not be known

    def __getattr__(self, name: str) -> NoReturn:
        raise TraceAttributeError(
            f"the structure of a traced tensor has no attribute {name!r} ({user_line()}): it has levels, offsets, lengths(level) "
            "and num_rows(level); read the rest before the call and pass it as an argument"
        )


def structure_of(x: TensorView) -> ViewStructure:
    """`jt.structure` of a traced tensor."""
    _ragged("structure", x)
    return ViewStructure(x)


def position(x: TensorView, dim: int = -1) -> TensorView:
    """The position of each element in dim `dim`, counted from 0: over that dim, and the dims that count its rows if it is ragged.

    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
    ...     f.output(position(ops.as_nested(x, offsets), 1))
    >>> [row.tolist() for row in f.evaluate(torch.zeros(5), torch.tensor([0, 2, 5])).unbind()]
    [[0, 1], [0, 1, 2]]
    """
    dim = dim_of("position", x, dim)
    domain = x.domains[dim]
    domains = (*(x.domains[k] for k in counting(x, dim)), domain)
    return pulled(x.fusion, torch.int64, domains, position_of(domain))


def tril(x: TensorView, diagonal: int = 0) -> TensorView:
    """`torch.tril` over the last two dims, each ragged or not: 0 above the diagonal."""
    return _triangle("tril", "le", x, diagonal)


def triu(x: TensorView, diagonal: int = 0) -> TensorView:
    """`torch.triu` over the last two dims, each ragged or not: 0 below the diagonal."""
    return _triangle("triu", "ge", x, diagonal)


def _triangle(name: str, kept: str, x: TensorView, diagonal: int) -> TensorView:
    if x.ndim < 2:
        raise ShapeError(f"{name}: takes at least two dims, got {shown(x)}")
    *_, rows, columns = x.domains
    shifted = call("add", position_of(rows), constant(diagonal, torch.int64), dtype=torch.int64)
    inside = call(kept, position_of(columns), shifted, dtype=torch.bool)
    zero = constant(False if x.dtype == torch.bool else 0, x.dtype)
    return pulled(x.fusion, x.dtype, x.domains, call("where", inside, x.at(x.domains), zero, dtype=x.dtype))


def _ragged(name: str, x: TensorView) -> RaggedIterDomain:
    """The innermost ragged dim."""
    found = next((d for d in reversed(x.domains) if isinstance(d, RaggedIterDomain)), None)
    if found is None:
        raise ShapeError(f"{name}: {shown(x)} is dense; only ragged tensors have {name.removeprefix('with_')}")
    return found
