"""Launch sites: the fast path of a device loop.

In: the variables that a device loop uses, at every call. Out: the loop runs. The key of a call finds the binding that an earlier
call created (`runtime/dispatch.py`); if there is none, the loop's program is looked up (`specialise.py`) and bound.
"""

from __future__ import annotations

import builtins
import itertools
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import get_num_threads, is_grad_enabled

from serrate.frontend.kernel.machine import BlockSize
from serrate.ir.tile import TileProgram
from serrate.runtime import dispatch
from serrate.runtime.dispatch import Binding, CallLeaves, FastPath, Key, Leaves, refuse_capture, remember
from serrate.runtime.locks import making
from serrate.tensor import JaggedTensor
from serrate.tensor.torch_private import in_dual_level, is_captured, is_recorded
from serrate.tiles.memory import rows_key
from serrate.tiles.signature import ObjectSnapshot, attributes, check, check_rows, is_read, key_of
from serrate.tiles.source import DeviceLoop, all_outside, outside
from serrate.tiles.sources import LEAVES, Items, flattened, is_item
from serrate.tiles.specialise import LoopPrograms
from serrate.tiles.stage import LoopStage, Options

STATES = 32
"""How many states of the objects that a loop reads keep their bindings; the oldest is dropped first."""
ITSELF = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, torch.dtype)
"""Types of values that are compared by identity."""


class OuterNames(NamedTuple):
    """Names from outside the kernel, compared with their earlier values instead of being part of every key."""

    token: object
    """Part of every key; replaced whenever this changes."""
    names: tuple[tuple[str, Any, Any], ...]
    """Each name with the builtin of that name, if any, and its value."""
    others: tuple[str, ...]


class LoopOutline(NamedTuple):
    """The program for calls with one outline, and how to find its items."""

    program: LoopStage
    items: tuple[Any, ...]
    """Integers, which are part of an outline; None for what is a leaf."""
    leaves: tuple[int, ...]
    """Which of the items are leaves, in order."""
    ragged: tuple[int, ...]
    """Which of them are ragged."""

    @classmethod
    def of(cls, program: LoopStage, items: Items) -> LoopOutline:
        """The outline of a call with these items."""
        leaves = tuple([k for k, item in enumerate(items) if isinstance(item, LEAVES)])
        ragged = tuple([k for k in leaves if isinstance(items[k], JaggedTensor)])
        return cls(program, tuple([None if k in leaves else item for k, item in enumerate(items)]), leaves, ragged)

    def filled(self, leaves: CallLeaves) -> Items:
        """The items of a call."""
        items = [*self.items]
        for k, leaf in zip(self.leaves, leaves, strict=True):
            items[k] = leaf
        for k, (_, value) in zip(self.ragged, leaves.ragged, strict=True):
            items[k] = value
        return items


class DeviceLoopState:
    """The bindings of earlier calls of a device loop, for one state of the objects that it uses; None if it uses no objects."""

    __slots__ = ("bindings", "outlines", "reading")

    def __init__(self, reading: ObjectSnapshot | None) -> None:
        self.reading = reading
        self.bindings: OrderedDict[Key, Binding] = OrderedDict()
        self.outlines: OrderedDict[Key, LoopOutline] = OrderedDict()

    def read(self, objects: Sequence[Any]) -> Sequence[Any] | None:
        """An empty tuple, because no tensors are reached through objects; None if an object has changed."""
        return () if self.reading is None or self.reading.holds(objects) else None


