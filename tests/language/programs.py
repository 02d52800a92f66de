"""Random small tile programs, as text, with arguments to run them on.

In: a source of random choices. Out: a `Program`: its text, its kernel, its arguments made anew for each run, and plans to try
it with. What a program means never depends on a tile: a loop whose carried values do depend on the cuts has a fixed block.
"""

from __future__ import annotations

import functools
import itertools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

import serrate
from serrate import JaggedTensor, Structure
from serrate.errors import StrategyError

FEATURES, COLUMNS, POSITIONS, ENTRIES = 3, 2, 7, 5

HEAD = """
import torch
import torch.nn.functional as F
import serrate
import serrate.language as hl

def program(a, c, other, index, target, nest, wide, dense, row, table, weight, weights, lens, n):
    {body}
"""


@dataclass
class Program:
    """A kernel's text, and how it is called."""

    text: str
    arguments: Callable[[], tuple[Any, ...]]
    plans: list[dict[str, Any]]

    @property
    def function(self) -> Any:
        """The plain function."""
        name = f"<program {hash(self.text)}>"
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(True), name)
        space: dict[str, Any] = {"__name__": "program"}
        exec(compile(self.text, name, "exec"), space)
        return space["program"]

    def kernel(self, plan: dict[str, Any] | None = None) -> Any:
        """The kernel, under as much of a plan as it has axes and block sizes for."""
        plan = dict(plan or {})
        if "config" in plan:
            plan["config"] = serrate.Config(block_sizes=plan["config"].block_sizes[: self._known[1]])
        if "sizes" in plan:
            plan["lanes"] = dict(zip(self._known[0], itertools.cycle(plan.pop("sizes"))))
        return serrate.kernel(self.function, **plan)

    @functools.cached_property
    def _known(self) -> tuple[list[str], int]:
        """The names of axes, and how many block sizes are open."""
        traced = serrate.kernel(self.function).on("reference")
        names = dict.fromkeys(axis.name for variant in traced.variants(*self.arguments()) for axis in variant.program.axes)
        return list(names), sum(site.programs.open_blocks for site in traced.sites)


class Scope:
    """Which tiles are open, in the order of dims; everything else is one number."""

    def __init__(self, *tiles: str) -> None:
        self.tiles = tiles

    def dim(self, tile: str) -> int:
        return self.tiles.index(tile)

    def fit(self, text: str, own: Sequence[str]) -> str:
        """A value with the dims of `own`, as one with all dims."""
        own = [t for t in own if t in self.tiles]
        if not own or own == list(self.tiles):
            return text
        return f"{text}[{', '.join(':' if t in own else 'None' for t in self.tiles)}]"

    def without(self, tile: str) -> Scope:
        return Scope(*(t for t in self.tiles if t != tile))


UNARY = (
    "torch.exp(-{0}.abs())", "torch.sigmoid({0})", "{0}.clamp(-1, 1)", "torch.where({0} > 0, {0}, 0.5)", "({0} * 2 - 1)",
    "torch.tanh({0})", "F.silu({0})", "F.relu({0})", "{0}.abs().sqrt()", "{0}.to(torch.float64).to(torch.float32)",
    "(1 - {0})", "torch.where(({0} > 0) & ({0} < 1), -{0}, {0})", "{0}.square()", "-{0}", "{0}.floor()",
    "torch.minimum({0}, {0} * 0.5)", "torch.where(~({0} > 0.2), {0}, 1.0)", "F.gelu({0})",
)  # fmt: skip
BINARY = (
    "({0} + {1})", "({0} * {1})", "({0} - {1})", "torch.maximum({0}, {1})", "({0} / (1 + {1}.abs()))",
    "torch.where({0} > {1}, {0}, {1} * 0.5)", "torch.minimum({0}, {1})",
)  # fmt: skip


