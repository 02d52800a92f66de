"""Gradients of random kernels: what `@serrate.kernel(backward="auto")` derives is right, or it is refused.

Kernels are drawn from a small grammar: loops over tiles of several sizes, guards, carried values, values read while they are
carried, masked and partial stores, atomic additions, indirect loads. The oracle are differences of the interpreter's results,
with tiles of one position, of two, and of everything; a kernel for which these differ must be refused too.
"""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from serrate import JaggedTensor
from serrate.errors import GradientError, SerrateError

ROWS, WIDTH = 4, 5
LENGTHS = [3, 0, 5, 1]
HEAD = """import torch
import serrate
import serrate.language as hl

F = torch.float64


"""


class Draft:
    """One random kernel, as source."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ragged = self.random.random() < 0.4
        self.single_b = self.random.random() < 0.2
        self.lines: list[str] = []

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def put(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    # Values have the dims (b, k), (b) or (k), without those that a loop over single numbers has.

    def dims(self, *names: str) -> list[str]:
        return [n for n in names if not ((n == "b" and self.single_b) or (n == "k" and self.single_k))]

    def spread(self, value: str, have: list[str], want: list[str]) -> str:
        """The value with dims of size 1 where it lacks some."""
        if have == want or not have:
            return value
        keys = ", ".join(":" if n in have else "None" for n in want)
        return f"({value})[{keys}]"

    def number(self, name: str) -> str:
        """The position along an axis."""
        single = name not in self.dims("b", "k")
        return name if single else f"{name}.index"

    def condition(self, *names: str) -> tuple[str, list[str]]:
        name = self.pick(*names)
        i = self.number(name)
        forms = [
            f"{i} % 4 < 2", f"{i} % 3 == 1", f"3 - {i} < 2", f"{i} // 2 < 1", f"{i} * -1 < -1", f"{i} < 2", f"{i} >= 1",
            f"{i} < 99", f"{i} * 2 < 5", f"({i} + 1) % 2 == 0", f"{i} != 2",
        ]  # fmt: skip
        test, own = self.random.choice(forms), self.dims(name)
        if len(names) == 2 and self.chance(0.3):
            both = self.dims("b", "k")
            b, k = (self.spread(self.number(n), self.dims(n), both) for n in ("b", "k"))
            return self.pick(f"{k} <= {b}", f"{k} < {b} * 2", f"({k} + {b}) % 2 == 0", f"{k} - {b} < 2"), both
        return f"({test})", own

    def row(self) -> str:
        """A value with the dims (b, k)."""
        want = self.dims("b", "k")
        loads = ["x[b, k]"] * 3
        test, have = self.condition("b", "k")
        if want:
            mask = self.spread(test, have, want)
            if have == want or (have and len(want) == 2):
                loads += [f"hl.load(x, [b, k], extra_mask={mask})", f"torch.where({mask}, x[b, k], 0.5)"]
        k = self.dims("k")
        loads += [
            f"x[b, k] * {self.spread('w[k]', k, want)}",
            f"x[b, k] * {self.spread('w[index[k]]', k, want)}",
            f"(x[b, k] * {self.spread(self.number('k'), k, want)})",
            f"(x[b, k] + {self.spread('w[k]', k, want)})",
        ]
        if not self.ragged and k:
            k1 = f"{self.number('k')} + 1"
            loads.append(f"hl.load(x, [b, {k1}], extra_mask={self.spread(f'({k1} < WIDTH)', k, want)})")
        value = self.random.choice(loads)
        return self.pick(value, value, f"torch.sin({value})", f"({value}) * ({value})", f"torch.exp({value} * 0.3)")

    def total(self, how: str, value: str) -> str:
        """A value with the dims (b), reduced over k."""
        if not self.dims("k"):
            return value
        return f"({value}).{how}({len(self.dims('b'))})"

    def loop(self, number: int) -> None:
        most = "x.max_length" if self.ragged else "WIDTH"
        end = self.pick(most, most, most, most, "3", *(["WIDTH - 1"] if not self.ragged else []))
        kind = self.random.random()
        self.single_k = kind < 0.15
        carried = [self.pick("0.0", "0.0", "1.0") for _ in range(self.random.randrange(3))]
        names = [f"a{number}{j}" for j in range(len(carried))]
        own = ", ".join(self.dims("b"))
        for name, first in zip(names, carried, strict=True):
            self.put(2, f"{name} = hl.full([{own}], {first}, dtype=F)")
        softmax = not self.single_k and self.chance(0.2)
        if softmax:
            self.put(2, f"top = hl.full([{own}], float('-inf'), dtype=F)")
            self.put(2, f"tot = hl.zeros([{own}], dtype=F)")
        if self.single_k:
            head = f"for k in hl.grid({end}):"
        elif kind < 0.25 and not self.single_b:
            head = f"for k in hl.jagged_tile({'x.lengths[b]' if self.ragged and self.chance(0.5) else 'lens[b]'}):"
        else:
            size = self.pick("", "", "", ", block_size=1", ", block_size=2", ", block_size=3")
            head = f"for k in hl.tile({end}{size}):"
        self.put(2, head)
        self.put(3, f"v = {self.row()}")
        b, bk = self.dims("b"), self.dims("b", "k")
        before = len(self.lines)
        if softmax:
            v = self.pick("v", "v", self.row())
            new = self.spread("new", b, bk)
            part = self.pick(f"torch.exp({v} - {new})", f"torch.exp({v} - {new}) * v", "v", f"torch.exp(v - {new}) + v")
            self.put(3, f"new = torch.maximum(top, {self.total('amax', v)})")
            self.put(3, f"tot = tot * torch.exp(top - new) + {self.total('sum', part)}")
            self.put(3, "top = new")
        stored = self.chance(0.35)
        if stored and self.chance(0.5):
            self.store(names)
            stored = False
        for j, name in enumerate(names):
            value = self.pick("v", "v", "v * 0.5", "v * v")
            other = self.spread(names[0], b, bk) if j and self.chance(0.25) else None
            if other:
                value = f"{value} * {other}"
            whole = self.total("sum", value)
            forms = [f"{name} + {whole}"] * 5
            forms += [
                f"torch.maximum({name}, {self.total('amax', value)})", f"torch.minimum({self.total('amin', value)}, {name})",
                f"{name} * {self.total('prod', value)}", f"{name} * 0.5 + {whole}", f"{name} + ({whole}) * ({whole})",
                f"{name} + {self.total('mean', value)}", f"{name} + w[0]", whole,
            ]  # fmt: skip
            self.put(3, f"{name} = {self.random.choice(forms)}")
        if stored:
            self.store(names)
        if len(self.lines) == before:
            self.store(names)
        self.results += [*names, *(["tot"] if softmax else []), *(["top"] if softmax and self.chance(0.3) else [])]

    def store(self, names: list[str]) -> None:
        """A store of one value for each position."""
        b, bk = self.dims("b"), self.dims("b", "k")
        value = self.pick("v", "v * 2", *([f"v * {self.spread(names[0], b, bk)}"] if names else []))
        if self.results and self.chance(0.5):
            value = f"{value} * {self.spread(self.results[0], b, bk)}"
        target = f"out{self.stores}"
        self.stores += 1
        test, have = self.condition("b", "k")
        if bk and self.chance(0.5) and (have == bk or (have and len(bk) == 2)):
            self.put(3, f"hl.store({target}, [b, k], {value}, extra_mask={self.spread(test, have, bk)})")
        elif self.chance(0.1):
            self.put(3, f"hl.atomic_add({target}, [b, k], {value})")
        else:
            self.put(3, f"{target}[b, k] = {value}")

    def source(self) -> str:
        self.results: list[str] = []
        self.stores = 0
        rows = "x.num_rows" if self.ragged else "x.size(0)"
        rows = self.pick(rows, rows, rows, rows, f"{rows} - 1")
        size = self.pick("", "", ", block_size=1", ", block_size=2")
        self.single_k = False
        self.put(1, f"for b in hl.grid({rows}):" if self.single_b else f"for b in hl.tile({rows}{size}):")
        for number in range(self.random.choice([1, 1, 2])):
            self.loop(number)
        if self.results:
            value = self.pick(" * ".join(self.results), " + ".join(self.results), f"torch.sin({self.results[-1]})")
            if self.dims("b") and self.chance(0.15):
                value = self.pick(f"({value}) / w[b].sum()", f"({value}) * b.begin", f"({value}) * b.index")
            test, have = self.condition("b")
            if have and self.chance(0.2):
                self.put(2, f"hl.store(out, [b], {value}, extra_mask={test})")
            else:
                self.put(2, f"{self.pick('out[b]', 'out[b]', 'out[b]', 'out[b]', 'out[index[b]]')} = {value}")
        like = "torch.zeros_like(x)" if self.ragged else "torch.zeros(ROWS, WIDTH, dtype=F)"
        based = [f"out{j} = {'base * 1.0' if not self.ragged and self.chance(0.3) else like}" for j in range(self.stores)]
        made = [f"out{j}" for j in range(self.stores)] + (["out"] if self.results else [])
        body = ["    out = torch.zeros(ROWS, dtype=F)", *(f"    {line}" for line in based), *self.lines]
        body.append(f"    return {', '.join(made)},")
        sizes = f"ROWS, WIDTH = {ROWS}, {WIDTH}\n\n\n"
        return (
            HEAD
            + sizes
            + '@serrate.kernel(backward="auto", tune="never")\ndef drawn(x, w, base, index, lens):\n'
            + "\n".join(body)
        )


def loaded(folder: Path, seed: int, source: str) -> ModuleType:
    path = folder / f"drawn_{seed}.py"
    path.write_text(source + "\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def values(results: Any) -> list[Tensor]:
    return [x.values if isinstance(x, JaggedTensor) else x for x in (results if isinstance(results, tuple) else (results,))]


def outcome(folder: Path, seed: int) -> str:
    """Whether a random kernel is "right" or "refused"; "invalid" if it is not a kernel at all. Fails if its gradient is wrong."""
    draft = Draft(seed)
    source = draft.source()
    kernel = loaded(folder, seed, source).drawn
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS) if draft.ragged else ROWS
    shape = (total,) if draft.ragged else (ROWS, WIDTH)
    given = [torch.randn(s, generator=generator, dtype=torch.float64) for s in (shape, (WIDTH,), (ROWS, WIDTH))]
    index = torch.tensor([2, 0, 3, 1, 4])
    lens = torch.tensor([2, 0, 3, 1])

    def run(function: Any, *tensors: Tensor) -> list[Tensor]:
        x, w, base = tensors
        rows = JaggedTensor.from_lengths(x, LENGTHS) if draft.ragged else x
        return values(function(rows, w, base, index, lens))

    tiles = (1, 2, "whole")
    try:
        with torch.no_grad():
            made = run(kernel, *given)
            plain = [run(kernel.interpreted(tile=tile), *given) for tile in tiles]
    except SerrateError:
        return "invalid"
    if not all(torch.isfinite(x).all() for each in (made, *plain) for x in each):
        return "invalid"
    leaves = [x.clone().requires_grad_() for x in given]
    try:
        recorded = run(kernel, *leaves)
    except GradientError:
        return "refused"
    arriving = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in recorded]
    loss = sum((x * g).sum() for x, g in zip(recorded, arriving, strict=True))
    assert isinstance(loss, Tensor)
    found: list[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        found = list(torch.autograd.grad(loss, leaves, allow_unused=True))

    def at(function: Any, k: int, step: Tensor) -> Tensor:
        moved = [x + step if j == k else x for j, x in enumerate(given)]
        with torch.no_grad():
            return torch.stack([(x * g).sum() for x, g in zip(run(function, *moved), arriving, strict=True)]).sum()

    for k, gradient in enumerate(found):
        direction = torch.randn(given[k].shape, generator=generator, dtype=torch.float64)
        ours = 0.0 if gradient is None else float((gradient * direction).sum())
        for tile in tiles:
            function, step = kernel.interpreted(tile=tile, check=False), direction * 1e-5
            wanted = float(at(function, k, step) - at(function, k, -step)) / 2e-5
            near = 1e-4 * max(1.0, abs(wanted))
            assert abs(ours - wanted) < near, f"seed {seed}, input {k}, tile {tile}: {ours}, not {wanted}\n{source}"
    return "right"


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("first", [30, 60, 75])
def test_gradients_of_random_kernels_are_right_or_refused(first: int, tmp_path: Path) -> None:
    found = [outcome(tmp_path, seed) for seed in range(first, first + 10)]
    assert "right" in found


@pytest.mark.slow
@pytest.mark.usefixtures("reference")
def test_gradients_of_many_random_kernels_are_right_or_refused(tmp_path: Path) -> None:
    found = [outcome(tmp_path, seed) for seed in range(1000, 1150)]
    assert found.count("right") > 25 and found.count("refused") > 25
