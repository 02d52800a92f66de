"""Every way offsets and lengths can be wrong, with the words a user gets.

In: wrong offsets and lengths. Out: failures where a mistake passes or its message changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serrate.errors import CallError, DeviceError, DtypeError, SerrateError, ShapeError, StructureError
from serrate.tensor import JaggedTensor, Structure, wait_for_checks
from serrate.tensor.checks.validate import Validate

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
        "offsets must have at least one element, the leading 0; got shape (0,)",
    ),
    ((), 0, StructureError, "a structure needs at least one level of offsets, got none"),
    (
        (T([0, 4], dtype=torch.uint8),),
        4,
        DtypeError,
        "offsets must be int32 or int64, got torch.uint8: convert them with .to(torch.int64)",
    ),
    (
        (T([0.0, 4.0], requires_grad=True),),
        4,
        DtypeError,
        "offsets must be int32 or int64, got torch.float32: convert them with .to(torch.int64)",
    ),
    (
        (T([0, 4]).to_sparse(),),
        4,
        DtypeError,
        "offsets must be strided, got torch.sparse_coo: convert them with .to_dense()",
    ),
    (
        (T([0, 4], dtype=torch.int32),),
        2**31,
        StructureError,
        "int32 offsets cannot count 2147483648 positions: convert them with .to(torch.int64)",
    ),
    (
        (T([0, 2**31 - 1, -(2**31), -1, 5], dtype=torch.int32),),
        5,
        StructureError,
        "offsets must not decrease: offsets[2] = -2147483648 < offsets[1] = 2147483647",
    ),
    (
        (T([0, 2**30, -(2**31), -(2**30), 0, 2**30], dtype=torch.int32),),
        2**30,
        StructureError,
        "offsets must not decrease: offsets[2] = -2147483648 < offsets[1] = 1073741824",
    ),
    (
        (T([0, 2**62, -(2**63), -(2**62), 0, 2**62]),),
        2**62,
        StructureError,
        "offsets must not decrease: offsets[2] = -9223372036854775808 < offsets[1] = 4611686018427387904",
    ),
    (
        (torch.zeros(2, 0, dtype=torch.int64),),
        0,
        StructureError,
        "offsets must have at least one element, the leading 0; got shape (2, 0)",
    ),
    (
        (T([0, 1, 2]), T([0, 1, 2]), T([0, 3, 5])),
        6,
        StructureError,
        "offsets of level 2 must end at the number of values: they end at 5, but the values have 6 positions",
    ),
    (
        (T([0, 1, 2]), T([0, 1, 3]), T([0, 3, 5])),
        5,
        StructureError,
        "offsets of level 1 must end at the number of parts of level 2: they end at 3, but level 2 has 2 parts",
    ),
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
    (
        (T([2**62, 2**62, 2**62]),),
        None,
        StructureError,
        f"lengths must not sum to more than int64 can hold: they sum to {3 * 2**62}",
    ),
    (
        (T([2**31 - 1, 2**31 - 1], dtype=torch.int32),),
        2**31,
        StructureError,
        "lengths must sum to the number of values: they sum to 4294967294, but the values have 2147483648 positions",
    ),
    ((T([2, 1]), T([3, 0, -2])), 1, StructureError, "lengths of level 1 must not be negative: lengths[2] = -2"),
    ((T([True]),), 1, DtypeError, "lengths must be int32 or int64, got torch.bool: convert them with .to(torch.int64)"),
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


@pytest.mark.parametrize("validate", [None, True, "deferred"])
def test_one_row_of_nearly_all_int32_counts_is_right(validate: Validate) -> None:
    structure = Structure.from_offsets(T([0, 0, 2**31 - 1, 2**31 - 1], dtype=torch.int32), validate=validate)
    wait_for_checks()
    assert structure.max_length() == 2**31 - 1


def test_unvalidated_numbers_are_trusted_and_shapes_on_a_device_are_not() -> None:
    assert Structure.from_offsets(T([0, 9, 7]), validate=False).num_rows() == 2
    assert Structure.from_offsets(T([0, 9, 7], device="meta")).num_rows() == 2
    with pytest.raises(DtypeError):
        Structure.from_offsets(torch.zeros(3, device="meta"))


VALUES = torch.zeros(4, 2)
ROWS = Structure.from_lengths(T([3, 1]))


def _quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(VALUES, 0.1, 0, torch.quint8)


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
    (
        lambda: JaggedTensor.from_csr(VALUES, T([0, 4]), dim=-1),
        ShapeError,
        "dim=-1: the dim of the values is counted from the first, 0",
    ),
    (
        lambda: JaggedTensor.from_csr(VALUES, T([0, 4]), dim=1.0),  # type: ignore[arg-type]
        CallError,
        "dim must be an int, got float",
    ),
    (
        lambda: JaggedTensor.from_csr(VALUES, T([0, 4]), validate="maybe"),  # type: ignore[arg-type]
        CallError,
        "validate='maybe' is not one of None, True, False and 'deferred'",
    ),
    (
        lambda: JaggedTensor.from_csr(VALUES, 4),  # type: ignore[arg-type]
        CallError,
        "offsets or lengths must be a tensor, or a sequence; got int",
    ),
    (
        lambda: JaggedTensor.from_lengths(VALUES, [[1, 2], [1]]),
        CallError,
        "offsets or lengths given as a list must be ints, or lists of the same number of ints "
        "(expected sequence of length 2 at dim 1 (got 1)); for levels of varying sizes pass one tensor each",
    ),
    (
        lambda: JaggedTensor.from_lengths(VALUES, [T([1, 2]), [1, 2, 1]]),
        CallError,
        "levels of nested rows must all be tensors: level 1 is of type list",
    ),
    (
        lambda: JaggedTensor.from_lengths(VALUES, [4.0]),
        DtypeError,
        "lengths must be int32 or int64, got torch.float32: convert them with .to(torch.int64)",
    ),
    (
        lambda: JaggedTensor.from_csr(VALUES.to_sparse(), T([0, 4])),
        DtypeError,
        "values must be strided, got torch.sparse_coo: convert them with .to_dense()",
    ),
    (
        lambda: JaggedTensor.from_csr(_quantized(), T([0, 4])),
        DtypeError,
        "values must not be quantized, got torch.quint8: convert them with .dequantize()",
    ),
    (
        lambda: JaggedTensor.from_csr(torch.nested.nested_tensor([VALUES], layout=torch.jagged), T([0, 4])),
        CallError,
        "values must be a plain tensor, got a NestedTensor: take its values and offsets",
    ),
    (
        lambda: JaggedTensor.from_csr(torch.zeros(1).expand(2**31), T([0, 4], dtype=torch.int32)),
        StructureError,
        "int32 offsets cannot count 2147483648 positions: convert them with .to(torch.int64)",
    ),
    (
        lambda: JaggedTensor.from_csr(VALUES, T([0, 1, 2]), dim=1, max_length=2),
        StructureError,
        "max_length=2 was given, but the longest row has length 1",
    ),
    (
        lambda: JaggedTensor.from_csr(VALUES, T([0, 4]), max_length=4.0),  # type: ignore[arg-type]
        CallError,
        "max_length must be an int, or one int or None for each level; got 4.0",
    ),
    (
        lambda: JaggedTensor.from_csr(VALUES, T([[0, 1, 2], [0, 2, 2]]), max_length=(3, None)),
        StructureError,
        "max_length=3 was given, but the longest row has length 2",
    ),
    (
        lambda: JaggedTensor.from_lengths(VALUES, (T([1, 1]), T([3, 1])), min_length=(0, 1)),
        StructureError,
        "min_length=0 was given, but the shortest row has length 1",
    ),
    (
        lambda: JaggedTensor.from_csr(torch.zeros(3, 4), T([0, 4]), dim=0),
        StructureError,
        "offsets must end at the number of values: they end at 4, but the values have 3 positions",
    ),
    (lambda: JaggedTensor.from_starts(VALUES, [-1], [2]), StructureError, "starts must not be negative: starts[0] = -1"),
    (
        lambda: JaggedTensor.from_starts(VALUES, [2, 0], [1, 2]),
        StructureError,
        "rows must not overlap and must be in order: row 0 ends at 3, row 1 starts at 0",
    ),
    (
        lambda: JaggedTensor.from_starts(VALUES, [0, 1], [2, 2]),
        StructureError,
        "rows must not overlap and must be in order: row 0 ends at 2, row 1 starts at 1",
    ),
    (
        lambda: JaggedTensor.from_starts(VALUES, [0, 3], [2, 2]),
        StructureError,
        "rows must lie inside the values: row 1 ends at 5, but there are 4 positions",
    ),
    (
        lambda: JaggedTensor.from_starts(VALUES, T([2**31 - 1], dtype=torch.int32), T([2], dtype=torch.int32)),
        StructureError,
        "rows must lie inside the values: row 0 ends at 2147483649, but there are 4 positions",
    ),
    (
        lambda: JaggedTensor.from_starts(VALUES, [0], [2, 2]),
        StructureError,
        "starts must have one element per row: 1 starts, but 2 rows",
    ),
    (
        lambda: JaggedTensor.from_starts(VALUES, [[0, 2]], [[1, 1]]),
        StructureError,
        "starts must be 1-D, got 2-D of shape (1, 2)",
    ),
    (
        lambda: JaggedTensor.from_starts(VALUES, T([0.0, 2.0]), T([1, 1])),
        DtypeError,
        "starts must be int32 or int64, got torch.float32: convert them with .to(torch.int64)",
    ),
    (
        lambda: JaggedTensor.from_starts(VALUES, (T([0]), T([2])), T([1, 1])),
        CallError,
        "starts must be a single tensor, for the innermost rows; got 2",
    ),
    (lambda: JaggedTensor.from_starts(VALUES, [0, 2], [1, -1]), StructureError, "lengths must not be negative: lengths[1] = -1"),
    (
        lambda: Structure.from_starts(T([0], device="meta"), T([1])),
        DeviceError,
        "starts are on meta, but lengths are on cpu: move one of them",
    ),
    (
        lambda: JaggedTensor(torch.zeros(4), Structure.from_starts(T([0, 3]), T([2, 2]))),
        ShapeError,
        "the rows reach position 5, but values of shape (4,) have 4",
    ),
    (lambda: ROWS.with_columns(T([2, -1])), StructureError, "counts must not be negative: counts[1] = -1"),
    (
        lambda: ROWS.with_columns(T([2, 1, 1])),
        StructureError,
        "counts must have one element for each of 2 rows, got shape (3,)",
    ),
    (lambda: ROWS.with_columns(T([[2], [1]])), StructureError, "counts must be 1-D, got 2-D of shape (2, 1)"),
    (
        lambda: ROWS.with_columns(T([2.0, 1.0])),
        DtypeError,
        "counts must be int32 or int64, got torch.float32: convert them with .to(torch.int64)",
    ),
    (
        lambda: ROWS.with_columns(T([2, 1], device="meta")),
        DeviceError,
        "counts are on meta, but the rows are on cpu: move one of them",
    ),
    (
        lambda: ROWS.with_columns(T([2, 1]), max_length=3),
        StructureError,
        "max_length=3 was given, but the row with the most columns has 2",
    ),
    (
        lambda: ROWS.with_columns(T([2, 1])).with_columns(T([2, 1])),
        StructureError,
        "with_columns: Structure(2 > 4 x columns) already has other ragged dims; start from the rows of one dim",
    ),
    (
        lambda: Structure.from_starts(T([0, 4]), T([2, 2])).with_columns(T([3, 1])),
        StructureError,
        "rows must not overlap and must be in order: row 0 ends at 6, row 1 starts at 4",
    ),
    (
        lambda: JaggedTensor(VALUES, ROWS.with_columns(T([2, 3]), packed=False)),
        ShapeError,
        "the rows have up to 3 columns, but dim 1 of values of shape (4, 2) has 2",
    ),
    (
        lambda: JaggedTensor(VALUES, ROWS.with_columns(T([2, 3]))),
        ShapeError,
        "the rows hold 9 positions together, but values of shape (4, 2) have 4",
    ),
    (
        lambda: JaggedTensor(torch.zeros(4), ROWS.with_columns(T([1, 1]), packed=False)),
        ShapeError,
        "dim 1 of the values is ragged, but they have shape (4,)",
    ),
    (
        lambda: JaggedTensor(VALUES, Structure.independent(ROWS, Structure.from_lengths(T([1, 2]), dim=1))),
        ShapeError,
        "the rows hold 3 positions together, but dim 1 of values of shape (4, 2) have 2",
    ),
    (
        lambda: Structure.independent(ROWS, ROWS),
        StructureError,
        "independent: structures 0 and 1 both partition dim 0: give one of them another dim=",
    ),
    (
        lambda: Structure.independent(ROWS, Structure.from_lengths(T([1], device="meta"), dim=1)),
        DeviceError,
        "independent: the structures are on cpu, meta: move them to one device",
    ),
    (
        lambda: Structure.independent(ROWS, T([0, 1])),  # type: ignore[arg-type]
        CallError,
        "independent: pass structures; argument 1 is of type Tensor",
    ),
    (
        lambda: JaggedTensor.from_padded(VALUES, mask=torch.ones(4, 2)),
        DtypeError,
        "from_padded: the mask must be torch.bool, got torch.float32: write mask != 0",
    ),
    (
        lambda: JaggedTensor.from_padded(VALUES, mask=torch.ones(2, 4, dtype=torch.bool)),
        ShapeError,
        "from_padded: the mask must have the first dims of (4, 2), got shape (2, 4)",
    ),
    (lambda: JaggedTensor.from_padded(VALUES), CallError, "from_padded: pass one of lengths, mask and structure"),
    (
        lambda: JaggedTensor.from_csr([1, 2], T([0, 2])),  # type: ignore[arg-type]
        CallError,
        "values must be a tensor, got list: use torch.as_tensor(values), or from_list(rows) or from_nested_list(numbers)",
    ),
    (
        lambda: JaggedTensor.from_padded(VALUES, VALUES > 0),
        DtypeError,
        "from_padded: lengths must be int32 or int64, got torch.bool: pass a mask as mask=",
    ),
    (
        lambda: JaggedTensor.from_list(VALUES),
        CallError,
        "from_list takes a list of rows, got one tensor of 2 dims: use from_padded, with the lengths of its "
        "rows, or give x.unbind()",
    ),
    (
        lambda: Structure([0, 2, 5]),  # type: ignore[arg-type]
        CallError,
        "Structure(rows) takes a tuple of Rows, got list: use Structure.from_offsets or Structure.from_lengths",
    ),
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
    (lambda: JaggedTensor.from_list([VALUES, 3]), CallError, "rows must be tensors: rows[1] is of type int"),  # type: ignore[list-item]
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
        "every branch of a nested list must have the same depth: at depth 1 item 1 is of type Tensor, but another is a list",
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


EMPTY: list[Callable[[], JaggedTensor]] = [
    lambda: JaggedTensor.from_csr(torch.zeros(0, 2), T([0])),
    lambda: JaggedTensor.from_csr(torch.zeros(0, 2), T([0, 0, 0], dtype=torch.int32)),
    lambda: JaggedTensor.from_csr(torch.zeros(0), (T([0]), T([0]))),
    lambda: JaggedTensor.from_csr(torch.zeros(0), (T([0, 0, 2]), T([0, 0, 0]))),
    lambda: JaggedTensor.from_csr(torch.zeros(0), torch.zeros(0, 3, dtype=torch.int64)),
    lambda: JaggedTensor.from_csr(torch.zeros(0), torch.zeros(3, 1, dtype=torch.int64)),
    lambda: JaggedTensor.from_csr(torch.zeros(0, 3), T([0, 0, 3]), dim=1),
    lambda: JaggedTensor.from_csr(torch.zeros(3, 0), T([0]), dim=1),
    lambda: JaggedTensor.from_lengths(torch.zeros(0), []),
    lambda: JaggedTensor.from_lengths(torch.zeros(0), (T([], dtype=torch.int64), T([], dtype=torch.int64))),
    lambda: JaggedTensor.from_lengths(torch.zeros(0), torch.zeros(0, 0, dtype=torch.int64)),
    lambda: JaggedTensor.from_lengths(torch.zeros(0), torch.zeros(2, 0, dtype=torch.int64)),
    lambda: JaggedTensor.from_starts(torch.zeros(0), [], []),
    lambda: JaggedTensor.from_starts(torch.zeros(5), [0, 5], [0, 0]),
    lambda: JaggedTensor.from_list([]),
    lambda: JaggedTensor.from_nested_list([]),
    lambda: JaggedTensor.from_padded(torch.zeros(0, 3), []),
    lambda: JaggedTensor.from_padded(torch.zeros(2, 0), [0, 0], format="padded"),
    lambda: JaggedTensor(torch.zeros(0), Structure.from_lengths(T([0, 2])).with_columns(T([3, 0]))),
    lambda: JaggedTensor(
        torch.zeros(0, 0),
        Structure.from_lengths(torch.zeros(0, dtype=torch.int64)).with_columns(T([], dtype=torch.int64), packed=False),
    ),
    lambda: JaggedTensor(
        torch.zeros(0, 0), Structure.independent(Structure.from_offsets(T([0])), Structure.from_offsets(T([0, 0]), dim=1))
    ),
]


@pytest.mark.parametrize("build", EMPTY)
def test_empty_batches_and_empty_rows_are_legal(build: Callable[[], JaggedTensor]) -> None:
    jt = build()
    assert jt.numel() == 0
    assert jt.to_padded().numel() == 0 or not jt.to_padded().any()


def test_a_failed_construction_leaves_the_structure_as_it_was() -> None:
    structure = Structure.from_offsets(T([0, 3], device="meta"))
    with pytest.raises(DeviceError):
        JaggedTensor(torch.zeros(4), structure)
    assert not structure.knows_total()
    gaps = Structure.from_starts(T([0, 3]), T([2, 2]))
    with pytest.raises(ShapeError):
        JaggedTensor(torch.zeros(4), gaps)
    with pytest.raises(ShapeError):
        JaggedTensor(torch.zeros(4), gaps)
    assert JaggedTensor(torch.zeros(5), gaps).numel() == 4


def test_small_offsets_only_for_columns_that_fit() -> None:
    rows = Structure.from_offsets(T([0, 1, 2], dtype=torch.int32))
    assert rows.with_columns(T([2, 3])).offsets[0].dtype is torch.int32
    wide = rows.with_columns(T([2**31, 3]))
    assert wide.offsets[0].dtype is torch.int64 and wide.max_length() == 2**31


def test_numbers_that_wrap_around_are_refused() -> None:
    with pytest.raises(
        StructureError, match="rows must end within int64: row 1 starts at 9223372036854775806, and its end overflows"
    ):
        JaggedTensor.from_starts(torch.zeros(10), T([0, 2**63 - 2]), T([2, 5]))
    for lengths, counts in (([2**32], [2**32]), ([2**33, 2**33], [2**30, 2**30])):
        with pytest.raises(StructureError, match="rows with columns must not have more elements than int64 can hold"):
            Structure.from_lengths(T(lengths)).with_columns(T(counts))
