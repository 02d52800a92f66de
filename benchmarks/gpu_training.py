"""The tasks of the GPU table with a backward pass, and what else computes the same gradients.

In: a task of the table. Out: a `Training`: a call that computes the task's result, and then the gradients of its floating-point
inputs. Peers do the same with their own functions: torch's calls on flat values, NestedTensor, padded tensors with a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmarks.gpu_peers import FAULTLESS, NESTED, REDUCED, TORCH, Prepare, as_nested, family_of
from benchmarks.gpu_tasks import TASKS as FORWARD
from benchmarks.gpu_tasks import Data, GpuTask, Work, close
from benchmarks.gpu_timing import Run
from benchmarks.tasks import BACKWARD
from serrate import JaggedTensor


@dataclass(frozen=True, kw_only=True)
class Training(Work):
    """A forward task and its gradients: those of `leaves`, if that of the result is `given`."""

    forward: Work
    leaves: tuple[Tensor, ...]
    given: Tensor

    def gradients(self, result: Any, leaves: tuple[Tensor, ...] | None = None, given: Tensor | None = None) -> tuple[Tensor, ...]:
        """Gradients in memory of their own, as `.grad` has them: that of a sum may be a view of the gradient that arrives."""
        values = result.values if isinstance(result, JaggedTensor) else result
        found = torch.autograd.grad(values, leaves or self.leaves, self.given if given is None else given)
        return tuple(g.contiguous() for g in found)


@dataclass(frozen=True)
class Rule:
    """How a family of tasks is differentiated: the shape of its result, the bytes and FLOPs of both passes relative to those of
    the forward pass, and its function of one row, whose gradients torch computes."""

    shape: Callable[[Work], tuple[int, ...]]
    row: Callable[..., Tensor] | None = None
    moved: float = 0.0
    flops: float = 0.0
    heads: int | None = None
    """How many heads of a position are compared; they are independent of each other."""


def _like_values(work: Work) -> tuple[int, ...]:
    return tuple(work.data.values.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """One sequence, `[length, heads, features]`."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1)


RULES: dict[str, Rule] = {
    # The forward pass reads the rows, the backward pass writes their gradients.
    "sum": Rule(lambda w: (len(w.data.lengths), *w.data.values.shape[1:]), lambda x: x.sum(0), moved=2),
    # Rows are read and results written; then rows (or results) and gradients are read and gradients written.
    "softmax": Rule(_like_values, lambda x: torch.softmax(x, 0), moved=2.5),
    "layer norm": Rule(_like_values, lambda x: functional.layer_norm(x, list(x.shape)), moved=2.5),
    # A product has two gradients. Attention's forward pass multiplies twice and its backward pass five times.
    "grouped matmul": Rule(lambda w: (len(w.data.values), w.operands[0].shape[2]), torch.matmul, flops=3),
    "attention": Rule(_like_values, _attend, flops=3.5, heads=2),
    "embedding bag": Rule(lambda w: (len(w.data.lengths), w.operands[0].shape[1])),
}


def trained(name: str, data: Data) -> Work:
    """The task of this name, without its suffix, with gradients of its floating-point inputs."""
    family = family_of(name)
    rule, forward = RULES[family], FORWARD[name].make(data)
    inputs = (forward.data.values, *forward.operands)
    leaves = tuple(x.requires_grad_() for x in inputs if isinstance(x, Tensor) and x.is_floating_point())
    torch.manual_seed(1)
    given = torch.randn(rule.shape(forward), device=leaves[0].device, dtype=leaves[0].dtype)
    moved = rule.moved * forward.moved
    if family == "embedding bag":
        # Besides the lookup: the gradients of the bags are read, that of the table is written.
        moved = forward.moved + given.nbytes + leaves[0].nbytes
    made = Training(
        forward.data,
        forward.call,
        forward.check,
        moved=moved,
        flops=rule.flops * forward.flops,
        operands=forward.operands,
        arguments=forward.arguments,
        forward=forward,
        leaves=leaves,
        given=given,
    )
    check = partial(_check_table if rule.row is None else _check_rows, made, rule)
    return replace(made, call=lambda *args: made.gradients(forward.call(*args)), check=check)


def _check_rows(work: Training, rule: Rule, found: tuple[Tensor, ...]) -> None:
    """Gradients of some rows, and of what belongs to them, against torch's of the same rows."""
    assert rule.row is not None
    options = [x for x in work.operands if not isinstance(x, Tensor)]
    for k in work.data.sample():
        if work.flops and work.data.lengths[k] > 1 << 15:
            continue
        given, *parts = (_part(work.data, x, k, rule.heads).detach() for x in (work.given, *work.leaves))
        wide = [x.to(torch.float32 if work.flops else torch.float64).requires_grad_() for x in parts]
        result = rule.row(*wide, *options)
        wanted = torch.autograd.grad(result, wide, given.to(result.dtype))
        for own, want in zip(found, wanted, strict=True):
            close(_part(work.data, own, k, rule.heads), want, own.dtype)


def _part(data: Data, x: Tensor, k: int, heads: int | None) -> Tensor:
    """Row k of a tensor with an element for each position, or element k of one with an element for each row."""
    return data.rows(x, [k])[0][:, :heads] if len(x) == len(data.values) else x[k]


