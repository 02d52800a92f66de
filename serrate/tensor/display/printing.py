"""A ragged tensor as text: one line for `repr`, the first and last rows with aligned numbers for `print`.

In: values and their structure, however large. Out: text; reads only the few numbers it shows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from serrate.tensor.components import count, take
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure
from serrate.tensor.sync import host_copy, may_copy

_LENGTHS = 8
_NUMBERS = 6
_UNREAD = "not on the host"


def preview(shape: tuple[object, ...], values: Tensor, structure: Structure, hints: Hints = NO_HINTS) -> str:
    """The repr of a ragged tensor.

    >>> preview((2, "r0"), torch.tensor([1, 2, 3]), Structure.from_lengths(torch.tensor([1, 2])))
    "JaggedTensor(shape=(2, 'r0'), dtype=torch.int64, device=cpu, lengths=[1, 2], values=[1, 2, 3])"
    """
    return f"JaggedTensor({', '.join(facts(shape, values, structure, hints, numbers=True))})"


def facts(shape: tuple[object, ...], values: Tensor, structure: Structure, hints: Hints, *, numbers: bool) -> list[str]:
    """The items of a repr; the first few values only if `numbers`.

    >>> facts((2, "r0"), torch.tensor([1, 2, 3]), Structure.from_lengths(torch.tensor([1, 2])), NO_HINTS, numbers=False)[-1]
    'lengths=[1, 2]'
    """
    found = [f"shape={shape}", f"dtype={values.dtype}", f"device={values.device}", f"lengths={lengths_text(structure)}"]
    if numbers:
        found.append(f"values={_first_numbers(values, structure)}")
    if structure.format != "csr":
        found.append(f"format={structure.format}")
    if hints != NO_HINTS:
        found.append(f"hints=({', '.join(f'{name}={word}' for name, word in hints.as_dict().items())})")
    if values.requires_grad:
        found.append("requires_grad=True")
    return found


def lengths_text(structure: Structure) -> str:
    """The first lengths of every ragged dim; `>` precedes an inner level, `x` columns, `and` another dim.

    >>> lengths_text(Structure.from_lengths(torch.tensor([2, 1]), torch.tensor([4, 0, 5])))
    '[2, 1] > [4, 0, 5]'
    """
    texts = []
    for rows in structure.rows:
        levels = [_first_lengths(rows, level) for level in range(rows.levels)]
        if all(level is None for level in levels):
            texts.append(_UNREAD)
            continue
        shown = [_UNREAD if level is None else level for level in levels]
        text = " > ".join(shown[: rows.depth])
        texts.append(text if rows.columns is None else f"{text} x {shown[-1]}")
    return _UNREAD if set(texts) == {_UNREAD} else " and ".join(texts)


def number_texts(numbers: Tensor) -> list[str]:
    """The elements of a small tensor on the CPU, each with at most four digits.

    >>> number_texts(torch.tensor([1.0, 0.5, 1 / 3]))
    ['1', '0.5', '0.3333']
    """
    flat = numbers.reshape(-1)
    if numbers.dtype.is_floating_point:
        return [f"{number:.4g}" for number in flat.to(torch.float64).tolist()]
    if numbers.dtype.is_complex:
        return [f"{number:.4g}" for number in flat.to(torch.complex128).tolist()]
    return [str(number) for number in flat.tolist()]


def first_numbers(values: Tensor) -> str:
    """The first elements of values whose numbers may be read, as text.

    >>> first_numbers(torch.arange(40))
    '0, 1, 2, 3, 4, 5, ...'
    """
    shown = host_copy(values.detach().reshape(-1)[:_NUMBERS], "repr")
    return _listed(number_texts(shown), values.numel())[1:-1] if _has_numbers(shown) else _UNREAD


def columns_of(lines: list[tuple[str, ...]], right: Collection[int]) -> str:
    """Lines of cells in aligned columns, each line after a line break; the columns `right` end together.

    >>> columns_of([("key", "rows"), ("user", "12")], right=(1,))
    '\\n  key   rows\\n  user    12'
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [cell.rjust(n) if k in right else cell.ljust(n) for k, (cell, n) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    )
    return "".join(f"\n  {'  '.join(line)}".rstrip(" ") for line in padded)


