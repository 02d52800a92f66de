"""No call waits for the GPU: operators, traced functions and kernels with every host synchronisation an error, once they are
built; and their results are those of a CPU. Without a GPU, reading lengths on the host is the error."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

import serrate.language as hl
from benchmarks import gpu_timing, steps
from serrate import JaggedTensor, Kernel, jit, kernel, settings
from serrate.errors import SyncError
from serrate.tensor import Structure, no_sync
from tests.conftest import INTERPRETED
from tests.engine.test_eager_gpu import OPERATIONS, ROWS
from tests.language.kinds import LENGTHS
from tests.language.on_device import moved
from tests.language.test_examples import NAMES, example
from tests.oracle.operators import BINARY, REDUCTIONS, UNARY
from tests.test_devices import EAGER

KNOWN = [4, 0, 3, 9]
ON_CPU = pytest.mark.skipif(not INTERPRETED, reason="Triton runs on a CPU only under its interpreter")
BACKENDS = pytest.mark.parametrize("backend", ["cpp", pytest.param("triton", marks=ON_CPU)])


def no_synchronisation() -> AbstractContextManager[None]:
    torch.cuda.synchronize()
    return gpu_timing.no_synchronisation(torch.device("cuda"))


def rows(device: str) -> JaggedTensor:
    """Rows of which the caller knows the longest and the shortest, which shapes of padded results need."""
    values = torch.rand(sum(KNOWN), 4, generator=torch.Generator().manual_seed(0)) + 0.5
    offsets = torch.tensor([0, 4, 4, 7, 16])
    return JaggedTensor.from_csr(values.to(device), offsets.to(device), max_length=9, min_length=0)


def plain(result: Any) -> Any:
    """Results as tensors on a CPU."""
    if isinstance(result, tuple | list):
        return [plain(each) for each in result]
    if isinstance(result, JaggedTensor):
        return [result.values.cpu(), *(buffer.cpu() for buffer in result.structure.buffers())]
    return result.cpu() if isinstance(result, torch.Tensor) else result


def agree(operation: Callable[[Any], Any]) -> None:
    here, there = rows("cpu"), rows("cuda")
    want = plain(operation(here))
    operation(there)
    with no_synchronisation():
        got = operation(there)
    torch.testing.assert_close(plain(got), want, rtol=1e-4, atol=1e-5, equal_nan=True)
    # New offsets and an old program: what an optimiser step meets.
    again = rows("cuda")
    with no_synchronisation():
        got = operation(again)
    torch.testing.assert_close(plain(got), want, rtol=1e-4, atol=1e-5, equal_nan=True)


OPERATORS = {**EAGER, **ROWS, **{name: OPERATIONS[name] for name in ("sum", "last", "padded", "in place", "cat")}}
OPERATORS |= {f"{name} of rows": (lambda x, f=f: f(x, 1)) for name, f in REDUCTIONS.items()}
HOST = ("range", "picked", "topk", "topk of rows")
"""Rows by number come from the host, and so does the size of results with some of each row."""
ON_DEVICE = [name for name in OPERATORS if name not in HOST]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_operators(name: str) -> None:
    agree(OPERATORS[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ON_DEVICE)
def test_operators_read_no_lengths(name: str) -> None:
    want = OPERATORS[name](rows("cpu"))
    with no_sync(strict=True):
        got = OPERATORS[name](rows("cpu"))
    torch.testing.assert_close(plain(got), plain(want), rtol=0, atol=0, equal_nan=True)


@kernel
def doubled_products(x: JaggedTensor, out: JaggedTensor, most: int) -> JaggedTensor:
    """Twice the elements of rows by columns, of which the kernel is told how many there may be."""
    for tile_b, tile_i, tile_j in hl.tile([x.num_groups, most, most]):
        out[tile_b, tile_i, tile_j] = x[tile_b, tile_i, tile_j] * 2
    return out


@kernel
def edges(x: JaggedTensor) -> torch.Tensor:
    """The last position of the longest row, and the second to last, counted from the end of the longest."""
    out = torch.empty([x.num_rows, 2], dtype=x.dtype, device=x.device)
    for tile_b in hl.tile(x.num_rows):
        out[tile_b, 0] = x[tile_b, -1, 0]
        out[tile_b, 1] = x[tile_b, -2, 0]
    return out


def of_lengths(*lengths: int, seed: int = 0) -> JaggedTensor:
    """Rows of which nothing is known but their offsets."""
    values = torch.rand(sum(lengths), 3, generator=torch.Generator().manual_seed(seed))
    return JaggedTensor.from_csr(values, torch.tensor([0, *accumulate(lengths)]), validate=False)


@BACKENDS
def test_a_kernel_indexes_new_rows_without_reading_their_lengths(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERRATE_BACKEND", backend)
    settings.reload()
    for lengths in ((4, 1, 3), (2, 7, 1, 5), (90,)):
        x = of_lengths(*lengths)
        want = torch.stack([row.mean(0) for row in x.values.split(lengths)])
        with no_sync(strict=True):
            got = steps.pooled(x)
        torch.testing.assert_close(got, want)


def test_a_kernel_indexes_rows_by_columns_without_reading_their_numbers() -> None:
    for k, shapes in enumerate(([(1, 1)], [(2, 3), (0, 9), (4, 1)], [(1, 5), (3, 2)])):
        parts = [torch.rand(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
        values = torch.cat([part.flatten() for part in parts])
        # The program is built for the first of them.
        with no_sync(strict=True) if k else nullcontext():
            rows = Structure.from_lengths(torch.tensor([n for n, _ in shapes]), validate=False)
            structure = rows.with_columns(torch.tensor([n for _, n in shapes]), validate=False)
            x = JaggedTensor(values, structure)
            got = doubled_products(x, x.with_values(torch.zeros_like(values)), 9)
        assert torch.equal(got.values, values * 2)


def test_indices_from_the_end_of_a_row_count_from_the_longest() -> None:
    x = of_lengths(2, 3, 3)
    rows = x.values[:, 0].split((2, 3, 3))
    want = torch.tensor([[0.0, rows[0][1]], [rows[1][2], rows[1][1]], [rows[2][2], rows[2][1]]])
    assert torch.equal(edges(x), want)
    with no_sync(strict=True), pytest.raises(SyncError, match="max_length"):
        edges(of_lengths(2, 3, 3))


@BACKENDS
def test_whole_rows_move_without_reading_their_lengths(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation has as many positions as its argument, which the host knows."""
    monkeypatch.setenv("SERRATE_BACKEND", backend)
    settings.reload()
    swapped = jit(lambda x: x.permute(1, 0, 2, 3))
    for lengths in ((1, 2, 3, 4), (2, 0, 4, 1, 7, 3), (5, 0, 0, 6)):
        x, parts = of_lengths(*lengths), len(lengths) // 2
        rows = x.values.split(lengths)
        with no_sync(strict=True):
            outer = torch.tensor([0, parts, 2 * parts])
            got = swapped(JaggedTensor.from_csr(x.values, (outer, x.offsets), validate=False))
        order = [half * parts + part for part in range(parts) for half in range(2)]
        assert torch.equal(got.values, torch.cat([rows[k] for k in order]))
        assert got.structure.offsets[0].tolist() == list(range(0, 2 * parts + 1, 2))
        assert got.structure.offsets[1].tolist() == [0, *accumulate(lengths[k] for k in order)]


