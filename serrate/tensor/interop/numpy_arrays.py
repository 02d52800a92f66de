"""numpy: values and offsets as arrays, and rows as arrays in a list or an object array.

In: arrays, or values with a structure. Out: values with a structure, or an object array of rows.
Values in one array are shared, and so are the rows returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, DtypeError
from serrate.tensor.components import take_all
from serrate.tensor.interop.common import Copying, package
from serrate.tensor.lists import from_lists
from serrate.tensor.structure import Structure

_KINDS = "biufc"


def tensor_of(array: Any, copying: Copying) -> Tensor:
    """An array as a tensor that shares its memory, even if the array is read-only (do not write to the tensor then).

    >>> import numpy
    >>> tensor_of(numpy.arange(3), Copying("from_numpy", None))
    tensor([0, 1, 2])
    """
    if array.dtype.kind not in _KINDS or array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
        raise DtypeError(f"{copying.bridge}: a tensor cannot hold {array.dtype}: convert the array to numbers first")
    if not array.dtype.isnative:
        copying.forced("its byte order is not this machine's")
        return _shared(array.astype(array.dtype.newbyteorder("=")))
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        copying.forced("tensors cannot have this array's strides")
        return _shared(array.copy())
    return copying.kept(_shared(array))


def offsets_of(array: Any) -> Tensor:
    """Offsets or lengths as int32 or int64; shared if the array has one of these dtypes and is contiguous.

    >>> import numpy
    >>> offsets_of(numpy.array([0, 2], dtype=numpy.uint32)).dtype
    torch.int64
    """
    if array.dtype.kind in "iu" and array.dtype.str[1:] not in ("i4", "i8"):
        array = array.astype("int64")
    return _shared(array if array.dtype.isnative and all(step > 0 for step in array.strides) else array.astype(array.dtype.type))


def array_of(values: Tensor, copying: Copying) -> Any:
    """A numpy array that shares the memory of a tensor on the CPU.

    >>> array_of(torch.zeros(1, dtype=torch.bfloat16), Copying("to_numpy", None))
    Traceback (most recent call last):
    serrate.errors.DtypeError: to_numpy: numpy has no dtype for torch.bfloat16: convert first, e.g. with jt.to(torch.float32)
    """
    values = values.resolve_conj().resolve_neg()
    try:
        return values.numpy()
    except TypeError:
        raise DtypeError(
            f"{copying.bridge}: numpy has no dtype for {values.dtype}: convert first, e.g. with jt.to(torch.float32)"
        ) from None


def _shared(array: Any) -> Tensor:
    with warnings.catch_warnings():
        # torch warns about read-only arrays, which other libraries' arrays usually are.
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        return torch.from_numpy(array)


def from_numpy(values: Any, offsets: Any, copying: Copying) -> tuple[Tensor, Structure]:
    """Values and structure of an array with its offsets (several for nested rows), or of arrays in a list.

    >>> import numpy
    >>> from_numpy(numpy.zeros(3), numpy.array([0, 1, 3]), Copying("from_numpy", None))[1]
    Structure(2 > 3)
    """
    numpy = package(copying.bridge, "numpy")
    if offsets is None:
        if isinstance(values, numpy.ndarray) and values.dtype != object:
            raise CallError("from_numpy: a single array needs offsets=; rows in separate arrays go in a list or an object array")
        if not isinstance(values, (list, tuple, numpy.ndarray)):
            raise CallError(f"from_numpy takes an array with offsets, or a list of arrays, got {type(values).__name__}")
        copying.forced("rows in separate arrays must be concatenated")
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
    """An object array with one array per row, or one object array per row if rows are ragged themselves.

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
    """The same nesting as lists, with a tensor for every numeric array."""
    if isinstance(items, numpy.ndarray) and items.dtype != object:
        # They are copied anyway, so unsupported strides need no second warning.
        return tensor_of(items.astype(items.dtype.newbyteorder("="), order="C", copy=False), copying)
    if isinstance(items, (list, tuple, numpy.ndarray)):
        return [_as_lists(item, numpy, copying) for item in items]
    return items


def _is_numbers(offsets: Sequence[Any]) -> bool:
    return not offsets or not hasattr(offsets[0], "__len__")
