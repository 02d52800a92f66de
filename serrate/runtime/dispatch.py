"""Dispatch: the fast path of every call.

In: the arguments of a call. Out: the binding that an earlier call with the same key left. Traced functions, eager operators,
compiled fusions and the device loops of kernels all come through here.

    key       everything a binding depends on: threads, modes, stream; the shape, dtype, device and contiguity of every tensor;
              the structure of every ragged tensor and the versions of its offsets; every number and string
    binding   a program with everything but the addresses of the call's tensors: its numbers and derived arrays, how its outputs
              and scratch are allocated, what its results are (`bound`)
    outline   the key without what is new in every batch: the identity of structures, and the sizes of dims that hold rows
    form      everything a program depends on besides sizes: dtypes, ranks, devices, row formats, which ragged tensors share rows

A warm call walks over its arguments once to make the key, looks it up, and runs the binding. It checks nothing: whatever a check
could find is part of the key. A call with new offsets has a new key but an old outline, by which its program is found. One with a
new outline is served by its form and the sizes that are compiled in (`frontend/specialise.py`, `tiles/specialise.py`). Rows that
are new are checked, unless they were when they were constructed. They are often seen once, so only the second call of a traced
function or fusion with the same key leaves a binding.
"""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import empty_like, get_num_threads, is_grad_enabled
from torch.autograd.profiler import record_function

from serrate import settings
from serrate.errors import CallError
from serrate.frontend.leaves import causal_variant
from serrate.ir.expr import Array
from serrate.modes import is_batch_invariant, is_deterministic
from serrate.runtime import memory
from serrate.runtime.launch import CppExecutable, Execute, TensorExecutable
from serrate.runtime.locks import Lock
from serrate.runtime.memory import InMemory, address, no_address
from serrate.runtime.results import Result
from serrate.schedule.plan import Plan
from serrate.tensor import JaggedTensor, Structure
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.jagged import trusted
from serrate.tensor.torch_private import PROFILER, is_recorded, stream_of

Key = tuple[Any, ...]
Leaves = list[Any]
"""What a binding reads at every call, in the order of the arguments: tensors, the values of ragged tensors, and numbers that are
not part of the key."""


class CallLeaves(list[Any]):
    """The leaves of a call, and its ragged tensors."""

    __slots__ = ("ragged",)

    def __init__(self) -> None:
        self.ragged: list[tuple[int, JaggedTensor]] = []
        """Each with its position in the key."""


Other = Callable[[Any, list[Any], Any, list[Any]], None]
"""Adds a value that is neither a tensor nor a plain number, string or container to a key or form. Its arguments: the value, the
key, the leaves, and the objects whose contents are compared separately."""

Apart = Callable[[Sequence[int]], None]
"""Raises if tensors of a program at these addresses share memory that must not be shared."""

BINDINGS = 64
"""How many bindings a callee keeps; the oldest is dropped first. Each keeps its structures alive."""

_lock = Lock()


# --- keys ----------------------------------------------------------------------------------------------------------------


_of_tensor: Callable[[torch.Tensor], tuple[Any, ...]] = attrgetter("shape", "dtype", "requires_grad", "is_cpu")
"""One call instead of four: keys are made at every call."""


