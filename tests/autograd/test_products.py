"""Gradients of matrix products with weights: sums over rows in blocks, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from serrate import JaggedTensor, jit
from serrate.compiled import Compiled

LENGTHS = [130, 0, 3, 257]


def grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([row @ w for row, w in zip(x.split(LENGTHS), weight, strict=True)])


FORMS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "a weight for each row": (lambda x, w: x @ w, grouped, (4, 130, 70)),
    "a weight for all": (lambda x, w: F.linear(x, w), F.linear, (300, 130)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_gradients_of_weights_and_rows(form: str, dtype: torch.dtype) -> None:
    function, oracle, shape = FORMS[form]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(LENGTHS), 130, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    result = jit(function)(JaggedTensor.from_lengths(x, LENGTHS), weight).values
    upstream = torch.randn(result.shape, generator=generator).to(dtype)
    found = torch.autograd.grad(result, (x, weight), upstream)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    wanted = torch.autograd.grad(oracle(*wide), wide, upstream.double())
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.3}
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **tolerance)


def test_few_blocks_are_summed_in_parts_and_bits_do_not_depend_on_threads() -> None:
    x = torch.linspace(-1, 1, 5000 * 8).reshape(5000, 8)
    upstream = torch.linspace(2, -1, 5000 * 4).reshape(5000, 4)
    program, before, found = jit(F.linear), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            weight = torch.ones(4, 8, requires_grad=True)
            found += torch.autograd.grad(program(JaggedTensor.from_lengths(x, [4999, 1]), weight).values, weight, upstream)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], (upstream.double().T @ x.double()).float())


def test_the_gradient_of_a_weight_is_written_where_it_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[Compiled] = []
    begin = Compiled.__init__
    monkeypatch.setattr(Compiled, "__init__", lambda self, *a, **k: (programs.append(self), begin(self, *a, **k))[1])
    weight = torch.ones(2, 3, 4, requires_grad=True)
    jit(lambda x, w: x @ w, backend="reference")(
        JaggedTensor.from_lengths(torch.ones(5, 3), [2, 3]), weight
    ).values.sum().backward()
    assert weight.grad is not None and weight.grad[:, 0, 0].tolist() == [2.0, 3.0]
    backward = next(p for p in programs if p.fusion.name.endswith("_backward"))
    assert len(backward.fusion.definitions) == 1


@pytest.mark.parametrize("traced", [True, False])
def test_dims_of_size_one_are_shared(traced: bool) -> None:
    """As in torch: one weight for the sentences of a document, for all rows, for all sequences of each head."""
    generator = torch.Generator().manual_seed(2)

    def real(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=torch.float64, generator=generator)

    sentences, inner = torch.tensor([2, 0, 3]), [4, 0, 1, 2, 3]
    document = torch.repeat_interleave(torch.tensor([0, 0, 2, 2, 2]), torch.tensor(inner))

    def nested(x: torch.Tensor) -> JaggedTensor:
        return JaggedTensor.from_lengths(x, (sentences, torch.tensor(inner)))

    def rows(x: torch.Tensor) -> JaggedTensor:
        return JaggedTensor.from_lengths(x, inner)

    def heads(x: torch.Tensor) -> JaggedTensor:
        return JaggedTensor.from_lengths(x, inner).transpose(1, 2)

    cases: list[tuple[torch.Tensor, torch.Tensor, Any, Any]] = [
        (real(10, 3), real(3, 1, 3, 2), nested, lambda x, w: torch.einsum("td,tde->te", x, w[document, 0])),
        (real(10, 3), real(1, 3, 2), rows, lambda x, w: x @ w[0]),
        (real(10, 2, 3), real(1, 2, 3, 4), heads, lambda x, w: torch.einsum("thd,hde->the", x, w[0])),
    ]
    for values, weight, make, oracle in cases:
        leaves, other = ([t.clone().requires_grad_() for t in (values, weight)] for _ in range(2))
        function = jit(torch.matmul) if traced else torch.matmul
        found = function(make(leaves[0]), leaves[1])
        found = (found.transpose(1, 2) if values.ndim == 3 else found).contiguous().values
        wanted = oracle(*other)
        torch.testing.assert_close(found, wanted)
        upstream = real(*wanted.shape)
        for ours, theirs in zip(
            torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(wanted, other, upstream), strict=True
        ):
            torch.testing.assert_close(ours, theirs)
