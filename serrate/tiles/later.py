"""Later calls: Python that is written for one layout of what a loop uses, and goes straight to the program.

In: what a call used, and the program that served it. Out: a function that serves every call like it. It looks at types and
numbers of dims, makes a key of everything that a program may be made for, and finds with it a second function, which hands the
program its addresses and numbers. Of a loop with a ragged `jt` and an integer `n` these are, in short,

    def call(env):                                        def run(w0, w0_0, w0_1, e0, v1):
        v0 = env["jt"]                                        r0 = e0.records.get(record) or made(...)
        if type(v0) is not JaggedTensor: return False         function(pointers(w0.data_ptr(), r0[1]),
        w0 = v0._values                                                numbers(threads, stream, r0[2], v1))
        w0_0, w0_1 = w0.shape
        e0 = remembered(v0._structure, w0)
        v1 = env["n"]
        run = ready.get((w0.dtype, w0_1, e0.form, v1))
        ...

What depends on a structure alone is remembered until the structure is gone or its offsets are written to; shapes, numbers and
threads are read every time. A call that does not fit, that would be refused, or whose tensors must be copied first, takes the
long way.
"""

from __future__ import annotations

import builtins
import itertools
import struct
import types
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from serrate.frontend.kernel.machine import BlockSize
from serrate.runtime.launch import CppExecutable, last_level_cache, row_size
from serrate.tensor import JaggedTensor
from serrate.tensor.torch_private import in_dual_level
from serrate.tiles.forms import (
    CONTAINERS,
    NUMBERS,
    Env,
    Fixed,
    Given,
    Path,
    Reading,
    Readings,
    is_read,
    key_of,
    least,
    made_of,
    number_at,
    parts_of,
    refuse_shared,
    remembered,
    structures,
)

if TYPE_CHECKING:
    from serrate.tiles.launch import Variant

