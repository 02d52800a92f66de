"""Samples of different sizes made into a batch, as a DataLoader wants it.

In: a list of samples: tensors, ragged tensors, numbers, or tuples, lists and dicts of them. Out: the same nesting, batched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from serrate.errors import CallError, StructureError
from serrate.tensor.jagged import JaggedTensor


def collate(batch: Sequence[Any]) -> Any:
    """The `collate_fn` of a DataLoader whose samples differ in size.

    Tensors with at least one dim become the rows of a JaggedTensor, whether their first dims agree or not, so that the kind of
    a batch never depends on its samples; scalars, numbers and words are batched as `torch.utils.data.default_collate` does;
    ragged samples follow one another along their rows; dicts, tuples and lists are batched item by item.

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
    for kind, name in ((JaggedTensor, "a JaggedTensor"), (Mapping, "a mapping"), ((tuple, list), "a sequence")):
        if isinstance(sample, kind):
            return name
    return "a number or a word"


def _check_same(what: str, found: list[Any]) -> None:
    for index, each in enumerate(found):
        if each != found[0]:
            raise CallError(f"collate: samples must agree in their {what}: sample {index} has {each}, sample 0 has {found[0]}")


def _joined(batch: Sequence[JaggedTensor]) -> JaggedTensor:
    for index, jt in enumerate(batch):
        if jt.structure.dims != (0,) or jt.structure.rows[0].columns is not None:
            raise StructureError(
                f"collate: ragged samples must be partitioned in their first dim only, and without columns: sample {index} "
                f"is {jt.structure}"
            )
    _check_same("levels", [jt.structure.levels for jt in batch])
    _check_same("inner dims", [tuple(jt.values.shape[1:]) for jt in batch])
    _check_same("dtype", [jt.dtype for jt in batch])
    packed = [jt.contiguous() for jt in batch]
    lengths = [torch.cat([jt.structure.lengths(level) for jt in packed]) for level in range(packed[0].structure.levels)]
    return JaggedTensor.from_lengths(torch.cat([jt.values for jt in packed]), lengths)
