"""Proves that one tile may cover its whole axis.

In: the tile program of a device loop. Out: nothing, or `NotLifted`, which names what depends on tile boundaries.

A loop over tiles runs its statements once per tile. Running them once for all positions stores the same numbers if every value
that leaves an iteration is proven to be one of the following, for each loop separately:

    x                                    computed at each position, or the same in all iterations: may be stored
    s sum= x over the tile               a partial reduction: may only be combined into a carried value, by the same operator
    acc sum= x, acc = acc + s            a carried reduction: is not read in its loop, but to update it
    new = maximum(top, s)                a running maximum; `exp(x - new)` is relative to it, and so is its product with x
    acc = acc * exp(top - new)           rescales a carried sum, to which only what is relative to the same maximum is added

A sum relative to a maximum does not depend on the tiles: with M the maximum of the whole row, it ends as the sum of exp(x - M),
because each factor rescales the sum so far from the old maximum to the new one. A loop over single positions has no partial
results, so any value of the position may be combined into a carried value. Everything else is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serrate.ir.expr import Element, Expr, Less, Symbol
from serrate.ir.loops import Assign, Declare, Dot, Existing, Guard, Held, Lane, Load, Local, Number, Reduce, Write
from serrate.ir.reductions import OPERATORS, reduction
from serrate.ir.tile import Axis, Loop, Statement, TileProgram, statements
from serrate.ir.values import Call, Constant, Value, call

Line = int | None
Update = Assign | Reduce | Dot


class NotLifted(Exception):
    """The reason why a loop cannot become a fusion, and its line, if known."""

    def __init__(self, reason: str, line: Line) -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line


def require_whole_tiles(program: TileProgram, lines: Mapping[object, int]) -> None:
    """Raises unless every tile of the program may be all of its axis."""
    (phase,) = program.phases
    ends = LoopEnds(program)
    for node in statements(phase.body):
        if isinstance(node, Loop):
            axis = program.axis_of(node.domain)
            if axis is None:
                raise NotLifted("a loop over something other than tiles is not differentiated", None)
            _Iteration(axis, ends, lines).check(node)


def updated(node: Statement) -> Local | None:
    """The private block that a statement changes."""
    return node.local if isinstance(node, Update) else None


class LoopEnds:
    """Loops whose ends depend on a tile, although what they compute does not.

    A jagged tile ends with the longest row of its tile of rows; each position counts only where its own row is that long. A
    causal loop over keys ends where the tile of queries does; a key after its query adds nothing, as is proven here.
    """

    def __init__(self, program: TileProgram) -> None:
        (phase,) = program.phases
        self._updates: dict[str, list[Update]] = {}
        for node in statements(phase.body):
            if isinstance(node, Update):
                self._updates.setdefault(node.local.name, []).append(node)
        self._temporaries = dict(self._assigned_once(phase.body))
        """The values of private blocks that are assigned once, where they are declared."""
        self.axes = {axis.position: axis for axis in program.axes}
        self.jagged = {a.position: guard for a in program.axes if (guard := self._jagged(a)) is not None}
        """The conditions under which a position of a jagged tile is before its end."""
        self.causal = {a.position: of for a in program.axes for of in program.axes if a.end is of.last and of.block is None}
        """The axis whose tile a loop ends with, for the position of each causal loop."""
        for position in [p for p, of in self.causal.items() if not self._adds_nothing(phase.body, p, of)]:
            del self.causal[position]

    def follows(self, test: Less, guard: Guard) -> bool:
        """Whether a test that a position is before the end of its loop is implied by the others, or irrelevant."""
        axis = self.axes.get(test.left) if isinstance(test.left, Symbol) else None
        if axis is None or test.right is not axis.end:
            return False
        known = self.jagged.get(axis.position)
        return axis.position in self.causal or (known is not None and all(other in guard for other in known))

    def _assigned_once(self, body: tuple[Statement, ...]) -> Iterator[tuple[str, Value]]:
        bodies = [body, *(node.body for node in statements(body) if isinstance(node, Loop))]
        for first, node in (pair for each in bodies for pair in itertools.pairwise(each)):
            made = isinstance(first, Declare) and isinstance(node, Assign) and first.local == node.local and not node.guard
            if made and isinstance(node, Assign) and len(self._updates[node.local.name]) == 1:
                yield node.local.name, node.value

    def _jagged(self, axis: Axis) -> Guard | None:
        """For a jagged tile, `most max= length where guard; end = most`: what holds only at positions before the end."""
        end = axis.end
        ended = self._updates.get(end.array.name, []) if isinstance(end, Element) and end.array.local else []
        if len(ended) != 1 or not isinstance(ended[0], Assign) or ended[0].guard or not isinstance(ended[0].value, Held):
            return None
        made = self._updates.get(ended[0].value.local.name, [])
        if len(made) != 1 or not isinstance(made[0], Reduce) or made[0].operator != "max":
            return None
        length = made[0].value
        return (Less(axis.position, length.expr), *made[0].guard) if isinstance(length, Number) else None

    # --- causal loops ----------------------------------------------------------------------------------------------------

    def _adds_nothing(self, body: tuple[Statement, ...], position: Symbol, of: Axis) -> bool:
        """Whether positions after those of another axis change nothing."""
        for node in statements(body):
            if isinstance(node, Write) and any(lane.symbol is position for lane in node.lanes):
                return False
            if not isinstance(node, Reduce | Dot) or not any(lane.symbol is position for lane in node.lanes):
                continue
            if any(lane.symbol is position for lane in node.local.lanes):
                continue
            operator = node.operator if isinstance(node, Reduce) else "sum"
            value = node.value if isinstance(node, Reduce) else call("mul", node.left, node.right, dtype=node.local.dtype)
            if self._after(value, position, of.position) != reduction(operator).identity(0, node.local.dtype):
                return False
        return True

    def _after(self, value: Value, late: Symbol, early: Symbol) -> float | int | bool | None:
        """The number that a value is where `late` is greater than `early`; None if that is not known."""
        if isinstance(value, Constant):
            return value.number
        if isinstance(value, Held):
            made = self._temporaries.get(value.local.name)
            return None if made is None else self._after(made, late, early)
        if not isinstance(value, Call):
            return None
        if value.function in COMPARISONS:
            return self._compared(value, late, early)
        found = [self._after(x, late, early) for x in value.args]
        match value.function:
            case "where":
                test, yes, no = found
                return (yes if test else no) if test is not None else yes if yes == no else None
            case "logical_and" | "bitand" if any(x is False for x in found):
                return False
            case "mul" if any(x == 0 for x in found if x is not None):
                return 0
            case "div" if found[0] == 0:
                return 0
            case "sub" if found[0] == -INFINITY:
                return -INFINITY
            case "exp" | "exp_below" | "exp_diff" if found[0] == -INFINITY:
                return 0
            case "cast" if value.dtype.is_floating_point:
                return found[0]
        return None

    def _compared(self, value: Call, late: Symbol, early: Symbol) -> bool | None:
        sides = [x.expr if isinstance(x, Number) else None for x in value.args]
        if sides[0] is None or sides[1] is None:
            return None
        # late - early is 1 or more; the difference of the sides is that plus a number, or its negative plus a number.
        difference = sides[0] - sides[1]
        above, below = (difference - (late - early)).value, (difference + (late - early)).value
        low = None if above is None else above + 1
        high = None if below is None else below - 1
        match value.function:
            case "lt":
                return True if high is not None and high < 0 else False if low is not None and low >= 0 else None
            case "le":
                return True if high is not None and high <= 0 else False if low is not None and low > 0 else None
            case "gt":
                return True if low is not None and low > 0 else False if high is not None and high <= 0 else None
            case "ge":
                return True if low is not None and low >= 0 else False if high is not None and high < 0 else None
        return None


COMPARISONS = ("lt", "le", "gt", "ge")
INFINITY = float("inf")


class Kind(NamedTuple):
    """The facts about a value in one iteration of a loop."""

    what: str
    of: str = ""
    """The private block that holds it; for a refused value, the block that prevents lifting."""
    operator: str = ""
    top: str = ""
    """The carried maximum that it is relative to."""
    at: object = None
    """The new value of that maximum."""


PLAIN = Kind("plain")
"""Computed at each position, or the same in all iterations."""
SEEN = Kind("seen")
"""Whether some position of the tile exists."""
OF_TILES = Kind("of tiles")
"""Depends on where tiles begin and end."""


@dataclass
class _Iteration:
    """One iteration of a loop over an axis."""

    axis: Axis
    ends: LoopEnds
    lines: Mapping[object, int]
    kinds: dict[str, Kind] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    """How often each private block was changed."""
    first: dict[str, float | int | bool | None] = field(default_factory=dict)
    """The number that a private block holds, if nothing was combined into it yet."""
    carried: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        axis = self.axis
        self.single = axis.block == 1
        self.sizes = frozenset() if self.single else frozenset((axis.first, axis.last, axis.number, axis.lane, axis.lanes))
        self.own = frozenset(a.position for a in self.ends.axes.values() if a.original is axis)

    def check(self, loop: Loop) -> None:
        inside = {n.local.name for n in statements(loop.body) if isinstance(n, Declare)}
        changed = {local.name: None for n in statements(loop.body) if (local := updated(n)) is not None}
        self.carried = frozenset(changed.keys() - inside)
        for name in self.carried:
            self.kinds[name] = Kind("old", name)
        self._run(loop.body)
        for name in (n for n in changed if n in self.carried):
            kind = self.kinds[name]
            if kind.what in ("rescaled", "new rescaled"):
                top = self.kinds.get(kind.top)
                if top is None or top.what != "new" or top.at != kind.at:
                    raise NotLifted(f"{name} is rescaled by another maximum than {kind.top}", self.lines.get(name))

    # --- statements ------------------------------------------------------------------------------------------------------

    def _run(self, body: tuple[Statement, ...]) -> None:
        for node in body:
            if isinstance(node, Loop):
                self._loop(node)
            elif isinstance(node, Declare):
                self.kinds[node.local.name] = PLAIN
                self.first[node.local.name] = node.number
            elif isinstance(node, Update):
                self._update(node)
                self.versions[node.local.name] = self.versions.get(node.local.name, 0) + 1
                self.first.pop(node.local.name, None)
            elif isinstance(node, Write) and not node.add:
                self._not_twice(node.lanes, self.lines.get(node.tensor.name))
                kind = self._all([self._value(node.value), self._guard(node.guard), *map(self._expr, node.index)])
                if kind != PLAIN:
                    raise self._refusal(kind, self.lines.get(node.tensor.name))

    def _loop(self, loop: Loop) -> None:
        """A loop inside: its statements are run again until nothing changes, because one iteration reads what another left."""
        axis = next((a for a in self.ends.axes.values() if a.domain is loop.domain), None)
        self._require_end(loop, axis)
        for _ in range(len(self.kinds) + 3):
            before, first = dict(self.kinds), dict(self.first)
            self._run(loop.body)
            if all(self.kinds[name] == kind for name, kind in before.items()) and first.items() <= self.first.items():
                return
        raise NotLifted(f"the values carried by {axis} are not recognised as reductions", None)

    def _require_end(self, loop: Loop, axis: Axis | None) -> None:
        """Raises if the end of a loop inside depends on the tile."""
        if axis is None or axis.position in self.ends.jagged or axis.position in self.ends.causal:
            return
        if self._all([self._expr(axis.begin), self._expr(axis.end)]) != PLAIN:
            inside = [n.tensor if isinstance(n, Write) else updated(n) for n in statements(loop.body)]
            lines = [self.lines[x.name] for x in inside if x is not None and x.name in self.lines]
            reason = f"where {axis} ends depends on {self.axis}, and positions after that are not proven to add nothing"
            raise NotLifted(reason, min(lines, default=None))

    def _update(self, node: Update) -> None:
        name, line = node.local.name, self.lines.get(node.local.name)
        self._not_twice(node.lanes, line)
        if isinstance(node, Dot):
            value, operator = self._product(self._value(node.left), self._value(node.right)), "sum"
        else:
            value, operator = self._value(node.value), node.operator if isinstance(node, Reduce) else ""
        if name in self.carried:
            self._carry(node, value, operator, line)
        elif isinstance(node, Assign):
            kind = value if not node.guard else self._all([value, self._guard(node.guard), self.kinds[name]])
            self.kinds[name] = kind
        else:
            self.kinds[name] = self._reduced(node, value, operator)

    def _carry(self, node: Update, value: Kind, operator: str, line: Line) -> None:
        """A change of a value that the loop carries."""
        name, now = node.local.name, self.kinds[node.local.name]
        guard = self._guard(node.guard)
        if guard != PLAIN:
            raise self._refusal(guard, line)
        if isinstance(node, Assign):
            if value == now or (value.what == "new" and value.of == name):
                self.kinds[name] = value
                return
            if value.what in ("rescaled", "new rescaled") and value.of == name and not node.guard and now == Kind("old", name):
                self.kinds[name] = value
                return
            raise self._not_a_reduction(name, value, line)
        over = self.single or any(lane.symbol in self.own for lane in node.lanes)
        same = now == Kind("old", name) or (now.what == "new" and now.operator == operator)
        whole = value == PLAIN if over else value.what == "partial" and value.operator == operator
        if same and whole:
            self.kinds[name] = Kind("new", name, operator)
        elif operator == "sum" and now.what in ("rescaled", "new rescaled") and self._is_relative(value, now, over):
            self.kinds[name] = now._replace(what="new rescaled")
        else:
            raise self._not_a_reduction(name, value, line)

    @staticmethod
    def _is_relative(value: Kind, now: Kind, over: bool) -> bool:
        wanted = "relative" if over else "partial relative"
        return value.what == wanted and value.top == now.top and value.at == now.at

    def _reduced(self, node: Reduce | Dot, value: Kind, operator: str) -> Kind:
        """The facts about a private block of the iteration after a reduction into it."""
        name, now = node.local.name, self.kinds[node.local.name]
        guard = self._guard(node.guard)
        if guard != PLAIN:
            return guard
        crossed = not self.single and any(lane.symbol in self.own for lane in node.lanes)
        over = crossed and not any(lane.symbol in self.own for lane in node.local.lanes)
        starts = name in self.first and self.first[name] == reduction(operator).identity(0, node.local.dtype)
        if value == PLAIN:
            found = Kind("partial", name, operator) if over else PLAIN
        elif value.what == "partial" and value.operator == operator and not crossed:
            found = Kind("partial", name, operator)
        elif value.what == "relative" and operator == "sum":
            found = value._replace(what="partial relative" if over else "relative", of=name)
        elif value.what == "partial relative" and operator == "sum" and not crossed:
            found = value._replace(of=name)
        else:
            return value if value != PLAIN else Kind("mixed", name)
        return found if found == now or starts else Kind("mixed", name)

    def _not_twice(self, lanes: Sequence[Lane], line: Line) -> None:
        if sum(lane.symbol in self.own for lane in lanes) > 1:
            raise NotLifted(f"positions of {self.axis} are paired with others of the same tile", line)

    # --- values ----------------------------------------------------------------------------------------------------------

    def _all(self, kinds: Iterable[Kind]) -> Kind:
        """Plain if all are; else the first that is not."""
        return next((kind for kind in kinds if kind != PLAIN), PLAIN)

    def _guard(self, guard: Guard) -> Kind:
        tests = [test for test in guard if not self.ends.follows(test, guard)]
        return self._all(self._expr(side) for test in tests for side in (test.left, test.right))

    def _expr(self, e: Expr) -> Kind:
        for part in _parts(e):
            if isinstance(part, Element):
                kind = self.kinds.get(part.array.name, PLAIN)
                if kind != PLAIN:
                    return kind if kind.what not in ("old", "new") else Kind("mixed", kind.of)
            elif part in self.sizes:
                return OF_TILES
        return PLAIN

    def _value(self, value: Value) -> Kind:
        return self._of(value, {})

    def _of(self, value: Value, known: dict[Value, Kind]) -> Kind:
        if value not in known:
            known[value] = self._found(value, known)
        return known[value]

    def _found(self, value: Value, known: dict[Value, Kind]) -> Kind:
        if isinstance(value, Held):
            return self.kinds.get(value.local.name, PLAIN)
        if isinstance(value, Load):
            return self._all([*map(self._expr, value.index), self._guard(value.guard)])
        if isinstance(value, Number):
            return self._expr(value.expr)
        if isinstance(value, Existing):
            guard = self._guard(value.guard)
            crossed = not self.single and any(lane.symbol in self.own for lane in value.lanes)
            return guard if guard != PLAIN or not crossed else Kind("partial", "", "sum")
        if not isinstance(value, Call):
            return PLAIN
        kinds = [self._of(x, known) for x in value.args]
        if all(kind == PLAIN for kind in kinds):
            return PLAIN
        found = self._called(value, kinds, known)
        if found is not None:
            return found
        worst = self._all(kinds)
        return OF_TILES if worst == OF_TILES else Kind("mixed", next((k.of for k in kinds if k.of), worst.top))

    def _called(self, value: Call, kinds: Sequence[Kind], known: dict[Value, Kind]) -> Kind | None:
        match value.function:
            case "cast":
                (inner,) = value.args
                return kinds[0] if inner.dtype.is_floating_point == value.dtype.is_floating_point else None
            case "neg" if kinds[0].what == "relative":
                return kinds[0]
            case "exp":
                (inner,) = value.args
                if isinstance(inner, Call) and inner.function == "sub":
                    return self._power(*(self._of(x, known) for x in inner.args))
                return None
            case "exp_below" | "exp_diff":
                return self._power(*kinds)
            case "gt":
                counted, least = value.args
                return SEEN if isinstance(counted, Existing) and isinstance(least, Constant) and least.number == 0 else None
            case "logical_or" if all(kind in (SEEN, PLAIN) for kind in kinds):
                return SEEN
            case "where":
                return self._chosen(value, kinds)
            case "div" if kinds[0].what == "relative" and kinds[1] == PLAIN:
                return kinds[0]
        if value.function in OPERATORS:
            for one, other in (kinds, kinds[::-1]):
                found = self._combined(value, OPERATORS[value.function], one, other)
                if found is not None:
                    return found
        return None

    def _combined(self, value: Call, operator: str, one: Kind, other: Kind) -> Kind | None:
        joins = other == PLAIN if self.single else other.what == "partial" and other.operator == operator
        if one.what == "new" and one.operator == operator and joins:
            return Kind("new", one.of, operator)
        if one.what == "old" and joins and self.single:
            return Kind("new", one.of, operator)
        if one.what == "old" and joins:
            locals_ = {v.local.name for v in value.walk() if isinstance(v, Held)}
            at = value, tuple(sorted((name, self.versions.get(name, 0)) for name in locals_))
            return Kind("new", one.of, operator, one.of, at)
        if operator == "sum" and one.what == "rescaled" and other.what == "partial relative":
            return one._replace(what="new rescaled") if (one.top, one.at) == (other.top, other.at) else None
        if operator == "prod" and one.what == "old" and other.what == "factor" and one.of != other.top:
            return Kind("rescaled", one.of, "", other.top, other.at)
        return self._product(one, other) if operator == "prod" and one.what == "relative" else None

    @staticmethod
    def _product(left: Kind, right: Kind) -> Kind:
        if left == PLAIN or right == PLAIN:
            one = left if right == PLAIN else right
            if one == PLAIN or one.what == "relative":
                return one
        return Kind("mixed", left.of or right.of or left.top)

    def _power(self, x: Kind, top: Kind) -> Kind | None:
        """e to the power of a difference."""
        if top.what != "new" or top.operator != "max" or top.at is None:
            return None
        if x == PLAIN:
            return Kind("relative", "", "", top.of, top.at)
        return Kind("factor", "", "", top.of, top.at) if x == Kind("old", top.of) else None

    def _chosen(self, value: Call, kinds: Sequence[Kind]) -> Kind | None:
        """A choice that leaves a carried value as it is, or a relative value out."""
        test, yes, no = kinds
        if yes.what in ("new", "rescaled", "new rescaled") and no == Kind("old", yes.of):
            # Where no position exists, what is combined is the identity, and the maximum and the sums relative to it stay.
            return yes if test == SEEN or (test == PLAIN and yes.what == "new") else None
        if test != PLAIN:
            return None
        zero = [isinstance(x, Constant) and x.number == 0 for x in value.args]
        if yes.what == "relative" and zero[2]:
            return yes
        return no if no.what == "relative" and zero[1] else None

    # --- refusals --------------------------------------------------------------------------------------------------------

    def _refusal(self, kind: Kind, line: Line) -> NotLifted:
        if kind == OF_TILES:
            return NotLifted("a number depends on the size of the tiles", line)
        name = kind.of or kind.top
        if kind.what in ("old", "new", "rescaled", "new rescaled") or name in self.carried:
            return NotLifted(f"{name} is read inside {self.axis}, before the loop has combined all of it", line)
        if not name:
            return NotLifted(f"it depends on how many positions a tile of {self.axis} has", line)
        return NotLifted(f"{name} is reduced within {self.axis}, one tile at a time", line)

    def _not_a_reduction(self, name: str, value: Kind, line: Line) -> NotLifted:
        step = "position to position" if self.single else "tile to tile"
        return NotLifted(f"{name} is carried from {step} by {self.axis}, and is not a reduction that is recognised", line)


def _parts(e: Expr) -> Iterator[Symbol | Element]:
    """The symbols of an index expression, and the elements of private blocks that it reads."""
    if isinstance(e, Symbol) or (isinstance(e, Element) and e.array.local):
        yield e
    else:
        for operand in e.operands:
            yield from _parts(operand)


__all__ = ["LoopEnds", "NotLifted", "require_whole_tiles", "updated"]
