"""`JaggedTensor`: values with the structure that says which of them belong to which row.

In: values and offsets, lengths, padded values or lists of rows. Out: a ragged tensor, its rows, and its conversions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, ShapeError
from serrate.tensor.bridges import Bridges
from serrate.tensor.describe import Description, describe
from serrate.tensor.hints import NO_HINTS, AccessPattern, Distribution, Hints, Reuse, more_hints
from serrate.tensor.html import as_html
from serrate.tensor.padding import pad
from serrate.tensor.positions import compacted
from serrate.tensor.preview import preview
from serrate.tensor.printing import printed
from serrate.tensor.structure import Structure
from serrate.tensor.taking import Piece, take, take_all

_operators: dict[Callable[..., Any], Callable[..., Any]] = {}


def install_operators(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Teaches torch functions to take a JaggedTensor: each key is a torch function, each value what runs instead.

    >>> install_operators({torch.numel: lambda jt: jt.numel()})
    >>> torch.numel(JaggedTensor.from_list([torch.zeros(2), torch.zeros(1)]))
    3
    """
    _operators.update(functions)


class JaggedTensor(Bridges):
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

    __slots__ = ()

    # --- rows ---

    def unbind(self) -> tuple[Any, ...]:
        """The rows: tensors that share storage with the values, or for nested levels JaggedTensors of one level less.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).unbind()
        (tensor([0, 1]), tensor([2]))
        """
        return tuple(map(self._piece, take_all(self._values, self._structure, "unbind")))

    def to_list(self) -> list[Any]:
        """The rows as a list of tensors, or as lists of lists of tensors for nested levels: the inverse of `from_list`.

        >>> JaggedTensor.from_lengths(torch.arange(3), [[2, 1]]).to_list()
        [[tensor([0, 1]), tensor([2])]]
        """
        pieces = map(self._piece, take_all(self._values, self._structure, "to_list"))
        return [piece if isinstance(piece, Tensor) else piece.to_list() for piece in pieces]

    # --- conversions ---

    def to_padded(self, fill: complex = 0) -> Tensor:
        """A tensor `[B, longest, *inner]`, or `[G, most parts, longest, *inner]` for two levels, with `fill` in the holes.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_padded(fill=-1)
        tensor([[ 0,  1],
                [ 2, -1]])
        """
        return pad(self._values, self._structure, fill)

    def to_format(self, format: str) -> JaggedTensor:
        """The same rows stored another way: `csr` back to back, `padded` each with the room of the longest.

        Itself if it is stored so already.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_format("padded").values
        tensor([0, 1, 2, 0])
        """
        if format not in ("csr", "padded"):
            raise CallError(f"to_format: {format!r} is not one of 'csr', 'padded' and 'nested'")
        if format == self.format:
            return self
        if format == "csr":
            return self.contiguous()
        stored = JaggedTensor.from_padded(self.to_padded(), structure=self._structure, format="padded")
        return JaggedTensor(stored.values, stored.structure, hints=self._hints)

    def contiguous(self) -> JaggedTensor:
        """The same rows back to back, columns packed, and contiguous in memory; itself if they are.

        >>> JaggedTensor.from_starts(torch.arange(8), [0, 4], [3, 2]).contiguous().values
        tensor([0, 1, 2, 4, 5])
        """
        if self._structure.format == "csr" and self._values.is_contiguous():
            return self
        values = self._values
        for dim, rows in reversed(list(zip(self._structure.dims, self._structure.rows, strict=True))):
            values = compacted(values, dim, rows, "contiguous")
        return JaggedTensor(values.contiguous(), self._structure.back_to_back(), hints=self._hints)

    def with_values(self, values: Tensor) -> JaggedTensor:
        """Other values with the same structure and hints.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).with_values(torch.zeros(3, 5)).shape
        (2, r0, 5)
        """
        return JaggedTensor(values, self._structure, hints=self._hints)

    def with_hint(
        self,
        *,
        distribution: Distribution | None = None,
        access_pattern: AccessPattern | None = None,
        reuse: Reuse | None = None,
        **unknown: Any,
    ) -> JaggedTensor:
        """The same tensor with advice for the tuner, beside what was advised before; it never changes a result.

        Hints stay through whatever keeps the rows or takes a part of them; `serrate.tensor.hints` has the words.

        >>> JaggedTensor.from_list([torch.zeros(2)]).with_hint(distribution="uniform", reuse="high").hints
        Hints(distribution='uniform', reuse='high')
        """
        told = {"distribution": distribution, "access_pattern": access_pattern, "reuse": reuse, **unknown}
        return JaggedTensor(self._values, self._structure, hints=more_hints(self._hints, told))

    def detach(self) -> JaggedTensor:
        """The same values, cut off from the gradient's history.

        >>> JaggedTensor.from_list([torch.zeros(2, requires_grad=True)]).detach().requires_grad
        False
        """
        return self.with_values(self._values.detach())

    def requires_grad_(self, requires_grad: bool = True) -> JaggedTensor:
        """Asks for gradients of the values; the tensor itself.

        >>> JaggedTensor.from_list([torch.zeros(2)]).requires_grad_().values.requires_grad
        True
        """
        self._values.requires_grad_(requires_grad)
        return self

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

    def describe(self) -> Description:
        """Lengths in numbers and as a histogram, what padding would cost, which hint fits; prints as text. Reads the lengths.

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

    # --- Python and torch ---

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
        return self._piece(take(self._values, self._structure, row % len(self), "jt[i]"))

    def __repr__(self) -> str:
        if not isinstance(self._values, Tensor):
            # torch's pytrees fill in placeholders, and print them.
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
        if not all(issubclass(kind, (Tensor, JaggedTensor)) for kind in types):
            return NotImplemented
        if function not in _operators:
            name = torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))
            raise CallError(f"{name} does not take a JaggedTensor: use jt.values, jt.unbind() or jt.to_padded()")
        return _operators[function](*args, **(kwargs or {}))

    def _piece(self, piece: Piece) -> Tensor | JaggedTensor:
        values, structure = piece
        return values if structure is None else JaggedTensor(values, structure, hints=self._hints)

    def _slice(self, key: slice) -> JaggedTensor:
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ShapeError(f"jt[a:b] takes rows that lie together, got step {step}: take rows one by one with jt[i]")
        stop = max(start, stop)
        if self._structure.dims[0] > 0:
            return self.with_values(self._values[start:stop])
        part, first, last = self._structure.rows[0].narrow(start, stop, why="jt[a:b]")
        return JaggedTensor(self._values[first:last], self._structure.replace(0, part), hints=self._hints)


def trusted(values: Tensor, structure: Structure, hints: Hints = NO_HINTS) -> JaggedTensor:
    """A ragged tensor of values that are known to fit their structure; nothing is checked.

    >>> trusted(torch.arange(3), JaggedTensor.from_lengths(torch.zeros(3), [2, 1]).structure).unbind()
    (tensor([0, 1]), tensor([2]))
    """
    jt = JaggedTensor.__new__(JaggedTensor)
    jt._values, jt._structure, jt._hints = values, structure, hints
    return jt
