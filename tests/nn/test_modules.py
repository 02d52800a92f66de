"""Modules against plain torch, row by row: outputs, gradients of inputs and of every parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import serrate
from serrate import JaggedTensor, jit
from serrate import nn as ragged
from serrate.errors import CallError, ShapeError

LENGTHS = [3, 0, 7, 1]


def rows(width: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> JaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), width, generator=generator), list(lengths))


def check(module: nn.Module, ours: Callable[[Any], Any], theirs: Callable[[Tensor], Tensor], x: JaggedTensor) -> None:
    """Compares a module with a function of one row, forwards and backwards."""
    x = x.detach().requires_grad_()
    found = ours(x)
    found = found.values if isinstance(found, JaggedTensor) else found
    alone = [row.detach().clone().requires_grad_() for row in x.unbind()]
    wanted = [theirs(row) for row in alone]
    wanted = torch.cat(wanted) if found.ndim == wanted[0].ndim else torch.stack(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    parameters = [p for p in module.parameters() if p.requires_grad]
    got = torch.autograd.grad((found * weights).sum(), [x.values, *parameters])
    want = torch.autograd.grad((wanted * weights).sum(), [*alone, *parameters])
    torch.testing.assert_close(got[0], torch.cat(want[: len(alone)]), rtol=1e-3, atol=1e-5)
    for (name, _), one, other in zip(module.named_parameters(), got[1:], want[len(alone) :], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def seen(length: int, is_causal: bool, window: int | None) -> Tensor:
    """Which keys a query sees, as loops."""
    found = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            near = window is None or abs(i - j) < window
            found[i, j] = near and (j <= i or not is_causal)
    return found


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary embeddings of a row `[length, heads, features]`, by complex numbers."""
    half = x.shape[-1] // 2
    speed = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * speed
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def plain_attention(module: ragged.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, base: float | None) -> Tensor:
    """One sequence; keys of a group of heads are repeated."""
    weights = module.in_proj_weight.split_with_sizes(module.widths)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.split_with_sizes(module.widths)
    q, k, v = (
        F.linear(x, w, b).unflatten(1, (-1, module.head_dim))
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    if base is not None:
        q, k = turned(q, base), turned(k, base)
    k, v = (x.repeat_interleave(module.num_heads // module.num_kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(module.head_dim)
    if module.is_causal or module.window is not None:
        scores = scores.masked_fill(~seen(len(query), module.is_causal, module.window), float("-inf"))
    return module.out_proj(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))


@pytest.mark.parametrize("bias", [True, False])
def test_grouped_linear(bias: bool) -> None:
    torch.manual_seed(0)
    module = ragged.GroupedLinear(4, 6, 5, bias=bias)
    numbers = iter(range(4))

    def plain(row: Tensor) -> Tensor:
        g = next(numbers)
        return row @ module.weight[g] + (0 if module.bias is None else module.bias[g])

    check(module, module, plain, rows(6))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "base"),
    [
        ({"bias": False}, None),
        ({"num_kv_heads": 2, "is_causal": True, "window": 3}, None),
        ({"num_kv_heads": 1, "window": 2}, 100.0),
        pytest.param({"is_causal": True}, 10000.0, marks=pytest.mark.slow),
    ],
)
def test_attention(options: dict[str, Any], base: float | None) -> None:
    torch.manual_seed(0)
    rotary = None if base is None else ragged.RotaryEmbedding(4, max_length=16, base=base)
    module = ragged.MultiheadAttention(16, 4, rotary=rotary, **options)
    check(module, module, lambda row: plain_attention(module, row, row, row, base), rows(16))


def test_attention_to_other_rows() -> None:
    torch.manual_seed(0)
    module, other = ragged.MultiheadAttention(16, 4), rows(16, [2, 4, 5, 1], seed=2)
    numbers = iter(range(4))

    def plain(row: Tensor) -> Tensor:
        key = other[next(numbers)]
        return plain_attention(module, row, key, key, None)

    check(module, lambda x: module(x, other), plain, rows(16))


