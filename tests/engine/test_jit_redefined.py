"""`serrate.jit` and what a function reads beside its arguments: redefined, replaced, untied or changed between calls.

In: functions that read names, attributes, items, defaults and closures. Out: failures against the same function called on plain
rows. On the reference backend: nothing here is about code.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import sys
import types
from collections import UserDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from serrate import JaggedTensor, jit
from serrate.errors import TraceError
from serrate.frontend.dependencies import snapshot

pytestmark = pytest.mark.usefixtures("reference")

X = JaggedTensor.from_lengths(torch.arange(6.0) + 1, [2, 0, 3, 1])


def check(jitted: Callable[..., Any], plain: Callable[..., Any], *more: Any) -> None:
    """Twice, so that the second call is a warm one: each row is what the plain function makes of it."""
    for _ in range(2):
        got = jitted(X, *more)
        for mine, row in zip(got, X, strict=True):
            torch.testing.assert_close(mine, plain(row, *more))


def cell(text: str, names: dict[str, Any]) -> None:
    """Runs a notebook's cell."""
    exec(compile(text, "<cell>", "exec"), names)


# --- tensors under two names -------------------------------------------------------------------------------------------------


class TwoNames:
    def __init__(self) -> None:
        self.initial = torch.full((1,), 3.0)
        self.w = self.initial

    def plain(self, x: Any) -> Any:
        return x * self.w

    @jit
    def scaled(self, x: Any) -> Any:
        return x * self.w


def test_the_attribute_that_was_read_is_the_one_that_is_followed() -> None:
    s = TwoNames()
    check(s.scaled, s.plain)
    s.w = torch.full((1,), 5.0)
    check(s.scaled, s.plain)
    s.initial = torch.full((1,), 7.0)
    check(s.scaled, s.plain)
    s.w = s.initial
    check(s.scaled, s.plain)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.outward.weight = self.inward.weight

    def forward(self, x: Any) -> Any:
        return self.outward(torch.relu(self.inward(x)))


def test_tied_weights_that_are_untied_and_tied_again() -> None:
    model = Tied()
    jitted = jit(model)
    x = JaggedTensor.from_lengths(torch.randn(5, 1), [2, 0, 3])

    def agree() -> None:
        for _ in range(2):
            torch.testing.assert_close(jitted(x).values, model(x.values))

    with torch.no_grad():
        agree()
        model.outward.weight = nn.Parameter(torch.full((1, 1), 4.0))
        agree()
        model.inward.weight = nn.Parameter(torch.full((1, 1), -2.0))
        agree()
        model.outward.weight = model.inward.weight
        agree()


@pytest.mark.parametrize("place", [0, 1, -1])
def test_one_tensor_twice_in_a_list(place: int) -> None:
    t = torch.full((1,), 2.0)
    ws = [t] * 2

    def function(x: Any) -> Any:
        return x * ws[place]

    def last(x: Any) -> Any:
        return x * ws[1] + ws[-1]

    for f in (function, last):
        jitted = jit(f)
        for k, value in ((0, 3.0), (1, 4.0), (0, 5.0)):
            check(jitted, f)
            ws[k] = torch.full((1,), value)
            check(jitted, f)
        ws[:] = [t, t]


def test_a_closure_and_a_global_that_were_one_tensor() -> None:
    names: dict[str, Any] = {"jit": jit, "w": torch.full((1,), 2.0)}
    cell("def make(v):\n    def f(x): return x * v + w\n    return f\nf = make(w); g = jit(f)", names)
    check(names["g"], names["f"])
    names["w"] = torch.full((1,), 3.0)
    check(names["g"], names["f"])


# --- what is redefined -------------------------------------------------------------------------------------------------------


def test_a_helper_that_is_defined_again() -> None:
    names: dict[str, Any] = {"jit": jit}
    cell("def deep(x): return x + 1\ndef helper(x): return deep(x) * 2\ndef f(x): return helper(x)\ng = jit(f)", names)
    check(names["g"], names["f"])
    cell("def helper(x): return deep(x) * 3", names)
    check(names["g"], names["f"])
    cell("def deep(x): return x - 5", names)
    check(names["g"], names["f"])
    names["deep"].__code__ = (lambda x: x * x).__code__
    check(names["g"], names["f"])
    cell("import torch\nhelper = torch.neg", names)
    check(names["g"], names["f"])


