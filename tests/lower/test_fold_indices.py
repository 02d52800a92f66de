"""Index arithmetic: folded into the indices that it computes, without changing what is read.

In: random integers, and arithmetic on them that is used as an index. Out: failures against plain torch, or a stage too many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import serrate
from serrate import JaggedTensor, ir, ops

Arithmetic = Callable[[Any, Any], Any]
FOLDED: dict[str, Arithmetic] = {
    "half": lambda i, j: i // 2,
    "third, shifted": lambda i, j: (i + 4) // 3 - 2,
    "scaled": lambda i, j: 3 * i - 5,
    "two tensors": lambda i, j: i + 2 * j - 1,
    "twice": lambda i, j: i - i // 2,
    "of a sum": lambda i, j: (i - j) // 4,
}
OTHER: dict[str, Arithmetic] = {
    "remainder": lambda i, j: i % 3,
    "product": lambda i, j: i * j,
    "backwards": lambda i, j: i // -2,
    "clamped": lambda i, j: i.clamp(0, 3),
}
BACKENDS = ["reference", "cpp", pytest.param("triton", marks=pytest.mark.triton)]


def read_at(arithmetic: Arithmetic) -> ir.Fusion:
    """A table read at computed indices; past its ends it is 0."""
    with ir.Fusion("read_at") as f:
        table, i, j = f.input((None, 3), torch.float32), f.input((None,), torch.int64), f.input((None,), torch.int64)
        f.output(ops.index(table, arithmetic(i, j)))
    return f


def expected(table: Tensor, at: Tensor) -> Tensor:
    return torch.stack([table[k] if 0 <= k < len(table) else torch.zeros(3) for k in at.tolist()])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*FOLDED, *OTHER])
@hypothesis.given(given=st.lists(st.tuples(st.integers(-9, 20), st.integers(-9, 20)), min_size=1, max_size=40))
@hypothesis.settings(max_examples=5)
def test_rows_at_computed_indices(backend: str, name: str, given: list[tuple[int, int]]) -> None:
    arithmetic = (FOLDED | OTHER)[name]
    i, j = torch.tensor(given).T.contiguous()
    table = torch.randn(7, 3)
    found = read_at(arithmetic).compile(backend)(table, i, j)
    torch.testing.assert_close(found, expected(table, arithmetic(i, j)))


@pytest.mark.parametrize("name", FOLDED)
def test_one_stage(name: str) -> None:
    assert len(read_at(FOLDED[name]).compile("cpp").stages) == 1


@pytest.mark.parametrize("name", OTHER)
def test_other_arithmetic_is_stored_first(name: str) -> None:
    assert len(read_at(OTHER[name]).compile("cpp").stages) == 2


def test_an_index_that_is_also_a_result() -> None:
    with ir.Fusion() as f:
        table, i = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        half = ops.floor_divide(i, 2)
        f.output(ops.index(table, half), half)
    given, data = torch.tensor([5, 0, -1, 9]), torch.randn(4, 3)
    rows, at = f.compile("cpp")(data, given)
    assert at.tolist() == [2, 0, -1, 4]
    torch.testing.assert_close(rows, expected(data, at))


def test_tokens_in_rows() -> None:
    @serrate.jit
    def looked_up(tokens: Any, table: Tensor) -> Any:
        return torch.nn.functional.embedding(tokens // 2 + 1, table).sum(1)

    tokens, table = JaggedTensor.from_lengths(torch.tensor([3, 0, 11, 4, 4]), [2, 0, 3]), torch.randn(7, 5)
    wanted = torch.stack([table[row // 2 + 1].sum(0) for row in tokens.unbind()])
    torch.testing.assert_close(looked_up(tokens, table), wanted)
    with pytest.raises(serrate.errors.IndexOutOfRange, match="index"):
        looked_up(JaggedTensor.from_list([torch.tensor([12])]), table)


def test_gradients_of_what_is_read() -> None:
    @serrate.jit
    def halves(table: Tensor, i: Tensor) -> Tensor:
        return ops.index(table, i // 2)

    table, i, gradient = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 7, 2, 6]), torch.randn(5, 3)
    halves(table, i).backward(gradient)
    wanted = torch.zeros(4, 3).index_add_(0, i // 2, gradient)
    torch.testing.assert_close(table.grad, wanted)


def test_arithmetic_that_doubles_at_every_step_is_stored() -> None:
    with ir.Fusion() as f:
        table, given = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        at = given
        for _ in range(12):
            at = at - at // 2
        f.output(ops.index(table, at))
    program = f.compile("cpp")
    at = torch.tensor([0, -1, 9, 40_000, 12])
    data = torch.randn(12, 3)
    found = program(data, at)
    for _ in range(12):
        at = at - at // 2
    torch.testing.assert_close(found, expected(data, at))
    assert len(program.stages) == 2
