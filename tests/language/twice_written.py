"""Random tile kernels as users write them, each written twice: with tiles, and as plain Python loops over single numbers.

In: a source of random choices. Out: `Pair`s: the text of a kernel, the text of loops that mean the same, and arguments for both.
The loops know nothing of serrate: rows are lists of lists, every element is read on its own, and what lies outside is 0. A kernel
must give what its loops give, under every plan and tile size, or be refused.
"""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

import serrate
from serrate import JaggedTensor

KERNEL_HEAD = """
import torch
import torch.nn.functional as F
import serrate
import serrate.language as hl
"""

LOOPS_HEAD = '''
import math

def at(x, *index):
    """One number of nested lists; outside is 0, and a dim of size 1 broadcasts."""
    for i in index:
        if len(x) == 1:
            i = 0
        if not 0 <= i < len(x):
            return 0
        x = x[i]
    return x

def sigmoid(x):
    return 1 / (1 + math.exp(-x))

def zeros(*shape):
    return [zeros(*shape[1:]) for _ in range(shape[0])] if shape else 0.0
'''

ODD_NAMES = (
    "t0", "v1", "T0", "T1", "c0", "r0", "n0", "acc", "out", "end", "run", "position", "positions", "threads", "pointer", "given",
    "stream", "extent0", "double", "register", "auto", "template", "float32", "i64", "f32", "load", "store", "smaller", "larger",
    "int_", "x", "λ", "größe", "_", "__x", "b_0", "total", "index", "main", "std", "errno", "NAN", "M_PI", "k2", "tile",
)  # fmt: skip
"""Names that users give and generated code might have too."""

UNARY = (
    ("torch.sigmoid({})", "sigmoid({})"),
    ("torch.tanh({})", "math.tanh({})"),
    ("torch.exp(-{}.abs())", "math.exp(-abs({}))"),
    ("{}.clamp(-1.0, 1.5)", "min(max({}, -1.0), 1.5)"),
    ("{}.square()", "({}) ** 2"),
    ("F.relu({})", "max({}, 0.0)"),
    ("({} * 2 - 1)", "({} * 2 - 1)"),
    ("(0.5 - {})", "(0.5 - {})"),
    ("{}.abs().sqrt()", "math.sqrt(abs({}))"),
)
BINARY = (
    ("({} + {})", "({} + {})"),
    ("({} * {})", "({} * {})"),
    ("({} - {})", "({} - {})"),
    ("torch.maximum({}, {})", "max({}, {})"),
    ("torch.minimum({}, {})", "min({}, {})"),
    ("({} / (1 + {}.abs()))", "({} / (1 + abs({})))"),
)


@dataclass(frozen=True)
class Value:
    """One value: its text with tiles (and which of the open tiles are its dims), its text for one position, when it exists."""

    tiled: str
    single: str
    dims: str
    exists: frozenset[str] = frozenset()


@dataclass
class Pair:
    """A kernel, the loops that say what it means, and how both are called."""

    kernel_text: str
    loops_text: str
    arguments: dict[str, Any]
    block_sizes: int
    """How many loops leave their tile open."""
    plans: Sequence[dict[str, Any]] = field(default=({},))

    def kernel(self, plan: dict[str, Any]) -> Any:
        return serrate.kernel(self._function(self.kernel_text), **plan)

    def results(self, kernel: Any) -> list[Any]:
        """What a kernel gives, as nested lists."""
        given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.arguments.items()}
        return [nested(result) for result in kernel(*given.values())]

    def wanted(self) -> list[Any]:
        """What the loops give."""
        return self._function(self.loops_text)(*map(nested, self.arguments.values()))

    def _function(self, text: str) -> Any:
        name = f"<written {hash(text)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        space: dict[str, Any] = {"__name__": "written"}
        exec(compile(text, name, "exec"), space)
        return space["program"]

    def __str__(self) -> str:
        shapes = "\n".join(f"# {name}: {_shown(value)}" for name, value in self.arguments.items())
        return f"{self.kernel_text}\n{shapes}\n# --- means ---{self.loops_text.removeprefix(LOOPS_HEAD)}"


def _shown(value: Any) -> str:
    if isinstance(value, JaggedTensor):
        return f"lengths {value.lengths.tolist()}, {value.dtype}, features {list(value.values.shape[1:])}"
    return f"{list(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)


def nested(value: Any) -> Any:
    """Tensors as nested lists of Python numbers."""
    if isinstance(value, JaggedTensor):
        bounds = value.offsets.tolist()
        flat = value.values.tolist()
        return [flat[a:b] for a, b in itertools.pairwise(bounds)]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def close(got: Any, want: Any, tolerance: float) -> bool:
    """Whether nested lists agree."""
    if isinstance(want, list):
        return (
            isinstance(got, list)
            and len(got) == len(want)
            and all(close(g, w, tolerance) for g, w in zip(got, want, strict=True))
        )
    if math.isnan(want) or math.isinf(want):
        return math.isnan(got) == math.isnan(want) and (math.isnan(want) or got == want)
    return abs(got - want) <= tolerance * (1 + abs(want))


