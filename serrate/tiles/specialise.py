"""Specialisation of device loops: which program serves which arguments.

In: the variables that a device loop uses. Out: the program for them, a `LoopStage`. A loop is traced once per signature (dtypes,
ranks, row formats, compiled-in sizes); everything else is an argument of the program. A size is compiled in until it is seen to
change. Numbers of rows, their lengths and first dims of tensors are never compiled in, unless the loop needs them at compile
time; then each value gets its own program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from serrate.errors import InvarianceError, KernelError
from serrate.frontend.kernel.machine import BlockSize
from serrate.ir.expr import const
from serrate.ir.loops import Write, load, number
from serrate.ir.tile import Axis, TileProgram, statements
from serrate.runtime.dispatch import Key
from serrate.runtime.locks import making
from serrate.schedule.statistics import below_their_maximum
from serrate.tensor import JaggedTensor
from serrate.tiles.implied_conditions import without_implied
from serrate.tiles.loops import RetraceFacts, RetraceNeeded
from serrate.tiles.memory import TracedRows, first_of
from serrate.tiles.proof import (
    Suspect,
    agree,
    at_random,
    backend_to_try,
    is_telling,
    name_of,
    passes_floats,
    refusal,
    tiles_to_try,
    unproven,
)
from serrate.tiles.read_back import refuse_read_back
from serrate.tiles.signature import counts_of, paths_of, sizes_of, widths
from serrate.tiles.source import DeviceLoop
from serrate.tiles.sources import CPU_DEVICE, NUMBERS, ArgumentSources, Container, Env, Fixed, Items, Path, Places, names_of
from serrate.tiles.stage import LoopStage, Options
from serrate.tiles.trace import Trace
from serrate.tiles.values import Traced


def _require_order(name: str, program: TileProgram) -> None:
    """Raises for atomic additions whose order affects the result."""
    for node in (n for phase in program.phases for n in statements(phase.body)):
        if isinstance(node, Write) and node.add and node.tensor.dtype.is_floating_point:
            raise InvarianceError(
                f"{name}: hl.atomic_add to {node.tensor.name} ({node.tensor.dtype}) adds in an order that varies by run, "
                "and serrate.batch_invariant() promises the same bits: carry the sum in a loop, or add integers"
            )


class Form:
    """One form of a loop's arguments: the sizes seen so far, which of them are compiled in, and the programs."""

    def __init__(self, env: Env, items: Items) -> None:
        self.names = names_of(env)
        self.seen: list[dict[Path, int]] = []
        self.static: set[Path] = set()
        """The sizes that the loop needs at compile time."""
        self.stages: dict[Key, LoopStage] = {}
        self._paths = paths_of(self.names, items)
        self._compiled_in: tuple[tuple[int, ...], tuple[Callable[[Items], int], ...]] = ((), ())

    def sizes(self, sizes: Sequence[int]) -> dict[Path, int]:
        """The sizes that may be compiled in, by path."""
        return {path: size for path, size in zip(self._paths, sizes, strict=True) if path is not None}

    def settle(self, changing: set[Path]) -> None:
        """Decides which sizes are compiled in from now on."""
        fixed = [k for k, p in enumerate(self._paths) if p is not None and (p not in changing or p in self.static)]
        needed = sorted(self.static.difference(self._paths), key=repr)
        # One assignment: other threads read both.
        self._compiled_in = (tuple(fixed), tuple(map(Places(self.names).number, needed)))

    def needs_lengths(self) -> bool:
        """Whether the loop needs numbers of rows or lengths at compile time."""
        return bool(self._compiled_in[1])

    def key(self, sizes: Sequence[int], items: Items) -> Key:
        """Which sizes are compiled into the program for these arguments, and what they are."""
        fixed, needed = self._compiled_in
        return (fixed, *[sizes[k] for k in fixed], *[number(items) for number in needed])


