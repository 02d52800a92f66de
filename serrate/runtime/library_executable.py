"""Library executables: a program that is one call of a vendor library, ready to run.

In: a tile program that a plan has made one `Library` call, and a call's tensors. Out: the program's output, written by torch. The
functions are torch's own. `mm`, with one weight per component, and `scaled_dot_product_attention` run once per row, and need
lengths on the host; `grouped_mm` and `varlen_attn` read offsets on the device, and nothing is copied from there. A function takes
only some dtypes, sizes and devices: `refusal` says why not, before anything runs.

Offsets are read when a call is bound. They may be wrong on a device, where they are checked later, so those that a device reads
are clamped to the rows that exist: no offsets make a call leave its tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from serrate.errors import StrategyError
from serrate.ir.loops import LoopProgram
from serrate.ir.tile import Library, TileProgram
from serrate.ir.values import Read
from serrate.ir.values import Tensor as Described
from serrate.runtime.launch import Execute
from serrate.runtime.memory import InMemory, whole

Run = Callable[..., None]
"""Takes the arguments of a call, and the output."""
ALIGNMENT = 16
"""Bytes that rows of the matrices of `grouped_mm` are a multiple of."""
WIDEST_HEAD = 256
"""The most features of a head that `varlen_attn` takes, and what their number is a multiple of."""
HEAD_STEP = 8


@dataclass(frozen=True)
class VendorFunction:
    """A function of a vendor library."""

    bound: Callable[..., Run]
    """The function for given offsets and keywords."""
    refusal: Callable[[Library, torch.device], str]
    """Why a call cannot run on a device; empty if it can."""


class LibraryExecutable:
    """Runs a library call."""

    def __init__(self, scheduled: TileProgram, call: Library, name: str, header: tuple[str, ...]) -> None:
        self.call = call
        self.program = LoopProgram(name, (), scheduled.inputs, scheduled.outputs, (), tuple(dict.fromkeys(call.rows)), (), header)
        self.source = "\n".join((*(f"# {line}" for line in header), f"{call}\n"))
        given = [read.tensor.memory for read in call.values if isinstance(read, Read)]
        self._places = [self.program.tensors.index(tensor) for tensor in (*given, *call.targets)]
        self._rows = [self.program.arrays.index(array) for array in call.rows]

    def require(self, device: torch.device) -> None:
        """Raises if the call cannot run on a device."""
        why = FUNCTIONS[self.call.function].refusal(self.call, device)
        if why:
            raise StrategyError(f"{self.call.function} {why}")

    def __call__(self, tensors: Sequence[InMemory], arrays: Sequence[InMemory], symbols: Sequence[int]) -> None:
        self.bound(arrays, symbols, tensors[0].device)([], lambda: tensors)

    def sized(self, symbols: Sequence[int], device: torch.device) -> None:
        """Its rows are read when it is bound."""
        return None

    def bound(self, arrays: Sequence[InMemory], symbols: Sequence[int], device: torch.device) -> Execute:
        """The call with everything but its memory."""
        rows = [whole(arrays[k]) for k in self._rows]
        run, places, kind = FUNCTIONS[self.call.function].bound(*rows, **dict(self.call.keywords)), self._places, device.type

        def execute(_: list[int], memory: Callable[[], Sequence[InMemory]]) -> None:
            tensors = memory()
            given = [whole(tensors[k]) for k in places]
            # Gradients are those of the program, and it determines the dtypes that it computes in.
            with torch.no_grad(), torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
                run(*given)

        return execute


# --- grouped matrix products ---------------------------------------------------------------------------------------------


def _mm(offsets: Tensor | None = None, *, transposed: bool) -> Run:
    groups = None if offsets is None else _spans(offsets)

    def run(rows: Tensor, weights: Tensor, out: Tensor) -> None:
        weights = weights.mT if transposed else weights
        if groups is None:
            # The weight of a single component may have a dim for it.
            torch.mm(rows, weights.squeeze(0) if weights.ndim > 2 else weights, out=out)
            return
        for group, (begin, end) in groups:
            torch.mm(rows[begin:end], weights[group], out=out[begin:end])

    return run


def _grouped_mm(offsets: Tensor, *, transposed: bool) -> Run:
    ends: dict[int, Tensor] = {}

    def run(rows: Tensor, weights: Tensor, out: Tensor) -> None:
        if not out.numel():
            return
        total = len(rows)
        if total not in ends:
            ends[total] = _bounds(offsets, total)[1:]
        found = F.grouped_mm(rows, weights.mT if transposed else weights, offs=ends[total])
        # Buffers on a device may be longer than their rows.
        out.copy_(found[: len(out)])

    return run


def _refuses_device(call: Library, device: torch.device) -> str:
    return "" if device.type == "cpu" or not call.rows else "needs lengths on the host, which are not copied from a device"


def _refuses_grouped_mm(call: Library, device: torch.device) -> str:
    if not hasattr(F, "grouped_mm"):
        return "is not in this version of torch"
    rows, out = _argument(call, 0), call.targets[0]
    on_cpu = device.type == "cpu"
    taken = (torch.float32, torch.bfloat16, torch.float16) if on_cpu else (torch.bfloat16,)
    if rows.dtype not in taken:
        return f"takes {_names(taken)} on this device, got {_names((rows.dtype,))}"
    if not on_cpu and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a device of compute capability 8.0 or more"
    for what, tensor in (("rows", rows), ("results", out)):
        size = tensor.storage[-1].extent_expr.value
        if size is None:
            return f"needs to know the width of {what} when it is compiled"
        if size * tensor.dtype.itemsize % ALIGNMENT or not size:
            return f"needs {what} of whole {ALIGNMENT} bytes, and one of {size} elements has {size * tensor.dtype.itemsize}"
    return ""


# --- attention -----------------------------------------------------------------------------------------------------------


def _scaled_dot_product_attention(queries: Tensor, keys: Tensor, *, scale: float, is_causal: bool) -> Run:
    spans = [(own, other) for (_, own), (_, other) in zip(_spans(queries, empty=True), _spans(keys, empty=True), strict=True)]

    def run(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        query, key, value, out = (x.unsqueeze(1) if x.ndim == 2 else x for x in (query, key, value, out))
        for (begin, end), (first, last) in spans:
            if begin >= end:
                continue
            if first >= last:
                out[begin:end].zero_()
                continue
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query[begin:end], key[first:last], value[first:last]))
            found = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
            out[begin:end].copy_(found.squeeze(0).transpose(0, 1))

    return run


def _varlen_attn(queries: Tensor, keys: Tensor, *, scale: float, is_causal: bool) -> Run:
    from torch.nn.attention.varlen import varlen_attn  # imported here because it takes long, and few use it

    bounds: dict[tuple[int, int], list[Tensor]] = {}

    def run(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        if not out.numel():
            return
        if not len(key):
            out.zero_()
            return
        totals = len(query), len(key)
        if totals not in bounds:
            bounds[totals] = [_bounds(offsets, total) for offsets, total in zip((queries, keys), totals, strict=True)]
        q, k, v = (x.unsqueeze(1) if x.ndim == 2 else x for x in (query, key, value))
        own, other = bounds[totals]
        # The longest rows are no longer than all of them together, which the host knows.
        found = varlen_attn(q, k, v, own, other, *totals, scale=scale, window_size=(-1, 0 if is_causal else -1))
        assert isinstance(found, Tensor)
        out.copy_(found[: len(out)].view(out.shape))

    return run


def _refuses_varlen_attn(call: Library, device: torch.device) -> str:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "is not in this version of torch"
    if not {"scale", "window_size"} <= set(inspect.signature(varlen_attn).parameters):
        return "of this version of torch takes no scale and window"
    query, value = _argument(call, 0), _argument(call, 2)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a CUDA device of compute capability 8.0 or more"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {_names((query.dtype,))}"
    if dict(call.keywords)["is_causal"] and call.rows[0] != call.rows[1]:
        return "aligns the last query of a causal attention with the last key, which are others than the first if rows differ"
    widths = [tensor.storage[-1].extent_expr.value for tensor in (query, value)]
    if widths[0] is None or widths[0] != widths[1] or widths[0] % HEAD_STEP or not 0 < widths[0] <= WIDEST_HEAD:
        return f"needs heads of equally many features, a multiple of {HEAD_STEP} and at most {WIDEST_HEAD}, got {widths}"
    return ""


FUNCTIONS: dict[str, VendorFunction] = {
    "mm": VendorFunction(_mm, _refuses_device),
    "grouped_mm": VendorFunction(_grouped_mm, _refuses_grouped_mm),
    "scaled_dot_product_attention": VendorFunction(_scaled_dot_product_attention, _refuses_device),
    "varlen_attn": VendorFunction(_varlen_attn, _refuses_varlen_attn),
}


# --- rows ----------------------------------------------------------------------------------------------------------------


def _spans(offsets: Tensor, *, empty: bool = False) -> list[tuple[int, tuple[int, int]]]:
    """The number of every row, and where it begins and ends, on the host; rows without elements only if asked for."""
    return [(k, span) for k, span in enumerate(pairwise(offsets.tolist())) if empty or span[0] < span[1]]


def _bounds(offsets: Tensor, total: int) -> Tensor:
    """Offsets as int32 that do not decrease and stay inside the rows that exist."""
    return offsets.clamp(0, total).cummax(0).values.to(torch.int32)


def _argument(call: Library, place: int) -> Described:
    value = call.values[place]
    assert isinstance(value, Read)
    return value.tensor.memory


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
