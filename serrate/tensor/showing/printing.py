"""The rows of a ragged tensor as text, for `print`: the first and the last of every dim, with their numbers aligned.

In: a ragged tensor's shape, values, structure and hints. Out: several lines, as torch prints a tensor; or the repr, where
the numbers cannot be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from serrate.tensor.hints import Hints
from serrate.tensor.showing.preview import facts, preview
from serrate.tensor.structure import Structure
from serrate.tensor.sync import may_copy
from serrate.tensor.taking import count, take

_OPEN = "JaggedTensor("


def printed(shape: tuple[object, ...], values: Tensor, structure: Structure, hints: Hints) -> str:
    """The str of a ragged tensor: its rows, then the facts of its repr.

    >>> from serrate import JaggedTensor
    >>> print(JaggedTensor.from_lengths(torch.tensor([1.0, 2.5, -10.0]), [1, 0, 2]))
    JaggedTensor([[  1.0000],
                  [],
                  [  2.5000, -10.0000]],
                 shape=(3, r0), dtype=torch.float32, device=cpu, lengths=[1, 0, 2])
    """
    if not (may_copy(values) and all(rows.readable() or may_copy(rows.offsets[0]) for rows in structure.rows)):
        return preview(shape, values, structure, hints)
    try:
        # Every dim multiplies the lines, so that tensors of many dims show less of each.
        shown = _shown(values.detach(), structure, 3 if len(shape) <= 3 else 2)
    except RuntimeError:
        # Inside torch's transforms, and while it traces, there are no numbers; the repr says so.
        return preview(shape, values, structure, hints)
    texts = iter(_aligned(list(_numbers(shown)), values.dtype))
    indent = " " * len(_OPEN)
    rows = _block(shown, len(shape), texts, indent + " ")
    facts_of = ", ".join(facts(shape, values, structure, hints, numbers=False))
    return f"{_OPEN}{rows},\n{indent}{facts_of})"


def _shown(values: Tensor, structure: Structure | None, edge: int) -> list[Any]:
    """The first and last of every dim as nested lists of numbers; None stands for what is left out."""
    if structure is None:
        return _shown_dense(values, edge)
    kept: list[Any] = []
    for row in _places(count(values, structure), edge):
        kept.append(None if row is None else _shown(*take(values, structure, row, "print"), edge))
    return kept


def _shown_dense(values: Tensor, edge: int) -> list[Any]:
    places = [_places(size, edge) for size in values.shape]
    for dim, kept in enumerate(places):
        if None in kept:
            where = torch.tensor([k for k in kept if k is not None], device=values.device)
            values = values.index_select(dim, where)
    wide = values.to(torch.float64) if values.dtype.is_floating_point else values
    return _with_gaps(wide.tolist(), [None in kept for kept in places])


def _with_gaps(numbers: list[Any], cut: list[bool]) -> list[Any]:
    inner = cut[1:]
    found = [_with_gaps(each, inner) for each in numbers] if inner else numbers
    half = len(found) // 2
    return [*found[:half], None, *found[half:]] if cut[0] else found


def _places(size: int, edge: int) -> list[int | None]:
    if size <= 2 * edge:
        return list(range(size))
    return [*range(edge), None, *range(size - edge, size)]


def _numbers(shown: list[Any]) -> Iterator[Any]:
    for each in shown:
        if isinstance(each, list):
            yield from _numbers(each)
        elif each is not None:
            yield each


def _aligned(numbers: list[Any], dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        texts = [f"{number:.4f}" for number in numbers]
    elif dtype.is_floating_point:
        form = _float_form([abs(number) for number in numbers if math.isfinite(number)])
        texts = [form.format(number) if math.isfinite(number) else str(number) for number in numbers]
    else:
        texts = [str(number) for number in numbers]
    width = max(map(len, texts), default=0)
    return [text.rjust(width) for text in texts]


def _float_form(sizes: list[float]) -> str:
    """How numbers of these sizes are written, as torch does: whole, with four digits, or with an exponent."""
    least, most = min((size for size in sizes if size), default=1.0), max(sizes, default=0.0)
    if all(size.is_integer() for size in sizes) and most < 1e8:
        return "{:.0f}."
    return "{:.4e}" if most > 1e8 or least < 1e-4 or most / least > 1e5 else "{:.4f}"


def _block(shown: list[Any], dims: int, texts: Iterator[str], indent: str) -> str:
    if dims == 1:
        return f"[{', '.join('...' if number is None else next(texts) for number in shown)}]"
    parts = ["..." if part is None else _block(part, dims - 1, texts, indent + " ") for part in shown]
    # Blocks of lines are told apart by an empty line, lines are not.
    between = ",\n" if dims == 2 else ",\n\n"
    return f"[{(between + indent).join(parts)}]"
