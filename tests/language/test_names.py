"""Names in kernels: every identifier of Python can be an argument, a tile, a carried value or a kernel.

In: one kernel, written with other names. Out: a failure where a name hangs the compiler, does not compile, or changes the result.
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import re
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import Config, JaggedTensor, Kernel
from serrate.schedule.strategies import STRATEGIES

ROLES = ("kernel", "jt", "weight", "scale", "out", "b", "k", "total", "largest", "x")
TEXT = """
def {kernel}({jt}, {weight}, {scale}):
    {out} = torch.empty({jt}.num_rows, 2)
    for {b} in hl.tile({jt}.num_rows):
        {total} = hl.zeros([{b}])
        {largest} = hl.zeros([{b}])
        for {k} in hl.tile({jt}.max_length):
            {x} = {jt}[{b}, {k}] * {weight}[{k}][None, :]
            {total} = {total} + {x}.sum(1)
            {largest} = torch.maximum({largest}, {x}.amax(1))
        {out}[{b}, 0] = {total} * {scale}
        {out}[{b}, 1] = {largest}
    return {out}
"""
_count = itertools.count()
JT = JaggedTensor.from_lengths(torch.arange(11.0) - 3, [2, 0, 5, 1, 3])
WEIGHT = torch.tensor([1.0, -2.0, 0.5, 4.0, 1.0])


def written(names: dict[str, str], strategy: str | None = None) -> Kernel:
    """The kernel with these names in the place of its own."""
    text = TEXT.format(**names)
    file = f"<names {next(_count)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    found: dict[str, Any] = {"torch": torch, "hl": hl}
    exec(compile(text, file, "exec"), found)
    return Kernel(found[names["kernel"]], Config(strategy=strategy))


def wanted() -> list[list[float]]:
    rows = [[float(v) * float(w) for v, w in zip(row, WEIGHT, strict=False)] for row in JT.unbind()]
    return [[sum(row) * 0.5, max([0.0, *row])] for row in rows]


def check(words: list[str], strategy: str | None = None) -> None:
    """Uses the words as names, as many at a time as there are roles."""
    for start in range(0, len(words), len(ROLES)):
        given = words[start : start + len(ROLES)]
        names = dict(zip(ROLES, given, strict=False))
        names |= {role: f"other_{role}" for role in ROLES[len(given) :]}
        # Warm calls too, which have code of their own.
        kernel = written(names, strategy)
        for _ in range(2):
            assert kernel(JT, WEIGHT, 0.5).tolist() == wanted(), names
        assert kernel.interpreted(tile=2)(JT, WEIGHT, 0.5).tolist() == wanted(), names


WORDS = {
    "numbered": "v1 t0 t1 v0 extent0 derived0 launched0 v2 t2 t3 x0 d0 T0 c0 r0",
    "C++ keywords": "double int this template operator auto typename union new delete constexpr nullptr requires static_assert",
    "alternative tokens": "and_eq bitand bitor compl not_eq or_eq xor xor_eq concept co_await",
    "names of generated code": "load store given pointer threads stream positions position end run count k done fold larger",
    "types of generated code": "f32 f64 bf16 f16 i64 i32 u16 u8 std main",
    "macros": "NULL INFINITY M_PI EOF errno linux unix I INT_MAX assert_ stdin",
    "underscores": "_ __ _x __x __x__ x_ x__ _1 _t0 ___",
    "unicode": "é ñ π λ 数 шаг τ0 ünïcode ａ mañana",
    "made of one another": "x_at jt x jt_offsets0 x_lane x_begin x_stream jt_num_rows b_lane x_here x_all jt_max_length",
    "digits": "a a2 a1 a_2 a22 a2_2 a12 a_1 a_1_2 a_12",
    "names of Python": "locals list dict super type print len range id env",
    "long": " ".join("l" * 120 + c for c in "abcdefghij"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_names_of_every_kind(kind: str) -> None:
    check([w for w in WORDS[kind].split() if not keyword.iskeyword(w)])


@pytest.mark.parametrize("strategy", [s if s == "maskless" else pytest.param(s, marks=pytest.mark.slow) for s in STRATEGIES])
def test_names_that_generated_code_uses(strategy: str) -> None:
    source = written({role: role for role in ROLES}, strategy).source(JT, WEIGHT, 0.5)
    code = re.sub(r"//.*|#.*", "", source)
    words = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", code))
    check([w for w in words if not keyword.iskeyword(w) and w not in ("torch", "hl")], strategy)


@pytest.mark.slow
def test_names_of_the_prelude() -> None:
    from serrate.codegen.cpp.names import PRELUDE

    words = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", re.sub(r"//.*", "", PRELUDE)))
    check([w for w in words if not keyword.iskeyword(w) and w not in ("torch", "hl")])


def test_a_container_and_its_parts_have_names_of_their_own() -> None:
    @serrate.kernel
    def pairs(t0: tuple[torch.Tensor, torch.Tensor], t0_0: torch.Tensor, double: dict[str, torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(t0_0)
        for v1 in hl.tile(t0_0.size(0)):
            out[v1] = t0[0][v1] + t0[1][v1] * 2 + t0_0[v1] * 3 + double["int"][v1] * 4
        return out

    a, b, c, d = torch.randn(4, 5)
    torch.testing.assert_close(pairs((a, b), c, {"int": d}), a + b * 2 + c * 3 + d * 4)


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_numbers_that_size_a_loop(backend: str) -> None:
    """Sizes are computed by generated Python, which uses these names itself."""

    @serrate.kernel
    def k(x: torch.Tensor, numbers: int, min: int, max: int) -> torch.Tensor:
        out = torch.zeros(numbers * min + max)
        for i in hl.tile(numbers * min + max - 1):
            out[i] = x[i] + 1
        return out

    x = torch.zeros(80)
    for n in range(4):
        numbers, least, most = 3 + n, 2 + 2 * n, 9 - n
        assert k.on(backend)(x, numbers, least, most).sum() == numbers * least + most - 1
