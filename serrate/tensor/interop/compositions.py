"""What a structure is made of, in words, and the refusal of what another format cannot hold.

In: a structure and what the other side can hold. Out: the structure's rows, or a FormatError that says what to do.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from serrate.errors import FormatError, PackageMissing
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure


def composition(structure: Structure) -> str:
    """The structure's composition in words.

    >>> import torch
    >>> composition(Structure.from_lengths(torch.tensor([1, 2])).with_columns(torch.tensor([3, 1])))
    'rows with columns'
    """
    if len(structure.rows) > 1:
        return f"rows of the dims {' and '.join(map(str, structure.dims))}"
    rows = structure.rows[0]
    if rows.columns is not None:
        return f"nested rows of {rows.depth} levels with columns" if rows.depth > 1 else "rows with columns"
    if rows.depth > 1:
        return f"nested rows of {rows.depth} levels"
    return f"rows of dim {structure.dims[0]}" if structure.dims[0] else "rows of one level"


def rows_of_one_dim(bridge: str, structure: Structure, *, first: bool = True) -> Rows:
    """The rows of a structure that partitions a single dim, the first one if `first`."""
    if len(structure.rows) > 1:
        raise _refused(bridge, structure, "convert what jt.unbind() gives, which has one partitioned dim less")
    if first and structure.dims != (0,):
        dim = structure.dims[0]
        raise _refused(bridge, structure, f"move the dim to the front, in jt.values.movedim({dim}, 0) and in its structure")
    return structure.rows[0]


def rows_of_one_level(bridge: str, structure: Structure, *, first: bool = True, columns: bool = False) -> Rows:
    """The rows of a structure that are not nested; with columns only if `columns`.

    >>> import torch
    >>> rows_of_one_level("to_cu_seqlens", Structure.from_lengths(torch.tensor([1]), torch.tensor([2])))
    Traceback (most recent call last):
    serrate.errors.FormatError: to_cu_seqlens: nested rows of 2 levels cannot be held: JaggedTensor.from_csr(jt.values, jt.offsets) has the innermost rows as one level
    """  # noqa: E501 -- an example shows the whole message
    rows = rows_of_one_dim(bridge, structure, first=first)
    if rows.columns is not None and not columns:
        raise _refused(bridge, structure, "take to_torch_nested(layout='strided'), to_arrow(), to_awkward() or to_padded()")
    if rows.depth > 1 and rows.columns is not None:
        raise _refused(bridge, structure, "convert what jt.unbind() gives, which has one level less")
    if rows.depth > 1:
        raise _refused(bridge, structure, "JaggedTensor.from_csr(jt.values, jt.offsets) has the innermost rows as one level")
    return rows


def package(bridge: str, name: str) -> ModuleType:
    """Another library, imported only now because it need not be installed.

    >>> package("from_arrow", "a_package_that_is_not_there")
    Traceback (most recent call last):
    serrate.errors.PackageMissing: from_arrow needs the package a_package_that_is_not_there: pip install 'serrate[interop]'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PackageMissing(f"{bridge} needs the package {name.partition('.')[0]}: pip install 'serrate[interop]'") from error


def _refused(bridge: str, structure: Structure, instead: str) -> FormatError:
    return FormatError(f"{bridge}: {composition(structure)} cannot be held: {instead}")
