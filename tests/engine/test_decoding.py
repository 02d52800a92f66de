"""Attention of few queries to many keys on a GPU's plan: keys are cut into pieces, whose results are combined in order.

In: sequences around the length of a piece, on Triton. Out: failures against torch's attention, one sequence at a
time.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from serrate import ir, ops
from serrate.ir.domains import COORDINATE
from serrate.ir.ragged_transforms import product
from serrate.ir.recipes import RunningSum
from serrate.schedule.strategies import contractions

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
PIECE = 128


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow."""
    monkeypatch.setattr(contractions, "PIECE", PIECE)


LENGTHS = [1, 0, PIECE, PIECE + 1, 2 * PIECE + 65, 0]


def program(
    queries: int, heads: int, width: int, values: int, dtype: torch.dtype, key_heads: int | None = None, **how: Any
) -> Any:
    with ir.Fusion("decoding") as f:
        q = f.input((None, heads, queries, width), dtype)
        k, v = (f.input((None, key_heads or heads, size), dtype) for size in (width, values))
        offsets = f.input((None,), torch.int64)
        rows = [ops.permute(ops.as_nested(x, offsets), (0, 2, 1, 3)) for x in (k, v)]
        f.output(ops.attention(q, *rows, enable_gqa=key_heads is not None, **how))
    return f.compile("triton")


def given(
    lengths: list[int], queries: int, heads: int, width: int, values: int, dtype: torch.dtype, key_heads: int | None = None
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(len(lengths))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    count, stored = sum(lengths), key_heads or heads
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return random(len(lengths), heads, queries, width), random(count, stored, width), random(count, stored, values), offsets


def by_sequence(args: tuple[Tensor, ...], causal: bool = False) -> Tensor:
    q, k, v, offsets = args
    out = []
    for n, own in enumerate(q.double()):
        keys, found = (x[offsets[n] : offsets[n + 1]].double().transpose(0, 1) for x in (k, v))
        keys, found = (x.repeat_interleave(len(own) // len(x), 0) for x in (keys, found))
        mask = torch.ones(own.shape[1], keys.shape[1]).tril(keys.shape[1] - own.shape[1]).bool() if causal else None
        scores = own @ keys.transpose(1, 2) / own.shape[-1] ** 0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        out.append(torch.softmax(scores, -1).nan_to_num() @ found)
    return torch.stack(out)


def close(got: Tensor, want: Tensor) -> None:
    tolerance = 1e-4 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("queries", "width", "values", "dtype"), [(1, 16, 16, torch.bfloat16), (3, 20, 7, torch.float32)], ids=["one", "odd"]
)
def test_pieces_of_keys_are_combined(queries: int, width: int, values: int, dtype: torch.dtype) -> None:
    args = given(LENGTHS, queries, 2, width, values, dtype)
    run = program(queries, 2, width, values, dtype)
    got = run(*args)
    close(got, by_sequence(args))
    assert torch.equal(got, run(*args))


def test_heads_of_queries_share_keys() -> None:
    args = given([PIECE + 3, 0, 5], 1, 4, 16, 16, torch.float32, key_heads=2)
    close(program(1, 4, 16, 16, torch.float32, key_heads=2)(*args), by_sequence(args))


def test_the_last_queries_see_the_last_keys() -> None:
    """Of one sequence, the first query sees no key at all."""
    args = given([PIECE + 2, 1, 4], 2, 1, 16, 16, torch.float32)
    close(program(2, 1, 16, 16, torch.float32, is_causal="lower_right")(*args), by_sequence(args, causal=True))


def test_a_piece_that_is_masked_entirely() -> None:
    """A window ends before the last piece: the sums of others have nothing to be combined with."""
    args = given([2 * PIECE + 5], 1, 1, 16, 16, torch.float32)
    got = program(1, 1, 16, 16, torch.float32, is_causal=True)(*args)
    torch.testing.assert_close(got[0, 0], args[2][:1, 0], rtol=1e-5, atol=1e-5)


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    args = given(LENGTHS, 1, 1, 16, 16, torch.bfloat16)
    run = program(1, 1, 16, 16, torch.bfloat16)
    whole, offsets = run(*args), args[3]
    for n in (3, 4):
        part = slice(int(offsets[n]), int(offsets[n + 1]))
        alone = run(args[0][n : n + 1], args[1][part], args[2][part], offsets[n : n + 2] - offsets[n])
        assert torch.equal(alone[0], whole[n])


def test_pieces_are_combined_where_results_are_stored() -> None:
    """Three launches: pieces; the results of queries; their places in the dense result."""
    args = given(LENGTHS, 1, 2, 16, 16, torch.float32)
    source = program(1, 2, 16, 16, torch.float32).source(*args)
    assert len(re.findall(r"^@triton.jit\(do_not", source, re.MULTILINE)) == 3


def test_the_product_of_rows_of_one_length_and_others_is_bounded_by_their_total() -> None:
    """Not by the product of both totals: that would be the memory of partial results."""
    count, total = ir.expr.symbol("count", 0), ir.expr.symbol("total", 0)
    offsets = ir.expr.Array("offsets")
    ones = ir.expr.Array("ones", recipe=RunningSum(ir.expr.const(3), COORDINATE, count))
    _, queries = ir.partition(ir.IterDomain(count * 3), ones, count)
    keys = queries.with_rows(offsets[COORDINATE + 1] - offsets[COORDINATE], name="k", bound=total)
    assert str(product(queries, keys).host_bound) == str(product(keys, queries).host_bound) == "total*3"
