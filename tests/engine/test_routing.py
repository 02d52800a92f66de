"""Routing and compositions: rows that the program itself decides on, moved, joined and scanned in one fusion.

In: hand-picked and random keys, indices and lengths. Out: failures against plain torch; nothing that was worked out for one call
may be seen in the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from serrate import ir
from serrate.frontend import ops
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor
from tests.engine.movement_cases import at
from tests.engine.oracle import BACKENDS, FULL, STRATEGIES, VARIANTS, compare, one_thread, pick

LONG, INT, FLOAT = torch.int64, torch.int32, torch.float64


def record(make: Callable[[ir.Fusion], Any]) -> ir.Fusion:
    with ir.Fusion("routing") as fusion:
        found = make(fusion)
        fusion.output(*(found if isinstance(found, tuple) else (found,)))
    return fusion


def nested(values: TensorView, offsets: TensorView) -> TensorView:
    return ops.as_nested(values, offsets)


def grouped(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Offsets and permutation by hand: position after position."""
    groups: list[list[int]] = [[] for _ in range(count + 1)]
    for n, key in enumerate(keys.tolist()):
        groups[key if 0 <= key < count else count].append(n)
    offsets = [0, *itertools.accumulate(map(len, groups[:count]))]
    return torch.tensor(offsets), torch.tensor([n for group in groups for n in group], dtype=LONG)


def rows_of(x: Tensor, offsets: Tensor) -> list[Tensor]:
    return list(x[: int(offsets[-1])].split(offsets.diff().tolist()))


def same(got: Any, want: Any, where: str) -> None:
    """Compares results: tensors, and lists of rows with ragged ones."""
    got = got if isinstance(got, tuple) else (got,)
    want = want if isinstance(want, tuple) else (want,)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        place = f"{where}, result {k}"
        if isinstance(b, list):
            assert isinstance(a, JaggedTensor), f"{place}: expected a JaggedTensor, got {type(a).__name__}"
            offsets = [0, *itertools.accumulate(map(len, b))]
            assert a.offsets.tolist() == offsets, f"{place}: offsets must be {offsets}, got {a.offsets.tolist()}"
            a, b = a.values, torch.cat([a.values[:0], *b])
        assert isinstance(a, Tensor) and a.dtype == b.dtype, f"{place}: expected {b.dtype}, got {a}"
        compare(a, b, place)


def every_plan(fusion: ir.Fusion, seed: str) -> list[tuple[str, Any]]:
    """The fusion under every strategy, each on a backend of its own, and under none."""
    first = pick(range(len(BACKENDS)), seed)
    found = []
    for k, strategy in enumerate(STRATEGIES):
        for backend in BACKENDS if FULL else [BACKENDS[(first + k) % len(BACKENDS)]]:
            quick = [v for v in VARIANTS[strategy] if backend != "triton" or 1 not in v.values()]
            options = pick(quick, seed, strategy, backend)
            found.append((f"{backend}, {strategy} {options}", fusion.compile(backend, strategy, **options)))
    return [*found, ("cpp", fusion.compile("cpp"))]


def on_backends(name: str) -> list[Any]:
    return list(BACKENDS)


# --- routing -----------------------------------------------------------------------------------------------------------

