"""Passes over loop programs, looked at one by one: what each leaves, for fusions and kernels alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, ir, ops, settings
from serrate.ir.domains import IterDomain
from serrate.ir.expr import Array, Expr, Less, Symbol, minimum, symbol
from serrate.ir.loops import (
    Assign,
    Declare,
    Dot,
    For,
    Lane,
    Local,
    LoopKernel,
    LoopProgram,
    Node,
    Reduce,
    Write,
    held,
    load,
    nodes,
)
from serrate.ir.tile import GRID, SERIAL
from serrate.ir.values import Role, Tensor, Value, call, constant
from serrate.lower.passes.end_loops import end_loops
from serrate.lower.passes.share_operands import share_operands
from serrate.lower.shifts import is_shift
from tests.engine.test_guess import TOLERANCE, _rows

F32 = torch.float32


# --- passes can be seen -----------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What SERRATE_LOG=passes prints."""
    monkeypatch.setenv("SERRATE_LOG", "passes")
    settings.reload()
    caplog.set_level(logging.DEBUG, logger="serrate.passes")
    return lambda: [record.getMessage() for record in caplog.records]


def test_the_passes_of_a_fusion_can_be_printed(shown: Callable[[], list[str]]) -> None:
    with ir.Fusion("totals") as f:
        x, offsets = f.input((None, 3), F32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(x, offsets), 1))
    f.compile("reference", "maskless")(torch.ones(3, 3), torch.tensor([0, 1, 3]))
    printed = {text.split("\n")[0]: text for text in shown()}
    assert next(iter(printed)) == "totals, before all passes"
    # Each as often as it changes something, in the order of the list.
    assert [t for t in printed if "after" in t] == [
        f"totals, after {name}" for name in ("keep_in_bounds", "name_indices", "strip_mine", "long_sums")
    ]
    assert "T1[c0]" in printed["totals, before all passes"] and "clamp(T1[c0], n0)" in printed["totals, after keep_in_bounds"]
    assert "T1_c0 := clamp(T1[c0], n0)" in printed["totals, after name_indices"]
    assert "T3_wide" not in printed["totals, after strip_mine"] and "_wide" in printed["totals, after long_sums"]


def test_the_passes_of_a_kernel_can_be_printed(shown: Callable[[], list[str]]) -> None:
    @serrate.kernel
    def totals(jt: JaggedTensor, out: torch.Tensor) -> None:
        for b in hl.tile(jt.num_rows):
            total = hl.zeros([b, 3])
            for t in hl.tile(jt.max_length):
                total = total + jt[b, t, :].sum(1)
            out[b, :] = total

    totals.on("reference")(JaggedTensor.from_lengths(torch.ones(3, 3), [1, 2]), torch.empty(2, 3))
    printed = {text.split("\n")[0]: text for text in shown()}
    assert {
        "totals, before all passes",
        "totals, after end_loops",
        "totals, after keep_in_bounds",
        "totals, after name_indices",
    } <= set(printed)
    assert "min(" in printed["totals, after end_loops"], "the loop ends where its row does"


# --- loops end where nothing exists any more ---------------------------------------------------------------------------------

N, LONG = symbol("n"), symbol("long")
C, R = symbol("c", 0), symbol("r", 0)
D, K = Lane(symbol("d", 0, 7), 8), Lane(symbol("k", 0, 3), 4)
LENGTHS = Array("lengths")
ROW = Less(R * 4 + K.symbol, LENGTHS[C])
TOTAL, COUNT = Local("total", F32, (D,)), Local("count", F32, (D,))


def tensor(name: str, role: Role) -> Tensor:
    dims = (IterDomain(N, name=f"{name}_0"), IterDomain(8, name=f"{name}_1"))
    return Tensor(name, F32, dims, dims, role)


X, Y = tensor("x", Role.INPUT), tensor("y", Role.OUTPUT)
ADDS = Reduce((K, D), (ROW,), TOTAL, "sum", load(X, (R * 4 + K.symbol, D.symbol)))