class Author:
    """Writes one pair."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.kernel: list[str] = []
        self.loops: list[str] = []
        self.depth = [1, 1]
        self.arguments: dict[str, Any] = {}
        self.generator = torch.Generator().manual_seed(random.randrange(1 << 30))
        self._free = list(ODD_NAMES)
        random.shuffle(self._free)
        if random.random() < 0.5:
            # Half of all programs have the names that anybody would choose.
            self._free = [f"{kind}{k}" for k in range(12) for kind in ("x", "w", "n", "y")]
        self.open_tiles = 0
        self.tolerance = 2e-4

    # --- choices and lines ---

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def name(self) -> str:
        return self._free.pop()

    def tiled(self, text: str, opens: int = 0) -> None:
        self.kernel.append("    " * self.depth[0] + text)
        self.depth[0] += opens

    def single(self, text: str, opens: int = 0) -> None:
        self.loops.append("    " * self.depth[1] + text)
        self.depth[1] += opens

    def both(self, text: str) -> None:
        self.tiled(text)
        self.single(text)

    def close(self, tiled: int = 1, single: int = 1) -> None:
        self.depth[0] -= tiled
        self.depth[1] -= single

    def block(self) -> str:
        """What is said of a loop's tile, if anything."""
        self.open_tiles += 1
        return self.one("", "", "", ", block_size=1", ", block_size=3", ", block_size=5", ", block_size=16")

    # --- arguments ---

    def argument(self, value: Any) -> str:
        name = self.name()
        self.arguments[name] = value
        return name

    def dense(self, *shape: int) -> str:
        return self.argument(torch.randn(shape, generator=self.generator))

    def lengths(self, rows: int) -> list[int]:
        return [self.one(0, 0, 1, 2, 3, 5, 8, 17, 33) for _ in range(rows)]

    def ragged(self, lengths: Sequence[int], *features: int) -> str:
        values = torch.randn((sum(lengths), *features), generator=self.generator)
        return self.argument(JaggedTensor.from_lengths(values, list(lengths)))

    # --- expressions ---

    def fit(self, value: Value, dims: str) -> str:
        """A value with all of `dims`."""
        if value.dims == dims or not value.dims:
            return value.tiled
        return f"{value.tiled}[{', '.join(':' if d in value.dims else 'None' for d in dims)}]"

    def expression(self, leaves: Sequence[Value], dims: str, size: int = 3) -> Value:
        """A value over `dims` made of leaves; the first leaf has all dims and is always in it."""
        value = self._over(leaves[0], dims)
        for _ in range(self.random.randrange(size)):
            if self.maybe(0.4):
                tiled, single = self.one(*UNARY)
                value = Value(tiled.format(value.tiled), single.format(value.single), dims, value.exists)
            else:
                other = self._over(self.one(*leaves), dims)
                tiled, single = self.one(*BINARY)
                value = Value(
                    tiled.format(value.tiled, other.tiled),
                    single.format(value.single, other.single),
                    dims,
                    value.exists | other.exists,
                )
        return value

    def _over(self, value: Value, dims: str) -> Value:
        return Value(self.fit(value, dims), value.single, dims, value.exists)

    # --- the text ---

    def pair(self) -> Pair:
        names = ", ".join(self.arguments)
        kernel = f"{KERNEL_HEAD}\ndef program({names}):\n" + "\n".join(self.kernel) + "\n"
        loops = f"{LOOPS_HEAD}\ndef program({names}):\n" + "\n".join(self.loops) + "\n"
        return Pair(kernel, loops, self.arguments, self.open_tiles)


def _condition(value: Value) -> str:
    return " and ".join(sorted(value.exists)) or "True"


# --- the kinds of programs ------------------------------------------------------------------------------------------------


