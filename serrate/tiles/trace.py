"""One run of a device loop with symbols: every loop once, every branch both ways.

In: the loop as a function of what it uses, with notes at its loops and branches (`source.py`); what it uses, as traced objects.
Out: a `KernelProgram`. `Trace` is the machine behind `serrate.language` while that runs.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from serrate.interpret.axes import Axis as NamedBlock
from serrate.interpret.axes import BlockSize
from serrate.interpret.run import refuse, running, user_frame
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Expr, Less, Symbol, const, symbol
from serrate.ir.kernel import Along, Axis, Carry, KernelProgram, Statement, Tiles, statements
from serrate.ir.loops import Assign, Declare, Dot, Held, If, Local, Reduce, Running, While, Write, held, number, values_of
from serrate.ir.values import Constant, Role, Tensor, Value, call, constant
from serrate.runtime.launch import PRELUDE
from serrate.tiles import functions, memory
from serrate.tiles.carried import Carried, finish
from serrate.tiles.functions import cast, conditions_of
from serrate.tiles.values import (
    Condition,
    Fed,
    LanesOf,
    OpenSize,
    Traced,
    TracedTensor,
    TracedTile,
    as_traced,
    mentions,
    symbols_of,
)

RESERVED = frozenset(w for pair in re.findall(r"(\w+)[(<]|(?:struct|using|define) (\w+)", PRELUDE) for w in pair) | frozenset(
    (  # noqa: SIM905  a list of words reads better without quotes
        "alignas asm auto bool break case catch char class const double else false float for if inline int long return sizeof "
        "static struct template true typename unsigned void while f32 f64 bf16 f16 i8 i16 i32 i64 u8 u32 main std "
        " const_cast continue default delete do enum explicit export extern friend goto "
        "mutable namespace new operator private protected public register short signed switch this throw try typedef typeid "
        "union using virtual volatile given pointer threads stream positions position end done count run k"
    ).split()
)
"""Names that generated code has for itself."""


DEFAULT_BLOCK = 64
"""Lanes of a block size that nobody has chosen."""


class Again(Exception):
    """The trace must be made again, now that more is known."""


class Known:
    """What one trace of a loop has found out for the next one: sizes to compile in, forms of carried values."""

    def __init__(self) -> None:
        self.static: set[tuple[Any, ...]] = set()
        self.written: set[str] = set()
        """Tensors that are stored to: what is read from them is read where it stands."""
        self.carried: dict[tuple[int, str], tuple[torch.dtype, tuple[str | None, ...]]] = {}


class Trace:
    """The machine behind `serrate.language` while a loop is traced."""

    def __init__(self, name: str, known: Known, blocks: Sequence[int | None] = ()) -> None:
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
        """The number of components that arrays describe."""
        self.reductions: dict[str, str] = {}
        self.notes: list[str] = []
        self.sizes: Callable[[tuple[Any, ...]], int | None] = lambda path: None
        """Which sizes are compiled in: their number, or None for one that the program is given."""
        self._written: dict[Tensor, None] = {}
        self._read: set[str] = set()
        self._used = set(RESERVED)
        self._computed: dict[str, Traced] = {}
        self._loop_number = 0
        self._sites: dict[Any, int] = {}

    # --- names, axes, blocks ---

    def name_for(self, wish: str) -> str:
        """A name that nothing has yet: the one wished for, or with a number."""
        wish = re.sub(r"\W+", "_", wish).strip("_")
        wish = wish if wish.isidentifier() and wish.isascii() and not keyword.iskeyword(wish) else "x"
        found, k = wish, 1
        # Of an axis, tiles and lanes have names of their own.
        while {found, f"{found}o", f"{found}i"} & self._used or re.fullmatch(r"(v|t|extent|derived)\d+", found):
            k += 1
            found = f"{wish}_{k}" if wish in ("v", "t", "extent", "derived") else f"{wish}{k}"
        self._used |= {found, f"{found}o", f"{found}i"}
        return found

    def emit(self, node: Statement) -> None:
        """A statement at this place of the program."""
        for lane in getattr(node, "lanes", ()):
            axis = next(a for a in self.axes if a.position is lane.symbol)
            if axis.looped and axis not in self.axes_open:
                refuse(f"a value of {axis} is used after its loop has ended: reduce it in the loop, or store it to a tensor")
        self.block.append(node)

    def declare(self, name: str, dtype: torch.dtype, axes: Sequence[Axis], identity: Any, kind: str | None = None) -> Local:
        """A private block, filled with a number; `kind` is the reduction that goes into it, if one does."""
        local = Local(name, dtype, tuple(a.block_lane for a in axes))
        self.block.append(Declare(local, identity))
        if kind is not None:
            self.reductions[name] = kind
        return local

    def fixed_axis(self, size: int) -> Axis | None:
        """Lanes that no loop runs over; none for one lane, which is broadcast as in torch."""
        if size == 1:
            return None
        return self._axis(Axis(self.name_for("d"), const(0), const(size), size, "no tile", looped=False))

    def like(self, axis: Axis) -> Axis:
        """Another axis of as many lanes."""
        if axis.looped:
            refuse(f"{axis} in two dims of one value: give them tiles of their own")
        made = self.fixed_axis(axis.size or 0)
        assert made is not None
        return made

    def _axis(self, axis: Axis) -> Axis:
        self.axes.append(axis)
        return axis

    def index_of(self, x: Traced) -> Expr:
        """A whole number for every lane as an index expression; one that was computed is kept in a private block."""
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

    def is_computed(self, what: Symbol) -> bool:
        """Whether a symbol is a number that the program itself has worked out."""
        return what.name in self._computed

    def part(self, value: Value, whole: Traced) -> Traced:
        """A value that is part of another, with the dims it depends on."""
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

    # --- what is outside ---

    def tensor(self, path: tuple[Any, ...], like: torch.Tensor) -> TracedTensor:
        """A tensor outside of the loops, or one that a ragged tensor has."""
        if path not in self.tensors:
            name = self.name_for("_".join(str(p) for p in path if p != "values"))
            dims = tuple(IterDomain(self.size((*path, "shape", k)), name=f"{name}_{k}") for k in range(like.dim()))
            self.tensors[path] = TracedTensor(self, name, Tensor(name, like.dtype, dims, dims, Role.INPUT))
        return self.tensors[path]

    def size(self, path: tuple[Any, ...]) -> Expr:
        """A number of the outside: compiled in, or given to the program."""
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
                raise Again
        refuse(
            f"{what} a number that is known when the kernel is compiled, and {expr} is known when it runs: "
            "use torch.where, an `if` statement, or hl.specialize for a size"
        )

    def array(self, name: str, axis: int, what: str) -> Array:
        """One of the arrays that describe the rows of a ragged tensor."""
        key = (name, axis, what)
        if key not in self.described:
            self.described[key] = Array(self.name_for(memory.offsets_array(name, axis, what).name))
        return self.described[key]

    def written(self, tensor: Tensor) -> None:
        """Notes that a tensor is stored to."""
        self._written[tensor] = None
        if tensor.name in self._read and tensor.name not in self.known.written:
            self.known.written.add(tensor.name)
            raise Again

    def read(self, tensor: Tensor, x: Traced) -> Traced:
        """What was read from a tensor: of one that is stored to, at once, because it may change."""
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
        return memory.read(self, tensor, key, extra_mask)

    def store(self, tensor: Any, key: Any, x: Any, extra_mask: Any = None, *, add: bool = False) -> None:
        """`tensor[key] = x`."""
        memory.write(self, tensor, key, x, extra_mask, add=add)

    def full(self, shape: Sequence[Any], value: Any, dtype: torch.dtype) -> Traced:
        """One number in every lane."""
        axes = [self._dim(d) for d in shape]
        ends = [Condition(Less(a.position, a.end), False) for a in axes if a is not None and a.looped]
        ends += [c for d in shape if isinstance(d, TracedTile) for c in d.conditions]
        if isinstance(value, Traced):
            return Traced(cast(value, dtype).value, axes, ends, value.fed)
        return Traced(constant(value, dtype), axes, ends)

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
                refuse("a shape is of tiles and of numbers that are known when the kernel is compiled")
            return self.fixed_axis(self.static(expr, "a shape needs"))
        return self.fixed_axis(int(size))

    def _registered(self, size: int, known: Any) -> Axis:
        """The lanes of a block size that was registered: of the loop that runs in such blocks, else of their own."""
        for axis in reversed(self.axes_open):
            if axis.site is known:
                return axis
        for axis in self.axes:
            if axis.site is known and not axis.looped:
                return axis
        return self._axis(Axis(self.name_for("d"), const(0), const(size), size, str(known), site=known, looped=False))

    def arange(self, start: Any, end: Any, step: int, dtype: torch.dtype) -> Traced:
        """Numbers for a fixed number of lanes, or for those of a block size."""
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
        """A size that is to be compiled in."""
        if isinstance(value, Traced):
            expr = value.expr
            return self.static(expr, f"{what} needs") if expr is not None else int(value)
        return value

    def block_size(self, low: Any, high: Any) -> int:
        """What `hl.register_block_size` gives inside a loop: a size of the configuration, else the whole extent up to a limit."""
        frame = user_frame()
        assert frame is not None
        extent = self.number(low if high is None else high, "hl.register_block_size")
        least = 1 if high is None else self.number(low, "hl.register_block_size")
        given, _ = self._block(None, (frame.f_code, frame.f_lasti, 0))
        size = min(max(int(least), given or DEFAULT_BLOCK), max(int(extent), 1))
        return BlockSize(size, NamedBlock(f"the block of line {frame.f_lineno}"))

    def dot(self, a: Any, b: Any, acc: Any, out_dtype: torch.dtype | None) -> Any:
        """A product of tiles."""
        return functions.dot(self, a, b, acc, out_dtype)

    def associative_scan(self, combine: Callable[..., Any], x: Any, dim: int, reverse: bool) -> Any:
        """A scan by a function of two values."""
        from serrate.tiles.scans import associative_scan

        return associative_scan(self, combine, x, dim, reverse)

    def fill(self, x: Any, value: float) -> Traced:
        """Every lane exists."""
        return functions.fill(self, as_traced(x), value)

    # --- loops ---

    def ranges(self, what: str, begin_or_end: Any, end: Any, block_size: Any, *, step: bool = False) -> Any:
        """What `hl.tile` and `hl.grid` run over."""
        single = not isinstance(begin_or_end, (list, tuple))
        firsts = [begin_or_end] if single else list(begin_or_end)
        ends = firsts if end is None else [end] if single else list(end)
        begins = [0] * len(firsts) if end is None else firsts
        sizes = list(block_size) if isinstance(block_size, (list, tuple)) else [block_size] * len(ends)
        if not len(begins) == len(ends) == len(sizes):
            refuse(
                f"{what}: {len(begins)} begins, {len(ends)} ends and {len(sizes)} {'steps' if step else 'block sizes'}: "
                "one for each dim"
            )
        frame = user_frame()
        assert frame is not None
        line = f"the {'grid' if step else 'tile'} of line {frame.f_lineno}"
        axes: list[tuple[Axis, Expr | None, int]] = []
        for n, (first, last, size) in enumerate(zip(begins, ends, sizes, strict=True)):
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
        return _Range(self, what, axes, single)

    def jagged_range(self, lengths: Any, block_size: Any) -> Any:
        """`hl.jagged_tile`: up to the longest of the rows, each position under the condition that its row is that long."""
        what = "hl.jagged_tile"
        value = as_traced(lengths)
        if not isinstance(value, Traced) or value.ndim == 0:
            refuse(
                "hl.jagged_tile takes the lengths of a tile of rows, such as jt.lengths[tile]; of one row, use hl.tile(length)"
            )
        frame = user_frame()
        assert frame is not None
        length = self.index_of(cast(value, torch.int64))
        longest = functions.reduced(
            self, Traced(number(length), value.axes, value.conditions), range(value.ndim), False, "max", torch.int64
        )
        end = self.index_of(longest)
        block, site = self._block(block_size, (frame.f_code, frame.f_lasti, 0))
        axis = Axis(
            self.name_for(self._target_name(0)), const(0), end, block, f"the jagged tile of line {frame.f_lineno}", site=site
        )
        conditions = (*value.conditions, Condition(Less(axis.position, length), True))
        return _Range(self, what, [(axis, None, 1)], True, conditions)

    def _target_name(self, n: int) -> str:
        names = self.loops[-1].targets if self.loops else ()
        name = names[n] if n < len(names) else "t"
        return name.removeprefix("tile_") or "t"

    def _block(self, size: Any, site: Any) -> tuple[int | None, Any]:
        if size is None:
            number_ = self._sites.setdefault(site, len(self._sites))
            given = self.blocks[number_] if number_ < len(self.blocks) else None
            return given, site
        block = int(self.number(size, "hl.tile"))
        if block < 1:
            refuse(f"hl.tile: a block size must be at least 1, not {block}")
        return block, getattr(size, "axis", site)

    def _bound(self, x: Any, what: str) -> Expr:
        if isinstance(x, TracedTile):
            refuse("a tile is not one number: use tile.begin, tile.end or tile.id")
        value = as_traced(x)
        if not isinstance(value, Traced) or value.dtype.is_floating_point:
            refuse(f"{what} takes whole numbers as bounds, not a {type(x).__name__}")
        if any(a is not None for a in value.axes):
            refuse(
                f"{what} needs one number, but this is a value with the lanes of {', '.join(map(str, value.axes))}: "
                "reduce it first (x.amax())"
            )
        return self.index_of(cast(value, torch.int64))

    def enter(self, targets: Sequence[str] = (), left: Sequence[str] = ()) -> TracedLoop:
        """A loop statement begins; `left` are names that it only leaves behind."""
        return TracedLoop(self, targets, left)

    def branch(self, test: Any) -> Branch:
        """An `if` statement begins."""
        return Branch(self, test)

    # --- the whole ---

    def run(self, function: Callable[..., Any], env: dict[str, Any]) -> KernelProgram:
        """The program of a device loop."""
        with running(self):
            function(**env)
        written = {t: replace(t, role=Role.OUTPUT) for t in self._written}
        inputs = tuple(t.tensor for t in self.tensors.values() if t.tensor not in written)
        body = tuple(_retargeted(n, written) for n in self.block)
        return KernelProgram(
            self.name,
            body,
            tuple(self.axes),
            inputs,
            tuple(written.values()),
            tuple((a, self.counted.get(a)) for a in self.described.values()),
            tuple(self.notes),
        )


def _retargeted(node: Any, written: dict[Tensor, Tensor]) -> Any:
    """The statement with tensors that are stored to as results, wherever they occur."""
    from serrate.ir.loops import Load, bodies, load, with_bodies
    from serrate.ir.values import rewrite

    def change(v: Value) -> Value | None:
        return load(written[v.tensor], v.index, v.guard, v.other) if isinstance(v, Load) and v.tensor in written else None

    if isinstance(node, Tiles | Along):
        return replace(node, body=tuple(_retargeted(n, written) for n in node.body))
    if isinstance(node, If | While):
        return with_bodies(node, tuple(tuple(_retargeted(n, written) for n in part) for part in bodies(node)))
    if isinstance(node, Dot):
        return replace(node, left=rewrite(node.left, change), right=rewrite(node.right, change))
    if isinstance(node, Assign | Reduce | Running | Write):
        node = replace(node, value=rewrite(node.value, change))
    return replace(node, tensor=written[node.tensor]) if isinstance(node, Write) else node


class _Range:
    """What `hl.tile`, `hl.jagged_tile` and `hl.grid` give: one run through the loop's body, with symbols."""

    def __init__(
        self,
        trace: Trace,
        what: str,
        dims: Sequence[tuple[Axis, Expr | None, int]],
        single: bool,
        conditions: Sequence[Condition] = (),
    ) -> None:
        self.trace, self.what, self.dims, self.single = trace, what, dims, single
        self.conditions = conditions

    def __iter__(self) -> Iterator[Any]:
        trace = self.trace
        if not trace.loops or trace.loops[-1].outer is not None:
            refuse(f"{self.what} is for a `for` statement of the kernel itself, or of a function that it calls")
        axes = [axis for axis, _, _ in self.dims]
        trace.loops[-1].begin(axes)
        made = tuple(
            TracedTile(axis, self.conditions) if low is None else Traced(number(low + axis.position * stride), ())
            for axis, low, stride in self.dims
        )
        yield made[0] if self.single else made


