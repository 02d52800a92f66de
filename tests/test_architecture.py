"""docs/architecture.md shows what the compiler does today: dumps (SERRATE_UPDATE_GOLDEN=1 rewrites them) and lists of files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import serrate
import serrate.language as hl
from serrate import ir, ops
from serrate.codegen.cpp.printer import print_cpp
from serrate.codegen.triton.printer import print_triton
from serrate.ir.loops import LoopProgram
from serrate.ir.tile import TileProgram
from serrate.lower.pipeline import loops_of, lower, passes
from serrate.lower.stages import stages
from serrate.schedule.strategies import plan
from serrate.schedule.target import CPU, GPU
from tests.pages import DOCS, check_dumps

ROOT = Path(serrate.__file__).parent
STEP = re.compile(r"^(\d+)\. `([a-z_/]+\.py)` \(`([A-Za-z_.]+)`\)", re.MULTILINE)


def new_kernel() -> Any:
    """The kernel of the page, never called."""

    @serrate.kernel
    def row_sums(jt):
        out = torch.empty(jt.num_rows)
        for tile_b in hl.tile(jt.num_rows):
            total = hl.zeros([tile_b])
            for tile_k in hl.tile(jt.max_length):
                total = total + jt[tile_b, tile_k].sum(1)
            out[tile_b] = total
        return out

    return row_sums


def rows(*shape: int) -> serrate.JaggedTensor:
    return serrate.JaggedTensor.from_lengths(torch.rand(5, *shape), [2, 0, 3])


def named(scheduled: TileProgram) -> LoopProgram:
    """The loop program as the pass that names indices leaves it."""
    program = loops_of(scheduled, "softmax", ())
    for name, each in passes(CPU):
        program = each(program)
        if name == "name_indices":
            break
    return program


def dumps() -> dict[str, str]:
    with ir.Fusion("softmax") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, offsets), dim=1))
    (program,) = stages(f)
    chosen = plan(program, "maskless", CPU, tile=8, keep_rows=False)
    scheduled = chosen.apply(program)
    loops = lower(scheduled, "softmax", (), CPU)
    gpu = lower(plan(program, "maskless", GPU, tile=8).apply(program), "softmax", (), GPU)
    parts = named(plan(program, "persistent_dynamic", CPU, tile=8, chunk=64).apply(program))
    with ir.Fusion("to_padded") as f_padded:
        x, offsets = f_padded.input((None, 64), torch.float32), f_padded.input((None,), torch.int64)
        f_padded.output(ops.to_padded(ops.as_nested(x, offsets), 7.0))
    (moving,) = stages(f_padded)
    moved = lower(plan(moving, "maskless", CPU).apply(moving), "to_padded", (), CPU)
    (variant,) = new_kernel().on("cpp").variants(rows())
    scheduled_kernel = variant.plan.apply(variant.program)
    return {
        "kernel_naive": "  phase" + str(variant.program).split("  phase")[1],
        "kernel_plan": "\n".join(map(str, variant.plan.steps)) + "\n",
        "kernel_loops": str(loops_of(scheduled_kernel, "row_sums", ())),
        "padded": print_cpp(moved, frozenset(moved.arrays)).text.split("// to_padded\n")[1].removesuffix("}\n"),
        "fusion": str(f),
        "naive": str(program),
        "plan": "\n".join(map(str, chosen.steps)) + "\n",
        "scheduled": str(scheduled),
        "made": str(loops_of(scheduled, "softmax", ())),
        "loops": str(named(scheduled)),
        "cpp": print_cpp(loops, frozenset(loops.arrays)).text,
        "triton": "@triton.jit(do" + print_triton(gpu).text.split("@triton.jit(do")[1].strip() + "\n",
        "persistent": str(parts).split("kernel softmax_1")[0].split("kernel softmax_0:\n")[1],
    }


def test_architecture_page_shows_real_dumps() -> None:
    check_dumps(DOCS / "architecture.md", dumps())


def first_calls(run: Callable[[], object]) -> list[tuple[str, str]]:
    """The functions of serrate in the order in which they are first called: file and name."""
    order: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            order.setdefault((path.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return list(order)


def test_first_calls_go_through_the_files_that_the_page_lists() -> None:
    steps = STEP.findall((DOCS / "architecture.md").read_text())
    assert [int(number) for number, _, _ in steps] == [*range(1, 11), *range(1, 11)]
    kernel, function = new_kernel(), serrate.jit(lambda x: torch.softmax(x, 1))
    runs: list[Callable[[], object]] = [lambda: kernel(rows()), lambda: function(rows(4))]
    for run, listed in zip(runs, (steps[:10], steps[10:]), strict=True):
        expected = [(file, name) for _, file, name in listed]
        assert [call for call in first_calls(run) if call in expected] == expected


def test_the_page_lists_all_passes_in_their_order() -> None:
    table = (DOCS / "architecture.md").read_text().partition("| pass | what it does | runs |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines() for name in re.findall(r"`([a-z_]+)`", row.partition(" | ")[0])]
    for target in (CPU, GPU):
        wanted = [name for name, _ in passes(target)]
        assert [name for name in listed if name in wanted] == wanted
    assert set(listed) == {name for target in (CPU, GPU) for name, _ in passes(target)}