def test_attention_loads_the_state_of_torchs() -> None:
    torch.manual_seed(0)
    theirs, ours = nn.MultiheadAttention(16, 4, batch_first=True), ragged.MultiheadAttention(16, 4)
    assert ours.load_state_dict(theirs.state_dict()) == theirs.load_state_dict(ours.state_dict())
    bias = torch.randn(8, 8)
    x = rows(16)
    for options in ({}, {"attn_mask": bias}):
        found = ours(x, **options)
        for row, wanted in zip(found.unbind(), x.unbind(), strict=True):
            n = len(wanted)
            mask = None if not options else bias[:n, :n]
            if n:
                torch.testing.assert_close(row, theirs(wanted, wanted, wanted, attn_mask=mask)[0], rtol=1e-4, atol=1e-5)


def test_attention_drops_weights_only_while_training() -> None:
    torch.manual_seed(0)
    module, x = ragged.MultiheadAttention(16, 4, dropout=0.5), rows(16)
    assert not torch.equal(module(x).values, module(x).values)
    module.eval()
    assert torch.equal(module(x).values, module(x).values)


@pytest.mark.parametrize(("norm_first", "activation"), [(True, "relu"), (False, "gelu")])
def test_transformer_layer_loads_the_state_of_torchs(norm_first: bool, activation: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"activation": activation, "norm_first": norm_first, "dropout": 0.0}
    theirs = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)
    ours = ragged.TransformerEncoderLayer(16, 2, 32, is_causal=True, **options)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    tied = dict(ours.named_parameters())

    def plain(row: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(row))
        return torch.func.functional_call(theirs, tied, (row,), {"src_mask": mask}) if len(row) else row

    check(ours, ours, plain, rows(16))


@pytest.mark.parametrize("is_causal", [True, False])
def test_hstu(is_causal: bool) -> None:
    torch.manual_seed(0)
    module = ragged.HSTU(16, 2, max_length=10, qk_dim=4, v_dim=6, is_causal=is_causal)

    def plain(row: Tensor) -> Tensor:
        u, v, q, k = F.silu(module.uvqk(module.norm(row))).split([12, 12, 8, 8], -1)
        v, q, k = (x.unflatten(1, (2, -1)) for x in (v, q, k))
        scores = F.silu(torch.einsum("qhd,khd->hqk", q, k) / 2) / 10 * seen(len(row), is_causal, None)
        mixed = torch.einsum("hqk,khd->qhd", scores, v).flatten(1)
        return row + module.output(F.layer_norm(mixed, (12,), eps=module.eps) * u)

    check(module, module, plain, rows(16))


