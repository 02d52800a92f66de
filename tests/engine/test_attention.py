"""Attention: every sequence against torch's own on that sequence alone, and nothing of scores in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import serrate
from serrate import JaggedTensor, ir, ops
from serrate.errors import ShapeError
from serrate.ir.loops import Dot, nodes

BACKENDS = ["reference", "cpp", "triton"]
LENGTHS = [5, 0, 130, 1, 70]


def rows(lengths: list[int], *features: int, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), *features, dtype=dtype), lengths)


def by_sequence(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor, **options: object) -> torch.Tensor:
    """torch's attention of each sequence, in float64: `[r, H, D]` in and out."""
    found = []
    for a, b, c in zip(q.unbind(), k.unbind(), v.unbind(), strict=True):
        heads = [x.double().transpose(0, 1)[None] for x in (a, b, c)]
        found.append(F.scaled_dot_product_attention(*heads, **options)[0].transpose(0, 1))
    return torch.cat(found)


@functools.cache
def fusion_of(
    heads: int, width: int, of_values: int, is_causal: bool, *, own_keys: bool = True, dtype: torch.dtype = torch.float32
) -> ir.Fusion:
    """Attention of `[total, H, D]`, by one structure or by one for queries and one for keys."""
    with ir.Fusion("attention") as f:
        q, k = (f.input((None, heads, width), dtype) for _ in range(2))
        v, of_queries = f.input((None, heads, of_values), dtype), f.input((None,), torch.int64)
        of_keys = of_queries if own_keys else f.input((None,), torch.int64)
        q = ops.permute(ops.as_nested(q, of_queries), (2, 0, 1, 3))
        k, v = (ops.permute(ops.as_nested(x, of_keys), (2, 0, 1, 3)) for x in (k, v))
        f.output(ops.permute(ops.attention(q, k, v, is_causal=is_causal), (1, 2, 0, 3)))
    return f


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("width", "of_values"), [(16, 16), (3, 5), (1, 1)])
def test_every_sequence_is_torch_alone(backend: str, is_causal: bool, width: int, of_values: int) -> None:
    q, k = (rows(LENGTHS, 2, width) for _ in range(2))
    v = rows(LENGTHS, 2, of_values)
    got = fusion_of(2, width, of_values, is_causal).compile(backend)(q.values, k.values, v.values, q.offsets)
    torch.testing.assert_close(got.values.double(), by_sequence(q, k, v, is_causal=is_causal), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_keep_statistics_in_float32(backend: str, is_causal: bool, dtype: torch.dtype) -> None:
    q, k, v = (rows(LENGTHS, 2, 32, dtype=dtype) for _ in range(3))
    got = fusion_of(2, 32, 32, is_causal, dtype=dtype).compile(backend)(q.values, k.values, v.values, q.offsets)
    wanted = by_sequence(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(got.values.double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@functools.cache
def compiled_of_two(is_causal: bool) -> Callable[..., JaggedTensor]:
    return fusion_of(2, 4, 4, is_causal, own_keys=False).compile("cpp")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 140), st.integers(0, 140)), min_size=1, max_size=4), st.booleans())
def test_queries_and_keys_of_any_lengths(lengths: list[tuple[int, int]], is_causal: bool) -> None:
    q = rows([n for n, _ in lengths], 2, 4)
    k, v = (rows([n for _, n in lengths], 2, 4) for _ in range(2))
    got = compiled_of_two(is_causal)(q.values, k.values, v.values, q.offsets, k.offsets)
    torch.testing.assert_close(got.values.double(), by_sequence(q, k, v, is_causal=is_causal), rtol=1e-4, atol=1e-5)


def test_nothing_of_the_scores_is_in_memory() -> None:
    q = rows([300, 20], 2, 64)
    (program,) = fusion_of(2, 64, 64, True).compile("cpp").executables(q.values, q.values, q.values, q.offsets)
    loops = program.program
    assert loops.scratch == ()
    assert sum(isinstance(n, Dot) for kernel in loops.kernels for n in nodes(kernel.body)) == 2


def test_a_causal_loop_over_keys_ends_at_its_queries() -> None:
    q = rows([300, 20], 2, 64)
    (program,) = fusion_of(2, 64, 64, True).compile("cpp").executables(q.values, q.values, q.values, q.offsets)
    assert "serial r3o < min(" in str(program.program)


