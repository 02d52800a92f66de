"""Host code: the Python function that allocates the memory of a program on a GPU and launches its kernels.

In: the sizes of a program's tensors, its symbols and its grids, as expressions in the numbers of a call; its compiled kernels.
Out: a function of a call's numbers and memory. Batches often differ in all of their sizes, so little can be kept from one call to
the next; straight-line code computes sizes, addresses and grids in a few microseconds. For a sum of rows:

    def run(numbers, inputs, arrays):
        t0, t1 = inputs
        a0, a1 = arrays
        s0, s1 = numbers[1], numbers[0]
        p0 = t0.data_ptr() or no_address(t0)
        p1 = t1.data_ptr() or no_address(t1)
        t2 = empty((max(0, numbers[1] - 1), max(0, 128)), dtype=dtype2, device=device)
        p2 = t2.data_ptr() or no_address(t2)
        if (p0 | p1 | p2 | a0 | a1) & 15 or max(s0, s1) >> 31 or is_hooked():
            return None
        now = stream()
        g0 = s0 - 1
        if g0:
            run0(g0, 1, 1, now, function0, metadata0, None, None, None, p0, p2, a0, a1, s0, s1)
        return (t0, t1, t2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from serrate.ir.expr import Expr, Symbol
from serrate.ir.size_functions import python_text
from serrate.runtime.memory import ALIGNMENT, Scratch, no_address

HostCode = Callable[[Sequence[int], Sequence[torch.Tensor], Sequence[int]], tuple[torch.Tensor, ...] | None]
"""Runs a program, given the numbers of a call, the tensors that the program takes, and the addresses of its arrays. Returns these
tensors and the outputs; None, and nothing was launched, if these kernels cannot serve the call."""


class HostBox(NamedTuple):
    """A tensor from which a kernel reads boxes: its number, and its shape as a matrix in the program's symbols."""

    tensor: int
    rows: Expr
    columns: Expr


class HostLaunch(NamedTuple):
    """A compiled kernel, and what it is launched with."""

    programs: Expr
    """How many programs are launched, in the program's symbols."""
    run: Callable[..., None]
    function: Any
    metadata: Any
    """As in `LoadedKernel`."""
    memory: Sequence[int]
    """The tensors that it takes, and after these the arrays, by number."""
    boxes: Sequence[HostBox]
    symbols: Sequence[int]


class Allocated(NamedTuple):
    """A tensor that is allocated for a call."""

    shape: Sequence[Expr]
    dtype: torch.dtype
    is_output: bool
    """Otherwise it is scratch."""


class Boxes(NamedTuple):
    """What launches with boxes need: how a matrix in memory is passed, its most rows, and the alignment of its address."""

    matrix: Callable[[int, tuple[int, int]], Any]
    farthest: int
    alignment: int


class HostProgram(NamedTuple):
    """A compiled program, and all that its host code depends on."""

    numbers: Sequence[Symbol]
    """Those of a call."""
    symbols: Sequence[tuple[Symbol, Expr]]
    """The program's, each with its value in terms of the numbers."""
    inputs: int
    """How many tensors it takes."""
    allocated: Sequence[Allocated]
    arrays: int
    """How many arrays it reads."""
    launches: Sequence[HostLaunch]
    boxes: Boxes


def host_code(
    program: HostProgram, device: torch.device, *, stream: Callable[[], int], is_hooked: Callable[[], bool]
) -> HostCode:
    """The function that runs a program on a device."""
    names = {**_common(device, stream, is_hooked), "matrix": program.boxes.matrix}
    names |= {f"dtype{k}": each.dtype for k, each in enumerate(program.allocated, program.inputs)}
    for k, launch in enumerate(program.launches):
        names |= {f"run{k}": launch.run, f"function{k}": launch.function, f"metadata{k}": launch.metadata}
    made: HostCode = _defined("numbers, inputs, arrays", _lines(program), names)
    return made


