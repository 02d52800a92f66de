"""Construction and validation of rows: the implementation of `Structure.from_offsets` and its siblings.

In: offsets, lengths, starts or counts, and how to validate them. Out: `Rows`, with the facts that the checks established.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub

import torch
from torch import Tensor

from serrate.errors import DeviceError, StructureError
from serrate.tensor.checks.deferred import poll
from serrate.tensor.checks.validate import (
    LARGEST,
    NO_KNOWN_LENGTHS,
    CheckTime,
    KnownLengths,
    MeasuredLengths,
    Validate,
    check_counts,
    check_extreme,
    check_layout,
    check_lengths,
    check_offsets,
    check_products,
    check_starts,
    check_time,
    defer_lengths_check,
    defer_offsets_check,
    known_of,
)
from serrate.tensor.offsets import chain_from_lengths, chain_from_offsets
from serrate.tensor.rows import Rows
from serrate.tensor.sync import host_copy, on_host

FEW_ROWS = 128
"""Up to this many offsets, checking them in Python is faster than calling torch."""
PerLevel = int | Sequence[int | None] | None
"""A length that the caller knows: the innermost level's, or one per level (None if unknown)."""


def rows_from_offsets(
    offsets: Sequence[Tensor], total: int | None, max_length: PerLevel, min_length: PerLevel, validate: Validate
) -> tuple[Rows, int | None]:
    """The rows for `Structure.from_offsets`, and their total number of positions if it is known."""
    poll()
    if validate is None and len(offsets) == 1 and (quick := one_level(offsets[0], total, max_length, min_length)) is not None:
        return quick, int(quick._facts["total", 0])
    when = CheckTime.NEVER
    if validate is not False:
        check_layout("offsets", offsets, total)
        when = check_time(validate, offsets[0])
    if when is not CheckTime.NOW:
        rows = Rows(chain_from_offsets(offsets, total))
        rows.checked = False
        known = _record_facts(rows, offsets, 1, None, total, max_length, min_length, when)
        if when is CheckTime.DEFERRED:
            lengths = defer_offsets_check(offsets, total, known)
            _keep_lengths(rows, [each if given.dim() == 1 else None for each, given in zip(lengths, offsets, strict=True)])
        return rows, total
    # `validate=True` on a device takes a host copy, which `no_sync` may forbid; otherwise the tensors are already on the host.
    host = tuple([host_copy(level, "validating offsets") for level in offsets]) if validate else offsets
    found = check_offsets(host, total)
    total = found[-1].end
    chain = chain_from_offsets(offsets, total)
    here = offsets[0].is_cpu
    rows = Rows(chain, host=chain if here else chain_from_offsets(host, total))
    _record_facts(rows, offsets, 1, found, total, max_length, min_length, when)
    if here:
        _keep_lengths(rows, [each.lengths for each in found])
    return rows, total


def rows_from_lengths(
    lengths: Sequence[Tensor], total: int | None, max_length: PerLevel, min_length: PerLevel, validate: Validate
) -> tuple[Rows, int | None]:
    """The rows for `Structure.from_lengths`, and their total number of positions if it is known."""
    poll()
    when = CheckTime.NEVER
    if validate is not False:
        check_layout("lengths", lengths)
        when = check_time(validate, lengths[0])
    if when is not CheckTime.NOW:
        rows = Rows(chain_from_lengths(lengths, total))
        rows.checked = False
        known = _record_facts(rows, lengths, 0, None, total, max_length, min_length, when)
        if when is CheckTime.DEFERRED:
            defer_lengths_check(lengths, total, known)
        return rows, total
    host = tuple([host_copy(level, "validating lengths") for level in lengths]) if validate else lengths
    found = check_lengths(host, total)
    total = found[-1].end
    chain = chain_from_lengths(lengths, total)
    rows = Rows(chain, host=chain if lengths[0].is_cpu else chain_from_lengths(host, total))
    _record_facts(rows, lengths, 0, found, total, max_length, min_length, when)
    return rows, total


def rows_from_starts(
    starts: Tensor,
    lengths: Sequence[Tensor],
    extent: int | None,
    room: int | None,
    max_length: PerLevel,
    min_length: PerLevel,
    validate: Validate,
) -> Rows:
    """The rows of `Structure.from_starts`."""
    if validate is not False:
        check_layout("starts", (starts,))
    rows, _ = rows_from_lengths(lengths, None, max_length, min_length, validate)
    if validate is not False:
        if starts.device != rows.device:
            raise DeviceError(f"starts are on {starts.device}, but lengths are on {rows.device}: move one of them")
        check_starts(starts, rows.sizes(), extent, check_time(validate, starts))
    gaps = Rows(rows.offsets, starts=starts.contiguous(), room=room, host=tuple(rows._host.values()))
    gaps._facts.update(rows._facts)
    gaps.checked = rows.checked
    if extent is not None:
        gaps.note("within", 0, extent)
    return gaps