VALUES: list[list[Any]] = [
    [2.0, torch.full((1,), 3.0), 4.0],
    [torch.full((1,), 3.0), None, torch.full((1,), 4.0)],
    [None, 2.0, None],
    [1, 1.0, True, 2],
]


@pytest.mark.parametrize("values", VALUES, ids=["float and tensor", "tensor and None", "None and float", "kinds of one"])
def test_a_global_of_another_type(values: list[Any]) -> None:
    names: dict[str, Any] = {"jit": jit}
    cell("def f(x): return x / 2 if w is None else x * w\ng = jit(f)", names)
    for value in values * 2:
        names["w"] = value
        check(names["g"], names["f"])


def test_a_global_that_hides_a_builtin_and_goes_again() -> None:
    names: dict[str, Any] = {"jit": jit}
    cell("def f(x): return x * max(1, 2)\ng = jit(f)", names)
    check(names["g"], names["f"])
    names["max"] = min
    check(names["g"], names["f"])
    del names["max"]
    check(names["g"], names["f"])


class Settings:
    scale = 2.0
    inner: Any = None


class More(Settings):
    """Inherits everything."""


@pytest.mark.parametrize("kind", [Settings, More])
def test_attributes_of_classes(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Any) -> Any:
        return x * kind.scale

    jitted = jit(function)
    check(jitted, function)
    monkeypatch.setattr(Settings, "scale", 3.0)
    check(jitted, function)
    monkeypatch.setattr(kind, "scale", torch.full((1,), 4.0))
    check(jitted, function)


