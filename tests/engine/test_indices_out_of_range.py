"""torch's indexing operators raise for an index that is not there, as torch does; serrate's own read 0.

In: indices, one of them outside. Out: failures that name the operator and the backend. The position in the message is that of
the first index outside, in the order of dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import serrate
from serrate import JaggedTensor, Structure, ir, jit, ops
from serrate.errors import IndexOutOfRange
from serrate.runtime import indices
from tests.engine.oracle import BACKENDS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

T, J = torch.tensor, JaggedTensor.from_lengths
LENGTHS = [2, 0, 3]
TABLE = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
ROWS = J(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)), LENGTHS)

Function = Callable[[Tensor | JaggedTensor, JaggedTensor], Any]
OPERATORS: dict[str, tuple[Function, Tensor | JaggedTensor, list[int], int, str]] = {
    # What is called, what is indexed, indices that are inside, how many positions there are at [2][1], what the message says.
    "embedding": (lambda x, k: F.embedding(k, x), TABLE, [1, 0, 9, 3, 3], 10, "there are 10 positions"),
    "embedding with padding": (lambda x, k: F.embedding(k, x, padding_idx=0), TABLE, [1, 0, 9, 3, 3], 10, "10 positions"),
    "gather of positions": (
        lambda x, k: torch.gather(x.sum(2), 1, k),
        ROWS,
        [1, 0, 2, 2, 0],
        3,
        "the row is not that long",
    ),
    "gather of features": (
        lambda x, k: torch.gather(x, 2, k.unsqueeze(-1)).sum(-1),
        ROWS,
        [1, 0, 3, 2, 0],
        4,
        "there are 4 positions",
    ),
    "gather of rows": (lambda x, k: torch.gather(x.sum(2), 0, k), ROWS, [0, 2, 0, 2, 2], 3, "there are 3 positions"),
    "cross_entropy": (F.cross_entropy, ROWS, [1, 0, 3, 2, -100], 4, "there are 4 positions"),
    "computed indices": (lambda x, k: F.embedding((k + 1) - 1, x), TABLE, [1, 0, 9, 3, 3], 10, "there are 10 positions"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_torch_operators_raise_with_the_position(name: str, backend: str) -> None:
    function, x, inside, count, message = OPERATORS[name]
    run = jit(function, backend=backend)
    run(x, J(T(inside), LENGTHS))
    for wrong in (count, -1, count + (1 << 40), -(1 << 62)) if backend == "cpp" else (count, -1):
        numbers = [*inside[:3], wrong, inside[4]]
        for _ in range(2):  # the call that compiles, and one that is prepared
            with pytest.raises(IndexError, match=rf"index\[2\]\[1\](\[0\])? = {wrong} is out of range: .*{message}"):
                run(x, J(T(numbers), LENGTHS))
        run(x, J(T(inside), LENGTHS))


def test_eager_operators_raise() -> None:
    for wrong in (10, -1):
        with pytest.raises(IndexOutOfRange, match=rf"embedding: index\[0\]\[1\] = {wrong} "):
            F.embedding(J(T([1, wrong, 2, 3, 4]), LENGTHS), TABLE)
    with pytest.raises(IndexOutOfRange, match=r"gather: index\[0\]\[0\] = 2 "):
        torch.gather(ROWS.sum(2), 1, J(T([2, 0, 2, 1, 0]), LENGTHS))
    out = J(torch.zeros(5), LENGTHS)
    with pytest.raises(IndexOutOfRange, match="gather"):
        torch.gather(ROWS.sum(2), 1, J(T([2, 0, 2, 1, 0]), LENGTHS), out=out)
    for wrong in (4, -5):
        with pytest.raises(IndexError):
            ROWS.index_select(2, T([0, wrong]))
        with pytest.raises(IndexError):
            torch.index_select(ROWS, 0, T([0, wrong]))


def test_narrow_dtypes() -> None:
    for dtype in (torch.int32, torch.int16, torch.uint8):
        torch.testing.assert_close(F.embedding(J(T([1, 9, 2], dtype=dtype), [2, 1]), TABLE).values, TABLE[[1, 9, 2]])
        with pytest.raises(IndexOutOfRange, match=r"index\[1\]\[0\] = 10 "):
            F.embedding(J(T([1, 9, 10], dtype=dtype), [2, 1]), TABLE)


def test_targets_that_are_ignored_are_not_indices() -> None:
    for ignored in (-100, -1, 7):
        target = T([1, ignored, 0, 3, ignored])
        got = F.cross_entropy(ROWS, J(target, LENGTHS), ignore_index=ignored)
        torch.testing.assert_close(got, F.cross_entropy(ROWS.values, target, ignore_index=ignored))
    with pytest.raises(IndexOutOfRange, match=r"cross_entropy: target: index\[0\]\[1\] = -100 "):
        F.cross_entropy(ROWS, J(T([1, -100, 0, 3, 1]), LENGTHS), ignore_index=-1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_indexing_by_a_tensor_counts_from_the_end(backend: str) -> None:
    """As torch's `x[indices]` does, in traced functions; rows too."""
    table = jit(lambda x, k: x[k], backend=backend)
    numbers = T([1, -1, 9, -10, 0])
    torch.testing.assert_close(table(TABLE, J(numbers, LENGTHS)).values, TABLE[numbers])
    for wrong in (10, -11):
        with pytest.raises(IndexOutOfRange, match=rf"index\[0\]\[1\] = {wrong} "):
            table(TABLE, J(T([1, wrong, 9, 3, 0]), LENGTHS))
    rows = jit(lambda x, k: x[k], backend=backend)
    want = [ROWS[k].tolist() for k in (2, 2, 0, 1)]
    assert [r.tolist() for r in rows(ROWS, T([-1, 2, 0, -2])).unbind()] == want
    with pytest.raises(IndexOutOfRange, match=r"index\[3\] = -4 "):
        rows(ROWS, T([-1, 2, 0, -4]))


