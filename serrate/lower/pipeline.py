"""The lowering pipeline: a scheduled tile program becomes the loop program that every backend prints.

In: a scheduled `TileProgram`. Out: a `LoopProgram`. One function, passes in order, checked in between:

    blocks    domains -> index expressions and guards, lanes -> blocks, private scratch -> blocks
    in_order  (where lanes are loops anyway) folds of lanes become loops
    tighten   serial loops end where guards say nothing exists any more
    tabulate  (where a target wants it) the component that owns a grid position comes from a table
    launch    (likewise) a grid that only lengths bound is launched by a number of its own
    inside    numbers that callers could still change are clamped, so that no access leaves its tensor
    name      array reads and searches that several statements share get a name, as far out as possible
    collect   which arrays and extents the program needs from its caller
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import replace

from serrate.errors import VerificationError
from serrate.ir.domains import COORDINATE
from serrate.ir.expr import Array, Element, Expr, Less, Search, Sum, Symbol, ceildiv, minimum, symbol
from serrate.ir.loops import (
    Assign,
    Attempt,
    Bind,
    Declare,
    Dot,
    Existing,
    Fold,
    For,
    Guard,
    If,
    Kernel,
    Lane,
    Lanes,
    LoopProgram,
    Node,
    Prefetch,
    Reduce,
    Running,
    While,
    Write,
    bodies,
    expressions_of,
    map_values,
    nodes,
    rewrite_value,
    values_of,
    written_by,
)
from serrate.ir.recipes import Owners
from serrate.ir.tile import GRID, TileProgram, verify
from serrate.lower.blocks import blocks
from serrate.lower.inside import inside, limits_of
from serrate.lower.reductions import in_order


def lower(
    program: TileProgram, name: str, header: tuple[str, ...] = (), *, tables: bool = False, folds: bool = False
) -> LoopProgram:
    """The loop program of a scheduled tile program; with `tables`, owners of grid positions are looked up; with `folds`, lanes
    are combined across by any function."""
    verify(program)
    loops = blocks(program, name, header)
    keep_inside = functools.partial(inside, limits=limits_of(program))
    for each in (
        *(() if folds else (in_order,)),
        tighten,
        *((tabulate, launch) if tables else ()),
        keep_inside,
        name_indices,
        collect,
    ):
        loops = each(loops)
        check(loops, complete=each is collect)
    return loops


def check(program: LoopProgram, *, complete: bool) -> None:
    """Raises unless every private block is declared before it is used; in a `complete` program, every symbol known too."""

    def walk(body: tuple[Node, ...], known: frozenset[Symbol], locals_: set[str]) -> None:
        known_here = set(known)
        for node in body:
            used = frozenset(s for e in expressions_of(node) for s in e.symbols)
            missing = used - known_here - {lane.symbol for lane in _lanes_in(node)}
            if isinstance(node, While):
                # Its guard is asked when its test has worked out what it needs.
                walk((*node.test, If(node.guard, node.body, ())), frozenset(known_here), set(locals_))
                continue
            if missing and complete:
                raise VerificationError(f"{program.name}: {sorted(s.name for s in missing)} used before it is known, in {node}")
            if isinstance(node, Bind):
                known_here.add(node.symbol)
            elif isinstance(node, Declare):
                locals_.add(node.local.name)
                if not node.local.lanes:
                    # A number of the program's own may be an index.
                    known_here.update((symbol(node.local.name, None, None), symbol(node.local.name)))
            elif undeclared := [x.name for x in written_by(node) if x.name not in locals_]:
                raise VerificationError(f"{program.name}: {undeclared[0]} is used before it is declared")
            elif isinstance(node, For):
                walk(node.body, frozenset(known_here | {node.symbol}), set(locals_))
            else:
                for part in bodies(node):
                    walk(part, frozenset(known_here), set(locals_))

    for kernel in program.kernels:
        walk(kernel.body, frozenset(program.symbols), set())


def _lanes_in(node: Node) -> list[Lane]:
    """The lanes of a statement, and those that it counts."""
    counted = [lane for value in values_of(node) for v in value.walk() if isinstance(v, Existing) for lane in v.lanes]
    return [*getattr(node, "lanes", ()), *counted]


# --- tighten -----------------------------------------------------------------------------------------------------------


def tighten(program: LoopProgram) -> LoopProgram:
    """Ends loops where every statement inside is guarded away: skipping what does not exist changes nothing.

    A grid loop ends early only by itself (the last of some components split over two grid loops): what it skips then are
    rows that do not exist, whose lengths could not be read.
    """
    return replace(program, kernels=tuple(replace(k, body=_tightened(k.body)) for k in program.kernels))


def _tightened(body: tuple[Node, ...]) -> tuple[Node, ...]:
    out: list[Node] = []
    for node in body:
        if isinstance(node, For):
            inner = _tightened(node.body)
            node = replace(node, body=inner)
            bound = _guard_bound(node, alone=node.kind is GRID)
            extent = node.extent if bound is None else minimum(node.extent, bound)
            node = replace(node, extent=extent, bound=node.bound if node.kind is GRID else extent)
        out.append(node)
    return tuple(out)


def _guard_bound(loop: For, *, alone: bool) -> Expr | None:
    """The first position of the loop from which on a guard that all its statements share cannot hold; the first of all such.

    With `alone`, only guards that loops and lanes further inside have no part in.
    """
    statements = [n for n in nodes(loop.body) if isinstance(n, Assign | Reduce | Fold | Dot | Running | Write)]
    inner = {n.symbol for n in nodes(loop.body) if isinstance(n, For)} | {lane.symbol for s in statements for lane in s.lanes}
    # Statements on kept lanes only (rescaling) carry no row guard of their own and rest with their row.
    guarded = [s for s in statements if any(loop.symbol in g.symbols for g in s.guard)]
    if not guarded or any(isinstance(s, Write) and s not in guarded for s in statements):
        return None
    found: Expr | None = None
    for guard in guarded[0].guard:
        if (
            all(guard in s.guard for s in guarded)
            and not ((guard.symbols if alone else guard.right.symbols) & inner)
            and loop.symbol not in guard.right.symbols
        ):
            bound = _solve(guard, loop.symbol, inner)
            if bound is not None:
                found = bound if found is None else minimum(found, bound)
    return found


def _solve(guard: Less, wanted: Symbol, inner: set[Symbol]) -> Expr | None:
    terms = guard.left.terms if isinstance(guard.left, Sum) else ((guard.left, 1),)
    factor = next((f for t, f in terms if t is wanted), 0)
    rest = guard.left - wanted * factor
    if factor < 1 or wanted in rest.symbols:
        return None
    for term, f in terms:
        if term in inner:
            if f < 0:
                return None
            rest = rest - term * f
    return ceildiv(guard.right - rest, factor) if not rest.symbols & inner else None


# --- tabulate ----------------------------------------------------------------------------------------------------------


def tabulate(program: LoopProgram) -> LoopProgram:
    """Replaces searches for the owner of a grid position by reads of a derived array, made once for each structure."""
    return replace(program, kernels=tuple(_tabulated(k) for k in program.kernels))


def _tabulated(kernel: Kernel) -> Kernel:
    # Grids of different kernels may have one name and different bounds, so each kernel is looked at alone.
    grids = {n.symbol: n.bound for n in nodes(kernel.body) if isinstance(n, For) and n.kind is GRID}
    found: dict[Expr, Expr] = {}
    for node in nodes(kernel.body):
        for expr in expressions_of(node):
            for e in expr.walk():
                # Where an array holds several rows of offsets, a position alone has no owner.
                if isinstance(e, Search) and e.first.value == 0 and e.position in grids and not grids[e.position].arrays:
                    table = Array(f"owners({e.array.name})", recipe=Owners(e.array, e.count, grids[e.position]))
                    found[e] = table[e.position]
    return replace(kernel, body=_replaced(kernel.body, found)) if found else kernel


def _replaced(body: tuple[Node, ...], found: dict[Expr, Expr]) -> tuple[Node, ...]:
    out: list[Node] = []
    for node in body:
        if isinstance(node, For):
            out.append(replace(node, extent=node.extent.substitute(found), body=_replaced(node.body, found)))
        else:
            out.append(substituted(node, found))
    return tuple(out)


# --- launch ------------------------------------------------------------------------------------------------------------


def launch(program: LoopProgram) -> LoopProgram:
    """Gives grids whose bound is read from arrays a symbol as their bound: a launch needs a number on the host."""
    found: dict[Expr, Symbol] = {}

    def change(body: tuple[Node, ...]) -> tuple[Node, ...]:
        out: list[Node] = []
        for node in body:
            if isinstance(node, For):
                if node.kind is GRID and node.bound.arrays:
                    node = replace(node, bound=found.setdefault(node.bound, symbol(f"launched{len(found)}")))
                node = replace(node, body=change(node.body))
            out.append(node)
        return tuple(out)

    kernels = tuple(replace(k, body=change(k.body)) for k in program.kernels)
    return replace(program, kernels=kernels, launched=tuple((s, e) for e, s in found.items()))


# --- name --------------------------------------------------------------------------------------------------------------


def name_indices(program: LoopProgram) -> LoopProgram:
    """Gives array reads and searches a name where their operands are first known."""
    names = array_names(program)
    lanes = {lane.symbol: lane for k in program.kernels for n in nodes(k.body) for lane in getattr(n, "lanes", ())}
    kernels = []
    for kernel in program.kernels:
        namer = _Namer(names, lanes)
        kernels.append(replace(kernel, body=namer.body(kernel.body, frozenset(), {})))
    return replace(program, kernels=tuple(kernels))


def array_names(program: LoopProgram) -> dict[Array, str]:
    """An identifier for every array the program reads: its own name for an argument, else `derived0`, `derived1`, ..."""
    found: dict[Array, None] = {}
    for kernel in program.kernels:
        for node in nodes(kernel.body):
            for expr in expressions_of(node):
                for inner in expr.walk():
                    if isinstance(inner, Element | Search):
                        found[inner.array] = None
    # Strides may be lengths too: of a tensor whose inner dim is as long as the longest row.
    strides = (d.extent_expr for tensor in program.tensors for d in tensor.storage[1:])
    found.update((e.array, None) for extent in strides for e in extent.walk() if isinstance(e, Element | Search))
    derived = (f"derived{k}" for k in range(len(found)))
    names = {a: a.name if a.recipe is None and a.data is None else next(derived) for a in found}
    # One tensor may be both offsets and indices; those are arrays of their own, because indices may be negative.
    return {a: f"{name}_index" if a.signed and not a.local else name for a, name in names.items()}


class _Namer:
    def __init__(self, arrays: dict[Array, str], lanes: dict[Symbol, Lane]) -> None:
        self.arrays, self.lanes = arrays, lanes
        self.lanes_of: dict[Symbol, Lanes] = {s: (lane,) for s, lane in lanes.items()}
        self.used: set[str] = set()

    def body(self, body: tuple[Node, ...], known: frozenset[Symbol], named: dict[Expr, Expr]) -> tuple[Node, ...]:
        named, out = dict(named), []
        loops = {n.symbol for n in nodes(body) if isinstance(n, For)}
        for expr, guard in _candidates(body):
            current = expr.substitute(named)
            if current in named or not isinstance(current, Element | Search):
                continue
            if current.symbols & loops and not current.symbols <= known:
                continue
            lanes = self._lanes_of(current)
            protects = tuple(g for each in guard if lanes and self._protects(g := each.substitute(named), lanes))
            if any(g.symbols & loops - known for g in protects):
                # What keeps the read inside is known only in a loop further in, so it is named there.
                continue
            bind = self._bind(current, lanes, protects)
            out.append(bind)
            named[current] = named[expr] = bind.symbol
            known |= {bind.symbol}
        return (*out, *(self._renamed(node, known, named) for node in body))

    def _lanes_of(self, expr: Expr) -> Lanes:
        return tuple(dict.fromkeys(lane for s in sorted(expr.symbols, key=str) for lane in self.lanes_of.get(s, ())))

    def _bind(self, expr: Expr, lanes: Lanes, guard: Guard) -> Bind:
        array = expr.array  # type: ignore[attr-defined]  # an Element or a Search
        place = expr.index if isinstance(expr, Element) else expr.position  # type: ignore[attr-defined]
        short = "_".join(re.findall(r"\w+", str(place)))
        base = f"{self.arrays[array]}_{short}" if isinstance(expr, Element) else f"owner_{short}"
        name, k = base[:40], 1
        while name in self.used:
            k += 1
            name = f"{base[:40]}_{k}"
        self.used.add(name)
        new = symbol(name, *expr.bounds)
        self.lanes_of[new] = lanes
        return Bind(new, expr, lanes, guard)

    def _protects(self, condition: Less, lanes: Lanes) -> bool:
        """Whether a condition can be asked before an array is read in these lanes: it is on them, and on no array itself."""
        if condition.left.arrays | condition.right.arrays:
            return False
        varying = [s for s in condition.symbols if self.lanes_of.get(s)]
        return bool(varying) and all(s in self.lanes and self.lanes[s] in lanes for s in varying)

    def _renamed(self, node: Node, known: frozenset[Symbol], named: dict[Expr, Expr]) -> Node:
        if isinstance(node, For):
            extent, bound = node.extent.substitute(named), node.bound
            inner = self.body(node.body, known | {node.symbol}, named)
            return replace(node, extent=extent, bound=bound, body=inner)
        return substituted(node, named)


def substituted(node: Node, named: dict[Expr, Expr]) -> Node:
    """A statement with index expressions replaced; statements inside it are not looked at."""
    if isinstance(node, For | Declare | Bind | Attempt | If | While):
        return node
    guard = tuple(g.substitute(named) for g in node.guard)
    if isinstance(node, Prefetch):
        return replace(node, guard=guard, index=tuple(e.substitute(named) for e in node.index))
    node = map_values(replace(node, guard=guard), lambda v: rewrite_value(v, named))
    return replace(node, index=tuple(e.substitute(named) for e in node.index)) if isinstance(node, Write) else node


def _candidates(body: tuple[Node, ...]) -> Iterable[tuple[Expr, Guard]]:
    """Array reads and searches in the body, inner ones before those that contain them, with their statement's guard."""
    for node in nodes(body):
        guard = getattr(node, "guard", ())
        for expr in expressions_of(node):
            for inner in reversed(list(expr.walk())):
                if isinstance(inner, Element | Search):
                    yield inner, guard


