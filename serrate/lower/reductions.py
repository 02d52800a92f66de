"""Expansion of reductions into block operations: one tile of values is reduced and combined with what is carried.

In: a reduction, its states as private blocks, the tile's values and the lanes they vary over. Out: block statements that
use only sum, prod, max, min, any and all, which every backend has. Each compound reduction is written once, for whole
states; lifting a plain value is the special case where some states are constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from serrate.ir.expr import Less, Symbol
from serrate.ir.loops import Assign, Declare, Dot, Guard, Held, Lanes, Load, Local, Node, Reduce, existing, held
from serrate.ir.reductions import Reduction, reduction
from serrate.ir.values import Call, Constant, Value, call, constant


@dataclass(frozen=True)
class Tile:
    """Where a reduction happens: the statement's lanes and guard, and the lanes that its states keep."""

    lanes: Lanes
    guard: Guard
    kept: Lanes
    kept_guard: Guard

    @property
    def reduced(self) -> Lanes:
        return tuple(lane for lane in self.lanes if lane not in self.kept)


def expand(kind: Reduction, states: tuple[Local, ...], values: tuple[Value, ...], tile: Tile, *, merge: bool) -> list[Node]:
    """Block statements that combine `values` into `states` over the lanes the states do not have."""
    given = iter(values)
    whole = tuple(next(given) if merge or c is None else constant(c, s.dtype) for c, s in zip(kind.lifted, states, strict=True))
    if kind.name in ("argmax", "argmin"):
        return _arg_extremum(kind.name.removeprefix("arg"), states, whole, tile)
    if kind.name == "softmax":
        return _softmax(states, whole, tile)
    if kind.name == "welford":
        return _shifted_moments(states, values[0], tile) if not merge else _merged_moments(states, whole, tile)
    product = as_dot(kind, states[0], whole[0], tile)
    operator = "max" if kind.name == "softmax_max" else kind.name
    return [product or Reduce(tile.lanes, tile.guard, states[0], operator, whole[0])]


def _arg_extremum(operator: str, states: tuple[Local, ...], whole: tuple[Value, ...], tile: Tile) -> list[Node]:
    """The tile's extremum, and the first place that holds it; then the better of it and what is carried."""
    (best, place), (x, at), dtype = states, whole, states[0].dtype
    seen, first = _named(best, "tile"), _named(place, "tile")
    none = constant(_NO_PLACE, torch.int64)
    kind = reduction(operator)
    holds = call("where", _same(x, held(seen)), at, none, dtype=torch.int64)
    better = call("gt" if operator == "max" else "lt", held(seen), held(best), dtype=torch.bool)
    if dtype.is_floating_point:
        # NaN is better than any number.
        news = call("logical_and", _nan(held(seen)), call("logical_not", _nan(held(best)), dtype=torch.bool), dtype=torch.bool)
        better = call("logical_or", better, news, dtype=torch.bool)
    nearer = call("minimum", held(place), held(first), dtype=torch.int64)
    kept = call("where", _same(held(seen), held(best)), nearer, held(place), dtype=torch.int64)
    extremum = call("maximum" if operator == "max" else "minimum", held(best), held(seen), dtype=dtype)
    return [
        Declare(seen, kind.identity(0, dtype)),
        Declare(first, _NO_PLACE),
        Reduce(tile.lanes, tile.guard, seen, operator, x),
        Reduce(tile.lanes, tile.guard, first, "min", holds),
        Assign(tile.kept, tile.kept_guard, place, call("where", better, held(first), kept, dtype=torch.int64)),
        Assign(tile.kept, tile.kept_guard, best, extremum),
    ]


_NO_PLACE = torch.iinfo(torch.int64).max


def _nan(x: Value) -> Value:
    return call("isnan", x, dtype=torch.bool)


def _same(a: Value, b: Value) -> Value:
    """Whether two values are equal, NaN equal to NaN."""
    same = call("eq", a, b, dtype=torch.bool)
    if not a.dtype.is_floating_point:
        return same
    return call("logical_or", same, call("logical_and", _nan(a), _nan(b), dtype=torch.bool), dtype=torch.bool)


