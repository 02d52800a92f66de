"""Values: what a program computes, as expressions over tensor elements.

In: tensors, domains, constants. Out: interned nodes, equal iff they are the same object.

    v ::= Constant(number) | Read(tensor, index) | Call(function, args)
        | Position(domain)     the index itself
        | Extent(domain)       the number of positions; for a ragged domain, the length of the current row
        | Computed(place)      an expression over indices and integers, as a number
        | Ordinal(tensor, index)  the number of an element in the order in which a tensor stores them
        | Argument(name)       a formal argument, used to inspect a function on values
        index ::= one entry per dim of the tensor: a domain, None for a broadcast dim, or (in reads) a Place, an expression over
        indices and over integers read from other tensors. It may be out of bounds; the element is then 0, or the read's
        `other`

`FUNCTIONS` names every elementwise function with its arity; each backend has a table from these names to its own code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

import torch

from serrate.errors import DtypeError
from serrate.ir.domains import IterDomain, origins
from serrate.ir.expr import INDEX, Expr, Symbol, const, key_part, symbol

Index = tuple[IterDomain | None, ...]
"""The index of a write: a domain per dim."""


def index_of(domain: IterDomain) -> Symbol:
    """The symbol for the index of a domain in a `Place`."""
    return symbol(f"{INDEX}{domain.uid}")


def index_read(k: int) -> Symbol:
    """The symbol for the k-th integer that a `Place` reads."""
    return symbol(f"#{k}", low=None)


@dataclass(frozen=True)
class Place:
    """A computed index: `expr` over the indices of `domains` (`index_of`) and the integers `reads` (`index_read`)."""

    expr: Expr
    domains: tuple[IterDomain, ...] = field(default=(), compare=False)
    reads: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        # Places with one expression are equal, so the same must hold for their domains: those that it does not name do not count.
        if not all(index_of(d) in self.expr.symbols for d in self.domains):
            named = tuple(d for d in self.domains if index_of(d) in self.expr.symbols)
            object.__setattr__(self, "domains", named)

    def __str__(self) -> str:
        names: dict[Expr, Expr] = {index_of(d): symbol(d.name) for d in self.domains}
        names |= {index_read(k): symbol(str(r)) for k, r in enumerate(self.reads)}
        return str(self.expr.substitute(names))

    def moved(self, domains: Mapping[int, IterDomain | None]) -> Place:
        """The same place with domains replaced, by uid; the caller replaces its reads."""
        new = [(d, domains.get(d.uid, d)) for d in self.domains]
        expr = self.expr.substitute({index_of(d): const(0) if to is None else index_of(to) for d, to in new})
        return Place(expr, tuple(to for _, to in new if to is not None), self.reads)


Places = tuple[IterDomain | Place | None, ...]
"""The index of a read: per dim a domain, a computed place, or None."""


def domains_of(places: Places) -> tuple[IterDomain, ...]:
    """The domains that an index depends on."""
    found: list[IterDomain] = []
    for at in places:
        if isinstance(at, Place):
            found.extend(at.domains)
            found.extend(d for r in at.reads if isinstance(r, Read) for d in domains_of(r.index))
        elif at is not None:
            found.append(at)
    return tuple(found)


UNARY = "neg abs exp log sqrt rsqrt reciprocal sigmoid tanh relu silu gelu erf floor ceil square isnan logical_not cast sin cos"
BINARY = (
    "add sub mul div maximum minimum lt le gt ge eq ne logical_and logical_or pow exp_diff exp_below floordiv rem fmod "
    "bitand bitor bitxor shl shr gcd"
)
LIBRARY_UNARY = "tan atan asin acos sinh cosh asinh acosh atanh erfc erfinv lgamma digamma".split()  # noqa: SIM905
LIBRARY_BINARY = "atan2 hypot copysign".split()  # noqa: SIM905
"""Floating-point functions that backends call by these names, in the C library, libdevice or torch."""
FUNCTIONS: dict[str, int] = {
    **dict.fromkeys([*UNARY.split(), *LIBRARY_UNARY], 1),
    "finite_or_zero": 1,
    "detach": 1,
    "differentiated_as": 2,
    **dict.fromkeys([*BINARY.split(), *LIBRARY_BINARY], 2),
    "where": 3,
    "random_bits": 3,
}
"""Name -> number of arguments. `exp_diff(x, m)` is e^(x - m) for x <= m, and 1 if both are equal, even if infinite;
`exp_below(x, m)` is the same, but NaN if both are infinite. `detach(x)` is x with a derivative of 0, `differentiated_as(x, y)`
is x with the derivative of y; no backend sees them. `floordiv` and `rem` are integer functions, rounded down; a divisor of 0
gives 0. `shl` and `shr` shift bits; if the shift exceeds the number of bits, 0 or the sign remains.
`random_bits(seed, word, position)` is 32 random bits as an int32, defined by `ir/philox.py`."""
COSTLY = frozenset(
    "exp log sqrt rsqrt sigmoid tanh silu gelu erf pow sin cos div exp_diff exp_below gcd atan2 hypot random_bits".split()  # noqa: SIM905
) | frozenset(LIBRARY_UNARY)
"""Functions as expensive as many additions."""


class Role(Enum):
    """The kind of memory of a tensor."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"
    PRIVATE = "private"
    """Scratch for one component's row, separate for each worker."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of a tile program: indexed by `logical` domains, stored over `storage` domains (row-major, back to back)."""

    name: str
    dtype: torch.dtype
    logical: tuple[IterDomain, ...]
    storage: tuple[IterDomain, ...]
    role: Role = Role.SCRATCH
    base: Tensor | None = field(default=None, repr=False)
    """The tensor whose memory this view shares under other logical domains, if any."""

    @property
    def memory(self) -> Tensor:
        """The tensor that owns the memory."""
        return self if self.base is None else self.base.memory

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.logical))}]"


