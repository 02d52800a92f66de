"""Plain torch, row by row: what every operation must give, on structures of every awkward kind.

In: a `Case` (how to record it, and what one row of its result is), rows, dtypes. Out: arguments, the wanted result, and a
comparison that names the first bad coordinate. Nothing here imports a backend: a third one is a line in `BACKENDS`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import serrate.compiled  # noqa: F401  installs Fusion.compile
from serrate import ir
from serrate.frontend import ops
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor

BACKENDS = ["reference", "cpp", "triton"]
STRATEGIES = ["maskless", "masked", "persistent_dynamic"]
FULL = os.environ.get("SERRATE_TEST_FULL") == "1"

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "maskless": [{}, {"tile": 3}, {"keep_rows": False}, {"tile": 1}],
    "masked": [{}, {"rows": 3, "tile": 2}, {"tile": 1, "rows": 1}],
    "persistent_dynamic": [{}, {"chunk": 7, "tile": 3}, {"chunk": 1}, {"chunk": 16}],
}
"""Options that must not change the meaning. A tile of 3 cuts most rows unevenly; a chunk of 7 gives most rows several parts."""

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
NUMBERS = FLOATS + INTEGERS

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-4, 3e-5),
    torch.float64: (1e-10, 1e-11),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
}
"""dtype -> relative, absolute. The oracle computes in float64, so this is all the error there is."""


# --- structures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Lengths of rows, and for two levels how many rows each group has."""

    lengths: tuple[int, ...]
    groups: tuple[int, ...] | None = None

    @property
    def offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    @property
    def group_offsets(self) -> list[int]:
        assert self.groups is not None
        return [0, *itertools.accumulate(self.groups)]

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def merged(self) -> Rows:
        """Each group as one row."""
        return Rows(tuple(sum(self.lengths[a:b]) for a, b in itertools.pairwise(self.group_offsets)))


ONE_LEVEL: dict[str, Rows] = {
    "mixed": Rows((3, 0, 7, 1, 13, 0)),
    "none": Rows(()),
    "all_empty": Rows((0, 0, 0, 0, 0)),
    "single": Rows((5,)),
    "single_empty": Rows((0,)),
    "primes": Rows((2, 3, 5, 7, 11, 13, 17)),
    "giant": Rows((*[1, 2, 0, 3] * 4, 24, 0)),
    "tiny": Rows(tuple((k * 7) % 3 for k in range(40))),
}
TWO_LEVELS: dict[str, Rows] = {
    "mixed": Rows((3, 0, 7, 1, 5, 0, 2), (2, 0, 4, 1)),
    "none": Rows((), ()),
    "empty_groups": Rows((), (0, 0, 0)),
    "empty_rows": Rows((0, 0, 0), (1, 2)),
    "single": Rows((4,), (1,)),
    "giant": Rows((1, 0, 2, 20, 1, 0, 3), (3, 1, 3)),
    "tiny": Rows(tuple(k % 3 for k in range(30)), tuple((k * 5) % 4 for k in range(20))),
}
assert all(sum(rows.groups or ()) == len(rows.lengths) for rows in TWO_LEVELS.values())


# --- cases ---------------------------------------------------------------------------------------------------------------

Features = tuple[int | None, ...]
"""The dims behind the rows; None is 5 positions that the program does not know when it is compiled."""
ANY: tuple[Features, ...] = ((5,), (), (1,), (3,), (64,), (2, 3), (None,), (2, 3, 4))
WIDE: tuple[Features, ...] = ((5,), (1,), (64,), (2, 3), (None,), (1025,), (3000,))
"""For what reduces over features, so that there must be some, and more of them than one block holds."""
FEW = ("mixed", "none", "giant")
"""Structures that are enough for wide features: each position then costs as much as a row does elsewhere."""
VECTOR: tuple[Features, ...] = ((5,), (1,), (3,), (64,), (None,))


@dataclass(frozen=True)
class Extra:
    """An argument beside the rows. `shape` uses F for the features, C for components, L for the longest row, or numbers."""

    shape: tuple[str | int, ...]
    ragged: bool = False
    dtype: torch.dtype | None = None
    """None: the dtype of the rows."""
    data: str | None = None
    """None: as the rows."""
    own_rows: bool = False
    """Whether it is ragged by lengths of its own: those of the rows, in the opposite order."""

    def of(self, rows: Rows) -> Rows:
        """The lengths of its rows."""
        return Rows(rows.lengths[::-1]) if self.own_rows else rows

    def behind(self, features: Features) -> Features:
        """The dims of a ragged one behind its rows."""
        return tuple(self.declared(features)[1:])

    def sizes(self, features: tuple[int, ...], components: int, longest: int) -> list[int]:
        known: dict[str, tuple[int, ...]] = {
            "F": features,
            "C": (components,),
            "L": (longest,),
            "D": features[-1:],
            "N": (0,),
        }
        return [n for s in self.shape for n in (known[s] if isinstance(s, str) else (s,))]

    def declared(self, features: Features) -> list[int | None]:
        known: dict[str, Features] = {
            "F": features,
            "C": (None,),
            "L": (None,),
            "D": features[-1:],
            "N": (None,),
        }
        return [n for s in self.shape for n in (known[s] if isinstance(s, str) else (s,))]


