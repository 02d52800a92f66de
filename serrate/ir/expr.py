"""Index expressions: small, immutable, interned, integer-valued.

In: Python ints and other expressions, combined with `+ - * // % ^`, `minimum`, `maximum`. Out: expressions in a canonical
form (sums are collected, so `o*64 + n - o*64` is `n`), with integer bounds, substitution and evaluation. Interning
makes equal expressions the same object: `==` is `is`, and dictionaries keyed by expressions are cheap.

    e ::= Const | Symbol | Sum(terms, const) | Product(a, b) | FloorDiv(a, b) | Mod(a, b) | Minimum(a, b) | Maximum(a, b)
        | Xor(a, b)
        | Element(array, e, most)           array[e]; with `most`, an expression, clamped to 0 .. most
        | Search(array, count, e, first)    upper_bound(array[first : first+count+1], e) - 1: the component that owns position e
    condition ::= Less(e, e)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast
from weakref import WeakValueDictionary

from serrate.ir.uids import Uid, sent

if TYPE_CHECKING:
    from serrate.ir.recipes import Recipe

INDEX = "@"
"""Prefix of the symbols for domain indices; the domain's number follows."""

Bounds = tuple[int | None, int | None]
"""Smallest and largest value, inclusive; None if unknown."""


@dataclass(frozen=True)
class Array:
    """A one-dimensional integer array that expressions read: an argument of the program, a constant, or derived from one.

    `data` holds a constant's elements. `recipe`, if given, says how to compute a derived array from others; the runtime computes
    it once per structure. Elements are non-negative unless `signed` (indices that a caller computes).
    """

    name: str
    data: tuple[int, ...] | None = None
    recipe: Recipe | None = None
    signed: bool = False
    local: bool = False
    """Whether it is a private block of indices, filled by the program itself."""

    def __getitem__(self, index: Expr | int) -> Expr:
        return element(self, as_expr(index))

    @property
    def sources(self) -> frozenset[Array]:
        """The arguments this array is computed from: itself, unless it is a constant or has a recipe."""
        if self.recipe is None:
            return frozenset() if self.data is not None else frozenset((self,))
        return frozenset(source for a in self.recipe.arrays for source in a.sources)

    def __str__(self) -> str:
        return self.name


def key_part(place: int) -> Any:
    """A named part of an interned node, read-only: the entry of its key at `place`."""
    return property(lambda node: node._key[place])


class Expr:
    """One index expression. Build with operators; never call the node classes directly."""

    _symbols: frozenset[Symbol]
    _arrays: frozenset[Array]
    __slots__ = ("__weakref__", "_arrays", "_key", "_symbols", "bounds", "text")
    _key: tuple[Any, ...]
    _interned: ClassVar[WeakValueDictionary[tuple[Any, ...], Expr]] = WeakValueDictionary()
    bounds: Bounds
    text: str

    def __add__(self, other: Expr | int) -> Expr:
        return _sum([(self, 1), (as_expr(other), 1)])

    def __radd__(self, other: int) -> Expr:
        return _sum([(self, 1), (as_expr(other), 1)])

    def __sub__(self, other: Expr | int) -> Expr:
        return _sum([(self, 1), (as_expr(other), -1)])

    def __rsub__(self, other: int) -> Expr:
        return _sum([(as_expr(other), 1), (self, -1)])

    def __mul__(self, other: Expr | int) -> Expr:
        return _product(self, as_expr(other))

    def __rmul__(self, other: int) -> Expr:
        return _product(self, as_expr(other))

    def __floordiv__(self, other: Expr | int) -> Expr:
        return _floordiv(self, as_expr(other))

    def __mod__(self, other: Expr | int) -> Expr:
        return _mod(self, as_expr(other))

    def __xor__(self, other: Expr | int) -> Expr:
        return _xor(self, as_expr(other))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    @property
    def value(self) -> int | None:
        """The value of a constant expression; None otherwise."""
        return self._key[1] if isinstance(self, Const) else None

    @property
    def operands(self) -> tuple[Expr, ...]:
        """The direct subexpressions."""
        return ()

    def rebuild(self, operands: tuple[Expr, ...]) -> Expr:
        """The same operation on new operands, simplified."""
        return self

    def evaluate(self, environment: Environment) -> Any:
        """The value under `environment`: ints, or integer tensors that broadcast against each other."""
        raise NotImplementedError

    def substitute(self, replacement: Mapping[Expr, Expr]) -> Expr:
        """This expression with every occurrence of a key replaced by its value."""
        if self in replacement:
            return replacement[self]
        operands = self.operands
        if not operands:
            return self
        new = tuple(operand.substitute(replacement) for operand in operands)
        return self if new == operands else self.rebuild(new)

    def __reduce__(self) -> tuple[object, ...]:
        # Rebuilt from its operands, and thus interned again: expressions are compared by identity.
        return (_RESTORED[type(self)], self._key[1:])

    def walk(self) -> Iterable[Expr]:
        """This expression and all its subexpressions."""
        yield self
        for operand in self.operands:
            yield from operand.walk()

    @property
    def symbols(self) -> frozenset[Symbol]:
        """The symbols that occur in this expression."""
        try:
            return self._symbols
        except AttributeError:
            self._symbols = frozenset(e for e in self.walk() if isinstance(e, Symbol))
            return self._symbols

    @property
    def arrays(self) -> frozenset[Array]:
        """The arrays this expression reads."""
        try:
            return self._arrays
        except AttributeError:
            self._arrays = frozenset(e.array for e in self.walk() if isinstance(e, Element | Search))
            return self._arrays