def _check_table(work: Training, rule: Rule, found: tuple[Tensor, ...]) -> None:
    """The gradient of a table of whose rows bags are sums."""
    bags = torch.repeat_interleave(torch.arange(len(work.data.lengths)), work.data.lengths).to(work.given.device)
    wanted = torch.zeros_like(work.leaves[0], dtype=torch.float32)
    close(found[0], wanted.index_add_(0, work.data.values, work.given[bags].float()), found[0].dtype)


NAMES = (
    *("sum", "softmax", "layer norm", "embedding bag"),
    *("grouped matmul", "grouped matmul, 128 groups", "grouped matmul, 8 groups"),
    *("attention 64", "attention 64, causal", "attention 128", "attention 128, causal"),
)
TASKS: dict[str, GpuTask] = {name + BACKWARD: replace(FORWARD[name], make=partial(trained, name)) for name in NAMES}


# --- peers ---------------------------------------------------------------------------------------------------------------


def training_peers(name: str, work: Training, *, compiled: bool) -> dict[str, Prepare]:
    """All methods for a task with a backward pass besides serrate's."""
    family = family_of(name.removesuffix(BACKWARD))
    found: dict[str, Prepare] = {}
    if family in TORCH and not (family in REDUCED and work.given.dtype != torch.float32):
        method, prepare = TORCH[family]
        found[method] = partial(_torch, prepare, work)
    if family in PADDED:
        found["padded"] = partial(_padded, family, work)
    if family in NESTED:
        found["NestedTensor"] = partial(_nested, family, work, False)
        if compiled:
            found["NestedTensor compiled"] = partial(_nested, family, work, True)
    return found


def _torch(prepare: Callable[[Work], Run], work: Training) -> Run:
    """A peer of the forward task: torch records it, because its inputs require gradients."""
    run = prepare(work.forward)
    return _checked(work, lambda: work.gradients(run()))


def _checked(work: Training, run: Callable[[], tuple[Tensor, ...]]) -> Run:
    """The run, whose gradients are right: NestedTensor's of softmax are not, for one."""
    work.check(run())
    return run


def _nested(family: str, work: Training, compiled: bool) -> Run:
    function = torch.compile(NESTED[family]) if compiled else NESTED[family]
    options = [x for x in work.operands if not isinstance(x, Tensor)]
    if family != "attention" and len(work.data.lengths) * work.data.longest * work.data.values[0].numel() > FAULTLESS:
        raise ValueError(f"NestedTensor pads here, which faults, and takes the device along, beyond {FAULTLESS} elements")

    def run() -> tuple[Tensor, ...]:
        result = function(*(as_nested(work.data, x) for x in work.leaves), *options)
        if family == "attention":
            result = result.transpose(1, 2)
        return work.gradients(result.values() if result.is_nested else result)

    return _checked(work, run)


MOST_PADDED = 1 << 34
"""Bytes of the largest padded tensor: a pass holds several of them."""


def _padded(family: str, work: Training) -> Run:
    """Rows, and the gradients that arrive, are padded beforehand, as by a user who keeps them so."""
    data, filler = work.data, float("-inf") if family == "softmax" else 0.0
    # Eight positions at a time: attention with a mask has no other fast kernel.
    longest = -(-data.longest // 8) * 8
    size = len(data.lengths) * longest * max(x[:1].nbytes for x in (data.values, work.given))
    if size > MOST_PADDED:
        raise ValueError(f"padded to the longest, the rows take {size / 2**30:.0f} GiB")
    mask = (torch.arange(longest) < data.lengths[:, None]).to(data.values.device)

    def padded(x: Tensor, filler: float = 0.0) -> Tensor:
        if len(x) != len(data.values):
            return x
        made = x.new_full((len(data.lengths), longest, *x.shape[1:]), filler)
        made[mask] = x
        return made

    leaves = tuple(padded(x.detach(), filler).requires_grad_() for x in work.leaves)
    given, options = padded(work.given), [x for x in work.operands if not isinstance(x, Tensor)]

    def run() -> tuple[Tensor, ...]:
        return work.gradients(PADDED[family](mask, *leaves, *options), leaves, given)

    found = zip(run(), work.leaves, strict=True)
    work.check(tuple(own if own.shape == leaf.shape else own[mask] for own, leaf in found))
    return run


def _masked_layer_norm(mask: Tensor, x: Tensor) -> Tensor:
    counts = (mask.sum(1) * x.shape[2]).to(x.dtype)[:, None, None]
    centred = (x - x.sum((1, 2), keepdim=True) / counts) * mask[:, :, None]
    return centred * torch.rsqrt((centred * centred).sum((1, 2), keepdim=True) / counts + 1e-5)


def _masked_attention(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """A causal mask hides the padding of keys from every query that exists."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    hidden = None if causal else mask[:, None, None, :].expand(-1, 1, q.shape[2], -1)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden, is_causal=causal).transpose(1, 2)


PADDED: dict[str, Callable[..., Tensor]] = {
    "sum": lambda mask, x: x.sum(1),
    "softmax": lambda mask, x: torch.softmax(x, 1),
    "layer norm": _masked_layer_norm,
    "grouped matmul": lambda mask, x, weights: torch.bmm(x, weights),
    "attention": _masked_attention,
}
