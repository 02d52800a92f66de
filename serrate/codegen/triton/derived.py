"""Derived arrays as Triton: all running sums of a program in one launch, all tables in another.

In: arrays with recipes. Out: the source of a module with two kernels, and the order of their arguments. Each running sum is one
program, which goes through all components; a table is searched block by block.

    offsets of pieces   [0, f(0), f(0) + f(1), ...]     f(c) = pieces of row c
    owners of pieces    [c of piece 0, c of piece 1, ...]
    longest of groups   [max(f(0), ..., f(n - 1)), max(f(n), ...), ...]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serrate.codegen.expressions import Spelling, written
from serrate.codegen.triton.printer import HELPER, with_helpers
from serrate.ir.expr import Array, Element, Expr, Search, Symbol, ceildiv
from serrate.ir.recipes import GroupMaximum, Owners, RunningSum

BLOCK = 1024
"""Components of a running sum, and positions of a table, that are computed at once."""


@dataclass(frozen=True)
class DerivedSource:
    """A module's text with the kernels `running_sums` and `tables`, as far as there are such arrays. Both take `inputs`, then the
    sums, then (`tables` only) the tables, then the values of `symbols`."""

    text: str
    inputs: tuple[Array, ...]
    sums: tuple[Array, ...]
    tables: tuple[Array, ...]
    symbols: tuple[Symbol, ...]


def can_derive(array: Array) -> bool:
    """Whether an array is a running sum of what a caller holds, a table of the owners of one, or the largest number of each group
    of components."""
    recipe = array.recipe
    if isinstance(recipe, Owners):
        return can_derive(recipe.offsets) and not recipe.count.arrays and not recipe.size.arrays
    if (
        not isinstance(recipe, RunningSum | GroupMaximum)
        or recipe.count.arrays
        or any(isinstance(e, Search) for e in recipe.term.walk())
    ):
        return False
    return all(a.recipe is None and a.data is None and not a.local for a in recipe.arrays)


def print_derived(arrays: Sequence[Array]) -> DerivedSource:
    """The kernels that fill these arrays, all of which `can_derive`."""
    tables = tuple(a for a in arrays if not isinstance(a.recipe, RunningSum))
    needed = dict.fromkeys(a for a in arrays if isinstance(a.recipe, RunningSum))
    needed.update((a.recipe.offsets, None) for a in tables if isinstance(a.recipe, Owners))
    sums = tuple(needed)
    recipes = [a.recipe for a in (*sums, *tables)]
    per_component = [r for r in recipes if isinstance(r, RunningSum | GroupMaximum)]
    inputs = tuple(dict.fromkeys(a for r in per_component for a in sorted(r.arrays, key=lambda a: a.name)))
    symbols = tuple(dict.fromkeys(s for r in recipes if r is not None for s in sorted(r.symbols, key=str)))
    names = {array: f"{kind}{k}" for kind, some in (("a", inputs), ("s", sums), ("t", tables)) for k, array in enumerate(some)}
    numbers = {s: f"n{k}" for k, s in enumerate(symbols)}
    fixed = ", ".join(f'"{n}"' for n in numbers.values())
    lines = []
    if sums:
        lines += [f"@triton.jit(do_not_specialize=[{fixed}])"]
        lines += [f"def running_sums({', '.join([*(names[a] for a in (*inputs, *sums)), *numbers.values()])}):"]
        lines += [f"    lanes = tl.arange(0, {BLOCK})"]
        for k, array in enumerate(sums):
            assert isinstance(array.recipe, RunningSum)
            lines += _running_sum(k, names[array], array.recipe, names, numbers)
    if tables:
        lines += ["", ""] if lines else []
        lines += [f"@triton.jit(do_not_specialize=[{fixed}])"]
        lines += [f"def tables({', '.join([*(names[a] for a in (*inputs, *sums, *tables)), *numbers.values()])}):"]
        lines += [f"    position = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})"]
        for k, array in enumerate(tables):
            size = written(table_size(array), _spelling({}, numbers, ""))
            lines += [f"    if tl.program_id(1) == {k}:"]
            if isinstance(array.recipe, Owners):
                count = written(array.recipe.count, _spelling({}, numbers, ""))
                lines += [f"        found = sr_owners({names[array.recipe.offsets]}, {count}, position)"]
            else:
                assert isinstance(array.recipe, GroupMaximum)
                lines += _longest(array.recipe, names, numbers)
            lines += [f"        tl.store({names[array]} + position, found, mask=position < {size})"]
    return DerivedSource(with_helpers("\n".join(lines) + "\n"), inputs, sums, tables, symbols)


def table_size(array: Array) -> Expr:
    """The number of elements of a table."""
    if isinstance(array.recipe, GroupMaximum):
        return ceildiv(array.recipe.count, array.recipe.size)
    assert isinstance(array.recipe, Owners)
    return array.recipe.size


def _longest(recipe: GroupMaximum, names: dict[Array, str], numbers: dict[Symbol, str]) -> list[str]:
    count = written(recipe.count, _spelling({}, numbers, ""))
    term = written(recipe.term, _spelling(names, {**numbers, recipe.coordinate: "c"}, f"mask=c < {count}, other=0"))
    return [
        f"        found = tl.full([{BLOCK}], 0, tl.int64)",
        f"        for member in range(0, {recipe.size}):",
        f"            c = position * {recipe.size} + member",
        f"            found = tl.maximum(found, tl.where(c < {count}, {term}, 0))",
    ]


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
