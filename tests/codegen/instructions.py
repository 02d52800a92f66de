"""`python -m tests.codegen.instructions [--known] TASK/DTYPE...`: the machine instructions of loops on sm_90, without a GPU.

In: names of the GPU table, such as `softmax/bfloat16`. Out: for every kernel of a call whose lengths the host does not know (with
`--known`, knows): its instructions and registers, with the limits of `runtime/triton.py`, and the instructions of each innermost
loop by kind. Counts are facts about code, not times.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)\s*(.*?);")
LABEL = re.compile(r"^(\.L\w+):", re.MULTILINE)
WORKERS = 132
"""Multiprocessors of an H200."""
KINDS = {
    "addresses": ("IADD3", "IMAD", "LEA", "UIADD3", "ULEA", "VIADD", "USHF", "SHF"),
    "masks": ("ISETP", "UISETP", "PLOP3", "P2R", "R2P", "SEL", "FSEL"),
    "bits": ("LOP3", "PRMT", "ULOP3"),
    "moves": ("MOV", "UMOV", "R2UR", "CS2R"),
    "floats": ("FADD", "FMUL", "FFMA", "FMNMX", "FSETP"),
    "conversions": ("F2FP", "F2F", "I2F", "F2I"),
    "functions": ("MUFU",),
    "products": ("HGMMA", "HMMA"),
    "memory": ("LDG", "STG", "LDGSTS", "LDS", "STS", "LDSM", "STSM"),
    "exchange": ("SHFL", "BAR"),
}


def kind_of(name: str, suffix: str) -> str:
    """What an instruction is for; `IMAD.MOV` is a move, `IMAD.U32` makes a float of a bfloat16."""
    if name == "IMAD" and suffix.startswith((".MOV", ".U32")):
        return "moves" if suffix.startswith(".MOV") else "conversions"
    return next((kind for kind, names in KINDS.items() if name in names), "others")


def innermost_loops(sass: str) -> tuple[int, list[Counter[str]]]:
    """The number of instructions of a listing, and the instructions of its innermost loops by kind.

    A loop is what lies between a branch and the earlier place that it leads to.
    """
    found, places = [], {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            places[label[1]] = len(found)
        elif match := LINE.search(line):
            found.append((match[2], match[3], match[4]))
    loops = []
    for end, (name, _, operands) in enumerate(found):
        target = re.search(r"`\((\.L\w+)\)", operands) if name == "BRA" else None
        # A kernel ends with a branch to itself.
        if target and places.get(target[1], end) < end:
            loops.append((places[target[1]], end))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return len(found), [Counter(kind_of(n, s) for n, s, _ in found[begin : end + 1] if n != "NOP") for begin, end in inner]


class Counting:
    """Compiles every kernel that is launched, prints its counts, and runs none: results are zeros."""

    def executed(self, program: Any) -> Callable[..., None]:
        import torch

        from serrate.ir.fusion import NOTHING
        from serrate.runtime.memory import whole
        from tests.codegen.gpu_targets import kinds_of

        for launch, ready in zip(program._printed.launches, program._launches, strict=True):
            self._count(ready.kernel, kinds_of(launch, "i32"))
        first, last = len(program.program.inputs), len(program.program.tensors)

        def run(_: list[int], memory: Callable[[], Sequence[Any]]) -> None:
            for each in memory()[first:last]:
                # Integers are results of checks: no index is out of range.
                result = whole(each)
                result.fill_(NOTHING if result.dtype == torch.int64 else 0)

        return run

    def _count(self, kernel: Any, kinds: Sequence[str]) -> None:
        import triton
        from triton.compiler import ASTSource

        from serrate.runtime.triton import REGISTERS, fewer_stages
        from tests.codegen.gpu_targets import TARGETS

        target, function = TARGETS["sm_90"], kernel.function
        target.activate()
        aligned = {(k,): [["tt.divisibility", 16]] for k, kind in enumerate(kinds) if kind.startswith("*")}
        source = ASTSource(function, dict(zip(function.arg_names, kinds, strict=True)), {}, aligned)
        for options in fewer_stages(kernel._options):
            compiled = triton.compile(source, target=target.target, options=options)
            if compiled.metadata.shared <= target.shared:
                break
        found = _disassembled(compiled.asm["cubin"])
        if limit := kernel.limit(found.registers):
            limited = _disassembled(
                triton.compile(source, target=target.target, options={**options, REGISTERS: limit}).asm["cubin"]
            )
            found = found if limited.spills else limited
        count, loops = innermost_loops(found.sass)
        print(f"  {function.__name__}: {count} instructions, {found.registers} registers")
        for loop in loops:
            print(f"    loop of {loop.total()}: {', '.join(f'{n} {kind}' for kind, n in loop.most_common())}")


class Disassembled(NamedTuple):
    """A compiled kernel: its instructions, and the resources of a thread."""

    sass: str
    registers: int
    spills: bool


def _disassembled(cubin: bytes) -> Disassembled:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
        used = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", used), re.search(r"STACK:(\d+)", used)
    assert registers is not None
    return Disassembled(sass, int(registers[1]), bool(stack and int(stack[1])))


def main(names: Sequence[str]) -> None:
    os.environ.update(TRITON_INTERPRET="0", SERRATE_BACKEND="triton", SERRATE_TUNE="never")
    import torch

    from benchmarks.gpu_tasks import TASKS, data_of
    from serrate import fusion_stage
    from serrate.runtime import triton as runtime
    from serrate.runtime.derivation import Derivation
    from serrate.runtime.memory import Scratch
    from serrate.runtime.triton import TritonExecutable
    from serrate.tensor.structure import Structure

    counting, choose = Counting(), fusion_stage.choose
    names, known = [name for name in names if name != "--known"], "--known" in names
    runtime._copy_engine = lambda: True

    def as_many(rows: Any, target: Any, _: int = 1, **options: Any) -> Any:
        """The plan for as many rows as the benchmark has; only a share of them is allocated."""
        rows = rows and replace(rows, count=rows.count * share, total=rows.total * share, longest=rows.longest if known else None)
        return choose(rows, target, WORKERS, **options)

    def derived(self: Derivation, *_: Any) -> list[Scratch]:
        return [Scratch(torch.zeros(2, dtype=torch.int64), 0, (2,), torch.int64) for _ in range(1 + max(self.order))]

    with (
        mock.patch.object(fusion_stage, "choose", as_many),
        nullcontext() if known else mock.patch.object(Structure, "known_max_length", lambda self, level=-1: None),
        mock.patch.object(TritonExecutable, "sized", lambda self, *_: counting.executed(self)),
        mock.patch.object(Derivation, "__call__", derived),
    ):
        for name in names:
            task, dtype = name.split("/")
            print(name)
            share = max(TASKS[task].rows // 64, 1)
            work = TASKS[task].make(data_of(TASKS[task], "uniform", dtype, "cpu", rows=TASKS[task].rows // share))
            work.call(*work.arguments(work.data.tensor(told=known)))


if __name__ == "__main__":
    main(sys.argv[1:])