class Environment:
    """Values of symbols and arrays during evaluation; arrays are anything indexable with a `searchsorted`-like search."""

    def __init__(
        self,
        symbols: Mapping[Symbol, Any],
        array: Callable[[Array, Any], Any] | None = None,
        search: Callable[[Array, int, Any, Any], Any] | None = None,
    ) -> None:
        self.symbols = symbols
        self.array = array or _constant_element
        self.search = search or _constant_search


def _constant_element(array: Array, index: Any) -> Any:
    assert array.data is not None, f"no elements known for {array}"
    if index < 0:
        raise IndexError(f"{array}[{index}]")
    return array.data[index]


def _constant_search(array: Array, count: int, position: Any, first: Any) -> Any:
    assert array.data is not None, f"no elements known for {array}"
    if first < 0:
        raise IndexError(f"{array}[{first}]")
    return sum(1 for k in range(1, count + 1) if array.data[first + k] <= position)


class Const(Expr):
    """An integer."""

    def evaluate(self, environment: Environment) -> Any:
        return self._key[1]


class Symbol(Expr):
    """A variable: a loop index, or an extent known at run time."""

    name: str = key_part(1)

    def evaluate(self, environment: Environment) -> Any:
        try:
            return environment.symbols[self]
        except KeyError:
            raise KeyError(f"no value given for symbol {self.name}") from None

    def __reduce__(self) -> tuple[object, ...]:
        number = self.name.removeprefix(INDEX)
        if number == self.name or not number.isdecimal():
            return super().__reduce__()
        return (_restored_index, (sent(int(number)), *self.bounds))


class Sum(Expr):
    """A linear combination: `terms` are (expression, integer factor), none of them a Sum or a Const."""

    terms: tuple[tuple[Expr, int], ...] = key_part(1)
    constant: int = key_part(2)

    @property
    def operands(self) -> tuple[Expr, ...]:
        return tuple(term for term, _ in self.terms)

    def rebuild(self, operands: tuple[Expr, ...]) -> Expr:
        factors = [factor for _, factor in self.terms]
        return _sum([*zip(operands, factors, strict=True), (const(self.constant), 1)])

    def evaluate(self, environment: Environment) -> Any:
        total: Any = self.constant
        for term, factor in self.terms:
            total = total + term.evaluate(environment) * factor
        return total


class _Binary(Expr):
    operation: ClassVar[Callable[[Any, Any], Any]]
    left: Expr = key_part(1)
    right: Expr = key_part(2)

    @property
    def operands(self) -> tuple[Expr, ...]:
        return (self.left, self.right)

    def rebuild(self, operands: tuple[Expr, ...]) -> Expr:
        rebuilt: Expr = type(self).operation(*operands)
        return rebuilt

    def evaluate(self, environment: Environment) -> Any:
        return type(self).operation(self.left.evaluate(environment), self.right.evaluate(environment))


