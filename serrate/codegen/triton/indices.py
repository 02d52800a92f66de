"""Prints the index expressions, masks and pointers of a kernel in Triton.

In: expressions over loop indices and lanes. Out: text, and lines of the kernel. A block has its own lanes and is broadcast to
those of a statement.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from serrate.codegen.expressions import Spelling, written
from serrate.codegen.triton.addresses import is_narrow, place_of, reach
from serrate.codegen.triton.module import HELPER
from serrate.errors import VerificationError
from serrate.ir.expr import Array, Element, Expr, Less, Search, Sum, Symbol, const, minimum
from serrate.ir.expr import symbol as new_symbol
from serrate.ir.loops import Guard, Lane, Lanes, Local
from serrate.ir.solve import factor_of, terms_of
from serrate.ir.values import Tensor

HALF = 1 << 30
"""Two numbers of at most this many add up in 32 bits."""


class IndexPrinter:
    """Prints indices, masks and pointers; `names` are those of arrays in memory, `blocks` the private blocks of the kernel."""

    def __init__(self, names: Mapping[Array, str], blocks: Mapping[str, Local]) -> None:
        self.names, self.blocks = names, blocks
        self.lines: list[str] = []
        self.indent = 1
        self.count = 0
        self.lanes_of: dict[Symbol, Lanes] = {}
        self.last: dict[Symbol, int] = {}
        """The last value of all that is counted in 32 bits: lanes, and loops whose extent is a number."""
        self.multiplied: set[Symbol] = set()
        """The symbols that are multiplied in addresses."""
        self.compared: dict[Lane, str] = {}
        """Lanes that masks compare, and the names of the same lanes of the next block."""
        self.variables: dict[Symbol, str] = {}
        self.single: dict[Symbol, str] = {}
        """Lanes that a loop runs over, one at a time: what holds all their positions."""
        self.protecting: Guard = ()
        """The conditions of the statement that is being printed, and of the load in it."""
        self.entered: frozenset[Less] = frozenset()
        """The conditions of the branches around that statement."""

    def put(self, line: str) -> None:
        """Adds a line to the kernel."""
        self.lines.append("    " * self.indent + line)

    def fresh(self) -> str:
        """A new name."""
        self.count += 1
        return f"v{self.count}"

    def named(self, text: str) -> str:
        """A new variable that holds what is written here."""
        name = self.fresh()
        self.put(f"{name} = {text}")
        return name

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
            element=lambda e, go: clamped(self._element(e, lanes, go), e, go),
            search=self._search,
        )
        return written(expr, spelling)

    def _element(self, e: Element, lanes: Lanes, go: Callable[[Expr], str]) -> str:
        """An element of an array in memory, or of a private block of indices."""
        if not e.array.local:
            mask = self._protection(e, lanes)
            guarded = f", mask={mask}, other=0" if mask else ""
            return f"tl.load({self.names[e.array]} + {go(e.index)}{guarded}).to(tl.int64)"
        block = self.blocks[e.array.name]
        text = self.spread(block.name, _places(e.index, block), lanes)
        return text if block.dtype == torch.int64 else f"{text}.to(tl.int64)"

    def _protection(self, e: Element, lanes: Lanes) -> str:
        """The mask of an element whose row may not exist: the conditions on its position. Conditions may read elements
        themselves, under masks of their own; only conditions that nest no deeper than the index of this element are used, so
        that the recursion ends."""
        place, own = e.index, self.lanes_in(e.index)
        found = (g for g in self.protecting if self.lanes_in(g.left) | self.lanes_in(g.right) <= own)
        near = tuple(g for g in found if g.symbols & place.symbols and _depth(g.left - g.right) <= _depth(place))
        return self.joined_mask("", near, lanes)

    @contextlib.contextmanager
    def protected(self, guard: Guard) -> Iterator[None]:
        """Adds conditions to those under which elements are read: those of a branch, of a statement, or of a load in it."""
        before, more = self.protecting, (g for g in guard if g not in self.entered)
        self.protecting = tuple(dict.fromkeys((*before, *more)))
        yield
        self.protecting = before

    @contextlib.contextmanager
    def inside(self, guard: Guard) -> Iterator[None]:
        """A context for code that runs only where these conditions, which have no lanes, hold."""
        before, self.entered = self.entered, self.entered | set(guard)
        yield
        self.entered = before

    def _search(self, e: Search, go: Callable[[Expr], str]) -> str:
        name = "sr_owners" if self.lanes_in(e.position) | self.lanes_in(e.first) else "sr_owner"
        row = "" if e.first.value == 0 else f" + {go(e.first)}"
        # The search is as wide as its positions, so they are broadcast if only their rows have lanes.
        wide = f" + {go(e.first)} * 0" if self.lanes_in(e.first) - self.lanes_in(e.position) else ""
        return f"{name}({self.names[e.array]}{row}, {go(e.count)}, {go(e.position)}{wide})"

    def lanes_in(self, expr: Expr) -> set[Lane]:
        """The lanes that an index depends on."""
        return {lane for s in expr.symbols for lane in self.lanes_of.get(s, ())}

    @contextlib.contextmanager
    def one_lane(self, s: Symbol, last: Expr) -> Iterator[str]:
        """The name of a loop index, given its last value. If it counts the lanes of a block, statements in the loop use only the
        current lane."""
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

    def mask(self, guard: Sequence[Less], lanes: Lanes, own: set[Lane]) -> str:
        """The conditions on the given lanes (and on none), as a block that broadcasts over `lanes`."""
        wanted = [g for g in guard if (self.lanes_in(g.left) | self.lanes_in(g.right)) <= own]
        return " & ".join(f"({self.condition(g, lanes)})" for g in wanted)

    def joined_mask(self, mask: str, guard: Guard, lanes: Lanes) -> str:
        """A mask combined with further conditions; lane-invariant ones enable or disable all of it."""
        laned = [g for g in guard if self.lanes_in(g.left) | self.lanes_in(g.right)]
        mask = " & ".join([*([mask] if mask else []), *(f"({self.condition(g, lanes)})" for g in laned)])
        for g in guard:
            if g not in laned:
                mask = f"tl.where({self.condition(g, ())}, {mask or True}, False)"
        return mask

    def condition(self, g: Less, lanes: Lanes) -> str:
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
        """A sum of lanes in which lanes that addresses multiply are replaced by those of the next block, and the difference.

        A thread holds several positions of a lane, which differ by constants: s, s + 8, s + 16. LLVM moves the constants out of
        the products in addresses, so that one register serves all positions, but only if s + 8 has no other uses. Masks therefore
        compare the lanes of the next block, s + 64 + 8.
        """
        next_, further = dict[Expr, Expr](), 0
        for s in (s for s in mine if s in self.multiplied):
            (lane,) = self.lanes_of[s]
            other = new_symbol(self.compared.setdefault(lane, f"{self.variables[s]}_next"))
            self.lanes_of[other], self.last[other] = (lane,), 2 * lane.size - 1
            next_[s] = other
            further += factor_of(here, s) * lane.size
        return here.substitute(next_), further

    def pointer(self, tensor: Tensor, index: Sequence[Expr], lanes: Lanes) -> tuple[str, set[Lane]]:
        """A pointer block: the part without lanes first, so that lanes add small offsets to one base.

        The outermost of three lanes is added last: a thread holds all of its positions, whose offsets differ by constants, and
        LLVM leaves these in the instructions that access memory only if nothing else is added to them.
        """
        place = place_of(tensor, index)
        terms = place.terms if isinstance(place, Sum) else ((place, 1),)
        base: Expr = const(place.constant if isinstance(place, Sum) else 0)
        offsets, last = const(0), const(0)
        for term, factor in terms:
            if not self.lanes_in(term):
                base = base + term * factor
            elif len(lanes) > 2 and self.lanes_in(term) == {lanes[0]}:
                last = last + term * factor
            else:
                offsets = offsets + term * factor
        text = tensor.name
        if base.value != 0:
            text += f" + {self.index(base)}"
        for each in (offsets, last):
            if each.value != 0:
                text += f" + {self.index(each, lanes)}"
        return text, self.lanes_in(place)


def _depth(expr: Expr) -> int:
    """The depth of indirection of an expression: how many reads are nested in each other's indices."""
    inside = max(map(_depth, expr.operands), default=0)
    return inside + (isinstance(expr, Element) and not expr.array.local)


def clamped(text: str, e: Element, go: Callable[[Expr], str]) -> str:
    """An element of an array, clamped to its bounds."""
    return text if e.most is None else f"tl.maximum(tl.minimum({text}, {go(e.most)}), 0)"


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