@pytest.mark.parametrize("strategy", ["maskless", "masked", "persistent_dynamic"])
def test_every_strategy_has_the_same_blocks(strategy: str) -> None:
    q, k, v = (rows(LENGTHS, 2, 8) for _ in range(3))
    got = fusion_of(2, 8, 8, True).compile("cpp", strategy)(q.values, k.values, v.values, q.offsets)
    torch.testing.assert_close(got.values.double(), by_sequence(q, k, v, is_causal=True), rtol=1e-4, atol=1e-5)


@serrate.jit
def spelled(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor) -> JaggedTensor:
    return torch.softmax(q @ k.transpose(1, 2) * 0.25, -1) @ v


@serrate.jit
def pointwise(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor) -> JaggedTensor:
    return F.silu(q @ k.transpose(1, 2)) @ v


def test_a_softmax_of_products_times_values_is_attention_too() -> None:
    q, k, v = (rows(LENGTHS, 16) for _ in range(3))
    k, v = q.with_values(k.values), q.with_values(v.values)
    wanted = torch.cat([torch.softmax(a @ b.T * 0.25, 1) @ c for a, b, c in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)])
    torch.testing.assert_close(spelled(q, k, v).values, wanted, rtol=1e-4, atol=1e-5)
    assert "online" in str(spelled.plan(q, k, v))


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_attention_is_pooled_in_the_same_program(backend: str) -> None:
    """Sums of short and of long rows both read what the weighted sum of the scores has stored."""
    x = rows([5, 0, 13, 1], 3)

    def pooled(x: JaggedTensor) -> torch.Tensor:
        return (torch.softmax(x @ x.transpose(-1, -2), -1) @ x).sum(1)

    wanted = torch.stack([(torch.softmax(row @ row.T, -1) @ row).sum(0) for row in x.unbind()])
    torch.testing.assert_close(serrate.jit(pooled, backend=backend)(x), wanted, rtol=1e-4, atol=1e-5)
    with ir.Fusion() as f:
        values, offsets = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        f.output(pooled(ops.as_nested(values, offsets)))
    for options in ({}, {"chunk": 4}):
        found = f.compile(backend, "persistent_dynamic", **options)(x.values, x.offsets)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.triton