class TracedLoop:
    """One loop statement: a loop over tiles, a `while` on numbers of the device, or plain Python, which runs as it is."""

    def __init__(self, trace: Trace, targets: Sequence[str], left: Sequence[str]) -> None:
        self.trace, self.targets, self.left = trace, tuple(targets), frozenset(left)
        self.outer: list[Statement] | None = None
        self.axes: list[Axis] = []
        self.carried: dict[str, tuple[Local, Traced]] = {}
        self.updates: dict[str, Traced] = {}
        self.kept: dict[str, Any] = {}
        """What programs find, and must leave as it is."""
        self.conditions: dict[str, list[Condition]] = {}
        self.stepped = False
        self.start = 0
        self.test: tuple[list[Statement], tuple[Less, ...]] | None = None
        self.number = trace._loop_number
        trace._loop_number += 1
        trace.loops.append(self)

    def begin(self, axes: list[Axis]) -> None:
        """It is a loop over tiles."""
        trace = self.trace
        self.outer, trace.block = trace.block, []
        self.axes = axes
        trace.axes += axes
        if not trace.axes_open:
            trace.programs = tuple(axes)
        trace.axes_open += axes
        trace.clock += 1
        self.start = trace.clock

    def again(self, test: Any) -> bool:
        """Whether a `while` goes on: of plain Python as it says; of a number of the device, through its body once."""
        trace = self.trace
        if self.test is not None:
            return False
        if not isinstance(test, Traced) or (test.expr is not None and test.expr.value is not None):
            if self.outer is not None:
                self.abandon()
            return bool(test)
        if any(a is not None for a in test.axes):
            refuse("`while` needs one number: reduce it first, with x.any() or x.amax()")
        guard = conditions_of(trace, cast(test, torch.bool))
        self.test = (trace.block, guard)
        trace.block = []
        return True

    def prepare(self) -> None:
        """It may be a `while` on numbers of the device: what its test works out belongs to it."""
        trace = self.trace
        self.outer, trace.block = trace.block, []
        trace.clock += 1
        self.start = trace.clock

    def abandon(self) -> None:
        """It is a `while` of plain Python after all."""
        assert self.outer is not None
        self.trace.block = [*self.outer, *self.trace.block]
        self.outer = None

    def rest(self, name: str, value: Any) -> Any:
        """A carried value: before the first iteration, or as an iteration leaves it."""
        if self.outer is None:
            return value
        if not self.stepped:
            return self._first(name, value)
        if name not in self.carried:
            if name in self.left and name not in self.kept:
                return Unset(name)
            if name in self.kept and name not in self.left and value is not self.kept[name]:
                refuse(
                    f"{name} is carried from one program to the next, but programs run in any order: "
                    "put a loop inside, or use hl.atomic_add"
                )
            return value
        local, before = self.carried[name]
        value = as_traced(value)
        if not isinstance(value, Traced):
            refuse(f"{name} is carried around the loop, and is a {type(value).__name__} at its end")
        value = self._aligned(before, value)
        self._check(name, before, value)
        self.updates[name] = value
        kept = self.conditions.get(name, [])
        since = self._outer_time()
        return Traced(held(local), before.axes, kept, [self._all_of_it(f, since) for f in value.fed if f.time >= since])

    def _all_of_it(self, fed: Fed, time: int) -> Fed:
        """What fed a value in any iteration: something did if its first position existed, because rows end and do not begin."""
        first: dict[Expr, Expr] = {a.position: a.begin for a in self.axes}
        guard = tuple(g.substitute(first) for g in fed.guard)
        return Fed(time, tuple(a for a in fed.over if a not in self.axes), tuple(g for g in guard if not g.proven))

    def _aligned(self, before: Traced, value: Traced) -> Traced:
        """The value in the lanes that it had: those of a block size that this loop runs in are the same in every iteration."""
        pairs = zip(before.axes[before.ndim - value.ndim :] if value.ndim <= before.ndim else (), value.axes, strict=False)
        names = {b: a for a, b in pairs if a is not None and b in self.axes and not a.looped and b is not None}
        return value.renamed(names) if names else value

    def _outer_time(self) -> int:
        outer = [loop for loop in self.trace.loops[: self.trace.loops.index(self)] if loop.outer is not None]
        return outer[-1].start if outer else self.start + 10**9

    def _first(self, name: str, value: Any) -> Any:
        trace = self.trace
        if isinstance(value, (TracedTile, TracedTensor)):
            return value
        was = value
        value = as_traced(value)
        if not isinstance(value, Traced):
            return was
        known = trace.known.carried.get((self.number, name))
        axes, dtype = list(value.axes), value.dtype
        if known is not None:
            dtype = known[0]
            by_name = {a.name: a for a in trace.axes}
            axes = [None if n is None else by_name[n] for n in known[1]]
        if trace.programs and self.axes and tuple(self.axes) == trace.programs and trace.axes_open == list(self.axes):
            # Programs carry nothing.
            self.kept[name] = was
            return was
        assert self.outer is not None
        here, trace.block = trace.block, self.outer
        local = Local(trace.name_for(name), dtype, tuple(a.block_lane for a in axes if a is not None))
        initial = cast(value, dtype).value
        plain = isinstance(initial, Constant)
        trace.block.append(Declare(local, initial.number if plain and isinstance(initial, Constant) else 0))
        if not plain:
            trace.block.append(Assign(local.lanes, (), local, initial))
        trace.block = here
        placeholder = Traced(held(local), axes, value.conditions)
        self.carried[name] = (local, placeholder)
        return placeholder

    def _check(self, name: str, before: Traced, value: Traced) -> None:
        trace = self.trace
        axes, _ = functions.joint([before, value], f"the carried value {name}")
        grown = any(a is not None and a not in before.axes for a in axes) or len(axes) != before.ndim
        if grown and any(a in self.axes for a in axes if a is not None):
            refuse(
                f"the carried value {name} has shape {memory._shown(before.axes)} before an iteration and "
                f"{memory._shown(value.axes)} after it"
            )
        if grown or value.dtype != before.dtype:
            key = (self.number, name)
            form = (value.dtype, tuple(None if a is None else a.name for a in axes))
            if key in trace.known.carried and trace.known.carried[key][1] != form[1]:
                refuse(
                    f"the carried value {name} has shape {memory._shown(before.axes)} before an iteration and "
                    f"{memory._shown(value.axes)} after it"
                )
            if trace.known.carried.get(key) == form or (value.ndim < before.ndim == len(axes) and value.dtype == before.dtype):
                return
            trace.known.carried[key] = form
            raise Again
        old = {c.holds for c in before.conditions}
        kept = [c for c in before.conditions if c in value.conditions]
        for c in value.conditions:
            if c.holds in old:
                continue
            changes = any(mentions(c.holds, a) for a in self.axes)
            if c.row and changes:
                refuse(
                    f"the carried value {name} exists under a condition on the length of a row that changes with the loop: "
                    "reduce over that dim before, or make its lanes exist with hl.fill(x, 0)"
                )
            if not changes:
                kept.append(c)
        self.conditions[name] = kept

    def step(self) -> None:
        """An iteration begins."""
        self.stepped = True

    def leave(self) -> None:
        """The loop is over."""
        trace = self.trace
        trace.loops.remove(self)
        if self.outer is None:
            return
        carried = [
            Carried(
                name,
                self.carried[name][0],
                value,
                () if name in self.left else tuple(f for f in value.fed if f.time >= self.start),
            )
            for name, value in self.updates.items()
            if value.value is not held(self.carried[name][0])
        ]
        body = finish(trace.block, carried, trace.reductions)
        for each in carried:
            what = "the loop" if not self.axes else str(self.axes[0])
            trace.notes.append(f"{each.local.name} around {what}: {each.kind or 'as it is written'}")
        parallel = bool(self.axes) and tuple(self.axes) == trace.programs and trace.axes_open == list(self.axes)
        trace.block = self.outer
        if self.test is not None:
            trace.block.append(While(tuple(self.test[0]), self.test[1], body))  # type: ignore[arg-type]
        elif self.axes:
            trace.axes_open = trace.axes_open[: -len(self.axes)]
            carries = tuple(Carry(c.local, c.kind, c.top) for c in carried)
            trace.block.append(Tiles(tuple(self.axes), parallel, body, carries))
        else:
            trace.block += body


