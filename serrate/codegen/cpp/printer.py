"""Loop programs as C++: grid loops over threads, serial loops as they are, blocks as loops over their lanes.

In: a loop program. Out: one source text with an `extern "C"` function, and the order of its arguments. Guards become loop
bounds: a lane's loop ends where its elements end, so no lane is ever masked. Blocks over the same lanes share one nest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serrate.codegen.cpp.guess import guess
from serrate.codegen.cpp.pieces import Cut, cut_of, moves
from serrate.codegen.cpp.statements import accumulated, along, clause, identity, joins, locals_of, owns, size_of, unrounded, wraps
from serrate.codegen.cpp.values import Scalars, computed, ctype, index_text, number
from serrate.errors import VerificationError
from serrate.ir.expr import Array, Element, Expr, Less, Search, Sum, Symbol, const
from serrate.ir.loops import (
    Assign,
    Attempt,
    Bind,
    Block,
    Declare,
    Dot,
    Existing,
    For,
    Guard,
    Kernel,
    Lane,
    Lanes,
    Load,
    Local,
    LoopProgram,
    Node,
    Prefetch,
    Reduce,
    Running,
    Write,
    expressions_of,
    flat_index,
    held,
    nodes,
    values_of,
)
from serrate.ir.tile import GRID
from serrate.ir.values import Constant, Role, Tensor, Value
from serrate.lower.pipeline import array_names

COMBINE = {
    "sum": "{0} += {1}",
    "prod": "{0} *= {1}",
    "max": "{0} = max_nan({0}, {1})",
    "min": "{0} = min_nan({0}, {1})",
    "softmax_max": "{0} = {1} > {0} ? {1} : {0}",
    "any": "{0} = {0} || {1}",
    "all": "{0} = {0} && {1}",
}
TOGETHER = 16
"""How many positions a thread takes at a time: enough to keep reading forward, few enough to share out evenly."""
PAIRED = 32
"""Columns of a block whose products are summed two at a time, where they are of bfloat16."""
ABREAST = 32
"""How many positions of a long lane are reduced side by side, each into a result of its own."""


@dataclass(frozen=True)
class Source:
    """Generated C++. It takes pointers to the program's tensors and arrays, then integers: the number of threads, whether
    results go past the cache, the program's symbols, and the size of a row of each private tensor."""

    name: str
    text: str


def print_cpp(program: LoopProgram, wide: frozenset[Array] = frozenset()) -> Source:
    """The program in C++; `wide` names the arrays that hold int64 (others hold int32)."""
    return _Printer(guess(program), wide).source()


