"""Ragged features by name: `serrate.keyed` and `KeyedJaggedTensor`.

In: ragged tensors by name, or the tensors of a TorchRec `KeyedJaggedTensor`. Out: one tensor that stores them key by key.

A model of the layout, for keys `names` and `rows_per_key` rows each:

    values   = [v for name in names for row in features[name] for v in row]
    lengths  = [len(row) for name in names for row in features[name]]        # [keys * batch], key by key

So a `KeyedJaggedTensor` is one JaggedTensor of `sum(rows_per_key)` rows, with names for ranges of rows:

    serrate.keyed({"user": jt, "item": jt})    KeyedJaggedTensor.from_lengths(keys, values, lengths)      from_offsets
    serrate.keyed(kjt), k.to_torchrec(), k.layout()                                                       TorchRec, shared
    k["user"], k.weights_of("user")                                                                       one key, a view
    k[["item", "user"]], k.split([1, 2]), torch.cat([k, other])                                           some keys
    k.keys(), k.items(), len(k), "user" in k, dict(k)                                                     as a dict
    k.values, k.lengths, k.offsets, k.weights, k.jagged, k.rows_per_key, k.batch_size                     its storage
    k.to(device), k.pin_memory(), k.share_memory_(), torch.equal(k, other)
    k.embedding_bag(tables)                                                                               all keys in one program
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from serrate.errors import CallError, DtypeError, StructureError, StructureMismatch, UnknownKey, choices
from serrate.tensor.display.printing import columns_of, first_numbers
from serrate.tensor.hints import NO_HINTS
from serrate.tensor.interop.common import package, rows_of_one_level
from serrate.tensor.jagged import JaggedTensor
from serrate.tensor.moving import runs
from serrate.tensor.positions import compact
from serrate.tensor.rows import running_sum
from serrate.tensor.structure import Structure
from serrate.tensor.sync import may_copy

_SHOWN = 12


class Layout(NamedTuple):
    """The tensors of a TorchRec `KeyedJaggedTensor`, by the names of its constructor."""

    keys: list[str]
    values: Tensor
    weights: Tensor | None
    lengths: Tensor
    offsets: Tensor
    stride_per_key: list[int]
    """The number of rows of each key."""


class KeyedRows:
    """The base of keyed tensors and their traced form: keys, and the range of rows of each."""

    __slots__ = ("_keys", "_numbers", "_rows_per_key")

    _keys: tuple[str, ...]
    _rows_per_key: tuple[int, ...]

    def __init__(self, keys: Iterable[str], rows_per_key: Iterable[int]) -> None:
        self._keys, self._rows_per_key = tuple(keys), tuple(rows_per_key)
        self._numbers = {key: k for k, key in enumerate(self._keys)}
        if len(self._numbers) != len(self._keys):
            twice = next(key for k, key in enumerate(self._keys) if self._numbers[key] != k)
            raise CallError(f"a key must not repeat: {twice!r} occurs twice in {list(self._keys)}")

    def keys(self) -> tuple[str, ...]:
        """The names, in the order of their values."""
        return self._keys

    @property
    def rows_per_key(self) -> tuple[int, ...]:
        """The number of rows of each key."""
        return self._rows_per_key

    @property
    def batch_size(self) -> int:
        """The common number of rows of all keys."""
        sizes = set(self._rows_per_key)
        if len(sizes) > 1:
            raise StructureMismatch(f"the keys have different numbers of rows, {self._sizes()}: use k.rows_per_key")
        return sizes.pop() if sizes else 0

    def number(self, key: object) -> int:
        """The index of a key."""
        found = self._numbers.get(key) if isinstance(key, str) else None
        if found is None:
            if not isinstance(key, str):
                raise CallError(
                    f"k[key] takes a key or a list of keys, got {type(key).__name__}; the keys are {list(self._keys)}"
                )
            raise UnknownKey(f"there is no key {key!r}: {choices(key, self._keys)}")
        return found

    def ranges(self) -> list[tuple[int, int]]:
        """The rows of each key: first, and one past the last."""
        return list(itertools.pairwise(itertools.accumulate(self._rows_per_key, initial=0)))

    def _sizes(self) -> str:
        return ", ".join(f"{key!r} {rows}" for key, rows in zip(self._keys, self._rows_per_key, strict=True))

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._numbers


class KeyedJaggedTensor(KeyedRows):
    """Several ragged features in one tensor of values, key by key; reads like a dict of JaggedTensors, which are views.

    >>> k = keyed({"user": [[1, 2], [3]], "item": [[7], []]})
    >>> k["item"].tolist(), k.values
    ([[7], []], tensor([1, 2, 3, 7]))
    >>> k
    KeyedJaggedTensor(2 keys, batch 2, dtype=torch.int64, device=cpu)
      key   rows  values  values[:4]
      user     2       3  1, 2, 3
      item     2       1  7
    """

    __slots__ = ("__weakref__", "_flat", "_parts", "_versions", "_weighing", "_weights")

    _flat: JaggedTensor
    """The rows of all keys, key by key."""
    _weights: Tensor | None
    _parts: dict[int, JaggedTensor]
    """JaggedTensors of keys, cached: programs need not compare the rows of identical objects."""
    _weighing: dict[int, JaggedTensor]
    _versions: list[int]
    """The version of the offsets for which the cache above is valid."""

    def __init__(
        self,
        keys: Iterable[str],
        rows: JaggedTensor,
        *,
        weights: Tensor | None = None,
        rows_per_key: Sequence[int] | None = None,
    ) -> None:
        """From the rows of all keys, key by key; `rows_per_key` if keys have different numbers of rows."""
        names = _names(keys)
        super().__init__(names, _rows_per_key(len(rows), len(names), rows_per_key))
        rows_of_one_level("KeyedJaggedTensor", rows.structure)
        if rows.format != "csr":
            rows = rows.contiguous()
        if weights is not None and weights.shape[:1] != rows.values.shape[:1]:
            raise StructureError(f"there must be a weight for each of {rows.values.shape[0]} values, got {tuple(weights.shape)}")
        self._hold(rows, weights)

    @classmethod
    def _trusted(
        cls, keys: tuple[str, ...], rows_per_key: tuple[int, ...], rows: JaggedTensor, weights: Tensor | None
    ) -> KeyedJaggedTensor:
        """Constructs without checks, from parts known to fit; torch's pytrees also pass placeholders."""
        made = cls.__new__(cls)
        KeyedRows.__init__(made, keys, rows_per_key)
        made._hold(rows, weights)
        return made

    def _hold(self, rows: JaggedTensor, weights: Tensor | None) -> None:
        self._flat, self._weights, self._parts, self._weighing, self._versions = rows, weights, {}, {}, []

    # --- constructors ---

    @classmethod
    def from_lengths(
        cls,
        keys: Iterable[str],
        values: Tensor,
        lengths: Tensor,
        *,
        weights: Tensor | None = None,
        rows_per_key: Sequence[int] | None = None,
    ) -> Self:
        """From TorchRec's layout: values and lengths `[keys * batch]`, both key by key. The values and weights are shared.

        >>> KeyedJaggedTensor.from_lengths(["a", "b"], torch.arange(4), torch.tensor([1, 0, 1, 2]))["b"].tolist()
        [[1], [2, 3]]
        """
        return cls(keys, JaggedTensor.from_lengths(values, lengths), weights=weights, rows_per_key=rows_per_key)

    @classmethod
    def from_offsets(
        cls,
        keys: Iterable[str],
        values: Tensor,
        offsets: Tensor,
        *,
        weights: Tensor | None = None,
        rows_per_key: Sequence[int] | None = None,
    ) -> Self:
        """From TorchRec's layout: values and offsets `[keys * batch + 1]`, both key by key. All tensors are shared.

        >>> KeyedJaggedTensor.from_offsets(["a", "b"], torch.arange(4), torch.tensor([0, 1, 1, 2, 4]))["b"].tolist()
        [[1], [2, 3]]
        """
        return cls(keys, JaggedTensor.from_csr(values, offsets), weights=weights, rows_per_key=rows_per_key)

    # --- storage ---

    @property
    def values(self) -> Tensor:
        """The values of all keys, back to back."""
        return self._flat.values

    @property
    def weights(self) -> Tensor | None:
        """One weight for each value, or None."""
        return self._weights

    @property
    def lengths(self) -> Tensor:
        """The length of every row, key by key."""
        return self._flat.lengths

    @property
    def offsets(self) -> Tensor:
        """The offsets of every row, key by key."""
        return self._flat.offsets

    @property
    def flat(self) -> JaggedTensor:
        """The rows of all keys as one JaggedTensor, key by key: shape `(keys * batch, r0)`."""
        return self._flat

    @property
    def jagged(self) -> JaggedTensor:
        """All keys as a JaggedTensor of two levels: shape `(keys, r0, r1)`.

        >>> keyed({"a": [[1, 2], [3]], "b": [[7], []]}).jagged.tolist()
        [[[1, 2], [3]], [[7], []]]
        """
        inner = self._flat.offsets
        outer = running_sum(torch.tensor(self._rows_per_key, dtype=torch.int64, device="cpu")).to(inner)
        return JaggedTensor.from_csr(self._flat.values, (outer, inner))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._flat.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._flat.device

    # --- keys ---

    def __getitem__(self, key: str | Sequence[str]) -> Any:
        """The JaggedTensor of one key, a view; or a KeyedJaggedTensor of some keys, in the order given.

        Adjacent keys in order are a view; other orders copy whole keys. The host must know where each key's values start, so
        on a device this takes a host copy.

        >>> k = keyed({"a": [[1, 2], [3]], "b": [[7], []], "c": [[], [5]]})
        >>> k[["c", "a"]].values
        tensor([5, 1, 2, 3])
        """
        if isinstance(key, (list, tuple)):
            return self._some([self.number(each) for each in key])
        number = self.number(key)
        versions = self._flat.structure.rows[0].versions()
        if versions != self._versions:
            self._parts, self._weighing, self._versions = {}, {}, versions
        part = self._parts.get(number)
        if part is None:
            first, last = self.ranges()[number]
            part = self._parts[number] = self._flat[first:last]
        return part

    def weights_of(self, key: str) -> JaggedTensor:
        """The weights of one key, with the structure of its values.

        >>> k = keyed({"a": [[1, 2], [3]]}, weights={"a": [[0.5, 1.0], [2.0]]})
        >>> k.weights_of("a").tolist()
        [[0.5, 1.0], [2.0]]
        """
        if self._weights is None:
            raise no_weights()
        number, rows = self.number(key), self[key]
        part = self._weighing.get(number)
        if part is None:
            first, last = self.ranges()[number]
            start, stop = self._flat.structure.host_offsets(why="k.weights_of(key)")[[first, last]].tolist()
            part = self._weighing[number] = rows.with_values(self._weights[start:stop])
        return part

    def items(self) -> Iterator[tuple[str, JaggedTensor]]:
        """Pairs of a key and its JaggedTensor."""
        return ((key, self[key]) for key in self._keys)

    def split(self, sizes: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Splits into consecutive groups of keys, `sizes` keys each; views.

        >>> [k.keys() for k in keyed({"a": [[1]], "b": [[2]], "c": [[3]]}).split([1, 2])]
        [('a',), ('b', 'c')]
        """
        if any(size < 0 for size in sizes) or sum(sizes) != len(self):
            raise CallError(f"split: the sizes {list(sizes)} must sum to the {len(self)} keys {list(self._keys)}")
        ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        return [self._some(list(range(first, last))) for first, last in ends]

    def _some(self, numbers: list[int]) -> KeyedJaggedTensor:
        keys = [self._keys[k] for k in numbers]
        sizes = [self._rows_per_key[k] for k in numbers]
        if numbers == list(range(len(self))):
            return self
        ranges = self.ranges()
        if numbers and numbers == list(range(numbers[0], numbers[-1] + 1)):
            first, last = ranges[numbers[0]][0], ranges[numbers[-1]][1]
            rows, weights = self._flat[first:last], self._weights
            if weights is not None:
                start, stop = self._flat.structure.host_offsets(why="k[keys]")[[first, last]].tolist()
                weights = weights[start:stop]
        else:
            rows, weights = _blocks(self._flat, self._weights, [ranges[k] for k in numbers])
        return KeyedJaggedTensor(keys, rows, weights=weights, rows_per_key=sizes)

    # --- other libraries ---

    def layout(self) -> Layout:
        """The tensors of TorchRec's layout, all shared.

        >>> keyed({"a": [[1, 2], [3]], "b": [[7], []]}).layout().lengths
        tensor([2, 1, 1, 0])
        """
        return Layout(list(self._keys), self.values, self._weights, self.lengths, self.offsets, list(self._rows_per_key))

    def to_torchrec(self) -> Any:
        """A TorchRec `KeyedJaggedTensor` that shares all tensors."""
        kind = package("to_torchrec", "torchrec").KeyedJaggedTensor
        strides: dict[str, Any] = {"stride_per_key_per_rank": [[rows] for rows in self._rows_per_key]}
        if len(set(self._rows_per_key)) <= 1:
            strides = {"stride": self.batch_size}
        given = self.layout()._asdict()
        del given["stride_per_key"]
        return kind(**given, **strides)

    # --- memory ---

    def _moved(self, change: Callable[[Any], Any]) -> KeyedJaggedTensor:
        weights = None if self._weights is None else change(self._weights)
        return KeyedJaggedTensor(self._keys, change(self._flat), weights=weights, rows_per_key=self._rows_per_key)

    def to(self, *args: Any, **kwargs: Any) -> KeyedJaggedTensor:
        """Converts device or dtype; takes the arguments of `torch.Tensor.to`. Weights keep their dtype.

        >>> keyed({"a": [[1, 2]]}).to(torch.int32).dtype
        torch.int32
        """
        rows = self._flat.to(*args, **kwargs)
        if rows is self._flat:
            return self
        weights = None if self._weights is None else self._weights.to(rows.device)
        return KeyedJaggedTensor(self._keys, rows, weights=weights, rows_per_key=self._rows_per_key)

    def pin_memory(self) -> KeyedJaggedTensor:
        """A copy in page-locked memory, for asynchronous copies to a device; a DataLoader with `pin_memory=True` calls it."""
        return self._moved(lambda part: part.pin_memory())

    def share_memory_(self) -> Self:
        """Moves all tensors to shared memory; returns the keyed tensor itself."""
        self._flat.share_memory_()
        if self._weights is not None:
            self._flat.with_values(self._weights).share_memory_()
        return self

    # --- Python and torch ---

    def embedding_bag(
        self,
        tables: Mapping[str, Any],
        *,
        mode: str | Mapping[str, str] = "sum",
        padding_idx: int | None = None,
        concat: bool = False,
    ) -> Any:
        """Looks up and pools all keys in one program: a `[batch, D]` tensor for each key, by name.

        `tables` has one table per key, of any size and width; keys may share one. `mode` applies to all keys, or is a dict by
        key. Weights, if any, multiply the rows that are looked up; the modes must then be "sum". Indices equal to `padding_idx`
        are ignored. With `concat`, the result is one tensor `[batch, sum of D]`, in the order of the keys.

        >>> import serrate
        >>> k = serrate.keyed({"user": [[0, 1], [1]], "item": [[2], []]})
        >>> tables = {"user": torch.eye(2), "item": torch.ones(3, 4)}
        >>> k.embedding_bag(tables)["user"]
        tensor([[1., 1.],
                [0., 1.]])
        >>> k.embedding_bag(tables, concat=True).shape
        torch.Size([2, 6])
        """
        return _installed["embedding_bag"](self, tables, mode=mode, padding_idx=padding_idx, concat=concat)

    def __repr__(self) -> str:
        sizes = set(self._rows_per_key)
        facts = [f"{len(self)} key{'s' if len(self) != 1 else ''}"]
        if len(sizes) == 1:
            facts.append(f"batch {self.batch_size}")
        facts += [f"dtype={self.dtype}", f"device={self.device}"]
        if self._weights is not None:
            facts.append(f"weights={self._weights.dtype}")
        return f"KeyedJaggedTensor({', '.join(facts)}){self._table()}"

    def _table(self) -> str:
        """A line for each of the first keys: rows, values and the first of these, if they can be read."""
        readable = self._flat.structure.rows[0].readable() or may_copy(self.offsets)
        readable = readable and may_copy(self.values)
        lines: list[tuple[str, ...]] = [("key", "rows", *(("values", "values[:4]") if readable else ()))]
        for key, rows in itertools.islice(zip(self._keys, self._rows_per_key, strict=True), _SHOWN):
            own = self[key].values if readable else None
            lines.append((key, str(rows), *(() if own is None else (str(own.shape[0]), first_numbers(own[:4])))))
        more = len(self) - _SHOWN
        return columns_of(lines, right=(1, 2)) + (
            f"\n  ... {more} more: {', '.join(self._keys[_SHOWN:][:8])}" if more > 0 else ""
        )

    def __bool__(self) -> NoReturn:
        raise CallError("a KeyedJaggedTensor has no truth value: use len(k), or torch.equal(k, other)")

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.equal and len(args) == 2:
            return _equal(*args)
        if function is torch.cat:
            return concat(*args)
        name = torch.overrides.resolve_name(function) or getattr(function, "__name__", repr(function))
        raise CallError(f"{name} does not take a KeyedJaggedTensor: use it on k[key], or on k.jagged, which has all keys")


_installed: dict[str, Callable[..., Any]] = {}


def install_methods(**functions: Callable[..., Any]) -> None:
    """Installs the implementations of methods that compute; called once by `api/eager.py`."""
    _installed.update(functions)


def keyed(
    features: Any, *, weights: Mapping[str, Any] | None = None, same_batch: bool = True, device: torch.device | str | None = None
) -> KeyedJaggedTensor:
    """Ragged features by name: from a dict of ragged tensors or lists of rows, or from a TorchRec `KeyedJaggedTensor`.

    The values of a dict are concatenated, without a copy if they already lie back to back. The tensors of any object with the
    methods `keys`, `values`, `lengths` and `weights_or_none` of TorchRec's class are shared. With `same_batch=False`, keys may
    have different batch sizes.

    >>> k = keyed({"user": [[1, 2], [3]], "item": [[7], []]}, weights={"user": [[0.5, 0.5], [1]], "item": [[1.0], []]})
    >>> k.lengths, k.weights
    (tensor([2, 1, 1, 0]), tensor([0.5000, 0.5000, 1.0000, 1.0000]))
    """
    if isinstance(features, KeyedJaggedTensor):
        return features
    if not isinstance(features, Mapping):
        if not callable(getattr(features, "weights_or_none", None)):
            raise CallError(
                f"keyed takes a dict of ragged tensors or a TorchRec KeyedJaggedTensor, got {type(features).__name__}: use "
                "KeyedJaggedTensor.from_lengths(keys, values, lengths) for separate tensors"
            )
        return _from_torchrec(features)
    if not features:
        raise CallError("keyed: pass at least one key")
    parts = _ragged(features, device)
    first, *rest = parts
    for key in rest:
        one, other = parts[first], parts[key]
        if same_batch and len(one) != len(other):
            raise StructureMismatch(
                f"keyed: {key!r} has {len(other)} rows, but {first!r} has {len(one)}; give every key a row, possibly empty, for "
                "each sample, or pass same_batch=False"
            )
        if one.values.shape[1:] != other.values.shape[1:] or one.dtype != other.dtype or one.device != other.device:
            raise DtypeError(
                f"keyed: all keys need the same inner dims, dtype and device: {key!r} has {tuple(other.values.shape[1:])}, "
                f"{other.dtype} on {other.device}, {first!r} {tuple(one.values.shape[1:])}, {one.dtype} on {one.device}"
            )
    joined_weights = None
    if weights is not None:
        if weights.keys() != parts.keys():
            raise CallError(f"keyed: weights need the keys of the features, {list(parts)}, got {list(weights)}")
        own = _ragged({key: weights[key] for key in parts}, device)
        for key, each in own.items():
            if not each.structure.same_rows(parts[key].structure, why="keyed"):
                raise StructureMismatch(
                    f"keyed: the weights of {key!r} must have its rows: {each.structure}, {parts[key].structure}"
                )
        joined_weights = _joined([compact(each.values, each.structure, "keyed")[0] for each in own.values()])
    wholes = [compact(each.values, each.structure, "keyed") for each in parts.values()]
    values = _joined([values for values, _ in wholes])
    lengths = torch.cat([structure.lengths() for _, structure in wholes])
    rows = JaggedTensor(values, Structure.from_lengths(lengths, total=values.shape[0]))
    return KeyedJaggedTensor(parts, rows, weights=joined_weights, rows_per_key=[len(each) for each in parts.values()])


def no_weights() -> CallError:
    """The error for requesting weights of a keyed tensor without weights."""
    return CallError("the keyed tensor has no weights: pass them to serrate.keyed(features, weights=...)")


def concat(tensors: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """The keys of all tensors, in order; no key may occur twice.

    >>> concat([keyed({"a": [[1]]}), keyed({"b": [[2, 3]]})])["b"].tolist()
    [[2, 3]]
    """
    given = list(tensors)
    if not given or not all(isinstance(each, KeyedJaggedTensor) for each in given):
        raise CallError(f"concat takes a list of KeyedJaggedTensors, got {[type(each).__name__ for each in given]}")
    keys = [key for each in given for key in each.keys()]  # noqa: SIM118 -- not a mapping
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise CallError(f"concat: {', '.join(map(repr, twice))} would occur twice: rename the keys, or select some with k[[...]]")
    weighted = [each.weights for each in given]
    if any(each is None for each in weighted) and any(each is not None for each in weighted):
        raise CallError("concat: either all keyed tensors must have weights, or none")
    weights = None if weighted[0] is None else torch.cat([each for each in weighted if each is not None])
    rows = _rows_after_one_another([each.flat for each in given])
    return KeyedJaggedTensor(keys, rows, weights=weights, rows_per_key=[n for each in given for n in each.rows_per_key])


def batched(samples: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Concatenates the rows of all samples, key by key, for `serrate.collate`.

    >>> one, two = keyed({"a": [[1]], "b": [[2, 3]]}), keyed({"a": [[], [4]], "b": [[5], []]})
    >>> batched([one, two])["b"].tolist()
    [[2, 3], [5], []]
    """
    first = samples[0]
    for k, sample in enumerate(samples):
        if sample.keys() != first.keys():
            raise CallError(f"collate: samples must agree in their keys: sample {k} has {sample.keys()}, sample 0 {first.keys()}")
        if (sample.weights is None) != (first.weights is None):
            raise CallError(f"collate: either all samples must have weights, or none: sample {k} differs from sample 0")
    rows = _rows_after_one_another([each.flat for each in samples])
    weighted = [each.weights for each in samples if each.weights is not None]
    begins = itertools.accumulate((len(each.flat) for each in samples), initial=0)
    ranges = [[(a + begin, b + begin) for a, b in each.ranges()] for each, begin in zip(samples, begins, strict=False)]
    order = [own[k] for k in range(len(first)) for own in ranges]
    moved, weights = _blocks(rows, torch.cat(weighted) if weighted else None, order)
    counts = [sum(each.rows_per_key[k] for each in samples) for k in range(len(first))]
    return KeyedJaggedTensor(first.keys(), moved, weights=weights, rows_per_key=counts)


def _names(keys: Iterable[str]) -> list[str]:
    names = [keys] if isinstance(keys, str) else list(keys)
    if isinstance(keys, str) or not all(isinstance(key, str) for key in names):
        wrong = next((key for key in names if not isinstance(key, str)), keys)
        raise CallError(f"keys must be strings, got {wrong!r}")
    return names


def _rows_per_key(rows: int, keys: int, given: Sequence[int] | None) -> Sequence[int]:
    if given is None:
        if keys == 0 or rows % keys:
            raise StructureError(
                f"{rows} rows do not divide among {keys} keys: pass rows_per_key= if keys have different numbers of rows"
            )
        return [rows // keys] * keys
    if len(given) != keys or sum(given) != rows or any(count < 0 for count in given):
        raise StructureError(
            f"rows_per_key={list(given)} must have one number for each of {keys} keys and sum to the {rows} rows"
        )
    return given


def _from_torchrec(kjt: Any) -> KeyedJaggedTensor:
    offsets = getattr(kjt, "offsets_or_none", lambda: None)()
    strides = getattr(kjt, "stride_per_key", lambda: None)()
    values = kjt.values()
    if offsets is None:
        rows = JaggedTensor.from_lengths(values, kjt.lengths())
    else:
        rows = JaggedTensor.from_csr(values, offsets)
    return KeyedJaggedTensor(kjt.keys(), rows, weights=kjt.weights_or_none(), rows_per_key=strides)


def _ragged(features: Mapping[str, Any], device: torch.device | str | None) -> dict[str, JaggedTensor]:
    """One ragged tensor per key. Lists without any number take the dtype of the other keys."""
    found: dict[str, JaggedTensor] = {}
    for key, each in features.items():
        if isinstance(each, Tensor):
            raise CallError(f"keyed: {key!r} is a dense tensor: make rows of it, with JaggedTensor.from_lengths or from_padded")
        given = each if isinstance(each, JaggedTensor) else JaggedTensor.from_nested_list(each)
        found[key] = given if device is None else given.to(device)
    empty = [key for key, each in features.items() if not isinstance(each, JaggedTensor) and not found[key].values.numel()]
    dtype = next((each.dtype for key, each in found.items() if key not in empty), torch.int64)
    return {key: each.to(dtype) if key in empty else each for key, each in found.items()}


def _joined(tensors: list[Tensor]) -> Tensor:
    """Concatenates tensors: the tensor that they are consecutive slices of, or a copy."""
    first = tensors[0]
    place, storage, whole = first.storage_offset(), first.untyped_storage().data_ptr(), True
    for part in tensors:
        alike = part.untyped_storage().data_ptr() == storage and part.is_contiguous() and not part.requires_grad
        whole = whole and alike and (not part.numel() or part.storage_offset() == place)
        place += part.numel()
    if len(tensors) == 1:
        return first
    total = sum(part.shape[0] for part in tensors)
    return first.as_strided((total, *first.shape[1:]), first.stride()) if whole else torch.cat(tensors)


def _rows_after_one_another(tensors: Sequence[JaggedTensor]) -> JaggedTensor:
    values = torch.cat([each.values for each in tensors])
    lengths = torch.cat([each.lengths for each in tensors])
    return JaggedTensor(values, Structure.from_lengths(lengths, total=values.shape[0]))


def _blocks(rows: JaggedTensor, weights: Tensor | None, ranges: Sequence[tuple[int, int]]) -> tuple[JaggedTensor, Tensor | None]:
    """Reorders ranges of rows; each is copied as one block."""
    ends = rows.structure.host_offsets(why="k[keys]")
    blocks = torch.tensor(
        [[int(ends[first]), int(ends[last] - ends[first])] for first, last in ranges], dtype=torch.int64, device="cpu"
    )
    starts, sizes = blocks.reshape(-1, 2).T.contiguous().to(rows.device)
    total = int(blocks.reshape(-1, 2)[:, 1].sum())
    lengths = torch.cat([rows.lengths[first:last] for first, last in ranges] or [rows.lengths[:0]])
    found = JaggedTensor(runs(rows.values, 0, starts, sizes, total), Structure.from_lengths(lengths, total=total), hints=NO_HINTS)
    return found, None if weights is None else runs(weights, 0, starts, sizes, total)


def _equal(one: Any, other: Any) -> bool:
    for each in (one, other):
        if not isinstance(each, KeyedJaggedTensor):
            raise CallError(f"torch.equal compares two KeyedJaggedTensors, got a {type(each).__name__}")
    if one.keys() != other.keys() or one.rows_per_key != other.rows_per_key or (one.weights is None) != (other.weights is None):
        return False
    return torch.equal(one.flat, other.flat) and (one.weights is None or torch.equal(one.weights, other.weights))
