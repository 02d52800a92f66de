"""Keyed tensors in traced functions: `k["user"]`, `k.items()`, and the pooled lookup of all keys in one program.

In: a keyed tensor, of which each key is a separate input of the trace. Out: the same over traced tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from serrate.errors import CallError, ShapeError
from serrate.ir.callers import asks_for_class
from serrate.ir.view import TensorView, standing_for
from serrate.tensor import JaggedTensor
from serrate.tensor.keyed_tensor import KeyedJaggedTensor, KeyedRows, no_weights


class TracedKeyed(KeyedRows):
    """A keyed tensor while a function is traced: one traced tensor per key, and one for its weights."""

    __slots__ = ("_parts", "_weighing")

    def __init__(self, keyed: KeyedJaggedTensor, change: Callable[[JaggedTensor], Any]) -> None:
        super().__init__(keyed.keys(), keyed.rows_per_key)
        self._parts: dict[str, TensorView] = {key: change(keyed[key]) for key in keyed}
        weighted = () if keyed.weights is None else keyed
        self._weighing: dict[str, TensorView] = {key: change(keyed.weights_of(key)) for key in weighted}

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` sees in a traced function; serrate's own code sees this class."""
        return self.stands_for() if standing_for.get() is not None and asks_for_class(sys._getframe(1)) else type(self)

    @staticmethod
    def stands_for() -> type:
        """The class of a keyed tensor outside of a trace."""
        return KeyedJaggedTensor

    def __getitem__(self, key: str) -> TensorView:
        """The traced tensor of one key."""
        return self._parts[self.keys()[self.number(key)]]

    def weights_of(self, key: str) -> TensorView:
        """The weights of one key, with its rows."""
        if not self._weighing:
            raise no_weights()
        return self._weighing[self.keys()[self.number(key)]]

    @property
    def has_weights(self) -> bool:
        """Whether there is a weight for each value."""
        return bool(self._weighing)

    def items(self) -> Iterator[tuple[str, TensorView]]:
        """Pairs of a key and its traced tensor."""
        return iter(self._parts.items())

    def embedding_bag(
        self,
        tables: Mapping[str, Any],
        *,
        mode: str | Mapping[str, str] = "sum",
        padding_idx: int | None = None,
        concat: bool = False,
    ) -> Any:
        """`KeyedJaggedTensor.embedding_bag`, traced."""
        found = pooled(self, by_key(tables), mode, padding_idx)
        return side_by_side(self, found) if concat else found


def leaves_in(keyed: KeyedJaggedTensor) -> list[JaggedTensor]:
    """The leaves of a keyed tensor: one tensor per key, then the weights of each."""
    weights = [] if keyed.weights is None else [keyed.weights_of(key) for key in keyed]
    return [*(keyed[key] for key in keyed), *weights]


def by_key(tables: Any) -> dict[str, Any]:
    """Tables as a plain dict, which the keys of calls support; ModuleDict and ParameterDict would be opaque objects."""
    if not callable(getattr(tables, "items", None)):
        kind = "tensor" if isinstance(tables, torch.Tensor | TensorView) else type(tables).__name__
        raise CallError(
            f"embedding_bag: takes a dict with a table for each key, got a {kind}; if all keys share one table, "
            "pass dict.fromkeys(keyed, table)"
        )
    return dict(tables.items())


def pooled(
    keyed: TracedKeyed, tables: Mapping[str, Any], mode: str | Mapping[str, str], padding_idx: int | None
) -> dict[str, Any]:
    """Pools the rows of each key's table; returns a dict by key."""
    missing = [key for key in keyed if key not in tables]
    if missing:
        raise CallError(f"embedding_bag: no table for {', '.join(map(repr, missing))}; the tables are {list(tables)}")
    found = {}
    for key, bags in keyed.items():
        how = mode if isinstance(mode, str) else mode.get(key)
        if how is None:
            raise CallError(f"embedding_bag: no mode for {key!r}; pass one per key, or one for all")
        if isinstance(tables[key], nn.Module):
            kind = type(tables[key]).__name__
            raise CallError(f"embedding_bag: the table of {key!r} must be a tensor, got a module: pass the weight of this {kind}")
        weights: Any = keyed.weights_of(key) if keyed.has_weights else None
        given: Any = bags
        found[key] = functional.embedding_bag(given, tables[key], mode=how, per_sample_weights=weights, padding_idx=padding_idx)
    return found


def side_by_side(keyed: KeyedRows, found: Mapping[str, Any]) -> Any:
    """Concatenates the results of all keys to one tensor `[batch, sum of widths]`."""
    if len(set(keyed.rows_per_key)) > 1:
        raise ShapeError(f"embedding_bag: with concat=True all keys must have the same number of rows, got {keyed.rows_per_key}")
    return torch.cat(list(found.values()), 1)
