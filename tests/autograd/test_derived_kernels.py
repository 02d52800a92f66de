"""`@serrate.kernel(backward="auto")`: gradients derived from the loops of a kernel, against torch, row by row, and against
differences; and what cannot be derived, with its line."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import serrate
import serrate.language as hl
from serrate import JaggedTensor, Structure, engine
from serrate.errors import GradientError, KernelIndexError
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


def reads_a_prefix(x: Any) -> Any:
    out = torch.empty_like(x)
    for _ in hl.tile(1):
        total = hl.zeros([])
        for k in hl.tile(x.size(0), block_size=1):
            total = total + x[k].sum(0)
            out[k] = x[k] * total  # here
    return out


def reads_before_adding(x: Any) -> Any:
    out = torch.empty_like(x)
    for _ in hl.tile(1):
        total = hl.zeros([])
        for k in hl.tile(x.size(0), block_size=2):
            out[k] = x[k] * total  # here
            total = total + x[k].sum(0)
    return out


def sums_prefixes(x: Any) -> Any:
    out = torch.empty(1)
    for b in hl.tile(1):
        total, products = hl.zeros([]), hl.zeros([])
        for k in hl.tile(x.size(0), block_size=1):
            total = total + x[k].sum(0)
            products = products + (x[k] * total).sum(0)  # here
        out[b] = products + hl.zeros([b])
    return out


def rescales_what_is_not_relative(x: Any) -> Any:
    out = torch.empty(1)
    for b in hl.tile(1):
        top, total = hl.full([], float("-inf")), hl.zeros([])
        for k in hl.tile(x.size(0), block_size=2):
            new = torch.maximum(top, x[k].amax(0))
            total = total * torch.exp(top - new) + x[k].sum(0)  # here
            top = new
        out[b] = total + hl.zeros([b])
    return out


def ends_with_a_tile(x: Any) -> Any:
    out = torch.empty_like(x)
    for b in hl.tile(x.size(0)):
        total = hl.zeros([b])
        for k in hl.tile(0, b.end):
            total = total + torch.where(b.index[:, None] + 1 >= k.index[None, :], x[k][None, :], 0.0).sum(1)  # here
        out[b] = total
    return out


def uses_where_a_tile_begins(x: Any) -> Any:
    out = torch.empty_like(x)
    for b in hl.tile(x.size(0)):
        out[b] = x[b] * b.begin  # here
    return out


def counts_tiles(x: Any) -> Any:
    out = torch.empty(1)
    for b in hl.tile(1):
        total, part = hl.zeros([b]), x[0]
        for _ in hl.tile(x.size(0), block_size=2):
            total = total + part
        out[b] = total * total
    return out


def adds_the_same_for_each_tile(x: Any) -> Any:
    out = torch.empty(1)
    for b in hl.tile(1):
        total = hl.zeros([])
        for _ in hl.tile(x.size(0), block_size=2):
            total = total + x[0:3].sum(0)  # here
        out[b] = total * total + hl.zeros([b])
    return out


def stores_in_another_loop(x: Any) -> Any:
    out = torch.zeros_like(x)
    for b in hl.tile(x.size(0)):
        for _ in hl.tile(x.size(0)):
            out[b] = x[b]  # here
    return out


def detaches(x: Any) -> Any:
    out = torch.empty_like(x)
    for b in hl.tile(x.size(0)):
        out[b] = x[b].detach() * x[b]  # here
    return out


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (detaches, r"detach\(\) in a kernel is ignored"),
        (branches, "a branch is not differentiated"),
        (adds, "an atomic addition is not differentiated"),
        (overwrites, "out is read, and the kernel also stores to it"),
        (stores_twice, "out is stored to in two places"),
        (scatters, "out is not stored once for each position"),
        (bounded_by_data, "is computed in the kernel"),
        (scaled_by_block, "max is reduced within the tile of line .*, one tile at a time"),
        (reads_a_prefix, "total is read inside the tile of line .*, before the loop has combined all of it"),
        (reads_before_adding, "total is read inside the tile of line .*, before the loop has combined all of it"),
        (sums_prefixes, "products is carried from position to position by .*, and is not a reduction"),
        (rescales_what_is_not_relative, "total is carried from tile to tile by .*, and is not a reduction"),
        (ends_with_a_tile, "where the tile of line .* ends depends on the tile of line .*, and positions after that"),
        (uses_where_a_tile_begins, "a number depends on the size of the tiles"),
        (counts_tiles, "total is carried from tile to tile by .*, and is not a reduction"),
        (adds_the_same_for_each_tile, "total is carried from tile to tile by .*, and is not a reduction"),
        (stores_in_another_loop, "out is not stored once for each position"),
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


def correlated(x: Any, y: Any, out: Any) -> Any:
    for b in hl.grid(x.num_rows):
        for i in hl.tile(x.max_length):
            for j in hl.tile(y.max_length):
                out[b, i, j] = x[b, i, :] @ y[b, j, :].T  # here
    return out


KEYS = [2, 1, 3, 0]


def pairs(packed: bool) -> JaggedTensor:
    """Zeros for each pair of a position of a row of LENGTHS and one of a row of KEYS."""
    structure = Structure.from_lengths(torch.tensor(LENGTHS)).with_columns(torch.tensor(KEYS), packed=packed)
    sizes = [sum(n * m for n, m in zip(LENGTHS, KEYS, strict=True))] if packed else [sum(LENGTHS), max(KEYS)]
    return JaggedTensor(torch.zeros(sizes, dtype=torch.float64), structure)


def test_products_of_rows_with_padded_columns() -> None:
    """The message below names them."""
    kernel = serrate.kernel(correlated, backward="auto")
    x, y = drawn(sum(LENGTHS), 3, dtype=torch.float64), drawn(sum(KEYS), 3, seed=1, dtype=torch.float64)
    parts = zip(x.split(LENGTHS), y.split(KEYS), strict=True)
    wanted = torch.autograd.grad(sum((a @ b.T).square().sum() for a, b in parts), (x, y))  # type: ignore[arg-type]
    out = kernel(rows(x), JaggedTensor.from_lengths(y, KEYS), pairs(packed=False))
    torch.testing.assert_close(torch.autograd.grad(out.values.square().sum(), (x, y)), wanted)


@pytest.mark.usefixtures("reference")
def test_products_of_rows_with_packed_columns_are_named_as_such() -> None:
    """The message spoke of an array that the compiler had named."""
    kernel = serrate.kernel(correlated, backward="auto")
    x, y = flat(3, dtype=torch.float64), drawn(sum(KEYS), 3, dtype=torch.float64)
    reason = "differentiate line .*# here.*: out has two ragged dims side by side, and packs .*, packed=False"
    with pytest.raises(GradientError, match=reason):
        kernel(rows(x), JaggedTensor.from_lengths(y, KEYS), pairs(packed=True))


@pytest.mark.usefixtures("reference")
def test_results_with_gaps_are_named_as_such() -> None:
    def scaled(x: Any, out: Any) -> Any:
        for b in hl.grid(out.num_rows):
            for i in hl.tile(out.max_length):
                out[b, i] = x[b] * 2
        return out

    gaps = JaggedTensor.from_starts(torch.zeros(8), [0, 4], [3, 2])
    with pytest.raises(GradientError, match=r"the rows of out may have gaps; pack them before the kernel: out.contiguous\(\)"):
        serrate.kernel(scaled, backward="auto")(drawn(2), gaps)


CONDITIONS = ("i % 4 < 2", "7 - i < 3", "i // 3 < 2", "i * -1 < -2", "i < 100", "i < 3", "(i % 4 < 2) & (i > 1)", "i + 3 < 8")


@pytest.mark.parametrize("where", ["load", "store"])
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.usefixtures("reference")
def test_conditions_on_positions(condition: str, where: str, tmp_path: Path) -> None:
    mask = condition.replace("i", "t.index").replace("t.indexndex", "t.index")
    stored = {
        "load": f"out[t] = hl.load(x, [t], extra_mask={mask}) * 2",
        "store": f"hl.store(out, [t], x[t] * 2, extra_mask={mask})",
    }
    lines = ["def masked(x):", "    out = torch.zeros_like(x)", "    for t in hl.tile(x.size(0)):", f"        {stored[where]}"]
    path = tmp_path / "masked.py"
    path.write_text("\n".join(["import torch", "import serrate.language as hl", *lines, "    return out", ""]))
    spec = importlib.util.spec_from_file_location("masked", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = drawn(8)
    found = serrate.kernel(module.masked, backward="auto")(x)
    chosen = eval(condition, {"i": torch.arange(8)})
    torch.testing.assert_close(found, torch.where(chosen, x * 2, 0.0))
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient.tolist() == (chosen * 2.0).tolist()


@pytest.mark.usefixtures("reference")
def test_loops_that_end_before_rows_do() -> None:
    @serrate.kernel(backward="auto")
    def first_two(jt: Any) -> Any:
        out, totals = torch.zeros_like(jt), torch.zeros(jt.num_rows)
        for b in hl.tile(jt.num_rows):
            total = hl.zeros([b])
            for k in hl.tile(2):
                out[b, k] = jt[b, k] * 3
                total = total + jt[b, k].sum(1)
            totals[b] = total
        return out, totals

    @serrate.kernel(backward="auto")
    def but_one(jt: Any) -> Any:
        out = torch.zeros_like(jt)
        for b in hl.tile(jt.num_rows - 1):
            for k in hl.tile(jt.max_length):
                out[b, k] = jt[b, k] * 3
        return out

    x = flat()
    out, totals = first_two(rows(x))
    (found,) = torch.autograd.grad(out.values.sum() + totals.sum(), x)
    assert found.tolist() == [4.0 if k < 2 else 0.0 for n in LENGTHS for k in range(n)]
    with pytest.raises(GradientError, match=r"the tile of line \d+, which leaves rows out"):
        but_one(rows(x))


@pytest.mark.usefixtures("reference")
def test_sums_over_single_positions() -> None:
    @serrate.kernel(backward="auto")
    def twice(x: Any) -> Any:
        out = torch.empty(x.size(0), dtype=x.dtype)
        for b in hl.tile(x.size(0)):
            first, second = hl.zeros([b], dtype=x.dtype), hl.zeros([b], dtype=x.dtype)
            for k in hl.tile(x.size(1), block_size=1):
                part = x[b, k].sum(1)
                first = first + part
                second = second + part
            for j in hl.grid(x.size(1)):
                second = second + x[b, j] * x[b, j]
            out[b] = first * second
        return out

    x = drawn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(twice(x), x.sum(1) * (x.sum(1) + x.square().sum(1)))
    assert torch.autograd.gradcheck(twice, (x,))


def test_functions_whose_accurate_form_has_no_useful_derivative() -> None:
    """`log1p` compensates for the rounding of 1 + x, which is 0 / 0 at 0: its derivative is that of log(1 + x)."""

    @serrate.kernel(backward="auto")
    def logs(x: Any) -> Any:
        out = torch.empty_like(x)
        for b in hl.tile(x.size(0)):
            out[b] = torch.log1p(x[b]) + torch.nn.functional.softplus(x[b]) * torch.expm1(x[b])
        return out

    x = torch.tensor([0.0, 1e-9, 0.5, 18.0], requires_grad=True)
    other = x.detach().clone().requires_grad_()
    want = torch.log1p(other) + torch.nn.functional.softplus(other) * torch.expm1(other)
    torch.testing.assert_close(logs(x), want)
    logs(x).sum().backward()
    want.sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


@serrate.kernel(backward="auto")
def replaced(x: Any, base: Any, masked: bool) -> Any:
    out = base * 1.0
    for t in hl.tile(x.size(0)):
        if masked:
            hl.store(out, [t], x[t] * 2, extra_mask=t.index >= 2)
        else:
            out[t] = x[t] * 2
    return out


@pytest.mark.usefixtures("reference")
def test_stores_to_tensors_that_have_a_gradient() -> None:
    x, base = drawn(6), drawn(6, seed=1)
    of_x, of_base = torch.autograd.grad(replaced(x, base, False).sum(), (x, base), materialize_grads=True)
    assert (of_x.tolist(), of_base.tolist()) == ([2.0] * 6, [0.0] * 6)
    with pytest.raises(GradientError, match="a store that may leave elements of a tensor as they are"):
        replaced(x, base, True)
    (found,) = torch.autograd.grad(replaced(x, base.detach(), True).sum(), x)
    assert found.tolist() == [0.0, 0.0, 2.0, 2.0, 2.0, 2.0]


@serrate.kernel(backward="auto")
def gathered(x: Any, index: Any) -> Any:
    out = torch.empty(index.size(0), dtype=x.dtype)
    for t in hl.tile(index.size(0)):
        out[t] = x[index[t]] * x[index[t]]
    return out


@pytest.mark.usefixtures("reference")
def test_integers_that_change_before_the_backward_pass_are_an_error() -> None:
    x, index = drawn(6), torch.tensor([0, 0, 1, 2])
    out = gathered(x, index)
    index.fill_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    jt = rows(flat())
    total = scaled_softmax(JaggedTensor.from_csr(jt.values[:, None], jt.offsets.clone()), drawn(1))[1]
    total.sum().backward()


def doubles(x: Any) -> Any:
    out = torch.empty_like(x)
    for t in hl.tile(x.size(0)):
        out[t] = x[t] * 2
    return out


@pytest.mark.usefixtures("reference")
def test_what_is_saved_is_torch_s_to_keep() -> None:
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x.clone()

    x = drawn(6)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = gathered(x * 1.0, torch.tensor([0, 0, 1, 2]))
    assert sorted(t.dtype.is_floating_point for t in kept) == [False, True]
    (found,) = torch.autograd.grad(out.sum(), x)
    assert found.tolist() == [4 * x[0].item(), 2 * x[1].item(), 2 * x[2].item(), 0, 0, 0]

    doubled = serrate.kernel(doubles, backward="auto")
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        doubled(x)
    assert not any(t.is_floating_point() and t.numel() for t in kept), "nothing is saved that the backward pass does not read"

    activation = x * 2.0
    gone = weakref.ref(activation)
    loss = gathered(activation, torch.tensor([0, 1])).sum()
    del activation
    loss.backward()
    gc.collect()
    assert gone() is None, "the loss keeps what the backward pass needed"


@pytest.mark.usefixtures("reference")
def test_the_backward_program_has_the_settings_of_the_kernel() -> None:
    def square(x: Any) -> Any:
        out = torch.empty_like(x)
        for b in hl.tile(x.num_rows):
            for k in hl.tile(x.max_length):
                out[b, k] = x[b, k] * x[b, k]
        return out

    for options in ({"tune": "never"}, {"effort": "none"}, {"strategy": "maskless"}, {"strategy": "persistent_dynamic"}):
        kernel = serrate.kernel(square, backward="auto", **options)
        x = flat()
        kernel(rows(x)).values.sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach())
        (loop,) = kernel._derived._loops.values()
        (program,) = loop._backward.values()
        assert program.program.policy == kernel.policy
        assert program.program.strategy in (options.get("strategy"), None)
    assert serrate.kernel(square, backward="auto", tune="never").policy.tune == "never"


@pytest.mark.usefixtures("reference")
def test_checked_calls_are_checked_with_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERRATE_CHECK", "1")
    serrate.settings.reload()
    x = drawn(4)
    with pytest.raises(KernelIndexError, match="out of bounds"):
        gathered(x, torch.tensor([0, 1, 9]))
    gathered(x, torch.tensor([0, 1, 1])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2 * x[0].item(), 4 * x[1].item(), 0, 0]


@pytest.mark.usefixtures("reference")
def test_gradients_that_copy_an_argument_say_so_at_the_users_line() -> None:
    """A kernel reads it in place, and its backward program does not."""

    @serrate.kernel(backward="auto")
    def square(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for t, u in hl.tile([x.size(0), x.size(1)]):
            out[t, u] = x[t, u] * x[t, u]
        return out

    x = drawn(3, 4).detach().T.requires_grad_()
    with pytest.warns(UserWarning, match="square: x is not contiguous, and its gradients copy it at every call") as told:
        for _ in range(2):
            (found,) = torch.autograd.grad(square(x).sum(), x)
    assert [each.filename for each in told] == [__file__]
    torch.testing.assert_close(found, 2 * x)


def test_programs_are_shown_for_arguments_that_require_gradients() -> None:
    def doubled(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for t in hl.tile(x.size(0)):
            out[t] = x[t] * 2
        return out

    x = torch.ones(3, requires_grad=True)
    for kernel in (serrate.kernel(backward="auto")(doubled), serrate.kernel(backward=lambda x, y, g: 2 * g)(doubled)):
        assert torch.equal(kernel(x), x * 2)
        assert "doubled" in kernel.source(x) and "doubled" in kernel.program(x)
        assert kernel.plan(x).strategy == kernel.explain(x).stages[0].strategy
        assert [known.program for known in kernel.tunings(x)] == ["doubled"]
