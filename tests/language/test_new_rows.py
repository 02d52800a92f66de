"""Kernels called with new rows: most such calls find their program by an outline, which they share with an earlier call."""

from __future__ import annotations

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.errors import KernelError, StructureError
from serrate.tiles.launch_site import LaunchSite
from serrate.tiles.specialise import LoopPrograms

BATCHES = ([3, 0, 5], [3, 0, 5], [1, 7, 0], [0, 0, 0], [40, 2, 1], [3, 0, 5], [2, 2], [9])


@serrate.kernel
def scaled_sums(x: JaggedTensor, y: JaggedTensor, factor: float, shift: int) -> torch.Tensor:
    out = torch.empty(x.num_rows, x.size(2))
    for b, d in hl.tile([x.num_rows, x.size(2)]):
        total = hl.zeros([b, d])
        for k in hl.tile(x.max_length):
            total = total + (x[b, k, d] * y[b, k, d]).sum(1)
        out[b, d] = total * factor + shift
    return out


def rows(lengths: list[int], width: int = 6) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), width), lengths)


def wanted(x: JaggedTensor, y: JaggedTensor, factor: float, shift: int) -> torch.Tensor:
    pairs = zip(x.unbind(), y.unbind(), strict=True)
    return torch.stack([(a.double() * b.double()).sum(0) * factor + shift for a, b in pairs]).float()


@pytest.mark.parametrize("backend", ["cpp", pytest.param("triton", marks=pytest.mark.triton)])
def test_batch_after_batch(backend: str) -> None:
    run = scaled_sums.on(backend)
    for call, lengths in enumerate(BATCHES):
        x = rows(lengths)
        y = x.with_values(torch.randn_like(x.values))
        for factor, shift in ((0.5, 2), (1.5, 2), (-1.0, call)):
            for _ in range(3):  # as it comes, bound, and warm
                torch.testing.assert_close(run(x, y, factor, shift), wanted(x, y, factor, shift))


def test_rows_of_one_tensor_or_of_two() -> None:
    """If two tensors share one `Rows` object, a tile of one is a tile of the other; otherwise, each has its own boundaries."""
    for lengths, others in (([3, 2], [2, 3]), ([1, 4], [0, 5]), ([2, 2], [4, 0])):
        x, apart = rows(lengths), rows(others)
        same = x.with_values(torch.randn_like(x.values))
        for y in (same, apart, same, apart):
            cut = [min(len(a), len(b)) for a, b in zip(x.unbind(), y.unbind(), strict=True)]
            pairs = zip(x.unbind(), y.unbind(), cut, strict=True)
            expected = torch.stack([(a[:n].double() * b[:n].double()).sum(0) for a, b, n in pairs]).float()
            torch.testing.assert_close(scaled_sums(x, y, 1.0, 0), expected)


def test_new_rows_find_the_program_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = serrate.kernel(scaled_sums.fn)
    x = rows([4, 1, 2])
    kernel(x, x, 1.0, 0)
    kernel(rows([1, 2, 3]), rows([1, 2, 3]), 1.0, 0)
    searched: list[int] = []
    find = LoopPrograms.find
    monkeypatch.setattr(LoopPrograms, "find", lambda *given: (searched.append(1), find(*given))[1])
    for lengths in ([2, 2, 2], [9, 0, 1]):
        x = rows(lengths)
        torch.testing.assert_close(kernel(x, x, 2.0, 0), wanted(x, x, 2.0, 0))
    assert not searched


def test_the_second_call_on_rows_leaves_a_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = serrate.kernel(scaled_sums.fn)
    x = rows([4, 1, 2])
    served: list[int] = []
    serve = LaunchSite._call
    monkeypatch.setattr(LaunchSite, "_call", lambda *given: (served.append(1), serve(*given))[1])
    for count in (1, 2, 2, 2):
        kernel(x, x, 1.0, 0)
        assert len(served) == count


def test_new_rows_are_checked() -> None:
    offsets = torch.tensor([0, 4, 6])
    scaled_sums(*[rows([1, 2])] * 2, 1.0, 0)
    x = JaggedTensor.from_csr(torch.randn(6, 6), offsets)
    offsets[1] = 9
    with pytest.raises(StructureError, match="must not decrease"):
        scaled_sums(x, x, 1.0, 0)


@serrate.kernel
def copy_rows(x: JaggedTensor, out: torch.Tensor) -> None:
    starts = x.offsets
    for b in hl.grid(x.num_rows):
        for k, d in hl.tile([x.max_length, x.size(2)]):
            first = starts[b]
            hl.store(out, [first + k.index + 1, d], x[b, k, d], extra_mask=(k.index < starts[b + 1] - first)[:, None])


def test_memory_that_is_shared_is_refused_at_the_first_call_on_new_rows() -> None:
    for lengths in ([2, 1], [1, 3], [4, 0]):
        x = rows(lengths)
        out = torch.zeros(sum(lengths) + 1, 6)
        copy_rows(x, out)
        torch.testing.assert_close(out[1:], x.values)
    values = torch.randn(6, 6)
    with pytest.raises(KernelError, match="shares memory"):
        copy_rows(JaggedTensor.from_lengths(values[:5], [4, 1]), values)


@serrate.kernel
def sums_of_lines(x: JaggedTensor) -> torch.Tensor:
    out = torch.empty(x.size(0), x.num_groups)
    for d, b in hl.tile([x.size(0), x.num_groups]):
        total = hl.zeros([d, b])
        for k in hl.tile(x.max_length):
            total = total + x[d, b, k].sum(2)
        out[d, b] = total
    return out


def test_rows_of_dim_1() -> None:
    """The size of a dim that holds rows is not part of an outline."""
    for lengths in ([2, 1], [1, 2], [4, 3], [0, 6], [4, 3]):
        values = torch.randn(5, sum(lengths))
        got = sums_of_lines(JaggedTensor.from_csr(values, torch.tensor([0, lengths[0], sum(lengths)]), dim=1))
        torch.testing.assert_close(got, torch.stack([part.sum(1) for part in values.split(lengths, dim=1)], dim=1))


def test_lengths_that_are_needed_at_compile_time() -> None:
    @serrate.kernel
    def first_positions(x: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(x.num_rows, 16)
        for b in hl.tile(x.num_rows):
            own = hl.arange(hl.specialize(x.max_length))
            out[b, own] = x[b, own, 0] * hl.specialize(x.max_length)
        return out

    for lengths in ([3, 1], [1, 3], [5, 2], [4, 4], [2, 6]):
        x = rows(lengths)
        for row, own in zip(first_positions(x), x.unbind(), strict=True):
            torch.testing.assert_close(row[: len(own)], own[:, 0] * max(lengths))
            assert not row[len(own) :].any()
