"""masked: several rows at once, up to the length of the longest.

for c: for r[c]: s  ->  grid co: serial xo: lanes ci, xi: s where r < length[c]      (x covers the rows of a group)
If rows are sorted by length first, the rows of a group have similar lengths, and few lanes are idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serrate.errors import ScheduleError
from serrate.ir.tile import TileProgram
from serrate.schedule.plan import Plan, Recorder, Sized
from serrate.schedule.prepare import Shape, prepare
from serrate.schedule.strategies.common import block_size, schedule, shapes, warps_for
from serrate.schedule.strategies.kernels import Lanes, whole_rows
from serrate.schedule.strategies.maskless import WholeRows, in_two_passes
from serrate.schedule.target import Target


def masked(
    program: TileProgram,
    target: Target,
    tile: int | None = None,
    rows: int | None = None,
    warps: int | None = None,
    lanes: Lanes | None = None,
    most: int | None = None,
) -> Plan:
    """A plan with groups of `rows` rows on the grid, each row one lane; rows longer than `most` are left out, and others are
    ordered by length within `target.ordered` rows."""
    recorder = Recorder(program)
    prepare(recorder)
    short: dict[str, str] = {}
    if most is not None:
        for shape in shapes(recorder.program):
            if len(shape.own_rows) > 1 or shape.has_other_rows:
                raise ScheduleError(f"phase {shape.phase} runs over several ragged dims, so its rows cannot be split by length")
            for row in shape.own_rows:
                recorder.do("short_only", shape.phase, row.name, most)
                short[row.component.name] = f"{row.name}r"
        # Lanes then keep their own maxima and sums, and are combined once per row; the row stays in cache.
        in_two_passes(recorder, keep=False)
    schedule(recorder, target, GroupedRows(tile, block_size(rows, target.rows_together, target), short, target.ordered), lanes)
    return recorder.plan("masked", warps or warps_for(program, target))


@dataclass(frozen=True)
class GroupedRows(WholeRows):
    """Groups of components on the grid, with rows as lanes, up to the length of the longest row."""

    size: int
    ordered_by: Mapping[str, str]
    """The rows by whose lengths components are ordered, by the names of both, within `run` of them."""
    run: int

    def per_component(self, recorder: Recorder, shape: Shape) -> tuple[list[str], list[str]]:
        assert shape.component is not None
        if shape.ragged is None and shape.has_other_rows:
            # Nested rows: the trip count would differ between lanes.
            return super().per_component(recorder, shape)
        name = shape.component.name
        if name in self.ordered_by:
            recorder.do("order", shape.phase, name, self.ordered_by[name], self.run)
            name = f"{name}p"
        recorder.do("split", shape.phase, name, Sized(self.size, "rows that are processed together, as lanes"))
        return [f"{name}o"], [f"{name}i"]

    def per_row(self, recorder: Recorder, shape: Shape, block: int | None) -> tuple[list[str], list[str], list[str]]:
        assert shape.ragged is not None
        (group,), (member,) = self.per_component(recorder, shape)
        for rows in shape.own_rows:
            recorder.do("cover", shape.phase, rows.name, group, self.size)
        cover = f"{shape.ragged.name}x"
        if block is None:
            return [group], [cover], [member]
        # A requested block is one of each row; the usual block is divided among the rows of a group.
        shared = Sized(max(block // self.size, 1), f"a block is divided among the {self.size} rows of a group")
        recorder.do("split", shape.phase, cover, block if self.tile else shared)
        return [group], [f"{cover}o"], [member, f"{cover}i"]

    def kernel(self, recorder: Recorder, target: Target, lanes: Lanes) -> None:
        whole_rows(recorder, target, lanes, self.size, near=False)
