"""Reductions across rows (the component dim alone), positions of largest and smallest elements, and scans, as cases.

In: nothing. Out: `ACROSS`, `SCANS`, `NESTED_SCANS` and `SPECIAL_SCANS`, by name. Across rows, only rows that reach a position
count there, and the result is as long as the longest row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from serrate.frontend import ops
from tests.engine.cases import _DATA, _DTYPES, REDUCERS, _layer_norm, _named, _rms_norm
from tests.engine.oracle import FLOATS, INTEGERS, NUMBERS, Case, Features, Table

SMALL: tuple[Features, ...] = ((5,), (), (1,), (3, 4), (None,))
BEHIND: tuple[Features, ...] = ((5,), (1,), (3, 4), (None,))
ALL = (*NUMBERS, torch.bool)


# --- by torch ----------------------------------------------------------------------------------------------------------


def first_largest(x: Tensor, dim: int, sign: int = 1) -> tuple[Tensor, Tensor]:
    """The largest element (`sign` -1: the smallest) along `dim` and its first position; the identity and -1 where none is."""
    if x.shape[dim] == 0:
        name = "amax" if sign > 0 else "amin"
        best = REDUCERS[name](x, (dim,))
        return best, torch.full(best.shape, -1)
    found = (torch.max if sign > 0 else torch.min)(x, dim, keepdim=True).values
    same = (x == found) | (x != x) if x.dtype.is_floating_point else x == found
    # NaN wins: where there is one, only NaN counts as the largest.
    same = torch.where(found != found, x != x, same)
    return found.squeeze(dim), same.long().argmax(dim)


def _reaching(rows: list[Tensor]) -> list[Tensor]:
    """For each position: the elements there of the rows that reach it, stacked."""
    longest = max(map(len, rows), default=0)
    return [torch.stack([r[k] for r in rows if len(r) > k]) for k in range(longest)]


def across(function: Callable[[Tensor], Any]) -> Callable[[Table], Any]:
    """One value for each position, made from the rows that reach it."""

    def run(rows: Table) -> Any:
        found = [function(x) for x in _reaching(rows)]
        size = len(found)
        found = found or [function(rows.like)]
        if isinstance(found[0], tuple):
            return tuple(torch.stack(parts)[:size] for parts in zip(*found, strict=True))
        return torch.stack(found)[:size]

    return run


def across_same(function: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Rows of the same lengths: each position has a function of the rows that reach it."""

    def run(rows: list[Tensor]) -> list[Tensor]:
        out = [r.clone() for r in rows]
        for k, x in enumerate(_reaching(rows)):
            mapped, reach = function(x), [c for c, r in enumerate(rows) if len(r) > k]
            out = [o.to(mapped.dtype) for o in out]
            for c, value in zip(reach, mapped, strict=True):
                out[c][k] = value
        return out

    return run


def _arg_across(sign: int, both: bool) -> Callable[[Table], Any]:
    """Arg-reductions across rows: a position is the number of a row, not its place among those that reach."""

    def run(rows: Table) -> Any:
        found = []
        for k in range(max(map(len, rows), default=0)):
            reach = [c for c, r in enumerate(rows) if len(r) > k]
            value, at = first_largest(torch.stack([rows[c][k] for c in reach]), 0, sign)
            found.append((value, torch.tensor(reach)[at]))
        best, place = zip(*(found or [first_largest(rows.like, 0, sign)]), strict=True)
        results = torch.stack(best)[: len(found)], torch.stack(place)[: len(found)]
        return results if both else results[1]

    return run


# --- cases -------------------------------------------------------------------------------------------------------------


def _across_cases() -> list[Case]:
    cases = []
    for name, reduce in REDUCERS.items():
        operation = getattr(ops, name)
        dtypes, data = _DTYPES.get(name, ALL), _DATA.get(name, "normal")
        make = functools.partial(Case, kind="table", dtypes=dtypes, data=data)
        cases += [
            make(f"{name}_across", lambda x, f=operation: f(x, 0), across(lambda x, f=reduce: f(x, (0,))), features=SMALL),
            make(
                f"{name}_across_features",
                lambda x, f=operation: f(x, (0, -1)),
                across(lambda x, f=reduce: f(x, (0, -1))),
                features=BEHIND,
            ),
        ]
    table = functools.partial(Case, kind="table", features=SMALL)
    cases += [
        table("sum_across_keepdim", lambda x: ops.sum(x, 0, keepdim=True), lambda rows: across(lambda x: x.sum(0))(rows)[None]),
        table("softmax_across", lambda x: ops.softmax(x, 0), across_same(lambda x: torch.softmax(x, 0))),
        table("log_softmax_across", lambda x: ops.log_softmax(x, 0), across_same(lambda x: torch.log_softmax(x, 0))),
        table("layer_norm_across", lambda x: ops.layer_norm(x, 0), across_same(lambda x: _layer_norm(x, (0,))), data="shifted"),
        table("rms_norm_across", lambda x: ops.rms_norm(x, 0, eps=1e-3), across_same(lambda x: _rms_norm(x, (0,), 1e-3))),
        table(
            "centered_across",
            lambda x: ops.sub(x, ops.mean(x, 0, keepdim=True)),
            across_same(lambda x: x - x.mean(0)),
        ),
        table("argmax_across", lambda x: ops.argmax(x, 0), _arg_across(1, False), dtypes=NUMBERS),
        table("argmin_across", lambda x: ops.argmin(x, 0), _arg_across(-1, False), dtypes=NUMBERS),
        table("max_across", lambda x: ops.max(x, 0), _arg_across(1, True), dtypes=NUMBERS),
        table("min_across", lambda x: ops.min(x, 0), _arg_across(-1, True), dtypes=NUMBERS),
        table(
            "sum_across_of_softmax",
            lambda x: ops.sum(ops.softmax(x, 1), 0),
            lambda rows: across(lambda x: x.sum(0))(Table([torch.softmax(r, 0) for r in rows], rows.like)),
        ),
        table(
            "sum_both_ways",
            lambda x: (ops.sum(x, 0), ops.sum(x, (0, 1))),
            lambda rows: (across(lambda x: x.sum(0))(rows), torch.cat([rows.like[:0], *rows]).sum(0)),
            dtypes=NUMBERS,
        ),
    ]
    return cases


