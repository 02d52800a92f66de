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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from serrate.api.pickling import global_name
from serrate.autograd.saved import Save, check_save
from serrate.compiled import Compiled
from serrate.errors import CallError, GradientError, TraceError
from serrate.frontend import autocast
from serrate.frontend.dependencies import Snapshot, kept, snapshot
from serrate.frontend.keyed import TracedKeyed, leaves_in
from serrate.frontend.leaves import leaves_of, refuse_nested
from serrate.frontend.python_objects import WeakMethod
from serrate.frontend.specialise import Specialised, changing
from serrate.frontend.trace import BY_VALUE, FusionInputs, StructureNumbers, TracedFunction, described, trace
from serrate.ir.view import TensorView
from serrate.runtime.arguments import KnownRows
from serrate.runtime.dispatch import (
    Binding,
    CallLeaves,
    FastPath,
    Key,
    Leaves,
    Other,
    Seen,
    form_of,
    key_of,
    outline_of,
    refuse_capture,
    remember,
)
from serrate.runtime.locks import making
from serrate.runtime.results import known_rows
from serrate.schedule.plan import Plan
from serrate.tensor import JaggedTensor, KeyedJaggedTensor, Structure
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.torch_private import has_tangent, in_dual_level, in_transform, is_captured, is_recorded, is_transformed
from serrate.tuner.policy import EAGER, USUAL, Policy, retuning
from serrate.tuner.record import Tuning

if TYPE_CHECKING:
    from serrate.report.data import Report

KINDS = 64
"""The most signatures for which a function keeps programs; the least recently used is dropped first."""
STATES = 16
"""The most states of a function's dependencies (what it reads besides its arguments) for which programs are kept."""


