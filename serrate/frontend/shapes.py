"""Shapes in messages: `(3, r0, 64)`, with ragged dims numbered from 0.

In: traced tensors. Out: text. Messages raised while tracing show the sizes of the call being traced; messages raised by later
calls of the same program show `B` for the number of rows and `?` for other sizes that may vary.
"""

from __future__ import annotations

from serrate.ir.domains import IterDomain, shape_text, size_text
from serrate.ir.expr import Environment
from serrate.ir.fusion import Fusion
from serrate.ir.view import TensorView


def shown(x: TensorView, *, later: bool = False) -> str:
    """The shape of a traced tensor; `later` for a message of later calls.

    >>> import torch
    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     rows = ops.as_nested(f.input((None, 4), torch.float32), f.input((None,), torch.int64))
    >>> shown(rows), shown(rows, later=True)
    ('(B, r0, 4)', '(B, r0, 4)')
    """
    return shape_text(x.domains, None if later else x.fusion.sizes)


def size_shown(fusion: Fusion, domain: IterDomain) -> str:
    """The size of a dim, if it is known."""
    return size_text(domain, fusion.sizes)


def equal_now(fusion: Fusion, a: IterDomain, b: IterDomain) -> bool:
    """Whether two dims have, or may have, equal sizes in the call being traced; the fusion checks later calls."""
    difference = a.extent_expr - b.extent_expr
    if difference.arrays or not difference.symbols <= fusion.sizes.keys():
        return True
    return not difference.evaluate(Environment(fusion.sizes))


def both(a: TensorView, b: TensorView, *, later: bool = False) -> str:
    """The shapes of two operands."""
    return f"{shown(a, later=later)} and {shown(b, later=later)}"
