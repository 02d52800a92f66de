"""A strategy of somebody else's: this file and nothing more, and every operation runs under it on every backend.

In: `blocked`, which gives each worker several neighbouring rows, one after the other. Out: failures that name the structure,
the first bad coordinate and both values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch

import serrate
from serrate import JaggedTensor, jit
from serrate.errors import StrategyError
from serrate.ir.tile import Loop, TileProgram
from serrate.schedule.plan import Plan, Recorder
from serrate.schedule.prepare import Shape, prepare
from serrate.schedule.strategies import STRATEGIES
from serrate.schedule.strategies.common import PhaseBlocks, schedule, schedule_product, warps_for
from serrate.schedule.strategies.kernels import whole_rows
from serrate.schedule.target import Target
from tests.engine.across_cases import SCANS
from tests.engine.cases import CASES, NESTED_CASES
from tests.engine.matrix import run
from tests.engine.movement_cases import MOVEMENT
from tests.engine.oracle import BACKENDS, ONE_LEVEL, TWO_LEVELS
from tests.language.test_strategies import online_softmax

# --- the strategy --------------------------------------------------------------------------------------------------------


def blocked(
    program: TileProgram, target: Target, tile: int | None = None, rows: int = 3, lanes: Mapping[str, int] | None = None
) -> Plan:
    """for c: for r[c]: s  ->  grid co: serial ci: serial ro: lanes ri: s      (`rows` components are one worker's)"""
    recorder = Recorder(program)
    prepare(recorder)
    schedule(recorder, target, NeighbouringRows(tile, rows), lanes)
    return recorder.plan("blocked", warps_for(program, target))


@dataclass(frozen=True)
class NeighbouringRows:
    """Groups of components on the grid, the members of a group serially, a row of each serially in blocks."""

    tile: int | None
    size: int

    def _members(self, recorder: Recorder, shape: Shape) -> tuple[str, str]:
        assert shape.component is not None
        recorder.do("split", shape.phase, shape.component.name, self.size)
        return f"{shape.component.name}o", f"{shape.component.name}i"

    def per_component(self, recorder: Recorder, shape: Shape) -> tuple[list[str], list[str]]:
        return [self._members(recorder, shape)[0]], []

    def for_components(self, target: Target) -> Target:
        return target

    def per_row(self, recorder: Recorder, shape: Shape, block: int | None) -> tuple[list[str], list[str], list[str]]:
        assert shape.ragged is not None
        group, member = self._members(recorder, shape)
        if block is None:
            return [group], [member, shape.ragged.name], []
        recorder.do("split", shape.phase, shape.ragged.name, block)
        return [group], [member, f"{shape.ragged.name}o"], [f"{shape.ragged.name}i"]

    def product(self, recorder: Recorder, shape: Shape, target: Target) -> None:
        schedule_product(recorder, shape, target, rows=shape.ragged, before=self._members(recorder, shape), grid=1)

    def cut(self, recorder: Recorder, shape: Shape, block: int | None, target: Target) -> PhaseBlocks:
        return ((shape.phase, block),)

    def kernel(self, recorder: Recorder, target: Target, lanes: Mapping[str, int]) -> None:
        whole_rows(recorder, target, lanes, 1, near=False)
        phase = recorder.program.phases[0]
        assert isinstance(phase.body[0], Loop)
        programs = phase.body[0].domain.name
        recorder.do("split", phase.name, programs, self.size)
        recorder.do("mark", phase.name, f"{programs}i", "serial")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(STRATEGIES, "blocked", blocked)
    yield


# --- everything runs under it --------------------------------------------------------------------------------------------

ONE = ["relu_affine", "sum_rows", "max_of_sums", "softmax_rows", "layer_norm_both", "matmul_each", "matmul_each_sum"]
QUICK = ["softmax_rows", "matmul_each"]
"""What Triton's interpreter runs too, which is slow."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ONE)
def test_one_level(name: str, backend: str) -> None:
    if backend == "triton" and name not in QUICK:
        pytest.skip("Triton's interpreter runs a sample")
    run(CASES[name], backend, "blocked", (("tile", 2),), torch.float32, (5,), ONE_LEVEL, 1)


@pytest.mark.parametrize("name", ["softmax_groups", "sum_positions", "centered_groups"])
def test_two_levels(name: str) -> None:
    run(NESTED_CASES[name], "reference", "blocked", (), torch.float32, (5,), TWO_LEVELS, 2)


@pytest.mark.parametrize("name", ["cumsum_rows", "cumsum_of_softmax"])
def test_scans(name: str) -> None:
    run(SCANS[name], "cpp", "blocked", (("rows", 2),), torch.float32, (5,), ONE_LEVEL, 1)


@pytest.mark.parametrize("name", ["gather_positions", "slice_positions_1_minus_1"])
def test_movement(name: str) -> None:
    run(MOVEMENT[name], "cpp", "blocked", (), torch.float32, (5,), ONE_LEVEL, 1)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("lengths", [[2, 0, 3, 1], [], [0], [5] * 7, [1, 700, 0, 3, 1]])
def test_kernels_run_under_it(backend: str, lengths: list[int]) -> None:
    softmax = serrate.kernel(online_softmax, strategy="blocked")

    x = JaggedTensor.from_lengths(torch.randn(sum(lengths)), lengths)
    for got, row in zip(softmax.on(backend)(x).unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(got, row.softmax(0))
    assert "serial" in str(softmax.on(backend).variants(x)[0].plan)


def test_it_is_a_strategy_like_any_other() -> None:
    jt = JaggedTensor.from_lengths(torch.arange(6.0), [2, 0, 3, 1])
    total = jit(lambda x: x.sum(1), strategy="blocked")
    assert total(jt).tolist() == [1.0, 0.0, 9.0, 5.0]
    assert total.plan(jt).strategy == "blocked"
    assert "grid i.c0o{(n1 + 1) // 3}" in str(total.plan(jt).apply(total.compiled(jt)[0].stages[0].naive))


def test_its_options_are_checked() -> None:
    with pytest.raises(StrategyError, match=r"blocked takes tile, rows; got chunk"):
        total = jit(lambda x: x.sum(1), strategy="blocked").compiled(JaggedTensor.from_lengths(torch.zeros(1), [1]))[0]
        total.fusion.compile("reference", "blocked", chunk=2)
