"""What is not part of the tile language is refused, with the user's line under a caret.

In: kernels with one mistake each. Out: a failure where nothing is raised, or the message lacks the line or the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.errors import CallError, GradientError, KernelError, StrategyError
from tests.language.kinds import TILES, ran

JT = JaggedTensor.from_lengths(torch.arange(1.0, 7.0), [2, 0, 4])
X = torch.arange(6.0)


@serrate.kernel
def branch_on_lanes(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        if x[t] > 0:  # mark
            pass


@serrate.kernel
def two_tiles_in_one_dim(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        for u in hl.tile(x.size(0)):
            x[t] + x[u]  # mark


@serrate.kernel
def unknown_function(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        torch.sort(x[t])  # mark


@serrate.kernel
def store_that_does_not_fit(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        x[t] = x[t][:, None] + x[None, :]  # mark


@serrate.kernel
def store_with_more_dims(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        x[t] = x[t][:, None] + hl.arange(8)[None, :]  # mark


@serrate.kernel
def carried_between_programs(x: torch.Tensor) -> None:
    total = hl.zeros([])
    for t in hl.tile(x.size(0)):
        total = total + x[t].sum()  # mark


@serrate.kernel
def carried_condition(jt: JaggedTensor) -> None:
    for b in hl.tile(jt.num_rows):
        acc = hl.zeros([b])
        for k in hl.grid(jt.max_length):
            acc = acc + torch.exp(jt[b, k])  # mark


@serrate.kernel
def condition_on_one_operand(jt: JaggedTensor, w: torch.Tensor) -> None:
    for b in hl.tile(jt.num_rows):
        for t in hl.tile(jt.max_length):
            jt[b, t] @ w[t, :]  # mark


@serrate.kernel
def part_of_a_tile(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        x[t][0]  # mark


@serrate.kernel
def too_many_indices(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        x[t, t]  # mark


@serrate.kernel
def index_by_floats(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        x[x[t]]  # mark


@serrate.kernel
def in_place(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        x[t].mul_(2)  # mark


@serrate.kernel
def jagged_tile_without_rows(x: torch.Tensor, lengths: torch.Tensor) -> None:
    for b in hl.tile(lengths.size(0)):
        for t in hl.jagged_tile(lengths[b]):
            t.index.sum()  # mark


@serrate.kernel
def shape_that_changes(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0), block_size=2):
        acc = hl.zeros([t])
        for _ in hl.grid(2):
            acc = (acc[None, :] + x[t][:, None]).sum(1, keepdim=True)  # mark


@serrate.kernel
def wrong_dim(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        x[t].sum(1)  # mark


@serrate.kernel
def fixed_lanes_meet_a_tile(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        x[t] + x  # mark


@serrate.kernel
def ragged_bound(jt: JaggedTensor) -> None:
    for b in hl.tile(jt.num_rows):
        for k in hl.tile(jt.size(1)):  # mark
            jt[b, k]


@serrate.kernel
def broken_lanes(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0), block_size=3.5):  # mark
        x[t] + 1


MISTAKES: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (branch_on_lanes, (X,), "reduce it first"),
    (two_tiles_in_one_dim, (X,), "separate them with None"),
    (unknown_function, (X,), "sort is not part of the tile language"),
    (store_that_does_not_fit, (X,), "the stored value"),
    (store_with_more_dims, (X,), ", but the index has "),
    (carried_between_programs, (X,), "hl.atomic_add"),
    (carried_condition, (JT,), "hl.fill"),
    (condition_on_one_operand, (JT, torch.zeros(4, 3)), "hl.fill"),
    (part_of_a_tile, (X,), "depends on the block size"),
    (too_many_indices, (X,), "2 indices for 1 dims"),
    (index_by_floats, (X,), "an integer"),
    (in_place, (X,), "cannot be changed in place"),
    (jagged_tile_without_rows, (X, torch.tensor([1, 2])), "dim of its rows"),
    (shape_that_changes, (X,), "the carried value acc has shape"),
    (fixed_lanes_meet_a_tile, (X,), "to no tile in another"),
    (wrong_dim, (X,), "dim 1 does not exist"),
    (ragged_bound, (JT,), "use jt.max_length; each row still ends at its own length"),
    (broken_lanes, (X,), "hl.tile: "),
]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("kernel", "args", "text"), MISTAKES, ids=lambda v: getattr(v, "__name__", ""))
def test_refused_with_the_line(kernel: Any, args: tuple[Any, ...], text: str, tile: Any) -> None:
    with pytest.raises(KernelError) as caught:
        ran(kernel, tile)(*args)
    lines = str(caught.value).splitlines()
    assert text in str(caught.value)
    assert __file__ in lines[-3] and f"in {kernel.__name__}" in lines[-3]
    assert lines[-2].endswith("# mark")
    assert set(lines[-1].strip()) == {"^"} and len(lines[-1]) <= len(lines[-2])


def test_the_caret_is_under_the_expression() -> None:
    with pytest.raises(KernelError) as caught:
        two_tiles_in_one_dim(X)
    line, caret = str(caught.value).splitlines()[-2:]
    assert line[len(caret) - len(caret.lstrip()) : len(caret)] == "x[t] + x[u]"


@pytest.mark.parametrize(
    "call",
    [
        lambda: hl.tile(3),
        lambda: hl.grid(3),
        lambda: hl.jagged_tile(X),  # type: ignore[arg-type]
        lambda: hl.zeros([3]),
        lambda: hl.full([3], 1.0),
        lambda: hl.arange(3),
        lambda: hl.load(X, [0]),
        lambda: hl.store(X, [0], 1.0),
        lambda: hl.atomic_add(X, [0], 1.0),
        lambda: hl.specialize(3),
        lambda: hl.register_block_size(3),
        lambda: hl.register_tunable("a", (1, 2)),
        lambda: hl.device_num_sms(),
        lambda: hl.dot(X, X),
        lambda: hl.associative_scan(lambda a, b: a + b, X, 0),
        lambda: hl.fill(X, 0.0),  # type: ignore[arg-type]
    ],
)
def test_outside_of_a_kernel(call: Callable[[], Any]) -> None:
    with pytest.raises(KernelError, match=r"hl\..* can only be used inside a function decorated with @serrate.kernel"):
        call()


def test_loops_belong_in_the_kernel_itself() -> None:
    with pytest.raises(KernelError, match="not in a function it calls"):
        _calls_a_helper(X)


def _looping_helper(x: torch.Tensor) -> None:
    for t in hl.tile(x.size(0)):
        x[t] = 0.0


@serrate.kernel
def _calls_a_helper(x: torch.Tensor) -> None:
    _looping_helper(x)


def test_decorator_arguments() -> None:
    with pytest.raises(StrategyError, match="unknown strategy 'fast': choose from maskless"):
        serrate.kernel(strategy="fast")
    with pytest.raises(CallError, match="are the same"):
        serrate.kernel(strategy="masked", jagged_strategy="maskless")
    with pytest.raises(CallError, match="block sizes must be positive ints"):
        serrate.Config(block_sizes=[0])
    with pytest.raises(CallError, match="autotune_effort"):
        serrate.kernel(autotune_effort="much")
    with pytest.raises(CallError, match="tile="):
        unknown_function.interpreted(tile=0)


def test_gradients_are_not_dropped_silently() -> None:
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(GradientError, match="no gradient"):
        branch_on_lanes(x)


def test_tangents_are_not_dropped_silently() -> None:
    @serrate.kernel
    def scaled(x: torch.Tensor, jt: JaggedTensor, pair: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out = torch.empty_like(x)
        for t in hl.tile(x.size(0)):
            out[t] = x[t] * jt.values[t] * pair[0][t]
        return out

    x, jt = torch.ones(3), JaggedTensor.from_lengths(torch.ones(3), [2, 1])
    scaled(x, jt, (x,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for run in (scaled, scaled.on("reference"), scaled.interpreted()):
            assert torch.equal(run(x, jt, (x,)), x), "no tangents, no matter"
            for given in ((dual, jt, (x,)), (x, jt.with_values(dual), (x,)), (x, jt, (dual,))):
                if run is scaled or given[2][0] is x:
                    with pytest.raises(GradientError, match="no forward-mode gradient, but an argument has a tangent"):
                        run(*given)
            assert torch.equal(run(dual.detach(), jt, (x,)), x)


def test_a_tile_is_not_a_result() -> None:
    @serrate.kernel
    def k(x: torch.Tensor) -> Any:
        for t in hl.tile(x.size(0)):
            y = x[t]
        return y

    with pytest.raises(KernelError, match="y is a tile value after the loop over tiles of line"):
        k(X)


def test_a_tensor_that_a_loop_replaces_is_not_returned() -> None:
    @serrate.kernel
    def replaced(x: torch.Tensor) -> Any:
        out, other = torch.zeros(x.size(0)), torch.zeros(x.size(0))
        for t in hl.tile(x.size(0)):
            other[t] = x[t]
            out = x[t]
        return out, other

    @serrate.kernel
    def in_a_loop(x: torch.Tensor) -> Any:
        y = x * 2
        for _ in range(2):
            z = y + 1
            for t in hl.tile(x.size(0)):
                y = x[t]
                x[t] = y + 1
        return z

    @serrate.kernel
    def bound_again(x: torch.Tensor) -> Any:
        out, y = torch.zeros(x.size(0)), None
        for t in hl.tile(x.size(0)):
            y = x[t] + 1
            out[t] = y
        for t in hl.tile(x.size(0)):
            y = out[t] * 2
            out[t] = y
        y = out * 10
        return y

    line = replaced.fn.__code__.co_firstlineno + 3
    with pytest.raises(KernelError, match=f"out is a tile value after the loop over tiles of line {line}: store it to a tensor"):
        replaced(X)
    with pytest.raises(KernelError, match="y is a tile value after the loop"):
        in_a_loop(X.clone())
    assert torch.equal(bound_again(X), (X + 1) * 20)


def test_names_without_a_value() -> None:
    @serrate.kernel
    def undefined(x: torch.Tensor, used: bool) -> Any:
        out = torch.zeros(x.size(0))
        for t in hl.tile(x.size(0)):
            out[t] = x[t] * never_defined if used else x[t]  # type: ignore[name-defined]  # noqa: F821
        return out

    @serrate.kernel
    def too_early(x: torch.Tensor) -> Any:
        out = torch.zeros(x.size(0))
        for t in hl.tile(x.size(0)):
            out[t] = x[t] * factor
        return out

    with pytest.raises(NameError, match="name 'never_defined' is not defined"):
        undefined(X, True)
    assert torch.equal(undefined(X, False), X)
    with pytest.raises(NameError, match="'factor'"):
        too_early(X)
    factor = 3
    assert torch.equal(too_early(X), X * 3)


def test_attributes_that_do_not_exist() -> None:
    @serrate.kernel
    def method(x: torch.Tensor) -> None:
        for t in hl.tile(x.size(0)):
            x[t] = x[t, None].summ(1)

    @serrate.kernel
    def metadata(jt: JaggedTensor) -> None:
        for b in hl.tile(jt.numrows):
            jt[b, 0] = 1.0

    with pytest.raises(AttributeError, match="a tile value has no attribute 'summ': did you mean 'sum'"):
        method(X)
    with pytest.raises(AttributeError, match="a ragged tensor of a kernel has no attribute 'numrows': did you mean 'num_rows'"):
        metadata(JT)


def summed_in_a_list(x: torch.Tensor, sums: list[Any]) -> None:
    for r in hl.grid(x.size(0)):
        totals = [hl.zeros([]), 0]
        for k in hl.grid(3):
            totals[0] = totals[0] + x[r] * k
        x[r] = totals[0]


def changed_in_a_branch(x: torch.Tensor, sums: list[Any]) -> None:
    for r in hl.grid(x.size(0)):
        found = {"value": x[r], "inner": [0]}
        if x[r] > 2:
            found["inner"][0] = 1
        x[r] = found["inner"][0]


def appended_in_a_while(x: torch.Tensor, sums: list[Any]) -> None:
    for r in hl.grid(x.size(0)):
        seen: list[Any] = []
        while x[r] < 5:
            x[r] = x[r] + 1
            seen.append(1)


def appended_by_every_program(x: torch.Tensor, sums: list[Any]) -> None:
    parts: list[Any] = []
    for r in hl.grid(x.size(0)):
        parts.append(x[r])
        x[r] = parts[0]


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (summed_in_a_list, "totals, a list, is modified in a loop over tiles: this happens only once"),
        (changed_in_a_branch, "found, a list, is modified in an `if` on a runtime value"),
        (appended_in_a_while, "seen, a list, is modified in a `while` on a runtime value"),
        (appended_by_every_program, "parts, a list, is modified in a loop over tiles"),
    ],
)
def test_containers_that_change_in_a_loop(kernel: Callable[..., None], message: str) -> None:
    """The modification would happen only once, while the loop is traced."""
    with pytest.raises(KernelError, match=message):
        serrate.kernel(kernel)(X.clone(), [])


def test_containers_that_stay_as_they_are() -> None:
    """They may be created in every iteration, and be modified in a loop that runs while the kernel is traced."""

    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for t in hl.tile(x.size(0)):
            powers = [x[t]]
            for _ in range(2):
                powers.append(powers[-1] * x[t])
            powers[0] = powers[0] * 10
            out[t] = powers[0] + powers[1] + powers[2]
        return out

    assert torch.equal(k(X), X * 10 + X**2 + X**3)