def plain_experts(module: ragged.MoE, tokens: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    act = {"swiglu": F.silu, "geglu": F.gelu, "relu": F.relu}[module.activation]
    mixed = []
    for token in tokens:
        chances = module.router(token).softmax(-1)
        weights, chosen = chances.topk(module.top_k)
        weights = weights / weights.sum() if module.normalise else weights
        found = torch.zeros_like(token)
        for weight, e in zip(weights, chosen.tolist(), strict=True):
            hidden = token @ module.up[e]
            hidden = act(hidden) if module.gate is None else act(token @ module.gate[e]) * hidden
            found = found + weight * (hidden @ module.down[e])
        mixed.append(found)
    return torch.stack(mixed) if mixed else tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1, "normalise": False, "activation": "relu"},
        pytest.param({"top_k": 4, "activation": "geglu", "normalise": False}, marks=pytest.mark.slow),
    ],
)
def test_experts(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = ragged.MoE(8, 6, num_experts=4, **options)
    check(module, lambda x: module(x).output, lambda row: plain_experts(module, row), rows(8))


def test_losses_and_loads_of_experts() -> None:
    torch.manual_seed(0)
    module, x = ragged.MoE(8, 6, num_experts=4), rows(8).requires_grad_()
    mixed = module(x)
    torch.testing.assert_close(module(x.values).output, mixed.output.values)  # dense tokens too
    logits = module.router(x.values.detach())
    chances = logits.softmax(-1)
    load = [0] * 4
    for token in chances:
        for e in token.topk(2).indices.tolist():
            load[e] += 1
    assert mixed.load.tolist() == load
    share = torch.tensor(load) / sum(load)
    balance, z = 4 * (share * chances.mean(0)).sum(), logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(mixed.load_balancing_loss, balance)
    torch.testing.assert_close(mixed.z_loss, z)
    got = torch.autograd.grad(mixed.load_balancing_loss + mixed.z_loss, module.router.weight)
    torch.testing.assert_close(got, torch.autograd.grad(balance + z, module.router.weight))


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_losses_without_tokens_are_zero(lengths: list[int]) -> None:
    module = ragged.MoE(6, 10, num_experts=4, top_k=2)
    mixed = module(JaggedTensor.from_lengths(torch.zeros(0, 6), torch.tensor(lengths, dtype=torch.int64)))
    assert mixed.load_balancing_loss == 0 and mixed.z_loss == 0 and mixed.load.tolist() == [0] * 4
    (mixed.output.values.sum() + mixed.load_balancing_loss + mixed.z_loss).backward()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


@pytest.mark.parametrize(
    ("module", "plain"),
    [
        (ragged.SumPool(), lambda row: row.sum(0)),
        (ragged.MeanPool(), lambda row: row.mean(0) if len(row) else row.sum(0)),
        (ragged.MaxPool(), lambda row: row.amax(0) if len(row) else row.sum(0)),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else "",
)
def test_pooling(module: nn.Module, plain: Callable[[Tensor], Tensor]) -> None:
    check(module, module, plain, rows(5))


def test_attention_pooling() -> None:
    torch.manual_seed(0)
    module = ragged.AttentionPool(5)
    check(module, module, lambda row: (row @ module.query).softmax(0) @ row, rows(5))


@pytest.mark.usefixtures("reference")
def test_sixteen_bits() -> None:
    torch.manual_seed(0)
    module, x = ragged.MultiheadAttention(8, 2, is_causal=True, rotary=ragged.RotaryEmbedding(4)), rows(8)
    wanted = module(x).values
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x).values
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.02)
    found.float().sum().backward()
    assert {parameter.grad.dtype for parameter in module.parameters()} == {torch.float32}
    found = module.bfloat16()(x.bfloat16()).values
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.02)


