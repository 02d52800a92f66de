"""One ragged tensor of every composition, for tests of how tensors are shown.

In: nothing. Out: `SHOWN`, tensors by the name of their composition, with the plain rows that each holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from serrate.tensor import JaggedTensor, Structure


def _lengths(*lengths: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(lengths, dtype=dtype)


def _from_levels() -> dict[str, tuple[JaggedTensor, Any]]:
    sides = Structure.from_lengths(_lengths(3, 0, 2))
    both = Structure.independent(Structure.from_lengths(_lengths(2, 1)), Structure.from_lengths(_lengths(1, 0, 2), dim=1))
    deep = [[[torch.tensor([1.0, 2.0])], []], [], [[torch.tensor([3.0]), torch.tensor([4.0, 5.0, 6.0])]]]
    return {
        "one level": (JaggedTensor.from_lengths(torch.arange(5), _lengths(2, 0, 3)), [[0, 1], [], [2, 3, 4]]),
        "int32": (JaggedTensor.from_lengths(torch.arange(3), _lengths(2, 1, dtype=torch.int32)), [[0, 1], [2]]),
        "features": (JaggedTensor.from_lengths(torch.arange(6).view(3, 2), _lengths(2, 1)), [[[0, 1], [2, 3]], [[4, 5]]]),
        "nested": (
            JaggedTensor.from_lengths(torch.arange(11), (_lengths(2, 3), _lengths(4, 4, 1, 0, 2))),
            [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8], [], [9, 10]]],
        ),
        "equal counts": (JaggedTensor.from_lengths(torch.arange(4), torch.tensor([[1, 2], [0, 1]])), [[[0], [1, 2]], [[], [3]]]),
        "three levels": (JaggedTensor.from_nested_list(deep), [[[[1, 2]], []], [], [[[3], [4, 5, 6]]]]),
        "rows of dim 1": (
            JaggedTensor.from_lengths(torch.arange(6).view(2, 3), _lengths(1, 2), dim=1),
            [[[0], [1, 2]], [[3], [4, 5]]],
        ),
        "independent": (
            JaggedTensor(torch.arange(9).view(3, 3), both),
            [[[[0], [], [1, 2]], [[3], [], [4, 5]]], [[[6], [], [7, 8]]]],
        ),
        "product": (
            JaggedTensor(torch.arange(14), sides.with_columns(_lengths(2, 5, 4))),
            [[[0, 1], [2, 3], [4, 5]], [], [[6, 7, 8, 9], [10, 11, 12, 13]]],
        ),
        "product, columns padded": (
            JaggedTensor(torch.arange(25).view(5, 5), sides.with_columns(_lengths(2, 5, 4), packed=False)),
            [[[0, 1], [5, 6], [10, 11]], [], [[15, 16, 17, 18], [20, 21, 22, 23]]],
        ),
        "gaps": (JaggedTensor.from_starts(torch.arange(9), _lengths(1, 5), _lengths(3, 2)), [[1, 2, 3], [5, 6]]),
        "padded": (
            JaggedTensor.from_padded(torch.arange(12).view(3, 4), _lengths(1, 0, 3), format="padded"),
            [[0], [], [8, 9, 10]],
        ),
        "no rows": (JaggedTensor.from_list([]), []),
        "empty rows": (JaggedTensor.from_lengths(torch.zeros(0), _lengths(0, 0)), [[], []]),
    }


SHOWN = _from_levels()


def unread(device: str = "meta") -> JaggedTensor:
    """A tensor whose lengths nobody has read yet."""
    return JaggedTensor.from_csr(torch.zeros(7, 2, device=device), torch.tensor([0, 3, 3, 7], device=device), validate=False)