def key_of(
    values: Iterable[Any],
    leaves: CallLeaves,
    objects: list[Any],
    other: Other,
    live: bool = False,
    key: list[Any] | None = None,
) -> list[Any]:
    """The key of a call with these arguments; given `key`, extends it instead. Appends the arguments' tensors to the leaves.

    Structures are told apart by identity: a binding keeps those in its key alive, so their ids are not reused. `live` floats are
    leaves instead of part of the key.
    """
    if key is None:
        key = [get_num_threads(), is_grad_enabled(), settings.current().plans, is_batch_invariant(), is_deterministic()]
    on_device: torch.Tensor | None = None
    for value in values:
        kind = type(value)
        if kind is torch.Tensor:
            leaves.append(value)
            described = _of_tensor(value)
            key += (described, value.is_contiguous())
            if not described[3]:
                key.append(value.device)
                on_device = value
        elif kind is JaggedTensor:
            # Its device is that of its structure.
            own, structure, hints = value._values, value._structure, value._hints
            leaves.append(own)
            described = _of_tensor(own)
            if hints is not NO_HINTS:
                key.append(hints)
            leaves.ragged.append((len(key), value))
            key += (described, own.is_contiguous(), id(structure))
            if not described[3]:
                on_device = own
            for rows in structure._rows:
                key += rows.versions()
        elif live and kind is float:
            key.append(kind)
            leaves.append(value)
        elif kind is int or kind is bool or value is None or kind is str:
            key += (kind, value)
        elif isinstance(value, torch.Tensor):
            variant = causal_variant(value)
            if variant is not None:
                key += (kind, variant)
                continue
            leaves.append(value)
            key += (kind, _of_tensor(value), value.is_contiguous(), value.device)
        elif kind is tuple or kind is list:
            key += (kind, len(value))
            key_of(value, leaves, objects, other, live, key)
        elif kind is dict:
            key += (kind, *value)
            key_of(value.values(), leaves, objects, other, live, key)
        else:
            other(value, key, leaves, objects)
    if on_device is not None:
        key.append(_stream(on_device))
    return key


def outline_of(key: Key, ragged: Sequence[tuple[int, JaggedTensor]], number: Callable[[JaggedTensor], int]) -> Key:
    """The outline of a call, given its key and its ragged tensors; `number` as in `form_of`."""
    outline = [*key]
    numbers = [number(value) for _, value in ragged] if len(ragged) > 1 else [0] * len(ragged)
    for (at, value), own in zip(reversed(ragged), reversed(numbers), strict=True):
        structure, values, (shape, dtype, requires_grad, is_cpu) = value._structure, value._values, outline[at]
        dims, width = structure._dims, 3
        for rows in structure._rows:
            width += len(rows._tensors)
        sizes = shape[1:] if dims == (0,) else tuple([size for dim, size in enumerate(shape) if dim not in dims])
        device = None if is_cpu else values.device
        outline[at : at + width] = (structure.form, sizes, dtype, requires_grad, device, outline[at + 1], own)
    return tuple(outline)


def _stream(tensor: torch.Tensor) -> object:
    """The stream of a call, because a call on another stream would not wait for the arrays of a binding. While a CUDA graph is
    recorded, an object that equals no other: the graph must derive arrays from the offsets of every replay."""
    return object() if is_recorded(tensor) else stream_of(tensor.device)


def form_of(
    values: Iterable[Any],
    items: list[Any],
    objects: list[Any],
    other: Other,
    number: Callable[[JaggedTensor], int],
    live: bool = False,
    form: list[Any] | None = None,
) -> list[Any]:
    """The form of a call with these arguments; given `form`, extends it instead. Appends the arguments' tensors to the items.

    Unlike leaves, items are whole ragged tensors. `live` integers and floats are items instead of part of the form. `number`
    gives ragged tensors one number if a program may rely on their rows being the same.
    """
    if form is None:
        form = []
    for value in values:
        kind = type(value)
        if kind is torch.Tensor:
            items.append(value)
            form += (value.dtype, value.ndim)
            if not value.is_cpu:
                form.append(value.device)
        elif kind is JaggedTensor:
            structure, own = value._structure, value._values
            items.append(value)
            form += (kind, own.dtype, own.ndim, structure.form, number(value))
            if not own.is_cpu:
                form.append(own.device)
        elif live and (kind is float or kind is int):
            form.append(kind)
            items.append(value)
        elif kind is int or kind is bool or value is None or kind is str:
            form += (kind, value)
        elif isinstance(value, torch.Tensor):
            variant = causal_variant(value)
            if variant is not None:
                form += (kind, variant)
                continue
            items.append(value)
            form += (kind, value.dtype, value.ndim, value.device)
        elif kind is tuple or kind is list:
            form += (kind, len(value))
            form_of(value, items, objects, other, number, live, form)
        elif kind is dict:
            form += (kind, *value)
            form_of(value.values(), items, objects, other, number, live, form)
        else:
            other(value, form, items, objects)
    return form


