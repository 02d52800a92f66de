"""Fusions whose arguments are JaggedTensors, declared by a structure or spelled by offsets, against plain torch row by row."""

from __future__ import annotations

import pickle

import pytest
import torch

from serrate import JaggedTensor, ir, ops
from serrate.errors import CallError, StructureMismatch
from serrate.tensor import Structure

T = torch.tensor
ROWS = JaggedTensor.from_lengths(torch.randn(6, 4), [3, 0, 2, 1])
SHAPES = {
    "one level": ROWS,
    "transposed": JaggedTensor.from_lengths(torch.randn(6, 4, 2), [3, 0, 2, 1]).transpose(1, 2),
    "nested": JaggedTensor.from_lengths(torch.randn(6, 4), [T([2, 1, 1]), T([3, 0, 2, 1])]),
    "gaps": JaggedTensor.from_starts(torch.randn(9, 4), [0, 4, 6], [3, 1, 2]),
    "columns": JaggedTensor(torch.randn(11, 4), Structure.from_lengths(T([3, 1, 2])).with_columns(T([1, 4, 2]))),
    "rows of dim 1": JaggedTensor.from_lengths(torch.randn(4, 6), [3, 0, 2, 1], dim=1),
}


def shape_of(jt: JaggedTensor) -> list[int | None]:
    return [None if dim in jt.structure.dims else size for dim, size in enumerate(jt.values.shape)]


@pytest.mark.parametrize("name", SHAPES)
def test_a_ragged_input_by_structure(name: str) -> None:
    jt = SHAPES[name]
    with ir.Fusion() as f:
        x = f.input(shape_of(jt), torch.float32, structure=jt.structure)
        f.output(ops.exp(x))
    want = [row.exp().tolist() if isinstance(row, torch.Tensor) else row.with_values(row.values.exp()).tolist() for row in jt]
    for found in (f.evaluate(jt), f.compile("cpp")(jt), f.clone().evaluate(jt), pickle.loads(pickle.dumps(f)).evaluate(jt)):
        assert str(found.shape) == str(jt.shape)
        torch.testing.assert_close(T(flat(found.tolist())), T(flat(want)))


def flat(lists: object) -> list[float]:
    return [number for each in lists for number in flat(each)] if isinstance(lists, list) else [lists]  # type: ignore[list-item]


def test_two_inputs_of_the_same_rows() -> None:
    other = ROWS.with_values(torch.randn(6, 4))
    with ir.Fusion() as f:
        x = f.input((None, 4), torch.float32, structure=ROWS.structure)
        y = f.input((None, 4), torch.float32, structure=x)
        bias = f.input((4,), torch.float32)
        f.output(ops.softmax(x * y + bias, 1))
    bias_given, compiled = torch.randn(4), f.compile("cpp")
    found = compiled(ROWS, other, bias_given)
    for got, a, b in zip(found, ROWS, other, strict=True):
        torch.testing.assert_close(got, torch.softmax(a * b + bias_given, 0))
    assert found.structure is ROWS.structure
    # Rows of equal lengths are the same rows.
    again = JaggedTensor.from_lengths(other.values, [3, 0, 2, 1])
    torch.testing.assert_close(compiled(ROWS, again, bias_given).values, found.values)
    assert "grid" in str(compiled.plan(ROWS, other, bias_given))  # type: ignore[attr-defined]
    with pytest.raises(StructureMismatch, match="argument 1 of fusion must have the rows of another"):
        compiled(ROWS, JaggedTensor.from_lengths(other.values, [1, 2, 0, 3]), bias_given)


def test_a_jagged_tensor_stands_for_values_and_offsets() -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    compiled = f.compile("cpp")
    torch.testing.assert_close(compiled(ROWS), torch.stack([row.sum(0) for row in ROWS]))
    torch.testing.assert_close(compiled(ROWS), compiled(ROWS.values, ROWS.offsets))


def test_other_rows_than_declared() -> None:
    with ir.Fusion("total") as f:
        x = f.input((None, 4), torch.float32, structure=ROWS.structure)
        f.output(ops.sum(x, 1))
    with pytest.raises(StructureMismatch, match=r"argument 0 of total was declared with rows like .*jt\.contiguous\(\)"):
        f.evaluate(SHAPES["gaps"])
    with ir.Fusion() as f, pytest.raises(CallError, match="structure= takes a Structure, or another ragged input, got list"):
        f.input((None, 4), torch.float32, structure=[0, 3, 5])
