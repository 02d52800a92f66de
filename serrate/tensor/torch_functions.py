"""torch functions that the container implements itself (`torch.cat([jt, jt])`, `torch.zeros_like(jt)`), and torch's pytrees.

In: torch functions, and pytrees with ragged tensors in them. Out: implementations, registered on import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from serrate.errors import CallError
from serrate.tensor.hints import Hints
from serrate.tensor.jagged import JaggedTensor, install_operators, trusted
from serrate.tensor.joining import cat, stack
from serrate.tensor.keyed_tensor import KeyedJaggedTensor
from serrate.tensor.positions import compact
from serrate.tensor.reshaping import movedim_order, split_like
from serrate.tensor.structure import Structure
from serrate.tensor.sync import host_copy
from serrate.tensor.torch_private import register_container


def _tensor_split(
    input: JaggedTensor, indices_or_sections: int | Sequence[int] | Tensor, dim: int = 0
) -> tuple[Tensor | JaggedTensor, ...]:
    def cut(whole: Tensor) -> Sequence[Tensor]:
        return torch.tensor_split(whole, indices_or_sections)

    return tuple(map(input._wrap, split_like(input.values, input.structure, input._dim(dim), "tensor_split", cut)))


def _split(tensor: JaggedTensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor | JaggedTensor, ...]:
    return tensor.split(split_size_or_sections, dim)


def _movedim(input: JaggedTensor, source: int | Sequence[int], destination: int | Sequence[int]) -> JaggedTensor:
    return input.permute(*movedim_order(input.ndim, source, destination))


def _like(function: Callable[..., Tensor]) -> Callable[..., JaggedTensor]:
    def made(input: JaggedTensor, *args: Any, **kwargs: Any) -> JaggedTensor:
        if not args and not kwargs:
            # The same shape, on the same device.
            return trusted(function(input._values), input._structure)
        values = function(input._values, *args, **kwargs)
        return JaggedTensor(values, input._structure.to(values.device))

    return made


def _compared(what: str, close: Callable[..., Tensor]) -> Callable[..., bool]:
    def same(input: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
        for each in (input, other):
            if not isinstance(each, JaggedTensor):
                raise CallError(
                    f"{what} compares two ragged tensors, got a {type(each).__name__}: compare jt.to_padded() or rows"
                )
        one, two = input.structure, other.structure
        if input.ndim != other.ndim or one.ahead != two.ahead or not one.same_rows(two, why=what):
            return False
        (mine, _), (theirs, _) = (compact(jt.values, jt.structure, what) for jt in (input, other))
        return mine.shape == theirs.shape and bool(host_copy(close(mine, theirs, *args, **kwargs).all(), what))

    return same


def _with_gradients(results: Any, gradients: Any) -> tuple[Any, Any]:
    """Tensors in place of ragged ones, for the results and their gradients that torch's autograd is given."""
    if gradients is None:
        return _values_of(results), None
    every = [results] if isinstance(results, JaggedTensor | Tensor) else list(results)
    given = [gradients] if isinstance(gradients, JaggedTensor | Tensor) else list(gradients)
    if len(every) != len(given):
        return _values_of(every), _values_of(given)  # torch says what is wrong
    pairs = [x.with_gradient(g) if isinstance(x, JaggedTensor) else (x, g) for x, g in zip(every, given, strict=True)]
    return [x for x, _ in pairs], [g for _, g in pairs]


def _values_of(given: Any) -> Any:
    """Tensors in place of ragged ones, in a single argument of torch's autograd or in a sequence."""
    if isinstance(given, Sequence):
        return [_values_of(each) for each in given]
    return given.values if isinstance(given, JaggedTensor) else given


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> tuple[Any, ...]:
    wanted = [inputs] if isinstance(inputs, JaggedTensor | Tensor) else list(inputs)
    results, gradients = _with_gradients(outputs, grad_outputs)
    found = torch.autograd.grad(results, _values_of(wanted), gradients, **options)
    pairs = zip(found, wanted, strict=True)
    return tuple(g.with_values(x) if isinstance(g, JaggedTensor) and x is not None else x for x, g in pairs)


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
    results, gradients = _with_gradients(tensors, grad_tensors)
    named = {name: _values_of(value) for name, value in options.items()}
    torch.autograd.backward(results, gradients, *args, **named)


