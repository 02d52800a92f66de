"""Schedule primitives, one by one: the program before and after, and what each refuses.

In: naive programs of small fusions. Out: failures that show the phase as text.
"""

from __future__ import annotations

import pytest
import torch

from serrate import ops
from serrate.errors import DomainError, ScheduleError
from serrate.ir import Fusion
from serrate.ir.tile import TileProgram
from serrate.lower.stages import stages
from serrate.schedule.plan import Plan, Recorder, Step
from serrate.schedule.primitives import PRIMITIVES, find


def program() -> TileProgram:
    """T3 = row sums;  T4 = exp(T3);  T5 = T3 * T4;  T6 = x * 2 over all elements."""
    with Fusion("f") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        total = ops.sum(ops.as_nested(x, offsets), 1)
        f.output(ops.mul(total, ops.exp(total)), ops.mul(x, 2))
    return stages(f)[0]


def loops(made: TileProgram, phase: str) -> list[str]:
    lines = str(made.with_phases((find(made, phase),))).split(f"phase {phase}:\n")[1].splitlines()
    return [line.strip().rstrip(":") for line in lines[:-1]]


def after(*steps: Step) -> TileProgram:
    return Plan("test", steps).apply(program())


def test_split_from_outside() -> None:
    assert loops(after(Step("split", ("T6", "d1", 3, 0))), "T6") == ["serial i.d0{n0}", "serial i.d1o{3}", "serial i.d1i{2}"]
    assert loops(after(Step("split", ("T6", "d1", 3))), "T6") == ["serial i.d0{n0}", "serial i.d1o{2}", "serial i.d1i{3}"]


def test_merge() -> None:
    assert loops(after(Step("merge", ("T6", "d0", "d1"))), "T6") == ["serial i.d0d1{n0*4}"]
    with pytest.raises(ScheduleError, match="phase T3 keeps d1 and reduces r0; one loop cannot do both"):
        after(Step("merge", ("T3", "r0", "d1")))
    with pytest.raises(ScheduleError, match="phase T6: merge takes a loop and the one inside it; d0 is not right inside d1"):
        after(Step("merge", ("T6", "d1", "d0")))


def test_partition() -> None:
    assert loops(after(Step("partition", ("T6", "d1", 0, 1, 4))), "T6") == [
        "serial i.d0{n0}",
        "serial i.d1c{2}",
        "serial ragged.d1r{[1, 3]}",
    ]
    assert loops(after(Step("partition", ("T6", "d0", "T1"))), "T6") == [
        "serial i.c0{n1 - 1}",
        "serial ragged.r0{T1[c + 1] - T1[c]}",
        "serial i.d1{4}",
    ]
    with pytest.raises(
        ScheduleError, match=r"phase T6: i.d0\{n0\} has an extent known only when run; \[0, 1\] may not end there"
    ):
        after(Step("partition", ("T6", "d0", 0, 1)))
    with pytest.raises(ScheduleError, match=r"phase T6: nothing checks that T1 are offsets of i.d1\{4\}; use numbers"):
        after(Step("partition", ("T6", "d1", "T1")))
    with pytest.raises(DomainError, match="offsets must end at the extent 4, got 3"):
        after(Step("partition", ("T6", "d1", 0, 3)))


def test_partition_and_combine_are_inverse() -> None:
    steps = (Step("partition", ("T6", "d0", "T1")), Step("combine", ("T6", "c0", "r0")))
    assert loops(after(*steps), "T6") == loops(program(), "T6")


def test_what_is_reduced_is_not_spread_over_workers() -> None:
    with pytest.raises(ScheduleError, match="phase T3 reduces r0, so that it cannot be spread over workers; rfactor it first"):
        after(Step("mark", ("T3", "r0", "grid")))
    assert loops(after(Step("mark", ("T3", "c0", "grid"))), "T3")[0] == "grid i.c0{n1 - 1}"


def test_delay() -> None:
    assert [p.name for p in after(Step("delay", ("T5", "T6"))).phases] == ["T3", "T4", "T5", "T6"]
    with pytest.raises(ScheduleError, match="delay: T4, which runs before T5, needs T3 of T3"):
        after(Step("delay", ("T3", "T5")))
    for second in ("T3", "T6"):
        with pytest.raises(ScheduleError, match=f"delay: T6 does not run before {second}"):
            after(Step("delay", ("T6", second)))
    moved = after(Step("inline", ("T4",)), Step("delay", ("T3", "T5")))
    assert [p.name for p in moved.phases] == ["T3", "T5", "T6"]


def test_allocate() -> None:
    made = after(
        Step("allocate", ("T4", "split", "d1", 3)),
        Step("allocate", ("T4", "reorder", "d1o", "c0", "d1i")),
        Step("allocate", ("T4", "merge", "c0", "d1i")),
    )
    (tensor,) = find(made, "T4").writes
    assert [d.name for d in tensor.storage] == ["d1o", "c0d1i"]
    assert tensor in find(made, "T5").reads
    assert [d.name for d in tensor.logical] == ["c0", "d1"], "only its memory changed"
    for args, message in (
        (("T5", "split", "d1", 2), "allocate: T5 is output, whose memory is not the program's to arrange"),
        (("T0", "split", "d1", 2), "allocate: T0 is not computed here"),
        (("T4", "split", "d0", 2), r"allocate: the memory of T4 is \[c0, d1\], got d0"),
        (("T4", "merge", "d1", "c0"), "allocate: c0 does not lie right inside d1 in the memory of T4"),
        (("T4", "reorder", "c0"), r"allocate: reorder c0 is not a change of \[c0, d1\]"),
        (("T4", "fold", "c0"), r"allocate: fold c0 is not a change of \[c0, d1\]"),
    ):
        with pytest.raises(ScheduleError, match=message):
            after(Step("allocate", args))


def test_every_primitive_says_what_it_does() -> None:
    for name, primitive in PRIMITIVES.items():
        assert (primitive.__doc__ and "->" in primitive.__doc__) or name == "reorder", name


def test_a_refused_step_changes_nothing() -> None:
    recorder = Recorder(program())
    before = str(recorder.program)
    assert not recorder.attempt("merge", "T3", "r0", "d1")
    assert str(recorder.program) == before and recorder.plan("test").steps == ()
