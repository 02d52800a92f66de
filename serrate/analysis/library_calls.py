"""Recognises programs that are exactly one library call, by what they compute, not by the operators they were written with.

In: a naive tile program. Out: the call, as a statement, for every vendor function that computes exactly this program; nothing if
the program does anything else. Elementwise statements are inlined first, so sums and statistics are compared, not single steps.

    product           O[c, r, n] = sum over k of X[c, r, k] * W[k, n]       also W[n, k]; one weight for all rows
    grouped product   O[c, r, n] = sum over k of X[c, r, k] * W[c, k, n]    also W[c, n, k]; one weight per component
    attention         Z[c, r, s] = sum over k of Q[c, r, k] * K[c, s, k]    with or without heads between c and r
                      Y[c, r, s] = Z * scale, -inf for s > r if it is causal
                      O[c, r, d] = sum over s of exp(Y - M) * V[c, s, d], times 1 / L      M, L: the softmax statistics of Y

All need rows back to back: `covers` says that every position of an operand belongs to one row, in order. Rows with gaps are not
recognised, and neither are operands that are computed, broadcast or read at computed indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import Combine
from serrate.ir.reductions import SOFTMAX, SUM
from serrate.ir.tile import Accumulate, Library, Store, TileProgram, chain, written_at
from serrate.ir.values import (
    Call,
    Constant,
    Places,
    Position,
    Read,
    Role,
    Tensor,
    Value,
    call,
    carried_dtype,
    constant,
    moved_to,
    read,
    rewrite,
)

PRODUCTS = ("mm", "grouped_mm")
ATTENTIONS = ("scaled_dot_product_attention", "varlen_attn")
FUNCTIONS = (*PRODUCTS, *ATTENTIONS)
"""Torch functions that compute products and attention."""


def library_calls(program: TileProgram) -> dict[str, Library]:
    """The calls that a program is, by the name of the function; none if it is not exactly such a call."""
    found = _Definitions.of(program)
    return {} if found is None else _product(found) or _attention(found)


class RowsAlong(NamedTuple):
    """A dim of memory that holds the rows of a loop over components, back to back."""

    offsets: Array
    component: int
    row: int
    """The uids of the loops."""


Layout = tuple[int | RowsAlong, ...]
"""For every dim of a tensor in memory, the loop that it is read or written along, by uid."""


@dataclass(frozen=True)
class _Definitions:
    """A program with one output, as sums of values: what elementwise statements store is inlined."""

    output: Tensor
    layout: Layout
    value: Value
    """The output, in terms of inputs and sums."""
    sums: Mapping[Tensor, Accumulate]
    stores: Mapping[Tensor, Store]

    @staticmethod
    def of(program: TileProgram) -> _Definitions | None:
        nests = [chain(phase) for phase in program.phases]
        if program.axes or len(program.outputs) != 1 or None in nests:
            return None
        leaves = [nest[1] for nest in nests if nest is not None]
        stores = {leaf.tensor: leaf for leaf in leaves if isinstance(leaf, Store)}
        sums = {target: leaf for leaf in leaves if isinstance(leaf, Accumulate) for target in leaf.targets}
        output = program.outputs[0]
        written: Store | Accumulate | None = stores.get(output) or sums.get(output)
        if len(stores) + sum(isinstance(leaf, Accumulate) for leaf in leaves) < len(leaves) or written is None:
            return None
        index = written_at(written, output)
        layout = _dims(output, index, [d for d in index if d is not None])
        if layout is None:
            return None
        made = _Definitions(output, layout, constant(0, torch.int64), sums, stores)
        value = made.inlined(written.value) if isinstance(written, Store) else _read(output, written)
        return None if value is None else _Definitions(output, layout, value, sums, stores)

    def inlined(self, value: Value) -> Value | None:
        """A value in terms of inputs and sums; None if something is read in another way than it was stored."""
        strange = False
        known: dict[Value, Value | None] = {}

        def change(v: Value) -> Value | None:
            if not isinstance(v, Read) or v.tensor.role is Role.INPUT:
                return None
            if v not in known:
                known[v] = stored_value(v)
            return known[v]

        def stored_value(v: Read) -> Value | None:
            nonlocal strange
            store = self.stores.get(v.tensor)
            if store is None:
                leaf = self.sums.get(v.tensor)
                strange = strange or leaf is None or v is not _read(v.tensor, leaf)
                return None
            stored = store.value if store.value.dtype == v.dtype else call("cast", store.value, dtype=v.dtype)
            moved = None if any(own is None for own in store.index) else moved_to(stored, store.index, v.index)
            strange = strange or moved is None
            return None if moved is None else rewrite(moved, change)

        made = rewrite(value, change)
        return None if strange else made

    def sum_of(self, value: Value | None) -> Accumulate | None:
        """The sum that a value reads."""
        leaf = self.sums.get(value.tensor) if isinstance(value, Read) else None
        plain = leaf is not None and leaf.reduction is SUM and not leaf.merge and not leaf.places
        return leaf if plain and leaf is not None and len(leaf.over) == 1 else None


def _read(tensor: Tensor, leaf: Accumulate) -> Value:
    """A sum where it is accumulated."""
    return read(tensor, leaf.place(tensor))


def _loops(leaf: Accumulate) -> list[IterDomain]:
    return [d for d in (*leaf.index, *leaf.over) if d is not None]


def _product(found: _Definitions) -> dict[str, Library]:
    """The calls of a product with one weight, or with one per component."""
    total = found.sum_of(found.value)
    factors = None if total is None else _factors(found, total)
    if total is None or factors is None or factors[0].dtype != found.output.dtype:
        return {}
    (depth,), loops = total.over, _loops(total)
    match found.layout:
        case (RowsAlong() as rows, int(width)):
            pass
        case _:
            return {}
    for k, (operand, weight) in enumerate((factors, factors[::-1])):
        layout, other = _layout(operand, loops), _layout(weight, loops, is_weight=True)
        matrix = () if other is None else other[-2:]
        if layout != (rows, depth.uid) or matrix not in ((depth.uid, width), (width, depth.uid)):
            continue
        operands, given = (factors[k], factors[1 - k]), (("transposed", matrix == (width, depth.uid)),)
        if other == matrix:
            return {"mm": Library("mm", (found.output,), operands, (), given)}
        if other == (rows.component, *matrix):
            return {name: Library(name, (found.output,), operands, (), given, (rows.offsets,)) for name in PRODUCTS}
    return {}


def _attention(found: _Definitions) -> dict[str, Library]:
    """The calls of an attention."""
    factors = _arguments("mul", found.value)
    weighted = None if factors is None else found.sum_of(factors[0])
    terms = None if weighted is None else _factors(found, weighted, rounded=True)
    powers = None if terms is None else _arguments("exp_diff", terms[0])
    if factors is None or weighted is None or terms is None or powers is None or not isinstance(powers[1], Read):
        return {}
    (keys,), largest = weighted.over, powers[1]
    statistics = found.sums.get(largest.tensor)
    if statistics is None or statistics.reduction is not SOFTMAX or statistics.merge or statistics.over != (keys,):
        return {}
    if largest.tensor is not statistics.targets[0] or found.inlined(statistics.values[0]) is not powers[0]:
        return {}
    if factors[1] is not _normalisation(largest, _read(statistics.targets[1], statistics)):
        return {}
    scores = _scores(powers[0], keys)
    products = None if scores is None else found.sum_of(scores.products)
    pair = None if products is None else _factors(found, products)
    if scores is None or products is None or pair is None:
        return {}
    if not pair[0].dtype == terms[1].dtype == found.output.dtype:
        return {}
    layouts = [*(_layout(each, _loops(products)) for each in pair), _layout(terms[1], _loops(weighted))]
    match found.layout:
        case (RowsAlong() as rows, *heads, int(width)) if len(heads) < 2:
            pass
        case _:
            return {}
    depth = products.over[0].uid
    queries: Layout = (rows, *heads, depth)
    if layouts[0] != queries:
        pair, layouts[:2] = (pair[1], pair[0]), [layouts[1], layouts[0]]
    beside = layouts[1][0] if layouts[1] else None
    if not isinstance(beside, RowsAlong) or (beside.component, beside.row) != (rows.component, keys.uid):
        return {}
    if layouts != [queries, (beside, *heads, depth), (beside, *heads, width)] or scores.seen not in (None, (rows.row, keys.uid)):
        return {}
    operands = (*pair, terms[1])
    given = (("scale", scores.scale), ("is_causal", scores.seen is not None))
    offsets = (rows.offsets, beside.offsets)
    return {name: Library(name, (found.output,), operands, (), given, offsets) for name in ATTENTIONS}


class _Scores(NamedTuple):
    products: Value
    scale: float
    seen: tuple[int, int] | None
    """If a query sees only keys up to its own number: the loops over queries and keys."""


def _scores(value: Value, keys: IterDomain) -> _Scores | None:
    """Scaled products of queries and keys, causal or not."""
    seen, masked = None, _arguments("where", value)
    if masked is not None:
        order = _arguments("le", masked[0])
        hidden = masked[2]
        if order is None or not isinstance(hidden, Constant) or hidden.number != float("-inf"):
            return None
        key, query = order
        if not isinstance(key, Position) or not isinstance(query, Position) or key.domain.uid != keys.uid:
            return None
        seen, value = (query.domain.uid, keys.uid), masked[1]
    scaled = _arguments("mul", value)
    if scaled is not None and isinstance(scaled[1], Constant):
        return _Scores(scaled[0], float(scaled[1].number), seen)
    return _Scores(value, 1.0, seen)


def _normalisation(largest: Value, total: Value) -> Value:
    """The scale of sums of weighted values: 0 if no key is visible, NaN if the maximum is infinite."""
    dtype = total.dtype
    undefined = call("sub", largest, largest, dtype=dtype)
    nothing = call("eq", total, constant(0, dtype), dtype=torch.bool)
    divisor = call("where", nothing, constant(1.0, dtype), total, dtype=dtype)
    factor = call("add", call("reciprocal", divisor, dtype=dtype), undefined, dtype=dtype)
    return call("where", nothing, constant(0.0, dtype), factor, dtype=dtype)


def _arguments(function: str, value: Value) -> tuple[Value, ...] | None:
    return value.args if isinstance(value, Call) and value.function == function else None


def _factors(found: _Definitions, total: Accumulate, *, rounded: bool = False) -> tuple[Value, Value] | None:
    """The factors of a sum of products in the dtype that sums of inputs have; `rounded`, the first may be rounded to the dtype
    of the second."""
    value = found.inlined(total.values[0])
    args = None if value is None else _arguments("mul", value)
    if value is None or args is None or not isinstance(args[1], Read) or not args[1].dtype.is_floating_point:
        return None
    left, right = args
    if value.dtype != carried_dtype(right.dtype) or total.targets[0].dtype != value.dtype:
        return None
    if rounded:
        inner = _arguments("cast", left)
        return (inner[0] if inner is not None and left.dtype == right.dtype else left), right
    return (left, right) if left.dtype == right.dtype else None


def _layout(value: Value, loops: Sequence[IterDomain], *, is_weight: bool = False) -> Layout | None:
    """How an input is read inside loops: the loop along every dim of its memory. The first dim of a weight may have one position,
    which is then left out."""
    if not isinstance(value, Read) or value.tensor.memory.role is not Role.INPUT:
        return None
    return _dims(value.tensor, value.index, loops, is_weight=is_weight)


def _dims(tensor: Tensor, index: Places, loops: Sequence[IterDomain], *, is_weight: bool = False) -> Layout | None:
    """The loop along every dim of the memory of a tensor that is accessed at an index; None if one is not accessed along all of
    it."""
    places = {own.uid: (own, at) for own, at in zip(tensor.logical, index, strict=True) if isinstance(at, IterDomain)}
    around = {loop.uid: (loop, loop) for loop in loops}
    found: list[int | RowsAlong] = []
    storage = tensor.memory.storage
    if is_weight and len(storage) == 3 and storage[0].is_single:
        storage, index = storage[1:], index[-2:]
    for dim in storage:
        _, at = places.get(dim.uid, (dim, None))
        if at is not None and at.uid in around:
            sizes = at.extent_expr.value, dim.extent_expr.value
            if None not in sizes and sizes[0] != sizes[1]:
                return None
            found.append(at.uid)
            continue
        # A dim that is accessed at itself holds the rows that the loops themselves go over.
        rows = _rows(dim, places if at is None else around if at.uid == dim.uid else {})
        if rows is None:
            return None
        found.append(rows)
    return tuple(found) if len(places) == len(index) else None


def _rows(dim: IterDomain, places: Mapping[int, tuple[IterDomain, IterDomain]]) -> RowsAlong | None:
    """The rows that lie along a dim, given the loops that dims of a tensor are accessed at."""
    for own, row in places.values():
        made, joined = own.definition, dim.definition
        if isinstance(made, Partition) and made.covers and made.inputs[0].uid == dim.uid and made.outputs[1].uid == own.uid:
            component, offsets = made.outputs[0], made.starts
        elif isinstance(joined, Combine) and joined.twin is None and joined.inputs[1].uid == own.uid:
            component, offsets = joined.inputs[0], joined.offsets
        else:
            continue
        _, owner = places.get(component.uid, (None, None))
        if owner is None or not isinstance(own, RaggedIterDomain) or not isinstance(row, RaggedIterDomain):
            continue
        if row.component.uid == owner.uid and row.length is own.length:
            return RowsAlong(offsets, owner.uid, row.uid)
    return None