class Product(_Binary):
    """A product of two expressions, neither of them a constant."""

    operation = operator.mul


class FloorDiv(_Binary):
    """Division rounded down; the divisor is positive."""

    operation = operator.floordiv


class Mod(_Binary):
    """The remainder of floor division; the divisor is positive, so the result is not negative."""

    operation = operator.mod


class Xor(_Binary):
    """Bitwise xor. Printed in parentheses, because `^` binds less tightly than a sum."""

    operation = operator.xor


class Minimum(_Binary):
    """The smaller of two expressions."""

    def rebuild(self, operands: tuple[Expr, ...]) -> Expr:
        return minimum(*operands)

    def evaluate(self, environment: Environment) -> Any:
        a, b = self.left.evaluate(environment), self.right.evaluate(environment)
        return a * (a < b) + b * (a >= b)


class Maximum(_Binary):
    """The larger of two expressions."""

    def rebuild(self, operands: tuple[Expr, ...]) -> Expr:
        return maximum(*operands)

    def evaluate(self, environment: Environment) -> Any:
        a, b = self.left.evaluate(environment), self.right.evaluate(environment)
        return a * (a > b) + b * (a <= b)


class Element(Expr):
    """`array[index]`; with `most`, clamped to 0 .. most."""

    array: Array = key_part(1)
    index: Expr = key_part(2)
    most: Expr | None = key_part(3)

    @property
    def operands(self) -> tuple[Expr, ...]:
        return (self.index,) if self.most is None else (self.index, self.most)

    def rebuild(self, operands: tuple[Expr, ...]) -> Expr:
        return element(self.array, *operands)

    def evaluate(self, environment: Environment) -> Any:
        found = environment.array(self.array, self.index.evaluate(environment))
        if self.most is None:
            return found
        most = self.most.evaluate(environment)
        found = found * (found < most) + most * (found >= most)
        return found * (found > 0)


class Search(Expr):
    """The component that owns a position: the last c with `array[first + c] <= position`, so empty components never own one.

    If the array holds several rows of offsets, `first` is where the row to search begins. A position at or past the end has no
    owner: the result is then `count`, or less on a backend that clamps.
    """

    array: Array = key_part(1)
    count: Expr = key_part(2)
    position: Expr = key_part(3)
    first: Expr = key_part(4)

    @property
    def operands(self) -> tuple[Expr, ...]:
        return (self.count, self.position, self.first)

    def rebuild(self, operands: tuple[Expr, ...]) -> Expr:
        return search(self.array, *operands)

    def evaluate(self, environment: Environment) -> Any:
        count, position, first = (e.evaluate(environment) for e in self.operands)
        return environment.search(self.array, count, position, first)


@dataclass(frozen=True)
class Less:
    """The condition `left < right`."""

    left: Expr
    right: Expr

    def __str__(self) -> str:
        return f"{self.left} < {self.right}"

    def substitute(self, replacement: Mapping[Expr, Expr]) -> Less:
        return Less(self.left.substitute(replacement), self.right.substitute(replacement))

    @property
    def symbols(self) -> frozenset[Symbol]:
        return self.left.symbols | self.right.symbols

    @property
    def proven(self) -> bool:
        """Whether the bounds alone prove the condition."""
        high = (self.left - self.right).bounds[1]
        return high is not None and high < 0

    @property
    def simplified(self) -> Less:
        """An equivalent condition without divisions that the comparison makes unnecessary.

        `i // N < P` iff `i < N*P`: with q = i // N, i = q*N + rest and 0 <= rest < N. If q <= P - 1 then i <= (P-1)*N + N-1,
        which is below N*P; if q >= P then i >= q*N >= N*P. This holds for any signs of i and P; N is positive, as every divisor.

        >>> print(Less(symbol("i") // 4 + 1, const(3)).simplified)
        i < 8
        """
        left, right = self.left, self.right
        if isinstance(left, Sum) and len(left.terms) == 1 and left.terms[0][1] == 1:
            right, left = right - left.constant, left.terms[0][0]
        if isinstance(left, FloorDiv):
            return Less(left.left, right * left.right).simplified
        return Less(left, right) if left is not self.left else self

    def evaluate(self, environment: Environment) -> Any:
        return self.left.evaluate(environment) < self.right.evaluate(environment)