class LoopPrograms:
    """The programs of one device loop."""

    def __init__(
        self, name: str, loop: DeviceLoop, options: Options, traced: Callable[[LoopPrograms, TileProgram], None]
    ) -> None:
        self.name, self.loop, self.options = name, loop, options
        self._report = traced
        """Called with every program before it is built."""
        self.changing: set[Path] = set()
        """Sizes that were seen to change, and integers that were a number of rows or a length when first seen."""
        self.forms: dict[Key, Form] = {}
        self.open_blocks = 0
        """How many block sizes of the configuration the loop takes."""
        self._decided: set[Path] = set()
        self._untested: dict[LoopStage, Sequence[tuple[Axis, Suspect]]] = {}
        """Programs whose tile sizes are in doubt, and whose calls so far had too few positions to tell."""

    def find(self, form: Key, items: Items, env: Callable[[], Env]) -> LoopStage:
        """The program for a call of this form with these items; if there is none yet, traces one for the variables in `env`."""
        sizes, single = sizes_of(items)
        key = (form, single)
        known = self.forms.get(key)
        found = None if known is None else known.stages.get(known.key(sizes, items))
        if found is None:
            with making, CPU_DEVICE:
                found = self._new(key, items, sizes, env())
        elif found in self._untested:
            with making, CPU_DEVICE:
                self._test(found, items, env())
        return found

    def is_tested(self, stage: LoopStage) -> bool:
        """Whether the tile sizes of a program need no more tests."""
        return stage not in self._untested

    def are_outlined(self, items: Items) -> bool:
        """Whether one program serves all calls with the outline of this one: no sizes of dims that hold rows, which are not part
        of an outline, are compiled in."""
        ragged = [x for x in items if isinstance(x, JaggedTensor)]
        return all(x.structure.dims == (0,) for x in ragged) and not any(f.needs_lengths() for f in self.forms.values())

    def _new(self, key: Key, items: Items, sizes: Sequence[int], env: Env) -> LoopStage:
        """The program for a new form or new sizes. The caller holds the lock `making`."""
        form = self.forms.get(key)
        if form is None:
            form = self.forms[key] = Form(env, items)
            assert all(env[name] is item for name, item in zip(form.names, items, strict=True)), "items are in the order of names"
        named = form.sizes(sizes)
        new = {path for path in named if len(path) == 1} - self._decided
        if new:
            counts = counts_of(env)
            self.changing |= {path for path in new if named[path] in counts and self.options.static_shapes is not True}
            # No program reads them.
            self.changing |= {(name,) for name in self._aliases(env)}
            self._decided |= new
        if self.options.alone:
            self.changing |= named.keys() - form.static - widths(env)
        elif self.options.static_shapes is False:
            self.changing |= {path for path in named if path not in form.static}
        self._settle()
        found = form.stages.get(form.key(sizes, items))
        if found is not None:
            return found
        # Sizes that differ from an earlier call of the same form are no longer compiled in, unless they must be.
        for other in form.seen if self.options.static_shapes is None and not self.options.alone else ():
            self.changing |= {p for p, v in named.items() if other[p] != v and p not in form.static}
        form.seen.append(named)
        self._settle()
        found = form.stages.get(form.key(sizes, items))
        if found is None:
            found = self._make(env, items, named, form)
            # Tracing may have found more sizes that it needs.
            self._settle()
            form.stages[form.key(sizes, items)] = found
        return found

    def _aliases(self, env: Env) -> dict[str, tuple[str, str]]:
        """Variables that are an attribute of a ragged tensor, so that programs know as much about them as about the attribute.
        With static shapes, they are numbers like any other."""
        if self.options.static_shapes is True:
            return {}
        return {name: of for name, of in self.loop.aliases.items() if isinstance(env.get(of[0]), JaggedTensor)}

    def _settle(self) -> None:
        for form in self.forms.values():
            form.settle(self.changing)

    def _make(self, env: Env, items: Items, sizes: dict[Path, int], form: Form) -> LoopStage:
        program, trace = self._traced(env, items, sizes, form)
        refuse_read_back(program, trace.lines)
        self._report(self, program)
        if self.options.alone:
            _require_order(self.name, program)
        sources = ArgumentSources(trace, env)
        longest = tuple((number, array) for array, numbers in sources.longest.items() for number in numbers)
        program = below_their_maximum(without_implied(replace(program, longest=longest)))
        made = LoopStage(self.name, program, sources, self.options)
        made.variant(items)
        suspects = unproven(program)
        if suspects:
            self._untested[made] = suspects
            self._test(made, items, env)
        return made

    def _test(self, stage: LoopStage, items: Items, env: Env) -> None:
        """Tests a program whose tile sizes are in doubt, if this call can tell them apart. The caller holds the lock `making`."""
        suspects = self._untested.get(stage)
        if suspects is None:
            return
        names = ", ".join(dict.fromkeys(name_of(each) for _, each in suspects))
        if is_telling(stage.traced, suspects, stage.environment(items), env):
            self._try(stage, suspects, env)
            del self._untested[stage]
            stage.reasons = (f"the tiles around {names}: tested, not proven",)
        else:
            stage.reasons = (f"the tiles around {names}: not tested yet, because no loop around them had several positions",)

    def _try(self, made: LoopStage, suspects: Sequence[tuple[Axis, Suspect]], env: Env) -> None:
        """Raises if the results depend on the tile size."""
        tiles = tiles_to_try(env)
        found: dict[bool, list[list[torch.Tensor]]] = {
            floats: [] for floats in (False, *[True] * passes_floats(made.traced, env))
        }
        for size in tiles:
            stage = made.with_options(Options("maskless", backend_to_try(env), lanes={axis.name: size for axis, _ in suspects}))
            for floats, results in found.items():
                results.append(stage.tried(at_random(env, floats=floats)))
        if not all(map(agree, found.values())):
            raise refusal(suspects, tiles)

    def _traced(self, env: Env, items: Items, sizes: dict[Path, int], form: Form) -> tuple[TileProgram, Trace]:
        # Carried values are determined anew for every program: their dtypes may differ.
        known = RetraceFacts()
        known.static = form.static
        places = Places(form.names)
        for _ in range(20):
            trace = Trace(self.name, known, self.options.blocks)

            def size(path: Path) -> int | None:
                if path[-1] == "now":
                    return places.number(path[:-1])(items)
                if path[0] == NUMBERS:
                    return sum(isinstance(x, float) for x in env.values())
                if path in sizes and path not in self.changing:
                    return sizes[path]
                return 1 if _is_single(path, env) else None

            trace.sizes = size
            try:
                aliases = self._aliases(env)
                made = {name: symbolic(trace, name, value, env) for name, value in env.items() if name not in aliases}
                made |= {name: getattr(made[of], attribute) for name, (of, attribute) in aliases.items()}
                for name in reversed([n for n, value in env.items() if isinstance(value, Container)]):
                    made[name] = made[name].of(made)
                used = {n: made[n] for n in (*self.loop.names, *self.loop.outside) if n in made}
                program = trace.run(self.loop.make(trace), used)
                self.open_blocks = trace.open_blocks
                return program, trace
            except RetraceNeeded:
                continue
        raise KernelError(f"{self.name}: the values that its loops carry change shape or dtype in every iteration")


def _is_single(path: Path, env: Env) -> bool:
    """Whether a size is 1, which is part of a form."""
    match path:
        case (name, "shape", k) if isinstance(env[name], torch.Tensor):
            return bool(env[name].shape[k] == 1)
        case (name, "values", "shape", k) if k > 0:
            return bool(env[name].values.shape[k] == 1)
    return False


def symbolic(trace: Trace, name: str, value: Any, env: Env) -> Any:
    """The symbolic value of a name while a loop is traced."""
    if isinstance(value, torch.Tensor):
        return trace.tensor((name,), value)
    if isinstance(value, JaggedTensor):
        return TracedRows(trace, name, value, first_of(name, env))
    if isinstance(value, (bool, BlockSize, Fixed)):
        return value
    if isinstance(value, int):
        expr = trace.size((name,))
        return expr.value if expr.value is not None else Traced(number(expr), ())
    if isinstance(value, float):
        floats = [n for n, x in env.items() if isinstance(x, float)]
        held = trace.tensor((NUMBERS,), torch.empty(len(floats), dtype=torch.float64, device="meta"))
        return Traced(load(held.tensor, (const(floats.index(name)),)), ())
    return value
