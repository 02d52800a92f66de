"""Dependencies: what a call of a function depends on besides its tensors, and a fast check that nothing has changed.

In: a function, and objects passed to it. Out: a `Snapshot`: the tensors that the function can reach, and generated Python that
follows the same paths again, returns the tensors that are there now, and detects any other change. For

    def f(x): return act(x @ params["w"]) * config.scale

the generated code is, in short,

    g = function.__globals__
    v0 = g["act"]            if v0.__code__ is not c0: return 0             and so on, for what `act` reads
    v1 = g["params"]["w"]    if type(v1) is not Tensor: return 1
    v2 = g["config"]         if type(v2) is not Config: return 2
    v3 = v2.__dict__         if v3["scale"] is not c1 and differs(...): return 3
    return (v1,)

Why this is enough: `bytecode` returns chains, which are followed exactly, and the names of all attributes read from any other
object. The end of a chain may be used in any way, so from there all those names are followed, all items of a container, and the
code of functions and methods, until nothing new is found. Two paths to one object are two reads, and the check includes that
they still lead to one object. Numbers, strings and the like are compared by value and type; functions by code, defaults and
closures; other objects by class and attributes; opaque objects by identity. The code of the standard library, of installed
packages and of serrate is assumed constant, and is not followed.
"""

from __future__ import annotations

import builtins
import collections
import enum
import importlib.util
import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from serrate.errors import TraceError
from serrate.frontend.bytecode import UNKNOWABLE, Chain, Reads, Step, reads_of
from serrate.frontend.classes import ANSWERING, is_builtin
from serrate.frontend.leaves import Leaf
from serrate.frontend.python_objects import (
    CONTAINERS,
    HOOKS,
    IMPLICIT,
    MAKING,
    MISSING,
    MODES,
    PARTS,
    PLAIN,
    TRANSPARENT,
    WRITES,
    differs,
    has_stable_code,
    in_mro,
    is_array,
    is_foreign,
    is_generator,
    is_library,
    is_read_inside,
    reads_of_library_class,
    slots_of,
    wrapped_attribute,
)
from serrate.tensor import JaggedTensor

LIMIT = 20_000
"""The maximum number of reads; a function with more is refused."""


class Snapshot(NamedTuple):
    """The dependencies of a function when it was traced."""

    read: Callable[[Any, Sequence[Any]], Any]
    """Takes the function and the objects passed to it; returns the tensors reached now, or, if anything has changed, the number
    of the path on which that was seen."""
    paths: tuple[str, ...]
    """The paths, as a user would write them."""
    generators: tuple[Any, ...]
    """Random number generators that the function reaches."""
    writes: bool
    """Whether reachable code writes to anything but its own variables."""
    asks: tuple[tuple[dict[str, Any], str], ...] = ()
    """The globals of reachable functions that call `type`, or use `isinstance` without calling it; with the name."""


def snapshot(function: Any, objects: Sequence[Any] = (), read: Iterable[str] = ()) -> tuple[Snapshot, list[Leaf]]:
    """The current dependencies of a function with these objects, and the tensors that it reaches. The attributes `read` of the
    objects are followed in addition to those that reachable code reads.

    >>> __name__ = "example"  # not a module of this package, whose functions are not followed
    >>> scales = [2.0, torch.ones(1)]
    >>> def f(x):
    ...     return x * scales[0] + scales[1]
    >>> taken, tensors = snapshot(f)
    >>> scales[1] = torch.zeros(1)
    >>> taken.read(f, ())
    (tensor([0.]),)
    >>> scales[0] = 3.0
    >>> taken.paths[taken.read(f, ())]
    'scales[0]'
    """
    walk = _walked(function, objects, read)
    return walk.snapshot(), walk.tensors


def kept(function: Any, objects: Sequence[Any], kind: type) -> str | None:
    """The path to an object of a class, among all that a function can read or write; None if it reaches no such object.

    >>> __name__ = "example"
    >>> results = []
    >>> def f(x):
    ...     results.append(x)
    >>> f(2j)
    >>> kept(f, (), complex)
    'results[0]'
    """
    return next(iter(_walked(function, objects, (), kind).found), None)


