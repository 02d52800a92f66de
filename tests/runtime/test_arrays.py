"""What is derived from offsets is remembered with them, and made again when it must be."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch

from serrate import JaggedTensor, Structure, ir, jit, ops
from serrate.errors import StructureError
from serrate.runtime import arrays
from serrate.runtime.dispatch import BINDINGS, CallLeaves, Seen, key_of
from tests.engine.oracle import BACKENDS, STRATEGIES


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_that_are_written_to(backend: str, strategy: str) -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    program = f.compile(backend, strategy)
    values, given = torch.arange(24.0).reshape(12, 2), torch.zeros(4, dtype=torch.int64)
    for boundaries in ([0, 2, 2, 12], [0, 5, 6, 12], [0, 0, 12, 12]):
        given.copy_(torch.tensor(boundaries))
        want = [values[a:b].sum(0).tolist() for a, b in itertools.pairwise(boundaries)]
        assert program(values, given).tolist() == want
    given.copy_(torch.tensor([0, 9, 3, 12]))
    with pytest.raises(StructureError, match="must not decrease"):
        program(values, given)


def test_the_first_rows_and_more_of_them() -> None:
    values, offsets = torch.arange(8.0), torch.tensor([0, 3, 3, 7, 8])
    rows = [values[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]
    for count in (1, 3, 2, 4):
        with ir.Fusion() as f:
            x, given = f.input((None,), torch.float32), f.input((None,), torch.int64)
            f.output(ops.slice(ops.as_nested(x, given), 0, 0, count))
        assert f.evaluate(values, offsets).tolist() == rows[:count]


def test_offsets_are_not_kept_for_ever() -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    program = f.compile("cpp")
    given = [torch.tensor([0, k % 10, 9]) for k in range(90)]
    seen = [weakref.ref(offsets) for offsets in given]
    for offsets in given:
        program(torch.ones(9), offsets)
    del given, offsets
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= max(arrays.TENSORS, BINDINGS)


def test_the_same_rows_beside_other_columns() -> None:
    """What is remembered for two tensors of offsets is not what was for the first of them and another."""
    values, rows = torch.arange(16.0).reshape(4, 4), torch.tensor([0, 1, 4])
    double = jit(lambda x: x * 2)
    for boundaries in ([0, 1, 4], [0, 3, 4], [0, 2, 4]):
        columns = Structure.from_offsets(torch.tensor(boundaries), dim=1)
        got = double(JaggedTensor(values, Structure.independent(Structure.from_offsets(rows), columns)))
        for k, (a, b) in enumerate(itertools.pairwise(rows.tolist())):
            wanted = [[row[c:d].tolist() for c, d in itertools.pairwise(boundaries)] for row in values[a:b] * 2]
            assert got[k].tolist() == wanted


def test_a_call_that_a_graph_records_derives_its_arrays_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every replay would read what the offsets of an earlier call gave."""
    offsets, made = torch.tensor([0, 2, 5]), itertools.count()

    def ask() -> int:
        return arrays.remembered((offsets,), "key", lambda: next(made))

    assert [ask(), ask()] == [0, 0]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert [ask(), ask()] == [1, 2]
    assert ask() == 0


def test_no_binding_serves_a_call_that_a_graph_records(monkeypatch: pytest.MonkeyPatch) -> None:
    x = JaggedTensor.from_csr(torch.empty(5, 2, device="meta"), torch.tensor([0, 2, 5], device="meta"), validate=False)
    for value in (x, x.values):
        keys = [key_of([value], CallLeaves(), [], lambda *_: None) for _ in range(2)]
        assert keys[0] == keys[1]
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert key_of([value], CallLeaves(), [], lambda *_: None) != key_of([value], CallLeaves(), [], lambda *_: None)


def test_rows_that_are_gone_were_not_seen() -> None:
    """A key has the ids of rows, and other rows soon have the same."""

    class Row:
        pass

    seen, first, second = Seen(), Row(), Row()
    assert [seen.note(("key",), [first]) for _ in range(2)] == [False, True]
    assert [seen.note(("key",), [second]) for _ in range(2)] == [False, True]
    assert not seen.note(("another key",), [second])
