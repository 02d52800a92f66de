"""Fold indices: integer arithmetic that computes an index becomes part of the index expression.

In: the definitions of a fusion. Out: the same; definitions that only computed indices are dead afterwards:

    T1[i] = floordiv(T0[i], 2);  T2[i, d] = x[T1[i], d]   ->   T2[i, d] = x[T0[i] // 2, d]

An index that is read from memory must be complete before the stage that uses it, so `T1` would need a separate stage: another
launch on a GPU. A layer that sends each token to `k` experts reads the tokens at `order // k`.

Long arithmetic is stored: folded, a sum that is used twice at each of `n` steps would be an expression of 2^n terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr, const
from serrate.ir.fusion import Definition
from serrate.ir.rewrites import map_values
from serrate.ir.tile import Leaf, Store
from serrate.ir.values import Call, Constant, Place, Read, Tensor, Value, index_read, reindex

MOST_OPERATIONS = 16
"""The most operations of an index expression; longer arithmetic is stored first."""


def fold_indices(definitions: Sequence[Definition]) -> list[Definition]:
    """The definitions, with arithmetic folded into indices."""
    stores: dict[Tensor, Store] = {}
    operations: dict[Tensor, int] = {}
    folded: list[Definition] = []
    for definition in definitions:
        statement = definition.statement
        if stores and isinstance(statement, Leaf):
            definition = replace(definition, statement=map_values(statement, lambda value: _folded(value, stores)))
        if isinstance(statement, Store) and isinstance(statement.value, Call):
            number = _operations(statement.value, operations)
            if number <= MOST_OPERATIONS:
                stores[statement.tensor], operations[statement.tensor] = statement, number
        folded.append(definition)
    return folded


def _operations(value: Value, known: Mapping[Tensor, int]) -> int:
    """How many operations a value takes, with those of the tensors that it reads."""
    if isinstance(value, Read):
        return known.get(value.tensor, 0)
    return sum((_operations(each, known) for each in value.args), start=int(isinstance(value, Call)))


def _folded(value: Value, stores: Mapping[Tensor, Store]) -> Value | None:
    if not isinstance(value, Read) or not value.args:
        return None
    return value.of(value.tensor, tuple(_folded_place(at, stores) if isinstance(at, Place) else at for at in value.index))


def _folded_place(place: Place, stores: Mapping[Tensor, Store]) -> Place:
    """The index as an expression over integers in memory, with the arithmetic that computed its own integers."""
    reads: list[Value] = []
    terms: dict[Expr, Expr] = {}
    for k, value in enumerate(place.reads):
        known = len(reads)
        term = _arithmetic(value, stores, reads)
        if term is None:
            reads[known:] = [value]
            term = index_read(known)
        terms[index_read(k)] = term
    return replace(place, expr=place.expr.substitute(terms), reads=tuple(reads))


def _arithmetic(value: Value, stores: Mapping[Tensor, Store], reads: list[Value]) -> Expr | None:
    """A value as an expression over integers in memory, which are appended to `reads`; None if an index cannot express it."""
    if value.dtype != torch.int64:
        return None
    if isinstance(value, Constant):
        return const(int(value.number))
    if isinstance(value, Read):
        stored, known = _stored(value, stores), len(reads)
        found = None if stored is None else _arithmetic(stored, stores, reads)
        if found is not None:
            return found
        del reads[known:]
        reads.append(value)
        return index_read(len(reads) - 1)
    if not isinstance(value, Call) or value.function not in ("add", "sub", "mul", "floordiv"):
        return None
    left, right = (_arithmetic(each, stores, reads) for each in value.args)
    if left is None or right is None:
        return None
    if value.function == "add":
        return left + right
    if value.function == "sub":
        return left - right
    if value.function == "mul":
        return left * right if left.value is not None or right.value is not None else None
    return left // right if (right.value or 0) > 0 else None


def _stored(read: Read, stores: Mapping[Tensor, Store]) -> Value | None:
    """The value of an element; None if it is unknown, or the index of the element is computed."""
    store = stores.get(read.tensor)
    if store is None:
        return None
    domains: dict[int, IterDomain | None] = {}
    for own, at in zip(store.index, read.index, strict=True):
        if isinstance(at, Place):
            return None
        if own is not None:
            domains[own.uid] = at
    return reindex(store.value, domains)