UNFIT = "except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError): return False"
"""What a call raises that has something else where a tensor, a container or a name was; the long way says what is wrong."""
ALONE = (bool, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
"""What is the same only if it is the very same."""


LAYOUTS = 32
"""How many layouts of one device loop are remembered; the least recently used goes first."""


class Later:
    """The later calls of one device loop."""

    def __init__(self, function: types.FunctionType, outside: Sequence[str], readings: Readings) -> None:
        self._function, self._outside, self._readings = function, outside, readings
        self._layouts: tuple[Layout, ...] = ()
        self._open: tuple[frozenset[Path], frozenset[Path]] = (frozenset(), frozenset())

    def __call__(self, given: Env) -> bool:
        """Serves the call, if it is like one before."""
        layouts = self._layouts
        for k, layout in enumerate(layouts):
            if layout.call(given):
                if k:
                    self._layouts = (layout, *layouts[:k], *layouts[k + 1 :])
                return True
        return False

    def note(self, given: Env, env: Env, variant: Variant, changing: frozenset[Path], static: frozenset[Path]) -> None:
        """Remembers that a program served a call; `changing` are sizes that no program has in it, unless they are `static`."""
        if (changing, static) != self._open:
            # Keys have other sizes in them now.
            self._open, self._layouts = (changing, static), ()
        for layout in self._layouts:
            if layout.note(given, env, variant):
                return
        layout = Layout(self._function, self._outside, self._readings.number(env)[1], given, changing, static)
        if layout.note(given, env, variant):
            self._layouts = (layout, *self._layouts[: LAYOUTS - 1])


class Code:
    """Python that is written line by line, and the objects it speaks of."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}

    def name(self, thing: Any, wish: str = "c") -> str:
        """A name for an object."""
        made = f"{wish}_{len(self.names)}"
        self.names[made] = thing
        return made

    def function(self, head: str) -> Callable[..., Any]:
        """What was written, as the body of a function."""
        text = "\n    ".join([head, *self.lines])
        exec(compile(text, "<a call of serrate>", "exec"), self.names)
        made: Callable[..., Any] = self.names[head.removeprefix("def ").partition("(")[0]]
        return made


class Layout:
    """Calls in which every name stands for the same type with the same number of dims."""

    def __init__(
        self,
        function: types.FunctionType,
        outside: Sequence[str],
        reading: Reading | None,
        given: Env,
        changing: frozenset[Path],
        static: frozenset[Path],
    ) -> None:
        self._code = Code()
        self._changing = changing
        self.ready: dict[tuple[Any, ...], Callable[..., None]] = {}
        self.locals: dict[Path, str] = {}
        """Tensors and numbers that a call has looked up, by the way to them."""
        self.entries: dict[str, str] = {}
        """What is remembered of the structures of ragged tensors, by their names."""
        self._dims: dict[str, int] = {}
        self._key: list[str] = []
        self._blocks: list[str] = []
        self._tensors: list[str] = []
        self._read: dict[str, str] = {}
        """Functions, classes, modules and objects of the user's, by their names."""
        self._count = itertools.count()
        for name, value in given.items():
            self._leaf(name, f"env[{name!r}]", value)
        for name in outside:
            self._outer(function, name)
        self._key += [f"{a}.axis is {b}.axis" for a, b in itertools.combinations(self._blocks, 2)]
        if reading is not None:
            holds, objects = self._code.name(reading.holds), "".join(f"{self._read[name]}, " for name in reading.objects)
            self._code.lines.append(f"if not {holds}(({objects})): return False")
        entries = list(self.entries.values())
        self._key += [_first(own, entries[:k]) for k, own in enumerate(entries) if k]
        self._key += [text for path in sorted(static, key=repr) if (text := self._static(path)) is not None]
        self.arguments = ", ".join(dict.fromkeys((*self.locals.values(), *self.entries.values())))
        self.call = self._call()

    def _call(self) -> Callable[..., Any]:
        code = self._code
        code.names |= {"structures": structures, "remembered": remembered, "ready": self.ready, "grad": torch.is_grad_enabled}
        code.names |= {"key_of": key_of, "in_dual_level": in_dual_level}
        body = [f"    {line}" for line in code.lines]
        recorded = " or ".join(f"{each}.requires_grad" for each in self._tensors)
        code.lines = [
            "try:",
            *body,
            f"    key = ({''.join(f'{part}, ' for part in self._key)})",
            "    if ask: return key",
            "    run = ready.get(key)",
            UNFIT,
            "if run is None: return False",
            *([f"if (({recorded}) and grad()) or in_dual_level(): return False"] if recorded else []),
            f"run({self.arguments})",
            "return True",
        ]
        return code.function("def call(env, ask=False):")

    def _outer(self, function: types.FunctionType, name: str) -> None:
        """A name of an enclosing function, a global one, or one that Python has."""
        if name in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
            if cell != types.CellType():
                self._leaf(name, f"{self._code.name(cell)}.cell_contents", cell.cell_contents)
            return
        names = self._code.name(function.__globals__)
        found = function.__globals__.get(name, getattr(builtins, name, None))
        if name in function.__globals__:
            self._leaf(name, f"{names}[{name!r}]", found)
        else:
            self._code.lines.append(f"if {name!r} in {names}: return False")

    def _leaf(self, name: str, expression: str, value: Any) -> None:
        """Looks at one thing: that it is what it was in this layout, and what of it belongs to the key."""
        code, at = self._code, f"v{next(self._count)}"
        lines = code.lines
        if value is None or isinstance(value, ALONE):
            lines.append(f"if {expression} is not {(own := code.name(value))}: return False")
            if is_read(value):
                self._read[name] = own
            return
        lines += [f"{at} = {expression}", f"if type({at}) is not {code.name(type(value))}: return False"]
        if type(value) in CONTAINERS:
            lines.append(f"if len({at}) != {len(value)}: return False")
            if isinstance(value, dict):
                lines.append(f"if tuple({at}) != {code.name(tuple(value))}: return False")
            for part, (key, x) in parts_of(name, value).items():
                self._leaf(part, f"{at}[{code.name(key)}]", x)
        elif isinstance(value, torch.Tensor):
            self._tensor((name,), at, value)
        elif isinstance(value, JaggedTensor):
            inside, entry = f"w{at[1:]}", f"e{at[1:]}"
            lines.append(f"{inside} = {at}._values")
            self._tensor((name, "values"), inside, value.values)
            lines += [
                f"s{at[1:]} = {at}._structure",
                f"{entry} = structures.get(id(s{at[1:]}))",
                f"if {entry} is None or {entry}.reference() is not s{at[1:]} or {entry}.stale():"
                f" {entry} = remembered(s{at[1:]}, {inside})",
            ]
            self._key.append(f"{entry}.form")
            self.locals[(name,)], self.entries[name] = at, entry
        elif isinstance(value, BlockSize):
            self._blocks.append(at)
            self._key.append(at)
        elif isinstance(value, Fixed) or not isinstance(value, (int, float)):
            self._key.append(at if isinstance(value, (Fixed, str, torch.dtype)) else f"key_of({at})")
            if is_read(value):
                self._read[name] = at
        else:
            self.locals[(name,)] = at
            if isinstance(value, int) and (name,) not in self._changing:
                self._key.append(at)

    def _tensor(self, path: Path, at: str, value: torch.Tensor) -> None:
        dims = [f"{at}_{k}" for k in range(value.dim())]
        self._code.lines += [
            f"({''.join(f'{d}, ' for d in dims)}) = {at}.shape",
            f"if not ({at}.is_cpu and {at}.is_contiguous()): return False",
        ]
        self._key.append(f"{at}.dtype")
        self._tensors.append(at)
        self.locals[path] = at
        for k, d in enumerate(dims):
            self.locals[*path, "shape", k] = d
            if k and (*path, "shape", k) not in self._changing:
                self._key.append(d)
            elif k or path[-1] != "values":
                self._key.append(f"{d} == 1")

    def _static(self, path: Path) -> str | None:
        """A size that programs have in them although it changes; None where there is none in this layout."""
        if path in self.locals:
            return self.locals[path]
        if path[0] not in self.entries:
            return None
        get = self._code.name(number_at(path))
        return f"{get}({{{path[0]!r}: {self.locals[(path[0],)]}}})"

    def note(self, given: Env, env: Env, variant: Variant) -> bool:
        """Remembers the program for calls like this one; whether this is one of the layout's."""
        key = self.call(given, True)
        if key is False:
            return False
        if all(variant.tensors[k].path in self.locals for k in variant.outputs):
            self.ready[key] = Runner(self, env, variant).function()
        return True


def _first(entry: str, others: Sequence[str]) -> str:
    """Which of some structures is the first that has the same rows."""
    return "".join(f"{k} if {entry}.rows == {other}.rows else " for k, other in enumerate(others)) + str(len(others))


class Runner:
    """Writes the function that hands a program the addresses and numbers of a call, which come as arguments of these names."""

    def __init__(self, layout: Layout, env: Env, variant: Variant) -> None:
        assert isinstance(variant.executable, CppExecutable)
        self._locals, self._entries = layout.locals, layout.entries
        self._env, self._variant, self._executable = env, variant, variant.executable
        self._code = Code()
        self._records = {name: Record(env[name], layout.locals[name, "values"]) for name in layout.entries}
        self._looked_up: list[str] = []
        self._sizes: list[str] = []
        """Lines behind those that look up what is remembered; texts of numbers of elements."""
        self._arguments = layout.arguments

    def function(self) -> Callable[..., None]:
        """The function."""
        code, executable, variant = self._code, self._executable, self._variant
        if not executable.program.kernels:
            code.lines.append("pass")
            return code.function(f"def run({self._arguments}):")
        tensors = [self._tensor(k, each) for k, each in enumerate(variant.tensors)]
        pointers = [*tensors, *(self._kept(each) for each in variant.arrays)]
        numbers = ["threads", "stream", *(self._number(each) for each in variant.symbols)]
        rows = [self._row(k, each) for k, each in enumerate(variant.tensors) if each.private]
        streams = [
            f"{self._product(each.path)} > {last_level_cache() // executable.program.tensors[k].dtype.itemsize}"
            for k, each in enumerate(variant.tensors)
            if k in variant.outputs and each.path is not None
        ]
        large = " or ".join(f"{size} >= {executable.SMALL}" for size in self._sizes)
        for name, record in self._records.items():
            record.look_up(code, self._entries[name], self._locals[(name,)])
        code.lines += [
            *self._looked_up,
            "threads, stream = 1, False",
            f"if {large}: threads, stream = get_num_threads(), {' or '.join(streams) or 'False'}",
            *(line for line, _ in rows),
            *self._apart(),
            f"function(pointers({', '.join(pointers)}), numbers({', '.join([*numbers, *(size for _, size in rows)])}))",
        ]
        code.names |= {
            "array": array,
            "empty": torch.empty,
            "function": executable.function(),
            "get_num_threads": torch.get_num_threads,
            "numbers": struct.Struct(f"{len(numbers) + len(rows)}q").pack,
            "pointers": struct.Struct(f"{len(pointers)}P").pack,
            "refuse_shared": refuse_shared,
            "row": executable.row,
        }
        return code.function(f"def run({self._arguments}):")

    def _apart(self) -> list[str]:
        """Lines that refuse a call in which something that is stored to shares memory with something else."""
        lines = []
        given, kinds = self._variant.tensors, self._executable.program.tensors
        known = [k for k, each in enumerate(given) if each.path in self._locals]
        for k in (k for k in known if k in self._variant.outputs):
            for j in (j for j in known if j != k and not (j in self._variant.outputs and j < k)):
                ends = [f"p{n} + ({self._product(given[n].path or ())}) * {kinds[n].dtype.itemsize}" for n in (k, j)]
                names = f"{given[k].path!r}, {given[j].path!r}"
                shapes = [f"({self._product(given[n].path or ()).replace(' * ', ', ')},)" for n in (k, j)]
                other = f"not (p{k} == p{j} and {' == '.join(shapes)}) and " if self._variant.in_place(k, j) else ""
                lines.append(f"if {other}p{k} < {ends[1]} and p{j} < {ends[0]}: refuse_shared({names})")
        return lines

    def _tensor(self, k: int, given: Given) -> str:
        """The address of a tensor."""
        if given.path == (NUMBERS,):
            floats = [self._locals[(name,)] for name, value in self._env.items() if isinstance(value, float)]
            self._looked_up.append(f"floats = array('d', ({''.join(f'{f}, ' for f in floats)}))")
            return "floats.buffer_info()[0]"
        if given.path in self._locals:
            self._sizes.append(self._product(given.path))
            self._looked_up.append(f"p{k} = {self._locals[given.path]}.data_ptr()")
            return f"p{k}"
        if given.memory is None:
            self._sizes.append(self._kept(made_of(lambda env: given.get(env).numel(), [given])))
            return self._kept(given)
        if not given.private:
            shape = self._kept(given)
            self._looked_up.append(f"m{k} = empty({shape}, dtype={self._code.name(given.memory)}, device='cpu')")
            self._sizes.append(f"m{k}.numel()")
        return f"m{k}.data_ptr()"

    def _row(self, k: int, given: Given) -> tuple[str, str]:
        """The line that finds the memory of a private row for each thread, and the number of elements of one."""
        like = torch.empty(0, dtype=given.memory, device="cpu")
        size = self._kept(made_of(lambda env: row_size(given.now(env)), [given]))
        return f"m{k} = row({k}, {self._code.name(like)}, {size} * threads)", size

    def _number(self, given: Given) -> str:
        return self._locals[given.path] if given.path in self._locals else self._kept(given)

    def _kept(self, given: Given) -> str:
        """Something that a structure tells, which is remembered with it; else it is found at every call."""
        if given.of is not None:
            return self._records[given.of].kept(given.of, given)
        found = f"f{len(self._looked_up)}"
        names = ", ".join(f"{path[0]!r}: {text}" for path, text in self._locals.items() if len(path) == 1)
        self._looked_up.append(f"{found} = {self._code.name(given.get)}({{{names}}})")
        return f"{found}.data_ptr()" if isinstance(given.get(self._env), torch.Tensor) else found

    def _product(self, path: Path) -> str:
        """The number of elements of a tensor."""
        dims = [text for own, text in self._locals.items() if own[: len(path) + 1] == (*path, "shape")]
        return " * ".join(dims) or "1"


class Record:
    """What a program is given of one structure: made at the first call with it, and kept with it."""

    def __init__(self, jt: JaggedTensor, values: str) -> None:
        self._values = values
        self._least = [dim for dim, _ in least(jt.structure)]
        self._ways: list[Callable[[JaggedTensor], Any]] = []
        self._texts: dict[Any, str] = {}
        self._own = f"r{values[1:]}"

    def kept(self, name: str, given: Given) -> str:
        """The text of a number, a shape, or the address of a tensor."""
        key = given.path or given
        if key not in self._texts:
            self._texts[key] = f"{self._own}_{len(self._ways)}"
            self._ways.append(lambda jt: given.get({name: jt}))
        return self._texts[key]

    def look_up(self, code: Code, entry: str, jt: str) -> None:
        """Writes the lines that give everything that was asked for its name."""
        ways, key = self._ways, object()

        def make(jt: JaggedTensor) -> tuple[Any, ...]:
            found = [way(jt) for way in ways]
            found = [each.contiguous() if isinstance(each, torch.Tensor) else each for each in found]
            # Addresses alone keep no tensor alive.
            kept = [each for each in found if isinstance(each, torch.Tensor)]
            given = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in found]
            made = (kept, *(extent for _, extent in least(jt.structure)), *given)
            remembered(jt.structure, jt.values).records[key] = made
            return made

        extents = [f"{self._own}_least_{dim}" for dim in self._least]
        names = ["_", *extents, *self._texts.values()]
        code.lines += [
            f"{self._own} = {entry}.records.get({code.name(key)})",
            f"if {self._own} is None: {self._own} = {code.name(make)}({jt})",
            f"({', '.join(names)},) = {self._own}",
        ]
        # Values may have been resized; the structure says what is wrong with them.
        short = " or ".join(f"{self._values}_{dim} < {own}" for dim, own in zip(self._least, extents, strict=True))
        code.lines.append(f"if {short}: {jt}._structure.check_values({self._values})")
