"""Binding: a caller's arguments to the extents and structures of a fusion, checked.

In: a fusion and its arguments. Out: a `Call`: the arguments, and what symbols and arrays stand for. Everything that can be
wrong with a call is found here, before anything runs. What depends on lengths is checked once for each tensor of offsets.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from serrate.errors import CallError, DeviceError, GradientError, ShapeError, StructureMismatch
from serrate.ir.expr import Array, Expr, Symbol, size_function
from serrate.ir.fusion import AtLeastLongest, Equal, Fusion
from serrate.ir.partition import Partition
from serrate.ir.ragged import RaggedIterDomain, offsets_array
from serrate.runtime.arrays import derive, remembered, sources
from serrate.tensor import Structure
from serrate.tensor.sync import host_copy


@dataclass(frozen=True)
class Call:
    """One call of a program: its arguments, and the values of the fusion's symbols in the order of `Binder.symbols`."""

    args: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    device: torch.device


class Binder:
    """Everything about a fusion's arguments that can be worked out before the first call."""

    def __init__(self, fusion: Fusion) -> None:
        self.name = fusion.name
        self.checks = tuple(fusion.checks)
        self.inputs = tuple(view.tensor for view in fusion.inputs)
        self.symbols: dict[Symbol, int] = {}
        self._forms = []
        for tensor in self.inputs:
            fixed, unknown = [], []
            for dim, domain in enumerate(tensor.logical):
                extent = domain.extent_expr
                if isinstance(extent, Symbol):
                    self.symbols[extent] = len(self.symbols)
                    unknown.append(dim)
                else:
                    fixed.append((dim, extent.value))
            self._forms.append((tensor.dtype, len(tensor.logical), tuple(fixed), tuple(unknown)))
        place = {tensor.name: k for k, tensor in enumerate(self.inputs)}
        self.partitions = _partitions(fusion)
        self._told: set[int] = set()
        arrays = {source for chain, _ in self.partitions for a in chain for source in sources(a)}
        self.offsets = tuple(sorted(place[a.name] for a in arrays))

    def bind(self, args: Sequence[torch.Tensor]) -> Call:
        """Checks the arguments and binds them; what depends on lengths is left to `check`."""
        if len(args) != len(self.inputs):
            raise CallError(f"{self.name} takes {len(self.inputs)} arguments, got {len(args)}")
        numbers: list[int] = []
        device = args[0].device if args else torch.device("cpu")
        grad = torch.is_grad_enabled()
        clean = True
        for k, arg in enumerate(args):
            dtype, rank, fixed, unknown = self._forms[k]
            if not isinstance(arg, torch.Tensor) or arg.dtype is not dtype or arg.ndim != rank:
                raise CallError(f"argument {k} of {self.name} must be a {dtype} tensor with {rank} dims, got {_described(arg)}")
            if arg.device != device:
                raise DeviceError(f"argument {k} of {self.name} is on {arg.device}, argument 0 on {device}; move one of them")
            if grad and arg.requires_grad:
                raise GradientError(
                    f"argument {k} of {self.name} requires a gradient, and compiled programs have none; "
                    "call it under torch.no_grad(), or detach the argument"
                )
            shape = arg.shape
            for dim, size in fixed:
                if shape[dim] != size:
                    raise ShapeError(f"argument {k} of {self.name}: dim {dim} must be {size}, got {shape[dim]}")
            for dim in unknown:
                numbers.append(shape[dim])
            clean = clean and arg.is_contiguous()
        given = tuple(args) if clean else tuple(self._packed(k, a) for k, a in enumerate(args))
        return Call(given, tuple(numbers), device)

    def _packed(self, k: int, arg: torch.Tensor) -> torch.Tensor:
        """The argument with its elements side by side; says so, once, where that takes a copy."""
        if arg.is_contiguous():
            return arg
        if k not in self._told:
            self._told.add(k)
            warnings.warn(
                f"argument {k} of {self.name} is not contiguous and is copied at every call; call .contiguous() once before",
                stacklevel=4,
            )
        return arg.contiguous()

    def size(self, expr: Expr) -> Callable[[Sequence[int]], int]:
        """An extent without arrays, as a function of a call's numbers."""
        return size_function(expr, tuple(self.symbols))

    def array(self, call: Call, array: Array) -> torch.Tensor:
        """The elements of an array in a call."""
        named = {t.name: x for t, x in zip(self.inputs, call.args, strict=True)}
        return derive(array, named, dict(zip(self.symbols, call.numbers, strict=True)), call.device)

    def check(self, call: Call) -> None:
        """Everything that depends on lengths; done once for each tensor of offsets."""
        for chain, total in self.partitions:
            self.structure(call, chain, total)
        for check in self.checks:
            if isinstance(check, AtLeastLongest):
                longest, reach = self.longest(call, check.ragged), self.size(check.extent)(call.numbers)
                if reach < longest:
                    raise ShapeError(f"{check.what} has {reach} positions; the longest row has {longest}")
            elif isinstance(check.left, Array) and isinstance(check.right, Array):
                left, right = self.array(call, check.left), self.array(call, check.right)
                if left is not right and not torch.equal(*(host_copy(x.long(), check.what) for x in (left, right))):
                    raise StructureMismatch(f"{check.what} differ: lengths {_lengths(left)} and {_lengths(right)}")
            elif isinstance(check, Equal):
                assert isinstance(check.left, Expr) and isinstance(check.right, Expr)
                a, b = self.size(check.left)(call.numbers), self.size(check.right)(call.numbers)
                if a != b:
                    raise ShapeError(f"{check.what} differ: {a} and {b}")

    def structure(self, call: Call, chain: tuple[Array, ...], total: Expr) -> Structure:
        """The structure that a chain of offsets describes, validated once for each tensor."""
        tensors = tuple(self.array(call, a) for a in chain)
        size = self.size(total)(call.numbers)
        return remembered(tensors, ("structure", size), lambda: Structure.from_offsets(*tensors, total=size))

    def known_longest(self, call: Call, ragged: RaggedIterDomain) -> int | None:
        """The length of the longest row, if nothing needs to be copied to the host to say it."""
        array = offsets_array(ragged)
        total = next((t for chain, t in self.partitions if chain == (array,)), None)
        if total is not None:
            return self.structure(call, (array,), total).known_max_length()
        return self.longest(call, ragged) if call.device.type == "cpu" else None

    def longest(self, call: Call, ragged: RaggedIterDomain) -> int:
        """The length of the longest row."""
        offsets = self.array(call, offsets_array(ragged))
        why = f"the longest row of {ragged.name}"
        return remembered((offsets,), "longest", lambda: int(host_copy(offsets, why).diff().max()) if len(offsets) > 1 else 0)


def _described(arg: object) -> str:
    if isinstance(arg, torch.Tensor):
        return f"{arg.dtype} with {arg.ndim}"
    return type(arg).__name__


def _partitions(fusion: Fusion) -> list[tuple[tuple[Array, ...], Expr]]:
    """Every array of offsets that the fusion's tensors are nested by, with the extent it must end at."""
    found: dict[tuple[Array, ...], Expr] = {}
    tensors = {r.tensor for d in fusion.definitions for v in d.statement.values for r in v.reads}
    for tensor in (*tensors, *(view.tensor for view in fusion.outputs)):
        for domain in tensor.logical:
            if isinstance(domain, RaggedIterDomain) and isinstance(domain.definition, Partition) and domain.definition.covers:
                found[(offsets_array(domain),)] = domain.definition.inputs[0].extent_expr
    return list(found.items())


def _lengths(offsets: torch.Tensor) -> str:
    lengths = offsets.diff().tolist()
    shown = ", ".join(map(str, lengths[:8]))
    return f"[{shown}{', ...' if len(lengths) > 8 else ''}]"
