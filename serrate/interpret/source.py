"""The kernel's own function, with a note at every loop.

In: a Python function. Out: the same function compiled again from its source, where every `for` and `while` says when an iteration
begins and hands in the values that it carries; all else, line numbers included, is as the user wrote it.

    for tile_k in hl.tile(n):                loop = enter()
        acc = acc + x[tile_k].sum()          for tile_k in hl.tile(n):
                                                 if "acc" in locals(): acc = loop.rest("acc", acc)
                                                 loop.step()
                                                 acc = acc + x[tile_k].sum()
                                             if "acc" in locals(): acc = loop.rest("acc", acc)
                                             loop.leave()

A name is carried if an iteration may read it before writing it, and may write it.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from serrate.errors import KernelError

ENTER = "__serrate_enter__"
LOCALS = "__serrate_locals__"
"""Python's `locals`, which the user may have another use for."""
CONDITION = "__serrate_condition__"
"""Makes a tensor of a bool, for `torch.where`: `tile.begin > 3` is a number here, and a value where kernels are compiled."""


@dataclass(frozen=True)
class Source:
    """A kernel's function with notes at its loops, and the lines it stands on."""

    function: Callable[..., Any]
    first: int
    last: int


def noted(function: Callable[..., Any], enter: Callable[[], Any]) -> Source:
    """The function with notes; `enter` makes the loop object of every execution of a loop."""
    found, offset, lines = parsed(function)
    _Notes().visit(found)
    ast.increment_lineno(found, offset)
    return Source(_compiled(function, found, enter), lines.start, lines.stop - 1)  # type: ignore[arg-type]


def parsed(function: Callable[..., Any]) -> tuple[ast.FunctionDef, int, range]:
    """The tree of a function without decorators and annotations, how far its lines are from the file's, and these lines."""
    if not isinstance(function, types.FunctionType):
        raise KernelError(f"@serrate.kernel takes a plain function, not a {type(function).__name__}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise KernelError(f"@serrate.kernel takes a function that returns: {function.__name__} is a generator or async")
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise KernelError(
            f"the source of {function.__name__} is not to be found, and a kernel is compiled from its source: "
            "define it in a file or notebook, or put the text that you exec into linecache.cache "
            "under the filename it is compiled with"
        ) from None
    # An indented function stays where it is, so that columns in messages are right.
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


def _compiled(function: types.FunctionType, tree: ast.FunctionDef, enter: Callable[[], Any]) -> Callable[..., Any]:
    """A function of this tree with the original's globals, cells and defaults."""
    free = function.__code__.co_freevars
    given = {ENTER: enter, LOCALS: locals, CONDITION: _condition}
    names = [*free, *given]
    outer = ast.FunctionDef(
        name="__serrate_outer__",
        args=ast.arguments(posonlyargs=[], args=[ast.arg(n) for n in names], kwonlyargs=[], kw_defaults=[], defaults=[]),
        body=[tree],
        decorator_list=[],
    )
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code = _inner(_inner(compile(module, function.__code__.co_filename, "exec"), outer.name), function.__name__)
    cells = dict(zip(free, function.__closure__ or (), strict=True)) | {n: types.CellType(x) for n, x in given.items()}
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, tuple(cells[n] for n in code.co_freevars)
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _inner(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _condition(x: Any) -> Any:
    return torch.tensor(x, device="cpu") if isinstance(x, bool) else x


class _Notes(ast.NodeTransformer):
    """Puts the notes at every loop of a function."""

    def __init__(self) -> None:
        self._loops = 0

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        return self._loop(node)

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        return self._loop(node)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "where" and node.args:
            first = node.args[0]
            name = ast.copy_location(ast.Name(CONDITION, ast.Load()), first)
            node.args[0] = ast.copy_location(ast.Call(name, [first], []), first)
        return node

    def _loop(self, node: ast.For | ast.While) -> list[ast.stmt]:
        carried = carried_names(node)
        self._loops += 1
        loop = f"__serrate_loop_{self._loops}__"
        self.generic_visit(node)

        def notes(last: str) -> list[ast.stmt]:
            text = [f"if {n!r} in {LOCALS}(): {n} = {loop}.rest({n!r}, {n})" for n in carried] + [f"{loop}.{last}()"]
            made = ast.parse("\n".join(text)).body
            lines = [carried[n] for n in carried] + [node]
            for statement, like in zip(made, lines, strict=True):
                for part in ast.walk(statement):
                    ast.copy_location(part, like)
            return made

        entered = ast.parse(f"{loop} = {ENTER}()").body
        for part in ast.walk(entered[0]):
            ast.copy_location(part, node)
        node.body = [*notes("step"), *node.body]
        return [*entered, node, *notes("leave")]


def carried_names(loop: ast.For | ast.While) -> dict[str, ast.stmt]:
    """The names whose value one iteration may hand to the next, each with a statement that writes it.

    >>> tree = ast.parse("for i in r:\\n    x = f(i)\\n    acc = acc + x\\n    if x: last = x").body[0]
    >>> list(carried_names(tree))
    ['acc']
    """
    written: dict[str, ast.stmt] = {}
    for statement in _statements(loop.body):
        for name in _targets(statement):
            written[name] = statement
    if isinstance(loop, ast.For):
        mine = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        exposed, _ = _exposed(loop.body, mine)
    else:
        mine = set()
        exposed, _ = _exposed(loop.body, set())
        exposed |= _reads(loop.test)
    return {name: written[name] for name in sorted(exposed) if name in written and name not in mine}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _targets(statement: ast.stmt) -> set[str]:
    """The names that a statement itself writes, without those of statements inside it."""
    if isinstance(statement, ast.Assign):
        parts: list[ast.AST] = list(statement.targets)
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For)):
        parts = [statement.target]
    elif isinstance(statement, ast.With):
        parts = [item.optional_vars for item in statement.items if item.optional_vars]
    else:
        parts = []
    found = {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found | {n.target.id for n in _own(statement) if isinstance(n, ast.NamedExpr)}


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield from ast.walk(child)


def _reads(node: ast.AST | None) -> set[str]:
    return (
        {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} if node is not None else set()
    )


def _exposed(body: list[ast.stmt], written: set[str]) -> tuple[set[str], set[str]]:
    """The names that may be read before they are written, and those that are written for sure."""
    exposed: set[str] = set()
    written = set(written)
    for s in body:
        if isinstance(s, ast.If):
            exposed |= _reads(s.test) - written
            (a, wa), (b, wb) = _exposed(s.body, written), _exposed(s.orelse, written)
            exposed |= a | b
            written |= wa & wb
        elif isinstance(s, (ast.For, ast.While)):
            head = s.iter if isinstance(s, ast.For) else s.test
            inside = _targets(s) if isinstance(s, ast.For) else set()
            exposed |= (_reads(head) - written) | _exposed(s.body, written | inside)[0] | _exposed(s.orelse, written)[0]
        elif isinstance(s, ast.With):
            for item in s.items:
                exposed |= _reads(item.context_expr) - written
            inner, done = _exposed(s.body, written | _targets(s))
            exposed |= inner
            written |= done
        else:
            reads = _reads(s)
            if isinstance(s, ast.AugAssign):
                reads |= {n.id for n in ast.walk(s.target) if isinstance(n, ast.Name)}
            exposed |= reads - written
            written |= _targets(s)
    return exposed, written
