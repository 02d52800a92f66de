"""Prints loop programs as C++: grid loops run on threads, serial loops as they are, blocks as loops over their lanes.

In: a loop program. Out: one source text with an `extern "C"` function, and the order of its arguments. Guards become loop
bounds: a lane's loop ends where its elements end; only the last block of a long reduced lane is masked. Blocks over the same
lanes share one nest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from serrate.codegen.cpp.index_set_split import IndexSetSplit, cut_of, moves
from serrate.codegen.cpp.names import RESERVED
from serrate.codegen.cpp.products import fetch, product
from serrate.codegen.cpp.statements import accumulated, along, clause, identity, size_of, unrounded, wraps
from serrate.codegen.cpp.streams import Stage, Straight, block_bytes, moved, streaming_of
from serrate.codegen.cpp.text import Text
from serrate.codegen.cpp.values import computed, ctype, number
from serrate.codegen.names import identifier, renamed, spellings
from serrate.errors import VerificationError
from serrate.ir.expr import Array, Element, Expr, Search, const, symbol
from serrate.ir.loops import (
    MAX_NUMBER,
    Assign,
    Bind,
    Block,
    Declare,
    Dot,
    Fold,
    For,
    Guard,
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
    expressions_of,
    factors_of,
    held,
    nodes,
    symbols_of,
    values_of,
)
from serrate.ir.tile import GRID
from serrate.ir.values import Call, Role, Tensor, Value
from serrate.lower.names import array_names
from serrate.lower.nests import joins, locals_of

COMBINE = {
    "sum": "{0} += {1}",
    "prod": "{0} *= {1}",
    "max": "{0} = max_nan({0}, {1})",
    "min": "{0} = min_nan({0}, {1})",
    MAX_NUMBER: "{0} = {1} > {0} ? {1} : {0}",
    "any": "{0} = {0} || {1}",
    "all": "{0} = {0} && {1}",
}
TOGETHER = 16
"""How many rows a thread takes at a time: enough that taking them costs nothing, few enough for load balance."""
ABREAST = 32
"""How many positions of a long lane are reduced side by side, into separate partial results."""


@dataclass(frozen=True)
class CppSource:
    """Generated C++. It takes pointers to the program's tensors and arrays, then integers: the number of threads, whether
    results bypass the cache, the program's symbols, and the size of a row of each private tensor."""

    name: str
    text: str


Streaming = dict[Write, Stage | Straight | None]
"""How the results of statements bypass the cache, by statement."""

SMALL = 1 << 15
"""Below this many elements, one thread is faster than waking others."""
LARGE, STACK = 1 << 16, 1 << 18
"""The most bytes of one block, and of all blocks, on a thread's stack."""


def print_cpp(program: LoopProgram, wide: frozenset[Array] = frozenset()) -> CppSource:
    """The program in C++; `wide` names the arrays that hold int64 (others hold int32)."""
    new = spellings(program, RESERVED)
    return _CppPrinter(renamed(program, new), wide, new).source()


