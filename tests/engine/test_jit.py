"""`serrate.jit`: what is traced and when, what is read anew at every call, and what cannot be traced.

In: functions over ragged tensors that use what is around them. Out: failures against plain torch, row by row. On the reference
backend: nothing here is about code.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from serrate import JaggedTensor, Structure, jit, ops, settings
from serrate.api.eager import FEW
from serrate.api.jit import KINDS
from serrate.errors import CallError, ShapeError, StructureError, TraceError
from serrate.runtime.dispatch import BINDINGS
from serrate.runtime.launch import ReferenceExecutable

pytestmark = pytest.mark.usefixtures("reference")

LENGTHS = [3, 0, 5, 2]
GLOBAL, FACTOR = torch.full((4,), 2.0), 3.0


def rows(lengths: list[int] = LENGTHS, dtype: torch.dtype = torch.float32, width: int = 4) -> JaggedTensor:
    generator = torch.Generator().manual_seed(len(lengths))
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), width, generator=generator).to(dtype), lengths)


def counted(function: Callable[..., Any]) -> tuple[Any, list[int]]:
    """A function that is traced, and a list that grows by one at every trace."""
    traces: list[int] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return function(*args, **kwargs)

    return jit(run), traces


# --- when it is traced -----------------------------------------------------------------------------------------------------


def test_tensors_padded_to_the_longest_row_are_not_traced_for() -> None:
    function, traced = counted(lambda x, dense: x.to_padded() + dense)
    for lengths in ([3, 0, 5, 2], [1, 9, 2, 2], [7, 1], [11, 0, 0]):
        x = rows(lengths)
        dense = torch.randn(len(lengths), max(lengths), 4)
        torch.testing.assert_close(function(x, dense), x.to_padded() + dense)
    # The first may be chance; the second, of another length, is not.
    assert len(traced) == 2


def test_a_weight_as_large_as_a_table_of_the_rows() -> None:
    function, traced = counted(lambda x, w: (x @ w) * w.shape[1] ** -0.5)
    w = torch.randn(4, 4)
    for lengths in ([4, 1, 2, 2], [3, 0, 2, 1], [4, 0, 0, 0]):
        x = rows(lengths)
        for got, row in zip(function(x, w), x, strict=True):
            torch.testing.assert_close(got, (row @ w) * 0.5)
    assert len(traced) == 1


def test_one_weight_used_twice() -> None:
    x, w = rows(), torch.randn(4, 4)
    got = jit(lambda x, w: nn.functional.linear(torch.relu(nn.functional.linear(x, w)), w))(x, w)
    torch.testing.assert_close(got.values, torch.relu(x.values @ w.T) @ w.T)


def test_features_as_many_as_the_longest_row_has_positions() -> None:
    x = rows([4, 1, 2])
    bias = torch.randn(3, 4)
    got = jit(lambda x, bias: x + bias.unsqueeze(1))(x, bias)
    for row, mine, own in zip(x, got, bias, strict=True):
        torch.testing.assert_close(mine, row + own)


def test_lengths_and_numbers_of_rows_are_not_traced_for() -> None:
    f, traces = counted(lambda x: torch.softmax(x, 1))
    for lengths in ([3, 0, 5, 2], [1], [], [0, 0], [7, 7, 7, 7, 7, 7]):
        jt = rows(lengths)
        for got, row in zip(f(jt).unbind(), jt.unbind(), strict=True):
            torch.testing.assert_close(got, row.softmax(0))
    assert len(traces) == 1


def test_kinds_of_arguments_are_traced_for() -> None:
    f, traces = counted(lambda x, y, scale=1: x + y * scale)
    jt = rows()
    other = JaggedTensor.from_lengths(jt.values * 2, LENGTHS)
    calls: list[tuple[Any, ...]] = [
        (jt, jt),
        (jt, other),
        (jt.double(), jt),
        (rows(width=1), rows(width=1)),
        (jt, torch.ones(4)),
        (jt, torch.ones(4), 2),
        (jt, torch.ones(4), 2.0),
        (JaggedTensor.from_lengths(jt.values, [[3, 0], [5, 2]]), 1.0),
        (jt.values, torch.ones(4)),
    ]
    for k, call in enumerate(calls, 1):
        f(*call)
        f(*call)
        assert len(traces) == k - (k > 1), "structures that are equal by value are the same structure"


def test_results_of_every_form() -> None:
    @jit
    def f(x: Any) -> dict[str, Any]:
        return {"rows": [x * 2, x.sum(1)], "extrema": torch.max(x, -1), "same": x}

    jt = rows()
    got = f(jt)
    assert isinstance(got["rows"][0], JaggedTensor) and isinstance(got["rows"][1], Tensor)
    assert torch.equal(got["extrema"].values.values, jt.values.amax(-1))
    assert torch.equal(got["extrema"].indices.values, jt.values.argmax(-1))
    assert torch.equal(got["same"].values, jt.values)


def test_shapes_decide_and_data_does_not() -> None:
    def by_shape(x: Any) -> Any:
        return x * 2 if x.shape[-1] == 4 and x.ndim == 3 and x.dtype == torch.float32 else x

    assert torch.equal(jit(by_shape)(rows()).values, rows().values * 2)
    assert torch.equal(jit(by_shape)(rows(width=2)).values, rows(width=2).values)

    def by_data(x: Any) -> Any:
        if x.sum() > 0:
            return x
        return -x

    line = by_data.__code__.co_firstlineno + 1
    with pytest.raises(TraceError, match=rf"a branch on data cannot be traced, .* \(.*test_jit\.py:{line}: if x\.sum\(\) > 0:"):
        jit(by_data)(rows())
    for use in (lambda x: float(x.sum()), list, lambda x: len(x)):
        with pytest.raises(TraceError, match=r"test_jit\.py:\d+"):
            jit(use)(rows())


def test_errors_name_the_line() -> None:
    def wrong(x: Any) -> Any:
        y = x * 2
        return y.sum(7)

    with pytest.raises(ShapeError, match="sum: dim 7 does not exist") as told:
        jit(wrong)(rows())
    line = wrong.__code__.co_firstlineno + 2
    assert any(f"test_jit.py:{line}: return y.sum(7)" in note for note in told.value.__notes__)


# --- what is outside -----------------------------------------------------------------------------------------------------


def test_tensors_that_are_closed_over_are_read_at_every_call() -> None:
    weight, shift = torch.full((4,), 2.0), rows()

    def function(x: Any) -> Any:
        return weight * x + shift

    f, jt = jit(function), shift
    assert torch.equal(f(jt).values, jt.values * 2 + jt.values)
    weight.fill_(5.0)
    assert torch.equal(f(jt).values, jt.values * 5 + jt.values), "changed in place"
    weight = torch.full((4,), 7.0)
    assert torch.equal(f(jt).values, jt.values * 7 + jt.values), "another tensor under the same name"
    weight = torch.full((1,), 3.0, dtype=torch.float64)
    assert f(jt).dtype == torch.float64, "of another kind"


def test_an_argument_that_is_also_outside_stays_an_argument() -> None:
    outside = torch.full((4,), 2.0)
    f = jit(lambda x, w: x * w + outside)
    jt = rows()
    assert torch.equal(f(jt, outside).values, jt.values * 2 + 2)
    assert torch.equal(f(jt, torch.full((4,), 3.0)).values, jt.values * 3 + 2)


def test_numbers_that_are_closed_over_are_traced_for() -> None:
    scale = 2.0

    def function(x: Any) -> Any:
        return x * scale

    f, jt = jit(function), rows()
    assert torch.equal(f(jt).values, jt.values * 2)
    scale = 3.0
    assert torch.equal(f(jt).values, jt.values * 3)


def test_global_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def helper(x: Any) -> Any:
        return x * GLOBAL

    f, jt = jit(lambda x: helper(x) + FACTOR), rows()
    assert torch.equal(f(jt).values, jt.values * 2 + 3)
    monkeypatch.setitem(globals(), "GLOBAL", torch.full((4,), 4.0))
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert torch.equal(f(jt).values, jt.values * 4 + 5)


def test_what_is_done_to_tensors_outside_is_done_anew() -> None:
    weight = torch.randn(3, 4)
    f, jt = jit(lambda x: x @ weight.T * weight.sum() + torch.arange(3)), rows()
    for _ in range(2):
        torch.testing.assert_close(f(jt).values, jt.values @ weight.T * weight.sum() + torch.arange(3))
        weight.mul_(2)


def test_operations_of_our_own_take_them_too() -> None:
    weight, jt = torch.randn(4), rows()
    got = jit(lambda x: ops.layer_norm(x, (1, 2), weight))(jt)
    for piece, row in zip(got.unbind(), jt.unbind(), strict=True):
        if len(row):
            torch.testing.assert_close(piece, nn.functional.layer_norm(row, tuple(row.shape)) * weight, rtol=1e-4, atol=1e-4)


def test_random_numbers_and_unknown_tensors_are_refused() -> None:
    with pytest.raises(TraceError, match=r"random numbers drawn while tracing .*test_jit\.py"):
        jit(lambda x: x + torch.randperm(4))(rows())
    weight = torch.randn(3, 4)
    with pytest.raises(TraceError, match=r"svd of a tensor that is not an argument cannot be traced"):
        jit(lambda x: x @ torch.linalg.svd(weight)[2].T)(rows())
    with pytest.raises(CallError, match=r"torch.special.bessel_j0 is not supported in a traced function \(.*test_jit\.py"):
        jit(torch.special.bessel_j0)(rows())
    with pytest.raises(CallError, match=r"exp got an unexpected keyword argument 'out'; it takes input"):
        jit(lambda x: torch.exp(x, out=weight))(rows())
    hidden = rows()
    with pytest.raises(
        TraceError, match=r"is neither an argument nor reachable from the function.s closure, globals or attributes"
    ):
        jit(lambda x: x + hidden.values[0])(rows())


def test_what_is_made_while_tracing_does_not_pile_up() -> None:
    f, traces = counted(lambda x: x * torch.eye(4)[0])
    for _ in range(3):
        f(rows())
        f(rows(dtype=torch.float64))
    assert len(traces) == 2


class Scaled(nn.Module):
    """A module whose method is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.power = 2

    @jit
    def forward(self, x: Any) -> Any:
        return self.inner(x) * self.weight**self.power


