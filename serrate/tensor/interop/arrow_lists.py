"""pyarrow: arrays of lists, nested to any depth.

In: a ListArray and its kin, or values with a structure. Out: the other of the two.

    ListArray, LargeListArray           rows back to back, int32 or int64 offsets         shared
    ListViewArray, LargeListViewArray   rows with gaps                                    shared if the lists are in order
    FixedSizeListArray                  inner dims; above other lists, parts of equal count    shared
    lists of lists                      nested rows; rows with columns also become these  shared
    bool, several chunks                                                                  copied

Nulls are rejected, because an empty row is not a missing one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, DtypeError, FormatError
from serrate.tensor.interop.columnar import FixedLists, Lists, Node, Views, assemble, in_order, lists_of
from serrate.tensor.interop.common import Copying, package, rows_of_one_dim
from serrate.tensor.interop.numpy_arrays import array_of, offsets_of, tensor_of
from serrate.tensor.structure import Structure


def from_arrow(array: Any, copying: Copying) -> tuple[Tensor, Structure]:
    """Values and structure of an array of lists.

    >>> import pyarrow
    >>> from_arrow(pyarrow.array([[1.0, 2.0], [], [3.0]]), Copying("from_arrow", None))
    (tensor([1., 2., 3.], dtype=torch.float64), Structure(3 > 3))
    """
    pa = package(copying.bridge, "pyarrow")
    if isinstance(array, pa.ChunkedArray):
        if array.num_chunks > 1:
            copying.forced(f"its {array.num_chunks} chunks are joined")
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if not isinstance(array, pa.Array):
        raise CallError(f"from_arrow takes a pyarrow array of lists, got {type(array).__name__}")
    nodes: list[Node] = []
    while True:
        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        if array.null_count:
            raise FormatError(
                f"from_arrow: {array.null_count} of {len(array)} items of {array.type} are null, and tensors cannot hold nulls: "
                "fill or drop them first (pyarrow.compute.fill_null, drop_null)"
            )
        found = _node(array, pa, copying)
        if found is None:
            break
        node, array = found
        nodes.append(node)
    if not nodes:
        raise CallError(f"from_arrow takes an array of lists, got an array of {array.type}: use torch.from_numpy")
    return assemble(nodes, _leaf(array, pa, copying))


def to_arrow(values: Tensor, structure: Structure, copying: Copying) -> Any:
    """The rows as an array of lists.

    >>> to_arrow(torch.arange(3), Structure.from_lengths(torch.tensor([1, 2])), Copying("to_arrow", None)).tolist()
    [[0], [1, 2]]
    """
    pa = package(copying.bridge, "pyarrow")
    rows = rows_of_one_dim(copying.bridge, structure)
    values = copying.on_cpu(values, "pyarrow")
    if values.dtype.is_complex:
        raise DtypeError(f"to_arrow: pyarrow has no type for {values.dtype}: use torch.view_as_real(jt.values) as the values")
    offsets, starts = lists_of(rows, values.shape[1] if rows.storage_dims == 2 else 1, copying.bridge)
    if values.dtype is torch.bool:
        copying.forced("pyarrow packs bools into bits")
        items = pa.array(array_of(values.contiguous().view(-1), copying))
    else:
        if not values.is_contiguous():
            copying.forced("the values are not contiguous")
        flat = array_of(copying.kept(values).contiguous().view(-1), copying)
        items = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), flat.size, [None, pa.py_buffer(flat)])
    positions = values.shape[0] * (values.shape[1] if rows.storage_dims == 2 else 1)
    inner = values.shape[rows.storage_dims :]
    for dim in reversed(range(len(inner))):
        kind = pa.list_(items.type, inner[dim])
        items = pa.Array.from_buffers(kind, positions * inner[:dim].numel(), [None], children=[items])
    *outer, last = offsets
    if starts is None:
        items = _lists(pa, last, items)
    else:
        large = torch.int64 in (last.dtype, starts.dtype)
        dtype = torch.int64 if large else torch.int32
        kind = (pa.large_list_view if large else pa.list_view)(items.type)
        buffers = [pa.py_buffer(part.to(dtype).contiguous().numpy()) for part in (starts, last.diff())]
        items = pa.Array.from_buffers(kind, len(starts), [None, *buffers], children=[items])
    for level in reversed(outer):
        items = _lists(pa, level, items)
    return items


def _lists(pa: Any, offsets: Tensor, items: Any) -> Any:
    kind = (pa.list_ if offsets.dtype is torch.int32 else pa.large_list)(items.type)
    buffer = pa.py_buffer(offsets.contiguous().numpy())
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, buffer], children=[items])


def _node(array: Any, pa: Any, copying: Copying) -> tuple[Node, Any] | None:
    """An array's lists, and the items they use; None if it is not an array of lists."""
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        return FixedLists(size, len(array)), array.values.slice(array.offset * size, len(array) * size)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        starts, lengths = (offsets_of(part.to_numpy()) for part in (array.offsets, array.sizes))
        if in_order(starts, lengths) and not _has_lists(kind.value_type, pa):
            return Views(starts, lengths), array.values
        copying.forced("the views are out of order, or views of lists")
        # Not by a cast to plain lists: for views out of order, that makes an invalid array.
        return Lists(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(lengths.dtype)), array.flatten()
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    if len(array) == 0:
        # An empty array may have an empty offsets buffer.
        dtype = torch.int64 if pa.types.is_large_list(kind) else torch.int32
        return Lists(torch.zeros(1, dtype=dtype, device="cpu")), array.values.slice(0, 0)
    offsets = offsets_of(array.offsets.to_numpy())
    first, last = int(offsets[0]), int(offsets[-1])
    return Lists(offsets - first if first else offsets), array.values.slice(first, last - first)


def _has_lists(kind: Any, pa: Any) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_list_view, pa.types.is_large_list_view)
    if any(test(kind) for test in tests):
        return True
    return bool(pa.types.is_fixed_size_list(kind)) and _has_lists(kind.value_type, pa)


def _leaf(array: Any, pa: Any, copying: Copying) -> Tensor:
    kind = array.type
    if pa.types.is_null(kind):
        return torch.empty(0, device="cpu")
    if pa.types.is_boolean(kind):
        copying.forced("pyarrow packs bools into bits")
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DtypeError(f"from_arrow: a tensor cannot hold {kind}: cast it to numbers first, e.g. array.cast(pyarrow.int64())")
    return tensor_of(array.to_numpy(), copying)