class TracedProgram:
    """A traced and compiled function."""

    def __init__(self, traced: TracedFunction, compiled: Compiled, inputs: FusionInputs) -> None:
        self.traced, self.compiled, self._inputs = traced, compiled, inputs
        self._finish = _finish(traced)
        self._described = [(inputs.ragged.index(k), first) for k, first in inputs.described]

    def bind(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Binding:
        """A binding for calls with these leaves; `tensors` are the inputs of the program."""
        inputs, constants = self._inputs, self.traced.constants
        structures = [leaves[k]._structure for k in inputs.ragged]
        known, hints = self._known([leaves[k] for k in inputs.ragged])
        return self.compiled.bind(
            [*tensors, *constants], self._sources(tensors), self._finish, hints=hints, keep=structures, known=known
        )

    def bound(self, values: Leaves, ragged: Sequence[JaggedTensor]) -> Binding:
        """As `bind`, given the leaves as bindings take them, and the ragged ones."""
        leaves = [*values]
        for k, value in zip(self._inputs.ragged, ragged, strict=True):
            leaves[k] = value
        return self.bind(leaves, self._inputs.placed(values, ragged))

    def run(self, values: Leaves, ragged: Sequence[JaggedTensor], sizes: dict[Any, Any] | None) -> Any:
        """One call, for which nothing is kept; `values` are its leaves as bindings take them, `sizes` as in `Outlined`."""
        tensors, (known, hints) = self._inputs.placed(values, ragged), self._known(ragged)
        if self.traced.constants:
            tensors += self.traced.constants
        if sizes is not None:
            return self.compiled.rerun(tensors, self._finish, hints, known, sizes)
        return self.compiled.once(tensors, self._sources(tensors), self._finish, hints=hints, known=known)(values)

    def outlined(self, values: Leaves, ragged: Sequence[JaggedTensor]) -> Outlined:
        """What serves calls with the outline of this one."""
        every = [*self._inputs.placed(values, ragged), *self.traced.constants]
        return Outlined(self, {} if self.compiled.is_outlined(every) else None)

    def _sources(self, tensors: Sequence[torch.Tensor]) -> list[int | torch.Tensor]:
        """Where the inputs of the program are among the leaves, and those that are not."""
        own = [tensor if leaf is None else leaf for leaf, tensor in zip(self._inputs.leaves, tensors, strict=False)]
        return [*own, *self.traced.constants]

    def _known(self, ragged: Sequence[JaggedTensor]) -> tuple[KnownRows, tuple[Structure, Hints] | None]:
        """The rows of a call's ragged tensors that need no check; and the hints of the first one, which results with its rows
        inherit."""
        known = known_rows([(ragged[k]._structure, first) for k, first in self._described])
        if ragged and (first := ragged[0])._hints is not NO_HINTS:
            return known, (first._structure, first._hints)
        return known, None


def _finish(traced: TracedFunction) -> Callable[[list[Any]], Any]:
    if not traced.copied:
        return traced.rebuild

    def finish(results: list[Any]) -> Any:
        for k in traced.copied:
            results[k] = results[k].clone()
        return traced.rebuild(results)

    return finish


class Outlined(NamedTuple):
    """What serves calls with one outline."""

    program: TracedProgram
    sizes: dict[Any, Any] | None
    """What depends only on sizes, from earlier calls; None if each call is bound anew."""


class Signature(NamedTuple):
    """The programs for one form of arguments."""

    inputs: FusionInputs
    programs: Specialised[TracedProgram]


class FunctionState:
    """The programs of a function for one state of its dependencies: what it reads besides its arguments."""

    __slots__ = ("bindings", "function", "kinds", "outlines", "seen", "snapshot", "used")

    def __init__(self, function: Callable[..., Any], taken: Snapshot | None, used: tuple[int, ...] = ()) -> None:
        self.function, self.snapshot, self.used = function, taken, used
        """Which of the reachable tensors are inputs of the programs. Grows while the function is traced."""
        self.kinds: OrderedDict[Key, Signature] = OrderedDict()
        self.bindings: OrderedDict[Key, Binding] = OrderedDict()
        self.outlines: OrderedDict[Key, Outlined] = OrderedDict()
        self.seen = Seen()

    def read(self, objects: Sequence[Any]) -> Sequence[Any] | None:
        """The tensors that the function reaches; None if anything that it reads has changed."""
        if self.snapshot is None:
            return ()
        reached = self.snapshot.read(self.function, objects)
        return reached if type(reached) is tuple else None

    def find(self, form: Key, leaves: Sequence[Any]) -> tuple[TracedProgram, bool] | None:
        """The program for a call of this form, and whether it serves all calls with the same outline; None if no such call was
        traced yet."""
        signature = self.kinds.get(form)
        if signature is None:
            return None
        with suppress(KeyError):
            self.kinds.move_to_end(form)
        tensors = signature.inputs.tensors(leaves)
        program = signature.programs.find([size for tensor in tensors for size in tensor.shape])
        return None if program is None else (program, not signature.programs.fixes_rows)

    def signature(self, form: Key, leaves: Sequence[Any], count: int) -> tuple[Signature, list[torch.Tensor], list[int]]:
        """The programs for a form, the inputs of a call, and their sizes; the first `count` leaves are its own tensors."""
        signature = self.kinds.get(form)
        inputs = FusionInputs(leaves) if signature is None else signature.inputs
        tensors = inputs.tensors(leaves)
        sizes = [size for tensor in tensors for size in tensor.shape]
        if signature is None:
            ragged, counting, widths = changing(inputs, tensors, leaves[:count])
            shared = self.snapshot is None  # an eager operation, shared by the whole process
            signature = self.kinds[form] = Signature(inputs, Specialised(sizes, ragged, counting, widths if shared else ()))
            while len(self.kinds) > KINDS:
                self.kinds.popitem(last=False)
        with suppress(KeyError):
            self.kinds.move_to_end(form)
        return signature, tensors, sizes


class Jitted:
    """A traced and compiled function over JaggedTensors and Tensors. Created by `serrate.jit`.

    Captured tensors (closures, globals, module parameters) are inputs of the compiled program and are read again at every call.
    Everything else the function reads is compared at every call with its value at trace time. In a class body it becomes a
    method, with separate programs per object.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: str | None = None,
        strategy: str | None = None,
        *,
        alone: bool = False,
        save: Save = "auto",
        policy: Policy | None = None,
    ) -> None:
        check_save(save)
        policy = policy or (EAGER if alone else USUAL)
        functools.update_wrapper(self, function, updated=())
        self.fn = function
        self._compiled = functools.partial(Compiled, backend=backend, strategy=strategy, save=save, policy=policy)
        self._same = functools.partial(Jitted, backend=backend, strategy=strategy, save=save, policy=policy)
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

    def __reduce__(self) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
        """Like a function, it is copied and pickled by name if its module holds it; otherwise, with the function it traces."""
        return global_name(self) or (self._same, (self.fn,))

    if not TYPE_CHECKING:  # type checkers would otherwise accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            traced = self.__dict__.get("fn")
            is_of_module = isinstance(traced, torch.nn.Module) and hasattr(traced, name)
            hint = f", but its module has one: write jitted.fn.{name}" if is_of_module else ""
            raise AttributeError(f"a function returned by serrate.jit has no attribute {name!r}{hint}", name=name, obj=self)

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
            found = self._methods[key] = (reference, self._same(WeakMethod(self.fn, reference)))
        return found[1]

    def into(self, memory: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call that writes its results into `memory`, if the program has one output for each; see `eager`."""
        binding, leaves = self._found(args, kwargs, into=True)
        assert binding is not None
        return binding(leaves, memory)

    def _found(self, args: Sequence[Any], kwargs: Mapping[str, Any], into: bool = False) -> tuple[Binding | None, list[Any]]:
        """The binding for this call, and its leaves: arguments, then captured tensors. Only a binding that is kept can write
        `into` memory of the caller's."""
        if not self._alone:
            args, kwargs = self._defaulted(args, kwargs)
        leaves = CallLeaves()
        objects: list[Any] = []
        try:
            given = self._key(args, kwargs, leaves, objects)
        except RuntimeError:
            refuse_nested(leaves)  # torch's nested tensors have no shape
            raise
        state, reached = self._fast.state(objects)
        if state is not None:
            key = given if not state.used else _and_outside(given, [reached[k] for k in state.used], leaves)
            try:
                binding = state.bindings.get(key)
            except TypeError:
                _refuse_unhashable((args, kwargs))
                raise
            if binding is None:
                binding = self._rebound(args, kwargs, state, reached, key, leaves, into)
            if binding is not None:
                return binding, leaves
        return self._bound(args, kwargs, given, objects)

    def _rebound(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        state: FunctionState,
        reached: Sequence[Any],
        key: Key,
        leaves: CallLeaves,
        into: bool,
    ) -> Binding | None:
        """A binding of a program that an earlier call left: this one has other rows or sizes. None if no call left one."""
        outline = outline_of(key, leaves.ragged, StructureNumbers())
        ragged = [value for _, value in leaves.ragged]
        known = state.outlines.get(outline)
        if known is None:
            items: list[Any] = []
            numbers = StructureNumbers()
            form = self._form(args, kwargs, items, numbers)
            if state.used:
                form_of([reached[k] for k in state.used], items, [], KEY_BY_VALUE, numbers, form=form)
            found = state.find(tuple(form), items)
            if found is None:
                return None
            program, serves_all = found
            known = Outlined(program, None)
            if serves_all and not any(map(is_recorded, leaves)):
                known = program.outlined(leaves, ragged)
                remember(state.outlines, outline, known)
        program, sizes = known
        # Rows are often seen only once: nothing is prepared for calls that may not come.
        if not into and not self._comes_again(state, program, key, ragged):
            return lambda leaves, into=(): program.run(leaves, ragged, sizes)
        binding = program.bound(leaves, ragged)
        remember(state.bindings, key, binding)
        return binding

    @staticmethod
    def _comes_again(state: FunctionState, program: TracedProgram, key: Key, ragged: Sequence[JaggedTensor]) -> bool:
        """Whether there was a call like this one, on the same rows, so that there may be more."""
        if not ragged:
            return state.seen.note(key, ())
        served = [value._structure.is_served(program) for value in ragged]
        return all(served)

    def _key(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: CallLeaves, objects: list[Any]) -> Key:
        """Everything that a binding depends on. Fills `leaves` with the tensors among the arguments, and `objects` with the
        mutable objects, whose contents are compared separately; an eager operation compares everything by value."""
        other = KEY_BY_VALUE if self._alone else KEY_BY_READING
        key = key_of(args, leaves, objects, other)
        key += (torch.get_default_dtype(), autocast.state())
        if kwargs:
            key += kwargs
            key_of(kwargs.values(), leaves, objects, other, key=key)
        if in_dual_level() or in_transform():
            _refuse_transforms(leaves)
        if is_captured():
            refuse_capture()
        return tuple(key)

    def _form(self, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: list[Any], numbers: StructureNumbers) -> list[Any]:
        """Everything that a trace of these arguments depends on, but sizes. Fills `leaves` with the tensors among them."""

        def walk(values: Iterable[Any], form: list[Any], leaves: list[Any], objects: list[Any], other: Other) -> None:
            form_of(values, leaves, objects, other, numbers, form=form)

        def other(value: Any, form: list[Any], leaves: list[Any], objects: list[Any]) -> None:
            _describes(walk, self._alone)(value, form, leaves, objects)

        form = form_of(args, leaves, [], other, numbers)
        form += (torch.get_default_dtype(), autocast.state())
        if kwargs:
            form += kwargs
            form_of(kwargs.values(), leaves, [], other, numbers, form=form)
        return form

    def _bound(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], given: Key, objects: Sequence[Any]
    ) -> tuple[Binding | None, list[Any]]:
        """Binds a call that has no binding yet, and caches the binding; `given` is the key of the arguments alone."""
        if _is_traced((args, kwargs)):
            return None, []
        try:
            hash(given)
        except TypeError:
            _refuse_unhashable((args, kwargs))
            raise
        with making:
            state, program, leaves, tensors = self._traced(args, kwargs, objects)
            # While tracing, more may have been found outside than was known before.
            key = given if not state.used else _and_outside(given, leaves[-len(state.used) :], CallLeaves())
            binding = state.bindings.get(key)
        if binding is None:
            # Not under the lock: binding may measure plans, and other threads build their programs meanwhile.
            binding = program.bind(leaves, tensors)
            with making:
                remember(state.bindings, key, binding)
        return binding, [leaf.values if isinstance(leaf, JaggedTensor) else leaf for leaf in leaves]

    def _traced(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], objects: Sequence[Any]
    ) -> tuple[FunctionState, TracedProgram, list[Any], list[torch.Tensor]]:
        """The current state of the dependencies, the program for it, the tensors of a call, and the inputs of the program that
        they are. The caller holds the lock `making`."""
        leaves: list[Any] = []
        numbers = StructureNumbers()
        form = self._form(args, kwargs, leaves, numbers)
        refuse_nested(leaves)
        state, reached = self._fast.state(objects)
        if state is None:
            state, reached = self._new_state(objects)

        def found(leaf: Any) -> bool:
            k = next((k for k, each in enumerate(reached) if each is leaf), None)
            if k is not None:
                state.used = (*state.used, k)
            return k is not None

        def signature() -> tuple[Signature, list[Any], list[torch.Tensor], list[int]]:
            every = [*leaves]
            whole = form_of([reached[k] for k in state.used], every, [], KEY_BY_VALUE, numbers, form=[*form])
            found, tensors, sizes = state.signature(tuple(whole), every, len(leaves))
            return found, every, tensors, sizes

        generators, asks = ((), ()) if state.snapshot is None else (state.snapshot.generators, state.snapshot.asks)
        while True:
            known, every, tensors, sizes = signature()
            program = known.programs.find(sizes)
            if program is not None:
                return state, program, every, tensors
            wanted, outside = known.programs.wanted(sizes), every[len(leaves) :]
            traced = trace(self.fn, args, kwargs, outside, None if self._alone else found, wanted, generators, asks)
            if state.snapshot is not None and state.snapshot.writes:
                self._refuse_kept(objects)
            # While tracing, more may have been found outside than was known before.
            known, every, tensors, _ = signature()
            if not traced.fixed:
                program = TracedProgram(traced, self._compiled(traced.fusion), known.inputs)
                known.programs.add(traced.sizes, program)
                return state, program, every, tensors
            known.programs.fix(traced.fixed)

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
        self._key(given, named, CallLeaves(), objects)
        with making:
            _, program, _, tensors = self._traced(given, named, objects)
        return program.compiled, [*tensors, *program.traced.constants]

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The code that runs for these arguments."""
        compiled, tensors = self.compiled(*args, **kwargs)
        return compiled.source(*tensors)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments; if there are several stages, that of the last."""
        compiled, tensors = self.compiled(*args, **kwargs)
        return compiled.plan(*tensors)

    def tunings(self, *args: Any, **kwargs: Any) -> list[Tuning]:
        """What is known about the plans of the stages for these arguments; nothing is measured."""
        compiled, tensors = self.compiled(*args, **kwargs)
        return compiled.tunings(*tensors, hints=_hints(args, kwargs))

    def tune(self, *args: Any, effort: str | None = None, **kwargs: Any) -> list[Tuning]:
        """Measures plans on a call with these arguments, also if they were measured before; returns what was found."""
        with retuning(effort):
            self(*args, **kwargs)
        return self.tunings(*args, **kwargs)

    def explain(self, *args: Any, html: str | Path | None = None, **kwargs: Any) -> Report:
        """What runs for these arguments, and why: rows, the plan of each stage, tiles, guards, other candidates, source. It
        prints as text, and has all of it as data. With `html`, it is also written to that file, as a page."""
        from serrate.report.collect import report, rows_of_arguments  # imported here because `import serrate` must stay fast

        compiled, tensors = self.compiled(*args, **kwargs)
        facts = compiled.facts(*tensors, hints=_hints(args, kwargs))
        return report(compiled.fusion.name, facts, rows_of_arguments(self.fn, args, kwargs), html=html)


