"""Loops that read, or overwrite, what other iterations store: refused if the result depends on the tile size or on the order of
programs; right, and not even tested, if every iteration keeps to its own elements.

In: kernels of a few lines. Out: a failure for one that gives a result where it should be refused, or the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.errors import KernelError, RaceError

Case = tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]


def matrix(rows: int = 3, columns: int = 40) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns)


def ragged() -> JaggedTensor:
    torch.manual_seed(0)
    return JaggedTensor.from_lengths(torch.randn(12), [4, 0, 5, 3])


def element(x: Any, at: Any) -> Any:
    return x[at]


def shifted(x: Any) -> Any:
    for b in hl.grid(x.size(0)):
        for k in hl.tile(x.size(1) - 1):
            x[b, k.index + 1] = x[b, k]
    return x


def by_another_name(x: Any) -> Any:
    for b in hl.grid(x.size(0)):
        for k in hl.tile(x.size(1) - 1):
            y = x
            x[b, k.index + 1] = element(y, (b, k))
    return x


def while_it_holds(x: Any) -> Any:
    for b in hl.grid(x.size(0)):
        for k in hl.tile(x.size(1) - 1):
            i = 0
            while i < 2:
                x[b, k.index + 1] = x[b, k]
                i = i + 1
    return x


def added(x: Any) -> Any:
    for b in hl.grid(x.size(0)):
        for k in hl.tile(x.size(1) - 1):
            hl.atomic_add(x, [b, k.index + 1], x[b, k])
    return x


def stored_before_it_is_read(x: Any) -> Any:
    for b in hl.grid(x.size(0)):
        for k in hl.tile(x.size(1)):
            x[b, k] = x[b, k] * 2
            x[b, k] = x[b, k] + hl.load(x, [b, k.index + 1], extra_mask=k.index < x.size(1) - 1)
    return x


def in_rows(x: Any) -> Any:
    for b in hl.grid(x.num_rows):
        for k in hl.tile(x.max_length):
            x[b, k.index + 1] = x[b, k]
    return x


def overwritten(x: Any) -> Any:
    y = torch.zeros(x.size(0), x.size(1) + 1)
    for b in hl.grid(x.size(0)):
        for k in hl.tile(x.size(1)):
            y[b, k] = x[b, k]
            y[b, k.index + 1] = x[b, k] * 2
    return y


def counted(x: Any, i: Any) -> Any:
    for k in hl.tile(i.size(0)):
        hl.atomic_add(x, [i[k]], hl.zeros([k]) + 1)
        i[k] = x[i[k]].to(torch.int64)
    return i


def gathered(x: Any, i: Any) -> Any:
    for k in hl.tile(i.size(0)):
        x[k] = x[i[k]]
    return x


DEPENDENT: dict[str, Case] = {
    "shifted": (shifted, lambda: (matrix(),)),
    "by_another_name": (by_another_name, lambda: (matrix(),)),
    "while_it_holds": (while_it_holds, lambda: (matrix(),)),
    "added": (added, lambda: (matrix(),)),
    "stored_before_it_is_read": (stored_before_it_is_read, lambda: (matrix(),)),
    "in_rows": (in_rows, lambda: (ragged(),)),
    "overwritten": (overwritten, lambda: (matrix(),)),
    "counted": (counted, lambda: (torch.zeros(4), torch.arange(40) % 4)),
    "gathered": (gathered, lambda: (torch.arange(40.0), torch.arange(40).flip(0))),
}


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", DEPENDENT)
def test_a_result_that_depends_on_the_tile_size(name: str, backend: str) -> None:
    function, given = DEPENDENT[name]
    what = "overwrite" if name == "overwritten" else "read"
    with pytest.raises(KernelError, match=rf"iterations of the tile of line \d+ {what} elements of \w+ that other .* store to"):
        serrate.kernel(function).on(backend)(*given())


def next_of_the_grid(x: Any) -> Any:
    for t in hl.tile(x.size(0) - 1):
        x[t.index + 1] = x[t]
    return x


def next_of_the_inner_grid(x: Any) -> Any:
    for b, k in hl.grid([x.size(0), x.size(1) - 1]):
        x[b, k + 1] = x[b, k]
    return x


def next_of_rows(x: Any) -> Any:
    for b, k in hl.grid([x.num_rows, x.max_length]):
        x[b, k + 1] = x[b, k]
    return x


def the_first(x: Any) -> Any:
    for t in hl.tile(x.size(0)):
        x[t] = x[t] - x[0]
    return x


def after_a_test(x: Any) -> Any:
    for t in hl.grid(x.size(0)):
        if t > 0:
            x[t] = x[t] + x[t - 1]
    return x


def transposed(x: Any) -> Any:
    for b in hl.grid(x.size(0)):
        for k in hl.tile(x.size(1)):
            x[b, k] = x[k, b]
    return x


def one_counter(x: Any) -> Any:
    for _ in hl.grid(x.size(0)):
        x[0] = x[0] + 1
    return x


RACING: dict[str, Case] = {
    "next_of_the_grid": (next_of_the_grid, lambda: (torch.arange(40.0),)),
    "next_of_the_inner_grid": (next_of_the_inner_grid, lambda: (matrix(),)),
    "next_of_rows": (next_of_rows, lambda: (ragged(),)),
    "the_first": (the_first, lambda: (torch.arange(1.0, 41),)),
    "after_a_test": (after_a_test, lambda: (torch.arange(40.0),)),
    "transposed": (transposed, lambda: (matrix(9, 9),)),
    "one_counter": (one_counter, lambda: (torch.zeros(4),)),
}


@pytest.mark.parametrize("name", RACING)
def test_programs_that_read_what_others_store(name: str) -> None:
    function, given = RACING[name]
    with pytest.raises(RaceError, match=r"run in any order, and one reads what another stores to x in line \d+"):
        serrate.kernel(function)(*given())


@pytest.mark.parametrize("name", ["next_of_the_grid", "next_of_the_inner_grid", "the_first", "after_a_test", "transposed"])
def test_the_checked_interpreter_sees_them_too(name: str) -> None:
    function, given = RACING[name]
    with pytest.raises(RaceError, match=r"program \d+ (stores and program \d+ reads|reads and program \d+ stores) one element"):
        serrate.kernel(function).interpreted(tile=1)(*given())


def test_the_checked_interpreter_sees_reads_at_indices_from_memory() -> None:
    """They depend on the data, so the compiler does not refuse them."""

    @serrate.kernel
    def gather(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        for t in hl.grid(x.size(0)):
            x[t] = x[i[t]]
        return x

    @serrate.kernel
    def count(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(i.size(0))
        for t in hl.grid(i.size(0)):
            hl.atomic_add(x, [i[t]], 1.0)
            out[t] = x[i[t]]
        return out

    for kernel in (gather, count):
        with pytest.raises(RaceError):
            kernel.interpreted(tile=1)(torch.arange(8.0), torch.arange(8).flip(0) // 2)
        kernel.interpreted(tile=1)(torch.arange(8.0), torch.arange(8))


def in_place(x: Any) -> Any:
    for b in hl.grid(x.size(0)):
        for k in hl.tile(x.size(1)):
            x[b, k] = x[b, k] * 2
    return x


def in_place_twice(x: Any) -> Any:
    for b, k in hl.tile([x.size(0), x.size(1)]):
        x[b, k] = x[b, k] * 4
        x[b, k] = x[b, k] / 2
    return x


def in_place_flat(x: Any) -> Any:
    rows, n = x.shape
    flat = x.flatten()
    for b in hl.grid(rows):
        for k in hl.tile(n):
            flat[b * n + k.index] = flat[b * n + k.index] * 2
    return flat.view(rows, n)


def in_place_by_indices(x: Any) -> Any:
    order = torch.arange(x.size(0)).flip(0)
    for t in hl.tile(x.size(0)):
        x[order[t], :] = x[order[t], :] * 2
    return x


def within_one_program(x: Any) -> Any:
    held = torch.zeros_like(x)
    for b in hl.grid(x.size(0)):
        for k in hl.tile(x.size(1)):
            held[b, k] = x[b, k]
        for k in hl.tile(x.size(1)):
            x[b, k] = held[b, x.size(1) - 1 - k.index] * 2
    return x.flip(1)


OWN: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (in_place, in_place_twice, in_place_flat, in_place_by_indices, within_one_program)
}


@pytest.mark.parametrize("name", OWN)
def test_iterations_that_keep_to_their_own_elements_need_no_test(name: str) -> None:
    kernel = serrate.kernel(OWN[name]).on("cpp")
    torch.testing.assert_close(kernel(matrix()), matrix() * 2)
    assert "tested" not in str(kernel.variants(matrix())[0].plan)


def even_and_odd(x: Any) -> Any:
    for t in hl.tile(x.size(0) // 2):
        x[t.index * 2 + 1] = x[t.index * 2]
    return x


def both_halves(x: Any) -> Any:
    n = x.size(0) // 2
    for t in hl.tile(n):
        x[t.index + n] = x[t]
    return x


def all_but_the_first(x: Any) -> Any:
    for t in hl.tile(1, x.size(0)):
        x[t] = x[t] - x[0]
    return x


def masked(x: Any) -> Any:
    for t in hl.tile(x.size(0)):
        hl.store(x, [t], x[t] - x[0], extra_mask=t.index > 0)
    return x


def pairs(x: Any) -> Any:
    for t in hl.grid(x.size(0)):
        if t % 2 == 0:
            x[t] = x[t + 1]
    return x


def blocks(x: Any) -> Any:
    source, target = torch.arange(0, 20), torch.arange(20, 40)
    for t in hl.tile(20):
        x[target[t]] = x[source[t]]
    return x


def recurrence(x: Any) -> Any:
    for _ in hl.grid(1):
        for t in hl.tile(x.size(0) - 1, block_size=1):
            x[t.index + 1] = x[t] + x[t.index + 1]
    return x


x = torch.arange(1.0, 41)
APART: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "even_and_odd": (even_and_odd, x[::2].repeat_interleave(2)),
    "both_halves": (both_halves, x[:20].repeat(2)),
    "all_but_the_first": (all_but_the_first, torch.cat([x[:1], x[1:] - 1])),
    "masked": (masked, torch.cat([x[:1], x[1:] - 1])),
    "pairs": (pairs, x[1::2].repeat_interleave(2)),
    "blocks": (blocks, x[:20].repeat(2)),
    "recurrence": (recurrence, x.cumsum(0)),
}


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", APART)
def test_elements_that_no_other_iteration_stores_may_be_read(name: str, backend: str) -> None:
    function, wanted = APART[name]
    torch.testing.assert_close(serrate.kernel(function).on(backend)(x.clone()), wanted)
    torch.testing.assert_close(serrate.kernel(function).interpreted(tile=1)(x.clone()), wanted)
