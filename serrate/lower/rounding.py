"""Rounding of sixteen-bit tensors: intermediates are float32 for all readers, and are rounded only when they become results.

In: the definitions of a fusion, and which tensors are results. Out: the same definitions, each tensor with its storage dtype.
A sixteen-bit tensor is stored in

    its own dtype   where rounding loses nothing (its elements are moved, or were rounded already), where all its readers round it
                    themselves (operands of matrix products), or where it is a result that nothing reads
    float32         otherwise; a result that is also read becomes two tensors: one to read, and one to return
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from serrate.ir.fusion import Definition
from serrate.ir.tile import Leaf, Library, Store
from serrate.ir.values import Call, Constant, Read, Tensor, Value, carried_dtype, read, rewrite

EXACT = frozenset(("neg", "abs", "relu", "maximum", "minimum", "where"))
"""Functions that return one of their operands, possibly negated."""


def unrounded(live: Sequence[Definition], results: Sequence[Tensor]) -> list[Definition]:
    """The definitions with storage dtypes; results that are also read are rounded by a separate definition."""
    used = {t for d in live for v in d.statement.values for t in _used_as_they_are(v)}
    given = {t.memory for t in results}
    stored: dict[Tensor, Tensor] = {}
    out: list[Definition] = []
    for definition in live:
        statement = definition.statement
        values = tuple(_read_from(v, stored) for v in statement.values)
        rounded: list[Definition] = []
        for t in statement.targets:
            if t not in used or carried_dtype(t.dtype) == t.dtype or _exact(statement, values, t.dtype):
                continue
            wide = replace(t, dtype=carried_dtype(t.dtype), name=f"{t.name}_float" if t in given else t.name)
            stored[t] = wide
            if t in given:
                rounded.append(Definition(Store(t, t.logical, read(wide, wide.logical)), t.logical))
        out += [Definition(_into(statement, stored, values), definition.domains), *rounded]
    return out


def _used_as_they_are(value: Value) -> Iterator[Tensor]:
    """The tensors that a value reads, except those that it rounds to their dtype at once."""
    pending, seen = [value], set[int]()
    while pending:
        v = pending.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if isinstance(v, Read):
            yield v.tensor.memory
        pending += () if _rounds(v) else v.args


def _rounds(value: Value) -> bool:
    return (
        isinstance(value, Call)
        and value.function == "cast"
        and isinstance(value.args[0], Read)
        and value.args[0].dtype == value.dtype
    )


def _read_from(value: Value, stored: dict[Tensor, Tensor]) -> Value:
    """The value with reads of stored tensors."""

    def change(v: Value) -> Value | None:
        return v.of(_seen(v.tensor, stored), v.index) if isinstance(v, Read) and v.tensor.memory in stored else None

    return rewrite(value, change)


def _seen(tensor: Tensor, stored: dict[Tensor, Tensor]) -> Tensor:
    """The stored tensor for a tensor or a view of one."""
    memory = stored[tensor.memory]
    return memory if tensor.base is None else replace(tensor, base=memory, dtype=memory.dtype)


def _exact(statement: Leaf | Library, values: Sequence[Value], dtype: torch.dtype) -> bool:
    """Whether the results of a statement are exact in a dtype, so rounding loses nothing."""
    if isinstance(statement, Library):
        # Sorting moves elements.
        return all(v.dtype == dtype for v in values if v.dtype.is_floating_point)
    return isinstance(statement, Store) and _is_of(values[0], dtype)


def _is_of(value: Value, dtype: torch.dtype) -> bool:
    if isinstance(value, Constant):
        return torch.tensor(value.number, dtype=torch.float64, device="cpu").to(dtype).item() == value.number
    if isinstance(value, Read):
        return value.dtype == dtype and carried_dtype(value.tensor.memory.dtype) != value.tensor.memory.dtype
    if isinstance(value, Call) and value.function in EXACT:
        return all(_is_of(a, dtype) for a in (value.args[1:] if value.function == "where" else value.args))
    return isinstance(value, Call) and value.function == "cast" and value.dtype == dtype


def _into(statement: Leaf | Library, stored: dict[Tensor, Tensor], values: tuple[Value, ...]) -> Leaf | Library:
    targets = tuple(stored.get(t, t) for t in statement.targets)
    if isinstance(statement, Store):
        return Store(targets[0], statement.index, values[0])
    return replace(statement, targets=targets, values=values)
