"""Loads and stores of plain tensors, and of ragged ones by component and position.

In: a tensor, the keys of an index, and a mask. Out: a value that holds 0 where nothing was read (rule 1), or a tensor written in
the lanes whose own indices exist and are in bounds (rule 4). No lane accesses memory out of bounds, whatever its index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from serrate.errors import KernelIndexError
from serrate.frontend.kernel.machine import current, refuse
from serrate.frontend.kernel.vocabulary import expand_keys
from serrate.interpret.axes import LaneMask
from serrate.interpret.functions import joint_dims
from serrate.interpret.placing import ConcreteIndex, computed, place
from serrate.interpret.values import ConcreteTile, ConcreteValue, value_of
from serrate.tensor import JaggedTensor


class ConcreteElements:
    """The elements an index refers to: their positions in memory, and which lanes have one."""

    def __init__(
        self, tensor: Tensor, placed: ConcreteIndex, where: list[Tensor], inside: Tensor, computed_inside: Tensor
    ) -> None:
        self.tensor, self.placed = tensor, placed
        self.where = where
        self.inside = inside
        """Lanes whose indices exist and are in bounds."""
        self.stray = ~computed_inside
        """Lanes whose indices exist, were computed by the user, and are out of bounds."""


def _plain(tensor: Tensor, key: Any, reads: bool) -> ConcreteElements:
    keys = expand_keys(key, tensor.dim())
    placed = place(keys, tensor.shape, [reads and size == 1 for size in tensor.shape])
    exists = placed.exists()
    inside, stray = exists, torch.zeros_like(exists)
    for index, size, given in zip(placed.indices, tensor.shape, placed.given, strict=True):
        within = (index >= 0) & (index < size)
        if computed(given):
            stray = stray | (exists & ~within)
        inside = inside & within
    return ConcreteElements(tensor, placed, placed.indices, inside, ~stray)


def _rows(jt: JaggedTensor, key: Any, reads: bool) -> ConcreteElements:
    """Component, then a position for each level, then columns; each step looks up where its rows start and end."""
    values, structure = jt.values, jt.structure
    dims = jt.dims
    extents = [
        structure.max_length(d.ragged)
        if d.ragged is not None
        else structure.rows[d.axis].num_rows(0)
        if d.axis is not None
        else values.shape[d.values_dim]
        for d in dims
    ]
    broadcast = [reads and d.axis is None and size == 1 for d, size in zip(dims, extents, strict=True)]
    placed = place(expand_keys(key, len(dims)), extents, broadcast)
    where: dict[int, Tensor] = {}
    component = position = inside = torch.ones((), dtype=torch.bool, device="cpu")
    mentioned: frozenset[int] = frozenset()
    for n, (dim, index) in enumerate(zip(dims, placed.indices, strict=True)):
        if dim.axis is None:
            inside = inside & (index >= 0) & (index < values.shape[dim.values_dim])
            where[dim.values_dim] = index
            continue
        rows = structure.rows[dim.axis]
        if dim.level is None:
            component, mentioned = index, placed.dims[n]
            inside = inside & (index >= 0) & (index < rows.num_rows(0))
            continue
        column = dim.level >= rows.depth
        length = _looked_up(rows.counts() if column else rows.lengths(dim.level), component)
        mentioned = mentioned | placed.dims[n]
        mask = (index >= 0) & (index < length)
        inside = inside & mask
        placed.conditions.append(_row_condition(mask, mentioned, placed, structure, dim.ragged, n))
        if column:
            if rows.packed:
                where[dim.values_dim] = _looked_up(rows.row_starts(), component) + position * length + index
            else:
                where[dim.values_dim] = index
        elif dim.level == rows.depth - 1:
            position = index
            where[dim.values_dim] = _looked_up(rows.row_starts(), component) + index
        else:
            component = _looked_up(rows.offsets[dim.level], component) + index
    exists = placed.exists()
    places = [where[d] for d in range(values.dim())]
    for index, size in zip(places, values.shape, strict=True):
        # Offsets may have changed unnoticed.
        inside = inside & (index >= 0) & (index < size)
    return ConcreteElements(values, placed, places, exists & inside, torch.ones_like(exists))


def _looked_up(table: Tensor, at: Tensor) -> Tensor:
    """`table[at]`, and 0 out of bounds."""
    if table.numel() == 0:
        return torch.zeros_like(at)
    within = (at >= 0) & (at < table.numel())
    return torch.where(within, table.long()[at.clamp(0, table.numel() - 1)], torch.zeros((), dtype=torch.int64, device="cpu"))


def _row_condition(
    mask: Tensor, dims: frozenset[int], placed: ConcreteIndex, structure: Any, ragged: int | None, last: int
) -> LaneMask:
    keys = placed.given[: last + 1]
    born = max((k.born for k in keys if isinstance(k, ConcreteTile)), default=0)
    born = max([born, *(c.born for k in keys if isinstance(k, ConcreteValue) for c in k.conditions)])
    names = tuple(k if isinstance(k, int) else id(k) for k in keys if not isinstance(k, slice))
    return LaneMask(mask, dims, ("row", id(structure), ragged, *names), born, True, (structure, *keys))


def _clamped(target: ConcreteElements) -> tuple[Tensor, ...]:
    """The indices, with 0 where a lane has no element."""
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    return tuple(torch.where(target.inside, index, zero).broadcast_to(target.placed.sizes) for index in target.where)


def _masked(target: ConcreteElements, extra_mask: Any) -> Tensor:
    """The lanes selected by an extra mask, which must have the dims of the index."""
    if extra_mask is None:
        return torch.ones(target.placed.sizes, dtype=torch.bool, device="cpu")
    mask = value_of(extra_mask)
    if mask.dtype is not torch.bool:
        refuse(f"extra_mask must be bool, not {mask.dtype}")
    _fits(mask, target.placed, "extra_mask")
    lanes: Tensor = mask.data.broadcast_to(target.placed.sizes)
    return lanes


def _fits(value: ConcreteValue, placed: ConcreteIndex, what: str) -> None:
    operands = [(placed.axes, placed.sizes), (value.axes, value.data.shape)]
    if value.data.ndim > len(placed.sizes) or joint_dims(operands, what)[1] != list(placed.sizes):
        refuse(f"{what} has shape {tuple(value.data.shape)}, but the index has {tuple(placed.sizes)}")


def _read(target: ConcreteElements, extra_mask: Any) -> ConcreteValue:
    wanted = _masked(target, extra_mask)
    _check_bounds(target, wanted)
    tensor, placed = target.tensor, target.placed
    if tensor.numel() == 0:
        return placed.value(torch.zeros(placed.sizes, dtype=tensor.dtype, device="cpu"))
    run, lanes = current("a load"), target.inside & wanted
    if run.accesses is not None:
        run.accesses.note_read(tensor, tuple(index.broadcast_to(placed.sizes)[lanes] for index in target.where), int(lanes.sum()))
    data = tensor[_clamped(target)] if target.where else tensor
    return placed.value(torch.where(lanes, data, torch.zeros((), dtype=tensor.dtype, device="cpu")))


def _write(target: ConcreteElements, x: Any, extra_mask: Any, *, add: bool = False) -> None:
    run = current("a store")
    if not run.depth:
        refuse("a store by tiles belongs inside a loop over tiles")
    value = value_of(x)
    if not isinstance(value, ConcreteValue):
        refuse(f"a stored value must be a tile value, a tensor or a number, not {type(x).__name__}")
    _fits(value, target.placed, "the stored value")
    wanted = _masked(target, extra_mask)
    _check_bounds(target, wanted)
    tensor = target.tensor
    lanes = target.inside & wanted
    data = value.data.broadcast_to(target.placed.sizes)[lanes].to(tensor.dtype)
    where = tuple(index.broadcast_to(target.placed.sizes)[lanes] for index in target.where)
    if run.accesses is not None:
        run.accesses.note(tensor, where, data, add=add)
    if not where:
        if bool(lanes):
            tensor.copy_(tensor + data.reshape(()) if add else data.reshape(()))
        return
    tensor.index_put_(where, data, accumulate=add)


def _check_bounds(target: ConcreteElements, wanted: Tensor) -> None:
    if current("a load").accesses is None:
        return
    stray = target.stray & wanted
    if bool(stray.any()):
        lane = tuple(stray.nonzero()[0].tolist())
        index = tuple(int(i.broadcast_to(target.placed.sizes)[lane]) for i in target.where)
        refuse(
            f"index {index} is out of bounds for a tensor of shape {tuple(target.tensor.shape)}, in lane {lane}, which is not "
            "masked: pass extra_mask=, or use torch.where on the index",
            KernelIndexError,
        )


def load(tensor: Any, key: Any, extra_mask: Any = None) -> ConcreteValue:
    """Loads from a plain or ragged tensor."""
    with torch._C.DisableTorchFunction():
        return _read(_target(tensor, key, reads=True), extra_mask)


def store(tensor: Any, key: Any, x: Any, extra_mask: Any = None, *, add: bool = False) -> None:
    """Stores to a plain or ragged tensor, or adds to it."""
    with torch._C.DisableTorchFunction():
        _write(_target(tensor, key, reads=False), x, extra_mask, add=add)


def _target(tensor: Any, key: Any, *, reads: bool) -> ConcreteElements:
    if isinstance(tensor, JaggedTensor):
        return _rows(tensor, key, reads)
    if isinstance(tensor, Tensor):
        return _plain(tensor, key, reads)
    refuse(f"loads and stores need a tensor, not a {type(tensor).__name__}")
