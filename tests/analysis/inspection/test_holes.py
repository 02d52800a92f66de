"""What holes must hold: tile programs with readers of every kind, and a run that shows that the fill is enough."""

from __future__ import annotations

import math

import pytest
import torch

from serrate import ir, ops
from serrate.analysis import CorrectnessKind, correctness
from serrate.ir import IterDomain, partition, split
from serrate.ir.reductions import REDUCTIONS, reduction
from serrate.ir.tile import SERIAL, Accumulate, Leaf, Phase, Store, TileProgram, nest
from serrate.ir.values import Role, Tensor, Value, call, constant, read
from serrate.lower.stages import stages

WEAK, STRONG = CorrectnessKind.WEAK, CorrectnessKind.STRONG
D = IterDomain(6, name="d")
J = IterDomain(5, name="j")


def blocked(dtype: torch.dtype = torch.float32, role: Role = Role.SCRATCH) -> Tensor:
    """Six elements in eight places."""
    return Tensor("x", dtype, (D,), split(D, 4), role)


def total(name: str, how: str, value: Value, over: tuple[IterDomain, ...] = (D,), index: tuple[IterDomain, ...] = ()) -> Leaf:
    kind = reduction(how)
    values = (value, constant(0, torch.int64)) if how.startswith("arg") else (value,)
    targets = tuple(Tensor(f"{name}{s}" if k else name, value.dtype, index, index) for k, s in enumerate(kind.states))
    return Accumulate(targets, index, kind, values, over)


def program(*leaves: Leaf, loops: tuple[IterDomain, ...] | None = None) -> TileProgram:
    around = split(D, 4) if loops is None else loops
    phases = tuple(Phase(leaf.targets[0].name, nest(tuple((d, SERIAL) for d in around), leaf)) for leaf in leaves)
    return TileProgram("p", (), (), phases)


@pytest.mark.parametrize(
    ("how", "dtype", "fill"),
    [
        ("sum", torch.float32, 0.0),
        ("sum", torch.int64, 0),
        ("prod", torch.float32, 1.0),
        ("max", torch.float32, -math.inf),
        ("min", torch.float32, math.inf),
        ("max", torch.int64, torch.iinfo(torch.int64).min),
        ("min", torch.int64, torch.iinfo(torch.int64).max),
        ("any", torch.bool, False),
        ("all", torch.bool, True),
        ("softmax", torch.float32, -math.inf),
        ("softmax_max", torch.float32, -math.inf),
    ],
)
def test_a_reduction_over_holes_wants_its_identity(how: str, dtype: torch.dtype, fill: float) -> None:
    x = blocked(dtype)
    found = correctness(program(total("y", how, read(x, (D,)))), x)
    assert (found.kind, found.fill, found.masks) == (STRONG, fill, ())
    assert f"{how} over d visits the holes of x" in str(found)


def test_every_reduction_is_decided() -> None:
    x = blocked()
    for how in REDUCTIONS:
        found = correctness(program(total("y", how, read(x, (D,)))), x)
        assert found.why
        # Places are counted too, and so is whatever moments see.
        assert (found.kind is STRONG) is (how not in ("welford", "argmax", "argmin"))


def test_moments_count_whatever_they_see() -> None:
    x = blocked()
    found = correctness(program(total("y", "welford", read(x, (D,)))), x)
    assert (found.kind, found.fill, found.masks) == (WEAK, None, ("y",))
    assert "any contents would count" in str(found)


def test_two_identities_leave_each_reader_to_mask() -> None:
    x = blocked()
    found = correctness(program(total("y", "sum", read(x, (D,))), total("z", "prod", read(x, (D,)))), x)
    assert (found.kind, found.fill, found.masks) == (WEAK, None, ("y", "z"))
    assert found.why == "y needs 0.0, z needs 1.0; no value suits all readers, so each masks holes"


def test_two_readers_with_one_identity_share_it() -> None:
    x = blocked()
    square = call("square", read(x, (D,)), dtype=torch.float32)
    found = correctness(program(total("y", "sum", read(x, (D,))), total("z", "sum", square)), x)
    assert (found.kind, found.fill) == (STRONG, 0.0)


