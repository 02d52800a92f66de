"""Tensors with regular dims between the dim that counts rows and the ragged one, `[B, H, r, D]`: every operation against plain
torch, row by row; nothing is copied to transpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.errors import ShapeError

torch.manual_seed(0)
LENGTHS = [3, 0, 5, 1]
HEADS, FEATURES = 4, 6
PACKED = JaggedTensor.from_lengths(torch.randn(9, HEADS, FEATURES), LENGTHS)
X = PACKED.transpose(1, 2)
ROWS = [row.transpose(0, 1) for row in PACKED.values.split(LENGTHS)]
Y = JaggedTensor.from_lengths(torch.randn(9, HEADS, FEATURES), LENGTHS).transpose(1, 2)
OTHERS = [row.transpose(0, 1) for row in Y.values.split(LENGTHS)]


def check(found: Any, wanted: Sequence[Tensor]) -> None:
    rows = list(found.unbind())
    assert [tuple(row.shape) for row in rows] == [tuple(row.shape) for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        torch.testing.assert_close(row, other)


def test_transposing_is_a_view_and_goes_back_to_the_same_tensor() -> None:
    assert str(X.shape) == "(4, 4, r0, 6)" and X.values is PACKED.values
    back = X.transpose(1, 2)
    assert back.values is PACKED.values and back.structure is PACKED.structure
    assert PACKED.transpose(1, 2).structure is X.structure
    assert X.size(2) == PACKED.size(1)
    check(X, ROWS)


BODIES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "elementwise": (lambda x: torch.relu(x * 2 + 1), lambda r: torch.relu(r * 2 + 1)),
    "dense operand": (lambda x: x - torch.arange(4.0).view(4, 1, 1), lambda r: r - torch.arange(4.0).view(4, 1, 1)),
    "sum of heads": (lambda x: x.sum(1), lambda r: r.sum(0)),
    "sum of rows": (lambda x: x.sum(2), lambda r: r.sum(1)),
    "sum of features": (lambda x: x.sum(-1), lambda r: r.sum(-1)),
    "kept dim": (lambda x: x - x.mean(2, keepdim=True), lambda r: r - r.mean(1, keepdim=True)),
    "softmax of rows": (lambda x: torch.softmax(x, 2), lambda r: torch.softmax(r, 1)),
    "softmax of heads": (lambda x: torch.softmax(x, 1), lambda r: torch.softmax(r, 0)),
    "layer norm": (lambda x: functional.layer_norm(x, (6,)), lambda r: functional.layer_norm(r, (6,))),
    "running sum": (lambda x: torch.cumsum(x, 2), lambda r: torch.cumsum(r, 1)),
    "transposed back": (lambda x: (x * 2).transpose(1, 2), lambda r: (r * 2).transpose(0, 1)),
    "features first": (lambda x: x.transpose(2, 3) + 1, lambda r: r.transpose(1, 2) + 1),
    "matmul": (lambda x: x @ torch.ones(6, 3), lambda r: r @ torch.ones(6, 3)),
    "select a head": (lambda x: x[:, 1], lambda r: r[1]),
    "slice of heads": (lambda x: x[:, 1:3], lambda r: r[1:3]),
}


@pytest.mark.parametrize("name", BODIES)
def test_eager_operations(name: str) -> None:
    body, plain = BODIES[name]
    check(body(X), [plain(row) for row in ROWS])


@pytest.mark.parametrize("given", [X, PACKED], ids=["transposed before", "transposed in the function"])
def test_operations_in_jit(given: JaggedTensor) -> None:
    @serrate.jit
    def every(x: Any) -> Any:
        x = x if given is X else x.transpose(1, 2)
        return [body(x) for body, _ in BODIES.values()]

    for found, (_, plain) in zip(every(given), BODIES.values(), strict=True):
        check(found, [plain(row) for row in ROWS])


def test_sum_over_rows_pads_nothing_but_the_result() -> None:
    wanted = torch.zeros(HEADS, max(LENGTHS), FEATURES)
    for row in ROWS:
        wanted[:, : row.shape[1]] += row
    torch.testing.assert_close(X.sum(0), wanted)


def test_products_of_rows_with_rows() -> None:
    scores = X @ Y.transpose(2, 3)
    assert str(scores.shape) == "(4, 4, r0, r1)"
    check(scores, [a @ b.transpose(1, 2) for a, b in zip(ROWS, OTHERS, strict=True)])
    check(torch.softmax(scores, -1) @ Y, [torch.softmax(a @ b.mT, -1) @ b for a, b in zip(ROWS, OTHERS, strict=True)])


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    found = functional.scaled_dot_product_attention(X, Y, Y, is_causal=causal)
    assert str(found.shape) == "(4, 4, r0, 6)" and found.structure is X.structure
    wanted = [functional.scaled_dot_product_attention(a, b, b, is_causal=causal) for a, b in zip(ROWS, OTHERS, strict=True)]
    check(found, wanted)
    check(found.transpose(1, 2).flatten(2), [row.transpose(0, 1).flatten(1) for row in wanted])


def test_both_orders_are_not_mixed_silently() -> None:
    square = JaggedTensor.from_lengths(torch.randn(9, 4, 4), LENGTHS)
    with pytest.raises(ShapeError):
        square + square.transpose(1, 2)
    assert not torch.equal(square, square.transpose(1, 2))
    with pytest.raises(serrate.errors.StructureMismatch, match="copy_"):
        square.clone().copy_(square.transpose(1, 2))


def test_writing_in_place_and_into_results() -> None:
    x = JaggedTensor.from_lengths(PACKED.values.clone(), LENGTHS)
    heads = x.transpose(1, 2)
    heads += 1
    check(x, [row.transpose(0, 1) + 1 for row in ROWS])
    heads[:, 2] = 0
    heads[2, 0, 1:3] = 7
    wanted = [row + 1 for row in ROWS]
    for row in wanted:
        row[2] = 0
    wanted[2][0, 1:3] = 7
    check(heads, wanted)
    out = torch.empty_like(heads)
    check(torch.exp(heads, out=out), [row.exp() for row in wanted])
    packed = torch.empty_like(x)
    with pytest.raises(serrate.errors.StructureMismatch):
        torch.exp(heads, out=packed)


def test_conversions_keep_the_order_of_dims() -> None:
    assert X.to(torch.float64).values.dtype is torch.float64
    check(X.to(torch.float64), [row.double() for row in ROWS])
    check(X.clone(), ROWS)
    assert X.contiguous() is X
    padded = X.to_padded(fill=-1)
    assert padded.shape == (4, HEADS, 5, FEATURES)
    for k, row in enumerate(ROWS):
        torch.testing.assert_close(padded[k, :, : LENGTHS[k]], row)
        assert (padded[k, :, LENGTHS[k] :] == -1).all()
    assert torch.equal(X.mask(), (padded != -1).any(-1))
    again = JaggedTensor.from_padded(padded, structure=X.structure)
    assert torch.equal(again, X)
    torch.testing.assert_close(X.to_format("padded").to_padded(), X.to_padded())


@serrate.kernel
def scaled(jt: JaggedTensor, out: Tensor) -> Tensor:
    for tile_b, tile_h in hl.tile([jt.num_rows, 4]):
        total = hl.zeros([tile_b, tile_h])
        for tile_k in hl.tile(jt.max_length):
            total = total + jt[tile_b, tile_h, tile_k].sum(2)
        out[tile_b, tile_h] = total
    return out


@pytest.mark.parametrize("interpreted", [False, True])
def test_kernels_index_the_dims_in_their_order(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreted:
        monkeypatch.setenv("SERRATE_CHECK", "1")
    found = scaled(X[..., 0], torch.zeros(4, HEADS))
    torch.testing.assert_close(found, torch.stack([row[..., 0].sum(1) for row in ROWS]))


def test_a_fusion_returns_regular_dims_before_ragged_ones() -> None:
    with serrate.ir.Fusion() as f:
        x, offsets = f.input((None, 4, 6), torch.float32), f.input((None,), torch.int64)
        f.output(serrate.ops.exp(serrate.ops.transpose(serrate.ops.as_nested(x, offsets), 1, 2)))
    for found in (f.evaluate(PACKED.values, PACKED.offsets), f.compile("cpp")(PACKED.values, PACKED.offsets)):
        assert str(found.shape) == "(4, 4, r0, 6)"
        check(found, [row.exp() for row in ROWS])
