"""How tests with CPU tensors run on a GPU: programs get copies, and what they write is copied back.

The device is the CPU here, and Triton's interpreter runs the programs; the copies are the same. The oracle is torch, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, jit
from serrate.runtime import triton as runtime
from tests import triton_on_device
from tests.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the functions are replaced already")
HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The addresses that programs were given."""
    plain, given = runtime.TritonFunction.launch, []

    def noted(self, grid, tensors, numbers):
        given.extend(t.data_ptr() for t in tensors)
        plain(self, grid, tensors, numbers)

    monkeypatch.setattr(runtime.TritonFunction, "launch", triton_on_device.launch_on(HERE, noted))
    yield given


def rows() -> JaggedTensor:
    lengths = [3, 0, 20, 1]
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), 4, generator=torch.Generator().manual_seed(0)), lengths)


def test_results_come_back(copied: list[int]) -> None:
    x = rows()
    found = jit(lambda x: torch.softmax(x, 1), backend="triton", strategy="persistent_dynamic")(x)
    torch.testing.assert_close(found.values, torch.cat([row.softmax(0) for row in x.unbind()]))
    assert copied and x.values.data_ptr() not in copied and found.values.data_ptr() not in copied


def test_what_a_kernel_writes_into_its_arguments_comes_back() -> None:
    def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
        for t in hl.tile(x.size(0)):
            out[t] = x[t] * 2

    whole = torch.arange(20.0)
    odd = whole[3::2]
    serrate.kernel(doubled).on("triton")(torch.arange(9.0), odd)
    assert odd.tolist() == [2.0 * k for k in range(9)] and whole[2::2].tolist() == list(range(2, 20, 2))


def test_tensors_that_share_memory_still_do() -> None:
    whole = torch.arange(12.0)
    copies = triton_on_device.Copies(HERE)
    left, right = copies.of(whole[:8]), copies.of(whole[4:])
    left[5] = -1
    assert right[1] == -1 and whole[5] == 5 and left.stride() == (1,) and right.storage_offset() == 4
    version = whole._version
    copies.back()
    assert whole[5] == -1 and whole._version == version
