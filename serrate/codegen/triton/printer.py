"""Prints loop programs in Triton: grid loops become programs, serial loops become loops, blocks become block operations.

In: a loop program. Out: Python source of one module with a `@triton.jit` function per kernel, and how to launch them. Generated
code uses only `triton.language`, and the device's math library through it. Lanes are `tl.arange`s; a value has its own lanes and
is broadcast to those of a statement.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from serrate.codegen.expressions import divisor
from serrate.codegen.names import renamed, spellings
from serrate.codegen.triton.addresses import multiplied, reach
from serrate.codegen.triton.block_values import ValuePrinter
from serrate.codegen.triton.grid import has_products, index_lines
from serrate.codegen.triton.indices import clamped
from serrate.codegen.triton.module import (
    HELPER,
    RESERVED,
    Launch,
    TritonSource,
    argument_names,
    box_names,
    descriptors_of,
    function_name,
    signature_line,
    with_helpers,
)
from serrate.codegen.triton.pipelining import IN_FLIGHT, bytes_of, last_reads, product_stages
from serrate.codegen.triton.values import (
    COMBINE,
    REDUCERS,
    SCANNED,
    TYPES,
    number_text,
    shape_of,
)
from serrate.ir.expr import Array, Element, Expr, Search, Symbol
from serrate.ir.loops import (
    Assign,
    Barrier,
    Bind,
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
    Prefetch,
    Reduce,
    Running,
    While,
    Write,
    expressions_of,
    factors_of,
    held,
    nodes,
    values_of,
    written_by,
)
from serrate.ir.reductions import Reduction, reduction
from serrate.ir.tile import GRID
from serrate.ir.values import Call, Constant, Role, Tensor, Value, carried_dtype
from serrate.lower.names import array_names
from serrate.schedule.plan import LaunchOptions

LEAST_PRODUCT = 16
"""The fewest rows, columns or depth that `tl.dot` takes."""
Combiners = dict[tuple[Reduction, tuple[torch.dtype, ...]], tuple[str, str]]
"""Combine functions, by reduction and state dtypes: name and text."""


def print_triton(
    program: LoopProgram,
    options: Sequence[LaunchOptions] = (),
    *,
    boxes: bool = False,
    interpreted: bool = False,
) -> TritonSource:
    """The program as a Triton module. Triton's interpreter multiplies 16-bit blocks wrongly, so it gets float32 blocks.

    `options`: how each kernel is launched, if not in the usual way. `boxes`: whether a copy engine reads the operands that it can
    read.
    """
    program, parts, launches = renamed(program, spellings(program, RESERVED)), [], []
    combiners: Combiners = {}
    for kernel, own in zip(program.kernels, options or [LaunchOptions()] * len(program.kernels), strict=True):
        grids = _grids(kernel)
        printers = [_TritonPrinter(program, each, own, boxes, interpreted, combiners) for each in grids]
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
    made = Launch(function_name(kernel.name), tensors, arrays, (), symbols, single.grid, listed.shared, False, stages)
    positions = " * ".join(divisor(bound, printers[1].index) for bound in single.grid)
    lines = [
        *(f"    {s} = sr_wide({s})" for s in symbols),
        f"    step = tl.num_programs(0) - {positions}",
        "    first = tl.program_id(0).to(tl.int64)",
        "    if (first < step):",
        f"        {listed.function}({', '.join([*argument_names(listed, names), 'first', 'step'])})",
        "    else:",
        f"        {single.function}({', '.join([*argument_names(single, names), 'first - step'])})",
    ]
    return "\n\n".join([*(text for text, _ in parts), signature_line(made, names) + "\n".join(lines) + "\n"]), made


def _grids(kernel: LoopKernel) -> list[LoopKernel]:
    """The kernel, or a part of it for each of its grids if it has several."""
    ends = [k + 1 for k, n in enumerate(kernel.body) if isinstance(n, For) and n.kind is GRID]
    if len(ends) < 2:
        return [kernel]
    bodies = [kernel.body[begin:end] for begin, end in itertools.pairwise((0, *ends))]
    return [LoopKernel(f"{kernel.name}_{k}", body) for k, body in enumerate(bodies)]


class _TritonPrinter(ValuePrinter):
    """Prints the loops and statements of one kernel."""

    def __init__(
        self,
        program: LoopProgram,
        kernel: LoopKernel,
        options: LaunchOptions,
        boxes: bool,
        interpreted: bool,
        combiners: Combiners,
    ) -> None:
        self.every = list(nodes(kernel.body))
        super().__init__(
            {a: f"{name}_at" for a, name in array_names(program).items()},
            {n.local.name: n.local for n in self.every if isinstance(n, Declare)},
            box_names(d for n in self.every if boxes and isinstance(n, Dot) for d in descriptors_of(n)),
            last_reads(kernel.body),
        )
        self.program, self.kernel, self.interpreted, self.combiners = program, kernel, interpreted, combiners
        self.stages = options.stages
        self.resident = options.resident is not None and has_products(kernel.body)
        self.written = {n.tensor.memory for n in self.every if isinstance(n, Write)}
        self.factors: dict[tuple[int, Lanes, Guard], str] = {}
        """Blocks of products that were read before the loop."""
        self.read_blocks: dict[tuple[int, frozenset[Lane], Guard], tuple[str, Lanes]] = {}
        """Blocks of products that were read in the current body, with their lanes: another product may use one transposed."""

    def run(self, *, alone: bool = True) -> tuple[str, Launch]:
        """The text of a function, and its launch. Unless it is `alone`, it has two more arguments: the `first` grid position of
        this program and, if programs share the grid, the `step` to its next position."""
        kernel, body, every = self.kernel, self.kernel.body, self.every
        tensors = self._tensors(every)
        arrays = self._arrays(every)
        symbols = self._symbols(every)
        lanes = dict.fromkeys(lane for n in every for lane in (*getattr(n, "lanes", ()), *_counted(n)))
        for lane in lanes:
            self.lanes_of[lane.symbol] = (lane,)
            # Two loops over one domain may have blocks of different sizes.
            taken = lane.symbol.name in self.variables.values()
            self.variables[lane.symbol] = f"{lane.symbol}_{lane.size}" if taken else lane.symbol.name
            self.last[lane.symbol] = lane.size - 1
            self.put(f"{self.variables[lane.symbol]} = tl.arange(0, {lane.size})")
        self.multiplied = multiplied(every)
        # Triton passes numbers that fit in 32 bits as 32-bit arguments, but their products may not fit.
        for s in symbols:
            self.put(f"{s} = sr_wide({s})")
        grid, shared = self._body(body, alone)
        self.lines[: len(lanes)] += [
            f"    {name} = tl.arange({lane.size}, {2 * lane.size})" for lane, name in self.compared.items()
        ]
        described = tuple(self.descriptors)
        name, stages, resident = function_name(kernel.name), product_stages(body), self.resident and shared is not None
        launch = Launch(name, tensors, arrays, described, symbols, grid, shared, resident, stages)
        more = () if alone else ("first",) if shared is None else ("first", "step")
        return signature_line(launch, self.names, more) + "\n".join(self.lines) + "\n", launch

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

    # --- loops -----------------------------------------------------------------------------------------------------------

    def _body(self, body: Sequence[Node], alone: bool) -> tuple[tuple[Expr, ...] | None, tuple[Expr, ...] | None]:
        """Names before the grid, the grid itself as program ids, and the body of each program. Returns the bounds of the grid: of
        one program for each position, or of one that programs share."""
        body = list(body)
        while body and isinstance(body[0], Bind):
            self._node(body.pop(0))
        self._read_scalars(body)
        heads: list[Bind | For] = []
        while (loop := _only_loop(body)) is not None and not loop.bound.symbols & {
            n.symbol for n in heads if isinstance(n, Bind)
        }:
            heads += (n for n in body if isinstance(n, Bind | For))
            body = list(loop.body)
        loops = [n for n in heads if isinstance(n, For)]
        resident = self.resident and bool(loops)
        shared = resident or any(loop.sparse for loop in loops)
        computed = {n.symbol for n in heads}
        # Loops that programs share end at their extent; others at the bound that the host knows.
        ends = {n: n.extent if n.sparse or (resident and not n.extent.symbols & computed) else n.bound for n in loops}
        first, step = ("tl.program_id(0).to(tl.int64)", "tl.num_programs(0)") if alone else ("first", "step")
        if shared:
            extents = " * ".join(map(self.index, ends.values()))
            # The blocks of the next position are read while the results of this one are stored.
            how = f"tl.range({first}, {extents}, {step}, flatten=True)" if resident else f"range({first}, {extents}, {step})"
            self.put(f"for position in {how}:")
            self.indent += 1
        elif loops:
            self.put(f"position = {first}")
        for line in index_lines(loops, [divisor(end, self.index) for end in ends.values()], body):
            self.put(line)
        for head in heads:
            if isinstance(head, Bind):
                self._node(head)
            elif head.extent is not ends[head]:
                self.put(f"if ({head.symbol} < {self.index(head.extent)}):")
                self.indent += 1
        self._nodes(body)
        bounds = tuple(loop.bound for loop in loops)
        return (None, bounds) if shared else (bounds, None)

    def _read_scalars(self, body: Sequence[Node]) -> None:
        """Reads numbers that are the same for the whole launch, such as the floats that a caller passes. Triton does not hoist
        loads: in a loop, each iteration would wait for memory."""
        every = list(nodes(tuple(body)))
        written = {n.tensor.memory for n in every if isinstance(n, Write)}
        named: dict[tuple[Tensor, tuple[Expr, ...]], str] = {}
        for load in (v for n in every for value in values_of(n) for v in value.walk() if isinstance(v, Load)):
            if not load.guard and load.tensor.memory not in written and _is_inside(load):
                key = (load.tensor, tuple(load.index))
                if key not in named:
                    named[key] = self.value(load, (), ())
                self.scalars[id(load)] = named[key]

    def _nodes(self, body: Sequence[Node]) -> None:
        for node in body:
            self._node(node)

    def _node(self, node: Node) -> None:
        if isinstance(node, For):
            extent = self.index(node.extent)
            outer, self.loop = self.loop, id(node)
            self._factors_before(node)
            with self.one_lane(node.symbol, node.extent - 1) as name:
                self._under(f"for {name} in {self._range(node, extent)}:", node.body)
            self.loop = outer
        elif isinstance(node, Bind):
            self._bind(node)
        elif isinstance(node, Declare):
            kind = TYPES[carried_dtype(node.local.dtype)]
            number = number_text(0 if node.number is None else node.number)
            if node.local.lanes:
                self.put(f"{node.local.name} = tl.full({shape_of(node.local.lanes)}, {number}, {kind})")
            else:
                self.put(f"{node.local.name} = tl.full([], {number}, {kind})")
            self.forget(node.local.name)
            self.absent[node.local.name] = (), 0 if node.number is None else node.number
        elif isinstance(node, If):
            self._if(node)
        elif isinstance(node, While):
            self._nodes(node.test)
            self._under(f"while {self._all(node.guard)}:", (*node.body, *node.test))
        elif isinstance(node, Barrier):
            self.put("tl.debug_barrier()")
        elif not isinstance(node, Prefetch):
            self._block(node)

    def _range(self, node: For, extent: str) -> str:
        """The range of a loop; loads of blocks that only a reduction needs are kept in flight."""
        if node.brief:
            return f"tl.range(0, {extent}, num_stages=1)"
        stages = min(self.stages, IN_FLIGHT // max(bytes_of(node.body), 1))
        pipelined = stages > 1 and all(isinstance(n, Reduce | Declare | Bind) for n in node.body)
        return f"tl.range(0, {extent}, num_stages={stages})" if pipelined else f"range(0, {extent})"

    def _factors_before(self, node: For) -> None:
        """Reads the blocks of products in a loop that are the same in all its iterations."""
        inside = list(nodes((node,)))
        changing = {n.symbol for n in inside if isinstance(n, For | Bind)}
        written = {n.tensor.memory for n in inside if isinstance(n, Write)}
        for dot in (n for n in node.body if isinstance(n, Dot)):
            rows, columns, depth = dot.lanes
            for value, lanes in ((dot.left, (rows, depth)), (dot.right, (depth, columns))):
                if not isinstance(value, Load) or value.tensor.memory in written or self.interpreted:
                    continue
                own = self._own(dot.guard, lanes)
                if (id(value), lanes, own) in self.factors:
                    continue
                exprs = [*value.index, *(side for g in (*own, *value.guard) for side in (g.left, g.right))]
                locals_ = any(isinstance(e, Element) and e.array.local for x in exprs for e in x.walk())
                plain = self.pointer(value.tensor, value.index, lanes)[1] == set(lanes)
                if plain and not locals_ and not changing & {s for e in exprs for s in e.symbols}:
                    with self.protected(own):
                        self.factors[id(value), lanes, own] = self.value(value, lanes, own, raw=True)

    def _if(self, node: If) -> None:
        outer = self.loop
        if any(loop == id(node) for loop, _ in self.last_reads):
            self.loop = id(node)
        holds = self._all(node.guard)
        if node.then:
            with self.inside(node.guard):
                self._under(f"if {holds}:", node.then)
        if node.other:
            self._under("else:" if node.then else f"if not ({holds}):", node.other)
        self.loop = outer

    def _all(self, guard: Guard) -> str:
        with self.protected(guard):
            return " & ".join(f"({self.condition(g, ())})" for g in guard) or "True"

    def _under(self, head: str, body: Sequence[Node]) -> None:
        """Statements inside a loop or a branch; values computed there are not reused after it."""
        self.put(head)
        self.indent += 1
        outer, self.shared = self.shared, {}
        blocks, self.read_blocks = self.read_blocks, {}
        factors = {**self.factors}
        for local in (x for node in nodes(tuple(body)) for x in written_by(node)):
            # In the second iteration it holds the result of the first.
            self.absent.pop(local.name, None)
        with contextlib.ExitStack() as scope:
            for node in body:
                if isinstance(node, Bind) and not node.lanes and self.lanes_of.get(node.symbol):
                    scope.enter_context(self.one_lane(node.symbol, node.expr))
                self._node(node)
        if not body or all(isinstance(n, Prefetch) for n in body):
            self.put("pass")
        self.shared, self.factors, self.read_blocks = outer, factors, blocks
        self.indent -= 1
        for node in nodes(tuple(body)):
            for local in (*written_by(node), *([node.local] if isinstance(node, Declare) else [])):
                self.forget(local.name)
            if isinstance(node, Write):
                self.forget_memory(node.tensor.memory)

    def _block(self, node: Assign | Reduce | Fold | Dot | Running | Write) -> None:
        """A block operation; its lane-invariant conditions become a branch around it."""
        plain = tuple(g for g in node.guard if not self.lanes_in(g.left) | self.lanes_in(g.right))
        if plain:
            self.put(f"if {self._all(plain)}:")
            self.indent += 1
            outer, blocks, self.shared, self.read_blocks = self.shared, self.read_blocks, {}, {}
            with self.inside(plain):
                self._operation(replace(node, guard=tuple(g for g in node.guard if g not in plain)))
            self.shared, self.read_blocks = outer, blocks
            self.indent -= 1
            for local in written_by(node):
                self.forget(local.name)
            if isinstance(node, Write):
                self.forget_memory(node.tensor.memory)
        else:
            self._operation(node)

    def _operation(self, node: Assign | Reduce | Fold | Dot | Running | Write) -> None:
        with self.protected(node.guard):
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

    def _bind(self, node: Bind) -> None:
        if node.lanes:
            self.lanes_of[node.symbol] = node.lanes
        self.last.pop(node.symbol, None)
        if not node.lanes and node.expr.value is None and (most := reach(node.expr, self.last)) is not None:
            self.last[node.symbol] = most
        if not node.lanes or isinstance(node.expr, Search):
            with self.protected(node.guard):
                text = self.index(node.expr, node.lanes)
            # Triton gives a loop up to a literal a 32-bit index; the same name is bound to 64 bits after the loop.
            text = text if node.expr.value is None else f"sr_wide({text})"
            self.put(f"{self.variables.get(node.symbol, node.symbol.name)} = {text}")
            return
        assert isinstance(node.expr, Element)
        mask = self.mask(node.guard, node.lanes, set(node.lanes))
        guarded = f", mask={mask}, other=0" if mask else ""
        at = self.index(node.expr.index, node.lanes)
        read = f"tl.load({self.names[node.expr.array]} + {at}{guarded}).to(tl.int64)"
        self.put(f"{node.symbol} = {clamped(read, node.expr, lambda e: self.index(e, node.lanes))}")

    # --- blocks ------------------------------------------------------------------------------------------------------------

    def _assign(self, node: Assign) -> None:
        local, mask = node.local, self.mask(node.guard, node.lanes, set(node.lanes))
        value = self.full(node.value, node.lanes, node.guard)
        guard, before = self.absent.get(local.name, (node.guard, None))
        if node.undefined:
            before = None
        elif mask and (guard or before is None or self.missing(node.value, node.lanes, node.guard) != before):
            value = f"tl.where({mask}, {value}, {self.held(local, node.lanes)})"
        single = [lane for lane in local.lanes if lane.symbol in self.single]
        if single:
            here = " & ".join(f"({self.at_lane(lane, local.lanes)})" for lane in single)
            left = tuple(lane for lane in local.lanes if lane not in single)
            new = self.fresh()
            self.put(f"{new} = {value}")
            value = f"tl.where({here}, {self.spread(new, left, local.lanes)}, {local.name})"
        self.put(f"{local.name} = {value}")
        self.forget(local.name)
        if not guard and before is not None and not single:
            self.absent[local.name] = node.guard, before

    def _write(self, node: Write) -> None:
        pointer, own = self.pointer(node.tensor, node.index, node.lanes)
        pointer += self.still(set(node.lanes) - own, node.lanes)
        mask = self.mask(node.guard, node.lanes, set(node.lanes))
        value = self.full(node.value, node.lanes, node.guard)
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
        self.forget_memory(node.tensor.memory)

    def _reduce(self, node: Reduce) -> None:
        local, lanes = node.local, node.lanes
        mask = self.mask(node.guard, lanes, set(lanes))
        reduced = [k for k, lane in enumerate(lanes) if lane not in local.lanes]
        factors = factors_of(node)
        if factors and not reduced and lanes == local.lanes and not any(isinstance(f, Constant) for f in factors):
            left, right = (self.value(f, lanes, node.guard) for f in factors)
            text = f"tl.fma({left}, {right}, {local.name})"
            self.put(f"{local.name} = {f'tl.where({mask}, {text}, {local.name})' if mask else text}")
            self.forget(local.name)
            return
        identity = reduction(node.operator).identity(0, local.dtype)
        if isinstance(node.value, Load) and not node.value.guard and local.dtype.is_floating_point:
            self.preferred[id(node.value)] = identity
        block, scale = (node.value, "") if mask or not reduced else _unscaled(node)
        text = self.full(block, lanes, node.guard)
        if mask and self.missing(node.value, lanes, node.guard) != identity:
            text = f"tl.where({mask}, {text}, {number_text(identity)})"
            if node.operator in ("max", "min") and isinstance(node.value, Call):
                # Exponentials below the maximum are then zero where the statement is masked off.
                text = self.shared[id(node.value), lanes, node.guard] = self.named(text)
                self.others[text] = identity
                self.kept.append(node.value)
        axes = [None] if len(reduced) == len(lanes) > 1 else list(reversed(reduced))
        for axis in axes:
            text = REDUCERS[node.operator].format(text, axis)
        text = _in_order(text, [lane for lane in lanes if lane in local.lanes], local)
        self.put(f"{local.name} = {COMBINE[node.operator].format(local.name, text + scale)}")
        self.forget(local.name)

    def _fold(self, node: Fold) -> None:
        """Combines all lanes of a block, then the result with the carried states. `tl.reduce` may reorder lanes; a scan does not,
        and its last position covers the whole block."""
        mask = self.mask(node.guard, node.lanes, set(node.lanes))
        combine = self._combiner(node.reduction, tuple(carried_dtype(x.dtype) for x in node.locals))
        blocks = [self.fresh() for _ in node.locals]
        for k, (block, local, value) in enumerate(zip(blocks, node.locals, node.values, strict=True)):
            dtype = TYPES[carried_dtype(local.dtype)]
            text = f"{self.full(value, node.lanes, node.guard)}.to({dtype})"
            nothing = number_text(node.reduction.identity(k, local.dtype))
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
        kept = [lane for lane in node.lanes if lane in node.locals[0].lanes]
        for block in blocks if kept != [*node.locals[0].lanes] else ():
            self.put(f"{block} = {_in_order(block, kept, node.locals[0])}")
        states = ", ".join(local.name for local in node.locals)
        self.put(f"{states} = {combine}({states}, {every})")
        for local in node.locals:
            self.forget(local.name)

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
        text = self.full(node.value, lanes, node.guard)
        mask = self.mask(node.guard, lanes, set(lanes))
        if mask:
            text = f"tl.where({mask}, {text}, {number_text(reduction(node.operator).identity(0, node.carry.dtype))})"
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
        self.forget(local)
        self.forget(carry)

    def _dot(self, node: Dot) -> None:
        rows, columns, depth = node.lanes
        local, kind = node.local.name, TYPES[carried_dtype(node.local.dtype)]
        left, left_dtype = self._operand(node.left, (rows, depth), node.guard)
        right, right_dtype = self._operand(node.right, (depth, columns), node.guard)
        if not node.local.dtype.is_floating_point or min(lane.size for lane in node.lanes) < LEAST_PRODUCT:
            # Tensor cores take floats, and no smaller blocks.
            left, right = self.named(left), self.named(right)
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
        self.forget(local)

    def _own(self, guard: Guard, lanes: Lanes) -> Guard:
        """The conditions that concern only these lanes."""
        return tuple(g for g in guard if (self.lanes_in(g.left) | self.lanes_in(g.right)) <= set(lanes))

    def _operand(self, value: Value, lanes: Lanes, guard: Guard) -> tuple[str, torch.dtype]:
        """A block of a product, and the dtype that it has."""
        own = self._own(guard, lanes)
        if (id(value), lanes, own) in self.factors:
            return self.factors[id(value), lanes, own], value.dtype
        wide = carried_dtype(value.dtype)
        if isinstance(value, Load) and self.pointer(value.tensor, value.index, lanes)[1] == set(lanes):
            return self._read_once(value, lanes, own), wide if self.interpreted else value.dtype
        # A prologue need not map a masked zero to zero.
        mask = self.mask(own, lanes, set(lanes))
        text = self.full(value, lanes, own)
        text = f"tl.where({mask}, {text}, 0)" if mask and self.missing(value, lanes, own) != 0 else text
        # Values of 16-bit dtypes are computed in float32; round them, because matrix units take 16-bit operands.
        if wide != value.dtype and not self.interpreted:
            return f"({text}).to({TYPES[value.dtype]})", value.dtype
        return text, wide

    def _read_once(self, value: Load, lanes: Lanes, guard: Guard) -> str:
        """A block of a product in memory, transposed if another product has read it along the other lane."""
        key = (id(value), frozenset(lanes), guard)
        changes = value.tensor.memory in self.written or any(
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


def _only_loop(body: Sequence[Node]) -> For | None:
    """The grid loop of a body that contains nothing else but names; None for any other body."""
    loop = body[-1] if body else None
    alone = isinstance(loop, For) and loop.kind is GRID and all(isinstance(n, Bind) for n in body[:-1])
    return loop if alone and isinstance(loop, For) else None


def _unscaled(node: Reduce) -> tuple[Value, str]:
    """The operand of a maximum or minimum without its scale, and the factor to apply to the result instead. The bits are the
    same, because rounding is monotonic."""
    value = node.value
    if node.operator not in ("max", "min") or not isinstance(value, Call) or value.function != "mul":
        return value, ""
    block, scale = value.args
    is_scaled = isinstance(block, Held) and isinstance(scale, Constant) and block.dtype == value.dtype == torch.float32
    if not is_scaled or not isinstance(scale, Constant) or not 0 < scale.number < math.inf:
        return value, ""
    return block, f" * {number_text(scale.number)}"


def _counted(node: Node) -> tuple[Lane, ...]:
    found = [lane for value in values_of(node) for v in value.walk() if isinstance(v, Existing) for lane in v.lanes]
    return tuple(found)


def _in_order(text: str, lanes: Sequence[Lane], local: Local) -> str:
    """A block, with its lanes in the order that a private block has them in. Those of a statement may be in another order: a
    product whose depth is 1 has its columns before its rows."""
    order = [lanes.index(lane) for lane in local.lanes]
    return text if order == sorted(order) else f"tl.permute({text}, {order})"


def _is_inside(load: Load) -> bool:
    """Whether a load reads one element at a constant index that is inside its tensor."""
    extents = [dim.extent_expr.value for dim in load.tensor.storage]
    places = [at.value for at in load.index]
    return bool(places) and all(at is not None and n is not None and 0 <= at < n for at, n in zip(places, extents, strict=True))
