"""The container's conversions by compiled code: the same bits as by torch, and torch where compiled code does not take them.

In: ragged tensors of every composition and dtype. Out: failures that name the conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import serrate
from serrate import JaggedTensor
from serrate.api import conversions
from serrate.compiled import Compiled
from serrate.runtime import launch
from serrate.tensor import moving
from tests.conftest import INTERPRETED
from tests.tensor.compositions import MAKERS, Sample, equal_parts, samples

CONVERSIONS: dict[str, Callable[[JaggedTensor], Any]] = {
    "to_padded": lambda jt: jt.to_padded(),
    "to_padded, filled": lambda jt: jt.to_padded(1),
    "contiguous": lambda jt: jt.contiguous(),
    "from_padded": lambda jt: JaggedTensor.from_padded(jt.to_padded(), structure=jt.structure),
    "rows by number": lambda jt: jt[torch.arange(len(jt)).flip(0).repeat(2)],
    "positions": lambda jt: jt[:, :2].contiguous(),
    "mask": lambda jt: jt.mask(),
}
# int64 for every program of 8 bytes, and so on: few widths keep the number of builds low.
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.complex128)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Compiled code takes all sizes; gives what it took and what it left to torch."""
    seen: list[bool] = []

    def watched(name: str, mover: moving.Mover) -> moving.Mover:
        def call(*args: Any) -> Tensor | None:
            found = mover(*args)
            # What `unpad_rows` leaves, `pack_runs` is asked for.
            if found is not None or name != "unpad_rows":
                seen.append(found is not None)
            return found

        return call

    monkeypatch.setattr(conversions, "SMALLEST", 0)
    for name, mover in list(moving._movers.items()):
        monkeypatch.setitem(moving._movers, name, watched(name, mover))
    yield seen


def by_torch(convert: Callable[[], Any]) -> Any:
    movers = dict(moving._movers)
    moving._movers.clear()
    try:
        return convert()
    finally:
        moving._movers.update(movers)


def parts(x: Any) -> list[Tensor]:
    return [x.values, *x.structure.offsets] if isinstance(x, JaggedTensor) else [x]


