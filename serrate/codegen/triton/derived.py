"""Computes derived arrays in Triton: all running sums of a program in one launch, or two if there are many components; all
tables in one more. If there is one block of components and tables are small, a single launch computes everything.

In: arrays with recipes. Out: the source of a module, and the order of its kernels' arguments. A program takes one block of
components, or of a table. If there are several blocks of components, `block_sums` stores the sum of each in `partial`. In
`all_arrays`, every program that searches a running sum computes it first; all programs store the same numbers.

    offsets of pieces   [0, f(0), f(0) + f(1), ...]     f(c) = pieces of row c
    owners of pieces    [c of piece 0, c of piece 1, ...]
    longest of groups   [max(f(0), ..., f(n - 1)), max(f(n), ...), ...]
    order of components [the c with the least f(c) of the first 1024, the next one, ...]

The length of a row that does not exist is computed as the length of another row, times 0. So elements past the end of an array
do not matter; they are read as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serrate.codegen.expressions import Spelling, unwrapped, written
from serrate.codegen.triton.module import HELPER, with_helpers
from serrate.ir.expr import Array, Element, Expr, Search, Symbol, ceildiv
from serrate.ir.recipes import GroupMaximum, Order, Owners, PerComponent, RunningSum

BLOCK = 1024
"""Positions of a table that are computed at once."""
COMPONENTS = 4096
"""Components of a running sum that are computed at once."""


@dataclass(frozen=True)
class DerivedSource:
    """A module's text with the kernels `block_sums`, `running_sums`, `tables` and `all_arrays`, as far as there are such arrays.
    All take `inputs`; then `block_sums` the partial sums, `running_sums` those and the sums, `tables` and `all_arrays` the sums
    and the tables; then the values of all `symbols` and the numbers of elements of all inputs."""

    text: str
    inputs: tuple[Array, ...]
    sums: tuple[Array, ...]
    tables: tuple[Array, ...]
    symbols: tuple[Symbol, ...]


def can_derive(array: Array) -> bool:
    """Whether an array is a running sum of what a caller holds, a table of the owners of one, the largest number of each group
    of components, or their order in runs that are sorted at once."""
    recipe = array.recipe
    if isinstance(recipe, Owners):
        return can_derive(recipe.offsets) and not recipe.count.arrays and not recipe.size.arrays
    sorts = isinstance(recipe, Order) and recipe.size == BLOCK
    if (
        not (isinstance(recipe, RunningSum | GroupMaximum) or sorts)
        or not isinstance(recipe, PerComponent)
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
    per_component = [r for r in recipes if isinstance(r, PerComponent)]
    inputs = tuple(dict.fromkeys(a for r in per_component for a in sorted(r.arrays, key=lambda a: a.name)))
    symbols = tuple(dict.fromkeys(s for r in recipes if r is not None for s in sorted(r.symbols, key=str)))
    names = {array: f"{kind}{k}" for kind, some in (("a", inputs), ("s", sums), ("t", tables)) for k, array in enumerate(some)}
    numbers = {s: f"n{k}" for k, s in enumerate(symbols)}
    given = [*numbers.values(), *(_count(names[a]) for a in inputs)]
    fixed = ", ".join(f'"{n}"' for n in given)
    widened = [f"    {n} = sr_wide({n})" for n in numbers.values()]
    lines: list[str] = []
    if sums:
        for kernel, made in (("block_sums", ()), ("running_sums", sums)):
            lines += ["", ""] if lines else []
            arguments = [*(names[a] for a in inputs), "partial", *(names[a] for a in made), *given]
            lines += [f"@triton.jit(do_not_specialize=[{fixed}])", f"def {kernel}({', '.join(arguments)}):"]
            lines += [*widened, "    block = tl.program_id(0).to(tl.int64)", f"    lanes = tl.arange(0, {COMPONENTS})"]
            lines += [f"    c = block * {COMPONENTS} + lanes", "    own = partial + tl.program_id(1) * tl.num_programs(0)"]
            lines += BEFORE if made else []
            for k, array in enumerate(sums):
                assert isinstance(array.recipe, RunningSum)
                lines += _block(k, array.recipe, names, numbers)
                lines += _after(names[array], array.recipe, numbers) if made else ["        tl.store(own + block, tl.sum(term))"]
    searched = [array.recipe.offsets for array in tables if isinstance(array.recipe, Owners)]
    alone = [array for array in sums if array not in searched]
    for kernel in ("tables", *(("all_arrays",) if sums else ())) if tables else ():
        lines += ["", ""] if lines else []
        lines += [f"@triton.jit(do_not_specialize=[{fixed}])"]
        lines += [f"def {kernel}({', '.join([*(names[a] for a in (*inputs, *sums, *tables)), *given])}):"]
        lines += [*widened, f"    position = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})"]
        lines += [f"    c = tl.arange(0, {COMPONENTS}).to(tl.int64)"] if kernel == "all_arrays" else []
        for k, array in enumerate(tables):
            size = written(table_size(array), _spelling({}, numbers, ""))
            lines += [f"    if tl.program_id(1) == {k}:"]
            if kernel == "all_arrays":
                own = [array.recipe.offsets] if isinstance(array.recipe, Owners) else []
                for each in (*own, *(alone if k == 0 else ())):
                    lines += _whole_sum(each, names, numbers)
                lines += ["        tl.debug_barrier()"] if own else []
            if isinstance(array.recipe, Owners):
                count = written(array.recipe.count, _spelling({}, numbers, ""))
                lines += [f"        found = sr_owners({names[array.recipe.offsets]}, {count}, position)"]
            elif isinstance(array.recipe, Order):
                lines += _order(array.recipe, names, numbers)
            else:
                assert isinstance(array.recipe, GroupMaximum)
                lines += _longest(array.recipe, names, numbers)
            lines += [f"        tl.store({names[array]} + position, found, mask=position < {size})"]
    return DerivedSource(with_helpers("\n".join(lines) + "\n"), inputs, sums, tables, symbols)


def table_size(array: Array) -> Expr:
    """The number of elements of a table."""
    if isinstance(array.recipe, GroupMaximum):
        return ceildiv(array.recipe.count, array.recipe.size)
    if isinstance(array.recipe, Order):
        return array.recipe.count
    assert isinstance(array.recipe, Owners)
    return array.recipe.size


def _longest(recipe: GroupMaximum, names: dict[Array, str], numbers: dict[Symbol, str]) -> list[str]:
    count = written(recipe.count, _spelling({}, numbers, ""))
    term = written(recipe.term, _spelling(names, {**numbers, recipe.coordinate: "own"}, f"own < {count}"))
    return [
        f"        found = tl.full([{BLOCK}], 0, tl.int64)",
        f"        for member in range(0, {recipe.size}):",
        f"            own = position * {recipe.size} + member",
        f"            found = tl.maximum(found, tl.where(own < {count}, {term}, 0))",
    ]


def _order(recipe: Order, names: dict[Array, str], numbers: dict[Symbol, str]) -> list[str]:
    """Sorts numbers with their positions as the last digits, so that equal ones keep their order."""
    count = written(recipe.count, _spelling({}, numbers, ""))
    spelling = _spelling(names, {**numbers, recipe.coordinate: "position"}, f"position < {count}")
    most = 2**62 // BLOCK
    # The last digits of a negative number would not be a position.
    key = f"tl.maximum(tl.minimum({written(recipe.term, spelling)}, {most - 1}), 0)"
    return [
        f"        key = tl.where(position < {count}, {key}, {most})",
        f"        found = position - position % {BLOCK} + tl.sort(key * {BLOCK} + position % {BLOCK}) % {BLOCK}",
    ]


BEFORE = [
    "    before = tl.full([], 0, tl.int64)",
    f"    for first in range(0, block, {COMPONENTS}):",
    "        before += tl.sum(tl.load(own + first + lanes, mask=first + lanes < block, other=0))",
]
"""The sum of all blocks before this one."""


def _block(array: int, recipe: RunningSum, names: dict[Array, str], numbers: dict[Symbol, str]) -> list[str]:
    """The terms of this block of components."""
    return [f"    if tl.program_id(1) == {array}:", _terms(recipe, names, numbers)]


def _terms(recipe: RunningSum, names: dict[Array, str], numbers: dict[Symbol, str]) -> str:
    count = written(recipe.count, _spelling({}, numbers, ""))
    term = written(recipe.term, _spelling(names, {**numbers, recipe.coordinate: "c"}, f"c < {count}"))
    if recipe.most is not None:
        # Lengths may be wrong: a check of the offsets reports that later.
        term = f"tl.maximum({_at_most(term, recipe, numbers)}, 0)"
    return f"        term = tl.where(c < {count}, {term}, 0).to(tl.int64)"


def _at_most(text: str, recipe: RunningSum, numbers: dict[Symbol, str]) -> str:
    """A number, or the most that elements of a running sum can be."""
    return text if recipe.most is None else f"tl.minimum({text}, {written(recipe.most, _spelling({}, numbers, ''))})"


def _whole_sum(array: Array, names: dict[Array, str], numbers: dict[Symbol, str]) -> list[str]:
    """A running sum over one block of components."""
    assert isinstance(array.recipe, RunningSum)
    count = written(array.recipe.count, _spelling({}, numbers, ""))
    return [
        _terms(array.recipe, names, numbers),
        f"        tl.store({names[array]}, tl.full([], 0, tl.int64))",
        f"        tl.store({names[array]} + 1 + c, {_at_most('tl.cumsum(term)', array.recipe, numbers)}, mask=c < {count})",
    ]


def _after(name: str, recipe: RunningSum, numbers: dict[Symbol, str]) -> list[str]:
    """Stores the running sum after each component."""
    count = written(recipe.count, _spelling({}, numbers, ""))
    return [
        "        if block == 0:",
        f"            tl.store({name}, before)",
        f"        tl.store({name} + 1 + c, {_at_most('before + tl.cumsum(term)', recipe, numbers)}, mask=c < {count})",
    ]


def _count(name: str) -> str:
    """The argument that is the number of elements of an array."""
    return f"n{name}"


def _spelling(names: dict[Array, str], numbers: dict[Symbol, str], mask: str) -> Spelling:
    def element(e: Element, go: Callable[[Expr], str]) -> str:
        name = names[e.array]
        text = f"{HELPER}element({name}, {unwrapped(go(e.index))}, {_count(name)}, {mask})"
        return text if e.most is None else f"tl.maximum(tl.minimum({text}, {go(e.most)}), 0)"

    def search(e: Search, go: Callable[[Expr], str]) -> str:
        raise AssertionError("no running sum searches")

    return Spelling(HELPER, "//", "tl.minimum", "tl.maximum", lambda s: numbers[s], element, search)