install_operators(
    {
        torch.autograd.grad: _grad,
        torch.autograd.backward: _backward,
        torch.cat: cat,
        torch.concat: cat,
        torch.concatenate: cat,
        torch.stack: stack,
        torch.hstack: lambda tensors: cat(tensors, 1),
        torch.vstack: lambda tensors: cat(tensors, 0),
        torch.row_stack: lambda tensors: cat(tensors, 0),
        torch.column_stack: lambda tensors: cat(tensors, 1),
        torch.dstack: lambda tensors: cat([x.unsqueeze(2) if x.dim() == 2 else x for x in tensors], 2),
        torch.split: _split,
        torch.chunk: lambda input, chunks, dim=0: input.chunk(chunks, dim),
        torch.tensor_split: _tensor_split,
        torch.unbind: lambda input, dim=0: input.unbind(dim),
        torch.permute: lambda input, dims: input.permute(*dims),
        torch.transpose: lambda input, dim0, dim1: input.transpose(dim0, dim1),
        torch.swapaxes: lambda input, axis0, axis1: input.transpose(axis0, axis1),
        torch.swapdims: lambda input, dim0, dim1: input.transpose(dim0, dim1),
        torch.movedim: _movedim,
        torch.moveaxis: _movedim,
        torch.flatten: lambda input, start_dim=0, end_dim=-1: input.flatten(start_dim, end_dim),
        torch.select: lambda input, dim, index: input.select(dim, index),
        torch.index_select: lambda input, dim, index: input.index_select(dim, index),
        torch.unsqueeze: lambda input, dim: input.unsqueeze(dim),
        torch.squeeze: lambda input, dim: input.squeeze(dim),
        torch.numel: lambda input: input.numel(),
        torch.is_floating_point: lambda input: input.dtype.is_floating_point,
        torch.is_complex: lambda input: input.dtype.is_complex,
        torch.clone: lambda input: input.clone(),
        torch.detach: lambda input: input.detach(),
        torch.equal: _compared("torch.equal", torch.eq),
        torch.allclose: _compared("torch.allclose", torch.isclose),
        **{
            function: _like(function)
            for function in (
                torch.zeros_like,
                torch.ones_like,
                torch.full_like,
                torch.empty_like,
            )
        },
    }
)


def _flatten(jt: JaggedTensor) -> tuple[list[Any], tuple[Structure, Hints]]:
    return [jt.values], (jt.structure, jt.hints)


def _unflatten(leaves: Iterable[Any], beside: tuple[Structure, Hints]) -> JaggedTensor:
    (values,) = leaves
    structure, hints = beside
    if isinstance(values, Tensor):
        return JaggedTensor(values, structure.to(values.device), hints=hints)
    # torch puts placeholders in place of tensors (specs, None for a missing gradient) and expects them back unchanged.
    jt = JaggedTensor.__new__(JaggedTensor)
    jt._values, jt._structure, jt._hints = values, structure, hints
    return jt


register_container(JaggedTensor, _flatten, _unflatten, ("values",))


def _flatten_keyed(keyed: KeyedJaggedTensor) -> tuple[list[Any], tuple[tuple[str, ...], tuple[int, ...]]]:
    return [keyed.flat, keyed.weights], (keyed.keys(), keyed.rows_per_key)


def _unflatten_keyed(leaves: Iterable[Any], beside: tuple[tuple[str, ...], tuple[int, ...]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor._trusted(*beside, *leaves)


register_container(KeyedJaggedTensor, _flatten_keyed, _unflatten_keyed, ("flat", "weights"))
