"""Which cases run where: backends, strategies, options, dtypes and feature shapes, sampled or all of them.

In: cases by name. Out: parameters for pytest, and `run`, which calls one program with every structure.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.engine.oracle import (
    ANY,
    BACKENDS,
    FEW,
    FULL,
    STRATEGIES,
    VARIANTS,
    Case,
    Features,
    Rows,
    arguments,
    check,
    compiled,
    one_thread,
    pick,
)

Options = tuple[tuple[str, Any], ...]
POINT = ("case", "backend", "strategy", "options", "dtype", "features")
ALIKE = ("special", "movement", "structure", "elementwise")
"""Suites whose cases have loops of one kind: each case runs under one strategy for each backend."""


def _pairs(case: Case, elementwise: bool) -> list[tuple[str, str]]:
    """Which backends and strategies a case runs on by default."""
    if elementwise:
        return [(backend, pick(STRATEGIES, case.name, backend)) for backend in BACKENDS]
    first = pick(range(len(BACKENDS)), case.name)
    return [(BACKENDS[(first + k) % len(BACKENDS)], strategy) for k, strategy in enumerate(STRATEGIES)]


def _is_quick(options: dict[str, Any], _: torch.dtype, features: Features) -> bool:
    """Whether Triton's interpreter, which runs block after block in Python, is done with a case in a second or two."""
    return len(features) < 2 and all((n or 0) <= 64 for n in features) and options.get("chunk") != 1 and options.get("tile") != 1


def points(cases: dict[str, Case], suite: str) -> list[Any]:
    """The sampled matrix, or all of it."""
    found: list[Any] = []
    for case in cases.values():
        # An elementwise case has no loop to schedule but the one over all elements.
        elementwise = (case.kind == "ragged" and case.features == ANY and suite != "two levels") or suite in ALIKE
        everything = list(itertools.product(BACKENDS, STRATEGIES))
        for backend, strategy in everything if FULL else _pairs(case, elementwise):
            rest = list(itertools.product(VARIANTS[strategy], case.dtypes, case.features))
            if backend == "triton" and not FULL:
                rest = [r for r in rest if _is_quick(*r)] or rest
            chosen = rest if FULL else [pick(rest, suite, case.name, backend, strategy)]
            for variant, dtype, features in chosen:
                options = tuple(sorted(variant.items()))
                shown = ",".join(f"{k}={v}" for k, v in options)
                name = "-".join(
                    (case.name, backend, strategy, shown, str(dtype).removeprefix("torch."), "x".join(map(str, features)))
                )
                found.append(pytest.param(case.name, backend, strategy, options, dtype, features, id=name))
    return found


def run(
    case: Case,
    backend: str,
    strategy: str,
    options: Options,
    dtype: torch.dtype,
    features: Features,
    structures: dict[str, Rows],
    level: int,
) -> None:
    program = compiled(case, backend, strategy, options, dtype, features, level)
    failures = []
    wide = max((n or 0 for n in features), default=0) > 256
    names = FEW if wide else tuple(structures)
    if backend == "triton" and not FULL:
        # Triton's interpreter runs programs one by one in Python.
        names = tuple(name for name in FEW if name in structures and name != "giant")
    for name in names:
        rows = structures[name]
        given = arguments(case, rows, dtype, features, f"{case.name} {name} {dtype} {features}")
        try:
            with one_thread():
                got = program(*given.call)
            check(case, got, given, f"{case.name} on {name} {list(rows.lengths)}")
        except AssertionError as error:
            failures.append(str(error).splitlines()[0])
    assert not failures, "\n" + "\n".join(failures)
