"""Renaming a loop program's identifiers that a target language reserves.

In: a loop program, and the names that a language or its printer reserves. Out: the same program without clashes: with reserved
names, or with names that the printer derives from others. Most programs are unchanged.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from serrate.ir.domains import IterDomain
from serrate.ir.expr import Expr, Symbol, symbol
from serrate.ir.loops import (
    Assign,
    Barrier,
    Bind,
    Block,
    Declare,
    Existing,
    Fold,
    For,
    Held,
    If,
    Lane,
    Lanes,
    Load,
    Local,
    LoopProgram,
    Node,
    Number,
    Prefetch,
    Running,
    While,
    Write,
    bodies,
    existing,
    expressions_of,
    held,
    load,
    map_values,
    nodes,
    number,
    values_of,
    with_bodies,
)
from serrate.ir.values import Tensor, Value, rewrite


@dataclass(frozen=True)
class Reserved:
    """The names that a program may not use in a language."""

    words: frozenset[str]
    """Keywords, and names that every generated source has."""
    made: re.Pattern[str]
    """Prefixes of names that the printer numbers."""
    endings: tuple[str, ...]
    """Suffixes that the printer appends to derive one name from another."""

    def keeps(self, name: str, names: Iterable[str]) -> bool:
        """Whether the name is reserved, in a program with these names."""
        if name in self.words or self.made.fullmatch(name):
            return True
        return any(name.endswith(end) and name[: -len(end)] in names for end in self.endings)


def identifier(name: str) -> str:
    """A name as an identifier: letters, digits and underscores; other characters become underscores.

    >>> identifier("a-b"), identifier("1x"), identifier("softmax")
    ('a_b', '_1x', 'softmax')
    """
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return plain if plain and not plain[0].isdigit() else f"_{plain}"


def spellings(program: LoopProgram, reserved: Reserved) -> dict[str, str]:
    """Replacements for reserved names, by name."""
    names = set(names_of(program))
    found: dict[str, str] = {}
    for name in sorted(n for n in names if reserved.keeps(n, names)):
        # A name reserved by its prefix stays reserved whatever is appended.
        tries = (f"x_{name}{k or ''}" for k in itertools.count())
        new = next(n for n in tries if n not in names and not reserved.keeps(n, names) and not _begins(n, names, reserved))
        found[name] = new
        names.add(new)
    return found


def _begins(name: str, names: set[str], reserved: Reserved) -> bool:
    return any(name + end in names for end in reserved.endings)


def names_of(program: LoopProgram) -> Iterator[str]:
    """Every name in a program: tensors, arrays, private blocks, and all symbols in indices."""
    for tensor in program.tensors:
        yield tensor.name
        yield from (s.name for s in _sizes(tensor))
    yield from (a.name for a in program.arrays)
    yield from (s.name for s in _symbols(program))
    for kernel in program.kernels:
        for node in nodes(kernel.body):
            if isinstance(node, Declare):
                yield node.local.name


def renamed(program: LoopProgram, new: Mapping[str, str]) -> LoopProgram:
    """The program with tensors, private blocks and symbols renamed. Arrays keep their names, which printers choose anyway."""
    return _ReservedNames(program, new).program() if new else program


def _sizes(tensor: Tensor) -> Iterator[Symbol]:
    for domain in tensor.storage:
        yield from domain.extent_expr.symbols


def _symbols(program: LoopProgram) -> Iterator[Symbol]:
    yield from program.symbols
    for kernel in program.kernels:
        for node in nodes(kernel.body):
            if isinstance(node, For | Bind):
                yield node.symbol
            if isinstance(node, For):
                yield from node.bound.symbols
            for expr in expressions_of(node):
                yield from expr.symbols
            yield from (lane.symbol for lane in getattr(node, "lanes", ()))
            for value in values_of(node):
                yield from (lane.symbol for v in value.walk() if isinstance(v, Existing) for lane in v.lanes)


class _ReservedNames:
    def __init__(self, program: LoopProgram, new: Mapping[str, str]) -> None:
        self.old, self.new = program, new
        every = {*_symbols(program), *(s for t in program.tensors for s in _sizes(t))}
        self.symbols: dict[Expr, Expr] = {s: symbol(new[s.name], *s.bounds) for s in every if s.name in new}
        self.tensors = {t: self._tensor(t) for t in program.tensors}

    def program(self) -> LoopProgram:
        old = self.old
        inputs, outputs, scratch = (tuple(self.tensors[t] for t in part) for part in (old.inputs, old.outputs, old.scratch))
        kernels = tuple(replace(k, body=self.body(k.body)) for k in old.kernels)
        symbols = tuple(self.symbol(s) for s in old.symbols)
        launched = tuple((self.symbol(s), self.expr(e)) for s, e in old.launched)
        return replace(old, kernels=kernels, inputs=inputs, outputs=outputs, scratch=scratch, symbols=symbols, launched=launched)

    def _tensor(self, tensor: Tensor) -> Tensor:
        storage = tuple(
            IterDomain(self.expr(d.extent_expr), name=d.name) if d.extent_expr.symbols & self.symbols.keys() else d
            for d in tensor.storage
        )
        return replace(tensor, name=self.new.get(tensor.name, tensor.name), storage=storage)

    def expr(self, expr: Expr) -> Expr:
        return expr.substitute(self.symbols)

    def symbol(self, own: Symbol) -> Symbol:
        found = self.symbols.get(own, own)
        assert isinstance(found, Symbol)
        return found

    def lanes(self, lanes: Lanes) -> Lanes:
        return tuple(Lane(self.symbol(lane.symbol), lane.size) for lane in lanes)

    def local(self, local: Local) -> Local:
        return Local(self.new.get(local.name, local.name), local.dtype, self.lanes(local.lanes))

    def value(self, value: Value) -> Value:
        def change(v: Value) -> Value | None:
            if isinstance(v, Load):
                guard = tuple(g.substitute(self.symbols) for g in v.guard)
                return load(self.tensors[v.tensor], tuple(map(self.expr, v.index)), guard, v.other)
            if isinstance(v, Held):
                return held(self.local(v.local))
            if isinstance(v, Number):
                return number(self.expr(v.expr), v.dtype)
            if isinstance(v, Existing):
                return existing(self.lanes(v.lanes), tuple(g.substitute(self.symbols) for g in v.guard), v.dtype)
            return None

        return rewrite(value, change)

    def body(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(self.node(node) for node in body)

    def node(self, node: Node) -> Node:
        node = with_bodies(node, tuple(self.body(part) for part in bodies(node)))
        if isinstance(node, For):
            return replace(node, symbol=self.symbol(node.symbol), extent=self.expr(node.extent), bound=self.expr(node.bound))
        if isinstance(node, Barrier):
            return node
        if isinstance(node, Declare):
            return replace(node, local=self.local(node.local))
        if isinstance(node, If | While):
            return replace(node, guard=tuple(g.substitute(self.symbols) for g in node.guard))
        if isinstance(node, Bind):
            guard = tuple(g.substitute(self.symbols) for g in node.guard)
            return replace(
                node, symbol=self.symbol(node.symbol), expr=self.expr(node.expr), lanes=self.lanes(node.lanes), guard=guard
            )
        assert isinstance(node, Block), node
        return self._block(
            replace(node, lanes=self.lanes(node.lanes), guard=tuple(g.substitute(self.symbols) for g in node.guard))
        )

    def _block(self, node: Block) -> Node:
        if isinstance(node, Write | Prefetch):
            node = replace(node, tensor=self.tensors[node.tensor], index=tuple(map(self.expr, node.index)))
        elif isinstance(node, Fold):
            node = replace(node, locals=tuple(map(self.local, node.locals)))
        else:
            node = replace(node, local=self.local(node.local))
        if isinstance(node, Running):
            axis = self.lanes((node.axis,))[0] if node.axis else None
            node = replace(node, carry=self.local(node.carry), axis=axis)
        if isinstance(node, Assign):
            node = replace(node, rests=tuple(tuple(g.substitute(self.symbols) for g in part) for part in node.rests))
        return map_values(node, self.value)