FEATURE = Extra(("F",))
PER_COMPONENT = Extra(("C", 1, "F"))
DENSE = Extra(("C", "L", "F"))
ROWS = Extra(("N", "F"), ragged=True)


@dataclass(frozen=True)
class Case:
    """One program: `build` records it on jagged rows and extras, `row` computes one row of each result with torch."""

    name: str
    build: Callable[..., TensorView | tuple[TensorView, ...]]
    row: Callable[..., Any]
    kind: str = "ragged"
    """What comes out: `ragged` rows, `resized` rows (of lengths that the oracle tells), one `component` value for each row
    (`grouped` by the outer level, if it stays), or `whole`: one result from all rows. The oracle of a `table` gets the list of
    all rows (and that of each ragged extra) at once, and gives a tensor or a list of rows."""
    features: tuple[Features, ...] = ANY
    dtypes: tuple[torch.dtype, ...] = FLOATS
    extras: tuple[Extra, ...] = ()
    data: str = "normal"
    own_dtype: bool = False
    """Whether torch computes the wanted result in the dtype itself (rounding is what is tested), not in float64."""
    levels: str = "rows"
    """In two levels: what a row of the oracle is, `rows` or `groups`."""
    slack: float = 1.0
    """How much more than the dtype's tolerance sixteen-bit results may be off, where something in between is rounded."""


