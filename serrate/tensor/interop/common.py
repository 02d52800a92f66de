"""Shared by all conversions: whether values are copied, with which warning, and which structures a format can hold.

In: the name of a bridge, `copy=`, a structure. Out: shared or copied values; an error that says what the format cannot hold.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from serrate.errors import CopyError, CopyWarning, FormatError, GradientError, PackageMissing
from serrate.ir.view import users_level
from serrate.tensor.rows import Rows
from serrate.tensor.structure import Structure
from serrate.tensor.sync import host_copy


@dataclass(frozen=True)
class Copying:
    """The caller's `copy=`: None shares if possible and warns otherwise, True always copies, False raises rather than copy.

    >>> Copying("to_arrow", copy=False).forced("arrow packs bools into bits")
    Traceback (most recent call last):
    serrate.errors.CopyError: to_arrow: copy=False, but arrow packs bools into bits: allow the copy with copy=True
    """

    bridge: str
    copy: bool | None

    def forced(self, reason: str) -> None:
        """Reports that the values must be copied, and why: raises, warns or does nothing, depending on `copy`."""
        if self.copy is False:
            raise CopyError(f"{self.bridge}: copy=False, but {reason}: allow the copy with copy=True")
        if self.copy is None:
            text = f"{self.bridge} copied the values: {reason} (copy=True silences this)"
            warnings.warn(text, CopyWarning, stacklevel=users_level())

    def kept(self, values: Tensor) -> Tensor:
        """Values that could be shared: themselves, or a copy if `copy=True`.

        >>> import torch
        >>> values = torch.zeros(2)
        >>> Copying("from_numpy", copy=None).kept(values) is values
        True
        """
        return values.clone() if self.copy else values

    def on_cpu(self, values: Tensor, peer: str) -> Tensor:
        """Values on the CPU without gradients, for libraries that support neither devices nor gradients.

        >>> import torch
        >>> Copying("to_numpy", copy=None).on_cpu(torch.zeros(2, requires_grad=True), "numpy")
        Traceback (most recent call last):
        serrate.errors.GradientError: to_numpy: numpy keeps no gradients, and the values require them: call jt.detach() first
        """
        if values.requires_grad:
            raise GradientError(f"{self.bridge}: {peer} keeps no gradients, and the values require them: call jt.detach() first")
        if values.is_cpu:
            return values
        self.forced(f"the values are on {values.device}")
        return host_copy(values, self.bridge)


def composition(structure: Structure) -> str:
    """A description of the structure for error messages.

    >>> import torch
    >>> composition(Structure.from_lengths(torch.tensor([1, 2])).with_columns(torch.tensor([3, 1])))
    'rows with columns'
    """
    if structure.ahead is not None:
        return f"{composition(structure.canonical)} with regular dims before them"
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
        raise _refused(bridge, structure, "convert the tensors of jt.unbind(), which have one partitioned dim less")
    if first and structure.dims != (0,):
        dim = structure.dims[0]
        raise _refused(bridge, structure, f"move the dim to the front, in jt.values.movedim({dim}, 0) and in its structure")
    if first and structure.ahead is not None:
        raise _refused(
            bridge, structure, "permute the dims so that every ragged dim comes right after the dim that counts its rows"
        )
    return structure.rows[0]


def rows_of_one_level(bridge: str, structure: Structure, *, first: bool = True, columns: bool = False) -> Rows:
    """The rows of a structure that are not nested; with columns only if `columns`.

    >>> import torch
    >>> rows_of_one_level("to_cu_seqlens", Structure.from_lengths(torch.tensor([1]), torch.tensor([2])))
    Traceback (most recent call last):
    serrate.errors.FormatError: to_cu_seqlens: the format cannot hold nested rows of 2 levels: JaggedTensor.from_csr(jt.values, jt.offsets) has the innermost rows as one level
    """  # noqa: E501 -- an example shows the whole message
    rows = rows_of_one_dim(bridge, structure, first=first)
    if rows.columns is not None and not columns:
        raise _refused(bridge, structure, "use to_torch_nested(layout='strided'), to_arrow(), to_awkward() or to_padded()")
    if rows.depth > 1 and rows.columns is not None:
        raise _refused(bridge, structure, "convert the tensors of jt.unbind(), which have one level less")
    if rows.depth > 1:
        raise _refused(bridge, structure, "JaggedTensor.from_csr(jt.values, jt.offsets) has the innermost rows as one level")
    return rows


def package(bridge: str, name: str) -> ModuleType:
    """Imports an optional dependency.

    >>> package("from_arrow", "a_package_that_is_not_there")
    Traceback (most recent call last):
    serrate.errors.PackageMissing: from_arrow needs the package a_package_that_is_not_there: pip install 'serrate[interop]'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PackageMissing(f"{bridge} needs the package {name.partition('.')[0]}: pip install 'serrate[interop]'") from error


def _refused(bridge: str, structure: Structure, instead: str) -> FormatError:
    return FormatError(f"{bridge}: the format cannot hold {composition(structure)}: {instead}")
