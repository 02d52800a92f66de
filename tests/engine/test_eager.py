"""Eager operations: torch's functions, methods and operators on ragged tensors, with torch's own signatures.

In: functions that run on a ragged tensor and on plain torch alike. Out: failures that name the case. What all backends compute is
tested elsewhere; here the reference backend shows what each spelling means, and a sample of them is compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from serrate import JaggedTensor, Structure
from serrate.api import eager
from serrate.api import jit as calls
from serrate.errors import CallError, DtypeError, GradientError, SerrateError, ShapeError, StructureMismatch
from tests.engine.test_compositions import COMPOSITIONS, tensor_of

LENGTHS = [3, 0, 5, 2]
Function = Callable[..., Any]


def rows(dtype: torch.dtype = torch.float32, features: tuple[int, ...] = (4,)) -> JaggedTensor:
    values = torch.randn(sum(LENGTHS), *features, generator=torch.Generator().manual_seed(3))
    return JaggedTensor.from_lengths((values if dtype.is_floating_point else values * 4).to(dtype), LENGTHS)


def plain(x: Any) -> Any:
    return x.values if isinstance(x, JaggedTensor) else x


def same(got: Any, want: Any, dtype: torch.dtype = torch.float32) -> None:
    got, want = plain(got), plain(want)
    assert got.dtype == want.dtype
    loose = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(dtype, 1e-4)
    torch.testing.assert_close(got, want, rtol=loose, atol=loose, equal_nan=True)


T = torch.tensor
SPELLINGS: dict[str, Function] = {
    # What is true of each row is true of all values: elementwise, or along the last dim.
    "add, alpha": lambda x: torch.add(x, 3, alpha=2),
    "sub, alpha": lambda x: x.sub(x * 2, alpha=0.5),
    "rsub": lambda x: torch.rsub(x, 3, alpha=2),
    "div, floor": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    "div, trunc": lambda x: x.div(0.3, rounding_mode="trunc"),
    "div of integers, trunc": lambda x: torch.div((x * 9).long(), 4, rounding_mode="trunc"),
    "round, decimals": lambda x: torch.round(x, decimals=2),
    "round, tens": lambda x: (x * 100).round(decimals=-1),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp, one side": lambda x: torch.clip(x, max=0.2),
    "clamp by tensors": lambda x: x.clamp(x * 0.5, x * 0.5 + 1),
    "clamp_min": lambda x: torch.clamp_min(x, 0.1),
    "clamp_max": lambda x: x.clamp_max(0.1),
    "where, a number": lambda x: torch.where(x > 0, x, 0.0),
    "where, two numbers": lambda x: torch.where(x > 0, 1, 0),
    "where, a method": lambda x: x.where(x > 0, 2.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, -9),
    "masked_fill by a tensor": lambda x: torch.masked_fill(x, x > 0, T(2.0)),
    "nan_to_num": lambda x: torch.nan_to_num(torch.log(x), nan=1.0, neginf=-3),
    "isclose": lambda x: torch.isclose(x, x + (x > 0) * 1e-2, rtol=1e-3),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=2),
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 5, value=2),
    "zeros_like": lambda x: torch.zeros_like(x),
    "full_like": lambda x: torch.full_like(x, 3, dtype=torch.int64),
    "bitwise": lambda x: (x > 0) & ~(x > 1) | (x < -1) ^ (x < -2),
    "logical, numbers": lambda x: torch.logical_and(x, x > 0),
    "relu6": lambda x: F.relu6(x * 9),
    "elu, positional": lambda x: F.elu(x, 0.5, False),
    "leaky_relu": lambda x: F.leaky_relu(x, negative_slope=0.2),
    "mish": lambda x: F.mish(x),
    "hardswish": lambda x: F.hardswish(x),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": lambda x: F.softplus(x, beta=2, threshold=1),
    "half": lambda x: x.half(),
    "long": lambda x: x.long(),
    "bool": lambda x: x.bool(),
    "bfloat16": lambda x: x.bfloat16(),
    "type_as": lambda x: x.type_as(T(1.0, dtype=torch.float64)),
    "sum of all": lambda x: x.sum(),
    "sum, dtype": lambda x: torch.sum(x, -1, dtype=torch.float64),
    "sum, as numpy": lambda x: torch.sum(x, axis=-1, keepdims=True),
    "mean of integers": lambda x: torch.mean((x * 9).long(), -1, dtype=torch.float32),
    "prod": lambda x: torch.prod(x, -1, keepdim=True),
    "var, biased": lambda x: x.var(-1, False),
    "var of all, biased": lambda x: x.var(unbiased=False),
    "std": lambda x: torch.std(x, dim=-1, keepdim=True),
    "std, correction": lambda x: x.std(-1, correction=2),
    "var_mean": lambda x: torch.var_mean(x, -1)[1],
    "max of all": lambda x: x.max(),
    "max along": lambda x: x.max(-1).values,
    "min along": lambda x: torch.min(x, dim=-1, keepdim=True).indices,
    "max of two": lambda x: torch.max(x, x * 2),
    "aminmax": lambda x: torch.aminmax(x, dim=-1).max - x.aminmax(dim=-1).min,
    "argmax": lambda x: x.argmax(-1),
    "count_nonzero": lambda x: torch.relu(x).count_nonzero(-1),
    "any": lambda x: (x > 1).any(-1),
    "all": lambda x: torch.all(x > -9),
    "norm": lambda x: torch.norm(x),
    "norm 1": lambda x: x.norm(1, -1),
    "norm 3": lambda x: torch.norm(x, p=3, dim=-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64),
    "vector_norm, inf": lambda x: torch.linalg.vector_norm(x, torch.inf, -1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "softmax, dtype": lambda x: F.softmax(x, -1, dtype=torch.float64),
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmin": lambda x: F.softmin(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "cumsum, dtype": lambda x: x.cumsum(-1, dtype=torch.float64),
    "sort": lambda x: torch.sort(x, dim=-1, descending=True).values,
    "topk": lambda x: torch.topk(x, 2, dim=-1, largest=False).indices,
    "argsort": lambda x: x.argsort(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,), T([1.0, 2.0, 3.0, 4.0]), eps=1e-3),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "linear": lambda x: F.linear(x, torch.eye(4)[:3], torch.ones(3)),
    "flip": lambda x: x.flip(-1),
    "gather": lambda x: torch.gather(x, -1, (x > 0).long()),
    "index_select": lambda x: x.index_select(-1, T([1, 0])),
}


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    jt = rows()
    same(SPELLINGS[name](jt), SPELLINGS[name](jt.values))


OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"]


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_both_sides(name: str) -> None:
    function = getattr(operator, name)
    jt, whole = rows(), rows(torch.int64)
    whole.values[whole.values == 0] = 7
    each = torch.randn(len(LENGTHS), 1, 4).exp()
    spread = each[:, 0].repeat_interleave(T(LENGTHS), 0)
    for a, b, left, right in (
        (jt, whole, jt.values, whole.values),
        (whole, 2, whole.values, 2),
        (2.5, whole, 2.5, whole.values),
        (jt, each, jt.values, spread),
        (each, jt, spread, jt.values),
    ):
        same(function(a, b), function(left, right))


ALONG_ROWS: dict[str, tuple[Function, bool]] = {
    # Functions of a ragged dim, and whether they give something for a row without elements as for any other.
    "sum": (lambda x, d: x.sum(d), True),
    "mean": (lambda x, d: torch.mean(x, dim=d), True),
    "amax": (lambda x, d: x.amax(d), False),
    "max": (lambda x, d: torch.max(x, d).indices, False),
    "std": (lambda x, d: x.std(d), True),
    "norm": (lambda x, d: torch.norm(x, dim=d), True),
    "softmax": (lambda x, d: torch.softmax(x, dim=d), True),
    "log_softmax": (lambda x, d: F.log_softmax(x, d), True),
    "logsumexp": (lambda x, d: x.logsumexp(d), True),
    "cumsum": (lambda x, d: x.cumsum(d), True),
    "cumprod": (lambda x, d: torch.cumprod(x, d), True),
    "sort": (lambda x, d: torch.sort(x, dim=d).values, True),
    "sorted places": (lambda x, d: torch.sort(x, dim=d, descending=True, stable=True)[1], True),
    "argsort": (lambda x, d: x.argsort(dim=d, stable=True), True),
    "normalize": (lambda x, d: F.normalize(x, dim=d), True),
    "flip": (lambda x, d: x.flip(d), True),
}


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in ALONG_ROWS), *((n, torch.bfloat16) for n in ("std", "norm", "cumsum", "logsumexp"))],
)
def test_along_rows(name: str, dtype: torch.dtype) -> None:
    """Compiled, against torch row by row."""
    function, for_empty = ALONG_ROWS[name]
    jt = rows(dtype)
    got = function(jt, 1)
    pieces = got.unbind() if isinstance(got, JaggedTensor) else got
    assert len(pieces) == len(LENGTHS)
    for piece, row in zip(pieces, jt.unbind(), strict=True):
        if for_empty or len(row):
            want = function(row.float(), 0)
            same(piece.float(), want.float(), dtype)


DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64, torch.bool),
)
OF_EVERY_DTYPE: dict[str, Function] = {
    "doubled": lambda x: x + x,
    "product with a number": lambda x: x * 3,
    "compared": lambda x: x > 1,
    "chosen": lambda x: torch.where(x > 1, x, x + 1),
    "quotient": lambda x: x / 2,
    "truth": lambda x: torch.logical_xor(x, x > 1),
    "sum": lambda x: x.sum(-1),
    "largest": lambda x: torch.amax(x, -1),
    "running sum": lambda x: x.cumsum(-1),
    "of another dtype": lambda x: x.to(torch.float64) + x,
}


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype) -> None:
    jt = rows(dtype)
    for name, function in OF_EVERY_DTYPE.items():
        got, want = plain(function(jt)), function(jt.values)
        assert got.dtype == want.dtype, name
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, msg=lambda m, name=name: f"{name}: {m}")


SORTED = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)


@pytest.mark.parametrize("dtype", SORTED)
@pytest.mark.parametrize("descending", [False, True])
def test_rows_are_sorted_as_torch_sorts(dtype: torch.dtype, descending: bool) -> None:
    """Long rows take another way than short ones; equal elements keep their order, and NaN is the largest."""
    values = (torch.randn(641, generator=torch.Generator().manual_seed(1)) * 20).to(dtype)
    if dtype.is_floating_point:
        values[[3, 9, 600]] = torch.nan
        values[[5, 601]], values[6], values[7], values[8] = -0.0, 0.0, torch.inf, -torch.inf
        values[[2, 12]] = -torch.tensor(torch.nan, dtype=dtype)  # with the other sign bit
    jt = JaggedTensor.from_lengths(values, [20, 0, 600, 1, 20])
    found = torch.sort(jt, dim=1, descending=descending)
    assert found.values.structure is jt.structure or found.values.structure.same_rows(jt.structure)
    for row, ordered, places in zip(jt.unbind(), found.values.unbind(), found.indices.unbind(), strict=True):
        want = torch.sort(row, descending=descending, stable=True)
        assert torch.equal(places, want.indices)
        torch.testing.assert_close(ordered, want.values, rtol=0, atol=0, equal_nan=True)


def _sorted_where_they_are(padded: torch.Tensor, exists: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of each line along a dim in order, in the places of those that exist, and where they come from."""
    values, places = padded.clone(), torch.zeros(padded.shape, dtype=torch.int64)
    if not padded.numel():
        return values, places
    lines = [x.movedim(dim, -1).reshape(-1, padded.shape[dim]) for x in (padded, exists)]
    for k, (line, own) in enumerate(zip(*lines, strict=True)):
        at = own.nonzero()[:, 0]
        found = line[at].sort(stable=True)
        others = [d for d in range(padded.ndim) if d != dim]
        index = torch.unravel_index(torch.tensor(k), [padded.shape[d] for d in others])
        for to, value, origin in zip(at.tolist(), found.values, at[found.indices], strict=True):
            place = [*index]
            place.insert(dim, torch.tensor(to))
            values[tuple(place)], places[tuple(place)] = value, origin
    return values, places


