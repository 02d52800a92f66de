"""`JaggedTensor`: values with the structure that says which of them belong to which row.

In: values and offsets, lengths, padded values or lists of rows. Out: a ragged tensor, its rows, and its conversions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, ShapeError
from serrate.tensor.display.describe import Description, describe
from serrate.tensor.display.picture import as_html
from serrate.tensor.display.printing import preview, printed
from serrate.tensor.elsewhere import Elsewhere
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.indexing.keys import lane_key
from serrate.tensor.indexing.reading import getitem
from serrate.tensor.indexing.writing import setitem
from serrate.tensor.padding import pad
from serrate.tensor.pieces import Piece, take_all
from serrate.tensor.positions import compact, coordinates, row_ids, tile_list, total_tiles
from serrate.tensor.reshaping import cut_as, flatten, permute, split, unbind
from serrate.tensor.same_rows import SameRows
from serrate.tensor.structure import Structure

_operators: dict[Callable[..., Any], Callable[..., Any]] = {}


def install_operators(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Teaches torch functions to take a JaggedTensor: each key is a torch function, each value what runs instead.

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


class JaggedTensor(SameRows, Elsewhere):
    """Rows of different lengths, back to back in `values`; a one-level tensor of shape `[B, r0, *inner]` is

        rows = [values[offsets[b]:offsets[b + 1]] for b in range(B)]

    and a two-level one of shape `[G, r0, r1, *inner]` is a list of such lists. Gradients belong to `values`.
    The constructor takes values and a structure; the `from_` class methods take everything else. It is no
    torch.Tensor, but takes torch's operations, each a compiled program; `serrate.jit` makes one program of many.

    >>> jt = JaggedTensor.from_list([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    >>> jt
    JaggedTensor(shape=(2, r0), dtype=torch.float32, device=cpu, lengths=[2, 1], values=[1, 2, 3])
    >>> jt[0]
    tensor([1., 2.])
    """

    __slots__ = ()
    __array_ufunc__ = None  # numpy's numbers and arrays leave operators to ragged tensors, as they do to torch's

    # --- rows ---

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The rows: tensors that share storage with the values, or for nested levels JaggedTensors of one level less.

        Another dim than the first may be named, if it is not ragged.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).unbind()
        (tensor([0, 1]), tensor([2]))
        """
        return tuple(map(self._piece, unbind(self._values, self._structure, self._dim(dim))))

    def to_list(self) -> list[Any]:
        """The rows as a list of tensors, or as lists of lists of tensors for nested levels: the inverse of `from_list`.

        >>> JaggedTensor.from_lengths(torch.arange(3), [[2, 1]]).to_list()
        [[tensor([0, 1]), tensor([2])]]
        """
        pieces = map(self._piece, take_all(self._values, self._structure, "to_list"))
        return [piece if isinstance(piece, Tensor) else piece.to_list() for piece in pieces]

    def row_ids(self, level: int = -1) -> Tensor:
        """Which row of a level every position belongs to, on the device: int64, one number for each position.

        Columns count as positions. With several partitioned dims the positions are those of the level's dim.

        >>> words = JaggedTensor.from_lengths(torch.arange(6), [torch.tensor([2, 1]), torch.tensor([1, 3, 2])])
        >>> words.row_ids(), words.row_ids(level=0)
        (tensor([0, 1, 1, 1, 2, 2]), tensor([0, 0, 0, 0, 1, 1]))
        """
        rows, own = self._structure.at(level)
        return row_ids(rows, own, "row_ids")

    def positions(self, level: int = -1) -> Tensor:
        """The place of every position along the ragged dim of a level, on the device: its place within its row.

        >>> words = JaggedTensor.from_lengths(torch.arange(6), [torch.tensor([2, 1]), torch.tensor([1, 3, 2])])
        >>> words.positions(), words.positions(level=0)
        (tensor([0, 0, 1, 2, 0, 1]), tensor([0, 1, 1, 1, 0, 0]))
        """
        rows, own = self._structure.at(level)
        return coordinates(rows, "positions")[own + 1]

    def total_tiles(self, block: int) -> int:
        """How many tiles of so many positions the innermost rows have together; an empty row has none.

        >>> JaggedTensor.from_lengths(torch.arange(7), [5, 0, 2]).total_tiles(2)
        4
        """
        return total_tiles(self._structure, block)

    def tile_list(self, block: int) -> tuple[Tensor, Tensor]:
        """The row that every one of these tiles belongs to, and its first position there.

        >>> JaggedTensor.from_lengths(torch.arange(7), [5, 0, 2]).tile_list(2)
        (tensor([0, 0, 0, 2]), tensor([0, 2, 4, 0]))
        """
        return tile_list(self._structure, block)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Any, ...]:
        """Pieces of so many rows each, the last one smaller; or of these numbers of rows. Or of a regular dim.

        >>> [len(piece) for piece in JaggedTensor.from_lengths(torch.arange(3), [1, 0, 2]).split(2)]
        [2, 1]
        """
        return tuple(map(self._piece, split(self._values, self._structure, sizes, self._dim(dim))))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        """At most so many pieces of equally many rows, the last one smaller; or of a regular dim.

        >>> [len(piece) for piece in JaggedTensor.from_lengths(torch.arange(3), [1, 0, 2]).chunk(2)]
        [2, 1]
        """
        pieces = cut_as(self._values, self._structure, self._dim(dim), "chunk", lambda whole: whole.chunk(chunks))
        return tuple(map(self._piece, pieces))

    def select(self, dim: int, index: int) -> Any:
        """One place of a dim, which goes away: `jt.select(2, 0)` is `jt[:, :, 0]`.

        >>> JaggedTensor.from_lengths(torch.arange(6).view(3, 2), [2, 1]).select(-1, 0).to_list()
        [tensor([0, 2]), tensor([4])]
        """
        return self[(slice(None),) * self._dim(dim) + (index,)]

    def index_select(self, dim: int, index: Tensor) -> Any:
        """Rows, or places of a regular dim, by number: `jt.index_select(0, index)` is `jt[index]`.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).index_select(0, torch.tensor([1, 0])).to_list()
        [tensor([2]), tensor([0, 1])]
        """
        return self[(slice(None),) * self._dim(dim) + (index,)]

    # --- dims ---

    def unsqueeze(self, dim: int) -> JaggedTensor:
        """A new dim of size 1, anywhere but between a ragged dim and the dim that counts its rows.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).unsqueeze(-1).shape
        (2, r0, 1)
        """
        if not -self.ndim - 1 <= dim <= self.ndim:
            raise ShapeError(f"dim {dim} does not exist: the tensor with its new dim has {self.ndim + 1} dims")
        found: JaggedTensor = self[(slice(None),) * (dim % (self.ndim + 1)) + (None,)]
        return found

    def squeeze(self, dim: int) -> JaggedTensor:
        """Without a regular dim of size 1; itself if its size is another.

        >>> JaggedTensor.from_lengths(torch.zeros(3, 1), [2, 1]).squeeze(-1).shape
        (2, r0)
        """
        kind = self.dims[self._dim(dim)]
        if kind.axis is not None:
            what = "counts rows" if kind.level is None else "is ragged"
            raise ShapeError(f"squeeze: dim {dim} {what} and stays, whatever its size: take rows with jt[i], or jt.flatten(0, 1)")
        found: JaggedTensor = self.select(dim, 0) if self.size(dim) == 1 else self
        return found

    def permute(self, *dims: int | Sequence[int]) -> JaggedTensor:
        """The dims in another order. A ragged dim stays behind the dim that counts its rows.

        Counts of nested rows change places if every row has as many parts: `[rank, expert, tokens]` becomes
        `[expert, rank, tokens]`, and rows move. All else is a view.

        >>> tokens = JaggedTensor.from_lengths(torch.arange(6), [[1, 2], [3, 0]])
        >>> tokens.permute(1, 0, 2).to_list()
        [[tensor([0]), tensor([3, 4, 5])], [tensor([1, 2]), tensor([], dtype=torch.int64)]]
        """
        order = [k for each in dims for k in ((each,) if isinstance(each, int) else each)]
        return JaggedTensor(*permute(self._values, self._structure, order), hints=self._hints)

    def transpose(self, dim0: int, dim1: int) -> JaggedTensor:
        """Two dims in each other's place; see `permute`.

        >>> JaggedTensor.from_lengths(torch.zeros(6, 4, 5), [1, 5]).transpose(2, 3).shape
        (2, r0, 5, 4)
        """
        order = list(range(self.ndim))
        one, other = self._dim(dim0), self._dim(dim1)
        order[one], order[other] = order[other], order[one]
        return self.permute(*order)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Dims as one: a level of nested rows left out, a ragged dim with the regular one behind it, or all rows as one.

        >>> words = JaggedTensor.from_lengths(torch.arange(6), [torch.tensor([2, 1]), torch.tensor([1, 3, 2])])
        >>> words.flatten(1, 2).lengths, words.flatten(0, 1).lengths
        (tensor([4, 2]), tensor([1, 3, 2]))
        """
        return self._piece(flatten(self._values, self._structure, self._dim(start_dim), self._dim(end_dim)))

    # --- conversions ---

    def to_padded(self, fill: complex = 0, *, max_length: int | None = None) -> Tensor:
        """A tensor `[B, longest, *inner]`, or `[G, most parts, longest, *inner]` for two levels, with `fill` in the holes.

        `max_length` is the size of the last ragged dim instead of the longest length: longer rows are cut there.

        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_padded(fill=-1)
        tensor([[ 0,  1],
                [ 2, -1]])
        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_padded(max_length=3)
        tensor([[0, 1, 0],
                [2, 0, 0]])
        """
        if max_length is None:
            return pad(self._values, self._structure, fill)
        if max_length < 0:
            raise ShapeError(f"to_padded: max_length must not be negative, got {max_length}")
        fits = self._structure.rows[-1].known("max", self._structure.rows[-1].levels - 1)
        kept = (
            self
            if fits is not None and fits <= max_length
            else self[(slice(None),) * self.jagged_dims[-1] + (slice(max_length),)]
        )
        return pad(kept._values, kept._structure, fill, max_length)

    def to_format(self, format: str) -> Any:
        """The same rows stored another way: `csr` back to back, `padded` each with the room of the longest; as a ragged tensor,
        itself if it is stored so already. Or `nested`: a list of tensors, as `to_list` gives it.

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
        """The same rows back to back, columns packed, and contiguous in memory; itself if they are.

        >>> JaggedTensor.from_starts(torch.arange(8), [0, 4], [3, 2]).contiguous().values
        tensor([0, 1, 2, 4, 5])
        """
        if self._structure.format == "csr" and self._values.is_contiguous():
            return self
        values, structure = compact(self._values, self._structure, "contiguous")
        return JaggedTensor(values.contiguous(), structure, hints=self._hints)

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
        """Rows, positions of rows, and parts of regular dims; one key for each dim, as in torch.

        `jt[i]`, `jt[a:b]`, numbers or booleans for rows; `jt[:, a:b]` a range of every row, without a copy; `jt[:, i]` one
        position of every row; `jt[..., d]` as torch; `jt[mask]` with a ragged mask of the same rows.

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
        return self._piece(getitem(self._values, self._structure, key))

    def __setitem__(self, key: Any, x: Any) -> None:
        """Writes into the values, where `jt[key]` is a part of them or a ragged mask chooses positions.

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
        for kind in types:
            if not issubclass(kind, (JaggedTensor, Tensor)):
                return NotImplemented
        operator = _operators.get(function)
        if operator is None:
            name = torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))
            raise CallError(f"{name} does not take a JaggedTensor: use jt.values, jt.unbind() or jt.to_padded()")
        return operator(*args, **(kwargs or {}))

    def _piece(self, piece: Piece) -> Tensor | JaggedTensor:
        values, structure = piece
        return values if structure is None else JaggedTensor(values, structure, hints=self._hints)


def trusted(values: Tensor, structure: Structure, hints: Hints = NO_HINTS) -> JaggedTensor:
    """A ragged tensor of values that are known to fit their structure; nothing is checked.

    >>> trusted(torch.arange(3), JaggedTensor.from_lengths(torch.zeros(3), [2, 1]).structure).unbind()
    (tensor([0, 1]), tensor([2]))
    """
    jt = JaggedTensor.__new__(JaggedTensor)
    jt._values, jt._structure, jt._hints = values, structure, hints
    return jt
