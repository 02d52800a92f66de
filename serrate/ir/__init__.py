"""The grammar of serrate: index expressions, domains and their transforms, values, tile programs, fusions.

In: nothing but torch dtypes. Out: immutable nodes that every later stage reads and rewrites.
"""

from serrate.ir.domains import IterDomain, IterType, ParallelType, RaggedIterDomain
from serrate.ir.fusion import Fusion
from serrate.ir.tensor_domain import TensorDomain
from serrate.ir.transforms import combine, cover, merge, partition, restrict, split
from serrate.ir.view import TensorView

__all__ = [
    "Fusion",
    "IterDomain",
    "IterType",
    "ParallelType",
    "RaggedIterDomain",
    "TensorDomain",
    "TensorView",
    "combine",
    "cover",
    "merge",
    "partition",
    "restrict",
    "split",
]
