"""Random numbers: the same on every backend and under every plan, from torch's generator, and random.

The oracle is Philox on Python integers, written here, at the numbers that elements have when rows lie back to back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serrate import JaggedTensor, engine, ir, jit, ops
from serrate.errors import CallError, DtypeError, TraceError
from serrate.ir.philox import philox, random_bits
from tests.engine.composed import COMPOSITIONS, tensor_of
from tests.engine.oracle import BACKENDS, FULL

# Triton's interpreter computes where nothing exists, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

STRATEGIES = ("maskless", "masked", "persistent_dynamic")
SEED = 0x0123456789ABCDEF


# --- the oracle ------------------------------------------------------------------------------------------------------------


def by_hand(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10, as its authors write it."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k[0], second % 2**32, (first >> 32) ^ c[3] ^ k[1], first % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def words(seed: int, count: int, word: int = 0, first: int = 0) -> list[int]:
    """The 32 bits of each of some positions."""
    key = (seed % 2**32, seed >> 32)
    found = []
    for p in range(first, first + count):
        found.append(by_hand((p // 4 % 2**32, p // 4 >> 32, word, 0), key)[p % 4])
    return found


def uniform(seed: int, count: int) -> Tensor:
    return torch.tensor([(w >> 8) / 2**24 for w in words(seed, count)])


def next_seed(seed: int) -> int:
    """What a call draws after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    return int(torch.empty((), dtype=torch.int64).random_())


def lengths_like(*lengths: int, width: int = 4, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.ones(sum(lengths), width, dtype=dtype), torch.tensor(lengths))


