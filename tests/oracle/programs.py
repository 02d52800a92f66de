"""Random programs over ragged tensors of every composition, as the text of Python functions.

In: hypothesis. Out: an `Example`: its arguments (as code that makes them, and as nested lists) and its source, which runs with
serrate and with the lists of `model` alike. Printed, an example is a file that a person can run.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.oracle.model import Lists, split

# --- arguments -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """A name, the code that makes it, and what it is: nested lists, or a tensor."""

    name: str
    code: str
    model: Any


@dataclass(frozen=True)
class Composition:
    """A kind of structure: which dims are ragged, and which sets of dims can be reduced, scanned or taken apart."""

    name: str
    dims: str
    """A letter for each dim: B counts rows, K their parts, r is ragged, D and H are features."""
    reduce: tuple[tuple[int, ...], ...]
    """Dims that can be reduced, with what is left still broadcasting back."""
    across: tuple[tuple[int, ...], ...] = ()
    """Dims that are reduced position by position; a result of the program and nothing more."""
    lines: tuple[int, ...] = ()
    """Dims along which there are lines: softmax, scans."""


COMPOSITIONS = [
    Composition("one level", "BrD", ((1,), (2,), (1, 2), (0, 1), (0, 1, 2)), ((0,), (0, 2)), (1, 2)),
    Composition("no features", "Br", ((1,), (0, 1)), ((0,),), (1,)),
    Composition("two feature dims", "BrHD", ((1,), (2,), (3,), (1, 3), (2, 3), (1, 2, 3), (0, 1)), ((0,),), (1, 2, 3)),
    Composition("int32 offsets", "BrD", ((1,), (2,), (1, 2), (0, 1)), ((0,),), (1, 2)),
    Composition("padded in place", "BrD", ((1,), (2,), (1, 2), (0, 1)), ((0,),), (1, 2)),
    Composition("gaps", "BrD", ((1,), (2,), (1, 2), (0, 1)), ((0,),), (1, 2)),
    Composition("parts of rows", "BrD", ((1,), (2,), (1, 2), (0, 1)), ((0,),), (1, 2)),
    Composition("chosen rows", "BrD", ((1,), (2,), (1, 2), (0, 1)), ((0,),), (1, 2)),
    Composition("some features", "BrD", ((1,), (2,), (1, 2), (0, 1)), ((0,),), (1, 2)),
    Composition("rows of dim 1", "HBrD", ((2,), (3,), (2, 3), (0,), (1, 2), (0, 2)), (), (0, 2, 3)),
    Composition("nested", "BrrD", ((2,), (3,), (2, 3), (1, 2), (1, 2, 3), (0, 1, 2)), ((0, 1),), (2, 3)),
    Composition("parts of equal number", "BKrD", ((2,), (3,), (2, 3), (1, 2), (0, 1, 2)), (), (2, 3)),
    Composition("three levels", "BrrrD", ((3,), (4,), (3, 4), (2, 3), (1, 2, 3), (0, 1, 2, 3)), (), (3, 4)),
    Composition("independent", "BrBrD", ((1,), (3,), (4,), (1, 3), (0, 1), (2, 3), (0, 1, 2, 3)), (), (1, 3, 4)),
    Composition("product", "BrcD", ((1,), (2,), (3,), (1, 2), (0, 1, 2)), (), (1, 2, 3)),
]


def _numbers(shape: tuple[int, ...], dtype: str, seed: int) -> str:
    """Code of some numbers: few enough to be different, and exact in every dtype."""
    if dtype == "int64":
        return f"torch.randint(-9, 10, {shape}, generator=torch.Generator().manual_seed({seed}))"
    return f"torch.randn({shape}, generator=torch.Generator().manual_seed({seed}), dtype=torch.{dtype})"


def _made(code: str) -> Any:
    return eval(code, {"torch": torch})


def _ends(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _rows(values: Tensor, starts: list[int], lengths: list[int]) -> list[Tensor]:
    return [values[a : a + n] for a, n in zip(starts, lengths, strict=True)]


def _cut(rows: list[Any], counts: list[int]) -> list[list[Any]]:
    ends = _ends(counts)
    return [rows[a:b] for a, b in itertools.pairwise(ends)]


LENGTH = st.one_of(st.sampled_from([0, 1]), st.integers(0, 5), st.sampled_from([2, 7, 13, 17]))
LENGTHS = st.one_of(st.lists(LENGTH, max_size=5), st.just([1, 0, 67, 2]), st.just([0, 0, 0]), st.just([]), st.just([31]))


@dataclass(frozen=True)
class Rows:
    """What structures of one example share: lengths, and how many of them belong together."""

    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    """As many rows as there are lengths, in groups."""
    outer: tuple[int, ...]
    """As many groups, in groups."""


@st.composite
def rows(draw: st.DrawFn, composition: Composition) -> Rows:
    lengths = draw(LENGTHS)
    if composition.name in ("independent", "product"):
        # Lists cannot tell how many columns there are where there are no rows.
        lengths = [max(n, 1) for n in lengths]
    if composition.name == "parts of equal number":
        lengths = lengths[: len(lengths) // 2 * 2]
    groups, left = [], len(lengths)
    while left:
        groups.append(draw(st.integers(0, min(left, 3))))
        left -= groups[-1]
        if len(groups) > 6:
            groups.append(left)
            break
    first = draw(st.integers(0, len(groups)))
    return Rows(tuple(lengths), tuple(groups), (first, 0, len(groups) - first))


def ragged(composition: Composition, shared: Rows, dtype: str, width: int, name: str, seed: int) -> Argument:
    """A ragged argument over some rows: the code that makes it, and its nested lists, written beside it."""
    lengths, total = list(shared.lengths), sum(shared.lengths)
    starts = _ends(lengths)[:-1]
    kind = getattr(torch, dtype)
    count = len(lengths)

    def plain(inner: tuple[int, ...], build: str, *, spell: str = "values") -> Argument:
        made = _numbers((total, *inner), dtype, seed)
        model = [split(row, 1) for row in _rows(_made(made), starts, lengths)]
        return Argument(name, build.replace(spell, made), Lists(model, (count, None, *inner), kind))

    if composition.name == "no features":
        return plain((), f"JaggedTensor.from_lengths(values, {lengths})")
    if composition.name == "two feature dims":
        return plain((2, width), f"JaggedTensor.from_lengths(values, {lengths})")
    if composition.name == "int32 offsets":
        offsets = f"torch.tensor({_ends(lengths)}, dtype=torch.int32)"
        return plain((width,), f"JaggedTensor.from_csr(values, {offsets})")
    if composition.name == "padded in place":
        longest = max(lengths, default=0) + 1
        made = _numbers((count, longest, width), dtype, seed)
        model = [split(row[:n], 1) for row, n in zip(_made(made), lengths, strict=True)]
        code = f"JaggedTensor.from_padded({made}, torch.tensor({lengths}, dtype=torch.int64), format='padded')"
        return Argument(name, code, Lists(model, (count, None, width), kind))
    if composition.name == "gaps":
        apart = [a + 2 * k + 1 for k, a in enumerate(starts)]
        made = _numbers((total + 2 * count + 3, width), dtype, seed)
        model = [split(row, 1) for row in _rows(_made(made), apart, lengths)]
        described = f"torch.tensor({apart}, dtype=torch.int64), torch.tensor({lengths}, dtype=torch.int64)"
        return Argument(name, f"JaggedTensor.from_starts({made}, {described})", Lists(model, (count, None, width), kind))
    if composition.name == "parts of rows":
        longer = [n + 1 for n in lengths]
        made = _numbers((sum(longer), width), dtype, seed)
        model = [split(row[1:], 1) for row in _rows(_made(made), _ends(longer)[:-1], longer)]
        return Argument(name, f"JaggedTensor.from_lengths({made}, {longer})[:, 1:]", Lists(model, (count, None, width), kind))
    if composition.name == "chosen rows":
        # Of twice as many rows, every other one, last first.
        more = [n for k in range(count) for n in (lengths[count - 1 - k], 1)]
        chosen = [2 * k for k in reversed(range(count))]
        made = _numbers((sum(more), width), dtype, seed)
        every = _rows(_made(made), _ends(more)[:-1], more)
        model = [split(every[k], 1) for k in chosen]
        code = f"JaggedTensor.from_lengths({made}, {more})[torch.tensor({chosen}, dtype=torch.int64)]"
        return Argument(name, code, Lists(model, (count, None, width), kind))
    if composition.name == "some features":
        made = _numbers((total, width + 2), dtype, seed)
        model = [split(row[:, 1:-1], 1) for row in _rows(_made(made), starts, lengths)]
        return Argument(
            name, f"JaggedTensor.from_lengths({made}, {lengths})[..., 1:-1]", Lists(model, (count, None, width), kind)
        )
    if composition.name == "rows of dim 1":
        made = _numbers((2, total, width), dtype, seed)
        model = [[split(row, 1) for row in _rows(half, starts, lengths)] for half in _made(made)]
        code = f"JaggedTensor({made}, Structure.from_offsets(torch.tensor({_ends(lengths)}), dim=1))"
        return Argument(name, code, Lists(model, (2, count, None, width), kind))
    if composition.name in ("nested", "three levels", "parts of equal number"):
        made = _numbers((total, width), dtype, seed)
        inner: Any = [split(row, 1) for row in _rows(_made(made), starts, lengths)]
        if composition.name == "parts of equal number":
            pairs = torch.tensor(lengths, dtype=torch.int64).view(-1, 2).tolist()
            code = f"JaggedTensor({made}, Structure.from_lengths(torch.tensor({pairs}, dtype=torch.int64).view(-1, 2)))"
            return Argument(name, code, Lists(_cut(inner, [2] * (count // 2)), (count // 2, 2, None, width), kind))
        levels, shape = [_ends(lengths)], [None, width]
        for counts in (shared.groups, shared.outer)[: 1 if composition.name == "nested" else 2]:
            inner, shape = _cut(inner, list(counts)), [None, *shape]
            levels = [_ends(list(counts)), *levels]
        offsets = ", ".join(f"torch.tensor({ends})" for ends in levels)
        return Argument(name, f"JaggedTensor.from_csr({made}, ({offsets}))", Lists(inner, (len(inner), *shape), kind))
    if composition.name == "independent":
        columns = [1, 0, 3]
        made = _numbers((total, 4, width), dtype, seed)
        spans = list(zip(_ends(columns)[:-1], columns, strict=True))
        # Dims are rows, positions, columns, and the positions of those.
        turned = [[[list(at[a : a + n].unbind()) for a, n in spans] for at in row] for row in _rows(_made(made), starts, lengths)]
        code = (
            f"JaggedTensor({made}, Structure.independent(Structure.from_offsets(torch.tensor({_ends(lengths)})), "
            f"Structure.from_offsets(torch.tensor({_ends(columns)}), dim=1)))"
        )
        return Argument(name, code, Lists(turned, (count, None, 3, None, width), kind))
    if composition.name == "product":
        counts = [(2, 5, 1, 3, 0)[k % 5] for k in range(count)]
        sizes = [n * m for n, m in zip(lengths, counts, strict=True)]
        made = _numbers((sum(sizes), width), dtype, seed)
        blocks = _rows(_made(made), _ends(sizes)[:-1], sizes)
        model = [split(b.reshape(n, m, width), 2) for b, n, m in zip(blocks, lengths, counts, strict=True)]
        code = (
            f"JaggedTensor({made}, Structure.from_lengths(torch.tensor({lengths}, dtype=torch.int64))"
            f".with_columns(torch.tensor({counts}, dtype=torch.int64)))"
        )
        return Argument(name, code, Lists(model, (count, None, None, width), kind, product=True))
    return plain((width,), f"JaggedTensor.from_lengths(values, {lengths})")


# --- plans -----------------------------------------------------------------------------------------------------------------


def _options(**choices: list[Any]) -> Any:
    """None stands for an option that is not given."""
    drawn = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})
    return drawn.map(lambda options: {name: value for name, value in options.items() if value is not None})


TILES = [None, 1, 3, 64]
OPTIONS: dict[str, Any] = {
    "maskless": _options(tile=TILES, keep_rows=[True, False]),
    "masked": _options(tile=TILES, rows=[None, 1, 3, 16]),
    "persistent_dynamic": _options(tile=TILES, chunk=[None, 1, 3, 5, 64]),
}
"""Strategies, and options that must not change the meaning."""


# --- programs --------------------------------------------------------------------------------------------------------------

UNARY = (
    "torch.exp(torch.tanh({a}))",
    "torch.relu({a})",
    "torch.sigmoid({a})",
    "{a} * 0.5 + 1",
    "-{a}",
    "abs({a})",
    "torch.clamp({a}, -1, 1)",
    "F.silu({a})",
    "F.gelu({a})",
    "torch.sqrt(abs({a}) + 1)",
    "torch.where({a} > 0, {a}, 0.25)",
    "1.5 - {a}",
    "2.0 / (abs({a}) + 1)",
    "torch.floor({a})",
)
WHOLE_UNARY = (
    "{a} * 3 - 1",
    "-{a}",
    "abs({a})",
    "torch.clamp({a}, -5, 5)",
    "{a} // 3",
    "{a} % 4",
    "torch.where({a} > 0, {a}, -1)",
)
BINARY = (
    "{a} + {b}",
    "{a} - {b}",
    "torch.tanh({a}) * {b}",
    "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})",
    "{a} / (abs({b}) + 1)",
    "torch.where({a} > {b}, {a}, {b})",
)
WHOLE_BINARY = ("{a} + {b}", "{a} - {b}", "torch.maximum({a}, {b})", "torch.where({a} > {b}, {a}, {b})", "{a} // (abs({b}) + 1)")
REDUCE = (
    "{a}.sum({d}, keepdim=True)",
    "{a}.mean({d}, keepdim=True)",
    "{a}.amax({d}, keepdim=True)",
    "{a}.amin({d}, keepdim=True)",
    "torch.logsumexp({a}, {d}, keepdim=True)",
    "torch.var({a}, {d}, correction=0, keepdim=True)",
    "torch.where({a}.amax({d}, keepdim=True) > 0, 1.0, 2.0)",
)
WHOLE_REDUCE = ("{a}.sum({d}, keepdim=True)", "{a}.amax({d}, keepdim=True)", "{a}.amin({d}, keepdim=True)")
LAST = ("{a}.sum({d})", "{a}.amax({d})", "torch.mean({a}, {d})", "torch.logsumexp({a}, {d})")
WHOLE_LAST = ("{a}.sum({d})", "{a}.amax({d})", "{a}.amin({d})", "({a} > 2).any({d})", "({a} < 2).all({d})")
LINES = (
    "torch.softmax({a}, {d})",
    "torch.log_softmax({a}, {d})",
    "torch.cumsum({a}, {d})",
    "torch.cumprod(torch.tanh({a}), {d})",
    "torch.cummax({a}, {d}).values",
    "torch.flip({a}, ({d},))",
    "torch.sort({a}, {d}).values",
)
WHOLE_LINES = (
    "torch.cumsum({a}, {d})",
    "torch.cummax({a}, {d}).values",
    "torch.cummin({a}, {d}).indices",
    "torch.flip({a}, ({d},))",
    "torch.sort({a}, {d}).values",
)
PRODUCTS = ("torch.matmul({a}, {b}.transpose(1, 2))", "torch.matmul({a}.transpose(1, 2), {b})")
PARTS = ("{a}[..., :1]", "{a}[..., -1]", "{a}[:, 1:]", "{a}[:, :2]", "{a}[:, -2:]", "{a}[1:]", "{a}[:1]", "{a}[..., None]")
PLACE = ("{a}.argmax({d})", "{a}.argmin({d})")


@dataclass(frozen=True)
class Example:
    """A program and its arguments."""

    composition: Composition
    arguments: tuple[Argument, ...]
    body: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def source(self) -> str:
        names = ", ".join(a.name for a in self.arguments)
        return "\n".join(
            (f"def program({names}):", *(f"    {line}" for line in self.body), f"    return {', '.join(self.results)},")
        )

    @property
    def function(self) -> Any:
        namespace: dict[str, Any] = {"torch": torch, "F": F}
        exec(self.source, namespace)
        return namespace["program"]

    def wanted(self) -> Any:
        return self.function(*(a.model for a in self.arguments))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        """A file to run."""
        made = "\n".join(f"{a.name} = {a.code}" for a in self.arguments)
        wanted = "\n".join(f"#   {part}" for part in repr(self.wanted()).splitlines())
        head = "import torch\nimport torch.nn.functional as F\n\nfrom serrate import JaggedTensor, Structure, jit\n"
        run = f"print(jit(program)({', '.join(a.name for a in self.arguments)}))"
        return f"\n# {self.composition.name}\n{head}\n\n{self.source}\n\n\n{made}\n{run}\n# wanted:\n{wanted}\n"


@st.composite
def examples(draw: st.DrawFn) -> Example:
    composition = draw(st.sampled_from(COMPOSITIONS))
    dtype = draw(st.sampled_from(["float64", "float64", "float64", "int64"]))
    whole = dtype == "int64"
    width = draw(st.sampled_from([1, 2, 5]))
    shared = draw(rows(composition))
    arguments = [ragged(composition, shared, dtype, width, name, k) for k, name in enumerate("xy"[: draw(st.integers(1, 2))])]
    full = composition.dims
    nodes: list[tuple[str, str]] = [(a.name, full) for a in arguments]
    """Names, and the dims of each: 1 where one was reduced."""
    arguments += draw(dense(composition, arguments[0].model, dtype, width))
    operands = [(a.name, "") for a in arguments if isinstance(a.model, Tensor)]
    body: list[str] = []
    finals: list[str] = []

    def add(text: str, dims: str) -> None:
        name = f"v{len(body)}"
        body.append(f"{name} = {text}")
        nodes.append((name, dims))

    for _ in range(draw(st.integers(1, 6))):
        a, dims = nodes[draw(st.integers(max(0, len(nodes) - 3), len(nodes) - 1))]
        kind = draw(st.sampled_from(["unary", "binary", "binary", "dense", "reduce", "reduce", "line", "last"]))
        if kind == "dense" and operands:
            b = draw(st.sampled_from(operands))[0]
            if b == "m":
                if dims == full and full.endswith("D") and len(full) > 2 and not whole:
                    add(f"torch.matmul({a}, m)", dims)
            elif dims == full:
                text = draw(st.sampled_from(WHOLE_BINARY if whole else BINARY))
                add(text.format(a=a, b=b), dims)
        elif kind == "unary":
            add(draw(st.sampled_from(WHOLE_UNARY if whole else UNARY)).format(a=a), dims)
        elif kind in ("binary", "dense"):
            b, others = draw(st.sampled_from(nodes))
            joined = "".join(p if p != "1" else q for p, q in zip(dims, others, strict=True))
            add(draw(st.sampled_from(WHOLE_BINARY if whole else BINARY)).format(a=a, b=b), joined)
        elif dims != full:
            # Of what is reduced already, only features are left to be reduced or to run along.
            last = len(full) - 1
            if dims[last] == "D" and not whole:
                add(f"torch.softmax({a}, {last})", dims)
        elif kind == "reduce":
            over = draw(st.sampled_from(composition.reduce))
            text = draw(st.sampled_from(WHOLE_REDUCE if whole else REDUCE))
            add(text.format(a=a, d=over), "".join("1" if k in over else c for k, c in enumerate(full)))
        elif kind == "line":
            dim = draw(st.sampled_from(composition.lines))
            add(draw(st.sampled_from(WHOLE_LINES if whole else LINES)).format(a=a, d=dim), dims)
        elif full == "BrD" and draw(st.booleans()):
            b = draw(st.sampled_from([name for name, others in nodes if others == full]))
            body.append(f"v{len(body)} = " + draw(st.sampled_from(PRODUCTS + PARTS)).format(a=a, b=b))
            finals.append(f"v{len(body) - 1}")
        else:
            over = draw(st.sampled_from(composition.reduce + composition.across))
            choices = WHOLE_LAST if whole else LAST
            if len(over) == 1 and over in composition.reduce:
                choices = (*choices, *PLACE)
                body.append(f"v{len(body)} = " + draw(st.sampled_from(choices)).format(a=a, d=over[0]))
            else:
                body.append(f"v{len(body)} = " + draw(st.sampled_from(choices)).format(a=a, d=over))
            finals.append(f"v{len(body) - 1}")
    # A dim of size 1 between components and their rows is for what broadcasts, and no result.
    ready = [name for name, dims in nodes if not ("1" in dims and "product" in composition.name)]
    results = [*finals, *ready[-draw(st.integers(1, 2)) :]]
    return Example(composition, tuple(arguments), tuple(body), tuple(dict.fromkeys(results)))


def every(composition: Composition, whole: bool) -> Example:
    """All operators over all dims of a composition, in one program."""
    shared = Rows((3, 1, 7, 2), (1, 3), (0, 0, 2))
    if composition.name not in ("independent", "product"):
        shared = Rows((3, 0, 7, 2), (1, 0, 3), (1, 0, 2))
    x, y = (ragged(composition, shared, "int64" if whole else "float64", 3, name, k) for k, name in enumerate("xy"))
    texts = [text.format(a="x", b="y") for text in ((*WHOLE_UNARY, *WHOLE_BINARY) if whole else (*UNARY, *BINARY))]
    for over in composition.reduce:
        back = "x - {a}" if whole else "x * torch.tanh({a})"
        texts += [back.format(a=text.format(a="x", d=over)) for text in (WHOLE_REDUCE if whole else REDUCE)]
    for over in composition.reduce + composition.across:
        texts += [text.format(a="x", d=over) for text in (WHOLE_LAST if whole else LAST)]
    for over in composition.reduce:
        texts += [text.format(a="x", d=over[0]) for text in PLACE if len(over) == 1]
    for dim in composition.lines:
        texts += [text.format(a="x", d=dim) for text in (WHOLE_LINES if whole else LINES)]
    if composition.dims == "BrD":
        texts += [text.format(a="x", b="y") for text in (PARTS if whole else PARTS + PRODUCTS)]
    body = tuple(f"v{k} = {text}" for k, text in enumerate(texts))
    return Example(composition, (x, y), body, tuple(f"v{k}" for k in range(len(texts))))


@st.composite
def dense(draw: st.DrawFn, composition: Composition, model: Lists, dtype: str, width: int) -> list[Argument]:
    """Dense operands: a number without dims, features, one for each component, as long as the longest row, a weight."""
    found = []
    if draw(st.booleans()):
        found.append(("s", ()))
    if composition.dims.endswith("D"):
        if draw(st.booleans()):
            found.append(("w", (width,)))
        if draw(st.booleans()):
            found.append(("m", (width, width)))
    if composition.dims == "BrD":
        if draw(st.booleans()):
            found.append(("c", (len(model.data), 1, width)))
        if draw(st.booleans()):
            found.append(("p", (len(model.data), max(map(len, model.data), default=0) + draw(st.integers(0, 2)), width)))
    made = [(name, _numbers(shape, dtype, 7 + k)) for k, (name, shape) in enumerate(found)]
    return [Argument(name, code, _made(code)) for name, code in made]
