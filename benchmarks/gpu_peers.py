"""What else runs the tasks of the GPU table: torch's own functions, NestedTensor, FBGEMM, Helion, hand-written Triton.

In: a task's work. Out: functions that prepare a call, by the method's name; preparing or calling may fail, which the table shows.
"""

from __future__ import annotations

import importlib.util
import inspect
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmarks.gpu_tasks import Data, Work
from benchmarks.gpu_timing import Run

Prepare = Callable[[], Run]
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def family_of(name: str) -> str:
    """The task's name without its sizes."""
    kind = name.removeprefix("short ").removeprefix("1-D ").removesuffix(", kernel")
    return next((each for each in ("attention", "grouped matmul") if kind.startswith(each)), kind)


def peers(name: str, work: Work, *, compiled: bool) -> dict[str, Prepare]:
    """All methods for a task besides serrate's."""
    family = family_of(name)
    found: dict[str, Prepare] = {}
    if family in HANDWRITTEN and work.data.values.ndim > 1:
        found["hand-written Triton"] = partial(_handwritten, family, work)
    if family in TORCH and not (family in REDUCED and work.data.values.dtype != torch.float32):
        method, prepare = TORCH[family]
        found[method] = partial(prepare, work)
    if family in NESTED:
        found["NestedTensor"] = partial(_nested, family, work, False)
        if compiled:
            found["NestedTensor compiled"] = partial(_nested, family, work, True)
    if family in FBGEMM and importlib.util.find_spec("fbgemm_gpu"):
        found["fbgemm"] = partial(_fbgemm, family, work)
    if family in HELION and work.data.values.ndim > 1 and importlib.util.find_spec("helion"):
        found["Helion"] = partial(_helion, family, work)
    return found


# --- hand-written Triton -------------------------------------------------------------------------------------------------

HANDWRITTEN: dict[str, Callable[[Any, Work], Tensor]] = {
    "sum": lambda triton, w: triton.row_sums(w.data.values, w.data.offsets),
    "softmax": lambda triton, w: triton.row_softmax(w.data.values, w.data.offsets),
    "layer norm": lambda triton, w: triton.row_layer_norm(w.data.values, w.data.offsets),
    "grouped matmul": lambda triton, w: triton.grouped_matmul(w.data.values, *w.operands, w.data.offsets),
    "attention": lambda triton, w: triton.attention(w.data.values, *w.operands[:2], w.data.offsets, w.operands[2]),
}


def _handwritten(family: str, work: Work) -> Run:
    from benchmarks import handwritten_triton  # triton is not needed to list the tasks

    return partial(HANDWRITTEN[family], handwritten_triton, work)


# --- torch on the flat values --------------------------------------------------------------------------------------------

REDUCED = ("sum", "mean", "max")


def _segment_reduce(kind: str, work: Work) -> Run:
    return partial(torch.segment_reduce, work.data.values, kind, offsets=work.data.offsets, axis=0)


def _permuted(work: Work) -> Run:
    """A gather of whole positions, with an index for each."""
    count = len(work.data.lengths)
    order = torch.arange(count).view(-1, count // 8).T.reshape(-1) if count % 8 == 0 else torch.arange(count)
    bounds = work.data.offsets.tolist()
    index = torch.cat([torch.arange(bounds[k], bounds[k + 1]) for k in order.tolist()]).to(work.data.values.device)
    return lambda: work.data.values[index]


def _embedding_bag(work: Work) -> Run:
    table, bounds = work.operands[0], work.data.offsets
    return partial(functional.embedding_bag, work.data.values, table, bounds, mode="sum", include_last_offset=True)


def _grouped_mm(work: Work) -> Run:
    ends = work.data.offsets[1:].int()
    return partial(functional.grouped_mm, work.data.values, *work.operands, offs=ends)


def _experts(work: Work) -> Run:
    """The same layer written with F.grouped_mm and torch's indexing."""
    choice, up, down = work.operands
    groups, ones = len(up), torch.ones_like(choice, dtype=torch.int32)

    def run() -> Tensor:
        order = choice.argsort(stable=True)
        counts = torch.zeros(groups, dtype=torch.int32, device=choice.device).scatter_add_(0, choice, ones)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = torch.relu(functional.grouped_mm(work.data.values[order], up, offs=ends))
        out = torch.empty_like(work.data.values)
        out[order] = functional.grouped_mm(hidden, down, offs=ends)
        return out

    return run


def _mixture(work: Work) -> Run:
    """The same layer written with F.grouped_mm and torch's indexing."""
    x, choice, weights, gate, up, down = work.operands
    groups, (count, top_k) = len(up), choice.shape
    flat = choice.flatten()
    ones = torch.ones_like(flat, dtype=torch.int32)

    def run() -> Tensor:
        order = flat.argsort(stable=True)
        counts = torch.zeros(groups, dtype=torch.int32, device=flat.device).scatter_add_(0, flat, ones)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = x[order // top_k]
        hidden = functional.silu(functional.grouped_mm(rows, gate, offs=ends)) * functional.grouped_mm(rows, up, offs=ends)
        out = torch.empty(count * top_k, x.shape[1], dtype=x.dtype, device=x.device)
        out[order] = functional.grouped_mm(hidden, down, offs=ends)
        mixed: Tensor = (out.view(count, top_k, -1) * weights[:, :, None]).sum(1)
        return mixed

    return run


def _varlen(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], most: tuple[int, int], causal: bool) -> Run:
    """`varlen_attn`, whose argument for causal attention has changed between releases."""
    from torch.nn.attention.varlen import varlen_attn

    masked: dict[str, Any] = {}
    if causal:
        asked = inspect.signature(varlen_attn).parameters
        masked = {"is_causal": True} if "is_causal" in asked else {"window_size": (-1, 0)}
    return partial(varlen_attn, q, k, v, *bounds, *most, **masked)


def _varlen_attention(work: Work) -> Run:
    k, v, causal = work.operands
    bounds, longest = work.data.offsets.int(), work.data.longest
    return _varlen(work.data.values, k, v, (bounds, bounds), (longest, longest), causal)


def _varlen_decode(work: Work) -> Run:
    q, v = work.operands
    queries = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    bounds = queries, work.data.offsets.int()
    return _varlen(q[:, :, 0].contiguous(), work.data.values, v, bounds, (1, work.data.longest), False)


TORCH: dict[str, tuple[str, Callable[[Work], Run]]] = {
    **{kind: ("segment_reduce", partial(_segment_reduce, kind)) for kind in REDUCED},
    "block permute": ("torch indexing", _permuted),
    "gather of rows": ("torch indexing", lambda w: lambda: w.operands[0][w.data.values]),
    "embedding bag": ("embedding_bag", _embedding_bag),
    "grouped matmul": ("grouped_mm", _grouped_mm),
    "experts": ("grouped_mm and indexing", _experts),
    "mixture of experts": ("grouped_mm and indexing", _mixture),
    "attention": ("varlen_attn", _varlen_attention),
    "decode attention": ("varlen_attn", _varlen_decode),
}


# --- NestedTensor --------------------------------------------------------------------------------------------------------


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


NESTED: dict[str, Callable[..., Any]] = {
    "sum": lambda x: x.sum(dim=1),
    "mean": lambda x: x.mean(dim=1),
    "max": lambda x: x.amax(dim=1),
    "softmax": lambda x: torch.softmax(x, dim=1),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[1:]),
    "layer norm over features": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "pointwise": lambda x: torch.relu(x * 2.0 + 1.0),
    "to_padded": lambda x: x.to_padded_tensor(0.0),
    "jagged + dense": lambda x, dense: x.to_padded_tensor(0.0) + dense,
    "from_padded": lambda dense, starts, counts: torch.nested.narrow(dense, 1, starts, counts, layout=torch.jagged).contiguous(),
    "attention": _attend,
}


