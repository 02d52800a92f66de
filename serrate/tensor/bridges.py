"""The bridges to other libraries, and the places in memory, as methods of a ragged tensor.

In: what other libraries hold rows in. Out: `Bridges`, the part of `JaggedTensor` that comes from them and goes to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, overload

import torch  # noqa: F401 -- the examples use it
from torch import Tensor

from serrate.tensor.constructors import Constructors
from serrate.tensor.interop import arrow_lists, awkward_arrays, boundaries, keyed, numpy_arrays, torch_nested
from serrate.tensor.interop.boundaries import CuSeqlens, GroupEnds
from serrate.tensor.interop.common import Copying
from serrate.tensor.interop.keyed import Keyed
from serrate.tensor.interop.memory import parts, pinned, share, shared
from serrate.tensor.lists import to_numbers
from serrate.tensor.padding import mask


class Bridges(Constructors):
    """Conversions of a `JaggedTensor`.

    Every bridge takes `copy`: `None` shares the values where both formats allow and warns (`CopyWarning`) where not, `False`
    raises `CopyError` instead, `True` always copies. Offsets are small: shared where their form is the same, else made anew.
    Values that are shared are the same memory: what is written on one side is seen on the other.
    """

    __slots__ = ()

    # --- torch ---

    @classmethod
    def from_torch_nested(cls, nested: Tensor, *, copy: bool | None = None) -> Self:
        """The rows of a NestedTensor, through which gradients flow.

        Jagged layout: always shared. With lengths its rows have gaps; with its ragged dim k + 1 they are rows of dim k of
        the values, and the dim that counts them comes right before the ragged one: `[B, D, r]` is `(D, B, r0)` here.
        Strided layout: shared if it is contiguous; rows of which two dims differ have columns: `(B, r0, r1)`.

        >>> from serrate import JaggedTensor
        >>> nested = torch.nested.nested_tensor_from_jagged(torch.zeros(3, 4), torch.tensor([0, 2, 3]))
        >>> JaggedTensor.from_torch_nested(nested).shape
        (2, r0, 4)
        """
        return cls(*torch_nested.from_torch_nested(nested, Copying("from_torch_nested", copy)))

    def to_torch_nested(self, layout: str = "jagged", *, copy: bool | None = None) -> Tensor:
        """The same rows as a NestedTensor, through which gradients flow.

        Jagged layout: always shared; rows with gaps become one with lengths. Strided layout: shared if the rows lie back to
        back in contiguous values; it holds rows with columns too. Nested rows and rows of several dims are refused.

        >>> from serrate import JaggedTensor
        >>> [tuple(row.shape) for row in JaggedTensor.from_lengths(torch.zeros(3, 4), [2, 1]).to_torch_nested().unbind()]
        [(2, 4), (1, 4)]
        """
        return torch_nested.to_torch_nested(self._values, self._structure, layout, Copying("to_torch_nested", copy))

    def mask(self) -> Tensor:
        """Which positions of `to_padded()` exist: bool `[B, longest]`, with all dims of the padded values up to the last ragged.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.zeros(3, 4), [2, 1]).mask()
        tensor([[ True,  True],
                [ True, False]])
        """
        return mask(self._values, self._structure, "mask")

    # --- kernels ---

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
        """Rows as variable-length attention kernels are told of them; values and boundaries are shared.

        `max_seqlen` is an upper bound: checked where lengths can be read, elsewhere believed to be the longest length.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_cu_seqlens(torch.zeros(5, 2), torch.tensor([0, 2, 5], dtype=torch.int32), 3).shape
        (2, r0, 2)
        """
        copying = Copying("from_cu_seqlens", copy)
        return cls(*boundaries.from_cu_seqlens(values, cu_seqlens, max_seqlen, validate, copying))

    def to_cu_seqlens(self, *, copy: bool | None = None) -> CuSeqlens:
        """`(values, cu_seqlens, max_seqlen)` with int32 boundaries; rows back to back are shared, others copied.

        The longest length is a host fact: on a device it takes a host copy unless it is known.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.zeros(3), [2, 1]).to_cu_seqlens().cu_seqlens
        tensor([0, 2, 3], dtype=torch.int32)
        """
        return boundaries.to_cu_seqlens(self._values, self._structure, Copying("to_cu_seqlens", copy))

    @classmethod
    def from_group_ends(cls, values: Tensor, ends: Tensor, *, validate: bool | None = None, copy: bool | None = None) -> Self:
        """Groups by where each ends, as `torch.nn.functional.grouped_mm(offs=)` takes them; the values are shared.

        Values behind the last end belong to no group and are left out; on a device, where that cannot be read, the last end
        is trusted to be the number of values.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_group_ends(torch.zeros(5, 2), torch.tensor([2, 5], dtype=torch.int32)).lengths
        tensor([2, 3], dtype=torch.int32)
        """
        return cls(*boundaries.from_group_ends(values, ends, validate, Copying("from_group_ends", copy)))

    def to_group_ends(self, *, copy: bool | None = None) -> GroupEnds:
        """`(values, ends)` with int32 ends; rows back to back are shared, others copied.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.zeros(3), [2, 1]).to_group_ends().ends
        tensor([2, 3], dtype=torch.int32)
        """
        return boundaries.to_group_ends(self._values, self._structure, Copying("to_group_ends", copy))

    # --- keyed features ---

    @overload
    @classmethod
    def from_keyed(
        cls,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        *,
        weights: None = None,
        rows_per_key: Sequence[int] | None = None,
        copy: bool | None = None,
    ) -> dict[str, Self]: ...

    @overload
    @classmethod
    def from_keyed(
        cls,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        *,
        weights: Tensor,
        rows_per_key: Sequence[int] | None = None,
        copy: bool | None = None,
    ) -> tuple[dict[str, Self], dict[str, Self]]: ...

    @classmethod
    def from_keyed(
        cls,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        *,
        weights: Tensor | None = None,
        rows_per_key: Sequence[int] | None = None,
        copy: bool | None = None,
    ) -> dict[str, Self] | tuple[dict[str, Self], dict[str, Self]]:
        """A ragged tensor for every key of a KeyedJaggedTensor: lengths `[keys * B]` and values, both key by key.

        With `weights` (one for every value) a pair: the values' tensors, and the weights' with the same structures. Keys with
        different numbers of samples need `rows_per_key`. Values and weights are shared; where one key ends and the next
        begins is a host fact.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_keyed(["ads", "clicks"], torch.arange(4), torch.tensor([1, 0, 1, 2]))["clicks"].tolist()
        [[1], [2, 3]]
        """
        copying = Copying("from_keyed", copy)
        parts = keyed.from_keyed(keys, values, lengths, rows_per_key, copying)
        found = {key: cls(*part) for key, part in parts.items()}
        if weights is None:
            return found
        weighing = keyed.from_keyed(keys, weights, lengths, rows_per_key, copying)
        return found, {key: cls(part, found[key]._structure) for key, (part, _) in weighing.items()}

    @staticmethod
    def to_keyed(
        tensors: Mapping[str, Bridges], *, weights: Mapping[str, Bridges] | None = None, copy: bool | None = None
    ) -> Keyed:
        """`(keys, values, lengths, offsets, weights)` as KeyedJaggedTensor takes them, from a tensor for every key.

        Values are shared if they lie back to back in memory, as those of `from_keyed` do, and need no gradient.

        >>> from serrate import JaggedTensor
        >>> keyed = JaggedTensor.from_keyed(["ads", "clicks"], torch.arange(4), torch.tensor([1, 0, 1, 2]))
        >>> JaggedTensor.to_keyed(keyed).offsets
        tensor([0, 1, 1, 2, 4])
        """
        apart = [
            None if each is None else {key: (jt._values, jt._structure) for key, jt in each.items()}
            for each in (tensors, weights)
        ]
        return keyed.to_keyed(apart[0] or {}, apart[1], Copying("to_keyed", copy))

    # --- other libraries ---

    @classmethod
    def from_arrow(cls, array: Any, *, copy: bool | None = None) -> Self:
        """The rows of a pyarrow array of lists: ListArray, LargeListArray, their views and fixed sizes, nested to any depth.

        Numbers are shared (and, arrow's buffers being read-only, not to be written into); bools, several chunks, and views that
        are out of order are copied. Lists of fixed size below the last others become inner dims. Nulls are refused.

        >>> import pyarrow
        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_arrow(pyarrow.array([[[1, 2], []], [], [[3]]])).shape
        (3, r0, r1)
        """
        return cls(*arrow_lists.from_arrow(array, Copying("from_arrow", copy)))

    def to_arrow(self, *, copy: bool | None = None) -> Any:
        """A pyarrow array of lists: ListArray for int32 offsets, LargeListArray for int64, of fixed-size lists for inner dims.

        Contiguous values are shared, bools are not. Rows with gaps become (Large)ListViewArrays, rows with columns lists of
        lists; rows of other dims than the first are refused, and so are bfloat16 and complex values.

        >>> from serrate import JaggedTensor
        >>> str(JaggedTensor.from_lengths(torch.zeros(3, 2), [2, 1]).to_arrow().type)
        'large_list<item: fixed_size_list<item: float>[2]>'
        """
        return arrow_lists.to_arrow(self._values, self._structure, Copying("to_arrow", copy))

    @classmethod
    def from_awkward(cls, array: Any, *, copy: bool | None = None) -> Self:
        """The rows of an Awkward Array of lists, nested to any depth.

        Numbers are shared; lists that are out of order and items behind an index are copied. Regular lists below the last
        others become inner dims. Missing values, records, unions and strings are refused.

        >>> import awkward
        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_awkward(awkward.Array([[1, 2], [], [3]])).tolist()
        [[1, 2], [], [3]]
        """
        return cls(*awkward_arrays.from_awkward(array, Copying("from_awkward", copy)))

    def to_awkward(self, *, copy: bool | None = None) -> Any:
        """An Awkward Array of lists that shares the values.

        Rows with gaps become a ListArray, rows with columns lists of lists; rows of other dims than the first are refused, and
        so are bfloat16 values.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_awkward()
        <Array [[0, 1], [2]] type='2 * var * int64'>
        """
        return awkward_arrays.to_awkward(self._values, self._structure, Copying("to_awkward", copy))

    @classmethod
    def from_numpy(cls, values: Any, offsets: Any = None, *, copy: bool | None = None) -> Self:
        """The rows of one array with its offsets (a list of them for nested rows), or of arrays in a list or array of objects.

        One array is shared, unless it runs backwards in memory; separate arrays are put back to back.

        >>> import numpy
        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_numpy(numpy.arange(3), numpy.array([0, 2, 3])).tolist()
        [[0, 1], [2]]
        """
        return cls(*numpy_arrays.from_numpy(values, offsets, Copying("from_numpy", copy)))

    def to_numpy(self, *, copy: bool | None = None) -> Any:
        """The rows as an array of objects that are arrays and share the values; nested rows are arrays of objects again.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).to_numpy()
        array([array([0, 1]), array([2])], dtype=object)
        """
        return numpy_arrays.to_numpy(self._values, self._structure, Copying("to_numpy", copy))

    def tolist(self) -> list[Any]:
        """The rows as nested lists of plain Python numbers: the inverse of `from_nested_list`.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.zeros(3, 2), [2, 1]).tolist()
        [[[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0]]]
        """
        return to_numbers(self._values, self._structure, "tolist")

    # --- memory ---

    def share_memory_(self) -> Self:
        """Moves values and structure into memory that other processes see; the tensor itself.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).share_memory_().is_shared()
        True
        """
        share(self._values, self._structure)
        return self

    def is_shared(self) -> bool:
        """Whether other processes can see values and structure.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).is_shared()
        False
        """
        return shared(self._values, self._structure)

    def pin_memory(self) -> Self:
        """A copy whose values and structure are in page-locked memory, from which a device copies without waiting."""
        return type(self)(*pinned(self._values, self._structure), hints=self._hints)

    def is_pinned(self) -> bool:
        """Whether values and structure are in page-locked memory.

        >>> from serrate import JaggedTensor
        >>> JaggedTensor.from_lengths(torch.arange(3), [2, 1]).is_pinned()
        False
        """
        # torch calls no empty tensor pinned.
        return all(part.is_pinned() for part in parts(self._values, self._structure) if part.numel())
