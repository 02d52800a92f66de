"""Binding: a caller's arguments to the tensors, extents and structures of a fusion, checked.

In: a fusion and its arguments. Out: a `Call`: what symbols and arrays stand for, and memory for results. Everything that
can be wrong with a call is found here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serrate.errors import CallError, DeviceError, GradientError, ShapeError, StructureMismatch
from serrate.ir.domains import IterDomain, RaggedIterDomain
from serrate.ir.expr import Array, Environment, Expr, Symbol
from serrate.ir.fusion import AtLeastLongest, Equal, Fusion, TensorView
from serrate.ir.transforms import Partition, offsets_array
from serrate.ir.values import Tensor
from serrate.runtime.arrays import derive, remembered
from serrate.tensor import JaggedTensor, Structure


@dataclass(frozen=True)
class Call:
    """One call of a program."""

    tensors: dict[Tensor, torch.Tensor]
    named: dict[str, torch.Tensor]
    symbols: dict[Symbol, int]
    device: torch.device

    def size(self, expr: Expr) -> int:
        """An extent, as a number; one that only lengths tell is read from the device."""
        if expr.value is not None:
            return expr.value
        return int(expr.evaluate(Environment(self.symbols, lambda array, k: int(self.array(array)[k]))))

    def array(self, array: Array) -> torch.Tensor:
        return derive(array, self.named, self.symbols, self.device)


class Binder:
    """Everything about a fusion's arguments that can be worked out before the first call."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self.inputs = [view.tensor for view in fusion.inputs]
        self.unknown = [
            [(k, d.extent_expr) for k, d in enumerate(t.logical) if isinstance(d.extent_expr, Symbol)] for t in self.inputs
        ]
        self.fixed = [
            [(k, d.extent_expr.value) for k, d in enumerate(t.logical) if d.extent_expr.value is not None] for t in self.inputs
        ]
        self.partitions = _partitions(fusion)

    def bind(self, args: Sequence[torch.Tensor]) -> Call:
        """Checks the arguments and binds them."""
        if len(args) != len(self.inputs):
            raise CallError(f"{self.fusion.name} takes {len(self.inputs)} arguments, got {len(args)}")
        symbols: dict[Symbol, int] = {}
        tensors: dict[Tensor, torch.Tensor] = {}
        device = args[0].device if args else torch.device("cpu")
        grad = torch.is_grad_enabled()
        for k, (tensor, arg) in enumerate(zip(self.inputs, args, strict=True)):
            if arg.dtype is not tensor.dtype or arg.ndim != len(tensor.logical):
                raise CallError(
                    f"argument {k} of {self.fusion.name} must be {tensor.dtype} with {len(tensor.logical)} dims, "
                    f"got {arg.dtype} with {arg.ndim}"
                )
            if arg.device != device:
                raise DeviceError(f"argument {k} of {self.fusion.name} is on {arg.device}, argument 0 on {device}")
            if grad and arg.requires_grad:
                raise GradientError(
                    f"argument {k} of {self.fusion.name} requires a gradient, and compiled programs have none; "
                    "call it under torch.no_grad(), or detach the argument"
                )
            shape = arg.shape
            for dim, size in self.fixed[k]:
                if shape[dim] != size:
                    raise ShapeError(f"argument {k} of {self.fusion.name}: dim {dim} must be {size}, got {shape[dim]}")
            for dim, symbol in self.unknown[k]:
                assert isinstance(symbol, Symbol)
                symbols[symbol] = shape[dim]
            tensors[tensor] = arg if arg.is_contiguous() else arg.contiguous()
        call = Call(tensors, {t.name: x for t, x in tensors.items()}, symbols, device)
        self._check(call)
        return call

    def _check(self, call: Call) -> None:
        for chain, total in self.partitions:
            self.structure(call, chain, total)
        for check in self.fusion.checks:
            if isinstance(check, AtLeastLongest):
                longest = self.longest(call, check.ragged)
                if call.size(check.extent) < longest:
                    raise ShapeError(f"{check.what} has {call.size(check.extent)} positions; the longest row has {longest}")
            elif isinstance(check.left, Array) and isinstance(check.right, Array):
                left, right = call.array(check.left), call.array(check.right)
                if left is not right and not torch.equal(left.long(), right.long()):
                    raise StructureMismatch(f"{check.what} differ: {_lengths(left)} and {_lengths(right)}")
            elif isinstance(check, Equal):
                assert isinstance(check.left, Expr) and isinstance(check.right, Expr)
                if call.size(check.left) != call.size(check.right):
                    raise ShapeError(f"{check.what} differ: {call.size(check.left)} and {call.size(check.right)}")

    def structure(self, call: Call, chain: tuple[Array, ...], total: Expr) -> Structure:
        """The structure that a chain of offsets describes, validated once for each tensor."""
        tensors = tuple(call.array(a) for a in chain)
        size = call.size(total)
        return remembered(tensors, ("structure", size), lambda: Structure.from_offsets(*tensors, total=size))

    def longest(self, call: Call, ragged: RaggedIterDomain) -> int:
        """The length of the longest row."""
        offsets = call.array(offsets_array(ragged))
        return remembered((offsets,), "longest", lambda: int(offsets.diff().max()) if len(offsets) > 1 else 0)

    def result(self, call: Call, view: TensorView, memory: torch.Tensor) -> torch.Tensor | JaggedTensor:
        """A result as the caller sees it: rows with their structure, or a plain tensor."""
        logical = view.tensor.logical
        chain = tuple(offsets_array(d) for d in logical if isinstance(d, RaggedIterDomain))
        inner = [call.size(d.extent_expr) for d in _behind(logical)]
        if not chain:
            return memory.view([call.size(d.extent_expr) for d in logical])
        structure = self.structure(call, chain, view.tensor.storage[0].extent_expr)
        return JaggedTensor(memory.view([memory.shape[0], *inner]), structure)


def _behind(logical: tuple[IterDomain, ...]) -> tuple[IterDomain, ...]:
    last = max((k for k, d in enumerate(logical) if d.is_ragged), default=-1)
    return logical[last + 1 :]


def _partitions(fusion: Fusion) -> list[tuple[tuple[Array, ...], Expr]]:
    """Every chain of offsets that the fusion's tensors are nested by, with the extent it must end at."""
    found: dict[tuple[Array, ...], Expr] = {}
    for view in (*fusion.outputs, *_views(fusion)):
        for domain in view.tensor.logical:
            if isinstance(domain, RaggedIterDomain) and isinstance(domain.definition, Partition):
                found[(offsets_array(domain),)] = domain.definition.inputs[0].extent_expr
    return list(found.items())


def _views(fusion: Fusion) -> list[TensorView]:
    tensors = {r.tensor for d in fusion.definitions for v in d.statement.values for r in v.reads}
    return [fusion.view(t) for t in tensors]


def _lengths(offsets: torch.Tensor) -> str:
    lengths = offsets.diff().tolist()
    shown = ", ".join(map(str, lengths[:8]))
    return f"[{shown}{', ...' if len(lengths) > 8 else ''}]"