def ends(*body: Node, branches: bool = True) -> tuple[Expr, LoopProgram]:
    """Where a loop over tiles of four positions ends, with these statements in it."""
    loop = For(R, LONG, SERIAL, body, LONG)
    inside = (Declare(TOTAL, 0.0), Declare(COUNT, 0.0), loop, Write((D,), (), Y, (C, D.symbol), held(TOTAL)))
    kernel = LoopKernel("p", (For(C, N, GRID, inside, N),))
    made = end_loops(LoopProgram("p", (kernel,), (X,), (Y,), (), (), (N, LONG)), branches=branches)
    (found,) = [n for n in nodes(made.kernels[0].body) if isinstance(n, For) and n.kind is SERIAL]
    return found.extent, made


def test_a_loop_ends_with_its_row() -> None:
    extent, _ = ends(ADDS)
    assert extent is minimum(LONG, (LENGTHS[C] + 3) // 4)


def test_a_loop_goes_on_for_what_something_else_feeds() -> None:
    feeds = Assign((D,), (), COUNT, call("add", held(COUNT), constant(1.0, F32), dtype=F32))
    assert ends(ADDS, feeds)[0] is LONG
    assert ends(ADDS, Write((D,), (), Y, (R, D.symbol), held(TOTAL)))[0] is LONG


def test_what_rests_with_the_row_does_not_keep_a_loop_going() -> None:
    rests = Assign((D,), (), COUNT, call("mul", held(COUNT), held(TOTAL), dtype=F32), ((ROW,),))
    assert ends(ADDS, rests)[0] is minimum(LONG, (LENGTHS[C] + 3) // 4)
    other = Less(R, N)
    fed_longer = Assign((D,), (), COUNT, call("mul", held(COUNT), held(TOTAL), dtype=F32), ((other,),))
    assert ends(ADDS, fed_longer)[0] is LONG


def test_rows_side_by_side_go_on_as_long_as_the_longest() -> None:
    side = Lane(symbol("s", 0, 1), 2)
    both = Local("both", F32, (side,))
    length = LENGTHS[C * 2 + side.symbol]
    adds = Reduce((side, K), (Less(R * 4 + K.symbol, length),), both, "sum", load(X, (R * 4 + K.symbol, C)))
    extent, made = ends(Declare(both, 0.0), adds)
    (longest,) = [n for n in nodes(made.kernels[0].body) if isinstance(n, Reduce) and n.operator == "max"]
    assert extent is minimum(LONG, (symbol(longest.local.name, 0) + 3) // 4)


def test_a_loop_starts_where_something_can_exist() -> None:
    own = Less(C * 4, R * 4 + K.symbol + 1)
    extent, made = ends(replace(ADDS, guard=(own,)))
    assert extent is LONG - C
    (adds,) = [n for n in nodes(made.kernels[0].body) if isinstance(n, Reduce)]
    assert adds.value is load(X, ((R + C) * 4 + K.symbol, D.symbol)) and adds.guard == (own.substitute({R: R + C}),)
    feeds = Assign((D,), (), COUNT, call("add", held(COUNT), constant(1.0, F32), dtype=F32))
    assert ends(replace(ADDS, guard=(own,)), feeds)[0] is LONG


def test_costly_parts_of_operands_are_computed_once_for_several_products() -> None:
    q = Lane(symbol("q", 0, 3), 4)
    scores, sums = Local("scores", F32, (D, q)), [Local(name, F32, (D, K)) for name in ("one", "other")]
    power = call("exp", held(scores), dtype=F32)
    products = [
        Dot((D, K, q), (Less(q.symbol, N),), sums[0], power, load(X, (q.symbol, K.symbol))),
        Dot((D, K, q), (Less(q.symbol, N),), sums[1], call("mul", power, power, dtype=F32), load(X, (q.symbol, K.symbol))),
    ]

    def shared(*body: Node) -> list[Node]:
        program = LoopProgram("p", (LoopKernel("p", body),), (X,), (Y,), (), (), (N,))
        return list(share_operands(program).kernels[0].body)

    (declared, computed, one, other) = shared(*products)
    assert isinstance(declared, Declare) and isinstance(computed, Assign) and computed.value is power
    assert computed.lanes == (D, q) and computed.guard == (Less(q.symbol, N),)
    assert isinstance(one, Dot) and one.left is held(computed.local)
    assert isinstance(other, Dot) and set(other.left.walk()) == {other.left, held(computed.local)}
    changed = Assign((D, q), (), scores, constant(0.0, F32))
    assert shared(products[0], changed, products[1]) == [products[0], changed, products[1]]


# --- maxima that are guessed -------------------------------------------------------------------------------------------------


def softmax(start: float, *, keeps: bool = False) -> serrate.Kernel:
    """Softmax statistics from a number of the user's own, and quotients; with `keeps`, the maximum is a result too."""

    @serrate.kernel
    def program(jt: JaggedTensor, tops: torch.Tensor) -> JaggedTensor:
        out = torch.empty_like(jt)
        for b, m in hl.tile([jt.num_rows, jt.size(2)]):
            top = hl.full([b, m], start)
            total = hl.zeros([b, m])
            for k in hl.tile(jt.max_length):
                x = jt[b, k, m]
                new = torch.maximum(top, x.amax(1))
                total = total * torch.exp(top - new) + torch.exp(x - new[:, None, :]).sum(1)
                top = new
            for k in hl.tile(jt.max_length):
                out[b, k, m] = torch.exp(jt[b, k, m] - top[:, None, :]) / total[:, None, :]
            if keeps:
                tops[b, m] = top
        return out

    return program


@pytest.mark.parametrize("start", [float("-inf"), 0.0, -1e4])
@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_a_kernel_guesses_its_maximum_and_it_never_shows(start: float, backend: str) -> None:
    # Below the start the kernel means something else than torch: e^(x - start) may be 0 everywhere.
    rows = {name: row for name, row in _rows((3,)).items() if start != 0.0 or name not in ("masked", "head masked")}
    finite = {name: row for name, row in rows.items() if not name.startswith("masked")}
    jt = JaggedTensor.from_list(list(finite.values()))
    kernel = softmax(start).on(backend)
    got = kernel(jt, torch.empty(len(finite), 3))
    (variant,) = kernel.variants(jt, torch.empty(len(finite), 3))
    assert "exp_near(" in variant.executable.source and "_far" in variant.executable.source
    for (name, row), mine in zip(finite.items(), got.unbind(), strict=True):
        torch.testing.assert_close(
            mine,
            torch.softmax(row.double(), 0).float(),
            rtol=TOLERANCE[F32],
            atol=TOLERANCE[F32],
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_a_maximum_that_is_a_result_is_not_guessed() -> None:
    jt, tops = JaggedTensor.from_list([torch.randn(40, 3), torch.randn(3, 3)]), torch.empty(2, 3)
    kernel = softmax(float("-inf"), keeps=True).on("cpp")
    kernel(jt, tops)
    assert torch.equal(tops, torch.stack([row.amax(0) for row in jt.unbind()]))
    (variant,) = kernel.variants(jt, tops)
    assert "height" not in variant.executable.source and "fn_exp_below" in variant.executable.source


M, T = Local("m", F32, (D,)), Local("t", F32, (D,))
AT: tuple[Symbol, Symbol] = (C, D.symbol)
POWER = call("exp", call("sub", load(X, AT), held(M), dtype=F32), dtype=F32)
SUMMED: tuple[Node, ...] = (Declare(T, 0.0), Reduce((D,), (), T, "sum", POWER))


def _log(x: Value) -> Value:
    return call("log", x, dtype=F32)


def _of(function: str, *args: Value) -> Value:
    return call(function, *args, dtype=torch.bool if function in ("gt", "eq") else F32)


ZERO, ONE = constant(0.0, F32), constant(1.0, F32)
SHIFTED: dict[str, tuple[Value, bool]] = {
    "a quotient": (_of("div", POWER, held(T)), True),
    "by the reciprocal": (_of("mul", POWER, _of("reciprocal", held(T))), True),
    "the logarithm of the sum": (_of("add", held(M), _log(held(T))), True),
    "a logarithm of a quotient": (_of("sub", _of("sub", load(X, AT), held(M)), _log(held(T))), True),
    "nothing where the sum is nothing": (_of("where", _of("gt", held(T), ZERO), _of("div", POWER, held(T)), ZERO), True),
    "no matter": (_of("sub", held(M), held(M)), True),
    "the maximum": (held(M), False),
    "the sum": (held(T), False),
    "twice the maximum": (_of("add", held(M), _of("add", held(M), _log(held(T)))), False),
    "a sum that is not empty": (_of("div", POWER, _of("maximum", held(T), constant(1e-6, F32))), False),
    "one more": (_of("div", POWER, _of("add", held(T), ONE)), False),
    "a square": (_of("div", _of("mul", POWER, POWER), held(T)), False),
    "whether the maximum is above a number": (_of("where", _of("gt", held(M), ONE), ONE, ZERO), False),
    "whether the maximum is above zero": (_of("where", _of("gt", held(M), ZERO), ONE, ZERO), False),
    "something else of it": (_of("tanh", held(M)), False),
}


@pytest.mark.parametrize("name", SHIFTED)
def test_what_depends_on_a_shift(name: str) -> None:
    value, same = SHIFTED[name]
    assert is_shift(M, (*SUMMED, Write((D,), (), Y, AT, value))) == same


@pytest.mark.parametrize("name", SHIFTED)
def test_the_answer_is_that_of_numbers(name: str) -> None:
    """The same by trying it: with another maximum, is the result another?"""
    value, same = SHIFTED[name]
    found = []
    for shift in (-1.5, 20.0):
        numbers: dict[object, torch.Tensor] = {M: torch.tensor(0.25 + shift), X: torch.tensor(-0.5)}
        numbers[T] = torch.exp(numbers[X] - numbers[M]) * 3
        found.append(_computed(value, numbers))
    assert torch.allclose(*found) == same


def _computed(value: Value, numbers: dict[object, torch.Tensor]) -> torch.Tensor:
    from serrate.codegen.reference import FUNCTIONS
    from serrate.ir.loops import Held, Load
    from serrate.ir.values import Call, Constant

    if isinstance(value, Held | Load):
        return numbers[value.local if isinstance(value, Held) else value.tensor]
    if isinstance(value, Constant):
        return torch.tensor(value.number)
    assert isinstance(value, Call)
    return FUNCTIONS[value.function](*(_computed(a, numbers) for a in value.args))


def test_a_block_that_is_read_along_another_lane_is_narrowed_along_the_others() -> None:
    """A result is stored along a lane of its own; that rows end is known of it all the same, so the loop over them ends there."""

    @serrate.kernel
    def k(x: JaggedTensor, w: torch.Tensor) -> JaggedTensor:
        out = torch.empty_like(x)
        for b in hl.grid(x.num_rows):
            for q in hl.tile(x.max_length):
                acc = hl.zeros([q, 8])
                for j in hl.tile(0, q.end):
                    acc = acc + (x[b, q] @ x[b, j].T) @ x[b, j] @ w
                out[b, q] = acc
        return out

    x, w = JaggedTensor.from_lengths(torch.randn(9, 8), [3, 0, 6]), torch.randn(8, 8)
    loops = str(k.on("reference").variants(x, w)[0].executable.program)
    end = next(line for line in loops.splitlines() if "serial qo <" in line)
    assert "_offsets0" in end, end


# --- selects by position ------------------------------------------------------------------------------------------------------


def test_concatenated_blocks_are_written_one_after_another(shown: Callable[[], list[str]]) -> None:
    with ir.Fusion("joined") as f:
        f.output(ops.relu(ops.cat([f.input((None, width), F32) for width in (2, 5, 1, 3)], 1)))
    parts = [torch.randn(3, width) for width in (2, 5, 1, 3)]
    want = torch.cat(parts, 1).relu()
    assert torch.equal(f.compile("reference", "maskless")(*parts), want)
    lines = [line for line in shown()[-1].split("\n") if "relu" in line]
    assert len(lines) == 4 and not any("where(" in line or " if " in line for line in lines), lines
    assert torch.equal(f.compile("cpp", "maskless")(*parts), want)


def test_pooled_rows_side_by_side_with_padding_between_them() -> None:
    with ir.Fusion("pooled") as f:
        x, offsets = f.input((None, 2), F32), f.input((None,), torch.int64)
        totals = ops.sum(ops.as_nested(x, offsets), 1)
        f.output(ops.cat([ops.pad(totals, 1, 1, 0, 7.0), totals, ops.pad(totals, 1, 0, 1, 8.0)], 1))
    x = torch.arange(6.0).reshape(3, 2)
    want = torch.tensor([[7.0, 2.0, 4.0, 2.0, 4.0, 2.0, 4.0, 8.0], [7.0, 4.0, 5.0, 4.0, 5.0, 4.0, 5.0, 8.0]])
    for backend in ("reference", "cpp"):
        assert torch.equal(f.compile(backend, "maskless")(x, torch.tensor([0, 2, 3])), want)


# --- gathers ----------------------------------------------------------------------------------------------------------------


def _bags(mode: str, width: int | None = 16, weighted: bool = False) -> ir.Fusion:
    with ir.Fusion("bags") as f:
        table, ids = f.input((9, width), F32), f.input((None,), torch.int64)
        offsets = f.input((None,), torch.int64)
        weights = ops.as_nested(f.input((None,), F32), offsets) if weighted else None
        f.output(ops.embedding_bag(ops.as_nested(ids, offsets), table, mode=mode, per_sample_weights=weights))
    return f


def test_indices_are_read_once_and_rows_are_prefetched(shown: Callable[[], list[str]]) -> None:
    bags = _bags("sum").compile("reference", "maskless")
    bags(torch.ones(9, 16), torch.tensor([8, 1, 0]), torch.tensor([0, 2, 3]))
    last = shown()[-1]
    lines = [line.strip() for line in last.split("kernel", 1)[1].split("\n")]
    ids = [line for line in lines if ":= T1[" in line]
    assert len(ids) == 2 and any("min(" in line and "n0 - 1" in line for line in ids), "this index, and a later one"
    assert any(line.startswith("[d1:16] prefetch T0[") for line in lines), lines
    assert sum("T0[" in line and "sum=" in line and " if " not in line for line in lines) == 1, (
        "the check is outside of the lanes"
    )
    assert not any("4096" in line for line in lines), "one loop over the bag"


def test_rows_that_are_narrow_stay_lanes(shown: Callable[[], list[str]]) -> None:
    _bags("sum", 4).compile("reference", "maskless")(torch.ones(9, 4), torch.tensor([8, 1, 0]), torch.tensor([0, 2, 3]))
    assert not any("prefetch" in text for text in shown())


@pytest.mark.parametrize("strategy", ["maskless", "masked", "persistent_dynamic"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gathered_rows_outside_the_table_are_zeros(strategy: str, mode: str) -> None:
    # Whole numbers, whose sums are exact in any order.
    table = torch.randint(-99, 100, (9, 16)).float()
    lengths = [0, 300, 1, 0, 7, 2]
    ids = torch.randint(-3, 12, (sum(lengths),))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.stack([table[i] if 0 <= i < 9 else torch.zeros(16) for i in ids.tolist()])
    bags = rows.double().split(lengths)
    want = torch.stack(
        [getattr(torch, {"max": "amax"}.get(mode, mode))(b, 0) if len(b) else torch.zeros(16) for b in bags]
    ).float()
    torch.testing.assert_close(_bags(mode).compile("cpp", strategy)(table, ids, offsets), want)


def test_a_weight_that_is_not_a_number_spoils_rows_outside_the_table_too() -> None:
    weights = torch.tensor([float("nan"), 2.0, float("inf")])
    found = _bags("sum", weighted=True).compile("cpp")(
        torch.ones(9, 16), torch.tensor([20, 1, 2]), torch.tensor([0, 1, 2, 3]), weights
    )
    assert found.isnan().any(1).tolist() == [True, False, False]
    assert found[:, 0].tolist()[1:] == [2.0, float("inf")]
