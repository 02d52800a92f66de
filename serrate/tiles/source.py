"""Splits a kernel's function into host code and device loops.

In: a Python function. Out: the same function with every outermost loop over tiles replaced by a launch, which passes the
variables that the loop uses; and for each loop a function of these, with hooks at its loops and branches for the tracer.

    for tile in hl.tile(n):             __serrate_launch__[0]({"x": x, "out": out})
        out[tile] = x[tile] * 2

Line numbers are the user's in both.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from serrate.errors import KernelError
from serrate.frontend.kernel.source import (
    LOCALS,
    carried_names,
    every_statement,
    names_read,
    names_written,
    parsed,
    read_first,
    rebuilt,
    with_defaults,
)

LAUNCH = "__serrate_launch__"
TRACE = "__serrate_trace__"
UNSET = "__serrate_unset__"
_UNSET = object()
"""The default of a parameter that need not be passed."""
ROW_NUMBERS = ("num_rows", "num_groups", "max_length")
"""Attributes of a ragged tensor that never change."""


@dataclass(frozen=True)
class DeviceLoop:
    """One outermost loop over tiles."""

    names: tuple[str, ...]
    """The local variables that it uses."""
    outside: tuple[str, ...]
    """The other names that it uses: globals, and variables of enclosing functions."""
    aliases: Mapping[str, tuple[str, str]]
    """Which of the local variables are an attribute of another one: `n` is ("jt", "num_rows") after `n = jt.num_rows`."""
    make: Callable[[Any], Callable[..., Any]]
    """Makes the loop a function of those of these names that have a value, for a machine."""
    line: int


@dataclass(frozen=True)
class SplitKernel:
    """A kernel's function, split."""

    host: Callable[[Sequence[Callable[[dict[str, Any]], None]]], Callable[..., Any]]
    """Makes the host function from one launcher per loop; a launcher takes the loop's variables by name."""
    loops: tuple[DeviceLoop, ...]


