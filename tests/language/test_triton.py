"""Tile kernels as Triton: every example under every strategy.

Expected values come from the check of each example, which is plain torch row by row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, settings
from tests.conftest import FULL
from tests.language.kinds import LENGTHS, ran
from tests.language.test_examples import NAMES, example

pytestmark = pytest.mark.triton
STRATEGIES = ("maskless", "masked", "persistent_dynamic cut")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str, strategy: str) -> None:
    torch.manual_seed(0)
    for kind in LENGTHS if FULL else ("giant",):
        example(name).check(LENGTHS[kind], lambda kernel: ran(kernel, f"triton {strategy}"))


def rows(lengths: list[int]) -> JaggedTensor:
    torch.manual_seed(0)
    return JaggedTensor.from_lengths(torch.randn(sum(lengths)), lengths)


def test_branches_and_loops_on_numbers_of_the_device() -> None:
    def halvings(x: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(x.num_rows, dtype=torch.int64)
        for b in hl.grid(x.num_rows):
            left, steps = x.lengths[b], 0
            while left > 1:
                left = left // 2
                steps = steps + 1
            if steps > 2:
                out[b] = steps
            else:
                out[b] = -steps
        return out

    lengths = [1, 0, 9, 40, 3]
    steps = [max(n.bit_length() - 1, 0) for n in lengths]
    found = serrate.kernel(halvings).on("triton")(rows(lengths))
    assert found.tolist() == [s if s > 2 else -s for s in steps]


@pytest.mark.parametrize("strategy", ["maskless", "masked"])
def test_rows_beside_the_first_and_the_last_are_not_read(strategy: str) -> None:
    """Their offsets must not be read before the loop either, where the number of whole blocks is computed."""

    def with_neighbours(x: JaggedTensor) -> torch.Tensor:
        out = torch.empty(x.num_rows)
        for b in hl.tile(x.num_rows):
            total = hl.zeros([b])
            for k in hl.tile(x.max_length):
                total = total + x[b.index - 1, k].sum(1) + 2 * x[b, k].sum(1) + x[b.index + 1, k].sum(1)
            out[b] = total
        return out

    x = rows([5, 0, 4, 2])
    sums = torch.stack([row.sum() for row in x.unbind()])
    wanted = 2 * sums
    wanted[1:] += sums[:-1]
    wanted[:-1] += sums[1:]
    torch.testing.assert_close(serrate.kernel(with_neighbours, strategy=strategy).on("triton")(x), wanted)


@pytest.mark.parametrize("backend", ["interpreted", "cpp", "triton"])
def test_scans_of_several_rows_at_once(backend: str) -> None:
    """A block may cover more rows than there are; the missing ones have no offsets to read."""

    def by_values(left: Any, starts: Any, right: Any, begins: Any) -> Any:
        return torch.where(begins, right, left + right), starts | begins

    def by_tuples(left: Any, right: Any) -> Any:
        return by_values(*left, *right)

    def segments(x: JaggedTensor, starts: JaggedTensor) -> tuple[JaggedTensor, JaggedTensor, JaggedTensor]:
        values, tuples, top = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
        for b in hl.tile(x.num_rows):
            for k in hl.tile(x.max_length, block_size=8):
                values[b, k], _ = hl.associative_scan(by_values, (x[b, k], starts[b, k]), 1)
                tuples[b, k], _ = hl.associative_scan(by_tuples, (x[b, k], starts[b, k]), 1)
                top[b, k] = hl.associative_scan(torch.maximum, x[b, k], 1)
        return values, tuples, top

    x = rows([5, 0, 4])
    starts = x.with_values(torch.tensor([1, 0, 0, 1, 0, 0, 0, 1, 0]).bool())
    wanted = torch.cat([part.cumsum(0) for part in x.values.split([3, 2, 2, 2])])
    kernel = serrate.kernel(segments, strategy="masked")
    values, tuples, top = (kernel.interpreted() if backend == "interpreted" else kernel.on(backend))(x, starts)
    torch.testing.assert_close(values.values, wanted)
    torch.testing.assert_close(tuples.values, wanted)
    torch.testing.assert_close(top.values, torch.cat([row.cummax(0).values for row in x.unbind() if len(row)]))


@pytest.mark.filterwarnings("error:tl.where with a non-boolean condition")
def test_bits_of_truth_values_are_truth_values() -> None:
    """Triton has deprecated integers as conditions."""

    def chosen(x: JaggedTensor) -> JaggedTensor:
        out = torch.empty_like(x)
        for b in hl.tile(x.num_rows):
            for k in hl.tile(x.max_length):
                v = x[b, k]
                both, any_, one = (v > -1) & (v < 1), (v < -1) | (v > 0), (v > 0) ^ (k.index < 2)[None, :]
                out[b, k] = torch.where(both, 1.0, 0.0) + torch.where(any_, 2.0, 0.0) + torch.where(one & True, 4.0, 0.0)
        return out

    x = rows([3, 0, 5])
    wanted = [
        1.0 * ((v > -1) & (v < 1)) + 2.0 * ((v < -1) | (v > 0)) + 4.0 * ((v > 0) ^ (torch.arange(len(v)) < 2)) for v in x.unbind()
    ]
    torch.testing.assert_close(serrate.kernel(chosen).on("triton")(x).values, torch.cat(wanted))


def test_a_value_that_is_read_twice_is_printed_once() -> None:
    """Printed as a tree, the last value would have 2^40 leaves."""

    def folded(x: JaggedTensor) -> JaggedTensor:
        out = torch.empty_like(x)
        for b in hl.tile(x.num_rows):
            for k in hl.tile(x.max_length):
                v = x[b, k]
                for _ in range(40):
                    v = torch.where(v > 0, v * 0.5, v + 1)
                out[b, k] = v
        return out

    x = rows([3, 0, 5])
    wanted = x.values
    for _ in range(40):
        wanted = torch.where(wanted > 0, wanted * 0.5, wanted + 1)
    torch.testing.assert_close(serrate.kernel(folded).on("triton")(x).values, wanted)


def test_atomic_adds() -> None:
    def histogram(x: JaggedTensor, bins: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4, dtype=torch.int64)
        for b in hl.grid(x.num_rows):
            for k in hl.tile(x.max_length):
                hl.atomic_add(out, [bins[x[b, k]]], torch.ones_like(x[b, k]))
        return out

    ids = JaggedTensor.from_lengths(torch.tensor([0, 1, 2, 2, 1, 0, 0]), [3, 0, 4])
    bins = torch.tensor([3, 1, 3])
    wanted = torch.bincount(bins[ids.values], minlength=4)
    assert torch.equal(serrate.kernel(histogram).on("triton")(ids, bins), wanted)


@pytest.mark.parametrize("width", [1, 3, 5, 48])
def test_widths_that_are_no_powers_of_two(width: int) -> None:
    def centred(x: JaggedTensor) -> JaggedTensor:
        out = torch.zeros_like(x)
        for b in hl.grid(x.num_rows):
            for k in hl.tile(x.max_length, block_size=3):
                block = x[b, k, :]
                out[b, k, :] = block - block.mean(1, keepdim=True)
        return out

    x = JaggedTensor.from_lengths(torch.randn(11, width), [4, 0, 7])
    wanted = x.values - x.values.mean(1, keepdim=True)
    torch.testing.assert_close(serrate.kernel(centred).on("triton")(x).values, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_products_of_small_and_of_integer_blocks(dtype: torch.dtype) -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(a.size(0), b.size(1), dtype=a.dtype)
        for i, j in hl.tile([a.size(0), b.size(1)], block_size=[4, 5]):
            acc = hl.zeros([i, j], dtype=torch.int32 if a.dtype == torch.int32 else torch.float32)
            for k in hl.tile(a.size(1), block_size=3):
                acc = acc + a[i, k] @ b[k, j]
            out[i, j] = acc.to(a.dtype)
        return out

    a, b = (torch.randint(-3, 4, shape).to(dtype) for shape in ((9, 7), (7, 11)))
    wanted = (a.double() @ b.double()).to(dtype)
    assert torch.equal(serrate.kernel(product).on("triton")(a, b), wanted)


def test_products_of_many_rows_run_on_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """They multiply blocks of two dims, so that rows are taken one at a time."""
    monkeypatch.setenv("SERRATE_BACKEND", "triton")
    settings.reload()
    sources = []

    def noted(kernel: serrate.Kernel) -> Any:
        made = serrate.kernel(kernel.fn, strategy="masked")

        def run(*args: Any) -> Any:
            sources.append(made.source(*args))
            return made(*args)

        return run

    example("jagged_flash_attention").check([3, 0, 17, 1], noted)
    # Two products, in the loop over whole blocks and after it.
    assert sources and all(source.count("tl.dot(") == 4 for source in sources)


def test_branches_with_reductions_of_known_and_of_unknown_length() -> None:
    """Which lanes existed is counted in integers in every branch. Triton refuses a name that is an integer in one branch and a
    float in another, but its interpreter accepts it."""

    @serrate.kernel
    def k(x: JaggedTensor, kind: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.num_rows)
        for b in hl.grid(x.num_rows):
            top = hl.full([1], -100.0)
            for t in hl.tile(x.max_length):
                top = torch.maximum(top, x[b, t].amax())
            if kind[b] == 0:
                found = 1.0
                for t in hl.tile(x.max_length):
                    found = found * x[b, t].prod()
            else:
                found = top.sum()
            out[b] = found
        return out

    x, kind = rows([3, 2, 7, 0]), torch.tensor([0, 1, 0, 1])
    wanted = [x[0].prod(), x[1].max(), x[2].prod(), torch.tensor(-100.0)]
    torch.testing.assert_close(k.on("triton")(x, kind), torch.stack(wanted))
    assert "* 1.0" not in k.on("triton").source(x, kind)