@pytest.mark.slow
def test_modules_inside_a_traced_function() -> None:
    torch.manual_seed(0)
    layer, experts, pool = ragged.TransformerEncoderLayer(8, 2, 16, dropout=0.0), ragged.MoE(8, 6, 3), ragged.MeanPool()
    model = nn.ModuleList([layer, experts, pool])
    x = rows(8)

    def run(x: Any) -> Any:
        return pool(experts(layer(x)).output)

    parameters = list(model.parameters())
    wanted, found = run(x), serrate.jit(run)(x)
    torch.testing.assert_close(found, wanted)
    pairs = zip(torch.autograd.grad(found.sum(), parameters), torch.autograd.grad(wanted.sum(), parameters), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda **where: ragged.GroupedLinear(3, 4, 5, **where),
        lambda **where: ragged.MultiheadAttention(8, 2, rotary=ragged.RotaryEmbedding(4, **where), **where),
        lambda **where: ragged.TransformerEncoderLayer(8, 2, 16, **where),
        lambda **where: ragged.HSTU(8, 2, 10, **where),
        lambda **where: ragged.MoE(8, 6, 4, **where),
        lambda **where: ragged.AttentionPool(8, **where),
        lambda **where: ragged.EmbeddingBag(8, 4, **where),
    ],
)
def test_factory_arguments(make: Callable[..., nn.Module]) -> None:
    module = make(device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.float64)}
    assert repr(module).startswith(type(module).__name__)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: ragged.MultiheadAttention(16, 3), ShapeError, "embed_dim=16 must be a positive multiple of num_heads=3"),
        (lambda: ragged.MultiheadAttention(16, 4, num_kv_heads=3), ShapeError, "multiple of num_kv_heads=3"),
        (lambda: ragged.MultiheadAttention(16, 4)(torch.randn(2, 3, 16)), CallError, "must be a JaggedTensor"),
        (lambda: ragged.MultiheadAttention(16, 4)(rows(8)), ShapeError, r"must have the shape \(B, r0, 16\), got \(4, r0, 8\)"),
        (lambda: ragged.MultiheadAttention(16, 4)(rows(16), value=rows(16)), CallError, "value is given without key"),
        (lambda: ragged.RotaryEmbedding(3), ShapeError, "must be even"),
        (lambda: ragged.MoE(8, 6, 4, top_k=5), CallError, "top_k must be between 1 and num_experts=4, got 5"),
        (lambda: ragged.MoE(8, 6, 4, activation="tan"), CallError, "activation must be one of swiglu"),
        (lambda: ragged.TransformerEncoderLayer(8, 2, activation="tan"), CallError, "activation must be one of relu"),
        (lambda: ragged.EmbeddingBag(8, 4, fused_optimizer="adam"), CallError, "must be one of sgd, rowwise_adagrad, got 'adam'"),
    ],
)
def test_errors_say_what_to_do(wrong: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrong()


def test_rows_longer_than_the_table_of_angles_raise() -> None:
    with pytest.raises(ShapeError, match="7"):
        ragged.RotaryEmbedding(4, max_length=6)(JaggedTensor.from_lengths(torch.randn(11, 2, 4), LENGTHS))


@pytest.mark.parametrize("count", [1, 2])
def test_rotary_embeddings_of_new_positions(count: int) -> None:
    """Rows that are turned piece by piece, as a cache of keys grows, are the rows turned at once."""
    torch.manual_seed(0)
    module, old = ragged.RotaryEmbedding(6, max_length=9, base=50.0), JaggedTensor.from_lengths(torch.randn(11, 2, 6), LENGTHS)
    new = torch.randn(len(old), count, 2, 6, requires_grad=True)
    wanted = torch.stack([turned(torch.cat(pair), 50.0)[-count:] for pair in zip(old.unbind(), new, strict=True)])
    packed = JaggedTensor.from_padded(new, [count] * len(old))
    for found in (module(new, old.lengths), module(packed, start=old.lengths.int()).to_padded()):
        torch.testing.assert_close(found, wanted)
        upstream = torch.randn_like(found)
        (ours,), (theirs,) = (torch.autograd.grad(y, new, upstream, retain_graph=True) for y in (found, wanted))
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(IndexError, match="there are 9 positions"):
        module(new, old.lengths + 5)
    for start in (torch.tensor([0]), old.lengths.float()):
        with pytest.raises(
            ShapeError, match="RotaryEmbedding: start must have one int32 or int64 position for each of the 4 rows"
        ):
            module(new, start)


def test_a_traced_step_of_decoding() -> None:
    """A cache of keys that grows by a token of every row, in a traced function, against all rows turned at once."""
    rotary, count = ragged.RotaryEmbedding(6, max_length=16, base=50.0), len(LENGTHS)
    traces: list[int] = []

    @jit
    def step(key: Any, keys: Any) -> Any:
        traces.append(1)
        return torch.cat([keys, rotary(key, start=keys.lengths)], 1)

    plain = JaggedTensor.from_lengths(torch.randn(sum(LENGTHS), 2, 6), LENGTHS)
    keys = rotary(plain)
    for _ in range(3):
        key = torch.randn(count, 1, 2, 6)
        keys, plain = step(key, keys), torch.cat([plain, key], 1)
    for own, row in zip(keys.unbind(), plain.unbind(), strict=True):
        torch.testing.assert_close(own, turned(row, 50.0))
    assert len(traces) == 1
    for start in (torch.tensor([0]), torch.zeros(count + 1, dtype=torch.long), torch.zeros(count)):
        with pytest.raises(ShapeError):
            jit(lambda key, start: rotary(key, start=start))(key, start)


def test_experts_refuse_padded_tokens() -> None:
    with pytest.raises(ShapeError, match=r"MoE: input must have the shape \(B, r0, 8\) or \(tokens, 8\), got \(2, 5, 8\)"):
        ragged.MoE(8, 6, num_experts=4)(torch.randn(2, 5, 8))
