"""What a traced function reaches that is no argument: tensors, which become inputs, and numbers, which it is traced with.

In: a function and the arguments of a call. Out: where each tensor was found (a closure, a global name, `self`, a module's
parameters), so that every call reads the tensor that is there then; and the numbers that a trace relies on.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from serrate.frontend.leaves import Leaf
from serrate.frontend.trace import described
from serrate.tensor import JaggedTensor

Step = tuple[str, Any]
PLAIN = (int, float, bool, str, type(None), torch.dtype)
"""What a trace is specialised on where it is found outside."""
LIMIT = 20_000
"""How many objects are looked at to find a tensor again."""


@dataclass(frozen=True)
class Source:
    """The way to something outside: from the function, or from the arguments, step by step."""

    steps: tuple[Step, ...]

    def read(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What is there now; None where the way has come to an end."""
        at: Any = {"function": function, "args": args, "kwargs": kwargs}
        try:
            for kind, key in self.steps:
                at = _step(at, kind, key)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return None
        return at


def _step(at: Any, kind: str, key: Any) -> Any:
    if kind == "item":
        return at[key]
    if kind == "vars":
        return vars(at)[key]
    if kind == "cell":
        return at.__closure__[key].cell_contents
    if kind == "global":
        return at.__globals__[key]
    if kind == "called":
        return at()
    return getattr(at, key)


def _parts(at: Any) -> Iterator[tuple[Step, Any]]:
    """What an object is made of, and the step to each part."""
    if isinstance(at, dict):
        yield from ((("item", key), part) for key, part in at.items())
    elif isinstance(at, list | tuple):
        yield from ((("item", k), part) for k, part in enumerate(at))
    elif isinstance(at, types.FunctionType):
        for k, cell in enumerate(at.__closure__ or ()):
            try:
                yield ("cell", k), cell.cell_contents
            except ValueError:
                continue  # not filled yet
        for name in sorted(_names(at.__code__)):
            if name in at.__globals__:
                yield ("global", name), at.__globals__[name]
    elif isinstance(at, types.MethodType):
        yield ("attribute", "__self__"), at.__self__
        yield ("attribute", "__func__"), at.__func__
    elif isinstance(at, weakref.ref):
        yield ("called", None), at()
    elif isinstance(at, functools.partial):
        for name in ("func", "args", "keywords"):
            yield ("attribute", name), getattr(at, name)
    elif not isinstance(at, type | types.ModuleType) and hasattr(at, "__dict__"):
        inside = vars(at)
        # Of what wraps a function only the function matters, not what is remembered for it.
        for name in ("fn",) if "__wrapped__" in inside else inside:
            yield ("vars", name), inside[name]
        if isinstance(vars(type(at)).get("__call__"), types.FunctionType):
            yield ("attribute", "__call__"), at.__call__
        if isinstance(at, torch.nn.Module):
            yield ("attribute", "forward"), at.forward


def _names(code: types.CodeType) -> set[str]:
    """The global names that code and the functions made in it speak of."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _walk(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[tuple[Step, ...], Any]]:
    """Everything that a call reaches, nearest first, each object once, with the steps to it."""
    start = {"function": function, "args": tuple(args), "kwargs": dict(kwargs)}
    pending: deque[tuple[tuple[Step, ...], Any]] = deque([((), start)])
    seen = {id(start)}
    while pending and len(seen) < LIMIT:
        steps, at = pending.popleft()
        for step, part in _parts(at):
            if isinstance(part, PLAIN):
                yield (*steps, step), part
            elif id(part) not in seen:
                seen.add(id(part))
                yield (*steps, step), part
                if not isinstance(part, torch.Tensor | JaggedTensor):
                    pending.append(((*steps, step), part))


class Method:
    """A function with an object as its first argument, which it does not keep alive."""

    def __init__(self, function: Callable[..., Any], owner: weakref.ref[Any]) -> None:
        self.function, self.owner = function, owner
        self.__name__ = getattr(function, "__name__", "method")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.owner(), *args, **kwargs)


def _numbers(function: Any) -> list[Source]:
    """The numbers that a function was written with: closed over, named, and kept by the object whose method it is."""
    found: list[Source] = []
    seen: set[int] = set()

    def visit(steps: tuple[Step, ...], at: Any, module: str | None) -> None:
        if id(at) in seen:
            return
        seen.add(id(at))
        if isinstance(at, types.FunctionType):
            for step, part in _parts(at):
                note((*steps, step), part, at.__module__)
        elif isinstance(at, Method | types.MethodType | functools.partial | weakref.ref) or "__wrapped__" in getattr(
            at, "__dict__", ()
        ):
            for step, part in _parts(at):
                visit((*steps, step), part, module)
        elif isinstance(at, torch.nn.Module):
            # Whether a module trains decides what it does.
            found.extend(Source((*steps, *_way(name), ("vars", "training"))) for name, _ in at.named_modules())
            plain = (name for name, part in vars(at).items() if isinstance(part, PLAIN) and not name.startswith("_"))
            found.extend(Source((*steps, ("vars", name))) for name in plain)
        elif not isinstance(at, (dict, list, tuple, type, types.ModuleType, torch.Tensor, JaggedTensor)):
            plain = (name for name, part in getattr(at, "__dict__", {}).items() if isinstance(part, PLAIN))
            found.extend(Source((*steps, ("vars", name))) for name in plain)

    def note(steps: tuple[Step, ...], part: Any, module: str) -> None:
        if isinstance(part, PLAIN):
            found.append(Source(steps))
        elif isinstance(part, torch.nn.Module) or getattr(part, "__module__", None) == module:
            # Functions of the same file, and traced ones, are part of the program.
            visit(steps, part, module)

    visit((("item", "function"),), function, None)
    return list(dict.fromkeys(found))


def _way(name: str) -> tuple[Step, ...]:
    return tuple(step for part in name.split(".") if part for step in (("vars", "_modules"), ("item", part)))


@dataclass
class Outside:
    """What one function reaches beside its arguments. Grows while the function is traced."""

    function: Any
    tensors: list[Source] = field(default_factory=list)
    numbers: list[Source] | None = None
    """Looked for at the first call: what a function speaks of may be made behind it."""

    def numbers_now(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The numbers as they are now: part of what a trace is specialised on."""
        if self.numbers is None:
            self.numbers = _numbers(self.function)
        found = [source.read(self.function, args, kwargs) for source in self.numbers]
        return tuple(described(n) if isinstance(n, PLAIN) else None for n in found)

    def tensors_now(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Leaf | None]:
        """The tensors as they are now."""
        found = [source.read(self.function, args, kwargs) for source in self.tensors]
        return [each if isinstance(each, torch.Tensor | JaggedTensor) else None for each in found]

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaf: Leaf) -> bool:
        """Finds the way to a tensor and remembers it; whether there is one."""
        for steps, at in _walk(self.function, args, kwargs):
            if at is leaf:
                self.tensors.append(Source(steps))
                return True
        return False
