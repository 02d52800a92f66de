"""numpy: values and offsets as arrays, and rows as arrays in a list or in an array of objects.

In: arrays, or values with a structure. Out: values with a structure, or an array of objects whose items are the rows.
Values that are one array are shared, and so are the rows that come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from serrate.errors import CallError
from serrate.tensor.interop.arrays import array_of, offsets_of, tensor_of
from serrate.tensor.interop.compositions import package
from serrate.tensor.interop.copying import Copying
from serrate.tensor.lists import from_lists
from serrate.tensor.structure import Structure
from serrate.tensor.taking import take_all


def from_numpy(values: Any, offsets: Any, copying: Copying) -> tuple[Tensor, Structure]:
    """Values and structure of an array with its offsets (a chain of them for nested rows), or of arrays in a list.

    >>> import numpy
    >>> from_numpy(numpy.zeros(3), numpy.array([0, 1, 3]), Copying("from_numpy", None))[1]
    Structure(2 > 3)
    """
    numpy = package(copying.bridge, "numpy")
    if offsets is None:
        if isinstance(values, numpy.ndarray) and values.dtype != object:
            raise CallError("from_numpy: one array needs offsets=, rows in separate arrays a list or an array of objects")
        if not isinstance(values, (list, tuple, numpy.ndarray)):
            raise CallError(f"from_numpy takes an array with offsets, or a list of arrays, got {type(values).__name__}")
        copying.forced("rows in separate arrays are put back to back")
        return from_lists(_as_lists(values, numpy, Copying(copying.bridge, None)), dtype=None, device=None)
    if not isinstance(values, numpy.ndarray):
        raise CallError(f"from_numpy: offsets= go with one array of values, got {type(values).__name__}")
    chain = offsets if isinstance(offsets, (list, tuple)) and not _is_numbers(offsets) else [offsets]
    tensor = tensor_of(values, copying)
    structure = Structure.from_offsets(
        *(offsets_of(numpy.asarray(level)) for level in chain), total=tensor.shape[0] if tensor.dim() else None
    )
    return tensor, structure


def to_numpy(values: Tensor, structure: Structure, copying: Copying) -> Any:
    """An array of objects, one for each row: its array, or an array of objects where rows are ragged themselves.

    >>> import torch
    >>> to_numpy(torch.arange(3), Structure.from_lengths(torch.tensor([1, 2])), Copying("to_numpy", None))
    array([array([0]), array([1, 2])], dtype=object)
    """
    numpy = package(copying.bridge, "numpy")
    values = copying.on_cpu(values, "numpy")
    array_of(values[:0], copying)
    return _rows(copying.kept(values), structure, copying, numpy)


def _rows(values: Tensor, structure: Structure, copying: Copying, numpy: Any) -> Any:
    pieces = take_all(values, structure, copying.bridge)
    found = numpy.empty(len(pieces), dtype=object)
    for row, (piece, inner) in enumerate(pieces):
        found[row] = array_of(piece, copying) if inner is None else _rows(piece, inner, copying, numpy)
    return found


def _as_lists(items: Any, numpy: Any, copying: Copying) -> Any:
    """The same nesting in lists, with a tensor for every array of numbers."""
    if isinstance(items, numpy.ndarray) and items.dtype != object:
        # They are copied in any case; what a tensor cannot step through is no reason for another warning.
        return tensor_of(items.astype(items.dtype.newbyteorder("="), order="C", copy=False), copying)
    if isinstance(items, (list, tuple, numpy.ndarray)):
        return [_as_lists(item, numpy, copying) for item in items]
    return items


def _is_numbers(offsets: Sequence[Any]) -> bool:
    return not offsets or not hasattr(offsets[0], "__len__")