def _first_lengths(rows: Rows, level: int) -> str | None:
    if rows.readable():
        shown = rows.host_offsets(level, "repr")[: _LENGTHS + 1]
    else:
        shown = rows.offsets[level][: _LENGTHS + 1]
        if not may_copy(shown):
            return None
        shown = host_copy(shown, "repr")
    if not _has_numbers(shown):
        return None
    return _listed([str(length) for length in shown.diff().tolist()], rows.num_rows(level))


def _first_numbers(values: Tensor, structure: Structure) -> str:
    shown, count = values.detach(), values.numel()
    if structure.format != "csr":
        if not all(rows.readable() and may_copy(rows.row_starts()) for rows in structure.rows):
            return _UNREAD
        shown, count = _first_row(shown, structure), _scalars(values, structure)
    # Slice every dim before flattening, so that non-contiguous values are not copied whole.
    for dim in range(shown.dim()):
        shown = shown.narrow(dim, 0, min(_NUMBERS, shown.shape[dim]))
    shown = shown.reshape(-1)[:_NUMBERS]
    if not may_copy(shown):
        return _UNREAD
    shown = host_copy(shown, "repr")
    return _listed(number_texts(shown), count) if _has_numbers(shown) else _UNREAD


def _first_row(values: Tensor, structure: Structure) -> Tensor:
    """The first non-empty row. Used if the values have holes, which are not shown."""
    for dim, rows in zip(structure.dims, structure.rows, strict=True):
        sizes = rows.host_sizes("repr")
        if rows.columns is not None:
            sizes = sizes * rows.host_lengths(rows.depth, "repr")
        filled = sizes.nonzero()
        if not len(filled):
            return values.narrow(dim, 0, 0)
        first = int(filled[0])
        values = values.narrow(dim, int(rows.host_row_starts("repr")[first]), int(rows.host_sizes("repr")[first]))
        if rows.storage_dims == 2:
            values = values.narrow(dim + 1, 0, int(rows.host_lengths(rows.depth, "repr")[first]))
    return values


def _scalars(values: Tensor, structure: Structure) -> int:
    regular = (values.shape[dim.values_dim] for dim in structure.dims_of(values.dim()) if dim.axis is None)
    return structure.total_elements(why="repr") * math.prod(regular)


def _has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor on the CPU has data to read; inside torch's transforms, and while it traces, it has none."""
    try:
        tensor.tolist()
    except RuntimeError:
        return False
    return True


def _listed(shown: list[str], count: int) -> str:
    return f"[{', '.join(shown)}{', ...' if count > len(shown) else ''}]"


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
        # Every dim multiplies the number of lines, so tensors with many dims show less of each.
        shown = _shown(values.detach(), structure, 3 if len(shape) <= 3 else 2)
    except RuntimeError:
        # Inside torch's transforms, and while it traces, there is no data to show; the repr says so.
        return preview(shape, values, structure, hints)
    texts = iter(_aligned(list(_numbers(shown)), values.dtype))
    indent = " " * len(_OPEN)
    rows = _block(shown, len(shape), texts, indent + " ")
    facts_of = ", ".join(facts(shape, values, structure, hints, numbers=False))
    return f"{_OPEN}{rows},\n{indent}{facts_of})"


def _shown(values: Tensor, structure: Structure | None, edge: int) -> list[Any]:
    """The first and last items of every dim as nested lists of numbers; None marks what is left out."""
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
    """The number format for these magnitudes, as in torch: integral, four digits, or an exponent."""
    least, most = min((size for size in sizes if size), default=1.0), max(sizes, default=0.0)
    if all(size.is_integer() for size in sizes) and most < 1e8:
        return "{:.0f}."
    return "{:.4e}" if most > 1e8 or least < 1e-4 or most / least > 1e5 else "{:.4f}"


def _block(shown: list[Any], dims: int, texts: Iterator[str], indent: str) -> str:
    if dims == 1:
        return f"[{', '.join('...' if number is None else next(texts) for number in shown)}]"
    parts = ["..." if part is None else _block(part, dims - 1, texts, indent + " ") for part in shown]
    # An empty line separates blocks of lines.
    between = ",\n" if dims == 2 else ",\n\n"
    return f"[{(between + indent).join(parts)}]"
