"""Offsets, lengths and starts are checked where they enter a fusion, however little of the rows a program reads."""

from __future__ import annotations

import itertools

import pytest
import torch

from serrate import ir, ops
from serrate.errors import SerrateError
from serrate.ir import TensorView

BACKENDS = ("reference", "cpp")


def _flat(x: TensorView) -> TensorView:
    return ops.sum(ops.flatten(x, x.ndim - 2, x.ndim - 1), x.ndim - 2)


def _sum(x: TensorView) -> TensorView:
    return ops.sum(x, x.ndim - 2)


def _values(x: TensorView) -> TensorView:
    return ops.relu(ops.as_flattened(x))


READERS = {"sum": _sum, "flattened": _flat, "values": _values}

WRONG_OFFSETS = ([0, 2, 900], [0, 2, 4], [0, 7, 6], [1, 3, 6], [-3, 2, 6], [0, -2, 6], [0, 2**40, 6], [-(2**62), 0, 6])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets(backend: str, reader: str) -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        f.output(READERS[reader](ops.as_nested(x, offsets)))
    program = f.compile(backend)
    program(torch.ones(6, 2), torch.tensor([0, 2, 6]))
    for wrong in WRONG_OFFSETS:
        with pytest.raises(SerrateError, match="offsets"):
            program(torch.ones(6, 2), torch.tensor(wrong))


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_that_were_right_for_values_of_another_size(backend: str) -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        f.output(_sum(ops.as_nested(x, offsets)))
    program, given = f.compile(backend), torch.tensor([0, 2, 6])
    assert program(torch.ones(6, 2), given).tolist() == [[2, 2], [4, 4]]
    for size in (5, 7):
        with pytest.raises(SerrateError, match="offsets"):
            program(torch.ones(size, 2), given)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths(backend: str, reader: str) -> None:
    with ir.Fusion() as f:
        x, lengths = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        f.output(READERS[reader](ops.as_nested(x, lengths=lengths)))
    program = f.compile(backend)
    program(torch.ones(6, 2), torch.tensor([2, 4]))
    for wrong in ([2, 900], [2, 3], [8, -2], [-2, 8], [2**62, 6], [2**63 - 1, 7]):
        with pytest.raises(SerrateError, match="offsets"):
            program(torch.ones(6, 2), torch.tensor(wrong))


