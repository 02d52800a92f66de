"""`@serrate.kernel(backward="auto")`: gradients derived from the loops of a kernel, against torch, row by row, and against
differences; and what cannot be derived, with its line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import serrate
import serrate.language as hl
from serrate import JaggedTensor, Structure, engine
from serrate.errors import GradientError
from tests.language.test_examples import example

LENGTHS = [3, 0, 7, 1]
FEATURES = torch.tensor([2, 1, 3, 0])


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def flat(*features: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return drawn(sum(LENGTHS), *features, seed=seed, dtype=dtype)


def rows(x: Tensor) -> JaggedTensor:
    return JaggedTensor.from_lengths(x, LENGTHS)


def columns(x: Tensor) -> JaggedTensor:
    return JaggedTensor(x, Structure.from_lengths(torch.tensor(LENGTHS)).with_columns(FEATURES, packed=False))


def each(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of one row's tensors, for all rows."""

    def run(*args: Tensor) -> Tensor:
        parts = zip(*(x.split(LENGTHS) if len(x) == sum(LENGTHS) else list(x) for x in args), strict=True)
        return torch.cat([function(*part) for part in parts])

    return run


def attended(causal: bool) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0] if len(q) else v

    return attend


def hstu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = F.silu(torch.einsum("qhd,khd->hqk", q, k) * 0.5) * 0.25
    return torch.einsum("hqk,khd->qhd", scores.tril(), v)


def mean(x: Tensor, count: Tensor) -> Tensor:
    return torch.where(torch.arange(3) < count, x.sum(0) / max(len(x), 1), 0.0)[None]


def added(x: Tensor, dense: Tensor) -> Tensor:
    return torch.cat([dense[: len(x)] + x, dense[len(x) :]])[None]


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, list(x.shape), eps=1e-6) if len(x) else x


EXAMPLES: dict[str, tuple[str, str, Callable[..., tuple[Any, ...]], Callable[..., Tensor], list[Tensor]]] = {
    "sum": ("jagged_sum", "jagged", lambda x: (rows(x),), each(lambda x: x.sum(0)[None]), [flat(3)]),
    "softmax": ("jagged_softmax", "jagged", lambda x: (rows(x),), each(lambda x: x.softmax(0)), [flat(3)]),
    "layer norm": ("jagged_layer_norm", "jagged", lambda x: (rows(x),), each(normed), [flat(3)]),
    "mean": ("jagged_mean", "jagged", lambda x: (columns(x), 3), lambda x: each(mean)(x, FEATURES), [flat(3)]),
    "dense add": ("jagged_dense_add", "jagged", lambda x, y: (rows(x), y), each(added), [flat(), drawn(4, 9)]),
    "dense bmm": (
        "jagged_dense_bmm",
        "jagged",
        lambda x, w, b: (rows(x), w, b),
        each(lambda x, w, b: x @ w + b),
        [flat(3), drawn(4, 3, 2), drawn(4, 2)],
    ),
    "grouped gemm": ("grouped_gemm", "jagged", lambda x, w: (rows(x), w), lambda x, w: x @ w, [flat(3), drawn(3, 2)]),
    "a weight for each group": (
        "grouped_gemm",
        "jagged_per_group",
        lambda x, w: (rows(x), w),
        each(lambda x, w: x @ w),
        [flat(3), drawn(4, 3, 2)],
    ),
    **{
        name: (
            "jagged_flash_attention",
            "jagged",
            lambda q, k, v, causal=causal: (rows(q), rows(k), rows(v), causal),
            each(attended(causal)),
            [flat(4), flat(4, seed=1), flat(3, seed=2)],
        )
        for name, causal in (("attention", False), ("causal attention", True))
    },
    "hstu": (
        "jagged_hstu_attention",
        "jagged",
        lambda q, k, v: (rows(q), rows(k), rows(v), 0.5, 0.25),
        each(hstu),
        [flat(2, 4), flat(2, 4, seed=1), flat(2, 4, seed=2)],
    ),
}


def values(result: Any) -> Tensor:
    return result.values if isinstance(result, JaggedTensor) else result


