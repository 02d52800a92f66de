"""Kernels that depend on the order of their iterations through memory, or have branches: right under every strategy, or refused.

Expected values are worked out row by row with plain torch and Python.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor
from serrate.errors import StrategyError

LENGTHS = [3, 0, 40, 1, 9, 5, 4]
GIANT = [2, 0, 60_000, 1, 7]


def rows(lengths: list[int]) -> JaggedTensor:
    torch.manual_seed(0)
    return JaggedTensor.from_lengths(torch.randn(sum(lengths)), lengths)


def in_a_branch(x: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(x.num_rows)
    for b in hl.grid(x.num_rows):
        if x.lengths[b] < 7:
            out[b] = 7.0
        else:
            acc = 0.0
            for k in hl.tile(x.max_length):
                acc = acc + x[b, k].sum()
            out[b] = acc
    return out


def in_the_other_branch(x: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(x.num_rows)
    for b in hl.grid(x.num_rows):
        if x.lengths[b] > 4:
            acc = 0.0
            for k in hl.tile(x.max_length):
                acc = acc + x[b, k].sum()
            out[b] = acc
    return out


def recurrence(x: JaggedTensor) -> JaggedTensor:
    out = torch.zeros_like(x)
    for b in hl.grid(x.num_rows):
        for k in hl.tile(x.max_length, block_size=1):
            out[b, k] = out[b, k.index - 1] * 0.5 + x[b, k]
    return out


def last_one_wins(x: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(x.num_rows, 2)
    for b in hl.grid(x.num_rows):
        for k in hl.tile(x.max_length, block_size=1):
            hl.store(out, [b, k.index % 2], x[b, k], extra_mask=k.index < x.lengths[b])
    return out


def stored_and_read_back(x: JaggedTensor) -> JaggedTensor:
    total = torch.zeros(x.num_rows)
    out = torch.zeros_like(x)
    for b in hl.tile(x.num_rows):
        acc = hl.zeros([b])
        for k in hl.tile(x.max_length):
            acc = acc + x[b, k].sum(1)
        total[b] = acc
        mine = total[b]
        for k in hl.tile(x.max_length):
            out[b, k] = x[b, k] * mine[:, None]
    return out


def cleared_first(x: JaggedTensor) -> JaggedTensor:
    out = torch.zeros_like(x)
    for b in hl.tile(x.num_rows):
        for k in hl.tile(2):
            out[b, k] = x[b, k] * 0.0 + 5.0
        for k in hl.tile(x.max_length):
            out[b, k] = x[b, k]
    return out


def one_more(x: JaggedTensor) -> torch.Tensor:
    out = torch.zeros(x.num_rows)
    for b in hl.grid(x.num_rows):
        acc = 0.0
        for k in hl.tile(x.max_length):
            acc = acc + x[b, k].sum()
        out[b] = acc + 1
    return out


def in_place(x: JaggedTensor) -> JaggedTensor:
    for b in hl.tile(x.num_rows):
        acc = hl.zeros([b])
        for k in hl.tile(x.max_length):
            acc = acc + x[b, k].sum(1)
        for k in hl.tile(x.max_length):
            x[b, k] = x[b, k] - acc[:, None]
    return x


def _recurrence(row: torch.Tensor) -> torch.Tensor:
    found, last = [], 0.0
    for v in row.tolist():
        last = last * 0.5 + v
        found.append(last)
    return torch.tensor(found)


def _last(row: torch.Tensor) -> torch.Tensor:
    found = [0.0, 0.0]
    for k, v in enumerate(row.tolist()):
        found[k % 2] = v
    return torch.tensor(found)


Expected = Callable[[torch.Tensor], torch.Tensor]
CASES: dict[str, tuple[Callable[..., object], Expected, str]] = {
    "in_a_branch": (in_a_branch, lambda r: (r.sum() if len(r) >= 7 else torch.tensor(7.0))[None], "inside an `if`"),
    "in_the_other_branch": (
        in_the_other_branch,
        lambda r: (r.sum() if len(r) > 4 else torch.tensor(0.0))[None],
        "inside an `if`",
    ),
    "recurrence": (recurrence, _recurrence, "one may read what another stores to out"),
    "last_one_wins": (last_one_wins, _last, ""),
    "stored_and_read_back": (stored_and_read_back, lambda r: r * r.sum(), "total is stored before"),
    "cleared_first": (cleared_first, lambda r: r, ""),
    "one_more": (one_more, lambda r: r.sum()[None] + 1, ""),
    "in_place": (in_place, lambda r: r - r.sum(), ""),
}


def close(found: object, x: JaggedTensor, expected: Expected) -> None:
    values = found.values if isinstance(found, JaggedTensor) else found
    assert isinstance(values, torch.Tensor)
    wanted = torch.cat([expected(r.double()).reshape(-1).float() for r in x.unbind()])
    torch.testing.assert_close(values.reshape(-1), wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", CASES)
def test_whole_rows(name: str, backend: str) -> None:
    kernel, expected, _ = CASES[name]
    for strategy in ("maskless", "masked"):
        x = rows(LENGTHS)
        close(serrate.kernel(kernel, strategy=strategy).on(backend)(x.with_values(x.values.clone())), x, expected)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_cut_only_where_that_changes_nothing(name: str) -> None:
    kernel, expected, reason = CASES[name]
    x = rows(LENGTHS)
    cut = serrate.kernel(kernel, strategy="persistent_dynamic", lanes={"chunk": 4})
    for backend in ("reference", "cpp"):
        made = cut.on(backend)
        if reason:
            with pytest.raises(StrategyError, match=reason):
                made(x)
        else:
            close(made(x.with_values(x.values.clone())), x, expected)


@pytest.mark.parametrize("name", CASES)
def test_one_giant_row_chooses_what_is_right(name: str) -> None:
    kernel, expected, _ = CASES[name]
    x = rows(GIANT)
    close(serrate.kernel(kernel)(x.with_values(x.values.clone())), x, expected)


def test_a_dense_loop_that_reads_its_own_stores_stays_in_order() -> None:
    def running(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for b in hl.grid(x.size(0)):
            for k in hl.tile(x.size(1), block_size=1):
                out[b, k] = out[b, k.index - 1] * 0.5 + x[b, k]
        return out

    x = torch.randn(3, 50)
    wanted = torch.stack([_recurrence(r) for r in x])
    for strategy, lanes in (("maskless", {}), ("persistent_dynamic", {"chunk": 4})):
        torch.testing.assert_close(serrate.kernel(running, strategy=strategy, lanes=lanes)(x), wanted)
    assert (
        "rows stay whole"
        in serrate.kernel(running, strategy="persistent_dynamic", lanes={"chunk": 4}).explain(x).stages[0].reasons[0]
    )


def test_a_scratch_that_differs_from_tile_to_tile_is_refused() -> None:
    def triangle(x: JaggedTensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.num_rows, w.size(0))
        for b in hl.grid(x.num_rows):
            for q in hl.tile(w.size(0), block_size=4):
                for j in hl.tile(q.begin, q.end, block_size=2):
                    acc = hl.zeros([j])
                    for k in hl.tile(x.max_length):
                        acc = acc + (x[b, k][:, None] * w[j][None, :]).sum(0)
                    out[b, j] = acc
        return out

    x, w = rows(LENGTHS), torch.randn(7)
    wanted = torch.stack([r.sum() for r in x.unbind()])[:, None] * w[None]
    torch.testing.assert_close(serrate.kernel(triangle, strategy="maskless")(x, w), wanted, rtol=1e-3, atol=1e-3)
    with pytest.raises(StrategyError, match="has a different size in each tile"):
        serrate.kernel(triangle, strategy="persistent_dynamic", lanes={"chunk": 4})(x, w)
