"""Verification of fusions.

In: a fusion. Out: nothing, or a `VerificationError` that names the offending tensor. The rules:

    inputs     each is declared once; no two tensors share a name
    order      a tensor is written once, and read only after it is written, so there are no cycles
    reads      one domain or place per dim; the definition runs over every such domain, or over domains derived from it
    dims       a ragged dim is read at a ragged domain of the same structure, or of one checked equal at run time
    rows       a ragged dim comes after the dim that owns it
    outputs    each is an input or is written
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serrate.errors import ShapeError, VerificationError
from serrate.ir.domains import IterDomain
from serrate.ir.ragged import RaggedIterDomain, lengths_array
from serrate.ir.storage import storage_of
from serrate.ir.values import Ordinal, Place, Position, Read, Tensor

if TYPE_CHECKING:
    from serrate.ir.fusion import Definition, Fusion


def verify(fusion: Fusion) -> None:
    """Raises `VerificationError` unless the fusion follows the rules."""
    _inputs(fusion)
    known = {view.tensor.memory for view in fusion.inputs}
    names = {tensor.name for tensor in known}
    for definition in fusion.definitions:
        for target in definition.statement.targets:
            if target in known or target.name in names:
                raise VerificationError(f"{fusion.name}: {target.name} is written, but it is an input or was already written")
        for value in definition.statement.values:
            for node in value.walk():
                if isinstance(node, Read):
                    if node.tensor.memory not in known:
                        raise VerificationError(_unknown(fusion, definition, node.tensor.memory))
                    _read(fusion, definition, node)
                elif isinstance(node, Position):
                    _runs_over(fusion, definition, node.domain, str(node))
                elif isinstance(node, Ordinal):
                    for domain in node.index:
                        if domain is not None:
                            _runs_over(fusion, definition, domain, str(node))
        for target in definition.statement.targets:
            _rows(fusion, target)
        known.update(definition.statement.targets)
        names.update(t.name for t in definition.statement.targets)
    for view in fusion.outputs:
        if view.tensor.memory not in known:
            raise VerificationError(f"{fusion.name}: output {view.tensor.name} is never written")


def _inputs(fusion: Fusion) -> None:
    seen: set[str] = set()
    for view in fusion.inputs:
        if view.tensor.name in seen:
            raise VerificationError(f"{fusion.name}: input {view.tensor.name} is declared twice")
        seen.add(view.tensor.name)


def _unknown(fusion: Fusion, definition: Definition, tensor: Tensor) -> str:
    """The reason why a tensor cannot be read here: it is defined later, never, or in terms of itself."""
    targets = definition.statement.targets
    if fusion.definition_of(tensor) is None:
        return f"{fusion.name}: {tensor.name} is read but never defined; tensors of another fusion cannot be read"
    if tensor in targets or any(fusion.reaches(t, tensor) for t in targets):
        return f"{fusion.name}: {tensor.name} is computed from itself, through {targets[0].name}"
    return f"{fusion.name}: {tensor.name} is read before it is defined"


def _read(fusion: Fusion, definition: Definition, node: Read) -> None:
    logical = node.tensor.logical
    if len(node.index) != len(logical):
        raise VerificationError(f"{fusion.name}: {node.tensor} has {len(logical)} dims and is read at {len(node.index)}: {node}")
    _rows(fusion, node.tensor)
    for own, at in zip(logical, node.index, strict=True):
        if at is None:
            if own.row_length.value != 1:
                raise VerificationError(f"{fusion.name}: {node} reads all of {own} at 0")
            continue
        if isinstance(at, Place):
            for domain in at.domains:
                _runs_over(fusion, definition, domain, str(node))
            continue
        _runs_over(fusion, definition, at, str(node))
        if isinstance(own, RaggedIterDomain) and not _same_rows(fusion, own, at):
            raise VerificationError(f"{fusion.name}: {node} reads rows of {own} at {at}, which has a different structure")


def _runs_over(fusion: Fusion, definition: Definition, domain: IterDomain, where: str) -> None:
    made_from = (node for d in definition.domains for node in (d, *(d.definition.inputs if d.definition else ())))
    if all(domain.uid != d.uid for d in made_from):
        names = ", ".join(d.name for d in definition.domains)
        raise VerificationError(f"{fusion.name}: {where} needs {domain.name}, but its definition runs over {names or 'nothing'}")


def _same_rows(fusion: Fusion, own: RaggedIterDomain, at: IterDomain) -> bool:
    if not isinstance(at, RaggedIterDomain):
        return False
    if own.uid == at.uid or own.pairing == at.pairing or own.pairing is None or at.pairing is None:
        return True
    pair = {lengths_array(own), lengths_array(at)}
    known = [a.data for a in pair if a.data is not None]
    checked = any({getattr(c, "left", None), getattr(c, "right", None)} == pair for c in fusion.checks)
    return checked or (len(known) == 2 and known[0] == known[1])


def _rows(fusion: Fusion, tensor: Tensor) -> None:
    for k, domain in enumerate(tensor.logical):
        if domain.is_ragged:
            try:
                storage_of(tensor.logical[: k + 1])
            except ShapeError:
                raise VerificationError(
                    f"{fusion.name}: the ragged dim {domain.name} of {tensor} must come after the dim of its components"
                ) from None
