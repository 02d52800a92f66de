"""JaggedTensor as a node of torch's pytrees, so that `tree_map`, `torch.func` and checkpointing see its values.

In: nothing. Out: the registration, made when this module is imported; values are the one leaf, the structure goes beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from serrate.tensor.hints import Hints
from serrate.tensor.jagged import JaggedTensor
from serrate.tensor.structure import Structure
from serrate.tensor.torch_private import register_container


def _flatten(jt: JaggedTensor) -> tuple[list[Any], tuple[Structure, Hints]]:
    return [jt.values], (jt.structure, jt.hints)


def _unflatten(leaves: Iterable[Any], beside: tuple[Structure, Hints]) -> JaggedTensor:
    (values,) = leaves
    structure, hints = beside
    if isinstance(values, Tensor):
        return JaggedTensor(values, structure.to(values.device), hints=hints)
    # torch fills trees with placeholders that are no tensors (specs, None for a missing gradient) and must get them back.
    jt = JaggedTensor.__new__(JaggedTensor)
    jt._values, jt._structure, jt._hints = values, structure, hints
    return jt


register_container(JaggedTensor, _flatten, _unflatten)
