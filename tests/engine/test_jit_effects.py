"""`serrate.jit` and what a function does beside computing its result: random numbers, writes, and what it hands out.

In: functions with effects. Out: failures where an effect is frozen, lost or leaks into later calls without a word.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import serrate
from serrate import JaggedTensor, KeyedJaggedTensor, jit
from serrate.errors import DtypeError, GradientError, InPlaceError, ShapeError, TraceError

pytestmark = pytest.mark.usefixtures("reference")

LENGTHS = [2, 0, 3, 1]
X = JaggedTensor.from_lengths(torch.arange(6.0) + 1, LENGTHS)


# --- random numbers --------------------------------------------------------------------------------------------------------

GENERATOR, OWN, OF_TORCH = np.random.default_rng(0), random.Random(0), torch.Generator()
DRAWS: dict[str, Callable[[Any], Any]] = {
    "random": lambda x: x * random.random(),
    "random.choice": lambda x: x * random.choice([1.0, 2.0]),
    "a generator of random": lambda x: x * OWN.random(),
    "numpy.random": lambda x: x * float(np.random.rand()),
    "a generator of numpy": lambda x: x * float(GENERATOR.normal()),
    "torch.randperm": lambda x: x * torch.randperm(1),
    "a generator of torch": lambda x: x * torch.randperm(1, generator=OF_TORCH),
    "in place": lambda x: x * torch.empty(1).cauchy_(),
    "at random in a helper": lambda x: helper(x),
}


def helper(x: Any) -> Any:
    return x if random.random() < 0.5 else -x


@pytest.mark.parametrize("function", DRAWS.values(), ids=DRAWS.keys())
def test_numbers_drawn_while_tracing_are_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TraceError, match="random numbers"):
        jit(function)(X)


def test_drawing_between_calls_is_nobodys_business() -> None:
    f = jit(lambda x: x * 2)
    for _ in range(2):
        random.random(), torch.rand(1), np.random.rand()
        assert f(X).values.equal(X.values * 2)


# --- the default dtype -----------------------------------------------------------------------------------------------------


def test_the_default_dtype_of_the_call_is_used() -> None:
    f: Callable[[Any], Any] = lambda x: (x * torch.ones(1), x / 2, torch.zeros(3))  # noqa: E731
    integers = JaggedTensor.from_lengths(torch.arange(6), LENGTHS)
    jitted = jit(f)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for _ in range(2):
                got = jitted(integers)
                assert [each.dtype for each in got] == [each.dtype for each in f(integers.values)]
                assert (integers / 2).dtype == dtype, "eager"
    finally:
        torch.set_default_dtype(torch.float32)


# --- forward-mode gradients ------------------------------------------------------------------------------------------------


def test_tangents_are_refused() -> None:
    f = jit(lambda x, w: x * w)
    w = torch.full((1,), 2.0)
    kept = torch.full((1,), 2.0)
    outside = jit(lambda x: x * kept)
    f(X, w), outside(X)
    with forward_ad.dual_level():
        assert f(X, w).values.equal(X.values * 2), "no tangents, no matter"
        dual = forward_ad.make_dual(w, torch.ones(1))
        ragged = X.with_values(forward_ad.make_dual(X.values, torch.ones(6)))
        for call in (lambda: f(X, dual), lambda: f(ragged, w), lambda: ragged * 2, lambda: X * dual, lambda: torch.exp(ragged)):
            with pytest.raises(GradientError, match="forward-mode"):
                call()
        kept = dual
        with pytest.raises(GradientError, match="forward-mode"):
            outside(X)
    with pytest.raises(Exception, match=r"forward-mode|torch\.func"):
        torch.func.jvp(lambda w: f(X, w).values, (w,), (torch.ones(1),))


# --- writes ----------------------------------------------------------------------------------------------------------------


def add(x: Any) -> Any:
    x += 1
    return x


def multiply(x: Any) -> Any:
    y = x
    y *= 2
    return y


def method(x: Any) -> Any:
    x.add_(1)
    return x


def view(x: Any) -> Any:
    y = x.unsqueeze(-1)
    y -= 1
    return x


def item(x: Any) -> Any:
    x[0] = 1.0
    return x


@pytest.mark.parametrize("function", [add, multiply, method, view, item])
def test_writing_to_an_argument_is_refused(function: Callable[[Any], Any]) -> None:
    jitted = jit(function)
    for _ in range(2):
        with pytest.raises(InPlaceError, match=r"in place.*return"):
            jitted(X)
    assert X.values.equal(torch.arange(6.0) + 1)


def test_writing_to_a_tensor_outside_is_refused() -> None:
    w = torch.ones(1)

    def assigned(x: Any) -> Any:
        nonlocal w
        w += 1
        return x * w

    def called(x: Any) -> Any:
        w.add_(1)
        return x * w

    def item(x: Any) -> Any:
        w[0] = 2.0
        return x * w

    def added(x: Any) -> Any:
        w.add_(x.sum())
        return x * w

    for function in (assigned, called, item, added):
        with pytest.raises(InPlaceError, match="in place"):
            jit(function)(X)
        assert w.equal(torch.ones(1))


def intermediate(x: Any) -> Any:
    y = x * 2
    y += 1
    y *= x
    y -= 0.5
    y /= 2
    return y


def test_intermediates_are_written_to() -> None:
    torch.testing.assert_close(jit(intermediate)(X).values, intermediate(X.values))


def test_sums_that_begin_with_zeros() -> None:
    def function(x: Any, y: Any) -> Any:
        total = torch.zeros(1)
        total += x
        total += y
        return total

    def other_name(x: Any, y: Any) -> Any:
        total = torch.zeros(1)
        zeros = total
        total += x
        return total + zeros * 2

    x, y = torch.ones(1), torch.full((1,), 2.0)
    jitted = jit(function)
    for _ in range(2):
        assert jitted(x, y).equal(torch.full((1,), 3.0))
    with pytest.raises(InPlaceError, match="in place"):
        jit(other_name)(x, y)


def another_name(x: Any) -> Any:
    y = x * 2
    z = y
    y += 1
    return y + z


def a_view(x: Any) -> Any:
    y = x * 2
    seen = y.unsqueeze(-1)
    y += 1
    return seen


def its_base(x: Any) -> Any:
    y = x * 2
    seen = y.unsqueeze(-1)
    seen += 1
    return y


@pytest.mark.parametrize("function", [another_name, a_view, its_base])
def test_what_was_written_to_is_not_read_under_another_name(function: Callable[[Any], Any]) -> None:
    with pytest.raises(InPlaceError, match="in place"):
        jit(function)(X)


def test_a_write_keeps_dtype_and_shape() -> None:
    def widened(x: Any) -> Any:
        y = x * 2
        y += torch.ones(1, dtype=torch.float64)
        return y

    def whole(x: Any) -> Any:
        y = x.sum(1)
        y += x.sum(1, keepdim=True)
        return y

    def truncated(x: Any) -> Any:
        y = (x > 2).to(torch.int64)
        y += 0.5
        return y

    assert jit(widened)(X).dtype == widened(X.values).dtype == torch.float32
    with pytest.raises(ShapeError, match="in place"):
        jit(whole)(X)
    with pytest.raises(DtypeError, match="in place"):
        jit(truncated)(X)


# --- what is handed out ----------------------------------------------------------------------------------------------------


def test_constants_are_handed_out_as_copies() -> None:
    f = jit(lambda x: (x + torch.ones(1), torch.ones(1), torch.zeros(2, 2).reshape(4), torch.arange(3).unsqueeze(0)))
    for _ in range(3):
        got = f(X)
        assert got[0].values.equal(X.values + 1)
        assert got[1].equal(torch.ones(1)) and got[2].equal(torch.zeros(4)) and got[3].equal(torch.arange(3)[None])
        for each in got[1:]:
            each.add_(5)


def test_a_tensor_that_is_made_and_then_written_to() -> None:
    def function(x: Any) -> Any:
        made = torch.ones(1)
        first = x * made
        made += 1
        return first + x * made

    f = jit(function)
    for _ in range(2):
        torch.testing.assert_close(f(X).values, function(X.values))


# --- what a traced tensor is -----------------------------------------------------------------------------------------------


def test_traced_ragged_tensors_are_what_they_stand_for() -> None:
    kinds: list[Any] = []

    def function(x: Any, w: Any) -> Any:
        kinds.extend(isinstance(each, JaggedTensor) for each in (x, w, x.sum(1), x * w))
        return x * w if isinstance(x, JaggedTensor) else -x

    w = torch.ones(1)
    torch.testing.assert_close(jit(function)(X, w).values, X.values)
    traced, kinds[:] = kinds[:], []
    function(X, w)
    assert traced == kinds


KINDS: dict[str, Callable[[Any], Any]] = {
    "isinstance": lambda w: isinstance(w, Tensor),
    "one of several classes": lambda w: isinstance(w, float | Tensor) and not isinstance(w, (int, list)),
    "is_tensor": torch.is_tensor,
    "a result": lambda w: isinstance(w + 1, Tensor) and isinstance(torch.exp(w), torch.Tensor),
    "in a condition": lambda w: next(each for each in (1.0, w) if isinstance(each, Tensor)) is w,
    "not a parameter": lambda w: isinstance(w, Tensor) and not isinstance(w, nn.Parameter),
    "not ragged": lambda w: not isinstance(w, JaggedTensor),
    "its class": lambda w: issubclass(w.__class__, Tensor),
    "type": lambda w: type(w) is Tensor,
    "type of a result": lambda w: type(w + 1) == torch.Tensor and type(torch.exp(w)) is not JaggedTensor,  # noqa: E721
    "type among others": lambda w: type(w) in (float, Tensor) and type(w) not in {int, list},
    "type as a key": lambda w: {int: False, Tensor: True}[type(w)],
    "type of others": lambda w: type(1.0 + 1) is float and type(type(w)) is type(Tensor) and type("C", (), {}).__name__ == "C",
    "type as a class": lambda w: isinstance(Tensor, type) and not isinstance(w, type) and issubclass(type(Tensor), type),
    "type in a function of its own": lambda w: (lambda each: type(each) is Tensor)(w),
    "type in a helper": lambda w: is_tensor(w),
    "type in map": lambda w: list(map(type, [1, w])) == [int, Tensor],
    "isinstance in map": lambda w: list(map(isinstance, [1, w], [int, Tensor])) == [True, True],
    "isinstance in a partial": lambda w: functools.partial(isinstance, w)(Tensor) and not isinstance(w, int),
}


def is_tensor(each: Any) -> bool:
    return type(each) is Tensor


@pytest.mark.parametrize("name", KINDS)
def test_traced_dense_tensors_are_tensors(name: str) -> None:
    """Code that treats tensors and numbers differently silently took the branch for numbers."""

    def function(x: Any, w: Any) -> Any:
        return x * w if KINDS[name](w) else x * 0

    w = torch.tensor([2.0])
    torch.testing.assert_close(jit(function)(X, w).values, X.values * 2)


def test_the_classes_of_traced_ragged_and_keyed_tensors() -> None:
    keyed = serrate.keyed({"a": X, "b": X})

    def function(x: Any, k: Any) -> Any:
        right = type(x) is JaggedTensor and type(k) is KeyedJaggedTensor and isinstance(k, KeyedJaggedTensor)
        return x * k["a"] if right else x * 0

    torch.testing.assert_close(jit(function)(X, keyed).values, function(X, keyed).values)


def test_the_module_of_a_traced_function_keeps_its_type() -> None:
    """Tracing replaces `type` in the globals of the function; also if the function fails, or calls another that is traced."""

    def failing(x: Any) -> Any:
        raise ValueError(type(x).__name__)

    inner = jit(lambda x: x * 2 if type(x) is Tensor else x)

    def calling(x: Any, w: Any) -> Any:
        return x * inner(w) * inner(x) * (1 if type(w) is Tensor else 0)

    with pytest.raises(ValueError, match="JaggedTensor"):
        jit(failing)(X)
    for _ in range(2):
        torch.testing.assert_close(jit(calling)(X, torch.ones(1)).values, X.values.square() * 2)
    assert not {"type", "isinstance"} & globals().keys()


def test_a_type_of_the_users_own_is_called() -> None:
    names: dict[str, Any] = {"type": lambda _: 3.0, "__name__": "a_users_module"}
    exec("def function(x):\n    return x * type(x)", names)
    torch.testing.assert_close(jit(names["function"])(X).values, X.values * 3)
    names["type"] = lambda _: 4.0


def test_a_function_that_asks_for_a_type_is_traced_once() -> None:
    traces: list[int] = []

    def function(x: Any, w: Any) -> Any:
        traces.append(1) if type(w) is Tensor else None
        return x * w

    f = jit(function)
    for _ in range(3):
        f(X, torch.ones(1))
    assert traces == [1]


def test_a_traced_dense_tensor_matches_a_class_pattern() -> None:
    def function(x: Any, w: Any) -> Any:
        match w:
            case Tensor():
                return x * w
            case _:
                return x * 0

    torch.testing.assert_close(jit(function)(X, torch.tensor([2.0])).values, X.values * 2)


def test_torch_stores_a_traced_tensor_that_stands_in_for_a_parameter() -> None:
    layer = nn.Linear(2, 3)
    given = {"weight": torch.randn(3, 2), "bias": torch.randn(3)}
    dense = torch.randn(5, 2)

    def function(params: Any, x: Any) -> Any:
        return torch.func.functional_call(layer, params, (x,))

    torch.testing.assert_close(jit(function)(given, dense), dense @ given["weight"].T + given["bias"])
    assert all(type(each) is nn.Parameter for each in layer.parameters())


def test_traced_dense_tensors_do_not_pass_for_memory() -> None:
    """torch's own code reads the memory of whatever passes for its tensor, and would do so here."""

    def chosen(x: Any) -> Any:
        total = x.sum(1)
        return torch.where(total > 0, total, -1.0)

    torch.testing.assert_close(jit(chosen)(X), chosen(X))
    with pytest.raises(TraceError):
        jit(lambda x: torch.as_tensor(x.sum(1)))(X)