# --- bindings ------------------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """Everything about a call that depends only on its offsets and extents: made once, used by every call like it."""

    plan: Plan
    executable: CppExecutable | TensorExecutable
    arrays: tuple[InMemory, ...]
    indices: tuple[tuple[int, Array], ...]
    """Which of the arrays are integers that a caller may change from call to call, and where they come from."""
    symbols: tuple[int, ...]
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Of outputs, and then of scratch, that are allocated for the call."""
    outputs: int
    """How many of these are outputs."""
    private: tuple[torch.Tensor, ...]
    allocate: Callable[[], list[InMemory]]
    execute: Execute | None
    """As in `SizedProgram`."""
    results: tuple[Result, ...] = ()


@dataclass(frozen=True)
class Doubles:
    """Floats among the leaves that a program reads from memory: other floats need no other binding."""

    places: tuple[int, ...]

    def of(self, leaves: Leaves) -> array[float]:
        """The floats of a call, in host memory."""
        return array("d", map(leaves.__getitem__, self.places))


_doubles: OrderedDict[tuple[torch.device, int, bytes], torch.Tensor] = OrderedDict()
"""By device; by stream, because another stream would not wait for the fill; by bits, because 0.0 == -0.0."""


def doubles_on(device: torch.device, floats: Iterable[float]) -> torch.Tensor:
    """Floats in device memory, cached for recent calls. The device fills them in, because a copy from the host would wait for the
    device. A call that a CUDA graph records gets a tensor that is not cached."""
    given = array("d", floats)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return _filled_in(device, given)
    key = (device, stream_of(device), given.tobytes())
    found = _doubles.get(key)
    if found is None:
        found = _filled_in(device, given)
        remember(_doubles, key, found)
    return found


def _filled_in(device: torch.device, floats: Sequence[float]) -> torch.Tensor:
    if device.type == "cpu" or not floats:
        return torch.tensor(floats, dtype=torch.float64, device=device)
    return torch.stack([torch.full((), x, dtype=torch.float64, device=device) for x in floats])


Source = int | torch.Tensor | Doubles
"""Where a program's tensor comes from: the place of a leaf, a tensor that the binding holds, or floats among the leaves."""


class Binding(Protocol):
    """Runs a call, given its leaves. Results are written into the caller's memory if it fits."""

    def __call__(self, leaves: Leaves, into: Sequence[torch.Tensor] = ()) -> Any: ...


def bound(
    ready: Prepared,
    sources: Sequence[Source],
    tensors: Sequence[torch.Tensor],
    *,
    results: Sequence[Result] = (),
    require: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] | None = None,
    found: Sequence[int] = (),
    finish: Callable[[list[Any]], Any] | None = None,
    indices: Sequence[tuple[int, int]] = (),
    apart: Apart | None = None,
    keep: Sequence[object] = (),
) -> Binding:
    """A program bound to everything but the addresses of a call's tensors.

    `tensors` are those of this call, one for each source. `require` judges the tensors at the places `found`; `finish` turns the
    results into what the call returns, and without it the call returns None; `indices` are arrays that are tensors of the call,
    each with its source; `apart` checks addresses; `keep` lives as long as the binding.
    """
    sizes = [tensor.numel() for tensor in tensors]
    sizes += [prod(shape) for shape, _ in ready.shapes]
    sizes += [row.numel() for row in ready.private]
    places = (tensor.device for tensor, source in zip(tensors, sources, strict=True) if not isinstance(source, Doubles))
    device = next(places, torch.device("cpu"))
    launch = _launch(ready, sources, sizes, device, indices, apart, keep)
    if not ready.shapes and require is None and finish is None:
        return launch
    count = len(sources)
    models = [
        (shape, dtype, memory.allocator(shape, dtype, device), _model(shape, dtype, sources, tensors))
        for shape, dtype in ready.shapes[: ready.outputs]
    ]
    # Most results are handed out in the shape that they are allocated in.
    shapes = [*(t.shape for t in tensors), *(shape for shape, _ in ready.shapes)]
    parts = [(r.place, None if shapes[r.place] == r.shape else r.shape, r.structure, r.hints) for r in results]
    scratch = memory.scratch(ready.shapes[ready.outputs :], device)
    given = _given(sources)

    def run(leaves: Leaves, into: Sequence[torch.Tensor] = ()) -> Any:
        made: list[Any]
        if into:
            made = _into(into, models, parts, count)
        else:
            made = [allocate() if model is None else empty_like(leaves[model]) for _, _, allocate, model in models]
        if scratch is not None:
            made += scratch()
        launch(leaves, made)
        if require is not None:
            require(given(leaves), [made[k - count] for k in found])
        if finish is None:
            return None
        returned: list[Any] = []
        for place, shown, structure, hints in parts:
            values = made[place - count] if place >= count else given(leaves)[place]
            if shown is not None:
                values = values.view(shown)
            returned.append(values if structure is None else trusted(values, structure, hints))
        return finish(returned)

    return run


