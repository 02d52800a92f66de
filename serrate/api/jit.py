"""`serrate.jit`: functions over ragged tensors, traced once per signature and bound once per structure.

In: a Python function. Out: a callable with the same signature that runs compiled code. Three steps, each cached:

    trace      the operations, for dtypes, ranks, sizes that do not change, and which
               arguments share a structure                                                          a fusion
    compile    its plan and code                                                                    a `Compiled`
    bind       arrays, sizes and structures of results, for one structure and one set of shapes     a binding

A warm call finds its binding with one lookup and goes straight to the code (`runtime/dispatch.py`).
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from serrate.engine import Compiled
from serrate.errors import CallError, GradientError, TraceError
from serrate.frontend import autocast
from serrate.frontend.dependencies import Snapshot, kept, snapshot
from serrate.frontend.keyed import TracedKeyed, leaves_in
from serrate.frontend.leaves import Leaves, leaves_of, refuse_nested
from serrate.frontend.python_objects import WeakMethod
from serrate.frontend.specialise import Specialised, changing
from serrate.frontend.trace import BY_VALUE, TracedFunction, described, inputs_of, kind_of, static_of, trace
from serrate.ir.view import TensorView
from serrate.runtime.dispatch import Binding, FastPath, Key, Other, key_of, remember
from serrate.runtime.locks import making
from serrate.runtime.results import remember_structure
from serrate.schedule.plan import Plan
from serrate.tensor import JaggedTensor, KeyedJaggedTensor
from serrate.tensor.hints import NO_HINTS
from serrate.tensor.torch_private import has_tangent, in_dual_level

KINDS = 64
"""The most signatures for which a function keeps programs; the least recently used is dropped first."""
STATES = 16
"""The most states of a function's dependencies (what it reads besides its arguments) for which programs are kept."""


Program = tuple[TracedFunction, Compiled]


def _bind(traced: TracedFunction, compiled: Compiled, leaves: Leaves) -> Binding:
    """The binding for a call of a traced function."""
    given = inputs_of(leaves, traced.constants)
    ragged = [leaf for leaf in leaves if isinstance(leaf, JaggedTensor)]
    for leaf in ragged:
        remember_structure(leaf)
    # Results with the rows of the first ragged tensor inherit its hints.
    hints = (ragged[0].structure, ragged[0].hints) if ragged and ragged[0].hints is not NO_HINTS else None
    sources = [g.tensor if g.leaf is None else g.leaf for g in given]
    keep = [leaf.structure for leaf in ragged]
    return compiled.bind([g.tensor for g in given], sources, _finish(traced), hints=hints, keep=keep)


def _finish(traced: TracedFunction) -> Callable[[list[Any]], Any]:
    if not traced.copied:
        return traced.rebuild

    def finish(results: list[Any]) -> Any:
        for k in traced.copied:
            results[k] = results[k].clone()
        return traced.rebuild(results)

    return finish


class FunctionState:
    """The programs of a function for one state of its dependencies: what it reads besides its arguments."""

    __slots__ = ("bindings", "function", "kinds", "snapshot", "used")

    def __init__(self, function: Callable[..., Any], taken: Snapshot | None, used: tuple[int, ...] = ()) -> None:
        self.function, self.snapshot, self.used = function, taken, used
        """Which of the reachable tensors are inputs of the programs. Grows while the function is traced."""
        self.kinds: OrderedDict[Key, Specialised[Program]] = OrderedDict()
        self.bindings: OrderedDict[Key, Binding] = OrderedDict()

    def read(self, objects: Sequence[Any]) -> Sequence[Any] | None:
        """The tensors that the function reaches; None if anything that it reads has changed."""
        if self.snapshot is None:
            return ()
        reached = self.snapshot.read(self.function, objects)
        return reached if type(reached) is tuple else None

    def programs(self, kind: Key, leaves: Leaves, arguments: Leaves) -> tuple[Specialised[Program], list[int]]:
        """The programs for a signature, and the sizes of a call's tensors, arguments first."""
        given = inputs_of(leaves)
        sizes = [size for g in given for size in g.tensor.shape]
        programs = self.kinds.get(kind)
        if programs is None:
            ragged, counting, widths = changing(given, arguments)
            shared = self.snapshot is None  # an eager operation, shared by the whole process
            programs = self.kinds[kind] = Specialised(sizes, ragged, counting, widths if shared else ())
            while len(self.kinds) > KINDS:
                self.kinds.popitem(last=False)
        with suppress(KeyError):
            self.kinds.move_to_end(kind)
        return programs, sizes