@pytest.mark.sampled(2)
@COMPOSITIONS
def test_elements_are_sorted_along_every_dim_of_every_composition(name: str) -> None:
    jt = tensor_of(name)
    exists = jt.with_values(torch.ones_like(jt.values)).to_padded() == 1
    for dim in range(jt.ndim):
        try:
            got = torch.sort(jt, dim=dim)
        except ShapeError as error:
            assert "counts rows" in str(error) or "innermost ragged dim" in str(error)
            assert dim != max(jt.jagged_dims)
            continue
        values, places = _sorted_where_they_are(jt.to_padded(torch.inf), exists, dim)
        assert torch.equal(got.values.to_padded(torch.inf), values)
        assert torch.equal(got.indices.to_padded(), places)


def test_topk_of_rows_gives_what_a_row_has() -> None:
    jt = JaggedTensor.from_lengths(T([3.0, 1.0, 2.0, 5.0]), [3, 0, 1])
    found = torch.topk(jt, 2, dim=1)
    assert [r.tolist() for r in found.values.unbind()] == [[3, 2], [], [5]]
    assert [r.tolist() for r in found.indices.unbind()] == [[0, 2], [], [0]]
    assert [r.tolist() for r in jt.topk(2, largest=False).values.unbind()] == [[1, 2], [], [5]]
    assert jt.topk(0).values.lengths.tolist() == [0, 0, 0]
    with pytest.raises(ShapeError, match="k must be a non-negative int, got -1"):
        jt.topk(-1)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("reference")