KEYS: dict[str, tuple[int, list[int]]] = {
    "mixed": (4, [2, 0, 3, 2, 2, 0, 3]),
    "more experts than tokens": (11, [10, 3, 3]),
    "no tokens": (5, []),
    "all to one": (6, [4] * 23),
    "all to the first": (3, [0] * 9),
    "all to the last": (3, [2] * 9),
    "one token": (2, [1]),
    "one expert": (1, [0] * 5),
    "primes": (7, [(k * k) % 7 for k in range(37)]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [LONG, INT, torch.uint8, torch.int16])
def test_group_by(dtype: torch.dtype, backend: str) -> None:
    for name, (count, listed) in KEYS.items():
        keys = torch.tensor(listed, dtype=dtype)
        program = record(lambda f, n=count: ops.group_by(f.input((None,), dtype), n)).compile(backend)
        same(program(keys), grouped(keys, count), name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_of_no_group_come_last_in_their_old_order(backend: str) -> None:
    keys = torch.tensor([5, -1, 0, 2, 3, 0, -7])
    same(record(lambda f: ops.group_by(f.input((None,), LONG), 3)).compile(backend)(keys), grouped(keys, 3), backend)
    empty = record(lambda f: ops.group_by(f.input((None,), LONG), 0)).compile(backend)
    same(empty(keys), (torch.tensor([0]), torch.arange(7)), backend)


def _experts(fusion: ir.Fusion, count: int, dtype: torch.dtype = LONG) -> tuple[TensorView, ...]:
    """Tokens to their experts, a weight each, and back; the routed rows; how much each expert got."""
    x, keys, weights = fusion.input((None, 3), FLOAT), fusion.input((None,), dtype), fusion.input((count, 3, 2), FLOAT)
    offsets, permutation = ops.group_by(keys, count)
    routed = nested(ops.index(x, permutation), offsets)
    done = ops.matmul(routed, weights)
    return ops.index(ops.as_flattened(done), ops.invert(permutation)), routed, ops.sum(routed, 1), ops.softmax(routed, 1)


def _experts_by_torch(x: Tensor, keys: Tensor, weights: Tensor) -> tuple[Any, ...]:
    offsets, permutation = grouped(keys, len(weights))
    rows = rows_of(x[permutation], offsets)
    back = torch.stack([x[n] @ weights[int(k)] for n, k in enumerate(keys)]) if len(keys) else x.new_zeros(0, 2)
    return back, rows, torch.stack([r.sum(0) for r in rows]), [torch.softmax(r, 0) for r in rows]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", list(KEYS))
def test_experts(name: str) -> None:
    count, listed = KEYS[name]
    generator = torch.Generator().manual_seed(len(listed))
    keys = torch.tensor(listed, dtype=LONG)
    x = torch.randn(len(listed), 3, dtype=FLOAT, generator=generator)
    weights = torch.randn(count, 3, 2, dtype=FLOAT, generator=generator)
    for where, program in every_plan(record(lambda f: _experts(f, count)), name):
        with one_thread():
            same(program(x, keys, weights), _experts_by_torch(x, keys, weights), f"{name}: {where}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_of_one_call_are_not_those_of_the_next(backend: str) -> None:
    """The same tensors written to, and others of the same size, with the same program."""
    program = record(lambda f: _experts(f, 4)).compile(backend)
    x, weights = torch.randn(7, 3, dtype=FLOAT), torch.randn(4, 3, 2, dtype=FLOAT)
    keys = torch.tensor([2, 0, 3, 2, 2, 0, 3])
    same(program(x, keys, weights), _experts_by_torch(x, keys, weights), "first")
    keys.copy_(torch.tensor([0, 0, 0, 1, 0, 0, 0]))
    same(program(x, keys, weights), _experts_by_torch(x, keys, weights), "written to")
    other = torch.tensor([3, 3, 3, 3, 3, 2, 1])
    same(program(x, other, weights), _experts_by_torch(x, other, weights), "other keys")
    fewer = torch.tensor([1, 0])
    same(program(x[:2], fewer, weights), _experts_by_torch(x[:2], fewer, weights), "fewer")
    same(program(x, keys, weights), _experts_by_torch(x, keys, weights), "the first keys again")


def _twice(fusion: ir.Fusion) -> tuple[TensorView, ...]:
    """Two groupings in one fusion, the second of what the first made."""
    x, first, second = (fusion.input((None,), d) for d in (FLOAT, LONG, LONG))
    a, p = ops.group_by(first, 3)
    once = ops.index(x, p)
    b, q = ops.group_by(ops.index(second, p), 4)
    rows = nested(ops.index(once, q), b)
    return nested(once, a), rows, ops.cumsum(rows, 1), ops.amax(nested(once, a), 1)


def _twice_by_torch(x: Tensor, first: Tensor, second: Tensor) -> tuple[Any, ...]:
    a, p = grouped(first, 3)
    b, q = grouped(second[p], 4)
    once, rows = rows_of(x[p], a), rows_of(x[p][q], b)
    largest = [r.amax(0) if len(r) else torch.tensor(float("-inf"), dtype=FLOAT) for r in once]
    return once, rows, [r.cumsum(0) for r in rows], torch.stack(largest)


def test_two_groupings_in_one_fusion() -> None:
    fusion = record(_twice)
    for where, program in every_plan(fusion, "twice"):
        for size in (9, 0, 1, 23):
            generator = torch.Generator().manual_seed(size)
            x = torch.randn(size, dtype=FLOAT, generator=generator)
            first, second = (torch.randint(0, n, (size,), generator=generator) for n in (3, 4))
            same(program(x, first, second), _twice_by_torch(x, first, second), f"{size}: {where}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_computed_offsets_that_are_used_twice(backend: str) -> None:
    """Two tensors over one computed structure can be added, and both are ragged results."""

    def make(f: ir.Fusion) -> tuple[TensorView, ...]:
        x, y, keys = f.input((None, 2), FLOAT), f.input((None, 2), FLOAT), f.input((None,), LONG)
        offsets, permutation = ops.group_by(keys, 3)
        a, b = nested(ops.index(x, permutation), offsets), nested(ops.index(y, permutation), offsets)
        return ops.add(a, b), ops.sub(ops.softmax(a, 1), b), ops.sum(a, 0)

    x, y = torch.randn(6, 2, dtype=FLOAT), torch.randn(6, 2, dtype=FLOAT)
    keys = torch.tensor([2, 2, 0, 2, 0, 2])
    offsets, permutation = grouped(keys, 3)
    a, b = rows_of(x[permutation], offsets), rows_of(y[permutation], offsets)
    across = torch.stack([sum(r[k] for r in a if len(r) > k) for k in range(4)])  # type: ignore[misc]
    want = ([p + q for p, q in zip(a, b, strict=True)], [torch.softmax(p, 0) - q for p, q in zip(a, b, strict=True)], across)
    same(record(make).compile(backend)(x, y, keys), want, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_of_rows_that_the_program_computes(backend: str) -> None:
    """A stage that uses only how long rows are, and none of their elements, follows the one that computes the offsets."""

    def make(f: ir.Fusion) -> tuple[TensorView, ...]:
        x, keys = f.input((None, 2), FLOAT), f.input((None,), LONG)
        offsets, permutation = ops.group_by(keys, 3)
        rows = nested(ops.index(x, permutation), offsets)
        return rows - ops.mean(rows, 1, keepdim=True), ops.lengths(rows) * 2

    x, keys = torch.randn(6, 2, dtype=FLOAT), torch.tensor([2, 2, 0, 2, 0, 2])
    offsets, permutation = grouped(keys, 3)
    rows = rows_of(x[permutation], offsets)
    program = record(make).compile(backend)
    same(program(x, keys), ([row - row.mean(0) if len(row) else row for row in rows], offsets.diff() * 2), backend)
    alone = record(lambda f: ops.lengths(nested(f.input((None,), FLOAT), ops.group_by(f.input((None,), LONG), 3)[0])))
    same(alone.compile(backend)(x[:, 0], keys), offsets.diff(), f"{backend}, lengths alone")


@pytest.mark.parametrize("backend", BACKENDS)
def test_computed_offsets_equal_given_ones(backend: str) -> None:
    """The same offsets, computed and given, make the same rows, and rows of both can be added."""

    def make(f: ir.Fusion) -> tuple[TensorView, ...]:
        x, keys, given = f.input((None,), FLOAT), f.input((None,), LONG), f.input((None,), LONG)
        offsets, permutation = ops.group_by(keys, 3)
        moved = ops.index(x, permutation)
        return ops.add(nested(moved, offsets), nested(moved, given)), ops.cumsum(nested(moved, given), 1)

    x, keys = torch.arange(5.0, dtype=FLOAT), torch.tensor([2, 0, 2, 0, 0])
    offsets, permutation = grouped(keys, 3)
    rows = rows_of(x[permutation], offsets)
    program = record(make).compile(backend)
    same(program(x, keys, offsets), ([2 * r for r in rows], [r.cumsum(0) for r in rows]), backend)
    with pytest.raises(Exception, match=r"the rows differ: lengths"):
        program(x, keys, torch.tensor([0, 2, 2, 5]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, LONG])
def test_index_add(dtype: torch.dtype, backend: str) -> None:
    program = record(lambda f: ops.index_add(f.input((None, 3), dtype), f.input((None,), LONG), 5)).compile(backend)
    for listed in ([], [4], [0] * 8, [3, 1, 3, 1, 3, 0]):
        keys = torch.tensor(listed, dtype=LONG)
        x = torch.arange(len(listed) * 3).reshape(-1, 3).to(dtype)
        same(program(x, keys), torch.zeros(5, 3, dtype=dtype).index_add(0, keys, x), str(listed))


def test_sums_of_short_rows_are_stored_for_what_reads_them() -> None:
    """The sums are cut to those that exist by a phase that does not run over rows."""
    program = record(lambda f: ops.index_add(f.input((None, 3), FLOAT), f.input((None,), LONG), 5)).compile(
        "triton", "persistent_dynamic"
    )
    x, keys = torch.randn(8, 3, dtype=FLOAT), torch.tensor([3, 1, 3, 1, 3, 0, 3, 4])
    same(program(x, keys), torch.zeros(5, 3, dtype=FLOAT).index_add(0, keys, x), "short rows")
    kernels = program.source(x, keys).split("@triton.jit(do_not")[1:]
    assert len(kernels) > 2
    # A launch for short rows and pieces of long ones calls a function for each.
    assert all("tl.store" in kernel or "if (first < step):" in kernel for kernel in kernels)


@pytest.mark.parametrize("backend", BACKENDS)
def test_topk_and_the_routing_it_decides(backend: str) -> None:
    """A gate chooses two experts for each token; every choice is routed, and what comes back is weighted and summed."""

    def make(f: ir.Fusion) -> tuple[TensorView, ...]:
        x, gate, scale = f.input((None, 2), FLOAT), f.input((None, 4), FLOAT), f.input((4, 1, 2), FLOAT)
        weights, experts = ops.topk(ops.softmax(gate, -1), 2)
        offsets, permutation = ops.group_by(ops.flatten(experts), 4)
        tokens = ops.floor_divide(permutation, 2)
        done = ops.mul(nested(ops.index(x, tokens), offsets), scale)
        back = ops.unflatten(ops.index(ops.as_flattened(done), ops.invert(permutation)), 0, (-1, 2))
        return ops.sum(ops.mul(back, ops.unsqueeze(weights, 2)), 1), experts

    program = record(make).compile(backend)
    for size in (5, 0, 1, 8):
        generator = torch.Generator().manual_seed(size)
        x, gate, scale = (torch.randn(*s, dtype=FLOAT, generator=generator) for s in ((size, 2), (size, 4), (4, 1, 2)))
        weights, experts = torch.topk(torch.softmax(gate, -1), 2)
        same(program(x, gate, scale), ((x[:, None] * scale[experts, 0] * weights[..., None]).sum(1), experts), f"{size} tokens")


@pytest.mark.parametrize("backend", BACKENDS)
def test_topk_of_any_dim(backend: str) -> None:
    x = torch.randperm(60, generator=torch.Generator().manual_seed(1)).reshape(3, 4, 5).float()
    for dim, k in ((0, 3), (1, 2), (2, 5), (-1, 1)):
        program = record(lambda f, k=k, d=dim: ops.topk(f.input((3, 4, 5), torch.float32), k, d)).compile(backend)
        same(program(x), tuple(torch.topk(x, k, dim)), f"dim {dim}")


# --- compositions ------------------------------------------------------------------------------------------------------


def _chain(fusion: ir.Fusion) -> TensorView:
    """Looked up, nested, normalised, joined, scanned."""
    table, tokens, offsets = fusion.input((None, 3), FLOAT), fusion.input((None,), INT), fusion.input((None,), LONG)
    rows = ops.softmax(nested(ops.index(table, tokens), offsets), 1)
    return ops.cumsum(ops.cat([rows, ops.flip(rows, 1), ops.slice(rows, 1, 1)], 1), 1)


def _chain_by_torch(table: Tensor, tokens: Tensor, offsets: Tensor) -> list[Tensor]:
    rows = [torch.softmax(r, 0) for r in rows_of(at(table, tokens), offsets)]
    return [torch.cat([r, r.flip(0), r[1:]]).cumsum(0) for r in rows]


LENGTHS = [[3, 0, 7, 1], [], [0, 0, 0], [24], [2, 3, 5, 7, 11], [1, 1, 1, 1]]


def _lookup(lengths: list[int], entries: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(entries, 3, dtype=FLOAT, generator=generator)
    tokens = torch.randint(-2, entries + 2, (sum(lengths),), generator=generator).to(INT)
    return table, tokens, torch.tensor([0, *itertools.accumulate(lengths)])


SORTED: dict[str, tuple[tuple[int, ...], Callable[[Any], Any], Callable[[Tensor], Tensor], int]] = {
    "merged": ((6, 4, 5), lambda x: ops.flatten(x, 0, 1), lambda x: x.flatten(0, 1), 1),
    "merged twice": ((3, 4, 5), ops.flatten, torch.flatten, 1),
    "split": ((6, 4), lambda x: ops.unflatten(x, 0, (2, 3)), lambda x: x.view(2, 3, 4), 2),
    "transposed": ((6, 4), lambda x: ops.permute(x, 1, 0), lambda x: x.t(), 2),
    "transposed, merged": (
        (6, 4, 5),
        lambda x: ops.flatten(ops.permute(x, 1, 0, 2), 0, 1),
        lambda x: x.transpose(0, 1).flatten(0, 1),
        2,
    ),
}


@pytest.mark.parametrize("name", SORTED)
def test_views_in_memory_order_are_sorted_without_a_copy(name: str) -> None:
    shape, view, on_torch, stages = SORTED[name]
    program = record(lambda f: ops.sort(view(f.input(shape, torch.float32)), -1)).compile("cpp")
    x = torch.randn(shape)
    same(program(x), tuple(torch.sort(on_torch(x), dim=-1, stable=True)), name)
    assert len(program.stages) == stages


@pytest.mark.parametrize("backend", BACKENDS)
def test_topk_of_rows_reads_them_in_place(backend: str) -> None:
    program = record(lambda f: ops.topk(nested(f.input((None, 6), torch.float32), f.input((None,), torch.int64)), 2)).compile(
        backend
    )
    x, offsets = torch.randn(9, 6), torch.tensor([0, 4, 4, 9])
    want = torch.topk(x, 2)
    same(program(x, offsets), tuple(rows_of(t, offsets) for t in want), "topk")
    assert len(program.stages) == 1


def test_a_chain_of_lookups_joins_and_scans() -> None:
    for where, program in every_plan(record(_chain), "chain"):
        for k, lengths in enumerate(LENGTHS):
            args = _lookup(lengths, 6, k)
            with one_thread():
                same(program(*args), _chain_by_torch(*args), f"{lengths}: {where}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_indices_of_one_call_are_not_those_of_the_next(backend: str) -> None:
    """One tensor of offsets, whose rows are remembered; indices and values change behind it."""
    program = record(_chain).compile(backend)
    table, tokens, offsets = _lookup([3, 0, 4], 6, 0)
    for seed in range(3):
        _, others, _ = _lookup([3, 0, 4], 6, seed)
        same(program(table, others, offsets), _chain_by_torch(table, others, offsets), f"indices {seed}")
    tokens.copy_(torch.arange(7))
    same(program(table, tokens, offsets), _chain_by_torch(table, tokens, offsets), "written to")
    offsets.copy_(torch.tensor([0, 1, 6, 7]))
    same(program(table, tokens, offsets), _chain_by_torch(table, tokens, offsets), "offsets written to")


@pytest.mark.parametrize("backend", on_backends("rows that are picked follow their indices"))
def test_rows_that_are_picked_follow_their_indices(backend: str) -> None:
    """Lengths of the result depend on indices, not on offsets alone."""
    program = record(lambda f: ops.index(nested(f.input((None,), FLOAT), f.input((None,), LONG)), f.input((None,), LONG)))
    compiled = program.compile(backend)
    x, offsets = torch.arange(6.0, dtype=FLOAT), torch.tensor([0, 1, 4, 4, 6])
    rows = rows_of(x, offsets)
    picked = torch.tensor([1, 0, 1])
    for listed in ([1, 0, 1], [3, 3, 2], [2, 2, 2], [0, 1, 3]):
        picked.copy_(torch.tensor(listed))
        same(compiled(x, offsets, picked), [rows[k] for k in listed], f"{listed}, written to")
        same(compiled(x, offsets, torch.tensor(listed)), [rows[k] for k in listed], f"{listed}, a tensor of its own")
    same(compiled(x, offsets, torch.tensor([], dtype=LONG)), [], "none")


@pytest.mark.parametrize("backend", on_backends("padding slicing and joining undo each other"))
def test_padding_slicing_and_joining_undo_each_other(backend: str) -> None:
    def make(f: ir.Fusion) -> tuple[TensorView, ...]:
        x = nested(f.input((None, 2), FLOAT), f.input((None,), LONG))
        both = ops.cat([x, ops.mul(x, 2.0)], 0)
        return ops.slice(ops.pad(x, 1, 2, 1, 7.0), 1, 2, -1), both, ops.slice(ops.sum(both, 1), 0, 1), ops.select(both, 0, 2)

    program = record(make).compile(backend)
    for lengths in ([3, 0, 2], [0, 0], [4]):
        offsets = torch.tensor([0, *itertools.accumulate(lengths)])
        x = torch.randn(sum(lengths), 2, dtype=FLOAT)
        rows = rows_of(x, offsets)
        both = [*rows, *(2 * r for r in rows)]
        sums = torch.stack([r.sum(0) for r in both])[1:]
        picked = both[2] if len(both) > 2 else None
        got = program(x, offsets) if picked is not None else None
        if got is not None:
            same(got, (rows, both, sums, picked), f"{lengths}")


@pytest.mark.parametrize("backend", on_backends("a row that is selected"))
def test_a_row_that_is_selected(backend: str) -> None:
    x, offsets = torch.arange(12.0, dtype=FLOAT).reshape(6, 2), torch.tensor([0, 3, 3, 6])
    rows = rows_of(x, offsets)
    for k in (0, 1, 2, -1, -2, -3):
        program = record(lambda f, k=k: ops.select(nested(f.input((None, 2), FLOAT), f.input((None,), LONG)), 0, k))
        same(program.compile(backend)(x, offsets), rows[k], f"row {k}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_one_component_that_is_known(strategy: str | None, backend: str) -> None:
    """The loop over components has one pass; what is kept for a row still has its place."""

    def make(f: ir.Fusion) -> tuple[TensorView, ...]:
        x = nested(f.input((None, 2), FLOAT), f.input((2,), LONG))
        return ops.softmax(x, 1), ops.sum(x, 1), ops.sum(x, 0), ops.cumsum(x, 1)

    for size in (5, 0):
        x = torch.randn(size, 2, dtype=FLOAT)
        want = ([torch.softmax(x, 0)], x.sum(0, keepdim=True), x, [x.cumsum(0)])
        same(record(make).compile(backend, strategy)(x, torch.tensor([0, size])), want, f"{size}")


VIEWS: dict[str, Callable[[ir.Fusion], Any]] = {
    "by computed offsets": lambda f: ops.as_nested(f.input((None, 2), FLOAT), ops.mul(f.input((None,), LONG), 1)),
    "by computed lengths": lambda f: ops.as_nested(f.input((None, 2), FLOAT), lengths=_differences(f.input((None,), LONG))),
    "positions and features as one": lambda f: ops.flatten(nested(f.input((None, 2), FLOAT), f.input((None,), LONG)), 1, 2),
    "positions and features as one, copied": lambda f: ops.set(
        ops.flatten(nested(f.input((None, 2), FLOAT), f.input((None,), LONG)), 1, 2)
    ),
}


def _differences(offsets: TensorView) -> TensorView:
    return ops.sub(ops.slice(offsets, 0, 1), ops.slice(offsets, 0, None, -1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(VIEWS))
def test_views_as_results(name: str, backend: str) -> None:
    """A result that nothing computes, only its structure is new."""
    program = record(VIEWS[name]).compile(backend)
    for lengths in ([3, 0, 2], [], [0], [4]):
        x, offsets = torch.randn(sum(lengths), 2, dtype=FLOAT), torch.tensor([0, *itertools.accumulate(lengths)])
        rows = rows_of(x, offsets)
        same(program(x, offsets), [r.reshape(-1) for r in rows] if "as one" in name else rows, f"{name} on {lengths}")


# --- the fusions themselves --------------------------------------------------------------------------------------------

FUSIONS: dict[str, Callable[[ir.Fusion], Any]] = {
    "experts": lambda f: _experts(f, 4),
    "twice": _twice,
    "chain": _chain,
    "picked rows": lambda f: ops.index(nested(f.input((None,), FLOAT), f.input((None,), LONG)), f.input((None,), LONG)),
    "across": lambda f: ops.layer_norm(nested(f.input((None, 2), FLOAT), f.input((None,), LONG)), 0),
    "index_add": lambda f: ops.index_add(f.input((None, 2), FLOAT), f.input((None,), LONG), 3),
    "argmax": lambda f: ops.max(nested(f.input((None, 2), FLOAT), f.input((None,), LONG)), 1),
    "cat": lambda f: ops.cat([nested(f.input((None,), FLOAT), f.input((None,), LONG)) for _ in range(2)], 0),
}


def _call(name: str) -> tuple[Tensor, ...]:
    x, keys = torch.randn(7, 3, dtype=FLOAT), torch.tensor([2, 0, 1, 2, 2, 0, 1])
    offsets = torch.tensor([0, 2, 2, 7])
    return {
        "experts": (x, keys, torch.randn(4, 3, 2, dtype=FLOAT)),
        "twice": (x[:, 0].contiguous(), keys, keys.flip(0)),
        "chain": (x, keys.to(INT), offsets),
        "picked rows": (x[:, 0].contiguous(), offsets, keys),
        "across": (x[:, :2].contiguous(), offsets),
        "index_add": (x[:, :2].contiguous(), keys),
        "argmax": (x[:, :2].contiguous(), offsets),
        "cat": (x[:, 0].contiguous(), offsets, x[:5, 1].contiguous(), torch.tensor([0, 4, 5])),
    }[name]


def _exact(a: Any, b: Any) -> None:
    for p, q in zip(a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,), strict=True):
        if isinstance(p, JaggedTensor):
            assert torch.equal(p.offsets, q.offsets)
            p, q = p.values, q.values
        torch.testing.assert_close(p, q, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FUSIONS)
def test_clones_are_equal_and_compute_the_same(name: str) -> None:
    fusion, again, args = record(FUSIONS[name]), record(FUSIONS[name]), _call(name)
    clone = fusion.clone()
    clone.verify()
    assert fusion == again == clone and str(clone) == str(fusion)
    assert fusion.key() == clone.key() and fusion.simplified() == fusion.simplified().simplified()
    want = fusion.compile("cpp")(*args)
    for other in (clone, fusion.simplified(), clone.simplified().clone()):
        _exact(other.compile("cpp")(*args), want)
        _exact(other.evaluate(*args), fusion.evaluate(*args))


def test_different_fusions_differ() -> None:
    keys = {record(make).key(): name for name, make in FUSIONS.items()}
    assert len(keys) == len(FUSIONS)
    near = [record(lambda f, n=n: ops.group_by(f.input((None,), LONG), n)) for n in (3, 4)]
    near += [record(lambda f, k=k: ops.slice(nested(f.input((None,), FLOAT), f.input((None,), LONG)), 1, k)) for k in (1, 2, -1)]
    near += [
        record(lambda f, v=v: ops.pad(nested(f.input((None,), FLOAT), f.input((None,), LONG)), 1, 1, 0, v)) for v in (0.0, 1.0)
    ]
    near += [
        record(lambda f, g=g: g(nested(f.input((None,), FLOAT), f.input((None,), LONG)), 1)) for g in (ops.cumsum, ops.cumprod)
    ]
    near += [
        record(lambda f, g=g: g(nested(f.input((None,), FLOAT), f.input((None,), LONG)), 1)) for g in (ops.argmax, ops.argmin)
    ]
    near += [record(lambda f, d=d: ops.index(f.input((4, 4), FLOAT), f.input((4,), LONG), d)) for d in (0, 1)]
    assert len({f.key() for f in near}) == len(near)


def test_simplifying_keeps_the_routing_that_rows_need() -> None:
    def make(f: ir.Fusion) -> TensorView:
        x, keys = f.input((None,), FLOAT), f.input((None,), LONG)
        offsets, permutation = ops.group_by(keys, 3)
        ops.group_by(keys, 5)
        ops.cumsum(nested(x, offsets), 1)
        return ops.sum(nested(ops.index(x, permutation), offsets), 1)

    fusion = record(make)
    simple = fusion.simplified()
    assert len(simple.definitions) < len(fusion.definitions)
    x, keys = torch.arange(4.0, dtype=FLOAT), torch.tensor([1, 0, 1, 1])
    same(simple.evaluate(x, keys), torch.tensor([1.0, 5.0, 0.0], dtype=FLOAT), "simplified")


# --- random ------------------------------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=200 if FULL else 15)
@hypothesis.given(st.data())
def test_random_routing_agrees_with_torch(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    size = data.draw(st.integers(0, 20))
    listed = data.draw(st.lists(st.integers(0, count - 1), min_size=size, max_size=size))
    backend = data.draw(st.sampled_from(["reference", "cpp"]))
    strategy = data.draw(st.sampled_from(STRATEGIES))
    x, keys = torch.arange(size * 3, dtype=FLOAT).reshape(size, 3).sin(), torch.tensor(listed, dtype=LONG)
    weights = torch.ones(count, 3, 2, dtype=FLOAT)
    program = record(lambda f: _experts(f, count)).compile(backend, strategy)
    same(program(x, keys, weights), _experts_by_torch(x, keys, weights), f"{backend} {strategy} {listed} of {count}")
