"""Ragged tensors in pickles and in files of `torch.save`.

In: nothing. Out: the registrations, made when this module is imported: how a ragged tensor comes apart, and that
`torch.load(weights_only=True)` may put it together. What is read is checked like what a user gives, because offsets that
point outside the values would be followed.
"""

from __future__ import annotations

import copyreg
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from serrate.errors import FormatError
from serrate.tensor.checks.validate import Moment, check_dim, check_form, check_offsets, check_rectangles, check_starts
from serrate.tensor.hints import Hints
from serrate.tensor.jagged import JaggedTensor
from serrate.tensor.rows import Rows, rows_of
from serrate.tensor.structure import Structure
from serrate.tensor.sync import on_host

_Facts = dict[tuple[str, int], float]
_Form = tuple[int, bool, int | None]


def load_rows(offsets: tuple[Tensor, ...], starts: Tensor | None, form: _Form, facts: _Facts) -> Rows:
    """Rows from what a file holds: offsets of every level, `form` = (depth, packed, room), and what was known of them.

    >>> load_rows((torch.tensor([0, 2, 3]),), None, (1, True, None), {})
    2 > 3
    >>> load_rows((torch.tensor([0, 2, 1]),), None, (1, True, None), {})
    Traceback (most recent call last):
    serrate.errors.StructureError: offsets must not decrease: offsets[2] = 1 < offsets[1] = 2
    """
    depth, packed, room = form
    if not isinstance(depth, int) or not isinstance(packed, bool) or not isinstance(room, int | None):
        raise FormatError(f"the form of rows is (depth, packed, room), not {form!r}: the file is damaged")
    check_form("offsets", offsets)
    if not 1 <= depth <= len(offsets) <= depth + 1 or any(level.dim() != 1 for level in offsets):
        raise FormatError(f"rows of {depth} levels cannot have {len(offsets)} tensors of offsets: the file is damaged")
    readable = all(map(on_host, offsets))
    # What was known is believed only where nothing can be read.
    rows = rows_of(tuple(level.contiguous() for level in offsets), depth, packed, starts, room, {} if readable else facts)
    if readable:
        rows.note("total", depth - 1, check_offsets(offsets[:depth], None)[-1].end)
        if rows.columns is not None:
            check_offsets(offsets[depth:], None)
            if rows.columns.shape != offsets[depth - 1].shape:
                raise FormatError("rows and the counts of their columns differ in number: the file is damaged")
            check_rectangles(rows.host_lengths(depth - 1, "loading rows"), rows.host_lengths(depth, "loading rows"))
    if starts is not None:
        check_form("starts", (starts,))
        if readable and on_host(starts):
            check_starts(starts, rows.host_sizes("loading rows"), None, Moment.NOW)
    return rows


def load_structure(rows: tuple[Rows, ...], dims: tuple[int, ...]) -> Structure:
    """A structure from what a file holds.

    >>> load_structure((Rows((torch.tensor([0, 2]),)),), (0,))
    Structure(1 > ?)
    """
    if not all(isinstance(each, Rows) for each in rows):
        raise FormatError("a structure is made of rows: the file is damaged")
    for dim in dims:
        check_dim(dim)
    return Structure.independent(*(Structure((each,), (dim,)) for each, dim in zip(rows, dims, strict=True)))


def load_tensor(values: Tensor, structure: Structure, hints: tuple[str | None, ...]) -> JaggedTensor:
    """A ragged tensor from what a file holds.

    >>> load_tensor(torch.zeros(2), Structure.from_lengths(torch.tensor([2])), ("uniform", None, None)).hints.distribution
    'uniform'
    """
    if not isinstance(values, Tensor) or not isinstance(structure, Structure):
        raise FormatError("a ragged tensor is made of values and a structure: the file is damaged")
    return JaggedTensor(values, structure.to(values.device), hints=Hints(*hints))


def rows_apart(rows: Rows) -> tuple[Any, ...]:
    """The arguments of `load_rows`. Derived arrays stay behind: they can be made again.

    >>> rows_apart(Rows((torch.tensor([0, 2]),)))
    ((tensor([0, 2]),), None, (1, True, None), {})
    """
    return rows.offsets, rows.starts, (rows.depth, rows.packed, rows.room), rows.facts()


def _reduce_rows(rows: Rows) -> tuple[Any, ...]:
    return load_rows, rows_apart(rows)


def _reduce_structure(structure: Structure) -> tuple[Any, ...]:
    return load_structure, (structure.rows, structure.dims)


def _reduce_tensor(jt: JaggedTensor) -> tuple[Any, ...]:
    return load_tensor, (jt.values, jt.structure, astuple(jt.hints))


copyreg.pickle(Rows, _reduce_rows)
copyreg.pickle(Structure, _reduce_structure)
copyreg.pickle(JaggedTensor, _reduce_tensor)
torch.serialization.add_safe_globals([load_rows, load_structure, load_tensor])
