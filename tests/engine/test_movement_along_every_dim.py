"""Operations that move elements, along every dim of every composition of ragged dims, against nested Python lists.

In: one tensor of each composition, and the same elements in lists of lists made from storage positions alone. Out: failures that
name the composition, the operation and the dim. An operation gives what the lists give, or is refused: `refused` says which.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serrate import JaggedTensor, Structure, ir, jit
from serrate.errors import CallError, RowError, ShapeError
from serrate.frontend import ops
from serrate.ir.view import TensorView
from tests.engine.oracle import BACKENDS, FULL, one_thread

pytestmark = [pytest.mark.sampled(2), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

T = torch.tensor
Lists = Any
"""Lists of lists, one level for each dim, of numbers."""


# --- compositions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Composition:
    """The inputs of a fusion, how its first one is viewed, and the elements that the view has."""

    inputs: tuple[Tensor, ...]
    view: Callable[..., TensorView]
    positions: Lists
    """Where each element lies in the first input: tuples of indices."""
    owns: dict[int, set[int]]
    """The dims that count rows, and the ragged dims whose rows they count."""
    order: tuple[int, ...] | None = None
    """The dims in the order in which a result can be returned."""

    @property
    def lists(self) -> Lists:
        return changed(self.positions, lambda at: self.inputs[0][at].item())


def changed(lists: Lists, function: Callable[[Any], Any]) -> Lists:
    return [changed(each, function) for each in lists] if isinstance(lists, list) else function(lists)


def numbers(*shape: int) -> Tensor:
    """Elements that are all different and in no order; none is 0, which is what a place outside gives."""
    count = torch.Size(shape).numel()
    return (torch.randperm(count, generator=torch.Generator().manual_seed(count)) + 1).double().reshape(shape)


def cut(items: list[Any], offsets: list[int]) -> list[Any]:
    return [items[a:b] for a, b in itertools.pairwise(offsets)]


def features(count: int, *at: int) -> list[tuple[int, ...]]:
    return [(*at, k) for k in range(count)]


def _product() -> Lists:
    found, start = [], 0
    for rows, columns in ((2, 3), (2, 0), (3, 1), (1, 4)):
        found.append([[features(2, start + r * columns + c) for c in range(columns)] for r in range(rows)])
        start += rows * columns
    return found


def _under(offsets: list[list[int]]) -> list[Any]:
    return [cut([features(2, g, i) for i in range(own[-1])], own) for g, own in enumerate(offsets)]


ROWS, WORDS, GROUPS = [0, 3, 3, 8, 10], [0, 2, 2, 5, 6, 6, 10], [[0, 3, 3, 7], [0, 1, 5, 7]]
FLAT = [features(2, i) for i in range(10)]
COMPOSITIONS: dict[str, Composition] = {
    "one level": Composition((numbers(10, 2), T(ROWS)), ops.as_nested, cut(FLAT, ROWS), {0: {1}}),
    "gaps": Composition(
        (numbers(12, 2), T([0, 4, 5]), T([3, 0, 6])),
        lambda x, starts, lengths: ops.as_nested(x, starts=starts, lengths=lengths),
        [[features(2, s + i) for i in range(n)] for s, n in ((0, 3), (4, 0), (5, 6))],
        {0: {1}},
    ),
    "rows of dim 1": Composition(
        (numbers(3, 10), T(ROWS)),
        lambda x, offsets: ops.as_nested(x, offsets, ragged_dim=1),
        [cut(features(10, k), ROWS) for k in range(3)],
        {1: {2}},
    ),
    "features before rows": Composition(
        (numbers(10, 2), T(ROWS)),
        lambda x, offsets: ops.permute(ops.as_nested(x, offsets), 0, 2, 1),
        [[[(i, k) for i in range(a, b)] for k in range(2)] for a, b in itertools.pairwise(ROWS)],
        {0: {2}},
        (0, 2, 1),
    ),
    "parts of groups": Composition(
        (numbers(2, 7, 2), T(GROUPS)),
        lambda x, offsets: ops.as_nested(x, offsets, ragged_dim=1),
        _under(GROUPS),
        {0: {2}, 1: {2}},
    ),
    "parts of rows": Composition(
        (numbers(10, 2), T([0, 4, 10]), T([[0, 1, 4], [0, 6, 6]])),
        lambda x, rows, parts: ops.as_nested(ops.as_nested(x, rows), parts, ragged_dim=1),
        cut(cut(FLAT, [0, 1, 4, 10, 10]), [0, 2, 4]),
        {0: {2}, 1: {2}},
    ),
    "chain": Composition(
        (numbers(10, 2), T(WORDS), T([0, 2, 2, 3, 6])),
        lambda x, words, sentences: ops.as_nested(ops.as_nested(x, words), sentences),
        cut(cut(FLAT, WORDS), [0, 2, 2, 3, 6]),
        {0: {1, 2}, 1: {2}},
    ),
    "chain of three": Composition(
        (numbers(10, 2), T(WORDS), T([0, 2, 2, 3, 6]), T([0, 1, 4])),
        lambda x, words, sentences, documents: ops.as_nested(ops.as_nested(ops.as_nested(x, words), sentences), documents),
        cut(cut(cut(FLAT, WORDS), [0, 2, 2, 3, 6]), [0, 1, 4]),
        {0: {1, 2, 3}, 1: {2, 3}, 2: {3}},
    ),
    "parts of a chain": Composition(
        (numbers(10, 2), T([0, 4, 4, 10]), T([0, 2, 3]), T([[0, 1, 4], [0, 0, 0], [0, 6, 6]])),
        lambda x, words, sentences, parts: ops.as_nested(ops.as_nested(ops.as_nested(x, words), parts, ragged_dim=1), sentences),
        cut(cut(cut(FLAT, [0, 1, 4, 4, 4, 10, 10]), [0, 2, 4, 6]), [0, 2, 3]),
        {0: {1, 3}, 1: {3}, 2: {3}},
    ),
    "independent": Composition(
        (numbers(10, 5), T(ROWS), T([0, 1, 1, 5])),
        lambda x, rows, columns: ops.as_nested(ops.as_nested(x, columns, ragged_dim=1), rows),
        [[cut(features(5, i), [0, 1, 1, 5]) for i in range(a, b)] for a, b in itertools.pairwise(ROWS)],
        {0: {1}, 2: {3}},
    ),
    "product": Composition((numbers(13, 2), T([0, 2, 4, 7, 8]), T([0, 3, 3, 4, 8])), ops.as_product, _product(), {0: {1, 2}}),
    "padded product": Composition(
        (numbers(6, 4), T([0, 2, 5, 6]), T([0, 3, 7, 8])),
        lambda x, rows, columns: ops.as_product(x, rows, columns, packed=False),
        [[features(n, i) for i in range(a, b)] for (a, b), n in zip(itertools.pairwise([0, 2, 5, 6]), (3, 4, 1), strict=True)],
        {0: {1, 2}},
    ),
}


# --- operations on lists -------------------------------------------------------------------------------------------------


def at_depth(lists: Lists, dim: int, function: Callable[[list[Any]], Any]) -> Lists:
    """The lists with those of `dim` changed."""
    return [at_depth(each, dim - 1, function) for each in lists] if dim else function(lists)


def paths(lists: Lists, *path: int) -> Iterator[tuple[int, ...]]:
    if not isinstance(lists, list):
        yield path
        return
    for k, each in enumerate(lists):
        yield from paths(each, *path, k)


def element(lists: Lists, path: tuple[int, ...]) -> Any:
    """The element there, None outside."""
    for k in path:
        if not isinstance(lists, list) or not 0 <= k < len(lists):
            return None
        lists = lists[k]
    return lists


def gathered(lists: Lists, dim: int, indices: Lists) -> Lists:
    """`out[i][j] = lists[indices[i][j]][j]` for dim 0; 0 where nothing is."""
    out = changed(indices, lambda _: 0)
    for path in paths(indices):
        found = element(lists, (*path[:dim], element(indices, path), *path[dim + 1 :]))
        element(out, path[:-1])[path[-1]] = 0 if found is None else found
    return out


def ordered(lists: Lists, dim: int, *, places: bool = False) -> Lists:
    """Elements in order along a dim, every line of it for itself; in a line across rows, some of them may not have a place."""
    out = changed(lists, lambda x: x)
    lines: dict[tuple[Any, ...], list[tuple[Any, int]]] = {}
    for path in paths(lists):
        lines.setdefault((path[:dim], path[dim + 1 :]), []).append((element(lists, path), path[dim]))
    for (before, behind), line in lines.items():
        for k, (value, place) in zip(sorted(k for _, k in line), sorted(line), strict=True):
            path = (*before, k, *behind)
            element(out, path[:-1])[path[-1]] = place if places else value
    return out


def like(lists: Lists, dim: int, rows: list[Any], value: float) -> Lists:
    """What could stand in `rows`, one of the lists of a dim: of the shape that its neighbours have."""
    return changed(next(each for own in (rows, *_at(lists, dim)) for each in own), lambda _: value)


def without_rows(lists: Lists, dim: int, ragged: set[int]) -> Lists:
    """A position of `dim` whose rows, in the `ragged` dims, are all empty; its regular dims are those of any other position."""
    if dim + 1 in ragged:
        return []
    sample = next(each for own in _at(lists, dim) for each in own)
    return [without_rows(lists, dim + 1, ragged) for _ in sample]


def padded(lists: Lists, dim: int, ragged: set[int]) -> Lists:
    """One position more before and two after those of a dim; empty ones if the dim counts rows."""

    def wider(rows: list[Any]) -> list[Any]:
        more = without_rows(lists, dim, ragged) if ragged else like(lists, dim, rows, 7.0)
        return [more, *rows, more, more]

    return at_depth(lists, dim, wider)


def selected(k: int) -> Callable[[Lists, int, set[int]], Lists]:
    """Position `k` of a dim; zeros where it is not there, or empty rows if the dim counts rows."""

    def select(lists: Lists, dim: int, ragged: set[int]) -> Lists:
        def one(rows: list[Any]) -> Any:
            if -len(rows) <= k < len(rows):
                return rows[k]
            return without_rows(lists, dim, ragged) if ragged else like(lists, dim, rows, 0.0)

        return at_depth(lists, dim, one)

    return select


def indexed(lists: Lists, dim: int, ragged: set[int]) -> Lists:
    """Positions `PICKED` of a dim; zeros where one is not there, or empty rows if the dim counts rows."""

    def joined(rows: list[Any]) -> list[Any]:
        absent = without_rows(lists, dim, ragged) if ragged else like(lists, dim, rows, 0.0)
        return [rows[k] if 0 <= k < len(rows) else absent for k in PICKED]

    return at_depth(lists, dim, joined)


def _at(lists: Lists, dim: int) -> Iterator[list[Any]]:
    if not dim:
        yield lists
        return
    for each in lists:
        yield from _at(each, dim - 1)


def summed(lists: Lists, dim: int) -> Lists:
    """Running sums along a dim."""
    out = changed(lists, lambda x: x)
    for path in paths(lists):
        before = [element(lists, (*path[:dim], k, *path[dim + 1 :])) for k in range(path[dim] + 1)]
        element(out, path[:-1])[path[-1]] = sum(v for v in before if v is not None)
    return out


def listed(found: Any) -> Lists:
    """A result in lists of lists, one level for each dim."""
    return found.tolist() if isinstance(found, Tensor) else [listed(piece) for piece in found.unbind()]


# --- operations ----------------------------------------------------------------------------------------------------------

Operation = tuple[Callable[..., TensorView], Callable[..., Lists]]
PICKED = [1, 0, 7, 1, -1]
"""Positions that `index` selects; some are outside."""


def _indices(x: TensorView, modulus: int) -> TensorView:
    """Indices made of the elements, some of them outside: the structure is the tensor's own."""
    return ops.sub(ops.remainder(ops.cast(x, torch.int64), modulus), 1)