@COMPOSITIONS
def test_every_composition(name: str) -> None:
    """Elementwise, in place, comparing, joining dtypes: rows stay what they are."""
    jt = tensor_of(name)
    exists = jt.with_values(torch.ones_like(jt.values)).to_padded() == 1
    for function in (lambda x: torch.relu(x) * 2 - x, lambda x: torch.where(x > 0, x, -x), lambda x: x.double() / 3):
        want = function(jt.to_padded()).masked_fill(~exists, 0)
        torch.testing.assert_close(function(jt).to_padded(), want)
    written = jt.clone()
    written.mul_(3).add_(jt)
    torch.testing.assert_close(written.to_padded(), jt.to_padded() * 4)
    assert written.structure is jt.structure
    written.zero_()
    assert not written.to_padded().any()
    written.copy_(jt)
    assert torch.equal(written, jt) and torch.allclose(written, jt) and written.equal(jt) and written.allclose(jt)
    if jt.numel():
        assert not torch.equal(written.fill_(2.5), jt)
        assert (written.to_padded()[exists] == 2.5).all()
    noise = torch.rand_like(jt)
    assert noise.structure.same_rows((jt + 0).structure) and noise.values.shape == (jt + 0).values.shape


# --- in place, and out= --------------------------------------------------------------------------------------------------