def test_stores_go_by_address() -> None:
    x, y = blocked(), Tensor("y", torch.float32, (D,), (D,))
    found = correctness(program(Store(y, (D,), read(x, (D,)))), x)
    assert (found.kind, found.masks) == (WEAK, ())
    assert "stores by address" in str(found)


def test_loops_over_the_elements_never_meet_a_hole() -> None:
    x = blocked()
    found = correctness(program(total("y", "sum", read(x, (D,))), loops=(D,)), x)
    assert found.kind is WEAK
    assert "stay inside the elements" in str(found)


def test_loops_made_in_another_way_guard_for_themselves() -> None:
    x = blocked()
    found = correctness(program(total("y", "sum", read(x, (D,))), loops=split(D, 5)), x)
    assert found.kind is WEAK
    assert "has its own guards" in str(found)


def test_loops_made_of_the_storage_may_be_split_further() -> None:
    x = blocked()
    o, n = split(D, 4)
    assert correctness(program(total("y", "sum", read(x, (D,))), loops=(o, *split(n, 2))), x).kind is STRONG
    assert correctness(program(total("y", "sum", read(x, (D,))), loops=(o, *split(n, 3))), x).kind is WEAK


def test_an_index_that_is_kept_keeps_its_holes_to_itself() -> None:
    x = Tensor("x", torch.float32, (D, J), (*split(D, 4), J))
    found = correctness(program(total("y", "sum", read(x, (D, J)), (J,), (D,)), loops=(*split(D, 4), J)), x)
    assert found.kind is WEAK
    assert "it keeps d" in str(found)


def test_functions_are_seen_through() -> None:
    x = blocked()
    element = read(x, (D,))
    exp = call("exp", element, dtype=torch.float32)
    assert correctness(program(total("y", "sum", exp)), x).fill == -math.inf
    shifted = call("add", element, constant(1.0, torch.float32), dtype=torch.float32)
    assert correctness(program(total("y", "sum", shifted)), x).masks == ("y",)
    scaled = call("mul", element, constant(3.0, torch.float32), dtype=torch.float32)
    assert correctness(program(total("y", "sum", scaled)), x).fill == 0.0
    assert correctness(program(total("y", "max", call("relu", element, dtype=torch.float32))), x).masks == ("y",)


def test_a_product_is_nothing_only_beside_another_hole() -> None:
    x, w = blocked(), Tensor("w", torch.float32, (D, J), (D, J), Role.INPUT)
    scale = Tensor("s", torch.float32, (J,), (J,), Role.INPUT)
    loops = (*split(D, 4), J)
    dot = call("mul", read(x, (D,)), read(w, (D, J)), dtype=torch.float32)
    assert correctness(program(total("y", "sum", dot, (D,), (J,)), loops=loops), x).fill == 0.0
    # 0 times an infinite scale is NaN, and the scale is no hole.
    scaled = call("mul", read(x, (D,)), read(scale, (J,)), dtype=torch.float32)
    assert correctness(program(total("y", "sum", scaled, (D,), (J,)), loops=loops), x).masks == ("y",)
    logarithm = call("mul", read(x, (D,)), call("log", read(w, (D, J)), dtype=torch.float32), dtype=torch.float32)
    assert correctness(program(total("y", "sum", logarithm, (D,), (J,)), loops=loops), x).masks == ("y",)


def test_partial_states_are_merged_from_empty_ones() -> None:
    kind = reduction("softmax")
    parts = [Tensor(n, torch.float32, (D,), split(D, 4)) for n in ("m", "t")]
    states = tuple(Tensor(n, torch.float32, (), ()) for n in ("M", "T"))
    merge = Accumulate(states, (), kind, tuple(read(p, (D,)) for p in parts), (D,), merge=True)
    fills = [correctness(program(merge), p).fill for p in parts]
    assert fills == [torch.finfo(torch.float32).min, 0.0]


def test_the_memory_of_the_caller_is_not_filled() -> None:
    x = blocked(role=Role.INPUT)
    found = correctness(program(total("y", "sum", read(x, (D,)))), x)
    assert (found.kind, found.masks) == (WEAK, ("y",))
    assert "caller's memory" in found.why