def split(function: types.FunctionType) -> SplitKernel:
    """Splits a kernel's function."""
    tree, offset, _ = parsed(function)
    local = {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
    for statement in every_statement(tree.body):
        local |= names_written(statement)
    aliases = _aliases(tree)
    finder = _Finder(function, local)
    tree.body = finder.statements(tree.body)
    for found, _, _ in finder.found:
        ast.increment_lineno(found, offset)
    ast.increment_lineno(tree, offset)
    _refuse_results(tree.body, finder)
    loops = tuple(_device(function, *each, aliases) for each in finder.found)
    return SplitKernel(lambda launches: with_defaults(rebuilt(function, tree, {LAUNCH: launches}), function), loops)


def _aliases(tree: ast.FunctionDef) -> dict[str, tuple[str, str]]:
    """Variables that hold a number of rows or the longest length of a parameter, and never anything else."""
    written = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    written.update(name for s in ast.walk(tree) if isinstance(s, (ast.Global, ast.Nonlocal)) for name in s.names)
    for s in ast.walk(tree):
        if isinstance(s, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Match)):
            written.update(names_written(s))
        elif isinstance(s, ast.ExceptHandler) and s.name:
            written[s.name] += 1
    parameters = {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
    found: dict[str, tuple[str, str]] = {}
    assigned = [pair for s in tree.body if isinstance(s, ast.Assign) for target in s.targets for pair in _pairs(target, s.value)]
    for pair in assigned:
        match pair:
            case ast.Name(name), ast.Attribute(ast.Name(of), attribute) if (
                attribute in ROW_NUMBERS and of in parameters and not written[of] and written[name] == 1
            ):
                found[name] = (of, attribute)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment, each with the expression that it gets, as far as these are written side by side."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [*zip(target.elts, value.elts, strict=True)]
    return [(target, value)]


def _refuse_results(body: Sequence[ast.stmt], finder: _Finder, live: Set[str] = frozenset()) -> None:
    """Raises if Python code reads a variable that a device loop has set: it exists only in the loop. `live` are the names that
    are read after these statements."""
    for k, s in enumerate(body):
        later = [other for other in body[k + 1 :] if other not in finder.launches]
        exposed, written = read_first(later, set())
        after = exposed | (live - written)
        if s in finder.launches:
            for name in sorted(finder.launches[s] & after):
                raise KernelError(
                    f"a kernel must return tensors, but {name} is a tile value after the loop over tiles of line {s.lineno}: "
                    "store it to a tensor created before the loop, as in out[tile] = x"
                )
        elif not isinstance(s, (ast.FunctionDef, ast.ClassDef)):
            again = read_first([s], set())[0] if isinstance(s, (ast.For, ast.While)) else set()
            for part in ("body", "orelse", "finalbody"):
                _refuse_results(getattr(s, part, []), finder, after | again)


class _Finder:
    """Replaces outermost loops over tiles by launches."""

    def __init__(self, function: types.FunctionType, local: set[str]) -> None:
        self.function, self.local = function, local
        self.found: list[tuple[ast.For, tuple[str, ...], tuple[str, ...]]] = []
        self.launches: dict[ast.stmt, set[str]] = {}
        """The calls in place of loops, and the names that each loop sets."""

    def statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [self._statement(s) for s in body]

    def _statement(self, s: ast.stmt) -> ast.stmt:
        if isinstance(s, ast.For) and self._is_device(s.iter):
            return self._launch(s)
        for name in ("body", "orelse", "finalbody"):
            if getattr(s, name, None) and not isinstance(s, (ast.FunctionDef, ast.ClassDef)):
                setattr(s, name, self.statements(getattr(s, name)))
        return s

    def _is_device(self, node: ast.expr) -> bool:
        found: Any = self._resolved(node.func) if isinstance(node, ast.Call) else None
        return getattr(found, "__module__", "") == "serrate.language" and found.__name__ in ("tile", "grid", "jagged_tile")

    def _resolved(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id not in self.local:
            return outside(self.function, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._resolved(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None
        return None

    def _launch(self, loop: ast.For) -> ast.stmt:
        written = {n for s in every_statement([loop]) for n in names_written(s)}
        bound = {
            n.id
            for comp in ast.walk(loop)
            if isinstance(comp, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp))
            for g in comp.generators
            for n in ast.walk(g.target)
            if isinstance(n, ast.Name)
        }
        read = sorted({n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - bound)
        exposed, _ = read_first([loop], set())
        names = tuple(n for n in read if n in self.local and n in exposed)
        others = tuple(n for n in read if n not in self.local)
        # Variables that the loop only writes may not exist before it.
        given = ", ".join(f"{n!r}: {n}" for n in names if n not in written)
        maybe = "".join(f", **({{{n!r}: {n}}} if {n!r} in {LOCALS}() else {{}})" for n in names if n in written)
        call = ast.parse(f"{LAUNCH}[{len(self.found)}]({{{given}{maybe if given else maybe[2:]}}})").body[0]
        for part in ast.walk(call):
            ast.copy_location(part, loop)
        self.launches[call] = written - {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        self.found.append((loop, names, others))
        return call


def outside(function: types.FunctionType, name: str, default: Any = None) -> Any:
    """The current value of a global or enclosing name, or the default if it has none."""
    if name in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        try:
            return cell.cell_contents
        except ValueError:
            return default
    if name in function.__globals__:
        return function.__globals__[name]
    return getattr(builtins, name, default)


def all_outside(function: types.FunctionType, names: Sequence[str]) -> dict[str, Any]:
    """The current values of global and enclosing names; names without a value are left out."""
    return {name: value for name in names if (value := outside(function, name, _UNSET)) is not _UNSET}


def _device(
    function: types.FunctionType,
    loop: ast.For,
    names: tuple[str, ...],
    others: tuple[str, ...],
    aliases: Mapping[str, tuple[str, str]],
) -> DeviceLoop:
    body = _HookInserter().statements([loop])
    # A name that the loop sets before reading it need not be passed.
    unset = ast.parse("\n".join(f"if {n} is {UNSET}: del {n}" for n in names) or "pass").body
    for statement in unset:
        for part in ast.walk(statement):
            ast.copy_location(part, loop)

    def make(machine: Any) -> Callable[..., Any]:
        # A name without a value is not a parameter, so reading it raises Python's own error.
        every = [*names, *all_outside(function, others)]
        arguments = ast.arguments(
            posonlyargs=[], args=[], kwonlyargs=[ast.arg(n) for n in every], kw_defaults=[None] * len(every), defaults=[]
        )
        made = ast.FunctionDef(name=function.__name__, args=arguments, body=[*unset, *body], decorator_list=[])
        ast.copy_location(made, loop)
        built = rebuilt(function, made, {TRACE: machine, UNSET: _UNSET})
        built.__kwdefaults__ = dict.fromkeys(every, _UNSET)
        return built

    used = {name: of for name, of in aliases.items() if name in names and of[0] in names}
    return DeviceLoop(names, others, used, make, loop.lineno)


class _HookInserter:
    """Inserts hooks at the loops and branches of a device loop."""

    def __init__(self) -> None:
        self.count = 0

    def statements(self, body: list[ast.stmt], live: frozenset[str] = frozenset()) -> list[ast.stmt]:
        """The statements with hooks; `live` are the names that are read after them."""
        out: list[ast.stmt] = []
        body = _without_else(body)
        for k, s in enumerate(body):
            exposed, written = read_first(body[k + 1 :], set())
            live_after = frozenset(exposed | (live - written))
            if isinstance(s, (ast.For, ast.While)):
                out += self._loop(s, live_after)
            elif isinstance(s, ast.If):
                out += self._branch(s, live_after)
            elif isinstance(s, (ast.Return, ast.Break, ast.Continue)):
                what = {ast.Return: "return", ast.Break: "break", ast.Continue: "continue"}[type(s)]
                raise KernelError(f"line {s.lineno}: `{what}` cannot be used in a loop over tiles: put `if` around what it skips")
            else:
                for name in ("body", "orelse"):
                    if getattr(s, name, None) and not isinstance(s, (ast.FunctionDef, ast.ClassDef)):
                        setattr(s, name, self.statements(getattr(s, name), live_after))
                out.append(s)
        return out

    def _name(self) -> str:
        self.count += 1
        return f"__serrate_{self.count}__"

    def _loop(self, node: ast.For | ast.While, live: frozenset[str]) -> list[ast.stmt]:
        carried = carried_names(node)
        # A variable that is read after the loop is carried too, even if no iteration reads it.
        written = {n: s for s in every_statement(node.body) for n in names_written(s)}
        left = {n: s for n, s in sorted(written.items()) if n in live and n not in carried}
        carried |= left
        loop = self._name()
        again, _ = read_first(node.body, set())
        again |= names_read(node.test) if isinstance(node, ast.While) else set()
        node.body = self.statements(node.body, live | frozenset(again))
        targets = [n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)] if isinstance(node, ast.For) else []

        def carries(then: str) -> list[ast.stmt]:
            found: list[ast.stmt] = []
            for n, written in carried.items():
                found += _like(f"if {n!r} in {LOCALS}(): {n} = {loop}.carry({n!r}, {n})", written)
            return [*found, *_like(f"{loop}.{then}()", node)]

        enter = _like(f"{loop} = {TRACE}.enter({tuple(targets)!r}, {tuple(left)!r})", node)
        if isinstance(node, ast.For):
            node.body = [*carries("step"), *node.body]
            return [*enter, node, *carries("leave")]
        before = [*_like(f"{loop}.prepare()", node), *carries("step")]
        test = _like(f"{loop}.continues(0)", node)[0]
        assert isinstance(test, ast.Expr) and isinstance(test.value, ast.Call)
        test.value.args = [node.test]
        node.test = test.value
        return [*enter, *before, node, *carries("leave")]

    def _branch(self, node: ast.If, live: frozenset[str]) -> list[ast.stmt]:
        name = self._name()
        written = sorted({n for part in (node.body, node.orelse) for s in every_statement(part) for n in names_written(s)})
        # Other names, such as the tiles of loops in both parts, need not have one value for both.
        read_later = [n for n in written if n in live]
        begin = _like(f"{name} = {TRACE}.branch(0)", node)
        first = begin[0]
        assert isinstance(first, ast.Assign) and isinstance(first.value, ast.Call)
        first.value.args = [node.test]
        saves = _like("\n".join(f"if {n!r} in {LOCALS}(): {name}.save({n!r}, {n})" for n in written) or "pass", node)

        def kept(side: int) -> str:
            return "\n".join(f"if {n!r} in {LOCALS}(): {name}.keep({side}, {n!r}, {n})" for n in read_later) or "pass"

        restored = "\n".join(f"if {n!r} in {LOCALS}(): {n} = {name}.restore({n!r}, {n})" for n in written) or "pass"
        merged = "\n".join(f"if {n!r} in {LOCALS}(): {n} = {name}.result({n!r}, {n})" for n in read_later) or "pass"
        then, other = _like(f"if {name}.then(): pass", node)[0], _like(f"if {name}.other(): pass", node)[0]
        assert isinstance(then, ast.If) and isinstance(other, ast.If)
        then.body = [*self.statements(node.body, live), *_like(kept(0) + "\n" + restored, node)]
        other.body = [*self.statements(node.orelse, live), *_like(kept(1), node)]
        return [*begin, *saves, then, other, *_like(f"{name}.close()\n{merged}", node)]


def _like(text: str, node: ast.stmt) -> list[ast.stmt]:
    """Parses statements and gives them the line of another."""
    made = ast.parse(text).body
    head = getattr(node, "test", None) or getattr(node, "iter", None) or node
    for statement in made:
        for part in ast.walk(statement):
            ast.copy_location(part, head)
    return made


def _without_else(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements, with the `else` part of each loop after the loop: no loop is left by `break`, which is refused."""
    found: list[ast.stmt] = []
    for s in body:
        found.append(s)
        if isinstance(s, (ast.For, ast.While)) and s.orelse:
            found += _without_else(s.orelse)
            s.orelse = []
    return found
