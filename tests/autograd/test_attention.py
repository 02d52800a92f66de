"""The backward program of attention: gradients of every sequence are torch's, and nothing is stored for pairs of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from serrate import JaggedTensor, ir, jit, ops
from serrate.compiled import Compiled
from serrate.errors import StructureMismatch
from serrate.ir.ragged import RaggedIterDomain

LENGTHS = [150, 0, 3, 129, 260]
"""Shorter and longer than one and two blocks."""


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def near(length: int) -> torch.Tensor:
    """The last 40 keys up to the query."""
    return causal(length) & ~causal(length).tril(-40)


def silu_weights(q: Any, k: Any, v: Any) -> Any:
    return (F.silu(q @ k.transpose(1, 2)) * 0.01) @ v


def torch_silu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (F.silu(q @ k.mT) * 0.01) @ v


def torch_masked(mask: Any) -> Any:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(len(q)))


FORMS: dict[str, tuple[Any, Any]] = {
    "plain": (F.scaled_dot_product_attention, F.scaled_dot_product_attention),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), torch_masked(causal)),
    "window": (lambda q, k, v: ops.attention(q, k, v, is_causal=True, window=40), torch_masked(near)),
    "written out": (
        lambda q, k, v: torch.softmax(q @ k.transpose(1, 2), 2) @ v,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0),
    ),
    "without a softmax": (silu_weights, torch_silu),
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Programs that are compiled."""
    found: list[Compiled] = []
    begin = Compiled.__init__

    def recorded(self: Compiled, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        found.append(self)

    monkeypatch.setattr(Compiled, "__init__", recorded)
    return found


@pytest.mark.parametrize(
    "form", [n if n in ("causal", "without a softmax") else pytest.param(n, marks=pytest.mark.slow) for n in FORMS]
)
def test_gradients_are_torch_s_and_take_linear_memory(form: str, programs: list[Compiled]) -> None:
    function, oracle = FORMS[form]
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(sum(LENGTHS), 8, generator=generator).requires_grad_() for _ in range(3)]
    weights = torch.randn(sum(LENGTHS), 8, generator=generator)
    rows = [JaggedTensor.from_lengths(x, LENGTHS) for x in given]
    found = torch.autograd.grad(jit(function)(*rows).values, given, weights)
    parts = [oracle(*each) for each in zip(*(x.split(LENGTHS) for x in given), strict=True)]
    for ours, wanted in zip(found, torch.autograd.grad(torch.cat(parts), given, weights), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    backward = next(p for p in programs if p.fusion.name.endswith("_backward"))
    built = [b for stage in backward.stages for b in stage._built.values()]  # type: ignore[union-attr]
    assert built
    for tensor in (t for b in built for t in b.allocated):
        owners = [d.component.uid for d in tensor.logical if isinstance(d, RaggedIterDomain)]
        assert len(set(owners)) == len(owners), f"{tensor.name} has an element for every pair of positions"


@pytest.mark.slow
def test_a_query_without_keys_gets_a_gradient_of_zero() -> None:
    q, k, v = (torch.ones(n, 2, requires_grad=True) for n in (3, 1, 1))
    sides = [JaggedTensor.from_lengths(x, n) for x, n in ((q, [2, 1]), (k, [0, 1]), (v, [0, 1]))]
    F.scaled_dot_product_attention(*sides).values.sum().backward()
    assert all(x.grad is not None for x in (q, k, v))
    assert torch.equal(q.grad, torch.zeros(3, 2)) and torch.equal(v.grad, torch.ones(1, 2))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("backend", "strategy"), [("cpp", None), pytest.param("triton", "persistent_dynamic", marks=pytest.mark.slow)]
)
def test_queries_keys_and_values_with_offsets_of_their_own(backend: str, strategy: str | None) -> None:
    """As on a GPU, where equal offsets in different tensors are found equal only at run time."""
    lengths, offsets = [3, 0, 2], torch.tensor([0, 3, 3, 5])
    with ir.Fusion() as f:
        given = [(f.input((None, 3, 2), torch.float32), f.input((None,), torch.int64)) for _ in range(3)]
        heads = (ops.transpose(ops.as_nested(*each), 1, 2) for each in given)
        f.output(ops.transpose(ops.attention(*heads), 1, 2))
    sides = [torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(k)).requires_grad_() for k in range(3)]
    program = f.compile(backend, strategy)
    found = program(sides[0], offsets, sides[1], offsets.clone(), sides[2], offsets.clone()).values
    parts = zip(*(x.split(lengths) for x in sides), strict=True)
    rows = ([x.transpose(0, 1) for x in each] for each in parts)
    wanted = torch.cat([F.scaled_dot_product_attention(*each).transpose(0, 1) for each in rows])
    torch.testing.assert_close(found, wanted)
    both = (torch.autograd.grad(y.square().sum(), sides) for y in (found, wanted))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(StructureMismatch, match="the rows differ"):
        program(sides[0], offsets, sides[1], offsets, sides[2], torch.tensor([0, 2, 3, 5]))


@pytest.mark.parametrize("hidden", [float("-inf"), False], ids=str)
def test_a_query_that_a_mask_hides_from_all_keys_gets_a_gradient_of_zero(hidden: float | bool) -> None:
    mask = torch.zeros(3, 3) if isinstance(hidden, float) else torch.ones(3, 3, dtype=torch.bool)
    mask[1] = hidden
    given = [torch.randn(3, 2, generator=torch.Generator().manual_seed(k)).requires_grad_() for k in range(3)]
    rows = [JaggedTensor.from_lengths(x, [3]) for x in given]
    found = jit(lambda q, k, v: ops.attention(q, k, v, mask=mask))(*rows).values
    seen = [given[0][[0, 2]], *given[1:]]
    wanted = F.scaled_dot_product_attention(*seen)
    torch.testing.assert_close(found, torch.stack([wanted[0], torch.zeros(2), wanted[1]]))
    both = (torch.autograd.grad(y.square().sum(), given) for y in (found, wanted))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)
