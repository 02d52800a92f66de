"""Every loss of `torch.nn.functional` on ragged tensors, and its gradients, against torch on the flat values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serrate import JaggedTensor, jit

pytestmark = [pytest.mark.usefixtures("reference"), pytest.mark.filterwarnings("ignore:reduction:UserWarning")]

LENGTHS = [3, 0, 2]
CLASSES = torch.tensor([1, 0, 2, 1, 0])
SIGNS = torch.tensor([1, -1, 1, 1, -1])
LISTED = torch.tensor([[1, 0, -1], [2, -1, 0], [0, 1, 2], [-1, 0, 1], [1, -1, -1]])
PER_CLASS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def real(*features: int, seed: int = 0) -> Tensor:
    return torch.randn(5, *features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def share(*features: int, seed: int = 0) -> Tensor:
    """Between 0 and 1."""
    return real(*features, seed=seed).sigmoid()


X, Y, Z = (real(3, seed=k) for k in range(3))
P, Q = share(3, seed=3), share(3, seed=4)

LOSSES: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "mse_loss": ([X, Y], {}),
    "l1_loss": ([X, Y], {}),
    "huber_loss": ([X, Y], {"delta": 0.7}),
    "smooth_l1_loss": ([X, Y], {"beta": 0.5}),
    "binary_cross_entropy": ([P, Q], {}),
    "binary_cross_entropy_with_logits": ([X, Q], {}),
    "kl_div": ([X, Q], {}),
    "kl_div of logarithms": ([X, Y], {"log_target": True}),
    "poisson_nll_loss": ([X, Q], {}),
    "poisson_nll_loss in full": ([P, Q * 4], {"log_input": False, "full": True}),
    "gaussian_nll_loss": ([X, Y, P], {}),
    "gaussian_nll_loss in full": ([X, Y, P], {"full": True, "eps": 0.4}),
    "gaussian_nll_loss of one variance": ([X, Y, share()], {}),
    "soft_margin_loss": ([X, Y.sign().long()], {}),
    "hinge_embedding_loss": ([real(), SIGNS], {"margin": 0.5}),
    "margin_ranking_loss": ([real(), real(seed=1), SIGNS], {"margin": 0.3}),
    "cosine_embedding_loss": ([X, Y, SIGNS], {"margin": 0.1}),
    "multi_margin_loss": ([X, CLASSES], {}),
    "multi_margin_loss of squares": ([X, CLASSES], {"p": 2, "margin": 0.5, "weight": PER_CLASS}),
    "multilabel_margin_loss": ([X, LISTED], {}),
    "multilabel_soft_margin_loss": ([X, LISTED.clamp(0, 1)], {}),
    "multilabel_soft_margin_loss with weights": ([X, LISTED.clamp(0, 1)], {"weight": PER_CLASS}),
    "triplet_margin_loss": ([X, Y, Z], {}),
    "triplet_margin_loss swapped": ([X, Y, Z], {"swap": True, "p": 3.0, "margin": 0.5}),
    "triplet_margin_with_distance_loss": ([X, Y, Z], {}),
    "nll_loss": ([X, CLASSES], {}),
    "cross_entropy": ([X, CLASSES], {"label_smoothing": 0.1}),
}


def test_no_loss_is_missing() -> None:
    known = {name for name in vars(F) if name.endswith("_loss") and not name.startswith("_")} | {
        *("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")
    }
    # `ctc_loss` has lengths of its own.
    assert known - {name.split()[0] for name in LOSSES} <= {"ctc_loss"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_are_torch_s(name: str, reduction: str) -> None:
    given, options = LOSSES[name]
    loss: Callable[..., Any] = getattr(F, name.split()[0])
    found = []
    for ragged in (True, False):
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in given]
        arguments = [JaggedTensor.from_lengths(x, LENGTHS) if ragged else x for x in leaves]
        result = loss(*arguments, reduction=reduction, **options)
        values = result.values if isinstance(result, JaggedTensor) else result
        wanted = [x for x in leaves if x.requires_grad]
        found.append((values, *torch.autograd.grad(values.sum(), wanted)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_distance_of_the_callers_own() -> None:
    def manhattan(x: Any, y: Any) -> Any:
        return (x - y).abs().sum(-1)

    rows = [JaggedTensor.from_lengths(x, LENGTHS) for x in (X, Y, Z)]
    got = jit(lambda *args: F.triplet_margin_with_distance_loss(*args, distance_function=manhattan))(*rows)
    torch.testing.assert_close(got, F.triplet_margin_with_distance_loss(X, Y, Z, distance_function=manhattan))


@pytest.mark.parametrize(
    ("backend", "strategy"), [("reference", None), ("cpp", None), ("cpp", "masked"), ("cpp", "persistent_dynamic")]
)
def test_losses_against_dense_targets(backend: str, strategy: str | None) -> None:
    """Dense targets, one for each position: positions past the end of a row do not count."""
    dense = real(4, 3, seed=5)[:3].clone().requires_grad_()
    x, flat, other = (v.clone().requires_grad_() for v in (X, X, dense.detach()))
    program = jit(F.binary_cross_entropy_with_logits, backend=backend, strategy=strategy)
    loss = program(JaggedTensor.from_lengths(x, LENGTHS), dense)
    wanted = F.binary_cross_entropy_with_logits(flat, torch.cat([row[:n] for row, n in zip(other, LENGTHS, strict=True)]))
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(x.grad, flat.grad)
    torch.testing.assert_close(dense.grad, other.grad)