class _CppPrinter(Text):
    def __init__(self, program: LoopProgram, wide: frozenset[Array], new: Mapping[str, str]) -> None:
        names = array_names(program).items()
        values = (value for kernel in program.kernels for node in nodes(kernel.body) for value in values_of(node))
        read = frozenset(v.tensor.memory for value in values for v in value.walk() if isinstance(v, Load))
        super().__init__({a: new.get(name, name) if a.local else f"{name}_at" for a, name in names}, read)
        self.program = program
        self.wide = wide
        self.private = tuple(t for t in program.scratch if t.role is Role.PRIVATE)
        self.tensors = program.tensors
        self.large: dict[str, Local] = {}
        """Private blocks of the current kernel that are on the heap."""

    def source(self) -> CppSource:
        program = self.program
        for line in program.header:
            self.put(f"// {line}")
        name = identifier(program.name)
        self.put(f'extern "C" void {name}(void* const* pointer, const i64* given) {{')
        self.indent = 1
        self._arguments()
        for kernel in program.kernels:
            self._kernel(kernel)
        self.indent = 0
        self.put("}")
        text = "\n".join(self.lines) + "\n"
        return CppSource(name, text)

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
            self.put("const bool stream = given[1] & 1;")
        for k, extent in enumerate(self.program.symbols, 2):
            self.put(f"const i64 {extent} = given[{k}];")
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
        return any(isinstance(n, Write) and block_bytes(self, n) for k in self.program.kernels for n in nodes(k.body))

    # --- kernels and loops --------------------------------------------------------------------------------------------

    def _kernel(self, kernel: LoopKernel) -> None:
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
            self._large_blocks(body)
            streamed = self._open_streams(body)
            self._nodes(body)
            self._close_streams(streamed)
        self.close()

    def _large_blocks(self, body: Sequence[Node]) -> None:
        """Allocates the blocks that do not fit on the stack, once per thread."""
        blocks = sorted(
            (n.local for n in nodes(tuple(body)) if isinstance(n, Declare) and n.local.lanes), key=lambda local: local.nbytes
        )
        total, self.large = 0, {}
        for local in blocks:
            total += local.nbytes
            if local.nbytes > LARGE or total > STACK:
                self.large[local.name] = local
        for name, local in self.large.items():
            self.put(f"Heap<{computed(local.dtype)}> {name}_heap({size_of(local.lanes)});")

    def _open_streams(self, body: Sequence[Node]) -> list[Tensor]:
        """Declares a stream for each result that bypasses the cache."""
        written = {n.tensor: None for n in nodes(tuple(body)) if isinstance(n, Write) and block_bytes(self, n)}
        for tensor in written:
            self.put(f"Stream {tensor.name}_stream;")
        return list(written)

    def _close_streams(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self.put(f"{tensor.name}_stream.flush();")
        if tensors:
            self.put("if (stream) stream_fence();")

    def _grid(self, outermost: For) -> None:
        """Prints nested grid loops as one loop over all their positions, distributed over threads in runs."""
        loops = [outermost]
        named: list[Bind] = []
        while True:
            # Names bound between the loops are bound inside all of them.
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
        together = self._together(outermost)
        if together is not None:
            self.put("Part parts[threads];")
            self.put(f"const Runs runs(parts, threads, positions, {together}, given[1] >> 1);")
        self.put(f"#pragma omp parallel num_threads(threads) if ({self._is_shared(outermost)})")
        self.open("")
        for tensor in self.private:
            mine = f"{tensor.name}_all + omp_get_thread_num() * {tensor.name}_size"
            self.put(f"{ctype(tensor.dtype)}* __restrict {tensor.name} = {mine};")
        self._large_blocks([outermost])
        streamed = self._open_streams([outermost])
        at = outermost.symbol.name if len(loops) == 1 else "position"
        if together is None:
            self.put("#pragma omp for schedule(static)")
            self.open(f"for (i64 {at} = 0; {at} < positions; {at}++)")
        else:
            self.open(f"for (Run run; runs.take(run);) for (i64 {at} = run.begin; {at} < run.end; {at}++)")
        rest = at
        for k in reversed(range(len(loops))) if len(loops) > 1 else ():
            self.put(f"const i64 {loops[k].symbol} = {rest}{f' % extent{k}' if k else ''};")
            rest = f"{rest} / extent{k}" if k else rest
        self._nodes((*named, *loops[-1].body))
        self.close()
        self._close_streams(streamed)
        self.close()

    def _is_shared(self, outermost: For) -> str:
        """The condition for sharing a grid between threads: it has several positions, and touches a tensor that is large enough.
        In a program with one kernel, the caller has decided the latter."""
        conditions = ["threads > 1", "positions > 1"]
        if len(self.program.kernels) > 1:
            largest = "0"
            for size in sorted(self._sizes(outermost), key=str):
                if size.arrays or not size.symbols <= set(self.program.symbols):
                    return " && ".join(conditions)
                largest = f"larger<i64>({largest}, {self.index(size)})"
            conditions.append(f"{largest} >= {SMALL}")
        return " && ".join(conditions)

    def _sizes(self, outermost: For) -> set[Expr]:
        """The numbers of elements of all tensors that a loop touches."""
        inside = list(nodes((outermost,)))
        named = {t.name: t for t in self.program.inputs}
        found = {node.tensor for node in inside if isinstance(node, Write)}
        found |= {v.tensor for node in inside for value in values_of(node) for v in value.walk() if isinstance(v, Load)}
        read = {e.array.name for node in inside for x in expressions_of(node) for e in x.walk() if isinstance(e, Element)}
        found |= {named[name] for name in read & named.keys()}
        return {prod((d.extent_expr for d in t.storage), start=const(1)) for t in found if t.role is not Role.PRIVATE}

    def _together(self, outermost: For) -> int | None:
        """How many positions a thread takes at a time if rows differ; None if all positions cost the same."""
        inside = list(nodes((outermost,)))
        reads = [e for node in inside for x in expressions_of(node) for e in x.walk()]
        given = {*self.program.symbols, *(n.symbol for n in inside if isinstance(n, For))}
        computed_ends = any(isinstance(n, For) and n.extent.symbols - given for n in inside)
        if not computed_ends and not any(isinstance(e, Element | Search | While) for e in (*reads, *inside)):
            return None
        # Pieces of rows may be long, and products of blocks take long.
        return 1 if any(isinstance(e, Search | Dot) for e in (*reads, *inside)) else TOGETHER

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
        elif isinstance(node, Declare):
            self._declare(node)
        elif isinstance(node, If):
            self._if(node)
        elif isinstance(node, While):
            self.open("while (true)")
            self._nodes(node.test)
            self.put(f"if (!({self._all(node.guard)})) break;")
            self._nodes(node.body)
            self.close()
        else:
            raise VerificationError(f"the cpp backend cannot print {node}")

    def _all(self, guard: Guard) -> str:
        return " && ".join(f"{self.index(g.left)} < {self.index(g.right)}" for g in guard) or "true"

    def _if(self, node: If) -> None:
        if not node.then:
            self.open(f"if (!({self._all(node.guard)}))")
            self._nodes(node.other)
            self.close()
            return
        self.open(f"if ({self._all(node.guard)})")
        self._nodes(node.then)
        self.close()
        if node.other:
            self.open("else")
            self._nodes(node.other)
            self.close()

    def _declare(self, node: Declare) -> None:
        local, kind = node.local, computed(node.local.dtype)
        value = None if node.number is None else number(node.number, local.dtype)
        if not local.lanes:
            self.put(f"{kind} {local.name};" if value is None else f"{kind} {local.name} = {value};")
            return
        size = size_of(local.lanes)
        if local.name in self.large:
            self.put(f"{kind}* __restrict {local.name} = {local.name}_heap.at;")
        else:
            self.put(f"alignas(64) {kind} {local.name}[{size}];")
        if value is None:
            return
        self.put("#pragma omp simd")
        self.put(f"for (i64 k = 0; k < {size}; k++) {local.name}[k] = {value};")

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _blocks(self, group: list[Block]) -> None:
        """One nest over the lanes that all statements of the group share."""
        first = group[0]
        if isinstance(first, Dot):
            product(self, first)
            return
        if all(isinstance(node, Prefetch) for node in group):
            if len(first.lanes) == 1:
                self._prefetches(group, first.lanes[0], first.lanes[0].size)
                return
            for node in group:
                assert isinstance(node, Prefetch)
                fetch(self, node)
            return
        lanes, bounds, conditions = first.lanes, self.bounds(first.lanes, first.guard), self.outside(first)
        for condition in conditions:
            self.open(f"if ({condition})")
        cut = cut_of(group, self.unlaned)
        if moved(self, group, cut, bounds):
            self.close(len(conditions))
            return
        pieces: Sequence[Sequence[Block]] = [group] if cut is None else cut.pieces
        staged = {node: streaming_of(self, node, bounds, pieces) for node in group if isinstance(node, Write)}
        if cut is None:
            self._nest(group, lanes, bounds, staged)
        else:
            self._pieces(cut, lanes, bounds, staged)
        for node, stage in staged.items():
            if isinstance(stage, Stage):
                size = f"({stage.count}) * sizeof({ctype(node.tensor.dtype)})"
                to = f"{node.tensor.name} + {stage.base}"
                self.put(f"if (stream) {node.tensor.name}_stream.copy({to}, {stage.pointer}, {size});")
        self.close(len(conditions))

    def _pieces(
        self,
        cut: IndexSetSplit,
        lanes: Lanes,
        bounds: dict[Lane, list[str]],
        staged: Streaming,
        range_: tuple[str, str] | None = None,
    ) -> None:
        """A block as two loop nests: over the positions of a lane at which everything it reads exists, and over the rest."""
        guard = next(iter(staged)).guard
        start, limit = range_ or (self.start(cut.lane, lanes, guard), self.limit(cut.lane, bounds[cut.lane]))
        end = self.end(cut, limit)
        after = end if start == "0" else f"larger<i64>({start}, {end})"
        for piece, part in ((cut.inside, (start, end)), (cut.outside, (after, limit))):
            if isinstance(piece, IndexSetSplit):
                self._pieces(piece, lanes, bounds, staged, part)
            else:
                own = dict(zip(piece, staged.values(), strict=True))
                self._nest(piece, lanes, bounds, own, {cut.lane: part})

    def _nest(
        self,
        group: Sequence[Block],
        lanes: Lanes,
        bounds: dict[Lane, list[str]],
        staged: Streaming,
        ranges: dict[Lane, tuple[str, str]] | None = None,
    ) -> None:
        """Prints loops over lanes around statements; `ranges` are the start and end of lanes that do not run in full."""
        for k, lane in enumerate(lanes):
            start, limit = (ranges or {}).get(lane) or (self.start(lane, lanes, group[0].guard), self.limit(lane, bounds[lane]))
            self._draw(group, lanes[k:], limit)
            if k == len(lanes) - 1:
                self._innermost(group, lane, (start, limit), staged, first=k == 0)
            else:
                self.open(f"for (i64 {lane.symbol} = {start}; {lane.symbol} < {limit}; {lane.symbol}++)")
                self._conditions(group, lane)
        if not lanes:
            self._statements(group, {}, staged)
        self.close(max(len(lanes) - 1, 0))
        self.drawn.clear()

    def _draw(self, group: Sequence[Block], lanes: Lanes, limit: str) -> None:
        """Draws the random bits of all positions of some lanes before the loops over them, where they are consecutive: four
        neighbours share the work, and vectors of them are drawn at once."""
        if size_of(lanes) * 4 > LARGE:
            return
        found = (v for node in group for value in values_of(node) for v in value.walk())
        for call in [v for v in found if isinstance(v, Call) and v.function == "random_bits" and v not in self.drawn]:
            seed, word, position = call.args
            if not isinstance(position, Number) or not self._is_scalar(seed, lanes) or not self._is_scalar(word, lanes):
                continue
            at = self.unlaned(position.expr)
            first = at.substitute({lane.symbol: const(0) for lane in lanes})
            place: Expr = const(0)
            for lane in lanes:
                place = place * lane.size + lane.symbol
            if at - first is not place or call in self.drawn:
                continue
            bits, run, scalars = self.fresh(), self.fresh(), self.scalars()
            count = f"larger<i64>(0, {limit}) * {size_of(lanes[1:])}"
            key = f"{scalars.text(seed)}, {scalars.text(word)}"
            for line in scalars.lines:
                self.put(line)
            self.put(f"alignas(64) u32 {bits}[{size_of(lanes) + 67}];")
            self.put(f"const i32* {run} = random_run({bits}, {key}, {self.index(first)}, {count});")
            self.drawn[call] = f"{run}[{self.index(place)}]"

    def _is_scalar(self, value: Value, lanes: Lanes) -> bool:
        """Whether a value is the same for all positions of some lanes, and can be computed even if there are none."""
        inner = {lane.symbol for lane in lanes}
        if any(isinstance(v, Load) and v.index for v in value.walk()):
            return False
        return not inner & {s for symbol in symbols_of(value) for s in self.unlaned(symbol).symbols}

    def _conditions(self, group: Sequence[Block], lane: Lane) -> None:
        for condition in self.unbounded(group[0].lanes, group[0].guard, lane):
            self.put(f"if (!({condition})) continue;")

    def _innermost(self, group: Sequence[Block], lane: Lane, range_: tuple[str, str], staged: Streaming, *, first: bool) -> None:
        start, limit = range_
        if isinstance(group[0], Write) and isinstance(staged[group[0]], Straight):
            self._straight(group[0], lane, range_)
            return
        scalars = [n for n in group if isinstance(n, Reduce) and lane not in n.local.lanes]
        # A scan passes a value from one position to the next, so its lane cannot be vectorized.
        serial = any(isinstance(n, Running) and n.axis == lane for n in group)
        if scalars and lane.size > ABREAST and limit != str(lane.size) and not serial:
            self._abreast(group, scalars, lane, range_, staged)
            return
        if not first:
            self._prefetches(group, lane, lane.size)
        for node in scalars:
            self.put(f"{accumulated(node)} {node.local.name}_here = {number(identity(node), node.local.dtype)};")
        run = _InnerLoop(limit, lane.symbol.name)
        if start == "0":
            self._widen(group, lane, lane.size, run)
        ordered = serial or any(isinstance(n, Write) and n.add for n in group)
        if not ordered:
            clauses = "".join(f" reduction({clause(n)}: {n.local.name}_here)" for n in scalars)
            self.put(f"#pragma omp simd{clauses}")
        self.open(f"for (i64 {lane.symbol} = {start}; {lane.symbol} < {limit}; {lane.symbol}++)")
        if ordered:
            # g++ 12 unrolls a short loop and vectorizes the one around it, with wrong masks for reads whose condition depends on
            # the outer position. It does not vectorize loops with an assembly statement.
            self.put('asm volatile("");')
        self._conditions(group, lane)
        self._statements(group, {n.local: f"{n.local.name}_here" for n in scalars}, staged)
        self.close()
        self._narrow(group, lane, staged, run)
        for node in scalars:
            self.put(self._combined(node, self.cell(node.local), f"{node.local.name}_here"))

    def _straight(self, node: Write, lane: Lane, range_: tuple[str, str]) -> None:
        """Prints the loop over a lane as a lambda of a first position and a count, called per streamed cache line."""
        to, first, count = (self.fresh() for _ in range(3))
        base = self.flat_expr(node.tensor, node.index).substitute({lane.symbol: const(0)})
        name, kind = node.tensor.name, ctype(node.tensor.dtype)
        taken = f"{kind}* __restrict {to}, i64 {first}, i64 {count}"
        where = f"{name} + {self.index(base)}, {range_[0]}, {range_[1]}, stream"
        self.open(f"{name}_stream.each({where}, [&]({taken}) __attribute__((always_inline))")
        self.put("#pragma omp simd")
        self.open(f"for (i64 {lane.symbol} = {first}; {lane.symbol} < {first} + {count}; {lane.symbol}++)")
        self._statements([node], {}, {node: Stage(to, "", lane.symbol - symbol(first), "")})
        self.close()
        self.indent -= 1
        self.put("});")

    def _abreast(
        self,
        group: Sequence[Block],
        scalars: list[Reduce],
        lane: Lane,
        range_: tuple[str, str],
        staged: Streaming,
    ) -> None:
        """Prints the reduction of a long lane, many positions side by side. The last block is partial and masked, so there is no
        scalar remainder loop."""
        here = {n.local: f"{n.local.name}_here[k]" for n in scalars}
        self.open("")
        for node in scalars:
            self.put(f"alignas(64) {accumulated(node)} {node.local.name}_here[{ABREAST}];")
            self.put("#pragma omp simd")
            self.put(f"for (int k = 0; k < {ABREAST}; k++) {here[node.local]} = {number(identity(node), node.local.dtype)};")
        self.put(f"const i64 count = {range_[1]};")
        self.put(f"i64 done = {range_[0]};")
        for whole in (True, False):
            self.open(f"for (; done + {ABREAST} <= count; done += {ABREAST})" if whole else "if (done < count)")
            if whole:
                self._prefetches(group, lane, ABREAST, "done + ")
            run = _InnerLoop(str(ABREAST) if whole else "count - done", "k", " + done")
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
            self.put(self._combined(node, self.cell(node.local), f"fold<{ABREAST}>({node.local.name}_here, {combine})"))
        self.close()

    def _prefetches(self, group: Sequence[Block], lane: Lane, size: int, done: str = "") -> None:
        """Prints prefetches of the next cache lines, for hints whose innermost lane is contiguous."""
        for node in group:
            if isinstance(node, Prefetch):
                start = along(self.flat_expr(node.tensor, node.index), lane)
                if start is not None:
                    step = max(64 // node.tensor.dtype.itemsize, 1)
                    place = f"{node.tensor.name} + {self.index(start)} + {done}k"
                    self.put(f"for (i64 k = 0; k < {size}; k += {step}) __builtin_prefetch({place}, 0, 2);")

    def _statements(self, group: Sequence[Block], here: dict[Local, str], staged: Streaming) -> None:
        scalars = self.scalars()
        for node in group:
            if isinstance(node, Prefetch):
                continue
            assert not isinstance(node, Dot | Fold)
            if isinstance(node, Write) and moves(node) and not node.add:
                source, (to, place) = node.value, self._target(node, staged)
                assert isinstance(source, Load)
                self.put(f"{to}[{self.index(place)}] = {source.tensor.name}[{self.flat(source.tensor, source.index)}];")
                continue
            product = None if scalars.known(node.value) else factors_of(node)
            text, *by = [scalars.text(v) for v in product or (unrounded(node),)]
            for line in scalars.lines:
                self.put(line)
            scalars.lines.clear()
            if isinstance(node, Write):
                if node in self.converted:
                    self.put(f"{self.converted[node]} = {text};")
                elif node.add:
                    at, kind = self.flat(node.tensor, node.index), computed(node.tensor.dtype)
                    self.put(f"add_alone({node.tensor.name}[{at}], ({kind}){text});")
                else:
                    to, place = self._target(node, staged)
                    self.put(f"store({to}[{self.index(place)}], ({computed(node.tensor.dtype)}){text});")
            elif isinstance(node, Assign):
                self.put(f"{self.cell(node.local)} = {text};")
                scalars.forget(held(node.local))
            elif isinstance(node, Running):
                self.put(self._combined(node, self.cell(node.carry), text))
                self.put(f"{self.cell(node.local)} = {self.cell(node.carry)};")
                scalars.forget(held(node.local))
                scalars.forget(held(node.carry))
            else:
                to = here.get(node.local) or self.cell(node.local)
                self.put(f"{to} = fused({text}, {by[0]}, {to});" if by else self._combined(node, to, text))
                scalars.forget(held(node.local))

    def _target(self, node: Write, staged: Streaming) -> tuple[str, Expr]:
        """The target of a write: a pointer and an offset."""
        stage = staged[node]
        if isinstance(stage, Stage):
            return stage.pointer, stage.place
        return node.tensor.name, self.flat_expr(node.tensor, node.index)

    # --- 16-bit floats, a block at a time -------------------------------------------------------------------------------

    def _widen(self, group: Sequence[Block], lane: Lane, size: int, run: _InnerLoop) -> None:
        """Converts the float16 operands of the loop over a lane before the loop, with vector instructions that compilers do not
        find by themselves. 16-bit results of the loop go to a block of float32."""
        if self.unbounded(group[0].lanes, group[0].guard, lane) or size * 4 > LARGE:
            # Masked elements must not be read, and long lanes do not fit on the stack.
            return
        found: dict[Load | Write, tuple[Tensor, Sequence[Expr]]] = {}
        for node in group:
            if isinstance(node, Write) and moves(node):
                continue
            loads = [v for value in values_of(node) for v in value.walk() if isinstance(v, Load) and not v.guard]
            found.update((v, (v.tensor, v.index)) for v in loads)
            if isinstance(node, Write) and not node.add:
                found[node] = (node.tensor, node.index)
        for access, (tensor, index) in found.items():
            start = along(self.flat_expr(tensor, index), lane)
            # For bfloat16 only results: a load is one shift away from float32.
            half = tensor.dtype == torch.float16 or (tensor.dtype == torch.bfloat16 and isinstance(access, Write))
            if half and start is not None:
                name = self.fresh()
                self.put(f"alignas(64) f32 {name}[{size}];")
                if isinstance(access, Load):
                    self.put(f"widen({name}, {tensor.name} + {self.index(start)}{run.done}, {run.count});")
                self.converted[access] = f"{name}[{run.at}]"

    def _narrow(self, group: Sequence[Block], lane: Lane, staged: Streaming, run: _InnerLoop) -> None:
        """Stores the float32 results of the loop over a lane as 16-bit floats."""
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


@dataclass(frozen=True)
class _InnerLoop:
    """An innermost loop: its trip count, its index, and where along the lane it starts."""

    count: str
    at: str
    done: str = ""
