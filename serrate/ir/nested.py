"""Integers nested to any depth: the form in which users pass and see lengths and offsets.

In: sequences of sequences, tensors. Out: validated nested tuples of ints, also flattened, as lengths and as offsets.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch

from serrate.errors import DomainError
from serrate.ir.domains import NestedInts


def integers(what: str, given: object) -> tuple[NestedInts, ...]:
    """Integers as nested tuples, from any supported form; raises for anything else."""
    if isinstance(given, torch.Tensor):
        if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool or given.ndim == 0:
            raise DomainError(f"{what} must be integers, one row or more, got {given.dtype} of {given.ndim} dims")
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise DomainError(f"{what} must be integers, got {given!r}")
    if any(isinstance(b, bool) or (not isinstance(b, int | Sequence) or isinstance(b, str)) for b in given):
        raise DomainError(f"{what} must be integers, got {list(given)}")
    if len({isinstance(b, int) for b in given}) > 1:
        raise DomainError(f"{what} must be nested evenly, got {list(given)}")
    return tuple(b if isinstance(b, int) else integers(what, b) for b in given)


def flattened(nested: NestedInts) -> list[int]:
    """Nested integers in a flat list."""
    return [nested] if isinstance(nested, int) else [number for inner in nested for number in flattened(inner)]


def depth_of(nested: NestedInts) -> int:
    """The nesting depth: 1 for a flat tuple."""
    return 0 if isinstance(nested, int) else 1 + max((depth_of(inner) for inner in nested), default=0)


def listed(nested: NestedInts) -> object:
    """Nested tuples as nested lists."""
    return nested if isinstance(nested, int) else [listed(inner) for inner in nested]


def boundaries_of(extents: NestedInts) -> NestedInts:
    """The offsets for nested lengths, one row of offsets per innermost row."""
    assert isinstance(extents, tuple)
    if extents and isinstance(extents[0], tuple):
        return tuple(boundaries_of(inner) for inner in extents)
    return (0, *itertools.accumulate(cast(tuple[int, ...], extents)))


def differences(what: str, offsets: tuple[NestedInts, ...]) -> tuple[NestedInts, ...]:
    """The lengths for nested offsets."""
    if offsets and isinstance(offsets[0], tuple):
        return tuple(differences(what, cast(tuple[NestedInts, ...], row)) for row in offsets)
    boundaries = cast(tuple[int, ...], offsets)
    check_boundaries(what, boundaries)
    return tuple(b - a for a, b in itertools.pairwise(boundaries))


def check_boundaries(what: str, boundaries: Sequence[int], total: int | None = None) -> None:
    """Raises if offsets do not start at 0, decrease, or do not end at a known total."""
    if not boundaries or boundaries[0] != 0:
        raise DomainError(f"{what} must start at 0, got {list(boundaries[:1])}")
    for k in range(1, len(boundaries)):
        if boundaries[k] < boundaries[k - 1]:
            raise DomainError(
                f"{what} must not decrease: offsets[{k}] = {boundaries[k]} < offsets[{k - 1}] = {boundaries[k - 1]}"
            )
    if total is not None and boundaries[-1] != total:
        raise DomainError(f"{what} must end at the extent {total}, got {boundaries[-1]}")