VECTORS = (
    ((0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
)
"""Of the Random123 distribution: counter, key, and what they give."""


@pytest.mark.parametrize(("counter", "key", "want"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], want: str) -> None:
    assert " ".join(f"{w:08x}" for w in by_hand(counter, key)) == want
    four = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert " ".join(f"{int(w):08x}" for w in four) == want


def test_bits_of_positions_that_need_more_than_32_bits() -> None:
    for first in (0, 3, 2**34 - 2, 2**40 + 1):
        got = random_bits(torch.tensor(SEED), torch.tensor(2), torch.arange(first, first + 6))
        assert [int(b) % 2**32 for b in got] == words(SEED, 6, word=2, first=first)


# --- the same everywhere ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_every_composition(composition: str) -> None:
    for lengths in ("mixed", "none", "empty", "giant"):
        jt = tensor_of(composition, lengths)
        seed = next_seed(3)
        torch.manual_seed(3)
        got = torch.rand_like(jt)
        assert torch.equal(got.values.flatten(), uniform(seed, got.values.numel()))
        assert str(got.shape) == str(jt.shape)


def recorded(operation: Callable[[Any], Any]) -> ir.Fusion:
    with ir.Fusion("drawn") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(operation(ops.as_nested(x, offsets)))
    return f


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "rand_like": ops.rand_like,
    "dropout": lambda x: ops.dropout(x, 0.3),
    "of rows": lambda x: ops.softmax(ops.dropout(ops.mul(x, 2.0), 0.25), 1),
    "summed": lambda x: ops.sum(ops.dropout(x, 0.5), 1),
    "randint_like": lambda x: ops.randint_like(x, -3, 11, torch.int64),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_backends_and_strategies_agree(name: str) -> None:
    fusion = recorded(PROGRAMS[name])
    lengths = [7, 0, 130, 1, 64, 3] if FULL else [7, 0, 37, 1]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    values = torch.randn(sum(lengths), 4)
    exact = name in ("rand_like", "dropout", "randint_like")
    want = None
    for backend, strategy in itertools.product(BACKENDS, STRATEGIES):
        if name == "of rows" and backend != "reference" and strategy != "persistent_dynamic" and not FULL:
            continue
        torch.manual_seed(11)
        found = fusion.compile(backend, strategy)(values, offsets)
        got = found.values if isinstance(found, JaggedTensor) else found
        want = got if want is None else want
        assert torch.equal(got, want) if exact else torch.allclose(got, want, atol=1e-5), (backend, strategy)


def test_threads_agree() -> None:
    jt = JaggedTensor.from_lengths(torch.randn(5000, 16), torch.tensor([1000, 0, 3999, 1]))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            found.append(F.dropout(jt, 0.5).values)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.equal(found[0] != 0, uniform(next_seed(0), jt.values.numel()).view_as(jt.values) >= 0.5)


@pytest.mark.parametrize("width", [1, 3, 8, 70])
def test_widths_that_blocks_of_four_do_not_fit(width: int) -> None:
    jt = lengths_like(3, 0, 5, 6, width=width)
    seed = next_seed(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand_like(jt).values.flatten(), uniform(seed, jt.values.numel()))


def test_rows_stored_apart_draw_what_rows_back_to_back_draw() -> None:
    apart = [tensor_of(composition, "mixed") for composition in ("padded", "gaps", "one level")]
    found = []
    for jt in apart:
        torch.manual_seed(2)
        found.append(F.dropout(jt.with_values(torch.ones_like(jt.values)), 0.5).to_padded())
    assert apart[0].format == "padded" and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_numbers_read_out_of_order_are_those_of_their_elements() -> None:
    jt = lengths_like(3, 0, 5)

    @jit
    def moved(x: Any) -> Any:
        drawn = torch.rand_like(x)
        return drawn.transpose(1, 2).sum(1), drawn.flip(1), drawn.sum(1), torch.rand_like(x[:, :, :1]) + x

    torch.manual_seed(4)
    summed, flipped, rows, broadcast = moved(jt)
    torch.manual_seed(4)
    plain = torch.rand_like(jt)
    narrow = torch.rand_like(jt[:, :, :1])
    assert torch.equal(broadcast.values, narrow.values + jt.values)
    torch.testing.assert_close(summed.values, plain.values.sum(1))
    for got, row in zip(flipped.unbind(), plain.unbind(), strict=True):
        assert torch.equal(got, row.flip(0))
    for got, row in zip(rows, plain.unbind(), strict=True):
        torch.testing.assert_close(got, row.sum(0))


def test_a_number_that_is_read_twice_is_drawn_once() -> None:
    @jit
    def twice(x: Any) -> Any:
        drawn = torch.rand_like(x)
        return drawn - drawn, drawn * 1.0, torch.softmax(drawn, 1)

    torch.manual_seed(0)
    zero, drawn, soft = twice(lengths_like(5, 2))
    assert not zero.values.any()
    for got, row in zip(soft.unbind(), drawn.unbind(), strict=True):
        torch.testing.assert_close(got, torch.softmax(row, 0))


# --- torch's generator ----------------------------------------------------------------------------------------------------


def test_manual_seed_repeats_and_calls_differ() -> None:
    jt = lengths_like(6, 2)
    f = jit(lambda x: torch.rand_like(x))
    for draw in (torch.rand_like, f):
        torch.manual_seed(7)
        first, second = draw(jt).values, draw(jt).values
        torch.manual_seed(7)
        assert torch.equal(draw(jt).values, first) and torch.equal(draw(jt).values, second)
        assert not torch.equal(first, second)


def test_a_traced_function_draws_what_its_operations_draw_one_by_one() -> None:
    def several(x: Any) -> Any:
        y = F.dropout(x * 2.0, 0.5)
        return torch.where(torch.rand_like(y) < 0.5, y, torch.rand_like(x))

    jt = lengths_like(9, 0, 4)
    torch.manual_seed(1)
    want = several(jt)
    torch.manual_seed(1)
    assert torch.equal(jit(several)(jt).values, want.values)


def test_the_state_of_the_generator_can_be_kept_and_forked() -> None:
    jt = lengths_like(3)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = torch.rand_like(jt).values
    moved = torch.get_rng_state()
    assert not torch.equal(state, moved)
    with torch.random.fork_rng():
        torch.rand_like(jt)
    assert torch.equal(torch.get_rng_state(), moved)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand_like(jt).values, first)
    # Tracing and looking at a program draw nothing.
    f = jit(lambda x: F.dropout(x, 0.5))
    before = torch.get_rng_state()
    f.source(jt)
    f.explain(jt)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.triton
def test_fusions_draw_their_seeds_or_are_given_them() -> None:
    with ir.Fusion() as f:
        x, seed = f.input((None,), torch.float32), f.input((), torch.int64)
        f.output(ops.rand_like(x, seed=seed), ops.rand_like(x), ops.rand_like(x))
    assert str(f).count("seed ") == 2 and f == f.clone() and len(f.clone().seeds) == 2
    values, seed = torch.zeros(9), torch.tensor(SEED)
    for backend in BACKENDS:
        program = f.compile(backend)
        torch.manual_seed(0)
        given, one, two = program(values, seed)
        torch.manual_seed(0)
        seeds = torch.empty(2, dtype=torch.int64).random_().tolist()
        assert torch.equal(given, uniform(SEED, 9)), backend
        assert torch.equal(one, uniform(seeds[0], 9)) and torch.equal(two, uniform(seeds[1], 9)), backend
    with pytest.raises(CallError, match="takes 2 arguments, got 1"):
        f.compile("reference")(values)


def test_warm_calls_build_nothing_and_draw_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    f = jit(lambda x: F.dropout(x, 0.5))
    jt = lengths_like(3, 4)
    f(jt)
    F.dropout(jt, 0.5)

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("built again")

    monkeypatch.setattr(engine, "build", refused)
    found = [call(jt).values for call in (f, f, lambda x: F.dropout(x, 0.5))]
    assert not torch.equal(found[0], found[1])


# --- what is drawn -----------------------------------------------------------------------------------------------------------


def many(dtype: torch.dtype = torch.float32) -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.zeros(1 << 14, 16, dtype=dtype), torch.tensor([1 << 13, 0, 1 << 13]))


def correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.double().flatten(), y.double().flatten()]))[0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_uniform_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.rand_like(many(dtype)).values
    assert x.dtype == dtype
    assert x.min() >= 0 and x.max() < 1
    wide, count = x.double(), x.numel()
    step = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(dtype, 0.0)
    # Five standard deviations of the mean, and of the variance, of so many.
    assert abs(wide.mean() + step / 2 - 0.5) < 5 / math.sqrt(12 * count)
    assert abs(wide.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / count) + step
    bins = torch.histc(wide + step / 2, 64, 0, 1)
    chi = ((bins - count / 64) ** 2 / (count / 64)).sum()
    assert chi < 63 + 6 * math.sqrt(2 * 63)
    for neighbours in (1, 2, 3, 4, 16):
        flat = wide.flatten()
        assert abs(correlation(flat[neighbours:], flat[:-neighbours])) < 5 / math.sqrt(count)


def test_float64_uses_more_bits_than_float32() -> None:
    torch.manual_seed(0)
    x = torch.rand_like(many(torch.float64)).values
    assert x.unique().numel() == x.numel()
    assert not torch.equal((x * 2**24).floor(), x * 2**24)


def test_two_draws_are_independent() -> None:
    torch.manual_seed(0)
    first, second = jit(lambda x: (torch.rand_like(x), torch.rand_like(x)))(many())
    assert abs(correlation(first.values, second.values)) < 5 / math.sqrt(first.values.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normal_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn_like(many(dtype)).values
    assert x.dtype == dtype and x.isfinite().all()
    wide, count = x.double().flatten(), x.numel()
    rounding = 0.0 if dtype != torch.bfloat16 else 2.0**-9
    assert abs(wide.mean()) < 5 / math.sqrt(count)
    assert abs(wide.var() - 1) < 5 * math.sqrt(2 / count) + rounding
    assert abs((wide**3).mean()) < 5 * math.sqrt(15 / count) + rounding
    assert abs((wide**4).mean() - 3) < 5 * math.sqrt(96 / count) + 12 * rounding
    for limit, share in ((1, 0.31731), (2, 0.0455), (3, 0.0027)):
        got = float((wide.abs() > limit).double().mean())
        assert abs(got - share) < 5 * math.sqrt(share / count) + 2 * rounding
    assert abs(correlation(wide[1:], wide[:-1])) < 5 / math.sqrt(count)


@pytest.mark.triton
def test_normal_numbers_agree_between_backends_up_to_rounding() -> None:
    fusion, offsets, found = recorded(ops.randn_like), torch.tensor([0, 3, 3, 20]), []
    for backend in BACKENDS:
        torch.manual_seed(0)
        found.append(fusion.compile(backend)(torch.zeros(20, 4), offsets).values)
    for got in found[1:]:
        torch.testing.assert_close(got, found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 2), (-3, 11), (5, 6), (0, 2**31), (0, 3 * 2**31), (-(2**40), 2**50), (-(2**62), 2**62 - 1)]
)
def test_integers(low: int, high: int) -> None:
    torch.manual_seed(0)
    x = torch.randint_like(many(), low, high, dtype=torch.int64).values
    assert x.dtype == torch.int64 and low <= int(x.min()) and int(x.max()) < high
    count, span = x.numel(), high - low
    assert abs(float(x.double().mean()) - (low + (span - 1) / 2)) <= 5 * span / math.sqrt(12 * count)
    if span < 100:
        assert x.unique().numel() == span


