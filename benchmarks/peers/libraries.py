"""Peers from other libraries: FBGEMM, Awkward Array and numpy, if installed.

In: a task. Out: methods for it; a missing library is reported with how to install it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import Ragged
from benchmarks.methods import Call, Method, too_large
from benchmarks.tasks import Task, permuted

INSTALL = "pip install 'serrate[peers]'"


def methods(task: Task) -> list[Method]:
    found = []
    if task.kind in _FBGEMM:
        make, values = _FBGEMM[task.kind]
        pads = task.kind in ("mean", "max", "logsumexp", "softmax") or task.name == "sum"
        reason = _missing("fbgemm_gpu") or (too_large(task.data) if pads else "")
        found.append(Method("fbgemm", lambda: _with_fbgemm(make, task), values(task), reason))
    if task.kind in _AWKWARD:
        found.append(Method("awkward", lambda: _with_awkward(task), _of_numpy, _missing("awkward") or _no_numpy_dtype(task)))
    if task.name == "1-D sum":
        found.append(
            Method("np.add.reduceat", lambda: _reduceat(task.data), _of_numpy, _missing("numpy") or _no_numpy_dtype(task))
        )
    return found


def _missing(module: str) -> str:
    return "" if importlib.util.find_spec(module) else f"not installed ({INSTALL})"


def _no_numpy_dtype(task: Task) -> str:
    return "numpy has no bfloat16" if task.data.values.dtype == torch.bfloat16 else ""


def _of_numpy(result: Any) -> Tensor:
    return torch.as_tensor(result)


# --- FBGEMM --------------------------------------------------------------------------------------------------------------


def _with_fbgemm(make: Callable[[Any, Task], Call], task: Task) -> Call:
    try:
        import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
    except (ImportError, OSError) as error:
        # a build for another torch version is found but does not load
        raise RuntimeError(f"does not load: {str(error).splitlines()[0]}") from error
    return make(torch.ops.fbgemm, task)


def _columns(values: Tensor) -> Tensor:
    """[total, 1] for [total]: FBGEMM needs an inner dim."""
    return values if values.dim() > 1 else values[:, None]


def _padded(fbgemm: Any, data: Ragged, filler: float = 0.0) -> Callable[[], Tensor]:
    values, longest = _columns(data.values), data.longest
    return lambda: fbgemm.jagged_to_padded_dense(values, [data.offsets], [longest], filler)


def _sum(fbgemm: Any, task: Task) -> Call:
    data = task.data
    if data.values.dim() == 1:
        return lambda: fbgemm.segment_sum_csr(1, data.offsets, data.values)
    dense = _padded(fbgemm, data)
    return lambda: dense().sum(dim=1)


def _mean(fbgemm: Any, task: Task) -> Call:
    dense, lengths = _padded(fbgemm, task.data), task.data.lengths[:, None].to(task.data.values.dtype)
    return lambda: dense().sum(dim=1) / lengths


def _max(fbgemm: Any, task: Task) -> Call:
    dense = _padded(fbgemm, task.data, float("-inf"))
    return lambda: dense().amax(dim=1)


def _logsumexp(fbgemm: Any, task: Task) -> Call:
    dense = _padded(fbgemm, task.data, float("-inf"))
    return lambda: torch.logsumexp(dense(), dim=1)


def _softmax(fbgemm: Any, task: Task) -> Call:
    values, offsets, longest = _columns(task.data.values), task.data.offsets, task.data.longest
    return lambda: fbgemm.jagged_softmax(values, offsets, longest)


def _to_padded(fbgemm: Any, task: Task) -> Call:
    return _padded(fbgemm, task.data)


def _from_padded(fbgemm: Any, task: Task) -> Call:
    offsets, total, dense = task.data.offsets, task.data.values.shape[0], task.operands[0]
    return lambda: fbgemm.dense_to_jagged(dense, [offsets], total)


def _add(fbgemm: Any, task: Task) -> Call:
    values, offsets = _columns(task.data.values), task.data.offsets
    dense = task.operands[0] if task.data.values.dim() > 1 else task.operands[0][..., None]
    return lambda: fbgemm.jagged_dense_elementwise_add(values, [offsets], dense)


def _permute(fbgemm: Any, task: Task) -> Call:
    # it moves single elements, so a position counts once per feature
    order = torch.tensor(permuted(task.data.rows), dtype=torch.int32)
    lengths, values = (task.data.lengths * task.data.values.shape[1])[:, None], task.data.values.view(-1)
    return lambda: fbgemm.permute_2D_sparse_data(order, lengths, values, None, None)


def _matmul(fbgemm: Any, task: Task) -> Call:
    values, offsets, longest = task.data.values, task.data.offsets, task.data.longest
    return lambda: fbgemm.jagged_dense_bmm(values, offsets, task.operands[0], longest)


def _as_is(task: Task) -> Callable[[Any], Tensor]:
    return lambda result: result


def _first(task: Task) -> Callable[[Any], Tensor]:
    """The values of a (values, offsets) pair, in their original shape."""
    return lambda result: result[0].view(-1, *task.data.values.shape[1:])


_FBGEMM: dict[str, tuple[Callable[[Any, Task], Call], Callable[[Task], Callable[[Any], Tensor]]]] = {
    "sum": (_sum, _as_is),
    "mean": (_mean, _as_is),
    "max": (_max, _as_is),
    "logsumexp": (_logsumexp, _as_is),
    "softmax": (_softmax, _first),
    "to_padded": (_to_padded, _as_is),
    "from_padded": (_from_padded, _first),
    "jagged + dense": (_add, lambda task: lambda result: result.view(task.operands[0].shape)),
    "block permute": (_permute, lambda task: lambda result: result[1].view(task.data.values.shape)),
    "grouped matmul": (_matmul, lambda task: lambda result: result[0]),
}


# --- Awkward Array and numpy ---------------------------------------------------------------------------------------------


def _with_awkward(task: Task) -> Call:
    import awkward

    index, operands = awkward.index.Index64, task.operands
    rows = awkward.contents.ListOffsetArray(
        index(task.data.offsets.numpy()), awkward.contents.NumpyArray(task.data.values.numpy())
    )
    if task.kind == "two-level sum":
        rows, operands = awkward.contents.ListOffsetArray(index(operands[0].numpy()), rows), ()
    array, function = awkward.Array(rows), _AWKWARD[task.kind]
    return lambda: awkward.to_numpy(function(awkward, array, *operands))


def _awkward_pointwise(awkward: Any, array: Any, scale: float, bias: Tensor) -> Any:
    import numpy

    return awkward.flatten(numpy.maximum(array * numpy.float32(scale) + bias.numpy()[None, None, :], numpy.float32(0)))


def _awkward_softmax(awkward: Any, array: Any) -> Any:
    import numpy

    exponentials = numpy.exp(array - awkward.max(array, axis=1)[:, None])
    return awkward.flatten(exponentials / awkward.sum(exponentials, axis=1)[:, None])


def _awkward_logsumexp(awkward: Any, array: Any) -> Any:
    import numpy

    top = awkward.max(array, axis=1)
    return numpy.log(awkward.sum(numpy.exp(array - top[:, None]), axis=1)) + top


_AWKWARD: dict[str, Callable[..., Any]] = {
    "sum": lambda awkward, array: awkward.sum(array, axis=1),
    "mean": lambda awkward, array: awkward.mean(array, axis=1),
    "max": lambda awkward, array: awkward.max(array, axis=1),
    "two-level sum": lambda awkward, array: awkward.sum(awkward.sum(array, axis=2), axis=1),
    "pointwise": _awkward_pointwise,
    "softmax": _awkward_softmax,
    "logsumexp": _awkward_logsumexp,
}


def _reduceat(data: Ragged) -> Call:
    import numpy

    values, starts = data.values.numpy(), data.offsets[:-1].numpy()
    return lambda: numpy.add.reduceat(values, starts)
