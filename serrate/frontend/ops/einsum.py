"""`einsum`: sums of products by letters, ragged ones included.

In: an equation and `TensorView`s. Out: a `TensorView`; each product of two tensors is one reduction, as in `matmul`.
A letter is one index: dims that share it have one size, or rows of one structure.
"""

from __future__ import annotations

from collections.abc import Sequence

from serrate.errors import CallError, DtypeError, ShapeError
from serrate.frontend.broadcast import match, under
from serrate.frontend.ops.blocks import permute
from serrate.frontend.ops.common import counting
from serrate.frontend.ops.elementwise import as_dtype, typed
from serrate.frontend.ops.movement import pulled
from serrate.frontend.ops.products import operand, product_dtypes
from serrate.frontend.ops.reductions import sum
from serrate.frontend.shapes import shown
from serrate.ir.domains import IterDomain
from serrate.ir.fusion import Fusion
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.reductions import SUM
from serrate.ir.tile import Accumulate
from serrate.ir.transforms import entangled
from serrate.ir.values import Places, Value, call
from serrate.ir.view import TensorView

Term = tuple[TensorView, str]
"""A tensor and the letters of its dims."""


def einsum(equation: str, *operands: TensorView) -> TensorView:
    """`torch.einsum`. A ragged letter needs the letters of the dims that count its rows: `"bik,bjk->bij"`.

    >>> import torch
    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, off = f.input((None, 8), torch.float32), f.input((4,), torch.int64)
    ...     y = ops.as_nested(x, off)
    ...     print(einsum("bik,bjk->bij", y, y).shape, einsum("bik,bij->bkj", y, y).shape)
    (3, 'r0', 'r1') (3, 8, 8)
    """
    views = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    terms, out = _parsed(equation, views)
    while len(terms) > 1:
        (a, b), rest = terms[:2], terms[2:]
        later = "".join([out, *(letters for _, letters in rest)])
        a, b = _summed(a, b[1] + later), _summed(b, a[1] + later)
        kept = out if not rest else "".join(letter for letter in dict.fromkeys(a[1] + b[1]) if letter in later)
        terms = [(_product(equation, a, b, kept), kept), *rest]
    view, letters = _summed(terms[0], out)
    return view if letters == out else permute(view, *(letters.index(letter) for letter in out))


def _parsed(equation: str, views: Sequence[TensorView]) -> tuple[list[Term], str]:
    """The letters of each tensor and of the result, `...` written out."""
    if not isinstance(equation, str):
        raise CallError("einsum: expected an equation such as 'bik,bjk->bij'; lists of numbers are not supported")
    left, arrow, right = equation.replace(" ", "").partition("->")
    written = left.split(",")
    if len(written) != len(views):
        raise ShapeError(f"einsum: {equation!r} names {len(written)} tensors, got {len(views)}")
    free = [letter for letter in map(chr, range(ord("A"), ord("Z") + 1)) if letter not in equation]
    more = max((v.ndim - len(w.replace("...", "")) for v, w in zip(views, written, strict=True) if "..." in w), default=0)
    leading = "".join(free[:more])
    terms = []
    for view, own in zip(views, written, strict=True):
        spare = view.ndim - len(own.replace("...", ""))
        letters = own.replace("...", leading[more - spare :] if spare > 0 else "")
        if len(letters) != view.ndim or not letters.isalpha():
            raise ShapeError(f"einsum: {own!r} of {equation!r} does not name the {view.ndim} dims of {shown(view)}")
        if len(set(letters)) < len(letters):
            raise ShapeError(f"einsum: {own!r} names a dim twice; diagonals are not supported")
        terms.append((view, letters))
    every = "".join(letters for _, letters in terms)
    once = "".join(sorted(letter for letter in set(every) - set(leading) if every.count(letter) == 1))
    out = right.replace("...", leading) if arrow else leading + once
    unknown = next((letter for letter in out if letter not in every or out.count(letter) > 1), None)
    if unknown is not None:
        raise ShapeError(f"einsum: the result of {equation!r} must name letters of the tensors once each, got {unknown!r}")
    return terms, out