def _lines(program: HostProgram) -> list[str]:
    """The lines of the function."""
    numbers, symbols, inputs, allocated, arrays, launches, boxes = program
    given = {s.name: f"numbers[{k}]" for k, s in enumerate(numbers)}
    own = {s.name: f"s{k}" for k, (s, _) in enumerate(symbols)}
    lines = [_unpacked("t", inputs, "inputs"), _unpacked("a", arrays, "arrays")]
    if symbols:
        lines.append(f"{_names('s', len(symbols))} = {_listed(python_text(value, given) for _, value in symbols)}")
    lines += [f"p{k} = t{k}.data_ptr() or no_address(t{k})" for k in range(inputs)]
    end, scratch = "0", list[str]()
    for k, (shape, dtype, is_output) in enumerate(allocated, inputs):
        sizes = [f"max(0, {python_text(size, given)})" for size in shape]
        if is_output:
            lines.append(f"t{k} = empty({_tuple(sizes)}, dtype=dtype{k}, device=device)")
            lines.append(f"p{k} = t{k}.data_ptr() or no_address(t{k})")
        else:
            # One allocation holds all scratch.
            bytes_of = " * ".join([*(f"{size}" for size in sizes), str(dtype.itemsize)])
            lines.append(f"e{k} = {end} + ({bytes_of} + {ALIGNMENT - 1} & -{ALIGNMENT})")
            scratch.append(f"p{k} = base + {end}" if end != "0" else f"p{k} = base")
            end = f"e{k}"
    if scratch:
        lines += [f"room = empty({end}, dtype=uint8, device=device)", "base = room.data_ptr()", *scratch]
    count = inputs + len(allocated)
    addresses = " | ".join([*(f"p{k}" for k in range(count)), *(f"a{k}" for k in range(arrays))]) or "0"
    wide = f" or max({_names('s', len(symbols))}) >> 31" if len(symbols) > 1 else " or s0 >> 31" if symbols else ""
    conditions = [f"({addresses}) & 15{wide} or is_hooked()"]
    for k, launch in enumerate(launches):
        for j, (tensor, rows, columns) in enumerate(launch.boxes):
            lines.append(f"m{k}_{j} = {python_text(rows, own)}, {python_text(columns, own)}")
            conditions.append(f"not 0 < m{k}_{j}[0] < {boxes.farthest} or p{tensor} % {boxes.alignment}")
    lines += [f"if {' or '.join(conditions)}:", "    return None", "now = stream()"]
    for k, launch in enumerate(launches):
        memory = [f"p{place}" if place < count else f"a{place - count}" for place in launch.memory]
        matrices = [f"matrix(p{tensor}, m{k}_{j})" for j, (tensor, _, _) in enumerate(launch.boxes)]
        arguments = ", ".join([*memory, *matrices, *(f"s{place}" for place in launch.symbols)])
        lines.append(f"g{k} = {python_text(launch.programs, own)}")
        lines.append(f"if g{k}:")
        lines.append(f"    run{k}(g{k}, 1, 1, now, function{k}, metadata{k}, None, None, None, {arguments})")
    outputs = [f"t{k}" for k, each in enumerate(allocated, inputs) if each.is_output]
    return [*lines, f"return {_tuple([*(f't{k}' for k in range(inputs)), *outputs])}"]


# --- derived arrays ------------------------------------------------------------------------------------------------------


DerivationCode = Callable[[Sequence[int], Sequence[torch.Tensor]], list[Scratch] | None]
"""Derives arrays, given their sizes, other numbers, and the tensors that they are derived from. None, and nothing was
launched, if these kernels cannot serve the call."""


class DerivationKernels(NamedTuple):
    """The compiled kernels of a derivation, those that it has; each as in `LoadedKernel`."""

    block_sums: tuple[Callable[..., None], Any, Any] | None
    running_sums: tuple[Callable[..., None], Any, Any] | None
    tables: tuple[Callable[..., None], Any, Any] | None
    all_arrays: tuple[Callable[..., None], Any, Any] | None


class DerivationSizes(NamedTuple):
    """How many components and entries of a table a program takes, and for how many programs one kernel derives everything."""

    components: int
    block: int
    few_blocks: int


