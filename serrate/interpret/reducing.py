"""Reductions, scans and products of tiles: holes never count (rule 3).

In: values. Out: values without the reduced dim, which always exist, and hold the identity if nothing was reduced; each records
for which of its lanes something existed, because a finished row rests (rule 5).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.frontend.kernel.machine import current, refuse
from serrate.frontend.kernel.vocabulary import dot_dtype, product_dtype
from serrate.interpret.axes import FedLanes, LaneMask, meet
from serrate.interpret.values import ConcreteValue, held_in, value_of

Dims = int | Sequence[int] | None
Picked = namedtuple("Picked", "values indices")


def least(dtype: torch.dtype) -> Any:
    """The identity of a maximum."""
    return -torch.inf if dtype.is_floating_point else False if dtype is torch.bool else torch.iinfo(dtype).min


def most(dtype: torch.dtype) -> Any:
    """The identity of a minimum."""
    return torch.inf if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).max


def dims_of(x: ConcreteValue, dim: Dims, what: str) -> list[int]:
    """The reduced dims, counted from the front."""
    given = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    for d in given:
        if not -x.ndim <= d < x.ndim:
            refuse(f"{what}: dim {d} does not exist in a value of {x.ndim} dims")
    dims = sorted({d % x.ndim for d in given})
    for each in x.pending:
        if any(x.axes[d] in each.axes for d in dims):
            refuse(
                f"{what} over a jagged tile, but the value does not have the dim of its rows: "
                "add it first, as in rows[:, None] + x"
            )
    return dims


def reduced(
    x: ConcreteValue, dims: Sequence[int], keepdim: bool, data: Tensor, dtype: torch.dtype | None = None
) -> ConcreteValue:
    """The result of a reduction in this dtype; `data` still has the reduced dims, with size 1."""
    lanes = x.exists().broadcast_to(x.data.shape)
    fed = [FedLanes(f.mask.amax(list(dims), keepdim=True) if dims else f.mask, f.time) for f in x.fed]
    fed.append(FedLanes(lanes.any(list(dims), keepdim=True) if dims else lanes, current("a reduction").clock))
    kept = [c for c in x.conditions if not c.dims & set(dims)]
    axes = [None if d in dims else axis for d, axis in enumerate(x.axes)]
    full = ConcreteValue(data, axes, kept, fed, x.pending, dtype)
    return full if keepdim else drop(full, dims)


def drop(x: ConcreteValue, dims: Sequence[int]) -> ConcreteValue:
    """Removes dims of size 1 that no condition mentions."""
    kept = [d for d in range(x.ndim) if d not in dims]

    def shape(t: Tensor) -> Tensor:
        return t.reshape([t.shape[d] for d in kept])

    place = {d: n for n, d in enumerate(kept)}
    conditions = [
        LaneMask(shape(c.mask), frozenset(place[d] for d in c.dims), c.key, c.born, c.row, c.keep) for c in x.conditions
    ]
    fed = [FedLanes(shape(f.mask), f.time) for f in x.fed]
    return ConcreteValue(shape(x.data), [x.axes[d] for d in kept], conditions, fed, x.pending, x.dtype)


def filled(x: ConcreteValue, dims: Sequence[int], identity: Any) -> Tensor:
    """The lanes, with the identity where they do not exist."""
    exists = x.exists().broadcast_to(x.data.shape)
    return torch.where(exists, x.data, torch.full((), identity, dtype=x.data.dtype, device=x.data.device))


def _sum(x: ConcreteValue, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> ConcreteValue:
    dims = dims_of(x, dim, "sum")
    lanes = filled(x, dims, 0)
    result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    lanes = lanes.to(held_in(result))
    return reduced(x, dims, keepdim, lanes.sum(dims, keepdim=True) if dims else lanes, result)


def _prod(x: ConcreteValue, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> ConcreteValue:
    dims = dims_of(x, dim, "prod")
    result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    data = filled(x, dims, 1).to(held_in(result))
    for d in dims:
        data = data.prod(d, keepdim=True)
    return reduced(x, dims, keepdim, data, result)


def _mean(x: ConcreteValue, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> ConcreteValue:
    if not (dtype or x.dtype).is_floating_point:
        refuse(f"mean of {x.dtype}: convert it to a float first, as in torch")
    dims = dims_of(x, dim, "mean")
    counted = x.exists().broadcast_to(x.data.shape).sum(dims, keepdim=True) if dims else torch.ones((), device="cpu")
    result = dtype or x.dtype
    lanes = filled(x, dims, 0).to(held_in(result))
    return reduced(x, dims, keepdim, (lanes.sum(dims, keepdim=True) if dims else lanes) / counted, result)


def _extreme(what: str, identity: Callable[[torch.dtype], Any]) -> Callable[..., ConcreteValue]:
    def run(x: ConcreteValue, dim: Dims = None, keepdim: bool = False) -> ConcreteValue:
        dims = dims_of(x, dim, what)
        data = filled(x, dims, identity(x.dtype))
        return reduced(x, dims, keepdim, getattr(torch, what)(data, dims, keepdim=True) if dims else data, x.dtype)

    return run


_amax, _amin = _extreme("amax", least), _extreme("amin", most)


def _truth(what: str, identity: bool) -> Callable[..., ConcreteValue]:
    def run(x: ConcreteValue, dim: Dims = None, keepdim: bool = False) -> ConcreteValue:
        dims = dims_of(x, dim, what)
        lanes = torch.where(x.exists().broadcast_to(x.data.shape), x.data != 0, torch.tensor(identity, device="cpu"))
        return reduced(x, dims, keepdim, getattr(torch, what)(lanes, dims, keepdim=True) if dims else lanes)

    return run


def _arg(what: str, identity: Callable[[torch.dtype], Any]) -> Callable[..., ConcreteValue]:
    def run(x: ConcreteValue, dim: int | None = None, keepdim: bool = False) -> ConcreteValue:
        if dim is None:
            if x.ndim != 1:
                refuse(f"{what} over all of {x.ndim} dims depends on the block sizes: pass dim=")
            dim = 0
        (d,) = dims_of(x, dim, what)
        exists = x.exists().broadcast_to(x.data.shape)
        lanes = filled(x, [d], identity(x.dtype))
        # The first existing lane that holds the extremum; NaN counts as one, as in torch.
        best = getattr(torch, "a" + what[3:])(lanes, d, keepdim=True)
        hit = exists & ((lanes == best) | (lanes.isnan() if x.dtype.is_floating_point else False))
        found = torch.where(hit.any(d, keepdim=True), hit.to(torch.uint8).argmax(d, keepdim=True), torch.tensor(-1, device="cpu"))
        return reduced(x, [d], keepdim, found)

    return run


_argmax, _argmin = _arg("argmax", least), _arg("argmin", most)


def _max_like(
    extreme: Callable[..., ConcreteValue], arg: Callable[..., ConcreteValue], both: Callable[..., Any]
) -> Callable[..., Any]:
    def run(x: ConcreteValue, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, ConcreteValue):
            from serrate.interpret.functions import call

            return call(both, (x, dim), {})
        return extreme(x) if dim is None else Picked(extreme(x, dim, keepdim), arg(x, dim, keepdim))

    return run


def _softmax(x: ConcreteValue, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Any:
    x = x if dtype is None else x.to(dtype)
    shifted = (x - _amax(x, dim, True)).exp()
    return shifted / _sum(shifted, dim, True)


def _logsumexp(x: ConcreteValue, dim: int, keepdim: bool = False) -> Any:
    # Only existing lanes count; the maximum is subtracted, unless it is infinite.
    dims = dims_of(x, dim, "logsumexp")
    lanes = filled(x, dims, -torch.inf)
    return reduced(x, dims, keepdim, torch.logsumexp(lanes, dims, keepdim=True), x.dtype)


# --- scans ---


def _cumulative(what: str, identity: int) -> Callable[..., ConcreteValue]:
    def run(x: ConcreteValue, dim: int, dtype: torch.dtype | None = None) -> ConcreteValue:
        (d,) = dims_of(x, dim, what)
        result = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
        return scanned(x, d, getattr(torch, what)(filled(x, [d], identity), d, dtype=held_in(result)), result)

    return run


def scanned(x: ConcreteValue, dim: int, data: Tensor, dtype: torch.dtype) -> ConcreteValue:
    """The result of a scan: it exists where its operand does, and is fed where anything existed along the dim."""
    lanes = x.exists().broadcast_to(x.data.shape).any(dim, keepdim=True)
    fed = [FedLanes(f.mask.amax(dim, keepdim=True), f.time) for f in x.fed]
    return ConcreteValue(data, x.axes, x.conditions, [*fed, FedLanes(lanes, current("a scan").clock)], x.pending, dtype)


def associative_scan(combine: Callable[..., Any], x: Any, dim: int, reverse: bool) -> Any:
    """Lane by lane along a dim; a hole passes on the running value."""
    many = isinstance(x, (tuple, list))
    given = [value_of(each) for each in (x if many else [x])]
    (d,) = dims_of(given[0], dim, "associative_scan")
    exists = given[0].exists().broadcast_to(given[0].data.shape)
    for each in given[1:]:
        exists = exists & each.exists()
    seen = torch.zeros_like(exists.select(d, 0)) if exists.shape[d] else exists
    carried: list[Tensor] = []
    results: list[list[Tensor]] = [[] for _ in given]
    count = given[0].data.shape[d]
    for lane in reversed(range(count)) if reverse else range(count):
        new = [each.data.select(d, lane) for each in given]
        if carried:
            rest = [axis for n, axis in enumerate(given[0].axes) if n != d]
            kinds = [each.dtype for each in given]
            left, right = ([ConcreteValue(t, rest, dtype=d) for t, d in zip(part, kinds, strict=True)] for part in (carried, new))
            with torch._C._EnableTorchFunction():
                made = combine(tuple(left), tuple(right)) if many else combine(left[0], right[0])
            new = [torch.where(seen, value_of(m).data, n) for m, n in zip(made if many else [made], new, strict=True)]
            new = [torch.where(exists.select(d, lane), n, c) for n, c in zip(new, carried, strict=True)]
        carried, seen = new, seen | exists.select(d, lane)
        for into, each in zip(results, new, strict=True):
            into.append(each)
    stacked = [torch.stack(each[::-1] if reverse else each, d) for each in results]
    out = [
        scanned(each, d, data, each.dtype if data.dtype is each.data.dtype else data.dtype)
        for each, data in zip(given, stacked, strict=True)
    ]
    return tuple(out) if many else out[0]


# --- products ---


def matmul(a: ConcreteValue, b: ConcreteValue, out_dtype: torch.dtype | None = None) -> ConcreteValue:
    """Contracts the last dim of `a` with the second to last of `b`, accumulating in float32 (float64 for float64).

    A condition on the contracted dim is applied to both operands, so that neither can contribute a NaN there; if it also mentions
    a dim that the other operand lacks, it is refused.
    """
    from serrate.interpret.functions import joint_dims

    if a.ndim == 0 or b.ndim == 0:
        refuse("a matrix product needs operands with at least one dim")
    if a.ndim == 1:
        return drop(matmul(a.unsqueeze(0), b, out_dtype), [max(b.ndim, 2) - 2])
    if b.ndim == 1:
        return drop(matmul(a, b.unsqueeze(1), out_dtype), [a.ndim - 1])
    k_axis, other = a.axes[-1], b.axes[-2]
    if a.data.shape[-1] != b.data.shape[-2]:
        refuse(f"a matrix product contracts {a.data.shape[-1]} lanes ({k_axis}) with {b.data.shape[-2]} ({other})")
    if not meet(k_axis, other):
        refuse(f"a matrix product contracts {k_axis} with {other}: index both operands by the same tile")
    for each in (*a.pending, *b.pending):
        if k_axis in each.axes or other in each.axes:
            refuse("a matrix product over a jagged tile, but an operand does not have the dim of its rows")
    ndim = max(a.ndim, b.ndim)
    batch, _ = joint_dims([(a.axes[:-2], a.data.shape[:-2]), (b.axes[:-2], b.data.shape[:-2])], "a product")
    left, right = _contracted(a, -1, -2), _contracted(b, -2, -1)
    kind = product_dtype(a.dtype, b.dtype)
    zero = torch.zeros((), dtype=kind, device="cpu")
    # 16-bit operands are rounded to 16 bits; the result is not.
    one, two = (x.data.to(x.dtype).to(kind) for x in (a, b))
    data = torch.matmul(torch.where(left & right.mT, one, zero), torch.where(left.mT & right, two, zero))
    result = out_dtype or torch.promote_types(a.dtype, b.dtype)
    counted = torch.matmul(_lanes(a).float(), _lanes(b).float()) > 0
    axes = [*batch, a.axes[-2], b.axes[-1]]
    conditions = [c.moved(range(ndim - a.ndim, ndim), ndim) for c in a.conditions if a.ndim - 1 not in c.dims]
    conditions += [c.moved(range(ndim - b.ndim, ndim), ndim) for c in b.conditions if b.ndim - 2 not in c.dims]
    fed = [FedLanes(_any(f.mask, -1, ndim), f.time) for f in a.fed] + [FedLanes(_any(f.mask, -2, ndim), f.time) for f in b.fed]
    fed.append(FedLanes(counted, current("a product").clock))
    return ConcreteValue(data, axes, conditions, fed, (*a.pending, *b.pending), result)


def _lanes(x: ConcreteValue) -> Tensor:
    return x.exists().broadcast_to(x.data.shape)


def _any(mask: Tensor, dim: int, ndim: int) -> Tensor:
    mask = mask.any(dim, keepdim=True)
    return mask.reshape([1] * (ndim - mask.dim()) + list(mask.shape))


def _contracted(x: ConcreteValue, contracted: int, free: int) -> Tensor:
    """Where the contracted dim exists, as a mask with size 1 in the free dim."""
    k, other = x.ndim + contracted, x.ndim + free
    mask = torch.ones([1] * x.ndim, dtype=torch.bool, device="cpu")
    for c in x.conditions:
        if k in c.dims:
            if other in c.dims:
                refuse(
                    f"a matrix product contracts {x.axes[k]}, which exists under a condition on {x.axes[other]} "
                    "that the other operand cannot have: "
                    "make the lanes exist with hl.fill(x, 0), or write (a[:, :, None] * b).sum(1)"
                )
            mask = mask & c.mask
    return mask


def dot(a: Any, b: Any, acc: Any = None, out_dtype: torch.dtype | None = None) -> Any:
    """`hl.dot`: has `dot_dtype`, or is added to `acc` in its dtype."""
    a, b = value_of(a), value_of(b)
    if acc is None:
        return matmul(a, b, out_dtype or dot_dtype(a.dtype, b.dtype))
    return (acc + matmul(a, b, acc.dtype)).to(out_dtype or acc.dtype)


def _addmm(acc: ConcreteValue, a: ConcreteValue, b: ConcreteValue, *, beta: float = 1, alpha: float = 1) -> Any:
    product = matmul(a, b, acc.dtype)
    product = product if alpha == 1 else product * alpha
    return (acc if beta == 1 else acc * beta) + product


def fill(x: ConcreteValue, v: Any) -> ConcreteValue:
    """Makes every lane exist, with `v` in holes. The bounds of plain ranges are kept."""
    rows = [c for c in x.conditions if c.row]
    exists = torch.ones([1] * x.ndim, dtype=torch.bool, device="cpu")
    for c in rows:
        exists = exists & c.mask
    data = torch.where(exists.broadcast_to(x.data.shape), x.data, torch.as_tensor(v, dtype=x.data.dtype, device="cpu"))
    return ConcreteValue(data, x.axes, [c for c in x.conditions if not c.row], x.fed, dtype=x.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "prod": _prod,
    "mean": _mean,
    "amax": _amax,
    "amin": _amin,
    "max": _max_like(_amax, _argmax, torch.maximum),
    "min": _max_like(_amin, _argmin, torch.minimum),
    "argmax": _argmax,
    "argmin": _argmin,
    "any": _truth("any", False),
    "all": _truth("all", True),
    "softmax": _softmax,
    "logsumexp": _logsumexp,
    "cumsum": _cumulative("cumsum", 0),
    "cumprod": _cumulative("cumprod", 1),
    "matmul": matmul,
    "mm": matmul,
    "bmm": matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "dot": matmul,
}
