"""Under `batch_invariant` the bits of a row's result follow from that row alone.

In: rows that are computed alone, among others, in another order and on other numbers of threads. Out: a failure that names the
operator and the row whose bits differ.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import serrate
import serrate.language as hl
from serrate import JaggedTensor, ir, ops
from serrate.errors import InvarianceError, TraceError
from tests.language.test_examples import NAMES, example
from tests.oracle.operators import BINARY, REDUCTIONS, UNARY

pytestmark = pytest.mark.sampled(2)

WIDTH = 3
LENGTHS = (0, 1, 2, 3, 5, 7, 13, 67, 257, 1009, 4, 4, 4, 4, 4, 4, 4, 4, 60_000)
"""Of the rows that batches are made of; a batch with the last one is cut between workers, one of short rows has them as lanes."""
GIANT = len(LENGTHS) - 1
SHORT = tuple(range(10, 18))
BATCHES = (
    tuple(range(GIANT)),
    (GIANT, *range(GIANT)),
    tuple(reversed(range(GIANT + 1))),
    SHORT,
    (9,),
    (0, 8, 1),
    (3, GIANT),
    (GIANT,),
)


@functools.cache
def row(k: int, what: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The k-th row of a kind; always the same numbers."""
    generator = torch.Generator().manual_seed(k * 1000 + sum(map(ord, what)))
    return torch.randn(*shape, generator=generator).to(dtype)


def batch(rows: Sequence[int], what: str = "x", width: int | None = WIDTH, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    inner = () if width is None else (width,)
    return JaggedTensor.from_list([row(k, what, LENGTHS[k], *inner, dtype=dtype) for k in rows])


def bits(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    return torch.where(x.isnan(), torch.nan, x).contiguous().view(whole)


def rows_of(result: Any) -> list[list[torch.Tensor]]:
    """What each row of a batch got, of every result."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    parts = [[bits(p) for p in (r.unbind() if isinstance(r, JaggedTensor) else r)] for r in results]
    return [list(each) for each in zip(*parts, strict=True)]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Seen:
    """Bits of rows, compared with those that the same row had before."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.found: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def compare(self, rows: Sequence[int], results: list[list[torch.Tensor]], where: Any) -> None:
        assert len(results) == len(rows)
        for k, got in zip(rows, results, strict=True):
            before, wanted = self.found.setdefault(k, (where, got))
            for name, a, b in zip(self.names, wanted, got, strict=True):
                assert torch.equal(a, b), f"{name}: row {k} of {LENGTHS[k]} differs between {before} and {where}"


def check(names: Sequence[str], run: Callable[[Sequence[int]], list[list[torch.Tensor]]], batches: Any = BATCHES) -> None:
    seen = Seen(names)
    for rows in batches:
        for count in (1, 2):
            torch.set_num_threads(count)
            seen.compare(rows, run(rows), f"{rows} on {count} threads")


# --- operators ----------------------------------------------------------------------------------------------------------


def applicable(table: dict[str, Callable[..., Any]], *args: Any) -> dict[str, Callable[..., Any]]:
    found = {}
    for name, function in table.items():
        try:
            function(*args)
        except (RuntimeError, TypeError):
            continue
        found[name] = function
    return found


SAMPLE = torch.ones(4, WIDTH)
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: lambda a, _, f=f: f(a) for name, f in applicable(UNARY, SAMPLE).items()},
    **{name: lambda a, b, f=f: f(a, b) for name, f in applicable(BINARY, SAMPLE, SAMPLE).items()},
    **{
        f"{name} over {what}": lambda a, _, f=f, d=d: f(a, d)
        for name, f in applicable(REDUCTIONS, SAMPLE, 0).items()
        for d, what in ((1, "positions"), (2, "features"))
    },
    "layer_norm of features": lambda a, _: F.layer_norm(a, (WIDTH,)),
    "normalised rows": lambda a, _: (a - a.mean(1, keepdim=True)) * torch.rsqrt(a.var(1, keepdim=True) + 1e-5),
    "both dims": lambda a, b: (a * b).sum((1, 2)),
    "by a matrix": lambda a, _: a @ WEIGHT.to(a.dtype),
    "gram matrix": lambda a, b: torch.matmul(a.transpose(1, 2), b),
    "centred and scaled": lambda a, b: torch.softmax(a * b, 1) * a.sum(1, keepdim=True),
    "flipped": lambda a, _: torch.flip(a, (1,)),
    "first positions": lambda a, _: a[:, :2],
}
WEIGHT = torch.linspace(-1, 1, WIDTH * 5).reshape(WIDTH, 5)
UNSUPPORTED = ("sort", "topk")
"""By rows, and what is not in traced functions."""


