"""Primitives on the loops of kernels: what they refuse, and that a kernel under any legal steps means the same.

In: kernels as users write them, and steps. Out: failures that name the steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.errors import ScheduleError
from serrate.ir.tile import Loop, TileProgram, statements
from serrate.lower.pipeline import lower
from serrate.schedule.plan import Plan, Recorder, Step
from serrate.schedule.target import CPU

LENGTHS = [3, 0, 11, 1, 7]


def rows(lengths: list[int] = LENGTHS) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(sum(lengths)), lengths)


@serrate.kernel
def centred(x: JaggedTensor, out: JaggedTensor) -> JaggedTensor:
    for b in hl.tile(x.num_rows):
        total = hl.zeros([b])
        for k in hl.tile(x.max_length):
            total = total + x[b, k].sum(1)
        for j in hl.tile(x.max_length):
            out[b, j] = x[b, j] - total[:, None]
    return out


@serrate.kernel
def decayed(x: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(x.num_rows)
    for b in hl.tile(x.num_rows):
        acc = hl.zeros([b])
        for k in hl.tile(x.max_length, block_size=4):
            acc = acc * 0.5 + x[b, k].sum(1)
        out[b] = acc
    return out


@serrate.kernel
def past_the_rows(x: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(dense)
    for b in hl.tile(x.num_rows):
        for k in hl.tile(dense.shape[1]):
            out[b, k] = dense[b, k] + x[b, k]
    return out


@serrate.kernel(strategy="persistent_dynamic")
def centred_features(x: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(x)
    for b in hl.tile(x.num_rows):
        total = hl.zeros([b])
        for k, m in hl.tile([x.max_length, x.size(2)]):
            total = total + x[b, k, m].sum([1, 2])
        for k, m in hl.tile([x.max_length, x.size(2)]):
            out[b, k, m] = x[b, k, m] - total[:, None, None]
    return out


def program_of(kernel: Any, *args: Any) -> TileProgram:
    found: TileProgram = kernel.on("reference").variants(*args)[0].program
    return found


def centred_program() -> TileProgram:
    x = rows()
    return program_of(centred, x, x.with_values(torch.zeros_like(x.values)))


def loops(program: TileProgram) -> list[tuple[str, list[str]]]:
    return [(p.name, [n.domain.name for n in statements(p.body) if isinstance(n, Loop)]) for p in program.phases]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([("split", "centred", "nothing", 4)], "has no loops over 'nothing'; it loops over b, k, j"),
        ([("mark", "centred", "k", "lanes")], r"cannot be lanes: its extent is not known; split it first"),
        ([("mark", "centred", "k", "grid")], "k cannot be grid: .* alone inside them and carries nothing"),
        ([("cut", "centred", "k", 8)], "is not ragged; nothing to cut"),
        ([("fork", "centred", "k", 8)], "is not ragged, so all its rows are equally long"),
        ([("ragged", "centred", "b")], "is guarded by a row length"),
        ([("ragged", "centred", "k"), ("ragged", "centred", "kr")], "is guarded by a row length"),
        ([("combine", "centred", "b", "k")], "are not both on the grid; cut the row instead"),
        ([("two_pass", "centred", "k")], "carries more than softmax statistics"),
        ([("one_pass", "centred", "k", "j")], "the loop over j does more than reduce a row"),
        (
            [("ragged", "centred", "k"), ("split", "centred", "kr", 8), ("split", "centred", "kri", 3)],
            "a piece has 8 positions .* not a multiple of 3",
        ),
        ([("keep", "centred", "k")], "nothing after the loop over k needs the terms it sums"),
    ],
)
def test_what_does_not_apply_is_refused(steps: list[tuple[Any, ...]], message: str) -> None:
    recorder = Recorder(centred_program())
    for step in steps[:-1]:
        recorder.do(*step)
    before = str(recorder.program)
    with pytest.raises(ScheduleError, match=message):
        recorder.do(*steps[-1])
    assert str(recorder.program) == before


def test_opaque_updates_are_not_cut_and_keep_their_tiles() -> None:
    recorder = Recorder(program_of(decayed, rows()))
    with pytest.raises(ScheduleError, match=r"tiles of the tile of line .* have 4 lanes, and 6 is not a multiple of that"):
        recorder.do("split", "decayed", "k", 6)
    recorder.do("ragged", "decayed", "k")
    with pytest.raises(ScheduleError, match=r"acc, carried around the tile of line .*, is not a known reduction"):
        recorder.do("cut", "decayed", "kr", 8)
    recorder.do("split", "decayed", "kr", 8)
    with pytest.raises(ScheduleError, match="have 4 lanes, not 8"):
        recorder.do("mark", "decayed", "kri", "lanes")


@serrate.kernel
def running(x: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(x)
    for b in hl.tile(x.num_rows):
        before = hl.zeros([b])
        for k in hl.tile(x.max_length, block_size=4):
            out[b, k] = x[b, k].cumsum(1) + before[:, None]
            before = before + x[b, k].sum(1)
    return out


@serrate.kernel
def sum_of_sums(x: JaggedTensor) -> torch.Tensor:
    out = torch.empty(x.num_rows)
    for b in hl.tile(x.num_rows):
        before, total = hl.zeros([b]), hl.zeros([b])
        for k in hl.tile(x.max_length, block_size=1):
            before = before + x[b, k].sum(1)
            total = total + (x[b, k] * before[:, None]).sum(1)
        out[b] = total
    return out


@pytest.mark.parametrize("kernel", [running, sum_of_sums])
def test_a_row_is_not_cut_if_its_loop_reads_what_it_has_carried_so_far(kernel: Any) -> None:
    recorder = Recorder(program_of(kernel, rows()))
    phase = recorder.program.phases[0].name
    recorder.do("ragged", phase, "k")
    with pytest.raises(ScheduleError, match=r"before, carried around the tile of line .*, is read inside the loop"):
        recorder.do("cut", phase, "kr", 8)


def test_a_loop_that_stores_past_the_rows_does_not_end_with_them() -> None:
    recorder = Recorder(program_of(past_the_rows, rows(), torch.zeros(5, 12)))
    with pytest.raises(ScheduleError, match="no statement in the loop over k is guarded by a row length"):
        recorder.do("ragged", "past_the_rows", "k")


def test_a_cut_leaves_parts_and_then_rows() -> None:
    plan = Plan("mine", (Step("ragged", ("centred", "k")), Step("fork", ("centred", "kr", 4)), Step("cut", ("centred", "kr", 4))))
    found = plan.apply(centred_program())
    (parts, first), (last, second) = loops(found)
    assert (parts, last) == ("centred_kr", "centred")
    assert first == ["bkro", "k_shortr", "j_short", "kri"]
    assert second == ["b", "kro", "j"]
    assert "kept" in str(lower(found, "centred", (), CPU))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("lengths", [LENGTHS, [], [0, 0], [1], [40, 1, 0, 39]])
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_rows_of_all_lengths_are_the_same_cut_or_whole(chunk: int, lengths: list[int], backend: str) -> None:
    x = rows(lengths)
    cut = serrate.kernel(centred.fn, strategy="persistent_dynamic", lanes={"chunk": chunk}).on(backend)
    out = cut(x, x.with_values(torch.full_like(x.values, 9)))
    for got, row in zip(out.unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(got, row - row.sum())


def test_a_part_of_a_row_is_as_long_whatever_runs_across_it() -> None:
    """A loop over features inside the one over positions does not make parts longer."""
    x = JaggedTensor.from_lengths(torch.zeros(5, 64), [4, 1])
    assert "rows of more than 4096 positions are cut" in str(centred_features.explain(x))
