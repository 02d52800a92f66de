"""Programs that are library calls: which are recognised, as which call, and what is not exactly one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import serrate.language as hl
from serrate import JaggedTensor, ir, jit, kernel, ops
from serrate.analysis.library_calls import ATTENTIONS, PRODUCTS, library_calls
from serrate.frontend.ops.normalise import softmax_terms
from serrate.fusion_stage import FusionStage
from serrate.ir.tile import Accumulate, Library, Phase, chain, nest
from serrate.ir.values import Role

LENGTHS = [3, 0, 7]
Function = Callable[..., Any]


def rows(*features: int, lengths: list[int] = LENGTHS, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), *features).to(dtype), lengths)


def calls(function: Function, *args: Any) -> dict[str, Library]:
    """The library calls that a traced function is."""
    (stage,) = jit(function, tune="never").compiled(*args)[0].stages
    assert isinstance(stage, FusionStage)
    return library_calls(stage.naive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("function", "transposed"),
    [
        (lambda x, w: x @ w, False),
        (lambda x, w: torch.bmm(x, w), False),
        (lambda x, w: torch.einsum("brk,bkn->brn", x, w), False),
        (lambda x, w: torch.einsum("bkn,brk->brn", w, x), False),
        (lambda x, w: x @ w.mT, True),
        (lambda x, w: torch.einsum("brk,bnk->brn", x, w), True),
    ],
)
def test_grouped_products(function: Function, transposed: bool, dtype: torch.dtype) -> None:
    found = calls(function, rows(8, dtype=dtype), torch.randn(3, *((5, 8) if transposed else (8, 5))).to(dtype))
    assert tuple(found) == PRODUCTS
    for name, call in found.items():
        assert (call.function, call.keywords) == (name, (("transposed", transposed),))
        assert [str(array) for array in call.rows] == ["T1"]
        assert [v.tensor.memory.name for v in call.values] == ["T0", "T3"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "transposed"), [(lambda x, w: x @ w, False), (F.linear, True), (lambda x, w: x @ w.T, True)]
)
def test_products_with_one_weight(function: Function, transposed: bool) -> None:
    found = calls(function, rows(8), torch.randn(*((5, 8) if transposed else (8, 5))))
    assert list(found) == ["mm"]
    assert found["mm"].rows == () and found["mm"].keywords == (("transposed", transposed),)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x @ w).relu(),
        lambda x, w: x.relu() @ w,
        lambda x, w: x @ w * 2,
        lambda x, w: x @ (w + 1),
        lambda x, w: x @ w + x @ w,
        lambda x, w: (x @ w).sum(1),
        lambda x, w: (x @ w, x * 2),
        lambda x, w: (x @ w).float().half(),
        lambda x, w: x @ w[:, :, :3],
        lambda x, w: x[:, 1:] @ w,
        lambda x, w: x @ w.flip(0),
        lambda x, w: x.sum(1),
        lambda x, w: x * 2,
        lambda x, w: torch.softmax(x, 1),
    ],
)
def test_not_exactly_a_product(function: Function) -> None:
    assert not calls(function, rows(8), torch.randn(3, 8, 5))


def test_operands_that_are_no_such_product() -> None:
    def product(x: Any, w: Any) -> Any:
        return x @ w

    assert not calls(product, rows(8).long(), torch.ones(3, 8, 5, dtype=torch.int64))
    apart = JaggedTensor.from_starts(torch.randn(12, 8), torch.tensor([0, 4, 5]), torch.tensor([3, 0, 7]))
    assert not calls(product, apart, torch.randn(3, 8, 5))
    assert not calls(product, apart, torch.randn(8, 5))
    assert not calls(lambda x, w: w @ x.transpose(1, 2), rows(8), torch.randn(3, 5, 8))
    nested = JaggedTensor.from_nested_list([[torch.randn(2, 8), torch.randn(3, 8)], [torch.randn(1, 8)]])
    assert not calls(product, nested, torch.randn(3, 8, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_of_another_dtype(dtype: torch.dtype) -> None:
    half = rows(8, dtype=torch.bfloat16)
    assert not calls(lambda x, w: (x @ w).to(dtype), half, torch.randn(3, 8, 5).bfloat16())
    assert not calls(lambda x, w: (x.float() @ w.float()).to(dtype), half, torch.randn(3, 8, 5).bfloat16())
    assert not calls(lambda x: attention(x, x, x).to(dtype), rows(2, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize(("dtype", "recognised"), [(torch.float32, True), (torch.bfloat16, False)])
def test_sums_that_are_not_rounded(dtype: torch.dtype, recognised: bool) -> None:
    """A program that stores the float32 sums of 16-bit operands, as a program may do for a later one."""
    (stage,) = jit(lambda x, w: x @ w, tune="never").compiled(rows(8, dtype=dtype), torch.randn(3, 8, 5).to(dtype))[0].stages
    assert isinstance(stage, FusionStage)
    nest_of = chain(stage.naive.phases[0])
    assert nest_of is not None and isinstance(nest_of[1], Accumulate)
    output = replace(nest_of[1].targets[0], role=Role.OUTPUT)
    loops = tuple((loop.domain, loop.kind) for loop in nest_of[0])
    phase = Phase(output.name, nest(loops, replace(nest_of[1], targets=(output,))))
    program = replace(stage.naive, outputs=(output,), phases=(phase,))
    assert bool(library_calls(program)) == recognised


def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return ops.attention(query, key, value, **options).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3, 1.0])
@pytest.mark.parametrize("heads", [(), (2,)])
@pytest.mark.parametrize("other", [LENGTHS, [5, 1, 2]])
def test_attention(dtype: torch.dtype, causal: bool, scale: float | None, heads: tuple[int, ...], other: list[int]) -> None:
    query = rows(*heads, 4, dtype=dtype)
    key = rows(*heads, 4, dtype=dtype, lengths=other)
    key = query.with_values(key.values) if other == LENGTHS else key
    value = key.with_values(torch.randn(len(key.values), *heads, 6).to(dtype))

    def function(q: Any, k: Any, v: Any) -> Any:
        if heads:
            return attention(q, k, v, is_causal=causal, scale=scale)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    found = calls(function, query, key, value)
    assert tuple(found) == ATTENTIONS
    for call in found.values():
        assert call.keywords == (("scale", 0.5 if scale is None else scale), ("is_causal", causal))
        assert (call.rows[0] == call.rows[1]) == (other == LENGTHS)
        own = [v.tensor.memory.name for v in call.values]  # type: ignore[attr-defined]
        assert own == (["T0", "T3", "T5"] if other == LENGTHS else ["T0", "T3", "T6"])


def test_attention_of_rows_to_themselves() -> None:
    found = calls(lambda x: attention(x, x, x), rows(2, 4))
    assert [v.tensor.memory.name for v in found["varlen_attn"].values] == ["T0", "T0", "T0"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: attention(q, k, v, window=2),
        lambda q, k, v: attention(q, k, v, is_causal="lower_right"),
        lambda q, k, v: attention(q, k, v, soft_cap=3.0),
        lambda q, k, v: attention(q, k, v, mask=torch.zeros(7, 7)),
        lambda q, k, v: attention(q, k, v, score_mod=lambda score, *_: score + 1),
        lambda q, k, v: attention(q, k, v) * 2,
        lambda q, k, v: attention(q * 2, k, v),
        lambda q, k, v: attention(q, k[:, :, :1], v[:, :, :1], enable_gqa=True),
        lambda q, k, v: torch.softmax(q @ k.transpose(2, 3), 3),
    ],
)
def test_not_exactly_attention(function: Function) -> None:
    assert not calls(function, rows(2, 4), rows(2, 4), rows(2, 4))


def test_keys_with_gaps_are_not_recognised() -> None:
    starts, lengths = torch.tensor([0, 4, 5]), torch.tensor([3, 0, 7])
    key = JaggedTensor.from_starts(torch.randn(12, 2, 4), starts, lengths)
    assert not calls(attention, rows(2, 4), key, key.with_values(torch.randn(12, 2, 4)))


def test_a_mask_by_another_index_is_not_causal() -> None:
    def by_head(score: Any, sequence: Any, head: Any, query: Any, key: Any) -> Any:
        return ops.where(key <= head, score, float("-inf"))

    def by_query(score: Any, sequence: Any, head: Any, query: Any, key: Any) -> Any:
        return ops.where(key <= query, score, float("-inf"))

    x = rows(2, 4)
    assert not calls(lambda q: attention(q, q, q, score_mod=by_head), x)
    assert calls(lambda q: attention(q, q, q, score_mod=by_query), x)["varlen_attn"].keywords[1] == ("is_causal", True)


@pytest.mark.parametrize(("factor", "recognised"), [(1, True), (2, False)])
def test_sums_that_are_scaled_otherwise(factor: int, recognised: bool) -> None:
    with ir.Fusion() as f:
        offsets = f.input((None,), torch.int64)
        query, key, value = (ops.as_nested(f.input((None, 4), torch.float32), offsets) for _ in range(3))
        weights, scale = softmax_terms(ops.matmul(query, ops.transpose(key, 1, 2)), -1)
        scale = scale if factor == 1 else ops.mul(scale, factor)
        f.output(ops.mul(ops.matmul(weights, value), scale))
    (stage,) = f.compile("reference").stages
    assert tuple(library_calls(stage.naive)) == (ATTENTIONS if recognised else ())


def test_kernels_are_not_recognised() -> None:
    @kernel
    def product(x: JaggedTensor, w: torch.Tensor) -> JaggedTensor:
        out = x.with_values(torch.empty([x.total_elements, w.size(2)]))
        for g, m, n in hl.tile([w.size(0), x.max_length, w.size(2)]):
            acc = hl.zeros([g, m, n])
            for k in hl.tile(w.size(1)):
                acc = acc + x[g, m, k] @ w[g, k, n]
            out[g, m, n] = acc
        return out

    program = product.on("reference").variants(rows(8), torch.randn(3, 8, 5))[0].program
    assert not library_calls(program)


def test_a_fusion_with_its_own_offsets() -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 8), torch.float32), f.input((4,), torch.int32)
        f.output(
            ops.as_flattened(
                ops.matmul(ops.as_nested(x, offsets), f.input((3, 8, 5), torch.float32)), component_dim=0, ragged_dim=1
            )
        )
    (stage,) = f.compile("reference").stages
    assert tuple(library_calls(stage.naive)) == PRODUCTS


def test_lengths_make_offsets() -> None:
    with ir.Fusion() as f:
        x, lengths = f.input((None, 8), torch.float32), f.input((3,), torch.int64)
        f.output(ops.matmul(ops.as_nested(x, lengths=lengths), f.input((3, 8, 5), torch.float32)))
    compiled = f.compile("cpp", "library")
    values, weights = torch.randn(10, 8), torch.randn(3, 8, 5)
    wanted = torch.cat([values[:3] @ weights[0], values[3:] @ weights[2]])
    torch.testing.assert_close(compiled(values, torch.tensor(LENGTHS), weights).values, wanted)
