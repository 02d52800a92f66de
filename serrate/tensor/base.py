"""The state and metadata of a ragged tensor: values, structure and hints; shape, sizes and lengths.

In: values with a structure that fits them. Out: `JaggedBase`, the part of `JaggedTensor` that its helper modules use (they cannot
import the class itself), and `RaggedSize`, the size of a ragged dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never, NoReturn, Self

import torch
from torch import Tensor

from serrate.errors import CallError, RaggedSizeError, ShapeError
from serrate.tensor.components import count
from serrate.tensor.foreign_names import refuse_recurrent
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.structure import Dim, Structure


class RaggedSize:
    """The result of `jt.size(dim)` for a ragged dim. Two are equal if their structures are equal and they name the same level.

    >>> import torch
    >>> size = RaggedSize(Structure.from_lengths(torch.tensor([3, 1])), 0)
    >>> size
    r0
    >>> int(size)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    serrate.errors.RaggedSizeError: r0 is the size of a ragged dim and differs from row to row: use ...
    """

    __slots__ = ("level", "structure")

    structure: Structure
    level: int

    def __init__(self, structure: Structure, level: int) -> None:
        self.structure = structure
        self.level = level

    def __repr__(self) -> str:
        return f"r{self.level}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedSize):
            return NotImplemented
        return self.level == other.level and self.structure.canonical == other.structure.canonical

    def __hash__(self) -> int:
        return hash((self.level, self.structure.canonical))

    def __index__(self) -> NoReturn:
        raise RaggedSizeError(
            f"{self} is the size of a ragged dim and differs from row to row: use jt.lengths for every row's, "
            "or jt.max_length for the longest"
        )

    __int__ = __index__
    __float__ = __index__

    def _refuse_arithmetic(self, other: object) -> NoReturn:
        self.__index__()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_arithmetic
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse_arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = _refuse_arithmetic


class JaggedBase:
    """Values, a structure and hints. Metadata describes the innermost rows; `jt.structure` has it for every level."""

    __slots__ = ("__weakref__", "_hints", "_structure", "_values")

    _values: Tensor
    _structure: Structure
    _hints: Hints

    def __init__(self, values: Tensor, structure: Structure | None = None, *, hints: Hints = NO_HINTS, **unknown: Never) -> None:
        if not isinstance(structure, Structure) or unknown:
            raise _bad_constructor_call(values, structure, unknown)
        structure.check_values(values)
        self._values = values
        self._structure = structure
        self._hints = hints

    @classmethod
    def _trusted(cls, values: Tensor, structure: Structure, hints: Hints = NO_HINTS) -> Self:
        """A ragged tensor whose values are known to fit the structure; nothing is checked.

        >>> from serrate import JaggedTensor
        >>> jt = JaggedTensor.from_lengths(torch.zeros(3), [2, 1])
        >>> JaggedTensor._trusted(torch.arange(3), jt.structure).unbind()
        (tensor([0, 1]), tensor([2]))
        """
        jt = cls.__new__(cls)
        jt._values, jt._structure, jt._hints = values, structure, hints
        return jt

    @property
    def values(self) -> Tensor:
        """The storage of all elements. `jt.transpose(1, 2)` of a `[B, r0, H, D]` has the same values, `[total, H, D]`: a ragged
        dim that comes after regular ones in the tensor comes before them here."""
        return self._values

    @property
    def structure(self) -> Structure:
        """The structure, which assigns values to rows."""
        return self._structure

    @property
    def offsets(self) -> Tensor:
        """The innermost offsets: the running sum of the lengths, and the row boundaries if rows lie back to back."""
        return self._structure.offsets[-1]

    @property
    def lengths(self) -> Tensor:
        """The innermost lengths; `jt.structure.lengths(level)` has those of another level."""
        return self._structure.lengths()

    @property
    def starts(self) -> Tensor:
        """The position in the values at which each innermost row starts: its offset, if rows lie back to back."""
        return self._structure.rows[-1].row_starts()

    @property
    def hints(self) -> Hints:
        """The hints given to `with_hint`."""
        return self._hints

    @property
    def format(self) -> str:
        """The storage format: `csr` (rows back to back), `padded` (every row takes the same space), or `gaps` (anything else)."""
        return self._structure.format

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """The device of values and offsets."""
        return self._values.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are recorded for the values."""
        return self._values.requires_grad

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The kind of every dim: regular, a count of rows, or ragged."""
        return self._structure.dims_of(self._values.dim())

    @property
    def ndim(self) -> int:
        """The number of dims, ragged ones included: 3 for `[B, r0, D]`."""
        return self._values.dim() + sum(rows.levels + 1 - rows.storage_dims for rows in self._structure.rows)

    @property
    def shape(self) -> tuple[int | RaggedSize, ...]:
        """The size of every dim; a ragged one is a symbol."""
        return tuple(self._size(dim) for dim in self.dims)

    @property
    def jagged_dims(self) -> tuple[int, ...]:
        """Which dims are ragged."""
        return tuple(k for k, dim in enumerate(self.dims) if dim.ragged is not None)

    @property
    def num_rows(self) -> int:
        """The number of innermost rows; `len(jt)` is the number of outermost ones."""
        return self._structure.num_rows()

    @property
    def num_groups(self) -> int:
        """The number of outermost components: experts, documents, sequences."""
        return self._structure.num_rows(0)

    @property
    def max_length(self) -> int:
        """The longest innermost row."""
        return self._structure.max_length()

    @property
    def min_length(self) -> int:
        """The shortest innermost row."""
        return self._structure.min_length()

    @property
    def total_elements(self) -> int:
        """The number of positions that exist; each may hold many scalars."""
        return self._structure.total_elements()

    @property
    def sparsity(self) -> float:
        """Mean length of the innermost rows divided by the longest."""
        return self._structure.sparsity()

    @property
    def variance(self) -> float:
        """The population variance of the innermost lengths."""
        return self._structure.variance()

    def dim(self) -> int:
        """The number of dims, as `ndim`."""
        return self.ndim

    def size(self, dim: int | None = None) -> int | RaggedSize | tuple[int | RaggedSize, ...]:
        """The size of a dim; a ragged dim's is a symbol, not an int. Negative dims count from the end; without `dim`, all sizes.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(3, 4)]).size(1)
        r0
        """
        if dim is None:
            return self.shape
        values = self._values
        dims = self._structure.dims_of(values.dim())
        if not -len(dims) <= dim < len(dims):
            raise ShapeError(f"dim {dim} does not exist: the tensor has {len(dims)} dims")
        found = dims[dim]
        size = values.shape[found.values_dim] if found.axis is None else self._size(found)
        if type(size) is RaggedSize:
            refuse_recurrent(size)
        return size

    def is_ragged(self, dim: int) -> bool:
        """Whether a dim has a different size in each row.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(3, 4)]).is_ragged(1)
        True
        """
        return self.dims[self._dim(dim)].ragged is not None

    def numel(self) -> int:
        """The number of scalars that exist; holes are not counted.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(3, 4), torch.zeros(1, 4)]).numel()
        16
        """
        scalars = self._structure.total_elements(why="numel")
        for dim in self.dims:
            if dim.axis is None:
                scalars *= self._values.shape[dim.values_dim]
        return scalars

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise ShapeError(f"dim {dim} does not exist: the tensor has {self.ndim} dims")
        return dim % self.ndim

    def _size(self, dim: Dim) -> int | RaggedSize:
        if dim.ragged is not None:
            return RaggedSize(self._structure, dim.ragged)
        if dim.axis is not None:
            return self._structure.rows[dim.axis].num_rows(0)
        return self._values.shape[dim.values_dim]

    def __len__(self) -> int:
        return count(self._values, self._structure)


def _bad_constructor_call(values: Any, structure: Any, unknown: Mapping[str, Any]) -> CallError:
    # People try the constructors of other libraries: offsets and lengths by name, or rows alone.
    if unknown:
        got = ", ".join(f"{name}=" for name in unknown)
    elif structure is not None:
        got = f"a {type(structure).__name__} as its structure"
    else:
        got = f"a {type(values).__name__} alone"
    return CallError(
        f"JaggedTensor(values, structure) takes a tensor and a Structure, got {got}: use JaggedTensor.from_csr(values, offsets), "
        "from_lengths(values, lengths), from_list(rows), from_nested_list(numbers) or from_padded(x, lengths)"
    )
