"""Several index tensors in one key are paired, as in torch: values, gradients, refusals; `narrow`.

In: traced functions, and ragged index tensors. Out: differences from torch's own indexing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
from serrate import JaggedTensor
from serrate.errors import IndexOutOfRange, ShapeError

X = JaggedTensor.from_lengths(torch.ones(3), [2, 1])
A, B = torch.tensor([0, -1, 1]), torch.tensor([3, 1, -4])
KEYS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "first dims": lambda z, a, b: z[a, b],
    "later dims": lambda z, a, b: z[:, :, a, b],
    "after an ellipsis": lambda z, a, b: z[..., a, b],
    "after an integer": lambda z, a, b: z[1, :, a, b],
    "three": lambda z, a, b: z[a, b, a],
    "broadcast": lambda z, a, b: z[a[:, None], b[None]],
    "one of one element": lambda z, a, b: z[a, b[:1]],
    "with None": lambda z, a, b: z[None, a, b],
    "computed": lambda z, a, b: z[a * 0 + 1, b.abs() % 3],
}


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("name", KEYS)
def test_pairs_of_indices(name: str, backend: str) -> None:
    key = KEYS[name]
    z = torch.randn(4, 4, 4, 5)
    found = serrate.jit(lambda x, z, a, b: key(z, a, b) + 0 * x.sum(), backend=backend)(X, z, A, B)
    torch.testing.assert_close(found, key(z, A, B))


def test_gradients_of_pairs() -> None:
    """An element that is read twice gets both gradients."""
    a, b = torch.tensor([0, 2, 0]), torch.tensor([3, 1, 3])
    found, wanted = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    weights = torch.tensor([1.0, 2.0, 3.0])
    serrate.jit(lambda x, t, a, b, w: (t[a, b] * w).sum() + 0 * x.sum())(X, found, a, b, weights).backward()
    (wanted[a, b] * weights).sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad)


def test_ragged_indices() -> None:
    w = torch.randn(3, 4)
    a, b = torch.tensor([0, 1, 2]), torch.tensor([3, 0, 1])
    found = w[JaggedTensor.from_lengths(a, [2, 1]), JaggedTensor.from_lengths(b, [2, 1])]
    assert found.lengths.tolist() == [2, 1]
    torch.testing.assert_close(found.values, w[a, b])


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (lambda z, a, b: z[a, :, b], ShapeError, "must be next to each other"),
        (lambda z, a, b: z[[0, 1]], ShapeError, "got .0, 1."),
        (lambda z, a, b: z[a, b + 2], IndexOutOfRange, "out of range"),
        (lambda z, a, b: z[a, b[:2]], ShapeError, r"index by tensors of \(3,\) and \(2,\), dim 0: the sizes differ"),
    ],
)
def test_refusals(key: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        serrate.jit(lambda x, z, a, b: key(z, a, b) + 0 * x.sum())(X, torch.randn(4, 4, 5), A, B)


@pytest.mark.parametrize(("start", "length"), [(0, 2), (1, 1), (-1, 1), (-2, 2), (-3, 2), (0, 0)])
def test_narrow(start: int, length: int) -> None:
    x, w = JaggedTensor.from_lengths(torch.randn(5, 3), [2, 3]), torch.randn(2, 3)
    wanted = x.values.narrow(1, start, length)
    torch.testing.assert_close(x.narrow(2, start, length).values, wanted)
    torch.testing.assert_close(serrate.jit(lambda x: x.narrow(2, start, length) * 1)(x).values, wanted)
    torch.testing.assert_close(
        serrate.jit(lambda x, w: w.narrow(1, start, length) + 0 * x.sum())(x, w), w.narrow(1, start, length)
    )


def test_narrow_along_rows() -> None:
    x = JaggedTensor.from_lengths(torch.arange(5.0), [4, 1])
    assert [row.tolist() for row in x.narrow(1, -2, 1).unbind()] == [[2.0], [4.0]]
    assert [row.tolist() for row in x.narrow(1, 1, 2).unbind()] == [[1.0, 2.0], []]


@pytest.mark.parametrize(("start", "length"), [(0, 4), (-1, 2), (2, 2), (-4, 1), (1, -1)])
def test_narrow_has_all_positions(start: int, length: int) -> None:
    x = JaggedTensor.from_lengths(torch.randn(5, 3), [2, 3])
    for f in (lambda x: x.narrow(2, start, length), serrate.jit(lambda x: x.narrow(2, start, length) * 1)):
        with pytest.raises(ShapeError, match=r"narrow: start .* is out of range for dim 2 of"):
            f(x)
