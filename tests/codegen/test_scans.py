"""Scans along a short dim, next to reads that do not exist at every position of the dim around it.

In: programs whose generated loops g++ 12 vectorized with wrong masks. Out: failures against plain torch.
"""

from __future__ import annotations

import pytest
import torch

from serrate import JaggedTensor, jit


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_gradients_of_slices_of_scans_along_features(backend: str, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(9, width, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.randn(8, width, generator=generator, dtype=torch.float64)
    found = jit(lambda x: x.cummax(2).values[:, 1:], backend=backend)(JaggedTensor.from_lengths(values, [9])).values
    expected = values.cummax(1).values[1:]
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad((each * weights).sum(), values)[0] for each in (found, expected))
    torch.testing.assert_close(*gradients)
