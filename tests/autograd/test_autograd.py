"""Ragged tensors under torch's autograd: leaves, hooks, modes, modules, new lengths."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from serrate import JaggedTensor, engine, ir, jit, ops
from serrate.errors import CallError, GradientError, StructureMismatch

pytestmark = pytest.mark.usefixtures("reference")


def rows(lengths: list[int], *features: int, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    values = torch.arange(1.0, 1.0 + sum(lengths)).div(7)[:, None].expand(-1, *features or (1,)).contiguous()
    return JaggedTensor.from_lengths(values.to(dtype) if features else values[:, 0].to(dtype), lengths)


def row_by_row(jt: JaggedTensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the summed squares of `softmax(x @ weight)`, from plain torch."""
    values, weight = jt.values.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    parts = (torch.softmax(row @ weight, 0).square().sum() for row in values.split(jt.lengths.tolist()))
    sum(parts, torch.zeros(())).backward()
    assert values.grad is not None and weight.grad is not None
    return values.grad, weight.grad


def squares(jt: Any, weight: Any) -> Any:
    return torch.softmax(jt @ weight, 1).square().sum()


@pytest.mark.parametrize("traced", [True, False])
def test_a_loss_reaches_values_and_weights(traced: bool) -> None:
    jt, weight = rows([3, 0, 2], 4).requires_grad_(), torch.linspace(-1, 1, 8).reshape(4, 2).requires_grad_()
    (jit(squares) if traced else squares)(jt, weight).backward()
    wanted = row_by_row(jt, weight)
    assert isinstance(jt.grad, JaggedTensor) and jt.grad.structure is jt.structure
    torch.testing.assert_close(jt.grad.values, wanted[0])
    torch.testing.assert_close(weight.grad, wanted[1])


@pytest.mark.parametrize("traced", [True, False])
def test_the_copy_of_an_argument_is_told_once_at_the_users_line(traced: bool) -> None:
    """There were two warnings that pointed into serrate, one of them about a program that the user never wrote."""
    values = torch.linspace(-1, 1, 20).reshape(4, 5).T.requires_grad_()
    jt, weight = JaggedTensor.from_lengths(values, [3, 0, 2]), torch.linspace(-1, 1, 8).reshape(4, 2)
    function = jit(squares) if traced else (lambda x, w: torch.softmax(x, 1).mul(x.detach()).sum())
    with pytest.warns(UserWarning, match=r"argument \d of \w+ \(torch.float32, shape \[5, 4\]\) is not contiguous") as told:
        result = function(jt, weight)
        (found,) = torch.autograd.grad(result, values)
    assert all(each.filename == __file__ and "_backward" not in str(each.message) for each in told)
    packed = values.detach().contiguous().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (wanted,) = torch.autograd.grad(function(JaggedTensor.from_lengths(packed, [3, 0, 2]), weight), packed)
        function(jt.contiguous(), weight)
    torch.testing.assert_close(found, wanted)


def test_gradients_add_up_and_can_be_cleared() -> None:
    jt = rows([2, 1]).requires_grad_()
    assert jt.grad is None and jt.is_leaf and jt.grad_fn is None
    for _ in range(2):
        (jt * 3).sum().backward()
    assert jt.grad is not None and jt.grad.values.tolist() == [6.0] * 3
    jt.grad = None
    assert jt.values.grad is None
    jt.grad = jt.detach()
    assert torch.equal(jt.values.grad, jt.values.detach())
    with pytest.raises(CallError, match="a JaggedTensor with the same rows"):
        jt.grad = torch.ones(3)  # type: ignore[assignment]


def test_functions_of_torch_s_autograd_take_ragged_tensors() -> None:
    jt, weight = rows([2, 1]).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    product = jt * weight
    ragged, plain = torch.autograd.grad(product, [jt, weight], torch.ones_like(product), retain_graph=True)
    assert isinstance(ragged, JaggedTensor) and ragged.values.tolist() == [2.0] * 3
    torch.testing.assert_close(plain, jt.values.detach().sum())
    product.backward(torch.ones_like(product), retain_graph=True)
    assert jt.grad is not None and jt.grad.values.tolist() == [2.0] * 3
    torch.autograd.backward(product, torch.ones_like(product))
    assert jt.grad.values.tolist() == [4.0] * 3


