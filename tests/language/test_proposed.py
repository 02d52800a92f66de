"""Kernels as one would like to write them: plain loops over tiles of a ragged batch, and what they replace, written out by hand.

In: sums with a dense row and a dense batch, grouped products, means with feature counts, in the ragged form and the long
ones. Out: a failure for each kernel, kind of lengths and way of running that differs from plain torch row by row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate as helion
import serrate.language as hl
from serrate import Kernel
from serrate.language import JaggedTensor
from tests.language.kinds import LENGTHS, TILES, ran

FEATURES, COLUMNS = 6, 5


def ragged(lengths: list[int], *inner: int, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    torch.manual_seed(2)
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), *inner).to(dtype), lengths)


# --- a dense row, added to every ragged one ---


@helion.kernel()
def add_row(jt: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = dense.expand(jt.num_rows, -1).clone()
    for tile_row in hl.tile(jt.num_rows):
        for tile_col in hl.tile(jt.max_length):
            out[tile_row, tile_col] = jt[tile_row, tile_col] + dense[tile_col]
    return out


@helion.kernel(jagged_strategy="persistent_dynamic")
def add_row_persistent(jt: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = dense.expand(jt.num_rows, -1).clone()
    for tile_i in hl.tile(jt.num_rows):
        for tile_j in hl.tile(jt.max_length):
            x = jt[tile_i, tile_j]
            out[tile_i, tile_j] = x + dense[tile_j]
    return out


@helion.kernel()
def add_row_exact(jt: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = dense.expand(jt.num_rows, -1).clone()
    for row_id in hl.grid(jt.num_rows):
        M_row = jt.lengths[row_id]
        if M_row > 0:
            for tile_col in hl.tile(M_row):
                values = jt.values[jt.offsets[row_id] + tile_col.index]
                out[row_id, tile_col] = values + dense[tile_col]
    return out


@helion.kernel()
def add_row_masked(jt: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = dense.expand(jt.num_rows, -1).clone()
    for tile_row in hl.tile(jt.num_rows):
        lengths = jt.lengths[tile_row]
        max_len = lengths.amax()
        for tile_col in hl.tile(0, max_len):
            values = hl.load(
                jt.values,
                [jt.offsets[tile_row][:, None] + tile_col.index[None, :]],
                extra_mask=tile_col.index[None, :] < lengths[:, None],
            )
            out[tile_row, tile_col] = values + dense[tile_col]
    return out


@helion.kernel()
def add_row_workers(jt: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = dense.expand(jt.num_rows, -1).clone()
    num_workers = hl.device_num_sms()
    rows, firsts = jt.tile_list(4)
    for worker_id in hl.grid(num_workers):
        tile_idx = worker_id
        total_tiles = jt.total_tiles(4)
        while tile_idx < total_tiles:
            row, cols = rows[tile_idx], firsts[tile_idx] + hl.arange(4)
            values = hl.load(jt, [row, cols])
            hl.store(out, [row, cols], values + hl.load(dense, [cols]), extra_mask=cols < jt.lengths[row])
            tile_idx += num_workers
    return out


def wanted_row(lengths: list[int], dtype: torch.dtype) -> tuple[tuple[Any, ...], torch.Tensor]:
    jt, dense = ragged(lengths, dtype=dtype), torch.randn(max(lengths, default=0) + 3).to(dtype)
    wanted = dense.expand(len(lengths), -1).clone()
    for row, own in zip(wanted, jt.unbind(), strict=True):
        row[: len(own)] += own
    return (jt, dense), wanted


# --- a dense batch, with its tail ---


@helion.kernel()
def dense_add(jt: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(dense)
    for tile_row in hl.tile(jt.num_rows):
        for tile_col in hl.tile(jt.max_length):
            out[tile_row, tile_col] = dense[tile_row, tile_col] + jt[tile_row, tile_col]
        for tile_col in hl.tile(jt.max_length, out.size(1)):
            out[tile_row, tile_col] = dense[tile_row, tile_col]
    return out


@helion.kernel()
def dense_add_parts(jt: JaggedTensor, dense: torch.Tensor) -> torch.Tensor:
    num_rows = dense.size(0)
    out = torch.zeros_like(dense)
    for tile_row in hl.tile(num_rows):
        starts = jt.offsets[tile_row]
        ends = jt.offsets[tile_row.index + 1]
        nnz = ends - starts
        max_nnz = nnz.amax()
        for tile_col in hl.tile(0, max_nnz):
            flat_idx = starts[:, None] + tile_col.index[None, :]
            valid = tile_col.index[None, :] < nnz[:, None]
            jagged_vals = hl.load(jt.values, [flat_idx], extra_mask=valid)
            out[tile_row, tile_col] = dense[tile_row, tile_col] + jagged_vals
        for tile_col in hl.tile(max_nnz, out.size(1)):
            out[tile_row, tile_col] = dense[tile_row, tile_col]
    return out


def wanted_dense(lengths: list[int], dtype: torch.dtype) -> tuple[tuple[Any, ...], torch.Tensor]:
    jt, dense = ragged(lengths, dtype=dtype), torch.randn(len(lengths), max(lengths, default=0) + 3).to(dtype)
    wanted = dense.clone()
    for row, own in zip(wanted, jt.unbind(), strict=True):
        row[: len(own)] += own
    return (jt, dense), wanted


# --- groups of rows, times one matrix: the result has the rows of the operand ---


@helion.kernel()
def grouped_gemm(A_jt: JaggedTensor, B: torch.Tensor) -> JaggedTensor:
    K, N = B.shape
    out = A_jt.with_values(torch.empty([A_jt.total_elements, N], dtype=torch.promote_types(A_jt.dtype, B.dtype)))
    for tile_g in hl.tile(A_jt.num_groups):
        for tile_m, tile_n in hl.tile([A_jt.max_length, N]):
            acc = hl.zeros([tile_g, tile_m, tile_n], dtype=torch.float32)
            for tile_k in hl.tile(K):
                acc = acc + torch.matmul(A_jt[tile_g, tile_m, tile_k], B[tile_k, tile_n])
            out[tile_g, tile_m, tile_n] = acc.to(out.dtype)
    return out


@helion.kernel()
def grouped_gemm_addmm(A_jt: JaggedTensor, B: torch.Tensor) -> JaggedTensor:
    """One group at a time, so that a block of rows is a matrix."""
    K, N = B.shape
    out = A_jt.with_values(torch.empty([A_jt.total_elements, N], dtype=torch.promote_types(A_jt.dtype, B.dtype)))
    for g in hl.grid(A_jt.num_groups):
        for tile_m, tile_n in hl.tile([A_jt.max_length, N]):
            acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
            for tile_k in hl.tile(K):
                acc = torch.addmm(acc, A_jt[g, tile_m, tile_k], B[tile_k, tile_n])
            out[g, tile_m, tile_n] = acc.to(out.dtype)
    return out


@helion.kernel(static_shapes=False)
def grouped_gemm_exact(A_jt: JaggedTensor, B: torch.Tensor) -> JaggedTensor:
    K, N = B.shape
    out = A_jt.with_values(torch.empty([A_jt.total_elements, N], dtype=torch.promote_types(A_jt.dtype, B.dtype)))
    packed, made, group_offsets = A_jt.values, out.values, A_jt.offsets
    for g in hl.grid(group_offsets.size(0) - 1):
        start = group_offsets[g]
        end = group_offsets[g + 1]
        M_g = end - start
        if M_g != 0:
            for tile_m, tile_n in hl.tile([M_g, N]):
                acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
                for tile_k in hl.tile(K):
                    acc = torch.addmm(acc, packed[start + tile_m.index, tile_k], B[tile_k, tile_n])
                made[start + tile_m.index, tile_n] = acc.to(made.dtype)
    return out


def wanted_gemm(lengths: list[int], dtype: torch.dtype) -> tuple[tuple[Any, ...], torch.Tensor]:
    A, B = ragged(lengths, FEATURES, dtype=dtype), torch.randn(FEATURES, COLUMNS).to(dtype)
    rows = [(own.double() @ B.double()).to(dtype) for own in A.unbind()]
    return (A, B), torch.cat([*rows, torch.empty(0, COLUMNS, dtype=dtype)])


# --- means: of rows alone, and of rows with a number of features of their own ---


@helion.kernel()
def mean(jt: JaggedTensor) -> torch.Tensor:
    num_rows = jt.num_rows
    max_M = jt.size(2)
    out = torch.zeros([num_rows, max_M], dtype=jt.dtype, device=jt.device)
    for tile_b in hl.tile(num_rows):
        for tile_m in hl.tile(max_M):
            row_sums = hl.zeros([tile_b, tile_m], dtype=jt.dtype)
            for tile_k in hl.tile(jt.max_length):
                x_slice = jt[tile_b, tile_k, tile_m]
                row_sums = row_sums + x_slice.sum(dim=1)
            lengths = jt.lengths[tile_b][:, None]
            out[tile_b, tile_m] = torch.where(lengths > 0, row_sums / lengths, 0.0)
    return out


@helion.kernel()
def mean_counted(jt: JaggedTensor, feature_counts: torch.Tensor) -> torch.Tensor:
    """A ragged dim and counts of features beside it: features that a row does not have are 0."""
    max_M = jt.size(2)
    out = torch.zeros([jt.num_rows, max_M], dtype=jt.dtype)
    for tile_b in hl.tile(jt.num_rows):
        counts = feature_counts[tile_b]
        for tile_m in hl.tile(max_M):
            feature_valid = tile_m.index[None, :] < counts[:, None]
            row_sums = hl.zeros([tile_b, tile_m], dtype=jt.dtype)
            for tile_k in hl.tile(jt.max_length):
                row_sums = row_sums + jt[tile_b, tile_k, tile_m].sum(dim=1)
            lengths = jt.lengths[tile_b][:, None]
            result = torch.where(lengths > 0, row_sums / lengths, 0.0)
            out[tile_b, tile_m] = torch.where(feature_valid, result, 0.0)
    return out


@helion.kernel()
def mean_by_hand(jt: JaggedTensor, x_feature_counts: torch.Tensor) -> torch.Tensor:
    x_data, x_offsets, max_M = jt.values, jt.offsets, jt.size(2)
    num_rows = x_offsets.size(0) - 1
    out = torch.zeros([num_rows, max_M], dtype=x_data.dtype, device=x_data.device)
    x_flat = x_data.view(-1)
    for tile_b in hl.tile(num_rows):
        starts = x_offsets[tile_b]
        ends = x_offsets[tile_b.index + 1]
        nnz = ends - starts
        max_nnz = nnz.amax()
        feature_counts = x_feature_counts[tile_b]
        for tile_m in hl.tile(max_M):
            feature_valid = tile_m.index < feature_counts[:, None]
            row_sums = hl.zeros([tile_b, tile_m], dtype=x_data.dtype)
            for tile_k in hl.tile(0, max_nnz):
                base_indices = starts[:, None] + tile_k.index[None, :]
                flat_indices = base_indices[:, :, None] * max_M + tile_m.index[None, None, :]
                row_mask = tile_k.index[None, :] < nnz[:, None]
                combined_mask = row_mask[:, :, None] & feature_valid[:, None, :]
                x_slice = hl.load(x_flat, [flat_indices], extra_mask=combined_mask)
                row_sums = row_sums + x_slice.sum(dim=1)
            nnz_expanded = nnz[:, None]
            result = torch.where(nnz_expanded > 0, row_sums / nnz_expanded, 0.0)
            out[tile_b, tile_m] = torch.where(feature_valid, result, 0.0)
    return out


def wanted_mean(lengths: list[int], dtype: torch.dtype, counted: bool = False) -> tuple[tuple[Any, ...], torch.Tensor]:
    jt = ragged(lengths, FEATURES, dtype=dtype)
    counts = torch.tensor([(2 * n + 1) % (FEATURES + 1) for n in range(len(lengths))], dtype=torch.int64)
    wanted = torch.zeros(len(lengths), FEATURES, dtype=dtype)
    for row, own, count in zip(wanted, jt.unbind(), counts.tolist() if counted else [FEATURES] * len(lengths), strict=True):
        if len(own):
            row[:count] = own[:, :count].double().mean(0)
    return ((jt, counts) if counted else (jt,)), wanted


def wanted_counted(lengths: list[int], dtype: torch.dtype) -> tuple[tuple[Any, ...], torch.Tensor]:
    return wanted_mean(lengths, dtype, counted=True)


Wanted = Callable[[list[int], torch.dtype], tuple[tuple[Any, ...], torch.Tensor]]
KERNELS: list[tuple[Kernel, Wanted]] = [
    *((k, wanted_row) for k in (add_row, add_row_persistent, add_row_exact, add_row_masked, add_row_workers)),
    *((k, wanted_dense) for k in (dense_add, dense_add_parts)),
    *((k, wanted_gemm) for k in (grouped_gemm, grouped_gemm_addmm, grouped_gemm_exact)),
    (mean, wanted_mean),
    *((k, wanted_counted) for k in (mean_counted, mean_by_hand)),
]
TOLERANCE = {torch.bfloat16: (2e-2, 2e-2), torch.float32: (1e-5, 1e-5), torch.float64: (1e-5, 1e-6)}
"""The accumulators are float32 where the kernel says so, whatever the operands are."""


def agrees(kernel: Kernel, wanted: Wanted, lengths: list[int], way: int | str, dtype: torch.dtype = torch.float32) -> None:
    given, right = wanted(lengths, dtype)
    found = ran(kernel, way)(*given)
    if isinstance(found, JaggedTensor):
        assert found.structure is given[0].structure
        found = found.values
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(found, right, rtol=rtol, atol=atol)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize(("kernel", "wanted"), KERNELS, ids=lambda x: getattr(x, "__name__", ""))
def test_agrees_with_torch(kernel: Kernel, wanted: Wanted, kind: str, tile: int | str) -> None:
    agrees(kernel, wanted, LENGTHS[kind], tile)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", ["maskless", "masked", "persistent_dynamic"])
@pytest.mark.parametrize(("kernel", "wanted"), KERNELS, ids=lambda x: getattr(x, "__name__", ""))
def test_every_strategy_and_many_tiles(kernel: Kernel, wanted: Wanted, strategy: str) -> None:
    """Rows longer than a tile, and more rows than go side by side."""
    again = helion.kernel(kernel.fn, strategy=strategy)
    for lengths in ([300, 0, 7, 65, 1, 0, 64, 130, 2, 19, 3], *LENGTHS.values()):
        agrees(again, wanted, lengths, "cpp")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [k for k in KERNELS if k[0] in (dense_add, grouped_gemm, mean)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_other_dtypes(kernel: Kernel, wanted: Wanted, dtype: torch.dtype, tile: int | str) -> None:
    for kind in ("exponential", "zeros", "empty"):
        agrees(kernel, wanted, LENGTHS[kind], tile, dtype)


@pytest.mark.parametrize(("kernel", "_"), KERNELS, ids=lambda x: getattr(x, "__name__", ""))
def test_nothing_special_is_needed(kernel: Kernel, _: Wanted) -> None:
    text = inspect.getsource(kernel.fn)
    assert "jagged_tile" not in text and "hl.fill" not in text


def test_the_size_of_a_ragged_dim_is_no_number() -> None:
    """A dim of lengths has no size to loop over; a kernel that asks for one is told so, compiled or not."""

    @helion.kernel
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for tile_b in hl.tile(jt.num_rows):
            for tile_k in hl.tile(jt.size(1)):
                out[tile_b] = jt[tile_b, tile_k].sum(1)
        return out

    for way in TILES:
        with pytest.raises((helion.errors.SerrateError, TypeError)):
            ran(k, way)(ragged([2, 3]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize(("kernel", "wanted"), KERNELS, ids=lambda x: getattr(x, "__name__", ""))
def test_one_kernel_for_all_lengths(kernel: Kernel, wanted: Wanted, backend: str) -> None:
    """Batches one after the other: what a kernel has learned from one must not spoil the next."""
    made = helion.kernel(kernel.fn, config=kernel.config).on(backend)
    for lengths in (*LENGTHS.values(), [65, 0, 3], *reversed(LENGTHS.values())):
        given, right = wanted(lengths, torch.float32)
        found = made(*given)
        torch.testing.assert_close(found.values if isinstance(found, JaggedTensor) else found, right, rtol=1e-5, atol=1e-5)
