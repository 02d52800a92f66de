"""`cat`, `stack` and `collate`: concatenation of ragged tensors, stacking them, and batching samples.

In: ragged and plain tensors. Out: one ragged tensor; for `collate`, a batch for a DataLoader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from serrate.errors import CallError, DeviceError, DtypeError, ShapeError, StructureError, StructureMismatch
from serrate.tensor.components import shift_dims
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tensor.indexing.reading import place_of_new_dim, put_last
from serrate.tensor.jagged import JaggedTensor
from serrate.tensor.keyed_tensor import KeyedJaggedTensor, batched
from serrate.tensor.moving import runs, select_rows
from serrate.tensor.permuting import inverse
from serrate.tensor.positions import compact, compact_axis
from serrate.tensor.rows import Rows, owners_and_places, rows_of, running_sum
from serrate.tensor.structure import Structure

_Whole = tuple[Tensor, Structure]


def cat(tensors: Sequence[Any], dim: int = 0) -> JaggedTensor:
    """Concatenates tensors along a dim.

    Along the dim that counts rows: the rows of the first tensor, then those of the second, and so on. Along a ragged dim: row by
    row; the tensors must have the same number of rows. Along a regular dim: the tensors must have the same rows. A dense tensor
    `[B, k, *inner]` counts as B rows of length k.

    >>> one = JaggedTensor.from_lengths(torch.arange(3), [2, 1])
    >>> two = JaggedTensor.from_lengths(torch.arange(10, 13), [0, 3])
    >>> cat([one, two]).lengths
    tensor([2, 1, 0, 3])
    >>> cat([one, two], dim=1).to_list()
    [tensor([0, 1]), tensor([ 2, 10, 11, 12])]
    """
    jts, hints = _operands("cat", tensors, dense=True)
    at = jts[0]._dim(dim)
    kind = jts[0].dims[at]
    _check_alike("cat", jts, skip=at)
    if kind.axis is None:
        wholes = _same_rows("cat", jts, skip=at)
        where = wholes[0][1].dims_of(wholes[0][0].dim())[at].values_dim
        return JaggedTensor(torch.cat([values for values, _ in wholes], where), wholes[0][1], hints=hints)
    wholes = [compact(jt.values, jt.structure, "cat") for jt in jts]
    _check_other_axes("cat", wholes, kind.axis)
    if kind.level is None:
        return JaggedTensor(*_along_rows(wholes, kind.axis, "cat"), hints=hints)
    return JaggedTensor(*_along_ragged(wholes, kind.axis, kind.level, at), hints=hints)


def stack(tensors: Sequence[Any], dim: int = 0) -> JaggedTensor:
    """Stacks tensors along a new dim.

    A new first dim counts the tensors: the result is nested one level deeper. Anywhere else, the new dim is regular, and the
    tensors must have the same rows.

    >>> one = JaggedTensor.from_lengths(torch.arange(3), [2, 1])
    >>> two = JaggedTensor.from_lengths(torch.arange(10, 13), [3])
    >>> stack([one, two]).to_list()
    [[tensor([0, 1]), tensor([2])], [tensor([10, 11, 12])]]
    >>> stack([one, one], dim=-1).shape
    (2, r0, 2)
    """
    jts, hints = _operands("stack", tensors, dense=False)
    first = jts[0]
    if not -first.ndim - 1 <= dim <= first.ndim:
        raise ShapeError(f"dim {dim} does not exist: the stacked tensor has {first.ndim + 1} dims")
    at = dim % (first.ndim + 1)
    nested = at == 0 and first.structure.dims[0] == 0
    _check_alike("stack", jts, skip=0 if nested else None)
    if nested:
        wholes = [compact(jt.values, jt.structure, "stack") for jt in jts]
        _check_other_axes("stack", wholes, 0)
        return JaggedTensor(*_one_level_more(wholes), hints=hints)
    wholes = _same_rows("stack", jts, skip=None)
    values, structure = wholes[0]
    place = place_of_new_dim(values, structure, at)
    if place is None:
        found, order = put_last(torch.stack([values for values, _ in wholes], -1), structure, at)
        assert order is not None
        return JaggedTensor(found, order, hints=hints)
    return JaggedTensor(torch.stack([values for values, _ in wholes], place), shift_dims(structure, place, 1), hints=hints)


def joined(rows: Sequence[Rows], total: int, why: str) -> Rows:
    """The rows of the first, then those of the second, and so on, back to back; `total` positions in all.

    >>> one, two = Rows((torch.tensor([0, 2]),)), Rows((torch.tensor([0, 1, 4]),))
    >>> joined([one, two], 6, "cat").offsets
    (tensor([0, 2, 3, 6]),)
    """
    device, first = rows[0].device, rows[0]
    known = all(each.readable() for each in rows)
    work = [each.host_rows(why) for each in rows] if known else rows
    chain = [running_sum(torch.cat([each.lengths(level) for each in work])) for level in range(first.levels)]
    # No shape gives the total number of columns, so unless it is read, int32 is not trusted to hold it.
    end = total if first.columns is None else int(chain[-1][-1]) if known else None
    narrow = end is not None and max(total, end) <= torch.iinfo(torch.int32).max
    dtype = torch.int32 if narrow and all(each.offsets[0].dtype is torch.int32 for each in rows) else torch.int64
    offsets = tuple(level.to(dtype) for level in chain)
    found = rows_of(offsets, first.depth, True, None, None, {})
    if known:
        found._host.update(enumerate(offsets))
    for name, pick in (("min", min), ("max", max)):
        for level in range(first.levels):
            facts = [each.known(name, level) for each in rows if each.num_rows(level)]
            if facts and None not in facts:
                found.note(name, level, pick(fact for fact in facts if fact is not None))
    found.note(*found.elements_fact, total)
    return found.to(device)


def _operands(what: str, tensors: Sequence[Any], *, dense: bool) -> tuple[list[JaggedTensor], Hints]:
    if isinstance(tensors, JaggedTensor | Tensor):
        raise CallError(f"{what} takes a list of tensors, got one {type(tensors).__name__}: write {what}([one, other])")
    given = list(tensors)
    first = next((each for each in given if isinstance(each, JaggedTensor)), None)
    if first is None:
        raise CallError(f"{what} takes at least one JaggedTensor, got {len(given)} tensors and no JaggedTensor: use torch.{what}")
    found: list[JaggedTensor] = []
    for k, each in enumerate(given):
        if not isinstance(each, JaggedTensor | Tensor):
            raise CallError(f"{what} takes tensors: item {k} is of type {type(each).__name__}")
        if each.dtype != first.dtype:
            raise DtypeError(f"{what} takes tensors of one dtype: tensor {k} is {each.dtype}, another {first.dtype}; convert one")
        if each.device != first.device:
            raise DeviceError(f"{what} takes tensors on one device: tensor {k} is on {each.device}, another on {first.device}")
        found.append(each if isinstance(each, JaggedTensor) else _rows_of_one_length(what, k, each, first, dense))
    hints = {each.hints for each in given if isinstance(each, JaggedTensor)}
    return found, hints.pop() if len(hints) == 1 else NO_HINTS


def _rows_of_one_length(what: str, k: int, x: Tensor, like: JaggedTensor, dense: bool) -> JaggedTensor:
    rows = like.structure.rows[0]
    if not dense or len(like.structure.rows) > 1 or rows.levels > 1:
        raise CallError(
            f"{what}: tensor {k} is dense; only cat along rows of one level accepts that: make it a JaggedTensor first"
        )
    if x.dim() != like.ndim:
        raise ShapeError(f"{what}: tensor {k} has {x.dim()} dims, but the ragged tensors have {like.ndim}")
    dim = like.structure.dims[0]
    x = x.permute(inverse(like.structure.order(like.values.dim())))
    count, length = x.shape[dim : dim + 2]
    offsets = torch.arange(count + 1, dtype=rows.offsets[0].dtype, device=x.device) * length
    structure = Structure.from_offsets(offsets, dim=dim, total=count * length, validate=False)
    for name in ("min", "max"):
        structure.rows[0].note(name, 0, length if count else 0)
    return JaggedTensor(x.flatten(dim, dim + 1), structure.transposed(like.structure.ahead))


def _check_alike(what: str, jts: Sequence[JaggedTensor], skip: int | None) -> None:
    """Raises unless all have the same kinds of dims, and the same sizes in all regular dims except the joined one."""
    first = jts[0]
    for k, jt in enumerate(jts[1:], 1):
        alike = jt.ndim == first.ndim and all(
            (one.axis, one.level) == (other.axis, other.level)
            and (one.axis is not None or at == skip or jt.size(at) == first.size(at))
            for at, (one, other) in enumerate(zip(jt.dims, first.dims, strict=True))
        )
        if not alike:
            raise ShapeError(f"{what}: tensor {k} of shape {jt.shape} does not fit tensor 0 of shape {first.shape}")


def _same_rows(what: str, jts: Sequence[JaggedTensor], skip: int | None) -> list[_Whole]:
    """Values and structures in the same layout, so that values can be concatenated directly."""
    first = jts[0]
    where = None if skip is None else first.dims[skip].values_dim

    def outline(values: Tensor) -> list[int]:
        return [size for dim, size in enumerate(values.shape) if dim != where]

    if all(jt.structure is first.structure and outline(jt.values) == outline(first.values) for jt in jts):
        return [(jt.values, jt.structure) for jt in jts]
    wholes = [compact(jt.values, jt.structure, what) for jt in jts]
    for k, (_, structure) in enumerate(wholes):
        if not structure.same_rows(wholes[0][1], why=what):
            raise StructureMismatch(
                f"{what}: tensor {k} must have the rows of tensor 0: {structure.difference_from(wholes[0][1])}"
            )
    return wholes


def _check_other_axes(what: str, wholes: Sequence[_Whole], axis: int) -> None:
    first = wholes[0][1]
    for k, (_, structure) in enumerate(wholes):
        for other in range(len(first.rows)):
            if other != axis and not structure.rows[other].same_rows(first.rows[other], what):
                raise StructureMismatch(
                    f"{what}: tensor {k} must have the rows of tensor 0 in dims that are not joined: {structure}, not {first}"
                )


def _along_rows(wholes: Sequence[_Whole], axis: int, why: str) -> _Whole:
    structure = wholes[0][1]
    dim = structure.dims[axis]
    values = torch.cat([values for values, _ in wholes], dim)
    rows = joined([each.rows[axis] for _, each in wholes], values.shape[dim], why)
    return values, structure.replace(axis, rows)


def _one_level_more(wholes: Sequence[_Whole]) -> _Whole:
    values, structure = _along_rows(wholes, 0, "stack")
    rows, counts = structure.rows[0], [each.rows[0].num_rows(0) for _, each in wholes]
    # The host knows the new level, so known facts about the levels below stay known.
    outer = running_sum(torch.tensor(counts, dtype=torch.int64, device="cpu")).to(rows.offsets[0].dtype)
    found = rows_of((outer.to(rows.device, non_blocking=True), *rows.offsets), rows.depth + 1, True, None, None, {})
    found._host.update({0: outer, **{level + 1: host for level, host in rows._host.items()}})
    for (name, level), fact in rows._facts.items():
        found.note(name, level if name == "elements" else level + 1, fact)
    found.note("min", 0, min(counts))
    found.note("max", 0, max(counts))
    plain, ahead = structure.canonical.replace(0, found), structure.ahead
    return values, plain if ahead is None else plain.transposed(((0, *ahead[0]), *ahead[1:]))


def _along_ragged(wholes: Sequence[_Whole], axis: int, level: int, at: int) -> _Whole:
    structure = wholes[0][1]
    dim, first = structure.dims[axis], structure.rows[axis]
    rows = [each.rows[axis] for _, each in wholes]
    _check_levels(rows, level, at)
    values = torch.cat([values for values, _ in wholes], dim)
    totals = [values.shape[dim] for values, _ in wholes]
    if level < first.depth - 1:
        found = _parts_joined(rows, level, values.shape[dim])
        return compact_axis(values, structure.replace(axis, found), axis, "cat")
    if level == first.depth:
        owner, _ = owners_and_places(first.inner_lengths(), first.total(first.depth - 1, "cat"))
        items = [each.counts().index_select(0, owner) for each in rows]
    else:
        items = [each.sizes() for each in rows]
    offsets = [*first.offsets]
    offsets[level] = running_sum(torch.stack([each.lengths(level).long() for each in rows]).sum(0))
    narrow = level < first.depth and values.shape[dim] <= torch.iinfo(torch.int32).max
    dtype = torch.int32 if narrow and all(each.offsets[0].dtype is torch.int32 for each in rows) else torch.int64
    found = rows_of(tuple(each.to(dtype) for each in offsets), first.depth, True, None, None, {})
    found.note(*found.elements_fact, values.shape[dim])
    return runs(values, dim, *_interleaved(items, totals), sum(totals)), structure.replace(axis, found)


def _parts_joined(rows: Sequence[Rows], level: int, total: int) -> Rows:
    """Interleaves: the parts of row 0 of every tensor, then of row 1, and so on; their values are already concatenated."""
    # With more than one level below, the host must know the number of rows, and computes everything.
    deep = rows[0].depth - level > 2
    work = [each.host_rows("cat") for each in rows] if deep else rows
    lengths = [each.lengths(level) for each in work]
    below = joined([each.below(level + 1) for each in work], total, "cat")
    totals = [each.num_rows(level + 1) for each in work]
    starts, taken = _interleaved(lengths, totals)
    owner, place = owners_and_places(taken, sum(totals))
    ids = starts.index_select(0, owner) + place
    outer = (*work[0].offsets[:level], running_sum(torch.stack([each.long() for each in lengths]).sum(0)))
    found = select_rows(below, ids, level=0, outer=outer, why="cat")
    found.note(*found.elements_fact, total)
    return found.to(rows[0].device)


def _check_levels(rows: Sequence[Rows], level: int, at: int) -> None:
    first = rows[0]
    for k, each in enumerate(rows):
        for other in range(first.levels):
            if each.num_rows(other) != first.num_rows(other) and other <= level:
                raise StructureMismatch(
                    f"cat along ragged dim {at}: tensor {k} has {each.num_rows(other)} rows, tensor 0 has {first.num_rows(other)}"
                )
            # Outer levels count the same rows, and columns belong to the same rows; inner levels come along.
            beside = other < level or (first.columns is not None and other >= first.depth - 1 and other != level)
            if not beside or each.offsets[other] is first.offsets[other]:
                continue
            if not torch.equal(each.host_offsets(other, "cat").long(), first.host_offsets(other, "cat").long()):
                raise StructureMismatch(
                    f"cat along ragged dim {at}: tensor {k} must have the lengths of tensor 0 on the other levels: "
                    f"{each}, not {first}"
                )


def _interleaved(lengths: Sequence[Tensor], totals: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Start and length of every run: row 0 of every tensor, then row 1, and so on; starts count through all tensors."""
    bases = [sum(totals[:k]) for k in range(len(totals))]
    table = torch.stack([each.long() for each in lengths], dim=1)
    starts = torch.stack([running_sum(each)[:-1] + base for each, base in zip(lengths, bases, strict=True)], dim=1)
    return starts.reshape(-1), table.reshape(-1)