def test_hooks_see_ragged_gradients() -> None:
    jt = rows([2, 1]).requires_grad_()
    seen: list[JaggedTensor] = []
    middle = jt * 2
    middle.retain_grad()
    middle.register_hook(seen.append)
    jt.register_hook(lambda gradient: gradient * 10)
    middle.sum().backward()
    assert seen[0].lengths.tolist() == [2, 1] and middle.grad is not None and middle.grad.values.tolist() == [1.0] * 3
    assert jt.grad is not None and jt.grad.values.tolist() == [20.0] * 3


def test_modes() -> None:
    jt = rows([2, 1]).requires_grad_()
    with torch.no_grad():
        assert not (jt * 2).requires_grad
    with torch.inference_mode():
        assert not (jt * 2).requires_grad
    assert (jt * 2).requires_grad and not (jt.detach() * 2).requires_grad


def test_no_gradient_flows_through_what_is_detached() -> None:
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    jt = JaggedTensor.from_lengths(x, [2, 0, 1])
    (found,) = torch.autograd.grad(jit(lambda jt: (jt * jt.detach()).sum())(jt), x)
    assert torch.equal(found, x.detach())
    assert not jit(lambda jt: jt.detach() * 2)(jt).requires_grad


@pytest.mark.parametrize("function", [torch.sign, torch.floor, torch.round])
def test_a_gradient_that_is_always_zero_is_zeros(function: Any) -> None:
    x = torch.tensor([0.5, -2.0, 0.0], requires_grad=True)
    result = jit(lambda jt: function(jt) * 2)(JaggedTensor.from_lengths(x, [2, 1]))
    assert result.requires_grad
    assert torch.equal(torch.autograd.grad(result.values.sum(), x)[0], torch.zeros(3))


def test_no_gradient_flows_through_what_a_traced_function_computes_without() -> None:
    x = torch.arange(1.0, 6.0).requires_grad_()
    jt = JaggedTensor.from_lengths(x, [3, 0, 2])

    @torch.no_grad()
    def scale(jt: Any) -> Any:
        return jt.sum(1, keepdim=True)

    @jit
    def program(jt: Any) -> Any:
        with torch.no_grad():
            same, top, fixed = jt[:], jt.sort(1)[0], ops.square(jt)
            with torch.enable_grad():
                moving = jt * 5
        return jt * scale(jt) + same + 10 * top + fixed + moving, fixed

    with torch.no_grad():
        program(jt)  # the mode around the first call is not that of the function
    result, fixed = program(jt)
    assert result.requires_grad and not fixed.requires_grad
    (found,) = torch.autograd.grad(result.values.sum(), x)
    assert found.tolist() == [6.0 + 5.0] * 3 + [9.0 + 5.0] * 2


@pytest.mark.parametrize("padding", [0, -1])
def test_the_padding_row_of_a_table_has_no_gradient(padding: int) -> None:
    table, tokens = torch.arange(8.0).reshape(4, 2).requires_grad_(), torch.tensor([0, 1, 3, 3])
    (wanted,) = torch.autograd.grad(F.embedding(tokens, table, padding_idx=padding).square().sum(), table)
    found = F.embedding(JaggedTensor.from_lengths(tokens, [3, 1]), table, padding_idx=padding)
    assert torch.equal(torch.autograd.grad(found.values.square().sum(), table)[0], wanted)


