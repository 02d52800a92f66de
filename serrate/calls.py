"""Calls: functions over ragged tensors, traced once for each kind of arguments and prepared once for each structure.

In: a Python function. Out: an object that is called like it, and runs compiled code. Three steps, each remembered:

    trace      what the function does, for dtypes, ranks, sizes that do not change, and which
               arguments share a structure                                                          a fusion
    compile    its plan and code                                                                    a `Compiled`
    prepare    arrays, sizes and structures of results, for one structure and one set of shapes     a `Ready`

A call like one before finds its `Ready` by one look-up and goes straight to the code.
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

from serrate import settings
from serrate.engine import Compiled
from serrate.errors import CallError, GradientError, TraceError
from serrate.frontend import autocast
from serrate.frontend.dependencies import Snapshot, WeakMethod, kept, snapshot
from serrate.frontend.leaves import Leaves, leaves_of, refuse_nested
from serrate.frontend.specialise import Specialised, changing
from serrate.frontend.trace import BY_VALUE, Key, TracedFunction, described, inputs_of, kind_of, static_of, trace
from serrate.ir.view import TensorView
from serrate.modes import is_batch_invariant
from serrate.runtime.locks import making
from serrate.runtime.results import remember_structure
from serrate.schedule.plan import Plan
from serrate.tensor import JaggedTensor
from serrate.tensor.hints import NO_HINTS
from serrate.tensor.jagged import trusted
from serrate.tensor.torch_private import has_tangent, in_dual_level

READY = 32
"""How many prepared calls are remembered for one function; the oldest goes first. Each keeps its structures alive."""
KINDS = 64
"""For how many kinds of arguments a function's programs are kept; the kind that was not called for longest goes first."""
STATES = 16
"""For how many states of what a function reads beside its arguments its programs are remembered; the oldest goes first."""


Program = tuple[TracedFunction, Compiled]


class Ready:
    """A call with everything but the addresses of its tensors."""

    __slots__ = ("_copied", "_first", "_fixed", "_keep", "_leaves", "_rebuild", "_run")

    def __init__(self, traced: TracedFunction, compiled: Compiled, leaves: Leaves) -> None:
        given = inputs_of(leaves, traced.constants)
        self._leaves = [g.leaf for g in given]
        self._fixed = [g.tensor if g.leaf is None else None for g in given]
        # Structures are found by identity: as long as they are kept here no other has the same.
        self._keep = [leaf.structure for leaf in leaves if isinstance(leaf, JaggedTensor)]
        self._rebuild = traced.rebuild
        self._copied = traced.copied
        self._first = next((k for k, leaf in enumerate(leaves) if isinstance(leaf, JaggedTensor)), None)
        for leaf in leaves:
            if isinstance(leaf, JaggedTensor):
                remember_structure(leaf)
        self._run = compiled.ready(*(g.tensor for g in given))

    def __call__(self, leaves: Leaves, into: Sequence[torch.Tensor] = ()) -> Any:
        values: list[Any] = [leaf._values if type(leaf) is JaggedTensor else leaf for leaf in leaves]
        tensors: list[Any] = [fixed if k is None else values[k] for k, fixed in zip(self._leaves, self._fixed, strict=True)]
        results = self._run(tensors, into)
        for k in self._copied:
            results[k] = results[k].clone()
        if self._first is not None:
            first: Any = leaves[self._first]
            if first._hints is not NO_HINTS:
                results = [_advised(result, first) for result in results]
        return self._rebuild(results)


def _advised(result: Any, first: JaggedTensor) -> Any:
    """A result with the hints of the first ragged argument, if it has the same rows."""
    if isinstance(result, JaggedTensor) and result.structure is first.structure:
        return trusted(result.values, result.structure, first.hints)
    return result


