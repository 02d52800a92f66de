"""Python objects by kind: plain values, containers, wrappers, random number generators, and code that is assumed constant.

In: an object, class or module name. Out: how the walk over a function's dependencies treats it.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from serrate.frontend.bytecode import reads_of

MISSING = object()
"""Marks an absent value."""
INSTALLED = tuple({Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")})
"""Where packages are installed."""

PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size, range, slice)
"""Immutable types, compared by value."""
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
WRITES = frozenset(("append", "appendleft", "add", "extend", "insert", "clear", "discard"))
"""Methods that change a container without reading it."""
MAKING = frozenset(("__init__", "__new__", "__post_init__"))
"""Methods of a class that create objects."""
_OF_OBJECTS = (
    "call getattr getattribute getitem iter next len bool contains reversed enter exit float int index hash eq ne lt le gt ge "
    "neg pos abs invert str repr format get missing class_getitem torch_function"
)
_OF_PAIRS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
IMPLICIT = frozenset(
    f"__{name}__" for name in (*_OF_OBJECTS.split(), *(f"{side}{name}" for name in _OF_PAIRS.split() for side in ("", "r", "i")))
)
"""Methods that are called implicitly."""
MODES: tuple[Callable[[], object], ...] = (
    torch.is_inference_mode_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.get_num_threads,
)
"""Functions that return modes of torch. If a traced function calls one, every later call compares its result."""
HOOKS = ("forward", "_forward_hooks", "_forward_pre_hooks")
"""Attributes that calling a torch module reads."""
PARTS = ("_parameters", "_buffers", "_modules")
"""The dicts in which a torch module keeps attributes."""


HEAP = 1 << 9
"""The flag of classes defined in Python."""


class WeakMethod:
    """A function bound to an object that it does not keep alive."""

    def __init__(self, function: Callable[..., Any], owner: weakref.ref[Any]) -> None:
        self.function, self.owner = function, owner
        self.__name__ = getattr(function, "__name__", "method")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.owner(), *args, **kwargs)


TRANSPARENT: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    functools.cached_property: ("func",),
    functools.partialmethod: ("func", "args", "keywords"),
    WeakMethod: ("function", "owner"),
}
"""Objects that are fully described by their parts."""

READ_INSIDE = frozenset(("collections", "os", "weakref", "_collections_abc"))
"""Standard-library modules whose classes hold users' objects and read them in their methods."""


def differs(a: Any, b: Any) -> bool:
    """Whether two plain values differ: 1, 1.0 and True differ, and so do 0.0 and -0.0, but NaN equals NaN."""
    if type(a) is not type(b):
        return True
    if type(a) is float or type(a) is complex:
        return repr(a) != repr(b)
    return bool(a != b)


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
    """Whether a module belongs to the standard library, to serrate or to an installed package, whose code is assumed constant."""
    package = module.partition(".")[0]
    if package in ("torch", "serrate") or (package in sys.stdlib_module_names and package != "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(folder) for folder in INSTALLED)


def has_stable_code(obj: Any) -> bool:
    """Whether a function or class belongs to a library."""
    module = obj.__globals__.get("__name__") if isinstance(obj, types.FunctionType) else getattr(obj, "__module__", None)
    return is_library(module or "")


def in_mro(kind: type, name: str) -> Any:
    """The attribute of a class or of one of its bases."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), MISSING)


@functools.lru_cache(maxsize=1024)
def reads_of_library_class(kind: type) -> tuple[frozenset[str], bool]:
    """The attributes that a library class reads from its own objects in implicitly called methods; whether it computes the names
    of some, as `ParameterList` does, and so may read any."""
    methods: dict[str, types.FunctionType] = {}
    for base in reversed(kind.__mro__):
        if base is not torch.nn.Module:
            methods |= {name: f for name, f in vars(base).items() if isinstance(f, types.FunctionType)}
    names, every = set[str](), False
    pending = [name for name in methods if name in IMPLICIT or name in ("forward", "get", "items", "keys", "values")]
    done: set[str] = set()
    while pending:
        name = pending.pop()
        if name in done:
            continue
        done.add(name)
        reads = reads_of(methods[name].__code__)
        names, every = names | reads.names, every or reads.every
        pending += [own for own in reads.names if own in methods]
    return frozenset(names - methods.keys()), every


def is_foreign(obj: Any) -> bool:
    """Whether an attribute of a library module was put there by other code."""
    return not isinstance(obj, types.ModuleType) and isinstance(obj, types.FunctionType) and not has_stable_code(obj)


def is_read_inside(obj: Any) -> bool:
    """Whether methods of a library class read what users put into its objects."""
    return isinstance(obj, torch.nn.Module) or type(obj).__module__ in READ_INSIDE


def is_generator(obj: Any) -> bool:
    """Whether an object is a random number generator."""
    return isinstance(obj, random.Random | torch.Generator) or type(obj).__module__.startswith("numpy.random")


def slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class defined in Python."""
    members = (name for base in kind.__mro__ for name, raw in vars(base).items() if isinstance(raw, types.MemberDescriptorType))
    return tuple(members) if kind.__flags__ & HEAP else ()


def is_array(obj: Any) -> bool:
    """Whether an object is an array, such as a NumPy array: the bytes of its contents are compared, not its attributes."""
    return hasattr(type(obj), "tobytes")


def wrapped_attribute(obj: Any) -> str | None:
    """The attribute of a wrapper that holds the function; only the function matters, not the wrapper's cache."""
    if isinstance(obj, type) or "__wrapped__" not in getattr(obj, "__dict__", ()) or isinstance(obj, types.FunctionType):
        return None
    return ("fn" if hasattr(obj, "fn") else "__wrapped__") if has_stable_code(type(obj)) else None