OPERATIONS: dict[str, Operation] = {
    "flip": (ops.flip, lambda x, d: at_depth(x, d, lambda rows: rows[::-1])),
    "gather": (
        lambda x, d: ops.gather(x, d, _indices(x, 6)),
        lambda x, d: gathered(x, d, changed(x, lambda v: int(v) % 6 - 1)),
    ),
    "index": (lambda x, d, picked: ops.index(x, picked, d), indexed),
    "slice": (lambda x, d: ops.slice(x, d, 1, 3), lambda x, d: at_depth(x, d, lambda rows: rows[1:3])),
    "slice from the end": (lambda x, d: ops.slice(x, d, -2), lambda x, d: at_depth(x, d, lambda rows: rows[-2:])),
    "slice off the end": (lambda x, d: ops.slice(x, d, None, -1), lambda x, d: at_depth(x, d, lambda rows: rows[:-1])),
    "pad": (lambda x, d: ops.pad(x, d, 1, 2, 7.0), padded),
    "cat": (
        lambda x, d: ops.cat([x, ops.neg(x), x], d),
        lambda x, d: at_depth(x, d, lambda rows: rows + changed(rows, lambda v: -v) + rows),
    ),
    "sort": (lambda x, d: ops.sort(x, d).values, ordered),
    "argsort": (lambda x, d: ops.argsort(x, d), lambda x, d: ordered(x, d, places=True)),
    "topk": (
        lambda x, d: ops.topk(x, 2, d, largest=False).values,
        lambda x, d: at_depth(ordered(x, d), d, lambda rows: rows[:2]),
    ),
    "topk indices": (
        lambda x, d: ops.topk(x, 2, d, largest=False).indices,
        lambda x, d: at_depth(ordered(x, d, places=True), d, lambda rows: rows[:2]),
    ),
    "select the first": (lambda x, d: ops.select(x, d, 0), selected(0)),
    "select the second": (lambda x, d: ops.select(x, d, 1), selected(1)),
    "select the last": (lambda x, d: ops.select(x, d, -1), selected(-1)),
    "cumsum": (ops.cumsum, summed),
    "slice by steps": (lambda x, d: ops.slice(x, d, 0, None, 2), lambda x, d: at_depth(x, d, lambda rows: rows[::2])),
}


