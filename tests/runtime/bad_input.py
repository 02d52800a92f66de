"""Random input, much of it bad, into constructors, fusions, traced functions and kernels; started by `test_bad_input.py`.

In: on the command line the first seed, how many, and `sanitize` to build generated C++ with the sanitizers. Out: status 0, or the
seed and what went wrong: an answer that plain Python lists do not give, an error that says nothing, or a fault.

What is right is decided here from lists of Python ints, without serrate: offsets are right if they begin with 0, do not decrease
and end at the values. Right input must give the right answer; bad input a `SerrateError`, or what torch itself raises where torch
does the work. Where offsets change after a check, behind everybody's back, any answer will do.
"""

from __future__ import annotations

import functools
import itertools
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

import serrate
import serrate.language as hl
from serrate import JaggedTensor, ir, jit, ops
from serrate.errors import SerrateError, VerificationError
from serrate.runtime import launch
from serrate.runtime.compiler import find_compiler

WIDTH = 2
EDGES = (-1, -(2**31), 2**31 - 1, 2**31, -(2**63), 2**63 - 1, 2**62, 10**6)
SENSIBLE = 10**7
"""Numbers up to which memory is there, and past 2**40 is not; between them a test would take all there is."""
FROM_TORCH = (RuntimeError, IndexError, ValueError, TypeError, OverflowError, MemoryError)


# --- numbers -------------------------------------------------------------------------------------------------------------


def lengths_of(random: Random) -> list[int]:
    """Lengths of rows that are right."""
    return [random.choice([0, 0, 1, 2, 3, 5, 9]) for _ in range(random.choice([0, 1, 2, 3, 5, 8]))]


