"""Random small tile programs: every tile size, backend and plan gives the same numbers.

In: a drawn expression, reduction and batch of lengths, against plain torch row by row; and programs of many kinds, drawn by
`programs.py`, against the interpreter. Out: a failure with the program's text.
"""

from __future__ import annotations

from random import Random
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import serrate
from tests.conftest import FULL
from tests.language import kinds
from tests.language.programs import KINDS, Program, agree, write

LEAVES = ("jt[b, t, m]", "other[b, t]{col}", "dense[b, t, m]", "row[b, m]{row}", "rows.lengths[b]{len}")
UNARY = ("torch.exp(-{0}.abs())", "torch.sigmoid({0})", "{0}.clamp(-1, 1)", "torch.where({0} > 0, {0}, 0.5)", "({0} * 2 - 1)")
BINARY = ("({0} + {1})", "({0} * {1})", "({0} - {1})", "torch.maximum({0}, {1})", "({0} / (1 + {1}.abs()))")
REDUCTIONS = {
    "sum": ("0.0", "acc + {0}.sum(1)"),
    "amax": ("-torch.inf", "torch.maximum(acc, {0}.amax(1))"),
    "amin": ("torch.inf", "torch.minimum(acc, {0}.amin(1))"),
    "prod": ("1.0", "acc * {0}.prod(1)"),
    "any": ("0.0", "torch.maximum(acc, ({0} > 0.3).any(1).to(torch.float32))"),
    "product": ("0.0", "acc + torch.where({0} > 0, {0}, 0.0).transpose(1, 2).sum(2)"),
}

expressions = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.builds(lambda f, a: f.replace("{0}", a), st.sampled_from(UNARY), inner),
        st.builds(lambda f, a, b: f.replace("{0}", a).replace("{1}", b), st.sampled_from(BINARY), inner, inner),
    ),
    max_leaves=4,
)

HEAD = """
import torch
import serrate
import serrate.language as hl

@serrate.kernel
def program(jt, other, dense, row, rows, n):
    out, kept = torch.empty(jt.num_rows, row.size(1)), torch.zeros_like(jt)
    for b, m in hl.tile([jt.num_rows, row.size(1)]):
        acc = hl.full([b, m], {start})
        for t in hl.tile(n):
            x = {expression}
            acc = {update}
        out[b, m] = acc
        for t in hl.tile(n):
            kept[b, t, m] = {expression} - acc[:, None, :]
    return out, kept
"""
TILES = {"col": "[:, :, None]", "row": "[:, None, :]", "len": ".to(torch.float32)[:, None, None]"}


def compiled(text: str) -> Any:
    """A kernel from its text."""
    return Program(text, tuple, []).function


def filled(text: str, parts: dict[str, str]) -> str:
    for key, value in parts.items():
        text = text.replace("{" + key + "}", value)
    return text


def padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """The first positions of a row, and zeros where it has no more."""
    return torch.cat([x, x.new_zeros(max(0, length - len(x)), *x.shape[1:])])[:length]


def row_by_row(expression: str, reduction: str, jt: Any, other: Any, dense: Any, row: Any) -> tuple[Any, Any]:
    """The same program on one row after the other: positions that exist are those that every ragged read has."""
    out, kept = torch.empty(len(jt), row.size(1)), []
    start = float(REDUCTIONS[reduction][0].replace("torch.", ""))
    for k, (own, beside) in enumerate(zip(jt.unbind(), other.unbind(), strict=True)):
        reach = [n for name, n in (("jt[", len(own)), ("other[", len(beside))) if name in expression]
        count = min(reach, default=dense.size(1))
        text = filled(expression, {"col": "", "row": "", "len": ""})
        for name in ("jt[b, t, m]", "other[b, t]", "dense[b, t, m]", "row[b, m]", "rows.lengths[b]"):
            text = text.replace(name, "_" + name.split("[")[0].replace(".", "_"))

        def value(length: int, text: str = text, own: Any = own, beside: Any = beside, k: int = k) -> Any:
            names = {"_jt": padded(own, length), "_other": padded(beside, length)[:, None], "_dense": padded(dense[k], length)}
            names |= {"_row": row[k][None].expand(length, -1), "_rows_lengths": torch.full((length, 1), float(len(own)))}
            return eval(text, {"torch": torch}, names).broadcast_to(length, row.size(1))

        x = value(count)
        acc = torch.full((row.size(1),), start)
        if count:
            for n in range(count):
                acc = eval(REDUCTIONS[reduction][1].replace("{0}", "x"), {"torch": torch}, {"acc": acc, "x": Row(x[n])})
        out[k] = acc
        kept.append(value(len(own)) - acc)
    return out, torch.cat(kept) if kept else torch.empty(0, row.size(1))