def _intern(kind: type[Expr], *key: Any, bounds: Bounds, text: str) -> Expr:
    full = (kind, *key)
    found = Expr._interned.get(full)
    if found is None:
        found = kind.__new__(kind)
        found._key = full
        found.bounds, found.text = bounds, text
        found = Expr._interned.setdefault(full, found)
    return found


def _restored_index(uid: Uid, low: int | None, high: int | None) -> Symbol:
    """The unpickled index of a domain, named after the domain's number in this process."""
    return symbol(f"{INDEX}{uid.here}", low, high)


def const(value: int) -> Expr:
    """The integer as an expression."""
    number = operator.index(value)
    return _intern(Const, number, bounds=(number, number), text=str(number))


def symbol(name: str, low: int | None = 0, high: int | None = None) -> Symbol:
    """A variable between `low` and `high`, inclusive; non-negative by default."""
    return cast(Symbol, _intern(Symbol, name, low, high, bounds=(low, high), text=name))


def as_expr(value: Expr | int) -> Expr:
    """An expression unchanged, or an int as a constant."""
    return value if isinstance(value, Expr) else const(value)


def element(array: Array, index: Expr, most: Expr | None = None) -> Expr:
    """`array[index]`; folded if both are constant and the index is in range (evaluating it raises otherwise).

    With `most`, the element is clamped to 0 .. most, whatever the array holds.
    """
    if array.data is not None and index.value is not None and 0 <= index.value < len(array.data):
        return const(array.data[index.value])
    low, high = (min(array.data), max(array.data)) if array.data else (None if array.signed else 0, None)
    if most is not None:
        return _intern(Element, array, index, most, bounds=(0, most.bounds[1]), text=f"clamp({array.name}[{index}], {most})")
    return _intern(Element, array, index, None, bounds=(low, high), text=f"{array.name}[{index}]")


def search(array: Array, count: Expr | int, position: Expr | int, first: Expr | int = 0) -> Expr:
    """The component that owns `position` in the offsets `array`, or in their row that begins at `first`."""
    count, position, first = as_expr(count), as_expr(position), as_expr(first)
    if array.data is not None and all(e.value is not None for e in (count, position, first)):
        known = cast(tuple[int, int, int], (count.value, position.value, first.value))
        if known[2] >= 0 and known[2] + known[0] < max(len(array.data), 1):
            return const(_constant_search(array, *known))
    row = "" if first.value == 0 else f"[{first}:]"
    text = f"search({array.name}{row}, {position})"
    # The upper bound includes the count: positions past the end map to it.
    return _intern(Search, array, count, position, first, bounds=(0, count.bounds[1]), text=text)


def ceildiv(a: Expr | int, b: Expr | int) -> Expr:
    """`a / b` rounded up."""
    b = as_expr(b)
    return (as_expr(a) + b - 1) // b


def minimum(a: Expr | int, b: Expr | int) -> Expr:
    """The smaller of two; folded if the bounds decide."""
    return _extremum(Minimum, "min", as_expr(a), as_expr(b))


def maximum(a: Expr | int, b: Expr | int) -> Expr:
    """The larger of two; folded if the bounds decide."""
    return _extremum(Maximum, "max", as_expr(a), as_expr(b))


def _extremum(kind: type[Expr], name: str, a: Expr, b: Expr) -> Expr:
    if a is b:
        return a
    low, high = _difference(a, b).bounds
    smaller, larger = (a, b) if kind is Minimum else (b, a)
    if high is not None and high <= 0:
        return smaller
    if low is not None and low >= 0:
        return larger
    a, b = sorted((a, b), key=_order)
    lows, highs = (a.bounds[0], b.bounds[0]), (a.bounds[1], b.bounds[1])
    if kind is Minimum:
        bounds = (_each(min, lows), _known(min, highs))
    else:
        bounds = (_known(max, lows), _each(max, highs))
    return _intern(kind, a, b, bounds=bounds, text=f"{name}({a}, {b})")


