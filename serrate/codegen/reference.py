"""The reference backend: runs a loop program with plain torch, block by block. The oracle of every other backend.

In: a loop program, and a value for each of its tensors, arrays and symbols. Out: the tensors, written. Lanes are tensor axes;
grid and serial loops are Python loops. Nothing is skipped for speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from serrate.errors import VerificationError
from serrate.ir.expansion import steps
from serrate.ir.expr import Array, Environment, Expr, Symbol
from serrate.ir.loops import (
    MAX_NUMBER,
    Assign,
    Barrier,
    Bind,
    Declare,
    Dot,
    Existing,
    Fold,
    For,
    Guard,
    Held,
    If,
    Lane,
    Lanes,
    Load,
    Local,
    LoopProgram,
    Node,
    Number,
    Prefetch,
    Reduce,
    Running,
    While,
    Write,
    identity_of,
)
from serrate.ir.philox import random_bits
from serrate.ir.values import LIBRARY_BINARY, LIBRARY_UNARY, Call, Constant, Tensor, Value, carried_dtype

_SAME_NAME = (
    "neg abs exp log sqrt rsqrt reciprocal sigmoid tanh relu erf floor ceil square isnan add sub mul maximum minimum "
    "lt le gt ge eq ne logical_not logical_and logical_or pow where"
)
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in (*_SAME_NAME.split(), "gcd", *LIBRARY_UNARY, *LIBRARY_BINARY)},
    "div": torch.true_divide,
    "bitand": torch.bitwise_and,
    "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "sin": torch.sin,
    "fmod": torch.fmod,
    "cos": torch.cos,
    "floordiv": lambda a, b: torch.where(b == 0, 0, torch.floor_divide(a, torch.where(b == 0, 1, b))),
    "rem": lambda a, b: torch.where(b == 0, 0, torch.remainder(a, torch.where(b == 0, 1, b))),
    "random_bits": random_bits,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "exp_below": lambda x, m: torch.exp(x - m),
    "exp_near": lambda x, m: torch.exp(x - m),
    "exp_rough": lambda x, m: torch.exp(x - m),
    "height": lambda x, m: torch.nan_to_num((x - m) * math.log2(math.e), 2.0**30, 2.0**30, -(2.0**30)).clamp(-(2**30), 2**30),
    "too_high": lambda height, m: (height > 23) | ~torch.isfinite(m),
    "exp_diff": lambda x, m: torch.where(x == m, torch.ones_like(x - m), torch.exp(x - m)),
}

REDUCERS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "sum": (lambda x, dims: x.sum(dims) if dims else x, torch.add),
    "prod": (lambda x, dims: _each_dim(torch.prod, x, dims), torch.mul),
    "max": (lambda x, dims: torch.amax(x, dims) if dims else x, torch.maximum),
    MAX_NUMBER: (lambda x, dims: torch.amax(_no_nan(x), dims) if dims else _no_nan(x), torch.fmax),
    "min": (lambda x, dims: torch.amin(x, dims) if dims else x, torch.minimum),
    "any": (lambda x, dims: _each_dim(torch.any, x, dims), torch.logical_or),
    "all": (lambda x, dims: _each_dim(torch.all, x, dims), torch.logical_and),
}


def _no_nan(x: torch.Tensor) -> torch.Tensor:
    """Replaces NaN by -inf."""
    return x.nan_to_num(-math.inf, math.inf, -math.inf)


def _each_dim(function: Callable[..., torch.Tensor], x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in sorted(dims, reverse=True):
        x = function(x, dim)
    return x


def run(
    program: LoopProgram,
    tensors: Mapping[Tensor, torch.Tensor],
    arrays: Mapping[Array, torch.Tensor],
    symbols: Mapping[Symbol, int],
) -> None:
    """Runs all kernels in order."""
    for kernel in program.kernels:
        _Interpreter(tensors, arrays, symbols).run(kernel.body)


class _Interpreter:
    def __init__(
        self, tensors: Mapping[Tensor, torch.Tensor], arrays: Mapping[Array, torch.Tensor], symbols: Mapping[Symbol, int]
    ) -> None:
        self.tensors, self.arrays = tensors, arrays
        self.symbols: dict[Symbol, Any] = dict(symbols)
        self.laned: dict[Symbol, Bind] = {}
        self.locals: dict[str, torch.Tensor] = {}
        self.device = next(iter(tensors.values())).device if tensors else torch.device("cpu")

    def run(self, body: tuple[Node, ...]) -> None:
        for node in body:
            if isinstance(node, For):
                for k in range(int(self.evaluate(node.extent, ()))):
                    self.symbols[node.symbol] = k
                    self.run(node.body)
            elif isinstance(node, Bind):
                if node.lanes:
                    self.laned[node.symbol] = node
                else:
                    self.symbols[node.symbol] = self.evaluate(node.expr, ())
            elif isinstance(node, Declare):
                shape = [lane.size for lane in node.local.lanes]
                self.locals[node.local.name] = torch.full(
                    shape, 0 if node.number is None else node.number, dtype=carried_dtype(node.local.dtype), device=self.device
                )
            elif isinstance(node, If):
                self.run(node.then if self._holds(node.guard) else node.other)
            elif isinstance(node, While):
                self.run(node.test)
                while self._holds(node.guard):
                    self.run(node.body)
                    self.run(node.test)
            elif isinstance(node, Fold):
                self.run(tuple(steps(node)))
            elif not isinstance(node, Prefetch | Barrier):
                self.block(node)

    def _at(self, local: Local, lanes: Lanes) -> tuple[torch.Tensor, list[Lane]]:
        """A private block and its lanes; if a loop runs over one of them, at that position."""
        found, own = self.locals[local.name], list(local.lanes)
        for lane in local.lanes:
            if lane not in lanes:
                found = found.select(own.index(lane), int(self.symbols[lane.symbol]))
                own.remove(lane)
        return found, own

    def _holds(self, guard: Guard) -> bool:
        return bool(self.mask(guard, ()).all())

    def block(self, node: Assign | Reduce | Dot | Running | Write) -> None:
        shape = [lane.size for lane in node.lanes]
        exists = self.mask(node.guard, node.lanes).expand(shape)
        if isinstance(node, Write):
            value = self.value(node.value, node.lanes, exists).expand(shape)
            memory = self.tensors[node.tensor]
            place = tuple(
                torch.as_tensor(self.evaluate(e, node.lanes), device=self.device).expand(shape)[exists] for e in node.index
            )
            if exists.any() and node.add:
                memory.index_put_(place, value[exists].to(memory.dtype), accumulate=True)
            elif exists.any():
                memory[place] = value[exists].to(memory.dtype)
            return
        local = self.locals[node.local.name]
        if isinstance(node, Assign):
            value = self.value(node.value, node.lanes, exists).expand(shape).to(local.dtype)
            part, own = self._at(node.local, node.lanes)
            order = [node.lanes.index(lane) for lane in own]
            part.copy_(torch.where(exists, value, local.new_zeros(())).permute(order).where(exists.permute(order), part))
        elif isinstance(node, Running):
            self.running(node, exists, shape)
        elif isinstance(node, Dot):
            # Every lane of an operand: the product's guard says which of them count, and an operand has fewer lanes.
            every = torch.ones([1] * len(shape), dtype=torch.bool, device=self.device)
            left, right = self.value(node.left, node.lanes, every), self.value(node.right, node.lanes, every)
            zero = torch.zeros((), dtype=local.dtype, device=self.device)
            product = torch.where(exists, left.to(local.dtype) * right.to(local.dtype), zero)
            self.locals[node.local.name] = local + product.sum(-1)
        else:
            whole, combine = REDUCERS[node.operator]
            identity = identity_of(node.operator, local.dtype)
            value = self.value(node.value, node.lanes, exists).expand(shape).to(local.dtype)
            value = torch.where(exists, value, torch.full((), identity, dtype=local.dtype, device=self.device))
            dims = tuple(k for k, lane in enumerate(node.lanes) if lane not in node.local.lanes)
            kept = [lane for lane in node.lanes if lane in node.local.lanes]
            order = [kept.index(lane) for lane in node.local.lanes]
            self.locals[node.local.name] = combine(local, whole(value, dims).to(local.dtype).permute(order))

    def running(self, node: Running, exists: torch.Tensor, shape: list[int]) -> None:
        _, combine = REDUCERS[node.operator]
        carry = self.locals[node.carry.name]
        identity = identity_of(node.operator, carry.dtype)
        value = self.value(node.value, node.lanes, exists).expand(shape).to(carry.dtype)
        value = torch.where(exists, value, torch.full((), identity, dtype=carry.dtype, device=self.device))
        if node.axis is None:
            self.locals[node.carry.name] = combine(carry, value)
            self.locals[node.local.name] = self.locals[node.carry.name].to(carried_dtype(node.local.dtype))
            return
        dim = node.lanes.index(node.axis)
        out = torch.empty_like(value)
        for k in range(node.axis.size):
            carry = combine(carry, value.select(dim, k))
            out.select(dim, k).copy_(carry)
        # The carried value may be wider.
        self.locals[node.carry.name], self.locals[node.local.name] = carry, out.to(carried_dtype(node.local.dtype))

    def evaluate(self, expr: Expr, lanes: Lanes) -> Any:
        symbols = _Symbols(self, lanes)

        def element(array: Array, index: Any) -> Any:
            data = self.locals[array.name].reshape(-1) if array.local else self.arrays[array]
            if isinstance(index, torch.Tensor):
                return data[index.clamp(0, max(len(data) - 1, 0))].long() if len(data) else torch.zeros_like(index)
            # Results in holes are not used.
            return int(data[min(max(index, 0), len(data) - 1)]) if len(data) else 0

        def search(array: Array, count: int, position: Any, first: Any) -> Any:
            if isinstance(first, torch.Tensor):
                return self._search_rows(self.arrays[array], count, torch.as_tensor(position, device=first.device), first)
            data = self.arrays[array][first + 1 : first + count + 1].contiguous()
            found = torch.searchsorted(data, torch.as_tensor(position, dtype=data.dtype, device=data.device), right=True)
            found = found.clamp(max=max(count - 1, 0))
            return found if isinstance(position, torch.Tensor) else int(found)

        return expr.evaluate(Environment(symbols, element, search))

    def _search_rows(self, data: torch.Tensor, count: int, position: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """The owners of positions that lie in different rows of offsets."""
        places = first.unsqueeze(-1) + torch.arange(1, count + 1, device=first.device)
        rows = data[places.clamp(0, max(len(data) - 1, 0))] if len(data) else torch.zeros_like(places)
        return (rows <= position.unsqueeze(-1)).sum(-1).clamp(max=max(count - 1, 0))

    def mask(self, guard: Guard, lanes: Lanes) -> torch.Tensor:
        exists = torch.ones([1] * len(lanes), dtype=torch.bool, device=self.device)
        for condition in guard:
            left, right = self.evaluate(condition.left, lanes), self.evaluate(condition.right, lanes)
            exists = exists & torch.as_tensor(left < right, device=self.device)
            if left is not right and not isinstance(left < right, torch.Tensor) and not left < right:
                # Later conditions must not be evaluated: a row that does not exist has no length.
                break
        return exists

    def value(self, value: Value, lanes: Lanes, exists: torch.Tensor) -> torch.Tensor:
        memo: dict[int, torch.Tensor] = {}

        def compute(v: Value) -> torch.Tensor:
            if id(v) not in memo:
                memo[id(v)] = self._compute(v, lanes, exists, compute)
            return memo[id(v)]

        return compute(value)

    def _compute(self, v: Value, lanes: Lanes, exists: torch.Tensor, compute: Callable[[Value], torch.Tensor]) -> torch.Tensor:
        if isinstance(v, Constant):
            return torch.full((), v.number, dtype=carried_dtype(v.dtype), device=self.device)
        if isinstance(v, Load):
            return self._load(v, lanes, exists)
        if isinstance(v, Held):
            local, own = self._at(v.local, lanes)
            order = [own.index(lane) for lane in lanes if lane in own]
            return local.permute(order).reshape([lane.size if lane in own else 1 for lane in lanes])
        if isinstance(v, Number):
            return torch.as_tensor(self.evaluate(v.expr, lanes), device=self.device).to(v.dtype)
        if isinstance(v, Existing):
            return self._existing(v, lanes)
        assert isinstance(v, Call), v
        args = [compute(a) for a in v.args]
        if v.function == "cast":
            return _cast(args[0], v.dtype)
        if v.function not in FUNCTIONS:
            raise VerificationError(f"the reference backend has no function {v.function!r}")
        return FUNCTIONS[v.function](*args).to(carried_dtype(v.dtype))

    def _load(self, v: Load, lanes: Lanes, exists: torch.Tensor) -> torch.Tensor:
        memory = self.tensors[v.tensor]
        places, inside = [], exists & self.mask(v.guard, lanes)
        for e, size in zip(v.index, memory.shape, strict=True):
            place = torch.as_tensor(self.evaluate(e, lanes), device=self.device)
            inside = inside & (place >= 0) & (place < size)
            places.append(place.clamp(0, max(size - 1, 0)))
        other = torch.full((), v.other, dtype=memory.dtype, device=self.device)
        if memory.numel() == 0:
            return other.expand(inside.shape).to(carried_dtype(memory.dtype))
        found = memory[tuple(places)] if places else memory
        return torch.where(inside, found, other).to(carried_dtype(memory.dtype))

    def _existing(self, v: Existing, lanes: Lanes) -> torch.Tensor:
        every: Lanes = (*lanes, *(lane for lane in v.lanes if lane not in lanes))
        shape = [lane.size if lane in v.lanes else 1 for lane in every]
        mask = self.mask(v.guard, every)
        counted = tuple(k for k, lane in enumerate(every) if lane in v.lanes)
        full = mask & torch.ones(shape, dtype=torch.bool, device=self.device)
        # torch sums over everything if dims is empty.
        total = (full.sum(counted, keepdim=True) if counted else full).to(v.dtype)
        return total.reshape(total.shape[: len(lanes)])


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds to a 16-bit dtype, and converts back to the dtype it is computed in."""
    return x.to(dtype).to(carried_dtype(dtype))


class _Symbols(dict[Symbol, Any]):
    """Symbols as seen by a block: its lanes are axes; names with lanes are evaluated on demand."""

    def __init__(self, interpreter: _Interpreter, lanes: Lanes) -> None:
        super().__init__(interpreter.symbols)
        self.interpreter, self.lanes = interpreter, lanes
        for k, lane in enumerate(lanes):
            self[lane.symbol] = _axis(lane, k, len(lanes), interpreter.device)

    def __missing__(self, symbol: Symbol) -> Any:
        bind = self.interpreter.laned.get(symbol)
        if bind is None and symbol.name in self.interpreter.locals:
            # A number that the program has computed.
            return int(self.interpreter.locals[symbol.name])
        if bind is None:
            raise KeyError(symbol)
        self[symbol] = self.interpreter.evaluate(bind.expr, self.lanes)
        return self[symbol]


def _axis(lane: Lane, position: int, rank: int, device: torch.device) -> torch.Tensor:
    return torch.arange(lane.size, device=device).reshape([-1 if k == position else 1 for k in range(rank)])
