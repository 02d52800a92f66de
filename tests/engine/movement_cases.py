"""Operations that move elements, and those that only change how a tensor is seen, as cases for the oracle.

In: nothing. Out: `MOVEMENT` and `STRUCTURE`, by name. A place outside its source reads 0, also where an index is negative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serrate.frontend import ops
from tests.engine.oracle import FLOATS, NUMBERS, ROWS, Case, Extra, Features

ALL = (*NUMBERS, torch.bool)
SMALL: tuple[Features, ...] = ((5,), (), (1,), (3, 4), (None,))
BEHIND: tuple[Features, ...] = ((5,), (1,), (3, 4), (None,))
"""Where there must be a dim behind the rows."""
LONG, INT = torch.int64, torch.int32
OTHER = Extra(("N", "F"), ragged=True, own_rows=True)


def at(source: Tensor, indices: Tensor, dim: int = 0) -> Tensor:
    """`source` at `indices` along `dim`, which their dims replace; 0 outside."""
    flat = indices.reshape(-1).long()
    inside = (flat >= 0) & (flat < source.shape[dim])
    if source.shape[dim] == 0:
        found = source.new_zeros((*source.shape[:dim], len(flat), *source.shape[dim + 1 :]))
    else:
        found = source.index_select(dim, flat.clamp(0, source.shape[dim] - 1))
    keep = inside.reshape([-1 if k == dim else 1 for k in range(found.dim())])
    found = torch.where(keep, found, torch.zeros((), dtype=found.dtype))
    return found.reshape((*source.shape[:dim], *indices.shape, *source.shape[dim + 1 :]))


def gathered(source: Tensor, dim: int, indices: Tensor) -> Tensor:
    """`torch.gather`, 0 outside."""
    indices = indices.long()
    inside = (indices >= 0) & (indices < source.shape[dim])
    if source.shape[dim] == 0:
        return source.new_zeros(indices.shape)
    found = torch.gather(source, dim, indices.clamp(0, source.shape[dim] - 1))
    return torch.where(inside, found, torch.zeros((), dtype=found.dtype))


def _picked_rows(rows: list[Tensor], indices: Tensor) -> list[Tensor]:
    """Whole rows; one that is not there is empty."""
    absent = rows[0][:0] if rows else torch.zeros(0)
    return [rows[k] if 0 <= k < len(rows) else absent for k in indices.tolist()]


def _gathered_across(rows: list[Tensor], indices: list[Tensor]) -> list[Tensor]:
    """Position r of row c reads position r of the row that its index names."""
    out = []
    for own in indices:
        found = torch.zeros(own.shape, dtype=rows[0].dtype)
        for place in torch.ones(own.shape).nonzero().tolist():
            k, (r, *rest) = int(own[tuple(place)]), place
            if 0 <= k < len(rows) and r < len(rows[k]):
                found[tuple(place)] = rows[k][(r, *rest)]
        out.append(found)
    return out


def _position(r: Tensor, k: int) -> Tensor:
    k = k if k >= 0 else len(r) + k
    return r[k] if 0 <= k < len(r) else r.new_zeros(r.shape[1:])


def _padded(r: Tensor, dim: int, before: int, after: int, value: Any) -> Tensor:
    pads = [0, 0] * (r.dim() - 1 - dim % r.dim())
    return F.pad(r, [*pads, before, after], value=value)


def _index_cases() -> list[Case]:
    table = Extra((7, "F"))
    ragged, ragged32 = Extra(("N",), True, LONG, "indices"), Extra(("N",), True, INT, "indices")
    flat = Extra((13,), dtype=LONG, data="indices")
    square = Extra((2, 3), dtype=INT, data="indices")
    cases = [
        Case("index_table", lambda x, k, t: ops.index(t, k), lambda r, k, t: at(t, k), extras=(ragged, table)),
        Case("index_table_int32", lambda x, k, t: ops.index(t, k), lambda r, k, t: at(t, k), extras=(ragged32, table)),
        Case("index_own_rows", lambda x, k: ops.index(ops.as_flattened(x), k), _from_all, "table", extras=(ragged,)),
        Case("index_flat", lambda x, k: ops.index(ops.as_flattened(x), k), at, "whole", extras=(flat,)),
        Case("index_square", lambda x, k: ops.index(ops.as_flattened(x), k, -x.ndim + 1), at, "whole", extras=(square,)),
        Case("index_features", lambda x, k: ops.index(x, k, 2), lambda r, k: at(r, k, 1), features=BEHIND, extras=(flat,)),
        Case(
            "index_last", lambda x, k: ops.index(x, k, -1), lambda r, k: at(r, k, r.dim() - 1), features=BEHIND, extras=(square,)
        ),
        Case("index_none", lambda x, k: ops.index(ops.as_flattened(x), k), at, "whole", extras=(Extra((0,), dtype=LONG),)),
        Case("index_rows", ops.index, _picked_rows, "table", extras=(flat,)),
        Case("index_rows_int32", ops.index, _picked_rows, "table", extras=(replace(flat, dtype=INT),)),
        Case("index_no_rows", ops.index, _picked_rows, "table", extras=(Extra((0,), dtype=LONG),)),
        Case(
            "embedding",
            lambda x, k, t: ops.embedding(k, t),
            lambda r, k, t: at(t, k),
            features=((5,), (1,), (64,)),
            extras=(ragged, table),
        ),
    ]
    return [replace(case, features=SMALL if case.features == Case.features else case.features) for case in cases]


def _from_all(rows: list[Tensor], indices: list[Tensor]) -> list[Tensor]:
    values = torch.cat(rows) if rows else torch.zeros(())
    return [at(values, k) for k in indices]


def _gather_cases() -> list[Case]:
    same = Extra(("N", "F"), True, LONG, "indices")
    other = Extra(("N", "F"), True, INT, "indices", own_rows=True)

    def across(rows: list[Tensor], indices: list[Tensor]) -> list[Tensor]:
        return _gathered_across(rows, indices) if rows else []

    return [
        Case(
            "gather_positions", lambda x, k: ops.gather(x, 1, k), lambda r, k: gathered(r, 0, k), features=SMALL, extras=(same,)
        ),
        Case(
            "gather_other_rows",
            lambda x, k: ops.gather(x, 1, k),
            lambda r, k: gathered(r, 0, k),
            "resized",
            features=SMALL,
            extras=(other,),
        ),
        Case(
            "gather_features", lambda x, k: ops.gather(x, 2, k), lambda r, k: gathered(r, 1, k), features=BEHIND, extras=(same,)
        ),
        Case("gather_last", lambda x, k: ops.gather(x, -1, k), lambda r, k: gathered(r, -1, k), features=BEHIND, extras=(same,)),
        Case("gather_across", lambda x, k: ops.gather(x, 0, k), across, "table", features=SMALL, extras=(same,)),
    ]


def _select_cases() -> list[Case]:
    cases = []
    for k in (0, 2, -1, -3, 100):
        name = str(k).replace("-", "minus_")
        cases.append(
            Case(
                f"select_position_{name}", lambda x, k=k: ops.select(x, 1, k), lambda r, k=k: _position(r, k), "component", SMALL
            )
        )
    for k in (0, -1):
        name = str(k).replace("-", "minus_")
        cases.append(
            Case(f"select_feature_{name}", lambda x, k=k: ops.select(x, 2, k), lambda r, k=k: r.select(1, k), features=BEHIND)
        )
    return cases


SLICES = [(None, 2), (1, None), (-2, None), (1, -1), (2, 1), (-3, -1), (0, 0), (100, None), (None, -100), (None, None)]


def _slice_cases() -> list[Case]:
    cases = []
    for start, stop in SLICES:
        name = f"{start}_{stop}".replace("-", "minus_")
        cases.append(
            Case(
                f"slice_positions_{name}",
                lambda x, a=start, b=stop: ops.slice(x, 1, a, b),
                lambda r, a=start, b=stop: r[a:b],
                "resized",
                SMALL,
            )
        )
    for start, stop in SLICES[:6]:
        name = f"{start}_{stop}".replace("-", "minus_")
        cases.append(
            Case(
                f"slice_rows_{name}",
                lambda x, a=start, b=stop: ops.slice(x, 0, a, b),
                lambda rows, a=start, b=stop: rows[a:b],
                "table",
                SMALL,
            )
        )
        cases.append(
            Case(
                f"slice_features_{name}",
                lambda x, a=start, b=stop: ops.slice(x, 2, a, b),
                lambda r, a=start, b=stop: r[:, a:b],
                features=BEHIND,
            )
        )
    return cases


def _pad_cases() -> list[Case]:
    cases = []
    for before, after, value in ((1, 2, 3), (0, 1, 1), (2, 0, 0), (0, 0, 1)):
        for name, dim, own, kind in (("positions", 1, 0, "resized"), ("last", -1, -1, "ragged")):
            cases.append(
                Case(
                    f"pad_{name}_{before}_{after}",
                    lambda x, d=dim, a=before, b=after, v=value: ops.pad(x, d, a, b, v),
                    lambda r, d=own, a=before, b=after, v=value: _padded(r, d, a, b, v),
                    kind,
                    SMALL if dim == 1 else BEHIND,
                )
            )
    return [
        *cases,
        Case("flip_positions", lambda x: ops.flip(x, 1), lambda r: r.flip(0), features=SMALL),
        Case("flip_features", lambda x: ops.flip(x, 2), lambda r: r.flip(1), features=BEHIND),
        Case("flip_twice", lambda x: ops.flip(ops.flip(x, 1), 1), lambda r: r, features=SMALL),
    ]


def _join_cases() -> list[Case]:
    def join(dim: int) -> Callable[..., Any]:
        return lambda *views: ops.cat(views, dim)

    wider = Extra(("N", 2, "F"), True)
    return [
        Case("cat_positions", join(1), lambda *rows: torch.cat(rows), "resized", SMALL, extras=(ROWS,)),
        Case("cat_positions_other", join(1), lambda *rows: torch.cat(rows), "resized", SMALL, extras=(OTHER,)),
        Case("cat_positions_three", join(1), lambda *rows: torch.cat(rows), "resized", SMALL, extras=(OTHER, ROWS)),
        Case("cat_rows", join(0), lambda a, b: a + b, "table", SMALL, extras=(OTHER,)),
        Case("cat_rows_three", join(0), lambda a, b, c: a + b + c, "table", SMALL, extras=(OTHER, ROWS)),
        Case("cat_rows_twice", lambda x: ops.cat([x, x], 0), lambda a: a + a, "table", SMALL),
        Case("cat_one", lambda x: ops.cat([x], 1), lambda r: r, "resized", SMALL),
        Case("cat_features", join(2), lambda a, b: torch.cat([a, b], 1), features=BEHIND, extras=(ROWS,)),
        Case(
            "cat_features_wider",
            lambda x, y: ops.cat([x, ops.flatten(y, 2, 3), x], 2),
            lambda a, b: torch.cat([a, b.flatten(1, 2), a], 1),
            features=((5,), (1,)),
            extras=(wider,),
        ),
        Case("cat_flat", lambda x: ops.cat([ops.as_flattened(x)] * 3, 0), lambda r: torch.cat([r] * 3), "whole", SMALL),
        Case(
            "cat_promoted",
            lambda x, k: ops.cat([x, k], 1),
            lambda r, k: torch.cat([r, k]),
            "resized",
            SMALL,
            extras=(Extra(("N", "F"), True, INT),),
            own_dtype=True,
        ),
        Case(
            "stack_features",
            lambda x, y: ops.stack([x, y], 2),
            lambda a, b: torch.stack([a, b], 1),
            features=SMALL,
            extras=(ROWS,),
        ),
        Case(
            "stack_last", lambda x, y: ops.stack([x, y], -1), lambda a, b: torch.stack([a, b], -1), features=SMALL, extras=(ROWS,)
        ),
        Case(
            "stack_flat",
            lambda x: ops.stack([ops.as_flattened(x), ops.neg(ops.as_flattened(x))]),
            lambda r: torch.stack([r, -r]),
            "whole",
            SMALL,
            dtypes=NUMBERS,
        ),
    ]


def _structure_cases() -> list[Case]:
    vector: Any = ((5,), (1,), (12,))
    square: Any = ((3, 4), (2, 3))
    weight = Extra((5, 3))
    flat = ops.as_flattened
    cases = [
        Case("transpose", lambda x: ops.transpose(x, 2, 3), lambda r: r.transpose(1, 2), features=square),
        Case("transpose_copy", lambda x: ops.set(ops.transpose(x, -1, -2)), lambda r: r.transpose(1, 2), features=square),
        Case("transpose_sum", lambda x: ops.sum(ops.transpose(x, 2, 3), -1), lambda r: r.sum(1), features=square),
        Case("transpose_flat", lambda x: ops.transpose(flat(x), 0, 1), lambda r: r.T, "whole", vector),
        Case("transpose_flat_copy", lambda x: ops.set(ops.transpose(flat(x), 0, 1)), lambda r: r.T, "whole", vector),
        Case("permute", lambda x: ops.permute(x, 0, 1, 3, 2), lambda r: r.permute(0, 2, 1), features=square),
        Case("permute_flat", lambda x: ops.set(ops.permute(flat(x), (2, 0, 1))), lambda r: r.permute(2, 0, 1), "whole", square),
        Case("unsqueeze_behind", lambda x: ops.unsqueeze(x, 2), lambda r: r.unsqueeze(1), features=SMALL),
        Case("unsqueeze_last", lambda x: ops.set(ops.unsqueeze(x, -1)), lambda r: r.unsqueeze(-1), features=SMALL),
        Case("squeeze", lambda x: ops.squeeze(ops.unsqueeze(x, -1), -1), lambda r: r, features=SMALL),
        Case("squeeze_copy", lambda x: ops.set(ops.squeeze(x, 2)), lambda r: r.squeeze(1), features=((1,), (5,), (1, 3))),
        Case("flatten_features", lambda x: ops.flatten(x, 2), lambda r: r.flatten(1), features=((3, 4), (2, 3, 4), (5,))),
        Case("flatten_sum", lambda x: ops.sum(ops.flatten(x, 2, -1), 2), lambda r: r.flatten(1).sum(1), features=square),
        Case("flatten_all", lambda x: ops.flatten(flat(x)), lambda r: r.reshape(-1), "whole", SMALL),
        Case("flatten_all_copy", lambda x: ops.set(ops.flatten(flat(x))), lambda r: r.reshape(-1), "whole", SMALL),
        Case("unflatten", lambda x: ops.unflatten(x, 2, (3, -1)), lambda r: r.unflatten(1, (3, 4)), features=((12,),)),
        Case(
            "unflatten_three",
            lambda x: ops.set(ops.unflatten(x, 2, (2, -1, 3))),
            lambda r: r.unflatten(1, (2, 2, 3)),
            features=((12,),),
        ),
        Case(
            "unflatten_known",
            lambda x: ops.sum(ops.unflatten(x, 2, (3, 4)), 2),
            lambda r: r.unflatten(1, (3, 4)).sum(1),
            features=((12,),),
        ),
        Case(
            "unflatten_unknown",
            lambda x: ops.set(ops.unflatten(x, 2, (-1, 1))),
            lambda r: r.unflatten(1, (-1, 1)),
            features=((None,), (5,)),
        ),
        Case(
            "reshape",
            lambda x: ops.set(ops.reshape(flat(x), (-1, 2))),
            lambda r: r.reshape(-1, 2),
            "whole",
            features=((12,), (2,), (3, 4)),
        ),
        Case("reshape_line", lambda x: ops.reshape(flat(x), (-1,)), lambda r: r.reshape(-1), "whole", SMALL),
        Case(
            "flatten_permuted",
            lambda x: ops.set(ops.flatten(ops.set(ops.transpose(x, 2, 3)), 2, 3)),
            lambda r: r.transpose(1, 2).flatten(1),
            features=square,
        ),
        Case(
            "broadcast_rows",
            lambda x: ops.broadcast_to(ops.amax(x, 1, keepdim=True), x),
            lambda r: r.amax(0, keepdim=True).expand_as(r) if len(r) else r,
            features=SMALL,
            dtypes=NUMBERS,
        ),
        Case(
            "broadcast_feature",
            lambda x, w: ops.broadcast_to(w, x),
            lambda r, w: w.expand_as(r),
            features=SMALL,
            extras=(Extra(("F",)),),
        ),
        Case(
            "broadcast_number",
            lambda x, w: ops.broadcast_to(w, x),
            lambda r, w: w.expand_as(r),
            features=SMALL,
            extras=(Extra((1,)),),
        ),
        Case(
            "transposed_weight",
            lambda x, w: ops.matmul(x, ops.transpose(w, 0, 1)),
            lambda r, w: r @ w.T,
            features=((3,),),
            dtypes=FLOATS[::-1],
            extras=(weight,),
        ),
    ]
    return [replace(case, dtypes=ALL if case.dtypes == Case.dtypes else case.dtypes) for case in cases]


def _named(*groups: list[Case]) -> dict[str, Case]:
    cases = [case for group in groups for case in group]
    found = {case.name: case for case in cases}
    assert len(found) == len(cases), "two cases of one name"
    return found


MOVEMENT = {
    name: replace(case, dtypes=ALL if case.dtypes == Case.dtypes else case.dtypes)
    for name, case in _named(
        _index_cases(), _gather_cases(), _select_cases(), _slice_cases(), _pad_cases(), _join_cases()
    ).items()
}
STRUCTURE = _named(_structure_cases())
