"""The verifier of loop programs: the rules of docs/ir.md, checked after every pass.

In: a loop program. Out: nothing, or a `VerificationError` that names the statement and the rule it breaks.
"""

from __future__ import annotations

import torch

from serrate.errors import VerificationError
from serrate.ir.expr import Symbol, symbol
from serrate.ir.loops import (
    MAX_NUMBER,
    Assign,
    Barrier,
    Bind,
    Block,
    Declare,
    Dot,
    Fold,
    For,
    Held,
    If,
    Lane,
    Load,
    Local,
    LoopProgram,
    Node,
    Prefetch,
    Reduce,
    Running,
    While,
    Write,
    bodies,
    expressions_of,
    lanes_in,
    nodes,
    values_of,
    written_by,
)
from serrate.ir.reductions import OPERATORS
from serrate.ir.storage import row_dims
from serrate.ir.tile import GRID, SERIAL
from serrate.ir.values import Role, Tensor

REDUCTIONS = frozenset((*OPERATORS.values(), MAX_NUMBER))


def verify_loops(program: LoopProgram, *, complete: bool) -> None:
    """Raises unless the program is legal; if it is `complete`, every symbol must be defined where it is used."""
    _Verifier(program, complete).run()


class _Verifier:
    def __init__(self, program: LoopProgram, complete: bool) -> None:
        self.program, self.complete = program, complete
        self.readable = frozenset(program.tensors)
        self.writable = frozenset((*program.outputs, *program.scratch))
        self.dims = {t: _dims(t) for t in program.tensors}
        self.node: object = None

    def fail(self, rule: str) -> None:
        raise VerificationError(f"{self.program.name}: {rule}: {self.node}")

    def run(self) -> None:
        written: set[Tensor] = set()
        for kernel in self.program.kernels:
            self.node = kernel.name
            own = {n.tensor for n in nodes(kernel.body) if isinstance(n, Write)}
            self.pending = {t for t in self.program.scratch if t.role is Role.SCRATCH} - written
            written |= own
            self._grids(kernel.body)
            self.body(kernel.body, frozenset(self.program.symbols), {})

    def _grids(self, body: tuple[Node, ...]) -> None:
        """Grid loops are inside nothing but grid loops."""
        for node in body:
            if isinstance(node, For) and node.kind is GRID:
                self._grids(node.body)
            elif any(isinstance(n, For) and n.kind is GRID for part in bodies(node) for n in nodes(part)):
                self.node = node
                self.fail("a grid loop may be nested only in grid loops")

    def body(self, body: tuple[Node, ...], known: frozenset[Symbol], locals_: dict[str, Local]) -> None:
        names, blocks = set(known), dict(locals_)
        for node in body:
            self.node = node
            if isinstance(node, While):
                # Its guard is evaluated after the statements of its test.
                self.body((*node.test, If(node.guard, node.body, ())), frozenset(names), blocks)
                continue
            self._symbols(node, names)
            if isinstance(node, Bind):
                names.add(node.symbol)
            elif isinstance(node, Declare):
                blocks[node.local.name] = node.local
                if not node.local.lanes:
                    # A number that the program computes may be an index.
                    names |= {symbol(node.local.name, None, None), symbol(node.local.name)}
            elif isinstance(node, For):
                if node.kind not in (GRID, SERIAL):
                    self.fail("a loop must be grid or serial")
                self.body(node.body, frozenset(names | {node.symbol}), blocks)
            elif isinstance(node, If):
                for part in bodies(node):
                    self.body(part, frozenset(names), blocks)
            elif not isinstance(node, Barrier):
                self._block(node, names, blocks)

    def _symbols(self, node: Node, known: set[Symbol]) -> None:
        if not self.complete:
            return
        own = {lane.symbol for lane in lanes_in(node)}
        for e in expressions_of(node):
            missing = e.symbols - known - own if not e.symbols <= known else ()
            if missing:
                self.fail(f"{', '.join(sorted(s.name for s in missing))} is used before it is known")

    def _block(self, node: Block, names: set[Symbol], blocks: dict[str, Local]) -> None:
        lanes = node.lanes
        if len({lane.symbol for lane in lanes}) != len(lanes) or any(lane.size < 1 for lane in lanes):
            self.fail("lanes of a statement must be distinct and not empty")
        for value in values_of(node):
            for v in value.walk():
                if isinstance(v, Held):
                    self._block_like(v.local, blocks)
                    if any(lane not in lanes and lane.symbol not in names for lane in v.local.lanes):
                        self.fail(f"{v.local} is read at lanes that the statement does not have")
                elif isinstance(v, Load):
                    self._access(v.tensor, len(v.index))
                    if v.tensor in self.pending:
                        self.fail(f"{v.tensor.name} is read before a kernel has written it")
        if isinstance(node, Write | Prefetch):
            self._access(node.tensor, len(node.index))
            if isinstance(node, Write) and node.tensor not in self.writable:
                self.fail(f"{node.tensor.name} is written, but is neither a result nor scratch")
            return
        for local in written_by(node):
            declared = self._block_like(local, blocks)
            if declared.dtype != local.dtype:
                self.fail(f"{local.name} is declared as {declared.dtype}")
            open_lanes = [lane for lane in local.lanes if lane not in lanes and lane.symbol not in names]
            if open_lanes and self.complete:
                self.fail(f"the position of {local.name} along {open_lanes[0].symbol} is undefined")
        if isinstance(node, Fold):
            if len({local.lanes for local in node.locals}) != 1 or len(node.values) != len(node.locals):
                self.fail("a fold needs one value per state, and states with equal lanes")
            return
        self._fits(node)
        if isinstance(node, Assign):
            self._same_lanes(node.local, lanes)
        elif isinstance(node, Dot):
            if len(lanes) != 3 or node.local.lanes != lanes[:2]:
                self.fail("a product needs lanes (rows, columns, depth), and a block with the first two")
        elif isinstance(node, Running):
            self._running(node)
        elif node.operator not in REDUCTIONS:
            self.fail(f"unknown block operator {node.operator}")

    def _running(self, node: Running) -> None:
        self._same_lanes(node.local, node.lanes)
        if node.axis is not None and (node.axis not in node.lanes or node.axis in node.carry.lanes):
            self.fail("a running value must scan a lane of its statement that its carry lacks")
        if node.operator not in REDUCTIONS:
            self.fail(f"unknown block operator {node.operator}")

    def _same_lanes(self, local: Local, lanes: tuple[Lane, ...]) -> None:
        if not set(lanes) <= set(local.lanes):
            self.fail(f"several lanes would write one element of {local.name}")

    def _block_like(self, local: Local, blocks: dict[str, Local]) -> Local:
        """The declaration of a private block; its lanes must have the same sizes."""
        declared = blocks.get(local.name)
        if declared is None:
            self.fail(f"{local.name} is used before it is declared")
            raise AssertionError
        if declared.lanes is not local.lanes and [n.size for n in declared.lanes] != [n.size for n in local.lanes]:
            self.fail(f"{local} is declared as {declared}")
        return declared

    def _fits(self, node: Assign | Reduce | Dot | Running) -> None:
        """Floats become integers only by an explicit cast."""
        whole = not node.local.dtype.is_floating_point and node.local.dtype != torch.bool
        if whole and any(v.dtype.is_floating_point for v in values_of(node)):
            self.fail(f"{node.local.name} is {node.local.dtype}, but is assigned a float")

    def _access(self, tensor: Tensor, count: int) -> None:
        if tensor not in self.readable:
            self.fail(f"{tensor.name} is not a tensor of the program")
        if count != self.dims[tensor]:
            self.fail(f"{tensor.name} has {self.dims[tensor]} dims in memory, but {count} indices")


def _dims(tensor: Tensor) -> int:
    """How many dims a tensor has in memory; a private tensor has those of one row."""
    if tensor.role is not Role.PRIVATE:
        return len(tensor.storage)
    return len(row_dims(tensor.logical))
