"""Settings of kernels: unknown names are refused, and settings without effect are reported.

In: configurations, settings of the decorator, backends, environment variables. Out: a failure where a misspelt one is accepted.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, settings
from serrate.api import kernel as kernels
from serrate.errors import BackendError, CallError, IgnoredWarning, SettingError, StrategyError


def doubled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for i, j in hl.tile([x.size(0), x.size(1)]):
        out[i, j] = x[i, j] * 2
    return out


@pytest.fixture(autouse=True)
def warned_anew() -> None:
    kernels._warn_once.cache_clear()


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: serrate.Config(block_size=[4]), CallError, "Config has no block_size: did you mean 'block_sizes'"),
        (lambda: serrate.Config(num_warp=4), CallError, "Config has no num_warp: did you mean 'num_warps'"),
        (lambda: serrate.Config(num_warps=3), CallError, "num_warps must be one of 1, 2, 4, 8, 16, 32, got 3"),
        (lambda: serrate.Config(num_warps=True), CallError, "num_warps must be one of 1, 2, 4, 8, 16, 32, got True"),
        (lambda: serrate.Config(num_stages=0), CallError, "num_stages must be one of 1, 2, 3, 4, 5, 6, 7, 8, got 0"),
        (lambda: serrate.Config(nonsense=1), CallError, "Config has no nonsense: choose from block_sizes, strategy"),
        (lambda: serrate.Config(strategy="masklss"), StrategyError, "unknown strategy 'masklss': did you mean 'maskless'"),
        (lambda: serrate.kernel(static_shape=True), CallError, "has no setting static_shape: did you mean 'static_shapes'"),
        (lambda: serrate.kernel(doubled, nonsense=True), CallError, "has no setting nonsense: choose from backward, config"),
        (lambda: serrate.kernel(static_shapes="yes"), CallError, "static_shapes is True, False or None: got 'yes'"),
        (lambda: serrate.kernel(autotune_effort="ful"), CallError, "autotune_effort='ful': did you mean 'full'"),
        (lambda: serrate.kernel(config={"block_sizes": [4]}), CallError, "config= is a serrate.Config, not a dict"),
        (
            lambda: serrate.kernel(doubled).on("nonsense"),
            BackendError,
            "no backend is called 'nonsense': choose from cpp, reference, triton",
        ),
        (lambda: serrate.kernel(doubled).on("ccp"), BackendError, "did you mean 'cpp'"),
    ],
)
def test_names_that_mean_nothing_are_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_a_kernel_shows_its_plan() -> None:
    kernel = serrate.kernel(doubled, strategy="maskless")
    assert str(kernel.plan(torch.ones(2, 2))).startswith("maskless")


def test_new_values_accept_the_device_that_ported_kernels_pass() -> None:
    @serrate.kernel
    def sums(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for i in hl.tile(x.size(0), block_size=2):
            acc = hl.zeros([i], dtype=x.dtype, device=x.device) + hl.full([i], 1.0, device=x.device)
            out[i] = x[i] + acc + hl.arange(2, device=x.device).sum()
        return out

    for run in (sums, sums.interpreted()):
        assert run(torch.zeros(4)).tolist() == [2.0] * 4


def test_kernels_follow_the_backend_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = serrate.kernel(doubled)
    kernel(torch.ones(2, 2))
    with monkeypatch.context() as patch:
        patch.setenv("SERRATE_BACKEND", "triton")
        settings.reload()
        assert kernel(torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]
        assert "@triton.jit" in kernel.source(torch.ones(2, 2))
    settings.reload()
    assert "@triton.jit" not in kernel.source(torch.ones(2, 2))
    assert kernel(torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "SERRATE_LOG",
            "nonsense",
            "SERRATE_LOG=nonsense is not a level or topic: choose from debug, info, warning, error, plan, passes",
        ),
        ("SERRATE_LOG", "plan,sorce", "SERRATE_LOG=sorce is not a level or topic: did you mean 'source'"),
        ("SERRATE_BACKEND", "cppp", "SERRATE_BACKEND=cppp is not a backend: did you mean 'cpp'"),
        ("SERRATE_CHECK", "maybe", "SERRATE_CHECK must be 0 or 1, got maybe"),
    ],
)
def test_environment_variables_that_mean_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        with pytest.raises(SettingError, match=message):
            settings.reload()
    settings.reload()


def test_what_has_no_effect_is_said_once() -> None:
    config = serrate.Config(block_sizes=[2, 2], num_warps=4, pid_type="flat")
    first = serrate.kernel(doubled, config=config, autotune_effort="none", dot_precision="ieee")
    with pytest.warns(IgnoredWarning) as found:
        first(torch.ones(3, 2))
    said = [str(w.message) for w in found]
    assert said == [f"{what} has no effect on a kernel yet" for what in ("pid_type='flat'", "dot_precision='ieee'")]
    # Kernels may run on several devices, so what is for a GPU is only reported.
    for what in ("pid_type='flat'", "dot_precision='ieee'", "num_warps=4"):
        assert f"without effect: {what}" in str(first.explain(torch.ones(3, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        serrate.kernel(doubled, config=config)(torch.ones(3, 2))
        serrate.kernel(doubled, autotune_effort="none", static_shapes=False)(torch.ones(3, 2))


@pytest.mark.parametrize(("static", "programs"), [(None, 2), (True, 4), (False, 1)])
def test_sizes_are_compiled_in_as_static_shapes_says(static: bool | None, programs: int) -> None:
    kernel = serrate.kernel(doubled, static_shapes=static).on("cpp")
    for columns in (3, 4, 5, 3, 6):
        x = torch.randn(2, columns)
        assert torch.equal(kernel(x), x * 2)
    assert sum(len(form.stages) for form in kernel.sites[0].programs.forms.values()) == programs


def test_a_size_that_a_kernel_needs_is_compiled_in_whatever_static_shapes_says() -> None:
    @serrate.kernel(static_shapes=False)
    def weighted(jt: JaggedTensor, n: int) -> torch.Tensor:
        out = torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            out[b] = (jt[b, 0][:, None] * hl.arange(n)[None, :]).sum(1)
        return out

    jt = JaggedTensor.from_lengths(torch.tensor([2.0, 3.0, 5.0]), [1, 2])
    for n in (3, 4, 3):
        assert weighted(jt, n).tolist() == [2.0 * sum(range(n)), 3.0 * sum(range(n))]


@pytest.mark.triton
def test_warps_and_stages_of_gpu_programs() -> None:
    @serrate.kernel(config=serrate.Config(num_warps=2, num_stages=5))
    def sums_and_products(jt, weight):
        sums, products = torch.empty(jt.num_rows, 8), torch.empty_like(jt)
        for b in hl.tile(jt.num_rows):
            total = hl.zeros([b, 8])
            for k in hl.tile(jt.max_length):
                total = total + jt[b, k, :].sum(1)
            sums[b, :] = total
        for b in hl.grid(jt.num_rows):
            for k in hl.tile(jt.lengths[b]):
                products[b, k, :] = jt[b, k, :] @ weight[:, :]
        return sums, products

    jt, weight = JaggedTensor.from_lengths(torch.randn(40, 8), [33, 0, 7]), torch.randn(8, 8)
    compiled = sums_and_products.on("triton")
    sums, products = compiled(jt, weight)
    torch.testing.assert_close(sums, torch.stack([row.sum(0) for row in jt.unbind()]))
    torch.testing.assert_close(products.values, jt.values @ weight)
    of_rows, of_products = [v.executable._launches for v in compiled.variants(jt, weight)]
    assert {launch.kernel._options["num_warps"] for launch in (*of_rows, *of_products)} == {2}
    assert {launch.kernel._options.get("num_stages") for launch in of_products} == {5}
    assert "num_stages=5" in compiled.source(jt, weight)
