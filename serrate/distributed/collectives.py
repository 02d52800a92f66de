"""The collectives of this package: rows exchanged or gathered as bytes, and counts with a header that ranks compare.

In: tensors, sizes and a process group of `torch.distributed`. Out: received tensors. Every failure becomes an `ExchangeError` on
the ranks that see it: counts travel with a header that says what each rank expects and whether it has already failed, so all
ranks raise in the same exchange instead of deadlocking.

The size of a message of counts depends only on the number of ranks, because backends abort the process or hang if ranks expect
messages of different sizes. Counts that do not fit follow in a second exchange, after the headers have been compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from math import prod
from typing import Literal
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from serrate.distributed.layout import by_owner, check_counts
from serrate.errors import ExchangeError, PartitionError
from serrate.runtime.memory import empty
from serrate.tensor.sync import host_copy

_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed `all_gather_into_tensor`, and warns where the old name is used."""


_COMMON = frozenset({torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.int8, torch.uint8})
"""Dtypes that gloo and NCCL both move."""


_DTYPES = {crc32(str(each).encode()): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


@dataclass(frozen=True)
class Header:
    """The facts on which ranks must agree before data moves. Each field is one int64 of the message."""

    partitions: int
    owners: int
    """A digest of how many partitions each rank owns."""
    dim: int
    dtype: int
    """A digest of its name."""
    width: int
    """Elements per position."""
    shape: int
    """A digest of the sizes of all dims but the sharded one."""
    aligned: int
    gradients: int
    """1 if gradients are recorded: the exchange of gradients needs every rank, too."""

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.partitions, self.owners, self.dim, self.dtype, self.width, self.shape, self.aligned, self.gradients

    def differs_in(self, other: Sequence[int]) -> str | None:
        """The first field in which another header differs, and its value there."""
        for field, mine, theirs in zip(fields(self), self.numbers, other, strict=True):
            if mine == theirs:
                continue
            if field.name in _DIGESTS:
                return _DIGESTS[field.name]
            if field.name == "gradients":
                return f"gradients are recorded {'here' if mine else 'there'} only; call requires_grad_() on all ranks or none"
            if field.name == "dtype":
                return f"dtype: {_DTYPES.get(mine)} here, {_DTYPES.get(theirs)} there"
            return f"{field.name}: {mine} here, {theirs} there"
        return None


_DIGESTS = {"owners": "how many partitions each rank owns", "shape": "the shape besides the sharded dim"}

HEADER = len(fields(Header)) + 1
"""The length of a header in a message: its fields, then 1 if the sender has already failed."""


def header_of(local: Tensor, dim: int, owned: Sequence[int], aligned: bool) -> Header:
    """The header of an exchange of `local` along `dim`."""
    rest = (*local.shape[:dim], *local.shape[dim + 1 :])
    recorded = local.requires_grad and torch.is_grad_enabled()
    dtype = crc32(str(local.dtype).encode())
    return Header(sum(owned), digest(owned), dim, dtype, prod(rest), digest(rest), int(aligned), int(recorded))


def digest(sizes: Sequence[int]) -> int:
    """A digest of a sequence of sizes, the same in every process."""
    return hash(tuple(sizes)) % (1 << 61)


def swap_room(ranks: int) -> int:
    """Int64s of a message of counts from one rank to another: a header, and counts of 55 partitions or, on few ranks, more."""
    return max(64, 1024 // ranks)


def gather_room(ranks: int) -> int:
    """Int64s of a message of counts that every rank gets: a header, and counts of at least one partition for each rank."""
    return max(512, HEADER + ranks)


def exchange_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends ranges of dim 0 to every rank, and returns what every rank sent here, in the order of ranks."""
    if group.size() == 1:
        return rows
    sent = _sendable(rows)
    got = empty((sum(receive), *sent.shape[1:]), sent.dtype, sent.device)
    if 0 not in sent.shape[1:]:
        try:
            dist.all_to_all_single(got, sent, list(receive), list(send), group=group)
        except RuntimeError as error:
            raise _explained(error, "exchange of rows", group) from error
    return _as_rows(got, rows)


def gather_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Gathers the rows of all ranks along dim 0. Returns them with `room` rows for each rank, and that number: the most that any
    rank has. Rows past the `sizes[r]` of a rank are undefined."""
    room = max(sizes)
    if group.size() == 1:
        return rows, room
    sent = _sendable(rows)
    if sent.shape[0] < room:
        padded = sent.new_empty((room, *sent.shape[1:]))
        padded[: sent.shape[0]] = sent
        sent = padded
    got = empty((room * len(sizes), *sent.shape[1:]), sent.dtype, sent.device)
    if got.numel():
        try:
            _all_gather(got, sent, group=group)
        except RuntimeError as error:
            raise _explained(error, "gathering of rows", group) from error
    return _as_rows(got, rows), room


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a tensor over all ranks."""
    if group.size() == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    try:
        dist.all_reduce(total, group=group)
    except RuntimeError as error:
        raise _explained(error, "sum over ranks", group) from error
    return total


@dataclass(frozen=True, eq=False)
class CheckedRow:
    """One rank's counts, and whether they are wrong. A rank with wrong counts still takes part in the exchange, so that the
    others are notified, and raises afterwards."""

    counts: Tensor
    failed: bool | Tensor
    """For counts on a device, a tensor [1] of int64 on that device, so that checking them needs no host copy."""
    problem: PartitionError | None
    """The error, if the host knows it."""
    size: int

    @classmethod
    def of(cls, row: Tensor, blocks: int, size: int, device: torch.device) -> CheckedRow:
        """Checks that there is one count for each block, that none is negative, and that they sum to `size`."""
        try:
            if row.dim() != 1:
                raise PartitionError(f"expected one count for each of {blocks} blocks, got shape {tuple(row.shape)}")
            if not row.is_cpu and row.shape[0] == blocks:
                counts = row.to(torch.int64)
                return cls(counts, ((counts < 0).any() | (counts.sum() != size)).to(torch.int64)[None], None, size)
            if row.dtype is not torch.int64 or row.shape[0] != blocks or (blocks and int(row.min()) < 0):
                row = check_counts(row[None], 1, blocks)[0]
            if int(row.sum()) != size:
                raise PartitionError(f"counts {row.tolist()} sum to {int(row.sum())}, but the local tensor has {size} positions")
            return cls(row if device.type == "cpu" else row.to(device, non_blocking=True), False, None, size)
        except PartitionError as error:
            return cls(torch.zeros(blocks, dtype=torch.int64, device=device), True, error, size)


def swap_counts(row: CheckedRow, owned: Sequence[int], header: Header, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Sends this rank's counts of every partition to the partition's owner.

    Returns, on the host, this rank's own row, and the counts [source rank, own partition].
    """
    rank, ranks = group.rank(), group.size()
    counts = by_owner(row.counts, owned)
    room, most = swap_room(ranks), counts.shape[1]
    first = min(most, room - HEADER)
    sent = row.counts.new_zeros(ranks, room)
    sent[:, :HEADER] = _head(header, row)
    sent[:, HEADER : HEADER + first] = counts[:, :first]
    own, messages = _on_host(row.counts, _swapped(sent, group))
    _agree(messages[:, :HEADER], header, row, rank)
    received = messages[:, HEADER : HEADER + first]
    if most > first:
        rest = _swapped(counts[:, first:].contiguous(), group)
        received = torch.cat([received, host_copy(rest, "an exchange between ranks")], 1)
    return own, received[:, : owned[rank]]


def gather_counts(row: CheckedRow, room: int, header: Header, group: dist.ProcessGroup) -> Tensor:
    """Gathers a row of counts from every rank, on the host, as [ranks, room]; rows are padded with zeros to `room`."""
    counts = row.counts.new_zeros(room)
    counts[: row.counts.shape[0]] = row.counts
    first = min(room, gather_room(group.size()) - HEADER)
    sent = row.counts.new_zeros(gather_room(group.size()))
    sent[:HEADER] = _head(header, row)
    sent[HEADER : HEADER + first] = counts[:first]
    messages = host_copy(_gathered(sent, group), "counts of all ranks")
    _agree(messages[:, :HEADER], header, row, group.rank())
    found = messages[:, HEADER : HEADER + first]
    if room > first:
        found = torch.cat([found, host_copy(_gathered(counts[first:], group), "counts of all ranks")], 1)
    return found.contiguous()


def _on_host(row: Tensor, messages: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the host: from a device, with one copy."""
    if row.is_cpu:
        return row, host_copy(messages, "an exchange between ranks")
    host = host_copy(torch.cat([row, messages.flatten()]), "an exchange between ranks")
    return host[: row.shape[0]], host[row.shape[0] :].view_as(messages)


@contextmanager
def announced(collective: Literal["swap", "gather"], device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """A context for checks of arguments before counts are exchanged. If a check fails, this rank still takes part in the
    exchange, so that the others raise too instead of waiting; then it raises."""
    try:
        yield
    except PartitionError:
        ranks = group.size()
        shape = (ranks, swap_room(ranks)) if collective == "swap" else (gather_room(ranks),)
        failed = torch.zeros(shape, dtype=torch.int64, device=device)
        failed[..., HEADER - 1] = 1
        with suppress(ExchangeError):
            (_swapped if collective == "swap" else _gathered)(failed, group)
        raise


def check_agreement(what: str, facts: dict[str, int], device: torch.device, group: dist.ProcessGroup) -> None:
    """Raises an ExchangeError on every rank if ranks differ in any of these numbers: one collective of their size."""
    own = torch.tensor([*facts.values()], dtype=torch.int64, device="cpu")
    rank, everyone = group.rank(), host_copy(_gathered(own.to(device), group), what)
    for other in range(group.size()):
        for name, mine, theirs in zip(facts, own.tolist(), everyone[other].tolist(), strict=True):
            if mine != theirs:
                raise ExchangeError(
                    f"rank {rank} and rank {other} do not agree about {what}: {name}: {mine} here, {theirs} there"
                )


def _swapped(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    got = torch.empty_like(sent)
    try:
        dist.all_to_all_single(got, sent, group=group)
    except RuntimeError as error:
        raise _explained(error, "exchange of counts", group) from error
    return got


def _gathered(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    got = sent.new_empty(group.size() * sent.shape[0])
    try:
        _all_gather(got, sent, group=group)
    except RuntimeError as error:
        raise _explained(error, "gathering of counts", group) from error
    return got.view(group.size(), -1)


def _head(header: Header, row: CheckedRow) -> Tensor:
    head = torch.tensor([*header.numbers, row.failed is True], dtype=torch.int64, device="cpu")
    if not row.counts.is_cpu:
        head = head.to(row.counts.device, non_blocking=True)
    return torch.cat([head[:-1], row.failed]) if isinstance(row.failed, Tensor) else head


def _agree(heads: Tensor, header: Header, row: CheckedRow, rank: int) -> None:
    """Raises this rank's own problem, or an ExchangeError that names the first rank that disagrees or has failed."""
    if row.problem is not None:
        raise row.problem
    if bool((heads == torch.tensor([*header.numbers, 0], device="cpu")).all()):
        return
    rows = heads.tolist()
    if rows[rank][-1]:
        raise PartitionError(f"counts must not be negative and must sum to the {row.size} positions of the local tensor")
    for other, (*_, failed) in enumerate(rows):
        if failed:
            raise ExchangeError(f"rank {other} of the group failed before an exchange with rank {rank}: its own error says why")
    for other, (*theirs, _) in enumerate(rows):
        difference = header.differs_in(theirs)
        if difference is not None:
            raise ExchangeError(f"rank {rank} and rank {other} do not agree about an exchange: {difference}")


def _explained(error: RuntimeError, what: str, group: dist.ProcessGroup) -> ExchangeError:
    return ExchangeError(
        f"the {what} failed on rank {group.rank()} of {group.size()}: another rank stopped, is late or passed other sizes; "
        f"look at the first error of every rank. The backend says: {error}"
    )


def _sendable(rows: Tensor) -> Tensor:
    """Rows that every backend can send: as they are, or as bytes, because backends differ in the dtypes that they move."""
    # The memory itself is sent, so lazy views (conjugate, negative) are resolved first.
    rows = rows.detach().resolve_conj().resolve_neg() if rows.is_conj() or rows.is_neg() else rows
    if rows.dtype in _COMMON:
        return rows.contiguous()
    rows = rows.detach().contiguous()
    width = prod(rows.shape[1:])
    return rows.view(rows.shape[0], width, 1).view(torch.uint8).view(rows.shape[0], width * rows.element_size())


def _as_rows(got: Tensor, like: Tensor) -> Tensor:
    return got if got.dtype is like.dtype else got.view(like.dtype).view(got.shape[0], *like.shape[1:])
