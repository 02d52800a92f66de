"""Loop programs as Triton: grid loops are programs, serial loops are loops, blocks are block operations.

In: a loop program. Out: Python source of one module with a `@triton.jit` function for each kernel, and how to launch them.
Only `triton.language` is used, and the device's math library through it. Lanes are `tl.arange`s; a value has its own lanes and is
broadcast to a statement's.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import keyword
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from serrate.analysis.boxes import MatrixBox, box_of
from serrate.codegen.expressions import OPERATORS, Spelling, divisor, written
from serrate.codegen.names import Reserved, identifier, renamed, spellings
from serrate.codegen.triton.addresses import is_narrow, multiplied, place_of, reach
from serrate.errors import VerificationError
from serrate.ir.conditions import conditions_of
from serrate.ir.expr import Array, Element, Expr, Less, Search, Sum, Symbol, const, minimum
from serrate.ir.expr import symbol as new_symbol
from serrate.ir.loops import (
    Assign,
    Bind,
    Boxed,
    Declare,
    Dot,
    Existing,
    Fold,
    For,
    Guard,
    Held,
    If,
    Lane,
    Lanes,
    Load,
    Local,
    LoopKernel,
    LoopProgram,
    Node,
    Number,
    Prefetch,
    Reduce,
    Running,
    While,
    Write,
    bodies,
    expressions_of,
    factors_of,
    held,
    nodes,
    values_of,
    written_by,
)
from serrate.ir.reductions import Reduction, reduction
from serrate.ir.solve import end_of, factor_of, possible, terms_of
from serrate.ir.tile import GRID
from serrate.ir.values import LIBRARY_BINARY, LIBRARY_UNARY, Call, Constant, Role, Tensor, Value, carried_dtype
from serrate.lower.names import array_names

TYPES: dict[torch.dtype, str] = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}
LIBDEVICE_UNARY = ("tanh", *(name for name in LIBRARY_UNARY if name != "digamma"))
LIBDEVICE_BINARY = ("pow", "fmod", *LIBRARY_BINARY)
"""Functions of floating point that the device's math library has under these names."""
FUNCTIONS: dict[str, str] = {
    **{n: f"tl.{n}({{0}})" for n in ("exp", "log", "rsqrt", "sigmoid", "erf", "floor", "ceil", "abs", "sin", "cos")},
    **{n: f"libdevice.{n}({{0}})" for n in LIBDEVICE_UNARY},
    **{n: f"libdevice.{n}({{0}}, {{1}})" for n in LIBDEVICE_BINARY},
    **{n: f"sr_{n}({{0}}, {{1}})" for n in ("bitand", "bitor", "bitxor", "shl", "shr", "gcd")},
    "digamma": "sr_digamma({0})",
    "sqrt": "tl.sqrt_rn({0})",
    **OPERATORS,
    # The interpreter supports `&` of two blocks or of two scalars, but not of one of each.
    "logical_and": "tl.where({0}, {1}, False).to(tl.int1)",
    "logical_or": "tl.where({0}, True, {1}).to(tl.int1)",
    "logical_not": "tl.where({0}, False, True).to(tl.int1)",
    "reciprocal": "(1.0 / {0})",
    "where": "tl.where({0}, {1}, {2})",
    "maximum": "sr_largest({0}, {1})",
    "minimum": "sr_smallest({0}, {1})",
    "relu": "tl.where({0} < 0, 0, {0})",
    "silu": "({0} * tl.sigmoid({0}))",
    "gelu": "({0} * 0.5 * (1.0 + tl.erf({0} * 0.7071067811865476)))",
    "floordiv": "sr_whole_div({0}, {1})",
    "rem": "sr_whole_rem({0}, {1})",
    "random_bits": "sr_random_bits({0}, {1}, {2})",
    "exp_below": "sr_exp_below({0}, {1})",
    "exp_diff": "sr_exp_diff({0}, {1})",
}
SPECIAL: dict[tuple[str, str], str] = {
    ("floor", "integer"): "{0}",
    ("ceil", "integer"): "{0}",
    ("pow", "integer"): "sr_whole_power({0}, {1})",
    ("sqrt", "double"): "tl.sqrt({0})",
    # `/` of float32 is an approximation on a GPU.
    ("div", "single"): "tl.div_rn({0}, {1})",
    ("reciprocal", "single"): "tl.div_rn(1.0, {0})",
    ("exp_below", "double"): "tl.exp({0} - {1})",
    ("exp_diff", "double"): "tl.exp({0} - sr_finite({1}))",
    ("digamma", "single"): "sr_digamma({0}).to(tl.float32)",
}
"""Functions that are written differently for integers, float64 or float32."""


def _kind(dtype: torch.dtype) -> str:
    if not dtype.is_floating_point:
        return "integer"
    return "double" if dtype == torch.float64 else "single"


POWERS = ("exp_diff", "exp_below")

COMBINE = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "sr_largest({0}, {1})",
    "min": "sr_smallest({0}, {1})",
    "any": "{0} | ({1})",
    "all": "{0} & ({1})",
}
SCANNED = {
    "sum": "sr_total",
    "prod": "sr_product",
    "max": "sr_largest",
    "min": "sr_smallest",
    "any": "sr_either",
    "all": "sr_both",
}
REDUCERS = {
    "sum": "tl.sum({0}, {1})",
    "prod": "tl.reduce({0}, {1}, sr_product)",
    "max": "tl.reduce({0}, {1}, sr_largest)",
    "min": "tl.reduce({0}, {1}, sr_smallest)",
    "any": "tl.reduce({0}, {1}, sr_either)",
    "all": "tl.reduce({0}, {1}, sr_both)",
}

PRELUDE = (Path(__file__).parent / "prelude.txt").read_text()
"""The prelude of generated modules: imports, then helper functions, whose names begin with `HELPER`."""
HELPER = "sr_"
LIBDEVICE = "from triton.language.extra import libdevice"
INTERPRETED_LIBDEVICE = "from serrate.codegen.triton import interpreted_libdevice as libdevice"
LEAST_PRODUCT = 16
"""The fewest rows, columns or depth that `tl.dot` takes."""
HALF = 1 << 30
"""Two numbers of at most this many add up in 32 bits."""
STAGES, ROW_STAGES = 4, 3
"""Blocks of a matrix product in flight: in a loop over as many as a number says, and over those of a row, which may be few."""
CHAINED_STAGES = (3, 2)
"""The same of products that feed each other: the first that lets two programs share a multiprocessor, else the last."""
HALF_SHARED = 113 << 10
"""Bytes of shared memory that each of two programs on a multiprocessor may have."""
IN_FLIGHT = 96 << 10
"""The most bytes that a loop which only reduces keeps in flight: they take shared memory."""
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


def _function_name(name: str) -> str:
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
    """The extents of a grid of which each program takes one position; None if there is none."""
    shared: tuple[Expr, ...] | None
    """The extents of a grid that programs share, so that fewer will do; None if there is none."""
    stages: int | None
    """How many blocks the loops with matrix products keep in flight; None without products."""


@dataclass(frozen=True)
class TritonSource:
    """A module's text and its launches, in order; `program` has the tensors and symbols under their names in the module."""

    program: LoopProgram
    text: str
    launches: tuple[Launch, ...]