def groups(size: int) -> list[list[str]]:
    names = [n for n in OPERATORS if not n.startswith(UNSUPPORTED)]
    return [names[k : k + size] for k in range(0, len(names), size)]


def flat(result: Any) -> list[Any]:
    return [x for each in result for x in (each if isinstance(each, tuple) else (each,))]


def parts_of(names: list[str]) -> list[str]:
    """The name of an operator for each of its results."""
    one = torch.ones(1, 4, WIDTH)
    return [name for name in names for _ in flat([OPERATORS[name](one, one)])]


def checked(names: list[str], dtype: torch.dtype, batches: Any = BATCHES) -> None:
    @serrate.jit
    def program(a: JaggedTensor, b: JaggedTensor) -> Any:
        return tuple(flat(OPERATORS[name](a, b) for name in names))

    def run(rows: Sequence[int]) -> list[list[torch.Tensor]]:
        a = batch(rows, dtype=dtype)
        return rows_of(program(a, a.with_values(torch.cat([row(k, "y", LENGTHS[k], WIDTH, dtype=dtype) for k in rows]))))

    check(parts_of(names), run, batches)


GROUPS = [(names, dtype) for names in groups(24) for dtype in (torch.float32, torch.bfloat16)]
QUICK = {("nansum over features", torch.float32), ("log_softmax over features", torch.bfloat16)}
"""First names of the groups that are not slow."""


@pytest.mark.parametrize(
    ("names", "dtype"),
    [pytest.param(*g, id=f"{g[0][0]} {g[1]}", marks=() if (g[0][0], g[1]) in QUICK else pytest.mark.slow) for g in GROUPS],
)
def test_operators(names: list[str], dtype: torch.dtype, threads: None) -> None:
    with serrate.batch_invariant():
        checked(names, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for group in groups(24) for n in group if n != "gram matrix"])
def test_eager_operators(name: str, threads: None) -> None:
    def run(rows: Sequence[int]) -> list[list[torch.Tensor]]:
        a = batch(rows)
        return rows_of(flat([OPERATORS[name](a, a.with_values(batch(rows, "y").values))]))

    with serrate.batch_invariant():
        check(parts_of([name]), run)


STATISTICS = {
    "sum": serrate.jit(lambda a: a.sum(1)),
    "softmax": serrate.jit(lambda a: torch.softmax(a, 1)),
}
CUT = ((GIANT,), (GIANT,) * 65)
"""Without the mode, the long row is cut between workers where it is a large share of all, and else stays whole."""


def _statistics(rows: Sequence[int]) -> list[list[torch.Tensor]]:
    return rows_of(tuple(f(batch(rows)) for f in STATISTICS.values()))


def test_a_row_that_is_all_there_is_and_one_of_many(threads: None) -> None:
    with serrate.batch_invariant():
        check(list(STATISTICS), _statistics, CUT)


def test_without_the_mode_a_row_may_differ(threads: None) -> None:
    """That the tests above can fail."""
    with pytest.raises(AssertionError, match=f"row {GIANT} of {LENGTHS[GIANT]} differs between"):
        check(list(STATISTICS), _statistics, CUT)


@pytest.mark.parametrize(("backend", "strategy"), [("cpp", "persistent_dynamic"), ("reference", None), ("triton", None)])
def test_other_plans_and_backends(backend: str, strategy: str | None, threads: None) -> None:
    program = serrate.jit(lambda a: (torch.softmax(a, 1), a.sum(1), a @ WEIGHT), backend=backend, strategy=strategy)
    batches = ((GIANT,), (9, GIANT, 8), (8, 9)) if backend == "cpp" else ((7,), (7, 6, 0), (6, 7, *SHORT))
    with serrate.batch_invariant():
        check(("softmax", "sum", "product"), lambda rows: rows_of(program(batch(rows))), batches)


@serrate.jit
def _several(a: JaggedTensor, table: torch.Tensor) -> Any:
    scores = torch.softmax(a * table, 1)
    return scores, (scores * a).sum(1), torch.logsumexp(a @ WEIGHT, 1), a.mean((1, 2))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, GIANT), min_size=1, max_size=12), st.sampled_from([1, 2]))