class LaunchSite:
    """One device loop of a kernel: its programs, and the bindings that earlier calls created."""

    def __init__(
        self,
        name: str,
        function: types.FunctionType,
        loop: DeviceLoop,
        options: Options,
        traced: Callable[[LoopPrograms, TileProgram], None],
    ) -> None:
        self.function, self.loop = function, loop
        self.programs = LoopPrograms(name, loop, options, traced)
        self._without = DeviceLoopState(None)
        """The bindings of calls that read no objects."""
        self._fast = FastPath[DeviceLoopState](STATES)
        self._numbers = itertools.count(1)
        self._attributes = attributes(function.__code__)
        self._plain: set[Any] = set()
        """Modules, functions, classes and dtypes whose attributes are not read."""
        self._outer = OuterNames(object(), (), loop.outside)

    def __call__(self, given: dict[str, Any]) -> None:
        leaves = CallLeaves()
        objects: list[Any] = []
        key = self._key(given, leaves, objects)
        state, _ = self._fast.state(objects) if objects else (self._without, ())
        binding = None if state is None else state.bindings.get(key)
        if is_captured():
            refuse_capture()
        if binding is None or in_dual_level():
            self._call(given, key, leaves, objects)
        else:
            binding(leaves)

    def _key(self, given: Mapping[str, Any], leaves: CallLeaves, objects: list[Any]) -> Key:
        """Everything that a binding depends on. Fills `leaves` with tensors and floats, and `objects` with what is read."""
        # A kernel is compiled for one choice of backend and one mode, so neither is part of its keys.
        key = dispatch.key_of(given.values(), leaves, objects, self._other, True, [get_num_threads(), is_grad_enabled()])
        if len(given) != len(self.loop.names):
            key.append(tuple(given))
        known, names = self._outer, self.function.__globals__
        for name, builtin, value in known.names:
            if names.get(name, builtin) is not value:
                known = self._outer = OuterNames(object(), (), self.loop.outside)
                break
        key.append(known.token)
        if known.others:
            dispatch.key_of([outside(self.function, n) for n in known.others], leaves, objects, self._other, True, key)
        if objects:
            _note_blocks(key, objects)
        return tuple(key)

    def _form(self, given: Mapping[str, Any], items: list[Any]) -> Key:
        """Everything that a program depends on, except sizes and the contents of objects. Fills `items`."""
        objects: list[Any] = []
        number = _row_numbers()
        form = dispatch.form_of(given.values(), items, objects, self._other_item, number, True)
        if len(given) != len(self.loop.names):
            form.append(tuple(given))
        known = self._outer
        form += known.names
        if known.others:
            outer = [outside(self.function, n) for n in known.others]
            dispatch.form_of(outer, items, objects, self._other_item, number, True, form)
        if objects:
            _note_blocks(form, objects)
        return tuple(form)

    def forget(self) -> None:
        """Drops all bindings: the plans they hold were replaced."""
        for state in (self._without, *self._fast.states):
            state.bindings = OrderedDict()

    def _settle(self) -> bool:
        """Removes outer names whose attributes are not read from the keys; returns whether there are any."""
        names, free = self.function.__globals__, self.function.__code__.co_freevars
        every = [(name, getattr(builtins, name, None)) for name in self.loop.outside if name not in free]
        found = [(name, builtin, names.get(name, builtin)) for name, builtin in every]
        plain = tuple((n, builtin, value) for n, builtin, value in found if isinstance(value, ITSELF) and value in self._plain)
        if plain:
            plain_names = {name for name, _, _ in plain}
            self._outer = OuterNames(object(), plain, tuple(n for n in self.loop.outside if n not in plain_names))
        return bool(plain)

    def _other(self, value: Any, key: list[Any], leaves: Leaves, objects: list[Any]) -> None:
        kind = type(value)
        if isinstance(value, float):
            key.append(kind)
            leaves.append(value)
        elif isinstance(value, ITSELF):
            key += (kind, value)
            if value not in self._plain:
                if is_read(value):
                    objects.append(value)
                else:
                    self._plain.add(value)
        else:
            key += (kind, key_of(value))
            if kind is BlockSize or is_read(value):
                objects.append(value)

    def _other_item(self, value: Any, form: list[Any], items: list[Any], objects: list[Any]) -> None:
        if is_item(value):
            form.append(type(value))
            items.append(value)
        else:
            self._other(value, form, items, objects)

    def _call(self, given: dict[str, Any], key: Key, leaves: CallLeaves, objects: Sequence[Any]) -> None:
        """Serves a call that has no binding yet. Many rows are used once, so only the second call on them creates a binding."""
        if not self._outer.names and self._settle():
            leaves = CallLeaves()
            key = self._key(given, leaves, [])
        state, ragged = self._state(objects), [value for _, value in leaves.ragged]
        if ragged:
            program, items = self._outlined(given, key, leaves, state)
        else:
            program, items = self._program(given, state.reading)
        served = [value._structure.is_served(program) for value in ragged]
        if not all(served) or not self.programs.is_tested(program):
            program.once(items)
            return
        binding = program.bind_or_run(items)
        if binding is not None:
            remember(state.bindings, key, binding)
            binding(leaves)

    def _outlined(self, given: dict[str, Any], key: Key, leaves: CallLeaves, state: DeviceLoopState) -> tuple[LoopStage, Items]:
        """As `_program`, with a fast path: most calls differ from an earlier one only in their rows, and reuse its program."""
        outline = dispatch.outline_of(key, leaves.ragged, _row_numbers())
        known = state.outlines.get(outline)
        if known is not None:
            items = known.filled(leaves)
            if in_dual_level():
                check(items)
            else:
                # What else could be wrong is part of the outline.
                check_rows(value for _, value in leaves.ragged)
            return known.program, items
        program, items = self._program(given, state.reading)
        outlined = self.programs.is_tested(program) and self.programs.are_outlined(items)
        if outlined and not any(is_recorded(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
            remember(state.outlines, outline, LoopOutline.of(program, items))
        return program, items

    def _program(self, given: dict[str, Any], reading: ObjectSnapshot | None) -> tuple[LoopStage, Items]:
        """The program for these variables, and the variables that it takes arguments from."""
        items: list[Any] = []
        form = (0 if reading is None else reading.number, *self._form(given, items))
        check(items)
        return self.programs.find(form, items, lambda: self._complete(given)), items

    def _state(self, objects: Sequence[Any]) -> DeviceLoopState:
        """The state of these objects, read if it is new."""
        if not objects:
            return self._without
        state, _ = self._fast.state(objects)
        if state is None:
            with making:
                state, _ = self._fast.state(objects)
                if state is None:
                    state = self._fast.add(DeviceLoopState(ObjectSnapshot(objects, self._attributes, next(self._numbers))))
        return state

    def _complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """Everything that the loop uses: local variables, outer names, and the contents of containers."""
        return flattened(given | all_outside(self.function, self.loop.outside))

    def asked(self, given: dict[str, Any]) -> tuple[LoopStage, Items]:
        """The program for these variables, and the variables that it takes arguments from; nothing is run."""
        objects: list[Any] = []
        self._key(given, CallLeaves(), objects)
        if not self._outer.names:
            self._settle()
        return self._program(given, self._state(objects).reading)


def _row_numbers() -> Callable[[JaggedTensor], int]:
    """Numbers the rows of ragged tensors. Tensors share a number only if they have the same `Rows` objects, not equal ones: a
    tile of one tensor's rows is then a tile of the other's."""
    numbers: dict[Any, int] = {}
    return lambda x: numbers.setdefault(rows_key(x), len(numbers))


def _note_blocks(key: list[Any], objects: list[Any]) -> None:
    """Appends to a key which block sizes belong to one axis, and keeps only the objects that are read. Two blocks of one size
    are the same only if they belong to one axis."""
    axes = [value.axis for value in objects if type(value) is BlockSize]
    key += [next(k for k, other in enumerate(axes) if other is axis) for axis in axes]
    objects[:] = [value for value in objects if type(value) is not BlockSize]