def collate(batch: Sequence[Any]) -> Any:
    """The `collate_fn` of a DataLoader whose samples differ in size.

    Tensors with at least one dim become the rows of a JaggedTensor, even if their first dims agree, so that the type of a batch
    never depends on its samples. Scalars, numbers and strings are batched as `torch.utils.data.default_collate` does; ragged
    samples are concatenated along their rows, keyed ones key by key; dicts, tuples and lists are batched item by item.

    >>> batch = collate([{"tokens": torch.tensor([1, 2]), "label": 0}, {"tokens": torch.tensor([3]), "label": 1}])
    >>> batch["tokens"].tolist(), batch["label"]
    ([[1, 2], [3]], tensor([0, 1]))
    """
    if not batch:
        raise CallError("collate: a batch needs at least one sample, got none")
    first = batch[0]
    for index, sample in enumerate(batch):
        if _kind(sample) != _kind(first):
            raise CallError(
                f"collate: samples must be of one kind: sample {index} is {_kind(sample)}, sample 0 is {_kind(first)}"
            )
    if isinstance(first, JaggedTensor):
        return _joined(batch)
    if isinstance(first, KeyedJaggedTensor):
        return batched(batch)
    if isinstance(first, Tensor) and first.dim():
        return JaggedTensor.from_list(batch)
    if isinstance(first, Mapping):
        _check_same("keys", [list(sample) for sample in batch])
        return {key: collate([sample[key] for sample in batch]) for key in first}
    if isinstance(first, (tuple, list)):
        _check_same("number of items", [len(sample) for sample in batch])
        columns = [collate(items) for items in zip(*batch, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*columns)
        return tuple(columns) if isinstance(first, tuple) else columns
    return default_collate(list(batch))


def _kind(sample: Any) -> str:
    if isinstance(sample, Tensor):
        return "a tensor with dims" if sample.dim() else "a scalar tensor"
    for kind, name in (
        (JaggedTensor, "a JaggedTensor"),
        (KeyedJaggedTensor, "a KeyedJaggedTensor"),
        (Mapping, "a mapping"),
        ((tuple, list), "a sequence"),
    ):
        if isinstance(sample, kind):
            return name
    return "a number or a string"


def _check_same(what: str, found: list[Any]) -> None:
    for index, each in enumerate(found):
        if each != found[0]:
            raise CallError(f"collate: samples must agree in their {what}: sample {index} has {each}, sample 0 has {found[0]}")


def _joined(batch: Sequence[JaggedTensor]) -> JaggedTensor:
    for index, jt in enumerate(batch):
        if jt.structure.dims != (0,) or jt.structure.rows[0].columns is not None or jt.structure.ahead is not None:
            raise StructureError(
                "collate: only the first dim of ragged samples may be partitioned, and they may not have columns: "
                f"sample {index} is {jt.structure}"
            )
    _check_same("levels", [jt.structure.levels for jt in batch])
    _check_same("inner dims", [tuple(jt.values.shape[1:]) for jt in batch])
    _check_same("dtype", [jt.dtype for jt in batch])
    packed = [jt.contiguous() for jt in batch]
    lengths = [torch.cat([jt.structure.lengths(level) for jt in packed]) for level in range(packed[0].structure.levels)]
    return JaggedTensor.from_lengths(torch.cat([jt.values for jt in packed]), lengths)
