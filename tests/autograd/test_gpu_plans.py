"""Gradients of matrix products and attention under the plans of a GPU, interpreted: values against torch, row by row, and what
the programs must not do, because it would make them slow."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

import serrate
from serrate import JaggedTensor, engine, jit
from serrate.ir.loops import Dot, Write, nodes
from serrate.runtime.triton import TritonExecutable

pytestmark = pytest.mark.triton

AROUND_BLOCKS = [0, 1, 63, 64, 65, 130]
GROUPS = {"mixed": [0, 5, 1, 130, 0], "one group": [70], "single rows": [1] * 4, "empty": [0, 0], "first only": [65, 0]}


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).requires_grad_()


def gradients(
    function: Callable[..., Any],
    lengths: Sequence[int],
    by_row: Sequence[Tensor],
    shared: Sequence[Tensor],
    wanted: Sequence[Tensor],
) -> list[Tensor]:
    """The gradients of a program whose lengths the host may not read, if that of its result counts up."""
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    with serrate.no_sync(strict=True):
        rows = [JaggedTensor.from_csr(x, offsets) for x in by_row]
        values = jit(function, backend="triton")(*rows, *shared).values
        return list(torch.autograd.grad(values, wanted, arriving(values)))


def arriving(values: Tensor) -> Tensor:
    return torch.linspace(-1, 1, values.numel()).reshape(values.shape).to(values.dtype)


def by_hand(
    row: Callable[..., Tensor], lengths: Sequence[int], by_row: Sequence[Tensor], shared: Sequence[Tensor]
) -> list[Tensor]:
    """The same in float64, one row after another."""
    wide = [x.detach().double().requires_grad_() for x in (*by_row, *shared)]
    rows, others = wide[: len(by_row)], wide[len(by_row) :]
    parts = zip(*(x.split(list(lengths)) for x in rows), strict=True)
    result = torch.cat([row(k, *each, *others) for k, each in enumerate(parts)])
    given = arriving(result.to(by_row[0].dtype)).double()
    return list(torch.autograd.grad(result, wide, given))


def close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for mine, known in zip(got, want, strict=True):
        at = 1e-4 if mine.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            mine.double(), known, rtol=at, atol=at * max(1.0, float(known.abs().max()) if known.numel() else 0.0)
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("sizes", [(37, 29), (16, 300), (160, 16)], ids=str)
def test_a_product_for_each_group(name: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    lengths, (depth, width) = GROUPS[name], sizes
    x, w = drawn(sum(lengths), depth, dtype=dtype), drawn(len(lengths), depth, width, dtype=dtype, seed=1)
    found = gradients(lambda x, w: x @ w, lengths, [x], [w], [x, w])
    close(found, by_hand(lambda k, x, w: x @ w[k], lengths, [x], [w]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_product_for_all_rows(dtype: torch.dtype) -> None:
    """More rows than one worker sums: parts of the sum are combined."""
    lengths = [4000, 0, 301]
    x, w = drawn(sum(lengths), 37, dtype=dtype), drawn(37, 20, dtype=dtype, seed=1)
    found = gradients(lambda x, w: x @ w, lengths, [x], [w], [x, w])
    close(found, by_hand(lambda _, x, w: x @ w, lengths, [x], [w]))


def test_an_operand_that_others_need_too_keeps_its_bits() -> None:
    """The gradient that arrives at a product is rounded; what else is computed from it is not."""
    x, w = drawn(70, 16, dtype=torch.bfloat16), drawn(2, 16, 8, dtype=torch.bfloat16, seed=1)
    found = gradients(lambda x, w: torch.tanh(x @ w) * 3, [60, 10], [x], [w], [x, w])
    close(found, by_hand(lambda k, x, w: torch.tanh(x @ w[k]) * 3, [60, 10], [x], [w]))


def heads(x: Any) -> Any:
    return x.transpose(1, 2)


def attend(causal: bool) -> Callable[..., Any]:
    return lambda q, k, v: heads(functional.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=causal))


def one_sequence(causal: bool) -> Callable[..., Tensor]:
    def row(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1) if causal else torch.zeros(len(q), len(k), dtype=torch.bool)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(2), v)

    return row


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (32, torch.bfloat16),
        (64, torch.bfloat16),
        (96, torch.float16),
        (128, torch.bfloat16),
        (64, torch.float32),
        (37, torch.float32),
    ],
    ids=str,
)
def test_attention(size: int, dtype: torch.dtype, causal: bool) -> None:
    given = [drawn(sum(AROUND_BLOCKS), 2, size, dtype=dtype, seed=k) for k in range(3)]
    found = gradients(attend(causal), AROUND_BLOCKS, given, [], given)
    close(found, by_hand(one_sequence(causal), AROUND_BLOCKS, given, []))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [64], [129]], ids=str)
def test_causal_attention_of_few_sequences(lengths: list[int]) -> None:
    given = [drawn(sum(lengths), 2, 64, dtype=torch.bfloat16, seed=k) for k in range(3)]
    found = gradients(attend(True), lengths, given, [], given)
    close(found, by_hand(one_sequence(True), lengths, given, []))


# --- what makes programs slow --------------------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[TritonExecutable]:
    """The programs that a test builds."""
    found: list[Any] = []
    build = engine.build
    monkeypatch.setattr(engine, "build", lambda *args, **kwargs: found.append(build(*args, **kwargs)) or found[-1])
    return found


def test_the_gradient_that_arrives_is_not_copied(built: list[TritonExecutable]) -> None:
    x, w = drawn(70, 48, dtype=torch.bfloat16), drawn(2, 48, 32, dtype=torch.bfloat16, seed=1)
    gradients(lambda x, w: x @ w, [60, 10], [x], [w], [x, w])
    backward = built[-1].program
    assert len(backward.kernels) == 2 and not backward.scratch


def test_gradients_of_weights_alone_have_as_many_warps_as_products(built: list[TritonExecutable]) -> None:
    x, w = drawn(70, 256, dtype=torch.bfloat16).detach(), drawn(2, 256, 256, dtype=torch.bfloat16, seed=1)
    gradients(lambda x, w: x @ w, [60, 10], [x], [w], [w])
    assert [launch.kernel._options["num_warps"] for launch in built[-1]._launches] == [8]
    assert "tl.full([128, 256], 0.0, tl.float32)" in built[-1].source


def test_all_workers_combine_parts_of_a_sum(built: list[TritonExecutable]) -> None:
    x, w = drawn(20, 64).detach(), drawn(64, 48, seed=1)
    gradients(lambda x, w: x @ w, [20], [x], [w], [w])
    parts, combined = built[-1]._printed.launches
    assert parts.grid and combined.grid and str(combined.grid[0]) == "48"


@pytest.mark.parametrize("causal", [False, True])
def test_whole_blocks_of_attention_have_no_masks(causal: bool, built: list[TritonExecutable]) -> None:
    given = [drawn(5, 2, 64, dtype=torch.bfloat16, seed=k) for k in range(3)]
    gradients(attend(causal), [5], given, [], given)
    before, keys, queries = re.split(r"@triton.jit\(do_not", built[-1].source)[1:]
    assert "tl.dot(" not in before and {t.dtype for t in built[-1].program.scratch if len(t.storage) > 2} == {torch.bfloat16}
    for kernel, products in ((keys, 4), (queries, 3)):
        whole = re.search(r"for (\w+) in range\(0, \(?whole", kernel)
        assert whole is not None
        step = whole[1].removeprefix("step_")
        loop = re.split(r"\n        (?:for rest|if \(whole|tl\.store)", kernel[whole.end() :])[0]
        assert loop.count("tl.dot(") == products
        assert "tl.where(" not in loop
        # The interpreter reads blocks that the loop keeps inside it, too: their addresses do not move with it.
        loads = [line for line in loop.splitlines() if "tl.load(" in line and re.search(rf"\b{step}\b", line)]
        assert loads and not any("mask=" in line for line in loads)
        # Each block is read once, and turned for the other product.
        assert len(re.findall(r"tl\.trans\(", loop)) == (2 if kernel is keys else 1)


def test_numbers_that_scale_an_operand_scale_the_sums(built: list[TritonExecutable]) -> None:
    given = [drawn(5, 2, 64, dtype=torch.bfloat16, seed=k) for k in range(3)]
    gradients(attend(False), [5], given, [], given)
    every = [n for kernel in built[-1].program.kernels for n in nodes(kernel.body)]
    operands = [str(side) for n in every if isinstance(n, Dot) for side in (n.left, n.right)]
    # The scores themselves are scaled where their exponentials are taken.
    assert operands and not any("0.125" in re.sub(r"mul\(T10\w*, 0\.125\)", "", text) for text in operands)
    assert sum("0.125" in str(n.value) for n in every if isinstance(n, Write)) == 2