def derivation_code(
    inputs: int,
    sums: int,
    tables: int,
    symbols: int,
    kernels: DerivationKernels,
    device: torch.device,
    *,
    sizes: DerivationSizes,
    stream: Callable[[], int],
    is_hooked: Callable[[], bool],
) -> DerivationCode:
    """The function that derives so many running sums and tables, which are in this order, in one allocation."""
    made = sums + tables
    sizes_of = [f"c{k}" for k in range(made)]
    lines = [_unpacked("t", inputs, "inputs"), ", ".join([*sizes_of, *(f"s{k}" for k in range(symbols))]) + ", = numbers"]
    lines += [f"p{k} = t{k}.data_ptr() or no_address(t{k})" for k in range(inputs)]
    longest, largest = ", ".join(sizes_of[:sums]), ", ".join(sizes_of[sums:])
    lines.append(f"components = -(-(max({longest}, 0) - 1) // {sizes.components}) or 1" if sums else "components = 1")
    lines.append(f"blocks = -(-max({largest}, 0) // {sizes.block})" if tables else "blocks = 0")
    # The first is partial sums of blocks of components.
    lines.append(f"e0 = {sums} * components * 8 + {ALIGNMENT - 1} & -{ALIGNMENT}" if sums else f"e0 = {ALIGNMENT}")
    lines += [f"e{k + 1} = e{k} + (max(c{k}, 2) * 8 + {ALIGNMENT - 1} & -{ALIGNMENT})" for k in range(made)]
    counts = [f"t{k}.numel()" for k in range(inputs)]
    lines.append(f"n = [{', '.join([*(f's{k}' for k in range(symbols)), *counts])}]")
    addresses = " | ".join(f"p{k}" for k in range(inputs)) or "0"
    lines += [f"if ({addresses}) & 15 or max(n, default=0) >> 31 or is_hooked():", "    return None"]
    # There are at least two elements: even without components, code may ask for the length of the first.
    lines.append(f"allocate = empty if min({', '.join([*sizes_of, '2'])}) > 1 else zeros")
    lines += [f"memory = allocate(e{made}, dtype=uint8, device=device)", "base = memory.data_ptr()", "now = stream()"]
    given = [f"p{k}" for k in range(inputs)]
    places = [f"base + e{k}" for k in range(made)]

    def launch(name: str, grid: str, memory: Sequence[str]) -> str:
        arguments = ", ".join([*given, *memory])
        return f"{name}({grid}, 1, now, {name}_function, {name}_metadata, None, None, None, {arguments}, *n)"

    several = []
    if sums:
        grid = f"components, {sums}"
        several += ["if components > 1:", f"    {launch('block_sums', grid, ['base'])}"]
        several.append(launch("running_sums", grid, ["base", *places[:sums]]))
    if tables:
        several += ["if blocks:", f"    {launch('tables', f'blocks, {tables}', places)}"]
    if kernels.all_arrays is not None:
        lines.append(f"if components == 1 and 0 < blocks <= {sizes.few_blocks}:")
        lines.append(f"    {launch('all_arrays', f'blocks, {tables}', places)}")
        lines.append("else:")
        several = [f"    {line}" for line in several]
    lines += several
    arrays = ", ".join(f"Scratch(memory, e{k}, (max(c{k}, 2),), int64)" for k in range(made))
    lines.append(f"return [{arrays}]")
    names = {**_common(device, stream, is_hooked), "int64": torch.int64, "zeros": torch.zeros, "Scratch": Scratch}
    for name, kernel in zip(DerivationKernels._fields, kernels, strict=True):
        if kernel is not None:
            names |= {name: kernel[0], f"{name}_function": kernel[1], f"{name}_metadata": kernel[2]}
    function: DerivationCode = _defined("numbers, inputs", lines, names)
    return function


# --- text ----------------------------------------------------------------------------------------------------------------


def _common(device: torch.device, stream: Callable[[], int], is_hooked: Callable[[], bool]) -> dict[str, Any]:
    """Names that all host code uses."""
    names: dict[str, Any] = {"empty": torch.empty, "device": device, "uint8": torch.uint8, "no_address": no_address}
    return names | {"stream": stream, "is_hooked": is_hooked}


def _defined(parameters: str, lines: Sequence[str], names: dict[str, Any]) -> Any:
    """The function with these parameters and lines."""
    text = f"def run({parameters}):\n" + "".join(f"    {line}\n" for line in lines if line)
    exec(compile(text, "<host code>", "exec"), names)
    return names["run"]


def _names(letter: str, count: int) -> str:
    return ", ".join(f"{letter}{k}" for k in range(count)) + ("," if count == 1 else "")


def _unpacked(letter: str, count: int, source: str) -> str:
    return f"{_names(letter, count)} = {source}" if count else ""


def _listed(texts: Sequence[str] | Any) -> str:
    found = [*texts]
    return ", ".join(found) + ("," if len(found) == 1 else "")


def _tuple(texts: Sequence[str]) -> str:
    return f"({_listed(texts)})" if texts else "()"
