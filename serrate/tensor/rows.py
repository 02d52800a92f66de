"""`Rows`: how one dim of the values is partitioned, on one level or nested, back to back or with gaps, with or without columns.

In: the offsets of every level, and the starts of rows that have gaps. Out: an immutable `Rows` with its lengths, known facts
about them, and memoised derived arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor

from serrate.tensor.sync import host_copy, on_host
from serrate.tensor.torch_private import is_recorded, stream_of, versions

_T = TypeVar("_T")
_Facts = dict[tuple[str, int], float]


class Rows:
    """How one dim of the values is partitioned. A model of its meaning:

        def rows(offsets, positions):                    # positions: the dim of the values
            first, *inner = offsets                      # level 0 counts the parts of level 1, the last level positions
            parts = rows(inner, positions) if inner else positions
            return [parts[a:b] for a, b in zip(first, first[1:])]

    With `starts`, row k of the innermost level is `positions[starts[k]:starts[k] + lengths[k]]`: there may be gaps.
    With `columns`, every innermost row k is a product of two ragged dims: `counts[k]` columns at each of its `lengths[k]`
    positions. They are `packed` (the row takes `lengths[k] * counts[k]` positions) or the first `counts[k]` positions of the
    next dim.

    Facts and derived arrays are memoised until one of the tensors is written to in place.

    The constructor trusts its caller: 1-D contiguous offsets of one dtype on one device. The constructors of `Structure` check.
    """

    __slots__ = (
        "__weakref__",
        "_facts",
        "_host",
        "_made_on",
        "_memo",
        "_rewritten",
        "_same",
        "_tensors",
        "_versions",
        "checked",
        "depth",
        "offsets",
        "packed",
        "room",
        "starts",
    )

    offsets: tuple[Tensor, ...]
    """The boundaries of every level, outermost first; those of the columns come last."""
    depth: int
    """The number of nested levels, columns not counted."""
    starts: Tensor | None
    """The start of each innermost row; None if rows lie back to back."""
    packed: bool
    """Whether columns are stored in the same dim as the rows, not in the next one."""
    room: int | None
    """The size of every row in padded storage; None for other storage."""
    checked: bool
    """False if the caller asked for no checks, or for deferred ones."""

    def __init__(
        self,
        offsets: tuple[Tensor, ...],
        *,
        columns: Tensor | None = None,
        packed: bool = True,
        starts: Tensor | None = None,
        room: int | None = None,
        host: tuple[Tensor, ...] = (),
    ) -> None:
        self.offsets = offsets if columns is None else (*offsets, columns)
        self.depth = len(offsets)
        self.starts = starts
        self.packed = packed
        self.room = room
        self._facts: _Facts = {}
        self._host: dict[int, Tensor] = dict(enumerate(host))
        self._memo: dict[Hashable, object] = {}
        self._made_on: dict[Hashable, tuple[torch.cuda.Stream, set[int]]] = {}
        """For each value derived on a GPU, by key: the stream that computed it, and the streams that have waited for it."""
        self._same: object | None = None
        self._tensors = self.offsets if starts is None else (*self.offsets, starts)
        self._versions = versions(self._tensors)
        self._rewritten = False
        self.checked = True

    @property
    def levels(self) -> int:
        """The number of ragged dims."""
        return len(self.offsets)

    def buffers(self) -> list[Tensor]:
        """The integer tensors that describe the rows, as programs take them."""
        if self.starts is None:
            return list(self.offsets)
        if self.columns is not None:
            return [*self.offsets, self.starts]
        return [*self.offsets[: self.depth - 1], self.starts, self.inner_lengths()]

    @property
    def columns(self) -> Tensor | None:
        """The offsets of the columns, if rows have columns."""
        return self.offsets[-1] if self.levels > self.depth else None

    @property
    def storage_dims(self) -> int:
        """The number of dims of the values that these rows describe: 2 if columns are padded, else 1."""
        return 2 if self.columns is not None and not self.packed else 1

    @property
    def contiguous(self) -> bool:
        """Whether rows are known to lie back to back, without holes."""
        return self.starts is None and self.storage_dims == 1

    @property
    def form(self) -> tuple[object, ...]:
        """What programs may be specialised on: everything but the number of rows and their lengths."""
        starts = self.starts
        if len(self.offsets) == 1:
            return (self.offsets[0].dtype, None if starts is None else starts.dtype)
        columns = None if self.columns is None else "packed" if self.packed else "padded"
        return (self.depth, columns, *[each.dtype for each in self.offsets], None if starts is None else starts.dtype)

    @property
    def device(self) -> torch.device:
        """The device of the offsets."""
        return self.offsets[0].device

    def lengths(self, level: int) -> Tensor:
        """The length of every row of a level, on the device."""
        return self.derived(("lengths", level), self.offsets[level].diff)

    def inner_lengths(self) -> Tensor:
        """The lengths of the innermost rows, columns not counted."""
        return self.lengths(self.depth - 1)

    def counts(self) -> Tensor:
        """The number of columns of each innermost row."""
        return self.lengths(self.depth)

    def sizes(self) -> Tensor:
        """The number of positions of the dim that each innermost row takes."""
        if self.columns is None or not self.packed:
            return self.inner_lengths()
        return self.derived("sizes", lambda: self.inner_lengths().long() * self.counts().long())

    def blocks(self) -> Tensor:
        """The offsets of the innermost rows in packed storage."""
        if self.columns is None or not self.packed:
            return self.offsets[self.depth - 1]
        return self.derived("blocks", lambda: running_sum(self.sizes()))

    def row_starts(self) -> Tensor:
        """The position of the dim at which each innermost row starts."""
        return self.blocks()[:-1] if self.starts is None else self.starts

    def host_offsets(self, level: int, why: str) -> Tensor:
        """The offsets of a level on the CPU, copied once. `why` names the operation in a SyncError."""
        if not self._is_current() or level not in self._host:
            self._host[level] = host_copy(self.offsets[level], why)
        return self._host[level]

    def host_lengths(self, level: int, why: str) -> Tensor:
        """The lengths of a level on the CPU."""
        return self.host_offsets(level, why).diff()

    def host_sizes(self, why: str) -> Tensor:
        """`sizes`, on the CPU."""
        lengths = self.host_lengths(self.depth - 1, why)
        if self.columns is None or not self.packed:
            return lengths
        return lengths.long() * self.host_lengths(self.depth, why).long()

    def host_row_starts(self, why: str) -> Tensor:
        """`row_starts`, on the CPU."""
        if self.starts is not None:
            starts = self.starts
            return self.derived("host starts", lambda: host_copy(starts, why))
        if self.columns is None or not self.packed:
            return self.host_offsets(self.depth - 1, why)[:-1]
        return self.derived("host blocks", lambda: running_sum(self.host_sizes(why)))[:-1]

    def readable(self) -> bool:
        """Whether lengths can be read without a new host copy."""
        return on_host(self.offsets[0]) or (self._is_current() and len(self._host) == self.levels)

    def starts_readable(self) -> bool:
        """Whether lengths and starts can be read without a new host copy."""
        return self.readable() and (self.starts is None or on_host(self.starts) or "host starts" in self._memo)

    def versions(self) -> list[int]:
        """The version counter of each tensor that describes the rows."""
        return versions(self._tensors)

    def _is_current(self) -> bool:
        """Whether memoised facts still hold. If a tensor was written to, drops them all."""
        found = versions(self._tensors)
        if found == self._versions:
            return True
        self._versions, self._rewritten, self._same = found, True, None
        self._facts, self._memo, self._made_on, self._host = {}, {}, {}, {}
        return False

    def unmodified(self) -> bool:
        """Whether these tensors were not written to since the rows were constructed and checked."""
        return self._is_current() and not self._rewritten

    def verified(self) -> bool:
        """Whether offsets on the host are known to be valid: checked at construction, and not written to since.

        Programs rely on that, and check rows that are not verified before they run.
        """
        if not self._is_current() or self._rewritten:
            return False
        if not on_host(self.offsets[0]):
            return True
        if self.depth == 1:
            return self.checked and ("min", 0) in self._facts
        return self.checked and all(("min", level) in self._facts for level in range(self.depth))

    def num_rows(self, level: int) -> int:
        """The number of rows of a level; never needs a host copy."""
        return self.offsets[level].shape[0] - 1

    def total(self, level: int, why: str) -> int:
        """The total length of a level's rows: in positions, in parts on an outer level, or in columns."""
        if level < self.depth - 1:
            return self.num_rows(level + 1)
        return int(self.fact("total", level, lambda: int(self.host_offsets(level, why)[-1])))

    def elements(self, why: str) -> int:
        """The number of elements: positions, or columns of all positions."""
        if self.columns is None:
            return self.total(self.depth - 1, why)

        def count() -> int:
            lengths, counts = (self.host_lengths(level, why).long() for level in (self.depth - 1, self.depth))
            return int((lengths * counts).sum())

        return int(self.fact(*self.elements_fact, count))

    def extent(self, why: str) -> int:
        """The number of positions of the dim that all innermost rows take."""
        return self.elements(why) if self.packed else self.total(self.depth - 1, why)

    def end(self, why: str) -> int:
        """The first position past all rows."""
        if self.num_rows(self.depth - 1) == 0:
            return 0
        return int((self.host_row_starts(why) + self.host_sizes(why)).max())

    @property
    def elements_fact(self) -> tuple[str, int]:
        """The key under which `elements` is memoised."""
        return ("total", self.depth - 1) if self.columns is None else ("elements", 0)

    @property
    def extent_fact(self) -> tuple[str, int]:
        """The key under which `extent` is memoised."""
        return self.elements_fact if self.packed else ("total", self.depth - 1)

    def max_length(self, level: int, why: str) -> int:
        """The longest length of a level; 0 without rows."""
        found = self.known("max", level)
        if found is None:
            found = self._facts["max", level] = _extreme(self.host_lengths(level, why), torch.max)
        return int(found)

    def min_length(self, level: int, why: str) -> int:
        """The shortest length of a level; 0 without rows."""
        return int(self.fact("min", level, lambda: _extreme(self.host_lengths(level, why), torch.min)))

    def variance(self, level: int, why: str) -> float:
        """The population variance of a level's lengths; 0 without rows."""
        count = self.num_rows(level)
        if count == 0:
            return 0.0

        def measure() -> float:
            lengths = self.host_lengths(level, why).long()
            # Exact, in Python's integers, and a third of the time that torch takes for it.
            squares, total = int(lengths.dot(lengths)), self.total(level, why)
            return (count * squares - total * total) / (count * count)

        return self.fact("variance", level, measure)

    def fact(self, name: str, level: int, measure: Callable[[], float]) -> float:
        """A fact by name: known, or else measured and memoised."""
        found = self.known(name, level)
        if found is None:
            found = self._facts[name, level] = measure()
        return found

    def known(self, name: str, level: int) -> float | None:
        """A fact by name, or None if it is not known."""
        return self._facts.get((name, level)) if self._is_current() else None

    def noted(self, name: str, level: int) -> float | None:
        """As `known`, in a call that has found these rows `verified`."""
        return self._facts.get((name, level))

    def note(self, name: str, level: int, fact: float) -> None:
        """Memoises a fact that the caller vouches for: `total`, `max` or `min` of a level, or `elements`."""
        self._facts[name, level] = fact

    def facts(self) -> _Facts:
        """All known facts."""
        return dict(self._facts) if self._is_current() else {}

    def derived(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Memoises what `make` computes from these rows, by key; not while a CUDA graph is recorded."""
        self._is_current()
        offsets, memo = self.offsets[0], self._memo
        if not offsets.is_cuda:
            if key not in memo:
                memo[key] = make()
            return cast(_T, memo[key])
        if is_recorded(offsets):
            return make()
        stream = stream_of(offsets.device)
        if key not in memo:
            memo[key], self._made_on[key] = make(), (torch.cuda.current_stream(offsets.device), {stream})
        elif (made_on := self._made_on.get(key)) is not None and stream not in made_on[1]:
            current = torch.cuda.current_stream(offsets.device)
            current.wait_stream(made_on[0])
            for tensor in _tensors_in(memo[key]):
                # This stream may still read it after the rows are freed.
                tensor.record_stream(current)
            made_on[1].add(stream)
        return cast(_T, memo[key])

    def to(self, device: torch.device | str) -> Rows:
        """The same rows on another device, with their known facts; themselves if they are already there."""
        offsets = tuple(level.to(device) for level in self.offsets)
        if offsets[0] is self.offsets[0]:
            return self
        starts = None if self.starts is None else self.starts.to(device)
        moved = rows_of(offsets, self.depth, self.packed, starts, self.room, self.facts())
        if on_host(self.offsets[0]):
            moved._host.update(enumerate(self.offsets))
            if self.starts is not None:
                moved._memo["host starts"] = self.starts
        else:
            moved._host.update(self._host)
        return moved

    def back_to_back(self) -> Rows:
        """The same rows without gaps, columns packed; themselves if they already are."""
        if self.contiguous:
            return self

        def make() -> Rows:
            packed = Rows(self.offsets[: self.depth], columns=self.columns)
            packed._host.update(self._host)
            packed._facts.update((fact, known) for fact, known in self._facts.items() if "within" not in fact[0])
            return packed

        return self.derived("back to back", make)

    def host_rows(self, why: str) -> Rows:
        """The same rows on the CPU, copied once."""

        def make() -> Rows:
            host = tuple(self.host_offsets(level, why) for level in range(self.levels))
            starts = None if self.starts is None else self.host_row_starts(why)
            home = rows_of(host, self.depth, self.packed, starts, self.room, self._facts)
            home._host.update(enumerate(host))
            if starts is not None:
                home._memo["host starts"] = starts
            return home

        return self.derived("at home", make)

    def below(self, level: int) -> Rows:
        """The rows of a level with everything nested in them, as `Rows` whose outermost level it is."""

        def make() -> Rows:
            inner = rows_of(self.offsets[level:], self.depth - level, self.packed, self.starts, self.room, {})
            inner._host.update((own - level, host) for own, host in self._host.items() if own >= level)
            if "host starts" in self._memo:
                inner._memo["host starts"] = self._memo["host starts"]
            for (name, own), fact in self._facts.items():
                if name == "elements" or own >= level:
                    inner.note(name, 0 if name == "elements" else own - level, fact)
            return inner

        return self.derived(("below", level), make) if level else self

    def uniform(self, level: int) -> int | None:
        """The common length of all rows of a level, if it is known without a host copy that all have the same."""
        least, most = self.known("min", level), self.known("max", level)
        return int(most) if most is not None and least == most else None

    def narrow(self, start: int, stop: int, *, level: int = 0, why: str) -> tuple[Rows, int, int]:
        """Rows `start` to `stop` of a level, as `Rows` whose outermost level it is, and the range of positions they take."""
        cut: list[Tensor] = []
        host: list[Tensor] = []

        def take(depth: int) -> Tensor:
            known, here = self.host_offsets(depth, why)[start : stop + 1], self.offsets[depth]
            host.append(known - known[0])
            cut.append(host[-1] if here.is_cpu else here[start : stop + 1] - here[start])
            return known

        for depth in range(level, self.depth - 1):
            known = take(depth)
            start, stop = int(known[0]), int(known[-1])
        known = take(self.depth - 1)
        if self.columns is not None:
            take(self.depth)
        first, last, starts = 0, 0, None
        if stop > start and self.starts is None and self.columns is None:
            first, last = int(known[0]), int(known[-1])
        elif stop > start:
            where, sizes = self.host_row_starts(why), self.host_sizes(why)
            first, last = int(where[start]), int(where[stop - 1] + sizes[stop - 1])
        if self.starts is not None:
            starts = self.starts[start:stop] - first
        rows = rows_of(tuple(cut), self.depth - level, self.packed, starts, self.room, {})
        rows._host.update(enumerate(host))
        if starts is not None:
            rows._memo["host starts"] = self.host_row_starts(why)[start:stop] - first
            rows.note("within", 0, last - first)
        rows.note("total", rows.depth - 1, int(known[-1] - known[0]))
        return rows, first, last

    def same_rows(self, other: Rows, why: str) -> bool:
        """Whether both have the same rows and columns, wherever they are stored."""
        if self.known_same_rows(other):
            return True
        if not self.same_form(other):
            return False
        for level, (mine, theirs) in enumerate(zip(self.offsets, other.offsets, strict=True)):
            if mine is not theirs and not _same_numbers(self.host_offsets(level, why), other.host_offsets(level, why)):
                return False
        # Rows found equal share a token, so that they are not compared again.
        self._same = other._same = self._same or other._same or object()
        return True

    def known_same_rows(self, other: Rows) -> bool:
        """Whether an earlier comparison found both to have the same rows."""
        if self is other:
            return True
        return self._is_current() and other._is_current() and self._same is not None and self._same is other._same

    def same_form(self, other: Rows) -> bool:
        """Whether both have the same depth, shapes and device, as equal rows must."""
        if self.depth != other.depth or len(self.offsets) != len(other.offsets) or self.device != other.device:
            return False
        return all(mine.shape == theirs.shape for mine, theirs in zip(self.offsets, other.offsets, strict=True))

    def same_tensors(self, other: Rows) -> bool:
        """Whether the same tensor objects describe both."""
        if self is other:
            return True
        mine, theirs = (*self.offsets, self.starts), (*other.offsets, other.starts)
        same = len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))
        return same and (self.depth, self.packed) == (other.depth, other.packed)

    def same_storage(self, other: Rows, why: str) -> bool:
        """Whether equal rows are also stored at the same positions."""
        if self.columns is not None and self.packed != other.packed:
            return False
        if self.starts is other.starts:
            return True
        return _same_numbers(self.host_row_starts(why), other.host_row_starts(why))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return NotImplemented
        why = "comparing two structures"
        return self is other or (self.same_rows(other, why) and self.same_storage(other, why))

    def __hash__(self) -> int:
        return hash(tuple(level.shape[0] for level in self.offsets))

    def __repr__(self) -> str:
        total = self.known("total", self.depth - 1)
        counts = [str(self.num_rows(level)) for level in range(self.depth)]
        text = " > ".join([*counts, "?" if total is None else str(int(total))])
        if self.columns is not None:
            text += " x columns" if self.packed else " x columns of the next dim"
        return text if self.starts is None else f"{text}, with gaps"


def rows_of(
    offsets: tuple[Tensor, ...], depth: int, packed: bool, starts: Tensor | None, room: int | None, facts: _Facts
) -> Rows:
    """Rows from their tensors and known facts."""
    columns = offsets[-1] if len(offsets) > depth else None
    rows = Rows(offsets[:depth], columns=columns, packed=packed, starts=starts, room=room)
    rows._facts.update(facts)
    return rows


def owners_and_places(lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each of `total` positions of rows with these lengths: its row, and its index in that row.

    >>> owners_and_places(torch.tensor([2, 0, 1]), 3)
    (tensor([0, 0, 2]), tensor([0, 1, 0]))
    """
    ends = running_sum(lengths)
    if lengths.numel():
        # torch would write past its result if the lengths do not sum to `total`; they may have changed since it was computed.
        ends = ends.clamp_(0, total).cummax(0).values
        ends[-1:].fill_(total)
    # With output_size, torch sizes the result without reading the lengths on the host.
    owner = torch.repeat_interleave(ends.diff(), output_size=total if lengths.numel() else 0)
    return owner, torch.arange(len(owner), device=lengths.device) - ends[:-1].index_select(0, owner)


def running_sum(lengths: Tensor) -> Tensor:
    """The offsets of rows with these lengths, as int64 so that they cannot overflow.

    >>> running_sum(torch.tensor([2, 0, 1], dtype=torch.int32))
    tensor([0, 2, 2, 3])
    """
    sums = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=sums[1:])
    return sums


def _extreme(lengths: Tensor, pick: Callable[[Tensor], Tensor]) -> int:
    return int(pick(lengths)) if lengths.numel() else 0


def _same_numbers(mine: Tensor, theirs: Tensor) -> bool:
    if mine.dtype != theirs.dtype:
        return torch.equal(mine.long(), theirs.long())
    return torch.equal(mine, theirs)


def _tensors_in(made: object) -> Iterator[torch.Tensor]:
    """The tensors on a GPU in a value that was derived from rows."""
    if isinstance(made, torch.Tensor):
        if made.is_cuda:
            yield made
    elif isinstance(made, Rows):
        yield from _tensors_in((*made.offsets, made.starts))
    elif isinstance(made, tuple | list):
        for each in made:
            yield from _tensors_in(each)
