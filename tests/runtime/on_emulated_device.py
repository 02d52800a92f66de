"""`python -m tests.runtime.on_emulated_device PROGRAM...`: a user's programs on the emulated device, called with new rows again
and again, compared with plain torch.

In: names of programs; without any, all. Out: nothing, or the first difference. After the first calls of a program, host code must
serve all of them: what it does not serve is counted.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from tests.runtime import emulated_device

emulated_device.install()

import serrate  # noqa: E402
from benchmarks.examples import example  # noqa: E402
from serrate import JaggedTensor, ir, ops  # noqa: E402
from serrate.codegen.triton.derived import can_derive  # noqa: E402
from serrate.ir.recipes import Owners, RunningSum  # noqa: E402
from serrate.runtime import triton as runtime  # noqa: E402
from serrate.runtime.derivation import Derivation  # noqa: E402

Rows = list[Tensor]
PIECE = 16
other_launches: list[int] = [0]
"""How often a program or a derivation was launched in another way than by host code."""


def count(owner: type, name: str) -> None:
    plain = getattr(owner, name)

    def counted(*args: Any) -> Any:
        other_launches[0] += 1
        return plain(*args)

    setattr(owner, name, counted)


count(runtime.SizedLaunches, "__call__")
count(Derivation, "_launched")


def there(x: Tensor) -> Tensor:
    return x.to("cuda")


def here(x: Any) -> Any:
    return x.to("cpu") if isinstance(x, Tensor | JaggedTensor) else [here(each) for each in x]


def lengths() -> Iterator[list[int]]:
    """Lengths of batches: other rows of the same total, other totals, other numbers of rows, empty ones, one giant row."""
    draw = random.Random(7)
    yield from ([3, 0, 5], [1, 7, 0], [0, 0, 9, 1], [0], [0, 0], [17] * 5, [1300, 0, 2, 40], [2, 1300, 1, 39])
    for count in (18, 24):
        yield [draw.choice([0, 1, 2, 31, 64, 65, draw.randrange(200)]) for _ in range(count)]


def ragged(values: Tensor, own: Sequence[int]) -> JaggedTensor:
    return JaggedTensor.from_lengths(there(values), there(torch.tensor(own, device="cpu")))


def repeated(call: Callable[..., Any], wanted: Callable[..., Any], *features: int, dtype: torch.dtype = torch.float32) -> None:
    """Compares a program of a ragged tensor, with all kinds of new rows. The second time that such rows come, nothing is left to
    be traced, planned or compiled."""
    for is_warm in (False, True):
        for own in lengths():
            values = torch.randn(sum(own), *features, device="cpu").to(dtype)
            other_launches[0] = 0
            found = here(call(ragged(values, own)))
            assert not (is_warm and other_launches[0]), f"{own}: {other_launches[0]} launches without host code"
            expected = wanted(list(values.split(own)))
            if isinstance(found, JaggedTensor):
                found, expected = found.values, torch.cat(expected)
            narrow = dtype != torch.float32
            torch.testing.assert_close(found, expected, rtol=3e-2 if narrow else 1e-4, atol=3e-2 if narrow else 1e-4)


def by_row(f: Callable[[Tensor], Tensor]) -> Callable[[Rows], Any]:
    return lambda rows: [f(row) for row in rows]


def stacked(f: Callable[[Tensor], Tensor]) -> Callable[[Rows], Any]:
    return lambda rows: torch.stack([f(row) for row in rows])


def sums() -> None:
    repeated(serrate.jit(lambda x: x.sum(1)), stacked(lambda row: row.sum(0)), 4)
    repeated(serrate.jit(lambda x: x.sum(1)), stacked(lambda row: row.sum(0)))


def softmax() -> None:
    repeated(serrate.jit(lambda x: torch.softmax(x, 1)), by_row(lambda row: row.softmax(0)), 4)
    repeated(lambda x: torch.softmax(x, 1), by_row(lambda row: row.softmax(0)), 3, dtype=torch.bfloat16)


def layer_norm() -> None:
    def norm(row: Tensor) -> Tensor:
        return functional.layer_norm(row, list(row.shape)) if len(row) else row

    repeated(serrate.jit(lambda x: ops.layer_norm(x, (1, 2))), by_row(norm), 8)


def pointwise() -> None:
    repeated(serrate.jit(lambda x: torch.relu(x * 2 + 1)), by_row(lambda row: torch.relu(row * 2 + 1)), 5)


def products() -> None:
    """The weights have one matrix for each row: the number of rows stays."""
    weights, draw = torch.randn(6, 16, 24, device="cpu"), random.Random(3)
    device, f = there(weights), serrate.jit(lambda x, w: torch.relu(x @ w))
    batches = [[draw.choice([0, 1, 5, 70, 140]) for _ in weights] for _ in range(7)]
    for is_warm, own in itertools.product((False, True), batches):
        values = torch.randn(sum(own), 16, device="cpu")
        other_launches[0] = 0
        found = here(f(ragged(values, own), device))
        assert not (is_warm and other_launches[0]), f"{own}: {other_launches[0]} launches without host code"
        wanted = [torch.relu(row @ w) for row, w in zip(values.split(own), weights, strict=True)]
        torch.testing.assert_close(found.values, torch.cat(wanted), rtol=1e-3, atol=1e-3)


def attention() -> None:
    f = serrate.jit(lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True))

    def wanted(row: Tensor) -> Tensor:
        q = row.transpose(0, 1)[None]
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True)[0].transpose(0, 1) if len(row) else row

    def call(x: JaggedTensor) -> JaggedTensor:
        return f(x.transpose(1, 2)).transpose(1, 2)

    for own in ([3, 0, 70], [65, 1, 7], [2], [130, 5, 0, 1]):
        values = torch.randn(sum(own), 2, 16, device="cpu")
        found = here(call(ragged(values, own)))
        torch.testing.assert_close(found.values, torch.cat([wanted(row) for row in values.split(own)]), rtol=1e-3, atol=1e-3)


def two_tensors() -> None:
    """Rows of two arguments: of one structure, of equal structures, and of rows that differ."""
    f = serrate.jit(lambda x, y: (x * y.sum(1, keepdim=True)).sum(1))
    for k, own in enumerate(lengths()):
        a, b = (torch.randn(sum(own), 3, device="cpu") for _ in range(2))
        x = ragged(a, own)
        y = x.with_values(there(b)) if k % 2 else ragged(b, own)
        wanted = torch.stack([(p * q.sum(0)).sum(0) for p, q in zip(a.split(own), b.split(own), strict=True)])
        torch.testing.assert_close(here(f(x, y)), wanted, rtol=1e-3, atol=1e-3)


def changed_offsets() -> None:
    """Offsets that are written to between calls are read again."""
    f = serrate.jit(lambda x: x.sum(1))
    values = torch.arange(12.0, device="cpu")[:, None].expand(12, 2).contiguous()
    offsets = there(torch.tensor([0, 4, 8, 12], device="cpu"))
    for bounds in ([0, 4, 8, 12], [0, 1, 8, 12], [0, 0, 0, 12], [0, 12, 12, 12]):
        offsets.copy_(there(torch.tensor(bounds, device="cpu")))
        x = JaggedTensor.from_csr(there(values), offsets)
        for _ in range(3):
            own = [end - begin for begin, end in itertools.pairwise(bounds)]
            torch.testing.assert_close(here(f(x)), torch.stack([row.sum(0) for row in values.split(own)]))


def derivations() -> None:
    """Arrays that are derived from offsets: in one launch, or, of many rows, in several."""
    with ir.Fusion("program") as f:
        x, bounds = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        f.output(ops.softmax(ops.as_nested(x, bounds), 1))
    program = f.compile("triton", "persistent_dynamic", chunk=PIECE, tile=8)
    for own in ([0, 40, 3, 0, 16, 100, 1], [5], [1] * 1100 + [33], [17] * 5 + [3] * 5000 + [40] * 4):
        offsets = there(torch.tensor([0, *itertools.accumulate(own)], device="cpu"))
        call = program.binder.bind((there(torch.ones(sum(own), 2, device="cpu")), offsets))
        stage: Any = program.stages[0]
        wanted = [a for a in stage.prepared(call).executable.program.arrays if can_derive(a)]
        derivation = Derivation(wanted, tuple(program.binder.symbols))
        pieces = [-(-n // PIECE) if n > PIECE else 0 for n in own]
        counts = [pieces, [min(n, 1) for n in pieces]]
        for is_warm in (False, True):
            other_launches[0] = 0
            arrays = derivation([offsets], derivation.numbers(call.numbers), offsets.device)
            assert is_warm == (not other_launches[0])
            made = {a: here(arrays[k].tensor()).tolist() for a, k in zip(wanted, derivation.order, strict=True)}
            sums = [made[a][: len(own) + 1] for a in wanted if isinstance(a.recipe, RunningSum)]
            assert sums == [[0, *itertools.accumulate(each)] for each in counts], len(own)
            tables = [made[a] for a in wanted if isinstance(a.recipe, Owners)]
            for table, each in zip(tables, counts, strict=True):
                assert table[: sum(each)] == [row for row, n in enumerate(each) for _ in range(n)], len(own)


def nested() -> None:
    f = serrate.jit(lambda x: (x.sum(2), x.mean(dim=(1, 2))))
    draw = random.Random(5)
    for _ in range(8):
        inner = [draw.randrange(6) for _ in range(draw.randrange(1, 12))]
        first = draw.randrange(len(inner) + 1)
        outer = [first, len(inner) - first]
        values = torch.randn(sum(inner), 2, device="cpu")
        levels = tuple(there(torch.tensor(each, device="cpu")) for each in (outer, inner))
        per_row, per_group = f(JaggedTensor.from_lengths(there(values), levels))
        rows = values.split(inner)
        torch.testing.assert_close(here(per_row).values, torch.stack([row.sum(0) for row in rows]))
        groups = [torch.cat([values[:0], *part]) for part in (rows[:first], rows[first:])]
        torch.testing.assert_close(here(per_group), torch.stack([group.mean(0) for group in groups]), equal_nan=True)


def kernels() -> None:
    for name, wanted in {
        "jagged_sum": stacked(lambda row: row.sum(0)),
        "jagged_softmax": by_row(lambda row: row.softmax(0)),
    }.items():
        repeated(example(name).jagged, wanted, 8)


def lookups() -> None:
    """Rows of a table at ragged indices, which are checked on the device."""
    table = torch.randn(50, 4, device="cpu")
    device, f = there(table), serrate.jit(lambda ids, table: functional.embedding(ids, table))
    for is_warm, own in itertools.product((False, True), lengths()):
        ids = torch.randint(50, (sum(own),), device="cpu")
        other_launches[0] = 0
        found = f(ragged(ids, own), device)
        assert not (is_warm and other_launches[0]), f"{own}: {other_launches[0]} launches without host code"
        assert torch.equal(here(found).values, table[ids])
    wrong = ragged(torch.tensor([3, 50, 2], device="cpu"), [1, 2])
    try:
        f(wrong, device)
        serrate.wait_for_checks()
    except IndexError as error:
        assert "50" in str(error), error
    else:
        raise AssertionError("an index out of range was not reported")


def routing() -> None:
    """Several stages, whose offsets are computed."""

    def layer(tokens: Any, expert: Any, weights: Any) -> Any:
        offsets, order = ops.group_by(expert, 3)
        rows = ops.as_nested(ops.index(tokens, order), offsets)
        return ops.index(ops.as_flattened(rows @ weights), ops.invert(order))

    f, weights = serrate.jit(layer), torch.randn(3, 8, 16, device="cpu")
    sizes = (12, 12, 12, 1, 40, 200, 201)
    for is_warm, count in itertools.product((False, True), sizes):
        tokens, expert = torch.randn(count, 8, device="cpu"), torch.randint(3, (count,), device="cpu")
        other_launches[0] = 0
        found = here(f(there(tokens), there(expert), there(weights)))
        assert not (is_warm and other_launches[0]), f"{count}: {other_launches[0]} launches without host code"
        wanted = torch.einsum("tk,tkn->tn", tokens, weights[expert])
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


PROGRAMS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        sums, softmax, layer_norm, pointwise, products, attention,
        two_tensors, changed_offsets, derivations, nested, lookups, routing, kernels,
    )
}  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or PROGRAMS:
        PROGRAMS[name]()
        print(name, flush=True)
