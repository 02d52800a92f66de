"""The collectives of this package: rows exchanged or gathered as bytes, and counts with a header that ranks compare.

In: tensors, sizes and a process group of `torch.distributed`. Out: received tensors. Every failure becomes an `ExchangeError`
on the ranks that see it: counts travel with a header that says what each rank expects and whether it has already failed, so all
ranks raise in the same exchange instead of waiting for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from serrate.distributed.layout import by_owner, check_counts
from serrate.errors import ExchangeError, PartitionError
from serrate.runtime.memory import empty
from serrate.tensor.sync import host_copy

_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed `all_gather_into_tensor`, and warns where the old name is used."""


@dataclass(frozen=True)
class Header:
    """What ranks must agree on before data moves. Each field is one int64 of the message; the first is at the same place in any
    version of a message, so that ranks that disagree about everything else still find it."""

    partitions: int
    owners: int
    """A digest of how many partitions each rank owns."""
    dim: int
    element_size: int
    width: int
    """Elements per position."""

    def differs_in(self, other: Sequence[int]) -> str | None:
        """The first field in which another header differs, and its value there."""
        for field, mine, theirs in zip(fields(self), astuple(self), other, strict=True):
            if mine != theirs:
                return f"{field.name.replace('_', ' ')}: {mine} here, {theirs} there"
        return None


HEADER = len(fields(Header)) + 1
"""The length of a header in a message: its fields, then 1 if the sender has already failed."""


def header_of(local: Tensor, dim: int, partitions: int, owned: Sequence[int]) -> Header:
    """The header of an exchange of `local` along `dim`."""
    digest = 0
    for n in owned:
        digest = (digest * 1_000_003 + n + 1) % (1 << 61)
    width = local[:0].numel() if local.dim() == 0 else _product(local.shape[:dim]) * _product(local.shape[dim + 1 :])
    return Header(partitions, digest, dim, local.element_size(), width)


def exchange_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends ranges of dim 0 to every rank, and returns what every rank sent here, in the order of ranks."""
    if dist.get_world_size(group) == 1:
        return rows
    sent = _bytes(rows)
    got = empty((sum(receive), sent.shape[1]), sent.dtype, sent.device)
    if sent.shape[1]:
        with _explained("exchange of rows", group):
            dist.all_to_all_single(got, sent, list(receive), list(send), group=group)
    return _rows(got, rows)


def gather_rows(rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Gathers the rows of all ranks along dim 0. Returns them with `room` rows for each rank, and that number: the most that any
    rank has. Rows past the `sizes[r]` of a rank are undefined."""
    room = max(sizes)
    if dist.get_world_size(group) == 1:
        return rows, room
    sent = _bytes(rows)
    if sent.shape[0] < room:
        padded = sent.new_empty((room, sent.shape[1]))
        padded[: sent.shape[0]] = sent
        sent = padded
    got = empty((room * len(sizes), sent.shape[1]), sent.dtype, sent.device)
    if got.numel():
        with _explained("gathering of rows", group):
            _all_gather(got, sent, group=group)
    return _rows(got, rows), room


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a tensor over all ranks."""
    if dist.get_world_size(group) == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    with _explained("sum over ranks", group):
        dist.all_reduce(total, group=group)
    return total


@dataclass(frozen=True, eq=False)
class CheckedRow:
    """One rank's counts, and whether they are wrong. A rank with wrong counts takes part in the exchange all the same, so that
    the others hear of it, and raises afterwards."""

    counts: Tensor
    failed: Tensor
    """[1], int64, on the device of the counts: there they are checked without a copy to the host."""
    problem: PartitionError | None
    """What is wrong, where the host knows."""
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
            counts = check_counts(row[None], 1, blocks)[0]
            if int(counts.sum()) != size:
                raise PartitionError(
                    f"counts {counts.tolist()} sum to {int(counts.sum())}, but the local tensor has {size} positions"
                )
            return cls(counts.to(device), torch.zeros(1, dtype=torch.int64, device=device), None, size)
        except PartitionError as error:
            nothing = torch.zeros(blocks, dtype=torch.int64, device=device)
            return cls(nothing, torch.ones(1, dtype=torch.int64, device=device), error, size)


def swap_counts(row: CheckedRow, owned: Sequence[int], header: Header, group: dist.ProcessGroup) -> Tensor:
    """Sends this rank's counts of every partition to the partition's owner.

    Returns, on the host, this rank's own row and after it the counts [source rank, own partition], flattened: they are copied
    from a device together.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent = row.counts.new_zeros(ranks, message_room(max(owned)))
    sent[:, :HEADER] = _message_head(header, row)
    sent[:, HEADER : HEADER + max(owned)] = by_owner(row.counts, owned)
    got = torch.empty_like(sent)
    with _explained("exchange of counts", group):
        dist.all_to_all_single(got, sent, group=group)
    host = host_copy(torch.cat([row.counts, got.flatten()]), "an exchange between ranks")
    messages = host[sum(owned) :].view(ranks, -1)
    _agree(messages[:, :HEADER], header, row, rank)
    return torch.cat([host[: sum(owned)], messages[:, HEADER : HEADER + owned[rank]].flatten()])


