"""`JaggedTensor`: values, and a structure that maps them to rows.

In: values and offsets, lengths, padded values or lists of rows. Out: a ragged tensor, its rows, and its conversions. The whole
public interface is here, as short methods that call the modules imported below. Shape and metadata are in `base`, dtypes and
devices in `casts`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor

from serrate.errors import CallError, GradientError, ShapeError, StructureMismatch
from serrate.tensor import padding
from serrate.tensor.base import JaggedBase
from serrate.tensor.building import PerLevel
from serrate.tensor.casts import Casts
from serrate.tensor.checks.validate import Validate, check_dim
from serrate.tensor.components import take_all
from serrate.tensor.display.describe import Description, describe
from serrate.tensor.display.picture import as_html
from serrate.tensor.display.printing import preview, printed
from serrate.tensor.foreign_names import idiom_of, instead_of
from serrate.tensor.hints import AccessPattern, Distribution, Reuse, more_hints
from serrate.tensor.indexing.keys import lane_key
from serrate.tensor.indexing.reading import getitem
from serrate.tensor.indexing.writing import setitem
from serrate.tensor.interop import arrow_lists, awkward_arrays, boundaries, numpy_arrays, torch_nested
from serrate.tensor.interop.boundaries import CuSeqlens, GroupEnds
from serrate.tensor.interop.common import Copying
from serrate.tensor.interop.memory import parts, pinned, share, shared
from serrate.tensor.lists import from_lists, gather_rows, to_numbers
from serrate.tensor.offsets import Levels, as_tensors, offsets_of_row_ids
from serrate.tensor.permuting import MaybeRagged, permute
from serrate.tensor.positions import compact, coordinates, row_ids, tile_list, total_tiles
from serrate.tensor.reshaping import flatten, split, split_like, unbind
from serrate.tensor.structure import Structure
from serrate.tensor.sync import host_copy
from serrate.tensor.torch_private import fields_of

_operators: dict[Callable[..., Any], Callable[..., Any]] = {}


def install_operators(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Registers implementations of torch functions for JaggedTensors, by torch function.

    >>> install_operators({torch.numel: lambda jt: jt.numel()})
    >>> torch.numel(JaggedTensor.from_list([torch.zeros(2), torch.zeros(1)]))
    3
    """
    _operators.update(functions)


def installed_operators() -> frozenset[Callable[..., Any]]:
    """The torch functions that take a JaggedTensor.

    >>> torch.cat in installed_operators()
    True
    """
    return frozenset(_operators)