def test_random_batches(rows: list[int], count: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    with serrate.batch_invariant():
        tables = torch.stack([row(k, "table", 1, WIDTH) for k in rows])
        _RANDOM.compare(rows, rows_of(_several(batch(rows), tables)), f"{rows} on {count} threads")
    torch.set_num_threads(before)


_RANDOM = Seen(("softmax", "weighted sum", "logsumexp of a product", "mean"))


# --- the mode -----------------------------------------------------------------------------------------------------------


def _strategy(f: Any, x: JaggedTensor) -> str:
    return f.plan(x).strategy  # type: ignore[no-any-return]


def test_the_mode_is_of_the_block_and_of_the_thread() -> None:
    total = serrate.jit(lambda a: a.sum(1))
    giant = batch((GIANT,))
    assert _strategy(total, giant) == "persistent_dynamic"
    with serrate.batch_invariant():
        assert _strategy(total, giant) == "maskless"
        with serrate.batch_invariant(False):
            assert _strategy(total, giant) == "persistent_dynamic"
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(_strategy(total, giant)))
        thread.start()
        thread.join()
        assert seen == ["persistent_dynamic"] and _strategy(total, giant) == "maskless"
    assert _strategy(total, giant) == "persistent_dynamic"
    with pytest.raises(KeyError), serrate.batch_invariant():
        raise KeyError
    assert _strategy(total, giant) == "persistent_dynamic"


def test_as_a_decorator() -> None:
    total = serrate.jit(lambda a: a.sum(1))

    @serrate.batch_invariant()
    def chosen(x: JaggedTensor, again: bool = True) -> str:
        """Doc."""
        return chosen(x, False) if again else _strategy(total, x)

    assert chosen(batch((GIANT,))) == "maskless" and chosen.__doc__ == "Doc."


def test_a_traced_function_does_not_change_the_mode() -> None:
    @serrate.jit
    def inside(a: JaggedTensor) -> Any:
        with serrate.batch_invariant():
            return a.sum(1)

    with pytest.raises(TraceError, match="put it around the call, or decorate the function with it above"):
        inside(batch((3,)))


def test_rows_that_are_computed_together_are_refused() -> None:
    x = batch((3, 5))
    masked = serrate.jit(lambda a: a.sum(1), strategy="masked")
    whole = serrate.jit(lambda a: a.sum(1), strategy="persistent_dynamic")
    masked(x)
    with serrate.batch_invariant():
        with pytest.raises(InvarianceError, match=r"masked may compute several rows together.*maskless, persistent_dynamic"):
            masked(x)
        whole(x)
    with ir.Fusion("scheduled") as f:
        values, offsets = f.input((None, WIDTH), torch.float32), f.input((None,), torch.int64)
        y = ops.sum(ops.as_nested(values, offsets), 1)
        f.output(y)
    y.split(0, 2)
    program = f.compile()
    program(x.values, x.offsets)
    with serrate.batch_invariant(), pytest.raises(InvarianceError, match="scheduled: by_hand may compute several rows together"):
        program(x.values, x.offsets)


def test_reductions_over_rows_are_allowed() -> None:
    x = batch((3, 5, 9))
    with serrate.batch_invariant():
        torch.testing.assert_close(x.sum((0, 1)), x.values.sum(0))


# --- kernels ------------------------------------------------------------------------------------------------------------


@serrate.kernel
def weighted(x: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.num_rows)
    for b in hl.tile(x.num_rows):
        total = hl.zeros([b])
        for at in hl.tile(dense.size(1)):
            total = total + (x[b, at] * dense[b, at]).sum(1)
        out[b] = total
    return out


