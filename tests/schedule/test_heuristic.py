"""What is chosen when nobody measures: by density, skew and size; for every composition, rows are what workers share.

In: facts about rows, and small calls. Out: the strategy, and what it was chosen from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from serrate import JaggedTensor, Structure, fusion_stage, jit
from serrate.engine import BuiltProgram, SizedProgram
from serrate.fusion_stage import FusionStage
from serrate.runtime.arguments import BoundCall
from serrate.runtime.bind import Binder
from serrate.schedule.heuristic import RowStatistics, choose
from serrate.schedule.target import CPU, GPU
from tests.conftest import INTERPRETED
from tests.engine.test_compositions import tensor_of


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (None, "maskless"),
        (RowStatistics(4096, 4096 * 128, 160, 256), "maskless"),  # dense, and long enough
        (RowStatistics(4096, 4096 * 128, 1100, 256), "maskless"),  # density 0.1, no row is a share
        (RowStatistics(4096, 4096 * 128, 2048 * 128, 256), "persistent_dynamic"),  # half of all in one row
        (RowStatistics(3, 30, 28, 4), "maskless"),  # skewed, and nothing to share
        (RowStatistics(100_000, 380_000, 4, 8), "masked"),  # dense and short
        (RowStatistics(100_000, 100_000, 4, 8), "maskless"),  # short, density 0.25
        (RowStatistics(100_000, 380_000, None, 8), "maskless"),  # nobody has looked
        (RowStatistics(0, 0, 0, 4), "maskless"),
    ],
)
def test_on_a_cpu(rows: RowStatistics | None, wanted: str) -> None:
    assert choose(rows, CPU)[0] == wanted


@pytest.mark.parametrize(
    ("rows", "product", "wanted"),
    [
        (RowStatistics(4096, 4096 * 256, 300, 512), False, "maskless"),
        (RowStatistics(4096, 4096 * 256, 2048 * 256, 512), False, "persistent_dynamic"),
        (RowStatistics(64, 64 * 1024, 1100, 512), False, "persistent_dynamic"),  # fewer rows than workers
        (RowStatistics(4096, 4096 * 256, 300, 512), True, "persistent_dynamic"),
        (RowStatistics(400_000, 1_500_000, 4, 64), False, "masked"),
        (RowStatistics(400_000, 1_500_000, None, 64), False, "persistent_dynamic"),
    ],
)
def test_on_a_gpu(rows: RowStatistics, product: bool, wanted: str) -> None:
    assert choose(rows, GPU, workers=132, product=product)[0] == wanted


@pytest.mark.parametrize(("mean", "tile"), [(0, 16), (1, 16), (17, 32), (33, 64), (64, 64), (65, None), (5000, None)])
def test_blocks_of_products_are_no_longer_than_rows_on_average(mean: int, tile: int | None) -> None:
    chosen = choose(RowStatistics(64, 64 * mean, None, 4096), GPU, workers=132, product=True)
    assert chosen.options.get("tile") == tile
    assert "tile" not in choose(RowStatistics(64, 64 * mean, 100_000, 4096), CPU, product=True).options


@pytest.mark.parametrize(
    ("body", "carried"),
    [
        (lambda x: x.sum(1), "sums"),
        (lambda x: x.amax(1) + 1, "sums"),
        (lambda x: torch.softmax(x, 1), "statistics"),
        (lambda x: torch.logsumexp(x, 1) + x.sum(1), "statistics"),
    ],
    ids=["sum", "maximum", "softmax", "both"],
)
def test_what_is_carried_along_rows_decides_the_sizes_of_rows_of_numbers(
    body: Callable[[JaggedTensor], object], carried: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watch(*args: Any, **kwargs: Any) -> object:
        seen.append(kwargs["carried"])
        return choose(*args, **kwargs)

    monkeypatch.setattr(fusion_stage, "choose", watch)
    jit(body, backend="reference")(JaggedTensor.from_lengths(torch.randn(5), [2, 0, 3]))
    assert seen == [carried]


def test_workers_that_combine_lanes_in_every_block_have_few_warps_and_groups_of_few_rows() -> None:
    long, short = RowStatistics(32768, 32768 * 2048, None, 4), RowStatistics(1 << 20, 32 << 20, None, 4)
    sums, statistics = (choose(long, GPU, 132, carried=c).options for c in ("sums", "statistics"))
    # Elements of a block that a thread holds.
    assert sums["tile"] // (32 * sums["warps"]) == 4
    assert statistics["tile"] // (32 * statistics["warps"]) == 16
    few, many = (choose(short, GPU, 132, carried=c).options["rows"] for c in ("statistics", "sums"))
    assert few < choose(short, GPU, 132).options["rows"] < many


def test_short_rows_are_not_cut_however_few_there_are() -> None:
    assert choose(RowStatistics(2, 3000, 2000, 256), CPU)[0] == "maskless"
    assert choose(RowStatistics(2, 6000, 4000, 256), CPU)[0] == "persistent_dynamic"


def test_long_rows_are_cut_only_where_others_would_wait() -> None:
    assert choose(RowStatistics(40, 40 * 4000, 4000, 256), CPU)[0] == "persistent_dynamic"
    assert choose(RowStatistics(400, 400 * 4000, 4000, 256), CPU)[0] == "maskless"


def test_a_row_is_kept_only_if_it_fits() -> None:
    assert choose(RowStatistics(100, 100_000, 1000, 256), CPU)[:2] == ("maskless", {"keep_rows": True})
    assert choose(RowStatistics(100, 1_000_000, 10_000, 256), CPU)[:2] == ("maskless", {"keep_rows": False})


SEEN: list[RowStatistics | None] = []


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()

    def watch(rows: RowStatistics | None, *args: object, **kwargs: object) -> object:
        SEEN.append(rows)
        return choose(rows, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(fusion_stage, "choose", watch)


@pytest.mark.parametrize(
    ("name", "dims", "wanted"),
    [
        ("one level", 1, RowStatistics(4, 10, 5, 16)),
        ("nested", 2, RowStatistics(4, 10, 5, 16)),  # sentences
        ("nested", (1, 2), RowStatistics(3, 10, 7, 16)),  # documents
        ("three levels", (1, 2, 3), RowStatistics(2, 10, 7, 16)),
        ("parts of equal number", 2, RowStatistics(4, 10, 5, 16)),
        ("rows of dim 1", 2, RowStatistics(4, 10, 5, 24)),
        ("independent", 3, RowStatistics(2, 5, 4, 80)),
        ("product", 2, RowStatistics(3, 14, 8, 8)),  # rectangles
        ("columns of the next dim", 2, RowStatistics(3, 14, 8, 8)),
        ("gaps", 1, RowStatistics(3, 7, 4, 16)),  # elements, not the room they have
        ("padded", 1, RowStatistics(3, 8, 5, 16)),
        ("one level", 2, None),  # nothing tells rows apart
    ],
)
def test_what_a_row_is(name: str, dims: int | tuple[int, ...], wanted: RowStatistics | None) -> None:
    jit(lambda x: x.sum(dims), backend="reference")(tensor_of(name))
    (seen,) = SEEN
    assert seen == wanted


def test_one_large_rectangle_is_cut() -> None:
    sides = torch.tensor([600, 10, 10])
    jt = JaggedTensor(torch.randn(int((sides * sides).sum())), Structure.from_lengths(sides).with_columns(sides))
    softmax = jit(lambda x: torch.softmax(x, 2))
    torch.testing.assert_close(softmax(jt).unbind()[0], torch.softmax(jt.unbind()[0], 1))
    assert softmax.plan(jt).strategy == "persistent_dynamic"


@pytest.mark.parametrize("rows", [RowStatistics(10, 1000, 100, 4), RowStatistics(1000, 128_000, 64_000, 256)])
@pytest.mark.parametrize("product", [False, True])
def test_what_lanes_must_be_does_not_choose_a_strategy(rows: RowStatistics, product: bool) -> None:
    for target in (CPU, GPU):
        other = replace(target, power_of_two_lanes=not target.power_of_two_lanes)
        assert choose(rows, other, 108, product=product) == choose(rows, target, 108, product=product)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's plans, on tensors of a CPU")
@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_similar_length_share_a_program(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of 17, 15 and 33 would have three different blocks."""
    # As on a device: nothing is copied from there to choose a plan.
    monkeypatch.setattr(Binder, "known_longest", lambda *_: None)
    total = jit(lambda x: x.sum(1), backend="triton")
    torch.use_deterministic_algorithms(deterministic)
    try:
        plans = []
        for mean in (17, 15, 33, 70):
            jt = JaggedTensor.from_lengths(torch.randn(2 * mean, 32), [mean - 1, mean + 1])
            torch.testing.assert_close(total(jt), torch.stack([row.sum(0) for row in jt.unbind()]))
            plans.append(total.plan(jt))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (plans[0] == plans[1] == plans[2]) is not deterministic
    assert plans[3] not in plans[:3]


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's plans, on tensors of a CPU")
def test_new_rows_run_the_program_for_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that differ only in their rows find the plan of earlier ones by the mean length."""
    monkeypatch.setattr(Binder, "known_longest", lambda *_: None)
    sized, plans = FusionStage.sized, []

    def noted(call: BoundCall, built: BuiltProgram) -> SizedProgram:
        plans.append(built.plan)
        return sized(call, built)

    monkeypatch.setattr(FusionStage, "sized", staticmethod(noted))
    total = jit(lambda x: x.sum(1), backend="triton")
    ran = []
    for mean in (17, 15, 33, 70, 16, 71):
        plans.clear()
        jt = JaggedTensor.from_lengths(torch.randn(2 * mean, 32), [mean - 1, mean + 1])
        torch.testing.assert_close(total(jt), torch.stack([row.sum(0) for row in jt.unbind()]))
        ran.append(plans[-1])
    assert ran[0] == ran[1] == ran[2] == ran[4] != ran[3] == ran[5]
