"""Ragged tensors as nested Python lists of torch's rows: what every operation must give, without any of serrate.

In: nested lists. Out: `Lists`, which takes the functions, methods and operators of torch that programs use, so that a program
runs on it as it is written. Dims up to the last ragged one are lists, those behind it are the dims of the tensors inside. Each
operation is written once, as plainly as it can be said: per element, per row, or per line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int | None, ...]
"""Sizes; None for a ragged dim."""


class Lists:
    """A ragged tensor. `data` is nested as deep as the last ragged dim of `shape`, and holds tensors of `dtype` inside.

    In a product, dims 1 and 2 both belong to dim 0: there are rectangles.
    """

    def __init__(self, data: Any, shape: Shape, dtype: torch.dtype, *, product: bool = False) -> None:
        self.data, self.shape, self.dtype, self.product = data, shape, dtype, product
        self.depth = 1 + max(k for k, n in enumerate(shape) if n is None)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape of the tensors inside."""
        return tuple(n for n in self.shape[self.depth :] if n is not None)

    def __repr__(self) -> str:
        return f"Lists({self.data}, shape={self.shape})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FUNCTIONS[NAMES.get(function.__name__, function.__name__)](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in FUNCTIONS:
            raise AttributeError(name)
        return lambda *args, **kwargs: FUNCTIONS[name](self, *args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return taken(self, key if isinstance(key, tuple) else (key,))

    def __matmul__(self, other: Any) -> Any:
        return matmul(self, other)


def nested(data: Any, shape: Sequence[int | None], dtype: torch.dtype, *, product: bool = False) -> Any:
    """`Lists`, or a tensor where no dim is ragged."""
    if None in shape:
        return Lists(_packed(data, tuple(shape), dtype), tuple(shape), dtype, product=product)
    return dense(data, tuple(shape), dtype)


def _packed(data: Any, shape: Shape, dtype: torch.dtype) -> Any:
    """Lists down to the last ragged dim, and tensors from there on."""
    return [_packed(each, shape[1:], dtype) for each in data] if None in shape else dense(data, shape, dtype)


def dense(data: Any, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Lists whose dims are all as long as those beside them, as a tensor. A ragged dim of nothing has no length."""
    if isinstance(data, Tensor):
        return data
    parts = [dense(each, shape[1:], dtype) for each in data]
    return torch.stack(parts) if parts else torch.empty((0, *(n or 0 for n in shape[1:])), dtype=dtype)


def split(data: Any, depth: int) -> Any:
    """A tensor, or lists of tensors, as lists of that depth."""
    if depth == 0:
        return data
    return [split(each, depth - 1) for each in (data.unbind() if isinstance(data, Tensor) else data)]


def leaves(data: Any) -> list[Tensor]:
    return [data] if isinstance(data, Tensor) else [leaf for each in data for leaf in leaves(each)]


# --- per element -----------------------------------------------------------------------------------------------------------


def elementwise(function: Callable[..., Any], *operands: Any) -> Any:
    """`function` of operands whose dims stand beside each other from the last one on; a dense one may be longer than a row."""
    shapes = [tuple(o.shape) if isinstance(o, Lists | Tensor) else () for o in operands]
    ndim = max(map(len, shapes))
    aligned = [(1,) * (ndim - len(s)) + s for s in shapes]
    shape = [None if None in sizes else max(sizes, key=lambda n: (n != 1, n)) for sizes in zip(*aligned, strict=True)]
    depth = 1 + max(k for k, n in enumerate(shape) if n is None)

    def go(level: int, parts: list[Any]) -> Any:
        if level == depth:
            return function(*parts)
        own = [len(s) >= ndim - level for s in shapes]
        lengths = [len(p) for p, s, mine in zip(parts, aligned, own, strict=True) if mine and s[level] is None]
        n = lengths[0] if lengths else shape[level]
        assert all(each == n for each in lengths), "rows of different lengths"

        def at(k: int, part: Any, size: int | None, mine: bool) -> Any:
            return part[0 if size == 1 else k] if mine else part

        return [
            go(level + 1, [at(k, p, s[level], m) for p, s, m in zip(parts, aligned, own, strict=True)]) for k in range(n or 0)
        ]

    data = go(0, [o.data if isinstance(o, Lists) else o for o in operands])
    ones = [torch.ones(1, dtype=o.dtype) if isinstance(o, Lists) or (isinstance(o, Tensor) and o.ndim) else o for o in operands]
    product = any(o.product for o in operands if isinstance(o, Lists))
    return Lists(data, tuple(shape), function(*ones).dtype, product=product)


# --- per row, or over several dims -----------------------------------------------------------------------------------------


def reduced(function: Callable[[Tensor, tuple[int, ...]], Tensor], x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """`function` (a tensor, and dims of it) over the elements that there are, position by position where rows are crossed."""
    if isinstance(x, Tensor):
        dims = tuple(range(x.ndim)) if dim is None else dim if isinstance(dim, tuple) else (dim,)
        found = function(x, dims)
        for d in sorted(d % x.ndim for d in dims) if keepdim else ():
            found = found.unsqueeze(d)
        return found
    dims = tuple(range(x.ndim)) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    dims = tuple(sorted(d % x.ndim for d in dims))
    inside = tuple(d - x.depth for d in dims if d >= x.depth)
    longest = {d: max(map(len, at_depth(x.data, d)), default=0) for d in range(x.depth)}
    owner = {d: 0 if x.product else d - 1 for d in range(x.depth) if x.shape[d] is None}
    crossed = {d for d, by in owner.items() if d not in dims and by in dims}

    def go(nodes: list[Any], level: int) -> Any:
        if level == x.depth:
            if not any(d < x.depth for d in dims):
                return function(nodes[0], inside)
            stacked = torch.stack(nodes) if nodes else torch.empty((0, *x.inner), dtype=x.dtype)
            return function(stacked, (0, *(d + 1 for d in inside)))
        if level in dims:
            return go([each for node in nodes for each in node], level + 1)
        if level in crossed or not nodes:
            n = longest[level] if x.shape[level] is None else x.shape[level]
        else:
            n = len(nodes[0])
        return [go([node[k] for node in nodes if len(node) > k], level + 1) for k in range(n or 0)]

    data = go([x.data], 0)
    kept = [longest[d] if d in crossed else n for d, n in enumerate(x.shape) if d not in dims]
    dtype = function(torch.ones((1,) * max(len(dims), 1), dtype=x.dtype), tuple(range(len(dims)))).dtype
    found = nested(data, kept, dtype)
    if not keepdim:
        return found
    found = unsqueezed(found, dims)
    if isinstance(found, Lists):
        found.product = x.product
    return found


def at_depth(data: Any, depth: int) -> list[Any]:
    return [data] if depth == 0 else [each for node in data for each in at_depth(node, depth - 1)]


def unsqueezed(x: Any, dims: Sequence[int]) -> Any:
    for dim in dims:
        if isinstance(x, Tensor):
            x = x.unsqueeze(dim)
            continue

        def go(node: Any, level: int, dim: int = dim) -> Any:
            if isinstance(node, Tensor):
                return node.unsqueeze(dim - level)
            return [node] if level == dim else [go(each, level + 1) for each in node]

        x = Lists(go(x.data, 0), (*x.shape[:dim], 1, *x.shape[dim:]), x.dtype)
    return x


# --- per line --------------------------------------------------------------------------------------------------------------


def along(function: Callable[[Tensor, int], Tensor], x: Any, dim: int) -> Any:
    """`function` (a tensor, and one of its dims) of each line along a dim; lines may change their length."""
    if isinstance(x, Tensor):
        return function(x, dim)
    dim %= x.ndim

    def line(nodes: list[Any], level: int) -> Any:
        """Lists of what is at one place of each of the nodes of a line."""
        if level == x.depth:
            stacked = torch.stack(nodes) if nodes else torch.empty((0, *x.inner), dtype=x.dtype)
            return list(function(stacked, 0).unbind())
        if not nodes:
            return []
        columns = [line([node[k] for node in nodes], level + 1) for k in range(len(nodes[0]))]
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in nodes]

    def go(node: Any, level: int) -> Any:
        if isinstance(node, Tensor):
            return function(node, dim - level)
        return line(node, level + 1) if level == dim else [go(each, level + 1) for each in node]

    data = go(x.data, 0)
    shape = list(x.shape)
    if dim >= x.depth:
        shape[dim] = function(torch.ones(x.inner, dtype=x.dtype), dim - x.depth).shape[dim - x.depth]
    return Lists(data, tuple(shape), function(torch.ones(1, dtype=x.dtype), 0).dtype, product=x.product)


def per_component(function: Callable[..., Tensor], shape: Shape, dtype: torch.dtype, *operands: Any) -> Any:
    """`function` of what each component has of every operand, as one tensor."""
    count = next(len(o.data) for o in operands if isinstance(o, Lists))
    depth = max(k for k, n in enumerate(shape) if n is None) if None in shape else 0

    def of(operand: Any, k: int) -> Tensor:
        if isinstance(operand, Lists):
            return dense(operand.data[k], operand.shape[1:], operand.dtype)
        return operand[k] if operand.ndim == 3 else operand

    parts = [split(function(*(of(o, k) for o in operands)), depth) for k in range(count)]
    return nested(parts, shape, dtype)


def matmul(a: Any, b: Any) -> Any:
    if isinstance(b, Tensor) and b.ndim == 2:
        # The last dim of every row.
        if isinstance(a, Tensor):
            return a @ b
        return Lists(map_leaves(lambda leaf: leaf @ b, a.data), (*a.shape[:-1], b.shape[1]), a.dtype, product=a.product)
    return per_component(torch.matmul, (*a.shape[:-1], b.shape[-1]), a.dtype, a, b)


def map_leaves(function: Callable[[Tensor], Any], data: Any) -> Any:
    return function(data) if isinstance(data, Tensor) else [map_leaves(function, each) for each in data]


def transpose(x: Any, a: int, b: int) -> Any:
    shape = list(x.shape)
    a, b = a % x.ndim, b % x.ndim
    shape[a], shape[b] = shape[b], shape[a]
    return per_component(lambda m: m.transpose(a - 1, b - 1), tuple(shape), x.dtype, x)


def taken(x: Lists, key: tuple[Any, ...]) -> Any:
    """Rows, parts of rows and features, by integers, slices, lists of row numbers, None and an ellipsis."""
    if Ellipsis in key:
        at = key.index(Ellipsis)
        named = len([k for k in key if k is not None and k is not Ellipsis])
        key = (*key[:at], *[slice(None)] * (x.ndim - named), *key[at + 1 :])

    def go(node: Any, key: tuple[Any, ...]) -> Any:
        if isinstance(node, Tensor):
            return node[key]
        if not key:
            return node
        first, *rest = key
        if isinstance(first, int):
            return go(node[first], tuple(rest))
        chosen = node[first] if isinstance(first, slice) else [node[k] for k in first]
        return [go(each, tuple(rest)) for each in chosen]

    shape: list[int | None] = []
    sizes = list(x.shape)
    for each in key:
        if each is None:
            shape.append(1)
            continue
        size = sizes.pop(0)
        if isinstance(each, list):
            shape.append(len(each))
        elif isinstance(each, slice):
            shape.append(None if size is None else len(range(size)[each]))
    shape += sizes
    if isinstance(key[0], int) and x.shape[1] is None:
        shape[0] = len(x.data[key[0]])
    return nested(go(x.data, key), shape, x.dtype)


# --- torch's functions -----------------------------------------------------------------------------------------------------


def _extremum(function: Callable[..., Tensor], worst: str) -> Callable[[Tensor, tuple[int, ...]], Tensor]:
    def run(x: Tensor, dims: tuple[int, ...]) -> Tensor:
        if all(x.shape[d] for d in dims):
            return function(x, dims)
        whole = None if x.dtype.is_floating_point else torch.iinfo(x.dtype)
        infinite = float("-inf") if worst == "min" else float("inf")
        identity = infinite if whole is None else getattr(whole, worst)
        return torch.full([n for k, n in enumerate(x.shape) if k not in dims], identity, dtype=x.dtype)

    return run


def _place(function: Callable[..., Tensor]) -> Callable[[Tensor, tuple[int, ...]], Tensor]:
    def run(x: Tensor, dims: tuple[int, ...]) -> Tensor:
        (dim,) = dims
        kept = [n for k, n in enumerate(x.shape) if k != dim]
        return function(x, dim) if x.shape[dim] else torch.full(kept, -1)

    return run


def _var(x: Tensor, dims: tuple[int, ...], correction: int = 1) -> Tensor:
    count = 1
    for d in dims:
        count *= x.shape[d]
    return ((x - x.mean(dims, keepdim=True)) ** 2).sum(dims) / max(count - correction, 0)


def _each(function: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, tuple[int, ...]], Tensor]:
    def run(x: Tensor, dims: tuple[int, ...]) -> Tensor:
        for d in sorted(dims, reverse=True):
            x = function(x, d)
        return x

    return run


def _reduction(function: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Callable[..., Any]:
    return lambda x, dim=None, keepdim=False: reduced(function, x, dim, keepdim)


def _pointwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: elementwise(function, *operands)


def _line(function: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    return lambda x, dim: along(function, x, dim)


class Pair(tuple[Any, Any]):
    """What `sort` and the like give."""

    values = property(lambda self: self[0])
    indices = property(lambda self: self[1])


def _pair(function: Callable[[Tensor, int], Any]) -> Callable[..., Pair]:
    return lambda x, dim: Pair((along(lambda t, d: function(t, d)[0], x, dim), along(lambda t, d: function(t, d)[1], x, dim)))


_ONE = "exp log sqrt sigmoid tanh relu neg abs square sin cos floor ceil round sign isnan logical_not log1p expm1 reciprocal"
_TWO = "add sub mul div maximum minimum lt le gt ge eq ne where pow floor_divide remainder fmod logical_and logical_or"

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _pointwise(getattr(torch, name)) for name in (*_ONE.split(), *_TWO.split())},
    **{f.__name__: (lambda x, f=f, **_: elementwise(f, x)) for f in (F.silu, F.gelu, F.softplus)},
    "clamp": lambda x, low=None, high=None: elementwise(lambda t: torch.clamp(t, low, high), x),
    "to": lambda x, dtype: elementwise(lambda t: t.to(dtype), x),
    "sum": _reduction(lambda t, dims: t.sum(dims)),
    "mean": _reduction(lambda t, dims: t.mean(dims)),
    "prod": _reduction(_each(torch.prod)),
    "amax": _reduction(_extremum(torch.amax, "min")),
    "amin": _reduction(_extremum(torch.amin, "max")),
    "any": _reduction(_each(torch.any)),
    "all": _reduction(_each(torch.all)),
    "logsumexp": _reduction(lambda t, dims: torch.logsumexp(t, dims)),
    "argmax": _reduction(_place(torch.argmax)),
    "argmin": _reduction(_place(torch.argmin)),
    "var": lambda x, dim=None, correction=1, keepdim=False: reduced(lambda t, dims: _var(t, dims, correction), x, dim, keepdim),
    "softmax": _line(torch.softmax),
    "log_softmax": _line(torch.log_softmax),
    "cumsum": _line(torch.cumsum),
    "cumprod": _line(torch.cumprod),
    "cummax": _pair(torch.cummax),
    "cummin": _pair(torch.cummin),
    "sort": _pair(lambda t, d: torch.sort(t, dim=d, stable=True)),
    "flip": lambda x, dims: along(lambda t, d: t.flip(d), x, dims if isinstance(dims, int) else dims[0]),
    "matmul": matmul,
    "transpose": transpose,
    "unsqueeze": lambda x, dim: unsqueezed(x, [dim % (x.ndim + 1)]),
}

_OPERATORS = {
    **{n: n for n in ("add", "sub", "mul", "pow", "lt", "le", "gt", "ge", "eq", "ne")},
    "div": "truediv",
    "floor_divide": "floordiv",
    "remainder": "mod",
}
NAMES = {f"__{python}__": name for name, python in _OPERATORS.items()}
"""Operators of torch's tensors, where the other side is a list."""
for _name, _python in _OPERATORS.items():
    setattr(Lists, f"__{_python}__", lambda self, other, f=FUNCTIONS[_name]: f(self, other))
    setattr(Lists, f"__r{_python}__", lambda self, other, f=FUNCTIONS[_name]: f(other, self))
Lists.__neg__ = lambda self: FUNCTIONS["neg"](self)  # type: ignore[attr-defined]
Lists.__abs__ = lambda self: FUNCTIONS["abs"](self)  # type: ignore[attr-defined]


# --- comparing -------------------------------------------------------------------------------------------------------------


def difference(want: Any, got: Any, close: float) -> str:
    """Where two results differ; nothing if they do not. `got` is a tensor, or nested lists of tensors."""
    if isinstance(want, tuple):
        return next(
            (f"result {k}: {d}" for k, (w, g) in enumerate(zip(want, got, strict=True)) if (d := difference(w, g, close))), ""
        )
    return _differs(want.data if isinstance(want, Lists) else want, got, close, ())


def _differs(want: Any, got: Any, close: float, path: tuple[int, ...]) -> str:
    here = f"at {list(path)}" if path else "there"
    if isinstance(want, Tensor):
        got = dense(got, want.shape, want.dtype) if isinstance(got, list) else got
        if tuple(want.shape) != tuple(got.shape):
            return f"{here}: got shape {tuple(got.shape)}, want {tuple(want.shape)}"
        if want.dtype != got.dtype:
            return f"{here}: got {got.dtype}, want {want.dtype}"
        good = torch.isclose(got.double(), want.double(), close, close, equal_nan=True)
        if good.all():
            return ""
        first = tuple((~good).nonzero()[0].tolist())
        return f"at {[*path, *first]}: got {got[first].item()!r}, want {want[first].item()!r}"
    parts = list(got.unbind()) if isinstance(got, Tensor) else got
    if len(want) != len(parts):
        return f"{here}: got {len(parts)} parts, want {len(want)}"
    return next((d for k, (w, g) in enumerate(zip(want, parts, strict=True)) if (d := _differs(w, g, close, (*path, k)))), "")