@pytest.mark.parametrize("name", CONVERSIONS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sample=samples(MAKERS, DTYPES))
def test_same_as_torch(taken: list[bool], name: str, sample: Sample) -> None:
    jt, convert = sample.jt, CONVERSIONS[name]
    got, want = convert(jt), by_torch(lambda: convert(jt))
    for a, b in zip(parts(got), parts(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sample=samples((equal_parts,), DTYPES), data=st.data())
def test_block_permute(taken: list[bool], sample: Sample, data: st.DataObject) -> None:
    jt = sample.jt
    order = (1, 0, *range(2, jt.ndim))
    got, want = jt.permute(*order), by_torch(lambda: jt.permute(*order))
    assert torch.equal(got.values, want.values)


def test_joining(taken: list[bool]) -> None:
    one = JaggedTensor.from_lengths(torch.randn(9, 3), [3, 0, 6])
    other = JaggedTensor.from_lengths(torch.randn(5, 3), [1, 4, 0])
    got = serrate.cat([one, other], 1)
    assert taken == [True]
    assert all(map(torch.equal, got.unbind(), [torch.cat(pair) for pair in zip(one.unbind(), other.unbind(), strict=True)]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cache", [0, 1 << 30], ids=["past the cache", "in the cache"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.complex64])
@pytest.mark.parametrize("inner", [(), (3,), (64,), (2, 600)])
def test_compiled_code_takes_them(
    taken: list[bool], monkeypatch: pytest.MonkeyPatch, inner: tuple[int, ...], dtype: torch.dtype, cache: int
) -> None:
    monkeypatch.setattr(launch, "last_level_cache", lambda: cache)
    lengths = torch.tensor([40, 0, 700, 1])
    jt = JaggedTensor.from_lengths(torch.randn(741, *inner).to(dtype), lengths)
    padded = jt.to_padded(3)
    for row, own, length in zip(padded, jt.unbind(), lengths.tolist(), strict=True):
        assert torch.equal(row[:length], own) and bool((row[length:] == 3).all())
    assert torch.equal(JaggedTensor.from_padded(padded, lengths).values, jt.values)
    assert taken == [True, True]


def test_nan_keeps_its_bits(taken: list[bool]) -> None:
    """A signalling NaN of sixteen bits would be another one after it was a float32."""
    bits = torch.tensor([0x7F81, 0x0001, -1], dtype=torch.int16)
    jt = JaggedTensor.from_lengths(bits.view(torch.bfloat16), [1, 2])
    assert jt.to_padded().view(torch.int16).tolist() == [[0x7F81, 0], [1, -1]] and taken == [True]


def test_gradients_flow(taken: list[bool]) -> None:
    values = torch.randn(5, 2, requires_grad=True)
    JaggedTensor.from_lengths(values, [2, 3]).to_padded().sum().backward()
    assert values.grad is not None and torch.equal(values.grad, torch.ones(5, 2)) and taken == []
    with torch.no_grad():
        JaggedTensor.from_lengths(values, [2, 3]).to_padded()
    assert taken == [True]


def test_under_transforms(taken: list[bool]) -> None:
    lengths = torch.tensor([2, 1])
    x = torch.randn(3, 2, 2)
    got = torch.vmap(lambda each: JaggedTensor.from_padded(each, lengths).values)(x)
    assert torch.equal(got, torch.stack([JaggedTensor.from_padded(each, lengths).values for each in x]))


def test_values_elsewhere(taken: list[bool]) -> None:
    strided = torch.randn(3, 8)[:, ::2]
    assert torch.equal(JaggedTensor.from_lengths(strided, [2, 1]).to_padded()[1, 0], strided[2])
    assert taken == [False]


def test_small_ones_are_torchs() -> None:
    assert conversions.pack_runs(torch.arange(10), 0, torch.tensor([7, 0]), torch.tensor([2, 3]), 5) is None


def test_runs_outside_are_not_read() -> None:
    """Offsets that nobody was asked to check: what lies outside is 0, and no memory there is touched."""
    broken = JaggedTensor.from_csr(torch.arange(1, 4), torch.tensor([0, 2, 1000]), validate=False)
    padded = broken.to_padded()
    assert padded.shape == (2, 998) and padded[:, :2].tolist() == [[1, 2], [3, 0]] and int(padded.sum()) == 6


def test_without_a_compiler(taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "default_backend", lambda device: "reference")
    jt = JaggedTensor.from_lengths(torch.arange(3), [2, 1])
    assert jt.to_padded().tolist() == [[0, 1], [2, 0]] and taken == [False]


def test_rows_are_moved_alike_by_any_number_of_threads(taken: list[bool]) -> None:
    lengths = torch.randint(0, 200, (300,))
    jt = JaggedTensor.from_lengths(torch.randn(int(lengths.sum()), 8), lengths)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append((jt.to_padded(), JaggedTensor.from_padded(jt.to_padded(), lengths).values))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for pair in found for a, b in zip(pair, found[0], strict=True)) and all(taken)


def on_triton(program: Callable[..., Compiled], *form: Any) -> Compiled:
    made = program(*form)
    return Compiled(made.fusion, "triton", made.strategy, **made.options)


@pytest.mark.sampled(1)
@pytest.mark.skipif(not INTERPRETED, reason="Triton runs on a CPU only under its interpreter")
@pytest.mark.parametrize(("dtype", "inner"), [(torch.float32, ()), (torch.bfloat16, (3,)), (torch.bool, (2, 5))])
def test_a_gpu_converts_by_compiled_code_without_reading_lengths(
    taken: list[bool], monkeypatch: pytest.MonkeyPatch, inner: tuple[int, ...], dtype: torch.dtype
) -> None:
    def on_host(_: Tensor) -> bool:
        return False

    def is_read(*_: object) -> None:
        raise AssertionError("lengths are read on the host")

    monkeypatch.setattr(conversions, "on_host", on_host)
    monkeypatch.setattr(conversions, "_longest", is_read)
    lengths = torch.tensor([4, 0, 700, 1])
    rows = [torch.randn(n, *inner).to(dtype) for n in lengths.tolist()]
    padded = torch.full((4, 800, *inner), 1, dtype=dtype)
    for box, row in zip(padded, rows, strict=True):
        box[: len(row)] = row
    monkeypatch.setattr(conversions, "default_backend", lambda _: "triton")
    for program in (conversions._gather_program, conversions._unpad_program, conversions._pad_program):
        monkeypatch.setattr(conversions, program.__name__, partial(on_triton, program.__wrapped__))
    packed = JaggedTensor.from_padded(padded, lengths)
    again = packed.to_padded(1)
    assert torch.equal(packed.values, torch.cat(rows)) and torch.equal(again, padded[:, :700]) and taken == [True, True]
    # Two levels: rows of parts.
    parts = (torch.tensor([1, 0, 3]), lengths)
    boxes = torch.zeros(3, 3, 800, *inner, dtype=dtype)
    boxes[0, 0], boxes[2] = padded[0], padded[1:]
    assert torch.equal(JaggedTensor.from_padded(boxes, parts).values, torch.cat(rows)) and taken == [True, True, True]


@pytest.mark.skipif(not INTERPRETED, reason="Triton runs on a CPU only under its interpreter")
@pytest.mark.parametrize("before", [(), (3,)], ids=str)
def test_padded_rows_are_read_up_to_the_end_of_their_box(before: tuple[int, ...]) -> None:
    """A row that says it is longer than its box does not go on in the next one."""
    padded = torch.arange(1, 1 + 8 * (before or (1,))[0], dtype=torch.int32).view(*before, 2, 4)
    program = on_triton(conversions._unpad_program.__wrapped__, torch.int32, bool(before), 1, torch.int64)
    found = program(padded, torch.tensor([0, 6, 7]), torch.empty(7, 0, dtype=torch.uint8))
    for got, box in zip(found.view(-1, 7), padded.view(-1, 2, 4), strict=True):
        assert got.tolist() == [*box[0].tolist(), 0, 0, int(box[1, 0])]