def sample(rows: Rows, features: tuple[int, ...], dtype: torch.dtype, data: str, generator: torch.Generator) -> Tensor:
    """Values for rows; `special` makes whole rows of -inf, and plants inf, NaN and -inf in others."""
    x = numbers((rows.total, *features), dtype, data, generator)
    if data == "special":
        for c, (a, b) in enumerate(itertools.pairwise(rows.offsets)):
            if b > a and c % 5 == 0:
                x[a:b] = float("-inf")
            elif b > a and c % 5 < 4:
                x[(a + b) // 2] = (float("inf"), float("nan"), float("-inf"))[c % 5 - 1]
    return x


def numbers(shape: Sequence[int], dtype: torch.dtype, data: str, generator: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(tuple(shape), generator=generator) < (0.8 if data == "mostly_true" else 0.3)
    if not dtype.is_floating_point:
        if data == "huge":
            return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, tuple(shape), generator=generator, dtype=dtype)
        if data == "indices":
            # On both sides of what is there.
            return torch.randint(-2, 12, tuple(shape), generator=generator).to(dtype)
        low = 1 if data == "positive" else -3
        return torch.randint(low, 4, tuple(shape), generator=generator).to(dtype)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    if data == "positive":
        x = x.abs() + 0.5
    elif data == "near_one":
        x = 1 + x / 16
    elif data == "far":
        x = 100 + x
    elif data == "shifted":
        x = 4 + x
    return x.to(dtype)


# --- running -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inputs are small: waking a second thread for each of the reference's many operations costs more than all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recorded(case: Case, dtype: torch.dtype, features: Features, levels: int = 1) -> ir.Fusion:
    """The fusion of a case."""
    fusion = ir.Fusion(f"case_{case.name}")
    with fusion:
        x = fusion.input((None, *features), dtype)
        offsets = [fusion.input((None,), torch.int64) for _ in range(levels)]
        nested = functools.reduce(ops.as_nested, offsets, x)
        extras = []
        for extra in case.extras:
            if extra.ragged:
                own = fusion.input(extra.declared(features), extra.dtype or dtype)
                by = [fusion.input((None,), torch.int64)] if extra.own_rows else offsets
                extras.append(functools.reduce(ops.as_nested, by, own))
            else:
                extras.append(fusion.input(extra.declared(features), extra.dtype or dtype))
        result = case.build(nested, *extras)
        fusion.output(*(result if isinstance(result, tuple) else (result,)))
    return fusion


@functools.cache
def compiled(
    case: Case,
    backend: str,
    strategy: str | None,
    options: tuple[tuple[str, Any], ...],
    dtype: torch.dtype,
    features: Features,
    levels: int = 1,
) -> Any:
    """The program of a case; it does not depend on lengths, so that one build serves every structure."""
    return recorded(case, dtype, features, levels).compile(backend, strategy, **dict(options))


class Table(list[Tensor]):
    """Rows, and one of ones, `like`, that tells their dtype and dims where there is no other."""

    def __init__(self, rows: Iterable[Tensor], like: Tensor) -> None:
        super().__init__(rows)
        self.like = like


@dataclass(frozen=True)
class Arguments:
    """What a program is called with, and the same things row by row."""

    call: tuple[Tensor, ...]
    values: Tensor
    extras: tuple[Tensor, ...]
    rows: Rows

    def split(self, specs: Sequence[Extra]) -> list[tuple[Tensor, ...]]:
        """For each row: its values and its part of every extra."""
        out = []
        for c, (a, b) in enumerate(itertools.pairwise(self.rows.offsets)):
            parts = [self.values[a:b]]
            for spec, extra in zip(specs, self.extras, strict=True):
                if spec.ragged:
                    own = spec.of(self.rows).offsets
                    parts.append(extra[own[c] : own[c + 1]])
                elif "L" in spec.shape:
                    parts.append(extra[c if spec.shape[0] == "C" else 0][: b - a])
                else:
                    parts.append(extra[c] if spec.shape[:1] == ("C",) else extra)
            out.append(tuple(parts))
        return out

    def tables(self, specs: Sequence[Extra]) -> list[Any]:
        """All rows as a list, those of every ragged extra too, and other extras as they are."""
        like = self.values.new_ones((1, *self.values.shape[1:]))
        parts: list[Any] = [Table(self.values.split(list(self.rows.lengths)), like)]
        for spec, extra in zip(specs, self.extras, strict=True):
            parts.append(list(extra.split(list(spec.of(self.rows).lengths))) if spec.ragged else extra)
        return parts


def arguments(case: Case, rows: Rows, dtype: torch.dtype, features: Features, seed: str) -> Arguments:
    """Random arguments, the same in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    known = tuple(5 if n is None else n for n in features)
    oracle_rows = rows.merged if rows.groups is not None and case.levels == "groups" else rows
    values = sample(rows, known, dtype, case.data, generator)
    outer = len(rows.lengths if rows.groups is None else rows.groups)
    offsets = [torch.tensor(rows.offsets)]
    if rows.groups is not None:
        offsets.append(torch.tensor(rows.group_offsets))
    call, extras = [values, *offsets], []
    for e in case.extras:
        of, data = e.dtype or dtype, e.data or case.data
        if e.ragged:
            own = sample(e.of(rows), tuple(e.sizes(known, outer, 0)[1:]), of, data, generator)
        else:
            # Two positions past the longest row: a dense operand may reach further than the rows do.
            own = numbers(e.sizes(known, outer, max(rows.lengths, default=0) + 2), of, data, generator)
        extras.append(own)
        call += [own, torch.tensor(e.of(rows).offsets)] if e.own_rows else [own]
    return Arguments(tuple(call), values, tuple(extras), oracle_rows)


@dataclass(frozen=True)
class Wanted:
    """One result by plain torch, the dtype that torch gives it, and the lengths of its rows if it has any."""

    values: Tensor
    dtype: torch.dtype
    rows: Rows | None = None


def wanted(case: Case, given: Arguments) -> list[Wanted]:
    """Each result by plain torch."""

    def tupled(x: Any) -> tuple[Any, ...]:
        return x if isinstance(x, tuple) else (x,)

    probe = [t if isinstance(t, Tensor) else [*t, _probe(case, given)[0][0]] for t in tupled(case.row(*_probe(case, given)))]
    dtypes = [(t[0] if isinstance(t, list) else t).dtype for t in probe]
    own = case.own_dtype or not given.values.dtype.is_floating_point
    wide = given if own else Arguments(given.call, _widened(given.values), tuple(map(_widened, given.extras)), given.rows)
    if case.kind == "whole":
        found = tupled(case.row(wide.values, *wide.extras))
        return [Wanted(x, dtype) for x, dtype in zip(found, dtypes, strict=True)]
    if case.kind == "table":
        tables = tupled(case.row(*wide.tables(case.extras)))
        return [
            Wanted(torch.cat([p[0][:0].to(t[0].dtype if t else p[0].dtype), *t]), d, Rows(tuple(map(len, t))))
            if isinstance(t, list)
            else Wanted(t, d)
            for t, p, d in zip(tables, probe, dtypes, strict=True)
        ]
    rows = [tupled(case.row(*parts)) for parts in wide.split(case.extras)]
    first = tupled(case.row(*_probe(case, wide)))
    results = []
    for k, dtype in enumerate(dtypes):
        if case.kind in ("ragged", "resized"):
            lengths = Rows(tuple(len(r[k]) for r in rows))
            results.append(Wanted(torch.cat([first[k][:0], *(r[k] for r in rows)]), dtype, lengths))
        else:
            results.append(Wanted(torch.stack([first[k], *(r[k] for r in rows)])[1:], dtype))
    return results


def _widened(x: Tensor) -> Tensor:
    return x.double() if x.dtype.is_floating_point else x


def _probe(case: Case, given: Arguments) -> tuple[Any, ...]:
    """One row of ones (three where the oracle takes all rows): tells dtypes and dims of results where there may be no rows."""
    known = given.values.shape[1:]
    extras: list[Any] = []
    many = case.kind == "table"
    for spec, extra in zip(case.extras, given.extras, strict=True):
        if many:
            shape = (1, *extra.shape[1:]) if spec.ragged or spec.shape[:1] != ("C",) else (3, *extra.shape[1:])
            ones = torch.ones(shape if spec.ragged or "C" in spec.shape else extra.shape, dtype=extra.dtype)
            extras.append([ones] * 3 if spec.ragged else ones)
            continue
        dropped = spec.shape[:1] == ("C",) or "L" in spec.shape
        shape = (1, *extra.shape[1:]) if spec.ragged else extra.shape[1:] if dropped else extra.shape
        extras.append(torch.ones((1, *shape[1:]) if "L" in spec.shape else shape, dtype=extra.dtype))
    row = torch.ones((1, *known), dtype=given.values.dtype)
    return (Table([row] * 3, row) if many else row, *extras)


def check(case: Case, got: Any, given: Arguments, where: str) -> None:
    """Fails with the first bad coordinate of the first bad result."""
    results = got if isinstance(got, tuple) else (got,)
    for k, (result, want) in enumerate(zip(results, wanted(case, given), strict=True)):
        place = f"{where}, result {k}" if len(results) > 1 else where
        if case.kind == "grouped" or want.rows is not None:
            assert isinstance(result, JaggedTensor), f"{place}: expected a JaggedTensor, got {type(result).__name__}"
            if case.kind in ("ragged", "grouped"):
                offsets = given.call[1 if case.kind == "ragged" else 2].tolist()
            else:
                assert want.rows is not None
                offsets = want.rows.offsets
            assert result.offsets.tolist() == offsets, f"{place}: offsets must be {offsets}, got {result.offsets.tolist()}"
            result = result.values
        assert isinstance(result, Tensor), f"{place}: expected a Tensor, got {type(result).__name__}"
        assert result.dtype == want.dtype, f"{place}: expected {want.dtype} as torch gives, got {result.dtype}"
        relative, absolute = TOLERANCES.get(want.dtype, (0.0, 0.0))
        slack = case.slack if want.dtype.itemsize == 2 else 1.0
        compare(result, want.values, place, want.rows, (relative * slack, absolute * slack))


def compare(
    got: Tensor, want: Tensor, where: str, rows: Rows | None = None, tolerance: tuple[float, float] | None = None
) -> None:
    """Fails with the first coordinate at which two tensors differ by more than the dtype allows."""
    assert got.shape == want.shape, f"{where}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    if got.dtype.is_floating_point:
        relative, absolute = tolerance or TOLERANCES[got.dtype]
        # What the dtype cannot hold is infinite in it.
        a, b = got.double(), want.to(got.dtype).double() if want.dtype == torch.float64 else want.double()
        good = torch.isclose(a, b, rtol=relative, atol=absolute, equal_nan=True)
    else:
        good = got == want
    if good.all():
        return
    bad = (~good).nonzero()
    first = tuple(bad[0].tolist())
    owner = ""
    if rows is not None and first:
        row = max(c for c, start in enumerate(rows.offsets[:-1]) if start <= first[0])
        owner = f" (row {row} of length {rows.lengths[row]}, position {first[0] - rows.offsets[row]})"
    raise AssertionError(
        f"{where}: {len(bad)} of {got.numel()} elements differ; first at {list(first)}{owner}: "
        f"got {got[first].item()!r}, want {want[first].item()!r}"
    )


def pick(choices: Sequence[Any], *key: object) -> Any:
    """One of the choices, the same in every run and process."""
    return choices[zlib.crc32(repr(key).encode()) % len(choices)]