PADDING = ("to_padded", "jagged + dense")
FAULTLESS = 1 << 30
"""Elements of a padded tensor that NestedTensor makes without a fault of the device: 1.45 * 2**30 are too many."""


def _nested(family: str, work: Work, compiled: bool) -> Run:
    """On a NestedTensor that is told its longest row; otherwise it would pad every row to the total of all."""
    data, function = work.data, NESTED[family]
    if family in PADDING and len(data.lengths) * data.longest > FAULTLESS:
        raise ValueError(f"NestedTensor's padding faults, and takes the device along, beyond {FAULTLESS} elements")
    arguments: tuple[Any, ...]
    if family == "from_padded":
        counts = data.offsets.diff()
        arguments = work.operands[0], torch.zeros_like(counts), counts
    elif family == "attention":
        k, v, causal = work.operands
        arguments = as_nested(data, data.values), as_nested(data, k), as_nested(data, v), causal
    else:
        arguments = as_nested(data, data.values), *work.operands
    run = partial(torch.compile(function) if compiled else function, *arguments)
    return partial(_without_gradients, run)


def as_nested(data: Data, values: Tensor) -> Tensor:
    least = int(data.lengths.min())
    return torch.nested.nested_tensor_from_jagged(values, data.offsets, min_seqlen=least, max_seqlen=data.longest)


def _without_gradients(run: Run) -> object:
    with torch.no_grad():
        return run()


# --- other libraries -----------------------------------------------------------------------------------------------------

FBGEMM: dict[str, Callable[[Any, Work], Any]] = {
    "softmax": lambda ops, w: ops.jagged_softmax(w.data.values, w.data.offsets, w.data.longest),
    "to_padded": lambda ops, w: ops.jagged_to_padded_dense(w.data.values[:, None], [w.data.offsets], [w.data.longest], 0.0),
    "jagged + dense": lambda ops, w: ops.jagged_dense_elementwise_add(
        w.data.values[:, None], [w.data.offsets], w.operands[0][:, :, None]
    ),
    "from_padded": lambda ops, w: ops.dense_to_jagged(w.operands[0][:, :, None], [w.data.offsets], len(w.data.values)),
}


def _fbgemm(family: str, work: Work) -> Run:
    import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm

    return partial(FBGEMM[family], torch.ops.fbgemm, work)


HELION = {"sum": "jagged_sum", "softmax": "jagged_softmax", "layer norm": "jagged_layer_norm"}


def _helion(family: str, work: Work) -> Run:
    """The example of that name, written by hand for plain tensors: the same source is a Helion kernel."""
    name = HELION[family]
    text = (EXAMPLES / f"{name}.py").read_text().partition('if __name__ == "__main__"')[0]
    text = text.replace("import serrate.language as hl", "import helion.language as hl").replace(
        "import serrate\n", "import helion\n"
    )
    text = text.replace("@serrate.kernel", '@helion.kernel(autotune_effort="quick")')
    # Helion reads a kernel's source from its file.
    path = Path(tempfile.mkdtemp()) / f"helion_{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return partial(module.manual, work.data.values, work.data.offsets)