def test_integers_under_torchs_signatures() -> None:
    jt = lengths_like(4, dtype=torch.float32)
    torch.manual_seed(0)
    got = torch.randint_like(jt, 10)
    torch.manual_seed(0)
    assert torch.equal(torch.randint_like(jt, low=0, high=10, dtype=torch.int32).values, got.values.int())
    assert got.dtype == torch.float32
    with pytest.raises(CallError, match="low must be less than high, got 4 and 4"):
        torch.randint_like(jt, 4, 4)
    with pytest.raises(CallError, match="less than 2\\^63 apart"):
        torch.randint_like(jt, -(2**63), 2**63 - 1)


def test_bernoulli() -> None:
    torch.manual_seed(0)
    chances = many().with_values(torch.rand(1 << 14, 16))
    got = torch.bernoulli(chances).values
    assert set(got.unique().tolist()) == {0.0, 1.0}
    for low in (0.0, 0.25, 0.5, 0.75):
        there = (chances.values >= low) & (chances.values < low + 0.25)
        assert abs(float(got[there].mean()) - (low + 0.125)) < 0.01
    half = torch.bernoulli(many(torch.int64), 0.25)
    assert half.dtype == torch.int64 and abs(float(half.values.double().mean()) - 0.25) < 0.005
    assert torch.bernoulli(chances.with_values(torch.ones(1 << 14, 16))).values.all()
    assert not torch.bernoulli(chances.with_values(torch.zeros(1 << 14, 16))).values.any()


# --- dropout -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    jt = many(dtype).with_values(torch.full((1 << 14, 16), 3.0, dtype=dtype))
    got = F.dropout(jt, p)
    assert got.dtype == dtype and got.structure.same_rows(jt.structure)
    alive = got.values != 0
    assert abs(float(alive.double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / alive.numel())
    scaled = (jt.values.float() / (1 - p)).to(dtype) if dtype.itemsize == 2 else jt.values / (1 - p)
    torch.testing.assert_close(got.values, torch.where(alive, scaled, torch.zeros((), dtype=dtype)))
    assert abs(float(got.values.double().mean()) - 3) < 0.1


def test_dropout_that_drops_nothing_or_everything() -> None:
    jt = lengths_like(3, 0, 4)
    assert F.dropout(jt, 0.4, training=False) is jt and F.dropout(jt, 0.0) is jt and torch.dropout(jt, 0.3, train=False) is jt
    assert not F.dropout(jt, 1.0).values.any() and not jit(lambda x: F.dropout(x, 1.0))(jt).values.any()
    assert torch.equal(jit(lambda x: F.dropout(x, 0.5, False))(jt).values, jt.values)
    for call in (F.dropout, jit(F.dropout)):
        with pytest.raises(CallError, match=r"dropout: the probability must be between 0 and 1, got 1\.5"):
            call(jt, 1.5)


def test_dropout_under_all_its_names() -> None:
    jt = lengths_like(3, 0, 4)
    found = []
    for call in (
        lambda x: F.dropout(x, 0.4),
        lambda x: torch.dropout(x, 0.4, True),
        lambda x: torch.dropout(x, p=0.4, train=True),
        torch.nn.Dropout(0.4),
        jit(torch.nn.Dropout(0.4)),
        lambda x: F.dropout(x.clone(), 0.4, inplace=True),
        lambda x: F.dropout(x.clone(), 0.4, True, True),
        jit(lambda x: ops.dropout(x, 0.4)),
    ):
        torch.manual_seed(5)
        found.append(call(jt).values)
    assert all(torch.equal(found[0], other) for other in found[1:])
    written = jt.clone()
    assert F.dropout(written, 0.4, inplace=True) is written


@pytest.mark.usefixtures("reference")
def test_many_probabilities_are_read_from_memory() -> None:
    jt = lengths_like(500, 0, 1500)
    for k in range(1, 20):
        got = F.dropout(jt, k / 20).values
        alive = got != 0
        assert abs(float(alive.double().mean()) - (1 - k / 20)) < 0.03
        torch.testing.assert_close(got[alive], torch.full_like(got[alive], 1 / (1 - k / 20)))


@pytest.mark.usefixtures("reference")
def test_dropout_in_a_module_that_trains() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.ReLU()).requires_grad_(False)
    jt = JaggedTensor.from_lengths(torch.randn(40, 4), torch.tensor([30, 10]))
    f = jit(module)
    torch.manual_seed(0)
    got = f(jt).values
    torch.manual_seed(0)
    want = torch.relu(F.dropout(jt.with_values(F.linear(jt.values, module[0].weight, module[0].bias)), 0.5)).values
    torch.testing.assert_close(got, want)
    module.eval()
    torch.testing.assert_close(f(jt).values, module(jt.values))


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    torch.manual_seed(0)
    jt = torch.randn_like(many())
    got = F.alpha_dropout(jt, 0.3, training=True).values.double()
    assert abs(got.mean()) < 0.02 and abs(got.var() - 1) < 0.02
    low = float(got.flatten().mode().values)
    plain = F.alpha_dropout(jt.values, 0.3, training=True).double()
    assert abs(low - float(plain.flatten().mode().values)) < 1e-6
    assert F.alpha_dropout(jt, 0.3) is jt
    assert not F.alpha_dropout(lengths_like(3), 1.0, training=True).values.any()


