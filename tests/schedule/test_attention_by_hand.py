"""Causal SiLU attention over ragged sequences, written by hand as a tile program and scheduled by hand.

Two ragged axes (queries and keys of one sequence) meet in one program: nothing in lowering or the backends knows about it.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from serrate.engine import build
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, symbol
from serrate.ir.partition import partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import reduction
from serrate.ir.tile import SERIAL, Accumulate, Phase, Store, TileProgram, nest
from serrate.ir.values import Role, Tensor, call, constant, position, read
from serrate.schedule.plan import Plan, Step

WIDTH = 8


def attention() -> TileProgram:
    """s[c,q,k] = Q.K;  p = silu(s) where k <= q;  o[c,q,:] = sum over k of p*V."""
    offsets, count, total = Array("off"), symbol("n1") - 1, symbol("n0")
    items = IterDomain(total, name="i")
    c, q = partition(items, offsets, count, names=("c", "q"))
    # Keys of the same sequence: another index over the same rows.
    k = RaggedIterDomain(total, name="k", pairing=offsets, component=c, length=q.length, row_start=q.row_start)
    d, v = IterDomain(WIDTH, name="d"), IterDomain(WIDTH, name="v")
    names = {name: Tensor(name, torch.float32, (c, q, d), (items, d), Role.INPUT) for name in ("Q", "K", "V")}
    bounds = Tensor("off", torch.int64, (IterDomain(symbol("n1"), name="o"),), (IterDomain(symbol("n1"), name="o"),), Role.INPUT)
    out = Tensor("O", torch.float32, (c, q, v), (items, v), Role.OUTPUT)
    score = Tensor("S", torch.float32, (c, q, k), (items, k))
    weight = Tensor("P", torch.float32, (c, q, k), (items, k))
    f32 = torch.float32
    product = call("mul", read(names["Q"], (c, q, d)), read(names["K"], (c, k, d)), dtype=f32)
    causal = call("le", position(k), position(q), dtype=torch.bool)
    kept = call("where", causal, call("silu", read(score, (c, q, k)), dtype=f32), constant(0.0, f32), dtype=f32)
    term = call("mul", read(weight, (c, q, k)), read(names["V"], (c, k, v)), dtype=f32)
    add = reduction("sum")
    phases = (
        Phase("S", nest(tuple((x, SERIAL) for x in (c, q, k, d)), Accumulate((score,), (c, q, k), add, (product,), (d,)))),
        Phase("P", nest(tuple((x, SERIAL) for x in (c, q, k)), Store(weight, (c, q, k), kept))),
        Phase("O", nest(tuple((x, SERIAL) for x in (c, q, k, v)), Accumulate((out,), (c, q, v), add, (term,), (k,)))),
    )
    return TileProgram("attention", (*names.values(), bounds), (out,), phases)


def steps(rows: int, keys: int, *, parts: bool) -> Plan:
    """Blocks of queries on the grid, keys serially in blocks; with `parts`, blocks of all sequences in one list."""
    out: list[Step] = []
    for phase in ("S", "P", "O"):
        out += [Step("split", (phase, "q", rows)), Step("split", (phase, "k", keys))]
        outer = ["cqo"] if parts else ["c", "qo"]
        if parts:
            out.append(Step("combine", (phase, "c", "qo")))
        lanes = {"S": ["qi", "ki", "d"], "P": ["qi", "ki"], "O": ["qi", "v", "ki"]}[phase]
        out.append(Step("reorder", (phase, *outer, "ko", *lanes)))
        out += [Step("mark", (phase, name, "grid")) for name in outer]
        out += [Step("mark", (phase, name, "lanes")) for name in lanes]
    depth = 2 if parts else 3
    out += [Step("fuse", ("S", "P", depth)), Step("fuse", ("P", "O", depth))]
    return Plan("by hand", tuple(out))


def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.tril(torch.nn.functional.silu(q @ k.T)) @ v


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize(("rows", "keys"), [(4, 8), (3, 5), (1, 1)])
def test_attention_agrees_with_torch_row_by_row(backend: str, rows: int, keys: int, parts: bool) -> None:
    lengths = [5, 0, 1, 17, 9]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    program = build(attention(), steps(rows, keys, parts=parts), "attention", backend, lambda array: True)
    q, k, v = (torch.randn(int(offsets[-1]), WIDTH) for _ in range(3))
    out = torch.full_like(q, float("nan"))
    arrays = []
    for array in program.program.arrays:
        if array.recipe is None:
            arrays.append(offsets)
        else:
            tiles = (torch.tensor(lengths) + rows - 1) // rows
            arrays.append(torch.cat([torch.zeros(1, dtype=torch.long), tiles.cumsum(0)]))
    sizes = {"n0": len(q), "n1": len(offsets)}
    program([q, k, v, offsets, out], arrays, [sizes[str(s)] for s in program.program.symbols])
    for a, b in itertools.pairwise(offsets):
        torch.testing.assert_close(out[a:b], wanted(q[a:b], k[a:b], v[a:b]), rtol=1e-4, atol=1e-4)


def test_scores_are_products_of_blocks() -> None:
    program = build(attention(), steps(4, 8, parts=True), "attention", "reference", lambda array: True)
    assert program.source.count("@") == 2, program.source
