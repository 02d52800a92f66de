"""The dumps in docs/architecture.md are what the compiler makes today; SERRATE_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import torch

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
    return {
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
