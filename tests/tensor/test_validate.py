"""Every way offsets and lengths can be wrong, with the words a user gets.

In: wrong offsets and lengths. Out: failures where a mistake passes or its message changes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serrate.errors import CallError, DeviceError, DtypeError, SerrateError, ShapeError, StructureError
from serrate.tensor import JaggedTensor, Structure

T = torch.tensor

OFFSETS: list[tuple[tuple[object, ...], int | None, type[SerrateError], str]] = [
    ((T([0, 4, 9, 7]),), 7, StructureError, "offsets must not decrease: offsets[3] = 7 < offsets[2] = 9"),
    ((T([0, 4, 9, 7], dtype=torch.int32),), 7, StructureError, "offsets must not decrease: offsets[3] = 7 < offsets[2] = 9"),
    ((T([0, -2]),), None, StructureError, "offsets must not decrease: offsets[1] = -2 < offsets[0] = 0"),
    ((T([1, 4]),), 4, StructureError, "offsets must start at 0: offsets[0] = 1"),
    (
        (T([0, 4]),),
        5,
        StructureError,
        "offsets must end at the number of values: they end at 4, but the values have 5 positions",
    ),
    ((T([0]),), 5, StructureError, "offsets must end at the number of values: they end at 0, but the values have 5 positions"),
    ((T([0.0, 4.0]),), 4, DtypeError, "offsets must be int32 or int64, got torch.float32: convert them with .to(torch.int64)"),
    ((T([False]),), 0, DtypeError, "offsets must be int32 or int64, got torch.bool: convert them with .to(torch.int64)"),
    (
        (T(3),),
        4,
        StructureError,
        "offsets must be 1-D, or 2-D with one row for each component, got 0-D of shape ()",
    ),
    (
        (torch.zeros(1, 2, 3, dtype=torch.int64),),
        4,
        StructureError,
        "offsets must be 1-D, or 2-D with one row for each component, got 3-D of shape (1, 2, 3)",
    ),
    (
        (torch.zeros(0, dtype=torch.int64),),
        0,
        StructureError,
        "offsets must hold at least the 0 that opens the first row, got shape (0,)",
    ),
    ((), 0, StructureError, "a structure needs at least one level of offsets, got none"),
    (([0, 4],), 4, CallError, "offsets must be a tensor, got list"),
    ((T([[0, 2], [1, 2]]),), 4, StructureError, "offsets must start at 0: offsets[1, 0] = 1"),
    ((T([[0, 2, 3], [0, 2, 1]]),), 4, StructureError, "offsets must not decrease: offsets[1, 2] = 1 < offsets[1, 1] = 2"),
    (
        (T([[0, 2], [0, 3]]),),
        4,
        StructureError,
        "offsets must end at the number of values: they end at 5, but the values have 4 positions",
    ),
    (
        (T([0, 2, 4]), T([0, 1, 2, 3])),
        3,
        StructureError,
        "offsets of level 0 must end at the number of parts of level 1: they end at 4, but level 1 has 3 parts",
    ),
    (
        (T([0, 2, 4]), T([[0, 1], [0, 2]])),
        3,
        StructureError,
        "offsets of level 0 must end at the number of parts of level 1: they end at 4, but level 1 has 2 parts",
    ),
    (
        (T([0, 2]), T([0, 3, 1])),
        1,
        StructureError,
        "offsets of level 1 must not decrease: offsets[2] = 1 < offsets[1] = 3",
    ),
    (
        (T([0, 2]), T([0, 3, 4], device="meta")),
        4,
        DeviceError,
        "offsets of level 1 are on meta, but those of level 0 are on cpu: move one of them",
    ),
]

LENGTHS: list[tuple[tuple[Tensor, ...], int | None, type[SerrateError], str]] = [
    ((T([2, -1]),), 1, StructureError, "lengths must not be negative: lengths[1] = -1"),
    ((T([[2, 1], [0, -3]]),), 0, StructureError, "lengths must not be negative: lengths[1, 1] = -3"),
    (
        (T([2, 1]),),
        4,
        StructureError,
        "lengths must sum to the number of values: they sum to 3, but the values have 4 positions",
    ),
    (
        (T([2, 1]), T([5, 5])),
        10,
        StructureError,
        "lengths of level 0 must sum to the number of parts of level 1: they sum to 3, but level 1 has 2 parts",
    ),
    ((T([2.0]),), 2, DtypeError, "lengths must be int32 or int64, got torch.float32: convert them with .to(torch.int64)"),
    ((T(2),), 2, StructureError, "lengths must be 1-D, or 2-D with one row for each component, got 0-D of shape ()"),
]


@pytest.mark.parametrize(("offsets", "total", "error", "message"), OFFSETS)
def test_wrong_offsets(offsets: tuple[Tensor, ...], total: int | None, error: type[SerrateError], message: str) -> None:
    with pytest.raises(error) as caught:
        Structure.from_offsets(*offsets, total=total)
    assert str(caught.value) == message


@pytest.mark.parametrize(("lengths", "total", "error", "message"), LENGTHS)
def test_wrong_lengths(lengths: tuple[Tensor, ...], total: int | None, error: type[SerrateError], message: str) -> None:
    with pytest.raises(error) as caught:
        Structure.from_lengths(*lengths, total=total)
    assert str(caught.value) == message


@given(st.lists(st.integers(-3, 9), min_size=1, max_size=8), st.integers(0, 9))
def test_offsets_pass_exactly_if_they_describe_rows(numbers: list[int], total: int) -> None:
    right = numbers[0] == 0 and numbers == sorted(numbers) and numbers[-1] == total
    try:
        Structure.from_offsets(T(numbers), total=total)
    except StructureError:
        assert not right
    else:
        assert right


def test_int32_differences_that_would_wrap_around_are_found() -> None:
    extreme = torch.iinfo(torch.int32)
    with pytest.raises(StructureError, match="must not decrease"):
        Structure.from_offsets(T([0, extreme.max, extreme.min], dtype=torch.int32))


def test_unvalidated_numbers_are_trusted_and_shapes_on_a_device_are_not() -> None:
    assert Structure.from_offsets(T([0, 9, 7]), validate=False).num_rows() == 2
    assert Structure.from_offsets(T([0, 9, 7], device="meta")).num_rows() == 2
    with pytest.raises(DtypeError):
        Structure.from_offsets(torch.zeros(3, device="meta"))


VALUES = torch.zeros(4, 2)

CONSTRUCTORS: list[tuple[Callable[[], object], type[SerrateError], str]] = [
    (
        lambda: JaggedTensor.from_csr(VALUES, T([0, 4]), dim=3),
        ShapeError,
        "dim=3 of the values does not exist: they have shape (4, 2)",
    ),
    (
        lambda: JaggedTensor.from_csr(VALUES, T([0, 4], device="meta")),
        DeviceError,
        "values are on cpu, but offsets or lengths on meta: move one of them",
    ),
    (lambda: JaggedTensor.from_csr([1, 2], T([0, 2])), CallError, "values must be a tensor, got list"),  # type: ignore[arg-type]
    (
        lambda: JaggedTensor.from_csr(T(1.0), T([0])),
        ShapeError,
        "values must have at least one dim, whose positions the rows share; got a scalar",
    ),
    (
        lambda: JaggedTensor.from_lengths(VALUES, [1, 2]),
        StructureError,
        "lengths must sum to the number of values: they sum to 3, but the values have 4 positions",
    ),
    (lambda: JaggedTensor.from_list([VALUES, 3]), CallError, "rows must be tensors: rows[1] is a int"),  # type: ignore[list-item]
    (
        lambda: JaggedTensor.from_list([T(1.0)]),
        ShapeError,
        "rows must have at least one dim, which is ragged: rows[0] is a scalar",
    ),
    (
        lambda: JaggedTensor.from_list([VALUES, torch.zeros(4, 3)]),
        ShapeError,
        "rows must agree in every dim after the first: rows[1] has shape (4, 3), rows[0] has shape (4, 2)",
    ),
    (
        lambda: JaggedTensor.from_list([VALUES, VALUES.half()]),
        DtypeError,
        "rows must have one dtype: rows[1] is torch.float16, rows[0] is torch.float32",
    ),
    (
        lambda: JaggedTensor.from_list([VALUES, VALUES.to("meta")]),
        DeviceError,
        "rows must be on one device: rows[1] is on meta, rows[0] on cpu",
    ),
    (
        lambda: JaggedTensor.from_nested_list([[VALUES], VALUES]),
        StructureError,
        "every branch of a nested list needs the same depth: at depth 1 item 1 is a Tensor, not a list; "
        "for a single level use from_list",
    ),
    (
        lambda: JaggedTensor.from_padded(VALUES, T([2, 1, 1])),
        ShapeError,
        "lengths describe 3 rows, but the padded values have 4",
    ),
    (
        lambda: JaggedTensor.from_padded(VALUES, T([2, 1, 3, 0])),
        StructureError,
        "lengths must fit the padded rows: lengths[2] = 3, but dim 1 of the padded values has 2",
    ),
    (
        lambda: JaggedTensor.from_padded(torch.zeros(2, 2, 4), (T([3, 0]), T([1, 1, 1]))),
        StructureError,
        "lengths of level 0 must fit the padded rows: lengths[0] = 3, but dim 1 of the padded values has 2",
    ),
    (
        lambda: JaggedTensor.from_padded(torch.zeros(4), T([2, 1, 1, 0])),
        ShapeError,
        "padded values of 1 ragged level(s) need at least 2 dims, got shape (4,)",
    ),
    (
        lambda: JaggedTensor.from_padded(VALUES, T([2, -1, 1, 0])),
        StructureError,
        "lengths must not be negative: lengths[1] = -1",
    ),
    (
        lambda: JaggedTensor.from_padded(VALUES, T([2, 1, 1, 0], device="meta")),
        DeviceError,
        "values are on cpu, but offsets or lengths on meta: move one of them",
    ),
]


@pytest.mark.parametrize(("build", "error", "message"), CONSTRUCTORS)
def test_wrong_constructions(build: Callable[[], object], error: type[SerrateError], message: str) -> None:
    with pytest.raises(error) as caught:
        build()
    assert str(caught.value) == message