def plainly(module: Scaled, jt: JaggedTensor) -> Tensor:
    found: Tensor = module.inner(jt.values) * module.weight**module.power
    return found


def test_methods_and_parameters() -> None:
    jt = rows()
    first, second = Scaled().eval(), Scaled().eval()
    with torch.no_grad():
        for module in (first, second, first):
            torch.testing.assert_close(module(jt).values, plainly(module, jt))
        first.weight.mul_(3)
        first.inner[0].bias.zero_()
        torch.testing.assert_close(first(jt).values, plainly(first, jt))
        second.weight = nn.Parameter(torch.full((4,), 9.0))
        second.power = 3
        torch.testing.assert_close(second(jt).values, plainly(second, jt), rtol=1e-4, atol=1e-4)
        # Whether a module trains is part of what it is traced for.
        assert not second.train()(jt).values.all() and second.eval()(jt).values.all()
    assert first(jt).requires_grad
    gone = weakref.ref(second)
    del second, module
    gc.collect()
    assert gone() is None, "a method does not keep its object"


def test_modules_partials_and_bound_methods() -> None:
    jt, module = rows(), Scaled().eval()
    with torch.no_grad():
        torch.testing.assert_close(jit(module)(jt).values, plainly(module, jt))
        torch.testing.assert_close(jit(nn.Linear(4, 2))(jt).values.shape, torch.Size([10, 2]))
        torch.testing.assert_close(jit(module.inner.forward)(jt).values, module.inner(jt.values))

    def scaled(x: Any, w: Any, power: int) -> Any:
        return x * w**power

    weight = torch.randn(4)
    f = jit(functools.partial(scaled, w=weight, power=2))
    torch.testing.assert_close(f(jt).values, jt.values * weight**2)
    weight.zero_()
    assert not f(jt).values.any()


