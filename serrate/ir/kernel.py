"""KernelProgram: the loops of a tile kernel as they are written, before anybody has said how large a tile is.

In: a traced kernel. Out: what a schedule chooses tiles for and `lower/tiles.py` makes a loop program of. Statements are those of
loop programs; their lanes are axes, whose number of lanes is not known yet.

    program   ::= statement*
    statement ::= Tiles(axes, parallel, body)    body for every tile of every axis; the outermost ones are independent programs
                | Along(axis, reverse, body)     body for every lane of an axis, in order
                | If | While                     as in loop programs
                | a block statement              its lanes are axes; every index is written in the positions along them
    axis      ::= name, begin, end, block        positions begin .. end-1, in tiles of `block` lanes where the user fixed that;
                                                 an alias has the lanes of another axis once more, in the tile that this one is in

A position is a symbol, and so is everything else that a tile knows of itself. Which tile it is, where it begins and how many
lanes it has are known when a schedule has chosen; nothing but the user's own `tile.begin`, `tile.end`, `tile.id` and
`tile.block_size` ever asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from serrate.ir.expr import Array, Bounds, Expr, Symbol, symbol
from serrate.ir.loops import Bind, Block, Declare, If, Lane, Local, Node, While, _line, bodies, with_bodies
from serrate.ir.values import Tensor


@dataclass(frozen=True, eq=False)
class Axis:
    """What one dim of a value runs over: the positions of a loop, or a fixed number of lanes that no loop runs over."""

    name: str
    begin: Expr
    end: Expr
    block: int | None
    """How many lanes the user fixed its tiles to."""
    what: str
    """What messages call it."""
    site: object = None
    """Where in the source it stands; block sizes of a configuration go by that."""
    looped: bool = True
    least: int = 1
    """The fewest lanes a schedule may choose."""
    span: Bounds | None = None
    """Bounds of its positions, where they are not to be taken from its ends: a part of an axis has the symbols of the whole."""
    at: Expr | None = None
    """Which of its tiles is meant, where no loop runs over them."""
    alias_of: Axis | None = None
    """The axis whose lanes these are again: a value that has two dims of one tile has them over an axis and an alias."""

    @property
    def original(self) -> Axis:
        """The axis itself, or the one that it is an alias of."""
        return self.alias_of or self

    @property
    def position(self) -> Symbol:
        """The index along it."""
        return symbol(self.name, *self._span)

    @property
    def _span(self) -> Bounds:
        high = self.end.bounds[1]
        return self.span or (self.begin.bounds[0], None if high is None else high - 1)

    @property
    def lane(self) -> Symbol:
        """Which lane of its tile a position is."""
        return symbol(f"{self.name}_lane")

    @property
    def lanes(self) -> Symbol:
        """How many lanes its tiles have."""
        return symbol(f"{self.name}_lanes", 1)

    @property
    def number(self) -> Symbol:
        """Which tile it is."""
        return symbol(f"{self.name}_id")

    @property
    def first(self) -> Symbol:
        """Where the tile begins."""
        return symbol(f"{self.name}_begin", self._span[0])

    @property
    def last(self) -> Symbol:
        """Where the tile ends: after `lanes` positions, or at the end of the axis."""
        low, high = self._span
        return symbol(f"{self.name}_end", low, None if high is None else high + 1)

    @property
    def block_lane(self) -> Lane:
        """The axis as a lane of a statement; its size is not known yet."""
        return Lane(self.position, 0)

    @property
    def size(self) -> int | None:
        """The number of positions, where it is known."""
        return (self.end - self.begin).value

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Carry:
    """A private block that a loop carries: the reduction it was recognised as, and for a rescaled sum the maximum it goes by."""

    local: Local
    kind: str | None
    top: Local | None = None


@dataclass(frozen=True, eq=False)
class Tiles:
    """`body` for every tile. Of several axes the last one runs fastest."""

    axes: tuple[Axis, ...]
    parallel: bool
    body: tuple[Statement, ...]
    carried: tuple[Carry, ...] = ()


@dataclass(frozen=True, eq=False)
class Along:
    """`body` for every lane of an axis, one after the other, from the first or from the last; private blocks of that axis are
    read and written at that lane."""

    axis: Axis
    reverse: bool
    body: tuple[Statement, ...]


Statement = Tiles | Along | If | While | Bind | Declare | Block


@dataclass(frozen=True, eq=False)
class KernelProgram:
    """A kernel's device loops over named tensors. `arrays` describe the rows of ragged ones."""

    name: str
    body: tuple[Statement, ...]
    axes: tuple[Axis, ...]
    """Every axis, in the order in which they were made."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    arrays: tuple[tuple[Array, Expr | None], ...]
    """What describes the rows of ragged tensors; of how many components, where that is one number."""
    carried: tuple[str, ...] = field(default=())
    """What is carried around each loop, and as what it was recognised."""
    scratch: tuple[Tensor, ...] = ()
    """Results of parts of rows, between one phase of a program and the next."""
    limits: tuple[tuple[Array, Expr], ...] = ()
    """What the elements of arrays that describe rows are at most: the positions or rows that there are."""

    def __str__(self) -> str:
        return text(self)


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement, outer ones first."""
    for node in body:
        yield node
        for part in inner(node):
            yield from statements(part)