@pytest.mark.parametrize("scale", [1e-5, 4096.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_are_scaled_before_they_are_rounded(dtype: torch.dtype, scale: float) -> None:
    """Squares of large scores exceed float16 without a small factor, and those of small ones lose digits without a large one."""
    q, k, v = (rows([5, 0, 35], 64, dtype=dtype) for _ in range(3))
    q = q * (64 if scale < 1 else 2**-13)

    @serrate.jit(backend="triton")
    def attend(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor) -> JaggedTensor:
        return (torch.relu(q @ k.transpose(1, 2)).square() * scale) @ v

    for own, *row in zip(*(x.unbind() for x in (attend(q, k, v), q, k, v)), strict=True):
        a, b, c = (x.double() for x in row)
        want = (torch.relu(a @ b.T).square() * scale) @ c
        largest = float(want.abs().max()) if len(want) else 0.0
        torch.testing.assert_close(own.double(), want, rtol=0, atol=largest * (0.02 if dtype == torch.bfloat16 else 0.002))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sum_of_no_weights_is_zero(backend: str) -> None:
    """A softmax of no keys is empty, and so is the sum over it, although its total is 0."""
    q, (k, v) = rows([3, 0, 2], 4), (rows([0, 5, 6], 4) for _ in range(2))
    got = serrate.jit(lambda q, k, v: torch.softmax(q @ k.transpose(1, 2), 2) @ v, backend=backend)(q, k, v)
    for own, a, b, c in zip(*(x.unbind() for x in (got, q, k, v)), strict=True):
        torch.testing.assert_close(own, torch.softmax(a @ b.T, 1) @ c, rtol=1e-4, atol=1e-5)


def test_a_function_of_scores_is_computed_a_block_at_a_time() -> None:
    q, k, v = (rows(LENGTHS, 16) for _ in range(3))
    k, v = q.with_values(k.values), q.with_values(v.values)
    wanted = torch.cat([F.silu(a @ b.T) @ c for a, b, c in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)])
    torch.testing.assert_close(pointwise(q, k, v).values, wanted, rtol=1e-4, atol=1e-4)
    assert "r0 by " in str(pointwise.plan(q, k, v))


# --- what happens to scores: against scores of one sequence, written out ------------------------------------------------------

Scores = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
NONE = float("-inf")


def by_scores(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor, change: Scores) -> torch.Tensor:
    """Attention of each sequence in float64, its scores changed by a function of queries' and keys' numbers."""
    found = []
    for a, b, c in zip(q.unbind(), k.unbind(), v.unbind(), strict=True):
        scores = a.double() @ b.double().T / a.size(1) ** 0.5
        scores = change(scores, torch.arange(len(a))[:, None], torch.arange(len(b))[None])
        found.append(torch.softmax(scores, 1).nan_to_num(0.0) @ c.double())
    return torch.cat(found)


MASK = torch.randn(130, 130)
SEEN = torch.rand(130, 130) > 0.4
CHANGES: dict[str, tuple[Callable[..., JaggedTensor], Scores]] = {
    "window": (
        lambda q, k, v: ops.attention(q, k, v, is_causal=True, window=20),
        lambda s, i, j: s.masked_fill((j > i) | (j <= i - 20), NONE),
    ),
    "window_on_both_sides": (
        lambda q, k, v: ops.attention(q, k, v, window=3),
        lambda s, i, j: s.masked_fill((i - j).abs() >= 3, NONE),
    ),
    "soft_cap": (lambda q, k, v: ops.attention(q, k, v, soft_cap=0.5), lambda s, i, j: 0.5 * torch.tanh(s / 0.5)),
    "alibi": (
        lambda q, k, v: ops.attention(q, k, v, is_causal=True, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j)),
        lambda s, i, j: (s - 0.1 * (i - j)).masked_fill(j > i, NONE),
    ),
    "score_mod_that_masks": (
        lambda q, k, v: ops.attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(j <= i, s, NONE)),
        lambda s, i, j: s.masked_fill(j > i, NONE),
    ),
    "dense_mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK),
        lambda s, i, j: s + MASK[: s.size(0), : s.size(1)],
    ),
    "dense_mask_of_bools": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=SEEN),
        lambda s, i, j: s.masked_fill(~SEEN[: s.size(0), : s.size(1)], NONE),
    ),
    "mask_of_rows_by_rows": (
        lambda q, k, v: ops.attention(q, k, v, mask=q @ k.transpose(1, 2)),
        lambda s, i, j: s * (1 + 16**0.5),
    ),
    "upper_left": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=causal_upper_left(3, 3)),
        lambda s, i, j: s.masked_fill(j > i, NONE),
    ),
    "lower_right": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(3, 4)),
        lambda s, i, j: s.masked_fill(j > i + s.size(1) - s.size(0), NONE),
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHANGES)
def test_scores_are_changed_a_block_at_a_time(name: str) -> None:
    function, change = CHANGES[name]
    traced = serrate.jit(function)
    q, k, v = rows(LENGTHS, 16), rows([7, 2, 100, 3, 129], 16), rows([7, 2, 100, 3, 129], 16)
    v = k.with_values(v.values)
    torch.testing.assert_close(traced(q, k, v).values.double(), by_scores(q, k, v, change), rtol=1e-4, atol=1e-5)
    assert "online" in str(traced.plan(q, k, v))