def test_what_is_in_gaps_is_no_index() -> None:
    ids = JaggedTensor(T([1, 77, 2, -5, 3]), Structure.from_starts(T([0, 2, 4]), T([1, 1, 1])))
    torch.testing.assert_close(torch.cat(F.embedding(ids, TABLE).unbind()), TABLE[1:4])


@pytest.mark.parametrize("levels", [[T([2, 0, 1]), T([1, 2, 2])], [T([[1, 2], [0, 2]])]], ids=["chain", "equal parts"])
def test_nested_rows(levels: list[Tensor]) -> None:
    ids = JaggedTensor.from_lengths(T([1, 2, 3, 10, 4]), levels if len(levels) > 1 else levels[0])
    with pytest.raises(IndexOutOfRange, match=r"embedding: index(\[\d\]){3} = 10 "):
        F.embedding(ids, TABLE)
    within = ids.with_values(T([0, 1, 0, 2, 1]))
    with pytest.raises(IndexOutOfRange, match=r"gather: index(\[\d\]){3} = 2 .*the row"):
        torch.gather(ids, 2, within)


def test_empty_tables_and_empty_indices() -> None:
    assert F.embedding(J(torch.zeros(0, dtype=torch.int64), [0, 0]), TABLE).values.shape == (0, 4)
    with pytest.raises(IndexOutOfRange, match="there are 0 positions"):
        F.embedding(J(T([0]), [1, 0]), torch.zeros(0, 4))


def test_what_nothing_reads_is_checked_too() -> None:
    @jit
    def f(x: Tensor, k: JaggedTensor) -> JaggedTensor:
        F.embedding(k, x)
        return k + 1

    with pytest.raises(IndexOutOfRange, match=r"index\[0\]\[0\] = 10 "):
        f(TABLE, J(T([10]), [1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_operations_of_our_own_read_zero(backend: str) -> None:
    with ir.Fusion() as f:
        x, k, offsets = f.input((10, 4), torch.float32), f.input((None,), torch.int64), f.input((None,), torch.int64)
        nested = ops.as_nested(k, offsets)
        f.output(ops.index(x, nested), ops.embedding(nested, x), ops.gather(nested, 1, nested))
    run = f.compile(backend=backend)
    found = run(TABLE, T([1, 10, -1]), T([0, 3, 3]))
    want = torch.stack([TABLE[1], torch.zeros(4), torch.zeros(4)])
    assert torch.equal(found[0].values, want) and torch.equal(found[1].values, want)
    assert found[2].values.tolist() == [10, 0, 0]


def test_on_a_device_it_is_raised_at_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As there: what was found is sent to the host, and nothing waits for it."""
    monkeypatch.setattr(indices, "on_host", lambda _: False)
    F.embedding(J(T([1, 2, 3]), [2, 1]), TABLE)
    serrate.wait_for_checks()
    F.embedding(J(T([1, 12, 3]), [2, 1]), TABLE)
    with pytest.raises(IndexOutOfRange, match=r"embedding: index 12 is out of range: there are 10 positions \(detected") as it:
        serrate.wait_for_checks()
    assert f"the call at {__file__}:" in str(it.value)


def test_told_late_the_limit_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where programs read the size of the table at every call, because it has changed often."""
    monkeypatch.setattr(indices, "on_host", lambda _: False)
    for size in range(11, 22):
        F.embedding(J(T([1, 2, size]), [2, 1]), torch.zeros(size, 4))
        with pytest.raises(IndexOutOfRange, match=f"index {size} is out of range: there are {size} positions"):
            serrate.wait_for_checks()


def test_a_clone_checks_as_well() -> None:
    with ir.Fusion() as f:
        x, k = f.input((10, 4), torch.float32), f.input((None,), torch.int64)
        f.output(torch.gather(x, 0, ops.unsqueeze(k, 1)))
    assert f == f.clone() and "check" in str(f)
    for program in (f, f.clone(), f.simplified()):
        with pytest.raises(IndexOutOfRange, match=r"gather: index\[1\]\[0\] = 10 "):
            program.evaluate(TABLE, T([1, 10]))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.filterwarnings("ignore:argument 0 of")
@pytest.mark.parametrize("run", [lambda f: f, serrate.jit], ids=["eager", "jit"])
def test_other_indices_in_the_same_rows_are_read_anew(run: Any, index: torch.dtype) -> None:
    table, rows = torch.randn(9, 8), JaggedTensor.from_lengths(torch.tensor([3, 1, 2], dtype=index), [2, 1])
    pooled = run(lambda ids, table: torch.nn.functional.embedding_bag(ids, table, mode="sum"))
    for numbers in ([3, 1, 2], [0, 8, 4], [5, 5, 5]):
        ids = torch.tensor(numbers, dtype=index)
        want = torch.stack([table[numbers[0]] + table[numbers[1]], table[numbers[2]]])
        torch.testing.assert_close(pooled(rows.with_values(ids), table), want)
        rows.values.copy_(ids)
        torch.testing.assert_close(pooled(rows, table), want)
        strided = torch.stack([ids, ids], 1)[:, 0]
        torch.testing.assert_close(pooled(rows.with_values(strided), table), want)
    with pytest.raises(IndexError, match="= 9 is out of range"):
        pooled(rows.with_values(torch.tensor([0, 1, 9], dtype=index)), table)
    one = JaggedTensor.from_lengths(torch.tensor([4], dtype=index), [1])
    torch.testing.assert_close(pooled(one, table), table[4:5])
