"""The symbolic run of a device loop: every loop runs once, and both sides of every branch.

In: the loop as a function of its variables, with hooks at its loops and branches (`source.py`), and traced objects for the
variables. Out: a `TileProgram` of one phase. `Trace` implements `serrate.language` during the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from serrate.frontend.kernel.machine import BlockSize, NamedBlock, refuse, running, user_frame
from serrate.frontend.kernel.vocabulary import loop_bounds, ragged_bound_hint
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Expr, Less, Symbol, const, symbol
from serrate.ir.loops import (
    Assign,
    Declare,
    Dot,
    Held,
    If,
    Load,
    Local,
    Reduce,
    Running,
    While,
    Write,
    held,
    number,
    symbols_of,
    values_of,
)
from serrate.ir.tile import Along, Axis, Loop, Phase, Statement, TileProgram, statements
from serrate.ir.values import Role, Tensor, Value, constant
from serrate.tiles import functions, memory, products, reducing
from serrate.tiles.elementwise import cast
from serrate.tiles.loops import Branch, RetraceFacts, RetraceNeeded, TracedLoop, TracedRange
from serrate.tiles.values import (
    Condition,
    LanesOf,
    OpenSize,
    Traced,
    TracedTensor,
    TracedTile,
    as_traced,
)

_PARTS = ("", "o", "i", "r", "ro", "ri", "rio", "rii")
FAMILY = (
    *(f"{copy}{part}" for copy in ("", "_again", "_short", "_short_again") for part in _PARTS),
    "_back", "_base", "_before", "_begin", "_carry", "_emptied", "_end", "_group", "_id", "_index", "_kept", "_lane", "_lanes",
    "_part", "_row", "_run", "_tile", "_wide", "_within",
)  # fmt: skip
"""Suffixes with which the compiler derives names; a name is fresh only if none of its derived names is taken."""
LONGEST = 40
"""The maximum length of a name in generated code."""


DEFAULT_BLOCK = 64
"""The number of lanes if no block size is chosen."""


class Trace:
    """Implements `serrate.language` while a loop is traced."""

    def __init__(self, name: str, known: RetraceFacts, blocks: Sequence[int | None] = ()) -> None:
        self.name, self.known = name, known
        self.blocks = tuple(blocks)
        self.block: list[Statement] = []
        self.axes: list[Axis] = []
        self.axes_open: list[Axis] = []
        self.programs: tuple[Axis, ...] = ()
        self.clock = 0
        self.loops: list[TracedLoop] = []
        self.tensors: dict[tuple[Any, ...], TracedTensor] = {}
        self.numbers: dict[tuple[Any, ...], Symbol] = {}
        self.described: dict[tuple[str, int, str], Array] = {}
        self.counted: dict[Array, Expr] = {}
        """The number of components that each array describes."""
        self.limits: dict[Array, Expr] = {}
        """The upper bound of the elements of each array that describes rows."""
        self.reductions: dict[str, str] = {}
        self.notes: list[str] = []
        self.sizes: Callable[[tuple[Any, ...]], int | None] = lambda path: None
        """The sizes that are compiled in; None for a size that is an argument of the program."""
        self._written: dict[Tensor, None] = {}
        self._read: set[str] = set()
        self._used: set[str] = set()
        self._computed: dict[str, Traced] = {}
        self.loaded: set[tuple[str, Expr]] = set()
        """Loads from 1-D tensors, by tensor and index."""
        self.lines: dict[object, int] = {}
        """The user's lines: of loads by value, of stores and private blocks by name; the first of each."""
        self._loop_number = 0
        self._sites: dict[Any, int] = {}

    # --- names, axes, blocks ---

    def name_for(self, wish: str) -> str:
        """A fresh name: the requested one, with a number appended if it is taken."""
        wish = re.sub(r"[^A-Za-z0-9]+", "_", wish).strip("_")[:LONGEST]
        if not wish.isidentifier():
            wish = f"x_{wish}".rstrip("_")
        # Keep the appended number apart from digits at the end of the name.
        separator = "_" if wish[-1].isdigit() else ""
        found, k = wish, 1
        while not self._used.isdisjoint(found + end for end in FAMILY):
            k += 1
            found = f"{wish}{separator}{k}"
        self._used.update(found + end for end in FAMILY)
        return found

    def emit(self, node: Statement) -> None:
        """Appends a statement to the program."""
        for lane in getattr(node, "lanes", ()):
            axis = next(a for a in self.axes if a.position is lane.symbol).original
            if axis.looped and axis not in self.axes_open:
                refuse(f"a value of {axis} is used after its loop: reduce it in the loop, or store it to a tensor")
        self.note(node.tensor.name if isinstance(node, Write) else getattr(getattr(node, "local", None), "name", None))
        self.block.append(node)

    def note(self, what: object) -> None:
        """Notes the user's line, unless there is an earlier one."""
        frame = user_frame()
        if frame is not None:
            self.lines.setdefault(what, frame.f_lineno)

    def note_update(self, local: Local, value: Value) -> None:
        """Notes the line of the update of a carried value: the last of what it is computed from."""
        read = (v.local.name if isinstance(v, Held) else v for v in value.walk() if isinstance(v, Held | Load))
        lines = [self.lines[what] for what in read if what != local.name and what in self.lines]
        if lines:
            self.lines.setdefault(local.name, max(lines))

    def declare(self, name: str, dtype: torch.dtype, axes: Sequence[Axis], identity: Any, kind: str | None = None) -> Local:
        """Declares a private block filled with a number; `kind` is the reduction that accumulates into it, if any."""
        local = Local(name, dtype, tuple(a.block_lane for a in axes))
        self.note(name)
        self.block.append(Declare(local, identity))
        if kind is not None:
            self.reductions[name] = kind
        return local

    def fixed_axis(self, size: int) -> Axis | None:
        """An axis of lanes that no loop runs over; None for one lane, which broadcasts as in torch."""
        if size < 1:
            refuse(f"a value of a kernel has no elements: one of its dims has size {size}. Return before the loop in this case")
        if size == 1:
            return None
        return self._axis(Axis(self.name_for("d"), const(0), const(size), size, "no tile", looped=False))

    def distinct(self, axes: Sequence[Axis | None]) -> list[Axis | None]:
        """Gives every dim of a value its own axis: repeated ones are replaced by aliases."""
        found: list[Axis | None] = []
        for dim, axis in enumerate(axes):
            if axis is not None and axis in found:
                axis = self._alias(axis.original, {a for a in (*found, *axes[dim:]) if a is not None})
            found.append(axis)
        return found

    def _alias(self, axis: Axis, taken: set[Axis]) -> Axis:
        """An axis over the same lanes that is not taken."""
        if axis.looped and axis.block is None:
            refuse(
                f"{axis} appears in two dims of one value, so the result depends on the block size: "
                "fix it with block_size=, or use a separate loop for one of the two dims"
            )
        for known in self.axes:
            if known.original is axis and known not in taken:
                return known
        name = self.name_for(f"{axis.name}_again")
        return self._axis(replace(axis, name=name, site=None, alias_of=axis))

    def _axis(self, axis: Axis) -> Axis:
        self.axes.append(axis)
        return axis

    def index_of(self, x: Traced) -> Expr:
        """An integer value as an index expression; a computed one is stored in a private block."""
        if x.expr is not None:
            return x.expr
        axes = [a for a in x.axes if a is not None]
        for name, other in self._computed.items():
            if other.value is x.value and other.axes == x.axes and self._visible(name):
                return self._element(name, axes)
        local = Local(self.name_for("at"), torch.int64, tuple(a.block_lane for a in axes))
        self.block.append(Declare(local, 0))
        self.emit(Assign(local.lanes, (), local, x.value))
        self._computed[local.name] = x
        return self._element(local.name, axes)

    def _visible(self, name: str) -> bool:
        blocks = [self.block, *(loop.outer for loop in self.loops if loop.outer is not None)]
        return any(isinstance(n, Declare) and n.local.name == name for b in blocks for n in b)

    @staticmethod
    def _element(name: str, axes: Sequence[Axis]) -> Expr:
        place: Expr = const(0)
        for axis in axes:
            lane: Expr = axis.lane if axis.looped else axis.position
            place = place * (axis.lanes if axis.looped else const(axis.size or 1)) + lane
        return Array(name, signed=True, local=True)[place]

    def is_argument(self, expr: Expr) -> bool:
        """Whether an expression is computed from integers that are arguments, which may be negative."""
        arguments = {number for path, number in self.numbers.items() if len(path) == 1}
        return bool(expr.symbols) and expr.symbols <= arguments

    def computed(self, name: str) -> Value | None:
        """The value computed for an index block; None for any other block."""
        return self._computed[name].value if name in self._computed else None

    def is_computed(self, what: Symbol) -> bool:
        """Whether a symbol is a value that the program itself computes."""
        return what.name in self._computed

    def part(self, value: Value, whole: Traced) -> Traced:
        """A subexpression of a value, with the dims it depends on."""
        used = symbols_of(value)
        axes = [a for a in whole.axes if a is not None and used & {a.position, a.lane}]
        return Traced(value, axes)

    def depends(self, value: Value) -> frozenset[Symbol]:
        """Everything that a value depends on, through private blocks too."""
        found, seen, pending = set(symbols_of(value)), set(), [value]
        made = [n for b in [self.block, *(loop.outer for loop in self.loops if loop.outer)] for n in statements(tuple(b))]
        while pending:
            for v in pending.pop().walk():
                if isinstance(v, Held) and v.local.name not in seen:
                    seen.add(v.local.name)
                    for node in made:
                        if isinstance(node, Assign | Reduce | Dot | Running) and node.local.name == v.local.name:
                            pending += values_of(node)
                            found |= {s for g in node.guard for s in g.symbols}
                            found |= {s for x in values_of(node) for s in symbols_of(x)}
        return frozenset(found)

    # --- tensors and sizes from outside the loop ---

    def tensor(self, path: tuple[Any, ...], like: torch.Tensor, first: Expr | None = None) -> TracedTensor:
        """A tensor from outside the loop, or a part of a ragged tensor; `first` is its first size, if that has a symbol."""
        if path not in self.tensors:
            name = self.name_for("_".join(str(p) for p in path if p != "values"))
            sizes = [self.size((*path, "shape", k)) if k or first is None else first for k in range(like.dim())]
            dims = tuple(IterDomain(size, name=f"{name}_{k}") for k, size in enumerate(sizes))
            self.tensors[path] = TracedTensor(self, name, Tensor(name, like.dtype, dims, dims, Role.INPUT))
        return self.tensors[path]

    def size(self, path: tuple[Any, ...]) -> Expr:
        """A size from outside the loop: compiled in, or an argument of the program."""
        number_ = self.sizes(path) if path not in self.known.static else self.sizes((*path, "now"))
        if number_ is not None:
            return const(number_)
        if path not in self.numbers:
            self.numbers[path] = symbol(self.name_for("_".join(map(str, path))), *((None, None) if len(path) == 1 else (0, None)))
        return self.numbers[path]

    def static(self, expr: Expr, what: str) -> int:
        """A size that must be compiled in."""
        if expr.value is not None:
            return expr.value
        for path, own in self.numbers.items():
            if own is expr:
                self.known.static.add(path)
                raise RetraceNeeded
        refuse(
            f"{what} a number that is known when the kernel is compiled, but {expr} is known only when it runs: "
            "use torch.where, an `if` statement, or hl.specialize for a size"
        )

    def array(self, name: str, axis: int, what: str) -> Array:
        """One of the arrays that describe the rows of a ragged tensor."""
        key = (name, axis, what)
        if key not in self.described:
            self.described[key] = Array(self.name_for(memory.offsets_array(name, axis, what).name))
        return self.described[key]

    def written(self, tensor: Tensor) -> None:
        """Records that a tensor is stored to."""
        self._written[tensor] = None
        if tensor.name in self._read and tensor.name not in self.known.written:
            self.known.written.add(tensor.name)
            raise RetraceNeeded

    def read(self, tensor: Tensor, x: Traced) -> Traced:
        """The value of a load. A load from a tensor that is stored to is emitted at once, because the element may change."""
        self._read.add(tensor.name)
        if tensor.name not in self.known.written:
            return x
        axes = [a for a in x.axes if a is not None]
        local = self.declare(self.name_for("read"), x.dtype, axes, 0)
        self.emit(Assign(local.lanes, (), local, x.value))
        return Traced(held(local), x.axes, x.conditions, x.fed)

    # --- the language ---

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A torch function on tiles."""
        return functions.dispatch(self, function, args, kwargs)

    def load(self, tensor: Any, key: Any, extra_mask: Any = None) -> Any:
        """`tensor[key]`."""
        found = memory.read(self, tensor, key, extra_mask)
        for each in found.value.walk() if isinstance(found, Traced) else ():
            if isinstance(each, Load):
                self.note(each)
        return found

    def store(self, tensor: Any, key: Any, x: Any, extra_mask: Any = None, *, add: bool = False) -> None:
        """`tensor[key] = x`."""
        memory.write(self, tensor, key, x, extra_mask, add=add)

    def full(self, shape: Sequence[Any], value: Any, dtype: torch.dtype) -> Traced:
        """One number in every lane."""
        axes = self.distinct([self._dim(d) for d in shape])
        ends = [Condition(Less(a.position, a.end), False) for a in axes if a is not None and a.looped]
        ends += [c for d in shape if isinstance(d, TracedTile) for c in d.conditions]
        if isinstance(value, Traced):
            return Traced(cast(value, dtype).value, axes, ends, value.fed)
        return Traced(constant(value, dtype), axes, ends)

    def positions(self, dim: Any) -> Traced:
        """The positions of a tile, or of the lanes of a number."""
        if isinstance(dim, TracedTile):
            return dim.index
        axis = self._dim(dim)
        if axis is None:
            return Traced(number(const(0)), [None])
        return Traced(number(axis.position), [axis], [Condition(Less(axis.position, axis.end), False)] if axis.looped else [])

    def _dim(self, size: Any) -> Axis | None:
        if isinstance(size, (TracedTile, OpenSize)):
            return size.axis
        if isinstance(size, LanesOf):
            return size.axis
        known = getattr(size, "axis", None)
        if known is not None and not isinstance(size, Traced):
            return self._registered(int(size), known)
        if isinstance(size, Traced):
            expr = size.expr
            if expr is None:
                refuse("a shape must consist of tiles and of numbers that are known when the kernel is compiled")
            return self.fixed_axis(self.static(expr, "a shape needs"))
        return self.fixed_axis(int(size))

    def _registered(self, size: int, known: Any) -> Axis:
        """The lanes of a registered block size: those of the loop that uses it, else separate ones."""
        for axis in reversed(self.axes_open):
            if axis.site is known:
                return axis
        for axis in self.axes:
            if axis.site is known and not axis.looped:
                return axis
        return self._axis(Axis(self.name_for("d"), const(0), const(size), size, str(known), site=known, looped=False))

    def arange(self, start: Any, end: Any, step: int, dtype: torch.dtype) -> Traced:
        """Consecutive numbers in a fixed number of lanes, or in those of a block size."""
        first, last = (0, start) if end is None else (start, end)
        axis_of = getattr(last, "axis", None)
        if axis_of is not None and not isinstance(first, Traced) and int(first) == 0 and step == 1:
            axis = self._dim(last)
        else:
            low, high = (
                self.static(e, "hl.arange needs") if (e := as_traced(x).expr) is not None else int(x) for x in (first, last)
            )
            count = len(range(low, high, step))
            axis = self.fixed_axis(count)
            if axis is None:
                return cast(Traced(number(const(low)), [None]), dtype)
            return cast(Traced(number(axis.position * step + low), [axis]), dtype)
        if axis is None:
            return cast(Traced(number(const(0)), [None]), dtype)
        return cast(Traced(number(axis.lane if axis.looped else axis.position), [axis]), dtype)

    def number(self, value: Any, what: str) -> Any:
        """`hl.specialize`: a size to compile in."""
        if isinstance(value, Traced):
            expr = value.expr
            return self.static(expr, f"{what} needs") if expr is not None else int(value)
        return value

    def block_size(self, low: Any, high: Any) -> int:
        """`hl.register_block_size` inside a loop: a size of the configuration, else the whole extent up to a limit."""
        frame = user_frame()
        assert frame is not None
        extent = self.number(low if high is None else high, "hl.register_block_size")
        least = 1 if high is None else self.number(low, "hl.register_block_size")
        given, _ = self._block(None, (frame.f_code, frame.f_lasti, 0))
        size = min(max(int(least), given or DEFAULT_BLOCK), max(int(extent), 1))
        return BlockSize(size, NamedBlock(f"the block of line {frame.f_lineno}"))

    def dot(self, a: Any, b: Any, acc: Any, out_dtype: torch.dtype | None) -> Any:
        """A product of tiles."""
        return products.dot(self, a, b, acc, out_dtype)

    def associative_scan(self, combine: Callable[..., Any], x: Any, dim: int, reverse: bool) -> Any:
        """A scan by a function of two values."""
        from serrate.tiles.scans import associative_scan

        return associative_scan(self, combine, x, dim, reverse)

    def fill(self, x: Any, value: float) -> Traced:
        """Every lane exists."""
        return reducing.fill(self, as_traced(x), value)

    def conditions_of(self, mask: Traced) -> tuple[Less, ...]:
        """A mask as conditions on indices."""
        return functions.conditions_of(self, mask)

    # --- loops ---

    def ranges(self, what: str, begin_or_end: Any, end: Any, block_size: Any, *, step: bool = False) -> Any:
        """The ranges of `hl.tile` and `hl.grid`."""
        single = not isinstance(begin_or_end, (list, tuple))
        frame = user_frame()
        assert frame is not None
        line = f"the {'grid' if step else 'tile'} of line {frame.f_lineno}"
        axes: list[tuple[Axis, Expr | None, int]] = []
        for n, (first, last, size) in enumerate(loop_bounds(what, begin_or_end, end, block_size, step=step)):
            name = self._target_name(n)
            low, high = self._bound(first, what), self._bound(last, what)
            named = line + ("" if single else f", number {n}")
            if step:
                stride = 1 if size is None else self.number(size, what)
                count = high - low if stride == 1 else (high - low + stride - 1) // stride
                axes.append((Axis(self.name_for(name), const(0), count, 1, named), low, stride))
                continue
            block, site = self._block(size, (frame.f_code, frame.f_lasti, n))
            axes.append((Axis(self.name_for(name), low, high, block, named, site=site), None, 1))
        return TracedRange(self, what, axes, single)

    def jagged_range(self, lengths: Any, block_size: Any) -> Any:
        """`hl.jagged_tile`: a range up to the longest of the rows; each position exists if its row is that long."""
        what = "hl.jagged_tile"
        value = as_traced(lengths)
        if not isinstance(value, Traced) or value.ndim == 0:
            refuse(
                "hl.jagged_tile takes the lengths of a tile of rows, such as jt.lengths[tile]; for one row, use hl.tile(length)"
            )
        frame = user_frame()
        assert frame is not None
        length = self.index_of(cast(value, torch.int64))
        longest = reducing.reduced(
            self, Traced(number(length), value.axes, value.conditions), range(value.ndim), False, "max", torch.int64
        )
        end = self.index_of(longest)
        block, site = self._block(block_size, (frame.f_code, frame.f_lasti, 0))
        axis = Axis(
            self.name_for(self._target_name(0)), const(0), end, block, f"the jagged tile of line {frame.f_lineno}", site=site
        )
        conditions = (*value.conditions, Condition(Less(axis.position, length), True))
        return TracedRange(self, what, [(axis, None, 1)], True, conditions)

    def _target_name(self, n: int) -> str:
        names = self.loops[-1].targets if self.loops else ()
        name = names[n] if n < len(names) else "t"
        return name.removeprefix("tile_") or "t"

    def _block(self, size: Any, site: Any) -> tuple[int | None, Any]:
        if size is None:
            number_ = self._sites.setdefault(site, len(self._sites))
            given = self.blocks[number_] if number_ < len(self.blocks) else None
            return given, site
        block = self.number(size, "hl.tile")
        if isinstance(block, float) or int(block) < 1:
            refuse(f"hl.tile: a block size must be an int, at least 1, not {block}")
        return int(block), getattr(size, "axis", site)

    @property
    def open_blocks(self) -> int:
        """How many block sizes the loop takes from the configuration."""
        return len(self._sites)

    def _bound(self, x: Any, what: str) -> Expr:
        if isinstance(x, TracedTile):
            refuse("a tile is not a scalar: use tile.begin, tile.end or tile.id")
        value = as_traced(x)
        if not isinstance(value, Traced) or value.dtype.is_floating_point:
            refuse(f"{what}: bounds must be integers, not a {type(x).__name__}{ragged_bound_hint(x)}")
        if any(a is not None for a in value.axes):
            refuse(
                f"{what} needs a scalar, but this value has the lanes of {', '.join(map(str, value.axes))}: "
                "reduce it first (x.amax())"
            )
        return self.index_of(cast(value, torch.int64))

    def enter(self, targets: Sequence[str] = (), left: Sequence[str] = ()) -> TracedLoop:
        """Called at the start of a loop statement; `left` are names that only later code reads."""
        return TracedLoop(self, targets, left)

    def branch(self, test: Any) -> Branch:
        """Called at the start of an `if` statement."""
        return Branch(self, test)

    # --- the run ---

    def run(self, function: Callable[..., Any], env: dict[str, Any]) -> TileProgram:
        """Runs a device loop; returns its program."""
        with running(self):
            function(**env)
        written = {t: replace(t, role=Role.OUTPUT) for t in self._written}
        inputs = tuple(t.tensor for t in self.tensors.values() if t.tensor not in written)
        body = tuple(_retargeted(n, written) for n in self.block)
        name = re.sub(r"[^A-Za-z0-9_]", "_", self.name)
        return TileProgram(
            name,
            inputs,
            tuple(written.values()),
            (Phase(name, body),),
            tuple(self.axes),
            tuple((a, self.counted[a]) for a in self.described.values() if a in self.counted),
            tuple(self.limits.items()),
            notes=tuple(self.notes),
        )


def _retargeted(node: Any, written: dict[Tensor, Tensor]) -> Any:
    """The statement with every tensor that is stored to marked as an output."""
    from serrate.ir.loops import bodies, load, with_bodies
    from serrate.ir.values import rewrite

    def change(v: Value) -> Value | None:
        return load(written[v.tensor], v.index, v.guard, v.other) if isinstance(v, Load) and v.tensor in written else None

    if isinstance(node, Loop | Along):
        return replace(node, body=tuple(_retargeted(n, written) for n in node.body))
    if isinstance(node, If | While):
        return with_bodies(node, tuple(tuple(_retargeted(n, written) for n in part) for part in bodies(node)))
    if isinstance(node, Dot):
        return replace(node, left=rewrite(node.left, change), right=rewrite(node.right, change))
    if isinstance(node, Assign | Reduce | Running | Write):
        node = replace(node, value=rewrite(node.value, change))
    return replace(node, tensor=written[node.tensor]) if isinstance(node, Write) else node