@BACKENDS
def test_dense_queries_see_new_rows_of_keys_without_reading_their_lengths(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERRATE_BACKEND", backend)
    settings.reload()
    generator, attention = torch.Generator().manual_seed(0), functional.scaled_dot_product_attention
    decoded = jit(lambda q, k, v: attention(q, k.transpose(1, 2), v.transpose(1, 2)))
    for lengths, count in (((2, 5), 1), ((1, 3, 40), 1), ((7, 2), 3)):
        keys, values = (torch.randn(sum(lengths), 2, 8, generator=generator) for _ in range(2))
        queries = torch.randn(len(lengths), 2, count, 8, generator=generator)
        with no_sync(strict=True):
            k = JaggedTensor.from_csr(keys, torch.tensor([0, *accumulate(lengths)]), validate=False)
            got = decoded(queries, k, k.with_values(values))
        for q, own, rows in zip(queries, keys.split(lengths), values.split(lengths), strict=True):
            torch.testing.assert_close(got[0], attention(q, own.transpose(0, 1), rows.transpose(0, 1)))
            got = got[1:]


ELEMENTWISE = [name for name in UNARY if name not in ("bitwise_not", "~x")]
PAIRS = [name for name in BINARY if "bitwise" not in name and not set(name) & set("&|^") and name != "masked_fill"]
"""`masked_fill` takes a number."""


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, len(ELEMENTWISE), 8))
def test_elementwise_functions(first: int) -> None:
    functions = [UNARY[name] for name in ELEMENTWISE[first : first + 8]]
    agree(jit(lambda x: tuple(f(x) for f in functions)))


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, len(PAIRS), 8))
def test_functions_of_two(first: int) -> None:
    functions = [BINARY[name] for name in PAIRS[first : first + 8]]
    agree(jit(lambda x: tuple(f(x, x * 0.5 + 1.0) for f in functions)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bimodal", "giant", "zeros"])
@pytest.mark.parametrize("name", NAMES)
def test_example_kernels(name: str, kind: str) -> None:
    def on_device(kernel: Kernel) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            there = [moved(arg, "cuda") for arg in args]
            got = kernel(*there)
            # Kernels that ask for a number wait for it, as written, and so do results as long as the longest row.
            if ".item()" not in inspect.getsource(kernel.fn) and "max_length" not in _outside_loops(kernel):
                with no_synchronisation():
                    got = kernel(*there)
            return moved(got, "cpu")

        return run

    torch.manual_seed(0)
    example(name).check(LENGTHS[kind], on_device)


def _outside_loops(kernel: Kernel) -> str:
    """The lines of a kernel before its first loop."""
    return inspect.getsource(kernel.fn).partition("    for ")[0]
