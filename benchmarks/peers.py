"""What a user would call instead: torch's own ways to work on rows of different lengths.

Comes in: the work's tensors. Goes out: peers by name, each a callable that returns a fresh result, or why there is none.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmarks.data import Ragged


@dataclass(frozen=True)
class Peer:
    """`values` turns a result into the shape the hand-written one has; it is not timed."""

    name: str
    call: Callable[[], Tensor] | None
    values: Callable[[Tensor], Tensor] = lambda result: result
    reason: str = ""


def sum_ragged(data: Ragged) -> list[Peer]:
    values, offsets, rows = data.values, data.offsets, data.rows
    indices, row_of = torch.arange(values.shape[0]), _row_of(data)
    return [
        _nested(data, lambda nested: nested.sum(dim=1), lambda result: result),
        _padded(data, 0.0, lambda padded, mask: padded.sum(dim=1), lambda result: result),
        Peer("embedding_bag", lambda: functional.embedding_bag(indices, values, offsets, mode="sum", include_last_offset=True)),
        Peer("index_add_", lambda: values.new_zeros(rows, values.shape[1]).index_add_(0, row_of, values)),
        Peer("segment_reduce", lambda: torch.segment_reduce(values, "sum", offsets=offsets)),
    ]


def pointwise(data: Ragged, scale: float, bias: Tensor) -> list[Peer]:
    return [
        _nested(data, lambda nested: torch.relu(nested * scale + bias), _nested_values, pads=False),
        _padded(data, 0.0, lambda padded, mask: torch.relu(padded * scale + bias)),
        Peer("flat values", lambda: torch.relu(data.values * scale + bias)),
    ]


def softmax(data: Ragged) -> list[Peer]:
    values, rows, row_of = data.values, data.rows, _row_of(data)

    def segments() -> Tensor:
        shifted = values - torch.segment_reduce(values, "max", offsets=data.offsets)[row_of]
        exponentials = shifted.exp_()
        return exponentials / values.new_zeros(rows, values.shape[1]).index_add_(0, row_of, exponentials)[row_of]

    return [
        _nested(data, lambda nested: torch.softmax(nested, dim=1), _nested_values),
        _padded(data, float("-inf"), lambda padded, mask: torch.softmax(padded, dim=1)),
        Peer("segments", segments),
    ]


def layer_norm(data: Ragged, epsilon: float) -> list[Peer]:
    values, features, row_of = data.values, data.values.shape[1], _row_of(data)
    counts = (data.lengths * features).to(values.dtype)

    def per_row(terms: Tensor) -> Tensor:
        return (values.new_zeros(data.rows).index_add_(0, row_of, terms.sum(1)) / counts)[row_of, None]

    def segments() -> Tensor:
        centred = values - per_row(values)
        return centred * torch.rsqrt(per_row(centred * centred) + epsilon)

    def masked(padded: Tensor, mask: Tensor) -> Tensor:
        centred = (padded - padded.sum(dim=(1, 2), keepdim=True) / counts[:, None, None]) * mask
        return centred * torch.rsqrt((centred * centred).sum(dim=(1, 2), keepdim=True) / counts[:, None, None] + epsilon)

    return [
        _nested(data, lambda nested: functional.layer_norm(nested, nested.shape[1:], eps=epsilon), _nested_values),
        _padded(data, 0.0, masked),
        Peer("segments", segments),
    ]


def grouped_matmul(data: Ragged, weights: Tensor) -> list[Peer]:
    tokens, bounds, ends = data.values, data.offsets.tolist(), data.offsets[1:].to(torch.int32)

    def per_group() -> Tensor:
        out = tokens.new_empty(tokens.shape[0], weights.shape[2])
        for group, (start, end) in enumerate(itertools.pairwise(bounds)):
            torch.mm(tokens[start:end], weights[group], out=out[start:end])
        return out

    if hasattr(functional, "grouped_mm"):
        grouped = Peer("F.grouped_mm", lambda: functional.grouped_mm(tokens, weights, offs=ends))
    else:
        grouped = Peer("F.grouped_mm", None, reason=f"not in torch {torch.__version__}")
    return [
        Peer("torch.mm per group", per_group),
        grouped,
        _padded(data, 0.0, lambda padded, mask: torch.bmm(padded, weights), name="padded bmm"),
    ]


def _row_of(data: Ragged) -> Tensor:
    return torch.repeat_interleave(torch.arange(data.rows), data.lengths)


def _too_large(data: Ragged) -> str:
    """Why the padded data would not fit beside its copies, or nothing."""
    size = data.rows * data.longest * data.values.shape[1] * data.values.element_size()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"pads to {size / 1e9:.0f} GB" if size > memory / 8 else ""


def _nested_values(result: Tensor) -> Tensor:
    return result.values()


def _nested(data: Ragged, function: Callable[[Tensor], Tensor], values: Callable[[Tensor], Tensor], pads: bool = True) -> Peer:
    name = "NestedTensor"
    # asked for, torch may take memory until the system ends the process, so it is not tried
    if pads and (reason := _too_large(data)):
        return Peer(name, None, reason=reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # without the longest length it pads every row to the total of all rows
        nested = torch.nested.nested_tensor_from_jagged(data.values, data.offsets, min_seqlen=1, max_seqlen=data.longest)
    return Peer(name, lambda: function(nested), values)


def _padded(
    data: Ragged,
    filler: float,
    function: Callable[[Tensor, Tensor], Tensor],
    values: Callable[[Tensor], Tensor] | None = None,
    name: str = "padded + mask",
) -> Peer:
    """The data is padded and filled beforehand, as a user of this peer would hold it: only the work itself is timed."""
    if reason := _too_large(data):
        return Peer(name, None, reason=reason)
    is_element = torch.arange(data.longest) < data.lengths[:, None]
    padded = data.values.new_full((data.rows, data.longest, data.values.shape[1]), filler)
    padded[is_element] = data.values
    mask = is_element[:, :, None]
    return Peer(name, lambda: function(padded, mask), values or (lambda result: result[is_element]))