class Jitted:
    """A traced and compiled function over JaggedTensors and Tensors. Created by `serrate.jit`.

    Captured tensors (closures, globals, module parameters) are inputs of the compiled program and are read again at every call.
    Everything else the function reads is compared at every call with its value at trace time. In a class body it becomes a
    method, with separate programs per object.
    """

    def __init__(
        self, function: Callable[..., Any], backend: str | None = None, strategy: str | None = None, *, alone: bool = False
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.fn = function
        self._backend, self._strategy = backend, strategy
        # An eager operation reads nothing but its arguments.
        self._alone = alone
        self._fast = FastPath(STATES, *([FunctionState(function, None)] if alone else []))
        self._count = 0
        self._function = _plain_function(function)
        self._own = (None, None) if self._function is None else (self._function.__defaults__, self._function.__kwdefaults__)
        self._signature, self._defaults = _tensor_defaults(function)
        self._methods: dict[int, tuple[weakref.ref[Any], Jitted]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        binding, leaves = self._found(args, kwargs)
        if binding is None:
            # Called inside a traced function: its operations become part of that trace.
            return self.fn(*args, **kwargs)
        return binding(leaves)

    def __get__(self, owner: Any, kind: Any = None) -> Jitted:
        """The method of an object."""
        if owner is None:
            return self
        found = self._methods.get(id(owner))
        if found is None or found[0]() is not owner:
            key = id(owner)
            try:
                reference = weakref.ref(owner, lambda _: self._methods.pop(key, None))
            except TypeError:
                raise CallError(
                    f"jit of a method: a {type(owner).__name__} cannot be weakly referenced; give it a __weakref__ slot"
                ) from None
            found = self._methods[key] = (reference, Jitted(WeakMethod(self.fn, reference), self._backend, self._strategy))
        return found[1]

    def into(self, memory: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call that writes its results into `memory`, if the program has one output for each; see `eager`."""
        binding, leaves = self._found(args, kwargs)
        assert binding is not None
        return binding(leaves, memory)

    def _found(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Binding | None, list[Any]]:
        """The binding for this call, and its leaves: arguments, then captured tensors."""
        if not self._alone:
            args, kwargs = self._defaulted(args, kwargs)
        leaves: list[Any] = []
        objects: list[Any] = []
        try:
            given = self._key(args, kwargs, leaves, objects)
        except RuntimeError:
            refuse_nested(leaves)  # torch's nested tensors have no shape
            raise
        state, reached = self._fast.state(objects)
        if state is None:
            return self._bound(args, kwargs, given, objects)
        key = given if not state.used else _and_outside(given, [reached[k] for k in state.used], leaves)
        try:
            binding = state.bindings.get(key)
        except TypeError:
            static_of((args, kwargs), alone=self._alone)  # raises an error that names the unhashable argument
            raise
        return (binding, leaves) if binding is not None else self._bound(args, kwargs, given, objects)

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: list[Any], objects: list[Any]) -> Key:
        """Everything that a binding depends on. Fills `leaves` with the tensors among the arguments, and `objects` with the
        mutable objects, whose contents are compared separately; an eager operation compares everything by value."""
        other = _by_value if self._alone else _by_reading
        key = key_of(args, leaves, objects, other)
        key += (torch.get_default_dtype(), autocast.state())
        if kwargs:
            key += kwargs
            key_of(kwargs.values(), leaves, objects, other, key=key)
        if in_dual_level():
            _refuse_tangents(leaves)
        return tuple(key)

    def _bound(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], given: Key, objects: Sequence[Any]
    ) -> tuple[Binding | None, list[Any]]:
        """Binds a call that has no binding yet, and caches the binding; `given` is the key of the arguments alone."""
        if _is_traced((args, kwargs)):
            return None, []
        with making:
            state, traced, leaves = self._traced(args, kwargs, objects)
            # While tracing, more may have been found outside than was known before.
            key = given if not state.used else _and_outside(given, leaves[-len(state.used) :], [])
            binding = state.bindings.get(key)
            if binding is None:
                binding = _bind(*traced, leaves)
                remember(state.bindings, key, binding)
        return binding, [leaf.values if isinstance(leaf, JaggedTensor) else leaf for leaf in leaves]

    def _traced(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], objects: Sequence[Any]
    ) -> tuple[FunctionState, Program, list[Any]]:
        """The current state of the dependencies, the program for it, and the tensors of a call. The caller holds the lock
        `making`."""
        leaves: list[Any] = leaves_of(args, kwargs)
        state, reached = self._fast.state(objects)
        if state is None:
            state, reached = self._new_state(objects)

        def found(leaf: Any) -> bool:
            k = next((k for k, each in enumerate(reached) if each is leaf), None)
            if k is not None:
                state.used = (*state.used, k)
            return k is not None

        generators = () if state.snapshot is None else state.snapshot.generators
        while True:
            outside = [reached[k] for k in state.used]
            every = [*leaves, *outside]
            kind = kind_of(args, kwargs, every, alone=self._alone)
            programs, sizes = state.programs(kind, every, leaves)
            program = programs.find(sizes)
            if program is not None:
                return state, program, every
            wanted = programs.wanted(sizes)
            traced = trace(self.fn, args, kwargs, outside, None if self._alone else found, wanted, generators)
            if state.snapshot is not None and state.snapshot.writes:
                self._refuse_kept(objects)
            # While tracing, more may have been found outside than was known before.
            every = [*leaves, *(reached[k] for k in state.used)]
            programs, _ = state.programs(kind_of(args, kwargs, every, alone=self._alone), every, leaves)
            if not traced.fixed:
                program = (traced, Compiled(traced.fusion, self._backend, self._strategy))
                programs.add(traced.sizes, program)
                return state, program, every
            programs.fix(traced.fixed)

    def _refuse_kept(self, objects: Sequence[Any]) -> None:
        path = kept(self.fn, objects, TensorView)
        if path is not None:
            raise TraceError(
                f"the function stores a traced tensor in `{path}`, and later calls would not store it again; return the tensor, "
                "and store the result of the call"
            )

    def _new_state(self, objects: Sequence[Any]) -> tuple[FunctionState, Sequence[Any]]:
        taken, reached = snapshot(self.fn, objects)
        self._count += 1
        if self._count == STATES + 1:
            self._warn(objects)
        # Ragged tensors are always inputs: their structures are part of the key.
        used = tuple(k for k, leaf in enumerate(reached) if isinstance(leaf, JaggedTensor))
        return self._fast.add(FunctionState(self.fn, taken, used)), reached

    def _warn(self, objects: Sequence[Any]) -> None:
        last = self._fast.states[0].snapshot
        assert last is not None
        changed = last.read(self.fn, objects)
        warnings.warn(
            f"{getattr(self.fn, '__name__', 'a function')} was retraced {STATES} times because something besides its arguments "
            f"changed: `{last.paths[changed]}`. Every trace compiles anew; pass it as an argument",
            stacklevel=2,
        )

    def _defaulted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Fills in default parameters that hold tensors, so that they become arguments."""
        f = self._function
        if f is not None and (f.__defaults__ is not self._own[0] or f.__kwdefaults__ is not self._own[1]):
            self._own, (self._signature, self._defaults) = (f.__defaults__, f.__kwdefaults__), _tensor_defaults(self.fn)
        if self._signature is None or not self._defaults:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        for name, value in self._defaults:
            bound.arguments.setdefault(name, (self._own[1] or {}).get(name, value))
        return bound.args, bound.kwargs

    def compiled(self, *args: Any, **kwargs: Any) -> tuple[Compiled, list[torch.Tensor]]:
        """The compiled fusion for these arguments, and the tensors it is called with."""
        given, named = self._defaulted(args, kwargs)
        objects: list[Any] = []
        self._key(given, named, [], objects)
        with making:
            _, (traced, compiled), leaves = self._traced(given, named, objects)
        return compiled, [g.tensor for g in inputs_of(leaves, traced.constants)]

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The code that runs for these arguments."""
        compiled, tensors = self.compiled(*args, **kwargs)
        return compiled.source(*tensors)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments; if there are several stages, that of the last."""
        compiled, tensors = self.compiled(*args, **kwargs)
        return compiled.plan(*tensors)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """The plan of each stage for these arguments, with reasons, as for kernels."""
        compiled, tensors = self.compiled(*args, **kwargs)
        return "\n".join(line for plan in compiled.plans(*tensors) for line in plan.tree)


def _is_traced(value: Any) -> bool:
    """Whether an argument contains a traced tensor."""
    if isinstance(value, list | tuple):
        return any(map(_is_traced, value))
    return any(map(_is_traced, value.values())) if isinstance(value, dict) else isinstance(value, TensorView | TracedKeyed)


def _plain_function(function: Any) -> types.FunctionType | None:
    """The Python function that holds the defaults of a callable."""
    if isinstance(function, WeakMethod):
        function = function.function
    if isinstance(function, types.MethodType):
        function = function.__func__
    return function if isinstance(function, types.FunctionType) else None


def _tensor_defaults(function: Callable[..., Any]) -> tuple[inspect.Signature | None, list[tuple[str, Any]]]:
    """The signature, and the defaults that hold tensors, with all defaults before positional-only ones."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return None, []  # a builtin function without a signature
    given = [p for p in signature.parameters.values() if p.default is not p.empty]
    tensors = [p for p in given if leaves_of((p.default,), {})]
    before = [p for p in given if tensors and p.kind is p.POSITIONAL_ONLY and p not in tensors]
    return signature, [(p.name, p.default) for p in (*tensors, *before)]


def _and_outside(key: Key, outside: Sequence[Any], leaves: list[Any]) -> Key:
    """Extends the key of a call by its captured tensors, which follow the arguments."""
    further = key_of(outside, leaves, [], _by_value, key=[*key])
    if in_dual_level():
        _refuse_tangents(leaves)
    return tuple(further)


def _refuse_tangents(leaves: Sequence[Any]) -> None:
    if any(map(has_tangent, leaves)):
        raise GradientError(
            "compiled programs have no forward-mode gradients, but an argument has a tangent; call it with "
            "forward_ad.unpack_dual(x).primal"
        )


def _by_value(value: Any, key: list[Any], leaves: list[Any], objects: list[Any]) -> None:
    """Adds an argument of an eager operation to the key, by value."""
    kind = type(value)
    if isinstance(value, list | tuple | dict):
        _inside(value, key, leaves, objects, _by_value)
    elif kind is KeyedJaggedTensor:
        key += (kind, *value.keys())
        key_of(leaves_in(value), leaves, objects, _by_value, key=key)
    else:
        key += described(value) if kind is float or kind is complex else (kind, value)


def _by_reading(value: Any, key: list[Any], leaves: list[Any], objects: list[Any]) -> None:
    """Adds an argument of a traced function to the key: an object by its class; its contents are compared separately."""
    kind = type(value)
    if kind is float or kind is complex:
        key += described(value)
    elif isinstance(value, list | tuple | dict):
        _inside(value, key, leaves, objects, _by_reading)
    elif kind is KeyedJaggedTensor:
        key += (kind, *value.keys())
        key_of(leaves_in(value), leaves, objects, _by_reading, key=key)
    elif isinstance(value, BY_VALUE):
        key += (kind, value)
    else:
        key.append(kind)
        objects.append(value)


def _inside(value: Any, key: list[Any], leaves: list[Any], objects: list[Any], other: Other) -> None:
    """Adds the items of a user-defined container to the key."""
    key += (type(value), len(value), *(value if isinstance(value, dict) else ()))
    key_of(value.values() if isinstance(value, dict) else value, leaves, objects, other, key=key)


def jit(function: Callable[..., Any] | None = None, *, backend: str | None = None, strategy: str | None = None) -> Any:
    """Traces a function over JaggedTensors and Tensors, compiles it, and runs it without padding.

    It is traced once per signature (dtypes, ranks, which arguments share a structure, and the values of non-tensor arguments),
    and once more when a size changes. Captured tensors are read again at every call; if a captured number changes, the function
    is retraced. Functions, methods, partials and modules can be traced, and may call each other.

    >>> from serrate import JaggedTensor, jit
    >>> @jit
    ... def center(jt):
    ...     return jt - jt.mean(dim=1, keepdim=True)
    >>> center(JaggedTensor.from_list([torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]])])).unbind()[0]
    tensor([[-1.],
            [ 1.]])
    """
    if function is None:
        return lambda f: Jitted(f, backend, strategy)
    return Jitted(function, backend, strategy)
