"""Ragged tensors of every composition and of awkward lengths, and operations on them by padded torch: one more oracle.

In: the names of compositions and lengths. Out: `tensor_of`, `OPERATIONS`, and `run`, which names the first bad coordinate. A
tensor is padded with a mask of what exists (`Padded`); an operation is written once more on that, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serrate import JaggedTensor, Structure, ops
from serrate.compiled import Compiled
from serrate.frontend.leaves import leaves_of
from serrate.frontend.specialise import Specialised, changing
from serrate.frontend.trace import FusionInputs, trace
from serrate.ir.view import TensorView
from tests.engine.oracle import FLOATS, TOLERANCES, one_thread

# --- compositions --------------------------------------------------------------------------------------------------------

LENGTHS: dict[str, list[int]] = {"mixed": [3, 0, 5, 2], "none": [], "empty": [0, 0, 0, 0], "giant": [1, 0, 24, 2], "single": [5]}
"""What rows are, for every composition."""
ROOM = 6
"""Columns that there is room for, where they are not packed."""


def _ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _offsets(lengths: list[int]) -> Tensor:
    return _ints([0, *itertools.accumulate(lengths)])


def _outer(count: int) -> list[int]:
    """How many of some rows belong to each of three owners: some, none, the rest."""
    return [(count + 1) // 2, 0, count // 2]


def _counts(lengths: list[int]) -> list[int]:
    return [(2, 5, 4, 1)[k % 4] for k in range(len(lengths))]


def _spread(lengths: list[int]) -> tuple[Tensor, int]:
    """Where rows start that have gaps between them, and how much room they take."""
    starts = [n + 2 * k + 1 for k, n in enumerate(_offsets(lengths).tolist())]
    return _ints(starts[:-1]), starts[-1]


def _rows_of_rows(lengths: list[int]) -> Structure:
    owners = _outer(len(lengths))
    return Structure.from_offsets(_offsets(_outer(3)), _offsets(owners), _offsets(lengths))


def _parts(lengths: list[int]) -> Structure:
    even = lengths[: len(lengths) // 2 * 2]
    return Structure.from_lengths(_ints(even).view(-1, 2))


def _independent(lengths: list[int]) -> Structure:
    return Structure.independent(Structure.from_offsets(_offsets(lengths)), Structure.from_offsets(_ints([0, 1, 1, 5]), dim=1))


def _gaps(lengths: list[int], *owners: Tensor) -> Structure:
    return Structure.from_starts(_spread(lengths)[0], *owners, _ints(lengths))


def _padded(lengths: list[int]) -> Structure:
    room = max(lengths, default=0) + 1
    return Structure.from_starts(torch.arange(len(lengths)) * room, _ints(lengths), room=room)


def _product(lengths: list[int]) -> Structure:
    return Structure.from_lengths(_ints(lengths)).with_columns(_ints(_counts(lengths)))


def _product_in_nested(lengths: list[int]) -> Structure:
    return Structure.from_lengths(_ints(_outer(len(lengths))), _ints(lengths)).with_columns(_ints(_counts(lengths)))


def _columns(lengths: list[int]) -> Structure:
    return Structure.from_lengths(_ints(lengths)).with_columns(_ints(_counts(lengths)), packed=False)


def _beside_rows(lengths: list[int], *, packed: bool) -> Structure:
    other = Structure.from_offsets(_ints([0, 1, 1, 3]), dim=1 if packed else 2)
    rectangles = Structure.from_lengths(_ints(lengths)).with_columns(_ints(_counts(lengths)), packed=packed)
    return Structure.independent(rectangles, other)


def _rectangles_apart(lengths: list[int]) -> tuple[Structure, int]:
    """Rectangles with gaps between them, and how much room they take."""
    sizes = [n * m for n, m in zip(lengths, _counts(lengths), strict=True)]
    starts, room = _spread(sizes)
    return Structure.from_starts(starts, _ints(lengths)).with_columns(_ints(_counts(lengths))), room


def _area(lengths: list[int]) -> int:
    return sum(n * m for n, m in zip(lengths, _counts(lengths), strict=True))


Maker = tuple[Callable[[list[int]], Structure], Callable[[list[int]], tuple[int, ...]]]
COMPOSITIONS: dict[str, Maker] = {
    "one level": (lambda n: Structure.from_offsets(_offsets(n)), lambda n: (sum(n), 4)),
    "int32 offsets": (lambda n: Structure.from_offsets(_offsets(n).int()), lambda n: (sum(n), 4)),
    "nested": (lambda n: Structure.from_offsets(_offsets(_outer(len(n))), _offsets(n)), lambda n: (sum(n), 4)),
    "parts of equal number": (_parts, lambda n: (sum(n[: len(n) // 2 * 2]), 4)),
    "three levels": (_rows_of_rows, lambda n: (sum(n), 3)),
    "rows of dim 1": (lambda n: Structure.from_offsets(_offsets(n), dim=1), lambda n: (3, sum(n), 2)),
    "independent": (_independent, lambda n: (sum(n), 5, 2)),
    "gaps": (_gaps, lambda n: (_spread(n)[1], 4)),
    "gaps in nested": (lambda n: _gaps(n, _ints(_outer(len(n)))), lambda n: (_spread(n)[1], 4)),
    "padded": (_padded, lambda n: (len(n) * (max(n, default=0) + 1), 4)),
    "product": (_product, lambda n: (_area(n), 2)),
    "product in nested": (_product_in_nested, lambda n: (_area(n), 2)),
    "columns of the next dim": (_columns, lambda n: (sum(n), ROOM, 2)),
    "product beside rows": (lambda n: _beside_rows(n, packed=True), lambda n: (_area(n), 3, 2)),
    "product with gaps": (lambda n: _rectangles_apart(n)[0], lambda n: (_rectangles_apart(n)[1], 2)),
    "columns beside rows": (lambda n: _beside_rows(n, packed=False), lambda n: (sum(n), ROOM, 3, 2)),
}
"""Name -> structure of some lengths, and the shape of its values."""


def tensor_of(composition: str, lengths: str, dtype: torch.dtype = torch.float32) -> JaggedTensor:
    structure, shape = COMPOSITIONS[composition]
    generator = torch.Generator().manual_seed(len(composition) * 7 + len(lengths))
    values = torch.randn(shape(LENGTHS[lengths]), generator=generator, dtype=torch.float64)
    values = (values * 3).round().to(dtype) if not dtype.is_floating_point else values.to(dtype)
    return JaggedTensor(values, structure(LENGTHS[lengths]))


# --- by padded torch -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Padded:
    """Every position of a dense tensor, and which of them exist."""

    x: Tensor
    exists: Tensor
    reduced: bool = False
    """Whether rows are gone: their owners exist, also those of empty rows, which positions do not tell."""

    @staticmethod
    def of(jt: JaggedTensor) -> Padded:
        exists = jt.with_values(torch.ones_like(jt.values)).to_padded() == 1
        x = jt.to_padded()
        return Padded(x.double() if x.dtype.is_floating_point else x, exists)

    def filled(self, value: float) -> Tensor:
        return self.x.masked_fill(~self.exists, value)

    def count(self, dims: tuple[int, ...]) -> Tensor:
        return self.exists.sum(dims, keepdim=True)

    def mean(self, dims: tuple[int, ...]) -> Tensor:
        return self.filled(0).sum(dims, keepdim=True) / self.count(dims)

    def variance(self, dims: tuple[int, ...], correction: int) -> Tensor:
        away = ((self.x - self.mean(dims)) ** 2).masked_fill(~self.exists, 0)
        return away.sum(dims, keepdim=True) / (self.count(dims) - correction).clamp(min=0)

    def logsumexp(self, dims: tuple[int, ...]) -> Tensor:
        return self.filled(-torch.inf).logsumexp(dims, keepdim=True)

    def like(self, x: Tensor) -> Padded:
        return Padded(x, self.exists)

    def without(self, x: Tensor, dims: tuple[int, ...]) -> Padded:
        """A reduction that left dims of extent 1: they go. A dim of rows stays where some row reaches."""
        order = sorted(dims, reverse=True)
        exists = self.exists.any(dims, keepdim=True) if all(self.exists.shape) else self.exists.sum(dims, keepdim=True) > 0
        for d in order:
            x, exists = x.squeeze(d), exists.squeeze(d)
        return Padded(x, exists, reduced=True)


Dims = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """One operation on dims of a tensor: traced, and on padded torch."""

    run: Callable[..., Any]
    want: Callable[..., Any]
    over: str = "one"
    """Which dims it takes: `none`, `one`, `two` of those that can be reduced, or `along`: one that is no count of rows."""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    extras: Callable[[Padded], list[Tensor]] = lambda p: []


def _extremum(p: Padded, dims: Dims) -> Padded:
    filled = p.filled(-torch.inf)
    empty = any(filled.shape[d] == 0 for d in dims)
    found = torch.full_like(p.count(dims).double(), -torch.inf) if empty else filled.amax(dims, keepdim=True)
    return p.without(found, dims)


def _argmax(p: Padded, dims: Dims) -> Padded:
    count = p.count(dims)
    empty = any(p.x.shape[d] == 0 for d in dims)
    place = torch.zeros_like(count) if empty else p.filled(-torch.inf).argmax(dims[0], keepdim=True)
    return p.without(torch.where(count > 0, place, -1), dims)


def _layer_norm(p: Padded, dims: Dims) -> Padded:
    return p.like((p.x - p.mean(dims)) / (p.variance(dims, 0) + 1e-5).sqrt())


def _softmax(p: Padded, dims: Dims) -> Padded:
    return p.like((p.filled(-torch.inf) - p.logsumexp(dims)).exp())


def _product(p: Padded, w: Tensor) -> Padded:
    return Padded(p.filled(0) @ w, p.exists[..., :1].expand(*p.exists.shape[:-1], w.shape[1]))


def _flipped(p: Padded, dims: Dims) -> Padded:
    (dim,) = dims
    count = p.exists.sum(dim, keepdim=True)
    at = (count - 1 - torch.arange(p.x.shape[dim]).view([-1 if k == dim else 1 for k in range(p.x.dim())])).clamp(min=0)
    return p.like(p.x.gather(dim, at.expand(p.x.shape)) if p.x.numel() else p.x)


def _weight(p: Padded) -> list[Tensor]:
    return [torch.linspace(-1, 1, p.x.shape[-1] * 3, dtype=torch.float64).view(p.x.shape[-1], 3)]


def _feature(p: Padded) -> list[Tensor]:
    return [torch.linspace(-1, 1, p.x.shape[-1], dtype=torch.float64)]


def _dense(p: Padded) -> list[Tensor]:
    return [torch.linspace(-1, 1, p.x.numel(), dtype=torch.float64).view(p.x.shape)]


NUMBERS = (*FLOATS, torch.int64, torch.int32)
OPERATIONS: dict[str, Operation] = {
    "chain": Operation(
        lambda x, d, w: torch.relu(x * w + 1), lambda p, d, w: p.like((p.x * w + 1).relu()), "none", extras=_feature
    ),
    "where": Operation(
        lambda x, d: torch.where(x > 0, x, x * 2), lambda p, d: p.like(torch.where(p.x > 0, p.x, p.x * 2)), "none", NUMBERS
    ),
    "dense": Operation(lambda x, d, y: x * 2 - y, lambda p, d, y: p.like(p.x * 2 - y), "none", extras=_dense),
    "sum": Operation(ops.sum, lambda p, d: p.without(p.filled(0).sum(d, keepdim=True), d), dtypes=NUMBERS),
    "sum of two": Operation(ops.sum, lambda p, d: p.without(p.filled(0).sum(d, keepdim=True), d), "two", NUMBERS),
    "mean": Operation(ops.mean, lambda p, d: p.without(p.mean(d), d)),
    "mean of two": Operation(ops.mean, lambda p, d: p.without(p.mean(d), d), "two"),
    "amax": Operation(ops.amax, _extremum),
    "argmax": Operation(lambda x, d: ops.argmax(x, d[0]), _argmax, dtypes=(torch.float32, torch.float64)),
    "any": Operation(
        lambda x, d: ops.any(ops.gt(x, 1), d), lambda p, d: p.without(p.like(p.x > 1).filled(0).sum(d, True) > 0, d)
    ),
    "var": Operation(ops.var, lambda p, d: p.without(p.variance(d, 1), d)),
    "var of two": Operation(ops.var, lambda p, d: p.without(p.variance(d, 1), d), "two"),
    "logsumexp": Operation(ops.logsumexp, lambda p, d: p.without(p.logsumexp(d), d)),
    "softmax": Operation(ops.softmax, _softmax),
    "softmax of two": Operation(ops.softmax, _softmax, "two"),
    "log_softmax": Operation(ops.log_softmax, lambda p, d: p.like(p.x - p.logsumexp(d))),
    "layer_norm": Operation(ops.layer_norm, _layer_norm),
    "centered": Operation(lambda x, d: x - ops.mean(x, d, keepdim=True), lambda p, d: p.like(p.x - p.mean(d))),
    "cumsum": Operation(lambda x, d: ops.cumsum(x, d[0]), lambda p, d: p.like(p.filled(0).cumsum(d[0])), "along", NUMBERS),
    "cumsum of softmax": Operation(
        lambda x, d: ops.cumsum(ops.softmax(x, d), d[0]),
        lambda p, d: p.like(_softmax(p, d).filled(0).cumsum(d[0])),
        "along",
    ),
    "flip": Operation(lambda x, d: ops.flip(x, d[0]), _flipped, "along", NUMBERS),
    "matmul": Operation(lambda x, d, w: x @ w, lambda p, d, w: _product(p, w), "none", extras=_weight),
    "matmul, softmax": Operation(
        lambda x, d, w: ops.softmax(torch.relu(x @ w), d), lambda p, d, w: _softmax(_relu(_product(p, w)), d), extras=_weight
    ),
    "select": Operation(
        lambda x, d: ops.select(x, -1, 1), lambda p, d: Padded(p.x[..., 1], p.exists[..., 1]), "none", dtypes=NUMBERS
    ),
    "operators": Operation(lambda x, d: x * x - x, lambda p, d: p.like(p.x * p.x - p.x), "none", NUMBERS),
    "two results": Operation(
        lambda x, d: (ops.sum(x, d), x * 2),
        lambda p, d: (p.without(p.filled(0).sum(d, keepdim=True), d), p.like(p.x * 2)),
        dtypes=NUMBERS,
    ),
}


def _relu(p: Padded) -> Padded:
    return p.like(p.x.relu())


def choices(operation: str, jt: JaggedTensor) -> list[Dims]:
    """The dims that an operation can be asked for."""
    over = OPERATIONS[operation].over
    if over == "none":
        return [()]
    dims = reducible(jt)
    if over == "two":
        # Of rows of rows, also the two outer dims: their rows are rows of all.
        outer = [(k, k + 1) for k, d in enumerate(jt.dims[:-2]) if d.axis is not None and d.level is None and k not in dims]
        deep = any(rows.depth > 2 for rows in jt.structure.rows)
        pairs = [pair for pair in itertools.combinations(range(len(jt.dims)), 2) if set(pair) <= set(dims)]
        return [*pairs, *([] if deep else outer)]
    counts = [k for k, d in enumerate(jt.dims) if d.axis is not None and d.level is None]
    return [(d,) for d in dims if over == "one" or d not in counts]


def reducible(jt: JaggedTensor) -> list[int]:
    """Dims that can be reduced alone: all but those that count rows of rows."""
    nested = {axis for axis, rows in enumerate(jt.structure.rows) if rows.depth > 1}
    innermost = {k for k, d in enumerate(jt.dims) if d.axis in nested and (d.level or 0) >= jt.structure.rows[d.axis].depth - 1}
    return [k for k, d in enumerate(jt.dims) if d.axis not in nested or k in innermost]


# --- comparing -----------------------------------------------------------------------------------------------------------


def agrees(got: Any, want: Padded | tuple[Padded, ...], dtype: torch.dtype, where: str) -> None:
    """Fails with the first bad coordinate of the first bad result."""
    results, wanted = (got, want) if isinstance(want, tuple) else ((got,), (want,))
    for result, padded in zip(results, wanted, strict=True):
        relative, absolute = TOLERANCES.get(dtype, (0.0, 0.0))
        values, expected = result, padded.x
        if isinstance(result, JaggedTensor):
            exists = Padded.of(result).exists
            assert exists.shape == padded.exists.shape, f"{where}: expected {padded.exists.shape}, got {exists.shape}"
            missing = padded.exists & ~exists if padded.reduced else padded.exists ^ exists
            assert not missing.any(), f"{where}: other elements exist, first at {missing.nonzero()[0].tolist()}"
            values, expected = result.to_padded(), expected.masked_fill(~exists, 0)
        assert isinstance(values, Tensor) and not isinstance(values, TensorView)
        assert values.shape == expected.shape, f"{where}: expected shape {tuple(expected.shape)}, got {tuple(values.shape)}"
        a, b = values.double(), expected.to(values.dtype).double()
        good = torch.isclose(a, b, rtol=4 * relative, atol=4 * absolute, equal_nan=True)
        if not good.all():
            first = tuple((~good).nonzero()[0].tolist())
            raise AssertionError(
                f"{where}: {int((~good).sum())} of {good.numel()} elements differ; first at {list(first)}: "
                f"got {a[first].item()!r}, want {b[first].item()!r}"
            )


# --- running -------------------------------------------------------------------------------------------------------------

Way = tuple[str, tuple[tuple[str, Any], ...]]
"""A strategy and its options."""


def run(operation: str, composition: str, backend: str, way: Way, dtype: torch.dtype, dims: Dims, lengths: Sequence[str]) -> None:
    """One operation on one composition, built once and called with rows of several kinds."""
    wanted, (strategy, options) = OPERATIONS[operation], way
    programs: dict[Any, Compiled] = {}
    for name in lengths:
        jt = tensor_of(composition, name, dtype)
        padded = Padded.of(jt)
        extras = [e.to(dtype) for e in wanted.extras(padded)]
        args = (jt, dims, *extras)
        leaves = leaves_of(args, {})
        inputs = FusionInputs(leaves)
        given = inputs.tensors(leaves)
        numbers = [size for tensor in given for size in tensor.shape]
        sizes = Specialised[Any](numbers, *changing(inputs, given, leaves)[:2]).wanted(numbers)
        key = (jt.structure.form, sizes)
        if key not in programs:
            traced = trace(wanted.run, args, {}, sizes=sizes)
            programs[key] = Compiled(traced.fusion, backend, strategy, **dict(options))
        with one_thread():
            got = programs[key](*given)
        want = wanted.want(padded, dims, *(e.double() for e in extras))
        agrees(got, want, dtype, f"{operation} of {composition}, {name}")
