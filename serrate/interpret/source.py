"""The kernel's function, with every loop instrumented.

In: a Python function. Out: the same function recompiled from its source, in which every `for` and `while` reports when an
iteration begins and which values it carries; everything else, including line numbers, is as the user wrote it.

    for tile_k in hl.tile(n):                loop = enter(False)
        acc = acc + x[tile_k].sum()          for tile_k in hl.tile(n):
                                                 if "acc" in locals(): acc = loop.carry("acc", acc)
                                                 loop.step()
                                                 acc = acc + x[tile_k].sum()
                                             if "acc" in locals(): acc = loop.carry("acc", acc)
                                             loop.leave()
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from serrate.frontend.kernel.source import LOCALS, carried_names, parsed, rebuilt, with_defaults

ENTER = "__serrate_enter__"
CONDITION = "__serrate_condition__"
"""Turns a bool into a tensor for `torch.where`: `tile.begin > 3` is a bool here, but a value in compiled kernels."""


@dataclass(frozen=True)
class AnnotatedKernel:
    """A kernel's instrumented function, and its line range."""

    function: Callable[..., Any]
    first: int
    last: int


def noted(function: Callable[..., Any], enter: Callable[[bool], Any]) -> AnnotatedKernel:
    """The instrumented function; `enter` creates the loop object for every execution of a loop, given whether it is a
    `while`."""
    found, offset, lines = parsed(function)
    _LoopNotes().visit(found)
    ast.increment_lineno(found, offset)
    made = rebuilt(function, found, {ENTER: enter, CONDITION: _condition})  # type: ignore[arg-type]
    return AnnotatedKernel(with_defaults(made, function), lines.start, lines.stop - 1)  # type: ignore[arg-type]


def _condition(x: Any) -> Any:
    return torch.tensor(x, device="cpu") if isinstance(x, bool) else x


class _LoopNotes(ast.NodeTransformer):
    """Instruments every loop of a function."""

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
            text = [f"if {n!r} in {LOCALS}(): {n} = {loop}.carry({n!r}, {n})" for n in carried] + [f"{loop}.{last}()"]
            made = ast.parse("\n".join(text)).body
            lines = [carried[n] for n in carried] + [node]
            for statement, like in zip(made, lines, strict=True):
                for part in ast.walk(statement):
                    ast.copy_location(part, like)
            return made

        entered = ast.parse(f"{loop} = {ENTER}({isinstance(node, ast.While)})").body
        for part in ast.walk(entered[0]):
            ast.copy_location(part, node)
        node.body = [*notes("step"), *node.body]
        return [*entered, node, *notes("leave")]
