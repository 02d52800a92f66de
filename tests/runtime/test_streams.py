"""Several streams of a GPU: none uses what another computes, unless it waits for it.

In: calls on a fake device, whose streams are only addresses, in a separate process; and on a GPU, if there is one. Out: failures
if arrays that were derived on one stream serve a call on another, or if another stream does not wait for lengths.
"""

from __future__ import annotations

import pytest
import torch

import serrate
from serrate import JaggedTensor
from tests.runtime.on_fake_device import needs_fake_device, run_on_fake_device

CALLS = """
import torch
from benchmarks import fake_device
fake_device.install()
import serrate
from examples.jagged_softmax import jagged
from serrate import JaggedTensor

jt = JaggedTensor.from_csr(torch.empty(5000, 8, device="cuda"), torch.tensor([0, 10, 4000, 5000]).to("cuda"))
for f in (serrate.jit(lambda x: torch.softmax(x, 1)), lambda x: x.sum(1), jagged):
    counts = []
    for stream in (0, 0, 0, 1, 1, 1, 0, 1):
        fake_device.stream[0], fake_device.launches[0] = stream, 0
        f(jt)
        counts.append(fake_device.launches[0])
    warm = counts[2]
    print(counts)
    assert counts[3] > warm and counts[5:] == [warm] * 3, counts
    jt = JaggedTensor.from_csr(jt.values, jt.offsets.clone())

fake_device.waits.clear()
fake_device.kept_for.clear()
for stream, waits in ((0, 0), (0, 0), (2, 1), (2, 1), (3, 2), (0, 2)):
    fake_device.stream[0] = stream
    jt.lengths
    assert [each.cuda_stream for each in fake_device.waits] == [0] * waits, (stream, fake_device.waits)
    assert len(fake_device.kept_for) == waits
assert [each.cuda_stream for each in fake_device.kept_for] == [2, 3]
"""


@needs_fake_device
def test_each_stream_derives_its_own_arrays() -> None:
    run_on_fake_device(CALLS)


@pytest.mark.gpu
def test_results_on_several_streams() -> None:
    lengths = [3000, 0, 17, 1, 9000]
    values = torch.randn(sum(lengths), 64, device="cuda")
    wanted = torch.stack([row.softmax(0).sum(0) if len(row) else row.sum(0) for row in values.split(lengths)])
    f = serrate.jit(lambda x: torch.softmax(x, 1).sum(1))
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(50):
        jt = JaggedTensor.from_lengths(values, torch.tensor(lengths, device="cuda"))
        found = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append((f(jt), jt.lengths + 0))
        torch.cuda.synchronize()
        for result, own in found:
            torch.testing.assert_close(result, wanted)
            assert own.tolist() == lengths