def test_a_score_mod_is_told_the_sequence_and_the_head() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125])

    @serrate.jit
    def sloped(x: JaggedTensor) -> JaggedTensor:
        x = x.transpose(1, 2)
        made = ops.attention(x, x, x, score_mod=lambda s, b, h, i, j: s - (h + 1) * 0.5 * (i - j).abs() * (b % 2))
        return made.transpose(1, 2)

    x = rows([4, 9, 2], 3, 8)
    got = sloped(x)
    for b, row in enumerate(x.unbind()):
        for h in range(len(slopes)):
            scores = row[:, h] @ row[:, h].T / 8**0.5
            apart = (torch.arange(len(row))[:, None] - torch.arange(len(row))).abs()
            wanted = torch.softmax(scores - (h + 1) * 0.5 * apart * (b % 2), 1) @ row[:, h]
            torch.testing.assert_close(got.unbind()[b][:, h], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads_first", [False, True])
def test_heads_of_queries_share_heads_of_keys(heads_first: bool) -> None:
    there, back = ((2, 0, 1, 3), (1, 2, 0, 3)) if heads_first else ((0, 2, 1, 3), (0, 2, 1, 3))

    @serrate.jit
    def grouped(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor) -> JaggedTensor:
        q, k, v = (x.permute(*there) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(*back)

    q, k, v = rows(LENGTHS, 6, 8), rows(LENGTHS, 2, 8), rows(LENGTHS, 2, 8)
    k, v = q.with_values(k.values), q.with_values(v.values)
    wanted = by_sequence(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(grouped(q, k, v).values.double(), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match="5 heads of queries cannot share 2 heads"):
        grouped(rows(LENGTHS, 5, 8), k, v)
    with pytest.raises(ShapeError, match="queries have 6 heads, keys and values 2: pass enable_gqa=True"):
        F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))


def test_projections_before_and_after_run_in_the_same_program() -> None:
    w, o = torch.randn(3, 8, 8), torch.randn(8, 8)

    @serrate.jit
    def layer(x: JaggedTensor, w: torch.Tensor, o: torch.Tensor) -> JaggedTensor:
        q, k, v = (x @ w[n] for n in range(3))
        return F.relu(F.scaled_dot_product_attention(q, k, v) @ o) + x

    x = rows(LENGTHS, 8)
    wanted = []
    for row in x.unbind():
        made = F.scaled_dot_product_attention(*((row @ w[n])[None] for n in range(3)))[0]
        wanted.append(F.relu(made @ o) + row)
    torch.testing.assert_close(layer(x, w, o).values, torch.cat(wanted), rtol=1e-3, atol=1e-3)
    assert "online" in str(layer.plan(x, w, o))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("backend", "count"), [("reference", 1), ("cpp", 1), ("cpp", 5), ("triton", 1)])
def test_dense_queries_see_the_keys_of_their_sequence(backend: str, count: int) -> None:
    q, (k, v) = torch.randn(len(LENGTHS), 4, count, 16), (rows(LENGTHS, 2, 16).transpose(1, 2) for _ in range(2))

    def attend(q: torch.Tensor, k: JaggedTensor, v: JaggedTensor, is_causal: bool | str = False) -> torch.Tensor:
        return ops.attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    found = serrate.jit(attend, backend=backend)(q, k, v)
    assert found.shape == q.shape
    for own, a, b, got in zip(q, k, v, found, strict=True):
        # torch gives NaN for a query without keys.
        want = F.scaled_dot_product_attention(own[None], a[None], b[None], enable_gqa=True)[0].nan_to_num()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if count > 1:
        # The last query sees the last key.
        last = serrate.jit(attend, backend=backend)(q, k, v, "lower_right")
        torch.testing.assert_close(last[:, :, -1], found[:, :, -1], rtol=1e-4, atol=1e-5)


def test_ragged_queries_see_dense_keys() -> None:
    q, (k, v) = rows(LENGTHS, 2, 16).transpose(1, 2), torch.randn(2, len(LENGTHS), 2, 9, 16)
    found = F.scaled_dot_product_attention(q, k, v)
    assert found.structure is q.structure
    for own, a, b, got in zip(q, k, v, found, strict=True):
        torch.testing.assert_close(got, F.scaled_dot_product_attention(own, a, b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_infinite_scores_are_what_torch_makes_of_them(backend: str) -> None:
    q, k, v = (JaggedTensor.from_lengths(torch.rand(43, 1, 2) + 0.1, [3, 40]) for _ in range(3))
    q.values[1] = float("inf")
    k.values[20] = float("-inf")
    got = fusion_of(1, 2, 2, False).compile(backend)(q.values, k.values, v.values, q.offsets)
    wanted = by_sequence(q, k, v)
    assert wanted.isnan().any() and wanted.isfinite().any()
    torch.testing.assert_close(got.values.double(), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_the_sum_of_powers_of_infinite_scores_is_kept_where_somebody_asks_for_it() -> None:
    def attend(q: JaggedTensor) -> tuple[JaggedTensor, JaggedTensor]:
        scores = q @ q.transpose(1, 2)
        return torch.softmax(scores, dim=2) @ q, torch.logsumexp(scores, dim=2)

    q = JaggedTensor.from_lengths(torch.rand(43, 2) + 0.1, [3, 40])
    q.values[1] = float("inf")
    _, got = serrate.jit(attend)(q)
    wanted = torch.cat([torch.logsumexp(x.double() @ x.double().t(), 1) for x in q.unbind()])
    assert wanted.isinf().any()
    torch.testing.assert_close(got.values.double(), wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