class Value:
    """One scalar per position of the domains it mentions. Build with `read`, `call`, `constant`, `position`."""

    __slots__ = ("__weakref__", "_key", "dtype")
    _key: tuple[Any, ...]
    dtype: torch.dtype
    _interned: ClassVar[WeakValueDictionary[tuple[Any, ...], Value]] = WeakValueDictionary()

    @property
    def args(self) -> tuple[Value, ...]:
        return ()

    def walk(self) -> Iterator[Value]:
        """This value and all values it contains, each node once."""
        seen: set[int] = set()
        pending: list[Value] = [self]
        while pending:
            value = pending.pop()
            if id(value) not in seen:
                seen.add(id(value))
                yield value
                pending.extend(value.args)

    @property
    def reads(self) -> tuple[Read, ...]:
        return tuple(v for v in self.walk() if isinstance(v, Read))

    def __reduce__(self) -> tuple[Any, ...]:
        # Interned again on unpickling: values are compared by identity.
        raise NotImplementedError


class Constant(Value):
    """A number."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (constant, (self.number, self.dtype))

    number: float | int | bool = key_part(1)

    def __str__(self) -> str:
        return str(self.number)


class Read(Value):
    """An element of a tensor; `other` where its place is out of bounds."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (read, (self.tensor, self.index, self.other))

    tensor: Tensor = key_part(1)
    index: Places = key_part(3)
    other: float | int | bool = key_part(4)

    def of(self, tensor: Tensor, index: Places) -> Value:
        """The same read from another tensor, or at another place."""
        return read(tensor, index, self.other)

    @property
    def args(self) -> tuple[Value, ...]:
        """The integers that the index's places read."""
        return tuple(r for at in self.index if isinstance(at, Place) for r in at.reads)

    def __str__(self) -> str:
        shown = ("0" if at is None else str(at) if isinstance(at, Place) else at.name for at in self.index)
        return f"{self.tensor.name}[{', '.join(shown)}{'' if repr(self.other) == '0' else f' else {self.other}'}]"


class Call(Value):
    """An elementwise function of other values."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_called, (self.function, self.args, self.dtype))

    function: str = key_part(1)

    @property
    def args(self) -> tuple[Value, ...]:
        return cast(tuple[Value, ...], self._key[2])

    def __str__(self) -> str:
        return shown(self)


class Position(Value):
    """The index of a domain, as a number."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (position, (self.domain,))

    domain: IterDomain = key_part(2)

    def __str__(self) -> str:
        return f"index({self.domain.name})"


class Extent(Value):
    """The number of positions of a domain; for a ragged one, the length of the current row."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (extent, (self.domain,))

    domain: IterDomain = key_part(2)

    def __str__(self) -> str:
        return f"extent({self.domain.name})"


class Computed(Value):
    """An expression over indices, and over integers read from tensors, as a number."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (computed, (self.place,))

    place: Place = key_part(1)

    @property
    def args(self) -> tuple[Value, ...]:
        return self.place.reads

    def __str__(self) -> str:
        return f"({self.place})"