def print_triton(
    program: LoopProgram, *, stages: Sequence[int] = (), boxes: bool = False, interpreted: bool = False
) -> TritonSource:
    """The program as a Triton module. Triton's interpreter multiplies 16-bit blocks wrongly, so it gets float32 blocks.

    `stages`: how many blocks the loops over rows keep in flight, for each kernel; 1 by default. `boxes`: whether a copy engine
    reads what it may read.
    """
    program, parts, launches = renamed(program, spellings(program, RESERVED)), [], []
    combiners: Combiners = {}
    maxima = _maxima(program)
    for kernel, flying in zip(program.kernels, stages or [1] * len(program.kernels), strict=True):
        grids = _grids(kernel)
        printers = [_TritonPrinter(program, each, flying, boxes, interpreted, combiners, maxima) for each in grids]
        text, launch = printers[0].run() if len(grids) == 1 else _joined(kernel, printers)
        parts.append(text)
        launches.append(launch)
    # Python reads the encoding of a module from its first lines, and would take `decoding: ...` for one.
    header = "".join(f"# {line}\n" for line in ("coding: utf-8", *program.header))
    code = "\n\n".join([*(text for _, text in combiners.values()), *parts])
    return TritonSource(program, header + with_helpers(code, interpreted=interpreted), tuple(launches))


def _joined(kernel: LoopKernel, printers: Sequence[_TritonPrinter]) -> tuple[str, Launch]:
    """A kernel with two grids: a function for each, and a kernel whose first programs share the first grid, while each of the
    others takes its position of the second. So no program waits for the size of a list before it reads its row. (Products are
    never joined, so no copy engine reads anything.)"""
    parts = [printer.run(alone=False) for printer in printers]
    (_, listed), (_, single) = parts
    assert listed.shared is not None and single.grid is not None
    names, each = printers[0].names, (listed, single)
    tensors = tuple(dict.fromkeys(t for launch in each for t in launch.tensors))
    arrays = tuple(dict.fromkeys(a for launch in each for a in launch.arrays))
    symbols = tuple(dict.fromkeys(s for launch in each for s in launch.symbols))
    stages = min((launch.stages for launch in each if launch.stages is not None), default=None)
    made = Launch(_function_name(kernel.name), tensors, arrays, (), symbols, single.grid, listed.shared, stages)
    positions = " * ".join(divisor(bound, printers[1].index) for bound in single.grid)
    lines = [
        *(f"    {s} = sr_wide({s})" for s in symbols),
        f"    step = tl.num_programs(0) - {positions}",
        "    first = tl.program_id(0).to(tl.int64)",
        "    if (first < step):",
        f"        {listed.function}({', '.join([*_arguments(listed, names), 'first', 'step'])})",
        "    else:",
        f"        {single.function}({', '.join([*_arguments(single, names), 'first - step'])})",
    ]
    return "\n\n".join([*(text for text, _ in parts), _head(made, names) + "\n".join(lines) + "\n"]), made


def _arguments(launch: Launch, names: dict[Array, str]) -> list[str]:
    """The names of a kernel's arguments, in order."""
    boxes = _box_names(launch.descriptors).values()
    return [*(t.name for t in launch.tensors), *(names[a] for a in launch.arrays), *boxes, *map(str, launch.symbols)]


def _head(launch: Launch, names: dict[Array, str], more: Sequence[str] = ()) -> str:
    fixed = ", ".join(f'"{s}"' for s in launch.symbols)
    arguments = ", ".join([*_arguments(launch, names), *more])
    return f"@triton.jit(do_not_specialize=[{fixed}])\ndef {launch.function}({arguments}):\n"


def _grids(kernel: LoopKernel) -> list[LoopKernel]:
    """The kernel, or a part of it for each of its grids if it has several."""
    ends = [k + 1 for k, n in enumerate(kernel.body) if isinstance(n, For) and n.kind is GRID]
    if len(ends) < 2:
        return [kernel]
    bodies = [kernel.body[begin:end] for begin, end in itertools.pairwise((0, *ends))]
    return [LoopKernel(f"{kernel.name}_{k}", body) for k, body in enumerate(bodies)]


def _clamped(text: str, e: Element, go: Callable[[Expr], str]) -> str:
    """An element of an array, clamped to its bounds."""
    return text if e.most is None else f"tl.maximum(tl.minimum({text}, {go(e.most)}), 0)"


Combiners = dict[tuple[Reduction, tuple[torch.dtype, ...]], tuple[str, str]]
"""Combine functions, by reduction and state dtypes: name and text."""