def rows(a: Author) -> None:
    """Statistics of rows, one or more loops after each other, stored for each row and for each position."""
    count = a.one(1, 2, 3, 7)
    own, others = a.lengths(count), a.lengths(count)
    width = max([*own, 1]) + a.one(-1, 0, 4) if max([*own, 1]) > 1 else 3
    x, same, other = a.ragged(own), a.ragged(own), a.ragged(others)
    dense, per_position, per_row = a.dense(count, width), a.dense(width), a.dense(count)
    wide, tall = a.dense(1, width), a.dense(count, 1)
    b, k = a.name(), a.name()
    inside = frozenset({f"{k} < len({x}[{b}])"})
    leaves = [
        Value(f"{x}[{b}, {k}]", f"ragged({x}, {b}, {k})", "bk", inside),
        Value(f"{same}[{b}, {k}]", f"ragged({same}, {b}, {k})", "bk", inside),
        Value(f"{dense}[{b}, {k}]", f"at({dense}, {b}, {k})", "bk"),
        Value(f"{per_position}[{k}]", f"at({per_position}, {k})", "k"),
        Value(f"{per_row}[{b}]", f"at({per_row}, {b})", "b"),
        Value(f"{wide}[{b}, {k}]", f"at({wide}, {b}, {k})", "bk"),
        Value(f"{tall}[{b}, {k}]", f"at({tall}, {b}, {k})", "bk"),
        Value(f"{x}.lengths[{b}].to(torch.float32)", f"float(len({x}[{b}]))", "b"),
        Value(f"{k}.index.to(torch.float32)", f"float({k})", "k"),
    ]
    if a.maybe(0.4):
        leaves.append(Value(f"{other}[{b}, {k}]", f"ragged({other}, {b}, {k})", "bk", frozenset({f"{k} < len({other}[{b}])"})))
    a.single("def ragged(rows, b, k): return rows[b][k] if 0 <= k < len(rows[b]) else 0")
    sums, kept = a.name(), a.name()
    a.tiled(f"{sums} = torch.empty({x}.num_rows)")
    a.tiled(f"{kept} = torch.zeros_like({x})")
    a.single(f"{sums}, {kept} = zeros(len({x})), [[0.0] * len(row) for row in {x}]")
    if a.maybe(0.2):
        a.tiled(f"if {x}.num_rows == 0:", 1)
        a.tiled(f"return {sums}, {kept}")
        a.close(1, 0)
    strategy_block = a.one("", "", ", block_size=1", ", block_size=2", ", block_size=3")
    a.open_tiles += 1
    a.tiled(f"for {b} in hl.tile({x}.num_rows{strategy_block}):", 1)
    a.single(f"for {b} in range(len({x})):", 1)
    carried: list[Value] = []
    for _ in range(a.one(1, 1, 2, 3)):
        acc, kind = a.name(), a.one("sum", "sum", "amax", "amin", "prod", "count")
        low = a.one("", "", "", "2, ")
        start = {"sum": "0.0", "count": "0.0", "amax": "-torch.inf", "amin": "torch.inf", "prod": "1.0"}[kind]
        a.tiled(f"{acc} = hl.full([{b}], {start})")
        a.single(f"{acc} = {start.replace('torch.inf', 'math.inf')}")
        bound = a.one(f"{x}.max_length", f"{x}.max_length", f"{x}.lengths.amax()") if count else f"{x}.max_length"
        a.tiled(f"for {k} in hl.tile({low}{bound}{a.block()}):", 1)
        a.single(f"for {k} in range({low}max(map(len, {x}))):", 1)
        value = a.expression([*leaves, *carried], "bk", 4)
        if a.maybe(0.3):
            dead = a.name()
            a.tiled(f"{dead} = {value.tiled} * 3")
        reduced = a.name()
        a.single(f"if {_condition(value)}:", 1)
        if kind == "sum":
            a.tiled(f"{acc} = {acc} + ({value.tiled}).sum(1)")
            a.single(f"{acc} = {acc} + {value.single}")
        elif kind == "count":
            a.tiled(f"{acc} += ({value.tiled} > 0.111).sum(dim=1)")
            a.single(f"{acc} += {value.single} > 0.111")
        elif kind == "prod":
            a.tiled(f"{acc} *= torch.tanh({value.tiled}).prod(1)")
            a.single(f"{acc} *= math.tanh({value.single})")
        else:
            a.tiled(f"{reduced} = ({value.tiled}).{kind}(1)")
            a.tiled(f"{acc} = torch.{'maximum' if kind == 'amax' else 'minimum'}({acc}, {reduced})")
            a.single(f"{acc} = {kind[1:]}({acc}, {value.single})")
        a.close(1, 2)
        # A maximum of nothing is infinite; what follows stays finite.
        finite = a.name()
        a.tiled(f"{finite} = {acc}.clamp(-50.0, 50.0)")
        a.single(f"{finite} = min(max({acc}, -50.0), 50.0)")
        carried.append(Value(finite, finite, "b"))
    a.tiled(f"{sums}[{b}] = {' + '.join(v.tiled for v in carried)}")
    a.single(f"{sums}[{b}] = {' + '.join(v.single for v in carried)}")
    if a.maybe(0.7):
        value = a.expression([*leaves, *carried], "bk", 4)
        a.tiled(f"for {k} in hl.tile({x}.max_length{a.block()}):", 1)
        a.tiled(f"{kept}[{b}, {k}] = {value.tiled}")
        a.single(f"for {k} in range(len({x}[{b}])):", 1)
        a.single(f"{kept}[{b}][{k}] = {value.single}")
        a.close()
    a.close()
    a.both(f"return {sums}, {kept}")


