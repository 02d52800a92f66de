"""A scheduled program as a short tree: its loops with their tile sizes and marks, and what is computed in them, one line each.

In: a tile program after a plan. Out: lines of text, for `explain`, `plan` and `SERRATE_LOG=plan`.
"""

from __future__ import annotations

from collections.abc import Iterator

from serrate.ir.domains import IterDomain
from serrate.ir.loops import line_of
from serrate.ir.ragged_transforms import Combine
from serrate.ir.tile import LANES, Along, At, ByLength, Leaf, Loop, Statement, TileProgram, inner
from serrate.ir.transforms import Split

WIDTH = 96
"""Longer statements are cut off."""


def tree(program: TileProgram) -> tuple[str, ...]:
    """The loops of a program, outermost first, with the statements in them; or its library call.

    >>> from serrate.ir.domains import IterDomain
    >>> from serrate.ir.tile import SERIAL, Phase
    >>> rows = IterDomain(6, name="i")
    >>> tree(TileProgram("p", (), (), (Phase("T1", (Loop(rows, SERIAL, ()),)),)))
    ('serial i 6',)
    """
    if program.call is not None:
        return (str(program.call),)
    return tuple(line for phase in program.phases for line in _lines(phase.body, ""))


def _lines(body: tuple[Statement, ...], indent: str) -> Iterator[str]:
    for statement in body:
        head, parts = _head(statement)
        yield f"{indent}{head if len(head) <= WIDTH else f'{head[: WIDTH - 4]} ...'}"
        for k, part in enumerate(parts):
            if k and part:
                yield f"{indent}else"
            yield from _lines(part, indent + "  ")


def _head(statement: Statement) -> tuple[str, tuple[tuple[Statement, ...], ...]]:
    """The line of a statement, and the bodies below it."""
    if isinstance(statement, Loop) and statement.kind is LANES:
        lanes, body = [_loop(statement.domain)], statement.body
        while len(body) == 1 and isinstance(body[0], Loop) and body[0].kind is LANES:
            lanes.append(_loop(body[0].domain))
            body = body[0].body
        return f"lanes {', '.join(lanes)}", (body,)
    if isinstance(statement, Loop):
        return f"{statement.kind.value} {_loop(statement.domain)}", (statement.body,)
    if isinstance(statement, Leaf):
        return str(statement), ()
    if isinstance(statement, ByLength):
        return f"rows of {statement.least} to {statement.most} positions of {statement.row.name}", inner(statement)
    if isinstance(statement, Along):
        return f"along {statement.axis.name}{' backwards' if statement.reverse else ''}", inner(statement)
    if isinstance(statement, At):
        return f"at {statement.domain.name}", inner(statement)
    parts = inner(statement)
    return type(statement).__name__.lower() if parts else line_of(statement).replace(":0", ""), parts


def _loop(domain: IterDomain) -> str:
    """A loop by the dim that it goes over, and its tile or size."""
    made = domain.definition
    if isinstance(made, Split) and domain.uid == made.outputs[0].uid:
        return f"{made.inputs[0].name} by {made.outputs[1].extent_expr}"
    if isinstance(made, Combine):
        return f"all of ({', '.join(map(_loop, made.inputs))})"
    if domain.is_ragged:
        return f"{domain.name} of each row"
    return domain.name if domain.extent_expr.value is None else f"{domain.name} {domain.extent_expr}"
