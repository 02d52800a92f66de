"""Gradients of block permutations (`regroup`, `permute` of dims that count rows) and of results nested by `[G, K+1]` offsets,
against plain torch, row by row."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from serrate import JaggedTensor, ir, jit, ops
from serrate.autograd.saved import Save

OFFSETS = torch.tensor([[0, 3, 3, 7, 10], [0, 2, 6, 9, 10]])
Rows = list[list[torch.Tensor]]


def blocks(x: torch.Tensor) -> Rows:
    """The rows of each group."""
    return [[x[g, a:b] for a, b in itertools.pairwise(row)] for g, row in enumerate(OFFSETS.tolist())]


def in_order(rows: Rows) -> list[torch.Tensor]:
    return [row for group in rows for row in group]


def swapped(rows: Rows) -> Rows:
    return [list(each) for each in zip(*rows, strict=True)]


def normed(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [row / row.square().sum(-1, keepdim=True) for row in rows]


Fused = Callable[[Any], Any]
Plain = Callable[[Rows], list[torch.Tensor]]

CASES: dict[str, tuple[Fused, Plain]] = {
    "regroup": (ops.regroup, lambda rows: [torch.cat(each) for each in swapped(rows)]),
    "regroup_between_functions": (
        lambda y: ops.exp(ops.regroup(ops.exp(y) * y) * 0.5),
        lambda rows: [torch.cat([(r.exp() * r * 0.5) for r in each]).exp() for each in swapped(rows)],
    ),
    "sum_of_regroup": (
        lambda y: ops.sum(ops.regroup(y * y), 1),
        lambda rows: [torch.cat([r * r for r in each]).sum(0) for each in swapped(rows)],
    ),
    "softmax_of_regroup": (
        lambda y: ops.softmax(ops.regroup(y), 1),
        lambda rows: [torch.cat(each).softmax(0) for each in swapped(rows)],
    ),
    "permute": (lambda y: ops.permute(y * y, 1, 0, 2, 3), lambda rows: [r * r for r in in_order(swapped(rows))]),
    "permute_with_features": (
        lambda y: ops.sum(ops.permute(ops.exp(y), 1, 3, 0, 2), 1),
        lambda rows: [r.exp().sum(-1) for r in in_order(swapped(rows))],
    ),
    "regroup_of_permute": (
        lambda y: ops.regroup(ops.permute(y * y, 1, 0, 2, 3)),
        lambda rows: [torch.cat([r * r for r in group]) for group in rows],
    ),
    "nested": (lambda y: y, in_order),
    "nested_result_that_is_saved": (ops.exp, lambda rows: [r.exp() for r in in_order(rows)]),
    "nested_reduction_that_is_saved": (
        lambda y: y / ops.sum(y * y, 3, keepdim=True),
        lambda rows: normed(in_order(rows)),
    ),
    "softmax_of_nested": (lambda y: ops.softmax(y, 2), lambda rows: [r.softmax(0) for r in in_order(rows)]),
    "sum_of_nested_features": (lambda y: ops.sum(y * y, 3), lambda rows: [(r * r).sum(-1) for r in in_order(rows)]),
}


def fusion(body: Fused) -> ir.Fusion:
    with ir.Fusion("blocks") as f:
        x, offsets = f.input((None, None, 3), torch.float64), f.input((None, None), torch.int64)
        f.output(body(ops.as_nested(x, offsets, ragged_dim=1)))
    return f


def values_of(result: Any) -> torch.Tensor:
    return result.values if isinstance(result, JaggedTensor) else result


def argument() -> torch.Tensor:
    return torch.randn(2, 10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()


def check(case: str, backend: str, save: Save = "auto") -> None:
    body, plain = CASES[case]
    x = argument()
    result = values_of(fusion(body).compile(backend, save=save)(x, OFFSETS))
    rows = plain(blocks(x))
    wanted = torch.stack(rows) if case == "sum_of_regroup" else torch.cat(rows)
    torch.testing.assert_close(result, wanted)
    arriving = torch.linspace(-1, 2, wanted.numel(), dtype=torch.float64).view(wanted.shape)
    (found,), (known,) = (torch.autograd.grad(y, x, arriving) for y in (result, wanted))
    torch.testing.assert_close(found, known)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("save", ["auto", "all"])
def test_gradients_are_those_of_each_row(case: str, save: Save) -> None:
    check(case, "reference", save)


@pytest.mark.parametrize("backend", ["cpp", "triton"])
@pytest.mark.parametrize("case", ["regroup_between_functions", "permute", "nested_reduction_that_is_saved"])
def test_compiled_gradients_are_those_of_each_row(case: str, backend: str) -> None:
    check(case, backend)


@pytest.mark.parametrize("case", ["regroup_between_functions", "permute", "nested_result_that_is_saved"])
def test_gradients_of_gradients_are_those_of_each_row(case: str) -> None:
    body, plain = CASES[case]
    x = argument()
    results = values_of(fusion(body).compile("reference")(x, OFFSETS)), torch.cat(plain(blocks(x)))
    arriving = torch.linspace(-1, 2, 60, dtype=torch.float64).view(20, 3).requires_grad_()
    firsts = [torch.autograd.grad(y, x, arriving, create_graph=True)[0] for y in results]
    found, known = (torch.autograd.grad(g.square().sum(), (x, arriving)) for g in firsts)
    torch.testing.assert_close(found, known)


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_documents_change_order(compiled: bool) -> None:
    def moved(x: JaggedTensor) -> JaggedTensor:
        return x.permute(1, 0, 2, 3)

    x = argument().detach().view(20, 3).requires_grad_()
    bounds = torch.cat([OFFSETS[0], OFFSETS[1, 1:] + 10])
    documents = JaggedTensor.from_csr(x, (torch.tensor([0, 4, 8]), bounds))
    result = jit(moved)(documents) if compiled else moved(documents)
    wanted = torch.cat(in_order(swapped(blocks(x.view(2, 10, 3)))))
    torch.testing.assert_close(result.values, wanted)
    arriving = torch.linspace(-1, 2, 60, dtype=torch.float64).view(20, 3)
    (found,), (known,) = (torch.autograd.grad(y, x, arriving) for y in (result.values, wanted))
    torch.testing.assert_close(found, known)