def test_in_place_writes_where_the_values_are() -> None:
    jt = rows()
    memory, want = jt.values, jt.values.clone()
    jt += 1
    jt *= jt
    jt.clamp_(max=5.0).masked_fill_(jt > 4, 0.5)
    F.relu(jt, inplace=True)
    want = (want + 1).square().clamp(max=5.0)
    want = want.masked_fill(want > 4, 0.5).relu()
    assert jt.values is memory
    same(memory, want)
    jt.lt_(0.25)
    same(memory, (want < 0.25).float())


def test_in_place_takes_what_can_be_cast() -> None:
    half = rows(torch.float16)
    want = half.values + torch.full((), 0.5, dtype=torch.float64).float()
    half += JaggedTensor(torch.full((10, 4), 0.5), half.structure)
    same(half, want.half(), torch.float16)
    whole = rows(torch.int64)
    before = whole.values.clone()
    with pytest.raises(DtypeError, match=r"the result is torch.float32, which values of torch.int64 cannot hold"):
        whole += 0.5
    assert torch.equal(whole.values, before)


def test_memory_that_is_read_elsewhere_is_not_written_too_early() -> None:
    base = torch.arange(11.0)
    want = base[1:] + base[:-1]
    offsets = T([0, 4, 10])
    late, early = (JaggedTensor.from_csr(part, offsets) for part in (base[1:], base[:-1]))
    late += early
    assert torch.equal(late.values, want)