def windows(a: Author) -> None:
    """Sums over the last few positions: loops that begin before the tensor does."""
    n, before, after = a.one(1, 5, 19, 40), a.one(1, 2, 4, 9), a.one(0, 0, 1, 3)
    x, q, k, out = a.dense(n), a.name(), a.name(), a.name()
    weights = a.dense(n)
    a.tiled(f"{out} = torch.empty({x}.size(0))")
    a.single(f"{out} = zeros(len({x}))")
    a.tiled(f"for {q} in hl.tile({x}.size(0){a.block()}):", 1)
    a.single(f"for {q} in range(len({x})):", 1)
    kind = a.one("sum", "amax", "dot")
    acc, mask, far = a.name(), a.name(), a.name()
    a.tiled(f"{acc} = hl.full([{q}], {'-torch.inf' if kind == 'amax' else '0.0'})")
    a.single(f"{acc} = {'-math.inf' if kind == 'amax' else '0.0'}")
    a.tiled(f"for {k} in hl.tile({q}.begin - {before - 1}, {q}.end + {after}{a.block()}):", 1)
    a.single(f"for {k} in range({q} - {before - 1}, {q} + {after} + 1):", 1)
    a.tiled(f"{far} = {q}.index[:, None] - {k}.index[None, :]")
    a.tiled(f"{mask} = ({far} < {before}) & ({far} >= {-after})")
    if kind == "amax":
        # Outside is 0, and lanes of a plain range exist.
        a.tiled(f"{acc} = torch.maximum({acc}, torch.where({mask}, {x}[{k}][None, :], -torch.inf).amax(1))")
        a.single(f"{acc} = max({acc}, at({x}, {k}))")
    elif kind == "sum":
        a.tiled(f"{acc} = {acc} + torch.where({mask}, {x}[{k}][None, :] * {weights}[{q}][:, None], 0.0).sum(1)")
        a.single(f"{acc} += at({x}, {k}) * {weights}[{q}]")
    else:
        a.tiled(f"{acc} = {acc} + ({mask}.to(torch.float32) @ {x}[{k}][:, None]).squeeze(1)")
        a.single(f"{acc} += at({x}, {k})")
    a.close()
    a.tiled(f"{out}[{q}] = {acc}")
    a.single(f"{out}[{q}] = {acc}")
    a.close()
    a.both(f"return [{out}]")


def ragged_windows(a: Author) -> None:
    """The same in every row: before a row's beginning lies another row."""
    count, before = a.one(1, 3, 5), a.one(1, 2, 4, 9)
    lengths = a.lengths(count)
    features = a.one(1, 3)
    x, b, q, k, out = a.ragged(lengths, features), a.name(), a.name(), a.name(), a.name()
    a.tiled(f"{out} = torch.zeros_like({x})")
    a.single(f"{out} = [[[0.0] * {features} for _ in row] for row in {x}]")
    a.open_tiles += 1
    a.tiled(f"for {b} in hl.grid({x}.num_rows):", 1)
    a.single(f"for {b} in range(len({x})):", 1)
    a.tiled(f"for {q} in hl.tile({x}.lengths[{b}]{a.block()}):", 1)
    a.single(f"for {q} in range(len({x}[{b}])):", 1)
    acc, mask, far = a.name(), a.name(), a.name()
    a.tiled(f"{acc} = hl.zeros([{q}, {features}])")
    a.single(f"{acc} = [0.0] * {features}")
    a.tiled(f"for {k} in hl.tile({q}.begin - {before - 1}, {q}.end{a.block()}):", 1)
    a.single(f"for {k} in range(max(0, {q} - {before - 1}), {q} + 1):", 1)
    a.tiled(f"{far} = {q}.index[:, None] - {k}.index[None, :]")
    a.tiled(f"{mask} = ({far} < {before}) & ({far} >= 0)")
    if a.maybe():
        a.tiled(f"{acc} = {acc} + {mask}.to(torch.float32) @ {x}[{b}, {k}, :]")
    else:
        a.tiled(f"{acc} = {acc} + torch.where({mask}[:, :, None], {x}[{b}, {k}, :][None, :, :], 0.0).sum(1)")
    a.single(f"{acc} = [s + v for s, v in zip({acc}, {x}[{b}][{k}])]")
    a.close()
    a.tiled(f"{out}[{b}, {q}, :] = {acc}")
    a.single(f"{out}[{b}][{q}] = {acc}")
    a.close(2, 2)
    a.both(f"return [{out}]")


