"""Padding and unpadding in traced programs: every composition, backend and strategy, against the container's own by torch.

In: one ragged tensor of each composition. Out: failures that name the composition and the backend.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serrate import JaggedTensor, ir, jit, ops
from serrate.compiled import Compiled
from serrate.errors import DtypeError, ShapeError
from serrate.runtime import launch
from tests.engine.oracle import BACKENDS, ONE_LEVEL, STRATEGIES
from tests.engine.test_compositions import COMPOSITIONS, tensor_of

# Triton's interpreter computes where nothing exists, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WAYS = [*((backend, None) for backend in BACKENDS), *(("reference", strategy) for strategy in STRATEGIES)]
LENGTHS = torch.tensor([3, 0, 7, 1])


def rows(*inner: int, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    values = torch.arange(11 * torch.Size(inner).numel()).reshape(11, *inner)
    return JaggedTensor.from_lengths(values.to(dtype), LENGTHS)


@pytest.mark.sampled(5)
@COMPOSITIONS
@pytest.mark.parametrize(("backend", "strategy"), WAYS)
def test_every_composition(name: str, backend: str, strategy: str | None) -> None:
    jt = tensor_of(name)
    if name == "columns of the next dim":
        jt = jt.contiguous()
    got = jit(lambda x: x.to_padded(-2), backend=backend, strategy=strategy)(jt)
    assert torch.equal(got, jt.to_padded(-2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fill", [0, 1.5, -0.0, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fills(backend: str, dtype: torch.dtype, fill: float) -> None:
    jt = rows(3, dtype=dtype)
    got, want = jit(lambda x: x.to_padded(fill), backend=backend)(jt), jt.to_padded(fill)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    # Bit for bit, so that -0.0 is told from 0.0; a NaN is any NaN.
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num().view(bits), want.nan_to_num().view(bits))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fill_that_is_a_tensor(backend: str) -> None:
    for inner in ((), (3,)):
        jt = rows(*inner)
        program = jit(lambda x, fill: x.to_padded(fill), backend=backend)
        for fill in (2.5, -1.0):
            assert torch.equal(program(jt, torch.tensor([fill])), jt.to_padded(fill))


@pytest.mark.parametrize("structure", ONE_LEVEL)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_from_padded(structure: str, strategy: str) -> None:
    lengths = torch.tensor(ONE_LEVEL[structure].lengths, dtype=torch.int64)
    x = torch.randn(len(lengths), max(ONE_LEVEL[structure].lengths, default=0) + 2, 5)
    want = [row[:length] for row, length in zip(x, lengths.tolist(), strict=True)]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    for given, kind in ((lengths, "lengths"), (offsets, "offsets")):
        with ir.Fusion() as f:
            dense, told = f.input((None, None, 5), torch.float32), f.input((None,), torch.int64)
            f.output(ops.from_padded(dense, **{kind: told}))
        for backend in ("reference", "cpp"):
            found = f.compile(backend, strategy)(x, given).unbind()
            assert len(found) == len(want) and all(map(torch.equal, found, want))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [(), (3,), (64,), (2, 3)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_jagged_plus_dense_is_one_program(backend: str, inner: tuple[int, ...], dtype: torch.dtype) -> None:
    """Past a row the dense value is written (rule 4), and nothing padded is kept in between."""
    jt = rows(*inner, dtype=dtype)
    dense = torch.randn(4, 7, *inner).to(dtype)
    for program in (jit(_after, backend=backend), jit(_before, backend=backend)):
        # Triton's interpreter rounds to sixteen bits in its own way.
        close = {"rtol": 2.0**-7, "atol": 0.0} if (backend, dtype) == ("triton", torch.bfloat16) else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(program(jt, dense), dense + jt.to_padded(), **close)
        (executable,) = program.compiled(jt, dense)[0].executables(*program.compiled(jt, dense)[1])
        assert len(executable.program.kernels) == 1 and not executable.program.scratch


def _after(jt: Any, dense: Any) -> Any:
    return dense + jt.to_padded()


def _before(jt: Any, dense: Any) -> Any:
    return jt.to_padded() + dense


def test_what_is_padded_may_be_computed() -> None:
    """In a hole there is the fill, not what a function makes of it."""
    jt = rows(3)
    assert torch.equal(jit(lambda x: torch.exp(x * 0).to_padded(5))(jt), torch.exp(jt * 0).to_padded(5))
    assert torch.equal(jit(lambda x: torch.exp(x.to_padded() * 0))(jt), torch.ones(4, 7, 3))


@pytest.mark.triton
def test_a_given_length() -> None:
    jt = rows(2)
    nested = JaggedTensor.from_lengths(jt.values, [torch.tensor([3, 0, 1]), LENGTHS])
    for backend in BACKENDS:
        for size in (0, 1, 5, 7, 9):
            program = jit(lambda x, n: x.to_padded(1, max_length=n), backend=backend)
            assert torch.equal(program(jt, size), jt.to_padded(1, max_length=size))
            assert torch.equal(program(nested, size), nested.to_padded(1, max_length=size))
    with pytest.raises(ShapeError, match="must not be negative"):
        jit(lambda x: x.to_padded(max_length=-1))(jt)


def test_a_dense_operand_of_another_length_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"differ: 9 and 7|differ: 7 and 9"):
        jit(_after)(rows(2), torch.zeros(4, 9, 2))


def test_mistakes() -> None:
    integers = JaggedTensor.from_lengths(torch.arange(11), LENGTHS)
    with pytest.raises(DtypeError, match="does not fit"):
        jit(lambda x: x.to_padded(0.5))(integers)
    with pytest.raises(ShapeError, match="no ragged dim"):
        jit(lambda x: ops.to_padded(x.sum(1)))(integers)
    with pytest.raises(ShapeError, match="either offsets or lengths"), ir.Fusion() as f:
        ops.from_padded(f.input((None, 3), torch.float32))
    with ir.Fusion() as f:
        x, lengths = f.input((None, None), torch.float32), f.input((None,), torch.int64)
        f.output(ops.from_padded(x, lengths=lengths))
    with pytest.raises(ShapeError, match="the longest row has 4"):
        f.evaluate(torch.zeros(1, 3), torch.tensor([4]))


def test_rows_are_copied_and_filled_as_wholes() -> None:
    """The block is cut where the row ends: before that it is copied, behind it is filled, and no lane asks where it is."""
    source = jit(lambda x: x.to_padded(7.0), backend="cpp").source(rows(64))
    assert "copy_bytes(" in source and "fill_with<f32>(" in source and "load(" not in source
    added = jit(_after, backend="cpp").source(rows(64), torch.zeros(4, 7, 64))
    assert "?" not in added.replace("stream ?", "")
    with ir.Fusion() as f:
        x, lengths = f.input((None, None, 64), torch.float32), f.input((None,), torch.int64)
        f.output(ops.from_padded(x, lengths=lengths))
    text = Compiled(f, "cpp").source(torch.zeros(1, 11, 64), torch.tensor([11]))
    assert "copy_bytes(" in text and "load(" not in text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("inner", [(), (3,), (64,), (300,)])
def test_results_past_the_cache(monkeypatch: pytest.MonkeyPatch, inner: tuple[int, ...], dtype: torch.dtype) -> None:
    """Stores that bypass the cache begin and end anywhere in a line."""
    monkeypatch.setattr(launch, "last_level_cache", lambda: 0)
    for lengths in ([3, 0, 700, 1], [1] * 33, [129, 64, 65]):
        x = torch.randn(sum(lengths), *inner).to(dtype)
        jt = JaggedTensor.from_lengths(x, lengths)
        dense = torch.randn(len(lengths), max(lengths), *inner).to(dtype)
        assert torch.equal(jit(lambda x: x.to_padded(1))(jt), jt.to_padded(1))
        assert torch.equal(jit(_after)(jt, dense), dense + jt.to_padded())


def test_blocks_permuted_past_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours among the old rows are far from each other in the new order."""
    monkeypatch.setattr(launch, "last_level_cache", lambda: 0)
    cuts = torch.randint(0, 301, (4, 30)).sort(1).values
    offsets = torch.cat([torch.zeros(4, 1, dtype=torch.int64), cuts, torch.full((4, 1), 300)], 1)
    x = torch.randn(4, 300, 64)
    with ir.Fusion() as f:
        values, told = f.input((4, None, 64), torch.float32), f.input((4, None), torch.int64)
        y = ops.regroup(ops.as_nested(values, told, ragged_dim=1))
        f.output(y)
    want = torch.cat([x[g, offsets[g, p] : offsets[g, p + 1]] for p in range(31) for g in range(4)])
    for strategy in STRATEGIES:
        assert torch.equal(Compiled(f, "cpp", strategy)(x, offsets).values, want)
    assert "owner(" not in Compiled(f, "cpp").source(x, offsets)
    # By hand it can be asked for: positions of several rows as one block.
    y.merge(0).combine(0).split(0, 8).parallelize(0, "block_x").parallelize(1, "thread_x").parallelize(2, "thread_y")
    assert torch.equal(Compiled(f, "cpp")(x, offsets).values, want)


def test_rows_with_gaps_are_not_searched_for() -> None:
    """Whoever runs over rows knows which row it is in."""
    jt = JaggedTensor.from_starts(torch.randn(40, 3), [0, 20], [7, 15])
    program = jit(lambda x: x * 2, backend="cpp")
    assert torch.equal(program(jt).values, torch.cat([r * 2 for r in jt.unbind()]))
    assert "owner(" not in program.source(jt)