def test_out() -> None:
    jt = rows()
    there = torch.zeros_like(jt)
    memory = there.values
    assert torch.exp(jt, out=there) is there and there.values is memory
    same(memory, jt.values.exp())
    total = torch.zeros(4, 4)
    assert torch.sum(jt, 1, out=total) is total
    same(total, torch.stack([r.sum(0) for r in jt.unbind()]))
    with pytest.raises(CallError, match="out= takes a single tensor, got a tuple"):
        torch.sort(jt, 1, out=(there, there))
    with pytest.raises(CallError, match="out= is a Tensor, but the result is a JaggedTensor"):
        torch.exp(jt, out=torch.zeros(10, 4))
    other = JaggedTensor.from_lengths(torch.zeros(10, 4), [5, 0, 3, 2])
    with pytest.raises(StructureMismatch, match="the result has the rows"):
        torch.exp(jt, out=other)
    assert not other.values.any()


def test_a_gradient_is_told_of_what_is_written_in_place() -> None:
    w = torch.ones(10, 4, requires_grad=True)
    jt = rows()
    loss = (w * jt.values).sum()
    with torch.no_grad():
        jt += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- networks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_torch_sequence_by_sequence(is_causal: bool) -> None:
    q, k, v = (JaggedTensor.from_lengths(torch.randn(10, 4), LENGTHS) for _ in range(3))
    got = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    for piece, a, b, c in zip(got.unbind(), q.unbind(), k.unbind(), v.unbind(), strict=True):
        if len(a):
            want = F.scaled_dot_product_attention(a[None], b[None], c[None], is_causal=is_causal)[0]
            torch.testing.assert_close(piece, want, rtol=1e-4, atol=1e-5)


def test_attention_of_heads_and_of_other_lengths() -> None:
    of_queries, of_keys = (Structure.from_lengths(T(n), dim=1) for n in (LENGTHS, [2, 4, 0, 6]))
    q = JaggedTensor(torch.randn(2, 10, 4), of_queries)
    k, v = (JaggedTensor(torch.randn(2, 12, 4), of_keys) for _ in range(2))
    got = F.scaled_dot_product_attention(q, k, v, scale=0.3)
    assert str(got.shape) == "(2, 4, r0, 4)"
    for n in (0, 1, 3):
        a, b, c = (x.values[:, x.offsets[n] : x.offsets[n + 1]] for x in (q, k, v))
        want = F.scaled_dot_product_attention(a, b, c, scale=0.3)
        torch.testing.assert_close(got.values[:, got.offsets[n] : got.offsets[n + 1]], want, rtol=1e-4, atol=1e-5)
    assert torch.equal(got.values[:, 3:8], torch.zeros(2, 5, 4)), "queries that see no key"


@pytest.mark.usefixtures("reference")
@pytest.mark.filterwarnings("ignore:argument . of scaled_dot")
def test_attention_says_what_it_does_not_take() -> None:
    jt, heads = rows(), rows(features=(2, 4))
    with pytest.raises(CallError, match=r"attn_mask and is_causal=True exclude each other"):
        F.scaled_dot_product_attention(jt, jt, jt, attn_mask=torch.ones(5, 5), is_causal=True)
    with pytest.raises(ShapeError, match=r"dim 1 of query is ragged and must be .*: use query\.permute\(0, 2, 1, 3\)"):
        F.scaled_dot_product_attention(heads, heads, heads)
    ready = heads.permute(0, 2, 1, 3)
    assert str(F.scaled_dot_product_attention(ready, ready, ready).permute(0, 2, 1, 3).shape) == str(heads.shape)


def test_networks_run_on_rows() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LeakyReLU(), torch.nn.LayerNorm(6), torch.nn.Linear(6, 2))
    table = torch.nn.Embedding(9, 4)
    words = JaggedTensor.from_lengths(torch.randint(0, 9, (10,)), LENGTHS)
    with torch.no_grad():
        same(network(table(words)), network(table(words.values)))