class State:
    """Programs of a function, for one state of what it reads beside its arguments."""

    __slots__ = ("kinds", "ready", "snapshot", "used")

    def __init__(self, taken: Snapshot | None, used: tuple[int, ...] = ()) -> None:
        self.snapshot, self.used = taken, used
        """Which of the tensors that can be reached are inputs of the programs. Grows while the function is traced."""
        self.kinds: OrderedDict[Key, Specialised[Program]] = OrderedDict()
        self.ready: OrderedDict[Key, Ready] = OrderedDict()

    def programs(self, kind: Key, leaves: Leaves, arguments: Leaves) -> tuple[Specialised[Program], list[int]]:
        """What was made for calls of a kind, and the sizes of a call's tensors, the first of which are its arguments."""
        given = inputs_of(leaves)
        sizes = [size for g in given for size in g.tensor.shape]
        programs = self.kinds.get(kind)
        if programs is None:
            ragged, counting, widths = changing(given, arguments)
            shared = self.snapshot is None  # one operation, for every place in a process where it is called
            programs = self.kinds[kind] = Specialised(sizes, ragged, counting, widths if shared else ())
            while len(self.kinds) > KINDS:
                self.kinds.popitem(last=False)
        with suppress(KeyError):
            self.kinds.move_to_end(kind)
        return programs, sizes


