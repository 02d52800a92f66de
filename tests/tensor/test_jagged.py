"""JaggedTensor against rows held in plain Python lists: what goes in comes out, with its gradients.

In: random rows of one and two levels. Out: failures where a conversion differs from torch, row by row.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serrate.errors import DtypeError, ShapeError
from serrate.tensor import JaggedTensor
from serrate.tensor.jagged import install_operators
from serrate.tensor.padding import unpad

LENGTHS = st.one_of(
    st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 7, 13, 31]), max_size=7),
    st.lists(st.just(0), max_size=3),
    st.sampled_from([[997], [0, 0, 499, 0], [1] * 17]),
)
NESTED = st.lists(st.lists(st.sampled_from([0, 0, 1, 2, 5, 11]), max_size=4), max_size=5)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64])
INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])
INNER = st.sampled_from([(), (1,), (3,), (2, 3), (0,)])


def numbered(count: int, inner: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # Every position differs from its neighbours, so a shifted row cannot pass for the right one.
    positions = torch.arange(1, count + 1).reshape(-1, *(1 for _ in inner)).expand(count, *inner)
    return (positions % 2 == 0) if dtype is torch.bool else positions.to(dtype)


def same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(got, wanted)
    return len(got) == len(wanted) and all(same(one, other) for one, other in zip(got, wanted, strict=True))


def cut(values: Tensor, lengths: list[int]) -> list[Tensor]:
    bounds = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    return [values[first:last] for first, last in bounds]


def cut_twice(values: Tensor, nested: list[list[int]]) -> list[list[Tensor]]:
    rows = iter(cut(values, [length for part in nested for length in part]))
    return [[next(rows) for _ in part] for part in nested]


def padded_by_hand(rows: list[Tensor], inner: tuple[int, ...], dtype: torch.dtype, longest: int, fill: int) -> Tensor:
    padded = torch.full((len(rows), longest, *inner), fill, dtype=dtype)
    for row, tensor in enumerate(rows):
        padded[row, : len(tensor)] = tensor
    return padded


def nested_tensor(values: Tensor, nested: list[list[int]]) -> JaggedTensor:
    flat = [length for part in nested for length in part]
    lengths = [torch.tensor(level, dtype=torch.int64) for level in ([len(part) for part in nested], flat)]
    return JaggedTensor.from_lengths(values, lengths)


@given(LENGTHS, INNER, DTYPES, INDEX_DTYPES)
def test_one_level_round_trips(lengths: list[int], inner: tuple[int, ...], dtype: torch.dtype, index: torch.dtype) -> None:
    values = numbered(sum(lengths), inner, dtype)
    rows = cut(values, lengths)
    offsets = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=index)
    padded = padded_by_hand(rows, inner, dtype, max(lengths, default=0), 1)
    made = [
        JaggedTensor.from_csr(values, offsets),
        JaggedTensor.from_csr(values, offsets.tolist()),
        JaggedTensor.from_lengths(values, torch.tensor(lengths, dtype=index)),
        JaggedTensor.from_lengths(values, lengths),
        JaggedTensor.from_padded(padded, torch.tensor(lengths, dtype=index)),
        *([JaggedTensor.from_list(rows)] if rows else []),
    ]
    for jt in made:
        assert same(jt.values, values)
        assert jt.offsets.tolist() == offsets.tolist()
        assert jt.lengths.tolist() == lengths
        assert jt.structure == made[0].structure
        assert same(jt.unbind(), rows)
        assert same(jt.to_list(), rows)
        assert same(list(jt), rows)
        assert same([jt[row] for row in range(len(jt))], rows)
        assert same([jt[row - len(jt)] for row in range(len(jt))], rows)
        assert same(jt.to_padded(fill=1), padded)


@given(NESTED, INNER, DTYPES)
def test_two_level_round_trips(nested: list[list[int]], inner: tuple[int, ...], dtype: torch.dtype) -> None:
    flat = [length for part in nested for length in part]
    values = numbered(sum(flat), inner, dtype)
    rows = cut_twice(values, nested)
    jt = nested_tensor(values, nested)
    assert same(jt.to_list(), rows)
    assert [part.ndim for part in jt] == [values.dim() + 1] * len(nested)
    assert same([part.to_list() for part in jt], rows)
    assert same([jt[row].to_list() for row in range(len(jt))], rows)
    if flat:
        again = JaggedTensor.from_nested_list(rows)
        assert same(again.values, values) and again.structure == jt.structure
    most, longest = max(map(len, nested), default=0), max(flat, default=0)
    padded = torch.full((len(nested), most, longest, *inner), 1, dtype=dtype)
    for group, parts in enumerate(rows):
        padded[group, : len(parts)] = padded_by_hand(parts, inner, dtype, longest, 1)
    assert same(jt.to_padded(fill=1), padded)
    back = JaggedTensor.from_padded(padded, [jt.structure.lengths(0), jt.structure.lengths(1)])
    assert same(back.values, values) and back.structure == jt.structure


@given(LENGTHS, st.integers(-9, 9), st.integers(-9, 9))
def test_slices_are_those_of_a_list(lengths: list[int], start: int, stop: int) -> None:
    values = numbered(sum(lengths), (2,), torch.float32)
    part = JaggedTensor.from_lengths(values, lengths)[start:stop]
    assert same(part.to_list(), cut(values, lengths)[start:stop])
    assert part.structure == JaggedTensor.from_lengths(part.values, lengths[start:stop]).structure


@given(NESTED, st.integers(-5, 5), st.integers(-5, 5))
def test_slices_of_two_levels_are_those_of_a_list(nested: list[list[int]], start: int, stop: int) -> None:
    values = numbered(sum(map(sum, nested)), (), torch.float32)
    assert same(nested_tensor(values, nested)[start:stop].to_list(), cut_twice(values, nested)[start:stop])


def test_three_levels_work_the_same() -> None:
    rows = [[[torch.tensor([1.0, 2.0])], []], [], [[torch.tensor([3.0]), torch.tensor([4.0, 5.0, 6.0])]]]
    jt = JaggedTensor.from_nested_list(rows)
    assert str(jt.shape) == "(3, r0, r1, r2)"
    assert same(jt.to_list(), rows)
    assert same(jt[2].to_list(), rows[2])
    padded = jt.to_padded(fill=-1)
    assert padded.shape == (3, 2, 2, 3)
    assert padded[2, 0].tolist() == [[3, -1, -1], [4, 5, 6]]


def test_2d_spelling_and_chain_hold_the_same_rows() -> None:
    values = torch.arange(12.0)
    square = JaggedTensor.from_csr(values, torch.tensor([[0, 3, 5], [0, 0, 0], [0, 4, 7]]))
    chain = JaggedTensor.from_csr(values, (torch.tensor([0, 2, 4, 6]), torch.tensor([0, 3, 5, 5, 5, 9, 12])))
    assert square.structure == chain.structure
    assert same(square.to_list(), chain.to_list())
    padded = square.to_padded()
    assert same(JaggedTensor.from_padded(padded, torch.tensor([[3, 2], [0, 0], [4, 3]])).values, values)


def test_empty_lists() -> None:
    jt = JaggedTensor.from_list([])
    assert (len(jt), tuple(jt.values.shape), jt.dtype, jt.unbind()) == (0, (0,), torch.get_default_dtype(), ())
    assert jt.to_padded().shape == (0, 0)
    assert JaggedTensor.from_nested_list([[], []]).tolist() == [[], []]


def test_padded_rows_may_be_longer_than_the_longest() -> None:
    x = torch.arange(12.0).reshape(2, 6)
    assert JaggedTensor.from_padded(x, [2, 3]).values.tolist() == [0, 1, 6, 7, 8]


def test_one_structure_serves_paddings_of_several_widths() -> None:
    jt = JaggedTensor.from_lengths(torch.arange(5.0), [2, 3])
    tight = jt.to_padded()
    wide = torch.nn.functional.pad(tight, (0, 4))
    assert same(unpad(tight, jt.structure), jt.values)
    assert same(unpad(wide, jt.structure), jt.values)


def test_plain_numbers_follow_the_values_to_their_device() -> None:
    values, padded = torch.zeros(3, device="meta"), torch.zeros(2, 4, device="meta")
    made = [
        JaggedTensor.from_csr(values, [0, 1, 3]),
        JaggedTensor.from_lengths(values, [1, 2]),
        JaggedTensor.from_padded(padded, [1, 2]),
    ]
    for jt in made:
        assert jt.offsets.device.type == "meta"
        assert (jt.max_length, jt.values.shape[0]) == (2, 3)


@pytest.mark.parametrize("nested", [None, [[2, 0], [], [3]]])
def test_gradients_go_through_every_conversion(nested: list[list[int]] | None) -> None:
    values = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def build(values: Tensor) -> JaggedTensor:
        return nested_tensor(values, nested) if nested else JaggedTensor.from_lengths(values, [2, 0, 3])

    structure = build(values).structure
    lengths = [structure.lengths(level) for level in range(structure.levels)]
    padded = build(values).to_padded().detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda values: build(values).to_padded(fill=3), values)
    assert torch.autograd.gradcheck(lambda padded: JaggedTensor.from_padded(padded, lengths).values, padded)
    assert torch.autograd.gradcheck(lambda values: build(values)[1:].values, values)
    assert torch.autograd.gradcheck(lambda values: build(values).to_list()[2], values) if not nested else True


def test_gradients_of_rows_meet_in_the_values() -> None:
    rows = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    jt = JaggedTensor.from_list(rows)
    assert jt.requires_grad
    first, second = jt.unbind()
    (first.sum() * 2 + second.sum() * 3).backward()
    assert rows[0].grad is not None and rows[0].grad.tolist() == [2, 2]
    assert rows[1].grad is not None and rows[1].grad.tolist() == [3]


def test_holes_of_padded_values_get_no_gradient() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    JaggedTensor.from_padded(x, [1, 2]).values.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[1, 0, 0], [1, 1, 0]]


def test_rows_share_storage_with_the_values() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(3), [1, 2])
    jt[1].fill_(7)
    jt[:1].values.fill_(5)
    assert jt.values.tolist() == [5, 7, 7]


def test_properties() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(7, 4, dtype=torch.float64), [3, 0, 4])
    assert (jt.ndim, jt.jagged_dims, str(jt.shape), len(jt)) == (3, (1,), "(3, r0, 4)", 3)
    assert (jt.num_rows, jt.max_length, jt.min_length, jt.total_elements) == (3, 4, 0, 7)
    assert (jt.sparsity, jt.variance) == (pytest.approx(7 / 12), pytest.approx(26 / 9))
    assert (jt.format, jt.dtype, jt.device, jt.requires_grad) == ("csr", torch.float64, torch.device("cpu"), False)
    assert (jt.size(0), jt.size(2), jt.size(-1)) == (3, 4, 4)
    deep = nested_tensor(torch.zeros(5, 2), [[2, 0], [], [3]])
    assert (deep.ndim, deep.jagged_dims, str(deep.shape)) == (4, (1, 2), "(3, r0, r1, 2)")
    assert (len(deep), deep.num_rows, deep.max_length) == (3, 3, 3)
    assert deep.offsets.tolist() == [0, 2, 2, 5]


def test_ragged_sizes_are_symbols() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(7), [3, 0, 4])
    size = jt.size(1)
    message = "r0 is the size of a ragged dim and differs from row to row: use jt.lengths for every row's, or jt.max_length"
    for convert in (int, float, range):
        with pytest.raises(TypeError, match=message):
            convert(size)  # type: ignore[operator]
    assert size == JaggedTensor.from_lengths(torch.ones(7), [3, 0, 4]).size(1)
    assert hash(size) == hash(jt.size(1))
    assert size != JaggedTensor.from_lengths(torch.ones(7), [3, 1, 3]).size(1)
    deep = nested_tensor(torch.zeros(2), [[2]])
    assert deep.size(1) != deep.size(2)
    assert size != 7 and size != "r0"


@pytest.mark.parametrize("dim", [2, -3])
def test_sizes_of_dims_that_do_not_exist(dim: int) -> None:
    with pytest.raises(ShapeError, match=f"dim {dim} does not exist: the tensor has 2 dims"):
        JaggedTensor.from_lengths(torch.zeros(7), [3, 0, 4]).size(dim)


def test_wrong_rows() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(7), [3, 0, 4])
    for row in (3, -4):
        with pytest.raises(IndexError, match=f"row {row} does not exist: the tensor has 3 rows"):
            jt[row]


@pytest.mark.parametrize(
    ("dtype", "fill", "fits"),
    [
        (torch.int64, 2.0, True),
        (torch.int64, 0.5, False),
        (torch.int64, float("nan"), False),
        (torch.int64, 1j, False),
        (torch.bool, 1, True),
        (torch.bool, 2, False),
        (torch.float32, float("-inf"), True),
        (torch.float32, 1j, False),
        (torch.complex64, 1j, True),
    ],
)
def test_fill_must_fit_the_dtype(dtype: torch.dtype, fill: complex, fits: bool) -> None:
    jt = JaggedTensor.from_lengths(torch.ones(1, dtype=dtype), [1, 0])
    if fits:
        assert jt.to_padded(fill)[1, 0].item() == fill
    else:
        with pytest.raises(DtypeError, match=r"fill=.* does not fit torch\."):
            jt.to_padded(fill)


def test_detach_clone_and_to() -> None:
    jt = JaggedTensor.from_lengths(torch.ones(3, requires_grad=True), [1, 2]).with_hint(reuse="high")
    for other in (jt.detach(), jt.clone(), jt.to(torch.float64), jt.with_values(torch.zeros(3))):
        assert other.structure is jt.structure
        assert other.hints == jt.hints
    assert (jt.detach().requires_grad, jt.clone().requires_grad) == (False, True)
    assert jt.clone().values.data_ptr() != jt.values.data_ptr()
    assert jt.to("cpu") is jt
    moved = jt.to("meta", torch.float16)
    assert (moved.device.type, moved.dtype, moved.offsets.device.type, moved.offsets.dtype) == (
        "meta",
        torch.float16,
        "meta",
        torch.int64,
    )
    assert moved.max_length == 2


def test_torch_functions_run_what_was_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serrate.tensor.jagged._operators", {})
    jt = JaggedTensor.from_lengths(torch.ones(3), [1, 2])
    with pytest.raises(TypeError) as caught:
        torch.relu(jt)
    assert str(caught.value) == "torch.relu does not take a JaggedTensor: use jt.values, jt.unbind() or jt.to_padded()"
    install_operators({torch.clamp: lambda jt, min: jt.with_values(torch.clamp(jt.values, min=min))})
    assert torch.clamp(jt, min=2).values.tolist() == [2, 2, 2]


def test_other_classes_may_take_over_torch_functions() -> None:
    class Other:
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> str:
            return "taken over"

    assert torch.add(JaggedTensor.from_list([torch.ones(3)]), Other()) == "taken over"


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_that_torch_hardly_knows_are_padded(dtype: torch.dtype) -> None:
    jt = JaggedTensor.from_lengths(torch.arange(3, dtype=torch.float32).to(dtype), [2, 1])
    assert jt.to_padded(1).to(torch.float32).tolist() == [[0, 1], [2, 1]]
