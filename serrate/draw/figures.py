"""Figures: domains with the transforms between them, loops with their guards, and fusions.

In: domains (the loops, usually) or a fusion. Out: a `Drawing`. Logical domains are at the top, loops at the bottom, with a
small node for each transform in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields

from serrate.analysis.guards import Guard, guards
from serrate.draw.layout import Box, Cell, Edge
from serrate.draw.picture import COLOURS, Drawing, Legend, domain_box, pill, titled_box
from serrate.errors import DomainError
from serrate.ir.domains import COORDINATE, IterDomain, IterType, ParallelType
from serrate.ir.expr import Expr
from serrate.ir.fusion import Fusion
from serrate.ir.ragged import RaggedIterDomain
from serrate.ir.tile import Accumulate, Leaf, Library, Scan
from serrate.ir.transforms import Split, Transform
from serrate.ir.values import Call, Read, Role, Tensor

LONGEST = 36
"""Extents with more characters are shortened."""
LONG_NAME = 12
"""Array names with more characters are shortened in guards."""


def draw_domains(domains: Iterable[IterDomain], guarded: Iterable[IterDomain] = (), notes: Iterable[str] = ()) -> Drawing:
    """A picture of `domains` and of everything they were made from; `guarded` ones are marked.

    >>> from serrate.ir import IterDomain, split
    >>> d = IterDomain(6, name="d")
    >>> picture = draw_domains(split(d, 4), guarded=[d])
    >>> "split 4" in picture.svg, "split 4" in picture.dot
    (True, True)
    """
    loops = list({d.uid: d for d in domains}.values())
    if not loops:
        raise DomainError("draw_domains: expected at least one domain, got none")
    marked = {d.uid for d in guarded}
    found, transforms = _closed(loops)
    owners = {d.component.uid for d in found if isinstance(d, RaggedIterDomain)}
    # Numbered as they are met here, so that the same program drawn again gives the same text.
    keys = {d.uid: f"domain {k}" for k, d in enumerate(found)}
    cells = [_cell(d, owners, d.uid in marked) for d in found]
    shown = [domain_box(keys[d.uid], cell) for d, cell in zip(found, cells, strict=True)]
    edges: list[Edge] = []
    for number, transform in enumerate(transforms):
        key = f"transform {number}"
        shown.append(pill(key, label(transform)))
        inputs = {d.uid for d in transform.inputs}
        edges += [Edge(keys[d.uid], key) for d in transform.inputs]
        edges += [Edge(keys[d.uid], key, dashed=True) for d in transform.beside if d.uid not in inputs]
        edges += [Edge(key, keys[d.uid]) for d in transform.outputs]
    return Drawing(shown, edges, _legend(cells, notes), [keys[d.uid] for d in loops])


def draw_loops(logical: Sequence[IterDomain], loop: Sequence[IterDomain]) -> Drawing:
    """The transforms from `logical` domains to loops; domains whose bound the loops must check are marked.

    >>> from serrate.ir import IterDomain, split
    >>> d = IterDomain(6)
    >>> "i0*4 + i1 &lt; 6" in draw_loops([d], split(d, 4)).svg
    True
    """
    found = guards(logical, loop)
    loops = ", ".join(f"i{k} = {d.name}" for k, d in enumerate(loop))
    notes = [f"loops: {loops}", *_with_short_names(found)] if found else ["no guards are needed"]
    return draw_domains([*loop, *logical], [g.domain for g in found], notes)


def draw_fusion(fusion: Fusion) -> Drawing:
    """A picture of a fusion: tensors with their domains, operations between them.

    >>> import torch
    >>> from serrate import ir, ops
    >>> with ir.Fusion() as f:
    ...     x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
    ...     f.output(ops.sum(ops.as_nested(x, offsets), 1))
    >>> "sum over r0" in draw_fusion(f).svg
    True
    """
    tensors = _tensors(fusion)
    outputs = {view.tensor.memory.name for view in fusion.outputs}
    owners = {d.component.uid for t in tensors.values() for d in t.logical if isinstance(d, RaggedIterDomain)}
    boxes: list[Box] = []
    edges: list[Edge] = []
    cells: list[Cell] = []
    for tensor in tensors.values():
        own = [_cell(d, owners, False) for d in tensor.logical] or [Cell(("scalar",), "regular")]
        cells += own
        role = " input" if tensor.memory.role is Role.INPUT and tensor.base is None else ""
        role += " output" if tensor.memory.name in outputs and _is_result(fusion, tensor) else ""
        boxes.append(titled_box(tensor.name, f"{tensor.name} {str(tensor.dtype).removeprefix('torch.')}{role}", own))
    for tensor in tensors.values():
        if tensor.base is not None:
            key = f"view {tensor.name}"
            boxes.append(pill(key, _view_label(tensor)))
            arrays = {a.name for d in tensor.logical if isinstance(d, RaggedIterDomain) for a in d.length.arrays}
            edges += [Edge(tensor.memory.name, key), Edge(key, tensor.name)]
            edges += [Edge(name, key, dashed=True) for name in sorted(_named(arrays, tensors)) if name != tensor.name]
    for number, definition in enumerate(fusion.definitions):
        statement, key = definition.statement, f"operation {number}"
        boxes.append(pill(key, _operation(statement)))
        reads = dict.fromkeys(r.tensor.name for v in statement.values for r in sorted(v.reads, key=str))
        edges += [Edge(name, key) for name in reads]
        edges += [Edge(key, t.name) for t in statement.targets]
    return Drawing(boxes, edges, _legend(cells, ()))


def label(transform: Transform) -> str:
    """A transform's label: `split 4`, `merge`, `partition`."""
    words = " ".join(re.findall(r"[A-Z][a-z0-9]*", type(transform).__name__)).lower()
    values = [getattr(transform, f.name) for f in fields(transform) if f.name not in ("inputs", "outputs")]
    numbers = [str(v) for v in values if isinstance(v, Expr) and len(str(v)) <= 12 and str(v) != "0"]
    if isinstance(transform, Split) and transform.outputs[1].extent_expr is not transform.factor:
        numbers.append("outside")
    return " ".join([words, *numbers])