def test_a_module_as_an_argument() -> None:
    f, jt = jit(lambda module, x: module(x)), rows()
    with torch.no_grad():
        for _ in range(2):
            layer = nn.Linear(4, 3)
            torch.testing.assert_close(f(layer, jt).values, layer(jt.values))
            torch.testing.assert_close(f(layer, jt).values, layer(jt.values))


def test_traced_functions_call_each_other() -> None:
    weight = torch.randn(4)

    @jit
    def inner(x: Any) -> Any:
        return x * weight

    outer, jt = jit(lambda x: inner(x).sum(1)), rows()
    torch.testing.assert_close(outer(jt)[2], (jt[2] * weight).sum(0))
    assert len(outer.plan(jt).steps) > 0


def test_a_fusion_takes_no_tensors() -> None:
    from serrate import ir

    with ir.Fusion() as f:
        x = f.input((None,), torch.float32)
        with pytest.raises(CallError, match="make it an input of the fusion"):
            x + torch.ones(3)
        f.output(ops.exp(x))


def test_slots_without_weak_references_are_told() -> None:
    class Small:
        __slots__ = ()

        @jit
        def f(self, x: Any) -> Any:
            return x

    with pytest.raises(CallError, match="give it a __weakref__ slot"):
        Small().f(rows())