def rows_with_columns(rows: Rows, counts: Tensor, packed: bool, max_length: int | None, validate: Validate) -> Rows:
    """The rows of `Structure.with_columns`."""
    poll()
    when = CheckTime.NEVER
    if validate is not False:
        check_layout("counts", (counts,))
        if counts.device != rows.device:
            raise DeviceError(f"counts are on {counts.device}, but the rows are on {rows.device}: move one of them")
        number = rows.num_rows(rows.depth - 1)
        if counts.shape != (number,):
            raise StructureError(f"counts must have one element for each of {number} rows, got shape {tuple(counts.shape)}")
        when = check_time(validate, counts)
        check_counts(counts, when, max_length)
        if when is CheckTime.NOW and rows.readable():
            lengths = rows.host_lengths(rows.depth - 1, "validating counts")
            check_products(lengths, host_copy(counts, "validating counts"))
    columns = chain_from_lengths([counts], None)[0]
    if columns.dtype is not rows.offsets[0].dtype:
        # int32 offsets only if the sum is known to fit.
        largest = torch.iinfo(rows.offsets[0].dtype).max
        fits = when is CheckTime.NOW and int(host_copy(columns[-1], "validating counts")) <= largest
        columns = columns.to(rows.offsets[0].dtype) if fits else columns
    offsets = rows.offsets if columns.dtype is rows.offsets[0].dtype else tuple(o.long() for o in rows.offsets)
    wide = Rows(offsets, columns=columns, packed=packed, starts=rows.starts, room=rows.room)
    wide.checked = rows.checked and when is CheckTime.NOW
    wide._facts.update((fact, known) for fact, known in rows._facts.items() if fact[0] != "within")
    if max_length is not None:
        wide.note("max", wide.depth, max_length)
    if wide.starts is not None and packed and when is not CheckTime.NEVER:
        check_starts(wide.starts, wide.sizes(), None, when)
    return wide


def one_level(level: Tensor, total: int | None, max_length: PerLevel, min_length: PerLevel) -> Rows | None:
    """A fast path for the common case, valid 1-D offsets on a CPU, with as few torch calls as possible.

    Returns None for anything else; the full checks then handle it and produce the error messages.

    >>> one_level(torch.tensor([0, 3, 4]), 4, None, None), one_level(torch.tensor([0, 3, 4]), 5, None, None)
    (2 > 4, None)
    """
    if not isinstance(level, Tensor) or level.dtype not in LARGEST or not on_host(level):
        return None
    if level.dim() != 1 or level.layout is not torch.strided or not level.is_contiguous() or level.shape[0] < 2:
        return None
    lengths = None
    if level.shape[0] <= FEW_ROWS:
        numbers = level.tolist()
        differences = list(map(sub, numbers[1:], numbers))
        first, end, shortest, longest = numbers[0], numbers[-1], min(differences), max(differences)
    else:
        lengths = level.diff()
        first, end = level[0].item(), level[-1].item()
        shortest, longest = (each.item() for each in lengths.aminmax())
        # No difference can have wrapped around if that many rows of the longest length still fit.
        if longest * lengths.shape[0] > LARGEST[level.dtype]:
            return None
    if shortest < 0 or first != 0 or (total is not None and end != total):
        return None
    for given, found in ((max_length, longest), (min_length, shortest)):
        if given is not None and (type(given) is not int or given != found):
            return None
    rows = Rows((level,), host=(level,))
    rows._facts = {("total", 0): end, ("max", 0): longest, ("min", 0): shortest}
    if lengths is not None:
        rows._memo["lengths", 0] = lengths
    return rows


def _record_facts(
    rows: Rows,
    given: Sequence[Tensor],
    one_more: int,
    found: Sequence[MeasuredLengths] | None,
    total: int | None,
    max_length: PerLevel,
    min_length: PerLevel,
    when: CheckTime,
) -> KnownLengths:
    """Records facts known from shapes, from checks and from the caller; verifies the caller's against the others."""
    facts = rows._facts
    if total is not None:
        facts["total", rows.depth - 1] = total
    if found is not None or len(given) != rows.depth:
        level = 0
        for k, tensor in enumerate(given):
            if tensor.dim() == 2:
                # The outer level of a 2-D tensor has rows of equal length, known from the shape.
                facts["max", level] = facts["min", level] = tensor.shape[1] - one_more if tensor.shape[0] else 0
                level += 1
            if found is not None:
                facts["max", level], facts["min", level] = found[k].longest, found[k].shortest
            level += 1
    if max_length is None and min_length is None:
        return NO_KNOWN_LENGTHS if rows.depth == 1 else known_of(None, None, rows.depth)
    known = known_of(max_length, min_length, rows.depth)
    trusted = when is CheckTime.NEVER
    for level, length in enumerate(known.longest):
        if length is not None:
            if trusted or (measured := facts.get(("max", level))) is None:
                facts["max", level] = length
            elif length != measured:
                check_extreme("max_length", length, "longest", int(measured))
    for level, length in enumerate(known.shortest):
        if length is not None:
            if trusted or (measured := facts.get(("min", level))) is None:
                facts["min", level] = length
            elif length != measured:
                check_extreme("min_length", length, "shortest", int(measured))
    return known


def _keep_lengths(rows: Rows, lengths: Sequence[Tensor | None]) -> None:
    """Keeps lengths that a check has computed, so that they are not computed again."""
    if len(lengths) != rows.depth:
        return
    for level, each in enumerate(lengths):
        if each is not None and each.dtype is rows.offsets[level].dtype:
            rows._memo["lengths", level] = each