def _launch(
    ready: Prepared,
    sources: Sequence[Source],
    sizes: Sequence[int],
    device: torch.device,
    indices: Sequence[tuple[int, int]],
    apart: Apart | None,
    keep: Sequence[object],
) -> Binding:
    """Runs the program on the leaves of a call and on what was allocated for it; `sizes` are its tensors' numbers of elements."""
    executable, arrays, symbols, count = ready.executable, ready.arrays, ready.symbols, len(sources)
    known = [*[0] * len(sizes), *[a.data_ptr() for a in arrays]]
    places: list[tuple[int, int]] = []
    floats: list[tuple[int, Doubles]] = []
    for k, source in enumerate(sources):
        if isinstance(source, int):
            places.append((k, source))
        elif isinstance(source, Doubles):
            floats.append((k, source))
        else:
            known[k] = address(source)
    for k, place in indices:
        given = sources[place]
        assert isinstance(given, int)
        places.append((len(sizes) + k, given))
    if not isinstance(executable, CppExecutable):
        execute = executable.bound(arrays, symbols, device) if ready.execute is None else ready.execute
        private, find = ready.private, _given(sources)

        def launch_on_device(leaves: Leaves, into: Sequence[Any] = (), _keep: object = (sources, keep)) -> None:
            pointers = known.copy()
            for k, place in places:
                pointers[k] = leaves[place].data_ptr() or no_address(leaves[place])
            doubles = [(k, doubles_on(device, own.of(leaves))) for k, own in floats] if floats else ()
            for k, each in doubles:
                pointers[k] = each.data_ptr()
            for k, each in enumerate(into, count) if into else ():
                pointers[k] = each.data_ptr()

            def every() -> list[InMemory]:
                memory = [*find(leaves), *into, *private, *arrays]
                for k, each in doubles:
                    memory[k] = each
                for k, place in indices:
                    memory[len(sizes) + k] = memory[place]
                return memory

            if apart is not None:
                apart(pointers)
            if PROFILER._is_profiler_enabled:
                with profiled(ready):
                    execute(pointers, every)
            else:
                execute(pointers, every)

        return launch_on_device
    function, packed, _, numbers, rows, _ = executable.bound(sizes, arrays, symbols)

    def launch(leaves: Leaves, into: Sequence[torch.Tensor] = (), _keep: object = (arrays, sources, keep)) -> None:
        pointers = known.copy()
        for k, place in places:
            pointers[k] = leaves[place].data_ptr() or no_address(leaves[place])
        for k, own in floats:
            # Alive until the program has run.
            doubles = own.of(leaves)
            pointers[k] = doubles.buffer_info()[0]
        for k, each in enumerate(into, count) if into else ():
            pointers[k] = each.data_ptr()
        for k, row in rows:
            pointers[k] = row()
        if apart is not None:
            apart(pointers)
        if PROFILER._is_profiler_enabled:
            with profiled(ready):
                function(packed(*pointers), numbers)
        else:
            function(packed(*pointers), numbers)

    return launch


def refuse_capture() -> None:
    """Raises for a call while operations are captured (`is_captured`): its result would become a constant of the graph, or its
    arguments have no memory."""
    raise CallError(
        "compiled programs cannot be captured by make_fx or torch.export, and do not run under FakeTensorMode: call them outside "
        "of these; torch.compile runs them between its graphs"
    )


