"""Derived arrays as Triton: all running sums of a program in one launch, all tables of owners in another.

In: arrays with recipes. Out: the source of a module with two kernels, and the order of their arguments. Each running sum is one
program, which goes through all components; a table is searched block by block.

    offsets of pieces   [0, f(0), f(0) + f(1), ...]     f(c) = pieces of row c
    owners of pieces    [c of piece 0, c of piece 1, ...]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serrate.codegen.expressions import Spelling, written
from serrate.codegen.triton.printer import HELPER, with_helpers
from serrate.ir.expr import Array, Element, Expr, Search, Symbol
from serrate.ir.recipes import Owners, RunningSum

BLOCK = 1024
"""Components of a running sum, and positions of a table, that are computed at once."""


@dataclass(frozen=True)
class DerivedSource:
    """A module's text; `inputs` and `symbols` are the arguments of `running_sums` before and after the arrays that it fills, and
    the numbers that both kernels take."""

    text: str
    inputs: tuple[Array, ...]
    sums: tuple[Array, ...]
    tables: tuple[Array, ...]
    symbols: tuple[Symbol, ...]


def can_derive(array: Array) -> bool:
    """Whether an array is a running sum of what a caller holds, or a table of the owners of one."""
    recipe = array.recipe
    if isinstance(recipe, Owners):
        return can_derive(recipe.offsets) and not recipe.count.arrays and not recipe.size.arrays
    if not isinstance(recipe, RunningSum) or recipe.count.arrays or any(isinstance(e, Search) for e in recipe.term.walk()):
        return False
    return all(a.recipe is None and a.data is None and not a.local for a in recipe.arrays)


def print_derived(arrays: Sequence[Array]) -> DerivedSource:
    """The kernels that fill these arrays, all of which `can_derive`."""
    tables = tuple(a for a in arrays if isinstance(a.recipe, Owners))
    needed = dict.fromkeys(a for a in arrays if isinstance(a.recipe, RunningSum))
    needed.update((a.recipe.offsets, None) for a in tables if isinstance(a.recipe, Owners))
    sums = tuple(needed)
    recipes = [a.recipe for a in (*sums, *tables)]
    inputs = tuple(dict.fromkeys(a for r in recipes if isinstance(r, RunningSum) for a in sorted(r.arrays, key=lambda a: a.name)))
    symbols = tuple(dict.fromkeys(s for r in recipes if r is not None for s in sorted(r.symbols, key=str)))
    names = {array: f"{kind}{k}" for kind, some in (("a", inputs), ("s", sums), ("t", tables)) for k, array in enumerate(some)}
    numbers = {s: f"n{k}" for k, s in enumerate(symbols)}
    fixed = ", ".join(f'"{n}"' for n in numbers.values())
    lines = [f"@triton.jit(do_not_specialize=[{fixed}])"]
    lines += [f"def running_sums({', '.join([*(names[a] for a in (*inputs, *sums)), *numbers.values()])}):"]
    lines += [f"    lanes = tl.arange(0, {BLOCK})"]
    for k, array in enumerate(sums):
        assert isinstance(array.recipe, RunningSum)
        lines += _running_sum(k, names[array], array.recipe, names, numbers)
    if tables:
        lines += ["", "", f"@triton.jit(do_not_specialize=[{fixed}])"]
        lines += [f"def owners({', '.join([*(names[a] for a in (*sums, *tables)), *numbers.values()])}):"]
        lines += [f"    position = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})"]
        for k, array in enumerate(tables):
            assert isinstance(array.recipe, Owners)
            recipe = array.recipe
            count, size = (written(e, _spelling({}, numbers, "")) for e in (recipe.count, recipe.size))
            lines += [f"    if tl.program_id(1) == {k}:"]
            lines += [f"        owner = sr_owners({names[recipe.offsets]}, {count}, position)"]
            lines += [f"        tl.store({names[array]} + position, owner, mask=position < {size})"]
    return DerivedSource(with_helpers("\n".join(lines) + "\n"), inputs, sums, tables, symbols)


def _running_sum(program: int, name: str, recipe: RunningSum, names: dict[Array, str], numbers: dict[Symbol, str]) -> list[str]:
    count = written(recipe.count, _spelling({}, numbers, ""))
    term = written(recipe.term, _spelling(names, {**numbers, recipe.coordinate: "c"}, f"mask=c < {count}, other=0"))
    return [
        f"    if tl.program_id(0) == {program}:",
        "        total = tl.full([], 0, tl.int64)",
        f"        tl.store({name}, total)",
        f"        for first in range(0, {count}, {BLOCK}):",
        "            c = first + lanes",
        f"            term = tl.where(c < {count}, {term}, 0).to(tl.int64)",
        f"            tl.store({name} + 1 + c, total + tl.cumsum(term), mask=c < {count})",
        "            total += tl.sum(term)",
    ]


def _spelling(names: dict[Array, str], numbers: dict[Symbol, str], mask: str) -> Spelling:
    def element(e: Element, go: Callable[[Expr], str]) -> str:
        return f"tl.load({names[e.array]} + {go(e.index)}, {mask}).to(tl.int64)"

    def search(e: Search, go: Callable[[Expr], str]) -> str:
        raise AssertionError("no running sum searches")

    return Spelling(HELPER, "//", "tl.minimum", "tl.maximum", lambda s: numbers[s], element, search)
