"""The GPU table, as far as it goes without a GPU: tasks and their checks on a CPU, hand-written kernels under Triton's
interpreter, and a table in which some methods fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from typer.testing import CliRunner

from benchmarks import gpu, gpu_peers, gpu_training, handwritten_triton
from benchmarks.gpu import TASKS
from benchmarks.gpu_tasks import data_of
from benchmarks.gpu_training import TASKS as BOTH_PASSES
from benchmarks.gpu_training import training_peers
from benchmarks.options import Options
from serrate.cli import app
from tests.conftest import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"


def small(name: str) -> Any:
    task = replace(TASKS[name], mean=min(TASKS[name].mean, 20), features=tuple(min(n, 64) for n in TASKS[name].features))
    return task.make(data_of(task, "exponential", task.dtypes[0], DEVICE, rows=16))


@pytest.mark.sampled(1)
@pytest.mark.triton
@pytest.mark.parametrize("name", TASKS)
def test_results_are_right_and_wrong_ones_are_seen(name: str) -> None:
    work = small(name)
    arguments = work.arguments(work.data.tensor())
    got = work.call(*arguments)
    work.check(got)
    for wrong in off_by_one(got):
        with pytest.raises(AssertionError):
            work.check(wrong)


def off_by_one(got: Any) -> list[Any]:
    """Wrong results: of several gradients, each once."""
    if isinstance(got, tuple):
        return [(*got[:k], each + 1, *got[k + 1 :]) for k, each in enumerate(got)]
    return [got + 1 if isinstance(got, torch.Tensor) else got.with_values(got.values + 1)]


@pytest.mark.sampled(1)
@pytest.mark.triton
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("name", BOTH_PASSES)
def test_padding_and_torch_compute_the_same_gradients(name: str) -> None:
    methods = training_peers(name, small(name), compiled=False)
    for method in methods.keys() - {"NestedTensor", *(["varlen_attn"] if DEVICE == "cpu" else ())}:
        methods[method]()()


def test_a_peer_with_other_gradients_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_training.PADDED, "softmax", lambda mask, x: 1.1 * torch.softmax(x, 1))
    with pytest.raises(AssertionError):
        training_peers("softmax + backward", small("softmax + backward"), compiled=False)["padded"]()


LENGTHS = [5, 1, 200, 0, 37]
ROWS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "sum": (handwritten_triton.row_sums, lambda row: row.sum(0, keepdim=True)),
    "softmax": (handwritten_triton.row_softmax, lambda row: row.softmax(0)),
    "layer norm": (handwritten_triton.row_layer_norm, lambda row: functional.layer_norm(row, row.shape) if len(row) else row),
}


def rows(*width: int) -> torch.Tensor:
    return torch.randn(sum(LENGTHS), *width, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def bounds() -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], device=DEVICE)


@pytest.mark.triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ROWS)
def test_hand_written_kernels_over_rows(name: str) -> None:
    kernel, row = ROWS[name]
    x = rows(128)
    wanted = torch.cat([row(each) for each in x.split(LENGTHS)])
    torch.testing.assert_close(kernel(x, bounds()), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.triton
def test_hand_written_grouped_products() -> None:
    x = rows(128).to(torch.float16)
    weights = torch.randn(5, 128, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    wanted = torch.cat([row.float() @ w.float() for row, w in zip(x.split(LENGTHS), weights, strict=True)])
    torch.testing.assert_close(handwritten_triton.grouped_matmul(x, weights, bounds()).float(), wanted, rtol=1e-2, atol=5e-2)


@pytest.mark.triton
@pytest.mark.parametrize("causal", [False, True])
def test_hand_written_attention(causal: bool) -> None:
    q, k, v = (rows(2, 64).roll(n, 0).to(torch.float16) for n in range(3))
    wanted = []
    for row in zip(*(x.float().split(LENGTHS) for x in (q, k, v)), strict=True):
        own, keys, values = (x.transpose(0, 1) for x in row)
        wanted.append(functional.scaled_dot_product_attention(own, keys, values, is_causal=causal).transpose(0, 1))
    got = handwritten_triton.attention(q, k, v, bounds(), causal)
    torch.testing.assert_close(got.float(), torch.cat(wanted), rtol=1e-2, atol=1e-2)


@pytest.fixture
def without_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Methods are called, and their times are made up."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "captured", lambda run: run)
    monkeypatch.setattr(gpu, "device_times", lambda runs, rounds: dict.fromkeys(runs, 2.0))
    monkeypatch.setattr(gpu, "copy_runs", lambda moved: ({"copy": lambda: None}, 1.0))
    monkeypatch.setattr(gpu, "dense_run", lambda: ((lambda: None), 1.0))
    monkeypatch.setattr(gpu, "host_time", lambda run: (run(), 7.0)[1])
    for name in ("is_available", "get_device_name", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: "a device")
    gpu.host_times.cache_clear()
    yield
    gpu.host_times.cache_clear()


@pytest.mark.skipif(not INTERPRETED, reason="the device is pretended")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_what_fails_is_in_the_table_and_ends_nothing(
    without_a_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(work: Any) -> Any:
        raise RuntimeError("no such kernel\nin this build")

    monkeypatch.setitem(gpu_peers.TORCH, "from_padded", ("broken", broken))
    chosen = ("from_padded", "grouped matmul")
    for name in chosen:
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], rows=16, mean=8, features=TASKS[name].features and (64,)))
    options = Options(quick=True, only=chosen, lengths=("uniform", "giant"), compiled=False, out=tmp_path)
    assert gpu.main(options)
    cells = json.loads((tmp_path / "gpu.json").read_text())["cells"]
    assert [(c["task"], c["lengths"]) for c in cells] == [(name, kind) for name in chosen for kind in ("uniform", "giant")]
    padded, product = cells[0], cells[2]
    assert padded["errors"] == {"broken": "RuntimeError: no such kernel"}
    assert padded["percent"] == {"serrate": 100, "lengths known": 100, "replayed": 100, "NestedTensor": 100}
    assert padded["host_us"] == {"warm": 7.0, "new offsets": 7.0, "construction": 7.0}
    assert {"serrate", "hand-written Triton", "grouped_mm"} <= set(product["percent"]) | set(product["errors"])


@pytest.mark.skipif(not INTERPRETED, reason="the device is pretended")
def test_cells_are_compiled_before_they_are_timed(
    without_a_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In threads here, because processes would not see the pretended device."""
    monkeypatch.setitem(TASKS, "pointwise", replace(TASKS["pointwise"], rows=16, mean=8, features=(64,)))
    monkeypatch.setitem(TASKS, "sum", replace(TASKS["sum"], make=lambda data: 1 / 0))
    monkeypatch.setattr(gpu, "ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs))
    called: list[bool] = []

    def ours(work: Any, told: bool) -> Callable[[], None]:
        called.append(told)
        return lambda: None

    monkeypatch.setattr(gpu, "_ours", ours)
    options = Options(only=("sum", "pointwise"), dtypes=("float32",), lengths=("uniform",), quick=True, out=tmp_path, jobs=2)
    gpu.compile_ahead(gpu.selected(options), options)
    assert called == [False, True]


@pytest.mark.skipif(not INTERPRETED, reason="the device is pretended")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_cells_with_a_backward_pass(without_a_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = ("softmax + backward", "grouped matmul + backward")
    for name in chosen:
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], rows=16, mean=8, features=(64,)))
    assert gpu.main(
        Options(quick=True, only=chosen, lengths=("exponential",), dtypes=("bfloat16",), compiled=False, out=tmp_path)
    )
    softmax, product = json.loads((tmp_path / "gpu.json").read_text())["cells"]
    assert set(softmax["percent"]) == {"serrate", "lengths known", "padded"} and set(softmax["errors"]) == {"NestedTensor"}
    assert set(product["percent"]) == {"serrate", "lengths known", "padded", "grouped_mm"} and not product["errors"]
    assert product["host_us"] == {"warm": 7.0, "new offsets": 7.0, "construction": 7.0}


@pytest.mark.skipif(not INTERPRETED, reason="there is a device")
def test_without_a_device_it_says_what_is_missing() -> None:
    found = CliRunner().invoke(app, ["bench", "gpu", "--quick"])
    assert found.exit_code == 1 and "needs a CUDA device, and none was found" in found.output
