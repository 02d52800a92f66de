"""A short text for a ragged tensor, however large it is: its `repr`.

In: a ragged tensor's shape, values, structure and hints. Out: one line with a few lengths of every ragged dim and a few
numbers. What is read is a few elements; where even that would need a forbidden copy, the line says so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
    """What a repr says, fact by fact; the first numbers of the values only if they are asked for.

    >>> facts((2, "r0"), torch.tensor([1, 2, 3]), Structure.from_lengths(torch.tensor([1, 2])), NO_HINTS, numbers=False)[-1]
    'lengths=[1, 2]'
    """
    found = [f"shape={shape}", f"dtype={values.dtype}", f"device={values.device}", f"lengths={lengths_text(structure)}"]
    if numbers:
        found.append(f"values={_first_numbers(values, structure)}")
    if structure.format != "csr":
        found.append(f"format={structure.format}")
    if hints != NO_HINTS:
        found.append(f"hints=({', '.join(f'{name}={word}' for name, word in hints.told().items())})")
    if values.requires_grad:
        found.append("requires_grad=True")
    return found


def lengths_text(structure: Structure) -> str:
    """The first lengths of every ragged dim: `>` leads to an inner level, `x` to the columns of rows, `and` to another dim.

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
    """The elements of a small tensor on the CPU, each as short as four digits allow.

    >>> number_texts(torch.tensor([1.0, 0.5, 1 / 3]))
    ['1', '0.5', '0.3333']
    """
    flat = numbers.reshape(-1)
    if numbers.dtype.is_floating_point:
        return [f"{number:.4g}" for number in flat.to(torch.float64).tolist()]
    if numbers.dtype.is_complex:
        return [f"{number:.4g}" for number in flat.to(torch.complex128).tolist()]
    return [str(number) for number in flat.tolist()]


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
        if not all(rows.readable() and may_copy(rows.where()) for rows in structure.rows):
            return _UNREAD
        shown, count = _first_row(shown, structure), _scalars(values, structure)
    # Every dim is cut before flattening, so that values that are not contiguous are not copied whole.
    for dim in range(shown.dim()):
        shown = shown.narrow(dim, 0, min(_NUMBERS, shown.shape[dim]))
    shown = shown.reshape(-1)[:_NUMBERS]
    if not may_copy(shown):
        return _UNREAD
    shown = host_copy(shown, "repr")
    return _listed(number_texts(shown), count) if _has_numbers(shown) else _UNREAD


def _first_row(values: Tensor, structure: Structure) -> Tensor:
    """The first row that has elements, of values with holes: holes are no elements, and are not shown."""
    for dim, rows in zip(structure.dims, structure.rows, strict=True):
        sizes = rows.host_sizes("repr")
        if rows.columns is not None:
            sizes = sizes * rows.host_lengths(rows.depth, "repr")
        filled = sizes.nonzero()
        if not len(filled):
            return values.narrow(dim, 0, 0)
        first = int(filled[0])
        values = values.narrow(dim, int(rows.host_where("repr")[first]), int(rows.host_sizes("repr")[first]))
        if rows.takes == 2:
            values = values.narrow(dim + 1, 0, int(rows.host_lengths(rows.depth, "repr")[first]))
    return values


def _scalars(values: Tensor, structure: Structure) -> int:
    regular = (values.shape[dim.values_dim] for dim in structure.dims_of(values.dim()) if dim.axis is None)
    return structure.total_elements(why="repr") * math.prod(regular)


def _has_numbers(tensor: Tensor) -> bool:
    """Whether torch has numbers for a tensor on the CPU: inside its transforms, and while it traces, it has none."""
    try:
        tensor.tolist()
    except RuntimeError:
        return False
    return True


def _listed(shown: list[str], count: int) -> str:
    return f"[{', '.join(shown)}{', ...' if count > len(shown) else ''}]"
