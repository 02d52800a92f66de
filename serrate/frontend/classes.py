"""Classes: what `type` and `isinstance` answer about traced tensors in the functions that are being traced.

In: the globals of functions that use these names. Out: a context in which the names stand for functions that answer as they do
elsewhere: `type(x) is torch.Tensor` for a dense traced tensor, `type(n) is int` for a symbolic size.

No object can change what Python's own `type` says about it, so the traced code must see another `type`. A direct call of
`isinstance` needs no help, since it asks the object (`ir.callers`); `map(isinstance, ...)` does, because no instruction shows the
question.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from serrate.frontend.keyed import TracedKeyed
from serrate.ir import callers
from serrate.ir.view import Size, TensorView, standing_for


def class_of(value: Any) -> type:
    """The class of what a traced value stands for; `type(value)` of anything else."""
    kind = type(value)
    if standing_for.get() is not None and issubclass(kind, TensorView | Size | TracedKeyed):
        found: type = value.stands_for()
        return found
    return kind


class _LikeType(type):
    """Makes a class that stands for `type` wherever code names it: in calls, in `isinstance`, as a base."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not AnsweringType:
            return super().__call__(*args, **kwargs)
        return class_of(*args) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, type) if cls is AnsweringType else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type) if cls is AnsweringType else super().__subclasscheck__(subclass)


class AnsweringType(type, metaclass=_LikeType):
    """`type`, as traced functions see it."""


def answering_isinstance(value: Any, kinds: Any) -> bool:
    """`isinstance`, as traced functions that pass it on see it."""
    return isinstance(value, kinds)


callers.ASKING.append(answering_isinstance.__code__)

ANSWERING = {"type": AnsweringType, "isinstance": answering_isinstance}
"""Builtins that are replaced, by name."""

_open = collections.Counter[tuple[int, str]]()
"""How many traces replace a name in some globals; changed under the lock that all traces hold."""


def is_builtin(name: str, names: dict[str, Any]) -> bool:
    """Whether some globals leave a name to Python's builtins, or did so before a trace began."""
    return name not in names or (name in ANSWERING and names[name] is ANSWERING[name])


@contextmanager
def answering(uses: Iterable[tuple[dict[str, Any], str]]) -> Iterator[None]:
    """Replaces builtins in globals, each given with the name of the builtin.

    Other threads that run this code meanwhile see the replacements too; they answer as the builtins, except about traced values.
    """
    uses = list(uses)
    for names, name in uses:
        names.setdefault(name, ANSWERING[name])
        _open[id(names), name] += 1
    try:
        yield
    finally:
        for names, name in uses:
            _open[id(names), name] -= 1
            if not _open[id(names), name]:
                del _open[id(names), name]
                if names.get(name) is ANSWERING[name]:
                    del names[name]