def profiled(ready: Prepared) -> AbstractContextManager[object]:
    """Within this context, profiles show a program by its name and strategy. Callers ask first whether there is a profiler."""
    return record_function(f"serrate: {ready.executable.program.name} ({ready.plan.strategy})")


def _given(sources: Sequence[Source]) -> Callable[[Leaves], list[Any]]:
    """The tensors that a program is given, as a function of the leaves of a call."""
    return lambda leaves: [leaves[source] if isinstance(source, int) else source for source in sources]


Models = Sequence[tuple[tuple[int, ...], torch.dtype, Callable[[], torch.Tensor], int | None]]
Parts = Sequence[tuple[int, tuple[int, ...] | None, Structure | None, Hints]]


def _into(into: Sequence[torch.Tensor], models: Models, parts: Parts, count: int) -> list[torch.Tensor]:
    """Outputs in the caller's memory. Memory of another size or dtype is not used; the caller compares addresses to find out."""
    given = {place - count: (own, shown) for (place, shown, _, _), own in zip(parts, into, strict=True)}
    made = []
    for k, (shape, dtype, allocate, _) in enumerate(models):
        own, shown = given.get(k, (None, None))
        if own is not None and own.shape == (shape if shown is None else shown) and own.dtype == dtype:
            made.append(own.view(shape))
        else:
            made.append(allocate())
    return made


def _model(shape: tuple[int, ...], dtype: torch.dtype, sources: Sequence[Source], tensors: Sequence[torch.Tensor]) -> int | None:
    """The leaf with the shape and dtype of an output that torch allocates, if any: `empty_like` of it is the fastest way."""
    for source, tensor in zip(sources, tensors, strict=True):
        if isinstance(source, int) and type(tensor) is torch.Tensor and (tensor.shape, tensor.dtype) == (shape, dtype):
            if tensor.is_cpu and prod(shape) * dtype.itemsize >= memory.SMALLEST:
                return None
            return source if tensor.is_contiguous() else None
    return None


# --- caches --------------------------------------------------------------------------------------------------------------


class CallState(Protocol):
    """Bindings for one state of everything that is read besides the arguments."""

    bindings: OrderedDict[Key, Binding]

    def read(self, objects: Sequence[Any]) -> Sequence[Any] | None:
        """The tensors that are reached through these objects and captured variables; None if anything changed."""


S = TypeVar("S", bound=CallState)
T = TypeVar("T")


class FastPath(Generic[S]):
    """The bindings of one callee: a traced function, an operator, a compiled fusion, a device loop."""

    def __init__(self, limit: int, *states: S) -> None:
        self._limit = limit
        self.states: tuple[S, ...] = states
        """Most recently used first. Replaced as a whole, so threads may lose a state to each other; it is then made again."""

    def state(self, objects: Sequence[Any]) -> tuple[S | None, Sequence[Any]]:
        """The state that matches, and the tensors reached; None if no state does."""
        states = self.states
        for k, state in enumerate(states):
            reached = state.read(objects)
            if reached is not None:
                if k:
                    self.states = (state, *states[:k], *states[k + 1 :])
                return state, reached
        return None, ()

    def add(self, state: S) -> S:
        """Adds a state; the least recently used one is dropped."""
        self.states = (state, *self.states[: self._limit - 1])
        return state


class Seen:
    """The keys of calls that ran without a binding: the next such call leaves one."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, list[weakref.ref[Any]]] = OrderedDict()

    def note(self, key: Key, rows: Sequence[Any]) -> bool:
        """Whether a call with this key and these structures or offsets came before. A key has only their ids, and those of rows
        that are gone are soon reused."""
        found = self._keys.get(key)
        if found is not None and all(each() is own for each, own in zip(found, rows, strict=True)):
            return True
        remember(self._keys, key, [weakref.ref(own) for own in rows])
        return False


def remember(bindings: OrderedDict[Key, T], key: Key, binding: T) -> None:
    """Caches a binding, or what a binding needs; the oldest are dropped."""
    with _lock.own:
        bindings[key] = binding
        if len(bindings) > BINDINGS:
            bindings.popitem(last=False)
