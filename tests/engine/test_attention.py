"""Attention: every sequence against torch's own on that sequence alone, and nothing of scores in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import serrate
from serrate import JaggedTensor, ir, ops
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("width", "of_values"), [(16, 16), (3, 5), (1, 1)])
def test_every_sequence_is_torch_alone(backend: str, is_causal: bool, width: int, of_values: int) -> None:
    q, k = (rows(LENGTHS, 2, width) for _ in range(2))
    v = rows(LENGTHS, 2, of_values)
    got = fusion_of(2, width, of_values, is_causal).compile(backend)(q.values, k.values, v.values, q.offsets)
    torch.testing.assert_close(got.values.double(), by_sequence(q, k, v, is_causal=is_causal), rtol=1e-4, atol=1e-5)


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


def test_a_function_of_scores_is_computed_a_block_at_a_time() -> None:
    q, k, v = (rows(LENGTHS, 16) for _ in range(3))
    k, v = q.with_values(k.values), q.with_values(v.values)
    wanted = torch.cat([F.silu(a @ b.T) @ c for a, b, c in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)])
    torch.testing.assert_close(pointwise(q, k, v).values, wanted, rtol=1e-4, atol=1e-4)
    assert "r0o" in str(pointwise.plan(q, k, v))
