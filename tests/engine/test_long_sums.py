"""Long float32 sums and scans have the error of blocked sums, not of running ones.

In: rows of millions of equal or random numbers, on which a running float32 sum drifts. Out: failures against float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, jit, ops, settings
from serrate.ir.fusion import Fusion

MILLION = 1_000_000


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpp", "reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SERRATE_BACKEND", request.param)
    settings.reload()
    return request.param


def near(found: Any, wanted: torch.Tensor | float, limit: float = 2e-6) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    values = found.values if isinstance(found, JaggedTensor) else found
    error = ((values.double() - wanted) / wanted).abs().max().item()
    assert error < limit, f"relative error {error}, at most {limit} wanted"


@pytest.mark.parametrize("count", [1, 2])
def test_ten_million_elements(count: int, threads: None) -> None:
    torch.set_num_threads(count)
    tenth = torch.full((10 * MILLION,), 0.1)
    noise = torch.rand(10 * MILLION, generator=torch.Generator().manual_seed(0))
    for values in (tenth, noise):
        exact = values.double()
        row = JaggedTensor.from_lengths(values, [len(values)])
        near(jit(lambda x: x.sum(1))(row), exact.sum())
        near(jit(lambda x: x.mean(1))(row), exact.mean())
        near(jit(lambda x: (x * x).sum(1))(row), (exact * exact).sum())
        near(jit(lambda x: x.sum((0, 1)))(row), exact.sum())
        near(jit(lambda x: torch.logsumexp(x, 1))(row), torch.logsumexp(exact, 0))
        near(jit(lambda x: torch.cumsum(x, 1))(row), exact.cumsum(0))
    near(jit(lambda x: x.var(1))(JaggedTensor.from_lengths(noise + 100, [10 * MILLION])), (noise + 100).double().var(), 1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["maskless", "masked", "persistent_dynamic"])
@pytest.mark.parametrize("width", [(), (1,), (3,), (64,)])
def test_every_strategy(width: tuple[int, ...], strategy: str) -> None:
    positions = MILLION // max(width or (1,))
    lengths = [positions, 7, 0, positions // 3]
    with Fusion() as f:
        x, offsets = f.input((None, *width), torch.float32), f.input((None,), torch.int64)
        y = ops.as_nested(x, offsets)
        f.output(ops.sum(y, 1), ops.sum(y * y, 1), ops.sum(y, tuple(range(1, y.ndim))))
    values = torch.full((sum(lengths), *width), 0.1)
    given = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    one, squares, everything = f.compile("cpp", strategy)(values, given)
    tenth = values[:1].double().reshape(-1)[0]
    for found, term, times in ((one, tenth, 1), (squares, tenth * tenth, 1), (everything, tenth, max(width or (1,)))):
        wanted = (torch.tensor(lengths, dtype=torch.float64) * term * times).reshape(-1, *[1] * (found.ndim - 1))
        kept = [0, 1, 3]
        near(found[kept], wanted[kept].expand_as(found[kept]))
        assert not found[2].any()


def test_sums_across_many_rows(backend: str) -> None:
    count = 300_000 if backend == "cpp" else 20_000
    rows = JaggedTensor.from_lengths(torch.full((count,), 0.1), [1] * count)
    near(jit(lambda x: x.sum(0))(rows), torch.tensor([count * float(torch.tensor(0.1))]))


def test_sums_on_every_backend(backend: str) -> None:
    count = {"reference": 10_000, "triton": 100_000, "cpp": 400_000}[backend]
    values = torch.full((count, 2), 0.1)
    rows = JaggedTensor.from_lengths(values, [count - 5, 5])
    wanted = torch.tensor([[count - 5] * 2, [5] * 2]) * values[0, 0].double()
    # Triton's interpreter sums the lanes of a block one after the other.
    near(jit(lambda x: x.sum(1))(rows), wanted, 2e-5 if backend == "triton" else 2e-6)
    near(jit(lambda x: torch.softmax(x, 1))(rows)[0], torch.full((count - 5, 2), 1 / (count - 5)))


def test_scans_on_every_backend(backend: str) -> None:
    count = 100_000 if backend == "cpp" else 8_000
    lengths = [count * 7 // 10, count * 3 // 10]
    values = torch.rand(count, 2, generator=torch.Generator().manual_seed(0))
    exact = torch.cat([part.double().cumsum(0) for part in values.split(lengths)])
    near(jit(lambda x: torch.cumsum(x, 1))(JaggedTensor.from_lengths(values, lengths)), exact)
    factors = 1 + (values - 0.5) * 1e-4
    exact = torch.cat([part.double().cumprod(0) for part in factors.split(lengths)])
    near(jit(lambda x: torch.cumprod(x, 1))(JaggedTensor.from_lengths(factors, lengths)), exact)


def test_products_over_long_rows() -> None:
    count = 400_000
    x, y = torch.full((count, 3), 0.1), torch.full((count, 4), 0.3)
    found = jit(lambda x, y: x.transpose(1, 2) @ y)(JaggedTensor.from_lengths(x, [count]), JaggedTensor.from_lengths(y, [count]))
    # Blocks of a product are summed over 1,024 positions at a time. torch's product of the same numbers is off by 7e-4.
    near(found, torch.full((1, 3, 4), count * x[0, 0].double().item() * y[0, 0].double().item()), 2e-5)


def test_infinities_and_nan_stay() -> None:
    for special in (float("inf"), float("-inf"), float("nan")):
        for place in (0, 999, 99_999):
            values = torch.ones(100_000)
            values[place] = special
            found = jit(lambda x: x.sum(1))(JaggedTensor.from_lengths(values, [100_000]))
            assert found.item() == special or (found.isnan().item() and special != special)


@serrate.kernel
def tile_sums(x: JaggedTensor) -> torch.Tensor:
    out = torch.empty(x.num_rows)
    for row in hl.tile(x.num_rows):
        total = hl.zeros([row])
        for at in hl.tile(x.max_length):
            total = total + x[row, at].sum(1)
        out[row] = total
    return out


@serrate.kernel
def feature_sums(x: JaggedTensor) -> torch.Tensor:
    out = torch.empty(x.num_rows, x.size(2))
    for row in hl.tile(x.num_rows):
        total = hl.zeros([row, x.size(2)])
        for at in hl.tile(x.max_length):
            total = total + x[row, at, :].sum(1)
        out[row, :] = total
    return out


@pytest.mark.parametrize("lengths", [[3 * MILLION], [MILLION, 5, 0, MILLION // 2] + [100] * 40])
def test_kernels(lengths: list[int]) -> None:
    tenth = float(torch.tensor(0.1))
    exact = torch.tensor(lengths, dtype=torch.float64) * tenth
    kept = [k for k, n in enumerate(lengths) if n]
    values = torch.full((sum(lengths),), 0.1)
    near(tile_sums(JaggedTensor.from_lengths(values, lengths))[kept], exact[kept])
    short = [n // 10 for n in lengths]
    kept = [k for k, n in enumerate(short) if n]
    wide = torch.full((sum(short), 3), 0.1)
    exact = torch.tensor(short, dtype=torch.float64)[:, None].expand(-1, 3) * tenth
    near(feature_sums(JaggedTensor.from_lengths(wide, short))[kept], exact[kept])
