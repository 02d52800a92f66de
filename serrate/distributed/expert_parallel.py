"""`ExpertParallel`: the experts of `serrate.nn.MoE` spread over the ranks of a mesh.

In: a MoE and a mesh. Out: the same module, which now holds this rank's experts. Each rank routes its own tokens, sends them to
the ranks of their experts (unaligned -> aligned), which process them, and receives the results (aligned -> unaligned).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from serrate.api.jit import jit
from serrate.distributed import bounded, convert
from serrate.distributed.collectives import all_reduce, check_agreement, digest
from serrate.distributed.layout import owned_partitions
from serrate.errors import CallError, PartitionError
from serrate.frontend import ops
from serrate.nn.experts import MoE, MoEOutput, apply_experts, combine, route
from serrate.tensor import JaggedTensor, Structure

EXPERT_PARAMETERS = ("gate", "up", "down")


class ExpertParallel(ParallelStyle):
    """Spreads the experts of a `serrate.nn.MoE` over a one-dimensional mesh; a style for torch's `parallelize_module`.

    Ranks own equally many consecutive experts, or `partitions_per_rank`. The module's parameters `gate`, `up` and `down` become
    this rank's experts; the router stays on every rank. Every token reaches all of its experts: nothing is dropped or padded.

    A layer exchanges counts once and rows twice, and on a GPU the host waits once, for the counts. With `max_tokens`, the most
    choices that a rank may receive, it never waits: messages then have that fixed size for each pair of ranks, and one that does
    not fit raises.

    The output covers this rank's tokens. `load` and the two losses cover the tokens of all ranks, but a rank's backward pass
    computes only its own share of the losses' gradients. So the gradients of experts are complete, and all other gradients must
    be summed over ranks, as in data parallelism; `sum_gradients` does that.
    """

    def __init__(self, partitions_per_rank: Sequence[int] | None = None, max_tokens: int | None = None) -> None:
        super().__init__()
        if max_tokens is not None and max_tokens < 1:
            raise CallError(f"ExpertParallel: max_tokens must be positive, got {max_tokens}")
        self.partitions_per_rank = None if partitions_per_rank is None else tuple(partitions_per_rank)
        self.max_tokens = max_tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MoE) or isinstance(module, MoEOverRanks):
            raise CallError(
                f"ExpertParallel takes a serrate.nn.MoE that is not spread over ranks yet, got {type(module).__name__}"
            )
        if device_mesh.ndim != 1:
            raise PartitionError(f'ExpertParallel takes a mesh of one dim, such as mesh["expert"], got {device_mesh}')
        group = device_mesh.get_group()
        owned = owned_partitions(module.num_experts, group.size(), self.partitions_per_rank)
        # With `max_tokens` no header is read afterwards, so this is where ranks that differ are found.
        facts = {"experts": module.num_experts, "a digest of partitions_per_rank": digest(owned), "top_k": module.top_k}
        facts |= {"embed_dim": module.embed_dim, "max_tokens": self.max_tokens or 0}
        check_agreement("ExpertParallel", facts, torch.device(device_mesh.device_type), group)
        first = sum(owned[: group.rank()])
        for name in EXPERT_PARAMETERS:
            parameter = getattr(module, name)
            if parameter is not None:
                own = parameter.detach()[first : first + owned[group.rank()]].clone()
                setattr(module, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        # As fully_shard does: the module stays the same object, so that parents, hooks and optimisers keep it.
        module.__class__ = MoEOverRanks
        assert isinstance(module, MoEOverRanks)
        module.group, module.owned, module.max_tokens = group, owned, self.max_tokens
        return module


class MoEOverRanks(MoE):
    """A `serrate.nn.MoE` whose experts are spread over ranks; made by `ExpertParallel`."""

    group: dist.ProcessGroup
    owned: tuple[int, ...]
    max_tokens: int | None

    def mixed(self, input: Any) -> MoEOutput:
        if len(self.owned) == 1:
            return super().mixed(input)
        tokens = input.contiguous().values if isinstance(input, JaggedTensor) else input
        rows, offsets, order, weights, chances, z = _dispatch(
            tokens, self.router.weight, self.num_experts, self.top_k, self.normalise
        )
        counts = offsets.diff()
        if self.max_tokens is None:
            exchange = convert.plan_exchange(rows, counts, self.owned, self.group)
            arrived = convert.unaligned_to_aligned(rows, exchange, self.group)
            worked = self._worked(arrived, exchange.blocks.sum(0).to(arrived.device, non_blocking=True))
            back = convert.aligned_to_unaligned(worked, exchange, self.group)
        else:
            slots = bounded.exchange(counts, self.owned, self.max_tokens, rows.shape[0], self.group)
            back = slots.to_unaligned(self._worked(slots.to_aligned(rows), slots.lengths))
        output = _combine(back, order, weights, self.top_k)
        if isinstance(input, JaggedTensor):
            output = input.contiguous().with_values(output)
        return MoEOutput(output, *self._statistics(chances, z, counts, tokens.shape[0]))

    def _worked(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """This rank's experts on the rows that arrived, `lengths[e]` for expert e."""
        if not self.up.shape[0]:
            return rows
        structure = Structure.from_lengths(lengths, total=rows.shape[0], validate=False)
        worked = _experts(JaggedTensor(rows, structure), self.gate, self.up, self.down, self.activation)
        assert isinstance(worked, JaggedTensor)
        return worked.values

    def _statistics(self, chances: Tensor, z: Tensor, counts: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """The losses and loads of all ranks' tokens: one sum over ranks. Gradients are those of this rank's share."""
        own = torch.cat([chances, z[None], z.new_full((1,), tokens), counts.to(z.dtype)]).double()
        everyone = own + (all_reduce(own.detach(), self.group) - own.detach())
        experts = self.num_experts
        sums, z_sum, total, load = torch.split(everyone, [experts, 1, 1, experts])
        count = total.detach().clamp(min=1)  # without tokens, both losses are 0
        balance = (sums / count * load.detach()).sum() * experts / (count * self.top_k).squeeze()
        return balance.to(z.dtype), (z_sum / count).squeeze().to(z.dtype), load.detach().round().long()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, experts {self.owned} over {len(self.owned)} ranks"


def expert_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that are this rank's own: experts that `ExpertParallel` has spread over ranks."""
    for each in module.modules():
        if isinstance(each, MoEOverRanks):
            yield from (p for name, p in each.named_parameters(recurse=False) if name in EXPERT_PARAMETERS)


def sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sums the gradients of every parameter that is not an expert's over the ranks of a mesh: one collective for each dtype."""
    own = {id(p) for p in expert_parameters(module)}
    rest = [p for p in module.parameters() if id(p) not in own and p.requires_grad]
    for p in rest:
        if p.grad is None:
            p.grad = torch.zeros_like(p)  # another rank may have one
    grads = [_stored(p.grad) for p in rest if p.grad is not None]
    for dtype in {grad.dtype for grad in grads}:
        same = [grad for grad in grads if grad.dtype == dtype]
        total = all_reduce(torch.cat([grad.flatten() for grad in same]), mesh.get_group())
        for grad, part in zip(same, torch.split(total, [grad.numel() for grad in same]), strict=True):
            grad.copy_(part.view_as(grad))


def _stored(grad: Tensor) -> Tensor:
    """The memory of a gradient; of one that fully_shard has sharded, this rank's part."""
    return grad._local_tensor if isinstance(grad, DTensor) else grad


@jit
def _dispatch(tokens: Any, router: Any, experts: int, top_k: int, normalise: bool) -> tuple[Any, ...]:
    to = route(tokens, router, experts, top_k, normalise)
    rows = ops.index(tokens, to.order // top_k)
    z = torch.logsumexp(to.logits, -1).square().sum()
    return rows, to.offsets, to.order, to.weights, to.chances.sum(0), z


@jit
def _experts(rows: Any, gate: Any, up: Any, down: Any, activation: str) -> Any:
    return apply_experts(rows, gate, up, down, activation)


@jit
def _combine(worked: Any, order: Any, weights: Any, top_k: int) -> Any:
    return combine(worked, order, weights, top_k)