def test_no_holes_or_no_readers() -> None:
    plain = Tensor("x", torch.float32, (D,), (D,))
    assert "without holes" in correctness(program(total("y", "sum", read(plain, (D,)))), plain).why
    assert "nobody reads x" in correctness(program(), blocked()).why


def test_ragged_rows_in_blocks() -> None:
    c, r = partition(IterDomain(512), [0, 100, 250, 512])
    x = Tensor("x", torch.float32, (c, r), (c, *split(r, 128)))
    loops = (c, *split(r, 128))
    found = correctness(program(total("y", "max", read(x, (c, r)), (r,), (c,)), loops=loops), x)
    assert (found.kind, found.fill) == (STRONG, -math.inf)
    assert correctness(program(total("y", "max", read(x, (c, r)), (r,), (c,)), loops=(c, r)), x).kind is WEAK


def test_a_fusion_and_its_naive_program_are_read_alike() -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        rows = ops.exp(ops.as_nested(x, offsets))
        f.output(ops.sum(rows, 1))
    for source in (f, stages(f)[0]):
        assert correctness(source, rows).why == f"{rows.tensor.name} is stored without holes"


@pytest.mark.parametrize("how", ["sum", "prod", "max", "min"])
def test_a_filled_allocation_is_reduced_without_a_mask(how: str) -> None:
    x = blocked()
    found = correctness(program(total("y", how, read(x, (D,)))), x)
    assert found.fill is not None
    elements = torch.randn(6)
    places = torch.cat([elements, torch.full((2,), float(found.fill))]).reshape(2, 4)
    run = {"sum": torch.sum, "prod": torch.prod, "max": torch.amax, "min": torch.amin}[how]
    torch.testing.assert_close(run(places), run(elements))


# --- schedules by hand ---------------------------------------------------------------------------------------------------


def scheduled(extent: int, block: int, tile: int, how: str) -> tuple[ir.Fusion, ir.TensorView]:
    """An intermediate that is stored in blocks, and reduced tile by tile."""
    with ir.Fusion() as f:
        t = ops.exp(f.input((extent,), torch.float32))
        y = getattr(ops, how)(t, 0)
        f.output(y)
    t.split(0, block).set_allocation(split(t.domains[0], block))
    y.split(0, tile)
    return f, t


@pytest.mark.parametrize("how", ["sum", "amax", "prod"])
@pytest.mark.parametrize(("extent", "block", "tile"), [(6, 4, 4), (8, 4, 4), (6, 3, 4), (6, 4, 3), (7, 2, 2), (7, 4, 5)])
def test_what_set_allocation_leaves_in_holes(how: str, extent: int, block: int, tile: int) -> None:
    f, t = scheduled(extent, block, tile, how)
    found = correctness(f, t)
    # Oracle: the memory in plain numbers, everything but elements set to what is found; loops over all places, without a mask.
    places = -(-extent // block) * block
    data = torch.arange(1.0, extent + 1).exp().tolist()
    loops = -(-extent // tile) * tile
    past = loops > extent
    in_memory = loops <= places and tile == block
    assert (found.kind is STRONG) is (past and in_memory)
    if found.kind is STRONG:
        assert found.fill is not None
        memory = torch.tensor(data + [float(found.fill)] * (places - extent))
        reduce = {"sum": torch.sum, "amax": torch.amax, "prod": torch.prod}[how]
        torch.testing.assert_close(reduce(memory), reduce(torch.tensor(data)))
    x = torch.arange(1.0, extent + 1) / extent
    wanted = {"sum": torch.sum, "amax": torch.amax, "prod": torch.prod}[how](x.exp())
    torch.testing.assert_close(f.compile("reference")(x), wanted)


def test_an_allocation_step_of_a_plan_is_seen() -> None:
    f, t = scheduled(6, 4, 4, "sum")
    (naive,) = stages(f)
    assert isinstance(naive, TileProgram)
    plan = f.compile("reference").plan(torch.ones(6))  # type: ignore[attr-defined]
    assert correctness(naive, t).why.endswith("is stored without holes")
    assert correctness(plan.apply(naive), t).fill == correctness(f, t).fill == 0.0
