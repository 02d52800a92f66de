"""The grammar of serrate: index expressions, domains and their transforms, values, tile programs, fusions.

In: nothing but torch dtypes. Out: immutable nodes that every later stage reads and rewrites.
"""

from serrate.ir.domains import IterDomain, IterType, ParallelType, RaggedIterDomain
from serrate.ir.draw import draw, draw_fusion
from serrate.ir.fusion import Fusion, TensorView
from serrate.ir.transforms import combine, cover, merge, partition, restrict, split

__all__ = [
    "Fusion",
    "IterDomain",
    "IterType",
    "ParallelType",
    "RaggedIterDomain",
    "TensorView",
    "combine",
    "cover",
    "draw",
    "draw_fusion",
    "merge",
    "partition",
    "restrict",
    "split",
]