class _Printer:
    def __init__(self, program: LoopProgram, wide: frozenset[Array]) -> None:
        self.program = program
        self.wide = wide
        self.names: dict[object, str] = {a: f"{name}_at" for a, name in array_names(program).items()}
        self.lines: list[str] = []
        self.indent = 0
        self.count = 0
        self.laned: dict[Symbol, Bind] = {}
        self.converted: dict[Load | Write, str] = {}
        """What the innermost loop at hand reads and writes as float32 instead of in sixteen bits."""
        self.private = tuple(t for t in program.scratch if t.role is Role.PRIVATE)
        self.tensors = program.tensors

    def source(self) -> Source:
        program = self.program
        for line in program.header:
            self.put(f"// {line}")
        self.put(f'extern "C" void {program.name}(void* const* pointer, const i64* given) {{')
        self.indent = 1
        self._arguments()
        for kernel in program.kernels:
            self._kernel(kernel)
        self.indent = 0
        self.put("}")
        text = "\n".join(self.lines) + "\n"
        return Source(program.name, text)

    def _arguments(self) -> None:
        used = self._used_tensors()
        for k, tensor in enumerate(self.tensors):
            if tensor not in used:
                continue
            qualifier = "const " if tensor.role is Role.INPUT else ""
            name = f"{tensor.name}_all" if tensor in self.private else tensor.name
            self.put(f"{qualifier}{ctype(tensor.dtype)}* __restrict {name} = ({qualifier}{ctype(tensor.dtype)}*)pointer[{k}];")
        for k, array in enumerate(self.program.arrays, len(self.tensors)):
            kind = "i64" if array in self.wide else "i32"
            self.put(f"const {kind}* __restrict {self.names[array]} = (const {kind}*)pointer[{k}];")
        self.put("const int threads = (int)given[0];")
        if self._streams():
            self.put("const bool stream = given[1];")
        for k, symbol in enumerate(self.program.symbols, 2):
            self.put(f"const i64 {symbol} = given[{k}];")
        for k, tensor in enumerate(self.private, 2 + len(self.program.symbols)):
            self.put(f"const i64 {tensor.name}_size = given[{k}];")

    def _used_tensors(self) -> set[Tensor]:
        used: set[Tensor] = set()
        for kernel in self.program.kernels:
            for node in nodes(kernel.body):
                if isinstance(node, Write):
                    used.add(node.tensor)
                used.update(v.tensor for value in values_of(node) for v in value.walk() if isinstance(v, Load))
        return used

    def _streams(self) -> bool:
        return any(isinstance(n, Write) and self._block_bytes(n) for k in self.program.kernels for n in nodes(k.body))

    # --- text ---------------------------------------------------------------------------------------------------------

    def put(self, line: str) -> None:
        self.lines.append("  " * self.indent + line if line and not line.startswith("#") else line)

    def open(self, line: str) -> None:
        self.put(f"{line} {{" if line else "{")
        self.indent += 1

    def close(self, times: int = 1) -> None:
        for _ in range(times):
            self.indent -= 1
            self.put("}")

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def index(self, expr: Expr) -> str:
        return index_text(self.unlaned(expr), self.names)

    def unlaned(self, expr: Expr) -> Expr:
        """Names with lanes are spelled out: in C++ they live inside the loops over those lanes."""
        while any(s in self.laned for s in expr.symbols):
            expr = expr.substitute({s: self.laned[s].expr for s in expr.symbols if s in self.laned})
        return expr

    # --- kernels and loops --------------------------------------------------------------------------------------------

    def _kernel(self, kernel: Kernel) -> None:
        self.put(f"// {kernel.name}")
        self.open("")
        body = list(kernel.body)
        while body and isinstance(body[0], Bind):
            self._node(body.pop(0))
        if len(body) == 1 and isinstance(body[0], For) and body[0].kind is GRID:
            self._grid(body[0])
        else:
            for tensor in self.private:
                self.put(f"{ctype(tensor.dtype)}* __restrict {tensor.name} = {tensor.name}_all;")
            streamed = self._open_streams(body)
            self._nodes(body)
            self._close_streams(streamed)
        self.close()

    def _open_streams(self, body: Sequence[Node]) -> list[Tensor]:
        """Declares the streams of the results that go past the cache, where they do."""
        written = {n.tensor: None for n in nodes(tuple(body)) if isinstance(n, Write) and self._block_bytes(n)}
        for tensor in written:
            self.put(f"Stream {tensor.name}_stream;")
        return list(written)

    def _close_streams(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self.put(f"{tensor.name}_stream.flush();")
        if tensors:
            self.put("if (stream) stream_fence();")

    def _grid(self, outermost: For) -> None:
        """Nested grid loops as one loop over all their positions, shared out to threads in small runs."""
        loops = [outermost]
        named: list[Bind] = []
        while True:
            # What is named between the loops is named inside them all.
            *before, inner = loops[-1].body
            binds = [node for node in before if isinstance(node, Bind)]
            known = {loop.symbol for loop in loops} | {bind.symbol for bind in (*named, *binds)}
            if len(binds) < len(before) or not isinstance(inner, For) or inner.kind is not GRID or inner.extent.symbols & known:
                break
            loops.append(inner)
            named += binds
        for k, loop in enumerate(loops):
            self.put(f"const i64 extent{k} = {self.index(loop.extent)};")
        total = " * ".join(f"extent{k}" for k in range(len(loops)))
        self.put(f"const i64 positions = {total};")
        schedule = self._schedule(outermost, len(loops))
        self.put("#pragma omp parallel num_threads(threads) if (threads > 1)")
        self.open("")
        for tensor in self.private:
            mine = f"{tensor.name}_all + omp_get_thread_num() * {tensor.name}_size"
            self.put(f"{ctype(tensor.dtype)}* __restrict {tensor.name} = {mine};")
        streamed = self._open_streams([outermost])
        self.put(f"#pragma omp for schedule({schedule})")
        if len(loops) == 1:
            self.open(f"for (i64 {outermost.symbol} = 0; {outermost.symbol} < positions; {outermost.symbol}++)")
        else:
            self.open("for (i64 position = 0; position < positions; position++)")
            rest = "position"
            for k in reversed(range(len(loops))):
                self.put(f"const i64 {loops[k].symbol} = {rest}{f' % extent{k}' if k else ''};")
                rest = f"{rest} / extent{k}" if k else rest
        self._nodes((*named, *loops[-1].body))
        self.close()
        self._close_streams(streamed)
        self.close()

    def _schedule(self, outermost: For, loops: int) -> str:
        """How positions are shared out: evenly where all cost the same, in short runs where rows differ."""
        reads = [e for node in nodes((outermost,)) for x in expressions_of(node) for e in x.walk()]
        if not any(isinstance(e, Element | Search) for e in reads):
            return "static"
        together = " * ".join([str(TOGETHER), *(f"extent{k}" for k in range(1, loops))])
        self.put(f"const i64 run = larger<i64>(1, smaller<i64>({together}, positions / (threads * 16)));")
        return "dynamic, run"

    def _nodes(self, body: Sequence[Node]) -> None:
        group: list[Block] = []
        for node in body:
            if isinstance(node, Declare) and not any(node.local in locals_of(b) for b in group):
                self._declare(node)
            elif isinstance(node, Assign | Reduce | Dot | Running | Write | Prefetch):
                if group and not joins(group, node):
                    self._blocks(group)
                    group = []
                group.append(node)
            else:
                if group:
                    self._blocks(group)
                    group = []
                self._node(node)
        if group:
            self._blocks(group)

    def _node(self, node: Node) -> None:
        if isinstance(node, Bind):
            if node.lanes:
                self.laned[node.symbol] = node
            else:
                self.put(f"const i64 {node.symbol} = {self.index(node.expr)};")
        elif isinstance(node, For):
            self.open(f"for (i64 {node.symbol} = 0, end = {self.index(node.extent)}; {node.symbol} < end; {node.symbol}++)")
            self._nodes(node.body)
            self.close()
        elif isinstance(node, Attempt):
            self._attempt(node)
        elif isinstance(node, Declare):
            self._declare(node)
        else:
            raise VerificationError(f"the cpp backend cannot print {node}")

    def _attempt(self, node: Attempt) -> None:
        self._nodes(node.quick)
        test, blocks = node.failed
        pointers = ", ".join(local.name if local.lanes else f"&{local.name}" for local in blocks)
        self.open(f"if ({test}({pointers}, {size_of(blocks[0].lanes)}))")
        self._nodes(node.exact)
        self.close()

    def _declare(self, node: Declare) -> None:
        local, kind = node.local, computed(node.local.dtype)
        value = number(node.number, local.dtype)
        if not local.lanes:
            self.put(f"{kind} {local.name} = {value};")
            return
        size = size_of(local.lanes)
        self.put(f"alignas(64) {kind} {local.name}[{size}];")
        self.put("#pragma omp simd")
        self.put(f"for (i64 k = 0; k < {size}; k++) {local.name}[k] = {value};")

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _blocks(self, group: list[Block]) -> None:
        """One nest over the lanes that all statements of the group share."""
        first = group[0]
        if isinstance(first, Dot):
            self._dot(first)
            return
        if all(isinstance(node, Prefetch) for node in group):
            return
        lanes, bounds, conditions = first.lanes, self._bounds(first.lanes, first.guard), self._outside(first)
        for condition in conditions:
            self.open(f"if ({condition})")
        cut = cut_of(group, self.unlaned)
        if self._moved(group, cut, bounds):
            self.close(len(conditions))
            return
        staged = {node: self._stage(node, bounds) for node in group if isinstance(node, Write)}
        if cut is None:
            self._nest(group, lanes, bounds, staged)
        else:
            self._pieces(cut, lanes, bounds, staged)
        for node, stage in staged.items():
            if stage is not None:
                size = f"({stage.count}) * sizeof({ctype(node.tensor.dtype)})"
                to = f"{node.tensor.name} + {stage.base}"
                self.put(f"if (stream) {node.tensor.name}_stream.copy({to}, {stage.pointer}, {size});")
        self.close(len(conditions))

    def _pieces(self, cut: Cut, lanes: Lanes, bounds: dict[Lane, list[str]], staged: dict[Write, _Stage | None]) -> None:
        """A block in two nests: the positions of a lane at which what is read is there, and those behind them."""
        end = self._end(cut, bounds)
        originals = list(staged)
        for group, range_ in ((cut.inside, ("0", end)), (cut.outside, (end, self._limit(cut.lane, bounds[cut.lane])))):
            moved = {node: staged[old] for node, old in zip(group, originals, strict=True)}
            self._nest(group, lanes, bounds, moved, {cut.lane: range_})

    def _end(self, cut: Cut, bounds: dict[Lane, list[str]]) -> str:
        """The name of the first position of the lane that is cut at which nothing is there any more."""
        end, limit = self.fresh(), self._limit(cut.lane, bounds[cut.lane])
        for condition in cut.bounds:
            bound = self._bound(cut.lane, condition)
            assert bound is not None
            limit = f"smaller<i64>({limit}, {bound})"
        tests = " && ".join(f"{self.index(g.left)} < {self.index(g.right)}" for g in cut.tests)
        self.put(f"const i64 {end} = {f'!({tests}) ? 0 : ' if tests else ''}larger<i64>(0, {limit});")
        return end

    def _nest(
        self,
        group: Sequence[Block],
        lanes: Lanes,
        bounds: dict[Lane, list[str]],
        staged: dict[Write, _Stage | None],
        ranges: dict[Lane, tuple[str, str]] | None = None,
    ) -> None:
        """Loops over lanes around statements; `ranges` are first and last bounds of lanes that are not done as a whole."""
        for k, lane in enumerate(lanes):
            start, limit = (ranges or {}).get(lane) or ("0", self._limit(lane, bounds[lane]))
            if k == len(lanes) - 1:
                self._innermost(group, lane, (start, limit), staged, first=k == 0)
            else:
                self.open(f"for (i64 {lane.symbol} = {start}; {lane.symbol} < {limit}; {lane.symbol}++)")
                self._conditions(group, lane)
        if not lanes:
            self._statements(group, {}, staged)
        self.close(max(len(lanes) - 1, 0))

    def _conditions(self, group: Sequence[Block], lane: Lane) -> None:
        for condition in self._unbounded(group[0].lanes, group[0].guard, lane):
            self.put(f"if (!({condition})) continue;")

    def _innermost(
        self, group: Sequence[Block], lane: Lane, range_: tuple[str, str], staged: dict[Write, _Stage | None], *, first: bool
    ) -> None:
        start, limit = range_
        scalars = [n for n in group if isinstance(n, Reduce) and lane not in n.local.lanes]
        # A running value goes from one position to the next, so positions along it cannot be done at once.
        serial = any(isinstance(n, Running) and n.axis == lane for n in group)
        if scalars and lane.size > ABREAST and limit != str(lane.size) and not serial:
            self._abreast(group, scalars, lane, limit, staged)
            return
        if not first:
            self._prefetches(group, lane, lane.size)
        for node in scalars:
            self.put(f"{accumulated(node)} {node.local.name}_here = {number(identity(node), node.local.dtype)};")
        run = _Run(limit, lane.symbol.name)
        if start == "0":
            self._widen(group, lane, lane.size, run)
        if not serial:
            clauses = "".join(f" reduction({clause(n)}: {n.local.name}_here)" for n in scalars)
            self.put(f"#pragma omp simd{clauses}")
        self.open(f"for (i64 {lane.symbol} = {start}; {lane.symbol} < {limit}; {lane.symbol}++)")
        self._conditions(group, lane)
        self._statements(group, {n.local: f"{n.local.name}_here" for n in scalars}, staged)
        self.close()
        self._narrow(group, lane, staged, run)
        for node in scalars:
            self.put(self._combined(node, self._cell(node.local), f"{node.local.name}_here"))

    def _abreast(
        self, group: Sequence[Block], scalars: list[Reduce], lane: Lane, limit: str, staged: dict[Write, _Stage | None]
    ) -> None:
        """A long lane that is reduced, many positions side by side. The last ones are a block too, of which a part is there:
        that is a mask, and no loop from one position to the next."""
        here = {n.local: f"{n.local.name}_here[k]" for n in scalars}
        self.open("")
        for node in scalars:
            self.put(f"alignas(64) {accumulated(node)} {node.local.name}_here[{ABREAST}];")
            self.put("#pragma omp simd")
            self.put(f"for (int k = 0; k < {ABREAST}; k++) {here[node.local]} = {number(identity(node), node.local.dtype)};")
        self.put(f"const i64 count = {limit};")
        self.put("i64 done = 0;")
        for whole in (True, False):
            self.open(f"for (; done + {ABREAST} <= count; done += {ABREAST})" if whole else "if (done < count)")
            if whole:
                self._prefetches(group, lane, ABREAST, "done + ")
            run = _Run(str(ABREAST) if whole else "count - done", "k", " + done")
            self._widen(group, lane, ABREAST, run)
            self.put("#pragma omp simd")
            self.open(f"for (int k = 0; k < {ABREAST}; k++)")
            if not whole:
                self.open("if (k < (int)(count - done))")
            self.put(f"const i64 {lane.symbol} = done + k;")
            self._conditions(group, lane)
            self._statements(group, here, staged)
            self.close(1 if whole else 2)
            self._narrow(group, lane, staged, run)
            self.close()
        for node in scalars:
            combine = f"[]({accumulated(node)}& to, {accumulated(node)} x) {{ {self._combined(node, 'to', 'x')} }}"
            self.put(self._combined(node, self._cell(node.local), f"fold<{ABREAST}>({node.local.name}_here, {combine})"))
        self.close()

    def _prefetches(self, group: Sequence[Block], lane: Lane, size: int, done: str = "") -> None:
        """Cache lines of what comes next, one after the other, for hints whose innermost lane runs along memory."""
        for node in group:
            if isinstance(node, Prefetch):
                start = along(self._flat_expr(node.tensor, node.index), lane)
                if start is not None:
                    step = max(64 // node.tensor.dtype.itemsize, 1)
                    place = f"{node.tensor.name} + {self.index(start)} + {done}k"
                    self.put(f"for (i64 k = 0; k < {size}; k += {step}) __builtin_prefetch({place}, 0, 2);")

    def _statements(self, group: Sequence[Block], here: dict[Local, str], staged: dict[Write, _Stage | None]) -> None:
        scalars = Scalars(self._load, lambda h: self._cell(h.local), self._existing, self.index, self.fresh)
        for node in group:
            if isinstance(node, Prefetch):
                continue
            assert not isinstance(node, Dot)
            if isinstance(node, Write) and moves(node):
                source, (to, place) = node.value, self._target(node, staged)
                assert isinstance(source, Load)
                self.put(f"{to}[{self.index(place)}] = {source.tensor.name}[{self._flat(source.tensor, source.index)}];")
                continue
            text = scalars.text(unrounded(node))
            for line in scalars.lines:
                self.put(line)
            scalars.lines.clear()
            if isinstance(node, Write):
                if node in self.converted:
                    self.put(f"{self.converted[node]} = {text};")
                else:
                    to, place = self._target(node, staged)
                    self.put(f"store({to}[{self.index(place)}], ({computed(node.tensor.dtype)}){text});")
            elif isinstance(node, Assign):
                self.put(f"{self._cell(node.local)} = {text};")
                scalars.forget(held(node.local))
            elif isinstance(node, Running):
                self.put(self._combined(node, self._cell(node.carry), text))
                self.put(f"{self._cell(node.local)} = {self._cell(node.carry)};")
                scalars.forget(held(node.local))
                scalars.forget(held(node.carry))
            else:
                self.put(self._combined(node, here.get(node.local) or self._cell(node.local), text))
                scalars.forget(held(node.local))

    def _target(self, node: Write, staged: dict[Write, _Stage | None]) -> tuple[str, Expr]:
        """Where a statement writes: a pointer and the place behind it."""
        stage = staged[node]
        return (stage.pointer, stage.place) if stage else (node.tensor.name, self._flat_expr(node.tensor, node.index))

    # --- sixteen bits, a block at a time --------------------------------------------------------------------------------

    def _widen(self, group: Sequence[Block], lane: Lane, size: int, run: _Run) -> None:
        """Converts the float16 that the loop over a lane reads before it begins: there are instructions for many at once, which
        compilers do not find in a loop. What the loop writes in sixteen bits gets a block of float32 of its own."""
        if self._unbounded(group[0].lanes, group[0].guard, lane):
            # What a condition leaves out must not be touched.
            return
        found: dict[Load | Write, tuple[Tensor, Sequence[Expr]]] = {}
        for node in group:
            if isinstance(node, Write) and moves(node):
                continue
            loads = [v for value in values_of(node) for v in value.walk() if isinstance(v, Load) and not v.guard]
            found.update((v, (v.tensor, v.index)) for v in loads)
            if isinstance(node, Write):
                found[node] = (node.tensor, node.index)
        for access, (tensor, index) in found.items():
            start = along(self._flat_expr(tensor, index), lane)
            # Of bfloat16 only results: what is read is a shift away from float32.
            half = tensor.dtype == torch.float16 or (tensor.dtype == torch.bfloat16 and isinstance(access, Write))
            if half and start is not None:
                name = self.fresh()
                self.put(f"alignas(64) f32 {name}[{size}];")
                if isinstance(access, Load):
                    self.put(f"widen({name}, {tensor.name} + {self.index(start)}{run.done}, {run.count});")
                self.converted[access] = f"{name}[{run.at}]"

    def _narrow(self, group: Sequence[Block], lane: Lane, staged: dict[Write, _Stage | None], run: _Run) -> None:
        """Writes what the loop over a lane has left in float32."""
        for node in group:
            if isinstance(node, Write) and node in self.converted:
                to, place = self._target(node, staged)
                start = place.substitute({lane.symbol: const(0)})
                name = self.converted[node].removesuffix(f"[{run.at}]")
                self.put(f"narrow({to} + {self.index(start)}{run.done}, {name}, {run.count});")
        self.converted.clear()

    def _combined(self, node: Reduce | Running, to: str, value: str) -> str:
        """`to = to op value`; integers wrap, as in torch."""
        if wraps(node):
            sign = "+" if node.operator == "sum" else "*"
            return f"{to} = (unsigned long long){to} {sign} (unsigned long long){value};"
        return COMBINE[node.operator].format(to, value) + ";"

    def _cell(self, local: Local) -> str:
        """An element of a private block, at the current lanes."""
        if not local.lanes:
            return local.name
        place: Expr = const(0)
        for lane in local.lanes:
            place = place * lane.size + lane.symbol
        return f"{local.name}[{index_text(place, self.names)}]"

    def _flat(self, tensor: Tensor, index: Sequence[Expr]) -> str:
        return self.index(self._flat_expr(tensor, index))

    def _flat_expr(self, tensor: Tensor, index: Sequence[Expr]) -> Expr:
        """The position in memory: row-major over storage, or over a private row."""
        sizes = [d.extent_expr for d in tensor.storage]
        if tensor.role is Role.PRIVATE:
            sizes = [d.extent_expr for d in tensor.logical if not owns(d, tensor)]
        return flat_index([self.unlaned(e) for e in index], sizes)

    def _load(self, value: Load) -> str:
        if value in self.converted:
            return self.converted[value]
        text = f"load({value.tensor.name}[{self._flat(value.tensor, value.index)}])"
        if not value.guard:
            return text
        inside = " && ".join(f"{self.index(g.left)} < {self.index(g.right)}" for g in value.guard)
        other = f"({computed(value.dtype)})0" if repr(value.other) == "0" else number(value.other, value.dtype)
        return f"({inside}) ? {text} : {other}"

    def _existing(self, value: Existing) -> str:
        bounds = self._bounds(value.lanes, value.guard)
        counts = [f"larger<i64>(0, {self._limit(lane, bounds[lane])})" for lane in value.lanes]
        on_lanes = {g for _, g in self._on_lanes(value.lanes, value.guard)}
        spelled = [Less(self.unlaned(g.left), self.unlaned(g.right)) for g in value.guard]
        tests = [f"({self.index(g.left)} < {self.index(g.right)})" for g in spelled if g not in on_lanes]
        return f"({' * '.join([*counts, *tests]) or '1'})"

    # --- guards as bounds ---------------------------------------------------------------------------------------------

    def _outside(self, node: Block) -> list[str]:
        lanes = {lane.symbol for lane in node.lanes}
        plain = [g for g in node.guard if not ({s for e in (g.left, g.right) for s in self.unlaned(e).symbols} & lanes)]
        return [f"{self.index(g.left)} < {self.index(g.right)}" for g in plain]

    def _bounds(self, lanes: Lanes, guard: Guard) -> dict[Lane, list[str]]:
        """For each lane the bounds that guards put on it, given the lanes before it."""
        bounds: dict[Lane, list[str]] = {lane: [] for lane in lanes}
        for lane, condition in self._on_lanes(lanes, guard):
            bound = self._bound(lane, condition)
            if bound is not None:
                bounds[lane].append(bound)
        return bounds

    def _on_lanes(self, lanes: Lanes, guard: Guard) -> list[tuple[Lane, Less]]:
        """Each condition with the innermost lane it depends on."""
        spelled = [Less(self.unlaned(g.left), self.unlaned(g.right)) for g in guard]
        pairs = [([lane for lane in lanes if lane.symbol in g.symbols], g) for g in spelled]
        return [(on[-1], g) for on, g in pairs if on]

    def _unbounded(self, lanes: Lanes, guard: Guard, lane: Lane) -> list[str]:
        """Conditions on a lane that no loop bound can express; tested inside its loop."""
        found = [g for on, g in self._on_lanes(lanes, guard) if on == lane and self._bound(on, g) is None]
        return [f"{self.index(g.left)} < {self.index(g.right)}" for g in found]

    def _bound(self, lane: Lane, condition: Less) -> str | None:
        terms = condition.left.terms if isinstance(condition.left, Sum) else ((condition.left, 1),)
        factor = next((f for t, f in terms if t is lane.symbol), 0)
        rest = condition.left - lane.symbol * factor
        if factor < 1 or lane.symbol in rest.symbols or lane.symbol in condition.right.symbols:
            return None
        room = condition.right - rest
        return self.index(room if factor == 1 else (room + factor - 1) // factor)

    def _limit(self, lane: Lane, bounds: list[str]) -> str:
        limit = str(lane.size)
        for bound in bounds:
            limit = f"smaller<i64>({limit}, {bound})"
        return limit

    # --- results past the cache ---------------------------------------------------------------------------------------

    def _block_bytes(self, node: Write) -> int:
        """Bytes of the block a statement writes if it lies in one piece, else 0."""
        if node.tensor.role is not Role.OUTPUT or not node.lanes:
            return 0
        flat = self._flat_expr(node.tensor, node.index)
        terms = dict(flat.terms) if isinstance(flat, Sum) else {flat: 1}
        expected = 1
        guarded = {lane for g in node.guard for lane in node.lanes if lane.symbol in g.symbols}
        for k, lane in reversed(list(enumerate(node.lanes))):
            # What another term finds for each lane, such as the row it belongs to, may jump from one to the next.
            jumps = any(lane.symbol in term.symbols for term in terms if term is not lane.symbol)
            if terms.get(lane.symbol) != expected or jumps or (k > 0 and lane in guarded):
                return 0
            expected *= lane.size
        size = expected * node.tensor.dtype.itemsize
        return size if 256 <= size <= 65536 else 0

    def _stage(self, node: Write, bounds: dict[Lane, list[str]]) -> _Stage | None:
        if not self._block_bytes(node):
            return None
        flat = self._flat_expr(node.tensor, node.index)
        start = flat.substitute({lane.symbol: const(0) for lane in node.lanes})
        name = self.fresh()
        kind = ctype(node.tensor.dtype)
        inner = size_of(node.lanes[1:])
        base = self.fresh()
        self.put(f"const i64 {base} = {self.index(start)};")
        self.put(f"Stage<{kind}, {size_of(node.lanes)}> {name}_stage;")
        place = f"{name}_stage.apart_from({self._source(node)})"
        self.put(f"{kind}* __restrict {name} = stream ? {place} : {node.tensor.name} + {base};")
        count = f"larger<i64>(0, {self._limit(node.lanes[0], bounds[node.lanes[0]])}) * {inner}"
        return _Stage(name, base, flat - start, count)

    def _source(self, node: Write) -> str:
        """Where the block that a statement reads begins in memory: of what runs over most lanes, if that is known beforehand."""
        at: dict[Expr, Expr] = {lane.symbol: const(0) for lane in node.lanes}
        found: list[tuple[int, str]] = []
        for load in (v for v in node.value.walk() if isinstance(v, Load) and not v.guard and v.tensor.role is not Role.SCRATCH):
            flat = self._flat_expr(load.tensor, load.index)
            start = flat.substitute(at)
            if not start.arrays:
                found.append((len(flat.symbols & at.keys()), f"{load.tensor.name} + {self.index(start)}"))
        return max(found, key=lambda each: each[0])[1] if found else "nullptr"

    def _moved(self, group: Sequence[Block], cut: Cut | None, bounds: dict[Lane, list[str]]) -> bool:
        """A block that lies in one piece, where it is read too, is copied as bytes; behind what is there, it is filled."""
        first = group[0]
        if len(group) > 1 or not isinstance(first, Write) or not self._block_bytes(first):
            return False
        node, filled = (first, None) if cut is None else (cut.inside[0], cut.outside[0])
        if not moves(node) or (cut is not None and cut.lane != node.lanes[0]):
            return False
        source, name, kind = node.value, node.tensor.name, ctype(node.tensor.dtype)
        assert isinstance(source, Load)
        at: dict[Expr, Expr] = {lane.symbol: const(0) for lane in node.lanes}
        to, by = self._flat_expr(node.tensor, node.index), self._flat_expr(source.tensor, source.index)
        start = to.substitute(at)
        fill = None if filled is None else self._same_everywhere(filled)
        if to - start != by - by.substitute(at) or (filled is not None and fill is None):
            return False
        limit, inner = self._limit(node.lanes[0], bounds[node.lanes[0]]), size_of(node.lanes[1:])
        end = f"larger<i64>(0, {limit})" if cut is None else self._end(cut, bounds)
        pointers = f"{name} + {self.index(start)}, {source.tensor.name} + {self.index(by.substitute(at))}"
        self.put(f"copy_bytes({name}_stream, {pointers}, {end} * {inner} * sizeof({kind}), stream);")
        if fill is not None:
            place = f"{name} + {self.index(start)} + {end} * {inner}"
            self.put(
                f"fill_with<{kind}>({name}_stream, {place}, {fill}, (larger<i64>({end}, {limit}) - {end}) * {inner}, stream);"
            )
        return True

    def _same_everywhere(self, node: Write) -> str | None:
        """What a statement writes if it is the same in all lanes, as its tensor stores it; else None."""
        value, kind = node.value, ctype(node.tensor.dtype)
        if isinstance(value, Constant):
            return f"stored<{kind}>({number(value.number, value.dtype)})"
        if not moves(node) or not isinstance(value, Load):
            return None
        place = self._flat_expr(value.tensor, value.index)
        still = not place.symbols & {lane.symbol for lane in node.lanes}
        return f"{value.tensor.name}[{self.index(place)}]" if still else None

    # --- matrix products ----------------------------------------------------------------------------------------------

    def _dot(self, node: Dot) -> None:
        """A product of blocks: operands that lie in memory in the type it is made in are used in place, others are copied."""
        rows, columns, depth = node.lanes
        bounds = self._bounds(node.lanes, node.guard)
        for condition in self._outside(node):
            self.put(f"if (!({condition})) continue;")
        limits = {lane: self.fresh() for lane in node.lanes}
        for lane in node.lanes:
            self.put(f"const i64 {limits[lane]} = larger<i64>(0, {self._limit(lane, bounds[lane])});")
        pairs = columns.size == PAIRED and all(isinstance(v, Load) and v.dtype == torch.bfloat16 for v in (node.left, node.right))
        kind = "bf16" if pairs else computed(node.local.dtype)
        a, am = self._operand(node.left, rows, depth, limits, kind)
        b, bk = self._operand(node.right, depth, columns, limits, kind)
        extents = ", ".join(limits[lane] for lane in (rows, columns, depth))
        name = f"dot_pairs<{rows.size}, {depth.size}>" if pairs else f"dot<{kind}>"
        self.put(f"{name}({node.local.name}, {columns.size}, {a}, {am}, {b}, {bk}, {extents});")

    def _operand(self, value: Value, outer: Lane, inner: Lane, limits: dict[Lane, str], kind: str) -> tuple[str, str]:
        """A pointer to the operand and the distance of its rows; its columns are side by side."""
        if isinstance(value, Load) and ctype(value.dtype) == kind and not value.guard:
            flat = self._flat_expr(value.tensor, value.index)
            terms = dict(flat.terms) if isinstance(flat, Sum) else {flat: 1}
            first, second, third = (flat.substitute({outer.symbol: const(k), inner.symbol: const(0)}) for k in range(3))
            stride = second - first
            # Rows that are looked up (those of different components may lie anywhere) have no one distance.
            even = (third - second - stride).value == 0
            if terms.get(inner.symbol) == 1 and even and not stride.symbols & {outer.symbol, inner.symbol}:
                return f"{value.tensor.name} + {self.index(first)}", f"({self.index(stride)})"
        name = self.fresh()
        self.put(f"static thread_local {kind} {name}[{outer.size * inner.size}];")
        self.open(f"for (i64 {outer.symbol} = 0; {outer.symbol} < {limits[outer]}; {outer.symbol}++)")
        self.open(f"for (i64 {inner.symbol} = 0; {inner.symbol} < {limits[inner]}; {inner.symbol}++)")
        scalars = Scalars(self._load, lambda h: self._cell(h.local), self._existing, self.index, self.fresh)
        text = scalars.text(value)
        for line in scalars.lines:
            self.put(line)
        self.put(f"store({name}[{outer.symbol} * {inner.size} + {inner.symbol}], {text});")
        self.close(2)
        return name, str(inner.size)


@dataclass(frozen=True)
class _Run:
    """How far an innermost loop goes, what counts its positions, and where along the lane it begins."""

    count: str
    at: str
    done: str = ""


@dataclass(frozen=True)
class _Stage:
    pointer: str
    base: str
    place: Expr
    count: str