class Writer:
    """Writes one program."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.lines: list[str] = []
        self.depth = 1

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(text)
        self.depth += 1

    def close(self, count: int = 1) -> None:
        self.depth -= count

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    # --- expressions ---

    def leaf(self, scope: Scope, ragged_only: bool) -> str:
        leaves = [("a[b, t, m]", "btm"), ("c[b, t]", "bt"), ("row[b, m]", "bm"), ("table[index[b, t], m]", "btm")]
        leaves += [("lens[b].to(torch.float32)", "b"), ("a.lengths[b].to(torch.float32)", "b")]
        if not ragged_only:
            leaves += [("other[b, t]", "bt"), ("dense[b, t, m]", "btm"), ("t.index.to(torch.float32)", "t")]
            leaves += [("hl.full([m], 0.7)", "m")] if "m" in scope.tiles else []
        text, own = self.one(*leaves)
        return (
            scope.fit(text, list(own)) if "t" in scope.tiles or "t" not in own else self.one("0.5", scope.fit("row[b, m]", "bm"))
        )

    def expression(self, scope: Scope, ragged_only: bool = False, size: int = 3) -> str:
        if size <= 1 or self.maybe(0.2):
            text = self.leaf(scope, ragged_only)
            return text if text != "0.5" else scope.fit("row[b, m]", "bm")
        if self.maybe():
            return str(self.one(*UNARY)).replace("{0}", self.expression(scope, ragged_only, size - 1))
        left = self.expression(scope, ragged_only, size - 1)
        return str(self.one(*BINARY)).replace("{0}", left).replace("{1}", self.expression(scope, ragged_only, size - 1))

    def anchored(self, scope: Scope, ragged_only: bool = False) -> str:
        """An expression that has all dims."""
        anchor = self.one("a[b, t, m]", "c[b, t]") if ragged_only else self.one("a[b, t, m]", "dense[b, t, m]", "other[b, t]")
        text = scope.fit(anchor, "bt" if "m" not in anchor else "btm")
        if "m" not in anchor and "m" in scope.tiles:
            text = f"({text} + {scope.fit('row[b, m]', 'bm')})"
        return f"({text} * 0.5 + {self.expression(scope, ragged_only)})"

    # --- kinds of programs ---

    def rows(self) -> None:
        """Sums, maxima, softmax statistics and other carried values over rows, then a pass that uses them."""
        grid = self.maybe(0.4)
        self.line("out = torch.zeros(4, a.num_rows, row.size(1))")
        self.line("kept, full = torch.zeros_like(a), torch.zeros(a.num_rows, n, row.size(1))")
        shape = self.one("joint", "nested") if not grid else "grid"
        if shape == "joint":
            self.open("for b, m in hl.tile([a.num_rows, row.size(1)]):")
        else:
            self.open("for b in hl.grid(a.num_rows):" if grid else "for b in hl.tile(a.num_rows):")
            self.open("for m in hl.tile(row.size(1)):")
        scope = Scope("t", "m") if grid else Scope("b", "t", "m")
        small = scope.without("t")
        inside = "[m]" if grid else "[b, m]"
        bound = self.one("n", "a.max_length", "longest", "from one")
        fixed = self.maybe(0.3)
        ragged_only = bound == "longest" and not grid
        block = f", block_size={self.one(1, 2, 3)}" if fixed else ""
        loop = {
            "n": f"hl.tile(n{block})",
            "a.max_length": f"hl.tile(a.max_length{block})",
            "longest": f"hl.tile({'a.lengths[b]' if grid else 'a.lengths[b].amax()'}{block})",
            "from one": f"hl.tile(1, n{block})",
        }[bound]
        names = self.carried(scope, small, inside, loop, fixed, ragged_only)
        for k, name in enumerate(names):
            self.line(f"out[{k}, b, m] = {name}")
        used = self.one(*names)
        self.open(f"for t in hl.tile({self.one('n', 'a.max_length')}):")
        self.line(f"kept[b, t, m] = {self.anchored(scope)} - {small_in(scope, used)}.clamp(-5, 5)")
        if self.maybe():
            self.line(f"full[b, t, m] = {self.anchored(scope)} * {small_in(scope, used)}.clamp(-5, 5)")
        self.close(1)
        self.close(1 if shape == "joint" else 2)
        self.line("return out, kept, full")

    def carried(self, scope: Scope, small: Scope, inside: str, loop: str, fixed: bool, ragged_only: bool) -> list[str]:
        dim = scope.dim("t")
        cut = str(small_in(scope, "new"))
        updates: dict[str, tuple[dict[str, str], list[str]]] = {
            "sum": ({"s": "0.0"}, ["s = s + {x}.sum(DIM)"]),
            "sum2": ({"s2": "0.0"}, ["s2 += {y}.sum(DIM)"]),
            "mul": ({"s3": "0.0"}, ["s3 = ({x} * {y}).sum(dim=DIM) + s3"]),
            "max": ({"u": "-torch.inf"}, ["u = torch.maximum(u, {x}.amax(DIM))"]),
            "min": ({"v": "torch.inf"}, ["v = torch.minimum({y}.amin(DIM), v)"]),
            "prod": ({"p": "1.0"}, ["p = p * torch.tanh({x}).prod(DIM)"]),
            "any": ({"g": "0.0"}, ["g = torch.maximum(g, ({x} > 0.3).any(DIM).to(torch.float32))"]),
            "all": ({"h": "1.0"}, ["h = h * ({x} > -0.3).all(DIM).to(torch.float32)"]),
            "count": ({"k": "0.0"}, ["k = k + ({x} > 0).to(torch.float32).sum(DIM)"]),
            "softmax": (
                {"top": "-torch.inf", "total": "0.0", "acc": "0.0"},
                [
                    "new = torch.maximum(top, {x}.amax(DIM))",
                    "e = torch.exp({x} - " + cut + ")",
                    "acc = acc * torch.exp(top - new) + (e * {y}).sum(DIM)",
                    "total = total * torch.exp(top - new) + e.sum(DIM)",
                    "top = new",
                ],
            ),
        }
        if fixed:
            updates |= {
                "decayed": ({"d": "0.0"}, ["d = d * 0.5 + {x}.sum(DIM)"]),
                "before": ({"q": "0.0", "w": "1.0"}, ["w = q", "q = q + {x}.sum(DIM)"]),
                "swapped": ({"q1": "0.0", "q2": "1.0"}, ["q1, q2 = q2, q1 * 0.5 + {x}.sum(DIM)"]),
                "followed": ({"f1": "0.0", "f2": "-1.0"}, ["f1 = f1 + {x}.sum(DIM)", "f2 = torch.maximum(f2, f1)"]),
                "reading": (
                    {"r1": "0.0", "r2": "0.0"},
                    ["r1 = r1 + {x}.sum(DIM)", f"r2 = r2 + ({{y}} * {small_in(scope, 'r1')}.tanh()).sum(DIM)"],
                ),
            }
            if not ragged_only:
                updates |= {
                    "counter": ({"i": "0.0"}, ["i = i + 1"]),
                    "branch": ({"j": "0.0"}, ["if t.begin > 2:", "    j = j + {x}.sum(DIM)"]),
                    "both": (
                        {"o": "0.0"},
                        ["if t.begin > 2:", "    o = o + {x}.sum(DIM)", "else:", "    o = torch.maximum(o, {y}.amax(DIM))"],
                    ),
                }
        chosen = self.random.sample(sorted(updates), self.one(1, 2, 3))
        names = []
        for name in chosen:
            for value, start in updates[name][0].items():
                self.line(f"{value} = hl.full({inside}, {start})")
                names.append(value)
        self.open(f"for t in {loop}:")
        self.line(f"x = {self.anchored(scope, ragged_only)}")
        self.line(f"y = {self.anchored(scope, ragged_only)}")
        for name in chosen:
            for update in updates[name][1]:
                self.line(update.replace("{x}", "x").replace("{y}", "y").replace("DIM", str(dim)))
        self.close()
        return names[:4]

    def powers(self) -> None:
        """Statistics of a row, and a later pass that needs the same powers again."""
        wide = self.maybe()
        self.line(f"kept = torch.zeros_like({'a' if wide else 'c'})")
        self.line("stats = torch.zeros(2, a.num_rows, row.size(1))")
        self.open("for b, m in hl.tile([a.num_rows, row.size(1)]):" if wide else "for b in hl.tile(a.num_rows):")
        dims, cut = ("[b, m]", "[:, None, :]") if wide else ("[b]", "[:, None]")
        read = "a[b, t, m]" if wide else "c[b, t]"
        value = self.one("{0}", "({0} * 0.5)", "torch.tanh({0})").format(read)
        bound = self.one("a.max_length", "n")
        self.line(f'top, total = hl.full({dims}, float("-inf")), hl.zeros({dims})')
        self.open(f"for t in hl.tile({bound}):")
        self.line(f"x = {value}")
        self.line("new = torch.maximum(top, x.amax(1))")
        self.line(f"total = total * torch.exp(top - new) + torch.exp(x - new{cut}).sum(1)")
        self.line("top = new")
        self.close()
        self.line("stats[0, b, m], stats[1, b, m] = top, total" if wide else "stats[0, b, 0], stats[1, b, 0] = top, total")
        self.open(f"for t in hl.tile({self.one(bound, 'a.max_length')}):")
        again = self.one(f"torch.exp({value} - top{cut}) / total{cut}", f"torch.exp({value} - top{cut}) * 2 - 1")
        self.line(f"kept[b, t{', m' if wide else ''}] = {again}")
        self.close(2)
        self.line("return kept, stats")

    def products(self) -> None:
        """Matrix products with ragged rows, and over ragged positions."""
        grid = self.maybe()
        if self.maybe():
            self.line("out = a.with_values(torch.zeros(a.total_elements, weight.size(1)))")
            self.line("full = torch.zeros(a.num_rows, weight.size(1))")
            self.open("for b in hl.grid(a.num_rows):" if grid else "for b in hl.tile(a.num_rows):")
            self.open("for t, u in hl.tile([a.max_length, weight.size(1)]):")
            inside = "[t, u]" if grid else "[b, t, u]"
            self.line(f"acc = hl.zeros({inside})")
            self.open("for k in hl.tile(weight.size(0)):")
            left = self.one("a[b, t, k]", "a[b, t, k].sigmoid()", "(a[b, t, k] * 2 + 1)", "table[index[b, t], k]")
            right = self.one("weight[k, u]", "weights[b, k, u]", "weight[k, u].tanh()")
            forms = [f"acc + {left} @ {right}", f"hl.dot({left}, {right}, acc=acc)", f"acc + torch.matmul({left}, {right})"]
            forms += [f"torch.addmm(acc, {left}, {right})"] if grid else []
            self.line(f"acc = {self.one(*forms)}")
            self.close()
            self.line(f"out[b, t, u] = {self.one('acc', 'torch.relu(acc) - 1', 'acc * 0.5', 'F.silu(acc)')}")
            self.close(2)
            self.line("return out, full")
            return
        self.line("out = torch.zeros(a.num_rows, row.size(1), weight.size(1))")
        self.line("right = a.with_values(a.values @ weight)")
        self.open("for b in hl.grid(a.num_rows):" if grid else "for b in hl.tile(a.num_rows):")
        self.open("for m, u in hl.tile([row.size(1), weight.size(1)]):")
        self.line(f"acc = hl.zeros({'[m, u]' if grid else '[b, m, u]'})")
        self.open(f"for t in hl.tile({self.one('n', 'a.max_length')}):")
        left = self.one("a[b, t, m]", "(a[b, t, m] + 1)", "dense[b, t, m]")
        dims = ("0, 1",) if grid else ("1, 2",)
        self.line(f"acc = acc + {left}.transpose({self.one(*dims)}) @ {self.one('right[b, t, u]', '(right[b, t, u] * 2 - 1)')}")
        self.close()
        self.line("out[b, m, u] = acc")
        self.close(2)
        self.line("return (out,)")

    def attention(self) -> None:
        """Two ragged axes of one row; loops that end with a tile of another, causal or not."""
        self.line("out = torch.zeros_like(a)")
        self.open("for b in hl.grid(a.num_rows):")
        self.open(f"for q in hl.tile({self.one('a.max_length', 'a.lengths[b]')}):")
        causal = self.maybe()
        end = self.one("q.end", "a.max_length", "a.lengths[b]") if causal else self.one("a.max_length", "a.lengths[b]", "n")
        soft = self.maybe()
        if soft:
            self.line('top, total = hl.full([q], float("-inf")), hl.zeros([q])')
        self.line(f"acc = hl.zeros([q, {FEATURES}])")
        begin = self.one("0, ", "") if not causal else "0, "
        self.open(f"for k in hl.tile({begin}{end}):")
        self.line("scores = a[b, q, :] @ a[b, k, :].T * 0.5")
        if causal:
            hidden = "-1e30" if soft else "0.0"
            self.line(
                f"scores = torch.where(q.index[:, None] >= k.index[None, :], {'scores' if soft else 'F.silu(scores)'}, {hidden})"
            )
        elif not soft:
            self.line("scores = F.silu(scores)")
        if soft:
            self.line("new = torch.maximum(top, scores.amax(1))")
            self.line("p = torch.exp(scores - new[:, None])")
            self.line("old = torch.exp(top - new)")
            self.line("total = total * old + p.sum(1)")
            self.line("acc = acc * old[:, None] + p @ a[b, k, :]")
            self.line("top = new")
        else:
            self.line("acc = acc + scores @ a[b, k, :]")
        self.close()
        self.line(f"out[b, q, :] = {'acc / total[:, None]' if soft else 'acc'}")
        self.close(2)
        self.line("return (out,)")

    def nested(self) -> None:
        """Two levels of rows."""
        self.line("out, inner = torch.zeros(nest.num_groups), torch.zeros(nest.num_groups, 4)")
        self.line("kept = torch.zeros_like(nest)")
        self.open("for g in hl.tile(nest.num_groups):")
        self.line("total, top = hl.zeros([g]), hl.full([g], -9.0)")
        self.open("for s in hl.tile(4):")
        self.line("own = hl.zeros([g, s])")
        self.open("for w in hl.tile(5):")
        x = self.one(
            "nest[g, s, w]", "(nest[g, s, w] + 1)", "nest[g, s, w].square()", "torch.where(nest[g, s, w] > 0, nest[g, s, w], 0.5)"
        )
        self.line(f"own = own + {x}.sum(2)")
        self.close()
        self.line("inner[g, s] = own")
        self.open("for w in hl.tile(5):")
        self.line(f"y = {self.one('nest[g, s, w] * 2', 'nest[g, s, w] - own[:, :, None]')}")
        self.line("kept[g, s, w] = y")
        if self.maybe():
            self.line(f"total = total + nest[g, s, w].sum({self.one('2).sum(1', '(1, 2)')})")
            self.line("top = torch.maximum(top, nest[g, s, w].amax((1, 2)))")
        self.close(2)
        self.line("out[g] = total + top")
        self.close()
        self.line("return out, inner, kept")

    def rectangles(self) -> None:
        """Rows and columns that are both ragged, independently."""
        self.line("out, cols, kept = torch.zeros(wide.num_rows), torch.zeros(wide.num_rows, 4), torch.zeros_like(wide)")
        self.open("for b in hl.tile(wide.num_rows):")
        self.line("total = hl.zeros([b])")
        self.open("for m in hl.tile(4):")
        self.line("own = hl.zeros([b, m])")
        self.open(f"for t in hl.tile({self.one('n', 'wide.structure.max_length(0)')}):")
        x = self.one(
            "wide[b, t, m]", "(wide[b, t, m] + 1)", "torch.exp(wide[b, t, m])", "(wide[b, t, m] * row[b, 0][:, None, None])"
        )
        self.line(f"x = {x}")
        self.line("own = own + x.sum(1)")
        self.line("kept[b, t, m] = x * 0.5")
        self.close()
        self.line("cols[b, m] = own")
        self.close()
        self.open(f"for t, m in hl.tile([{self.one('n', '5')}, 4]):")
        self.line(f"total = total + {x}.sum(2).sum(1)")
        self.close()
        self.line("out[b] = total")
        self.close()
        self.line("return out, cols, kept")

    def moved(self) -> None:
        """Gathers by ragged indices, scatters to places that are all different, and sums where they are not."""
        grid = self.maybe()
        self.line(f"out, sums = torch.zeros(a.total_elements, row.size(1)), torch.zeros({ENTRIES}, row.size(1))")
        self.line("hits = torch.zeros(a.num_rows, dtype=torch.int64)")
        self.open("for b in hl.grid(a.num_rows):" if grid else "for b in hl.tile(a.num_rows):")
        scope = Scope("t", "m") if grid else Scope("b", "t", "m")
        if self.maybe():
            self.line("count = hl.zeros([], dtype=torch.int64)" if grid else "count = hl.zeros([b], dtype=torch.int64)")
            self.open("for t in hl.tile(a.max_length):")
            self.line(f"count = count + (index[b, t] % 2 == {self.one(0, 1)}).to(torch.int64).sum({scope.dim('t')})")
            self.close()
            self.line("hits[b] = count")
        self.open(f"for t, m in hl.tile([{self.one('n', 'a.max_length')}, row.size(1)]):")
        self.line(f"x = {self.anchored(scope)} + table[index[b, t], m]")
        self.line(self.one("out[target[b, t], m] = x", "hl.store(out, [target[b, t], m], x)"))
        if self.maybe():
            self.line(f"hl.atomic_add(sums, [{self.one('index[b, t]', '(index[b, t] + 1) % 5')}, m], x)")
        self.close(2)
        self.line("return out, sums, hits")


def small_in(scope: Scope, name: str) -> str:
    """A value without the dim t in a scope that has it."""
    return scope.fit(name, [t for t in scope.tiles if t != "t"])


KINDS = ("rows", "rows", "rows", "powers", "products", "attention", "nested", "rectangles", "moved")
SIZES = (1, 2, 3, 4, 5, 8, 16, 33)


def write(random: Random, kind: str | None = None) -> Program:
    """A random program."""
    writer = Writer(random)
    getattr(writer, kind or random.choice(KINDS))()
    text = HEAD.replace("{body}", "\n".join(writer.lines).lstrip())
    lengths = [[random.choice((0, 0, 1, 2, 3, 5, POSITIONS)) for _ in range(random.choice((0, 1, 2, 3, 5)))] for _ in range(2)]
    lengths[1] = [random.randrange(POSITIONS) for _ in lengths[0]]
    levels = [[random.randrange(4) for _ in range(random.randrange(5))] for _ in range(3)]
    seed = random.randrange(1000)
    plans: list[dict[str, Any]] = [{"strategy": s} for s in ("maskless", "masked", "persistent_dynamic")]
    for _ in range(2):
        plans.append({"sizes": [random.choice(SIZES) for _ in range(13)]})
    plans.append({"strategy": "persistent_dynamic", "lanes": {"chunk": random.choice((1, 2, 3))}})
    plans.append({"config": serrate.Config(block_sizes=[random.choice((None, *SIZES)) for _ in range(4)])})
    return Program(text, lambda: arguments(lengths[0], lengths[1], levels, seed), plans)


def arguments(own: list[int], others: list[int], levels: list[list[int]], seed: int) -> tuple[Any, ...]:
    """What every program is given."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    total, count = sum(own), len(own)
    a = JaggedTensor.from_lengths(randn(total, FEATURES), own)
    other = JaggedTensor.from_lengths(randn(sum(others)), others)
    index = a.with_values(torch.randint(0, ENTRIES, (total,), generator=generator))
    target = a.with_values(torch.randperm(total, generator=generator))
    inner = [n for group in levels for n in group]
    sizes = [torch.tensor(x, dtype=torch.int64) for x in ([len(group) for group in levels], inner)]
    structure = Structure.from_lengths(*sizes)
    nest = JaggedTensor(randn(sum(inner)), structure)
    counts = torch.tensor([(n * 2 + seed) % 5 for n in range(count)], dtype=torch.int64)
    rectangles = Structure.from_lengths(torch.tensor(own, dtype=torch.int64)).with_columns(counts, packed=bool(seed % 2))
    stored = int((torch.tensor(own, dtype=torch.int64) * counts).sum()) if seed % 2 else total
    wide = JaggedTensor(randn(stored) if seed % 2 else randn(stored, 4), rectangles)
    lens = torch.tensor(own, dtype=torch.int64)
    return (
        a, a.with_values(randn(total)), other, index, target, nest, wide, randn(count, POSITIONS, FEATURES),
        randn(count, FEATURES), randn(ENTRIES, FEATURES), randn(FEATURES, COLUMNS), randn(count, FEATURES, COLUMNS),
        lens, POSITIONS,
    )  # fmt: skip


def compare(found: Any, wanted: Any, where: str) -> None:
    """Fails where results differ, with the program's text."""
    for f, w in zip(found, wanted, strict=True):
        pair = [x.values if isinstance(x, JaggedTensor) else x for x in (f, w)]
        torch.testing.assert_close(*pair, rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m: f"{m}\n{where}")


def agree(program: Program, backends: Sequence[str], plans: Sequence[dict[str, Any]]) -> None:
    """Every tile of the interpreter, and backends under plans, give the numbers of the interpreter's tile of one."""
    plain = program.kernel()
    wanted = plain.interpreted(tile=1)(*program.arguments())
    for tile in (3, "whole"):
        compare(plain.interpreted(tile=tile)(*program.arguments()), wanted, f"interpreted, tile {tile}\n{program.text}")
    for backend in backends:
        for plan in ({}, *plans):
            made = program.kernel(plan).on(backend)
            where = f"{backend}, {plan}\n{program.text}"
            try:
                found = made(*program.arguments())
            except StrategyError as error:
                # Rows that a program does not let be cut are refused, with the reason.
                assert "cannot cut" in str(error), where
                continue
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}\n{where}") from error
            compare(found, wanted, where)
