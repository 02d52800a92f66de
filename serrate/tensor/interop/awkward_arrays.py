"""Awkward Array: lists of numbers, nested to any depth.

In: an `ak.Array`, or values with a structure. Out: the other of the two.

    ListOffsetArray        rows back to back, nested rows; rows with columns become these     shared
    ListArray              rows with gaps                                                     shared if the lists are in order
    RegularArray           inner dims; above other lists, parts of equal count                shared
    IndexedArray                                                                              copied

Missing values, records, unions and strings are rejected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError, DeviceError, FormatError
from serrate.tensor.interop.columnar import FixedLists, Lists, Node, Views, assemble, in_order, lists_of
from serrate.tensor.interop.common import Copying, package, rows_of_one_dim
from serrate.tensor.interop.numpy_arrays import array_of, offsets_of, tensor_of
from serrate.tensor.structure import Structure


def from_awkward(array: Any, copying: Copying) -> tuple[Tensor, Structure]:
    """Values and structure of an array of lists.

    >>> import awkward
    >>> from_awkward(awkward.Array([[1.0, 2.0], [], [3.0]]), Copying("from_awkward", None))
    (tensor([1., 2., 3.], dtype=torch.float64), Structure(3 > 3))
    """
    ak = package(copying.bridge, "awkward")
    if not isinstance(array, (ak.Array, ak.contents.Content)):
        raise CallError(f"from_awkward takes an ak.Array, got {type(array).__name__}")
    layout = ak.to_layout(array)
    if ak.backend(layout) != "cpu":
        raise DeviceError(f"from_awkward: the array is on {ak.backend(layout)}: move it first with ak.to_backend(array, 'cpu')")
    nodes: list[Node] = []
    while True:
        layout = _unwrapped(layout, copying)
        found = _node(layout, copying)
        if found is None:
            break
        node, layout = found
        nodes.append(node)
    if layout.is_unknown:
        # An array of unknown type is empty, and has no rows.
        nodes = nodes or [Lists(torch.zeros(1, dtype=torch.int64, device="cpu"))]
        leaf = torch.empty(0, device="cpu")
    else:
        leaf = tensor_of(layout.data, copying)
    if not nodes and leaf.dim() > 1:
        nodes, leaf = [FixedLists(leaf.shape[1], leaf.shape[0])], leaf.flatten(0, 1)
    if not nodes:
        raise CallError("from_awkward takes an array of lists, got an array of numbers: use torch.from_numpy")
    return assemble(nodes, leaf)


def to_awkward(values: Tensor, structure: Structure, copying: Copying) -> Any:
    """The rows as an array of lists.

    >>> to_awkward(torch.arange(3), Structure.from_lengths(torch.tensor([1, 2])), Copying("to_awkward", None)).to_list()
    [[0], [1, 2]]
    """
    ak = package(copying.bridge, "awkward")
    rows = rows_of_one_dim(copying.bridge, structure)
    values = copying.on_cpu(values, "awkward")
    width = values.shape[1] if rows.storage_dims == 2 else 1
    offsets, starts = lists_of(rows, width, copying.bridge)
    if rows.storage_dims == 2 and not values.is_contiguous():
        copying.forced("the padded columns are not contiguous")
        values = values.contiguous()
    else:
        values = copying.kept(values)
    content = ak.contents.NumpyArray(array_of(values.flatten(0, 1) if rows.storage_dims == 2 else values, copying))
    *outer, last = offsets
    if starts is None:
        content = ak.contents.ListOffsetArray(ak.index.Index(last.contiguous().numpy()), content)
    else:
        starts = starts.contiguous()
        stops = starts + last.diff().to(starts.dtype)
        content = ak.contents.ListArray(ak.index.Index(starts.numpy()), ak.index.Index(stops.numpy()), content)
    for level in reversed(outer):
        content = ak.contents.ListOffsetArray(ak.index.Index(level.contiguous().numpy()), content)
    return ak.Array(content)


def _unwrapped(layout: Any, copying: Copying) -> Any:
    """Strips wrappers that change nothing; raises for content that a tensor cannot hold."""
    while True:
        if layout.parameter("__array__") in ("string", "bytestring", "char", "byte"):
            raise FormatError("from_awkward: the array holds strings, and tensors cannot: encode them as numbers first")
        if layout.is_record or layout.is_union:
            what = "records: take one field with array['name']" if layout.is_record else "a union of types: make them one type"
            raise FormatError(f"from_awkward: the array holds {what}")
        if layout.is_option:
            missing = int(layout.mask_as_bool(valid_when=False).sum())
            if missing:
                raise FormatError(
                    f"from_awkward: {missing} of {layout.length} items are None, and tensors cannot hold missing values: "
                    "fill or drop them first (ak.fill_none, ak.drop_none)"
                )
            if hasattr(layout, "index"):
                copying.forced("its items are reached through an index")
            layout = layout.project()
        elif layout.is_indexed:
            copying.forced("its items are reached through an index")
            layout = layout.project()
        else:
            return layout


def _node(layout: Any, copying: Copying) -> tuple[Node, Any] | None:
    """A layout's lists, and the items they use; None if it is not a layout of lists."""
    if layout.is_regular:
        return FixedLists(layout.size, layout.length), layout.content[: layout.size * layout.length]
    if not layout.is_list:
        return None
    if not hasattr(layout, "offsets"):
        starts, stops = (offsets_of(part.data) for part in (layout.starts, layout.stops))
        # An empty list may start anywhere; surplus stops are legal, and ignored.
        lengths = stops[: starts.shape[0]] - starts
        if in_order(starts, lengths) and not _has_lists(layout.content):
            return Views(starts, lengths), layout.content
        copying.forced("its lists are out of order, or lists of lists that leave gaps")
        layout = layout.to_ListOffsetArray64(True)
    offsets = offsets_of(layout.offsets.data)
    first, last = int(offsets[0]), int(offsets[-1])
    return Lists(offsets - first if first else offsets), layout.content[first:last]


def _has_lists(layout: Any) -> bool:
    if layout.is_numpy or layout.is_unknown:
        return False
    return (layout.is_list and not layout.is_regular) or (hasattr(layout, "content") and _has_lists(layout.content))
