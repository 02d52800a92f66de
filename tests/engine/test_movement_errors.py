"""What movement, routing, scans and views refuse, and that they refuse it: nothing is dropped, repeated or read out of bounds.

In: fusions that cannot be meant, or calls whose sizes do not fit. Out: the error and a piece of its message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from serrate import ir
from serrate.errors import DtypeError, SerrateError, ShapeError
from serrate.frontend import ops
from serrate.ir.view import TensorView

FLOAT, LONG = torch.float32, torch.int64
OFFSETS = torch.tensor([0, 3, 3, 5])
FLAT, WIDE, MATRIX = torch.arange(1.0, 6.0), torch.ones(5, 2), torch.arange(6.0).reshape(2, 3)


def rows(f: ir.Fusion, *features: int) -> TensorView:
    return ops.as_nested(f.input((None, *features), FLOAT), f.input((None,), LONG))


def groups(f: ir.Fusion) -> TensorView:
    return ops.as_nested(rows(f), f.input((None,), LONG))


def parts(f: ir.Fusion) -> TensorView:
    return ops.as_nested(f.input((2, None), FLOAT), f.input((2, 4), LONG), ragged_dim=1)


def dense(f: ir.Fusion, *sizes: int | None) -> TensorView:
    return f.input(sizes, FLOAT)


def indices(f: ir.Fusion, *sizes: int | None) -> TensorView:
    return f.input(sizes, LONG)


Make = Callable[[ir.Fusion], Any]

RECORDED: dict[str, tuple[Make, type[Exception], str]] = {
    "index by floats": (lambda f: ops.index(rows(f), dense(f, 2)), DtypeError, "indices must be integers"),
    "index by bools": (lambda f: ops.index(dense(f, 2), f.input((2,), torch.bool)), DtypeError, "indices must be integers"),
    "rows by a matrix": (lambda f: ops.index(rows(f), indices(f, 2, 2)), ShapeError, "selected by a 1-D tensor"),
    "parts by a matrix": (lambda f: ops.index(parts(f), indices(f, 2, 2), 1), ShapeError, "selected by a 1-D tensor"),
    "cat of parts of other numbers": (
        lambda f: ops.cat([parts(f), ops.slice(parts(f), 1, 1)]),
        ShapeError,
        "dim 1, which is not joined: the sizes differ: 3 and 2",
    ),
    "table of one dim": (lambda f: ops.embedding(indices(f, 2), dense(f, 4)), ShapeError, "[entries, features]"),
    "gather of other rank": (lambda f: ops.gather(rows(f), 1, indices(f, 4)), ShapeError, "the same number of dims"),
    "gather of features by dense indices": (
        lambda f: ops.gather(rows(f, 2), 2, indices(f, None, 5, 1)),
        ShapeError,
        "dim 1 is ragged in the first and dense in the second: use JaggedTensor.from_padded",
    ),
    "dense classes of ragged logits": (
        lambda f: ops.cross_entropy(rows(f, 2), indices(f, None, 5)),
        ShapeError,
        "cross_entropy of (B, r0, 2) and (?, 5, 1): dim 1 is ragged in the first",
    ),
    "select far away": (lambda f: ops.select(dense(f, 2, 3), 0, 5), ShapeError, "no position 5 in dim 0"),
    "select before the start": (lambda f: ops.select(dense(f, 2, 3), 1, -4), ShapeError, "no position -4 in dim 1"),
    "pad by less": (lambda f: ops.pad(rows(f), 1, -1, 0), ShapeError, "use slice"),
    "scan of rows": (lambda f: ops.cumsum(rows(f), 0), ShapeError, "counts rows"),
    "scan of rows in groups": (lambda f: ops.cumprod(groups(f), 1), ShapeError, "rows"),
    "scan of groups": (lambda f: ops.cumsum(groups(f), 0), ShapeError, "rows"),
    "argmax of rows in groups": (
        lambda f: ops.argmax(groups(f), 1),
        ShapeError,
        "reduce dim 2 as well, or dims (0, 1)",
    ),
    "sum of groups alone": (
        lambda f: ops.sum(groups(f), 0),
        ShapeError,
        "reduce dim 2 as well, or dims (0, 1)",
    ),
    "argmax of two dims": (lambda f: ops.argmax(rows(f, 2), (1, 2)), ShapeError, "expected one dim"),
    "cat of nothing": (lambda f: ops.cat([]), ShapeError, "at least one"),
    "cat of other sizes": (lambda f: ops.cat([dense(f, 2, 3), dense(f, 2, 4)]), ShapeError, "3 and 4"),
    "cat with a size of one": (lambda f: ops.cat([dense(f, 2, 3), dense(f, 2, 1)]), ShapeError, "3 and 1"),
    "cat of one with more": (lambda f: ops.cat([dense(f, 2, 1), dense(f, 2, 3)]), ShapeError, "1 and 3"),
    "cat of narrow rows": (lambda f: ops.cat([rows(f, 2), rows(f, 1)], 1), ShapeError, "2 and 1"),
    "cat of narrow features": (lambda f: ops.cat([rows(f, 2, 3), rows(f, 2, 1)], 2), ShapeError, "3 and 1"),
    "stack of other sizes": (lambda f: ops.stack([dense(f, 2, 3), dense(f, 2, 1)]), ShapeError, "3 and 1"),
    "cat of rows with dense": (
        lambda f: ops.cat([rows(f, 2), dense(f, None, None, 3)], 2),
        ShapeError,
        "the same dims must be ragged",
    ),
    "rows before components": (lambda f: ops.permute(rows(f, 2), 1, 0, 2), ShapeError, "must stay after"),
    "permute with a dim twice": (lambda f: ops.permute(dense(f, 2, 3), 0, 0), ShapeError, "every dim"),
    "flatten of rows": (lambda f: ops.flatten(rows(f)), ShapeError, "use as_flattened"),
    "flatten backwards": (lambda f: ops.flatten(dense(f, 2, 3), 1, 0), ShapeError, "flatten"),
    "unflatten of rows": (lambda f: ops.unflatten(rows(f), 1, (1, -1)), ShapeError, "no common length"),
    "unflatten of what is left": (lambda f: ops.unflatten(dense(f, 6), 0, (4, -1)), ShapeError, "does not divide"),
    "unflatten of two unknowns": (lambda f: ops.unflatten(dense(f, 6), 0, (-1, -1)), ShapeError, "at most one"),
    "reshape to other numbers": (lambda f: ops.reshape(dense(f, 2, 3), (5,)), ShapeError, "6 and 5"),
    "reshape of rows": (lambda f: ops.reshape(rows(f), (-1,)), ShapeError, "ragged"),
    "broadcast to less": (lambda f: ops.broadcast_to(dense(f, 3), dense(f, 2, 1)), ShapeError, "1 and 3"),
    "broadcast of more dims": (lambda f: ops.broadcast_to(dense(f, 2, 3), dense(f, 3)), ShapeError, "more dims"),
    "topk of the number of rows": (lambda f: ops.topk(rows(f), 2, 0), ShapeError, "counts rows of different lengths"),
    "topk of none": (lambda f: ops.topk(dense(f, 2, 3), 0), ShapeError, "between 1 and 3"),
    "topk of too many": (lambda f: ops.topk(dense(f, 2, 3), 4), ShapeError, "between 1 and 3"),
    "groups below zero": (lambda f: ops.group_by(indices(f, 3), -1), ShapeError, "non-negative"),
    "keys of floats": (lambda f: ops.group_by(dense(f, 3), 2), DtypeError, "1-D integers"),
    "a short permutation": (lambda f: ops.invert(f.input((3,), torch.int32)), DtypeError, "1-D int64"),
}


@pytest.mark.parametrize("name", list(RECORDED))
def test_refused_when_recorded(name: str) -> None:
    make, kind, message = RECORDED[name]
    with ir.Fusion(), pytest.raises(kind, match=re.escape(message)):
        make(_current())


def _current() -> ir.Fusion:
    from serrate.ir.fusion import current_fusion

    return current_fusion()


CALLED: dict[str, tuple[Make, tuple[torch.Tensor, ...]]] = {
    "cat of other numbers of rows": (lambda f: ops.cat([rows(f), rows(f)], 1), (FLAT, OFFSETS, FLAT, torch.tensor([0, 5]))),
    "cat of more rows": (lambda f: ops.cat([rows(f), rows(f)], 1), (FLAT, torch.tensor([0, 5]), FLAT, OFFSETS)),
    "cat of other sizes": (lambda f: ops.cat([dense(f, 2, None), dense(f, 2, None)]), (MATRIX, torch.ones(2, 4))),
    "cat of other structures": (
        lambda f: ops.cat([rows(f, 2), rows(f, 2)], 2),
        (WIDE, OFFSETS, WIDE, torch.tensor([0, 1, 1, 5])),
    ),
    "stack of other structures": (lambda f: ops.stack([rows(f), rows(f)], 2), (FLAT, OFFSETS, FLAT, torch.tensor([0, 1, 1, 5]))),
    "fewer indices than rows": (
        lambda f: ops.index_add(dense(f, None, 2), indices(f, None), 3),
        (WIDE, torch.tensor([0, 1, 2, 0])),
    ),
    "more indices than rows": (
        lambda f: ops.index_add(dense(f, None, 2), indices(f, None), 3),
        (WIDE, torch.tensor([0, 1, 2, 0, 1, 1])),
    ),
    "reshape of what is left": (lambda f: ops.set(ops.reshape(dense(f, None, 3), (4, -1))), (MATRIX,)),
    "topk of too many": (lambda f: ops.topk(dense(f, 2, None), 4), (MATRIX,)),
    "a row behind the last": (lambda f: ops.select(rows(f), 0, 3), (FLAT, OFFSETS)),
    "a row before the first": (lambda f: ops.select(rows(f), 0, -4), (FLAT, OFFSETS)),
    "a row before the only one": (lambda f: ops.select(rows(f), 0, -3), (FLAT, torch.tensor([0, 5]))),
}


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", list(CALLED))
def test_refused_when_called(name: str, backend: str) -> None:
    make, args = CALLED[name]
    with ir.Fusion() as fusion:
        made = make(fusion)
        fusion.output(*(made if isinstance(made, tuple) else (made,)))
    with pytest.raises(SerrateError):
        fusion.compile(backend)(*args)