# --- what is told --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: x.sum(dims=1),
            CallError,
            r"sum got an unexpected keyword argument 'dims'; it takes input, dim, keepdim, dtype",
        ),
        (lambda x: x.softmax(), ShapeError, "softmax: dim is required"),
        (lambda x: x.argmax(), ShapeError, "argmax: dim is required"),
        (lambda x: x.add(), CallError, r"add missing 1 required positional argument: 'other'; it takes input, other, alpha"),
        (lambda x: x.div(2, rounding_mode="up"), CallError, "rounding_mode must be None, 'trunc' or 'floor', got 'up'"),
        (lambda x: torch.var(x, 1, unbiased=True, correction=1), (CallError, TypeError), "correction"),
        (lambda x: torch.where(x > 0), CallError, r"where.condition. returns positions"),
        (lambda x: x & 1, DtypeError, "bitwise_and: .*not implemented for .Float"),
        (lambda x: torch.fft.fft(x), CallError, "fft does not take a JaggedTensor"),
        (lambda x: F.dropout(x, 1.5), CallError, "the probability must be between 0 and 1, got 1.5"),
        (lambda x: x + "a", TypeError, "an operand must be a tensor or a real number"),
        (lambda x: F.layer_norm(x, (3,)), ShapeError, r"normalized_shape \(3,\) is not the shape of the last dims, \(4,\)"),
    ],
)
def test_mistakes(call: Function, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(rows())


def test_gradients_are_not_forgotten() -> None:
    jt = rows().requires_grad_()
    assert (jt + 1).requires_grad and torch.softmax(jt, 1).requires_grad and not (jt > 1).requires_grad
    for call in (lambda: jt.add_(1), lambda: jt.zero_(), lambda: torch.exp(jt, out=rows())):
        with pytest.raises(GradientError, match=r"torch\.no_grad\(\)"):
            call()
    with torch.no_grad():
        assert not (jt + 1).requires_grad
    assert jt.double().requires_grad, "the container's own operations keep gradients"


def test_numbers_are_told_apart() -> None:
    jt = JaggedTensor.from_lengths(T([1.0, -2.0]), [1, 1])
    assert torch.signbit((jt * 0.0).values).tolist() == [False, True]
    assert torch.signbit((jt * -0.0).values).tolist() == [True, False]
    assert (jt + 1).dtype == (jt + True).dtype == torch.float32
    assert torch.isnan((jt * float("nan")).values).all()


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_number_that_changes_is_not_a_build_each_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[int] = []
    traced = calls.trace
    monkeypatch.setattr(calls, "trace", lambda *args: traces.append(1) or traced(*args))
    jt, written = rows(dtype), rows()
    want = written.values.clone()
    for step in range(3 * eager.FEW):
        rate = 0.9 + step / 1000 + dtype.itemsize / 7
        same(jt * rate, jt.values * rate, dtype)
        same(torch.clamp(jt, -rate, rate), torch.clamp(jt.values, -rate, rate), dtype)
        written *= rate
        want *= rate
    same(written, want)
    assert len(traces) <= 3 * (eager.FEW + 2)


@pytest.mark.usefixtures("reference")
def test_every_spelling_answers_or_says_why() -> None:
    """No torch function that is known here ends in an error of Python's own on a call without options."""
    from serrate.ir.view import TensorView

    jt = rows()
    for name in (n for n in TensorView.operators if isinstance(n, str) and hasattr(JaggedTensor, n)):
        try:
            getattr(jt, name)() if callable(getattr(jt, name)) else None
        except (SerrateError, TypeError) as error:
            assert isinstance(error, SerrateError) or f"{name}()" in str(error), name


def test_memory_of_another_shape_is_refused_and_not_written() -> None:
    jt = JaggedTensor.from_lengths(torch.ones(3, 2), [2, 1])
    for shape in ((4,), (2, 1, 2), (1, 2, 2), (2, 3), (0,)):
        memory = torch.full(shape, 7.0)
        with pytest.raises(StructureMismatch, match="the result has shape"):
            torch.sum(jt, 1, out=memory)
        assert memory.eq(7).all()


def test_a_product_into_its_own_operand() -> None:
    generator = torch.Generator().manual_seed(3)
    jt = JaggedTensor.from_lengths(torch.randint(-3, 4, (6, 200), generator=generator).float(), [4, 0, 2])
    weight = torch.randint(-3, 4, (200, 200), generator=generator).float()
    want = jt.values.clone() @ weight
    assert torch.matmul(jt, weight, out=jt) is jt
    assert torch.equal(jt.values, want)
