"""A short text for a ragged tensor, however large it is.

In: a ragged tensor's shape, values and structure. Out: one line with at most a few lengths and a few numbers; where
reading them would need a forbidden copy, the line says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serrate.tensor.structure import Structure
from serrate.tensor.sync import host_copy, may_copy

_LENGTHS = 8
_NUMBERS = 6


def preview(shape: tuple[object, ...], values: Tensor, structure: Structure) -> str:
    """The repr of a ragged tensor.

    >>> preview((2, "r0"), torch.tensor([1, 2, 3]), Structure.from_lengths(torch.tensor([1, 2])))
    "JaggedTensor(shape=(2, 'r0'), dtype=torch.int64, device=cpu, lengths=[1, 2], values=[1, 2, 3])"
    """
    facts = [f"shape={shape}", f"dtype={values.dtype}", f"device={values.device}"]
    facts += [f"lengths={_lengths(structure)}", f"values={_numbers(values)}"]
    if values.requires_grad:
        facts.append("requires_grad=True")
    return f"JaggedTensor({', '.join(facts)})"


def _lengths(structure: Structure) -> str:
    shown = structure.offsets[-1][: _LENGTHS + 1]
    if not may_copy(shown):
        return "not on the host"
    return _listed([str(length) for length in host_copy(shown, "repr").diff().tolist()], structure.num_rows())


def _numbers(values: Tensor) -> str:
    # The first rows are cut off before flattening, so that values with gaps in memory are not copied whole.
    shown = values.detach()[:_NUMBERS].reshape(-1)[:_NUMBERS]
    if not may_copy(shown):
        return "not on the host"
    shown = host_copy(shown, "repr")
    if values.dtype.is_floating_point:
        return _listed([f"{number:.4g}" for number in shown.to(torch.float64).tolist()], values.numel())
    return _listed([str(number) for number in shown.tolist()], values.numel())


def _listed(shown: list[str], count: int) -> str:
    return f"[{', '.join(shown)}{', ...' if count > len(shown) else ''}]"