def refused(composition: Composition, operation: str, dim: int) -> bool:
    """What has no meaning, or is not supported: along a dim that counts rows, only what picks whole rows."""
    inside = composition.owns.get(dim, set())
    if not inside or operation == "gather":
        return False
    return not operation.startswith(("select", "slice", "cat", "flip", "pad", "index", "sort", "argsort"))


# --- tests ---------------------------------------------------------------------------------------------------------------


def depth(lists: Lists) -> int:
    return 1 + max(map(depth, lists), default=0) if isinstance(lists, list) else 0


def exchanged(lists: Lists) -> Lists:
    """Dims 1 and 2 in the opposite order."""
    return [[list(column) for column in zip(*rows, strict=True)] for rows in lists]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_every_operation_along_every_dim(name: str, backend: str) -> None:
    """By default each operation along each dim runs on one of the backends, a different one in the next composition."""
    composition = COMPOSITIONS[name]
    lists = composition.lists
    turn = BACKENDS.index(backend) + list(COMPOSITIONS).index(name)
    wanted: dict[str, Lists] = {}
    with ir.Fusion() as fusion:
        x, *described = (fusion.input((None, *t.shape[1:]), t.dtype) for t in composition.inputs)
        picked = fusion.input((None,), torch.int64)
        results = []
        for k, (operation, dim) in enumerate(itertools.product(OPERATIONS, range(depth(lists)))):
            if not FULL and (k + turn) % len(BACKENDS):
                continue
            (run, model), view = OPERATIONS[operation], composition.view(x, *described)
            by = (picked,) if operation == "index" else ()
            if refused(composition, operation, dim):
                with pytest.raises(ShapeError, match=r"^\w+: .*dim"):
                    run(view, dim, *by)
                continue
            ragged = (composition.owns.get(dim, set()),) if operation.startswith(("select", "pad", "index")) else ()
            want, found = model(lists, dim, *ragged), run(view, dim, *by)
            if composition.order is not None and found.ndim == view.ndim:
                want, found = exchanged(want), ops.permute(found, *composition.order)
            wanted[f"{operation} along dim {dim}"] = want
            results.append(found)
        fusion.output(*results)
    with one_thread():
        run_it = fusion.evaluate if backend == "reference" else fusion.compile(backend=backend)
        got = {key: listed(each) for key, each in zip(wanted, run_it(*composition.inputs, T(PICKED)), strict=True)}
    for key, want in wanted.items():
        assert got[key] == want, key


