"""Text of C++: lines, index expressions, elements of memory and blocks, guards as loop bounds.

In: expressions, values, guards. Out: text, collected line by line. Guards become loop bounds where possible.
"""

from __future__ import annotations

from collections.abc import Sequence

from serrate.codegen.cpp.index_set_split import IndexSetSplit
from serrate.codegen.cpp.values import Scalars, computed, index_text, number
from serrate.ir.expr import Expr, Less, Symbol, const
from serrate.ir.loops import Bind, Block, Existing, Guard, Lane, Lanes, Load, Local, Write, flat_index
from serrate.ir.solve import end_of, start_of
from serrate.ir.storage import row_dims
from serrate.ir.values import Role, Tensor, Value


class Text:
    """Lines of C++, and everything needed to write them."""

    def __init__(self, names: dict[object, str], read: frozenset[Tensor]) -> None:
        self.names = names
        self.read = read
        """The memory that the program reads."""
        self.lines: list[str] = []
        self.indent = 0
        self.count = 0
        self.laned: dict[Symbol, Bind] = {}
        self.converted: dict[Load | Write, str] = {}
        """Elements that the current innermost loop reads and writes as float32 instead of in 16 bits."""
        self.drawn: dict[Value, str] = {}
        """Random bits that were drawn before the current loops."""

    def put(self, line: str) -> None:
        """Adds a line at the current depth; preprocessor lines are not indented."""
        self.lines.append("  " * self.indent + line if line and not line.startswith("#") else line)

    def open(self, line: str) -> None:
        """Adds a line that opens a block."""
        self.put(f"{line} {{" if line else "{")
        self.indent += 1

    def close(self, times: int = 1) -> None:
        for _ in range(times):
            self.indent -= 1
            self.put("}")

    def fresh(self) -> str:
        """An unused name."""
        self.count += 1
        return f"v{self.count}"

    # --- expressions and elements ---------------------------------------------------------------------------------------

    def index(self, expr: Expr) -> str:
        """An index expression."""
        return index_text(self.unlaned(expr), self.names)

    def unlaned(self, expr: Expr) -> Expr:
        """Expands names with lanes, which in C++ live inside the loops over those lanes."""
        while any(s in self.laned for s in expr.symbols):
            expr = expr.substitute({s: self.laned[s].expr for s in expr.symbols if s in self.laned})
        return expr

    def flat(self, tensor: Tensor, index: Sequence[Expr]) -> str:
        return self.index(self.flat_expr(tensor, index))

    def flat_expr(self, tensor: Tensor, index: Sequence[Expr]) -> Expr:
        """The position in memory: row-major over storage, or over a private row."""
        sizes = [d.extent_expr for d in tensor.storage]
        if tensor.role is Role.PRIVATE:
            sizes = [d.extent_expr for d in row_dims(tensor.logical)]
        return flat_index([self.unlaned(e) for e in index], sizes)

    def cell(self, local: Local) -> str:
        """An element of a private block, at the current lanes."""
        if not local.lanes:
            return local.name
        place: Expr = const(0)
        for lane in local.lanes:
            place = place * lane.size + lane.symbol
        return f"{local.name}[{index_text(place, self.names)}]"

    def load(self, value: Load) -> str:
        if value in self.converted:
            return self.converted[value]
        text = f"load({value.tensor.name}[{self.flat(value.tensor, value.index)}])"
        if not value.guard:
            return text
        inside = " && ".join(f"{self.index(g.left)} < {self.index(g.right)}" for g in value.guard)
        other = f"({computed(value.dtype)})0" if repr(value.other) == "0" else number(value.other, value.dtype)
        return f"({inside}) ? {text} : {other}"

    def existing(self, value: Existing) -> str:
        lanes, guard = value.lanes, value.guard
        symbols = {lane.symbol for lane in lanes}
        on_lanes = self.on_lanes(lanes, guard)
        counted = {g for _, g in on_lanes}
        spelled = [Less(self.unlaned(g.left), self.unlaned(g.right)) for g in guard]
        tests = [f"({self.index(g.left)} < {self.index(g.right)})" for g in spelled if g not in counted]
        bounds = self.bounds(lanes, guard)
        ranges = {lane: (self.start(lane, lanes, guard), self.limit(lane, bounds[lane])) for lane in lanes}
        if any(len(g.symbols & symbols) > 1 or (self.bound(n, g) or self.floor(n, g)) is None for n, g in on_lanes):
            text = self._counted(value, ranges)
        else:
            text = " * ".join(f"larger<i64>(0, {b if a == '0' else f'{b} - {a}'})" for a, b in ranges.values()) or "1"
        # Conditions come first: what a bound reads may exist only where they hold.
        return f"(({' && '.join(tests)}) ? {text} : 0)" if tests else f"({text})"

    def _counted(self, value: Existing, ranges: dict[Lane, tuple[str, str]]) -> str:
        """Counts lanes one by one, for conditions on several lanes at once or without a single bound."""
        loops = []
        for lane, (start, limit) in ranges.items():
            asked = [f"if (!({test})) continue; " for test in self.unbounded(value.lanes, value.guard, lane)]
            loops.append(f"for (i64 {lane.symbol} = {start}; {lane.symbol} < {limit}; {lane.symbol}++) {{ {''.join(asked)}")
        return f"[&] {{ i64 count = 0; {''.join(loops)}count++; {'} ' * len(loops)}return count; }}()"

    def scalars(self) -> Scalars:
        """Values as text, for one body of a loop."""
        return Scalars(self.load, lambda h: self.cell(h.local), self.existing, self.index, self.fresh, self.drawn)

    # --- guards as bounds ---------------------------------------------------------------------------------------------

    def outside(self, node: Block) -> list[str]:
        """The lane-invariant conditions of a statement."""
        lanes = {lane.symbol for lane in node.lanes}
        plain = [g for g in node.guard if not ({s for e in (g.left, g.right) for s in self.unlaned(e).symbols} & lanes)]
        return [f"{self.index(g.left)} < {self.index(g.right)}" for g in plain]

    def bounds(self, lanes: Lanes, guard: Guard) -> dict[Lane, list[str]]:
        """The bounds that guards put on each lane, given the lanes before it."""
        bounds: dict[Lane, list[str]] = {lane: [] for lane in lanes}
        for lane, condition in self.on_lanes(lanes, guard):
            bound = self.bound(lane, condition)
            if bound is not None:
                bounds[lane].append(bound)
        return bounds

    def on_lanes(self, lanes: Lanes, guard: Guard) -> list[tuple[Lane, Less]]:
        """Each condition with the innermost lane it depends on."""
        spelled = [Less(self.unlaned(g.left), self.unlaned(g.right)) for g in guard]
        pairs = [([lane for lane in lanes if lane.symbol in g.symbols], g) for g in spelled]
        return [(on[-1], g) for on, g in pairs if on]

    def unbounded(self, lanes: Lanes, guard: Guard, lane: Lane) -> list[str]:
        """Conditions on a lane that cannot be loop bounds, and are tested inside its loop."""
        found = [
            g for on, g in self.on_lanes(lanes, guard) if on == lane and self.bound(on, g) is None and self.floor(on, g) is None
        ]
        return [f"{self.index(g.left)} < {self.index(g.right)}" for g in found]

    def bound(self, lane: Lane, condition: Less) -> str | None:
        """Where a condition on a lane stops holding; None if it is not an upper bound."""
        end = end_of(condition, lane.symbol)
        return None if end is None else self.index(end)

    def floor(self, lane: Lane, condition: Less) -> str | None:
        """Where a condition on a lane starts holding; None if it is not a lower bound."""
        start = start_of(condition, lane.symbol)
        return None if start is None else self.index(start)

    def start(self, lane: Lane, lanes: Lanes, guard: Guard) -> str:
        """Where the loop over a lane begins: at 0, or where the last of its lower bounds starts to hold."""
        start = "0"
        for on, condition in self.on_lanes(lanes, guard):
            floor = self.floor(lane, condition) if on == lane and self.bound(on, condition) is None else None
            start = start if floor is None else f"larger<i64>({start}, {floor})"
        return start

    def limit(self, lane: Lane, bounds: list[str]) -> str:
        """Where the loop over a lane ends: at its size, or at its first upper bound."""
        limit = str(lane.size)
        for bound in bounds:
            limit = f"smaller<i64>({limit}, {bound})"
        return limit

    def end(self, cut: IndexSetSplit, limit: str) -> str:
        """The name of the position at which a split lane's data ends; at most `limit`."""
        end = self.fresh()
        for condition in cut.bounds:
            bound = self.bound(cut.lane, condition)
            assert bound is not None
            limit = f"smaller<i64>({limit}, {bound})"
        tests = " && ".join(f"{self.index(g.left)} < {self.index(g.right)}" for g in cut.tests)
        self.put(f"const i64 {end} = {f'!({tests}) ? 0 : ' if tests else ''}larger<i64>(0, {limit});")
        return end
