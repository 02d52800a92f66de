"""torch's names for what joins, cuts and reorders: `torch.cat([jt, jt])` is `serrate.cat([jt, jt])`.

In: nothing. Out: the operators, installed when this module is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serrate.tensor.jagged import JaggedTensor, install_operators
from serrate.tensor.joining import cat, stack
from serrate.tensor.reordering import moved
from serrate.tensor.splitting import cut_as


def _chunk(input: JaggedTensor, chunks: int, dim: int = 0) -> tuple[Tensor | JaggedTensor, ...]:
    pieces = cut_as(input.values, input.structure, input._dim(dim), "chunk", lambda whole: whole.chunk(chunks))
    return tuple(map(input._piece, pieces))


def _tensor_split(
    input: JaggedTensor, indices_or_sections: int | Sequence[int] | Tensor, dim: int = 0
) -> tuple[Tensor | JaggedTensor, ...]:
    def cut(whole: Tensor) -> Sequence[Tensor]:
        return torch.tensor_split(whole, indices_or_sections)

    return tuple(map(input._piece, cut_as(input.values, input.structure, input._dim(dim), "tensor_split", cut)))


def _split(tensor: JaggedTensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor | JaggedTensor, ...]:
    return tensor.split(split_size_or_sections, dim)


def _movedim(input: JaggedTensor, source: int | Sequence[int], destination: int | Sequence[int]) -> JaggedTensor:
    return input.permute(*moved(input.ndim, source, destination))


install_operators(
    {
        torch.cat: cat,
        torch.concat: cat,
        torch.concatenate: cat,
        torch.stack: stack,
        torch.split: _split,
        torch.chunk: _chunk,
        torch.tensor_split: _tensor_split,
        torch.unbind: lambda input, dim=0: input.unbind(dim),
        torch.permute: lambda input, dims: input.permute(*dims),
        torch.transpose: lambda input, dim0, dim1: input.transpose(dim0, dim1),
        torch.swapaxes: lambda input, axis0, axis1: input.transpose(axis0, axis1),
        torch.swapdims: lambda input, dim0, dim1: input.transpose(dim0, dim1),
        torch.movedim: _movedim,
        torch.moveaxis: _movedim,
        torch.flatten: lambda input, start_dim=0, end_dim=-1: input.flatten(start_dim, end_dim),
    }
)
