"""Schedule primitives, one by one: the program before and after, and what each refuses.

In: naive programs of small fusions. Out: failures that show the phase as text.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from serrate import ops
from serrate.errors import DomainError, ScheduleError
from serrate.ir import Fusion, TensorView
from serrate.ir.tile import TileProgram
from serrate.lower.stages import stages
from serrate.schedule.block_loops import find
from serrate.schedule.plan import Plan, Recorder, Step
from serrate.schedule.primitives import PRIMITIVES


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
        ScheduleError, match=r"partition: i.d0\{n0\} of T6 has an extent known only at run time; \[0, 1\] may not end there"
    ):
        after(Step("partition", ("T6", "d0", 0, 1)))
    with pytest.raises(ScheduleError, match=r"partition: T1 does not partition an extent of 4 anywhere in the program"):
        after(Step("partition", ("T6", "d1", "T1")))
    with pytest.raises(DomainError, match="offsets must end at the extent 4, got 3"):
        after(Step("partition", ("T6", "d1", 0, 3)))


def test_partition_and_combine_are_inverse() -> None:
    steps = (Step("partition", ("T6", "d0", "T1")), Step("combine", ("T6", "c0", "r0")))
    assert loops(after(*steps), "T6") == loops(program(), "T6")


def test_what_is_reduced_is_not_spread_over_workers() -> None:
    with pytest.raises(ScheduleError, match="phase T3 reduces r0, so it cannot be spread over workers; rfactor it first"):
        after(Step("mark", ("T3", "r0", "grid")))
    assert loops(after(Step("mark", ("T3", "c0", "grid"))), "T3")[0] == "grid i.c0{n1 - 1}"


def test_delay() -> None:
    assert [p.name for p in after(Step("delay", ("T5", "T6"))).phases] == ["T3", "T4", "T5", "T6"]
    with pytest.raises(ScheduleError, match="delay: T4, which runs before T5, uses T3 of T3"):
        after(Step("delay", ("T3", "T5")))
    for second in ("T3", "T6"):
        with pytest.raises(ScheduleError, match=f"delay: T6 does not run before {second}"):
            after(Step("delay", ("T6", second)))
    moved = after(Step("inline", ("T4",)), Step("delay", ("T3", "T5")))
    assert [p.name for p in moved.phases] == ["T3", "T5", "T6"]


def test_inline_only_where_the_readers_index_gives_the_place() -> None:
    """Every row times every row: what is stored for row `r0` of a component is read at its row `r1` too."""
    with Fusion("f") as f:
        x, offsets = f.input((None, 2, 4), torch.float32), f.input((None,), torch.int64)
        rows = ops.as_nested(x, offsets)
        first, second = (ops.select(rows, 2, k) for k in range(2))
        f.output(ops.matmul(first, ops.transpose(second, 1, 2)))
    made = stages(f)[0]
    first_name, second_name = (p.name for p in made.phases[:2])
    inlined = Plan("test", (Step("inline", (first_name,)),)).apply(made)
    assert [p.name for p in inlined.phases] == [p.name for p in made.phases[1:]]
    with pytest.raises(ScheduleError, match=f"{second_name} is read at other rows than those that its definition reads"):
        Plan("test", (Step("inline", (second_name,)),)).apply(made)


def test_gather() -> None:
    # T4 needs T3 and T5 needs T4; T6 is the input itself, doubled.
    assert [p.name for p in after(Step("gather", ("T3", "T6"))).phases] == ["T3", "T6", "T4", "T5"]
    assert [p.name for p in after(Step("gather", ("T6", "T3"))).phases] == ["T6", "T3", "T4", "T5"]
    with pytest.raises(ScheduleError, match="gather: T5 needs T4, which would run after it"):
        after(Step("gather", ("T3", "T5")))
    with pytest.raises(ScheduleError, match="gather: T4 needs T3, which would run after it"):
        after(Step("gather", ("T4", "T3")))


def test_repeat() -> None:
    made = after(Step("repeat", ("T3", "T4")))
    assert [p.name for p in made.phases] == ["T3", "T3_2", "T4", *(p.name for p in program().phases[2:])]
    assert {t.name for t in made.phases[2].reads} == {t.name.replace("T3", "T3_2") for t in program().phases[1].reads}
    with pytest.raises(ScheduleError, match="repeat: T6 is not an intermediate result of its own"):
        after(Step("repeat", ("T6", "T4")))


def rows(operation: Callable[[TensorView], TensorView]) -> TileProgram:
    """The program of one operation on rows."""
    with Fusion("f") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(operation(ops.as_nested(x, offsets)))
    return stages(f)[0]


def refused(made: TileProgram, step: Step) -> str:
    with pytest.raises(ScheduleError) as error:
        Plan("test", (step,)).apply(made)
    return str(error.value)


def gated() -> TileProgram:
    """T4 = x @ a;  T5 = x @ b;  T6 = T4 * T5: the columns of a and of b are two dims."""
    with Fusion("f") as f:
        x = f.input((None, 4), torch.float32)
        a, b = f.input((4, 8), torch.float32), f.input((4, 8), torch.float32)
        f.input((8, 3), torch.float32)
        f.output(ops.mul(ops.matmul(x, a), ops.matmul(x, b)))
    return stages(f)[0]


def test_align() -> None:
    made = gated()
    *_, second, last = (p.name for p in made.phases)
    column, other = (loops(made, name)[1].split(".")[1].split("{")[0] for name in (second, last))
    assert column != other
    aligned = Plan("test", (Step("align", (second, column, other)),)).apply(made)
    assert loops(aligned, second)[1] == loops(aligned, last)[1]
    assert f"{second}[d0, {other}]" in str(aligned)
    assert refused(made, Step("align", (second, column, "d0"))).startswith("align: ")
    assert refused(made, Step("align", (second, column, "nothing"))) == "align: no phase loops over 'nothing'"
    rows = refused(program(), Step("align", ("T3", "r0", "d1")))
    assert rows.endswith("must be plain dims: not rows, components, or parts of another dim")


def test_fuse() -> None:
    fused = after(Step("fuse", ("T4", "T5", 2)))
    assert [p.name for p in fused.phases] == ["T3", "T5", "T6"]
    assert loops(fused, "T5")[:2] == ["serial i.c0{n1 - 1}", "serial i.d1{4}"]
    assert refused(program(), Step("fuse", ("T3", "T5", 1))) == "fuse: T3 and T5 are not neighbours"
    assert refused(program(), Step("fuse", ("T3", "T4", 2))) == "fuse: T3 and T4 do not share their outermost 2 loops"


def test_loops_that_run_in_different_ways_are_not_fused() -> None:
    for kind in ("grid", "lanes"):
        domain = "c0" if kind == "grid" else "d1"
        made = after(Step("reorder", ("T4", domain, "d1" if domain == "c0" else "c0")), Step("mark", ("T4", domain, kind)))
        made = Plan("test", (Step("reorder", ("T5", domain, "d1" if domain == "c0" else "c0")),)).apply(made)
        assert refused(made, Step("fuse", ("T4", "T5", 1))) == "fuse: T4 and T5 do not share their outermost 1 loops"


def test_a_reader_does_not_share_the_loop_that_is_reduced() -> None:
    made = rows(lambda y: y - ops.sum(y, 1, keepdim=True))
    first, second = (phase.name for phase in made.phases)
    assert "is complete only after all of r0" in refused(made, Step("fuse", (first, second, 2)))
    lanes = (Step("mark", (first, "d1", "lanes")), Step("mark", (second, "d1", "lanes")))
    Plan("test", (*lanes, Step("fuse", (first, second, 1)))).apply(made)


@pytest.mark.parametrize("dim", [1, 2])
def test_a_reader_of_other_places_does_not_share_loops(dim: int) -> None:
    made = rows(lambda y: ops.flip(ops.relu(y), dim))
    first, second = (phase.name for phase in made.phases)
    assert loops(made, first) == loops(made, second)
    for depth in (1, 2, 3):
        assert "is read at a different index than it is written at" in refused(made, Step("fuse", (first, second, depth)))


def test_a_reader_through_a_view_does_not_share_loops() -> None:
    with Fusion("f") as f:
        f.output(ops.flip(ops.unflatten(ops.relu(f.input((None, 6), torch.float32)), 1, (2, 3)), 2))
    (made,) = stages(f)
    assert refused(made, Step("fuse", ("T1", "T3", 1))) == "fuse: T1 is read through a view; it must be complete first"


def test_a_scan_begins_anew_in_every_row() -> None:
    made = rows(lambda y: ops.cumsum(y, 1))
    assert "restarts in every row" in refused(made, Step("combine", (made.phases[0].name, "c0", "r0")))
    along = rows(lambda y: ops.cumsum(y, 2))
    Plan("test", (Step("combine", (along.phases[0].name, "c0", "r0")),)).apply(along)


def test_only_what_is_reduced_is_factored() -> None:
    for kept in (("c0",), ("r0", "c0"), ("c0", "r0"), ("d1",)):
        assert refused(program(), Step("rfactor", ("T3", *kept))) == f"phase T3: {', '.join(kept)} is not reduced there"
    assert (
        refused(program(), Step("rfactor", ("T4", "c0"))) == "phase T4 is not a reduction of values; there is nothing to rfactor"
    )
    made = after(Step("split", ("T3", "r0", 2)), Step("rfactor", ("T3", "r0o")))
    assert loops(made, "T3")[:2] == ["serial i.c0{n1 - 1}", "serial ragged.r0o{(T1[c + 1] - T1[c] + 1) // 2}"]


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
        (("T5", "split", "d1", 2), "allocate: T5 is output, whose memory layout the caller decides"),
        (("T0", "split", "d1", 2), "allocate: T0 is not computed here"),
        (("T4", "split", "d0", 2), r"allocate: the memory of T4 is \[c0, d1\], got d0"),
        (("T4", "merge", "d1", "c0"), "allocate: c0 is not the dim right after d1 in the memory of T4"),
        (("T4", "reorder", "c0"), r"allocate: reorder c0 is not a valid change of \[c0, d1\]"),
        (("T4", "fold", "c0"), r"allocate: fold c0 is not a valid change of \[c0, d1\]"),
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