def gather_counts(row: CheckedRow, room: int, header: Header, group: dist.ProcessGroup) -> Tensor:
    """Gathers a row of counts from every rank, on the host, as [ranks, room]; rows are padded with zeros to `room`."""
    ranks = dist.get_world_size(group)
    sent = row.counts.new_zeros(message_room(room, 64))
    sent[:HEADER] = _message_head(header, row)
    sent[HEADER : HEADER + row.counts.shape[0]] = row.counts
    got = torch.empty(ranks * sent.shape[0], dtype=torch.int64, device=sent.device)
    with _explained("gathering of counts", group):
        _all_gather(got, sent, group=group)
    messages = host_copy(got, "counts of all ranks").view(ranks, -1)
    _agree(messages[:, :HEADER], header, row, dist.get_rank(group))
    return messages[:, HEADER : HEADER + room].contiguous()


def message_room(counts: int, least: int = 8) -> int:
    """The length of a message with so many counts: a power of two. Ranks that disagree about the number of partitions then send
    messages of one size, unless they differ much, and can read each other's headers; a backend ends the process where sizes
    differ."""
    return max(least, 1 << (HEADER + counts - 1).bit_length())


def _message_head(header: Header, row: CheckedRow) -> Tensor:
    return torch.cat([torch.tensor(astuple(header), dtype=torch.int64, device=row.failed.device), row.failed])


def _agree(heads: Tensor, header: Header, row: CheckedRow, rank: int) -> None:
    """Raises this rank's own problem, or an ExchangeError that names the first rank that disagrees or has failed."""
    if row.problem is not None:
        raise row.problem
    if bool((heads == torch.tensor([*astuple(header), 0], device="cpu")).all()):
        return
    for other, (*theirs, failed) in enumerate(heads.tolist()):
        if failed and other == rank:
            raise PartitionError(f"counts must not be negative and must sum to the {row.size} positions of the local tensor")
        if failed:
            raise ExchangeError(f"rank {other} of the group failed before an exchange with rank {rank}: its own error says why")
        difference = header.differs_in(theirs)
        if difference is not None:
            raise ExchangeError(f"rank {rank} and rank {other} do not agree about an exchange: {difference}")


@contextmanager
def _explained(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    try:
        yield
    except PartitionError:
        raise
    except RuntimeError as error:
        raise ExchangeError(
            f"the {what} failed on rank {dist.get_rank(group)} of {dist.get_world_size(group)}: another rank stopped, is late "
            f"or passed other sizes; look at the first error of every rank. The backend says: {error}"
        ) from error


def _bytes(rows: Tensor) -> Tensor:
    """Rows as bytes, [rows, bytes of each]: backends differ in the dtypes that they move."""
    width = _product(rows.shape[1:])
    return (
        rows.detach().contiguous().view(rows.shape[0], width).view(torch.uint8).view(rows.shape[0], width * rows.element_size())
    )


def _rows(got: Tensor, like: Tensor) -> Tensor:
    return got.view(like.dtype).view(got.shape[0], *like.shape[1:])


def _product(sizes: Sequence[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found
