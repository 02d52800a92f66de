"""Library calls as plans: their results are torch's, they are measured and remembered like other plans, and left out where bits
count. The oracle is plain torch, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

import serrate
import serrate.language as hl
from serrate import JaggedTensor, engine, ir, ops, settings
from serrate.analysis.library_calls import library_calls
from serrate.errors import InvarianceError, StrategyError
from serrate.fusion_stage import FusionStage
from serrate.ir.tile import Library
from serrate.runtime import library_executable
from serrate.runtime.library_executable import FUNCTIONS, LibraryExecutable, VendorFunction
from serrate.schedule.strategies import plan
from serrate.schedule.target import CPU, GPU
from serrate.tuner import record
from serrate.tuner.archive import export_archive, import_archive
from serrate.tuner.candidates import Candidate, Space, candidate_of
from serrate.tuner.measure import ProgramMeasurer
from serrate.tuner.search import EFFORTS, Effort, Halving

LENGTHS: list[list[int]] = [[3, 0, 7], [], [0], [0, 0, 0], [5], [1, 1, 1, 64]]
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float64: (1e-9, 1e-9), torch.bfloat16: (2e-2, 2e-2)}


def rows(lengths: Sequence[int], *features: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> JaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), *features, generator=generator, dtype=torch.float64)
    return JaggedTensor.from_lengths(values.to(dtype), list(lengths))


def product(x: Any, w: Any) -> Any:
    return x @ w


def attention(query: Any, key: Any, value: Any, is_causal: bool = False, scale: float | None = None) -> Any:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale).transpose(1, 2)


def product_by_row(x: JaggedTensor, weights: torch.Tensor) -> torch.Tensor:
    found = [row.double() @ w.double() for row, w in zip(x.unbind(), weights, strict=True)]
    return torch.cat(found) if found else torch.zeros(0, weights.size(2), dtype=torch.float64)


def attention_by_row(query: JaggedTensor, key: JaggedTensor, value: JaggedTensor, causal: bool, scale: float) -> torch.Tensor:
    """A loop over queries, with the weights written out."""
    found = [torch.zeros(0, *value.values.shape[1:], dtype=torch.float64)]
    for q, k, v in zip(query.unbind(), key.unbind(), value.unbind(), strict=True):
        for number, one in enumerate(q.double()):
            seen = slice(0, number + 1) if causal else slice(None)
            weights = torch.softmax(torch.einsum("hd,khd->hk", one, k.double()[seen]) * scale, dim=1)
            found.append(torch.einsum("hk,khd->hd", weights, v.double()[seen])[None])
    return torch.cat(found)


def close(got: JaggedTensor, wanted: torch.Tensor) -> None:
    rtol, atol = TOLERANCE[got.values.dtype]
    torch.testing.assert_close(got.values.double(), wanted, rtol=rtol, atol=atol)


def fusion(call: str, dtype: torch.dtype = torch.float32) -> Any:
    with ir.Fusion("grouped") as f:
        x, offsets = f.input((None, 8), dtype), f.input((None,), torch.int64)
        f.output(ops.matmul(ops.as_nested(x, offsets), f.input((None, 8, 16), dtype)))
    return f.compile("cpp", "library", call=call)


# --- results -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("depth", "width"), [(8, 16), (7, 5), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_grouped_products(lengths: list[int], depth: int, width: int, dtype: torch.dtype) -> None:
    x, weights = rows(lengths, depth, dtype=dtype), torch.randn(len(lengths), depth, width).to(dtype)
    grouped = serrate.jit(product, strategy="library")
    for _ in range(3):  # the first call, the one that leaves a binding, and a warm one
        close(grouped(x, weights), product_by_row(x, weights))
    assert grouped.plan(x, weights).strategy == "library"
    turned = serrate.jit(lambda x, w: x @ w.mT, strategy="library")
    close(turned(x, weights.mT.contiguous()), product_by_row(x, weights))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm(lengths: list[int], dtype: torch.dtype) -> None:
    x, weights = rows(lengths, 8, dtype=dtype), torch.randn(len(lengths), 8, 16).to(dtype)
    compiled = fusion("grouped_mm", dtype)
    for _ in range(3):
        close(compiled(x.values, x.offsets, weights), product_by_row(x, weights))
    assert str(compiled.plan(x.values, x.offsets, weights)).startswith("library: call grouped_mm")


@pytest.mark.parametrize("lengths", LENGTHS)
def test_one_weight(lengths: list[int]) -> None:
    x, weight = rows(lengths, 7), torch.randn(5, 7)
    close(serrate.jit(F.linear, strategy="library")(x, weight), x.values.double() @ weight.double().T)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [4, 6])
def test_attention(lengths: list[int], dtype: torch.dtype, causal: bool, width: int) -> None:
    query = rows(lengths, 2, 4, dtype=dtype)
    key = query.with_values(rows(lengths, 2, 4, dtype=dtype, seed=1).values)
    value = query.with_values(rows(lengths, 2, width, dtype=dtype, seed=2).values)
    called = serrate.jit(lambda q, k, v: attention(q, k, v, causal, 0.3), strategy="library")
    for _ in range(3):
        close(called(query, key, value), attention_by_row(query, key, value, causal, 0.3))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_to_other_rows(causal: bool) -> None:
    query = rows([3, 2, 0, 4, 6], 2, 4)
    key, value = rows([5, 0, 2, 4, 1], 2, 4, seed=1), rows([5, 0, 2, 4, 1], 2, 4, seed=2)
    value = key.with_values(value.values)
    called = serrate.jit(lambda q, k, v: attention(q, k, v, causal), strategy="library")
    close(called(query, key, value), attention_by_row(query, key, value, causal, 0.5))


def test_queries_without_keys_get_zeros() -> None:
    query, key = rows([3, 2], 2, 4), rows([0, 4], 2, 4, seed=1)
    value, out = key.with_values(key.values + 1), torch.full((5, 2, 4), float("nan"))
    run = executable(attention, "scaled_dot_product_attention", query, key, value)
    run([query.values, query.offsets, key.values, key.offsets, value.values, out], [query.offsets, key.offsets], ())
    close(query.with_values(out), attention_by_row(query, key, value, False, 0.5))


def test_attention_without_heads() -> None:
    query = rows([3, 0, 7], 4)
    key, value = query.with_values(rows([3, 0, 7], 4, seed=1).values), query.with_values(rows([3, 0, 7], 6, seed=2).values)
    found = serrate.jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), strategy="library")(query, key, value)
    heads = [x.with_values(x.values.unsqueeze(1)) for x in (query, key, value)]
    close(found, attention_by_row(*heads, False, 0.5).squeeze(1))


@pytest.mark.filterwarnings("ignore:.*is not contiguous and is copied")
def test_arguments_that_are_not_contiguous() -> None:
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 16, 8).mT
    apart = x.with_values(torch.stack([x.values, x.values], 2)[:, :, 0])
    assert not apart.values.is_contiguous() and not weights.is_contiguous()
    grouped = serrate.jit(product, strategy="library")
    for _ in range(3):
        close(grouped(apart, weights), product_by_row(x, weights))
    close(fusion("grouped_mm")(apart.values, x.offsets, weights), product_by_row(x, weights))


def test_new_offsets_and_changed_offsets() -> None:
    grouped, weights = serrate.jit(product, strategy="library"), torch.randn(3, 8, 5)
    for lengths in ([3, 0, 7], [3, 0, 7], [10, 0, 0], [2, 6, 2]):
        x = rows(lengths, 8)
        close(grouped(x, weights), product_by_row(x, weights))
    compiled, x = fusion("mm"), rows([3, 0, 7], 8)
    offsets, weights = x.offsets.clone(), torch.randn(3, 8, 16)
    for _ in range(3):
        compiled(x.values, offsets, weights)
    offsets[1] = 5
    changed = JaggedTensor.from_csr(x.values, torch.tensor([0, 5, 3, 10]).cummax(0).values)
    offsets[2] = 5
    close(compiled(x.values, offsets, weights), product_by_row(changed, weights))


def test_rows_with_gaps_are_no_such_call() -> None:
    apart = JaggedTensor.from_starts(torch.randn(12, 8), torch.tensor([0, 4, 5]), torch.tensor([3, 0, 7]))
    weights = torch.randn(3, 8, 5)
    with pytest.raises(StrategyError, match="not exactly one library call"):
        serrate.jit(product, strategy="library")(apart, weights)
    close(serrate.jit(product, tune="never")(apart, weights), product_by_row(apart, weights))


def test_autocast_does_not_reach_the_library() -> None:
    with ir.Fusion() as f:
        offsets = f.input((None,), torch.int64)
        f.output(ops.attention(*(ops.as_nested(f.input((None, 4), torch.float32), offsets) for _ in range(3))))
    given = [rows([3, 0, 7], 4, seed=k) for k in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = f.compile("cpp", "library")(given[0].offsets, *(x.values for x in given))
    heads = [x.with_values(x.values.unsqueeze(1)) for x in given]
    close(found, attention_by_row(*heads, False, 0.5).squeeze(1))


# --- what a user may name ------------------------------------------------------------------------------------------------


def test_a_program_that_is_not_such_a_call() -> None:
    with pytest.raises(StrategyError, match=r"not exactly one library call: a product of rows and weights, or attention"):
        serrate.jit(lambda x: x * 2, strategy="library")(rows([3], 8))
    with pytest.raises(StrategyError, match="it is mm or grouped_mm; name another strategy"):
        fusion("varlen_attn")(torch.randn(3, 8), torch.tensor([0, 3]), torch.randn(1, 8, 16))
    with pytest.raises(StrategyError, match=r"library: call='grouped': did you mean 'grouped_mm'"):
        fusion("grouped")


def test_a_kernel_is_not_such_a_call() -> None:
    @serrate.kernel(strategy="library")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for tile in hl.tile(x.size(0)):
            out[tile] = x[tile] * 2
        return out

    with pytest.raises(StrategyError, match="a kernel is not recognised as a library call"):
        doubled(torch.ones(3))


def test_what_a_function_refuses() -> None:
    with pytest.raises(StrategyError, match="grouped_mm takes float32 and bfloat16 and float16 on this device, got float64"):
        fusion("grouped_mm", torch.float64)(torch.randn(3, 8).double(), torch.tensor([0, 3]), torch.randn(1, 8, 16).double())
    with ir.Fusion() as f:
        x, offsets = f.input((None, 7), torch.float32), f.input((None,), torch.int64)
        f.output(ops.matmul(ops.as_nested(x, offsets), f.input((None, 7, 16), torch.float32)))
    with pytest.raises(StrategyError, match="needs rows of whole 16 bytes, and one of 7 elements has 28"):
        f.compile("cpp", "library", call="grouped_mm")(torch.randn(3, 7), torch.tensor([0, 3]), torch.randn(1, 7, 16))


# --- on a GPU, as far as that shows without one ---------------------------------------------------------------------------


def executable(function: Callable[..., Any], name: str, *args: Any) -> LibraryExecutable:
    (stage,) = serrate.jit(function, tune="never").compiled(*args)[0].stages
    assert isinstance(stage, FusionStage)
    scheduled = plan(stage.naive, "library", GPU, call=name).apply(stage.naive)
    assert scheduled.call is not None
    return LibraryExecutable(scheduled, scheduled.call, "program", ())


def test_grouped_mm_is_given_ends_of_groups_as_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = rows([3, 0, 7], 8, dtype=torch.bfloat16), torch.randn(3, 16, 8).bfloat16()
    seen: list[tuple[torch.Tensor, ...]] = []

    def grouped_mm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        seen.append((a, b, offs))
        return torch.cat([a[:3] @ b[0], a[3:] @ b[2]])

    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    run = executable(lambda x, w: x @ w.mT, "grouped_mm", x, weights)
    out = torch.empty(10, 16, dtype=torch.bfloat16)
    bound = run.bound([x.offsets], (), torch.device("cpu"))
    for _ in range(2):
        bound([], lambda: [x.values, x.offsets, weights, out])
    close(x.with_values(out), product_by_row(x, weights.mT))
    assert len(seen) == 2
    a, b, offs = seen[1]
    assert a is x.values and b.shape == (3, 8, 16) and b.data_ptr() == weights.data_ptr()
    assert offs.dtype == torch.int32 and offs.tolist() == [3, 3, 10]
    assert offs is seen[0][2]  # made once for all calls with these offsets


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_attn_is_given_offsets_and_bounds(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    query = rows([3, 0, 7], 2, 8, dtype=torch.bfloat16)
    key, value = (query.with_values(rows([3, 0, 7], 2, 8, dtype=torch.bfloat16, seed=k).values) for k in (1, 2))
    seen: list[dict[str, Any]] = []

    def varlen_attn(q: Any, k: Any, v: Any, own: Any, other: Any, max_q: int, max_k: int, **options: Any) -> torch.Tensor:
        seen.append(options)
        assert own.dtype == other.dtype == torch.int32 and own.tolist() == other.tolist() == [0, 3, 3, 10]
        assert max_q >= 7 and max_k >= 7
        jagged = [JaggedTensor.from_csr(x, own.long()) for x in (q, k, v)]
        return attention_by_row(*jagged, causal, options["scale"]).to(q.dtype)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    run = executable(lambda q, k, v: attention(q, k, v, causal), "varlen_attn", query, key, value)
    out = torch.empty(10, 2, 8, dtype=torch.bfloat16)
    run([query.values, query.offsets, key.values, value.values, out], [query.offsets], ())
    close(query.with_values(out), attention_by_row(query, key, value, causal, 8**-0.5))
    assert seen == [{"scale": pytest.approx(8**-0.5), "window_size": (-1, 0 if causal else -1)}]


def test_wrong_offsets_stay_inside() -> None:
    given = torch.tensor([0, 5, 3, -4, 99, 7])
    assert library_executable._bounds(given, 10).tolist() == [0, 5, 5, 5, 10, 10]


def test_what_a_gpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    device, capability = torch.device("cuda"), (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def refusal(name: str, function: Callable[..., Any], *args: Any) -> str:
        return FUNCTIONS[name].refusal(executable(function, name, *args).call, device)

    def heads(dtype: torch.dtype, *widths: int) -> list[JaggedTensor]:
        first = rows([3, 0, 7], 2, widths[0], dtype=dtype)
        return [first, *(first.with_values(torch.randn(10, 2, width).to(dtype)) for width in widths)]

    half = torch.bfloat16
    x, weights = rows([3, 0, 7], 8, dtype=half), torch.randn(3, 8, 16).bfloat16()
    assert refusal("grouped_mm", product, x, weights) == ""
    assert "lengths on the host" in refusal("mm", product, x, weights)
    assert refusal("mm", product, x, weights[0]) == ""
    assert refusal("grouped_mm", product, x.float(), weights.float()) == "takes bfloat16 on this device, got float32"
    assert "rows of whole 16 bytes" in refusal("grouped_mm", product, rows([3, 2], 4, dtype=half), weights[:2, :4].contiguous())
    assert "results of whole 16 bytes" in refusal("grouped_mm", product, x, weights[:, :, :5].contiguous())
    assert refusal("varlen_attn", attention, *heads(half, 8, 8)) == ""
    assert "takes bfloat16 and float16" in refusal("varlen_attn", attention, *heads(torch.float32, 8, 8))
    assert "a multiple of 8" in refusal("varlen_attn", attention, *heads(half, 4, 4))
    assert "equally many features" in refusal("varlen_attn", attention, *heads(half, 8, 16))
    query, key, value = heads(half, 8, 8)
    other = JaggedTensor.from_lengths(key.values, [5, 0, 5])
    causal = refusal("varlen_attn", lambda q, k, v: attention(q, k, v, True), query, other, other.with_values(value.values))
    assert "aligns the last query" in causal
    assert refusal("varlen_attn", attention, query, other, other.with_values(value.values)) == ""
    capability = (7, 5)
    assert "compute capability 8.0" in refusal("grouped_mm", product, x, weights)
    assert "compute capability 8.0" in refusal("varlen_attn", attention, *heads(half, 8, 8))
    device = torch.device("cpu")
    assert "needs a CUDA device" in refusal("varlen_attn", attention, *heads(half, 8, 8))


# --- the tuner -----------------------------------------------------------------------------------------------------------


class Measured:
    """Stands in for the clock: candidates run, and take the time that is written here."""

    def __init__(self) -> None:
        self.seconds = {"library(call=mm)": 1e-3, "library(call=grouped_mm)": 2e-3, "library": 1e-3}
        self.searches = 0

    def measurer(self, *args: Any) -> ProgramMeasurer:
        outer, self.searches = self, self.searches + 1

        class Fake(ProgramMeasurer):
            def run(self, candidate: Candidate, repeats: int) -> float:
                super().run(candidate, repeats)
                return outer.seconds.get(str(candidate), outer.seconds.get(candidate.strategy, 5e-3))

        return Fake(*args)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, private_cache: Path) -> Iterator[Measured]:
    """Programs are tuned with an empty cache and in no hurry, and a library is the fastest."""
    made = Measured()
    monkeypatch.setattr(engine, "ProgramMeasurer", made.measurer)
    monkeypatch.setenv("SERRATE_TUNE", "first_call")
    monkeypatch.setitem(EFFORTS, "quick", Effort("quick", 60.0, 60.0, Halving(steps=0)))
    settings.reload()
    record.forget()
    yield made
    record.forget()


MM = Candidate("library", (("call", "mm"),))


def test_a_call_is_measured_chosen_and_remembered(measured: Measured) -> None:
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    grouped = serrate.jit(product)
    for _ in range(3):
        close(grouped(x, weights), product_by_row(x, weights))
    (known,) = grouped.tunings(x, weights)
    assert (known.chosen, known.source, measured.searches) == (MM, "measured", 1)
    tried = {str(each.candidate): each for each in known.tried}
    assert tried["library(call=mm)"].seconds == 1e-3 and not tried["library(call=mm)"].reason
    assert {"library(call=grouped_mm)", "maskless(keep_rows=True)", "masked", "persistent_dynamic"} <= set(tried)
    report = str(grouped.explain(x, weights))
    assert "* library(call=mm)" in report and "1 ms" in report and "T4 = mm(T0[d0, d1], T3[c0, d1, d5]" in report

    # Another process finds it on disk.
    record.forget()
    again = serrate.jit(product)
    close(again(x, weights), product_by_row(x, weights))
    assert again.plan(x, weights).strategy == "library"
    assert (again.tunings(x, weights)[0].source, measured.searches) == ("remembered", 1)

    # And so does an operator, which is not measured itself.
    close(x @ weights, product_by_row(x, weights))
    assert measured.searches == 1


def test_reasons_why_a_call_is_not_timed(measured: Measured) -> None:
    x, weights = rows([3, 0, 7], 7), torch.randn(3, 7, 5)
    grouped = serrate.jit(product)
    grouped(x, weights)
    why = "grouped_mm needs rows of whole 16 bytes, and one of 7 elements has 28"
    tried = {str(each.candidate): each for each in grouped.tunings(x, weights)[0].tried}
    assert (tried["library(call=grouped_mm)"].seconds, tried["library(call=grouped_mm)"].reason) == (None, why)
    assert why in str(grouped.explain(x, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_within_rounding_are_accepted(measured: Measured, dtype: torch.dtype) -> None:
    query = rows([30, 0, 70], 2, 8, dtype=dtype)
    key, value = (query.with_values(rows([30, 0, 70], 2, 8, dtype=dtype, seed=k).values) for k in (1, 2))
    attend = serrate.jit(lambda q, k, v: attention(q, k, v, True))
    close(attend(query, key, value), attention_by_row(query, key, value, True, 8**-0.5))
    assert str(attend.tunings(query, key, value)[0].chosen) == "library(call=scaled_dot_product_attention)"
    x, weights = rows([30, 0, 70], 64, dtype=dtype), torch.randn(3, 64, 16).to(dtype)
    grouped = serrate.jit(product)
    grouped(x, weights)
    assert grouped.tunings(x, weights)[0].chosen == MM


def test_wrong_results_are_not_chosen(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(offsets: torch.Tensor, transposed: bool) -> Callable[..., None]:
        return lambda x, w, out: out.fill_(1.0)

    monkeypatch.setitem(FUNCTIONS, "mm", VendorFunction(wrong, FUNCTIONS["mm"].refusal))
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    grouped = serrate.jit(product)
    close(grouped(x, weights), product_by_row(x, weights))
    (known,) = grouped.tunings(x, weights)
    assert str(known.chosen) == "library(call=grouped_mm)"
    assert any(each.candidate == MM and "differ" in each.reason for each in known.tried)


def test_nothing_calls_a_library_without_measuring() -> None:
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    grouped = serrate.jit(product, tune="never")
    grouped(x, weights)
    assert grouped.plan(x, weights).strategy != "library"
    assert "library(call=mm)" in str(grouped.explain(x, weights))
    assert "* library(call=mm)" in str(serrate.jit(product, strategy="library").explain(x, weights))
    assert not any(trial.chosen for trial in grouped.explain(x, weights).stages[0].trials if trial.strategy == "library")


def test_deterministic_algorithms_leave_libraries_out(measured: Measured) -> None:
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    grouped, named = serrate.jit(product), serrate.jit(product, strategy="library")
    for _ in range(3):
        grouped(x, weights), named(x, weights)
    assert grouped.plan(x, weights).strategy == "library"
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            close(grouped(x, weights), product_by_row(x, weights))
        (known,) = grouped.tunings(x, weights)
        assert known.chosen.strategy != "library" and all(each.candidate.strategy != "library" for each in known.tried)
        assert grouped.plan(x, weights).strategy != "library"
        with pytest.raises(StrategyError, match=r"not used under torch.use_deterministic_algorithms\(True\)"):
            named(x, weights)
    finally:
        torch.use_deterministic_algorithms(False)
    assert grouped.plan(x, weights).strategy == "library"
    assert measured.searches == 2


def test_a_warm_call_under_deterministic_algorithms_does_not_call_a_library(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        run = original(*args, **kwargs)

        def counted(*given: torch.Tensor) -> None:
            nonlocal called
            called += 1
            run(*given)

        return counted

    original = FUNCTIONS["mm"].bound
    monkeypatch.setitem(FUNCTIONS, "mm", VendorFunction(counting, FUNCTIONS["mm"].refusal))
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    grouped = serrate.jit(product)
    for _ in range(4):
        grouped(x, weights)
    before = called
    grouped(x, weights)
    assert called == before + 1
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(4):
            grouped(x, weights)
    finally:
        torch.use_deterministic_algorithms(False)
    assert called == before + 1


def test_batch_invariance_leaves_libraries_out(measured: Measured) -> None:
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    grouped, named = serrate.jit(product), serrate.jit(product, strategy="library")
    grouped(x, weights)
    with serrate.batch_invariant():
        assert grouped.plan(x, weights).strategy == "maskless"
        close(grouped(x, weights), product_by_row(x, weights))
        with pytest.raises(InvarianceError, match="library"):
            named(x, weights)


@pytest.mark.parametrize("named", [None, "library"])
def test_gradients(measured: Measured, named: str | None) -> None:
    def gradients(run: Callable[..., Any], *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in given]
        found = run(*leaves)
        found.backward(torch.linspace(-1, 1, found.numel()).reshape(found.shape))
        return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)

    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    grouped = serrate.jit(product, strategy=named)
    for _ in range(3):
        found = gradients(lambda v, w: grouped(x.with_values(v), w).values, x.values, weights)
        wanted = gradients(lambda v, w: torch.cat([v[:3] @ w[0], v[3:] @ w[2]]), x.values, weights)
        for got, own in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, own)
    recorded = grouped(x.with_values(x.values.clone().requires_grad_()), weights).values
    assert "Mm" not in type(recorded.grad_fn).__name__ and recorded.requires_grad

    query = rows([3, 0, 7], 2, 4)
    key, value = (query.with_values(rows([3, 0, 7], 2, 4, seed=k).values) for k in (1, 2))
    attend = serrate.jit(attention, strategy=named)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = [F.scaled_dot_product_attention(*(x[a:b].transpose(0, 1) for x in (q, k, v))) for a, b in ((0, 3), (3, 10))]
        return torch.cat([part.transpose(0, 1) for part in parts])

    found = gradients(lambda *all: attend(*map(query.with_values, all)).values, query.values, key.values, value.values)
    wanted = gradients(plain, query.values, key.values, value.values)
    for got, own in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-5)


def test_a_derived_program_may_be_such_a_call(measured: Measured) -> None:
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    grouped = serrate.jit(product, strategy="library")
    values = x.values.clone().requires_grad_()
    grouped(x.with_values(values), weights).values.sum().backward()
    (derived,) = grouped.compiled(x.with_values(values), weights)[0]._gradients.values()
    assert derived.forward.strategy == "library"


def test_fusions_are_tuned_alike(measured: Measured) -> None:
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    with ir.Fusion() as f:
        values, offsets = f.input((None, 8), torch.float32), f.input((None,), torch.int64)
        f.output(ops.matmul(ops.as_nested(values, offsets), f.input((None, 8, 16), torch.float32)))
    compiled = f.compile("cpp")
    for _ in range(3):
        close(compiled(x.values, x.offsets, weights), product_by_row(x, weights))
    assert compiled.tunings(x.values, x.offsets, weights)[0].chosen == MM


def test_a_call_travels_in_an_archive(measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    serrate.jit(product)(x, weights)
    assert export_archive(settings.current().cache_dir, tmp_path / "plans.zip").records == 1
    monkeypatch.setenv("SERRATE_CACHE_DIR", str(tmp_path / "other"))
    settings.reload()
    assert import_archive(tmp_path / "other", tmp_path / "plans.zip").added == 1
    again = serrate.jit(product)
    close(again(x, weights), product_by_row(x, weights))
    assert (again.tunings(x, weights)[0].chosen, measured.searches) == (MM, 1)


def test_a_remembered_call_that_cannot_run_is_reported(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    serrate.jit(product)(x, weights)
    refuses = VendorFunction(FUNCTIONS["mm"].bound, lambda call, device: "is not in this version of torch")
    monkeypatch.setitem(FUNCTIONS, "mm", refuses)
    with pytest.warns(UserWarning, match=r"remembered plan library\(call=mm\) cannot be used \(mm is not in this version"):
        close(serrate.jit(product)(x, weights), product_by_row(x, weights))


def test_candidates() -> None:
    space = Space(Candidate("maskless"), CPU, threads=2, calls=("mm", "grouped_mm"))
    shown = ["maskless", "library(call=mm)", "library(call=grouped_mm)", "masked", "persistent_dynamic"]
    assert [str(each) for each in space.openings()] == shown
    assert not space.variants(MM) and not space.sharings(MM)
    assert "library" not in {each.strategy for each in Space(Candidate("maskless"), CPU).everything()}
    assert candidate_of(MM.as_dict()) == MM
    with pytest.raises(ValueError, match="names of library calls"):
        candidate_of({**MM.as_dict(), "options": {"call": "rm"}})


def test_a_plan_is_printed_and_replayed() -> None:
    x, weights = rows([3, 0, 7], 8), torch.randn(3, 8, 16)
    (stage,) = serrate.jit(product, tune="never").compiled(x, weights)[0].stages
    assert isinstance(stage, FusionStage)
    made = plan(stage.naive, "library", CPU)
    assert made.lines == ("library", "  call mm")
    again = made.apply(stage.naive)
    assert isinstance(again.call, Library) and not again.phases
    assert str(again.call) == str(library_calls(stage.naive)["mm"])
    assert plan(stage.naive, "library", GPU).lines == ("library", "  call grouped_mm")
