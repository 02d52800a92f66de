"""Ragged inputs of fusions: values and the tensors that describe their rows, viewed as one ragged tensor.

In: a fusion, a shape and a structure. Out: a ragged `TensorView`; a call then takes a `JaggedTensor` in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serrate.errors import CallError
from serrate.frontend import ops
from serrate.ir import hooks
from serrate.ir.fusion import Fusion, RaggedInput
from serrate.ir.view import TensorView
from serrate.tensor import Structure
from serrate.tensor.rows import Rows


def ragged_view(values: TensorView, structure: Structure, buffers: Sequence[TensorView]) -> TensorView:
    """Values viewed as rows; `buffers` are the inputs for `structure.buffers()`."""
    given, view = iter(buffers), values
    named = [(rows, [next(given) for _ in rows.buffers()]) for rows in structure.rows]
    # From the last dim to the first, so that earlier dims keep their positions.
    for dim, (rows, own) in reversed(list(zip(structure.dims, named, strict=True))):
        view = _nested(view, dim, rows, own)
    return view if structure.ahead is None else ops.permute(view, *structure.order(values.ndim))


def _nested(view: TensorView, dim: int, rows: Rows, buffers: list[TensorView]) -> TensorView:
    """The dims that a partitioned dim of the values becomes."""
    if rows.columns is not None:
        starts = None if rows.starts is None else buffers[-1]
        *outer, own, columns = buffers[: rows.levels]
        view = ops.as_product(view, own, columns, starts=starts, ragged_dim=dim, packed=rows.packed)
    elif rows.starts is not None:
        *outer, starts, lengths = buffers
        view = ops.as_nested(view, starts=starts, lengths=lengths, ragged_dim=dim)
    else:
        *outer, own = buffers
        view = ops.as_nested(view, own, ragged_dim=dim)
    for level in reversed(outer):
        view = ops.as_nested(view, level, ragged_dim=dim)
    return view


def ragged_input(fusion: Fusion, shape: Sequence[int | None], dtype: torch.dtype, structure: object) -> TensorView:
    """Declares a ragged argument: its values have `shape`, its rows the form of `structure`, or the rows of another input."""
    if isinstance(structure, TensorView):
        entry = next((r for r in fusion.ragged if r.view is structure), None)
        if entry is None:
            raise CallError("input: structure= takes a Structure, or another ragged input of the fusion")
        form = entry.structure
        assert isinstance(form, Structure)
        buffers, like = entry.buffers, entry.values
    elif isinstance(structure, Structure):
        form, like = structure, None
        buffers = tuple(range(len(fusion.inputs) + 1, len(fusion.inputs) + 1 + len(form.buffers())))
    else:
        raise CallError(f"input: structure= takes a Structure, or another ragged input, got {type(structure).__name__}")
    at, values = len(fusion.inputs), fusion.input(shape, dtype)
    if like is None:
        for buffer in form.buffers():
            fusion.input((None,), buffer.dtype)
    view = ragged_view(values, form, [fusion.inputs[k] for k in buffers])
    fusion.ragged.append(RaggedInput(view, at, buffers, form, like))
    return view


hooks.install(ragged_input=ragged_input)
