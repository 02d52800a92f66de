"""Row-wise gradients of tables and fused updates, against torch's own modules and loops over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import serrate
from serrate import JaggedTensor, Structure
from serrate import nn as ragged
from serrate.errors import CallError

IDS = torch.tensor([3, 1, 3, 0, 7, 1, 1, 8, 8])
LENGTHS = [3, 0, 4, 2]


def bags() -> JaggedTensor:
    return JaggedTensor.from_lengths(IDS, LENGTHS)


def offsets() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0)[:-1]


@pytest.mark.parametrize(
    ("mode", "padding_idx", "weighted"), [("sum", None, False), ("sum", 1, True), ("mean", None, False), ("mean", -2, False)]
)
def test_sparse_gradients_of_bags(mode: str, padding_idx: int | None, weighted: bool) -> None:
    torch.manual_seed(0)
    table = torch.randn(10, 4, requires_grad=True)
    own, other = (torch.arange(1.0, 10.0).requires_grad_() for _ in range(2)) if weighted else (None, None)
    each = None if own is None else bags().with_values(own)
    found = F.embedding_bag(bags(), table, mode=mode, sparse=True, padding_idx=padding_idx, per_sample_weights=each)
    options: dict[str, Any] = {"mode": mode, "padding_idx": padding_idx}
    wanted = F.embedding_bag(IDS, table, offsets(), per_sample_weights=other, **options)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(4, 4)
    (wanted * weights).sum().backward()
    dense, table.grad = table.grad, None
    (found * weights).sum().backward()
    assert table.grad.is_sparse
    assert table.grad._indices()[0].tolist() == sorted(set(IDS.tolist()) - {None if padding_idx is None else padding_idx % 10})
    torch.testing.assert_close(table.grad.to_dense(), dense)
    if own is not None:
        torch.testing.assert_close(own.grad, other.grad)


def test_sparse_gradients_of_lookups() -> None:
    torch.manual_seed(0)
    theirs = nn.Embedding(10, 4, sparse=True, padding_idx=1)
    ours = nn.Embedding(10, 4, sparse=True, padding_idx=1)
    ours.load_state_dict(theirs.state_dict())
    found, weights = ours(bags()), torch.randn(9, 4)
    assert str(found.shape) == "(4, r0, 4)"
    (found.values * weights).sum().backward()
    (theirs(IDS) * weights).sum().backward()
    assert ours.weight.grad.is_sparse
    torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())


def test_sparse_gradients_of_nested_bags_and_of_rows_with_gaps() -> None:
    torch.manual_seed(0)
    table = torch.randn(10, 4, requires_grad=True)
    nested = JaggedTensor(IDS, Structure.from_lengths(torch.tensor([2, 0, 2]), torch.tensor(LENGTHS)))
    gaps = JaggedTensor.from_padded(F.pad(bags().to_padded(), (0, 3)), torch.tensor(LENGTHS))
    weights = torch.randn(4, 4)
    (F.embedding_bag(IDS, table, offsets(), mode="mean") * weights).sum().backward()
    wanted, table.grad = table.grad, None
    for given in (nested, gaps):
        found = F.embedding_bag(given, table, mode="mean", sparse=True)
        values = found.values if isinstance(found, JaggedTensor) else found
        (values * weights).sum().backward()
        torch.testing.assert_close(table.grad.to_dense(), wanted)
        table.grad = None


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), torch.optim.SparseAdam, torch.optim.Adagrad])
def test_optimisers_of_sparse_gradients(make: Any) -> None:
    torch.manual_seed(0)
    theirs, ours = nn.EmbeddingBag(10, 4, sparse=True), ragged.EmbeddingBag(10, 4, sparse=True)
    ours.load_state_dict(theirs.state_dict())
    steps = [make(list(module.parameters())) for module in (theirs, ours)]
    for _ in range(3):
        theirs(IDS, offsets()).square().sum().backward()
        ours(bags()).square().sum().backward()
        for step in steps:
            step.step()
            step.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_fused_sgd(mode: str) -> None:
    torch.manual_seed(0)
    ours, theirs = ragged.EmbeddingBag(10, 4, mode=mode, fused_optimizer="sgd", lr=0.1), nn.EmbeddingBag(10, 4, mode=mode)
    theirs.load_state_dict(ours.state_dict())
    step = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        ours(bags()).square().sum().backward()
        theirs(IDS, offsets()).square().sum().backward()
        step.step()
        step.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight, check_stride=False)
    assert ours.weight.grad is None and ours.weight.requires_grad


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_a_frozen_table_stays_as_it_is(optimizer: str) -> None:
    table, head = ragged.EmbeddingBag(10, 4, mode="sum", fused_optimizer=optimizer, lr=0.1), nn.Linear(4, 1)
    model = nn.Sequential(table, head)
    model[0].requires_grad_(False)
    before = table.weight.clone()
    found = model(bags())
    assert not table(bags()).requires_grad
    found.sum().backward()
    assert torch.equal(table.weight, before) and head.weight.grad is not None
    model.requires_grad_(True)
    model(bags()).sum().backward()
    assert not torch.equal(table.weight, before)


def test_fused_rowwise_adagrad() -> None:
    torch.manual_seed(0)
    ours = ragged.EmbeddingBag(10, 4, mode="sum", fused_optimizer="rowwise_adagrad", lr=0.1, padding_idx=8)
    table = [row.clone() for row in ours.weight]
    total = [0.0] * 10
    weights = torch.randn(4, 4)
    for _ in range(3):
        (ours(bags()) * weights).sum().backward()
        sums: dict[int, Tensor] = {}
        for bag, ids in enumerate(bags().unbind()):
            for k in ids.tolist():
                sums[k] = sums.get(k, torch.zeros(4)) + weights[bag]
        sums.pop(8)
        for k, gradient in sums.items():
            total[k] += float(gradient.square().mean())
            table[k] = table[k] - 0.1 * gradient / (total[k] ** 0.5 + 1e-10)
    torch.testing.assert_close(ours.weight.data, torch.stack(table))
    torch.testing.assert_close(ours.state_dict()["sum_of_squares"], torch.tensor(total))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("converted", [True, False])
def test_rowwise_adagrad_of_tables_of_other_dtypes(dtype: torch.dtype, converted: bool) -> None:
    module = ragged.EmbeddingBag(10, 4, mode="sum", fused_optimizer="rowwise_adagrad", lr=0.5, dtype=None if converted else dtype)
    module = module.to(dtype)
    assert module.sum_of_squares.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    gradient = torch.bincount(IDS, minlength=10).to(torch.float64) / 3  # of every feature
    weight, squares = module.weight.detach().double(), torch.zeros(10, dtype=torch.float64)
    for _ in range(3):
        (module(bags()) / 3).sum().backward()
        squares += gradient.square()
        weight -= (0.5 * gradient / (squares.sqrt() + 1e-10))[:, None]
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(module.weight.detach().double(), weight, **tolerance)
    torch.testing.assert_close(module.sum_of_squares.double(), squares, rtol=tolerance["rtol"], atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"fused_optimizer": "sgd"}])
def test_gradients_scaled_by_frequency_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(CallError, match="embedding_bag: scale_grad_by_freq is not supported"):
        ragged.EmbeddingBag(10, 4, mode="sum", scale_grad_by_freq=True, **options)(bags())


def test_fused_updates_have_the_same_bits_for_any_number_of_threads() -> None:
    def trained(threads: int) -> Tensor:
        torch.manual_seed(0)
        module = ragged.EmbeddingBag(50, 16, fused_optimizer="rowwise_adagrad")
        ids = JaggedTensor.from_lengths(torch.randint(0, 50, (4000,)), torch.full((400,), 10))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for _ in range(2):
                module(ids).square().sum().backward()
        finally:
            torch.set_num_threads(before)
        return module.weight.data

    assert torch.equal(trained(1), trained(2))


def test_what_fused_optimisers_do_not_take() -> None:
    module = ragged.EmbeddingBag(10, 4, mode="sum", fused_optimizer="sgd")
    with pytest.raises(CallError, match="bags are the rows of a JaggedTensor, got a Tensor"):
        module(IDS, offsets())
    with pytest.raises(CallError, match="does not work in a traced function"):
        serrate.jit(lambda ids: module(ids))(bags())
    with pytest.raises(CallError, match="the gradient of per_sample_weights needs the table"):
        module(bags(), per_sample_weights=bags().with_values(torch.ones(9, requires_grad=True)))
    with pytest.raises(CallError, match="mode='max'"):
        ragged.EmbeddingBag(10, 4, mode="max", fused_optimizer="sgd")
    with torch.no_grad():
        assert module(bags()).shape == (4, 4)