def test_wrapped_functions_keep_their_names() -> None:
    @jit
    def centered(x: Any) -> Any:
        """Less the mean."""
        return x - x.mean(1, keepdim=True)

    assert centered.__name__ == "centered" and centered.__doc__ == "Less the mean."
    assert "centered" in centered.source(rows())


def test_zeros_of_both_signs_are_different_numbers_outside() -> None:
    jt = JaggedTensor.from_lengths(torch.ones(3), [2, 1])
    scale = 0.0
    scaled = jit(lambda x: x * scale)
    assert not scaled(jt).values.signbit().any()
    scale = -0.0
    assert scaled(jt).values.signbit().all()


def test_offsets_that_are_written_to_are_read_again() -> None:
    values, offsets = torch.arange(12.0), torch.tensor([0, 2, 2, 12])
    jt = JaggedTensor.from_csr(values, offsets)
    both = jit(lambda x: (x * 2, x.sum(1)))
    for boundaries in ([0, 2, 2, 12], [0, 5, 6, 12], [0, 0, 12, 12]):
        offsets.copy_(torch.tensor(boundaries))
        rows = [values[a:b] for a, b in itertools.pairwise(boundaries)]
        doubled, totals = both(jt)
        assert doubled.tolist() == (jt + jt).tolist() == [(row * 2).tolist() for row in rows]
        assert totals.tolist() == jt.sum(1).tolist() == [row.sum().item() for row in rows]
    offsets.copy_(torch.tensor([0, 9, 3, 12]))
    for call in (both, lambda x: x.sum(1)):
        with pytest.raises(StructureError, match="must not decrease"):
            call(jt)


def test_zeros_of_both_signs_are_different_arguments() -> None:
    jt = JaggedTensor.from_lengths(torch.ones(3), [2, 1])
    scaled = jit(lambda x, scale: x * scale)
    for _ in range(2):
        assert not scaled(jt, 0.0).values.signbit().any()
        assert scaled(jt, -0.0).values.signbit().all()


def test_dense_arguments_of_other_dtypes() -> None:
    jt = JaggedTensor.from_lengths(torch.arange(3.0), [2, 1])
    added = jit(lambda x, y: x + y)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool, torch.float32):
        by = torch.tensor([[1], [2]]).to(dtype)
        want = jt.values + by.flatten()[[0, 0, 1]]
        got = added(jt, by).values
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_kinds_of_arguments_are_not_kept_for_ever() -> None:
    jt = JaggedTensor.from_lengths(torch.ones(3), [2, 1])
    scaled = jit(lambda x, scale: x * scale)
    for k in (*range(KINDS + 10), 0):
        assert scaled(jt, k).tolist() == [[k, k], [k]]
    assert all(len(state.kinds) <= KINDS and len(state.bindings) <= BINDINGS for state in scaled._fast.states)


def test_a_backend_that_is_asked_for_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    jt = JaggedTensor.from_lengths(torch.ones(3), [2, 1])
    total = jit(lambda x: x.sum(1))
    ran: list[str] = []
    run = ReferenceExecutable.__call__
    monkeypatch.setattr(ReferenceExecutable, "__call__", lambda self, *args: (ran.append("reference"), run(self, *args))[1])
    for backend, times in (("reference", 1), ("cpp", 1), ("reference", 2)):
        monkeypatch.setenv("SERRATE_BACKEND", backend)
        settings.reload()
        assert total(jt).tolist() == [2, 1]
        assert len(ran) == times