def as_dot(kind: Reduction, local: Local, value: Value, tile: Tile) -> Dot | None:
    """The reduction as a matrix product, if it is one: a product of two blocks that share exactly the reduced lane."""
    if kind.name != "sum" or len(tile.reduced) != 1 or len(tile.kept) != 2:
        return None
    if not (isinstance(value, Call) and value.function == "mul"):
        return None
    inner = tile.reduced[0]
    left, right = value.args
    for a, b in ((left, right), (right, left)):
        if lanes_of(a, tile.lanes) == {tile.kept[0], inner} and lanes_of(b, tile.lanes) == {tile.kept[1], inner}:
            return Dot((*tile.kept, inner), tile.guard, local, a, b)
    return None


def lanes_of(value: Value, lanes: Lanes) -> set[object]:
    """The lanes a value varies over."""
    found: set[object] = set()
    for node in value.walk():
        if isinstance(node, Held):
            found.update(node.local.lanes)
        elif isinstance(node, Load):
            symbols = frozenset().union(*(e.symbols for e in node.index)) if node.index else frozenset()
            found.update(lane for lane in lanes if lane.symbol in symbols)
    return found


def _named(like: Local, suffix: str) -> Local:
    return Local(f"{like.name}_{suffix}", like.dtype, like.lanes)


def _softmax(states: tuple[Local, ...], whole: tuple[Value, ...], tile: Tile) -> list[Node]:
    """m' = max(m, tile);  t = t*e^(m - m') + sum of tile totals*e^(tile maxima - m')."""
    (largest, total), (x, weight), dtype = states, whole, states[0].dtype
    lifted = isinstance(weight, Constant)
    if lifted and not tile.reduced:
        return _softmax_lane_by_lane(states, x, tile)
    seen = _named(largest, "tile")
    grown = call("maximum", held(largest), held(seen), dtype=dtype)
    scale = call("exp_diff", held(largest), grown, dtype=dtype)
    power = call("exp_diff", x, held(largest), dtype=dtype)
    return [
        Declare(seen, torch.finfo(dtype).min),
        Reduce(tile.lanes, tile.guard, seen, "max", x),
        Assign(tile.kept, tile.kept_guard, total, call("mul", held(total), scale, dtype=dtype)),
        Assign(tile.kept, tile.kept_guard, largest, grown),
        Reduce(tile.lanes, tile.guard, total, "sum", power if lifted else call("mul", weight, power, dtype=dtype)),
    ]


def _softmax_lane_by_lane(states: tuple[Local, ...], x: Value, tile: Tile) -> list[Node]:
    """One value for each lane: a single exponential, of the distance to the maximum so far, serves both ways.

    e = e^-|x - m|;  t = t*e + 1 if x is the new maximum, else t + e
    """
    (largest, total), dtype = states, states[0].dtype
    m, t, one = held(largest), held(total), constant(1.0, dtype)
    distance = call("abs", call("sub", x, m, dtype=dtype), dtype=dtype)
    power = call("exp", call("neg", distance, dtype=dtype), dtype=dtype)
    same = call("eq", x, m, dtype=torch.bool)
    power = call("where", same, one, power, dtype=dtype)
    above = call("add", call("mul", t, power, dtype=dtype), one, dtype=dtype)
    below = call("add", t, power, dtype=dtype)
    grows = call("gt", x, m, dtype=torch.bool)
    return [
        Assign(tile.lanes, tile.guard, total, call("where", grows, above, below, dtype=dtype)),
        Assign(tile.lanes, tile.guard, largest, call("maximum", m, x, dtype=dtype)),
    ]


def _shifted_moments(states: tuple[Local, ...], x: Value, tile: Tile) -> list[Node]:
    """Sums of (x - mean) and of its square, relative to the mean so far; then the parallel-variance update.

    The mean so far starts as the row's first element (see `first_value`). It is one of the data, so the squares can not
    cancel: the part of them that a far-off first element brings is really there.
    """
    count, mean, square = states
    dtype = mean.dtype
    near, near2 = _named(mean, "near"), _named(square, "near")
    shifted = call("sub", x, held(mean), dtype=dtype)
    counted, seen = _counted(tile, _named(count, "seen"))
    delta = call("div", held(near), call("maximum", seen, constant(1.0, dtype), dtype=dtype), dtype=dtype)
    return [
        *counted,
        Declare(near, 0.0),
        Declare(near2, 0.0),
        Reduce(tile.lanes, tile.guard, near, "sum", shifted),
        Reduce(tile.lanes, tile.guard, near2, "sum", call("square", shifted, dtype=dtype)),
        Assign(
            tile.kept,
            tile.kept_guard,
            square,
            _grown_square(held(count), held(square), seen, delta, held(near), held(near2), dtype),
        ),
        Assign(tile.kept, tile.kept_guard, mean, _grown_mean(held(count), held(mean), seen, delta, dtype)),
        Assign(tile.kept, tile.kept_guard, count, call("add", held(count), seen, dtype=dtype)),
    ]


