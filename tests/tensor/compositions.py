"""Ragged tensors of every composition, each with its rows in plain Python lists: the oracle of what a conversion must keep.

In: the names of compositions, dtypes. Out: hypothesis strategies of `Sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from serrate.tensor import JaggedTensor, Structure

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ALL_DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128)

LENGTHS = st.one_of(st.lists(st.sampled_from([0, 0, 1, 2, 3, 7]), max_size=5), st.lists(st.just(0), max_size=3))
INNER = st.sampled_from([(), (1,), (3,), (2, 3), (0,)])
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass
class Sample:
    """A ragged tensor and what its rows are."""

    jt: JaggedTensor
    rows: list[Any]
    """Nested lists of numbers."""


def numbered(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Values of which neighbours differ, so that a shifted row cannot pass for the right one."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(1, count + 1) % 251
    if dtype is torch.bool:
        return (numbers % 3 == 0).view(*shape)
    numbers = numbers % 113 if dtype in (torch.int8, torch.bfloat16) else numbers
    return (numbers * (1 - 2j) if dtype.is_complex else numbers).to(dtype).view(*shape)


def cut(items: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """The items in consecutive pieces of these lengths."""
    found, start = [], 0
    for length in lengths:
        found.append(items[start : start + length])
        start += length
    assert start == len(items)
    return found


def _index(draw: Draw) -> torch.dtype:
    return draw(st.sampled_from([torch.int32, torch.int64]))


def _tensor(lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(lengths, dtype=dtype)


def one_level(draw: Draw, dtype: torch.dtype) -> Sample:
    lengths, inner = draw(LENGTHS), draw(INNER)
    values = numbered((sum(lengths), *inner), dtype)
    return Sample(JaggedTensor.from_lengths(values, _tensor(lengths, _index(draw))), cut(values.tolist(), lengths))


def nested(draw: Draw, dtype: torch.dtype) -> Sample:
    depth, inner, index = draw(st.sampled_from([2, 2, 3])), draw(INNER), _index(draw)
    levels = [draw(LENGTHS)]
    for _ in range(depth - 1):
        count = sum(levels[-1])
        levels.append(draw(st.lists(st.sampled_from([0, 1, 2, 4]), min_size=count, max_size=count)))
    values = numbered((sum(levels[-1]), *inner), dtype)
    rows = values.tolist()
    for level in reversed(levels):
        rows = cut(rows, level)
    return Sample(JaggedTensor.from_lengths(values, [_tensor(level, index) for level in levels]), rows)


def equal_parts(draw: Draw, dtype: torch.dtype) -> Sample:
    components, parts = draw(st.sampled_from([(3, 2), (1, 5), (4, 1), (2, 3)]))
    lengths = draw(st.lists(st.integers(0, 3), min_size=components * parts, max_size=components * parts))
    values = numbered((sum(lengths), 2), dtype)
    jt = JaggedTensor.from_lengths(values, _tensor(lengths, _index(draw)).view(components, parts))
    return Sample(jt, cut(cut(values.tolist(), lengths), [parts] * components))


def later_dim(draw: Draw, dtype: torch.dtype) -> Sample:
    lengths, outer = draw(LENGTHS), draw(st.sampled_from([1, 3]))
    values = numbered((outer, sum(lengths), *draw(INNER)), dtype)
    jt = JaggedTensor.from_lengths(values, _tensor(lengths, _index(draw)), dim=1)
    return Sample(jt, [cut(each.tolist(), lengths) for each in values])


def transposed(draw: Draw, dtype: torch.dtype) -> Sample:
    lengths, heads = draw(LENGTHS), draw(st.sampled_from([1, 3]))
    values = numbered((sum(lengths), heads, *draw(INNER)), dtype)
    jt = JaggedTensor.from_lengths(values, _tensor(lengths, _index(draw))).transpose(1, 2)
    return Sample(jt, [[[each[head] for each in row] for head in range(heads)] for row in cut(values.tolist(), lengths)])


def independent(draw: Draw, dtype: torch.dtype) -> Sample:
    first, second = draw(LENGTHS), draw(LENGTHS)
    values = numbered((sum(first), sum(second)), dtype)
    structure = Structure.independent(
        Structure.from_lengths(_tensor(first, torch.int64)), Structure.from_lengths(_tensor(second, torch.int64), dim=1)
    )
    # A row is [length, columns], and its columns come apart: one block for each of them.
    rows = [[cut(position, second) for position in row] for row in cut(values.tolist(), first)]
    return Sample(JaggedTensor(values, structure), rows)


def _columns(draw: Draw, dtype: torch.dtype, *, packed: bool) -> Sample:
    lengths = draw(LENGTHS)
    counts = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    index, inner = _index(draw), draw(INNER)
    structure = Structure.from_lengths(_tensor(lengths, index)).with_columns(_tensor(counts, index), packed=packed)
    if packed:
        values = numbered((sum(n * m for n, m in zip(lengths, counts, strict=True)), *inner), dtype)
        blocks = cut(values.tolist(), [n * m for n, m in zip(lengths, counts, strict=True)])
        rows = [cut(block, [m] * n) for block, n, m in zip(blocks, lengths, counts, strict=True)]
    else:
        values = numbered((sum(lengths), max(counts, default=0) + 1, *inner), dtype)
        rows = [[p[:m] for p in row] for row, m in zip(cut(values.tolist(), lengths), counts, strict=True)]
    return Sample(JaggedTensor(values, structure), rows)


def packed_columns(draw: Draw, dtype: torch.dtype) -> Sample:
    return _columns(draw, dtype, packed=True)


def padded_columns(draw: Draw, dtype: torch.dtype) -> Sample:
    return _columns(draw, dtype, packed=False)


def gaps(draw: Draw, dtype: torch.dtype) -> Sample:
    lengths, index = draw(LENGTHS), _index(draw)
    spare = draw(st.lists(st.integers(0, 2), min_size=len(lengths) + 1, max_size=len(lengths) + 1))
    starts, at = [], 0
    for length, room in zip(lengths, spare, strict=False):
        starts.append(at + room)
        at += room + length
    values = numbered((at + spare[-1], *draw(INNER)), dtype)
    jt = JaggedTensor.from_starts(values, _tensor(starts, index), _tensor(lengths, index))
    return Sample(jt, [values[a : a + n].tolist() for a, n in zip(starts, lengths, strict=True)])


def nested_gaps(draw: Draw, dtype: torch.dtype) -> Sample:
    sample = gaps(draw, dtype)
    count = len(sample.rows)
    first = draw(st.integers(0, count))
    index = sample.jt.starts.dtype
    outer = _tensor([first, 0, count - first], index)
    jt = JaggedTensor.from_starts(sample.jt.values, sample.jt.starts, [outer, sample.jt.lengths.to(index)])
    return Sample(jt, cut(sample.rows, outer.tolist()))


def padded(draw: Draw, dtype: torch.dtype) -> Sample:
    lengths = draw(LENGTHS)
    x = numbered((len(lengths), max(lengths, default=0) + 1, *draw(INNER)), dtype)
    jt = JaggedTensor.from_padded(x, _tensor(lengths, _index(draw)), format="padded")
    return Sample(jt, [x[row, :length].tolist() for row, length in enumerate(lengths)])


MAKERS = (
    one_level,
    nested,
    equal_parts,
    later_dim,
    transposed,
    independent,
    packed_columns,
    padded_columns,
    gaps,
    nested_gaps,
    padded,
)


def samples(
    makers: Sequence[Callable[[Draw, torch.dtype], Sample]] = MAKERS, dtypes: Sequence[torch.dtype] = ALL_DTYPES
) -> st.SearchStrategy[Sample]:
    """A ragged tensor of one of these compositions and dtypes."""

    @st.composite
    def make(draw: Draw) -> Sample:
        return draw(st.sampled_from(makers))(draw, draw(st.sampled_from(dtypes)))

    return make()  # type: ignore[call-arg]