def test_rows_that_are_equal_and_told_in_different_ways() -> None:
    """By offsets, and by where each starts: they share no tensors, although they are the same rows in the same places."""
    values = torch.arange(7.0)
    one = JaggedTensor(values, Structure.from_offsets(torch.tensor([0, 3, 3, 7])))
    other = JaggedTensor(values * 10, Structure.from_starts(torch.tensor([0, 3, 3]), torch.tensor([3, 0, 4])))
    assert one.structure == other.structure
    added = jit(lambda x, y: x + y)
    for a, b in ((one, other), (other, one), (one, one), (other, other)):
        want = a.values + b.values
        assert added(a, b).tolist() == [want[:3].tolist(), [], want[3:].tolist()]


def test_a_traced_function_explains_its_plans() -> None:
    f = jit(lambda x: torch.softmax(x, 1))
    (stage,) = f.explain(rows()).stages
    plan = f.plan(rows())
    assert stage.plan == plan.tree and stage.strategy == plan.strategy
    # Loops with their marks and tiles, one line each; what is inside is indented.
    lines, told = stage.plan, "\n".join(stage.plan)
    grid = next(line for line in lines if line.startswith("  grid "))
    assert any(line.startswith("    ") and "lanes " in line for line in lines[lines.index(grid) :]), told
    assert not any("ragged." in line or "{" in line for line in lines), told
    assert len(lines) < len(plan.steps), told


def test_ragged_tensors_of_objects_and_globals_are_operands_of_each_other() -> None:
    class Batch:
        def __init__(self, seed: int) -> None:
            values = torch.randn(6, 2, generator=torch.Generator().manual_seed(seed))
            self.tokens = JaggedTensor.from_lengths(values, [3, 0, 2, 1])

    @jit
    def total(batch: Batch) -> Any:
        return (batch.tokens * 2).sum(1), torch.softmax(batch.tokens, 1)

    batch = Batch(0)
    for seed in range(3):
        batch.tokens = Batch(seed).tokens
        sums, weights = total(batch)
        rows = batch.tokens.values.split([3, 0, 2, 1])
        torch.testing.assert_close(sums, torch.stack([2 * row.sum(0) for row in rows]))
        torch.testing.assert_close(weights.values, torch.cat([row.softmax(0) for row in rows]))


def test_numbers_of_many_eager_calls_do_not_matter_to_a_traced_one() -> None:
    """After some numbers, an eager operator reads further ones from memory; a traced one has none to read from."""
    reached = rows()
    for k in range(2 * FEW):
        reached * (k + 0.125)
    got = jit(lambda x: x + reached * 77.25)(rows())
    torch.testing.assert_close(got.values, rows().values * 78.25)


def test_results_that_are_not_tensors() -> None:
    """They belong to the trace: whatever they are made from is compared at every call."""

    def function(x: Any, dense: Any, cache: Any = None, scale: float = 2.0) -> Any:
        return {"y": x * scale, "cache": cache, "scale": scale / 2, "facts": [x.dtype, dense.shape, (True, "text")]}, None

    f = jit(function)
    for count, options in ((3, {}), (5, {}), (7, {"scale": 3.0}), (7, {"cache": 1, "scale": 3}), (3, {})):
        dense = torch.ones(count, 2)
        (got, nothing), (right, _) = f(rows(), dense, **options), function(rows(), dense, **options)
        torch.testing.assert_close(got.pop("y").values, right.pop("y").values)
        right["facts"][1] = tuple(dense.shape)
        assert got == right and nothing is None
        assert [type(each) for each in (got["scale"], *got["facts"][1])] == [float, int, int]
        got["facts"].clear()  # the caller's own


@pytest.mark.parametrize(
    "result", [lambda x: None, lambda x: (3, None), lambda x: [], lambda x: object(), lambda x: (x, x.shape)]
)
def test_results_without_a_tensor_or_of_other_kinds(result: Callable[[Any], Any]) -> None:
    with pytest.raises(TraceError, match="a traced function must return tensors"):
        jit(result)(rows())