def pairs(a: Author) -> None:
    """A dim that meets itself: every element against every other."""
    n = a.one(1, 4, 7, 13)
    x, i, j, out = a.dense(n), a.name(), a.name(), a.name()
    tiled, single = a.one(*BINARY)
    row, form = a.name(), a.one("slices", "tiles", "arange", "features", "mask", "reduced")
    if form == "features":
        features = a.one(2, 5)
        x = a.dense(n, features)
        a.tiled(f"{out} = torch.empty({x}.size(0), {features}, {features})")
        a.single(f"{out} = zeros(len({x}), {features}, {features})")
        a.tiled(f"for {i} in hl.tile({x}.size(0){a.block()}):", 1)
        a.tiled(f"{row} = {x}[{i}, :]")
        a.tiled(f"{out}[{i}, :, :] = {tiled.format(f'{row}[:, :, None]', f'{row}[:, None, :]')}")
        a.single(f"for {i} in range(len({x})):", 1)
        a.single(f"for p in range({features}):", 1)
        a.single(f"for q in range({features}):", 1)
        a.single(f"{out}[{i}][p][q] = {single.format(f'{x}[{i}][p]', f'{x}[{i}][q]')}")
        a.close(1, 3)
        a.both(f"return [{out}]")
        return
    a.tiled(f"{out} = torch.zeros({x}.size(0), {x}.size(0))")
    a.single(f"{out} = zeros(len({x}), len({x}))")
    if form == "tiles":
        a.tiled(f"for {i}, {j} in hl.tile([{x}.size(0), {x}.size(0)]{a.one('', ', block_size=[3, 2]')}):", 1)
        a.open_tiles += 2
        a.tiled(f"{out}[{i}, {j}] = {tiled.format(f'{x}[{i}][:, None]', f'{x}[{j}][None, :]')}")
    else:
        one = a.name()
        a.tiled(f"for {one} in hl.grid(1):", 1)
        if form == "slices":
            a.tiled(f"{row} = {x}[:]")
            a.tiled(f"{out}[:, :] = {tiled.format(f'{row}[:, None]', f'{row}[None, :]')}")
        elif form == "arange":
            a.tiled(f"{row} = hl.arange({n})")
            a.tiled(f"{out}[:, :] = {tiled.format(f'{x}[{row}][:, None]', f'{x}[{row}][None, :]')}")
        elif form == "mask":
            a.tiled(f"{row} = hl.arange({n})")
            a.tiled(f"{out}[:, :] = torch.where({row}[:, None] >= {row}[None, :], {x}[:][None, :], -1.0)")
            single = None
        else:
            a.tiled(f"{row} = {x}[:]")
            whole = tiled.format(f"{row}[:, None]", f"{row}[None, :]")
            a.tiled(f"{out}[0, :] = ({whole}).sum({a.one(1, -1)})")
            a.close(1, 0)
            a.single(f"for {i} in range(len({x})):", 1)
            a.single(f"{out}[0][{i}] = sum({single.format(f'{x}[{i}]', 'other')} for other in {x})")
            a.close(0, 1)
            a.both(f"return [{out}]")
            return
    a.close(1, 0)
    a.single(f"for {i} in range(len({x})):", 1)
    a.single(f"for {j} in range(len({x})):", 1)
    a.single(f"{out}[{i}][{j}] = " + (single.format(f"{x}[{i}]", f"{x}[{j}]") if single else f"{x}[{j}] if {i} >= {j} else -1.0"))
    a.close(0, 2)
    a.both(f"return [{out}]")


def products(a: Author) -> None:
    """Products of matrices, a matrix with itself among them, and products inside rows."""
    n, inner, width = a.one(1, 6, 17), a.one(1, 5, 24), a.one(1, 4, 9)
    form = a.one("plain", "gram", "gram_slice", "ragged", "weighted_rows")
    i, j, k, out, acc = a.name(), a.name(), a.name(), a.name(), a.name()
    if form in ("plain", "gram"):
        x = a.dense(n, inner)
        w = a.dense(inner, width) if form == "plain" else x
        size = f"{w}.size(1)" if form == "plain" else f"{x}.size(0)"
        a.tiled(f"{out} = torch.empty({x}.size(0), {size})")
        a.single(f"{out} = zeros(len({x}), {width if form == 'plain' else n})")
        a.tiled(f"for {i}, {j} in hl.tile([{x}.size(0), {size}]{a.one('', ', block_size=[5, 3]')}):", 1)
        a.open_tiles += 2
        a.tiled(f"{acc} = hl.zeros([{i}, {j}])")
        a.tiled(f"for {k} in hl.tile({x}.size(1){a.block()}):", 1)
        right = f"{w}[{k}, {j}]" if form == "plain" else f"{x}[{j}, {k}].T"
        left = f"{x}[{i}, {k}]"
        a.tiled(
            a.one(
                f"{acc} = {acc} + {left} @ {right}",
                f"{acc} = torch.addmm({acc}, {left}, {right})",
                f"{acc} = hl.dot({left}, {right}, acc={acc})",
            )
        )
        a.close(1, 0)
        a.tiled(f"{out}[{i}, {j}] = {acc}")
        a.close(1, 0)
        element = f"{w}[{k}][{j}]" if form == "plain" else f"{x}[{j}][{k}]"
        a.single(f"for {i} in range(len({out})):", 1)
        a.single(f"for {j} in range(len({out}[0])):", 1)
        a.single(f"{out}[{i}][{j}] = sum({x}[{i}][{k}] * {element} for {k} in range({inner}))")
        a.close(0, 2)
    elif form == "gram_slice":
        x, row = a.dense(n, inner, 3), a.name()
        a.tiled(f"{out} = torch.empty({x}.size(0), {inner}, {inner})")
        a.single(f"{out} = zeros(len({x}), {inner}, {inner})")
        a.tiled(f"for {i} in hl.grid({x}.size(0)):", 1)
        a.tiled(f"{row} = {x}[{i}, :, :]")
        a.tiled(f"{out}[{i}, :, :] = {a.one(f'{row} @ {row}.T', f'hl.dot({row}, {row}.transpose(0, 1))')}")
        a.close(1, 0)
        a.single(f"for {i} in range(len({x})):", 1)
        a.single(f"{out}[{i}] = [[sum(u * v for u, v in zip(p, q)) for q in {x}[{i}]] for p in {x}[{i}]]")
        a.close(0, 1)
    elif form == "ragged":
        lengths = a.lengths(a.one(1, 4))
        x, w = a.ragged(lengths, inner), a.dense(len(lengths), inner, width)
        a.tiled(f"{out} = torch.zeros({x}.values.size(0), {width})")
        a.single(f"{out} = []")
        a.tiled(f"for {i} in hl.grid({x}.num_rows):", 1)
        start = a.name()
        a.tiled(f"{start} = {x}.offsets[{i}]")
        a.tiled(f"for {j} in hl.tile({x}.lengths[{i}]{a.block()}):", 1)
        a.tiled(f"{out}[{start} + {j}.index, :] = {x}[{i}, {j}, :] @ {w}[{i}, :, :]")
        a.close(2, 0)
        a.single(f"for {i} in range(len({x})):", 1)
        a.single(f"for {j} in {x}[{i}]:", 1)
        a.single(f"{out}.append([sum({j}[t] * {w}[{i}][t][u] for t in range({inner})) for u in range({width})])")
        a.close(0, 2)
    else:
        lengths = a.lengths(a.one(1, 4))
        x = a.ragged(lengths, width)
        a.tiled(f"{out} = torch.empty({x}.num_rows, {width}, {width})")
        a.single(f"{out} = zeros(len({x}), {width}, {width})")
        a.tiled(f"for {i} in hl.grid({x}.num_rows):", 1)
        a.tiled(f"{acc} = hl.zeros([{width}, {width}])")
        rows_ = a.name()
        a.tiled(f"for {k} in hl.tile({x}.lengths[{i}]{a.block()}):", 1)
        a.tiled(f"{rows_} = {x}[{i}, {k}, :]")
        a.tiled(f"{acc} = {acc} + {rows_}.T @ {rows_}")
        a.close(1, 0)
        a.tiled(f"{out}[{i}, :, :] = {acc}")
        a.close(1, 0)
        a.single(f"for {i} in range(len({x})):", 1)
        a.single(f"{out}[{i}] = [[sum(r[p] * r[q] for r in {x}[{i}]) + 0.0 for q in range({width})] for p in range({width})]")
        a.close(0, 1)
    a.both(f"return [{out}]")


