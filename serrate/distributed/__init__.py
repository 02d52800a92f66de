"""Tensors whose partitions are spread over ranks: layouts, conversions between them with gradients, expert parallelism.

layout        who holds which positions, and what each rank sends and receives: pure functions of counts
collectives   rows moved as bytes; counts with a header that ranks compare
blocks        local reordering, by compiled copies
convert       conversions of plain tensors, with gradients
placement     PartitionedShard
tensor        PartitionedTensor; local_ops: what its operations compute on each rank
bounded       exchanges of a fixed size, for which the host waits for nothing
mesh_program  MeshProgram: a fusion whose loop over groups is spread over ranks
expert_parallel  ExpertParallel: the experts of `serrate.nn.MoE` spread over ranks

`torch.distributed` must be initialised, with one process per rank.
"""

from serrate.distributed.expert_parallel import ExpertParallel, expert_parameters, sum_gradients
from serrate.distributed.mesh_program import MeshProgram
from serrate.distributed.placement import PartitionedShard
from serrate.distributed.tensor import PartitionedTensor

__all__ = ["ExpertParallel", "MeshProgram", "PartitionedShard", "PartitionedTensor", "expert_parameters", "sum_gradients"]