@pytest.mark.parametrize(
    "backend", ["reference", pytest.param("cpp", marks=pytest.mark.slow), pytest.param("triton", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_gradients_of_the_examples_are_those_of_each_row(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERRATE_BACKEND", backend)
    serrate.settings.reload()
    file, kernel, arguments, plain, given = EXAMPLES[name]
    found = values(serrate.kernel(getattr(example(file), kernel).fn, backward="auto")(*arguments(*given)))
    wanted = plain(*given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    arriving = torch.linspace(-1, 2, wanted.numel()).view(wanted.shape)
    both = (torch.autograd.grad(y, given, arriving) for y in (found, wanted))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@serrate.kernel(backward="auto")
def scaled_softmax(jt: Any, scale: Any) -> Any:
    """Two loops over tiles of rows, and torch's functions around and between them."""
    out, totals = torch.empty_like(jt), torch.empty(jt.num_rows, jt.size(2), dtype=jt.dtype)
    twice = scale * 2
    for b, m in hl.tile([jt.num_rows, jt.size(2)]):
        top, total = hl.full([b, m], float("-inf"), dtype=jt.dtype), hl.zeros([b, m], dtype=jt.dtype)
        for k in hl.tile(jt.max_length):
            x = jt[b, k, m] * twice[m][None, None, :]
            new = torch.maximum(top, x.amax(1))
            total = total * torch.exp(top - new) + torch.exp(x - new[:, None, :]).sum(1)
            top = new
        for k in hl.tile(jt.max_length):
            out[b, k, m] = torch.exp(jt[b, k, m] * twice[m][None, None, :] - top[:, None, :]) / total[:, None, :]
    weighted = out.values * jt.values
    again = JaggedTensor.from_csr(weighted, jt.offsets)
    for b, m in hl.tile([jt.num_rows, jt.size(2)]):
        total = hl.zeros([b, m], dtype=jt.dtype)
        for k in hl.tile(jt.max_length):
            total = total + again[b, k, m].sum(1)
        totals[b, m] = total
    return out, totals.sum(0)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, pytest.param(torch.autograd.gradgradcheck, marks=pytest.mark.slow)])
def test_first_and_second_gradients_are_those_of_differences(check: Callable[..., bool]) -> None:
    def run(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        out, pooled = scaled_softmax(JaggedTensor.from_lengths(x, [2, 0, 1]), scale)
        return out.values, pooled

    given = drawn(3, 2, dtype=torch.float64), drawn(2, seed=1, dtype=torch.float64)
    assert check(run, given, fast_mode=True)


def test_new_lengths_build_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step, built, build = 0, list[int](), engine.build

    def counted(*args: Any, **kwargs: Any) -> Any:
        built.append(step)
        return build(*args, **kwargs)

    monkeypatch.setattr(engine, "build", counted)
    scale = drawn(2)
    for lengths in ([3, 1], [2, 2, 5], [1, 0, 4, 4], [6, 1], [0, 3]):
        step += 1
        x = drawn(sum(lengths), 2)
        out, _ = scaled_softmax(JaggedTensor.from_lengths(x, lengths), scale)
        (found,) = torch.autograd.grad(out.values.square().sum(), x)
        parts = torch.cat([(part * 2 * scale).softmax(0) for part in x.split(lengths)])
        (wanted,) = torch.autograd.grad(parts.square().sum(), x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert max(built, default=0) <= 2, built


@pytest.mark.usefixtures("reference")
def test_without_gradients_nothing_is_recorded() -> None:
    x, scale = flat(2), drawn(2)
    with torch.no_grad():
        assert not scaled_softmax(rows(x), scale)[0].requires_grad
    assert not scaled_softmax(rows(x.detach()), scale.detach())[1].requires_grad
    assert scaled_softmax(rows(x.detach()), scale)[1].requires_grad


@pytest.mark.usefixtures("reference")
def test_rows_that_are_only_stored_to_and_no_rows_at_all() -> None:
    @serrate.kernel(backward="auto")
    def spread(jt: Any, dense: Any) -> Any:
        out = torch.empty_like(jt)
        for b, m in hl.tile([jt.num_rows, jt.size(2)]):
            for k in hl.tile(jt.max_length):
                out[b, k, m] = dense[b, m][:, None, :] + hl.zeros([b, k, m])
        return out

    dense = drawn(4, 2)
    spread(rows(torch.zeros(sum(LENGTHS), 2)), dense).values.sum().backward()
    assert dense.grad is not None and dense.grad.tolist() == [[n, n] for n in LENGTHS]
    none = drawn(0, 2)
    found = scaled_softmax(JaggedTensor.from_lengths(none, []), drawn(2))[0]
    assert torch.autograd.grad(found.values.sum(), none)[0].shape == (0, 2)


@serrate.kernel(backward="auto")
def looked_up(table: Any, indices: Any, weights: Any) -> Any:
    """Sums of rows of a table at ragged indices, weighted."""
    out = torch.empty(indices.num_rows, table.size(1), dtype=table.dtype)
    for b, m in hl.tile([indices.num_rows, table.size(1)]):
        total = hl.zeros([b, m], dtype=table.dtype)
        for k in hl.jagged_tile(indices.lengths[b]):
            total = total + (table[indices[b, k], m] * weights[b, k][:, :, None]).sum(1)
        out[b, m] = total
    return out


@pytest.mark.usefixtures("reference")
def test_jagged_tiles_and_rows_at_indices_from_memory() -> None:
    indices = rows(torch.tensor([1, 1, 4, 0, 2, 2, 2, 4, 1, 0, 3]))
    table, weights = drawn(5, 2, dtype=torch.float64), flat(dtype=torch.float64)
    parts = zip(indices.values.split(LENGTHS), weights.split(LENGTHS), strict=True)
    wanted = torch.stack([(table[index] * own[:, None]).sum(0) for index, own in parts])
    torch.testing.assert_close(looked_up(table, indices, rows(weights)), wanted)
    assert torch.autograd.gradcheck(lambda t, w: looked_up(t, indices, rows(w)), (table, weights))


@pytest.mark.parametrize("single", [True, False], ids=["hl.grid", "tiles of one"])
@pytest.mark.usefixtures("reference")
def test_programs_of_one_row_each(single: bool) -> None:
    @serrate.kernel(backward="auto")
    def of_rows(jt: Any, scale: Any) -> Any:
        out = torch.empty(jt.num_rows, dtype=jt.dtype)
        for b in hl.grid(jt.num_rows):
            total = hl.zeros([], dtype=jt.dtype)
            for k in hl.tile(jt.max_length):
                total = total + (jt[b, k] * jt[b, k]).sum(0)
            out[b] = total * scale[b]
        return out

    @serrate.kernel(backward="auto")
    def of_tiles(jt: Any, scale: Any) -> Any:
        out = torch.empty(jt.num_rows, dtype=jt.dtype)
        for b in hl.tile(jt.num_rows, block_size=1):
            total = hl.zeros([b], dtype=jt.dtype)
            for k in hl.tile(jt.max_length):
                total = total + (jt[b, k] * jt[b, k]).sum(1)
            out[b] = total * scale[b]
        return out

    kernel, given = of_rows if single else of_tiles, (flat(dtype=torch.float64), drawn(4, dtype=torch.float64))
    wanted = torch.stack([row.square().sum() for row in given[0].split(LENGTHS)]) * given[1]
    torch.testing.assert_close(kernel(rows(given[0]), given[1]), wanted)
    assert torch.autograd.gradcheck(lambda x, s: kernel(rows(x), s), given)


def branches(x: Any) -> Any:
    out = torch.empty_like(x)
    for b in hl.tile(x.size(0)):
        if x[0] > 0:
            out[b] = x[b]
    return out


def adds(x: Any) -> Any:
    out = torch.zeros(1)
    for b in hl.tile(x.size(0)):
        hl.atomic_add(out, [0], x[b].sum())  # here
    return out


def overwrites(x: Any) -> Any:
    out = torch.zeros_like(x)
    for b in hl.tile(x.size(0)):
        out[b] = out[b] + x[b]  # here
    return out


def stores_twice(x: Any) -> Any:
    out = torch.zeros_like(x)
    for b in hl.tile(x.size(0)):
        out[b] = x[b]
        out[b] = x[b] * 2
    return out


def scatters(x: Any) -> Any:
    out, order = torch.zeros_like(x), torch.arange(x.size(0))
    for b in hl.tile(x.size(0)):
        out[order[b]] = x[b]  # here
    return out


def bounded_by_data(x: Any) -> Any:
    out = torch.zeros(1)
    for b in hl.tile(1):
        total = hl.zeros([b])
        for k in hl.tile(x[0].to(torch.int64)):
            total = total + x[k].sum(0)  # here
        out[b] = total
    return out


def scaled_by_block(x: Any) -> Any:
    out = torch.zeros_like(x)
    for b in hl.tile(x.size(0), block_size=2):
        out[b] = x[b] / x[b].abs().amax()  # here
    return out


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (branches, "a branch is not differentiated"),
        (adds, "an atomic addition is not differentiated"),
        (overwrites, "out is read, and the kernel also stores to it"),
        (stores_twice, "out is stored to in two places"),
        (scatters, "out is not stored once for each position"),
        (bounded_by_data, "is computed in the kernel"),
        (scaled_by_block, "max is reduced within the tile of line .*, one tile at a time"),
    ],
)
@pytest.mark.usefixtures("reference")
def test_what_is_in_the_way_is_named_with_its_line(function: Callable[..., Any], reason: str) -> None:
    kernel = serrate.kernel(function, backward="auto")
    x = torch.arange(1.0, 5.0)
    kernel(x)
    with pytest.raises(GradientError, match=f"{function.__name__}.*cannot differentiate line .*{reason}") as caught:
        kernel(x.requires_grad_())
    lines, first = inspect.getsourcelines(function)
    marked = [first + k for k, line in enumerate(lines) if "# here" in line]
    if marked:
        assert f"line {marked[0]} " in str(caught.value)