def _with_short_names(found: Sequence[Guard]) -> list[str]:
    """The guards as text. Arrays with long names (derived ones are named by their recipe) get short ones, listed below."""
    arrays = {a.name for g in found for a in g.condition.left.arrays | g.condition.right.arrays}
    lines = [f"guard: {g}" for g in found]
    # A long name can contain a shorter one, so the longest goes first.
    for k, name in enumerate(sorted((n for n in arrays if len(n) > LONG_NAME), key=lambda n: (-len(n), n))):
        lines = [line.replace(name, f"A{k}") for line in lines]
        lines.append(f"A{k} = {name}")
    return lines


def _closed(loops: Sequence[IterDomain]) -> tuple[list[IterDomain], list[Transform]]:
    """The domains, all they were made from and what was made along with them, oldest first; and the transforms."""
    found: dict[int, IterDomain] = {}
    transforms: dict[int, Transform] = {}
    pending = list(loops)
    while pending:
        domain = pending.pop(0)
        if domain.uid in found:
            continue
        found[domain.uid] = domain
        made = domain.definition
        if made is not None:
            transforms.setdefault(id(made), made)
            pending.extend((*made.inputs, *made.outputs, *made.beside))
    domains = [found[uid] for uid in sorted(found)]
    return domains, sorted(transforms.values(), key=lambda t: t.outputs[0].uid)


def _legend(cells: Iterable[Cell], notes: Iterable[str]) -> Legend:
    used = list(cells)
    kinds = {c.colour for c in used}
    return Legend(tuple(k for k in COLOURS if k in kinds), any(c.marked for c in used), tuple(notes))


