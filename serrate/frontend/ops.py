"""Operations on the tensors of a fusion: what `serrate.ops` offers and what tracing records.

In: `TensorView`s and Python numbers. Out: new `TensorView`s; each call adds definitions to the fusion. Result dtypes are
torch's own (asked of torch on empty tensors). Composite operations (softmax, norms) are written here as the reductions
and elementwise steps they are; no later stage knows them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from serrate.errors import DtypeError, ShapeError
from serrate.frontend.broadcast import broadcast, index_into
from serrate.ir.domains import COORDINATE, IterDomain
from serrate.ir.expr import Array, RunningSum
from serrate.ir.fusion import Equal, Fusion, current_fusion
from serrate.ir.partition import partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import combine
from serrate.ir.reductions import reduction
from serrate.ir.storage import collapse, storage_of
from serrate.ir.tile import Accumulate, Store
from serrate.ir.values import Role, Tensor, Value, call, carried_dtype, constant, extent
from serrate.ir.view import TensorView

Number = float | int | bool
Operand = TensorView | Number
Dims = int | Sequence[int]


def _fusion(*operands: object) -> Fusion:
    for operand in operands:
        if isinstance(operand, TensorView):
            return operand.fusion
    return current_fusion()


def _stand_in(operand: Operand) -> Any:
    """Something torch computes result dtypes from: an empty tensor, or the number itself."""
    return torch.empty((1,), dtype=operand.dtype, device="meta") if isinstance(operand, TensorView) else operand


# --- structure ---------------------------------------------------------------------------------------------------------


def as_nested(
    x: TensorView, offsets: TensorView | None = None, *, lengths: TensorView | None = None, ragged_dim: int = 0
) -> TensorView:
    """Views dim `ragged_dim` as (component, ragged) by K+1 offsets or K lengths; no data moves.

    Applied to the component dim of a nested tensor it nests again: documents > sentences > words.

    >>> from serrate import ir
    >>> with ir.Fusion() as f:
    ...     x, off = f.input((None, 4), torch.float32), f.input((4,), torch.int64)
    ...     print(as_nested(x, off).shape)
    (3, 'r0', 4)
    """
    fusion = x.fusion
    given = offsets if offsets is not None else lengths
    if given is None or (offsets is not None and lengths is not None):
        raise ShapeError("as_nested: give offsets or lengths, one of them")
    if given.ndim != 1 or given.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"as_nested: {'offsets' if offsets is not None else 'lengths'} must be 1-D int32 or int64, got {given}")
    if given.tensor.role is not Role.INPUT:
        raise ShapeError("as_nested: offsets must be an input of the fusion")
    dim = _dim(x, ragged_dim)
    domain = x.domains[dim]
    if isinstance(domain, RaggedIterDomain):
        raise ShapeError(f"as_nested: dim {dim} is ragged; nest the component dim, or partition before nesting")
    names = (fusion.fresh("c"), fusion.fresh("r"))
    array = Array(given.tensor.name)
    if offsets is not None:
        count = given.domains[0].extent_expr - 1
    else:
        count = given.domains[0].extent_expr
        array = Array(f"sum({array.name}[c])", recipe=RunningSum(array[COORDINATE], COORDINATE, count))
    component, ragged = partition(domain, array, count, names=names)
    logical = (*x.domains[:dim], component, ragged, *x.domains[dim + 1 :])
    return fusion.view(Tensor(fusion.fresh("T"), x.dtype, logical, x.tensor.storage, x.tensor.role, base=x.tensor.memory))


def as_flattened(x: TensorView, *, component_dim: int = 0, ragged_dim: int = 1) -> TensorView:
    """Views a (component, ragged) pair as the one dim it was made from; the inverse of `as_nested`."""
    c, r = _dim(x, component_dim), _dim(x, ragged_dim)
    flat = combine(x.domains[c], x.domains[r])
    logical = [d for k, d in enumerate(x.domains) if k != r]
    logical[c if c < r else c - 1] = flat
    return x.fusion.view(
        Tensor(x.fusion.fresh("T"), x.dtype, tuple(logical), x.tensor.storage, x.tensor.role, base=x.tensor.memory)
    )


def _dim(x: TensorView, dim: int) -> int:
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ShapeError(f"dim {dim} is out of range for a tensor of {x.ndim} dims")
    return dim % x.ndim


def _dims(x: TensorView, dim: Dims | None) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    return tuple(dict.fromkeys(_dim(x, d) for d in ([dim] if isinstance(dim, int) else dim)))


# --- elementwise -------------------------------------------------------------------------------------------------------


def _elementwise(name: str, dtype: torch.dtype, *operands: Operand, compute: torch.dtype | None = None) -> TensorView:
    """Records `name` over broadcast operands. `compute` is the dtype arguments are brought to first, if they differ."""
    fusion = _fusion(*operands)
    views = [o for o in operands if isinstance(o, TensorView)]
    domains, indices = broadcast(fusion, name, views)
    places = iter(indices)
    values = [v.at(next(places)) if isinstance(v, TensorView) else constant(v, compute or dtype) for v in operands]
    if compute is not None:
        values = [_as(v, compute) for v in values]
    out = fusion.tensor(dtype, domains)
    return fusion.define([out], domains, Store(out, domains, call(name, *values, dtype=dtype)))[0]


def _as(value: Value, dtype: torch.dtype) -> Value:
    same = carried_dtype(value.dtype) == carried_dtype(dtype)
    return value if same else call("cast", value, dtype=dtype)


def _unary(name: str, torch_function: Callable[..., Any]) -> Callable[[TensorView], TensorView]:
    def operation(x: TensorView) -> TensorView:
        dtype = torch_function(_stand_in(x)).dtype
        return _elementwise(name, dtype, x, compute=None if name in ("isnan", "logical_not") else dtype)

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"`torch.{torch_function.__name__}`, elementwise; the result has the operand's structure."
    return operation


def _binary(name: str, torch_function: Callable[..., Any]) -> Callable[[Operand, Operand], TensorView]:
    comparison = name in ("lt", "le", "gt", "ge", "eq", "ne")

    def operation(a: Operand, b: Operand) -> TensorView:
        stands = (_stand_in(a), _stand_in(b))
        dtype = torch_function(*stands).dtype
        return _elementwise(name, dtype, a, b, compute=torch.result_type(*stands) if comparison else dtype)

    operation.__name__ = operation.__qualname__ = name
    operation.__doc__ = f"`torch.{torch_function.__name__}`, elementwise with broadcasting."
    return operation


neg = _unary("neg", torch.neg)
abs = _unary("abs", torch.abs)
exp = _unary("exp", torch.exp)
log = _unary("log", torch.log)
sqrt = _unary("sqrt", torch.sqrt)
rsqrt = _unary("rsqrt", torch.rsqrt)
reciprocal = _unary("reciprocal", torch.reciprocal)
sigmoid = _unary("sigmoid", torch.sigmoid)
tanh = _unary("tanh", torch.tanh)
relu = _unary("relu", torch.relu)
silu = _unary("silu", torch.nn.functional.silu)
erf = _unary("erf", torch.erf)
floor = _unary("floor", torch.floor)
ceil = _unary("ceil", torch.ceil)
square = _unary("square", torch.square)
isnan = _unary("isnan", torch.isnan)
add = _binary("add", torch.add)
sub = _binary("sub", torch.sub)
mul = _binary("mul", torch.mul)
div = _binary("div", torch.true_divide)
pow = _binary("pow", torch.pow)
lt = _binary("lt", torch.lt)
le = _binary("le", torch.le)
gt = _binary("gt", torch.gt)
ge = _binary("ge", torch.ge)
eq = _binary("eq", torch.eq)
ne = _binary("ne", torch.ne)


def maximum(a: Operand, b: Operand) -> TensorView:
    """`torch.maximum`, elementwise with broadcasting; NaN wins."""
    return _extremum("maximum", a, b)


def minimum(a: Operand, b: Operand) -> TensorView:
    """`torch.minimum`, elementwise with broadcasting; NaN wins."""
    return _extremum("minimum", a, b)


def _extremum(name: str, a: Operand, b: Operand) -> TensorView:
    dtype = torch.result_type(_stand_in(a), _stand_in(b))
    return _elementwise(name, dtype, a, b, compute=dtype)


def clamp(x: TensorView, min: Number | None = None, max: Number | None = None) -> TensorView:
    """`torch.clamp` with numbers as bounds."""
    if min is None and max is None:
        raise ShapeError("clamp: give min, max or both")
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


def gelu(x: TensorView, approximate: str = "none") -> TensorView:
    """`torch.nn.functional.gelu`, exact or by tanh."""
    if approximate == "tanh":
        inner = mul(add(x, mul(mul(x, square(x)), 0.044715)), 0.7978845608028654)
        return mul(mul(x, 0.5), add(tanh(inner), 1.0))
    if approximate != "none":
        raise ShapeError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    if not x.dtype.is_floating_point:
        raise DtypeError(f"gelu: takes floating point, got {x.dtype}")
    return _elementwise("gelu", x.dtype, x)


def logical_not(x: TensorView) -> TensorView:
    """`torch.logical_not`."""
    return _elementwise("logical_not", torch.bool, cast(x, torch.bool))


def logical_and(a: TensorView, b: TensorView) -> TensorView:
    """`torch.logical_and`."""
    return _elementwise("logical_and", torch.bool, cast(a, torch.bool), cast(b, torch.bool))


def logical_or(a: TensorView, b: TensorView) -> TensorView:
    """`torch.logical_or`."""
    return _elementwise("logical_or", torch.bool, cast(a, torch.bool), cast(b, torch.bool))


def where(condition: TensorView, a: Operand, b: Operand) -> TensorView:
    """`torch.where`, with broadcasting."""
    if condition.dtype != torch.bool:
        raise DtypeError(f"where: the condition must be bool, got {condition.dtype}")
    fusion = condition.fusion
    dtype = torch.where(_stand_in(condition), _stand_in(a), _stand_in(b)).dtype
    views = [o for o in (condition, a, b) if isinstance(o, TensorView)]
    domains, indices = broadcast(fusion, "where", views)
    places = iter(indices)
    choice = condition.at(next(places))
    arms = [_as(o.at(next(places)), dtype) if isinstance(o, TensorView) else constant(o, dtype) for o in (a, b)]
    out = fusion.tensor(dtype, domains)
    return fusion.define([out], domains, Store(out, domains, call("where", choice, *arms, dtype=dtype)))[0]


def cast(x: TensorView, dtype: torch.dtype) -> TensorView:
    """`x.to(dtype)`; rounds where the new dtype is narrower."""
    return x if x.dtype == dtype else _elementwise("cast", dtype, x)


# --- reductions --------------------------------------------------------------------------------------------------------


def _reduce(name: str, x: TensorView, dims: tuple[int, ...], dtype: torch.dtype, state: torch.dtype) -> tuple[TensorView, ...]:
    """Records a reduction of `x`; gives one view for each state, over the dims that are left."""
    fusion, kind = x.fusion, reduction(name)
    over = tuple(x.domains[d] for d in dims)
    kept = tuple(d for k, d in enumerate(x.domains) if k not in dims)
    try:
        storage_of(kept)
    except ShapeError:
        raise ShapeError(
            f"{name} over a component dim alone: its rows have different lengths; reduce the ragged dim too, or to_padded first"
        ) from None
    value = x.at(x.domains)
    lifted = value if carried_dtype(value.dtype) == state else call("cast", value, dtype=state)
    targets = tuple(fusion.tensor(state, kept) for _ in kind.states)
    views = fusion.define(targets, x.domains, Accumulate(targets, kept, kind, (lifted,), over))
    return views if dtype == state or len(views) > 1 else (cast(views[0], dtype),)


def _keep(x: TensorView, reduced: TensorView, dims: tuple[int, ...], keepdim: bool) -> TensorView:
    """Puts extent-1 dims back where `dims` were reduced."""
    if not keepdim:
        return reduced
    fusion, logical = x.fusion, list(reduced.domains)
    for dim in sorted(dims):
        logical.insert(dim, IterDomain(1, name=fusion.fresh("o")))
    storage = list(reduced.tensor.storage)
    tensor = Tensor(
        fusion.fresh("T"), reduced.dtype, tuple(logical), tuple(storage), reduced.tensor.role, base=reduced.tensor.memory
    )
    return fusion.view(tensor)


def sum(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.sum`; integers and bools sum to int64."""
    dims = _dims(x, dim)
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    return _keep(x, _reduce("sum", x, dims, dtype, carried_dtype(dtype))[0], dims, keepdim)


