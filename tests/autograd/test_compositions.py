"""Gradients of every operation on every composition of rows, against padded torch.

Values move into a dense tensor by plain indexing, torch differentiates the same operation there, and what flows back to the
values must be the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from serrate import JaggedTensor, jit
from tests.engine.composed import COMPOSITIONS, OPERATIONS, Dims, Padded, choices, tensor_of

SMOOTH = [name for name in OPERATIONS if name not in ("argmax", "any")]
"""Operations with gradients."""


def every() -> Iterator[Any]:
    for operation in SMOOTH:
        for composition in COMPOSITIONS:
            for dims in choices(operation, tensor_of(composition, "mixed")):
                name = f"{operation}-{composition}-{dims}"
                marks = () if zlib.crc32(name.encode()) % 100 == 0 else (pytest.mark.slow,)
                yield pytest.param(operation, composition, dims, id=name, marks=marks)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("operation", "composition", "dims"), every())
def test_gradients_are_those_of_padded_torch(operation: str, composition: str, dims: Dims) -> None:
    check(operation, composition, dims, "reference")


def check(operation: str, composition: str, dims: Dims, backend: str) -> None:
    made = OPERATIONS[operation]
    jt = tensor_of(composition, "mixed", torch.float64)
    values = jt.values.requires_grad_()
    padded = Padded.of(jt.with_values(values))
    extras = [x.requires_grad_() for x in made.extras(padded)]
    wanted = made.want(padded, dims, *extras) if made.over != "none" else made.want(padded, (), *extras)
    got = jit(made.run, backend=backend)(jt, dims, *extras)
    results, wants = (got, wanted) if isinstance(got, tuple) else ((got,), (wanted,))
    mine, theirs = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for result, want in zip(results, wants, strict=True):
        ours, exists = (Padded.of(result).x, Padded.of(result).exists) if isinstance(result, JaggedTensor) else (result, None)
        there = torch.ones_like(ours, dtype=torch.bool) if exists is None else exists
        place = tuple(slice(0, n) for n in ours.shape)
        plain = want.x[place]
        # Undefined results (the mean of nothing) have undefined gradients.
        there = there & ours.isfinite().detach() & plain.isfinite().detach()
        weights = torch.linspace(-1, 2, ours.numel(), dtype=torch.float64).view(ours.shape)
        mine = mine + (ours[there] * weights[there]).sum()
        theirs = theirs + (plain[there] * weights[there]).sum()
    torch.testing.assert_close(mine, theirs)
    wrt = [values, *extras]
    found, known = (torch.autograd.grad(total, wrt, retain_graph=True, allow_unused=True) for total in (mine, theirs))
    for one, other, x in zip(found, known, wrt, strict=True):
        a, b = (torch.zeros_like(x) if g is None else g for g in (one, other))
        # So have the variances of single elements, in torch too.
        a = a.nan_to_num() if operation.startswith("var") else a
        torch.testing.assert_close(a, b.nan_to_num(), rtol=1e-6, atol=1e-8)