def _difference(a: Expr, b: Expr) -> Expr:
    """An expression that is at most 0 only if `a <= b`, and at least 0 only if `a >= b`. Floors by one divisor, which is
    positive, are in the order of their dividends."""
    if isinstance(a, FloorDiv) and isinstance(b, FloorDiv) and a.right is b.right:
        return a.left - b.left
    return a - b


def _order(e: Expr) -> tuple[str, int]:
    """Sort key of operands: by text, then by identity for different expressions with the same text."""
    return (e.text, id(e))


def _each(pick: Callable[..., int], values: tuple[int | None, ...]) -> int | None:
    return None if None in values else pick(values)


def _known(pick: Callable[..., int], values: tuple[int | None, ...]) -> int | None:
    known = [v for v in values if v is not None]
    return pick(known) if known else None


def _scaled(bounds: Bounds, factor: int) -> Bounds:
    low = None if bounds[0] is None else bounds[0] * factor
    high = None if bounds[1] is None else bounds[1] * factor
    return (low, high) if factor >= 0 else (high, low)


def _sum(parts: Iterable[tuple[Expr, int]]) -> Expr:
    factors: dict[Expr, int] = {}
    constant = 0
    for part, factor in parts:
        if isinstance(part, Const):
            constant += cast(int, part.value) * factor
        elif isinstance(part, Sum):
            constant += part.constant * factor
            for term, inner in part.terms:
                factors[term] = factors.get(term, 0) + inner * factor
        else:
            factors[part] = factors.get(part, 0) + factor
    terms = tuple(sorted(((t, f) for t, f in factors.items() if f), key=lambda tf: (tf[1] < 0, _order(tf[0]))))
    if not terms:
        return const(constant)
    if constant == 0 and len(terms) == 1 and terms[0][1] == 1:
        return terms[0][0]
    low: int | None = constant
    high: int | None = constant
    for term, factor in terms:
        term_low, term_high = _scaled(term.bounds, factor)
        low = None if low is None or term_low is None else low + term_low
        high = None if high is None or term_high is None else high + term_high
    return _intern(Sum, terms, constant, bounds=(low, high), text=_sum_text(terms, constant))


def _sum_text(terms: tuple[tuple[Expr, int], ...], constant: int) -> str:
    text = ""
    for term, factor in terms:
        # A leading minus binds tighter than a division.
        inner = _bracketed(term) if factor < 0 and not text else term.text
        size = abs(factor)
        piece = inner if size == 1 else f"{inner}*{size}"
        text += (f" - {piece}" if factor < 0 else f" + {piece}") if text else (f"-{piece}" if factor < 0 else piece)
    if constant:
        text += f" {'-' if constant < 0 else '+'} {abs(constant)}"
    return text


def _bracketed(e: Expr) -> str:
    return f"({e})" if isinstance(e, Sum | FloorDiv | Mod) else str(e)


def _divisor(e: Expr) -> str:
    return f"({e})" if isinstance(e, Product) else _bracketed(e)


def _factors(e: Expr) -> list[Expr]:
    return [*_factors(e.left), *_factors(e.right)] if isinstance(e, Product) else [e]


def _product(a: Expr, b: Expr) -> Expr:
    if isinstance(a, Const):
        a, b = b, a
    if isinstance(b, Const):
        return _sum([(a, cast(int, b.value))])
    # Constant factors are pulled out of a sum, so that (2*x)*y and 2*(x*y) are one expression.
    if isinstance(a, Sum) and len(a.terms) == 1 and a.constant == 0:
        return _sum([(_product(a.terms[0][0], b), a.terms[0][1])])
    if isinstance(b, Sum) and len(b.terms) == 1 and b.constant == 0:
        return _sum([(_product(a, b.terms[0][0]), b.terms[0][1])])
    first, *rest = sorted([*_factors(a), *_factors(b)], key=_order)
    for factor in rest:
        first = _pair(first, factor)
    return first


def _pair(a: Expr, b: Expr) -> Expr:
    """The node of a product whose factors are already sorted."""
    corners = [None if x is None or y is None else x * y for x in a.bounds for y in b.bounds]
    if None not in corners:
        known = cast(list[int], corners)
        bounds: Bounds = (min(known), max(known))
    elif a.bounds[0] is not None and b.bounds[0] is not None and a.bounds[0] >= 0 and b.bounds[0] >= 0:
        bounds = (a.bounds[0] * b.bounds[0], None)
    else:
        bounds = (None, None)
    return _intern(Product, a, b, bounds=bounds, text=f"{_bracketed(a)}*{_bracketed(b)}")