class Branch:
    """An `if` statement: on plain Python one branch, on a number of the device both."""

    def __init__(self, trace: Trace, test: Any) -> None:
        self.trace = trace
        self.known: bool | None = None
        self.before: dict[str, Any] = {}
        self.sides: list[dict[str, Any]] = [{}, {}]
        self.blocks: list[list[Statement]] = [[], []]
        if (
            isinstance(test, Traced)
            and not isinstance(test.value, Constant)
            and not (test.expr is not None and test.expr.value is not None)
        ):
            if any(a is not None for a in test.axes):
                refuse("`if` needs one number: reduce it first (x.amax(), x.any()), or use torch.where")
            self.negated = False
            self.guard = conditions_of(trace, cast(test, torch.bool))
        else:
            self.known = bool(test)

    def save(self, name: str, value: Any) -> None:
        """What a name stands for before the branches."""
        self.before[name] = value

    def then(self) -> bool:
        """Whether the first branch is traced."""
        if self.known is not None:
            return self.known
        self.outer, self.trace.block = self.trace.block, []
        return True

    def other(self) -> bool:
        """Whether the second branch is traced."""
        if self.known is not None:
            return not self.known
        self.blocks[0], self.trace.block = self.trace.block, []
        return True

    def keep(self, side: int, name: str, value: Any) -> None:
        """What a name stands for after a branch."""
        self.sides[side][name] = value

    def restore(self, name: str, value: Any) -> Any:
        """What the second branch begins with."""
        return value if self.known is not None else self.before.get(name, value)

    def close(self) -> None:
        """Both branches are over."""
        if self.known is not None:
            return
        self.blocks[1], self.trace.block = self.trace.block, self.outer
        self.merged: dict[str, Any] = {}
        for name in {**self.sides[0], **self.sides[1]}:
            self.merged[name] = self._merge(name)
        self.trace.block.append(If(self.guard, tuple(self.blocks[0]), tuple(self.blocks[1])))  # type: ignore[arg-type]

    def _merge(self, name: str) -> Any:
        trace = self.trace
        sides = [self.sides[k].get(name, self.before.get(name, _MISSING)) for k in (0, 1)]
        if sides[0] is sides[1]:
            return sides[0]
        if any(s is _MISSING for s in sides):
            return Unset(name)
        values = [as_traced(s) for s in sides]
        if not all(isinstance(v, Traced) for v in values):
            return Unset(name)
        axes, values = functions.joint(values, f"{name} after an `if`")
        dtype = torch.promote_types(values[0].dtype, values[1].dtype)
        local = Local(trace.name_for(name), dtype, tuple(a.block_lane for a in axes if a is not None))
        trace.block.append(Declare(local, 0))
        for block, value in zip(self.blocks, values, strict=True):
            block.append(Assign(local.lanes, (), local, cast(value, dtype).value))
        conditions = [c for v in values for c in v.conditions]
        return Traced(held(local), axes, conditions, self._fed(values, axes))

    def _fed(self, values: Sequence[Traced], axes: Sequence[Axis | None]) -> list[Fed]:
        """What feeds a value is what fed it in the branch that ran: each one notes whether something did."""
        trace = self.trace
        since = next((loop.start for loop in reversed(trace.loops) if loop.outer is not None), 0)
        now = [[f for f in v.fed if f.time >= since] for v in values]
        before = [f for v in values for f in v.fed if f.time < since]
        if not any(now) or now[0] == now[1]:
            return [*before, *now[0]]
        own = [a for a in axes if a is not None]
        local = Local(trace.name_for("seen"), torch.int64, tuple(a.block_lane for a in own))
        trace.block.append(Declare(local, 0))
        for block, feds in zip(self.blocks, now, strict=True):
            total: Value = constant(0 if feds else 1, torch.int64)
            for f in feds:
                total = call("add", total, f.count(), dtype=torch.int64)
            block.append(Assign(local.lanes, (), local, total))
        return [*before, Fed(trace.clock, (), (Less(const(0), trace._element(local.name, own)),))]

    def result(self, name: str, value: Any) -> Any:
        """What a name stands for after both branches."""
        return value if self.known is not None else self.merged.get(name, value)


_MISSING = object()


class Unset:
    """A name that only one branch sets."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        refuse(
            f"{self._name} may not have been set: set it before the loop, or in both branches of the `if`, whose number is known "
            "when the kernel runs"
        )
