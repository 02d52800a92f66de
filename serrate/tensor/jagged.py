"""`JaggedTensor`: values with the structure that says which of them belong to which row.

In: values and offsets, lengths, padded values or lists of rows. Out: a ragged tensor, its rows, and its conversions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, ShapeError
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.levels import Levels, as_tensors
from serrate.tensor.padding import check_padded, pad, unpad
from serrate.tensor.preview import preview
from serrate.tensor.rows import flatten_nested, gather_rows, split_rows
from serrate.tensor.sizes import RaggedSize
from serrate.tensor.structure import PerLevel, Structure
from serrate.tensor.sync import host_copy, on_host

_operators: dict[Callable[..., Any], Callable[..., Any]] = {}


def install_operators(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Teaches torch functions to take a JaggedTensor: each key is a torch function, each value what runs instead.

    >>> install_operators({torch.numel: lambda jt: jt.values.numel()})
    >>> torch.numel(JaggedTensor.from_list([torch.zeros(2), torch.zeros(1)]))
    3
    """
    _operators.update(functions)


class JaggedTensor:
    """Rows of different lengths, back to back in `values`; a one-level tensor of shape `[B, r0, *inner]` is

        rows = [values[offsets[b]:offsets[b + 1]] for b in range(B)]

    and a two-level one of shape `[G, r0, r1, *inner]` is a list of such lists. Gradients belong to `values`.
    The constructor takes values and a structure; the `from_` class methods take everything else.

    >>> jt = JaggedTensor.from_list([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    >>> jt
    JaggedTensor(shape=(2, r0), dtype=torch.float32, device=cpu, lengths=[2, 1], values=[1, 2, 3])
    >>> jt[0]
    tensor([1., 2.])
    """

    __slots__ = ("__weakref__", "_hints", "_structure", "_values")

    _values: Tensor
    _structure: Structure
    _hints: Hints

    def __init__(self, values: Tensor, structure: Structure, *, hints: Hints = NO_HINTS) -> None:
        structure.check_values(values)
        self._values = values
        self._structure = structure
        self._hints = hints

    @classmethod
    def from_csr(
        cls,
        values: Tensor,
        offsets: Levels,
        *,
        dim: int = 0,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: bool | None = None,
    ) -> JaggedTensor:
        """Rows back to back with their offsets; nested rows with a chain of offsets, outermost first, or 2-D offsets.

        `max_length` and `min_length` spare a host copy later; `validate` is as for `Structure.from_offsets`.

        >>> JaggedTensor.from_csr(torch.arange(9), (torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))).shape
        (2, r0, r1)
        """
        if dim != 0:
            raise ShapeError(f"from_csr partitions dim 0 of the values, got dim={dim}: move the ragged dim to the front")
        structure = Structure.from_offsets(
            *as_tensors(offsets, values),
            total=values.shape[0],
            max_length=max_length,
            min_length=min_length,
            validate=validate,
        )
        return cls(values, structure.to(values.device))

    @classmethod
    def from_lengths(
        cls,
        values: Tensor,
        lengths: Levels,
        *,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: bool | None = None,
    ) -> JaggedTensor:
        """Rows back to back with their lengths; nested rows with the lengths of each level, outermost first, or 2-D lengths.

        >>> JaggedTensor.from_lengths(torch.arange(5), torch.tensor([2, 0, 3])).unbind()
        (tensor([0, 1]), tensor([], dtype=torch.int64), tensor([2, 3, 4]))
        """
        structure = Structure.from_lengths(
            *as_tensors(lengths, values),
            total=values.shape[0],
            max_length=max_length,
            min_length=min_length,
            validate=validate,
        )
        return cls(values, structure.to(values.device))

    @classmethod
    def from_list(cls, rows: Sequence[Tensor]) -> JaggedTensor:
        """One row for each tensor; the first dim of each is ragged, the others must agree. An empty list has 0 rows.

        >>> JaggedTensor.from_list([torch.zeros(3, 4), torch.zeros(1, 4)]).shape
        (2, r0, 4)
        """
        return cls(*gather_rows(rows, outer=()))

    @classmethod
    def from_nested_list(cls, rows: Sequence[Sequence[Any]]) -> JaggedTensor:
        """Rows of rows: a list of lists of tensors for two levels, and so on; every branch has the same depth.

        >>> JaggedTensor.from_nested_list([[torch.zeros(3), torch.zeros(1)], [], [torch.zeros(2)]]).shape
        (3, r0, r1)
        """
        return cls(*gather_rows(*flatten_nested(rows)))

    @classmethod
    def from_padded(cls, x: Tensor, lengths: Levels, *, total: int | None = None) -> JaggedTensor:
        """The rows of padded values `[B, L, *inner]`: the first `lengths[b]` positions of each, copied back to back.

        For two levels `x` is `[G, parts, L, *inner]` with `lengths` a pair (parts of each row, length of each part) or 2-D.
        The number of values is a host fact: on a device it takes a host copy of the lengths, unless `total` is given
        (then the lengths are trusted).

        >>> JaggedTensor.from_padded(torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])).values
        tensor([1, 2, 3])
        """
        tensors = as_tensors(lengths, x)
        readable = total is None or on_host(tensors[0])
        if readable and not on_host(tensors[0]):
            tensors = tuple(host_copy(level, "from_padded") for level in tensors)
        structure = Structure.from_lengths(*tensors, total=total)
        check_padded(x, structure, read_lengths=readable)
        structure = structure.to(x.device)
        return cls(unpad(x, structure), structure)

    @property
    def values(self) -> Tensor:
        """The storage of all elements, rows back to back."""
        return self._values

    @property
    def structure(self) -> Structure:
        """Which values belong to which row."""
        return self._structure

    @property
    def offsets(self) -> Tensor:
        """The innermost offsets: where each row starts in the values, and where the last one ends."""
        return self._structure.offsets[-1]

    @property
    def lengths(self) -> Tensor:
        """The innermost lengths."""
        return self._structure.lengths()

    @property
    def hints(self) -> Hints:
        """What `with_hint` was told."""
        return self._hints

    @property
    def format(self) -> str:
        """How the values are stored."""
        return "csr"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Where values and offsets are."""
        return self._values.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are recorded for the values."""
        return self._values.requires_grad

    @property
    def ndim(self) -> int:
        """The number of dims, ragged ones included: 3 for `[B, r0, D]`."""
        return self._structure.levels + self._values.dim()

    @property
    def shape(self) -> tuple[int | RaggedSize, ...]:
        """The size of every dim; a ragged one is a symbol."""
        ragged = (RaggedSize(self._structure, level) for level in range(self._structure.levels))
        return (len(self), *ragged, *self._values.shape[1:])

    @property
    def jagged_dims(self) -> tuple[int, ...]:
        """Which dims are ragged."""
        return tuple(range(1, self._structure.levels + 1))

    @property
    def num_rows(self) -> int:
        """The number of innermost rows; `len(jt)` is the number of outermost ones."""
        return self._structure.num_rows()

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
        """The number of positions in the values; each may hold many scalars."""
        return self._structure.total_elements()

    @property
    def sparsity(self) -> float:
        """Mean over longest length of the innermost rows."""
        return self._structure.sparsity()

    @property
    def variance(self) -> float:
        """The population variance of the innermost lengths."""
        return self._structure.variance()

    def size(self, dim: int) -> int | RaggedSize:
        """The size of a dim, counted from the end if negative; for a ragged dim a symbol that is no int.

        >>> JaggedTensor.from_list([torch.zeros(3, 4)]).size(1)
        r0
        """
        if not -self.ndim <= dim < self.ndim:
            raise ShapeError(f"dim {dim} does not exist: the tensor has {self.ndim} dims")
        return self.shape[dim]

    def unbind(self) -> tuple[Any, ...]:
        """The rows: tensors that share storage with the values, or for nested levels JaggedTensors of one level less.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).unbind()
        (tensor([0, 1]), tensor([2]))
        """
        if self._structure.levels == 1:
            return tuple(split_rows(self._values, self._structure, why="unbind"))
        return tuple(self._row(row, "unbind") for row in range(len(self)))

    def to_list(self) -> list[Any]:
        """The rows as a list of tensors, or as lists of lists of tensors for nested levels: the inverse of `from_list`.

        >>> JaggedTensor.from_lengths(torch.arange(3), [[2, 1]]).to_list()
        [[tensor([0, 1]), tensor([2])]]
        """
        return split_rows(self._values, self._structure, why="to_list")

    def to_padded(self, fill: complex = 0) -> Tensor:
        """A tensor `[B, longest, *inner]`, or `[G, most parts, longest, *inner]` for two levels, with `fill` in the holes.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_padded(fill=-1)
        tensor([[ 0,  1],
                [ 2, -1]])
        """
        return pad(self._values, self._structure, fill)

    def with_values(self, values: Tensor) -> JaggedTensor:
        """Other values with the same structure and hints.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).with_values(torch.zeros(3, 5)).shape
        (2, r0, 5)
        """
        return JaggedTensor(values, self._structure, hints=self._hints)

    def with_hint(
        self, *, distribution: str | None = None, access_pattern: str | None = None, reuse: str | None = None
    ) -> JaggedTensor:
        """The same tensor with advice for the tuner, beside what was advised before; see `Hints` for the words.

        >>> JaggedTensor.from_list([torch.zeros(2)]).with_hint(distribution="uniform", reuse="high").hints.reuse
        'high'
        """
        told = {"distribution": distribution, "access_pattern": access_pattern, "reuse": reuse}
        hints = replace(self._hints, **{name: word for name, word in told.items() if word is not None})
        return JaggedTensor(self._values, self._structure, hints=hints)

    def detach(self) -> JaggedTensor:
        """The same values, cut off from the gradient's history.

        >>> JaggedTensor.from_list([torch.zeros(2, requires_grad=True)]).detach().requires_grad
        False
        """
        return self.with_values(self._values.detach())

    def clone(self) -> JaggedTensor:
        """A copy of the values with the same structure, which never changes and is shared.

        >>> jt = JaggedTensor.from_list([torch.zeros(2)])
        >>> jt.clone().structure is jt.structure
        True
        """
        return self.with_values(self._values.clone())

    def to(self, *args: Any, **kwargs: Any) -> JaggedTensor:
        """On another device or with another dtype: the arguments of `torch.Tensor.to`. Offsets follow the device only.

        >>> JaggedTensor.from_list([torch.zeros(2)]).to(torch.float64).dtype
        torch.float64
        """
        values = self._values.to(*args, **kwargs)
        if values is self._values:
            return self
        return JaggedTensor(values, self._structure.to(values.device), hints=self._hints)

    def __len__(self) -> int:
        return self._structure.num_rows(0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind())

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._slice(key)
        try:
            row = operator.index(key)
        except TypeError:
            raise CallError(f"jt[i] takes a row and jt[a:b] a range of rows, got {type(key).__name__}") from None
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} does not exist: the tensor has {len(self)} rows")
        return self._row(row % len(self), "jt[i]")

    def __repr__(self) -> str:
        return preview(self.shape, self._values, self._structure)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not all(issubclass(kind, (Tensor, JaggedTensor)) for kind in types):
            return NotImplemented
        if function not in _operators:
            name = torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))
            raise CallError(f"{name} does not take a JaggedTensor: use jt.values, jt.unbind() or jt.to_padded()")
        return _operators[function](*args, **(kwargs or {}))

    def _row(self, row: int, why: str) -> Tensor | JaggedTensor:
        first, last = self._structure.host_offsets(0, why=why)[row : row + 2].tolist()
        if self._structure.levels == 1:
            return self._values[first:last]
        inner, start, stop = self._structure.narrow(first, last, level=1, why=why)
        return JaggedTensor(self._values[start:stop], inner)

    def _slice(self, key: slice) -> JaggedTensor:
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ShapeError(f"jt[a:b] takes rows that lie together, got step {step}: take rows one by one with jt[i]")
        part, first, last = self._structure.narrow(start, max(start, stop), why="jt[a:b]")
        return JaggedTensor(self._values[first:last], part, hints=self._hints)