def test_a_checkpoint_computes_again() -> None:
    jt, weight = rows([3, 0, 2], 4).requires_grad_(), torch.linspace(-1, 1, 8).reshape(4, 2).requires_grad_()
    calls: list[int] = []

    def counted(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        found: torch.Tensor = squares(jt.with_values(values), weight)
        return found

    checkpoint(counted, jt.values, weight, use_reentrant=False).backward()
    assert len(calls) == 2
    torch.testing.assert_close(weight.grad, row_by_row(jt, weight)[1])


def test_autocast_rounds_products_and_gradients_keep_the_dtype_of_their_tensor() -> None:
    jt, weight = rows([3, 2], 4).requires_grad_(), torch.linspace(-1, 1, 8).reshape(4, 2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = F.linear(jt, weight.t())
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, jt.values.detach().sum(0)[:, None].expand(-1, 2), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_thirty_two(dtype: torch.dtype) -> None:
    jt = rows([64, 3], dtype=dtype).requires_grad_()
    (jt * jt).sum(1).sum().backward()
    assert jt.grad is not None and jt.grad.dtype == dtype
    torch.testing.assert_close(jt.grad.values, jt.values.detach() * 2)


def test_new_lengths_need_no_new_program(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build = engine.build

    def counted(program: Any, *args: Any) -> Any:
        built.append(program.name)
        return build(program, *args)

    monkeypatch.setattr(engine, "build", counted)
    program = jit(squares)
    weight = torch.linspace(-1, 1, 8).reshape(4, 2).requires_grad_()
    for step in range(20):
        if step == 2:
            built.clear()
        jt = rows([step % 5, 3, (step * 7) % 4], 4).requires_grad_()
        weight.grad = None
        program(jt, weight).backward()
        torch.testing.assert_close(weight.grad, row_by_row(jt, weight)[1])
    assert not built


def test_offsets_that_change_before_backward_are_noticed() -> None:
    offsets = torch.tensor([0, 2, 3])
    jt = JaggedTensor.from_csr(torch.ones(3), offsets).requires_grad_()
    found = torch.softmax(jt, 1).values.sum()
    offsets[1] = 1
    with pytest.raises(GradientError, match="changed in place since the call"):
        found.backward()


def test_values_that_change_before_backward_are_noticed() -> None:
    jt, other = rows([2, 1]).requires_grad_(), rows([2, 1])
    product = jt * other
    other.values.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.values.sum().backward()


def test_what_backward_does_not_need_is_not_kept() -> None:
    jt, big = rows([2, 1]).requires_grad_(), rows([2, 1])
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        total = jt + big
    assert not kept
    total.values.sum().backward()


def test_what_is_saved_can_be_chosen() -> None:
    kept, found = dict[str, int](), []
    for save in ("inputs", "auto", "all"):
        jt = rows([3, 0, 2], 2).requires_grad_()
        sizes: list[int] = []

        def keep(x: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(x.numel())
            return x

        program = jit(lambda x: torch.tanh(x.exp()) * x.sum(1, keepdim=True), save=save)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = program(jt)
        result.values.square().sum().backward()
        kept[save] = sum(sizes)
        assert jt.grad is not None
        found.append(jt.grad.values)
    assert kept["inputs"] == 10 and kept["auto"] == 10 + 6 and kept["all"] > 16
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    with pytest.raises(CallError, match="save: expected 'auto', 'all', 'inputs', got 'none'"):
        jit(lambda x: x, save="none")


def test_dropout_repeats_in_backward() -> None:
    jt = JaggedTensor.from_lengths(torch.ones(40), [25, 15]).requires_grad_()
    found = jit(lambda x: F.dropout(x, 0.5) * 3)(jt)
    found.values.sum().backward()
    assert jt.grad is not None and torch.equal(jt.grad.values, found.values.detach()) and 0 < int((found.values == 0).sum()) < 40


def test_fusions_have_gradients() -> None:
    with ir.Fusion() as f:
        x, offsets, weight = f.input((None, 2), torch.float64), f.input((None,), torch.int64), f.input((2,), torch.float64)
        f.output(ops.sum(ops.mul(ops.as_nested(x, offsets), weight), 1), ops.amax(ops.as_nested(x, offsets), 2))
    program = f.compile("reference")
    values, w = torch.randn(5, 2, dtype=torch.float64).requires_grad_(), torch.randn(2, dtype=torch.float64).requires_grad_()
    offsets_ = torch.tensor([0, 2, 2, 5])

    def run(values: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums, largest = program(values, offsets_, w)
        return sums, largest.values

    assert torch.autograd.gradcheck(run, (values, w), fast_mode=True)


def test_a_module_trains() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    jt = JaggedTensor.from_lengths(torch.randn(12, 4), [5, 0, 7])
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (model(jt).squeeze(-1) - jt.sum(-1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("place", range(-1, 4))
def test_running_products_with_zeros(place: int) -> None:
    x = torch.tensor([2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    x[max(place, 0) :: 2] *= float(place < 0)
    x.requires_grad_()
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    (got,) = torch.autograd.grad((torch.cumprod(JaggedTensor.from_lengths(x, [4, 0]), 1).values * weights).sum(), x)
    (want,) = torch.autograd.grad((x.cumprod(0) * weights).sum(), x)
    torch.testing.assert_close(got, want)


# --- gradients that the user passes --------------------------------------------------------------------------------------


def _given(result: JaggedTensor, gradient: JaggedTensor, how: str, x: JaggedTensor) -> JaggedTensor:
    if how == "method":
        result.backward(gradient)
    elif how == "backward":
        torch.autograd.backward([result], [gradient])
    else:
        (found,) = torch.autograd.grad(result, x, grad_outputs=gradient)
        assert isinstance(found, JaggedTensor)
        return found
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("how", ["method", "backward", "grad"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_of_a_view_has_no_elements_in_its_gaps(how: str, packed: bool) -> None:
    x = JaggedTensor.from_lengths(torch.randn(5), [3, 0, 2]).requires_grad_()
    view = x[:, 1:]
    gradient = JaggedTensor.from_lengths(torch.ones(3), [2, 0, 1]) if packed else torch.ones_like(view)
    assert _given(view, gradient, how, x).tolist() == [[0, 1, 1], [], [0, 1]]


@pytest.mark.parametrize("how", ["method", "backward", "grad"])
def test_a_gradient_must_have_the_rows_of_its_result(how: str) -> None:
    x = JaggedTensor.from_lengths(torch.randn(5), [3, 0, 2]).requires_grad_()
    wrong = JaggedTensor.from_lengths(torch.ones(5), [1, 2, 2])
    with pytest.raises(StructureMismatch, match=re.escape("[1, 2, 2], not [3, 0, 2]")):
        _given(x * 3, wrong, how, x)
    with pytest.raises(StructureMismatch):
        x.grad = wrong
    equal = JaggedTensor.from_lengths(torch.arange(5.0), [3, 0, 2])
    assert _given(x * 3, equal, how, x).tolist() == [[0, 3, 6], [], [9, 12]]


def test_batches_of_gradients_are_refused() -> None:
    x = JaggedTensor.from_lengths(torch.randn(5), [3, 2]).requires_grad_()
    with pytest.raises(GradientError, match="mul: a compiled program takes one gradient at a time"):
        torch.autograd.grad((x * x).values, x.values, torch.eye(5), is_grads_batched=True)
    with pytest.raises(GradientError, match="vectorize=False"):
        torch.autograd.functional.jacobian(lambda v: (x.with_values(v) * 2).values, x.values, vectorize=True)
    found = torch.autograd.functional.jacobian(lambda v: (x.with_values(v) * 2).values, x.values)
    assert torch.equal(found, 2 * torch.eye(5))


def test_transforms_of_torch_func_are_refused() -> None:
    x = JaggedTensor.from_lengths(torch.randn(5), [3, 2])

    def total(values: torch.Tensor) -> torch.Tensor:
        return (x.with_values(values) * 2).sum()

    for _ in range(2):
        with pytest.raises(GradientError, match=r"torch\.func"):
            torch.func.grad(total)(x.values)
        with pytest.raises(GradientError, match=r"torch\.func"):
            torch.vmap(total)(torch.randn(3, 5))
        total(x.values)  # with this call, the second round finds a bound program


@pytest.mark.parametrize("dim", [1, 2])
def test_gradients_of_heads_sorted_along_their_rows(dim: int) -> None:
    """In memory, the heads come after the rows."""
    values, row_values = (torch.arange(24.0).mul(7).remainder(25).reshape(6, 4).requires_grad_() for _ in range(2))
    rows = JaggedTensor.from_lengths(values, [3, 0, 2, 1])
    found = jit(lambda x: torch.sort(torch.stack([x, x * -2], 1), dim + 1).values)(rows)
    expected = [torch.sort(torch.stack([r, r * -2]), dim).values for r in row_values.split([3, 0, 2, 1])]
    found = found.transpose(1, 2).values  # [total, heads, features]
    wanted = torch.cat(expected, 1).transpose(0, 1)
    torch.testing.assert_close(found, wanted)
    weights = torch.linspace(-1, 2, wanted.numel()).reshape(wanted.shape)
    gradients = [torch.autograd.grad((each * weights).sum(), x)[0] for each, x in ((found, values), (wanted, row_values))]
    torch.testing.assert_close(*gradients)