class Row:
    """One position, which reduces to itself: what the update formula of a program is evaluated on."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def sum(self, dim: int) -> torch.Tensor:
        return self.x

    amax = amin = prod = any = sum

    def __gt__(self, other: float) -> Row:
        return Row(self.x > other)

    def transpose(self, a: int, b: int) -> Row:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Row:
        return Row(function(*(a.x if isinstance(a, Row) else a for a in args)))


@hypothesis.settings(max_examples=200 if FULL else 10)
@given(
    expression=expressions,
    reduction=st.sampled_from(sorted(REDUCTIONS)),
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4),
    seed=st.integers(0, 99),
)
def test_random_programs(expression: str, reduction: str, lengths: list[tuple[int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    features, most = 2, 6
    jt, other = (
        serrate.JaggedTensor.from_lengths(torch.randn(sum(n[k] for n in lengths), *inner), [n[k] for n in lengths])
        for k, inner in ((0, (features,)), (1, ()))
    )
    dense, row = torch.randn(len(lengths), most, features), torch.randn(len(lengths), features)
    # Every operand brings the dims that it lacks, so that all expressions have the three dims of a tile.
    full = f"({filled(expression, TILES)} + dense[b, t, m] * 0)"
    start, update = REDUCTIONS[reduction]
    text = filled(HEAD, {"start": start, "expression": full, "update": update.replace("{0}", "x")})
    program = compiled(text)
    wanted, kept = row_by_row(expression, reduction, jt, other, dense, row)
    for tile in kinds.TILES:
        try:
            out, stored = kinds.ran(program, tile)(jt, other, dense, row, jt, most)
        except pytest.skip.Exception:
            # Rows that must not be cut are one way less, not a reason to leave the others out.
            continue
        torch.testing.assert_close(out, wanted, msg=lambda m: f"tile {tile}: {m}\n{text}")  # noqa: B023
        torch.testing.assert_close(stored.values, kept, equal_nan=True, msg=lambda m: f"tile {tile}: {m}\n{text}")  # noqa: B023


EVERY_KIND = tuple(dict.fromkeys(KINDS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("seed", range(20 if FULL else 1))
def test_all_plans(kind: str, seed: int) -> None:
    program = write(Random(seed), kind)
    agree(program, ["reference"], program.plans)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("seed", range(100, 140 if FULL else 101))
def test_compiled(kind: str, seed: int) -> None:
    """Every program is built twice: as it is, and under another plan for each seed."""
    program = write(Random(seed), kind)
    agree(program, ["cpp"], [program.plans[seed % len(program.plans)]])


@pytest.mark.triton
@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("seed", range(200, 220 if FULL else 201))
def test_on_triton(kind: str, seed: int) -> None:
    program = write(Random(seed), kind)
    agree(program, ["triton"], program.plans if FULL else [program.plans[seed % len(program.plans)]])


@pytest.mark.slow
@given(random=st.randoms(use_true_random=False), kind=st.sampled_from(EVERY_KIND))
def test_search(random: Random, kind: str) -> None:
    program = write(random, kind)
    agree(program, ["reference"], program.plans)


def test_programs_are_the_same_again() -> None:
    assert write(Random(5)).text == write(Random(5)).text


def test_a_wrong_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    program = write(Random(1), "rows")
    found = program.kernel().on("reference")(*program.arguments())
    monkeypatch.setattr(type(program.kernel().on("reference")), "__call__", lambda *_: (found[0] + 1, *found[1:]))
    with pytest.raises(AssertionError, match="reference, "):
        agree(program, ["reference"], [])