def _arg_cases() -> list[Case]:
    cases = []
    for name, sign in (("max", 1), ("min", -1)):
        both, place = getattr(ops, name), getattr(ops, f"arg{name}")
        cases += [
            Case(
                f"{name}_rows", lambda x, f=both: f(x, 1), lambda r, s=sign: first_largest(r, 0, s), "component", SMALL, NUMBERS
            ),
            Case(
                f"arg{name}_rows",
                lambda x, f=place: f(x, 1),
                lambda r, s=sign: first_largest(r, 0, s)[1],
                "component",
                SMALL,
                NUMBERS,
            ),
            Case(
                f"{name}_features",
                lambda x, f=both: f(x, -1),
                lambda r, s=sign: first_largest(r, -1, s),
                "ragged",
                BEHIND,
                NUMBERS,
            ),
            Case(
                f"arg{name}_keepdim",
                lambda x, f=place: f(x, 1, keepdim=True),
                lambda r, s=sign: first_largest(r, 0, s)[1].unsqueeze(0),
                "component",
                SMALL,
                NUMBERS,
            ),
        ]
    return cases


def _scan_cases() -> list[Case]:
    def sums(r: Tensor, dim: int) -> Tensor:
        return torch.cumsum(r, dim)

    def products(r: Tensor, dim: int) -> Tensor:
        return torch.cumprod(r, dim)

    cases = []
    for name, wanted, data in (("cumsum", sums, "normal"), ("cumprod", products, "near_one")):
        scan = getattr(ops, name)
        cases += [
            Case(f"{name}_rows", lambda x, f=scan: f(x, 1), lambda r, f=wanted: f(r, 0), "ragged", SMALL, ALL, data=data),
            Case(f"{name}_features", lambda x, f=scan: f(x, 2), lambda r, f=wanted: f(r, 1), "ragged", BEHIND, ALL, data=data),
            Case(
                f"{name}_flat",
                lambda x, f=scan: f(ops.as_flattened(x), 0),
                lambda r, f=wanted: f(r, 0),
                "whole",
                SMALL,
                ALL,
                data=data,
            ),
        ]
    return [
        *cases,
        Case("cumsum_wrapping", lambda x: ops.cumsum(x, 1), lambda r: r.cumsum(0), "ragged", SMALL, INTEGERS, data="huge"),
        Case("cumprod_wrapping", lambda x: ops.cumprod(x, 1), lambda r: r.cumprod(0), "ragged", SMALL, INTEGERS, data="huge"),
        Case(
            "cumsum_twice", lambda x: ops.cumsum(ops.cumsum(x, 1), 1), lambda r: r.cumsum(0).cumsum(0), "ragged", SMALL, slack=4.0
        ),
        Case(
            "cumsum_flipped",
            lambda x: ops.flip(ops.cumsum(ops.flip(x, 1), 1), 1),
            lambda r: r.flip(0).cumsum(0).flip(0),
            "ragged",
            SMALL,
        ),
        Case(
            "cumsum_of_softmax",
            lambda x: ops.cumsum(ops.softmax(x, 1), 1),
            lambda r: torch.softmax(r, 0).cumsum(0),
            "ragged",
            SMALL,
        ),
        Case(
            "cumsum_and_sum",
            lambda x: (ops.cumsum(x, 1), ops.add(x, 1)),
            lambda r: (r.cumsum(0), r + 1),
            "ragged",
            SMALL,
            NUMBERS,
        ),
        Case("sum_of_cumsum", lambda x: ops.sum(ops.cumsum(x, 1), 1), lambda r: r.cumsum(0).sum(0), "component", SMALL, NUMBERS),
    ]


def _nested_scan_cases() -> list[Case]:
    small: Any = ((5,), (), (1,))
    return [
        Case("cumsum_positions", lambda x: ops.cumsum(x, 2), lambda r: r.cumsum(0), "ragged", small, NUMBERS),
        Case("cumprod_positions", lambda x: ops.cumprod(x, 2), lambda r: r.cumprod(0), "ragged", small, NUMBERS, data="near_one"),
        Case("flip_positions", lambda x: ops.flip(x, 2), lambda r: r.flip(0), "ragged", small, NUMBERS),
        Case("argmax_positions", lambda x: ops.argmax(x, 2), lambda r: first_largest(r, 0)[1], "grouped", small, NUMBERS),
    ]


def _special_cases() -> list[Case]:
    cases = [*_arg_cases(), *(c for c in _across_cases() if c.dtypes == FLOATS or "max" in c.name or "min" in c.name)]
    cases += [
        Case("cumsum_rows", lambda x: ops.cumsum(x, 1), lambda r: r.cumsum(0), "ragged", SMALL),
        Case("cumprod_rows", lambda x: ops.cumprod(x, 1), lambda r: r.cumprod(0), "ragged", SMALL),
    ]
    return [replace(case, data="special", dtypes=FLOATS) for case in cases]


ACROSS = _named(_across_cases(), _arg_cases())
SCANS = _named(_scan_cases())
NESTED_SCANS = _named(_nested_scan_cases())
SPECIAL_SCANS = _named(_special_cases())