def _counted(tile: Tile, local: Local) -> tuple[list[Node], Value]:
    """How many elements of the tile exist: worked out where guards are bounds of the reduced lanes, else counted."""
    own = tuple(g for g in tile.guard if g not in tile.kept_guard)
    if all(_is_bound(g, lane.symbol) for g in own for lane in tile.reduced if lane.symbol in g.symbols):
        return [], existing(tile.reduced, own, local.dtype)
    return [Declare(local, 0.0), Reduce(tile.lanes, tile.guard, local, "sum", constant(1.0, local.dtype))], held(local)


def _is_bound(condition: Less, symbol: Symbol) -> bool:
    """Whether a condition says how far a lane may go, and nothing else about it."""
    return symbol not in condition.right.symbols and symbol not in (condition.left - symbol).symbols


def _share(count: Value, seen: Value, dtype: torch.dtype) -> Value:
    """seen / (count + seen), 0 when both are 0."""
    total = call("maximum", call("add", count, seen, dtype=dtype), constant(1.0, dtype), dtype=dtype)
    return call("div", seen, total, dtype=dtype)


def _grown_mean(count: Value, mean: Value, seen: Value, delta: Value, dtype: torch.dtype) -> Value:
    return call("add", mean, call("mul", delta, _share(count, seen, dtype), dtype=dtype), dtype=dtype)


def _grown_square(count: Value, square: Value, seen: Value, delta: Value, near: Value, near2: Value, dtype: torch.dtype) -> Value:
    within = call("sub", near2, call("mul", delta, near, dtype=dtype), dtype=dtype)
    weight = call("mul", count, _share(count, seen, dtype), dtype=dtype)
    between = call("mul", call("square", delta, dtype=dtype), weight, dtype=dtype)
    # Rounding can leave a tiny negative rest where all elements are equal.
    total = call("add", call("maximum", within, constant(0.0, dtype), dtype=dtype), between, dtype=dtype)
    return call("add", square, total, dtype=dtype)


def _merged_moments(states: tuple[Local, ...], whole: tuple[Value, ...], tile: Tile) -> list[Node]:
    """The mean of the parts first, then squares within and between the parts: no difference of large numbers."""
    count, mean, square = states
    dtype = mean.dtype
    n, m, s = whole
    seen, near, near2 = _named(count, "parts"), _named(mean, "parts"), _named(square, "parts")
    average = call("div", held(near), call("maximum", held(seen), constant(1.0, dtype), dtype=dtype), dtype=dtype)
    away = call("square", call("sub", m, held(near), dtype=dtype), dtype=dtype)
    spread = call("add", s, call("mul", n, away, dtype=dtype), dtype=dtype)
    delta = call("sub", held(near), held(mean), dtype=dtype)
    weight = call("mul", held(count), _share(held(count), held(seen), dtype), dtype=dtype)
    between = call("mul", call("square", delta, dtype=dtype), weight, dtype=dtype)
    squares = call("add", held(square), call("add", held(near2), between, dtype=dtype), dtype=dtype)
    return [
        Declare(seen, 0.0),
        Declare(near, 0.0),
        Declare(near2, 0.0),
        Reduce(tile.lanes, tile.guard, seen, "sum", n),
        Reduce(tile.lanes, tile.guard, near, "sum", call("mul", n, m, dtype=dtype)),
        Assign(tile.kept, tile.kept_guard, near, average),
        Reduce(tile.lanes, tile.guard, near2, "sum", spread),
        Assign(tile.kept, tile.kept_guard, square, squares),
        Assign(tile.kept, tile.kept_guard, mean, _grown_mean(held(count), held(mean), held(seen), delta, dtype)),
        Assign(tile.kept, tile.kept_guard, count, call("add", held(count), held(seen), dtype=dtype)),
    ]