@serrate.kernel
def softmax_rows(x: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(x)
    for b in hl.tile(x.num_rows):
        top, total = hl.full([b], float("-inf")), hl.zeros([b])
        for at in hl.tile(x.max_length):
            new = torch.maximum(top, x[b, at].amax(1))
            total = total * torch.exp(top - new) + torch.exp(x[b, at] - new[:, None]).sum(1)
            top = new
        for at in hl.tile(x.max_length):
            out[b, at] = torch.exp(x[b, at] - top[:, None]) / total[:, None]
    return out


def _kernels(rows: Sequence[int]) -> list[list[torch.Tensor]]:
    x = batch(rows, width=None)
    longest = max(LENGTHS[k] for k in rows)
    dense = torch.stack([row(k, "dense", max(LENGTHS))[:longest] for k in rows])
    return rows_of((weighted(x, dense), softmax_rows(x)))


KERNEL_BATCHES = ((9,), (7, 8), (9, GIANT), (GIANT,), tuple(range(GIANT)), (5, 9, 0), (GIANT,) * 9)


def test_kernels(threads: None) -> None:
    """Also where the width of a dense operand is the length of the longest row."""
    with serrate.batch_invariant():
        check(("weighted", "softmax"), _kernels, KERNEL_BATCHES)


@serrate.kernel
def crossed(x: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.num_rows)
    for b in hl.tile(x.num_rows):
        total = hl.zeros([b])
        for at, other in hl.tile([x.max_length, dense.size(1)]):
            total = total + (x[b, at][:, :, None] * dense[b, other][:, None, :]).sum([1, 2])
        out[b] = total
    return out


def test_there_is_one_plan() -> None:
    """Of a kernel whatever the width of a table is, which may be the length of the longest row."""
    several = serrate.jit(lambda a: (torch.softmax(a, 1), a.sum(1)))
    plans: set[str] = set()
    tiles: set[str] = set()
    with serrate.batch_invariant():
        for rows in (*BATCHES, (GIANT, 9)):
            plans.add(str(several.plan(batch(rows))))
            longest = max(LENGTHS[k] for k in rows)
            if longest > 1:
                explained = crossed.explain(batch(rows, width=None), torch.ones(len(rows), longest)).stages[0].plan
                # Statements may name sizes; the strategy and the loops are the plan.
                loops = ("grid ", "serial ", "lanes ")
                tiles.add("\n".join([explained[0], *(line for line in explained if line.lstrip().startswith(loops))]))
    assert len(plans) == len(tiles) == 1


def test_kernels_that_cannot_promise_are_refused() -> None:
    @serrate.kernel
    def scattered(x: JaggedTensor, out: torch.Tensor) -> None:
        for b in hl.tile(x.num_rows):
            for at in hl.tile(x.max_length):
                hl.atomic_add(out, [at], x[b, at].sum(0))

    x = batch((3, 5), width=None)
    scattered(x, torch.zeros(8))
    with serrate.batch_invariant():
        scattered(x.with_values(torch.ones(len(x.values), dtype=torch.int64)), torch.zeros(8, dtype=torch.int64))
        with pytest.raises(InvarianceError, match=r"scattered: hl.atomic_add to out \(torch.float32\) adds in an order"):
            scattered(x, torch.zeros(8))
        masked = serrate.kernel(strategy="masked")(softmax_rows.fn)
        with pytest.raises(InvarianceError, match="softmax_rows: masked may compute several rows together"):
            masked(x)
    masked(x)


Made = tuple[str, Callable[[], Any]]
"""A kernel of an example by name, and its call; the result is as `rows_of` takes it."""


def _of(rows: Sequence[int], what: str, *inner: int) -> JaggedTensor:
    return JaggedTensor.from_list([row(k, what, LENGTHS[k], *inner) for k in rows])


def _cut(values: torch.Tensor, like: JaggedTensor) -> JaggedTensor:
    return like.with_values(values)


def _grouped_gemm(m: Any, rows: Sequence[int]) -> list[Made]:
    a, shared = _of(rows, "a", 6), row(0, "shared", 6, 5)
    own = torch.stack([row(k, "own", 6, 5) for k in rows])
    return [
        ("jagged", lambda: m.jagged(a, shared)),
        ("manual", lambda: _cut(m.manual(a.values, shared, a.offsets), a)),
        ("manual_persistent", lambda: _cut(m.manual_persistent(a.values, shared, a.offsets), a)),
        ("jagged_per_group", lambda: m.jagged_per_group(a, own)),
    ]


def _dense_add(m: Any, rows: Sequence[int]) -> list[Made]:
    x, width = _of(rows, "x"), max(LENGTHS[k] for k in rows) + 2
    dense = torch.stack([row(k, "dense", max(LENGTHS) + 2)[:width] for k in rows])

    def own(result: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[each[: LENGTHS[k] + 2] for k, each in zip(rows, result, strict=True)]]

    return [
        ("jagged", lambda: own(m.jagged(x, dense))),
        ("manual", lambda: own(m.manual(x.values, x.offsets, dense))),
    ]


def _dense_bmm(m: Any, rows: Sequence[int]) -> list[Made]:
    x = _of(rows, "x", 5)
    dense, bias = torch.stack([row(k, "dense", 5, 4) for k in rows]), torch.stack([row(k, "bias", 4) for k in rows])
    return [
        ("jagged", lambda: m.jagged(x, dense, bias)),
        ("manual", lambda: _cut(m.manual(x.offsets, x.values, dense, bias), x)),
    ]


def _flash_attention(m: Any, rows: Sequence[int]) -> list[Made]:
    q, k, v = _of(rows, "q", 4), _of(rows, "k", 4), _of(rows, "v", 3)
    k, v = q.with_values(k.values), q.with_values(v.values)
    return [("causal", lambda: m.jagged(q, k, v, True)), ("not causal", lambda: m.jagged(q, k, v, False))]


def _hstu_attention(m: Any, rows: Sequence[int]) -> list[Made]:
    q, k, v = (_of(rows, what, 2, 4) for what in "qkv")
    k, v = q.with_values(k.values), q.with_values(v.values)
    most = 2048
    return [
        ("jagged", lambda: m.jagged(q, k, v, 0.5, 1 / most)),
        ("manual", lambda: _cut(m.manual(most, 0.5, q.values, k.values, v.values, q.offsets), q)),
    ]


def _values_and_offsets(width: int | None) -> Callable[[Any, Sequence[int]], list[Made]]:
    def made(m: Any, rows: Sequence[int]) -> list[Made]:
        x = _of(rows, "x", *(() if width is None else (width,)))

        def manual() -> Any:
            result = m.manual(x.values, x.offsets)
            return result if len(result) == len(rows) and len(result) != len(x.values) else _cut(result, x)

        return [("jagged", lambda: m.jagged(x)), ("manual", manual)]

    return made


def _mean(m: Any, rows: Sequence[int]) -> list[Made]:
    features = torch.tensor([1 + k % 4 for k in rows])
    most = int(features.max())
    structure = serrate.Structure.from_lengths(torch.tensor([LENGTHS[k] for k in rows])).with_columns(features, packed=False)
    x = JaggedTensor(torch.cat([row(k, "x", LENGTHS[k], 4)[:, :most] for k in rows]), structure)
    offsets = torch.tensor([0, *torch.tensor([LENGTHS[k] for k in rows]).cumsum(0).tolist()])

    def own(result: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[each[: 1 + k % 4] for k, each in zip(rows, result, strict=True)]]

    return [
        ("jagged", lambda: own(m.jagged(x, most))),
        ("manual", lambda: own(m.manual(x.values, offsets, features, most))),
    ]


def _moe_matmul(m: Any, rows: Sequence[int]) -> list[Made]:
    lengths = [LENGTHS[k] for k in rows]
    a, w = torch.cat([row(k, "a", LENGTHS[k], 6) for k in rows]), torch.stack([row(k, "w", 6, 5) for k in rows])
    tokens = JaggedTensor.from_lengths(torch.arange(sum(lengths)), lengths)
    return [
        ("jagged", lambda: _cut(m.jagged(a, w, tokens), tokens)),
        ("manual", lambda: _cut(m.manual(a, w, tokens.lengths, tokens.offsets, tokens.values, tokens.max_length), tokens)),
    ]


EXAMPLES: dict[str, Callable[[Any, Sequence[int]], list[Made]]] = {
    "grouped_gemm": _grouped_gemm,
    "jagged_dense_add": _dense_add,
    "jagged_dense_bmm": _dense_bmm,
    "jagged_flash_attention": _flash_attention,
    "jagged_hstu_attention": _hstu_attention,
    "jagged_layer_norm": _values_and_offsets(4),
    "jagged_mean": _mean,
    "jagged_softmax": _values_and_offsets(4),
    "jagged_sum": _values_and_offsets(4),
    "moe_matmul": _moe_matmul,
}
EXAMPLE_BATCHES = ((7,), (8, 7, 0), (1, 8, 7, *SHORT, 6))
LONG_BATCHES = (*EXAMPLE_BATCHES, (8, GIANT, 7), (GIANT,))
LONG = ("jagged_layer_norm", "jagged_mean", "jagged_softmax", "jagged_sum")


@pytest.mark.parametrize("name", NAMES)
def test_example_kernels(name: str, threads: None) -> None:
    module, made = example(name), EXAMPLES[name]
    kernels = [which for which, _ in made(module, (7,))]

    def run(rows: Sequence[int]) -> list[list[torch.Tensor]]:
        results = [rows_of(call()) for _, call in made(module, rows)]
        return [[part for each in of_row for part in each] for of_row in zip(*results, strict=True)]

    with serrate.batch_invariant():
        check(kernels, run, LONG_BATCHES if name in LONG else EXAMPLE_BATCHES)