def test_attributes_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("settings_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.scale, module.act = 2.0, torch.relu  # type: ignore[attr-defined]

    def function(x: Any) -> Any:
        return module.act(x) * module.scale

    def imported(x: Any) -> Any:
        import settings_of_a_test as own  # type: ignore[import-not-found]
        from settings_of_a_test import act

        return act(x) * own.scale

    both = [(f, jit(f)) for f in (function, imported)]
    for f, jitted in both:
        check(jitted, f)
    module.scale = 3.0  # type: ignore[attr-defined]
    for f, jitted in both:
        check(jitted, f)
    module.act = lambda x: x - 1  # type: ignore[attr-defined]
    for f, jitted in both:
        check(jitted, f)


@dataclasses.dataclass
class Config:
    x: Any = 2.0
    name: str = "relu"


@dataclasses.dataclass(frozen=True)
class Frozen:
    inside: Any


class Slots:
    __slots__ = ("__weakref__", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Computed:
    """An attribute that is computed from another one."""

    def __init__(self, x: Any) -> None:
        self._x = x

    @property
    def x(self) -> Any:
        return self._x

    @x.setter
    def x(self, x: Any) -> None:
        self._x = x


class ByName:
    """Attributes that are kept in a dict."""

    def __init__(self, **kept: Any) -> None:
        self.__dict__["kept"] = kept

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["kept"][name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.kept[name] = value


CONFIGS: list[Callable[[], Any]] = [
    Config,
    lambda: types.SimpleNamespace(x=2.0),
    lambda: Slots(2.0),
    lambda: Computed(2.0),
    lambda: ByName(x=2.0),
    Settings,
]


class Owner:
    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def plain(self, x: Any) -> Any:
        return x * getattr(self.cfg, "x", 10.0)

    def direct(self, x: Any) -> Any:
        return x * self.cfg.x

    def method(self, x: Any) -> Any:
        return self.direct(x) + self.cfg.x


@pytest.mark.parametrize("make", CONFIGS, ids=["dataclass", "namespace", "slots", "property", "getattr", "class attribute"])
def test_attributes_of_attributes(make: Callable[[], Any]) -> None:
    owner = Owner(make())
    if isinstance(owner.cfg, Settings):
        owner.cfg.x = 2.0
    cfg = owner.cfg
    functions: list[Callable[..., Any]] = [
        owner.plain,
        owner.direct,
        owner.method,
        lambda x: x * cfg.x,
        lambda x: x + owner.cfg.x,
    ]
    both = [(f, jit(f)) for f in functions]
    values = [2.0, 3.0, torch.full((1,), 4.0), torch.full((1,), 5.0), 2, 3.0]
    for value in values:
        owner.cfg.x = value
        for f, jitted in both:
            check(jitted, f)
    owner.cfg = Config(7.0)
    for f, jitted in both:
        check(jitted, f)


def test_mutable_objects_as_arguments() -> None:
    def function(x: Any, cfg: Any) -> Any:
        return x * cfg.x

    jitted = jit(function)
    for make in (Config, lambda: types.SimpleNamespace(x=2.0), lambda: Slots(2.0), lambda: Frozen(Config())):
        cfg: Any = make()
        inside = cfg.inside if isinstance(cfg, Frozen) else cfg
        f, g = (function, jitted) if inside is cfg else ((f := lambda x, c: x * c.inside.x), jit(f))
        for value in (2.0, 3.0, torch.full((1,), 4.0), torch.full((1,), 5.0)):
            inside.x = value
            check(g, f, cfg)


def test_equal_objects_that_are_told_apart_by_what_they_hold() -> None:
    class Same:
        def __init__(self, x: float) -> None:
            self.x = x

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Same)

        def __hash__(self) -> int:
            return 1

    def function(x: Any, same: Any) -> Any:
        return x * same.x

    jitted = jit(function)
    for value in (1.0, 2.0, 1.0):
        check(jitted, function, Same(value))


def test_functions_as_arguments_are_known_by_what_they_do() -> None:
    traces: list[int] = []

    def function(x: Any, act: Any) -> Any:
        traces.append(1)
        return act(x)

    jitted = jit(function)
    for scale in (2.0, 2.0, 3.0, 2.0):
        check(jitted, function, lambda x, scale=scale: x * scale)
        check(jitted, function, lambda x: x * scale)  # noqa: B023
        check(jitted, function, functools.partial(torch.mul, other=scale))
    traced = len(traces) - 24 * len(X)
    assert traced == 6


def test_defaults_of_parameters() -> None:
    def helper(x: Any, scale: Any = 2.0, *, shift: Any = 1.0) -> Any:
        return x * scale + shift

    def function(x: Any, scale: Any = 2.0, *, shift: Any = 1.0) -> Any:
        return helper(x) * scale + shift

    jitted = jit(function)
    for f in (helper, function):
        check(jitted, function)
        f.__defaults__ = (3.0,)
        check(jitted, function)
        f.__kwdefaults__ = {"shift": 5.0}
        check(jitted, function)
        f.__defaults__ = (torch.full((1,), 7.0),)
        check(jitted, function)
        f.__defaults__ = (torch.full((1,), 8.0),)
        check(jitted, function)


def test_the_content_of_containers() -> None:
    scales: list[Any] = [1.0, 2.0]
    table: dict[str, Any] = {"a": 2.0, "b": [torch.full((1,), 3.0)]}
    several, queue, user = {1.0}, deque([1.0]), UserDict(a=1.0)
    functions: list[Callable[..., Any]] = [
        lambda x: x * scales[1],
        lambda x: x * sum(scales),
        lambda x: x * table["a"],
        lambda x: sum((x * w for w in table["b"]), x),
        lambda x: x * (2.0 if "c" in table else 1.0),
        lambda x: x * max(several),
        lambda x: x * queue[0],
        lambda x: x * user["a"],
    ]
    both = [(f, jit(f)) for f in functions]
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: scales.append(5.0),
        lambda: scales.__setitem__(1, 7.0),
        lambda: table.update(a=9.0),
        lambda: table["b"].append(torch.full((1,), 4.0)),
        lambda: table["b"].__setitem__(0, torch.full((1,), 5.0)),
        lambda: table.update(c=None),
        lambda: several.add(6.0),
        lambda: queue.appendleft(3.0),
        lambda: user.update(a=3.0),
    ]
    for change in changes:
        change()
        for f, jitted in both:
            check(jitted, f)


MODE: ContextVar[float] = ContextVar("mode", default=2.0)


class Kind(type):
    def __getitem__(cls, name: str) -> Any:
        return scales_of_classes[name]


class Indexed(metaclass=Kind):
    """Has items."""


scales_of_classes = {"a": 2.0}


def test_context_variables_environment_and_metaclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TEST_OF_JIT", "2")
    functions: list[Callable[..., Any]] = [
        lambda x: x * MODE.get(),
        lambda x: x * float(os.getenv("A_TEST_OF_JIT") or 0),
        lambda x: x * float(os.environ.get("A_TEST_OF_JIT", 0)),
        lambda x: x * Indexed["a"],
    ]
    both = [(f, jit(f)) for f in functions]
    for f, jitted in both:
        check(jitted, f)
    token = MODE.set(3.0)
    monkeypatch.setenv("A_TEST_OF_JIT", "3")
    monkeypatch.setitem(scales_of_classes, "a", 3.0)
    for f, jitted in both:
        check(jitted, f)
    MODE.reset(token)


class Level(enum.Enum):
    LOW, HIGH = 1, 2


def test_enums_environment_and_function_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = types.SimpleNamespace(level=Level.LOW)

    def helper(x: Any) -> Any:
        return x * helper.scale  # type: ignore[attr-defined]

    helper.scale = 2.0  # type: ignore[attr-defined]
    monkeypatch.setenv("A_TEST_OF_JIT", "1")
    functions: list[Callable[..., Any]] = [
        lambda x: x if cfg.level is Level.LOW else -x,
        helper,
        lambda x: x * float(os.environ["A_TEST_OF_JIT"]),
    ]
    both = [(f, jit(f)) for f in functions]
    for f, jitted in both:
        check(jitted, f)
    cfg.level = Level.HIGH
    helper.scale = 3.0  # type: ignore[attr-defined]
    monkeypatch.setenv("A_TEST_OF_JIT", "2")
    for f, jitted in both:
        check(jitted, f)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1) for _ in range(2)])
        self.act: Any = torch.relu
        self.by_name = nn.ModuleDict({"a": nn.Linear(1, 1)})

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = self.act(layer(x))
        return self.by_name["a"](x)


