"""Arrays that a GPU derives from offsets, in one launch or several: where the pieces of each row begin, the row of each piece.

In: lengths of rows. Out: failures that show the offsets or the owners that differ from those counted in Python.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from serrate import ir, ops
from serrate.codegen.triton.derived import can_derive
from serrate.ir.recipes import GroupMaximum, Order, Owners, RunningSum
from serrate.runtime.derivation import Derivation
from serrate.schedule.target import GPU
from tests.conftest import FULL

pytestmark = pytest.mark.triton
PIECE = 16
LENGTHS = [[], [0], [5], [16], [17], [0, 40, 3, 0, 16, 100, 1], [1] * 1100 + [33] + [2] * 30, [17] * 5 + [3] * 9000 + [40] * 4]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} rows")
@pytest.mark.parametrize(("dtype", "together"), [(torch.int32, True), (torch.int64, True), (torch.int64, False)], ids=str)
def test_pieces_of_long_rows(lengths: list[int], dtype: torch.dtype, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serrate.runtime.derivation.FEW_BLOCKS", 64 if together else 0)
    with ir.Fusion("program") as f:
        x, offsets = f.input((None, 2), torch.float32), f.input((None,), dtype)
        f.output(ops.softmax(ops.as_nested(x, offsets), 1))
    run = f.compile("triton", "persistent_dynamic", chunk=PIECE, tile=8)
    values, given = torch.ones(sum(lengths), 2), torch.tensor([0, *accumulate(lengths)], dtype=dtype)
    call = run.binder.bind((values, given))
    ready = run.stages[0].prepared(call)
    wanted = [a for a in ready.executable.program.arrays if can_derive(a)]
    derivation = Derivation(wanted, tuple(run.binder.symbols))
    assert derivation.names == ("T1",)
    arrays = derivation([given], derivation.numbers(call.numbers), given.device)
    made = {array: arrays[place].tensor() for array, place in zip(wanted, derivation.order, strict=True)}
    pieces = [-(-n // PIECE) if n > PIECE else 0 for n in lengths]
    counts = [pieces, [min(n, 1) for n in pieces]]
    sums = [made[a].tolist()[: len(lengths) + 1] for a in wanted if isinstance(a.recipe, RunningSum)]
    tables = [made[a].tolist() for a in wanted if isinstance(a.recipe, Owners)]
    assert sums == [[0, *accumulate(each)] for each in counts]
    for table, each in zip(tables, counts, strict=True):
        assert table[: sum(each)] == [row for row, n in enumerate(each) for _ in range(n)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lengths", LENGTHS if FULL else LENGTHS[:-1], ids=lambda lengths: f"{len(lengths)} rows")
def test_short_rows_in_the_order_of_their_lengths(lengths: list[int]) -> None:
    with ir.Fusion("program") as f:
        x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    run = f.compile("triton", "persistent_dynamic", chunk=PIECE, tile=8, rows=4)
    values, given = torch.ones(sum(lengths)), torch.tensor([0, *accumulate(lengths)])
    call = run.binder.bind((values, given))
    wanted = [a for a in run.stages[0].prepared(call).executable.program.arrays if can_derive(a)]
    derivation = Derivation(wanted, tuple(run.binder.symbols))
    made = derivation([given], derivation.numbers(call.numbers), given.device)
    (place,) = [place for a, place in zip(wanted, derivation.order, strict=True) if isinstance(a.recipe, Order)]
    short = [n if n <= PIECE else 0 for n in lengths]
    runs = [range(k, min(k + GPU.ordered, len(lengths))) for k in range(0, len(lengths), GPU.ordered)]
    assert made[place].tensor().tolist()[: len(lengths)] == [c for each in runs for c in sorted(each, key=lambda c: short[c])]
    assert run(values, given).tolist() == [float(n) for n in lengths]


@pytest.mark.parametrize("lengths", LENGTHS[:-1], ids=lambda lengths: f"{len(lengths)} rows")
def test_the_longest_row_of_each_group(lengths: list[int]) -> None:
    with ir.Fusion("program") as f:
        x, offsets = f.input((None,), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    run = f.compile("triton", "masked", rows=4)
    values, given = torch.ones(sum(lengths)), torch.tensor([0, *accumulate(lengths)])
    call = run.binder.bind((values, given))
    wanted = [a for a in run.stages[0].prepared(call).executable.program.arrays if can_derive(a)]
    derivation = Derivation(wanted, tuple(run.binder.symbols))
    made = derivation([given], derivation.numbers(call.numbers), given.device)
    (place,) = [place for a, place in zip(wanted, derivation.order, strict=True) if isinstance(a.recipe, GroupMaximum)]
    groups = [max(lengths[k : k + 4]) for k in range(0, len(lengths), 4)]
    assert made[place].tensor().tolist()[: len(groups)] == groups
    assert run(values, given).tolist() == [float(n) for n in lengths]