def _divided(a: Expr, divisor: int) -> tuple[Expr, Expr]:
    """`a` as `divisor*quotient + rest`, moving every divisible term into the quotient."""
    terms = a.terms if isinstance(a, Sum) else ((a, 1),)
    constant = a.constant if isinstance(a, Sum) else 0
    if isinstance(a, Const):
        terms, constant = (), cast(int, a.value)
    whole = _sum([(t, f // divisor) for t, f in terms if f % divisor == 0] + [(const(constant // divisor), 1)])
    rest = _sum([(t, f) for t, f in terms if f % divisor] + [(const(constant % divisor), 1)])
    return whole, rest


def _floordiv(a: Expr, b: Expr) -> Expr:
    divisor = b.value
    if divisor is not None:
        if divisor <= 0:
            raise ZeroDivisionError(f"{a} // {b}: the divisor must be positive")
        if divisor == 1:
            return a
        if a.value is not None:
            return const(a.value // divisor)
        whole, rest = _divided(a, divisor)
        low, high = rest.bounds
        if low is not None and high is not None and low // divisor == high // divisor:
            return whole + low // divisor
        if whole is not const(0):
            return whole + _floordiv(rest, b)
        if isinstance(a, FloorDiv) and a.right.value is not None:
            return _floordiv(a.left, const(a.right.value * divisor))
    elif a is b:
        return const(1)
    elif a.value == 0:
        return a
    bounds: Bounds = (None, None)
    if divisor is not None:
        bounds = tuple(None if x is None else x // divisor for x in a.bounds)  # type: ignore[assignment]
    elif a.bounds[0] is not None and a.bounds[0] >= 0:
        bounds = (0, a.bounds[1])
    return _intern(FloorDiv, a, b, bounds=bounds, text=f"{_bracketed(a)} // {_divisor(b)}")


def _mod(a: Expr, b: Expr) -> Expr:
    divisor = b.value
    if divisor is not None:
        if divisor <= 0:
            raise ZeroDivisionError(f"{a} % {b}: the divisor must be positive")
        _, rest = _divided(a, divisor)
        low, high = rest.bounds
        if low is not None and high is not None and low // divisor == high // divisor:
            return rest - (low // divisor) * divisor
        a = rest
    elif a is b or a.value == 0:
        return const(0)
    high = b.bounds[1]
    bounds: Bounds = (0, None if high is None else high - 1)
    return _intern(Mod, a, b, bounds=bounds, text=f"{_bracketed(a)} % {_divisor(b)}")


def _xor(a: Expr, b: Expr) -> Expr:
    if a.value is not None and b.value is not None:
        return const(a.value ^ b.value)
    if a is b:
        return const(0)
    for left, right in ((a, b), (b, a)):
        if left.value == 0:
            return right
        if isinstance(left, Xor) and right in left.operands:
            return left.left if right is left.right else left.right
    a, b = sorted((a, b), key=_order)
    bounds: Bounds = (None, None)
    if all(e.bounds[0] is not None and e.bounds[0] >= 0 for e in (a, b)):
        highs = [e.bounds[1] for e in (a, b)]
        # No bit is set above the highest bit of either.
        bounds = (0, None if None in highs else (1 << max(cast(int, h).bit_length() for h in highs)) - 1)
    return _intern(Xor, a, b, bounds=bounds, text=f"({a} ^ {b})")


def _restored_sum(terms: tuple[tuple[Expr, int], ...], constant: int) -> Expr:
    return _sum([*terms, (const(constant), 1)])


_RESTORED: dict[type[Expr], Callable[..., Expr]] = {
    Const: const,
    Symbol: symbol,
    Sum: _restored_sum,
    Product: operator.mul,
    FloorDiv: operator.floordiv,
    Mod: operator.mod,
    Minimum: minimum,
    Maximum: maximum,
    Xor: operator.xor,
    Element: element,
    Search: search,
}
"""How to rebuild a pickled expression from its operands."""