def indirect(a: Author) -> None:
    """Reads and additions at positions that the kernel computes."""
    count, entries = a.one(1, 4, 9), a.one(3, 8)
    lengths = a.lengths(count)
    ids = a.argument(JaggedTensor.from_lengths(torch.randint(0, entries, (sum(lengths),), generator=a.generator), lengths))
    table, b, k = a.dense(entries, 2), a.name(), a.name()
    form = a.one("lookup", "histogram", "by_hand")
    out, acc = a.name(), a.name()
    if form == "lookup":
        a.tiled(f"{out} = torch.empty({ids}.num_rows, 2)")
        a.single(f"{out} = zeros(len({ids}), 2)")
        a.open_tiles += 1
        a.tiled(f"for {b} in hl.tile({ids}.num_rows{a.block()}):", 1)
        a.tiled(f"{acc} = hl.zeros([{b}, 2])")
        a.tiled(f"for {k} in hl.tile({ids}.max_length{a.block()}):", 1)
        a.tiled(f"{acc} = {acc} + {table}[{ids}[{b}, {k}], :].sum(1)")
        a.close(1, 0)
        a.tiled(f"{out}[{b}, :] = {acc}")
        a.close(1, 0)
        a.single(f"for {b} in range(len({ids})):", 1)
        a.single(f"{out}[{b}] = [sum({table}[e][m] for e in {ids}[{b}]) + 0.0 for m in range(2)]")
        a.close(0, 1)
    elif form == "histogram":
        a.tiled(f"{out} = torch.zeros({entries})")
        a.single(f"{out} = zeros({entries})")
        a.tiled(f"for {b} in hl.tile({ids}.num_rows{a.block()}):", 1)
        a.tiled(f"for {k} in hl.tile({ids}.max_length{a.block()}):", 1)
        a.tiled(f"hl.atomic_add({out}, [{ids}[{b}, {k}]], {table}[{ids}[{b}, {k}], 1])")
        a.close(2, 0)
        a.single(f"for {b} in {ids}:", 1)
        a.single(f"for {k} in {b}:", 1)
        a.single(f"{out}[{k}] += {table}[{k}][1]")
        a.close(0, 2)
    else:
        values, offsets = a.dense(max(sum(lengths), 1)), a.argument(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
        first, last = a.name(), a.name()
        a.tiled(f"{out} = torch.empty({offsets}.size(0) - 1)")
        a.single(f"{out} = zeros(len({offsets}) - 1)")
        a.tiled(f"for {b} in hl.tile({offsets}.size(0) - 1{a.block()}):", 1)
        a.tiled(f"{first}, {last} = {offsets}[{b}], {offsets}[{b}.index + 1]")
        a.tiled(f"{acc} = hl.zeros([{b}])")
        a.tiled(f"for {k} in hl.tile(({last} - {first}).amax(){a.block()}):", 1)
        where = f"{first}[:, None] + {k}.index[None, :]"
        a.tiled(f"{acc} = {acc} + hl.load({values}, [{where}], extra_mask={where} < {last}[:, None]).sum(1)")
        a.close(1, 0)
        a.tiled(f"{out}[{b}] = {acc}")
        a.close(1, 0)
        a.single(f"for {b} in range(len({out})):", 1)
        a.single(f"{out}[{b}] = sum({values}[{offsets}[{b}] : {offsets}[{b} + 1]]) + 0.0")
        a.close(0, 1)
    a.both(f"return [{out}]")


def decisions(a: Author) -> None:
    """Flags, absent arguments, branches and loops on numbers that only the running kernel knows, helpers, early ends."""
    count = a.one(1, 3, 6)
    lengths = a.lengths(count)
    x, flag, absent = a.ragged(lengths), a.argument(a.maybe()), a.argument(None)
    b, k, out, acc, helper = a.name(), a.name(), a.name(), a.name(), a.name()
    limit = a.one(0, 2, 6)
    a.tiled(f"{helper} = lambda v: v * 2 + 1")
    a.single(f"{helper} = lambda v: v * 2 + 1")
    a.tiled(f"{out} = torch.zeros({x}.num_rows)")
    a.single(f"{out} = zeros(len({x}))")
    a.tiled(f"for {b} in hl.grid({x}.num_rows):", 1)
    a.single(f"for {b} in range(len({x})):", 1)
    a.both(f"{acc} = 0.0")
    a.tiled(f"if {x}.lengths[{b}] > {limit}:", 1)
    a.single(f"if len({x}[{b}]) > {limit}:", 1)
    a.tiled(f"for {k} in hl.tile({x}.lengths[{b}]{a.block()}):", 1)
    value = f"{x}[{b}, {k}]"
    a.tiled(f"if {flag}:", 1)
    a.tiled(f"{acc} = {acc} + {helper}({value}).sum()")
    a.close(1, 0)
    a.tiled("else:", 1)
    a.tiled(f"{acc} = {acc} - {value}.square().sum()")
    a.close(2, 0)
    a.single(f"for {k} in {x}[{b}]:", 1)
    a.single(f"{acc} = {acc} + {helper}({k}) if {flag} else {acc} - {k} ** 2")
    a.close(0, 1)
    a.close()
    a.tiled(f"if {absent} is not None:", 1)
    a.tiled(f"{acc} = {acc} + {absent}[{b}]")
    a.close(1, 0)
    a.tiled(f"{out}[{b}] = {acc}")
    a.single(f"{out}[{b}] = {acc}")
    a.close()
    a.both(f"return [{out}]")


def levels(a: Author) -> None:
    """Rows of rows."""
    groups = a.one(1, 3)
    counts = [a.one(0, 1, 2, 4) for _ in range(groups)]
    lengths = a.lengths(sum(counts))
    values = torch.randn(sum(lengths), generator=a.generator)
    x = a.name()
    a.arguments[x] = JaggedTensor.from_lengths(values, (torch.tensor(counts), torch.tensor(lengths, dtype=torch.int64)))
    # The loops are given the same rows as lists.
    flat, rows_ = iter(values.tolist()), iter(lengths)
    lists = [[[next(flat) for _ in range(next(rows_))] for _ in range(c)] for c in counts]
    g, s, w, out, acc = a.name(), a.name(), a.name(), a.name(), a.name()
    a.tiled(f"{out} = torch.empty({groups})")
    a.single(f"{x} = {lists!r}")
    a.single(f"{out} = zeros({groups})")
    a.tiled(f"for {g} in hl.tile({groups}{a.one('', ', block_size=1', ', block_size=2')}):", 1)
    a.tiled(f"{acc} = hl.zeros([{g}])")
    a.tiled(f"for {s} in hl.tile({max([*counts, 1])}{a.block()}):", 1)
    a.tiled(f"for {w} in hl.tile({max([*lengths, 1])}{a.block()}):", 1)
    tiled, single = a.one(*UNARY)
    a.tiled(f"{acc} = {acc} + ({tiled.format(f'{x}[{g}, {s}, {w}]')}).sum(2).sum(1)")
    a.close(2, 0)
    a.tiled(f"{out}[{g}] = {acc}")
    a.close(1, 0)
    a.single(f"for {g} in range({groups}):", 1)
    a.single(f"{out}[{g}] = sum({single.format('v')} for row in {x}[{g}] for v in row) + 0.0")
    a.close(0, 1)
    a.both(f"return [{out}]")


def statistics(a: Author) -> None:
    """A running softmax, and the moments of rows, in every dtype that rows may have."""
    count = a.one(1, 3, 6)
    lengths = a.lengths(count)
    dtype = a.one(torch.float32, torch.float64, torch.bfloat16, torch.float16)
    values = torch.randn(sum(lengths), generator=a.generator).to(dtype)
    x = a.argument(JaggedTensor.from_lengths(values, lengths))
    a.tolerance = 2e-2 if dtype.itemsize == 2 else a.tolerance
    b, k, out, top, total, new = (a.name() for _ in range(6))
    a.tiled(f"{out} = torch.zeros_like({x})")
    a.single(f"{out} = [[0.0] * len(row) for row in {x}]")
    a.tiled(f"for {b} in hl.tile({x}.num_rows{a.one('', ', block_size=1', ', block_size=3')}):", 1)
    a.single(f"for {b} in range(len({x})):", 1)
    if a.maybe():
        a.tiled(f"{top}, {total} = hl.full([{b}], -torch.inf), hl.zeros([{b}])")
        a.tiled(f"for {k} in hl.tile({x}.max_length{a.block()}):", 1)
        a.tiled(f"{new} = torch.maximum({top}, {x}[{b}, {k}].to(torch.float32).amax(1))")
        exponents = f"torch.exp({x}[{b}, {k}].to(torch.float32) - {new}[:, None])"
        a.tiled(f"{total} = {total} * torch.exp({top} - {new}) + {exponents}.sum(1)")
        a.tiled(f"{top} = {new}")
        a.close(1, 0)
        a.tiled(f"for {k} in hl.tile({x}.max_length{a.block()}):", 1)
        a.tiled(f"{out}[{b}, {k}] = torch.exp({x}[{b}, {k}].to(torch.float32) - {top}[:, None]) / {total}[:, None]")
        a.close(1, 0)
        a.single(f"{total} = sum(math.exp(v) for v in {x}[{b}])")
        a.single(f"{out}[{b}] = [math.exp(v) / {total} for v in {x}[{b}]]")
    else:
        a.tiled(f"{top}, {total} = hl.zeros([{b}]), hl.zeros([{b}])")
        a.tiled(f"for {k} in hl.tile({x}.max_length{a.block()}):", 1)
        a.tiled(f"{top} = {top} + {x}[{b}, {k}].to(torch.float32).sum(1)")
        a.close(1, 0)
        a.tiled(f"{new} = {top} / {x}.lengths[{b}].clamp(min=1)")
        a.tiled(f"for {k} in hl.tile({x}.max_length{a.block()}):", 1)
        a.tiled(f"{total} += ({x}[{b}, {k}].to(torch.float32) - {new}[:, None]).square().sum(1)")
        a.close(1, 0)
        a.tiled(f"for {k} in hl.tile({x}.max_length{a.block()}):", 1)
        a.tiled(f"{out}[{b}, {k}] = ({x}[{b}, {k}].to(torch.float32) - {new}[:, None]) * torch.rsqrt({total}[:, None] + 0.5)")
        a.close(1, 0)
        a.single(f"{new} = sum({x}[{b}]) / max(len({x}[{b}]), 1)")
        a.single(f"{total} = sum((v - {new}) ** 2 for v in {x}[{b}])")
        a.single(f"{out}[{b}] = [(v - {new}) / math.sqrt({total} + 0.5) for v in {x}[{b}]]")
    a.close()
    a.both(f"return [{out}]")


def slices(a: Author) -> None:
    """Whole dims: reductions, scans and softmax along them, and integers."""
    n, features = a.one(1, 4, 9), a.one(1, 3, 8)
    x, i, out, row = a.dense(n, features), a.name(), a.name(), a.name()
    forms = (
        ("torch.cumsum({}, 1)", "[sum({}[: j + 1]) for j in range(len({}))]"),
        ("torch.softmax({}, dim=1)", "[math.exp(v) / sum(map(math.exp, {})) for v in {}]"),
        ("{} - {}.mean(1, keepdim=True)", "[v - sum({}) / len({}) for v in {}]"),
        ("{} * ({} == {}.amax(1)[:, None])", "[v * (v == max({})) for v in {}]"),
        ("{}.sum(-1)[:, None] + {} * 0", "[sum({}) for v in {}]"),
        ("{}.argmax(1).to(torch.float32)[:, None] + {} * 0", "[float({}.index(max({}))) for v in {}]"),
    )
    tiled, single = a.one(*forms)
    a.tiled(f"{out} = torch.empty_like({x})")
    a.single(f"{out} = zeros(len({x}), {features})")
    a.tiled(f"for {i} in hl.tile({x}.size(0){a.block()}):", 1)
    a.tiled(f"{row} = {x}[{i}, :]")
    a.tiled(f"{out}[{i}, :] = {tiled.replace('{}', row)}")
    a.close(1, 0)
    a.single(f"for {i} in range(len({x})):", 1)
    element = f"{x}[{i}]"
    a.single(f"{out}[{i}] = {single.replace('{}', element)}")
    a.close(0, 1)
    a.both(f"return [{out}]")


KINDS: dict[str, Callable[[Author], None]] = {
    kind.__name__: kind
    for kind in (rows, windows, ragged_windows, pairs, products, indirect, decisions, levels, statistics, slices)
}


def write(kind: str, seed: int) -> tuple[Pair, float]:
    """A pair of this kind, and how closely its two halves agree."""
    random = Random(f"{kind} {seed}")
    author = Author(random)
    KINDS[kind](author)
    pair = author.pair()
    plans: list[dict[str, Any]] = [{}]
    plans += [{"strategy": random.choice(("maskless", "masked", "persistent_dynamic"))} for _ in range(2)]
    pair.plans = plans
    return pair, author.tolerance
