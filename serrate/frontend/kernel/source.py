"""A kernel's syntax tree: the names its statements read and write, and functions compiled from rewritten trees.

In: a Python function. Out: its syntax tree, and functions compiled from trees, with the user's line numbers.

A name is carried by a loop if an iteration may read it before writing it, and may write it.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from serrate.errors import KernelError

LOCALS = "__serrate_locals__"
"""Python's `locals`, a name that the user may redefine."""


def parsed(function: Callable[..., Any]) -> tuple[ast.FunctionDef, int, range]:
    """The tree of a function without decorators and annotations, its line offset in the file, and its source lines."""
    if not isinstance(function, types.FunctionType):
        raise KernelError(f"@serrate.kernel takes a plain function, not a {type(function).__name__}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise KernelError(f"@serrate.kernel takes a plain function: {function.__name__} is a generator or async")
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise KernelError(
            f"the source of {function.__name__} was not found, and a kernel is compiled from its source: "
            "define it in a file or notebook, or register the text you exec in linecache.cache "
            "under its filename"
        ) from None
    # An indented function is not dedented, so that columns in messages are right.
    text, offset = "if True:\n" + "".join(lines), first - 2
    if not lines[0][:1].isspace():
        text, offset = "".join(lines), first - 1
    try:
        tree = ast.parse(text)
    except SyntaxError:
        raise KernelError(f"the source of {function.__name__} is not a statement of its own: define it with def") from None
    found = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function.__name__), None)
    if found is None:
        raise KernelError(
            f"the source of {function.__name__} holds no def of that name: a kernel is defined with def, not lambda"
        )
    found.decorator_list = []
    found.returns = None
    for argument in ast.walk(found.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    found.args.defaults = [ast.copy_location(ast.Constant(None), d) for d in found.args.defaults]
    found.args.kw_defaults = [None if d is None else ast.copy_location(ast.Constant(None), d) for d in found.args.kw_defaults]
    return found, offset, range(first, first + len(lines))


def rebuilt(function: types.FunctionType, tree: ast.FunctionDef, given: Mapping[str, Any]) -> types.FunctionType:
    """Compiles this tree with the original's globals and cells, plus some names of ours. Defaults are not set."""
    given = {**given, LOCALS: locals}
    free = function.__code__.co_freevars
    own = {a.arg for a in tree.args.kwonlyargs}
    names = [*(n for n in free if n not in own), *given]
    outer = ast.FunctionDef(
        name="__serrate_outer__",
        args=ast.arguments(posonlyargs=[], args=[ast.arg(n) for n in names], kwonlyargs=[], kw_defaults=[], defaults=[]),
        body=[tree],
        decorator_list=[],
    )
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code = _inner(_inner(compile(module, function.__code__.co_filename, "exec"), outer.name), function.__name__)
    cells = dict(zip(free, function.__closure__ or (), strict=True)) | {n: types.CellType(x) for n, x in given.items()}
    made = types.FunctionType(code, function.__globals__, function.__name__, None, tuple(cells[n] for n in code.co_freevars))
    made.__qualname__ = function.__qualname__  # Python's own messages show it
    return made


def with_defaults(made: types.FunctionType, like: types.FunctionType) -> types.FunctionType:
    """The function, with the defaults of another."""
    made.__defaults__, made.__kwdefaults__ = like.__defaults__, like.__kwdefaults__
    return made


def _inner(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def carried_names(loop: ast.For | ast.While) -> dict[str, ast.stmt]:
    """The names that a loop may carry from one iteration to the next, each with a statement that writes it.

    >>> tree = ast.parse("for i in r:\\n    x = f(i)\\n    acc = acc + x\\n    if x: last = x").body[0]
    >>> list(carried_names(tree))
    ['acc']
    """
    written: dict[str, ast.stmt] = {}
    for statement in every_statement(loop.body):
        for name in names_written(statement):
            written[name] = statement
    if isinstance(loop, ast.For):
        mine = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        exposed, _ = read_first(loop.body, mine)
    else:
        mine = set()
        exposed, _ = read_first(loop.body, set())
        exposed |= names_read(loop.test)
    return {name: written[name] for name in sorted(exposed) if name in written and name not in mine}


def every_statement(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements and their nested statements, but not those inside functions and classes."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                yield from every_statement(getattr(statement, name, []))
        for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from every_statement(part.body)


def names_written(statement: ast.stmt) -> set[str]:
    """The names that a statement itself writes, excluding nested statements."""
    if isinstance(statement, ast.Assign):
        parts: list[ast.AST] = list(statement.targets)
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For)):
        parts = [statement.target]
    elif isinstance(statement, ast.With):
        parts = [item.optional_vars for item in statement.items if item.optional_vars]
    elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in statement.names}
    elif isinstance(statement, ast.Match):
        patterns = [p for case in statement.cases for p in ast.walk(case.pattern)]
        captured = {p.rest if isinstance(p, ast.MatchMapping) else getattr(p, "name", None) for p in patterns}
        return {name for name in captured if name} | {n.target.id for n in _own(statement) if isinstance(n, ast.NamedExpr)}
    else:
        parts = []
    found = {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found | {n.target.id for n in _own(statement) if isinstance(n, ast.NamedExpr)}


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, excluding nested statements."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield from ast.walk(child)


def names_read(node: ast.AST) -> set[str]:
    """The names that an expression or a statement reads, including nested ones."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def read_first(body: list[ast.stmt], written: set[str]) -> tuple[set[str], set[str]]:
    """The names that may be read before they are written, and those that are definitely written."""
    exposed: set[str] = set()
    written = set(written)
    for s in body:
        if isinstance(s, ast.If):
            exposed |= names_read(s.test) - written
            (a, wa), (b, wb) = read_first(s.body, written), read_first(s.orelse, written)
            exposed |= a | b
            written |= wa & wb
        elif isinstance(s, (ast.For, ast.While)):
            head = s.iter if isinstance(s, ast.For) else s.test
            inside = names_written(s) if isinstance(s, ast.For) else set()
            exposed |= (names_read(head) - written) | read_first(s.body, written | inside)[0] | read_first(s.orelse, written)[0]
        elif isinstance(s, ast.With):
            for item in s.items:
                exposed |= names_read(item.context_expr) - written
            inner, done = read_first(s.body, written | names_written(s))
            exposed |= inner
            written |= done
        else:
            read = names_read(s)
            if isinstance(s, ast.AugAssign):
                read |= {n.id for n in ast.walk(s.target) if isinstance(n, ast.Name)}
            exposed |= read - written
            written |= names_written(s)
    return exposed, written
