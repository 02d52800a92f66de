"""The module around the kernels of a Triton program: helper functions, heads of functions, and how kernels are launched.

In: printed kernels. Out: the text of a module; `Launch`es, which say what each kernel takes and how many programs it has.
"""

from __future__ import annotations

import builtins
import functools
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serrate.analysis.boxes import MatrixBox, box_of
from serrate.codegen.names import Reserved, identifier
from serrate.ir.expr import Array, Expr, Symbol
from serrate.ir.loops import Boxed, Dot, LoopProgram
from serrate.ir.values import Tensor

PRELUDE = (Path(__file__).parent / "prelude.txt").read_text()
"""The prelude of generated modules: imports, then helper functions, whose names begin with `HELPER`."""
HELPER = "sr_"
LIBDEVICE = "from triton.language.extra import libdevice"
INTERPRETED_LIBDEVICE = "from serrate.codegen.triton import interpreted_libdevice as libdevice"
RESERVED = Reserved(
    frozenset((*keyword.kwlist, *dir(builtins), "tl", "triton", "libdevice", "position", "first", "step")),
    re.compile(rf"v\d+|{HELPER}\w*|__\w*"),
    ("_at", "_now", "_next"),
)
"""Names that a program may not use, because generated modules use them."""


@functools.cache
def _prelude() -> tuple[str, dict[str, str]]:
    """The imports, and the text of each function by name."""
    imports, *functions = PRELUDE.rstrip().split("\n\n\n")
    return imports, {text.split("def ", 1)[1].split("(", 1)[0]: text for text in functions}


def with_helpers(code: str, *, interpreted: bool = False) -> str:
    """The code after its imports and the helper functions that it calls, directly or indirectly."""
    imports, functions = _prelude()
    wanted: set[str] = set()
    pending = [code]
    while pending:
        new = {*re.findall(rf"\b{HELPER}\w+", pending.pop())} & functions.keys() - wanted
        wanted |= new
        pending += (functions[name] for name in new)
    called = [text for name, text in functions.items() if name in wanted]
    if any("libdevice." in text for text in (code, *called)):
        imports += f"\n{INTERPRETED_LIBDEVICE if interpreted else LIBDEVICE}"
    return "\n\n\n".join([imports, *called, code])


def function_name(name: str) -> str:
    """The name of a kernel's function: the kernel's, unless a helper or Python reserves it. Nothing in PTX is called `_`."""
    plain = identifier(name)
    return f"program_{plain}" if plain == "_" or RESERVED.keeps(plain, ()) else plain


@dataclass(frozen=True)
class Descriptor:
    """A tensor as a matrix of `rows` x `columns`, from which a copy engine reads blocks."""

    tensor: Tensor
    rows: Expr
    columns: Expr
    block: tuple[int, int]


@dataclass(frozen=True)
class Launch:
    """One kernel: its function, its arguments in order, and the number of programs to launch."""

    function: str
    tensors: tuple[Tensor, ...]
    arrays: tuple[Array, ...]
    descriptors: tuple[Descriptor, ...]
    symbols: tuple[Symbol, ...]
    grid: tuple[Expr, ...] | None
    """The extents of the grid in which each program takes one position; None for a kernel without one."""
    shared: tuple[Expr, ...] | None
    """The extents of the grid that programs share, so that fewer suffice; None for a kernel without one."""
    resident: bool
    """Whether programs stay on their multiprocessor and compute one block of a matrix product after another."""
    stages: int | None
    """How many blocks the loops with matrix products keep in flight; None without products."""


@dataclass(frozen=True)
class TritonSource:
    """A module's text and its launches, in order; `program` has the tensors and symbols under their names in the module."""

    program: LoopProgram
    text: str
    launches: tuple[Launch, ...]


def argument_names(launch: Launch, names: Mapping[Array, str]) -> list[str]:
    """The names of a kernel's arguments, in order."""
    boxes = box_names(launch.descriptors).values()
    return [*(t.name for t in launch.tensors), *(names[a] for a in launch.arrays), *boxes, *map(str, launch.symbols)]


def signature_line(launch: Launch, names: Mapping[Array, str], more: Sequence[str] = ()) -> str:
    """The head of a kernel's function; `more` are its last arguments."""
    fixed = ", ".join(f'"{s}"' for s in launch.symbols)
    arguments = ", ".join([*argument_names(launch, names), *more])
    return f"@triton.jit(do_not_specialize=[{fixed}])\ndef {launch.function}({arguments}):\n"


def descriptors_of(dot: Dot) -> Iterator[Descriptor]:
    """The descriptors of the boxes of a product."""
    rows, columns, depth = dot.lanes
    for value, lane in ((dot.left, rows), (dot.right, columns)):
        if isinstance(value, Boxed) and (box := box_of(value, (lane, depth))) is not None:
            yield descriptor_of(value.tensor, box)


def box_names(descriptors: Iterable[Descriptor]) -> dict[Descriptor, str]:
    """The descriptors that boxes are read from, without duplicates, and their argument names."""
    names: dict[Descriptor, str] = {}
    for descriptor in descriptors:
        alike = sum(d.tensor is descriptor.tensor for d in names if d != descriptor)
        names.setdefault(descriptor, f"{descriptor.tensor.name}_box{alike + 1 if alike else ''}")
    return names


def descriptor_of(tensor: Tensor, box: MatrixBox) -> Descriptor:
    """The descriptor of a box of a tensor."""
    row, column = box.sides
    return Descriptor(tensor, box.rows, box.columns, (row.size, column.size))
