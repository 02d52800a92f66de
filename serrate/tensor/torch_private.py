"""The only module of this package that uses private torch API, each use with its reason.

In: a class with its flatten and unflatten; rows in one buffer; a tensor. Out: a pytree registration; a NestedTensor; a version
counter, and other facts about the tensor.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# torch has no public pytree module (as of 2.13); `torch.export.register_dataclass` is public but takes
# only dataclasses, and would make the structure a leaf. `torch.func` and `torch.export` see containers only through this.
from torch.utils._pytree import GetAttrKey, register_pytree_node

PROFILER: Any = torch.autograd.profiler
"""Every call reads its `_is_profiler_enabled`; the public query takes ten times as long (100 ns)."""

GROUPED_MM: Callable[..., Any] | None = getattr(torch, "_grouped_mm", None)
"""What `torch.nn.functional.grouped_mm` calls; only this function dispatches to `__torch_function__`."""


def register_container(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
    leaves: Sequence[str],
) -> None:
    """Registers a class with torch's pytrees; `flatten` returns its leaves and the context that rebuilds it from them. `leaves`
    are the attributes that paths name.

    >>> from torch.utils._pytree import tree_map
    >>> class Pair:
    ...     def __init__(self, a, b):
    ...         self.a, self.b = a, b
    >>> register_container(Pair, lambda x: ([x.a, x.b], None), lambda leaves, context: Pair(*leaves), ("a", "b"))
    >>> tree_map(lambda leaf: leaf + 1, Pair(1, 2)).b
    3
    """

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        found, context = flatten(value)
        return [(GetAttrKey(name), leaf) for name, leaf in zip(leaves, found, strict=True)], context

    name = f"{cls.__module__}.{cls.__qualname__}"
    register_pytree_node(cls, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=flatten_with_keys)


def fields_of(*names: str) -> dict[str, dataclasses.Field[Any]]:
    """What makes a class a dataclass to functions that take dataclasses apart; its constructor takes these names.

    >>> class Pair:
    ...     __dataclass_fields__ = fields_of("a", "b")
    ...     def __init__(self, a, b):
    ...         self.a, self.b = a, b
    >>> dataclasses.replace(Pair(1, 2), b=3).b
    3
    """
    made: type = dataclasses.make_dataclass("Fields", names)
    return {field.name: field for field in dataclasses.fields(made)}


def is_recorded(tensor: Tensor) -> bool:
    """Whether a CUDA graph records what is done with this tensor now. What is derived from offsets must then be derived again,
    because every replay may find other offsets. (A public query, but torch built for CPUs has only a placeholder that raises.)

    >>> is_recorded(torch.zeros(2))
    False
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The address of a GPU's current stream; 0 on a CPU. Every call asks for it. (The public function creates an object, which
    takes ten times as long.)

    >>> stream_of(torch.device("cpu"))
    0
    """
    if device.type != "cuda":
        return 0
    if _RAW_STREAM is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(_RAW_STREAM(torch.cuda.current_device() if device.index is None else device.index))


_RAW_STREAM = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Missing in a torch that was built for CPUs."""


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is wrapped by a `torch.func` transform (vmap, grad, jvp); torch has no public function for this.

    >>> is_transformed(torch.zeros(2))
    False
    """
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is one of a batch of gradients (`is_grads_batched`), which has no memory of its own; torch has no public
    function for this.

    >>> is_batched(torch.zeros(2))
    False
    """
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def nested_view(values: Tensor, sizes: Tensor, starts: Tensor) -> Tensor:
    """A strided NestedTensor that shares contiguous values: row k has shape `sizes[k]` and starts at `starts[k]`.

    The public constructors of this layout copy every row; this one makes a view, and gradients flow through it.

    >>> [row.tolist() for row in nested_view(torch.arange(3.0), torch.tensor([[1], [2]]), torch.tensor([0, 1])).unbind()]
    [[0.0], [1.0, 2.0]]
    """
    strides = torch.ones_like(sizes)
    for dim in reversed(range(sizes.shape[1] - 1)):
        strides[:, dim] = strides[:, dim + 1] * sizes[:, dim + 1]
    view: Tensor = torch._nested_view_from_buffer(values.view(-1), sizes, strides, starts)
    return view


def in_transform() -> bool:
    """Whether a `torch.func` transform (grad, vmap, jvp) runs now; torch has no public function for this.

    >>> in_transform()
    False
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_captured() -> bool:
    """Whether a dispatch mode records operations instead of running them, or runs them on tensors without memory, as `make_fx`,
    `torch.export` and `FakeTensorMode` do. torch has no public function for this.

    >>> is_captured()
    False
    """
    # Most calls run under no mode. Other modes, such as those that count operations, do no harm.
    return torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(k) is not None for k in _CAPTURING)


_CAPTURING = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)


def leave_graph(function: types.FunctionType) -> None:
    """Makes `torch.compile` break its graph at a function, and run it and everything it calls uncompiled.

    `torch.compiler.disable` does the same, but it imports all of `torch._dynamo`, which takes a second, and wraps the function,
    which costs a microsecond per call.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "serrate compiles its own programs"  # type: ignore[attr-defined]


def in_dual_level() -> bool:
    """Whether tensors may have forward-mode tangents now; asking each tensor at every call would cost too much.

    >>> with torch.autograd.forward_ad.dual_level():
    ...     in_dual_level()
    True
    """
    return forward_ad._current_level >= 0


def has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor has a forward-mode tangent.

    >>> with torch.autograd.forward_ad.dual_level():
    ...     x = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
    ...     has_tangent(x), has_tangent(x.detach())
    (True, False)
    """
    return in_dual_level() and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def version(tensor: Tensor) -> int:
    """The version counter of a tensor, for which torch has no public name; 0 for inference tensors, which have none.

    >>> x = torch.zeros(2)
    >>> version(x), version(x.add_(1))
    (0, 1)
    """
    try:
        return tensor._version
    except RuntimeError:
        return 0


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each of some tensors was written to; asked in every call.

    >>> versions([torch.zeros(2), torch.zeros(2).add_(1)])
    [0, 1]
    """
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [version(tensor) for tensor in tensors]


def is_any_autocast_enabled() -> bool:
    """Whether autocast is on for any device type; the public function asks for one at a time.

    >>> is_any_autocast_enabled()
    False
    """
    return bool(torch._C._is_any_autocast_enabled())


def default_store() -> Any | None:
    """The store that the default process group was started with; torch has no public function for it. None without a group.

    >>> default_store() is None
    True
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.distributed_c10d._get_default_store()