def test_modules_whose_parts_are_replaced() -> None:
    model = Layers()
    jitted = jit(model)
    x = JaggedTensor.from_lengths(torch.randn(5, 1), [2, 0, 3])

    def again() -> None:
        for _ in range(2):
            torch.testing.assert_close(jitted(x).values, model(x.values))

    with torch.no_grad():
        again()
        model.act = torch.tanh
        again()
        model.layers.append(nn.Linear(1, 1))
        again()
        model.layers[0] = nn.Linear(1, 1, bias=False)
        again()
        model.layers[1].bias = None
        again()
        model.by_name["a"] = nn.Identity()
        again()
        handle = model.layers[0].register_forward_hook(lambda module, args, out: out + 1)
        again()
        handle.remove()
        again()
        model.forward = lambda x: x * 3  # type: ignore[method-assign]
        again()


class Weights(nn.Module):
    """Parameters in torch's containers, which look them up by names that they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(1) for _ in range(3)])
        self.named = nn.ParameterDict({"a": torch.randn(1), "item": torch.randn(1)})
        self.named["factor"] = 2.0

    def forward(self, x: Any) -> Any:
        x = x * self.named["a"] + self.named["factor"] + self.listed[0]
        for weight in self.listed:
            x = torch.tanh(x * weight)
        return x * sum(self.named[key] for key in self.named if key != "factor") + len(self.listed)


def test_containers_of_parameters_that_are_replaced() -> None:
    model = Weights()
    jitted = jit(model)
    x = JaggedTensor.from_lengths(torch.randn(5, 1), [2, 0, 3])

    def again() -> None:
        for _ in range(2):
            torch.testing.assert_close(jitted(x).values, model(x.values))

    again()
    got = torch.autograd.grad(jitted(x).values.sum(), [*model.parameters()])
    torch.testing.assert_close(got, torch.autograd.grad(model(x.values).sum(), [*model.parameters()]), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.listed[1].fill_(0.5)
        again()
        model.listed[1] = nn.Parameter(torch.full((1,), 3.0))
        again()
        model.listed.append(nn.Parameter(torch.full((1,), -2.0)))
        again()
        model.named["a"] = nn.Parameter(torch.full((1,), 5.0))
        again()
        model.named["more"] = nn.Parameter(torch.full((1,), 0.25))
        again()
        model.named["factor"] = -1.0
        again()
        del model.named["item"]
        again()


LINEAR = nn.Linear(1, 1)


def test_methods_of_modules_that_are_called_by_name() -> None:
    jitted = jit(lambda x: LINEAR.forward(x) + sum(p.sum() for p in LINEAR.parameters()))
    x = JaggedTensor.from_lengths(torch.randn(5, 1), [2, 0, 3])
    with torch.no_grad():
        for _ in range(2):
            for _ in range(2):
                total = LINEAR.weight.sum() + LINEAR.bias.sum()
                torch.testing.assert_close(jitted(x).values, LINEAR(x.values) + total)
            LINEAR.weight = nn.Parameter(torch.full((1, 1), 4.0))


def test_methods_that_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        def act(self, x: Any) -> Any:
            return x * 2

    class Derived(Base):
        def run(self, x: Any) -> Any:
            return self.act(x)

        def above(self, x: Any) -> Any:
            return super().act(x)  # type: ignore[misc]

    d = Derived()
    both = [(f, jit(f)) for f in (d.run, d.above)]
    for change in (
        lambda: None,
        lambda: setattr(Base, "act", lambda self, x: x * 3),
        lambda: setattr(Derived, "act", lambda self, x: x * 4),
        lambda: setattr(d, "act", lambda x: x * 5),
    ):
        change()
        for f, jitted in both:
            check(jitted, f)


def test_shapes_and_dtypes_that_are_asked_of_tensors_outside() -> None:
    names: dict[str, Any] = {"jit": jit, "w": torch.ones(2)}
    cell("def f(x): return x * w.shape[0] + w.dtype.itemsize + w.dim()\ng = jit(f)", names)
    for w in (torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(2, 2)):
        names["w"] = w
        check(names["g"], names["f"])


def test_one_of_many_traces_for_a_number_that_never_stays_is_told() -> None:
    names: dict[str, Any] = {"jit": jit, "step": 0}
    cell("def f(x): return x * step\ng = jit(f)", names)
    with pytest.warns(UserWarning, match=r"f was retraced \d+ times .* `step`"):
        for step in range(40):
            names["step"] = step
            check(names["g"], names["f"])


def test_what_cannot_be_followed_is_refused() -> None:
    numbers = iter([1.0, 2.0])
    with pytest.raises(TraceError, match=r"`numbers` is an iterator"):
        jit(lambda x: x * next(numbers))(X)
    with pytest.raises(TraceError, match="eval"):
        jit(lambda x: x * eval("2"))(X)
    with pytest.raises(TraceError, match=r"torch\.is_grad_enabled\(\) cannot be used"):
        jit(lambda x: x * 2 if torch.is_grad_enabled() else x)(X)


def test_code_of_installed_packages_is_not_followed() -> None:
    """An assertion that pytest has rewritten reaches all tests of the session through pytest's own modules."""

    def twice(rows: Any) -> Any:
        assert rows.size(0) == 2
        with pytest.raises(ValueError):
            raise ValueError
        return rows * 2

    taken, _ = snapshot(twice)
    assert len(taken.paths) < 40
    jt = JaggedTensor.from_lengths(torch.ones(3, 1), [1, 2])
    assert jit(twice)(jt).values.tolist() == [[2.0]] * 3


def test_arrays_of_numpy_whose_attributes_and_methods_are_read() -> None:
    names: dict[str, Any] = {"jit": jit, "a": np.array([1.0, 2.0]), "holder": types.SimpleNamespace(a=np.array([3.0]))}
    text = "def f(x): return x * float(a.max()) + a.sum().item() + a.shape[0] + float(holder.a.mean())\ng = jit(f)"
    cell(text, names)
    check(names["g"], names["f"])
    names["a"][1] = 7.0
    check(names["g"], names["f"])
    names["a"] = np.array([5.0, 1.0, 2.0])
    check(names["g"], names["f"])
    names["holder"].a = np.array([4.0, 6.0])
    check(names["g"], names["f"])


def test_modes_of_torch_that_are_asked_for() -> None:
    def f(x: Any) -> Any:
        x = x + 1 if torch.is_inference_mode_enabled() else x
        return x - 5 if torch.are_deterministic_algorithms_enabled() else x

    g = jit(f)
    for _ in range(2):
        check(g, f)
        with torch.inference_mode():
            check(g, f)
        torch.use_deterministic_algorithms(True)
        try:
            check(g, f)
        finally:
            torch.use_deterministic_algorithms(False)