def inner(node: Statement) -> tuple[tuple[Statement, ...], ...]:
    """The statements inside a statement: branches hold whatever stands around them."""
    return (node.body,) if isinstance(node, Tiles | Along) else cast(tuple[tuple[Statement, ...], ...], bodies(node))


def with_inner(node: Statement, new: tuple[tuple[Statement, ...], ...]) -> Statement:
    """The statement with others inside it, as many lists as `inner` gives."""
    if isinstance(node, Tiles | Along):
        return replace(node, body=new[0])
    return cast(Statement, with_bodies(node, cast(tuple[tuple[Node, ...], ...], new)))


def text(program: KernelProgram) -> str:
    """The program as people read it."""
    lines = [f"kernel {program.name}"]
    for role, tensors in (("input", program.inputs), ("output", program.outputs)):
        for tensor in tensors:
            shape = ", ".join(str(d.extent_expr) for d in tensor.storage)
            lines.append(f"  {role:<6} {tensor.name}: {str(tensor.dtype).removeprefix('torch.')}[{shape}]")
    lines += [f"  carried {each}" for each in program.carried]
    _lines(program.body, "  ", lines)
    return "\n".join(lines) + "\n"


def _lines(body: tuple[Statement, ...], indent: str, lines: list[str]) -> None:
    for node in body:
        if isinstance(node, Tiles):
            ranges = ", ".join(
                f"{a.name} in {a.begin} .. {a.end}{'' if a.block is None else f' by {a.block}'}" for a in node.axes
            )
            lines.append(f"{indent}{'programs' if node.parallel else 'tiles'} {ranges}:")
            _lines(node.body, indent + "  ", lines)
        elif isinstance(node, Along):
            lines.append(f"{indent}along {node.axis.name}{' backwards' if node.reverse else ''}:")
            _lines(node.body, indent + "  ", lines)
        elif isinstance(node, If):
            then, other = inner(node)
            lines.append(f"{indent}if {' and '.join(map(str, node.guard))}:")
            _lines(then, indent + "  ", lines)
            if other:
                lines.append(f"{indent}else:")
                _lines(other, indent + "  ", lines)
        elif isinstance(node, While):
            test, body_ = inner(node)
            lines.append(f"{indent}loop:")
            _lines(test, indent + "  ", lines)
            lines.append(f"{indent}  leave unless {' and '.join(map(str, node.guard))}")
            _lines(body_, indent + "  ", lines)
        else:
            lines.append(indent + _line(node).replace(":0", ""))
