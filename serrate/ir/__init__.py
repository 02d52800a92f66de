"""The grammar of serrate: index expressions, domains and their transforms, values, tile programs, fusions.

In: nothing but torch dtypes. Out: immutable nodes that every later stage reads and rewrites.
"""

from __future__ import annotations

from serrate.ir.domains import IterDomain, IterType, ParallelType
from serrate.ir.fusion import Fusion
from serrate.ir.partition import partition
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.ragged_transforms import combine, cover, product, regroup
from serrate.ir.tensor_domain import TensorDomain
from serrate.ir.transforms import merge, resize, restrict, split, swizzle
from serrate.ir.traversal import traverse
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
    "product",
    "regroup",
    "resize",
    "restrict",
    "split",
    "swizzle",
    "traverse",
]
