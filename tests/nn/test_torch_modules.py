"""torch's own modules take ragged tensors as they are: against the same modules on each row, forwards and backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from serrate import JaggedTensor
from serrate.errors import CallError

LENGTHS = [3, 0, 2]


def rows(*shape: int, seed: int = 0) -> JaggedTensor:
    torch.manual_seed(seed)
    return JaggedTensor.from_lengths(torch.randn(5, *shape), LENGTHS)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(4, 3),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        nn.Identity(),
        nn.ReLU(),
        nn.ReLU6(),
        nn.LeakyReLU(0.2),
        nn.PReLU(),
        nn.PReLU(4),
        nn.ELU(),
        nn.SELU(),
        nn.CELU(),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.SiLU(),
        nn.Mish(),
        nn.GLU(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.LogSigmoid(),
        nn.Softplus(),
        nn.Softsign(),
        nn.Softshrink(),
        nn.Hardshrink(),
        nn.Tanhshrink(),
        nn.Hardtanh(),
        nn.Hardsigmoid(),
        nn.Hardswish(),
        nn.Threshold(0.1, 20.0),
        nn.Softmax(-1),
        nn.LogSoftmax(-1),
        nn.Softmin(-1),
        nn.Dropout(0.0),
        nn.Dropout(0.5).eval(),
        nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Dropout(0.0), nn.Linear(6, 2)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("reference")
def test_modules(module: nn.Module) -> None:
    x = rows(4).requires_grad_()
    alone = x.values.detach().clone().requires_grad_()
    found, wanted = module(x), module(alone)
    assert found.lengths.tolist() == LENGTHS
    torch.testing.assert_close(found.values, wanted)
    weights = torch.randn(wanted.shape)
    parameters = list(module.parameters())
    got = torch.autograd.grad((found.values * weights).sum(), [x.values, *parameters])
    want = torch.autograd.grad((wanted * weights).sum(), [alone, *parameters])
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_softmax_over_rows() -> None:
    x = rows(4)
    for found, row in zip(nn.Softmax(1)(x).unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(found, row.softmax(0))


def test_dropout_keeps_rows_and_scales() -> None:
    torch.manual_seed(0)
    x = JaggedTensor.from_lengths(torch.ones(3000, 4), [1000, 0, 2000]).requires_grad_()
    dropped = nn.Dropout(0.25)(x)
    kept = dropped.values != 0
    assert 0.7 < kept.float().mean() < 0.8
    torch.testing.assert_close(dropped.values[kept], torch.full_like(dropped.values[kept], 4 / 3))
    dropped.values.sum().backward()
    assert torch.equal(x.grad.values, dropped.values)


def test_dropout_of_new_rows_draws_anew_and_its_gradient_follows() -> None:
    kept = []
    for k in range(4):
        x = JaggedTensor.from_lengths(torch.ones(40, 4), [10 + k, 0, 30 - k]).requires_grad_()
        dropped = nn.Dropout(0.5)(x)
        dropped.values.sum().backward()
        assert torch.equal(x.grad.values, dropped.values)
        kept.append(dropped.values.detach())
    assert not any(torch.equal(a, b) for k, a in enumerate(kept) for b in kept[:k])


def of_losses() -> list[Any]:
    x, y, chances = (rows(4, seed=seed).values for seed in range(3))
    p, q = x.sigmoid(), y.sigmoid()
    signs, classes = y.sign(), torch.tensor([0, 3, -100, 1, 2])
    each = torch.rand(4) + 0.5
    return [
        (nn.MSELoss(), x, y),
        (nn.L1Loss(), x, y),
        (nn.SmoothL1Loss(beta=0.7), x, y),
        (nn.SmoothL1Loss(beta=0.0), x, y),
        (nn.HuberLoss(delta=0.7), x, y),
        (nn.BCELoss(), p, q),
        (nn.BCELoss(weight=each), p, q),
        (nn.BCEWithLogitsLoss(), x, q),
        (nn.BCEWithLogitsLoss(weight=each, pos_weight=each + 1), x, q),
        (nn.KLDivLoss(), x, chances.softmax(-1)),
        (nn.KLDivLoss(log_target=True), x, chances.log_softmax(-1)),
        (nn.PoissonNLLLoss(full=True), x, y.abs() * 3),
        (nn.PoissonNLLLoss(log_input=False), p, y.abs()),
        (nn.SoftMarginLoss(), x, signs),
        (nn.HingeEmbeddingLoss(), x, signs),
        (nn.MarginRankingLoss(0.1), x, y, signs),
        (nn.CrossEntropyLoss(weight=each, label_smoothing=0.1), x, classes),
        (nn.NLLLoss(), x, classes),
        (nn.NLLLoss(weight=each), x, classes),
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(len(of_losses())), ids=[f"{k} {case[0]}" for k, case in enumerate(of_losses())])
@pytest.mark.usefixtures("reference")
def test_losses(number: int) -> None:
    loss, *given = of_losses()[number]
    for reduction in ("mean", "sum", "none"):
        loss.reduction = reduction
        x = JaggedTensor.from_lengths(given[0].clone(), LENGTHS).requires_grad_()
        alone = given[0].clone().requires_grad_()
        found = loss(x, *(JaggedTensor.from_lengths(other, LENGTHS) for other in given[1:]))
        wanted = loss(alone, *given[1:])
        values = found.values if isinstance(found, JaggedTensor) else found
        assert isinstance(found, JaggedTensor) == (reduction == "none")
        torch.testing.assert_close(values, wanted)
        weights: Tensor | float = torch.randn(wanted.shape)
        (got,) = torch.autograd.grad((values * weights).sum(), [x.values])
        (want,) = torch.autograd.grad((wanted * weights).sum(), [alone])
        torch.testing.assert_close(got, want)


@pytest.mark.usefixtures("reference")
def test_the_divergence_of_a_batch_is_divided_by_its_rows() -> None:
    x, chances = rows(4), rows(4, seed=1).values.softmax(-1)
    found = nn.KLDivLoss(reduction="batchmean")(x, x.with_values(chances))
    torch.testing.assert_close(found, nn.KLDivLoss(reduction="sum")(x.values, chances) / 3)


@pytest.mark.usefixtures("reference")
def test_losses_of_half_precision_are_computed_in_single() -> None:
    x, y = rows(4).to(torch.bfloat16), rows(4, seed=1).to(torch.bfloat16)
    found = nn.MSELoss()(x, y)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, nn.MSELoss()(x.values.float(), y.values.float()).bfloat16())


@pytest.mark.usefixtures("reference")
def test_cosine_similarity() -> None:
    x, y = rows(4), rows(4, seed=1)
    torch.testing.assert_close(nn.CosineSimilarity(-1)(x, y).values, nn.CosineSimilarity(-1)(x.values, y.values))


def test_an_unknown_reduction_is_named() -> None:
    with pytest.raises(CallError, match="mse_loss: reduction must be 'mean', 'sum' or 'none', got 'all'"):
        nn.MSELoss(reduction="all")(rows(4), rows(4))