@pytest.mark.parametrize("name", ["max_length", "requires_grad"])
def test_what_is_no_operation_is_not_known_while_tracing(name: str) -> None:
    with pytest.raises(TraceError, match=rf"no attribute '{name}' .*test_jit_effects.py.*pass it as an argument"):
        jit(lambda x: getattr(x, name))(X)


def test_a_traced_tensor_that_is_kept_is_refused() -> None:
    results: list[Any] = []
    table: dict[str, Any] = {}
    last: Any = None

    class Holder:
        last: Any = None

        def run(self, x: Any) -> Any:
            self.last = x * 2
            return self.last

    holder = Holder()

    def listed(x: Any) -> Any:
        y = x * 2
        results.append(y)
        return y

    def stored(x: Any) -> Any:
        table["y"] = x * 2
        return x

    def held(x: Any) -> Any:
        holder.last = x * 2
        return x

    def named(x: Any) -> Any:
        nonlocal last
        last = x * 2
        return x

    for function in (listed, stored, held, named, holder.run):
        results.clear()
        table.clear()
        holder.last = last = None
        with pytest.raises(TraceError, match="the function stores a traced tensor in "):
            jit(function)(X)


def test_what_a_function_makes_and_keeps_for_itself() -> None:
    class Cached:
        table: Any = None

        def run(self, x: Any) -> Any:
            if self.table is None:
                self.table = torch.full((1,), 3.0)
            parts = []
            parts.append(x * self.table)
            return parts[0]

    f = jit(Cached().run)
    for _ in range(3):
        assert f(X).values.equal(X.values * 3)