def offsets_of(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def spoiled(random: Random, numbers: list[int]) -> list[int]:
    """Numbers, often with a mistake in them."""
    numbers, kind = list(numbers), random.randrange(9)
    at = random.randrange(len(numbers)) if numbers else None
    if kind < 3 or at is None:
        return numbers
    if kind == 3:
        numbers[at] = random.choice(EDGES)
    elif kind == 4:
        numbers[at] += random.choice([-2, -1, 1, 2, 100])
    elif kind == 5:
        random.shuffle(numbers)
    elif kind == 6:
        del numbers[at]
    elif kind == 7:
        numbers.insert(at, random.choice([0, 1, *numbers]))
    else:
        numbers = [random.choice([*EDGES, *numbers]) for _ in numbers]
    return numbers


def tensor_of(numbers: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """The numbers as they are stored: those that an int32 cannot hold wrap around."""
    return torch.tensor(list(numbers), dtype=torch.int64).to(dtype)


def strange(random: Random, numbers: Tensor) -> Tensor:
    """The same numbers, sometimes in a tensor that is not what was asked for."""
    kind = random.randrange(24)
    if kind == 0:
        return numbers.to(random.choice([torch.float32, torch.int16, torch.uint8, torch.bool, torch.float64, torch.complex64]))
    if kind == 1:
        return numbers.to("meta")
    if kind == 2:
        return numbers.reshape(random.choice([(1, -1), (-1, 1)])) if numbers.numel() else numbers
    if kind == 3:
        return torch.stack([numbers, numbers], 1)[:, 0]
    return numbers


def is_plain(numbers: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64)) -> bool:
    return numbers.dtype in dtypes and numbers.dim() == 1 and numbers.device.type == "cpu"


def are_offsets(numbers: Sequence[int], total: int) -> bool:
    return bool(numbers) and numbers[0] == 0 and numbers[-1] == total and all(a <= b for a, b in itertools.pairwise(numbers))


def values_of(random: Random, total: int) -> Tensor:
    return torch.tensor([[float(random.randrange(9)) for _ in range(WIDTH)] for _ in range(total)]).reshape(total, WIDTH)


def cut(values: Tensor, offsets: Sequence[int]) -> list[list[list[float]]]:
    """Rows as lists."""
    listed = values.tolist()
    return [listed[a:b] for a, b in itertools.pairwise(offsets)]


def summed(rows: list[list[list[float]]]) -> list[list[float]]:
    return [[sum(position[k] for position in row) for k in range(WIDTH)] for row in rows]


# --- verdicts ------------------------------------------------------------------------------------------------------------


def judge(right: bool, call: Callable[[], Any], want: Callable[[], Any]) -> None:
    """Right input gives what is wanted; bad input a clear error."""
    try:
        found = call()
    except SerrateError as error:
        assert not isinstance(error, VerificationError), f"an internal error: {error!r}"
        assert not right, f"refused, but it was right: {error!r}"
        assert str(error).strip(), "an error that says nothing"
        return
    assert right, f"accepted, and gave {found}"
    assert found == want(), f"got {found}, want {want()}"


def survive(*calls: Callable[[], Any]) -> None:
    """Whatever comes out, or goes wrong in torch: no fault, and no mistake of ours."""
    for call in calls:
        try:
            call()
        except VerificationError:
            raise
        except (SerrateError, *FROM_TORCH):
            pass


# --- constructors --------------------------------------------------------------------------------------------------------


def constructor(random: Random) -> None:
    lengths = lengths_of(random)
    offsets = offsets_of(lengths)
    values = values_of(random, max(0, offsets[-1] + random.choice([0, 0, 0, 0, 1, -1])))
    dtype = random.choice([torch.int64, torch.int64, torch.int32])
    form = random.choice(["csr", "lengths", "list", "starts", "padded", "row ids"])
    if form in ("csr", "list", "lengths"):
        numbers = strange(random, tensor_of(spoiled(random, lengths if form == "lengths" else offsets), dtype))
        given: Any = numbers.tolist() if form == "list" and numbers.device.type == "cpu" else numbers
        constructed = JaggedTensor.from_lengths if form == "lengths" else JaggedTensor.from_csr
        make = functools.partial(constructed, values, given)
        if numbers.dim() == 2:
            # That means two levels.
            survive(make)
            return
        right = is_plain(numbers)
        listed = numbers.tolist() if right else []
        bounds = offsets_of(listed) if form == "lengths" else listed
        right = right and are_offsets(bounds, len(values))
        _validated(random, right, make, lambda: cut(values, bounds), listed)
    elif form == "starts":
        starts, sizes = (tensor_of(spoiled(random, n), dtype) for n in (offsets[:-1], lengths))
        pairs = list(zip(starts.tolist(), sizes.tolist(), strict=False))
        right = len(starts) == len(sizes) and all(s >= 0 and n >= 0 and s + n <= len(values) for s, n in pairs)
        right = right and all(a + n <= b for (a, n), (b, _) in itertools.pairwise(pairs))
        make = functools.partial(JaggedTensor.from_starts, values, starts, sizes)
        numbers_given = [*starts.tolist(), *sizes.tolist()]
        _validated(random, right, make, lambda: [values.tolist()[s : s + n] for s, n in pairs], numbers_given)
    elif form == "padded":
        numbers, room = tensor_of(spoiled(random, lengths), dtype), max(lengths, default=0)
        x = torch.rand(len(lengths), room, WIDTH)
        right = len(numbers) == len(x) and all(0 <= n <= room for n in numbers.tolist())
        rows = [row[:n] for row, n in zip(x.tolist(), numbers.tolist(), strict=False)]
        judge(right, lambda: JaggedTensor.from_padded(x, numbers).tolist(), lambda: rows)
    else:
        ids = [row for row, n in enumerate(lengths) for _ in range(n)]
        numbers = tensor_of(spoiled(random, ids), dtype)
        count = len(lengths)
        listed = numbers.tolist()
        right = len(listed) == len(values) and all(0 <= n < count for n in listed) and listed == sorted(listed)
        want = [[p for p, n in zip(values.tolist(), listed, strict=False) if n == row] for row in range(count)]
        judge(right, lambda: JaggedTensor.from_row_ids(values, numbers, count).tolist(), lambda: want)


def _validated(
    random: Random, right: bool, make: Callable[..., JaggedTensor], want: Callable[[], Any], numbers: list[int]
) -> None:
    """A constructor under one of the ways to validate, and what is computed from what it makes."""
    how = random.choice([None, None, True, False, "deferred"])
    if how is None or how is True:
        judge(right, lambda: make(validate=how).tolist(), want)
        return

    if any(SENSIBLE < abs(n) < 2**40 for n in numbers):
        return

    def use() -> None:
        jt = make(validate=how)
        survive(
            *(lambda: jt.sum(dim=1), lambda: jt.to_padded(), lambda: torch.softmax(jt, 1), lambda: jt.unbind()),
            *(lambda: jt * 2, lambda: jt[0], lambda: jt.tolist(), lambda: torch.sort(jt, 1), lambda: jt.sum(dim=0)),
        )

    survive(use)
    survive(serrate.wait_for_checks)
    if right:
        judge(True, lambda: make(validate=how).tolist(), want)


# --- fusions -------------------------------------------------------------------------------------------------------------


@functools.cache
def fusion(kind: str, reader: str, strategy: str | None) -> Any:
    """A program over rows by offsets, by lengths or by starts and lengths."""
    with ir.Fusion() as f:
        x = f.input((None, WIDTH), torch.float32)
        given = {name: f.input((None,), torch.int64) for name in kind.split("+")}
        y = ops.as_nested(x, **given)
        if reader == "flattened":
            f.output(ops.sum(ops.unflatten(ops.flatten(ops.sum(y, 1, keepdim=True), 1, 2), 1, (1, WIDTH)), 1))
        elif reader == "softmax":
            f.output(ops.sum(ops.softmax(y, 1), 1))
        elif reader == "dense":
            f.output(ops.sum(y + f.input((None, None, WIDTH), torch.float32), 1))
        else:
            f.output(ops.sum(y, 1))
    return f.compile("cpp", strategy)


def program(random: Random) -> None:
    lengths = lengths_of(random)
    offsets = offsets_of(lengths)
    values = values_of(random, max(0, offsets[-1] + random.choice([0, 0, 0, 1, -1])))
    kind = random.choice(["offsets", "lengths", "lengths+starts"])
    reader = random.choice(["sum", "flattened", "softmax", "dense"])
    run = fusion(kind, reader, random.choice([None, "maskless", "masked", "persistent_dynamic"]))
    if kind == "offsets":
        numbers = [strange(random, tensor_of(spoiled(random, offsets)))]
        right = is_plain(numbers[0], (torch.int64,)) and are_offsets(numbers[0].tolist(), len(values))
        rows = cut(values, numbers[0].tolist()) if right else []
    elif kind == "lengths":
        numbers = [strange(random, tensor_of(spoiled(random, lengths)))]
        right = is_plain(numbers[0], (torch.int64,))
        listed = numbers[0].tolist() if right else []
        right = right and all(n >= 0 for n in listed) and sum(listed) == len(values)
        rows = cut(values, offsets_of(listed)) if right else []
    else:
        numbers = [tensor_of(spoiled(random, lengths)), tensor_of(spoiled(random, offsets[:-1]))]
        pairs = list(zip(numbers[1].tolist(), numbers[0].tolist(), strict=False))
        right = len(numbers[0]) == len(numbers[1]) and all(s >= 0 and n >= 0 and s + n <= len(values) for s, n in pairs)
        right = right and all(a + n <= b for (a, n), (b, _) in itertools.pairwise(pairs))
        rows = [values.tolist()[s : s + n] for s, n in pairs] if right else []
    if right and any(len(n) == 0 for n in numbers) and kind == "offsets":
        return
    more: list[Tensor] = []
    if reader == "dense":
        room = max(map(len, rows), default=0) + random.choice([0, 0, 1, -1])
        more = [torch.ones(len(rows) + random.choice([0, 0, 0, 1]), max(room, 0), WIDTH)]
        fits = more[0].shape[0] in (1, len(rows)) and (
            more[0].shape[1] >= max(map(len, rows), default=0) or more[0].shape[1] == 1
        )
        if more[0].shape[0] != len(rows) or more[0].shape[1] < max(map(len, rows), default=0):
            right = False
            if fits:
                return survive(lambda: run(values, *numbers, *more))
        want = [[sum(p[k] + 1 for p in row) for k in range(WIDTH)] for row in rows]
    elif reader == "softmax":
        want = [[1.0 if row else 0.0] * WIDTH for row in rows]
    else:
        want = summed(rows)
    judge(right, lambda: _rounded(run(values, *numbers, *more)), lambda: want)
    plain = [n for n in numbers if is_plain(n) and n.is_contiguous()]
    if right and plain and random.random() < 0.5:
        _late(random, plain[0], lambda: run(values, *numbers, *more))


def _rounded(found: Tensor) -> list[Any]:
    return [[round(x, 4) + 0.0 for x in row] for row in found.tolist()]


def _late(random: Random, numbers: Tensor, call: Callable[[], Any]) -> None:
    """The numbers change through NumPy's memory, which leaves no trace; then they are as they were."""
    before = numbers.tolist()
    for _ in range(2):
        held = numbers.numpy()
        for k in range(len(before)):
            held[k] = random.choice([*EDGES[:1], *before, 10**6, -(2**31), 2**31 - 1])
        survive(call)
    numbers.numpy()[:] = before


# --- traced functions and eager operations -------------------------------------------------------------------------------


@jit
def traced(x: JaggedTensor, bias: Tensor, dense: Tensor) -> Any:
    centred = (x + bias) - x.mean(1, keepdim=True)
    return centred, torch.softmax(x, 1), (x * dense).sum(1), torch.cumsum(x, 1), x.amax(1)


EAGER: tuple[Callable[[JaggedTensor], Any], ...] = (
    lambda x: x.sum(1),
    lambda x: x.to_padded(),
    lambda x: torch.sort(x, 1),
    lambda x: torch.topk(x, 1, 1),
    lambda x: torch.flip(x, (1,)),
    lambda x: torch.cat([x, x], 1),
    lambda x: x.sum(0),
    lambda x: x[:, :2],
    lambda x: torch.softmax(x, 1),
    lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    lambda x: x.unbind(),
    lambda x: torch.nn.functional.linear(x, torch.ones(3, WIDTH)),
)


def function(random: Random) -> None:
    lengths = lengths_of(random)
    offsets = tensor_of(offsets_of(lengths), random.choice([torch.int64, torch.int32]))
    values = values_of(random, sum(lengths))
    jt = JaggedTensor.from_csr(values, offsets)
    rows = cut(values, offsets.tolist())
    bias = torch.ones(random.choice([(WIDTH,), (WIDTH,), (WIDTH,), (WIDTH + 1,), (3, WIDTH), (), (0,)]))
    room = max(lengths, default=0) + random.choice([0, 0, 1, -1])
    dense = torch.ones(len(lengths), max(room, 0), WIDTH, dtype=random.choice([torch.float32, torch.float32, torch.float64]))
    if random.random() < 0.05:
        dense = dense.to("meta")

    def call() -> Any:
        return [each.tolist() for each in traced(jt, bias, dense)]

    right = bias.shape in ((WIDTH,), ()) and room >= max(lengths, default=0) and dense.device.type == "cpu"
    if right:
        found = call()
        assert found[2] == summed(rows), (found[2], summed(rows))
        assert [len(row) for row in found[0]] == lengths
    else:
        survive(call)
    operation = random.choice(EAGER)
    survive(lambda: operation(jt))
    _late(random, offsets, lambda: (survive(call), operation(jt)))
    if right:
        assert call()[2] == summed(rows)


# --- kernels -------------------------------------------------------------------------------------------------------------


@serrate.kernel
def row_sums(jt: JaggedTensor, out: Tensor) -> None:
    for b in hl.tile(jt.num_rows):
        total = hl.zeros([b, jt.values.shape[1]])
        for t in hl.tile(jt.max_length):
            total = total + jt[b, t, :].sum(1)
        out[b, :] = total


@serrate.kernel
def gathered(table: Tensor, index: Tensor, out: Tensor) -> None:
    for t in hl.tile(out.shape[0]):
        out[t] = table[index[t]]


@serrate.kernel
def pieces(values: Tensor, starts: Tensor, lengths: Tensor, out: Tensor) -> None:
    for b in hl.tile(out.shape[0]):
        first = starts[b]
        total = hl.zeros([b])
        for t in hl.jagged_tile(lengths[b]):
            total = total + values[first[:, None] + t.index].sum(1)
        out[b] = total


def kernel(random: Random) -> None:
    lengths = lengths_of(random)
    offsets = tensor_of(offsets_of(lengths))
    values = values_of(random, sum(lengths))
    which = random.randrange(3)
    if which == 0:
        jt, out = JaggedTensor.from_csr(values, offsets), torch.zeros(len(lengths), WIDTH)
        row_sums.on("cpp")(jt, out)
        assert out.tolist() == summed(cut(values, offsets.tolist()))
        _late(random, offsets, lambda: row_sums.on("cpp")(jt, out))
        row_sums.on("cpp")(jt, out)
        assert out.tolist() == summed(cut(values, offsets.tolist()))
    elif which == 1:
        table = torch.arange(1.0, 1 + random.randrange(2, 9))
        index = tensor_of([random.choice([0, 1, 2, *EDGES]) for _ in range(random.randrange(0, 7))])
        out = torch.zeros(len(index))
        gathered.on("cpp")(table, index, out)
        # Outside of a tensor there is 0.
        assert out.tolist() == [table[i].item() if 0 <= i < len(table) else 0 for i in index.tolist()]
    else:
        flat = values.flatten()
        starts = tensor_of([random.choice([*range(-2, len(flat) + 3), *EDGES[:4]]) for _ in range(4)])
        sizes = tensor_of([random.choice([0, 1, 2, 5, -1]) for _ in range(4)])
        out = torch.zeros(4)
        pieces.on("cpp")(flat, starts, sizes, out)
        reach = [range(s, s + n) for s, n in zip(starts.tolist(), sizes.tolist(), strict=True)]
        if len(flat) > 1:
            assert out.tolist() == [sum(flat[i].item() for i in r if 0 <= i < len(flat)) for r in reach]


SUBJECTS = (constructor, constructor, program, program, program, function, kernel)


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    if "sanitize" in sys.argv[3:]:
        from tests.codegen.sanitized import FLAGS

        launch.find_compiler = functools.partial(find_compiler, FLAGS)  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    failed = 0
    for seed in range(first, first + count):
        subject = SUBJECTS[seed % len(SUBJECTS)]
        # A fault ends the process; then this line says where.
        print(f"\r{subject.__name__} {seed} ", end="", file=sys.stderr, flush=True)
        try:
            subject(Random(seed))
        except Exception:
            failed += 1
            print(f"\n{traceback.format_exc()}", file=sys.stderr)
            if failed == 8:
                break
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
