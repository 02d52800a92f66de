"""Compiled copies of rows, for the container's conversions.

In: values, and the starts and lengths of runs of their positions. Out: the runs packed back to back, or padded to one length.
Elements are copied as bits, so one program serves all dtypes of a size. On a GPU nothing is read on the host: a run that is out
of bounds is cut off there. Importing this module installs the copies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.compiled import Compiled
from serrate.engine import default_backend
from serrate.frontend import ops
from serrate.frontend.ops.movement import pulled
from serrate.frontend.ops.padding import padded_over
from serrate.frontend.ops.structure import viewed
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array
from serrate.ir.fusion import Fusion
from serrate.ir.partition import partition
from serrate.ir.values import Place, index_of
from serrate.ir.view import TensorView
from serrate.runtime.arguments import KnownRows
from serrate.runtime.results import remember_rows
from serrate.schedule.heuristic import SHARES
from serrate.schedule.target import GPU
from serrate.tensor import moving
from serrate.tensor.moving import BITS
from serrate.tensor.rows import Rows, running_sum
from serrate.tensor.sync import on_host
from serrate.tuner.policy import EAGER

SMALLEST = 1 << 20
"""Below this many bytes on a CPU, torch's indexing is as fast: it is slower per position but has less overhead. (On a GPU it
takes several launches.)"""


def pack_runs(values: Tensor, dim: int, starts: Tensor, lengths: Tensor, total: int, packed: Rows | None = None) -> Tensor | None:
    """Packs runs of a dim back to back; None if torch must do it. `packed` are the rows that they become, if they exist.

    >>> pack_runs(torch.arange(10), 0, torch.tensor([7, 0]), torch.tensor([2, 3]), 5) is None
    True
    """
    shape = (*values.shape[:dim], total, *values.shape[dim + 1 :])
    if not _takes(values, math.prod(shape)):
        return None
    if not on_host(values):
        offsets = running_sum(lengths) if packed is None else _checked_offsets(packed)
        gather = _gather_program(BITS[values.itemsize], *_sides(values, dim), starts.dtype, offsets.dtype)
        return _result(gather(_bits(values, dim), starts, offsets, _positions(total, values)), shape, values.dtype)
    longest = _longest(values.shape[dim], starts, lengths, total)
    if longest is None:
        return None
    program = _pack_program(BITS[values.itemsize], *_sides(values, dim), starts.dtype, lengths.dtype, _whole(longest, total))
    return _result(program(_bits(values, dim), starts, lengths), shape, values.dtype)


def pad_runs(values: Tensor, dim: int, starts: Tensor, lengths: Tensor, room: int, fill: complex) -> Tensor | None:
    """Pads runs of a dim to `room` positions each; None if torch must do it."""
    shape = (*values.shape[:dim], starts.shape[0], room, *values.shape[dim + 1 :])
    if not _takes(values, math.prod(shape)):
        return None
    if on_host(values):
        longest = _longest(values.shape[dim], starts, lengths, None)
        if longest is None or longest > room:
            return None
    bits = torch.full((1,), fill, dtype=values.dtype, device=values.device).view(BITS[values.itemsize])
    program = _pad_program(bits.dtype, *_sides(values, dim), starts.dtype, lengths.dtype)
    rooms = torch.empty(room, dtype=torch.uint8, device=values.device)
    return _result(program(_bits(values, dim), starts, lengths, bits, rooms), shape, values.dtype)


def unpad_rows(padded: Tensor, dim: int, packed: Rows, total: int) -> Tensor | None:
    """Packs padded rows on a GPU back to back, given nothing but their offsets; None on a CPU, and if torch must do it."""
    shape = (*padded.shape[:dim], total, *padded.shape[dim + 2 :])
    if on_host(padded) or not _takes(padded, math.prod(shape)):
        return None
    offsets = _checked_offsets(packed)
    before, after = math.prod(padded.shape[:dim]) > 1, math.prod(padded.shape[dim + 2 :])
    program = _unpad_program(BITS[padded.itemsize], before, after, offsets.dtype)
    boxes = ([-1] if before else []) + [*padded.shape[dim : dim + 2]] + ([after] if after > 1 else [])
    bits = padded.detach().view(boxes).view(BITS[padded.itemsize])
    return _result(program(bits, offsets, _positions(total, padded)), shape, padded.dtype)


def _checked_offsets(rows: Rows) -> Tensor:
    """The boundaries of innermost rows. Programs that are given them check them, unless the rows were checked."""
    level = rows.depth - 1
    offsets = rows.offsets[level].contiguous()
    if rows.verified():
        remember_rows(KnownRows({0: (rows, level)}, {}), (offsets,))
    return offsets


def _positions(total: int, like: Tensor) -> Tensor:
    """A tensor without elements whose structure has `total` positions, known to the host."""
    return torch.empty(total, 0, dtype=torch.uint8, device=like.device)


def _takes(values: Tensor, count: int) -> bool:
    """Whether to use compiled code: there are enough elements, of a supported size, and a compiler."""
    if values.itemsize not in BITS or count == 0 or values.numel() == 0 or not values.is_contiguous():
        return False
    if on_host(values):
        return count * values.itemsize >= SMALLEST and default_backend(values.device) == "cpp"
    return default_backend(values.device) == "triton"


def _longest(size: int, starts: Tensor, lengths: Tensor, total: int | None) -> int | None:
    """The longest run; None if one is out of bounds: torch then raises its own error."""
    if starts.shape[0] == 0:
        return None
    least, longest = map(int, torch.aminmax(lengths))
    if least < 0 or int(starts.min()) < 0 or int((starts + lengths).max()) > size:
        return None
    return longest if total is None or int(lengths.sum()) == total else None


def _whole(longest: int, total: int) -> str | None:
    """`maskless` if no run is a large share of all; else None, and the heuristic decides, which takes longer."""
    return "maskless" if longest * SHARES < total else None


def _sides(values: Tensor, dim: int) -> tuple[bool, int]:
    """Whether there are dims before the moved one, and how many elements the dims after it hold."""
    return math.prod(values.shape[:dim]) > 1, math.prod(values.shape[dim + 1 :])


def _bits(values: Tensor, dim: int) -> Tensor:
    """The values as bits, with the dims before the moved one merged (dropped if they have one position), and those after it."""
    before, after = _sides(values, dim)
    shape = ([-1] if before else []) + [values.shape[dim]] + ([after] if after > 1 else [])
    return values.detach().view(shape).view(BITS[values.itemsize])


def _result(found: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    assert isinstance(found, Tensor)
    return found.view(dtype).view(shape)


@functools.cache
def _pack_program(
    dtype: torch.dtype, before: bool, after: int, starts: torch.dtype, lengths: torch.dtype, strategy: str | None
) -> Compiled:
    with Fusion("pack_runs") as fusion:
        rows, dim = _rows(fusion, dtype, before, after, starts, lengths)
        fusion.output(ops.as_flattened(ops.set(rows), component_dim=dim, ragged_dim=dim + 1))
    return Compiled(fusion, strategy=strategy, policy=EAGER)


@functools.cache
def _gather_program(dtype: torch.dtype, before: bool, after: int, starts: torch.dtype, offsets: torch.dtype) -> Compiled:
    """Packed rows, given by their offsets; each position is read from its run."""
    with Fusion("gather_runs") as fusion:
        values = fusion.input([None] * (1 + before) + [after] * (after > 1), dtype)
        first = fusion.input((None,), starts)
        component, row = _packed_rows(fusion, offsets)
        read = Place(Array(first.tensor.name, signed=True)[index_of(component)] + index_of(row), (component, row))
        _output_rows(fusion, values, int(before), (component, row), (read,))
    return _moving(fusion, dtype, after)


@functools.cache
def _unpad_program(dtype: torch.dtype, before: bool, after: int, offsets: torch.dtype) -> Compiled:
    """Packed rows, given by their offsets; each position is read from its place in the padded row."""
    with Fusion("unpad_rows") as fusion:
        padded = fusion.input([None] * (2 + before) + [after] * (after > 1), dtype)
        component, row = _packed_rows(fusion, offsets)
        read = [Place(index_of(domain), (domain,)) for domain in (component, row)]
        _output_rows(fusion, padded, int(before), (component, row), read)
    return _moving(fusion, dtype, after)


def _packed_rows(fusion: Fusion, offsets: torch.dtype) -> tuple[IterDomain, ...]:
    """Components and rows that lie back to back: two inputs, their offsets, and a tensor of as many positions."""
    bounds, positions = fusion.input((None,), offsets), fusion.input((None, 0), torch.uint8)
    names, count = (fusion.fresh("c"), fusion.fresh("r")), bounds.domains[0].extent_expr - 1
    return partition(positions.domains[0], Array(bounds.tensor.name), count, names=names, program=fusion.identity)


def _output_rows(fusion: Fusion, values: TensorView, dim: int, pair: Sequence[IterDomain], read: Sequence[Place]) -> None:
    """Outputs packed rows, whose positions are read at these places of the values' dims from `dim` on."""
    outer, inner = values.domains[:dim], values.domains[dim + len(read) :]
    rows = pulled(fusion, values.dtype, (*outer, *pair, *inner), values.at((*outer, *read, *inner)))
    fusion.output(ops.as_flattened(rows, component_dim=dim, ragged_dim=dim + 1))


