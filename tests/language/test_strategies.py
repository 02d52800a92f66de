"""What strategies do to the loops of a kernel, and what `explain` says of it.

In: kernels under every strategy. Out: a failure where numbers differ from plain torch, or `explain` from the code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from benchmarks.examples import EXAMPLES, QUICK, case
from serrate import JaggedTensor
from serrate.errors import StrategyError
from serrate.ir.values import Role

SHORT, LOPSIDED = [3, 0, 7, 10], [30000, 1, 0, 2]


def ragged(lengths: list[int]) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)), lengths)


@pytest.mark.parametrize("options", [{"strategy": "masked"}, {"config": serrate.Config(block_sizes=[3, 4])}], ids=str)
def test_rows_side_by_side_meet_a_dense_row(options: dict[str, Any]) -> None:
    @serrate.kernel(**options)
    def k(jt: JaggedTensor, p: torch.Tensor) -> JaggedTensor:
        out = torch.zeros_like(jt)
        for b in hl.tile(jt.num_rows):
            for t in hl.tile(jt.max_length):
                out[b, t] = jt[b, t] - p[t][None, :]
        return out

    jt, p = ragged(SHORT), torch.randn(8, generator=torch.Generator().manual_seed(1))
    wide = torch.cat([p, torch.zeros(2)])
    torch.testing.assert_close(k(jt, p).values, torch.cat([r - wide[: len(r)] for r in jt.unbind()]))


def sums(block: int | None, strategy: str | None) -> Any:
    @serrate.kernel(strategy=strategy)
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows, block_size=block):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                acc = acc + jt[b, t].sum(1)
            out[b] = acc
        return out

    return k


def doubled(block: int | None, strategy: str | None) -> Any:
    @serrate.kernel(strategy=strategy)
    def k(jt: JaggedTensor) -> JaggedTensor:
        out = torch.zeros_like(jt)
        for b, t in hl.tile([jt.num_rows, jt.max_length], block_size=[block, None]):
            out[b, t] = jt[b, t] * 2
        return out

    return k


@pytest.mark.parametrize("made", [sums, doubled])
def test_a_list_of_pieces_takes_one_row_at_a_time(made: Any) -> None:
    with pytest.raises(StrategyError, match=r"takes one row at a time, but the tile of line .* has 2 lanes"):
        made(2, "persistent_dynamic")(ragged(SHORT))


def test_several_rows_at_a_time_stay_whole_where_one_is_long() -> None:
    jt = ragged(LOPSIDED)
    found = sums(2, None)
    torch.testing.assert_close(found(jt), torch.stack([r.sum() for r in jt.unbind()]), rtol=1e-3, atol=1e-3)
    assert found.explain(jt).stages[0].strategy == "maskless"
    torch.testing.assert_close(doubled(2, None)(jt).values, jt.values * 2)


def test_explain_says_that_rows_are_cut_only_where_they_are() -> None:
    jt = ragged(SHORT)
    cut = sums(None, "persistent_dynamic")
    assert "are cut into pieces" in plan_of(cut, jt) and "cut k tr" in plan_of(cut, jt) and "_kept" in cut.source(jt)
    tiles = doubled(None, "persistent_dynamic")
    assert "programs are the tiles of" in plan_of(tiles, jt) and "cut" not in plan_of(tiles, jt)
    assert "_kept" not in tiles.source(jt)


def plan_of(kernel: Any, jt: JaggedTensor) -> str:
    """The plan and its reasons, as `explain` says them."""
    (stage,) = kernel.explain(jt).stages
    return "\n".join((*stage.plan, *stage.reasons))


def nested(strategy: str | None) -> Any:
    @serrate.kernel(strategy=strategy)
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for _ in hl.grid(2):
                for t in hl.tile(jt.max_length):
                    acc = acc + jt[b, t].sum(1)
            out[b] = acc
        return out

    return k


def halved(strategy: str | None) -> Any:
    @serrate.kernel(strategy=strategy)
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc = hl.zeros([b])
            for _ in hl.grid(2):
                for t in hl.tile(jt.max_length):
                    acc = acc + jt[b, t].sum(1)
                acc = acc * 0.5
            out[b] = acc
        return out

    return k


@pytest.mark.parametrize(("made", "factor"), [(nested, 2.0), (halved, 0.75)])
@pytest.mark.parametrize("lengths", [SHORT, LOPSIDED], ids=["short", "lopsided"])
def test_rows_are_cut_inside_other_loops(made: Any, factor: float, lengths: list[int]) -> None:
    jt, found = ragged(lengths), serrate.kernel(made(None).fn, strategy="persistent_dynamic", lanes={"chunk": 64})
    torch.testing.assert_close(found(jt), torch.stack([factor * r.sum() for r in jt.unbind()]), rtol=1e-3, atol=1e-3)
    assert "are cut into pieces" in plan_of(found, jt) and "_kept" in found.source(jt)


def test_explain_says_that_rows_stay_whole() -> None:
    @serrate.kernel(strategy="persistent_dynamic")
    def dense(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            out[b] = jt.lengths[b] * 2.0
        return out

    jt = ragged(SHORT)
    text = plan_of(dense, jt)
    assert "rows stay whole" in text and "cut" not in text and "_kept" not in dense.source(jt)


def test_rows_stay_whole_where_they_need_what_a_loop_around_them_carries() -> None:
    @serrate.kernel
    def k(jt: JaggedTensor) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            acc, scale = hl.zeros([b]), hl.full([b], 1.0, torch.float32)
            for _ in hl.grid(2):
                for t in hl.tile(jt.max_length):
                    acc = acc + (jt[b, t] * scale[:, None]).sum(1)
                scale = scale * 0.5
            out[b] = acc
        return out

    jt = ragged(LOPSIDED)
    torch.testing.assert_close(k(jt), torch.stack([1.5 * r.sum() for r in jt.unbind()]), rtol=1e-3, atol=1e-3)
    assert k.explain(jt).stages[0].strategy == "maskless"
    with pytest.raises(StrategyError, match="needs scale, which a loop around it carries"):
        serrate.kernel(k.fn, strategy="persistent_dynamic")(jt)


def test_a_lopsided_batch_is_cut() -> None:
    jt = ragged(LOPSIDED)
    for made in (sums(None, None), nested(None)):
        assert made.explain(jt).stages[0].strategy == "persistent_dynamic"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_shared_out_in_parts(name: str) -> None:
    """The loops are others than those of whole rows, and the results are the same."""
    sample = case(name, "uniform", QUICK)
    programs, results = [], []
    for strategy, lanes in (("maskless", {}), ("persistent_dynamic", {"chunk": 4})):
        made = serrate.kernel(sample.kernel.fn, config=sample.kernel.config, strategy=strategy, lanes=lanes).on("reference")
        found = made(*sample.arguments)
        results.append(found.values if isinstance(found, JaggedTensor) else found)
        programs.append([str(kernel) for v in made.variants(*sample.arguments) for kernel in v.executable.program.kernels])
    assert programs[0] != programs[1]
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


@serrate.kernel(strategy="persistent_dynamic", lanes={"chunk": 4})
def by_loops(x: JaggedTensor, rows: torch.Tensor) -> JaggedTensor:
    out = torch.zeros_like(x)
    for b in hl.grid(rows.size(0)):
        for k in hl.tile(x.max_length):
            out[b, k] = x[b, k] * 2
    return out


@serrate.kernel(strategy="persistent_dynamic", lanes={"k": 4})
def by_programs(x: JaggedTensor, rows: torch.Tensor) -> JaggedTensor:
    out = torch.zeros_like(x)
    for b, k in hl.tile([rows.size(0), x.max_length]):
        out[b, k] = x[b, k] * 2
    return out


@serrate.kernel(strategy="persistent_dynamic", lanes={"k": 4, "m": 2})
def by_columns(x: JaggedTensor, rows: torch.Tensor) -> JaggedTensor:
    wide = torch.zeros(x.total_elements, 3)
    out = x.with_values(wide)
    for b, k, m in hl.tile([rows.size(0), x.max_length, 3]):
        out[b, k, m] = (x[b, k] * 2)[:, :, None] + hl.zeros([b, k, m])
    return x.with_values(wide[:, 1])


@serrate.kernel(strategy="persistent_dynamic", lanes={"chunk": 4})
def by_columns_and_loops(x: JaggedTensor, rows: torch.Tensor) -> JaggedTensor:
    wide = torch.zeros(x.total_elements, 3)
    out = x.with_values(wide)
    for b, m in hl.tile([rows.size(0), 3]):
        for k in hl.tile(x.max_length):
            out[b, k, m] = (x[b, k] * 2)[:, :, None] + hl.zeros([b, k, m])
    return x.with_values(wide[:, 1])


@pytest.mark.parametrize("kernel", [by_loops, by_programs, by_columns, by_columns_and_loops], ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_an_axis_may_be_told_another_number_than_there_are_rows(kernel: Any, backend: str) -> None:
    """Rows past the last one are not there; of a loop over fewer, only these are done."""
    x = ragged([3, 0, 11, 1, 7])
    for count in (0, 2, 5, 9):
        got = kernel.on(backend)(x, torch.zeros(count)).unbind()
        for k, (one, row) in enumerate(zip(got, x.unbind(), strict=True)):
            assert torch.equal(one, row * 2 if k < count else row * 0)


def online_softmax(x: JaggedTensor) -> JaggedTensor:
    out = torch.empty_like(x)
    for b in hl.tile(x.num_rows):
        top, total = hl.full([b], float("-inf"), torch.float32), hl.zeros([b])
        for k in hl.tile(x.max_length):
            new = torch.maximum(top, x[b, k].amax(1))
            total = total * torch.exp(top - new) + torch.exp(x[b, k] - new[:, None]).sum(1)
            top = new
        for k in hl.tile(x.max_length):
            out[b, k] = torch.exp(x[b, k] - top[:, None]) / total[:, None]
    return out


def test_private_rows_are_no_longer_than_a_part() -> None:
    """Rows that are kept while they are worked on are short ones; a long row needs no memory of its own in every thread."""

    softmax = serrate.kernel(online_softmax, strategy="persistent_dynamic", lanes={"chunk": 16})

    for lengths in ([3, 5000, 0, 16, 17], [9, 4], [0], []):
        x = ragged(lengths)
        for got, row in zip(softmax(x).unbind(), x.unbind(), strict=True):
            torch.testing.assert_close(got, row.softmax(0))
    (variant,) = softmax.on("cpp").variants(ragged([3, 5000]))
    rows = [t for t in variant.executable.program.scratch if t.role is Role.PRIVATE]
    assert rows and all(str(d.extent_expr).startswith("min(16, ") for t in rows for d in t.storage)


@pytest.mark.parametrize("lengths", [SHORT, [], [1]], ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_rows_are_cut_if_a_variable_holds_their_number(backend: str, lengths: list[int]) -> None:
    @serrate.kernel(strategy="persistent_dynamic", lanes={"chunk": 2})
    def k(jt: JaggedTensor) -> torch.Tensor:
        count, longest = jt.num_rows, jt.max_length
        out = torch.zeros(count)
        for b in hl.tile(count):
            acc = hl.zeros([b])
            for t in hl.tile(longest):
                acc = acc + jt[b, t].sum(1)
            out[b] = acc
        return out

    jt = ragged(lengths)
    torch.testing.assert_close(k.on(backend)(jt), torch.tensor([float(row.sum()) for row in jt.unbind()]))


def test_with_static_shapes_a_number_of_rows_is_known_when_the_kernel_is_compiled() -> None:
    @serrate.kernel(static_shapes=True)
    def k(jt: JaggedTensor) -> JaggedTensor:
        count = jt.num_rows
        out = torch.empty_like(jt)
        for b in hl.tile(count):
            for t in hl.tile(jt.max_length):
                out[b, t] = jt[b, t] * (2 if count > 2 else 3)
        return out

    for lengths, factor in (([1, 2], 3), (SHORT, 2)):
        torch.testing.assert_close(k(ragged(lengths)).values, ragged(lengths).values * factor)


def test_variables_that_are_set_again_hold_other_numbers() -> None:
    @serrate.kernel
    def fewer(jt: JaggedTensor) -> torch.Tensor:
        count = jt.num_rows
        out = torch.zeros(count)
        count = count - 1
        for b in hl.tile(count):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                acc = acc + jt[b, t].sum(1)
            out[b] = acc
        return out

    @serrate.kernel
    def of_another(jt: JaggedTensor, other: JaggedTensor) -> torch.Tensor:
        count = jt.num_rows
        jt = other
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(count):
            acc = hl.zeros([b])
            for t in hl.tile(jt.max_length):
                acc = acc + jt[b, t].sum(1)
            out[b] = acc
        return out

    jt = ragged(SHORT)
    wanted = torch.tensor([*(float(row.sum()) for row in jt.unbind()[:-1]), 0.0])
    torch.testing.assert_close(fewer(jt), wanted)
    torch.testing.assert_close(of_another(ragged([1, 2, 3]), jt), wanted)