class JaggedTensor(Casts):
    """Rows of different lengths, back to back in `values`; a one-level tensor of shape `[B, r0, *inner]` is

        rows = [values[offsets[b]:offsets[b + 1]] for b in range(B)]

    and a two-level one of shape `[G, r0, r1, *inner]` is a list of such lists. Gradients belong to `values`.
    The constructor takes values and a structure; the `from_` class methods take everything else. It is not a
    torch.Tensor, but supports torch's operations, each a compiled program; `serrate.jit` fuses many into one.

    >>> jt = JaggedTensor.from_list([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    >>> jt
    JaggedTensor(shape=(2, r0), dtype=torch.float32, device=cpu, lengths=[2, 1], values=[1, 2, 3])
    >>> jt[0]
    tensor([1., 2.])
    """

    __slots__ = ()
    # DDP and FSDP find the tensors of a module's arguments and results in dataclasses, not in pytrees, and replace them there.
    __dataclass_fields__ = fields_of("values", "structure", "hints")
    __array_ufunc__ = None  # makes numpy scalars and arrays defer to our operators, as they do to torch's

    # --- constructors ---

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

        `dim` is the partitioned dim of the values. `max_length` and `min_length` avoid a host copy later; for `validate` see
        `Structure.from_offsets`.

        >>> JaggedTensor.from_csr(torch.arange(9), (torch.tensor([0, 2, 3]), torch.tensor([0, 4, 4, 9]))).shape
        (2, r0, r1)
        """
        return cls._from_levels(Structure.from_offsets, values, offsets, dim, max_length, min_length, validate)

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

        >>> JaggedTensor.from_lengths(torch.arange(5), torch.tensor([2, 0, 3])).unbind()
        (tensor([0, 1]), tensor([], dtype=torch.int64), tensor([2, 3, 4]))
        """
        return cls._from_levels(Structure.from_lengths, values, lengths, dim, max_length, min_length, validate)

    @classmethod
    def _from_levels(
        cls,
        make: Callable[..., Structure],
        values: Tensor,
        described: Levels,
        dim: int,
        max_length: PerLevel,
        min_length: PerLevel,
        validate: Validate,
    ) -> Self:
        """A tensor whose structure `make` builds from offsets or lengths."""
        levels = as_tensors(described, values)
        if dim:
            check_dim(dim, values)
        structure = make(
            *levels, dim=dim, total=values.shape[dim], max_length=max_length, min_length=min_length, validate=validate
        )
        # Lists of numbers were checked on the CPU, and move to the values' device.
        return cls._trusted(values, structure if isinstance(described, Tensor) else structure.to(values.device))

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
        """Rows given by starts and lengths, possibly with gaps between them; nothing is copied.

        >>> JaggedTensor.from_starts(torch.arange(8), [0, 4], [3, 2]).unbind()
        (tensor([0, 1, 2]), tensor([4, 5]))
        """
        first = as_tensors(starts, values)
        if len(first) != 1:
            raise CallError(f"starts must be a single tensor, for the innermost rows; got {len(first)}")
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
        """Rows given by the row number of every position, in increasing order: the inverse of `row_ids`.

        `num_rows` includes trailing empty rows. Without it, the last number decides, which takes a host copy on a device.

        >>> JaggedTensor.from_row_ids(torch.arange(4), torch.tensor([0, 0, 2, 2]), num_rows=4).tolist()
        [[0, 1], [], [2, 3], []]
        """
        (ids,) = as_tensors(row_ids, values)
        if ids.shape[:1] != values.shape[:1]:
            raise ShapeError(
                f"row_ids must have one element for each of {values.shape[0]} positions, got shape {tuple(ids.shape)}"
            )
        return cls.from_csr(values, offsets_of_row_ids(ids.to(values.device), num_rows))

    @classmethod
    def from_list(cls, rows: Iterable[Tensor]) -> Self:
        """One row per tensor; first dims may differ, all other dims must agree. An empty list gives 0 rows.

        >>> JaggedTensor.from_list([torch.zeros(3, 4), torch.zeros(1, 4)]).shape
        (2, r0, 4)
        """
        return cls(*gather_rows(rows, outer=()))

    @classmethod
    def from_nested_list(
        cls, rows: Sequence[Any], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Self:
        """Lists of lists, to any depth, with tensors or plain numbers as leaves; every branch has the same depth.

        A list of lists of numbers has one level, a list of lists of tensors two. An empty list may appear at any depth: the
        deepest list determines the depth, and lists that are all empty count as lists of numbers, so `[[], []]` has one level.
        Numbers get the dtype that `torch.tensor` would choose.

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
        """The rows of padded values `[B, L, *inner]`: the first `lengths[b]` positions of each, packed back to back.

        For two levels, `x` is `[G, parts, L, *inner]` and `lengths` a pair (parts per row, length per part) or 2-D.
        Instead of lengths, a boolean `mask` `[B, L]` selects positions anywhere in a row, and a `structure` describes what
        lengths cannot: several ragged dims, rows with columns. With `format="padded"` nothing is copied: the tensor keeps
        `x` as its values, with the padded dims merged.
        The host must know the total length. On a device that takes a host copy of the lengths, unless `total` is given
        (the lengths are then trusted).

        >>> JaggedTensor.from_padded(torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])).values
        tensor([1, 2, 3])
        >>> JaggedTensor.from_padded(torch.tensor([[1, 2], [0, 3]]), mask=torch.tensor([[True, True], [False, True]])).values
        tensor([1, 2, 3])
        """
        return cls(*padding.from_padded(x, lengths, mask, structure, total, format))

    # --- the same rows with other values ---

    def with_values(self, values: Tensor) -> Self:
        """Other values with the same structure and hints.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).with_values(torch.zeros(3, 5)).shape
        (2, r0, 5)
        """
        self._structure.check_values(values)
        return type(self)._trusted(values, self._structure, self._hints)

    def with_hint(
        self,
        *,
        distribution: Distribution | None = None,
        access_pattern: AccessPattern | None = None,
        reuse: Reuse | None = None,
        **unknown: Any,
    ) -> Self:
        """The same tensor with hints for the tuner, in addition to earlier ones; they never change a result.

        They influence which plan runs without measurement, and which plans are measured first. `serrate.tensor.hints` lists them
        and the operations that keep them.

        >>> JaggedTensor.from_list([torch.zeros(2)]).with_hint(distribution="uniform", reuse="high").hints
        Hints(distribution='uniform', reuse='high')
        """
        hints = {"distribution": distribution, "access_pattern": access_pattern, "reuse": reuse, **unknown}
        return type(self)(self._values, self._structure, hints=more_hints(self._hints, hints))

    def detach(self) -> Self:
        """The same values, detached from the autograd graph.

        >>> JaggedTensor.from_list([torch.zeros(2, requires_grad=True)]).detach().requires_grad
        False
        """
        return self.with_values(self._values.detach())

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Turns gradients of the values on or off; returns the tensor itself.

        >>> JaggedTensor.from_list([torch.zeros(2)]).requires_grad_().values.requires_grad
        True
        """
        self._values.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Self | None:
        """The gradient of the values, with the same rows; None before the first `backward()`.

        >>> jt = JaggedTensor.from_list([torch.ones(2), torch.ones(1)]).requires_grad_()
        >>> jt.values.sum().backward()
        >>> jt.grad
        JaggedTensor(shape=(2, r0), dtype=torch.float32, device=cpu, lengths=[2, 1], values=[1, 1, 1])
        """
        found = self._values.grad
        return None if found is None else self.with_values(found)

    @grad.setter
    def grad(self, gradient: JaggedTensor | None) -> None:
        if gradient is not None and not isinstance(gradient, JaggedTensor):
            raise CallError(f"grad takes a JaggedTensor with the same rows, or None; got {type(gradient).__name__}")
        if gradient is not None and gradient._structure is not self._structure:
            gradient._require_rows_of(self, "the gradient")
            if (self._structure.format, gradient._structure.format) != ("csr", "csr"):
                raise StructureMismatch("x.grad must be stored like x: x.grad = x.with_values(...)")
        self._values.grad = None if gradient is None else gradient._values

    @property
    def grad_fn(self) -> Any:
        """The function of torch's autograd that made the values; None for a leaf."""
        return self._values.grad_fn

    @property
    def is_leaf(self) -> bool:
        """Whether the values are a leaf of the autograd graph."""
        return self._values.is_leaf

    def retain_grad(self) -> None:
        """Keeps the gradient of values that are not a leaf."""
        self._values.retain_grad()

    def register_hook(self, hook: Callable[[JaggedTensor], JaggedTensor | None]) -> Any:
        """Calls `hook` with every gradient of the values, as a JaggedTensor; it may return another one to use instead.

        >>> jt = JaggedTensor.from_list([torch.ones(2)]).requires_grad_()
        >>> handle = jt.register_hook(lambda gradient: gradient.with_values(gradient.values * 2))
        >>> jt.values.sum().backward()
        >>> jt.grad.values
        tensor([2., 2.])
        """

        def on_values(gradient: Tensor) -> Tensor | None:
            found = hook(self.with_values(gradient))
            return found._values if isinstance(found, JaggedTensor) else found

        register: Callable[..., Any] = self._values.register_hook
        return register(on_values)

    def backward(
        self,
        gradient: JaggedTensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """`torch.Tensor.backward` of the values; needs the gradient of every element, with the same rows."""
        wanted = None if inputs is None else [inputs] if isinstance(inputs, JaggedTensor | Tensor) else list(inputs)
        plain = None if wanted is None else [x._values if isinstance(x, JaggedTensor) else x for x in wanted]
        values, given = self.with_gradient(gradient)
        run: Callable[..., None] = values.backward
        run(given, retain_graph, create_graph, inputs=plain)

    def with_gradient(self, gradient: Any) -> tuple[Tensor, Any]:
        """The values, and a given gradient for them. If that is ragged, it must have the same rows; both are packed if they are
        stored differently or have gaps, which have no gradient."""
        if not isinstance(gradient, JaggedTensor):
            return self._values, gradient
        if gradient._structure is not self._structure:
            gradient._require_rows_of(self, "the gradient")
        return self.contiguous()._values, gradient.contiguous()._values

    def _require_rows_of(self, other: JaggedTensor, what: str) -> None:
        if not self._structure.agrees(other._structure, f"{what} and its tensor"):
            raise StructureMismatch(
                f"{what} must have the rows of its tensor: {self._structure.difference_from(other._structure)}"
            )

    def clone(self) -> Self:
        """Copies the values; shares the structure, which is immutable.

        >>> jt = JaggedTensor.from_list([torch.zeros(2)])
        >>> jt.clone().structure is jt.structure
        True
        """
        return self.with_values(self._values.clone())

    def equal(self, other: Any) -> bool:
        """Whether another ragged tensor has the same rows and the same elements.

        >>> jt = JaggedTensor.from_list([torch.tensor([1, 2])])
        >>> jt.equal(jt.clone())
        True
        """
        same: Any = torch.equal  # torch's signature admits only torch tensors
        return bool(same(self, other))

    def allclose(
        self,
        other: Any,
        rtol: float = 1e-05,
        atol: float = 1e-08,
        equal_nan: bool = False,
    ) -> bool:
        """Whether another ragged tensor has the same rows, and elements that agree within tolerance.

        >>> jt = JaggedTensor.from_list([torch.tensor([1.0, 2.0])])
        >>> jt.allclose(jt.with_values(jt.values + 1e-7))
        True
        """
        near: Any = torch.allclose
        return bool(near(self, other, rtol, atol, equal_nan))

    def zero_(self) -> Self:
        """Sets every element to 0 in place; gaps between rows are left alone.

        >>> JaggedTensor.from_list([torch.tensor([1, 2])]).zero_().values
        tensor([0, 0])
        """
        return self.fill_(0)

    def fill_(self, value: Any) -> Self:
        """Sets every element to `value` in place; gaps between rows are left alone.

        >>> JaggedTensor.from_list([torch.tensor([1, 2])]).fill_(7).values
        tensor([7, 7])
        """
        self._check_writable()
        setitem(self._values, self._structure, ..., value)
        return self

    def copy_(self, src: Any, non_blocking: bool = False) -> Self:
        """Copies the elements of `src` in place: a ragged tensor with the same rows, or a tensor that broadcasts.

        >>> jt = JaggedTensor.from_list([torch.tensor([1, 2])])
        >>> jt.copy_(jt.with_values(torch.tensor([3, 4]))).values
        tensor([3, 4])
        """
        self._check_writable()
        if isinstance(src, JaggedTensor):
            if tuple(map(str, src.shape)) != tuple(map(str, self.shape)) or not src._structure.same_rows(self._structure):
                raise StructureMismatch(f"copy_: the rows of {src._structure} are not those of {self._structure}")
            src = src.to(self.device, self.dtype)
        setitem(self._values, self._structure, ..., src)
        return self

    def _check_writable(self) -> None:
        if self.requires_grad and torch.is_grad_enabled():
            raise GradientError("a tensor that requires grad cannot be written to in place: do it under torch.no_grad()")

    # --- rows ---

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The rows: tensors that share storage with the values, or JaggedTensors of one level less if rows are nested.

        `dim` may be any dim that is not ragged.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).unbind()
        (tensor([0, 1]), tensor([2]))
        """
        return tuple(map(self._wrap, unbind(self._values, self._structure, self._dim(dim))))

    def to_list(self) -> list[Any]:
        """The rows as a list of tensors, or as lists of lists of tensors for nested levels: the inverse of `from_list`.

        >>> JaggedTensor.from_lengths(torch.arange(3), [[2, 1]]).to_list()
        [[tensor([0, 1]), tensor([2])]]
        """
        pieces = map(self._wrap, take_all(self._values, self._structure, "to_list"))
        return [piece if isinstance(piece, Tensor) else piece.to_list() for piece in pieces]

    def row_ids(self, level: int = -1) -> Tensor:
        """The row number of every position on a level, as an int64 tensor on the device.

        Columns count as positions. With several partitioned dims, positions are counted in the level's dim.

        >>> words = JaggedTensor.from_lengths(torch.arange(6), [torch.tensor([2, 1]), torch.tensor([1, 3, 2])])
        >>> words.row_ids(), words.row_ids(level=0)
        (tensor([0, 1, 1, 1, 2, 2]), tensor([0, 0, 0, 0, 1, 1]))
        """
        rows, own = self._structure.at(level)
        return row_ids(rows, own, "row_ids")

    def positions(self, level: int = -1) -> Tensor:
        """The index of every position within its row on a level, on the device.

        >>> words = JaggedTensor.from_lengths(torch.arange(6), [torch.tensor([2, 1]), torch.tensor([1, 3, 2])])
        >>> words.positions(), words.positions(level=0)
        (tensor([0, 0, 1, 2, 0, 1]), tensor([0, 1, 1, 1, 0, 0]))
        """
        rows, own = self._structure.at(level)
        return coordinates(rows, "positions")[own + 1]

    def total_tiles(self, block: int) -> int:
        """The total number of tiles of `block` positions in the innermost rows; an empty row has none.

        >>> JaggedTensor.from_lengths(torch.arange(7), [5, 0, 2]).total_tiles(2)
        4
        """
        return total_tiles(self._structure, block)

    def tile_list(self, block: int) -> tuple[Tensor, Tensor]:
        """The row of every tile, and the first position of the tile in that row.

        >>> JaggedTensor.from_lengths(torch.arange(7), [5, 0, 2]).tile_list(2)
        (tensor([0, 0, 0, 2]), tensor([0, 2, 4, 0]))
        """
        return tile_list(self._structure, block)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Any, ...]:
        """Splits the rows, or a regular dim, into pieces of one size (the last may be smaller) or of the given sizes.

        >>> [len(piece) for piece in JaggedTensor.from_lengths(torch.arange(3), [1, 0, 2]).split(2)]
        [2, 1]
        """
        return tuple(map(self._wrap, split(self._values, self._structure, sizes, self._dim(dim))))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        """Splits the rows, or a regular dim, into at most `chunks` pieces of equal size (the last may be smaller).

        >>> [len(piece) for piece in JaggedTensor.from_lengths(torch.arange(3), [1, 0, 2]).chunk(2)]
        [2, 1]
        """
        pieces = split_like(self._values, self._structure, self._dim(dim), "chunk", lambda whole: whole.chunk(chunks))
        return tuple(map(self._wrap, pieces))

    def select(self, dim: int, index: int) -> Any:
        """Selects one index of a dim and removes the dim: `jt.select(2, 0)` is `jt[:, :, 0]`.

        >>> JaggedTensor.from_lengths(torch.arange(6).view(3, 2), [2, 1]).select(-1, 0).to_list()
        [tensor([0, 2]), tensor([4])]
        """
        return self[(slice(None),) * self._dim(dim) + (index,)]

    def index_select(self, dim: int, index: Tensor) -> Any:
        """Selects rows, or indices of a regular dim: `jt.index_select(0, index)` is `jt[index]`.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).index_select(0, torch.tensor([1, 0])).to_list()
        [tensor([2]), tensor([0, 1])]
        """
        return self[(slice(None),) * self._dim(dim) + (index,)]

    # --- dims ---

    def unsqueeze(self, dim: int) -> JaggedTensor:
        """Inserts a dim of size 1.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).unsqueeze(-1).shape
        (2, r0, 1)
        """
        if not -self.ndim - 1 <= dim <= self.ndim:
            raise ShapeError(f"dim {dim} does not exist: the tensor with its new dim has {self.ndim + 1} dims")
        found: JaggedTensor = self[(slice(None),) * (dim % (self.ndim + 1)) + (None,)]
        return found

    def squeeze(self, dim: int) -> JaggedTensor:
        """Removes a regular dim of size 1; returns the tensor itself if the size is not 1.

        >>> JaggedTensor.from_lengths(torch.zeros(3, 1), [2, 1]).squeeze(-1).shape
        (2, r0)
        """
        kind = self.dims[self._dim(dim)]
        if kind.axis is not None:
            what = "counts rows" if kind.level is None else "is ragged"
            raise ShapeError(f"squeeze: dim {dim} {what} and cannot be removed: use jt[i] for a row, or jt.flatten(0, 1)")
        found: JaggedTensor = self.select(dim, 0) if self.size(dim) == 1 else self
        return found

    def permute(self, *dims: int | Sequence[int]) -> JaggedTensor:
        """Permutes the dims. A ragged dim must come after the dim that counts its rows, with only regular dims in between.

        Dims that count nested rows can be swapped if every row has the same number of parts: `[rank, expert, tokens]`
        becomes `[expert, rank, tokens]`, which copies rows. Everything else is a view.

        >>> tokens = JaggedTensor.from_lengths(torch.arange(6), [[1, 2], [3, 0]])
        >>> tokens.permute(1, 0, 2).to_list()
        [[tensor([0]), tensor([3, 4, 5])], [tensor([1, 2]), tensor([], dtype=torch.int64)]]
        """
        order = [k for each in dims for k in ((each,) if isinstance(each, int) else each)]
        return JaggedTensor(*permute(self._values, self._structure, order), hints=self._hints)

    def transpose(self, dim0: int, dim1: int) -> JaggedTensor:
        """Swaps two dims; see `permute`.

        >>> heads = JaggedTensor.from_lengths(torch.zeros(6, 4, 5), [1, 5]).transpose(1, 2)
        >>> heads.shape, heads[0].shape, heads.values.shape
        ((2, 4, r0, 5), torch.Size([4, 1, 5]), torch.Size([6, 4, 5]))
        """
        order = list(range(self.ndim))
        one, other = self._dim(dim0), self._dim(dim1)
        order[one], order[other] = order[other], order[one]
        return self.permute(*order)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Flattens dims: drops a level of nesting, merges a ragged dim with the regular one after it, or joins all rows.

        >>> words = JaggedTensor.from_lengths(torch.arange(6), [torch.tensor([2, 1]), torch.tensor([1, 3, 2])])
        >>> words.flatten(1, 2).lengths, words.flatten(0, 1).lengths
        (tensor([4, 2]), tensor([1, 3, 2]))
        """
        return self._wrap(flatten(self._values, self._structure, self._dim(start_dim), self._dim(end_dim)))

    # --- storage formats ---

    def to_padded(self, fill: complex = 0, *, max_length: int | None = None) -> Tensor:
        """A tensor `[B, longest, *inner]`, or `[G, most parts, longest, *inner]` for two levels, with `fill` in the holes.

        `max_length` sets the size of the last ragged dim instead of the longest length; longer rows are truncated.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_padded(fill=-1)
        tensor([[ 0,  1],
                [ 2, -1]])
        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_padded(max_length=3)
        tensor([[0, 1, 0],
                [2, 0, 0]])
        """
        if max_length is None:
            return padding.pad(self._values, self._structure, fill)
        if max_length < 0:
            raise ShapeError(f"to_padded: max_length must not be negative, got {max_length}")
        fits = self._structure.rows[-1].known("max", self._structure.rows[-1].levels - 1)
        kept = (
            self
            if fits is not None and fits <= max_length
            else self[(slice(None),) * self.jagged_dims[-1] + (slice(max_length),)]
        )
        return padding.pad(kept._values, kept._structure, fill, max_length)

    def mask(self) -> Tensor:
        """Which positions of `to_padded()` are not holes: bool `[B, longest]`, the padded dims up to the last ragged one.

        >>> JaggedTensor.from_lengths(torch.zeros(3, 4), [2, 1]).mask()
        tensor([[ True,  True],
                [ True, False]])
        """
        return padding.mask(self._values, self._structure, "mask")

    def to_format(self, format: str) -> Any:
        """Converts the storage. `csr` (back to back) and `padded` (to the longest row) return a ragged tensor, or the tensor
        itself if it already has that format; `nested` returns a list of tensors, as `to_list` does.

        >>> jt = JaggedTensor.from_lengths(torch.arange(3), [2, 1])
        >>> jt.to_format("padded").values
        tensor([0, 1, 2, 0])
        >>> jt.to_format("nested")
        [tensor([0, 1]), tensor([2])]
        """
        if format not in ("csr", "padded", "nested"):
            raise CallError(f"to_format: {format!r} is not one of 'csr', 'padded' and 'nested'")
        if format == "nested":
            return self.to_list()
        if format == self.format:
            return self
        if format == "csr":
            return self.contiguous()
        stored = JaggedTensor.from_padded(self.to_padded(), structure=self._structure, format="padded")
        return JaggedTensor(stored.values, stored.structure, hints=self._hints)

    def contiguous(self) -> JaggedTensor:
        """The same rows back to back and contiguous in memory, with columns packed; the tensor itself if they already are.

        Values keep their order of dims: that of a transposed tensor is not the order in memory.

        >>> JaggedTensor.from_starts(torch.arange(8), [0, 4], [3, 2]).contiguous().values
        tensor([0, 1, 2, 4, 5])
        """
        if self._structure.format == "csr" and self._values.is_contiguous():
            return self
        values, structure = compact(self._values, self._structure, "contiguous")
        return JaggedTensor(values.contiguous(), structure, hints=self._hints)

    def describe(self) -> Description:
        """Statistics and a histogram of the lengths, the cost of padding, and the hint that fits; prints as text.

        >>> print(JaggedTensor.from_lengths(torch.zeros(12, 4), [1, 2, 9]).describe())
        JaggedTensor (3, r0, 4)  torch.float32, cpu, csr
          values    192 B for 12 positions, and 32 B of structure
          padded    432 B, 55.6% of it holes: 208 B saved
        <BLANKLINE>
        r0  dim 1: 3 rows, 12 positions
          lengths   min 1, median 2, mean 4, p95 9, max 9; 0 rows empty
          variance  12.67, a deviation of 3.559
          sparsity  0.444: padded to the longest, 55.6% would be holes
          looks     giant: the longest row holds 75% of all
                 1  ████████████████████████████████ 1
                 2  ████████████████████████████████ 1
                 3  0
                 4  0
                 5  0
                 6  0
                 7  0
                 8  0
                 9  ████████████████████████████████ 1
        """
        return describe(self.shape, self._values, self._structure)

    # --- conversion from and to other libraries ---

    # Every conversion takes `copy`: None shares the values if both formats allow and otherwise warns (`CopyWarning`), False
    # raises `CopyError` instead, True always copies. Offsets are small: shared if both formats store them alike, else converted.
    # Shared values are the same memory: a write on one side is seen on the other.

    @classmethod
    def from_torch_nested(cls, nested: Tensor, *, copy: bool | None = None) -> Self:
        """The rows of a NestedTensor; gradients flow through.

        Jagged layout: always shared. With lengths, the rows have gaps. A transposed one, `[B, H, r, D]`, keeps its shape.
        Strided layout: shared if it is contiguous; two ragged dims become rows with columns: `(B, r0, r1)`.

        >>> nested = torch.nested.nested_tensor_from_jagged(torch.zeros(3, 4), torch.tensor([0, 2, 3]))
        >>> JaggedTensor.from_torch_nested(nested).shape
        (2, r0, 4)
        """
        return cls(*torch_nested.from_torch_nested(nested, Copying("from_torch_nested", copy)))

    def to_torch_nested(self, layout: str = "jagged", *, copy: bool | None = None) -> Tensor:
        """The same rows as a NestedTensor; gradients flow through.

        Jagged layout: always shared; rows with gaps become a NestedTensor with lengths. Strided layout: shared if the rows
        lie back to back in contiguous values; it also supports rows with columns. Neither supports nested rows or several
        partitioned dims.

        >>> [tuple(row.shape) for row in JaggedTensor.from_lengths(torch.zeros(3, 4), [2, 1]).to_torch_nested().unbind()]
        [(2, 4), (1, 4)]
        """
        return torch_nested.to_torch_nested(self._values, self._structure, layout, Copying("to_torch_nested", copy))

    @classmethod
    def from_cu_seqlens(
        cls,
        values: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int | None = None,
        *,
        validate: bool | None = None,
        copy: bool | None = None,
    ) -> Self:
        """Rows in the format of variable-length attention kernels; values and boundaries are shared.

        `max_seqlen` is an upper bound. It is checked if lengths are on the host, and otherwise trusted to be the longest length.

        >>> JaggedTensor.from_cu_seqlens(torch.zeros(5, 2), torch.tensor([0, 2, 5], dtype=torch.int32), 3).shape
        (2, r0, 2)
        """
        copying = Copying("from_cu_seqlens", copy)
        return cls(*boundaries.from_cu_seqlens(values, cu_seqlens, max_seqlen, validate, copying))

    def to_cu_seqlens(self, *, copy: bool | None = None) -> CuSeqlens:
        """`(values, cu_seqlens, max_seqlen)` with int32 boundaries; rows back to back are shared, others copied.

        The host must know the longest length: on a device that takes a host copy, unless it is already known.

        >>> JaggedTensor.from_lengths(torch.zeros(3), [2, 1]).to_cu_seqlens().cu_seqlens
        tensor([0, 2, 3], dtype=torch.int32)
        """
        return boundaries.to_cu_seqlens(self._values, self._structure, Copying("to_cu_seqlens", copy))

    @classmethod
    def from_group_ends(cls, values: Tensor, ends: Tensor, *, validate: bool | None = None, copy: bool | None = None) -> Self:
        """Groups given by their ends, as `torch.nn.functional.grouped_mm(offs=)` takes them; the values are shared.

        Values past the last end belong to no group and are dropped. On a device, where the ends cannot be read, the last one
        is trusted to equal the number of values.

        >>> JaggedTensor.from_group_ends(torch.zeros(5, 2), torch.tensor([2, 5], dtype=torch.int32)).lengths
        tensor([2, 3], dtype=torch.int32)
        """
        return cls(*boundaries.from_group_ends(values, ends, validate, Copying("from_group_ends", copy)))

    def to_group_ends(self, *, copy: bool | None = None) -> GroupEnds:
        """`(values, ends)` with int32 ends; rows back to back are shared, others copied.

        >>> JaggedTensor.from_lengths(torch.zeros(3), [2, 1]).to_group_ends().ends
        tensor([2, 3], dtype=torch.int32)
        """
        return boundaries.to_group_ends(self._values, self._structure, Copying("to_group_ends", copy))

    @classmethod
    def from_arrow(cls, array: Any, *, copy: bool | None = None) -> Self:
        """The rows of a pyarrow array of lists: ListArray, LargeListArray, their views and fixed sizes, nested to any depth.

        Numbers are shared (do not write to them: arrow's buffers are read-only); bools, several chunks, and views out of
        order are copied. Fixed-size lists inside the innermost ragged ones become inner dims. Nulls are rejected.

        >>> import pyarrow
        >>> JaggedTensor.from_arrow(pyarrow.array([[[1, 2], []], [], [[3]]])).shape
        (3, r0, r1)
        """
        return cls(*arrow_lists.from_arrow(array, Copying("from_arrow", copy)))

    def to_arrow(self, *, copy: bool | None = None) -> Any:
        """A pyarrow array of lists: ListArray for int32 offsets, LargeListArray for int64; inner dims are fixed-size lists.

        Contiguous values are shared, except bools. Rows with gaps become (Large)ListViewArrays, rows with columns lists of
        lists. Only the first dim may be partitioned; bfloat16 and complex values are not supported.

        >>> str(JaggedTensor.from_lengths(torch.zeros(3, 2), [2, 1]).to_arrow().type)
        'large_list<item: fixed_size_list<item: float>[2]>'
        """
        return arrow_lists.to_arrow(self._values, self._structure, Copying("to_arrow", copy))

    @classmethod
    def from_awkward(cls, array: Any, *, copy: bool | None = None) -> Self:
        """The rows of an Awkward Array of lists, nested to any depth.

        Numbers are shared; lists out of order and indexed items are copied. Regular lists inside the innermost ragged ones
        become inner dims. Missing values, records, unions and strings are rejected.

        >>> import awkward
        >>> JaggedTensor.from_awkward(awkward.Array([[1, 2], [], [3]])).tolist()
        [[1, 2], [], [3]]
        """
        return cls(*awkward_arrays.from_awkward(array, Copying("from_awkward", copy)))

    def to_awkward(self, *, copy: bool | None = None) -> Any:
        """An Awkward Array of lists that shares the values.

        Rows with gaps become a ListArray, rows with columns lists of lists. Only the first dim may be partitioned; bfloat16
        values are not supported.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_awkward()
        <Array [[0, 1], [2]] type='2 * var * int64'>
        """
        return awkward_arrays.to_awkward(self._values, self._structure, Copying("to_awkward", copy))

    @classmethod
    def from_numpy(cls, values: Any, offsets: Any = None, *, copy: bool | None = None) -> Self:
        """The rows of one array with its offsets (a list of them for nested rows), or of arrays in a list or an object array.

        A single array is shared, unless it has negative strides; separate arrays are concatenated.

        >>> import numpy
        >>> JaggedTensor.from_numpy(numpy.arange(3), numpy.array([0, 2, 3])).tolist()
        [[0, 1], [2]]
        """
        return cls(*numpy_arrays.from_numpy(values, offsets, Copying("from_numpy", copy)))

    def to_numpy(self, *, copy: bool | None = None) -> Any:
        """The rows as an object array of arrays that share the values; nested rows are object arrays themselves.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_numpy()
        array([array([0, 1]), array([2])], dtype=object)
        """
        return numpy_arrays.to_numpy(self._values, self._structure, Copying("to_numpy", copy))

    def tolist(self) -> list[Any]:
        """The rows as nested lists of plain Python numbers: the inverse of `from_nested_list`.

        >>> JaggedTensor.from_lengths(torch.zeros(3, 2), [2, 1]).tolist()
        [[[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0]]]
        """
        return to_numbers(self._values, self._structure, "tolist")

    # --- memory ---

    def share_memory_(self) -> Self:
        """Moves values and structure to shared memory; returns the tensor itself.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).share_memory_().is_shared()
        True
        """
        share(self._values, self._structure)
        return self

    def is_shared(self) -> bool:
        """Whether values and structure are in shared memory.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).is_shared()
        False
        """
        return shared(self._values, self._structure)

    def pin_memory(self) -> Self:
        """A copy with values and structure in page-locked memory, for asynchronous copies to a device."""
        return type(self)(*pinned(self._values, self._structure), hints=self._hints)

    def is_pinned(self) -> bool:
        """Whether values and structure are in page-locked memory.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).is_pinned()
        False
        """
        # torch never reports an empty tensor as pinned.
        return all(part.is_pinned() for part in parts(self._values, self._structure) if part.numel())

    # --- Python and torch ---

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind())

    def __getitem__(self, key: Any) -> Any:
        """Indexes rows, positions of rows and regular dims, with one key per dim as in torch.

        Rows take `jt[i]`, `jt[a:b]`, row numbers or booleans; `jt[:, a:b]` slices every row without a copy; `jt[:, i]`
        selects one position of every row; `jt[..., d]` works as in torch; `jt[mask]` takes a ragged mask with the same rows.

        >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
        >>> jt[:, -2:].to_list()
        [tensor([1, 2]), tensor([3, 4])]
        >>> jt[[1, 1]].lengths
        tensor([2, 2])
        >>> jt[jt.with_values(jt.values != 1)].lengths
        tensor([2, 2])
        """
        lanes = lane_key(key)
        if lanes is not None:
            return lanes.read_rows(self, key)
        return self._wrap(getitem(self._values, self._structure, key))

    def __setitem__(self, key: Any, x: Any) -> None:
        """Writes into the values, if `jt[key]` is a view of them or a ragged mask.

        >>> jt = JaggedTensor.from_lengths(torch.arange(5), [3, 2])
        >>> jt[:, -1:] = 0
        >>> jt.values
        tensor([0, 1, 0, 3, 0])
        """
        lanes = lane_key(key)
        if lanes is not None:
            lanes.write_rows(self, key, x)
        else:
            setitem(self._values, self._structure, key, x)

    def __contains__(self, element: object) -> bool:
        """Whether any element equals a number, as for tensors.

        >>> 3 in JaggedTensor.from_lengths(torch.tensor([3, 1, 2]), [2, 1])
        True
        """
        if not isinstance(element, int | float | Tensor | JaggedTensor):
            raise CallError(f"in: an element of a JaggedTensor is a number, got a {type(element).__name__}")
        found: Any = self == element
        return bool(host_copy(found.any(), "in"))

    def __bool__(self) -> NoReturn:
        raise CallError("a JaggedTensor has no truth value: use len(jt), jt.numel(), or torch.equal(jt, other)")

    if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"JaggedTensor has no attribute {name!r}{instead_of(name)}", name=name, obj=self)

    def __repr__(self) -> str:
        if not isinstance(self._values, Tensor):
            # torch's pytrees put placeholders here, and print them.
            return f"JaggedTensor(values={self._values!r}, structure={self._structure!r})"
        return preview(self.shape, self._values, self._structure, self._hints)

    def __str__(self) -> str:
        if not isinstance(self._values, Tensor):
            return repr(self)
        return printed(self.shape, self._values, self._structure, self._hints)

    def _repr_html_(self) -> str:
        return as_html(self.shape, self._values, self._structure, self._hints)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for kind in types:
            if not issubclass(kind, (JaggedTensor, Tensor)):
                return NotImplemented
        operator = _operators.get(function)
        if operator is None:
            name = torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))
            advice = idiom_of(name) or "use jt.values, jt.unbind() or jt.to_padded()"
            raise CallError(f"{name} does not take a JaggedTensor: {advice}")
        return operator(*args, **(kwargs or {}))

    def _wrap(self, piece: MaybeRagged) -> Tensor | JaggedTensor:
        values, structure = piece
        return values if structure is None else JaggedTensor(values, structure, hints=self._hints)


for _base in (Casts, JaggedBase):
    for _name, _member in vars(_base).items():
        if inspect.isfunction(_member):
            # Python's own TypeErrors then name the public class.
            _member.__qualname__ = f"JaggedTensor.{_name}"

trusted = JaggedTensor._trusted
"""Constructs a ragged tensor without checks, from values known to fit the structure."""