def _moving(fusion: Fusion, dtype: torch.dtype, after: int) -> Compiled:
    """A program that copies rows to where they are packed, on a GPU."""
    if after > 1:
        return Compiled(fusion, policy=EAGER)
    # Nothing is reduced, so a block is a piece: as many loads as possible are in flight.
    block = GPU.move_bytes // dtype.itemsize
    return Compiled(fusion, strategy="persistent_dynamic", tile=block, chunk=block, warps=GPU.warps)


@functools.cache
def _pad_program(dtype: torch.dtype, before: bool, after: int, starts: torch.dtype, lengths: torch.dtype) -> Compiled:
    with Fusion("pad_runs") as fusion:
        rows, _ = _rows(fusion, dtype, before, after, starts, lengths)
        fill, rooms = fusion.input((1,), dtype), fusion.input((None,), torch.uint8)
        fusion.output(padded_over(rows, rooms.domains, fill))
    return Compiled(fusion, policy=EAGER)


def _rows(
    fusion: Fusion, dtype: torch.dtype, before: bool, after: int, starts: torch.dtype, lengths: torch.dtype
) -> tuple[TensorView, int]:
    """Runs of a dim as rows, in any order, and the dim that counts them; the caller has checked that they are in bounds."""
    values = fusion.input([None] * (1 + before) + [after] * (after > 1), dtype)
    first, count = fusion.input((None,), starts), fusion.input((None,), lengths)
    dim = int(before)
    arrays = [Array(view.tensor.name) for view in (first, count)]
    names = (fusion.fresh("c"), fusion.fresh("r"))
    pair = partition(
        values.domains[dim], arrays[0], first.domains[0].extent_expr, lengths=arrays[1], names=names, program=fusion.identity
    )
    return viewed(values, (*values.domains[:dim], *pair, *values.domains[dim + 1 :])), dim


moving.install(pack_runs=pack_runs, pad_runs=pad_runs, unpad_rows=unpad_rows)