class Ordinal(Value):
    """The number of an element in the order in which a tensor stores its elements, rows back to back. The tensor itself is not
    read, and need not exist."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (ordinal, (self.tensor, self.index))

    tensor: Tensor = key_part(1)
    index: Index = key_part(3)

    def __str__(self) -> str:
        return f"ordinal({', '.join('0' if at is None else at.name for at in self.index)})"


class Argument(Value):
    """A formal argument: a function on values becomes a value in terms of its arguments."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (argument, (self.name, self.dtype))

    name: str = key_part(1)

    def __str__(self) -> str:
        return self.name


def shown(value: Value) -> str:
    """The value as text. A large value names its shared subvalues: `add(v0, v0) where v0 = ...`."""
    names: dict[int, str] = {}
    texts: list[str] = []

    def go(v: Value) -> str:
        if not isinstance(v, Call):
            return str(v)
        if id(v) in names:
            return names[id(v)]
        args = ", ".join(go(a) for a in v.args)
        head = str(v.dtype).removeprefix("torch.") if v.function == "cast" else v.function
        text = f"{head}({args})"
        if uses[id(v)] > 1 and len(text) > 40:
            names[id(v)] = f"v{len(names)}"
            texts.append(f"{names[id(v)]} = {text}")
            return names[id(v)]
        return text

    uses: dict[int, int] = {}
    for node in value.walk():
        for arg in node.args:
            uses[id(arg)] = uses.get(id(arg), 0) + 1
    uses[id(value)] = 0
    text = go(value)
    return f"{text} where {'; '.join(texts)}" if texts else text


def domains_in(value: Value) -> tuple[IterDomain, ...]:
    """The domains that a value varies along."""
    found: dict[int, IterDomain] = {}
    for v in value.walk():
        if isinstance(v, Read):
            found.update((d.uid, d) for d in domains_of(v.index))
        elif isinstance(v, Position | Extent):
            found[v.domain.uid] = v.domain
        elif isinstance(v, Computed):
            found.update((d.uid, d) for d in v.place.domains)
        elif isinstance(v, Ordinal):
            found.update((d.uid, d) for d in v.index if d is not None)
    return tuple(found.values())


def intern(kind: type[Value], dtype: torch.dtype, *key: Any) -> Value:
    full = (kind, *key, dtype)
    found = Value._interned.get(full)
    if found is None:
        found = kind.__new__(kind)
        found._key, found.dtype = full, dtype
        found = Value._interned.setdefault(full, found)
    return found


def constant(number: float | int | bool, dtype: torch.dtype) -> Value:
    """A number of the given dtype."""
    if not isinstance(number, float | int):
        number = operator.index(number)  # a size in the call being traced
    if dtype == torch.bool:
        number = bool(number)
    elif not dtype.is_floating_point and isinstance(number, int):
        # Overflow wraps around, as in a tensor of this dtype.
        low = torch.iinfo(dtype).min
        number = (int(number) - low) % 2 ** (8 * dtype.itemsize) + low
    elif isinstance(number, int) and not -(2**63) <= number < 2**63:
        number = float(number)  # too large for an integer in any backend
    # The text distinguishes 1 from 1.0 and True and 0.0 from -0.0, and makes nan equal to itself.
    return intern(Constant, dtype, number, repr(number))


def read(tensor: Tensor, index: Places, other: float | int | bool = 0) -> Value:
    """The element of `tensor` at `index`; `other` where a computed place is out of bounds."""
    key = tuple(at if at is None or isinstance(at, Place) else at.uid for at in index)
    return intern(Read, tensor.dtype, tensor, key, index, other, repr(other))


def call(function: str, *args: Value, dtype: torch.dtype) -> Value:
    """An elementwise function; `dtype` is the result's."""
    if FUNCTIONS.get(function) != len(args):
        raise DtypeError(f"{function}: takes {FUNCTIONS.get(function)} arguments, got {len(args)}")
    return intern(Call, dtype, function, args)


def _called(function: str, args: tuple[Value, ...], dtype: torch.dtype) -> Value:
    return call(function, *args, dtype=dtype)


def position(domain: IterDomain) -> Value:
    """The index of `domain` as an int64."""
    return intern(Position, torch.int64, domain.uid, domain)


