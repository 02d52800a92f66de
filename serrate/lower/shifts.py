"""Shifts: whether results are independent of the value that exponentials are taken relative to.

In: a private block m, and all statements that may read it. Out: whether m is only a shift.

If every m is replaced by m + d, a value v becomes e^(w*d) * v + a*d. The pair (w, a) is its degree, and statements have it too:

    m: (0, 1)        e^(x - m): (-1, 0)       a sum of such: (-1, 0)       log of it: (0, -1)      m + log t: (0, 0)

m is a shift if everything that is stored or tested has degree (0, 0). Values that are not understood have no degree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from serrate.ir.loops import (
    Assign,
    Bind,
    Declare,
    Dot,
    For,
    Held,
    Load,
    Local,
    Node,
    Prefetch,
    Reduce,
    Write,
    bodies,
    expressions_of,
)
from serrate.ir.values import Call, Constant, Role, Tensor, Value
from serrate.lower.passes.common import names_in

Degree = tuple[int, int]
Key = TypeVar("Key", str, Tensor)
PLAIN: Degree = (0, 0)
COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))


class Unknown(Exception):
    """Raised for a value that has no degree."""


def is_shift(local: Local, statements: Iterable[Node]) -> bool:
    """Whether the results of statements do not depend on the value of a block, apart from rounding."""
    degrees = _Degrees({local.name: (0, 1)})
    try:
        # Twice: a carried value must have the same degree in the second iteration.
        degrees.body(tuple(statements))
        degrees.body(tuple(statements))
    except Unknown:
        return False
    return True


@dataclass
class _Degrees:
    blocks: dict[str, Degree | None]
    """The degrees of private blocks; None for a block of zeros, which has every degree."""
    rows: dict[Tensor, Degree | None] = field(default_factory=dict)

    def body(self, body: tuple[Node, ...]) -> None:
        for node in body:
            self._plain_indices(node)
            if bodies(node):
                for part in bodies(node):
                    self.body(part)
            elif isinstance(node, Declare):
                self.blocks.setdefault(node.local.name, None if node.number is None or node.number == 0 else PLAIN)
            elif isinstance(node, Write):
                self._write(node)
            elif isinstance(node, Assign):
                self._join(self.blocks, node.local.name, self.of(node.value))
            elif isinstance(node, Reduce | Dot):
                value = self._product(self.of(node.left), self.of(node.right)) if isinstance(node, Dot) else self.of(node.value)
                summed = isinstance(node, Dot) or (node.operator == "sum" and value is not None and value[1] == 0)
                if value not in (PLAIN, None) and not summed:
                    raise Unknown
                self._join(self.blocks, node.local.name, value)
            elif not isinstance(node, For | Bind | Prefetch):
                raise Unknown

    def _write(self, node: Write) -> None:
        degree = self.of(node.value)
        if node.tensor.role is Role.PRIVATE:
            self._join(self.rows, node.tensor, degree)
        elif degree not in (PLAIN, None):
            raise Unknown

    def _join(self, known: dict[Key, Degree | None], key: Key, degree: Degree | None) -> None:
        """Gives a block a degree. All its elements must have the same one."""
        have = known.get(key)
        if have is not None and degree is not None and have != degree:
            raise Unknown
        known[key] = have if degree is None else degree

    def _plain_indices(self, node: Node) -> None:
        if any(self.blocks.get(name, PLAIN) not in (PLAIN, None) for e in expressions_of(node) for name in names_in(e)):
            raise Unknown

    def of(self, value: Value) -> Degree | None:
        """The degree of a value; None for zeros."""
        if isinstance(value, Held):
            return self.blocks.get(value.local.name, PLAIN)
        if isinstance(value, Load):
            return self.rows.get(value.tensor, PLAIN)
        if isinstance(value, Constant):
            return None if value.number == 0 else PLAIN
        return self._call(value.function, value.args) if isinstance(value, Call) else PLAIN

    def _call(self, function: str, args: tuple[Value, ...]) -> Degree | None:
        if function == "sub" and args[0] is args[1]:
            return None
        found = [self.of(a) for a in args]
        if all(d == PLAIN or d is None for d in found) and function not in ("add", "sub", "mul"):
            return PLAIN
        if function in ("add", "sub"):
            return self._sum(found[0], found[1], -1 if function == "sub" else 1)
        if function == "mul":
            return self._product(*found)
        first = found[0] or PLAIN
        if function in ("div", "reciprocal"):
            top, (w, a) = (PLAIN, first) if function == "reciprocal" else (first, found[1] or PLAIN)
            return self._product(top, (-w, a))
        if function in ("cast", "neg"):
            return first if function == "cast" else (first[0], -first[1])
        if function in ("exp", "exp_below", "exp_diff"):
            w, a = first if function == "exp" else self._sum(found[0], found[1], -1) or PLAIN
            return (a, 0) if w == 0 else _unknown()
        if function == "log":
            return (0, first[0]) if first[1] == 0 else _unknown()
        if function == "where" and found[0] in (PLAIN, None):
            return self._same(found[1:])
        if function in COMPARISONS:
            self._same(found)
            return PLAIN
        return self._same(found) if function in ("maximum", "minimum") else _unknown()

    def _same(self, found: list[Degree | None]) -> Degree | None:
        kinds = {d for d in found if d is not None}
        # Zero is invariant under scaling but not under translation, so it may be compared with scaled values only.
        if len(kinds) > 1 or (None in found and any(d[1] for d in kinds)):
            raise Unknown
        return kinds.pop() if kinds else None

    def _sum(self, left: Degree | None, right: Degree | None, sign: int) -> Degree | None:
        if left is None or right is None:
            (w, a) = left or right or PLAIN
            return None if left is right else (w, a if right is None else sign * a)
        if left[0] == right[0] and (left[0] == 0 or left[1] == right[1] == 0):
            return (left[0], left[1] + sign * right[1])
        raise Unknown

    def _product(self, left: Degree | None, right: Degree | None) -> Degree | None:
        if left is None or right is None:
            return None
        return (left[0] + right[0], 0) if left[1] == right[1] == 0 else _unknown()


def _unknown() -> Degree:
    raise Unknown
