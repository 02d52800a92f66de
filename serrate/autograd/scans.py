"""The derivatives of scans and library calls, which are written with operations of the front end.

In: a statement, and the gradient of its result. Out: the gradient of what it takes, over the same dims.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from serrate.autograd.transpose import transposed
from serrate.frontend.ops.elementwise import div, eq, isnan, logical_and, logical_or, mul, where
from serrate.frontend.ops.movement import flip, pulled
from serrate.frontend.ops.scans import cumprod, cumsum, running
from serrate.frontend.ops.structure import set as copied
from serrate.ir.storage import storage_of
from serrate.ir.tile import Library
from serrate.ir.values import Place, Position, Read, Tensor, call, constant, index_read, position, read
from serrate.ir.view import TensorView

# --- scans ---------------------------------------------------------------------------------------------------------------------

ScanRule = Callable[[TensorView, TensorView, TensorView, int], TensorView]
"""From the elements, the running results, the gradient of these, and the dim."""


def _after(x: TensorView, dim: int) -> TensorView:
    """Running sums from the end."""
    return flip(cumsum(flip(x, dim), dim), dim)


def _sum(x: TensorView, out: TensorView, g: TensorView, dim: int) -> TensorView:
    return _after(g, dim)


def _prod(x: TensorView, out: TensorView, g: TensorView, dim: int) -> TensorView:
    """Sums of g * out from each position on, divided by x. From the first zero on, all results are 0 and depend only on that
    zero; its derivative is the product with 1 in its place."""
    gone = where(eq(x, 0), 1.0, 0.0)
    zeros = cumsum(gone, dim)
    first = logical_and(eq(x, 0), eq(zeros, 1.0))
    usual = div(_after(mul(g, out), dim), where(eq(x, 0), 1.0, x))
    there = _after(where(eq(zeros, 0.0), 0.0, mul(g, cumprod(where(first, 1.0, x), dim))), dim)
    return where(eq(zeros, 0.0), usual, where(first, there, 0.0))


def _extremum(x: TensorView, out: TensorView, g: TensorView, dim: int) -> TensorView:
    """Each result goes to the last element equal to it so far."""
    own = logical_or(isnan(x), eq(x, out))
    last = call("where", own.at(own.domains), position(x.domains[dim]), constant(-1, torch.int64), dtype=torch.int64)
    places = running("max", pulled(x.fusion, torch.int64, x.domains, last), dim, torch.int64)
    return _at(x.tensor, places, g, dim)[1]


SCANS: dict[str, ScanRule] = {"sum": _sum, "prod": _prod, "max": _extremum, "min": _extremum}
"""The reduction of a scan -> rule."""


def _at(tensor: Tensor, places: TensorView, g: TensorView, dim: int) -> tuple[Tensor, TensorView]:
    """The gradient of a tensor whose elements were taken at these places along a dim, or that of the memory it is a view of."""
    place = Place(index_read(0), (), (places.at(places.domains),))
    index = tuple(place if k == dim else d for k, d in enumerate(places.domains))
    taken = read(tensor, index)
    assert isinstance(taken, Read)
    return transposed(g.fusion, taken, g.at(g.domains), places.domains)


# --- library calls -------------------------------------------------------------------------------------------------------------

LibraryRule = Callable[[Library, TensorView], tuple[Tensor, TensorView]]
"""From the call, and the gradient of its first result: the first argument or the memory it is a view of, and its gradient."""


def _given(statement: Library) -> Tensor:
    given = statement.values[0]
    assert isinstance(given, Read)
    return given.tensor


def _chosen(stored: int, statement: Library, g: TensorView) -> tuple[Tensor, TensorView]:
    """The gradient of elements selected along a dim; the dim's number in memory order is one of the options."""
    x, at = _given(statement), statement.options[stored]
    assert isinstance(at, int)
    along = storage_of(x.logical)[at].uid
    return _moved(statement, g, [d.uid for d in x.logical].index(along))


def _sorted_rows(statement: Library, g: TensorView) -> tuple[Tensor, TensorView]:
    """The gradient of rows sorted along the last dim of the second argument."""
    within = statement.values[1]
    assert isinstance(within, Read)
    along = within.tensor.logical[-1].uid
    return _moved(statement, g, [d.uid for d in _given(statement).logical].index(along))


def _sorted_lines(statement: Library, g: TensorView) -> tuple[Tensor, TensorView]:
    """The gradient of elements sorted across rows, along the dim whose positions the second argument holds."""
    along = statement.values[1]
    assert isinstance(along, Read)
    made = g.fusion.definition_of(along.tensor)
    number = None if made is None else made.statement.values[0]
    assert isinstance(number, Position)
    return _moved(statement, g, [d.uid for d in _given(statement).logical].index(number.domain.uid))


def _moved(statement: Library, g: TensorView, dim: int) -> tuple[Tensor, TensorView]:
    places = g.fusion.view(statement.targets[1])
    return _at(_given(statement), copied(places), g, dim)


LIBRARY: dict[str, LibraryRule | None] = {
    "group_by": None,
    "group_first": None,
    "invert": None,
    "group_and_invert": None,
    "topk": partial(_chosen, 1),
    "sort": partial(_chosen, 0),
    "sort_rows": _sorted_rows,
    "sort_lines": _sorted_lines,
}
"""The name of a library function -> rule; None for functions of integers."""