# --- collect -----------------------------------------------------------------------------------------------------------


def collect(program: LoopProgram) -> LoopProgram:
    """Lists the arrays and symbols that the caller must supply."""
    arrays = dict.fromkeys(array_names(program))
    introduced: set[Symbol] = set()
    used: dict[Symbol, None] = {}
    for kernel in program.kernels:
        for node in nodes(kernel.body):
            if isinstance(node, For | Bind):
                introduced.add(node.symbol)
            elif isinstance(node, Declare) and not node.local.lanes:
                introduced.update((symbol(node.local.name, None, None), symbol(node.local.name)))
            introduced.update(lane.symbol for lane in _lanes_in(node))
            for expr in expressions_of(node):
                used.update(dict.fromkeys(sorted(expr.symbols, key=str)))
                for inner in expr.walk():
                    if isinstance(inner, Search):
                        used.update(dict.fromkeys(sorted(inner.count.symbols, key=str)))
            if isinstance(node, For):
                used.update(dict.fromkeys(sorted(node.bound.symbols, key=str)))
    for tensor in program.tensors:
        for domain in tensor.storage:
            used.update(dict.fromkeys(sorted(domain.host_bound.symbols, key=str)))
    symbols = tuple(s for s in used if s not in introduced and s is not COORDINATE)
    return replace(program, arrays=tuple(a for a in arrays if not a.local), symbols=symbols)
