"""Ragged tensors of every composition, each with a model of it in plain Python lists.

In: draws of hypothesis. Out: a `JaggedTensor` whose elements are all different, and the same elements in lists of lists, one
level of lists for each dim; made from storage positions alone, without asking the tensor.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from serrate.tensor import JaggedTensor, Structure
from serrate.tensor.checks.validate import CheckTime, check_offsets, check_starts
from serrate.tensor.rows import Rows, rows_of

KINDS = (
    "one level",
    "nested",
    "nested equal",
    "three levels",
    "rows of dim 1",
    "independent",
    "product packed",
    "product padded",
    "product beside rows",
    "gaps",
    "nested gaps",
    "padded",
    "transposed",
    "nested transposed",
    "product transposed",
)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
ROWS_FIRST = pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind not in ("rows of dim 1", "independent", "product beside rows") and "trans" not in kind],
)
LENGTHS = st.sampled_from([0, 1, 2, 3, 5])
COUNTS = st.one_of(st.lists(LENGTHS, min_size=2, max_size=4), st.lists(LENGTHS, max_size=4))
INDEX = st.sampled_from([torch.int32, torch.int64])


def ints(numbers: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def rows_at(lengths: list[int], starts: list[int] | None = None) -> list[list[int]]:
    begins = itertools.accumulate(lengths, initial=0) if starts is None else iter(starts)
    return [[*range(start, start + length)] for start, length in zip(begins, lengths, strict=False)]


def grouped(items: list[Any], sizes: list[int]) -> list[list[Any]]:
    left = iter(items)
    return [[next(left) for _ in range(size)] for size in sizes]


def modelled(values: Tensor, axes: dict[int, list[Any]]) -> list[Any]:
    """Lists for every dim; `axes` has, for each partitioned dim of the values, the positions of its rows in lists of lists."""
    partitioned = sorted(axes)
    inside = {dim + 1 for dim in partitioned if _leaf(axes[dim]) is tuple}
    dims = [axes.get(dim, [*range(size)]) for dim, size in enumerate(values.shape) if dim not in inside]

    def build(rest: list[list[Any]], here: Any, at: tuple[int, ...]) -> Any:
        if isinstance(here, list):
            return [build(rest, each, at) for each in here]
        at = (*at, *here) if isinstance(here, tuple) else (*at, here)
        return build(rest[1:], rest[0], at) if rest else values[at].item()

    return build(dims[1:], dims[0], ())


def transposed(values: Tensor, rows: list[Any], ahead: tuple[int, ...]) -> list[Any]:
    """Lists for every dim where, of the dims after the first of the values, `ahead[k]` come before the k-th ragged dim; `rows`
    has the positions of the first dim in lists of lists."""

    def build(here: Any, at: tuple[int, ...], level: int) -> Any:
        if level < len(ahead) and len(at) < ahead[level]:
            return [build(here, (*at, k), level) for k in range(values.shape[1 + len(at)])]
        if isinstance(here, list):
            return [build(each, at, level + 1) for each in here]
        if len(at) < values.dim() - 1:
            return [build(here, (*at, k), level) for k in range(values.shape[1 + len(at)])]
        return values[(here, *at)].item()

    return [build(row, (), 0) for row in rows]


def _leaf(nested: Any) -> type | None:
    if not isinstance(nested, list):
        return type(nested)
    return next((found for each in nested if (found := _leaf(each)) is not None), None)


@st.composite
def ragged(draw: st.DrawFn, *kinds: str) -> tuple[JaggedTensor, list[Any]]:
    kind, index = draw(st.sampled_from(kinds)), draw(INDEX)
    inner = draw(st.sampled_from([(), (2,), (2, 3)]))
    lengths = draw(COUNTS)
    total = sum(lengths)

    def made(shape: tuple[int, ...], structure: Structure, axes: dict[int, list[Any]]) -> tuple[JaggedTensor, list[Any]]:
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
        jt = JaggedTensor(values, structure)
        if draw(st.booleans()):
            # What was measured is handed on to what is made of the tensor, where it must still be true.
            for level in range(structure.levels):
                assert structure.min_length(level) <= structure.max_length(level)
        return jt, modelled(values, axes)

    if kind in ("nested", "nested equal", "three levels", "nested gaps"):
        if kind == "nested equal":
            parts = draw(st.sampled_from([[2, 2, 2], [1, 1], [3], [0, 0], []]))
        else:
            parts = draw(COUNTS)
        lengths = draw(st.lists(st.sampled_from([0, 1, 2, 4]), min_size=sum(parts), max_size=sum(parts)))
        levels = [parts, lengths]
        if kind == "three levels":
            groups = draw(COUNTS.filter(lambda sizes: sum(sizes) <= 6))
            parts = draw(st.lists(st.sampled_from([0, 1, 2]), min_size=sum(groups), max_size=sum(groups)))
            lengths = draw(st.lists(st.sampled_from([0, 1, 3]), min_size=sum(parts), max_size=sum(parts)))
            levels = [groups, parts, lengths]
        starts = None
        if kind == "nested gaps":
            skips = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
            starts = [
                s + skip for s, skip in zip(itertools.accumulate(lengths, initial=0), itertools.accumulate(skips), strict=False)
            ]
        nested: list[Any] = rows_at(lengths, starts)
        for sizes in reversed(levels[:-1]):
            nested = grouped(nested, sizes)
        chain = [ints(level, index) for level in levels]
        if starts is None:
            return made((sum(lengths), *inner), Structure.from_lengths(*chain), {0: nested})
        structure = Structure.from_starts(ints(starts, index), *chain)
        return made((sum(lengths) + sum(skips) + 1, *inner), structure, {0: nested})
    if kind.endswith("transposed"):
        inner = draw(st.sampled_from([(2,), (2, 3), (3, 1, 2)]))
        levels = [lengths]
        if kind == "nested transposed":
            levels = [draw(COUNTS), lengths]
            levels[1] = draw(st.lists(LENGTHS, min_size=sum(levels[0]), max_size=sum(levels[0])))
            places: list[Any] = grouped(rows_at(levels[1]), levels[0])
        elif kind == "product transposed":
            counts = draw(st.lists(LENGTHS, min_size=len(lengths), max_size=len(lengths)))
            sizes = [n * c for n, c in zip(lengths, counts, strict=True)]
            places = [grouped(row, [c] * n) for row, n, c in zip(rows_at(sizes), lengths, counts, strict=True)]
        else:
            places = rows_at(lengths)
        structure = Structure.from_lengths(*(ints(level, index) for level in levels))
        if kind == "product transposed":
            structure = structure.with_columns(ints(counts, index))
        ragged_dims = structure.levels
        before = tuple(sorted(draw(st.lists(st.integers(0, len(inner)), min_size=ragged_dims, max_size=ragged_dims))))
        shape = (structure.total_elements(), *inner)
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
        return JaggedTensor(values, structure.transposed((before,))), transposed(values, places, before)
    if kind == "rows of dim 1":
        return made((2, total, *inner), Structure.from_lengths(ints(lengths, index), dim=1), {1: rows_at(lengths)})
    if kind == "independent":
        others = draw(COUNTS)
        both = Structure.independent(
            Structure.from_lengths(ints(lengths, index)), Structure.from_lengths(ints(others, index), dim=1)
        )
        return made((total, sum(others), *inner), both, {0: rows_at(lengths), 1: rows_at(others)})
    if kind.startswith("product"):
        counts = draw(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=len(lengths), max_size=len(lengths)))
        packed = kind == "product packed" or (kind == "product beside rows" and draw(st.booleans()))
        if not any(length * count for length, count in zip(lengths, counts, strict=True)):
            # Without an element the model cannot tell that the next dim belongs to the rows.
            packed = True
        structure = Structure.from_lengths(ints(lengths, index)).with_columns(ints(counts, index), packed=packed)
        others = draw(COUNTS) if kind == "product beside rows" else None
        if others is not None:
            beside = Structure.from_lengths(ints(others, index), dim=1 if packed else 2)
            structure = Structure.independent(structure, beside)
            inner = (sum(others), *inner)
        behind = {} if others is None else {1 if packed else 2: rows_at(others)}
        if packed:
            sizes = [length * count for length, count in zip(lengths, counts, strict=True)]
            rows = [grouped(row, [c] * n) for row, n, c in zip(rows_at(sizes), lengths, counts, strict=True)]
            return made((sum(sizes), *inner), structure, {0: rows, **behind})
        width = max(counts, default=0) + 1
        pairs = [[[(p, c) for c in range(count)] for p in row] for row, count in zip(rows_at(lengths), counts, strict=True)]
        return made((total, width, *inner), structure, {0: pairs, **behind})
    if kind == "gaps":
        skips = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
        starts = [
            s + skip for s, skip in zip(itertools.accumulate(lengths, initial=0), itertools.accumulate(skips), strict=False)
        ]
        structure = Structure.from_starts(ints(starts, index), ints(lengths, index))
        return made((total + sum(skips) + 1, *inner), structure, {0: rows_at(lengths, starts)})
    if kind == "padded":
        room = max(lengths, default=0) + 1
        x = torch.arange(torch.Size((len(lengths), room, *inner)).numel(), dtype=torch.float64)
        x = x.reshape(len(lengths), room, *inner)
        jt = JaggedTensor.from_padded(x, ints(lengths, index), format="padded")
        assert jt.format == "padded"
        return jt, modelled(jt.values, {0: rows_at(lengths, [row * room for row in range(len(lengths))])})
    return made((total, *inner), Structure.from_lengths(ints(lengths, index)), {0: rows_at(lengths)})


def listed(found: Any) -> Any:
    """A result in lists of lists, one level for each dim."""
    return found.tolist() if isinstance(found, Tensor) else [listed(piece) for piece in found.unbind()]


def flat(model: Any) -> list[float]:
    return [number for each in model for number in flat(each)] if isinstance(model, list) else [model]


def check_sound(found: Any) -> None:
    """What a ragged tensor is made of is legal, and what it remembers is true."""
    if isinstance(found, Tensor):
        return
    for rows in found.structure.rows:
        check_offsets(rows.offsets[: rows.depth], None if rows.depth == 0 else int(rows.offsets[rows.depth - 1][-1]))
        assert len({level.dtype for level in rows.offsets}) == 1
        assert all(level.is_contiguous() for level in rows.offsets)
        fresh = rows_of(rows.offsets, rows.depth, rows.packed, rows.starts, rows.room, {})
        if rows.starts is not None:
            check_starts(rows.starts, fresh.sizes(), None, CheckTime.NOW)
        check_remembered(rows, fresh)


def check_remembered(rows: Rows, fresh: Rows) -> None:
    for level, host in rows._host.items():
        assert host.tolist() == rows.offsets[level].tolist()
    for (name, level), known in rows._facts.items():
        if name == "elements":
            assert known == fresh.elements("a test")
        elif name == "total":
            assert known == fresh.total(level, "a test")
        elif name == "within":
            assert known >= fresh.end("a test")
        elif name == "columns within":
            assert known >= fresh.max_length(fresh.depth, "a test")
        elif rows.num_rows(level):
            measured = fresh.max_length(level, "a test") if name == "max" else fresh.min_length(level, "a test")
            assert name == "variance" or known == measured, (name, level)