def extent(domain: IterDomain) -> Value:
    """The number of positions of `domain` as an int64."""
    return intern(Extent, torch.int64, domain.uid, domain)


def computed(place: Place) -> Value:
    """A place as an int64."""
    return intern(Computed, torch.int64, place)


def ordinal(tensor: Tensor, index: Index) -> Value:
    """The number of the element of `tensor` at `index`, in the order of memory, as an int64."""
    return intern(Ordinal, torch.int64, tensor, tuple(None if at is None else at.uid for at in index), index)


def argument(name: str, dtype: torch.dtype) -> Value:
    """A formal argument."""
    return intern(Argument, dtype, name)


def rewrite(value: Value, change: Callable[[Value], Value | None], memo: dict[int, Value] | None = None) -> Value:
    """`value` with every node for which `change` returns a replacement replaced; shared nodes stay shared."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    changed = value
    if isinstance(value, Read) and value.args:
        # The integers in an element's index are part of its key, so they are rewritten first.
        changed = value.of(value.tensor, tuple(_reread(at, lambda r: rewrite(r, change, memo)) for at in value.index))
    elif isinstance(value, Computed) and value.args:
        changed = computed(replace(value.place, reads=tuple(rewrite(r, change, memo) for r in value.args)))
    new = change(changed)
    if new is None:
        new = changed
        if isinstance(value, Call):
            args = tuple(rewrite(a, change, memo) for a in value.args)
            # Not `call`, which knows only functions of the IR; backends have more.
            new = value if args == value.args else intern(Call, value.dtype, value.function, args)
    memo[id(value)] = new
    return new


def _reread(at: IterDomain | Place | None, change: Callable[[Value], Value]) -> IterDomain | Place | None:
    return replace(at, reads=tuple(map(change, at.reads))) if isinstance(at, Place) else at


def moved_to(value: Value, own: Places, index: Places) -> Value | None:
    """The element at `index`, given that the one at `own` is `value`; None if no domains give its place.

    A base dim stands for the dims that a view makes of it, as long as these are read at themselves: `x[d0]` is row `r0` of
    component `c0`. It has no name for another row of the same component.
    """
    pairs = [(d, at) for d, at in zip(own, index, strict=True) if isinstance(d, IterDomain)]
    if any(isinstance(at, Place) for _, at in pairs):
        return None
    domains = {d.uid: at for d, at in pairs if not isinstance(at, Place)}
    connected = set[int]().union(*(origins(d) for d, at in pairs if not isinstance(at, IterDomain) or at.uid != d.uid))
    others = (d for d in domains_in(value) if d.uid not in domains)
    return reindex(value, domains) if all(connected.isdisjoint(origins(d)) for d in others) else None


def reindex(value: Value, domains: Mapping[int, IterDomain | None]) -> Value:
    """`value` with domains replaced, by uid. To inline a producer into its reader, see `moved_to`."""

    def change(v: Value) -> Value | None:
        if isinstance(v, Read):
            return v.of(v.tensor, tuple(_moved(at, domains) for at in v.index))
        if isinstance(v, Position):
            new = domains.get(v.domain.uid, v.domain)
            return constant(0, torch.int64) if new is None else position(new)
        if isinstance(v, Computed):
            return computed(v.place.moved(domains))
        if isinstance(v, Ordinal):
            return ordinal(v.tensor, tuple(None if at is None else domains.get(at.uid, at) for at in v.index))
        if isinstance(v, Extent):
            new = domains.get(v.domain.uid, v.domain)
            return constant(1, torch.int64) if new is None else extent(new)
        return None

    return rewrite(value, change)


def _moved(at: IterDomain | Place | None, domains: Mapping[int, IterDomain | None]) -> IterDomain | Place | None:
    if isinstance(at, Place):
        return at.moved(domains)
    return None if at is None else domains.get(at.uid, at)


DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""The dtypes that programs support."""


def carried_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values are computed in: float32 for 16-bit floats, otherwise unchanged."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def rounding_of(value: Value) -> Value | None:
    """The operand of a rounding to 16 bits; None if a value is not one.

    >>> x = argument("x", torch.float32)
    >>> print(rounding_of(call("cast", x, dtype=torch.bfloat16)), rounding_of(x))
    x None
    """
    if not isinstance(value, Call) or value.function != "cast" or carried_dtype(value.dtype) == value.dtype:
        return None
    return value.args[0] if value.args[0].dtype.is_floating_point else None
