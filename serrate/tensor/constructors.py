"""The ways to make a ragged tensor: from offsets, lengths, starts, lists and padded values.

In: values and what says which of them belong to which row. Out: `Constructors`, the part of `JaggedTensor` that makes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Never, Self

import torch
from torch import Tensor

from serrate.errors import CallError, DtypeError, ShapeError
from serrate.tensor.accessors import Accessors
from serrate.tensor.building import PerLevel
from serrate.tensor.checks.validate import Validate, check_dim
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.lists import from_lists, gather_rows
from serrate.tensor.offsets import Levels, as_tensors, offsets_of
from serrate.tensor.padding import check_padded, unpad
from serrate.tensor.positions import boxes
from serrate.tensor.structure import Structure
from serrate.tensor.sync import host_copy, on_host


class Constructors(Accessors):
    """Class methods of a `JaggedTensor`."""

    __slots__ = ()

    def __init__(self, values: Tensor, structure: Structure | None = None, *, hints: Hints = NO_HINTS, **unknown: Never) -> None:
        if not isinstance(structure, Structure) or unknown:
            raise _not_parts(values, structure, unknown)
        structure.check_values(values)
        self._values = values
        self._structure = structure
        self._hints = hints

    @classmethod
    def _joined(cls, values: Tensor, structure: Structure) -> Self:
        """Values and the structure that was just made for them, and so need not be asked whether they fit."""
        jt = cls.__new__(cls)
        jt._values, jt._structure, jt._hints = values, structure, NO_HINTS
        return jt

    @classmethod
    def from_csr(
        cls,
        values: Tensor,
        offsets: Levels,
        *,
        dim: int = 0,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: Validate = None,
    ) -> Self:
        """Rows back to back with their offsets; nested rows with a chain of offsets, outermost first, or 2-D offsets.

        `dim` is the dim of the values that is partitioned. `max_length` and `min_length` spare a host copy later; `validate`
        is as for `Structure.from_offsets`.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_csr(torch.arange(9), (torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))).shape
        (2, r0, r1)
        """
        levels = as_tensors(offsets, values)
        if dim:
            check_dim(dim, values)
        structure = Structure.from_offsets(
            *levels, dim=dim, total=values.shape[dim], max_length=max_length, min_length=min_length, validate=validate
        )
        # Plain numbers were checked on the CPU, and go where the values are.
        return cls._joined(values, structure if isinstance(offsets, Tensor) else structure.to(values.device))

    @classmethod
    def from_lengths(
        cls,
        values: Tensor,
        lengths: Levels,
        *,
        dim: int = 0,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: Validate = None,
    ) -> Self:
        """Rows back to back with their lengths; nested rows with the lengths of each level, outermost first, or 2-D lengths.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.arange(5), torch.tensor([2, 0, 3])).unbind()
        (tensor([0, 1]), tensor([], dtype=torch.int64), tensor([2, 3, 4]))
        """
        levels = as_tensors(lengths, values)
        if dim:
            check_dim(dim, values)
        structure = Structure.from_lengths(
            *levels, dim=dim, total=values.shape[dim], max_length=max_length, min_length=min_length, validate=validate
        )
        # Plain numbers were checked on the CPU, and go where the values are.
        return cls._joined(values, structure if isinstance(lengths, Tensor) else structure.to(values.device))

    @classmethod
    def from_starts(
        cls,
        values: Tensor,
        starts: Levels,
        lengths: Levels,
        *,
        dim: int = 0,
        max_length: PerLevel = None,
        min_length: PerLevel = None,
        validate: Validate = None,
    ) -> Self:
        """Rows that may leave gaps between them, by where each starts and how long it is; nothing is copied.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_starts(torch.arange(8), [0, 4], [3, 2]).unbind()
        (tensor([0, 1, 2]), tensor([4, 5]))
        """
        first = as_tensors(starts, values)
        if len(first) != 1:
            raise CallError(f"starts must be one tensor, of the innermost rows; got {len(first)}")
        if dim:
            check_dim(dim, values)
        structure = Structure.from_starts(
            first[0].to(values.device),
            *(level.to(values.device) for level in as_tensors(lengths, values)),
            dim=dim,
            extent=values.shape[dim],
            max_length=max_length,
            min_length=min_length,
            validate=validate,
        )
        return cls(values, structure)

    @classmethod
    def from_row_ids(cls, values: Tensor, row_ids: Tensor | Sequence[int], num_rows: int | None = None) -> Self:
        """Rows by the number of the row that every position is in, in order: the inverse of `row_ids`.

        `num_rows` counts rows without elements at the end too; without it the last number tells, which is a host fact.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_row_ids(torch.arange(4), torch.tensor([0, 0, 2, 2]), num_rows=4).tolist()
        [[0, 1], [], [2, 3], []]
        """
        (ids,) = as_tensors(row_ids, values)
        if ids.shape[:1] != values.shape[:1]:
            raise ShapeError(
                f"row_ids must hold one number for each of {values.shape[0]} positions, got shape {tuple(ids.shape)}"
            )
        return cls.from_csr(values, offsets_of(ids.to(values.device), num_rows))

    @classmethod
    def from_list(cls, rows: Iterable[Tensor]) -> Self:
        """One row for each tensor; the first dim of each is ragged, the others must agree. An empty list has 0 rows.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_list([torch.zeros(3, 4), torch.zeros(1, 4)]).shape
        (2, r0, 4)
        """
        return cls(*gather_rows(rows, outer=()))

    @classmethod
    def from_nested_list(
        cls, rows: Sequence[Any], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Self:
        """Lists of lists, to any depth, with tensors or plain numbers at the bottom; every branch has the same depth.

        A list of lists of numbers has one level, a list of lists of tensors two. An empty list may stand at any depth: the
        depth is that of the deepest list, and lists that are all empty hold numbers, so `[[], []]` has one level.
        The dtype of numbers is the one that `torch.tensor` would choose.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_nested_list([[torch.zeros(3), torch.zeros(1)], [], [torch.zeros(2)]]).shape
        (3, r0, r1)
        >>> JaggedTensor.from_nested_list([[1, 2], [], [3]], dtype=torch.float32).values
        tensor([1., 2., 3.])
        """
        return cls(*from_lists(rows, dtype, device))

    @classmethod
    def from_padded(
        cls,
        x: Tensor,
        lengths: Levels | None = None,
        *,
        mask: Tensor | None = None,
        structure: Structure | None = None,
        total: int | None = None,
        format: str = "csr",
    ) -> Self:
        """The rows of padded values `[B, L, *inner]`: the first `lengths[b]` positions of each, copied back to back.

        For two levels `x` is `[G, parts, L, *inner]` with `lengths` a pair (parts of each row, length of each part) or 2-D.
        A boolean `mask` `[B, L]` says instead which positions exist, wherever in the row they stand. A `structure` says what
        lengths cannot: rows of several dims, rows with columns. With `format="padded"` nothing is copied: the tensor keeps
        `x` as its values, all its padded dims as one.
        The number of values is a host fact: on a device it takes a host copy of the lengths, unless `total` is given
        (then the lengths are trusted).

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_padded(torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])).values
        tensor([1, 2, 3])
        >>> JaggedTensor.from_padded(torch.tensor([[1, 2], [0, 3]]), mask=torch.tensor([[True, True], [False, True]])).values
        tensor([1, 2, 3])
        """
        if (lengths is not None) + (mask is not None) + (structure is not None) != 1:
            raise CallError("from_padded: give one of lengths, mask and structure")
        if format not in ("csr", "padded"):
            raise CallError(f"from_padded: format={format!r} is not one of 'csr' and 'padded'")
        if mask is not None:
            if format == "padded":
                raise CallError("from_padded: positions that a mask leaves out may be anywhere, so the rest must be copied")
            return cls(*_masked(x, mask))
        readable = True
        if structure is None:
            assert lengths is not None
            tensors = as_tensors(lengths, x)
            if tensors[0].dtype is torch.bool:
                raise DtypeError("from_padded: lengths must be int32 or int64, got torch.bool: give a mask by its name, as mask=")
            readable = total is None or on_host(tensors[0])
            if readable and format == "csr" and not on_host(tensors[0]):
                tensors = tuple(host_copy(level, "from_padded") for level in tensors)
            structure = Structure.from_lengths(*tensors, total=total)
        if format == "padded":
            readable = structure.rows[0].readable()
        structure = structure.back_to_back()
        check_padded(x, structure, read_lengths=readable)
        structure = structure.to(x.device)
        if format == "padded":
            return cls(*_in_place(x, structure))
        return cls(unpad(x, structure), structure)


def _not_parts(values: Any, structure: Any, unknown: Mapping[str, Any]) -> CallError:
    # People come with the constructors of other libraries in their fingers: offsets and lengths by name, or rows alone.
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


def _masked(x: Tensor, mask: Tensor) -> tuple[Tensor, Structure]:
    if mask.dtype is not torch.bool:
        raise DtypeError(f"from_padded: the mask must be torch.bool, got {mask.dtype}: write mask != 0")
    if mask.dim() < 2 or x.shape[: mask.dim()] != mask.shape:
        raise ShapeError(f"from_padded: the mask must have the first dims of {tuple(x.shape)}, got shape {tuple(mask.shape)}")
    lengths = mask.sum(-1)
    parts = mask.shape[:-1]
    flat = lengths.reshape(-1)
    outer = [torch.full((parts[:level].numel(),), parts[level], device=x.device) for level in range(1, len(parts))]
    where = host_copy(flat, "from_padded")
    chain = Structure.from_lengths(*(level.cpu() for level in outer), where).to(x.device)
    return x[mask], chain


def _in_place(x: Tensor, structure: Structure) -> tuple[Tensor, Structure]:
    if len(structure.rows) > 1 or structure.dims != (0,) or structure.rows[0].columns is not None:
        raise ShapeError(f"from_padded: only the rows of dim 0 can stay padded in place, got {structure}; use format='csr'")
    rows = structure.rows[0]
    room = x.shape[rows.depth]
    there = boxes(rows, tuple(x.shape[1 : rows.depth]))
    lengths = tuple(rows.lengths(level) for level in range(rows.depth))
    kept = Structure.from_starts(there * room, *lengths, room=room, validate=False)
    if not x.is_contiguous():
        raise ShapeError("from_padded: values that stay padded in place must be contiguous: call x.contiguous() first")
    return x.flatten(0, rows.depth), kept
