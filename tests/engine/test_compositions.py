"""Every composition of ragged dims through traced programs: every dim, with the plan that is chosen, against padded torch.

In: one ragged tensor of each composition. Out: failures that name the composition, the operation and the backend.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from serrate import JaggedTensor, Structure, ir, jit, ops
from serrate.errors import ShapeError, StructureError, StructureMismatch
from tests.engine.composed import reducible
from tests.engine.oracle import BACKENDS, FULL

# Triton's interpreter computes where nothing exists, and says so.
pytestmark = [pytest.mark.sampled(2), pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

T = torch.tensor
OFFSETS, LENGTHS, COUNTS = T([0, 3, 3, 8, 10]), T([3, 0, 2]), T([2, 5, 4])


def _rectangles(dim: int = 0, packed: bool = True) -> Structure:
    return Structure.from_offsets(T([0, 3, 3, 5]), dim=dim).with_columns(COUNTS, packed=packed)


def _beside(*structures: Structure) -> Structure:
    return Structure.independent(*structures)


STRUCTURES: dict[str, tuple[tuple[int, ...], Callable[[], Structure]]] = {
    "one level": ((10, 4), lambda: Structure.from_offsets(OFFSETS)),
    "nested": ((10, 4), lambda: Structure.from_offsets(T([0, 2, 2, 4]), OFFSETS)),
    "parts of equal number": ((10, 4), lambda: Structure.from_offsets(T([[0, 3, 3], [0, 5, 7]]))),
    "three levels": ((10, 4), lambda: Structure.from_offsets(T([0, 2, 3]), T([0, 2, 2, 4]), OFFSETS)),
    "rows of dim 1": ((3, 10, 2), lambda: Structure.from_offsets(OFFSETS, dim=1)),
    "independent": (
        (10, 5, 2),
        lambda: Structure.independent(Structure.from_offsets(OFFSETS), Structure.from_offsets(T([0, 1, 5]), dim=1)),
    ),
    "gaps": ((14, 4), lambda: Structure.from_starts(T([0, 4, 10]), T([3, 0, 4]))),
    "gaps in nested": ((14, 4), lambda: Structure.from_starts(T([0, 4, 10]), T([2, 0, 1]), T([3, 0, 4]))),
    "padded": ((15, 4), lambda: Structure.from_starts(T([0, 5, 10]), T([3, 0, 5]), room=5)),
    "product": ((14, 2), lambda: Structure.from_lengths(LENGTHS).with_columns(COUNTS)),
    "product of int32": ((14, 2), lambda: Structure.from_lengths(LENGTHS.int()).with_columns(COUNTS.int())),
    "product in nested": ((14, 2), lambda: Structure.from_lengths(T([2, 0, 1]), LENGTHS).with_columns(COUNTS)),
    "columns of the next dim": ((5, 6, 2), lambda: Structure.from_lengths(LENGTHS).with_columns(COUNTS, packed=False)),
    "product beside rows": ((14, 5, 2), lambda: _beside(_rectangles(), Structure.from_offsets(T([0, 1, 1, 5]), dim=1))),
    "rows beside a product": ((10, 14, 2), lambda: _beside(Structure.from_offsets(OFFSETS), _rectangles(dim=1))),
    "columns of the next dim beside rows": (
        (5, 6, 5, 2),
        lambda: _beside(_rectangles(packed=False), Structure.from_offsets(T([0, 1, 1, 5]), dim=2)),
    ),
    "two products": ((14, 14), lambda: _beside(_rectangles(), _rectangles(dim=1))),
    "nested beside a product": ((10, 14), lambda: _beside(Structure.from_offsets(T([0, 2, 2, 4]), OFFSETS), _rectangles(dim=1))),
    "product with gaps": (
        (28, 2),
        lambda: Structure.from_starts(T([1, 9, 20]), LENGTHS).with_columns(COUNTS),
    ),
    "product with gaps in nested": (
        (28, 2),
        lambda: Structure.from_starts(T([1, 9, 20]), T([2, 0, 1]), LENGTHS).with_columns(COUNTS),
    ),
    "columns of the next dim with gaps": (
        (9, 6, 2),
        lambda: Structure.from_starts(T([1, 5, 6]), LENGTHS).with_columns(COUNTS, packed=False),
    ),
    "product with gaps beside rows": (
        (28, 5),
        lambda: _beside(
            Structure.from_starts(T([1, 9, 20]), LENGTHS).with_columns(COUNTS), Structure.from_offsets(T([0, 1, 1, 5]), dim=1)
        ),
    ),
    "no rows": ((0, 4), lambda: Structure.from_offsets(T([0]))),
    "rows without positions": ((0, 4), lambda: Structure.from_offsets(T([0, 0, 0]))),
    "rectangles without columns": ((0, 2), lambda: Structure.from_lengths(LENGTHS).with_columns(T([0, 0, 0]))),
}
COMPOSITIONS = pytest.mark.parametrize("name", STRUCTURES)


def tensor_of(name: str) -> JaggedTensor:
    shape, structure = STRUCTURES[name]
    return JaggedTensor(torch.randn(shape, generator=torch.Generator().manual_seed(len(name))), structure())


def agree(function: Callable[..., object], want: Tensor, *args: object, fill: float = 0, turn: int | None = None) -> None:
    """Runs on every backend; of many calls alike, each on the `turn`-th one, unless all are asked for."""
    for backend in BACKENDS if turn is None or FULL else [BACKENDS[turn % len(BACKENDS)]]:
        got = jit(function, backend=backend)(*args)
        padded = got.to_padded(fill) if isinstance(got, JaggedTensor) else got
        torch.testing.assert_close(padded, want, rtol=1e-4, atol=1e-5, msg=lambda m, b=backend: f"{b}: {m}")


@COMPOSITIONS
def test_elementwise(name: str) -> None:
    jt = tensor_of(name)
    agree(lambda x: torch.exp(x) * 2, jt.with_values(jt.values.exp() * 2).to_padded(), jt)


@COMPOSITIONS
def test_a_result_has_the_rows_of_its_argument(name: str) -> None:
    jt = tensor_of(name)
    for function in (lambda x: x, lambda x: x + 1):
        got = jit(function)(jt)
        assert got.structure.same_rows(jt.structure.back_to_back())
        assert got.format == "csr"
        if jt.format == "csr":
            assert all(a is b for a, b in zip(got.structure.offsets, jt.structure.offsets, strict=True)), "offsets are shared"


@COMPOSITIONS
def test_sums_over_every_dim(name: str) -> None:
    jt = tensor_of(name)
    for k, dim in enumerate(reducible(jt), len(name)):
        agree(lambda x, dim=dim: x.sum(dim), jt.to_padded().sum(dim), jt, turn=k)


@COMPOSITIONS
def test_softmax_over_every_dim(name: str) -> None:
    jt = tensor_of(name)
    exists = jt.with_values(torch.ones_like(jt.values)).to_padded() == 1
    for k, dim in enumerate(reducible(jt), len(name) + 1):
        want = jt.to_padded(-torch.inf).softmax(dim).masked_fill(~exists, 0)
        agree(lambda x, dim=dim: torch.softmax(x, dim), want, jt, turn=k)


@COMPOSITIONS
def test_equal_rows_meet_however_they_are_stored(name: str) -> None:
    jt = tensor_of(name)
    other = jt.contiguous()
    copied = JaggedTensor(other.values * 3, Structure.independent(*_apart(other.structure)))
    agree(lambda a, b: a + b, (jt.with_values(jt.values * 4)).to_padded(), jt, copied)


def _apart(structure: Structure) -> list[Structure]:
    """The same rows by offsets of their own, one structure for each dim."""
    found = []
    for dim, rows in zip(structure.dims, structure.rows, strict=True):
        made = Structure.from_offsets(*(level.clone() for level in rows.offsets[: rows.depth]), dim=dim)
        found.append(made if rows.columns is None else made.with_columns(rows.counts().clone()))
    return found


def test_different_rows_do_not_meet() -> None:
    a = tensor_of("gaps")
    b = JaggedTensor.from_lengths(torch.zeros(7, 4), [4, 0, 3])
    with pytest.raises(StructureMismatch, match=r"add of .*, dim 1: the rows differ: lengths \[3, 0, 4\] and \[4, 0, 3\]"):
        jit(lambda x, y: x + y)(a, b)


def test_queries_by_keys_and_back() -> None:
    """Scores of every query with every key of its sequence are rectangles; their softmax times the values is rows again."""
    generator = torch.Generator().manual_seed(1)
    offsets = T([0, 3, 3, 8])
    q, k = (JaggedTensor.from_csr(torch.randn(8, 4, generator=generator), offsets) for _ in range(2))
    scores = jit(lambda q, k: torch.softmax(q @ k.transpose(-1, -2), -1))(q, k)
    assert str(scores.shape) == "(3, r0, r1)"
    assert [tuple(r.shape) for r in scores.unbind()] == [(3, 3), (0, 0), (5, 5)]
    for got, a, b in zip(scores.unbind(), q.unbind(), k.unbind(), strict=True):
        torch.testing.assert_close(got, torch.softmax(a @ b.T, -1), rtol=1e-4, atol=1e-5)
    # A product that comes out of one program goes into the next.
    again = jit(lambda s: s.sum(2))(scores)
    torch.testing.assert_close(again.values, torch.ones(8))
    assert again.offsets.tolist() == offsets.tolist()


@pytest.mark.parametrize("packed", [True, False])
def test_part_of_every_rectangle_is_read_where_it_is(packed: bool) -> None:
    """Cutting the rows of rectangles leaves gaps between them; nothing is copied to read them."""
    structure = Structure.from_lengths(T([4, 0, 3])).with_columns(COUNTS, packed=packed)
    jt = JaggedTensor(torch.randn((20, 3) if packed else (7, 6, 3)), structure)
    cut = jt[:, 1:3]
    assert cut.values.data_ptr() == jt.values.data_ptr() and any(rows.starts is not None for rows in cut.structure.rows)
    for k, want in enumerate(jt.unbind()):
        for backend in BACKENDS:
            total, twice = jit(lambda x: (x.sum(2), x * 2), backend=backend)(cut)
            torch.testing.assert_close(total[k], want[1:3].sum(1), msg=lambda m, b=backend: f"{b}: {m}")
            torch.testing.assert_close(twice[k], want[1:3] * 2, msg=lambda m, b=backend: f"{b}: {m}")
        torch.testing.assert_close(torch.softmax(cut, 1)[k], want[1:3].softmax(0))


@pytest.mark.parametrize(
    ("rows", "columns", "error", "message"),
    [
        ([0, 2, 3], [0, 3, 6], StructureError, "as_product: rows by columns are 9 elements together, but the dim has 8"),
        (
            [0, 2, 1],
            [0, 3, 5],
            StructureError,
            r"as_product: rows: offsets must not decrease: offsets\[2\] = 1 < offsets\[1\] = 2",
        ),
        ([0, 2, 3], [1, 3, 5], StructureError, r"as_product: columns: offsets must start at 0: offsets\[0\] = 1"),
        ([0, 2, 3], [0, 5], ShapeError, "as_product: the numbers of offsets of rows and of columns differ: 2 and 3"),
    ],
)
def test_wrong_rectangles(rows: list[int], columns: list[int], error: type[Exception], message: str) -> None:
    with ir.Fusion() as f:
        x, q, k = f.input((None,), torch.float32), f.input((None,), torch.int64), f.input((None,), torch.int64)
        f.output(ops.exp(ops.as_product(x, q, k)))
    with pytest.raises(error, match=message):
        f.evaluate(torch.arange(8.0), T(rows), T(columns))


def test_columns_need_room() -> None:
    with ir.Fusion() as f:
        x, q, k = f.input((None, 2), torch.float32), f.input((None,), torch.int64), f.input((None,), torch.int64)
        f.output(ops.exp(ops.as_product(x, q, k, packed=False)))
    with pytest.raises(ShapeError, match="as_product: dim 1, which holds the columns, has 2 positions; the longest row has 3"):
        f.evaluate(torch.zeros(3, 2), T([0, 2, 3]), T([0, 3, 5]))


@pytest.mark.gpu
@COMPOSITIONS
def test_on_a_gpu(name: str) -> None:
    jt = tensor_of(name)
    there = jt.to("cuda")
    functions: list[Callable[..., object]] = [lambda x: torch.exp(x) * 2]
    functions += [lambda x, dim=dim: x.sum(dim) for dim in reducible(jt)]
    functions += [lambda x, dim=dim: torch.softmax(x, dim) for dim in reducible(jt)]
    for function in functions:
        want, got = jit(function, backend="reference")(jt), jit(function)(there)
        if isinstance(want, JaggedTensor):
            assert got.structure.to("cpu").same_rows(want.structure)
            want, got = want.to_padded(), got.to_padded()
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


@COMPOSITIONS
def test_everything_at_once(name: str) -> None:
    jt = tensor_of(name)
    for backend in BACKENDS:
        got = jit(lambda x: (x.sum(), x.amax()), backend=backend)(jt)
        want = (jt.to_padded().sum(), jt.to_padded(-torch.inf).amax() if jt.numel() else torch.tensor(-torch.inf))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m, b=backend: f"{b}: {m}")