class Jitted:
    """A function over JaggedTensors and Tensors that is traced, compiled and run. Made by `serrate.jit`.

    Tensors that the function reaches without being handed them (closed over, global, parameters of a module) are inputs of
    what is compiled, read anew at every call. Whatever else it reads is compared at every call with what it was when the function
    was traced. In a class it makes a method, with programs of their own for each object.
    """

    def __init__(
        self, function: Callable[..., Any], backend: str | None = None, strategy: str | None = None, *, alone: bool = False
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self.fn = function
        self._backend, self._strategy = backend, strategy
        # One operation of our own reaches nothing but its arguments.
        self._alone = alone
        self._states: tuple[State, ...] = (State(None),) if alone else ()
        """Used last, first. Replaced as a whole: a thread that comes in between may lose a state, which is then made again."""
        self._count = 0
        self._function = _plain_function(function)
        self._own = (None, None) if self._function is None else (self._function.__defaults__, self._function.__kwdefaults__)
        self._signature, self._defaults = _tensor_defaults(function)
        self._methods: dict[int, tuple[weakref.ref[Any], Jitted]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ready, leaves = self._found(args, kwargs)
        if ready is None:
            # Called by a function that is being traced: what this one does is part of that trace.
            return self.fn(*args, **kwargs)
        return ready(leaves)

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
                    f"jit of a method: a {type(owner).__name__} cannot be referred to weakly; give it a __weakref__ slot"
                ) from None
            found = self._methods[key] = (reference, Jitted(WeakMethod(self.fn, reference), self._backend, self._strategy))
        return found[1]

    def into(self, memory: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call whose results are written into `memory` where the program has one place for each; see `eager`."""
        ready, leaves = self._found(args, kwargs)
        assert ready is not None
        return ready(leaves, memory)

    def _found(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Ready | None, list[Any]]:
        """What was prepared for calls like this one, and the tensors that it takes: arguments, then what is reached otherwise."""
        if not self._alone:
            args, kwargs = self._defaulted(args, kwargs)
        leaves: list[Any] = []
        objects: list[Any] | None = None if self._alone else []
        try:
            key = _exact(args, kwargs, leaves, objects)
        except RuntimeError:
            refuse_nested(leaves)  # torch's nested tensors have no shape
            raise
        state, reached = self._state(objects)
        if state is None:
            return self._prepare(args, kwargs)
        used = state.used
        if used:
            key = _and_outside(key, [reached[k] for k in used], leaves)
        try:
            ready = state.ready.get(key)
        except TypeError:
            static_of((args, kwargs), alone=self._alone)  # says which argument cannot be hashed
            raise
        return (ready, leaves) if ready is not None else self._prepare(args, kwargs)

    def _state(self, objects: Sequence[Any] | None) -> tuple[State | None, Sequence[Any]]:
        """The state in which everything is that is read beside arguments, and the tensors reached; None if it is a new one."""
        states = self._states
        if objects is None:
            return states[0], ()
        for k, state in enumerate(states):
            assert state.snapshot is not None
            reached = state.snapshot.read(self.fn, objects)
            if type(reached) is tuple:
                if k:
                    self._states = (state, *states[:k], *states[k + 1 :])
                return state, reached
        return None, ()

    def _prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Ready | None, list[Any]]:
        if _is_traced((args, kwargs)):
            return None, []
        with making:
            state, traced, leaves = self._traced(args, kwargs)
            # While tracing, more may have been found outside than was known before.
            key = _exact(args, kwargs, [], None if self._alone else [])
            if state.used:
                key = _and_outside(key, leaves[-len(state.used) :], [])
            ready = state.ready.get(key)
            if ready is None:
                ready = Ready(*traced, leaves)
                while len(state.ready) >= READY:
                    state.ready.popitem(last=False)
                state.ready[key] = ready
        return ready, leaves

    def _traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[State, Program, list[Any]]:
        """The state that everything is in, what the function is compiled to in it, and the tensors that a call takes; the lock of
        what is made is held."""
        leaves: list[Any] = leaves_of(args, kwargs)
        objects: list[Any] | None = None if self._alone else []
        _exact(args, kwargs, [], objects)
        state, reached = self._state(objects)
        if state is None:
            assert objects is not None
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
                self._refuse_kept(objects or ())
            # While tracing, more may have been found outside than was known before.
            every = [*leaves, *(reached[k] for k in state.used)]
            programs, _ = state.programs(kind_of(args, kwargs, every, alone=self._alone), every, leaves)
            if not traced.fixed:
                program = (traced, Compiled(traced.fusion, self._backend, self._strategy))
                programs.add(traced.sizes, program)
                return state, program, every
            programs.fix(traced.fixed)

    def _refuse_kept(self, objects: Sequence[Any]) -> None:
        way = kept(self.fn, objects, TensorView)
        if way is not None:
            raise TraceError(
                f"the function keeps a traced tensor in `{way}`, which would not be written again in later calls; return the "
                "tensor, and keep what the call gives"
            )

    def _new_state(self, objects: Sequence[Any]) -> tuple[State, Sequence[Any]]:
        taken, reached = snapshot(self.fn, objects)
        self._count += 1
        if self._count == STATES + 1:
            self._warn(objects)
        # The rows of ragged tensors are known by their structures, whatever is asked of them.
        state = State(taken, tuple(k for k, leaf in enumerate(reached) if isinstance(leaf, JaggedTensor)))
        self._states = (state, *self._states[: STATES - 1])
        return state, reached

    def _warn(self, objects: Sequence[Any]) -> None:
        last = self._states[0].snapshot
        assert last is not None
        way = last.read(self.fn, objects)
        warnings.warn(
            f"{getattr(self.fn, '__name__', 'a function')} was traced {STATES} times for what it reads beside its arguments, "
            f"because `{last.ways[way]}` changed: each trace is compiled anew. Pass what changes as an argument",
            stacklevel=2,
        )

    def _defaulted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Tensors that are defaults of parameters are arguments like others."""
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
        """What these arguments are compiled to, and the tensors it is called with."""
        given, named = self._defaulted(args, kwargs)
        with making:
            _, (traced, compiled), leaves = self._traced(given, named)
        return compiled, [g.tensor for g in inputs_of(leaves, traced.constants)]

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The code that runs for these arguments."""
        compiled, tensors = self.compiled(*args, **kwargs)
        return compiled.source(*tensors)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan that is used for these arguments; of the last stage where there are several."""
        compiled, tensors = self.compiled(*args, **kwargs)
        return compiled.plan(*tensors)


def _is_traced(value: Any) -> bool:
    """Whether a traced tensor is among arguments."""
    if isinstance(value, list | tuple):
        return any(map(_is_traced, value))
    return any(map(_is_traced, value.values())) if isinstance(value, dict) else isinstance(value, TensorView)


def _plain_function(function: Any) -> types.FunctionType | None:
    """The function that has the defaults of something that is called."""
    if isinstance(function, WeakMethod):
        function = function.function
    if isinstance(function, types.MethodType):
        function = function.__func__
    return function if isinstance(function, types.FunctionType) else None


def _tensor_defaults(function: Callable[..., Any]) -> tuple[inspect.Signature | None, list[tuple[str, Any]]]:
    """The signature, and the defaults that hold tensors; with all that stand before those which have no name in a call."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return None, []  # a function of torch's own that does not tell
    given = [p for p in signature.parameters.values() if p.default is not p.empty]
    tensors = [p for p in given if leaves_of((p.default,), {})]
    before = [p for p in given if tensors and p.kind is p.POSITIONAL_ONLY and p not in tensors]
    return signature, [(p.name, p.default) for p in (*tensors, *before)]


def _exact(args: Sequence[Any], kwargs: Mapping[str, Any], leaves: list[Any], objects: list[Any] | None) -> Key:
    """Everything that a prepared call depends on. Fills `leaves` with the tensors among the arguments, and `objects` with what is
    known by what can be read of it; without `objects` everything is known by its value."""
    grad = torch.is_grad_enabled()
    key: list[Any] = [torch.get_num_threads(), torch.get_default_dtype(), autocast.state(), settings.current().backend]
    key.append(is_batch_invariant())
    for value in args:
        _describe(value, key, leaves, objects, grad)
    for name, value in kwargs.items():
        key.append(name)
        _describe(value, key, leaves, objects, grad)
    if in_dual_level():
        _refuse_tangents(leaves)
    return tuple(key)


def _and_outside(key: Key, outside: Sequence[Any], leaves: list[Any]) -> Key:
    """The key of a call with the tensors that it takes beside its arguments, which come behind those."""
    grad = torch.is_grad_enabled()
    further = [*key]
    for tensor in outside:
        _describe(tensor, further, leaves, None, grad)
    if in_dual_level():
        _refuse_tangents(outside)
    return tuple(further)


def _refuse_tangents(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        tensor = leaf.values if isinstance(leaf, JaggedTensor) else leaf
        if has_tangent(tensor):
            raise GradientError(
                "compiled programs have no forward-mode gradients, and a tensor here has a tangent; call it with "
                "forward_ad.unpack_dual(x).primal"
            )


def _describe(value: Any, key: list[Any], leaves: list[Any], objects: list[Any] | None, grad: bool) -> None:
    kind = type(value)
    if kind is JaggedTensor:
        values, structure = value._values, value._structure
        leaves.append(value)
        key += (id(structure), values.shape, values.dtype, values.is_contiguous(), grad and values.requires_grad)
        for rows in structure._rows:
            key += rows.versions()
    elif kind is int or kind is bool or value is None or kind is str:
        key += (kind, value)
    elif kind is float or kind is complex:
        key += described(value)
    elif isinstance(value, torch.Tensor):
        leaves.append(value)
        key += (value.shape, value.dtype, value.device, value.is_contiguous(), grad and value.requires_grad)
    elif isinstance(value, list | tuple):
        key += (kind, len(value))
        for each in value:
            _describe(each, key, leaves, objects, grad)
    elif isinstance(value, dict):
        key += (kind, len(value))
        for name, each in value.items():
            key.append(name)
            _describe(each, key, leaves, objects, grad)
    elif objects is None or isinstance(value, BY_VALUE):
        key += (kind, value)
    else:
        key.append(kind)
        objects.append(value)


def jit(function: Callable[..., Any] | None = None, *, backend: str | None = None, strategy: str | None = None) -> Any:
    """Traces a function over JaggedTensors and Tensors, compiles it, and runs it without padding.

    It is traced once for each kind of arguments: dtypes, ranks, structures that are the same, and what is no tensor; and once
    more when a size changes. Tensors it closes over or keeps are read anew at every call; numbers it closes over are part of
    what it is traced for. Functions, methods, partials and modules can be traced, and call each other.

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
