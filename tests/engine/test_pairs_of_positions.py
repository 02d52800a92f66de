"""A ragged tensor broadcast against itself along another dim: a value for every pair of positions of a row.

In: traced functions of one argument. Out: differences from plain torch, row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from serrate import JaggedTensor, jit

LENGTHS = [2, 0, 4, 1]


def features() -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(7, 2, generator=torch.Generator().manual_seed(0)), LENGTHS)


PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "distances": (
        lambda x: (x.unsqueeze(2) - x.unsqueeze(1)).abs().sum(-1),
        lambda r: (r[:, None] - r[None]).abs().sum(-1),
    ),
    "mask": (lambda x: x.sum(2)[:, :, None] < x.sum(2)[:, None], lambda r: r.sum(1)[:, None] < r.sum(1)[None]),
    "reduced": (lambda x: (x.unsqueeze(2) * x.unsqueeze(1)).exp().sum(2), lambda r: (r[:, None] * r[None]).exp().sum(1)),
    "of another value": (lambda x: x.unsqueeze(2) + (x * 2).unsqueeze(1), lambda r: r[:, None] + 2 * r[None]),
    "a bias of attention": (
        lambda x: torch.softmax(x @ x.transpose(1, 2) - (x.unsqueeze(2) - x.unsqueeze(1)).abs().sum(-1), -1) @ x,
        lambda r: torch.softmax(r @ r.T - (r[:, None] - r[None]).abs().sum(-1), -1) @ r,
    ),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_positions(name: str, backend: str) -> None:
    ours, of_row = PAIRS[name]
    x = features()
    found = jit(ours, backend=backend)(x)
    for own, row in zip(found.unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(own, of_row(row), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_gradients_of_pairs(backend: str) -> None:
    x = features().requires_grad_()
    jit(lambda x: (x.unsqueeze(2) - x.unsqueeze(1)).square().sum(), backend=backend)(x).backward()
    values = features().values.requires_grad_()
    torch.stack([(r[:, None] - r[None]).square().sum() for r in values.split(LENGTHS)]).sum().backward()
    torch.testing.assert_close(x.grad.values, values.grad, rtol=1e-4, atol=1e-4)


PACKED: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "some columns by others": (lambda x: x[:, :, :17] @ x[:, :, 20:37].transpose(1, 2), lambda r: r[:, :17] @ r[:, 20:37].T),
    "columns by themselves": (lambda x: x[:, :, 1:] @ x[:, :, 1:].transpose(1, 2), lambda r: r[:, 1:] @ r[:, 1:].T),
    "packed queries, keys and values": (
        lambda x: functional.scaled_dot_product_attention(
            *(x.unflatten(2, (3, 1, 13)).select(2, k).transpose(1, 2) for k in range(3))
        ).transpose(1, 2),
        lambda r: functional.scaled_dot_product_attention(*r.unflatten(1, (3, 1, 13)).permute(1, 2, 0, 3)).transpose(0, 1),
    ),
}


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_products_of_parts_of_the_same_rows(name: str, dtype: torch.dtype, backend: str) -> None:
    """Both operands of a product are read from one tensor: one at the rows of the result, the other at its columns."""
    ours, of_row = PACKED[name]
    x = JaggedTensor.from_lengths(torch.randn(26, 39, generator=torch.Generator().manual_seed(0)).to(dtype), [5, 0, 20, 1])
    found = jit(ours, backend=backend)(x)
    for own, row in zip(found.unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(own.double(), of_row(row.double()), rtol=2e-2, atol=1e-4 if dtype == torch.float32 else 6e-2)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_products_of_rows_of_a_table(backend: str) -> None:
    numbers, table = JaggedTensor.from_lengths(torch.arange(26) % 7, [5, 0, 20, 1]), torch.randn(7, 16)

    @jit(backend=backend)
    def similarities(numbers: Any, table: Any) -> Any:
        rows = functional.embedding(numbers, table)
        return rows @ rows.transpose(1, 2)

    for own, row in zip(similarities(numbers, table).unbind(), numbers.unbind(), strict=True):
        torch.testing.assert_close(own, table[row] @ table[row].T)


def test_pairs_of_a_dense_dim() -> None:
    w = torch.randn(5)
    found = jit(lambda x, w: w[:, None] - w[None] + 0 * x.sum())(features(), w)
    torch.testing.assert_close(found, w[:, None] - w[None])


VIEWS: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "parts by the whole": (
        lambda x: x.unflatten(2, (2, 3))[:, :, :, :, None] - x[:, :, None, None],
        lambda r: r.unflatten(1, (2, 3))[:, :, :, None] - r[:, None, None],
    ),
    "one part by the whole": (lambda x: x.unflatten(2, (6, 1)) * x[:, :, None], lambda r: r.unflatten(1, (6, 1)) * r[:, None]),
    "other parts": (
        lambda x: x.unflatten(2, (2, 3))[:, :, :, 0, None] * x.unflatten(2, (3, 2))[:, :, None, :, 0],
        lambda r: r.unflatten(1, (2, 3))[:, :, 0, None] * r.unflatten(1, (3, 2))[:, None, :, 0],
    ),
    "merged by a part": (
        lambda x: (x.unflatten(2, (2, 3)) * 2).flatten(2)[:, :, :, None] - x.unflatten(2, (2, 3))[:, :, None, 0],
        lambda r: 2 * r[:, :, None] - r[:, None, :3],
    ),
    "a product": (lambda x: x.unflatten(2, (6, 1)) @ x[:, :, None], lambda r: r[:, :, None] @ r[:, None]),
    "einsum": (
        lambda x: torch.einsum("bnij,bnk->bnijk", x.unflatten(2, (2, 3)), x),
        lambda r: torch.einsum("nij,nk->nijk", r.unflatten(1, (2, 3)), r),
    ),
}


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_dim_have_independent_indices(name: str, backend: str) -> None:
    ours, of_row = VIEWS[name]
    generator = torch.Generator().manual_seed(0)
    values, row_values = (torch.randn(7, 6, generator=generator.manual_seed(0)).requires_grad_() for _ in range(2))
    found = jit(ours, backend=backend)(JaggedTensor.from_lengths(values, LENGTHS))
    expected = torch.cat([of_row(r) for r in row_values.split(LENGTHS)])
    torch.testing.assert_close(found.values, expected)
    weights = torch.randn(expected.shape, generator=generator)
    (found.values * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(values.grad, row_values.grad, rtol=1e-4, atol=1e-4)