def _summed(term: Term, needed: str) -> Term:
    """A tensor without the letters that nothing else needs."""
    view, letters = term
    gone = tuple(k for k, letter in enumerate(letters) if letter not in needed)
    return (sum(view, gone), "".join(letter for letter in letters if letter in needed)) if gone else term


def _product(equation: str, a: Term, b: Term, kept: str) -> TensorView:
    """One product, summed over the letters that are not kept."""
    # The last dim of the result is one of the second tensor, as in `matmul`.
    if kept and kept[-1] not in b[1]:
        a, b = b, a
    if a[0].dtype != b[0].dtype:
        raise DtypeError(f"einsum: all tensors must have one dtype, got {a[0].dtype} and {b[0].dtype}; convert one of them")
    fusion, (dtype, carried) = a[0].fusion, product_dtypes("einsum", a[0])
    domains = _domains(fusion, f"einsum {equation!r}", (a, b))
    sides: list[Value] = []
    for view, letters in (a, b):
        index: Places = tuple(
            None if own.is_single and domains[letter].uid != own.uid else domains[letter]
            for own, letter in zip(view.domains, letters, strict=True)
        )
        sides.append(as_dtype(operand(view, index), carried))
    product = call("mul", *sides, dtype=carried)
    rows = tuple(domains[letter] for letter in kept)
    over = tuple(domain for letter, domain in domains.items() if letter not in kept)
    if not over:
        return typed(pulled(fusion, carried, rows, product), dtype)
    state = fusion.tensor(carried, rows)
    return typed(fusion.define([state], (*rows, *over), Accumulate((state,), rows, SUM, (product,), over))[0], dtype)


def _domains(fusion: Fusion, what: str, terms: Sequence[Term]) -> dict[str, IterDomain]:
    """The domain of each letter, a different one for each; rows are counted by the domains of the letters that count them."""
    found: dict[str, IterDomain] = {}
    sources = {}
    for letter in dict.fromkeys("".join(letters for _, letters in terms)):
        places = [(view, letters.index(letter), letters) for view, letters in terms if letter in letters]
        # The most specific domain: ragged dims, then dims that count rows, then sizes that do not broadcast.
        sources[letter] = max(places, key=lambda p: _rank(p[0].domains[p[1]]))
        chosen = sources[letter][0].domains[sources[letter][1]]
        for view, k, _ in places:
            match(fusion, f"{what}, letter {letter!r} of {shown(view)}", chosen, view.domains[k], f"{what}, letter {letter!r}")
    for letter, (view, k, letters) in sorted(sources.items(), key=lambda each: each[1][0].domains[each[1][1]].is_ragged):
        own = view.domains[k]
        if isinstance(own, RaggedIterDomain):
            counts = counting(view, k)
            if not counts:
                raise ShapeError(f"{what}: letter {letter!r} of {shown(view)} is ragged, and no dim counts its rows")
            if any(found.get(letters[c], own).uid != view.domains[c].uid for c in counts):
                if len(counts) > 1 or view.domains[counts[0]].uid != own.component.uid:
                    raise ShapeError(f"{what}: rows of several levels must come from one tensor; flatten the outer level first")
                own = under(found[letters[counts[0]]], own, fusion.fresh("r"))
        if any(entangled(own, other) for other in found.values()):
            name = fusion.fresh("r" if own.is_ragged else "d")
            own = own.with_rows(own.row_length, name=name, bound=own.bound, total=own.extent_expr)
        found[letter] = own
    return {letter: found[letter] for letter in sources}


def _rank(domain: IterDomain) -> tuple[bool, bool, bool]:
    return domain.is_ragged, domain.pairing is not None, domain.extent != 1