def _walked(function: Any, objects: Sequence[Any], read: Iterable[str], wanted: type | None = None) -> _Walk:
    names: set[str] = set(read)
    every = False
    while True:
        walk = _Walk(function, objects, frozenset(names), every, wanted)
        if walk.names <= names and walk.every <= every:
            return walk
        # New names also apply to objects seen before.
        names |= walk.names
        every |= walk.every


def _all_same(now: Iterable[Any], then: Sequence[Any]) -> bool:
    """Whether two equally long lists of plain values are the same."""
    return not any(a is not b and differs(a, b) for a, b in zip(now, then, strict=True))


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not MISSING
    except ValueError:
        return False


class _Walk:
    """A breadth-first walk over everything reachable, which generates the code that repeats it. If a class is `wanted`, it also
    follows what is only written."""

    def __init__(
        self, function: Any, objects: Sequence[Any], names: frozenset[str], every: bool, wanted: type | None = None
    ) -> None:
        self.names, self.every = set(names), every
        self.found: list[str] = []
        """The paths to objects of the wanted class."""
        self._wanted, self._writes = wanted, False
        self.tensors: list[Leaf] = []
        self._generators: list[Any] = []
        self._asks: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._known, self._every = sorted(names), every
        self._lines: list[str] = []
        self._constants: dict[str, Any] = {"differs": differs, "all_same": _all_same, "is_filled": _is_filled, "MISSING": MISSING}
        self._paths: list[str] = []
        self._leaves: list[str] = []
        self._objects: dict[int, str] = {}
        self._keep: list[Any] = []
        """Keeps visited objects alive, so that their ids are not reused."""
        self._used: set[int] = set()
        self._done: set[Any] = set()
        self._dicts: dict[str, tuple[Any, str, set[str]]] = {}
        """Attribute dicts, by variable: the path to each, and names looked up but absent."""
        self._parts: dict[tuple[str, str], str] = {}
        self._pending: collections.deque[Callable[[], None]] = collections.deque()
        self._counter = itertools.count()
        self._visit("function", function, getattr(function, "__name__", "function"), quiet=True)
        for k, each in enumerate(objects):
            self._visit(f"objects[{k}]", each, f"argument of type {type(each).__name__}")
        while self._pending:
            self._pending.popleft()()
            if len(self._lines) > LIMIT:
                raise TraceError(
                    f"{getattr(function, '__name__', 'the function')} reaches more than {LIMIT:,} objects by the names it uses; "
                    f"the last was `{self._paths[-1]}`. Pass what it needs as arguments"
                )

    def snapshot(self) -> Snapshot:
        """The snapshot of what was found."""
        for var, (inside, path, absent) in self._dicts.items():
            if not inside:
                self._check(var, path)
            elif len(absent) <= 4:
                self._check(" or ".join(f"{name!r} in {var}" for name in sorted(absent)), path)
            else:
                # Fast path: the same keys. New keys do not matter unless they are looked up.
                keys, looked_for = self._constant(list(inside)), self._constant(frozenset(absent))
                self._check(f"[*{var}] != {keys} and not {looked_for}.isdisjoint({var})", path)
        body = [*self._lines, f"return ({''.join(f'{leaf}, ' for leaf in self._leaves)})"]
        text = "\n".join(
            [
                "def read(function, objects):",
                "    try:",
                *(f"        {line}" for line in body),
                "    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:",
                "        return path_of[error.__traceback__.tb_lineno - 3]",
            ]
        )
        # A path ends at the next check.
        path_of, following = [0] * len(self._lines), 0
        for k, line in reversed(list(enumerate(self._lines))):
            following = path_of[k] = int(line.rpartition(" ")[2]) if line.startswith("if ") else following
        self._constants["path_of"] = path_of
        exec(compile(text, "<dependencies>", "exec"), self._constants)
        asks = tuple(self._asks.values())
        return Snapshot(self._constants["read"], tuple(self._paths), tuple(self._generators), self._writes, asks)

    # --- code ------------------------------------------------------------------------------------------------------------

    def _constant(self, obj: Any) -> str:
        name = f"c{next(self._counter)}"
        self._constants[name] = obj
        return name

    def _check(self, condition: str, path: str) -> None:
        self._lines.append(f"if {condition}: return {self._path(path)}")

    def _path(self, path: str) -> int:
        if not self._paths or self._paths[-1] != path:
            self._paths.append(path)
        return len(self._paths) - 1

    def _variable(self, expression: str) -> str:
        name = f"v{next(self._counter)}"
        self._lines.append(f"{name} = {expression}")
        return name

    # --- objects ------------------------------------------------------------------------------------------------------------

    def _visit(self, expression: str, obj: Any, path: str, quiet: bool = False) -> None:
        """Reads an object that may be used in any way."""
        held = self._hold(expression, obj, path, quiet)
        if held is not None and id(obj) not in self._used:
            self._used.add(id(obj))
            self._pending.append(lambda: self._use(held, obj, path))

    def _hold(self, expression: str, obj: Any, path: str, quiet: bool = False) -> str | None:
        """Reads an object and checks its kind; returns its variable, or None for a plain value."""
        if self._wanted is not None and isinstance(obj, self._wanted):
            self.found.append(path)
            return None
        if isinstance(obj, (*PLAIN, enum.Enum)):
            if (expression, "plain") in self._done:
                return None
            self._done.add((expression, "plain"))
            if obj is None or isinstance(obj, bool | enum.Enum):
                self._check(f"{expression} is not {obj if obj is None else self._constant(obj)}", path)
            else:
                value = self._constant(obj)
                self._check(f"(x := {expression}) is not {value} and differs(x, {value})", path)
            return None
        known = self._objects.get(id(obj))
        if known is not None:
            if known != expression and (expression, known) not in self._done:
                self._done.add((expression, known))
                self._check(f"{expression} is not {known}", path)
            return known
        var = self._objects[id(obj)] = self._variable(expression)
        self._keep.append(obj)
        if isinstance(obj, types.FunctionType) and not has_stable_code(obj):
            self._check(f"{var}.__code__ is not {self._constant(obj.__code__)}", path)
        elif not quiet and self._is_opaque(obj):
            self._check(f"{var} is not {self._constant(obj)}", path)
        else:
            self._check(f"type({var}) is not {self._constant(type(obj))}", path)
        return var

    def _is_opaque(self, obj: Any) -> bool:
        """Whether an object is fully identified by itself."""
        if isinstance(obj, (type, types.ModuleType, types.FunctionType)) or is_generator(obj):
            return True
        if isinstance(obj, (*CONTAINERS, torch.nn.Module, torch.Tensor, JaggedTensor, weakref.ref, *TRANSPARENT)):
            return False
        if wrapped_attribute(obj) is not None or is_array(obj):
            return False
        if (type(obj).__module__.partition(".")[0]) in ("torch", "serrate"):
            return True
        return not hasattr(obj, "__dict__") and not slots_of(type(obj))

    def _use(self, var: str, obj: Any, path: str) -> None:
        """Reads everything that may matter about an object that is used in any way."""
        if isinstance(obj, torch.Tensor | JaggedTensor):
            self.tensors.append(obj)
            self._leaves.append(var)
        elif isinstance(obj, types.FunctionType):
            if not has_stable_code(obj):
                self._function(var, obj, path)
        elif isinstance(obj, CONTAINERS):
            self._content(var, obj, path)
            if hasattr(obj, "__dict__") and not has_stable_code(type(obj)):
                self._object(var, obj, path)
        elif isinstance(obj, tuple(TRANSPARENT)):
            for name in TRANSPARENT[next(kind for kind in TRANSPARENT if isinstance(obj, kind))]:
                self._visit(f"{var}.{name}", getattr(obj, name), path)
        elif isinstance(obj, weakref.ref):
            self._visit(f"{var}()", obj(), path)
        elif isinstance(obj, ContextVar):
            self._visit(f"{var}.get(MISSING)", obj.get(MISSING), path)
        elif (attribute := wrapped_attribute(obj)) is not None:
            self._visit(f"{var}.{attribute}", getattr(obj, attribute), path)
        elif isinstance(obj, type):
            for name in (*self._known, *sorted(IMPLICIT | MAKING)):
                self._of_class(obj, name, path)
                self._of_class(type(obj), name, path)
        elif isinstance(obj, types.ModuleType):
            for name in self._known:
                self._of_module(var, obj, name, path)
        elif is_array(obj):
            contents = self._constant((obj.tobytes(), str(getattr(obj, "dtype", "")), getattr(obj, "shape", ())))
            self._check(f"({var}.tobytes(), str(getattr({var}, 'dtype', '')), getattr({var}, 'shape', ())) != {contents}", path)
        elif not self._is_opaque(obj):
            self._object(var, obj, path)
        elif isinstance(obj, collections.abc.Iterator) and type(obj).__module__ in ("builtins", "itertools"):
            raise TraceError(
                f"`{path}` is an iterator, which yields something new each time; a trace would keep the first item. Pass its "
                "items as arguments, or use a list"
            )
        elif is_generator(obj):
            self._generators.append(obj)

    def _content(self, var: str, obj: Any, path: str) -> None:
        """Reads all items of a container."""
        if not obj:
            return self._check(var, path)
        if isinstance(obj, set | frozenset):
            plain = all(isinstance(each, PLAIN) for each in obj)
            self._check(f"{var} != {self._constant(frozenset(obj))}", path)
            if not plain:
                for each in obj:
                    self._visit(self._constant(each), each, path)
            return
        if isinstance(obj, dict):
            self._check(f"[*{var}] != {self._constant(list(obj))}", path)
            items, values = [(self._constant(key), f"[{key!r}]", each) for key, each in obj.items()], f"{var}.values()"
        else:
            self._check(f"len({var}) != {len(obj)}", path)
            items, values = [(str(k), f"[{k}]", each) for k, each in enumerate(obj)], var
        if len(items) > 4 and all(isinstance(each, PLAIN) for _, _, each in items):
            # All plain values in one comparison.
            self._check(f"not all_same({values}, {self._constant([each for _, _, each in items])})", path)
            return
        for key, shown, each in items:
            self._visit(f"{var}[{key}]", each, f"{path}{shown}")

    def _function(self, var: str, function: types.FunctionType, path: str) -> None:
        """Follows what the code of a function reads."""
        self._visit(f"{var}.__defaults__", function.__defaults__, f"{path}.__defaults__")
        self._visit(f"{var}.__kwdefaults__", function.__kwdefaults__, f"{path}.__kwdefaults__")
        reads = self._record(reads_of(function.__code__), function.__code__.co_freevars)
        for name in reads.asks:
            if is_builtin(name, function.__globals__):
                self._asks[id(function.__globals__), name] = (function.__globals__, name)
        for chain in reads.chains:
            found = self._root(var, function, chain)
            if found is not None:
                self._follow(*found, chain.steps)

    def _record(self, reads: Reads, free: Sequence[str]) -> Reads:
        self.names |= reads.names
        self.every |= reads.every
        self._writes |= bool(reads.stores)
        if self._wanted is not None:
            self.names |= reads.stores
            chains = (Chain("cell" if name in free else "global", name) for name in reads.stores if name.isidentifier())
            return replace(reads, chains=(*reads.chains, *chains))
        return reads

    def _root(self, var: str, function: types.FunctionType, chain: Chain) -> tuple[str, Any, str] | None:
        """The start of a chain; None for a builtin."""
        if chain.root == "cell":
            place = function.__code__.co_freevars.index(chain.name)
            cell = (function.__closure__ or ())[place]
            if not _is_filled(cell):
                self._check(f"is_filled({var}.__closure__[{place}])", chain.name)
                return None
            return f"{var}.__closure__[{place}].cell_contents", cell.cell_contents, chain.name
        if chain.root == "module":
            name = importlib.util.resolve_name(chain.name, function.__globals__.get("__package__"))
            names, where, shown = sys.modules, self._named("modules", sys.modules), name
        else:
            if chain.name in UNKNOWABLE and chain.name not in function.__globals__:
                raise TraceError(
                    f"{function.__name__} uses {chain.name}, so its reads cannot be determined; avoid it in traced functions, or "
                    "call it before"
                )
            name, names, shown = chain.name, function.__globals__, chain.name
            where = self._globals(var, function)
        if name in names and not (chain.root == "global" and is_builtin(name, names)):
            return f"{where}[{name!r}]", names[name], shown
        if (where, name) not in self._done:
            self._done.add((where, name))
            stand_in = self._constant(ANSWERING[name]) if name in ANSWERING else None
            there = f"{name!r} in {where}"
            self._check(there if stand_in is None else f"{there} and {where}[{name!r}] is not {stand_in}", shown)
        if chain.root == "global" and not hasattr(builtins, name):
            self._check(f"hasattr({self._named('builtins', builtins)}, {name!r})", shown)
        return None

    def _named(self, name: str, obj: Any) -> str:
        self._constants[name] = obj
        return name

    def _globals(self, var: str, function: types.FunctionType) -> str:
        known = self._objects.get(id(function.__globals__))
        if known is None:
            known = self._objects[id(function.__globals__)] = self._variable(f"{var}.__globals__")
            self._done.add((f"{var}.__globals__", known))
        elif (f"{var}.__globals__", known) not in self._done:
            self._done.add((f"{var}.__globals__", known))
            self._check(f"{var}.__globals__ is not {known}", "a function it calls")
        return known

    def _follow(self, expression: str, obj: Any, path: str, steps: Sequence[Step]) -> None:
        """Follows a chain step by step, as far as its objects can be inspected."""
        for k, step in enumerate(steps):
            if isinstance(obj, (*PLAIN, torch.Tensor, JaggedTensor)):
                break
            found = self._step(expression, obj, path, step)
            if found is None:
                if not (isinstance(obj, types.ModuleType) and is_library(obj.__name__)):
                    # Its result is followed further.
                    self.names.update(name for kind, name in steps[k + 1 :] if kind == "attribute")
                return
            expression, obj, path = found
        self._visit(expression, obj, path)

    def _step(self, expression: str, obj: Any, path: str, step: Step) -> tuple[str, Any, str] | None:
        """Follows one step of a chain; None if the object is read in another way."""
        kind, key = step
        if kind == "item" and type(obj) in (list, tuple, dict, collections.OrderedDict, collections.deque):
            try:
                inside = obj[key]
            except (IndexError, KeyError, TypeError):
                self._visit(expression, obj, path)
                return None
            return f"{self._hold(expression, obj, path)}[{self._constant(key)}]", inside, f"{path}[{key!r}]"
        writes = key in WRITES and isinstance(obj, CONTAINERS)
        self._writes |= writes
        if kind == "item" or (
            isinstance(obj, CONTAINERS) and has_stable_code(type(obj)) and (not writes or self._wanted is not None)
        ):
            self._visit(expression, obj, path)
            return None
        held = self._hold(expression, obj, path)
        if held is None or (isinstance(obj, CONTAINERS) and has_stable_code(type(obj))):
            return None
        return self._attribute(held, obj, key, path)

    # --- attributes ----------------------------------------------------------------------------------------------------------

    def _attribute(self, var: str, obj: Any, name: str, path: str) -> tuple[str, Any, str] | None:
        """The location and value of an attribute; None if it is not followed further."""
        if isinstance(obj, types.ModuleType):
            return self._in_module(var, obj, name, path)
        if isinstance(obj, type):
            return self._in_class(obj, name, path)
        if not self._has_attributes(obj):
            self._visit(var, obj, path)
            return None
        return self._in_object(var, obj, name, path)

    def _has_attributes(self, obj: Any) -> bool:
        if isinstance(obj, types.FunctionType):
            return not has_stable_code(obj)
        visited_as_a_whole = isinstance(obj, tuple(TRANSPARENT)) or is_array(obj) or wrapped_attribute(obj) is not None
        return not (visited_as_a_whole or self._is_opaque(obj))

    def _object(self, var: str, obj: Any, path: str) -> None:
        """Reads all attributes of an object that any reachable code may read."""
        names, every = set(self._known), self._every
        if isinstance(obj, torch.nn.Module):
            names.update(HOOKS)
        if is_read_inside(obj):
            kind: Any = type(obj)
            own, computed = reads_of_library_class(kind)
            names, every = names | own, every or computed
        if every:
            names |= vars(obj).keys() if hasattr(obj, "__dict__") else set()
            names |= set(slots_of(type(obj)))
        for name in sorted(names):
            found = self._in_object(var, obj, name, path)
            if found is not None:
                self._visit(*found)
        if not has_stable_code(type(obj)):
            for name in sorted(IMPLICIT - names):
                found = self._in_class(type(obj), name, path)
                if found is not None:
                    self._visit(*found)

    def _of_class(self, kind: type, name: str, path: str) -> None:
        found = self._in_class(kind, name, path)
        if found is not None:
            self._visit(*found)

    def _of_module(self, var: str, module: types.ModuleType, name: str, path: str) -> None:
        found = self._in_module(var, module, name, path)
        if found is not None:
            self._visit(*found)

    def _in_module(self, var: str, module: types.ModuleType, name: str, path: str) -> tuple[str, Any, str] | None:
        inside, shown = vars(module), f"{path}.{name}"
        if name not in inside:
            if not is_library(module.__name__):
                self._absent(f"{var}.__dict__", inside, name, shown)
            return None
        obj = inside[name]
        if obj is os.getenv:
            return f"{var}.__dict__['environ']", os.environ, f"{path}.environ"
        if obj is torch.is_grad_enabled:
            raise TraceError(
                f"{shown}() cannot be used in a traced function, which serves calls with and without gradients: pass a flag"
            )
        if callable(obj) and any(obj is mode for mode in MODES):
            self._check(f"{self._constant(obj)}() != {self._constant(obj())}", f"{shown}()")
            return None
        if is_library(module.__name__) and (callable(obj) or isinstance(obj, types.ModuleType)):
            return (f"{var}.__dict__[{name!r}]", obj, shown) if is_foreign(obj) else None
        return f"{var}.__dict__[{name!r}]", obj, shown

    def _in_class(self, kind: type, name: str, path: str) -> tuple[str, Any, str] | None:
        """An attribute of a class or of one of its bases."""
        for base in kind.__mro__:
            if base is object or has_stable_code(base):
                if name in vars(base):
                    return None
                continue
            inside = self._class_dict(base)
            if name in vars(base):
                return f"{inside}[{name!r}]", vars(base)[name], f"{path}.{name}"
            self._absent(inside, vars(base), name, f"{path}.{name}")
        return None

    def _class_dict(self, kind: type) -> str:
        known = self._objects.get(-id(kind))
        if known is None:
            # The dict of a class cannot be replaced, so it is read directly.
            known = self._objects[-id(kind)] = self._constant(vars(kind))
            self._check(f"{self._constant(kind)}.__mro__ is not {self._constant(kind.__mro__)}", kind.__name__)
        return known

    def _absent(self, where: str, inside: Any, name: str, path: str) -> None:
        if where not in self._dicts:
            self._dicts[where] = (inside, path, set())
        self._dicts[where][2].add(name)

    def _in_object(self, var: str, obj: Any, name: str, path: str) -> tuple[str, Any, str] | None:
        """An attribute of an object, looked up as Python would."""
        kind, shown = type(obj), f"{path}.{name}"
        raw = in_mro(kind, name)
        if isinstance(raw, types.MemberDescriptorType):
            there = getattr(obj, name, MISSING)
            if there is MISSING:
                self._check(f"getattr({var}, {name!r}, MISSING) is not MISSING", shown)
                return None
            return f"{var}.{name}", there, shown
        if isinstance(raw, property):
            return self._bound(var, obj, name, path)
        inside = getattr(obj, "__dict__", None)
        if inside is not None:
            where = self._instance_dict(var, obj)
            if name in inside:
                return f"{where}[{name!r}]", inside[name], shown
            self._absent(where, inside, name, shown)
        if raw is not MISSING:
            return self._bound(var, obj, name, path)
        if inside is not None and isinstance(obj, torch.nn.Module):
            for part in PARTS:
                parts = inside.get(part)
                if parts is None:
                    continue
                held = self._part(where, part)
                if name in parts:
                    return f"{held}[{name!r}]", parts[name], shown
                self._absent(held, parts, name, shown)
        if not has_stable_code(kind):
            self._in_class(kind, name, path)
            if hasattr(kind, "__getattr__"):
                # Its result depends on the whole object.
                self._visit(var, obj, path)
        return None

    def _instance_dict(self, var: str, obj: Any) -> str:
        known = self._objects.get(-id(obj))
        if known is None:
            known = self._objects[-id(obj)] = self._variable(f"{var}.__dict__")
        return known

    def _part(self, where: str, part: str) -> str:
        known = self._parts.get((where, part))
        if known is None:
            known = self._parts[where, part] = self._variable(f"{where}[{part!r}]")
        return known

    def _bound(self, var: str, obj: Any, name: str, path: str) -> tuple[str, Any, str] | None:
        """An attribute that an object has from its class; a method may use the object in any way."""
        found = self._in_class(type(obj), name, path)
        if hasattr(type(found[1]), "__get__") if found is not None else is_read_inside(obj):
            self._visit(var, obj, path)
        return found