class _TritonPrinter:
    def __init__(
        self,
        program: LoopProgram,
        kernel: LoopKernel,
        stages: int,
        boxes: bool,
        interpreted: bool,
        combiners: Combiners,
        maxima: frozenset[Tensor],
    ) -> None:
        self.program, self.kernel, self.interpreted, self.combiners = program, kernel, interpreted, combiners
        self.maxima = maxima
        self.stages, self.boxes = stages, boxes
        self.descriptors: dict[Descriptor, str] = {}
        """What boxes are read from, and the names of these arguments."""
        self.names: dict[Array, str] = {a: f"{name}_at" for a, name in array_names(program).items()}
        self.lines: list[str] = []
        self.indent = 1
        self.count = 0
        self.lanes_of: dict[Symbol, Lanes] = {}
        self.last: dict[Symbol, int] = {}
        """The last value of all that is counted in 32 bits: lanes, and loops whose extent is a number."""
        self.multiplied: set[Symbol] = set()
        """What addresses multiply."""
        self.compared: dict[Lane, str] = {}
        """Lanes that masks compare, and the names of the same lanes of the next block."""
        self.variables: dict[Symbol, str] = {}
        self.single: dict[Symbol, str] = {}
        """Lanes that a loop runs over, one at a time: what holds all their positions."""
        self.shared: dict[tuple[int, Lanes, Guard], str] = {}
        self.kept: list[Value] = []
        self.narrow: set[str] = set()
        """Private blocks that are products of 16-bit blocks."""
        self.factors: dict[tuple[int, Lanes, Guard], str] = {}
        """Blocks of products that were read before the loop."""
        self.read_blocks: dict[tuple[int, frozenset[Lane], Guard], tuple[str, Lanes]] = {}
        """Blocks of products that were read in the body at hand, and their lanes: another product may take one transposed."""
        self.preferred: dict[int, float] = {}
        """What loads, by id, should give where their statement is masked off."""
        self.others: dict[str, float] = {}
        """What blocks hold there, by name, if that is known."""
        self.absent: dict[str, tuple[Guard, float]] = {}
        """What private blocks hold where a guard fails."""

    def run(self, *, alone: bool = True) -> tuple[str, Launch]:
        """The text of a function, and its launch. Unless it is `alone`, it is told which of how many programs it is: the `first`
        position that it takes of the grid, and the `step` from there to its next one if programs share the grid."""
        kernel, body = self.kernel, self.kernel.body
        every = list(nodes(body))
        tensors = self._tensors(every)
        arrays = self._arrays(every)
        symbols = self._symbols(every)
        self.descriptors = _box_names(d for n in every if self.boxes and isinstance(n, Dot) for d in _descriptors(n))
        lanes = dict.fromkeys(lane for n in every for lane in (*getattr(n, "lanes", ()), *_counted(n)))
        self.blocks = {n.local.name: n.local for n in every if isinstance(n, Declare)}
        self.last_reads, self.loop = _last_reads(body), 0
        self.written = {n.tensor for n in every if isinstance(n, Write)}
        for lane in lanes:
            self.lanes_of[lane.symbol] = (lane,)
            # Two loops over one domain may have blocks of different sizes.
            taken = lane.symbol.name in self.variables.values()
            self.variables[lane.symbol] = f"{lane.symbol}_{lane.size}" if taken else lane.symbol.name
            self.last[lane.symbol] = lane.size - 1
            self.put(f"{self.variables[lane.symbol]} = tl.arange(0, {lane.size})")
        self.multiplied = multiplied(every)
        # A number that fits 32 bits is passed in 32, and its product with another need not fit.
        for s in symbols:
            self.put(f"{s} = sr_wide({s})")
        grid, shared = self._body(body, alone)
        self.lines[: len(lanes)] += [
            f"    {name} = tl.arange({lane.size}, {2 * lane.size})" for lane, name in self.compared.items()
        ]
        described = tuple(self.descriptors)
        launch = Launch(_function_name(kernel.name), tensors, arrays, described, symbols, grid, shared, _stages(body))
        more = () if alone else ("first",) if shared is None else ("first", "step")
        return _head(launch, self.names, more) + "\n".join(self.lines) + "\n", launch

    # --- what a kernel takes -----------------------------------------------------------------------------------------

    def _tensors(self, every: list[Node]) -> tuple[Tensor, ...]:
        found: dict[Tensor, None] = {}
        for node in every:
            found.update((v.tensor, None) for value in values_of(node) for v in value.walk() if isinstance(v, Load))
            if isinstance(node, Write):
                found[node.tensor] = None
        return tuple(found)

    def _arrays(self, every: list[Node]) -> tuple[Array, ...]:
        found: dict[Array, None] = {}
        for node in every:
            for expr in (*expressions_of(node), *self._strides(node)):
                for e in expr.walk():
                    if isinstance(e, Element | Search) and not e.array.local:
                        found[e.array] = None
        return tuple(found)

    def _strides(self, node: Node) -> list[Expr]:
        """The extents in the strides of a statement's tensors."""
        return [d.extent_expr for tensor in self._tensors([node]) for d in tensor.storage[1:]]

    def _symbols(self, every: list[Node]) -> tuple[Symbol, ...]:
        given = set(self.program.symbols)
        found: dict[Symbol, None] = {}
        for node in every:
            exprs = [*expressions_of(node), *([node.bound] if isinstance(node, For) else []), *self._strides(node)]
            found.update((s, None) for e in exprs for s in sorted(e.symbols, key=str) if s in given)
        return tuple(found)

    # --- text ----------------------------------------------------------------------------------------------------------

    def put(self, line: str) -> None:
        self.lines.append("    " * self.indent + line)

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def spread(self, name: str, own: Lanes, lanes: Lanes) -> str:
        """A block reshaped to broadcast over a statement's lanes."""
        if not own or own == lanes:
            return name
        order = [own.index(lane) for lane in lanes if lane in own]
        if order != sorted(order):
            name = f"tl.permute({name}, ({', '.join(map(str, order))}))"
        return f"{name}[{', '.join(':' if lane in own else 'None' for lane in lanes)}]"

    def index(self, expr: Expr, lanes: Lanes = ()) -> str:
        """An index expression; symbols with lanes are broadcast over `lanes`."""
        narrow = is_narrow(expr, self.last)

        def symbol(s: Symbol) -> str:
            own = self.lanes_of.get(s, ())
            text = self.spread(self.variables.get(s, s.name), own, lanes)
            return text if narrow or s not in self.last else f"sr_wide({text})"

        spelling = Spelling(
            helper=HELPER,
            divide="//",
            minimum="tl.minimum",
            maximum="tl.maximum",
            symbol=symbol,
            element=lambda e, go: _clamped(self._element(e, lanes, go), e, go),
            search=self._search,
        )
        return written(expr, spelling)

    def _element(self, e: Element, lanes: Lanes, go: Callable[[Expr], str]) -> str:
        """An element of an array in memory, or of a private block of indices."""
        if not e.array.local:
            return f"tl.load({self.names[e.array]} + {go(e.index)}).to(tl.int64)"
        block = self.blocks[e.array.name]
        text = self.spread(block.name, _places(e.index, block), lanes)
        return text if block.dtype == torch.int64 else f"{text}.to(tl.int64)"

    def _search(self, e: Search, go: Callable[[Expr], str]) -> str:
        name = "sr_owners" if self.lanes_in(e.position) | self.lanes_in(e.first) else "sr_owner"
        row = "" if e.first.value == 0 else f" + {go(e.first)}"
        # The search is as wide as its positions, so they are broadcast if only their rows have lanes.
        wide = f" + {go(e.first)} * 0" if self.lanes_in(e.first) - self.lanes_in(e.position) else ""
        return f"{name}({self.names[e.array]}{row}, {go(e.count)}, {go(e.position)}{wide})"

    def lanes_in(self, expr: Expr) -> set[Lane]:
        """The lanes that an index depends on."""
        return {lane for s in expr.symbols for lane in self.lanes_of.get(s, ())}

    # --- loops -----------------------------------------------------------------------------------------------------------

    def _body(self, body: Sequence[Node], alone: bool) -> tuple[tuple[Expr, ...] | None, tuple[Expr, ...] | None]:
        """Names before the grid, the grid itself as program ids, and the body of each program. Returns the bounds of the grid: of
        one program for each position, or of one that programs share."""
        body = list(body)
        while body and isinstance(body[0], Bind):
            self._node(body.pop(0))
        heads: list[Bind | For] = []
        while (loop := _only_loop(body)) is not None and not loop.bound.symbols & {
            n.symbol for n in heads if isinstance(n, Bind)
        }:
            heads += (n for n in body if isinstance(n, Bind | For))
            body = list(loop.body)
        loops = [n for n in heads if isinstance(n, For)]
        shared = any(loop.sparse for loop in loops)
        first, step = ("tl.program_id(0).to(tl.int64)", "tl.num_programs(0)") if alone else ("first", "step")
        if shared:
            extents = " * ".join(self.index(loop.extent if loop.sparse else loop.bound) for loop in loops)
            self.put(f"for position in range({first}, {extents}, {step}):")
            self.indent += 1
        elif loops:
            self.put(f"position = {first}")
        rest = "position"
        for k, loop in reversed(list(enumerate(loops))):
            count = divisor(loop.bound, self.index)
            self.put(f"{loop.symbol} = {rest}{f' % {count}' if k else ''}")
            rest = f"({rest} // {count})"
        for head in heads:
            if isinstance(head, Bind):
                self._node(head)
            elif head.bound is not head.extent and not head.sparse:
                self.put(f"if ({head.symbol} < {self.index(head.extent)}):")
                self.indent += 1
        self._nodes(body)
        bounds = tuple(loop.bound for loop in loops)
        return (None, bounds) if shared else (bounds, None)

    def _nodes(self, body: Sequence[Node]) -> None:
        for node in body:
            self._node(node)

    def _node(self, node: Node) -> None:
        if isinstance(node, For):
            extent = self.index(node.extent)
            outer, self.loop = self.loop, id(node)
            self._factors_before(node)
            with self._one_lane(node.symbol, node.extent - 1) as name:
                self._under(f"for {name} in {self._range(node, extent)}:", node.body)
            self.loop = outer
        elif isinstance(node, Bind):
            self._bind(node)
        elif isinstance(node, Declare):
            kind = TYPES[carried_dtype(node.local.dtype)]
            number = _number(0 if node.number is None else node.number)
            if node.local.lanes:
                self.put(f"{node.local.name} = tl.full({_shape(node.local.lanes)}, {number}, {kind})")
            else:
                self.put(f"{node.local.name} = tl.full([], {number}, {kind})")
            self._forget(node.local.name)
            self.absent[node.local.name] = (), 0 if node.number is None else node.number
        elif isinstance(node, If):
            self._if(node)
        elif isinstance(node, While):
            self._nodes(node.test)
            self._under(f"while {self._all(node.guard)}:", (*node.body, *node.test))
        elif not isinstance(node, Prefetch):
            self._block(node)

    def _range(self, node: For, extent: str) -> str:
        """What a loop runs over; loads of blocks that only a reduction needs are kept in flight."""
        if node.brief:
            return f"tl.range(0, {extent}, num_stages=1)"
        stages = min(self.stages, IN_FLIGHT // max(_bytes_of(node.body), 1))
        pipelined = stages > 1 and all(isinstance(n, Reduce | Declare | Bind) for n in node.body)
        return f"tl.range(0, {extent}, num_stages={stages})" if pipelined else f"range(0, {extent})"

    def _factors_before(self, node: For) -> None:
        """Reads the blocks of products in a loop that are the same in all its iterations."""
        inside = list(nodes((node,)))
        changing = {n.symbol for n in inside if isinstance(n, For | Bind)}
        written = {n.tensor for n in inside if isinstance(n, Write)}
        for dot in (n for n in node.body if isinstance(n, Dot)):
            rows, columns, depth = dot.lanes
            for value, lanes in ((dot.left, (rows, depth)), (dot.right, (depth, columns))):
                if not isinstance(value, Load) or value.tensor in written or self.interpreted:
                    continue
                own = self._own(dot.guard, lanes)
                if (id(value), lanes, own) in self.factors:
                    continue
                exprs = [*value.index, *(side for g in (*own, *value.guard) for side in (g.left, g.right))]
                locals_ = any(isinstance(e, Element) and e.array.local for x in exprs for e in x.walk())
                plain = self._pointer(value.tensor, value.index, lanes)[1] == set(lanes)
                if plain and not locals_ and not changing & {s for e in exprs for s in e.symbols}:
                    self.factors[id(value), lanes, own] = self.value(value, lanes, own, raw=True)

    @contextlib.contextmanager
    def _one_lane(self, s: Symbol, last: Expr) -> Iterator[str]:
        """What a loop index is called, given its last value. Where it counts the lanes of a block, statements in the loop are
        about that lane alone."""
        lanes, variable, before = self.lanes_of.pop(s, None), self.variables.get(s, s.name), self.last.pop(s, None)
        if lanes:
            self.variables[s] = f"{s}_now"
            self.single[s] = variable
        if (most := reach(last, self.last)) is not None:
            self.last[s] = most
        yield self.variables.get(s, s.name)
        self.last.pop(s, None)
        if lanes:
            self.lanes_of[s], self.variables[s] = lanes, variable
            del self.single[s]
        if before is not None:
            self.last[s] = before

    def _if(self, node: If) -> None:
        outer = self.loop
        if any(loop == id(node) for loop, _ in self.last_reads):
            self.loop = id(node)
        if node.then:
            self._under(f"if {self._all(node.guard)}:", node.then)
        if node.other:
            self._under("else:" if node.then else f"if not ({self._all(node.guard)}):", node.other)
        self.loop = outer

    def _all(self, guard: Guard) -> str:
        return " & ".join(f"({self._condition(g, ())})" for g in guard) or "True"

    def _under(self, head: str, body: Sequence[Node]) -> None:
        """Statements inside a loop or a branch; values computed there are not reused after it."""
        self.put(head)
        self.indent += 1
        outer, self.shared = self.shared, {}
        blocks, self.read_blocks = self.read_blocks, {}
        factors = {**self.factors}
        for local in (x for node in nodes(tuple(body)) for x in written_by(node)):
            # In a second iteration it holds what the first has left.
            self.absent.pop(local.name, None)
        with contextlib.ExitStack() as scope:
            for node in body:
                if isinstance(node, Bind) and not node.lanes and self.lanes_of.get(node.symbol):
                    scope.enter_context(self._one_lane(node.symbol, node.expr))
                self._node(node)
        if not body or all(isinstance(n, Prefetch) for n in body):
            self.put("pass")
        self.shared, self.factors, self.read_blocks = outer, factors, blocks
        self.indent -= 1
        for node in nodes(tuple(body)):
            for local in (*written_by(node), *([node.local] if isinstance(node, Declare) else [])):
                self._forget(local.name)

    def _block(self, node: Assign | Reduce | Fold | Dot | Running | Write) -> None:
        """A block operation; its lane-invariant conditions become a branch around it."""
        plain = [g for g in node.guard if not self.lanes_in(g.left) | self.lanes_in(g.right)]
        if plain:
            self.put(f"if {' & '.join(f'({self._condition(g, ())})' for g in plain)}:")
            self.indent += 1
            outer, blocks, self.shared, self.read_blocks = self.shared, self.read_blocks, {}, {}
            self._operation(replace(node, guard=tuple(g for g in node.guard if g not in plain)))
            self.shared, self.read_blocks = outer, blocks
            self.indent -= 1
            for local in written_by(node):
                self._forget(local.name)
        else:
            self._operation(node)

    def _operation(self, node: Assign | Reduce | Fold | Dot | Running | Write) -> None:
        if isinstance(node, Write):
            self._write(node)
        elif isinstance(node, Assign):
            self._assign(node)
        elif isinstance(node, Reduce):
            self._reduce(node)
        elif isinstance(node, Fold):
            self._fold(node)
        elif isinstance(node, Running):
            self._running(node)
        else:
            self._dot(node)

    def _forget(self, local: str) -> None:
        """Invalidates values computed from a private block that changed."""
        self.absent.pop(local, None)
        stale = {id(v) for v in self.kept if any(isinstance(n, Held) and n.local.name == local for n in v.walk())}
        self.shared = {key: name for key, name in self.shared.items() if key[0] not in stale}

    def _bind(self, node: Bind) -> None:
        if node.lanes:
            self.lanes_of[node.symbol] = node.lanes
        self.last.pop(node.symbol, None)
        if not node.lanes and node.expr.value is None and (most := reach(node.expr, self.last)) is not None:
            self.last[node.symbol] = most
        if not node.lanes or isinstance(node.expr, Search):
            text = self.index(node.expr, node.lanes)
            # Triton gives a loop up to a literal a 32-bit index; the same name is bound to 64 bits after the loop.
            text = text if node.expr.value is None else f"sr_wide({text})"
            self.put(f"{self.variables.get(node.symbol, node.symbol.name)} = {text}")
            return
        assert isinstance(node.expr, Element)
        mask = self._mask(node.guard, node.lanes, set(node.lanes))
        guarded = f", mask={mask}, other=0" if mask else ""
        at = self.index(node.expr.index, node.lanes)
        read = f"tl.load({self.names[node.expr.array]} + {at}{guarded}).to(tl.int64)"
        self.put(f"{node.symbol} = {_clamped(read, node.expr, lambda e: self.index(e, node.lanes))}")

    # --- blocks ------------------------------------------------------------------------------------------------------------

    def _mask(self, guard: Guard, lanes: Lanes, own: set[Lane]) -> str:
        """The conditions on the given lanes (and on none), as a block that broadcasts over `lanes`."""
        wanted = [g for g in guard if (self.lanes_in(g.left) | self.lanes_in(g.right)) <= own]
        return " & ".join(f"({self._condition(g, lanes)})" for g in wanted)

    def _condition(self, g: Less, lanes: Lanes) -> str:
        """A condition; of one on plain lanes, the lanes are compared in 32 bits, with one number or with one of each row."""
        rest = g.right - g.left
        mine = [(t, factor) for t, factor in terms_of(rest) if isinstance(t, Symbol) and t in self.last and self.lanes_in(t)]
        here: Expr = sum((term * -factor for term, factor in mine), const(0))
        limit = rest + here
        if not mine or limit.symbols & here.symbols or sum(abs(f) * self.last[s] for s, f in mine) >= HALF:
            return f"{self.index(g.left, lanes)} < {self.index(g.right, lanes)}"
        if limit.value is not None:
            return f"{self.index(here, lanes)} < {limit}"
        here, further = self._of_next_blocks(here, [s for s, _ in mine])
        limit = limit + further
        if not self.lanes_in(limit):
            return f"{self.index(here, lanes)} < sr_number({self.index(limit)})"
        # What changes in a loop is one number, added to the lanes, so that the numbers of all rows stay as they are.
        change = sum((term * -factor for term, factor in terms_of(limit) if not self.lanes_in(term)), const(0))
        of_rows = limit + change
        if change.bounds[0] is None or change.bounds[0] < 0 or of_rows.bounds[1] is None or of_rows.bounds[1] >= HALF:
            return f"{self.index(here, lanes)} < sr_number({self.index(limit, lanes)})"
        moved = f" + sr_number({self.index(minimum(change, HALF))})" if change.value != 0 else ""
        return f"{self.index(here, lanes)}{moved} < sr_number({self.index(of_rows, lanes)})"

    def _of_next_blocks(self, here: Expr, mine: Sequence[Symbol]) -> tuple[Expr, int]:
        """A sum of lanes, in which lanes that addresses multiply are those of the next block, and how much larger it is.

        A thread holds several positions of a lane, which differ by constants: s, s + 8, s + 16. LLVM moves the constants out of
        the products in addresses, so that one register serves all of them, but only if nothing else uses s + 8. So masks compare
        the lanes of the next block, s + 64 + 8.
        """
        next_, further = dict[Expr, Expr](), 0
        for s in (s for s in mine if s in self.multiplied):
            (lane,) = self.lanes_of[s]
            other = new_symbol(self.compared.setdefault(lane, f"{self.variables[s]}_next"))
            self.lanes_of[other], self.last[other] = (lane,), 2 * lane.size - 1
            next_[s] = other
            further += factor_of(here, s) * lane.size
        return here.substitute(next_), further

    def _pointer(self, tensor: Tensor, index: Sequence[Expr], lanes: Lanes) -> tuple[str, set[Lane]]:
        """A pointer block: the part without lanes first, so that lanes add small offsets to one base."""
        place = place_of(tensor, index)
        terms = place.terms if isinstance(place, Sum) else ((place, 1),)
        base: Expr = const(place.constant if isinstance(place, Sum) else 0)
        offsets: Expr = const(0)
        for term, factor in terms:
            if self.lanes_in(term):
                offsets = offsets + term * factor
            else:
                base = base + term * factor
        text = tensor.name
        if base.value != 0:
            text += f" + {self.index(base)}"
        if offsets.value != 0:
            text += f" + {self.index(offsets, lanes)}"
        return text, self.lanes_in(place)

    def value(self, value: Value, lanes: Lanes, guard: Guard, *, raw: bool = False) -> str:
        """A value as a block that broadcasts over `lanes`; computed once per loop body."""
        if isinstance(value, Constant):
            if value.dtype == torch.int64 and abs(int(value.number)) > 2**31 - 1:
                return f"tl.full([], {int(value.number)}, tl.int64)"
            return _number(float(value.number) if value.dtype.is_floating_point else value.number)
        if isinstance(value, Held):
            return self._held(value.local, lanes)
        key = (id(value), lanes, guard)
        if key not in self.shared or raw:
            text = self._load(value, lanes, guard, raw) if isinstance(value, Load) else self._compute(value, lanes, guard)
            name = self._named(text)
            if raw:
                return name
            if isinstance(value, Load) and not value.guard and not isinstance(value, Boxed):
                self.others[name] = self.preferred.get(id(value), value.other)
            self.shared[key] = name
            self.kept.append(value)
        return self.shared[key]

    def _held(self, local: Local, lanes: Lanes) -> str:
        """A private block, spread over `lanes`; of a lane that a loop runs over, the position that it is at."""
        text, own = local.name, local.lanes
        for lane in (each for each in local.lanes if each.symbol in self.single):
            text = f"tl.sum(tl.where({self._at_lane(lane, own)}, {text}, 0), {own.index(lane)})"
            own = tuple(other for other in own if other is not lane)
        if own != local.lanes:
            text = f"{text}.to({TYPES[carried_dtype(local.dtype)]})"
        return self.spread(text, own, lanes)

    def _at_lane(self, lane: Lane, lanes: Lanes) -> str:
        """Where a lane is the one that a loop is at."""
        return f"{self.spread(self.single[lane.symbol], (lane,), lanes)} == {self.variables[lane.symbol]}"

    def _assign(self, node: Assign) -> None:
        local, mask = node.local, self._mask(node.guard, node.lanes, set(node.lanes))
        value = self._full(node.value, node.lanes, node.guard)
        guard, before = self.absent.get(local.name, (node.guard, None))
        if mask and (guard or before is None or self._missing(node.value, node.lanes, node.guard) != before):
            value = f"tl.where({mask}, {value}, {self._held(local, node.lanes)})"
        single = [lane for lane in local.lanes if lane.symbol in self.single]
        if single:
            here = " & ".join(f"({self._at_lane(lane, local.lanes)})" for lane in single)
            left = tuple(lane for lane in local.lanes if lane not in single)
            new = self.fresh()
            self.put(f"{new} = {value}")
            value = f"tl.where({here}, {self.spread(new, left, local.lanes)}, {local.name})"
        self.put(f"{local.name} = {value}")
        self._forget(local.name)
        if not guard and before is not None and not single:
            self.absent[local.name] = node.guard, before

    def _load(self, value: Load, lanes: Lanes, guard: Guard, raw: bool) -> str:
        wanted = carried_dtype(value.dtype)
        box = box_of(value, lanes) if self.boxes and isinstance(value, Boxed) else None
        if box is not None:
            text = self._box(value.tensor, box, lanes)
            return text if raw or wanted == value.dtype else f"{text}.to({TYPES[wanted]})"
        pointer, own = self._pointer(value.tensor, value.index, lanes)
        mask = self._joined_mask(self._mask(guard, lanes, own), value.guard, lanes)
        masked = {e for g in value.guard for e in self.lanes_in(g.left) | self.lanes_in(g.right)}
        pointer += self._still(masked - own, lanes)
        other = _number(value.other if value.guard else self.preferred.get(id(value), value.other))
        text = f"tl.load({pointer}{f', mask={mask}, other={other}' if mask else ''}{self._eviction(value)})"
        return text if raw or wanted == value.dtype else f"{text}.to({TYPES[wanted]})"

    def _box(self, tensor: Tensor, box: MatrixBox, lanes: Lanes) -> str:
        """A block that a copy engine reads, with its lanes in this order."""
        name = self.descriptors[_descriptor(tensor, box)]
        place = ", ".join(f"sr_place({self.index(e)})" for e in box.place)
        return f"{name}.load([{place}]){'' if box.sides == lanes else '.T'}"

    def _eviction(self, value: Load) -> str:
        """The hint of a load that reads a block of rows for the last time."""
        return ', eviction_policy="evict_first"' if (self.loop, value.tensor) in self.last_reads else ""

    def _still(self, missing: set[Lane], lanes: Lanes) -> str:
        """Adds lanes to a pointer that its address does not depend on, as a mask or value with these lanes requires."""
        return "".join(f" + {self.index(lane.symbol, lanes)} * 0" for lane in lanes if lane in missing)

    def _joined_mask(self, mask: str, guard: Guard, lanes: Lanes) -> str:
        """A mask combined with a load's own conditions; lane-invariant ones enable or disable all of it."""
        laned = [g for g in guard if self.lanes_in(g.left) | self.lanes_in(g.right)]
        mask = " & ".join([*([mask] if mask else []), *(f"({self._condition(g, lanes)})" for g in laned)])
        for g in guard:
            if g not in laned:
                mask = f"tl.where({self._condition(g, ())}, {mask or True}, False)"
        return mask

    def _compute(self, value: Value, lanes: Lanes, guard: Guard) -> str:
        if isinstance(value, Number):
            text = self.index(value.expr, lanes)
            if not self.lanes_in(value.expr):
                # A lane-invariant value may be a plain integer here.
                text = f"sr_wide({text})"
            return f"({text}).to({TYPES[value.dtype]})"
        if isinstance(value, Existing):
            return self._existing(value, lanes)
        assert isinstance(value, Call), value
        asked, rest = conditions_of(value) if value.function in ("lt", "le", "gt", "ge") else ((), value)
        if asked and rest is None:
            # A comparison of positions: lanes have 32 bits.
            return f"({self._condition(asked[0], lanes)})"
        args = [self.value(a, lanes, guard) for a in value.args]
        if value.function == "cast":
            return self._cast(value, args[0])
        if value.function not in FUNCTIONS:
            raise VerificationError(f"the triton backend has no function {value.function!r}")
        if value.function in LIBDEVICE_BINARY and value.dtype.is_floating_point:
            # A literal would be float32 there, whatever the dtype of the other operand.
            kind = TYPES[carried_dtype(value.dtype)]
            args = [f"tl.full([], {a}, {kind})" if isinstance(v, Constant) else a for a, v in zip(args, value.args, strict=True)]
        if value.function in POWERS and (scaled := self._scaled(value.args[0], lanes, guard)) is not None:
            return f"sr_exp_scaled({', '.join(scaled)}, {args[1]})"
        if value.function in POWERS and _kind(value.dtype) == "single" and self._is_maximum(*value.args):
            return f"sr_exp_change({args[0]}, {args[1] if value.function == 'exp_below' else f'sr_finite({args[1]})'})"
        special = SPECIAL.get((value.function, _kind(value.dtype)))
        return (special or FUNCTIONS[value.function]).format(*args)

    def _scaled(self, value: Value, lanes: Lanes, guard: Guard) -> tuple[str, str] | None:
        """The block and the number of scores of 16-bit queries and keys, which need not be subtracted exactly."""
        if not isinstance(value, Call) or value.function != "mul" or self._missing(value, lanes, guard) is not None:
            return None
        block, scale = value.args
        if not isinstance(block, Held) or not isinstance(scale, Constant) or block.local.name not in self.narrow:
            return None
        return self._held(block.local, lanes), self.value(scale, lanes, guard)

    def _is_maximum(self, x: Value, m: Value) -> bool:
        """Whether a value that a larger one is subtracted from is the maximum of a part, so that sums relative to it change."""
        if isinstance(x, Load):
            return x.tensor in self.maxima
        return isinstance(m, Call) and m.function == "maximum" and x in m.args

    def _cast(self, value: Call, arg: str) -> str:
        if isinstance(value.args[0], Constant):
            return f"tl.full([], {arg}, {TYPES[value.dtype]}).to({TYPES[carried_dtype(value.dtype)]})"
        if isinstance(value.args[0], Number) and value.args[0].expr.value is not None:
            return f"{float(value.args[0].expr.value)}" if value.dtype.is_floating_point else arg
        if value.dtype == torch.bool:
            return f"({arg} != 0)"
        kept = TYPES[carried_dtype(value.dtype)]
        # 16-bit floats are converted through float32, whatever the argument is.
        through = "" if kept == TYPES[value.dtype] else f".to({kept})"
        rounded = f"{arg}{through}.to({TYPES[value.dtype]})"
        return rounded if kept == TYPES[value.dtype] else f"{rounded}.to({kept})"

    def _existing(self, value: Existing, lanes: Lanes) -> str:
        counts = []
        counted = {lane.symbol for lane in value.lanes}
        for lane in value.lanes:
            limit = str(lane.size)
            for g in value.guard:
                if lane.symbol in g.symbols:
                    limit = f"tl.minimum({limit}, {self.index(_room(lane, g), lanes)})"
            counts.append(limit if limit.isdigit() else f"tl.maximum({limit}, 0)")
        counts += [f"({self._condition(g, lanes)}).to(tl.int64)" for g in value.guard if not g.symbols & counted]
        total = " * ".join(counts) or "1"
        return f"({total}) * 1.0" if all(c.isdigit() for c in counts) else f"({total}).to({TYPES[value.dtype]})"

    def _full(self, value: Value, lanes: Lanes, guard: Guard) -> str:
        """A value as a block of exactly these lanes."""
        if isinstance(value, Constant):
            return f"tl.full({_shape(lanes)}, {_number(value.number)}, {TYPES[carried_dtype(value.dtype)]})"
        text = self.value(value, lanes, guard)
        return text if self._varies_over(value, lanes) == set(lanes) else f"tl.broadcast_to({text}, {_shape(lanes)})"

    def _varies_over(self, value: Value, lanes: Lanes) -> set[Lane]:
        """The lanes that a value has a position for."""
        if isinstance(value, Call):
            return {lane for arg in value.args for lane in self._varies_over(arg, lanes)}
        if isinstance(value, Load):
            return self._pointer(value.tensor, value.index, lanes)[1]
        if isinstance(value, Held) and not self.single:
            return set(value.local.lanes)
        return self.lanes_in(value.expr) if isinstance(value, Number) else set()

    def _write(self, node: Write) -> None:
        pointer, own = self._pointer(node.tensor, node.index, node.lanes)
        pointer += self._still(set(node.lanes) - own, node.lanes)
        mask = self._mask(node.guard, node.lanes, set(node.lanes))
        value = self._full(node.value, node.lanes, node.guard)
        masked = f", mask={mask}" if mask else ""
        if node.add:
            # Atomic additions do not convert.
            self.put(f'tl.atomic_add({pointer}, ({value}).to({TYPES[node.tensor.dtype]}){masked}, sem="relaxed")')
        else:
            # Adjacent rows share sectors at their ends with other programs' stores, which should combine in cache: do not stream.
            apart = any(self.lanes_of.get(s) and s not in self.last for e in node.index for s in e.symbols)
            is_streamed = node.tensor.role is Role.OUTPUT and len(node.lanes) > 1 and not apart
            streamed = ', cache_modifier=".cs"' if is_streamed else ""
            self.put(f"tl.store({pointer}, {value}{masked}{streamed})")

    def _reduce(self, node: Reduce) -> None:
        local, lanes = node.local, node.lanes
        mask = self._mask(node.guard, lanes, set(lanes))
        reduced = [k for k, lane in enumerate(lanes) if lane not in local.lanes]
        factors = factors_of(node)
        if factors and not reduced and lanes == local.lanes and not any(isinstance(f, Constant) for f in factors):
            left, right = (self.value(f, lanes, node.guard) for f in factors)
            text = f"tl.fma({left}, {right}, {local.name})"
            self.put(f"{local.name} = {f'tl.where({mask}, {text}, {local.name})' if mask else text}")
            self._forget(local.name)
            return
        identity = reduction(node.operator).identity(0, local.dtype)
        if isinstance(node.value, Load) and not node.value.guard and local.dtype.is_floating_point:
            self.preferred[id(node.value)] = identity
        block, scale = (node.value, "") if mask or not reduced else _unscaled(node)
        text = self._full(block, lanes, node.guard)
        if mask and self._missing(node.value, lanes, node.guard) != identity:
            text = f"tl.where({mask}, {text}, {_number(identity)})"
            if node.operator in ("max", "min") and isinstance(node.value, Call):
                # Exponentials below the maximum are then zero where the statement is masked off.
                text = self.shared[id(node.value), lanes, node.guard] = self._named(text)
                self.others[text] = identity
                self.kept.append(node.value)
        axes = [None] if len(reduced) == len(lanes) > 1 else list(reversed(reduced))
        for axis in axes:
            text = REDUCERS[node.operator].format(text, axis)
        self.put(f"{local.name} = {COMBINE[node.operator].format(local.name, text + scale)}")
        self._forget(local.name)

    def _missing(self, value: Value, lanes: Lanes, guard: Guard) -> float | None:
        """What a computed value is where its statement is masked off, if that is known."""
        if isinstance(value, Load) and self._pointer(value.tensor, value.index, lanes)[1] != set(lanes):
            return None
        if isinstance(value, Held):
            asked, number = self.absent.get(value.local.name, ((), None))
            known = value.local.lanes == lanes and all(_is_asked(g, asked, lanes) for g in guard)
            return number if known and not self.single else None
        if isinstance(value, Call) and value.function in POWERS:
            return 0 if self._missing(value.args[0], lanes, guard) == -math.inf else None
        if isinstance(value, Call) and value.function == "cast":
            return 0 if self._missing(value.args[0], lanes, guard) == 0 else None
        return self.others.get(self.shared.get((id(value), lanes, guard), ""))

    def _fold(self, node: Fold) -> None:
        """Combines all lanes of a block, then the result with the carried states. `tl.reduce` may reorder lanes; a scan does not,
        and its last position covers the whole block."""
        mask = self._mask(node.guard, node.lanes, set(node.lanes))
        combine = self._combiner(node.reduction, tuple(carried_dtype(x.dtype) for x in node.locals))
        blocks = [self.fresh() for _ in node.locals]
        for k, (block, local, value) in enumerate(zip(blocks, node.locals, node.values, strict=True)):
            dtype = TYPES[carried_dtype(local.dtype)]
            text = f"{self._full(value, node.lanes, node.guard)}.to({dtype})"
            nothing = _number(node.reduction.identity(k, local.dtype))
            self.put(f"{block} = {f'tl.where({mask}, {text}, {nothing})' if mask else text}")
        every = ", ".join(blocks)
        for axis in reversed([k for k, lane in enumerate(node.lanes) if lane not in node.locals[0].lanes]):
            if node.reduction.commutative:
                self.put(f"{every} = tl.reduce(({every}), {axis}, {combine})")
                continue
            self.put(f"{every} = tl.associative_scan(({every}), {axis}, {combine})")
            lane = node.lanes[axis]
            left = (*node.lanes[: axis + 1], *(other for other in node.lanes[axis + 1 :] if other in node.locals[0].lanes))
            last = f"{self.spread(self.variables[lane.symbol], (lane,), left)} == {lane.size - 1}"
            for block, local in zip(blocks, node.locals, strict=True):
                whole = f"tl.sum(tl.where({last}, {block}, 0), {axis})"
                self.put(f"{block} = {whole}.to({TYPES[carried_dtype(local.dtype)]})")
        states = ", ".join(local.name for local in node.locals)
        self.put(f"{states} = {combine}({states}, {every})")
        for local in node.locals:
            self._forget(local.name)

    def _combiner(self, kind: Reduction, dtypes: tuple[torch.dtype, ...]) -> str:
        """The function that combines two states, printed once."""
        if (kind, dtypes) not in self.combiners:
            name = f"{HELPER}combine{len(self.combiners)}"
            a, b = ([Local(f"{side}{k}", dtype, ()) for k, dtype in enumerate(dtypes)] for side in "ab")
            outer, self.lines, shared, self.shared, indent, self.indent = self.lines, [], self.shared, {}, self.indent, 1
            combined = kind.combine(tuple(map(held, a)), tuple(map(held, b)))
            results = ", ".join(self.value(v, (), ()) for v in combined)
            self.put(f"return {results}")
            head = f"@triton.jit\ndef {name}({', '.join(local.name for local in (*a, *b))}):\n"
            self.combiners[kind, dtypes] = name, head + "\n".join(self.lines) + "\n"
            self.lines, self.shared, self.indent = outer, shared, indent
        return self.combiners[kind, dtypes][0]

    def _running(self, node: Running) -> None:
        """A scan of the block, combined with the carry; the carry is then combined with the block's total."""
        lanes, local, carry = node.lanes, node.local.name, node.carry.name
        text = self._full(node.value, lanes, node.guard)
        mask = self._mask(node.guard, lanes, set(lanes))
        if mask:
            text = f"tl.where({mask}, {text}, {_number(reduction(node.operator).identity(0, node.carry.dtype))})"
        # The carry may be wider than the block; products lose more precision per step than sums, and are scanned in its dtype.
        own, wide = (TYPES[carried_dtype(each.dtype)] for each in (node.local, node.carry))
        kind = wide if node.operator == "prod" else own
        narrow = "" if own == wide else f".to({own})"
        block = self.fresh()
        self.put(f"{block} = {text}.to({kind})")
        if node.axis is None:
            self.put(f"{carry} = {COMBINE[node.operator].format(carry, block)}")
            self.put(f"{local} = {carry}{narrow}")
        else:
            axis = lanes.index(node.axis)
            scanned = f"tl.associative_scan({block}, {axis}, {SCANNED[node.operator]})"
            before = self.spread(carry, node.carry.lanes, lanes)
            before = before if kind == wide else f"{before}.to({kind})"
            self.put(f"{local} = ({COMBINE[node.operator].format(before, scanned)}){narrow}")
            self.put(f"{carry} = {COMBINE[node.operator].format(carry, REDUCERS[node.operator].format(block, axis))}")
        self._forget(local)
        self._forget(carry)

    def _dot(self, node: Dot) -> None:
        rows, columns, depth = node.lanes
        local, kind = node.local.name, TYPES[carried_dtype(node.local.dtype)]
        left, left_dtype = self._operand(node.left, (rows, depth), node.guard)
        right, right_dtype = self._operand(node.right, (depth, columns), node.guard)
        if not node.local.dtype.is_floating_point or min(lane.size for lane in node.lanes) < LEAST_PRODUCT:
            # Tensor cores take floats, and no smaller blocks.
            left, right = self._named(left), self._named(right)
            self.put(f"{local} += tl.sum({left}.to({kind})[:, :, None] * {right}.to({kind})[None, :, :], 1)")
        else:
            common = torch.promote_types(left_dtype, right_dtype)
            if common == torch.float32:
                # A computed float32 operand is rounded to the 16-bit dtype of the other, unless it is read from wider memory.
                both = ((node.left, left_dtype), (node.right, right_dtype))
                common = next((own for v, own in both if own.itemsize == 2 and not _reads_wide(both, own)), common)
            left, right = (
                text if own == common else f"{text}.to({TYPES[common]})"
                for text, own in ((left, left_dtype), (right, right_dtype))
            )
            if common.itemsize == 2:
                self.narrow.add(local)
            precision = ', input_precision="ieee"' if common == torch.float32 else ""
            self.put(f"{local} = tl.dot({left}, {right}, acc={local}{precision}, out_dtype={kind})")
        self._forget(local)

    def _named(self, text: str) -> str:
        name = self.fresh()
        self.put(f"{name} = {text}")
        return name

    def _own(self, guard: Guard, lanes: Lanes) -> Guard:
        """The conditions that concern only these lanes."""
        return tuple(g for g in guard if (self.lanes_in(g.left) | self.lanes_in(g.right)) <= set(lanes))

    def _operand(self, value: Value, lanes: Lanes, guard: Guard) -> tuple[str, torch.dtype]:
        """A block of a product, and the dtype that it has."""
        own = self._own(guard, lanes)
        if (id(value), lanes, own) in self.factors:
            return self.factors[id(value), lanes, own], value.dtype
        wide = carried_dtype(value.dtype)
        if isinstance(value, Load) and self._pointer(value.tensor, value.index, lanes)[1] == set(lanes):
            return self._read_once(value, lanes, own), wide if self.interpreted else value.dtype
        # What a prologue makes of a masked zero need not be zero.
        mask = self._mask(own, lanes, set(lanes))
        text = self._full(value, lanes, own)
        text = f"tl.where({mask}, {text}, 0)" if mask and self._missing(value, lanes, own) != 0 else text
        # Values of 16-bit dtypes are computed in float32; round them, because matrix units take 16-bit operands.
        if wide != value.dtype and not self.interpreted:
            return f"({text}).to({TYPES[value.dtype]})", value.dtype
        return text, wide

    def _read_once(self, value: Load, lanes: Lanes, guard: Guard) -> str:
        """A block of a product in memory, transposed if another product has read it along the other lane."""
        key = (id(value), frozenset(lanes), guard)
        changes = value.tensor in self.written or any(
            isinstance(e, Element) and e.array.local for x in value.index for e in x.walk()
        )
        if key not in self.read_blocks or changes:
            self.read_blocks[key] = self.value(value, lanes, guard, raw=not self.interpreted), lanes
            self.kept.append(value)
        name, order = self.read_blocks[key]
        return name if order == lanes else f"tl.trans({name})"


def _reads_wide(operands: Sequence[tuple[Value, torch.dtype]], narrow: torch.dtype) -> bool:
    """Whether an operand of a product has more bits in memory than this dtype."""
    return any(isinstance(v, Load) and own.itemsize > narrow.itemsize for v, own in operands)


def _descriptors(dot: Dot) -> Iterator[Descriptor]:
    """What the boxes of a product are read from."""
    rows, columns, depth = dot.lanes
    for value, lane in ((dot.left, rows), (dot.right, columns)):
        if isinstance(value, Boxed) and (box := box_of(value, (lane, depth))) is not None:
            yield _descriptor(value.tensor, box)


def _box_names(descriptors: Iterable[Descriptor]) -> dict[Descriptor, str]:
    """What boxes are read from, each once, and the names of these arguments."""
    names: dict[Descriptor, str] = {}
    for descriptor in descriptors:
        alike = sum(d.tensor is descriptor.tensor for d in names if d != descriptor)
        names.setdefault(descriptor, f"{descriptor.tensor.name}_box{alike + 1 if alike else ''}")
    return names


def _descriptor(tensor: Tensor, box: MatrixBox) -> Descriptor:
    row, column = box.sides
    return Descriptor(tensor, box.rows, box.columns, (row.size, column.size))


def _maxima(program: LoopProgram) -> frozenset[Tensor]:
    """The tensors that hold maxima of parts of rows: written from a private block that is the largest of several values."""
    found: set[Tensor] = set()
    for kernel in program.kernels:
        every = list(nodes(kernel.body))
        largest = {n.local.name for n in every if isinstance(n, Reduce) and n.operator == "max"}
        largest |= {n.local.name for n in every if isinstance(n, Assign) and _is_larger(n.value)}
        found |= {n.tensor for n in every if isinstance(n, Write) and isinstance(n.value, Held) and n.value.local.name in largest}
    return frozenset(t for t in found if t.role is Role.SCRATCH)


def _is_larger(value: Value) -> bool:
    return isinstance(value, Call) and value.function == "maximum"


def _only_loop(body: Sequence[Node]) -> For | None:
    """The grid loop of a body that has only names besides; None for any other body."""
    loop = body[-1] if body else None
    alone = isinstance(loop, For) and loop.kind is GRID and all(isinstance(n, Bind) for n in body[:-1])
    return loop if alone and isinstance(loop, For) else None


def _room(lane: Lane, condition: Less) -> Expr:
    """The number of positions of a lane that satisfy a condition."""
    end = end_of(condition, lane.symbol)
    if end is None:
        raise VerificationError(f"the guard {condition} does not bound the lane {lane}")
    return end


def _places(index: Expr, block: Local) -> Lanes:
    """The lanes along which a private block is read: its own, or others of the same sizes."""
    terms = dict(index.terms) if isinstance(index, Sum) else {index: 1}
    by_stride = {factor: term for term, factor in terms.items()}
    found, stride = [], math.prod(lane.size for lane in block.lanes)
    for lane in block.lanes:
        stride //= lane.size
        at = by_stride.get(stride)
        if not isinstance(at, Symbol) or len(terms) != len(block.lanes):
            raise VerificationError(f"{block} is read at {index}, which does not say at which position of each lane")
        found.append(Lane(at, lane.size))
    return tuple(found)


def _stages(body: Sequence[Node], loop: For | None = None) -> int | None:
    """How many blocks of products to keep in flight, if these are the statements of a loop."""
    products = [n for n in body if isinstance(n, Dot)]
    inner = (_stages(part, n if isinstance(n, For) and n.kind is not GRID else None) for n in body for part in bodies(n))
    own = _stages_of(products, loop) if products else None
    return min((n for n in (own, *inner) if n is not None), default=None)


def _stages_of(products: Sequence[Dot], loop: For | None) -> int:
    """Two programs on a multiprocessor hide what one waits for: scores, say, before they are multiplied with values."""
    sides = [(v, dot) for dot in products for v in (dot.left, dot.right)]
    if not any(isinstance(v, Held) for side, _ in sides for v in side.walk()):
        return STAGES if loop is None or loop.extent.value is not None else ROW_STAGES
    changing = {loop.symbol, *(n.symbol for n in nodes(loop.body) if isinstance(n, For | Bind))} if loop else set()
    blocks = {v: dot for v, dot in sides if isinstance(v, Load)}
    still = moving = 0
    for block, dot in blocks.items():
        own = {s for e in block.index for s in e.symbols}
        size = block.dtype.itemsize * math.prod(lane.size for lane in dot.lanes if lane.symbol in own)
        still, moving = (still, moving + size) if own & changing else (still + size, moving)
    fitting = (n for n in CHAINED_STAGES if still + n * moving <= HALF_SHARED)
    return next(fitting, CHAINED_STAGES[-1])


def _unscaled(node: Reduce) -> tuple[Value, str]:
    """What a maximum or minimum is of, and what to multiply it by afterwards: the same as of scaled elements, to the bit, because
    rounding keeps their order."""
    value = node.value
    if node.operator not in ("max", "min") or not isinstance(value, Call) or value.function != "mul":
        return value, ""
    block, scale = value.args
    is_scaled = isinstance(block, Held) and isinstance(scale, Constant) and block.dtype == value.dtype == torch.float32
    if not is_scaled or not isinstance(scale, Constant) or not 0 < scale.number < math.inf:
        return value, ""
    return block, f" * {_number(scale.number)}"


def _bytes_of(body: Sequence[Node]) -> int:
    """The bytes that one iteration of a loop loads, for all lanes."""
    blocks = {(v.tensor, v.index, n.lanes) for n in body if isinstance(n, Reduce) for v in _loads(n)}
    return sum(tensor.dtype.itemsize * math.prod(lane.size for lane in lanes) for tensor, _, lanes in blocks)


def _is_asked(condition: Less, guard: Guard, lanes: Lanes) -> bool:
    """Whether a condition fails only where a guard does: it is one of its own, or what one of these says of fewer lanes."""
    others = {lane.symbol for lane in lanes} - condition.symbols
    return any(condition in (g, possible(g, others)) for g in guard)


def _last_reads(body: Sequence[Node]) -> set[tuple[int, Tensor]]:
    """The loops, by id, that read an input after another loop beside them has: the last to need it. A loop and the block that was
    taken out of its end are one. Blocks of products are read by other programs too."""
    loops: list[list[Node]] = []
    for node in body:
        if isinstance(node, For | If) and loops and isinstance(first := loops[-1][0], For) and _goes_on(node, first.symbol):
            loops[-1].append(node)
        elif isinstance(node, For) and not any(isinstance(inner, Dot) for inner in nodes((node,))):
            loops.append([node])
    read = [{v.tensor for n in loop for v in _loads(n) if v.tensor.role is Role.INPUT} for loop in loops]
    last = {tensor: loop for loop, tensors in zip(loops, read, strict=True) for tensor in tensors}
    several = [tensor for tensor in last if sum(tensor in tensors for tensors in read) > 1]
    inside = (_last_reads(part) for n in body for part in bodies(n))
    return {(id(n), tensor) for tensor in several for n in last[tensor]}.union(*inside)


def _goes_on(node: For | If, index: Symbol) -> bool:
    """Whether a statement goes on where a loop over this index has ended."""
    return any(isinstance(n, Bind) and n.symbol is index for n in bodies(node)[0])


def _loads(node: Node) -> Iterator[Load]:
    return (v for n in nodes((node,)) for value in values_of(n) for v in value.walk() if isinstance(v, Load))


def _counted(node: Node) -> tuple[Lane, ...]:
    found = [lane for value in values_of(node) for v in value.walk() if isinstance(v, Existing) for lane in v.lanes]
    return tuple(found)


def _shape(lanes: Lanes) -> str:
    return f"[{', '.join(str(lane.size) for lane in lanes)}]"


def _number(value: float | int | bool) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, float) and value == 0 and math.copysign(1, value) < 0:
        # Triton makes a constant that equals zero from zero bits.
        return "(tl.full([], 0.0, tl.float32) * -1.0)"
    return repr(value)