def _cell(domain: IterDomain, owners: set[int], marked: bool) -> Cell:
    mark = "" if domain.parallel is ParallelType.SERIAL else f".{domain.parallel.value}"
    lines = (f"{domain.name}{mark}", _extent(domain), *(("guard",) if marked else ()))
    return Cell(lines, _colour(domain, owners), marked)


def _colour(domain: IterDomain, owners: set[int]) -> str:
    if domain.iter_type is IterType.REDUCTION:
        return "reduction"
    if domain.iter_type is IterType.BROADCAST:
        return "broadcast"
    if domain.is_ragged:
        return "ragged"
    return "component" if domain.uid in owners or domain.pairing is not None else "regular"


def _extent(domain: IterDomain) -> str:
    if not isinstance(domain, RaggedIterDomain):
        return _short(str(domain.extent_expr))
    try:
        lengths = domain.extents
    except DomainError:
        return _short(str(domain.length).replace(str(COORDINATE), "c"))
    text = _listed(lengths)
    if len(text) <= LONGEST:
        return text
    rows = f", … {domain.component.extent_expr} rows]"
    return text[: LONGEST - len(rows)].rpartition(",")[0] + rows


def _listed(lengths: object) -> str:
    return f"[{', '.join(map(_listed, lengths))}]" if isinstance(lengths, tuple) else str(lengths)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _tensors(fusion: Fusion) -> dict[str, Tensor]:
    """Every tensor and view of a fusion, in the order they are met."""
    found: dict[str, Tensor] = {view.tensor.name: view.tensor for view in fusion.inputs}
    for definition in fusion.definitions:
        for value in definition.statement.values:
            for element in sorted(value.reads, key=str):
                found.setdefault(element.tensor.memory.name, element.tensor.memory)
                found.setdefault(element.tensor.name, element.tensor)
        for target in definition.statement.targets:
            found.setdefault(target.name, target)
    for view in fusion.outputs:
        found.setdefault(view.tensor.name, view.tensor)
    return found


def _is_result(fusion: Fusion, tensor: Tensor) -> bool:
    return any(view.tensor.name == tensor.name for view in fusion.outputs)


def _named(arrays: set[str], tensors: dict[str, Tensor]) -> set[str]:
    """The tensors that the names of arrays mention: `T1`, or `sum(T1[c])`."""
    return {word for name in arrays for word in re.findall(r"\w+", name) if word in tensors}


def _view_label(view: Tensor) -> str:
    base = {d.uid for d in view.memory.logical}
    made = [d.definition for d in view.logical if d.uid not in base and d.definition is not None]
    undone = [
        d.definition for d in view.memory.logical if d.definition is not None and d.uid not in {o.uid for o in view.logical}
    ]
    names = dict.fromkeys(label(t) for t in made)
    return f"view: {', '.join(names)}" if names else "view: combine" if undone else "view"


def _operation(statement: Leaf | Library) -> str:
    if isinstance(statement, Library):
        return statement.function
    if isinstance(statement, Scan):
        return f"running {statement.reduction} over {statement.over[0].name}"
    if isinstance(statement, Accumulate):
        product = any(isinstance(v, Call) and v.function == "mul" for v in statement.values)
        what = f"{statement.reduction} of products" if product else str(statement.reduction)
        return f"{what} over {', '.join(d.name for d in statement.over)}"
    value = statement.value
    if isinstance(value, Read):
        return "set"
    if not isinstance(value, Call):
        return _short(str(value))
    return str(value.dtype).removeprefix("torch.") if value.function == "cast" else _call(value)


def _call(value: Call) -> str:
    """The function, with constants and positions, which have no edges."""
    plain = [a for a in value.args if not isinstance(a, Read)]
    if all(isinstance(a, Read) for a in value.args) or not plain:
        return value.function
    shown = ", ".join("·" if isinstance(a, Read) else str(a) for a in value.args)
    return _short(f"{value.function}({shown})")