def test_autocast_leaves_random_numbers_alone() -> None:
    jt = lengths_like(8, 3)
    torch.manual_seed(0)
    want = F.dropout(jt, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(0)
        got = F.dropout(jt, 0.5)
    assert got.dtype == torch.float32 and torch.equal(got.values, want.values)


# --- what is refused ---------------------------------------------------------------------------------------------------------


def test_like_has_no_gradient_and_dropout_has_that_of_what_it_kept() -> None:
    jt = lengths_like(3).requires_grad_()
    assert not torch.rand_like(jt).requires_grad and torch.rand_like(jt, requires_grad=True).requires_grad
    torch.manual_seed(1)
    kept = F.dropout(jt, 0.5)
    kept.values.sum().backward()
    torch.manual_seed(1)
    with torch.no_grad():
        torch.testing.assert_close(jt.values.grad, F.dropout(torch.ones_like(jt), 0.5).values)


def test_messages() -> None:
    jt = lengths_like(3)
    with pytest.raises(DtypeError, match=r"rand_like: needs a floating-point dtype, got torch\.int64; pass dtype=torch\.float32"):
        torch.rand_like(jt.long())
    assert torch.rand_like(jt.long(), dtype=torch.float64).dtype == torch.float64
    with pytest.raises(CallError, match=r"drawn from torch's default generator, which torch\.manual_seed sets"):
        torch.rand_like(jt, generator=torch.Generator())
    with pytest.raises(CallError, match="the result is on the device of its input"):
        torch.rand_like(jt, device="cpu")
    with pytest.raises(TraceError, match=r"random numbers drawn while tracing .*draw them before the call"):
        jit(lambda x: x + torch.randperm(4))(jt)
    with pytest.raises(CallError, match="rand: the program runs on cpu, not on cuda"):
        jit(lambda x: x + torch.rand(4, device="cuda"))(jt)
    with pytest.raises(TraceError, match="dropout: inplace=True cannot be traced; use the result instead"):
        jit(lambda x: F.dropout(x, 0.5, inplace=True))(jt)
    with pytest.raises(DtypeError, match="dropout: needs a floating-point dtype"):
        F.dropout(jt.long(), 0.5)
    with ir.Fusion() as f, pytest.raises(CallError, match=r"a seed is an int64 without dims, got torch\.float32 with 1"):
        x = f.input((3,), torch.float32)
        ops.rand_like(x, seed=x)


def test_tensors_made_while_tracing_are_drawn_like_too() -> None:
    jt = lengths_like(3)
    f = jit(lambda x: x + torch.rand_like(torch.zeros(4)))
    torch.manual_seed(0)
    first = f(jt).values
    assert torch.equal(first, jt.values + uniform(next_seed(0), 4)) and not torch.equal(f(jt).values, first)


@pytest.mark.usefixtures("reference")
def test_tensors_of_a_given_shape_in_traced_functions() -> None:
    jt = lengths_like(3)
    made: dict[str, Callable[[], Any]] = {
        "rand": lambda: torch.rand(4),
        "rand of a tuple": lambda: torch.rand((1, 4), dtype=torch.float32, device="cpu"),
        "rand of a size": lambda: torch.rand(size=(4,)),
        "randn": lambda: torch.randn(4),
        "randint": lambda: torch.randint(9, (4,)),
        "randint from": lambda: torch.randint(3, 9, (4,)),
        "randint by name": lambda: torch.randint(high=9, size=(4,)),
    }
    for name, make in made.items():
        f = jit(lambda x, make=make: x * 0 + make())
        seed = next_seed(5)
        torch.manual_seed(5)
        first, second = f(jt).values, f(jt).values
        assert torch.equal(first, first[:1].expand(3, 4)) and not torch.equal(first, second), name
        if name.startswith("rand "):
            assert torch.equal(first[0], uniform(seed, 4)), name
        if name.startswith("randint"):
            low = 3 if name == "randint from" else 0
            assert first[0].tolist() == [low + (w * (9 - low) >> 32) for w in words(seed, 4)], name