SENTENCES = JaggedTensor.from_lengths(numbers(10), [T([2, 0, 1, 3]), T([2, 0, 3, 1, 0, 4])])
RANKS = JaggedTensor.from_lengths(numbers(10), T([[2, 0, 3], [1, 0, 4]]))


@pytest.mark.parametrize("jt", [SENTENCES, RANKS], ids=["chain", "equal parts"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_torch_gather_of_nested_rows(jt: JaggedTensor, dim: int) -> None:
    """Each index names a row, or a position of one; positions that the named row does not have are 0."""
    rows = listed(jt)
    within = changed(rows, lambda _: 0)
    for path in paths(rows):
        there = element(rows, path[:dim])
        element(within, path[:-1])[path[-1]] = int(element(rows, path)) % len(there)
    indices = jt.with_values(T([element(within, path) for path in paths(rows)]))
    assert listed(torch.gather(jt, dim, indices)) == gathered(rows, dim, within)
    assert listed(torch.take_along_dim(jt, indices, dim)) == gathered(rows, dim, within)


@pytest.mark.parametrize("jt", [SENTENCES, RANKS], ids=["chain", "equal parts"])
def test_torch_functions_along_dims_that_count_rows_are_refused(jt: JaggedTensor) -> None:
    for dim in (0, 1):
        for function in (lambda x, d: torch.topk(x, 1, d), torch.cumsum):
            with pytest.raises(ShapeError, match=f"dim {dim} .*rows"):
                function(jt, dim)
        assert listed(torch.sort(jt, dim).values) == ordered(listed(jt), dim)
        assert listed(torch.argsort(jt, dim)) == ordered(listed(jt), dim, places=True)
        assert listed(torch.flip(jt, [dim])) == at_depth(listed(jt), dim, lambda rows: rows[::-1])
    with pytest.raises(CallError, match="does not take a JaggedTensor"):
        torch.roll(jt, 1, 0)
    assert listed(torch.flip(jt, [2])) == at_depth(listed(jt), 2, lambda rows: rows[::-1])
    assert listed(torch.argsort(jt, 2)) == ordered(listed(jt), 2, places=True)


@pytest.mark.parametrize("jt", [SENTENCES, RANKS], ids=["chain", "equal parts"])
def test_indexing_nested_rows_in_a_traced_function(jt: JaggedTensor) -> None:
    rows, picked = listed(jt), T([1, 0, -1, 1])
    every: dict[str, tuple[Callable[[Any], Any], Lists]] = {
        "x[1:]": (lambda x: x[1:], rows[1:]),
        "x[::2]": (lambda x: x[::2], rows[::2]),
        "x[0]": (lambda x: x[0], rows[0]),
        "x[-1]": (lambda x: x[-1], rows[-1]),
        "x[picked]": (lambda x: x[picked], [rows[k] for k in picked.tolist()]),
        "x[:, 1:]": (lambda x: x[:, 1:], [own[1:] for own in rows]),
        "x[:, :, :1]": (lambda x: x[:, :, :1], [[each[:1] for each in own] for own in rows]),
        "flip": (lambda x: x.flip([0, 1]), [own[::-1] for own in rows[::-1]]),
        "cat": (lambda x: torch.cat([x, x + 1]), rows + changed(rows, lambda v: v + 1)),
        "cat of rows": (lambda x: torch.cat([x, x[:, :1]], 1), [own + own[:1] for own in rows]),
        "cat of positions": (lambda x: torch.cat([x, x], 2), [[each + each for each in own] for own in rows]),
        "pad": (lambda x: F.pad(x, [0, 0, 0, 0, 1, 2]), [[], *rows, [], []]),
        "pad of rows": (lambda x: F.pad(x, [0, 0, 1, 2]), [[[], *own, [], []] for own in rows]),
        "pad of positions": (lambda x: F.pad(x, [1, 2], value=7.0), [[[7.0, *each, 7.0, 7.0] for each in own] for own in rows]),
        "pad by less": (lambda x: F.pad(x, [0, 0, -1, 1]), [[*own[1:], []] for own in rows]),
        "sort": (lambda x: torch.sort(x, 2, descending=True).values, [[sorted(each)[::-1] for each in own] for own in rows]),
        "sort across rows": (lambda x: torch.sort(x, 1).values, ordered(rows, 1)),
        "sort across documents": (lambda x: torch.sort(x, 0).indices, ordered(rows, 0, places=True)),
    }
    # One program with all of them, and eager ones.
    together = jit(lambda x: [run(x) for run, _ in every.values()])(jt)
    for (name, (run, want)), found in zip(every.items(), together, strict=True):
        assert listed(found) == want, name
        assert listed(run(jt)) == want, name


LONG = JaggedTensor.from_lengths(numbers(19), [T([2, 3]), T([2, 3, 4, 2, 8])])
PRODUCT = JaggedTensor(numbers(13), Structure.from_lengths(T([2, 3])).with_columns(T([2, 3])))


@pytest.mark.parametrize("positions", [[1, 0, 1], [-1, 0, -2], [], [1]])
@pytest.mark.parametrize("dim", [1, 2])
def test_the_same_positions_of_every_row(positions: list[int], dim: int) -> None:
    picked = T(positions, dtype=torch.int64)
    key = (*(slice(None),) * dim, picked)
    for jt in (LONG, LONG.with_values(LONG.values[:, None] + T([0.0, 100.0]))):
        want = at_depth(listed(jt), dim, lambda rows: [rows[k] for k in positions])
        assert listed(jt[key]) == want
        assert listed(jit(lambda x: x[key])(jt)) == want
        if min(positions, default=0) >= 0:
            assert listed(torch.index_select(jt, dim, picked)) == want
            assert listed(jit(lambda x: x.index_select(dim, picked))(jt)) == want


def test_positions_that_some_row_lacks_are_an_error() -> None:
    for key in ((slice(None), T([0, 2])), (slice(None), slice(None), T([-3]))):
        with pytest.raises(RowError, match=r"position (2|-3) does not exist in every row: row 0 has length 2"):
            LONG[key]
        with pytest.raises(IndexError, match=r"indexing by a tensor: index\[\d\] = (2|-3) is out of range: the row is not that"):
            jit(lambda x, key=key: x[key])(LONG)
    with pytest.raises(CallError, match=r"jt\[:, rows\]: a ragged dim takes .* position numbers of one dim, got a torch.bool"):
        LONG[:, T([True, False])]
    with pytest.raises(CallError, match="rows and columns of a product take an int"):
        PRODUCT[:, T([0])]
    with pytest.raises(CallError, match=r"jt\[:, rows\] = x: a ragged dim takes an int, a slice or a ragged mask"):
        LONG[:, T([0])] = 0.0


def totals(lists: Lists, dims: int, of: int) -> Lists:
    """Sums over the last `dims` of `of` dims."""
    if of > dims:
        return [totals(each, dims, of - 1) for each in lists]
    return sum(element(lists, path) for path in paths(lists))


CHANGES: dict[str, Operation] = {name: OPERATIONS[name] for name in ("index", "pad", "cat", "select the first")}


@pytest.mark.parametrize(
    "name", ["chain of three", *(pytest.param(n, marks=pytest.mark.slow) for n in ("parts of rows", "chain", "parts of a chain"))]
)
def test_results_with_new_levels_are_operands_like_any_other(name: str) -> None:
    """Reduced, moved along another dim, and added to themselves."""
    composition = COMPOSITIONS[name]
    lists = composition.lists
    wanted: dict[str, Lists] = {}
    with ir.Fusion() as fusion:
        x, *described = (fusion.input((None, *t.shape[1:]), t.dtype) for t in composition.inputs)
        picked, results = fusion.input((None,), torch.int64), []
        for operation, dim in itertools.product(CHANGES, composition.owns):
            (run, model), view = CHANGES[operation], composition.view(x, *described)
            ragged = () if operation == "cat" else (composition.owns[dim],)
            made = run(view, dim, *((picked,) if operation == "index" else ()))
            want = model(lists, dim, *ragged)
            key = f"{operation} along dim {dim}, "
            wanted[key + "doubled"] = changed(want, lambda v: v + v)
            results.append(made + made)
            wanted[key + "flipped"] = want[::-1]
            results.append(ops.flip(made, 0))
            for count in range(1, made.ndim + 1):
                wanted[f"{key}summed over {count} dims"] = totals(want, count, made.ndim)
                results.append(ops.sum(made, tuple(range(made.ndim - count, made.ndim))))
        fusion.output(*results)
    found = fusion.compile(backend="cpp")(*composition.inputs, T(PICKED))
    for (key, want), each in zip(wanted.items(), found, strict=True):
        assert listed(each) == want, key
