"""Single numpy arrays as tensors and back, sharing memory.

In: an array or a tensor on the CPU. Out: the other of the two, or a DtypeError for what the other side has no dtype for.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from serrate.errors import DtypeError
from serrate.tensor.interop.copying import Copying

_KINDS = "biufc"


def tensor_of(array: Any, copying: Copying) -> Tensor:
    """The tensor of an array's numbers: shared, even if the array is read-only; then it is not to be written into.

    >>> import numpy
    >>> tensor_of(numpy.arange(3), Copying("from_numpy", None))
    tensor([0, 1, 2])
    """
    if array.dtype.kind not in _KINDS or array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
        raise DtypeError(f"{copying.bridge}: a tensor cannot hold {array.dtype}: convert the array to numbers first")
    if not array.dtype.isnative:
        copying.forced("the bytes of its numbers are in another order than this machine's")
        return _shared(array.astype(array.dtype.newbyteorder("=")))
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        copying.forced("tensors cannot step through memory as this array does")
        return _shared(array.copy())
    return copying.kept(_shared(array))


def offsets_of(array: Any) -> Tensor:
    """Boundaries or lengths as int32 or int64: shared where the array is of these dtypes and has no gaps.

    >>> import numpy
    >>> offsets_of(numpy.array([0, 2], dtype=numpy.uint32)).dtype
    torch.int64
    """
    if array.dtype.kind in "iu" and array.dtype.str[1:] not in ("i4", "i8"):
        array = array.astype("int64")
    return _shared(array if array.dtype.isnative and all(step > 0 for step in array.strides) else array.astype(array.dtype.type))


def array_of(values: Tensor, copying: Copying) -> Any:
    """The numpy array that shares a tensor on the CPU.

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
        # torch warns of every read-only array, which arrays of other libraries usually are.
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        return torch.from_numpy(array)
