"""Where a kernel's source may come from, what the decorator takes, and which names a loop carries.

In: functions from files, from exec and from closures. Out: a failure where one does not run, or not as written.
"""

from __future__ import annotations

import ast
import linecache
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate.errors import KernelError
from serrate.frontend.kernel.source import carried_names
from tests.language.kinds import TILES, ran

SCALE = 3.0

TEXT = """
import serrate as helion
import serrate.language as hl
import torch

@helion.kernel(config=helion.Config(block_sizes=[4]), static_shapes=True, autotune_effort="none")
def doubled(x):
    out = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        out[tile] = x[tile] * 2
    return out
"""


def test_from_exec_with_linecache() -> None:
    name = "<a cell of a notebook>"
    linecache.cache[name] = (len(TEXT), None, TEXT.splitlines(True), name)
    space: dict[str, Any] = {"__name__": "cell"}
    exec(compile(TEXT, name, "exec"), space)
    assert space["doubled"](torch.arange(6)).tolist() == [0, 2, 4, 6, 8, 10]
    assert space["doubled"].fn.__name__ == "doubled"
    assert space["doubled"].config.block_sizes == (4,)


def test_without_a_source() -> None:
    space: dict[str, Any] = {"__name__": "cell"}
    exec(compile(TEXT, "<nowhere>", "exec"), space)
    with pytest.raises(KernelError, match="the source of doubled was not found"):
        space["doubled"](torch.arange(6))
    with pytest.raises(KernelError, match="defined with def, not lambda"):
        serrate.kernel(lambda x: x)(torch.arange(6))
    with pytest.raises(KernelError, match="takes a plain function"):
        serrate.kernel(torch.exp)(torch.arange(6))


def _helper(x: Any) -> Any:
    return torch.where(x > 1, x, 0.0) * SCALE


def test_closures_globals_defaults_and_helpers() -> None:
    bias, power = torch.arange(5.0), 2

    @serrate.kernel
    def k(x: torch.Tensor, shift: float = 1.0, *, scale: float = 2.0) -> torch.Tensor:
        def inner(v: Any) -> Any:
            return v**power

        out = torch.empty_like(x)
        for t in hl.tile(x.size(0)):
            out[t] = _helper(inner(x[t]) + bias[t]) * scale + shift
        return out

    x = torch.randn(5)
    wanted = _helper(x**2 + bias) * 2 + 1
    torch.testing.assert_close(k.interpreted(tile=2)(x), wanted)
    power = 3
    torch.testing.assert_close(k.interpreted(tile=2)(x, 0.0, scale=1.0), _helper(x**3 + bias))


def test_control_flow_is_pythons() -> None:
    """`continue`, `break`, a device `while`, `if` on numbers, tuples of carried values."""

    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(3)
        for g in hl.grid(3):
            total, step = hl.zeros([]), 1
            for t in hl.tile(x.size(0), block_size=2):
                if t.begin == 2:
                    continue
                if t.begin == 8:
                    break
                total = total + x[t].sum()
            while total < 100:
                total, step = total * 2, step + 1
            out[g] = total + g if step > 1 else -1
        return out

    total = float(sum(range(10)) - 2 - 3 - 8 - 9)
    while total < 100:
        total *= 2
    assert k.interpreted()(torch.arange(10.0)).tolist() == [total, total + 1, total + 2]


def test_block_sizes_of_the_configuration() -> None:
    def sizes(x: torch.Tensor) -> list[int]:
        found = []
        for t, u in hl.tile([4, 4]):
            for v in hl.tile(4, block_size=3):
                found = [t.block_size, u.block_size, v.block_size, hl.register_block_size(64)]
        return [int(n) for n in found]

    assert serrate.kernel(sizes, config=serrate.Config(block_sizes=[1, None, 5])).interpreted()(torch.zeros(4)) == [1, 16, 3, 5]
    assert serrate.kernel(sizes).interpreted(tile="whole")(torch.zeros(4)) == [4, 4, 3, 64]


def test_tiles_say_where_they_are() -> None:
    @serrate.kernel
    def k() -> list[Any]:
        found: list[Any] = []
        for t in hl.tile(2, 9, block_size=3):
            found += [(t.id, t.begin, t.end, int(t.block_size), t.count)]
            found += [
                t.index.data.tolist(),
                t.index.exists().tolist(),
                (hl.arange(t.block_size) + t.begin == t.index).all().item(),
            ]
        for i, j in hl.grid([1, 2], [2, 4]):
            found += [(i, j)]
        for i in hl.grid(0, 5, 2):
            found += [i]
        return found

    full, cut = [True], [True, False, False]
    assert k.interpreted()() == [
        (0, 2, 5, 3, 3), [2, 3, 4], full, True,
        (1, 5, 8, 3, 3), [5, 6, 7], full, True,
        (2, 8, 9, 3, 3), [8, 9, 10], cut, True,
        (1, 2), (1, 3), 0, 2, 4,
    ]  # fmt: skip


def test_a_registered_block_may_be_summed_lane_by_lane() -> None:
    """The elementwise form of a long sum: lanes are added up over the tiles, and reduced once at the end."""

    @serrate.kernel
    def k(x: torch.Tensor) -> torch.Tensor:
        m, n = x.size()
        out = torch.empty(m)
        block = hl.register_block_size(n)
        for t in hl.tile(m):
            acc = hl.zeros([t, block])
            for u in hl.tile(n, block_size=block):
                acc += x[t, u]
            out[t] = acc.sum(-1)
        return out

    x = torch.randn(3, 7)
    for tile in TILES:
        torch.testing.assert_close(ran(k, tile)(x), x.sum(1))


@pytest.mark.parametrize(
    ("body", "carried"),
    [
        ("acc = acc + x", ["acc"]),
        ("acc += x", ["acc"]),
        ("y = x\nacc = y", []),
        ("if c:\n    y = x\nacc = y", ["y"]),
        ("if c:\n    y = x\nelse:\n    y = 2\nacc = y", []),
        ("for j in r:\n    acc = acc * j", ["acc"]),
        ("for j in r:\n    y = x\nz = y", ["y"]),
        ("m, l = new(m, l)", ["l", "m"]),
        ("out[i] = x", []),
        ("while t < n:\n    t = t + 1", ["t"]),
        ("acc = [acc for _ in r]", ["acc"]),
        ("with c:\n    y = x\nz = y", []),
        ("i = i + 1", []),
    ],
)
def test_carried_names(body: str, carried: list[str]) -> None:
    lines = "\n".join("    " + line for line in body.splitlines())
    loop = ast.parse(f"for i in r:\n{lines}").body[0]
    assert isinstance(loop, ast.For)
    assert list(carried_names(loop)) == carried


def test_what_a_kernel_meets_is_of_the_language_whoever_runs_it() -> None:
    @serrate.kernel
    def kinds(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for tile in hl.tile(x.size(0)):
            value = x[tile]
            met = isinstance(tile, hl.Tile) and isinstance(value, hl.TileValue) and not isinstance(tile, hl.TileValue)
            out[tile] = value * 2 if met else value
        return out

    for tile in TILES:
        assert ran(kinds, tile)(torch.arange(3.0)).tolist() == [0.0, 2.0, 4.0]