@pytest.mark.parametrize("reader", ["sum", "flattened"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_starts_and_lengths(backend: str, reader: str) -> None:
    with ir.Fusion() as f:
        x, starts, lengths = f.input((None, 2), torch.float32), *(f.input((None,), torch.int64) for _ in range(2))
        f.output(READERS[reader](ops.as_nested(x, starts=starts, lengths=lengths)))
    program = f.compile(backend)
    program(torch.ones(6, 2), torch.tensor([0, 3]), torch.tensor([2, 3]))
    for first, count in (([0, 3], [3, 900]), ([-1, 3], [3, 3]), ([0, 2**40], [1, 1]), ([0, 3], [4, 3]), ([0, 3], [3, 2**63 - 1])):
        with pytest.raises(SerrateError, match=r"rows|starts|lengths"):
            program(torch.ones(6, 2), torch.tensor(first), torch.tensor(count))


@pytest.mark.parametrize("outer", WRONG_OFFSETS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_outer_offsets_under_rows_of_offsets(backend: str, outer: list[int]) -> None:
    with ir.Fusion() as f:
        x, first, second = f.input((None, 2), torch.float32), f.input((None,), torch.int64), f.input((None, 3), torch.int64)
        y = ops.as_nested(ops.as_nested(x, first), second, ragged_dim=1)
        f.output(ops.sum(y, 2))
    with pytest.raises(SerrateError, match="offsets"):
        # Each row of inner offsets ends where the outer row does, as far as there are such numbers.
        lengths = [b - a for a, b in itertools.pairwise(outer)]
        f.compile(backend)(torch.ones(6, 2), torch.tensor(outer), torch.tensor([[0, n // 2, n] for n in lengths]))


@pytest.mark.parametrize("reader", ["sum", "flattened", "outer"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_inner_rows_of_offsets(backend: str, reader: str) -> None:
    with ir.Fusion() as f:
        x, first, second = f.input((None, 2), torch.float32), f.input((None,), torch.int64), f.input((None, 3), torch.int64)
        y = ops.as_nested(ops.as_nested(x, first), second, ragged_dim=1)
        f.output(ops.sum(ops.as_flattened(y, component_dim=1, ragged_dim=2), 1) if reader == "outer" else READERS[reader](y))
    program = f.compile(backend)
    program(torch.ones(6, 2), torch.tensor([0, 2, 6]), torch.tensor([[0, 1, 2], [0, 2, 4]]))
    every = [[0, 1, 900], [0, 5, 2], [1, 1, 2], [0, -7, 2], [0, 1, 1], [0, 0, 3]]
    for wrong in [[first, [0, 2, 4]] for first in every]:
        with pytest.raises(SerrateError, match="offsets"):
            program(torch.ones(6, 2), torch.tensor([0, 2, 6]), torch.tensor(wrong))


@pytest.mark.parametrize("reader", ["sum", "flattened", "inner", "outer"])
@pytest.mark.parametrize("level", [0, 1])
def test_every_level_of_a_chain(level: int, reader: str) -> None:
    with ir.Fusion() as f:
        x, documents, sentences = f.input((None, 2), torch.float32), *(f.input((None,), torch.int64) for _ in range(2))
        y = ops.as_nested(ops.as_nested(x, sentences), documents)
        if reader == "inner":
            y = _sum(ops.as_flattened(y, component_dim=0, ragged_dim=1))
        else:
            y = _values(ops.as_flattened(y, component_dim=1, ragged_dim=2)) if reader == "outer" else READERS[reader](y)
        f.output(y)
    program = f.compile("cpp")
    right = [[0, 1, 3], [0, 2, 2, 6]]
    program(torch.ones(6, 2), *map(torch.tensor, right))
    for wrong in ([0, 1, 2], [0, 1, 900], [0, 9, 3], [1, 2, 3]) if level == 0 else ([0, 2, 2, 7], [0, 2, 1, 6], [-1, 2, 2, 6]):
        given = [*right]
        given[level] = wrong
        with pytest.raises(SerrateError, match="offsets"):
            program(torch.ones(6, 2), *map(torch.tensor, given))


@pytest.mark.parametrize("which", ["rows", "columns"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rectangles(backend: str, packed: bool, which: str) -> None:
    with ir.Fusion() as f:
        x = f.input((None,) if packed else (None, 3), torch.float32)
        rows, columns = f.input((None,), torch.int64), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_product(x, rows, columns, packed=packed), 2))
    program = f.compile(backend)
    values = torch.ones(8) if packed else torch.ones(3, 3)
    right = {"rows": [0, 2, 3], "columns": [0, 3, 5]}
    assert program(values, *map(torch.tensor, right.values())).values.tolist() == [3, 3, 2]
    wrong_rows = ([0, 2, 900], [0, 4, 3], [0, -1, 3], [1, 2, 3])
    wrong_columns = ([0, 900, 902], [0, 5, 3], [0, -3, -1], [1, 4, 6])
    for wrong in wrong_rows if which == "rows" else wrong_columns:
        given = {**right, which: wrong}
        with pytest.raises(SerrateError):
            program(values, *map(torch.tensor, given.values()))


def test_offsets_that_the_program_computes() -> None:
    with ir.Fusion() as f:
        x, lengths = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        offsets = ops.cumsum(lengths, 0)
        f.output(_flat(ops.as_nested(x, offsets)))
    program = f.compile("cpp")
    assert program(torch.ones(6, 2), torch.tensor([0, 2, 4])).tolist() == [4, 8]
    for wrong in ([0, 2, 900], [0, -900, 906], [3, 0, 3]):
        with pytest.raises(SerrateError, match="offsets"):
            program(torch.ones(6, 2), torch.tensor(wrong))


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_of_padded_rows(backend: str) -> None:
    with ir.Fusion() as f:
        x, lengths = f.input((None, None), torch.float32), f.input((None,), torch.int64)
        f.output(ops.from_padded(x, lengths=lengths))
    program = f.compile(backend)
    for wrong in ([1, 900], [-1, 2], [2**62, 2], [2**63 - 1, 1]):
        with pytest.raises(SerrateError):
            program(torch.ones(2, 3), torch.tensor(wrong))


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_of_padded_rows(backend: str) -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, None), torch.float32), f.input((None,), torch.int64)
        f.output(_flat(ops.unsqueeze(ops.from_padded(x, offsets), 2)))
    program = f.compile(backend)
    for wrong in ([0, 1, 900], [0, -1, 2], [1, 2, 3], [0, 2, 1]):
        with pytest.raises(SerrateError):
            program(torch.ones(2, 3), torch.tensor(wrong))