def _hints(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hints:
    """The hints of a call: those of its first ragged tensor."""
    return next((leaf.hints for leaf in leaves_of(args, kwargs) if isinstance(leaf, JaggedTensor)), NO_HINTS)


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


def _and_outside(key: Key, outside: Sequence[Any], leaves: CallLeaves) -> Key:
    """Extends the key of a call by its captured tensors, which follow the arguments."""
    further = key_of(outside, leaves, [], KEY_BY_VALUE, key=[*key])
    if in_dual_level() or in_transform():
        _refuse_transforms(leaves)
    return tuple(further)


def _refuse_transforms(leaves: Sequence[Any]) -> None:
    values = [leaf.values if isinstance(leaf, JaggedTensor) else leaf for leaf in leaves]
    if any(map(is_transformed, values)):
        raise GradientError(
            "compiled programs do not run under torch.func transforms (grad, vmap, jvp): use torch.autograd.grad, and rows of a "
            "ragged tensor instead of vmap"
        )
    if any(map(has_tangent, values)):
        raise GradientError(
            "compiled programs have no forward-mode gradients, but an argument has a tangent; call it with "
            "forward_ad.unpack_dual(x).primal"
        )


Walk = Callable[[Iterable[Any], list[Any], list[Any], list[Any], Other], None]
"""`key_of` or `form_of`: values, the key or form to extend, leaves, objects, what describes other values."""


def _describes(walk: Walk, by_value: bool) -> Other:
    """Adds an argument that is neither a tensor nor a plain number, string or container to a key or form: `by_value` for eager
    operations; otherwise an object by its class, and its contents are compared separately."""

    def other(value: Any, key: list[Any], leaves: list[Any], objects: list[Any]) -> None:
        kind = type(value)
        if kind is float or kind is complex:
            key += described(value)
        elif isinstance(value, list | tuple | dict):
            # A container of a class of the user's.
            key += (kind, len(value), *(value if isinstance(value, dict) else ()))
            walk(value.values() if isinstance(value, dict) else value, key, leaves, objects, other)
        elif kind is KeyedJaggedTensor:
            key += (kind, *value.keys())
            walk(leaves_in(value), key, leaves, objects, other)
        elif by_value or isinstance(value, BY_VALUE):
            key += (kind, value)
        else:
            key.append(kind)
            objects.append(value)

    return other


def _walk_key(values: Iterable[Any], key: list[Any], leaves: Any, objects: list[Any], other: Other) -> None:
    key_of(values, leaves, objects, other, key=key)


KEY_BY_VALUE, KEY_BY_READING = _describes(_walk_key, True), _describes(_walk_key, False)


def _refuse_unhashable(value: Any) -> None:
    """Raises for an argument that cannot be part of a key."""
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _refuse_unhashable(each)
        return
    try:
        hash(value)
    except TypeError:
        raise TraceError(
            f"a traced function takes tensors, numbers and other values that can be hashed; got {type(value).__name__}"
        ) from None


def jit(
    function: Callable[..., Any] | None = None,
    *,
    backend: str | None = None,
    strategy: str | None = None,
    save: Save = "auto",
    effort: str | None = None,
    tune: str | None = None,
) -> Any:
    """Traces a function over JaggedTensors and Tensors, compiles it, and runs it without padding.

    It is traced once per signature (dtypes, ranks, which arguments share a structure, and the values of non-tensor arguments),
    and once more when a size changes. Captured tensors are read again at every call; if a captured number changes, the function
    is retraced. Functions, methods, partials and modules can be traced, and may call each other.

    `save` says what a call keeps for its gradients besides its arguments: results of reductions ("auto"), everything that the
    backward program reads ("all"), or nothing ("inputs"); the rest is computed again.

    Where no strategy is named, plans are measured on the first call with arguments of a new kind, and the fastest is remembered:
    `effort` is "none", "quick" (3 s per program on a CPU) or "full"; `tune` is "first_call", "background" or "never".

    >>> from serrate import JaggedTensor, jit
    >>> @jit
    ... def center(jt):
    ...     return jt - jt.mean(dim=1, keepdim=True)
    >>> center(JaggedTensor.from_list([torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]])])).unbind()[0]
    tensor([[-1.],
            [ 1.]])
    """
    policy = Policy(tune, effort)
    if function is None:
        return lambda f: Jitted(f, backend, strategy, save=save, policy=policy)
    return Jitted(function, backend, strategy, save=save, policy=policy)