def prod(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """The product; integers and bools multiply to int64."""
    dims = _dims(x, dim)
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    return _keep(x, _reduce("prod", x, dims, dtype, carried_dtype(dtype))[0], dims, keepdim)


def amax(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.amax`; NaN wins, an empty row gives the smallest value of the dtype."""
    dims = _dims(x, dim)
    return _keep(x, _reduce("max", x, dims, x.dtype, carried_dtype(x.dtype))[0], dims, keepdim)


def amin(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.amin`; NaN wins, an empty row gives the largest value of the dtype."""
    dims = _dims(x, dim)
    return _keep(x, _reduce("min", x, dims, x.dtype, carried_dtype(x.dtype))[0], dims, keepdim)


def any(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.any`."""
    dims = _dims(x, dim)
    return _keep(x, _reduce("any", cast(x, torch.bool), dims, torch.bool, torch.bool)[0], dims, keepdim)


def all(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.all`."""
    dims = _dims(x, dim)
    return _keep(x, _reduce("all", cast(x, torch.bool), dims, torch.bool, torch.bool)[0], dims, keepdim)


def _floating(name: str, x: TensorView) -> torch.dtype:
    if not x.dtype.is_floating_point:
        raise DtypeError(f"{name}: takes floating point, got {x.dtype}; cast first")
    return x.dtype


def _count(x: TensorView, dims: tuple[int, ...], like: TensorView, dtype: torch.dtype) -> TensorView:
    """How many elements a reduction over `dims` counts, as a tensor over `like`'s domains."""
    fusion = x.fusion
    value = constant(1.0, dtype)
    # A ragged dim and its component, both reduced, count the elements of all rows.
    for domain in collapse([x.domains[d] for d in dims]):
        value = call("mul", value, call("cast", extent(domain), dtype=dtype), dtype=dtype)
    out = fusion.tensor(dtype, like.domains)
    return fusion.define([out], like.domains, Store(out, like.domains, value))[0]


def mean(x: TensorView, dim: Dims | None = None, keepdim: bool = False) -> TensorView:
    """`torch.mean`; an empty row gives NaN."""
    dtype, dims = _floating("mean", x), _dims(x, dim)
    state = carried_dtype(dtype)
    total = _reduce("sum", x, dims, state, state)[0]
    result = div(total, _count(x, dims, total, state))
    return _keep(x, cast(result, dtype), dims, keepdim)


def _moments(x: TensorView, dims: tuple[int, ...]) -> tuple[TensorView, TensorView, TensorView]:
    state = carried_dtype(_floating("var", x))
    count, average, squares = _reduce("welford", x, dims, state, state)
    return count, average, squares


def var(x: TensorView, dim: Dims | None = None, correction: Number = 1, keepdim: bool = False) -> TensorView:
    """`torch.var`; an empty row gives NaN."""
    dims = _dims(x, dim)
    count, _, squares = _moments(x, dims)
    result = div(squares, maximum(sub(count, correction), 0.0))
    return _keep(x, cast(result, x.dtype), dims, keepdim)


def _softmax_states(x: TensorView, dim: Dims) -> tuple[tuple[int, ...], TensorView, TensorView]:
    dims = _dims(x, dim)
    state = carried_dtype(_floating("softmax", x))
    largest, total = _reduce("softmax", x, dims, state, state)
    return dims, largest, total


def _undefined(largest: TensorView) -> TensorView:
    """0, or NaN where the maximum is infinite: such a row has no softmax."""
    return sub(largest, largest)


def softmax(x: TensorView, dim: Dims, dtype: torch.dtype | None = None) -> TensorView:
    """`torch.softmax` over a ragged or a regular dim (or several at once)."""
    x = x if dtype is None else cast(x, dtype)
    dims, largest, total = _softmax_states(x, dim)
    scale = _keep(x, add(reciprocal(total), _undefined(largest)), dims, True)
    power = _elementwise("exp_diff", scale.dtype, x, _keep(x, largest, dims, True), compute=scale.dtype)
    return cast(mul(power, scale), x.dtype)


def log_softmax(x: TensorView, dim: Dims, dtype: torch.dtype | None = None) -> TensorView:
    """`torch.log_softmax` over a ragged or a regular dim."""
    x = x if dtype is None else cast(x, dtype)
    dims, largest, total = _softmax_states(x, dim)
    scale = _keep(x, add(log(total), _undefined(largest)), dims, True)
    return cast(sub(sub(x, _keep(x, largest, dims, True)), scale), x.dtype)


def logsumexp(x: TensorView, dim: Dims, keepdim: bool = False) -> TensorView:
    """`torch.logsumexp`; an empty row gives -inf."""
    dims, largest, total = _softmax_states(x, dim)
    return _keep(x, cast(add(largest, log(total)), x.dtype), dims, keepdim)


def _affine(x: TensorView, normal: TensorView, weight: Operand | None, bias: Operand | None) -> TensorView:
    normal = normal if weight is None else mul(normal, weight)
    return cast(normal if bias is None else add(normal, bias), x.dtype)


def layer_norm(
    x: TensorView, dim: Dims = -1, weight: TensorView | None = None, bias: TensorView | None = None, eps: float = 1e-5
) -> TensorView:
    """Normalises to mean 0 and variance 1 over `dim` (any dims, ragged ones included), then scales and shifts."""
    dims = _dims(x, dim)
    count, average, squares = _moments(x, dims)
    scale = rsqrt(add(div(squares, count), eps))
    normal = mul(sub(x, _keep(x, average, dims, True)), _keep(x, scale, dims, True))
    return _affine(x, normal, weight, bias)


def rms_norm(x: TensorView, dim: Dims = -1, weight: TensorView | None = None, eps: float | None = None) -> TensorView:
    """Divides by the root of the mean square over `dim`, then scales."""
    dims, state = _dims(x, dim), carried_dtype(_floating("rms_norm", x))
    total = _reduce("sum", square(cast(x, state)), dims, state, state)[0]
    scale = rsqrt(add(div(total, _count(x, dims, total, state)), torch.finfo(x.dtype).eps if eps is None else eps))
    return _affine(x, mul(x, _keep(x, scale, dims, True)), weight, None)


# --- matrix products ---------------------------------------------------------------------------------------------------


def matmul(x: TensorView, w: TensorView) -> TensorView:
    """Rows of `x` times a weight: [k, j] shared by all rows, or [component, k, j], one for each component.

    >>> from serrate import ir
    >>> with ir.Fusion() as f:
    ...     x, off, w = f.input((None, 8), torch.float32), f.input((4,), torch.int64), f.input((3, 8, 5), torch.float32)
    ...     print(matmul(as_nested(x, off), w).shape)
    (3, 'r0', 5)
    """
    fusion = x.fusion
    if x.ndim < 2 or w.ndim not in (2, 3):
        raise ShapeError(f"matmul: expected rows [..., k] and a weight [k, j] or [component, k, j], got {x} and {w}")
    if x.dtype != w.dtype:
        raise DtypeError(f"matmul: both must have one dtype, got {x.dtype} and {w.dtype}")
    k, j = x.domains[-1], w.domains[-1]
    _equal(fusion, "matmul: the contracted extents", k, w.domains[-2])
    index: tuple[IterDomain, ...] = (k, j)
    if w.ndim == 3:
        component = x.ragged.component if isinstance(x.domains[-2], RaggedIterDomain) else x.domains[-3]
        _equal(fusion, "matmul: the number of components and of weights", component, w.domains[0])
        index = (component, k, j)
    kept = (*x.domains[:-1], j)
    dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    if not x.dtype.is_floating_point:
        raise DtypeError(f"matmul: takes floating point, got {x.dtype}")
    state = fusion.tensor(carried_dtype(dtype), kept)
    product = call("mul", x.at(x.domains), w.at(index), dtype=carried_dtype(dtype))
    out = fusion.define([state], (*kept, k), Accumulate((state,), kept, reduction("sum"), (product,), (k,)))[0]
    return cast(out, dtype)


def _equal(fusion: Fusion, what: str, a: IterDomain, b: IterDomain) -> None:
    difference = (a.extent_expr - b.extent_expr).value
    if difference is None:
        fusion.checks.append(Equal(a.extent_expr, b.extent_expr, what))
    elif difference != 0:
        raise ShapeError(f"{what}: {a.extent} and {b.extent} differ")


def linear(x: TensorView, weight: TensorView, bias: TensorView | None = None) -> TensorView:
    """`torch.nn.functional.linear`: weight is [j, k]."""
    fusion = x.fusion
    if weight.ndim != 2:
        raise ShapeError(f"linear: expected a weight [j, k], got {weight}")
    if x.dtype != weight.dtype:
        raise DtypeError(f"linear: both must have one dtype, got {x.dtype} and {weight.dtype}")
    k, j = x.domains[-1], weight.domains[0]
    _equal(fusion, "linear: the contracted extents", k, weight.domains[1])
    kept = (*x.domains[:-1], j)
    state = fusion.tensor(carried_dtype(_floating("linear", x)), kept)
    product = call("mul", x.at(x.domains), weight.at((j, k)), dtype=state.dtype)
    out = fusion.define([state], (*kept, k), Accumulate((state,), kept, reduction("sum"), (product,), (k,)))[0]
    return cast(out if bias is None else add(out, bias), x.dtype)


def set(x: TensorView) -> TensorView:
    """A copy of `x` with the same structure."""
    out = x.fusion.tensor(x.dtype, x.domains)
    return x.fusion.define([out], x.domains, Store(out, x.domains, x.at(index_into(x, x.domains))))[0]
