"""Structures: what they say about rows, when two are the same, and what they remember.

In: random and chosen lengths. Out: failures where a structure disagrees with plain Python lists.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import statistics
import timeit
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serrate.errors import DeviceError, ShapeError, StructureError
from serrate.tensor import JaggedTensor, Structure
from serrate.tensor import rows as rows_module
from serrate.tensor.rows import Rows

INTEGERS = pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
ROWS = st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 7, 13, 31, 97]), max_size=9)


def offsets_of(lengths: list[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))


@given(ROWS, st.sampled_from([torch.int32, torch.int64]))
def test_metadata_is_that_of_the_lengths(lengths: list[int], dtype: torch.dtype) -> None:
    offsets = torch.tensor(offsets_of(lengths), dtype=dtype)
    for structure in (Structure.from_offsets(offsets), Structure.from_lengths(torch.tensor(lengths, dtype=dtype))):
        assert structure.offsets[0].dtype == dtype
        assert structure.offsets[0].tolist() == offsets_of(lengths)
        assert structure.lengths().tolist() == lengths
        assert structure.levels == 1
        assert structure.num_rows() == len(lengths)
        assert structure.total_elements() == sum(lengths)
        assert structure.max_length() == max(lengths, default=0)
        assert structure.min_length() == min(lengths, default=0)
        mean = sum(lengths) / len(lengths) if lengths else 0
        assert structure.sparsity() == pytest.approx(mean / max(lengths) if sum(lengths) else 1.0)
        assert structure.variance() == pytest.approx(statistics.pvariance(lengths) if lengths else 0.0)


def test_empty_batch() -> None:
    empty = Structure.from_offsets(torch.tensor([0]))
    assert (empty.num_rows(), empty.total_elements(), empty.max_length(), empty.min_length()) == (0, 0, 0, 0)
    assert (empty.sparsity(), empty.variance()) == (1.0, 0.0)


@given(st.lists(ROWS, max_size=5))
def test_two_levels_count_parts_and_positions(nested: list[list[int]]) -> None:
    parts = [len(row) for row in nested]
    lengths = [length for row in nested for length in row]
    structure = Structure.from_offsets(torch.tensor(offsets_of(parts)), torch.tensor(offsets_of(lengths)))
    assert structure == Structure.from_lengths(torch.tensor(parts, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64))
    assert structure.lengths(0).tolist() == parts
    assert structure.lengths(1).tolist() == structure.lengths().tolist() == lengths
    assert (structure.num_rows(0), structure.num_rows()) == (len(nested), len(lengths))
    assert (structure.total_elements(0), structure.total_elements()) == (len(lengths), sum(lengths))
    assert structure.max_length(level=0) == max(parts, default=0)
    assert structure.max_length() == max(lengths, default=0)
    assert structure.variance(level=0) == pytest.approx(statistics.pvariance(parts) if parts else 0.0)


@INTEGERS
@pytest.mark.parametrize("shape", [(3, 2), (1, 5), (4, 1), (0, 3), (3, 0)])
def test_two_spellings_are_one_structure(shape: tuple[int, int], dtype: torch.dtype) -> None:
    components, parts = shape
    lengths = torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    square = torch.nn.functional.pad(lengths.cumsum(1, dtype=dtype), (1, 0))
    chain = Structure.from_lengths(torch.full((components,), parts, dtype=dtype), lengths.reshape(-1))
    for spelled in (Structure.from_offsets(square), Structure.from_lengths(lengths)):
        assert spelled == chain
        assert hash(spelled) == hash(chain)
        assert [level.dtype for level in spelled.offsets] == [dtype, dtype]
        assert spelled.max_length(0) == spelled.min_length(0) == (parts if components else 0)


def test_a_partition_of_a_ragged_domain() -> None:
    structure = Structure.from_offsets(torch.tensor([[0, 50, 127], [0, 0, 0], [0, 100, 198]]), total=325)
    assert structure.offsets[0].tolist() == [0, 2, 4, 6]
    assert structure.offsets[1].tolist() == [0, 50, 127, 127, 127, 227, 325]


def test_levels_go_on_and_2d_offsets_fit_in_a_chain() -> None:
    deep = Structure.from_offsets(torch.tensor([0, 1, 3]), torch.tensor([[0, 1, 3], [0, 0, 2], [0, 4, 4]]))
    assert deep.levels == 3
    assert [level.tolist() for level in deep.offsets] == [[0, 1, 3], [0, 2, 4, 6], [0, 1, 3, 3, 5, 9, 9]]
    assert repr(deep) == "Structure(2 > 3 > 6 > 9)"


def test_lengths_known_from_2d_shapes_belong_to_their_own_levels() -> None:
    structure = Structure.from_offsets(torch.tensor([[0, 2], [0, 1]]), torch.tensor([[0, 1, 1, 4]] * 3))
    found = Structure((Rows(structure.offsets),))
    assert [structure.max_length(level) for level in range(4)] == [found.max_length(level) for level in range(4)] == [1, 2, 3, 3]


def test_offsets_of_a_chain_have_one_dtype() -> None:
    mixed = Structure.from_offsets(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 1, 3]))
    assert [level.dtype for level in mixed.offsets] == [torch.int64, torch.int64]


def test_offsets_are_contiguous() -> None:
    assert Structure.from_offsets(torch.tensor([0, 9, 2, 9, 5])[::2]).offsets[0].is_contiguous()


def test_int32_lengths_do_not_wrap_around() -> None:
    lengths = torch.tensor([2**31 - 1, 2**31 - 1, 5], dtype=torch.int32)
    structure = Structure.from_lengths(lengths)
    assert structure.offsets[0].dtype == torch.int64
    assert structure.total_elements() == 2**32 + 3


@given(ROWS, ROWS)
def test_equality_is_by_value_and_hash_by_shape(mine: list[int], theirs: list[int]) -> None:
    one, same = (Structure.from_offsets(torch.tensor(offsets_of(mine))) for _ in range(2))
    other = Structure.from_offsets(torch.tensor(offsets_of(theirs)))
    assert one == same and hash(one) == hash(same)
    assert (one == other) == (mine == theirs)
    if len(mine) == len(theirs):
        assert hash(one) == hash(other)


def test_a_comparison_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, same, third = (Structure.from_offsets(torch.tensor([0, 2, 3])) for _ in range(3))
    assert one == same and same == third
    monkeypatch.setattr(rows_module, "_same_numbers", None)
    assert same == one and one == third and one.same_rows(third) and one.agrees(third, "both")


def test_equality_of_unlike_things() -> None:
    one = Structure.from_offsets(torch.tensor([0, 2, 3]))
    assert one == Structure.from_offsets(torch.tensor([0, 2, 3], dtype=torch.int32))
    assert one != Structure.from_offsets(torch.tensor([0, 2]), torch.tensor([0, 2, 3]))
    assert one != one.to("meta")
    wrapped = Structure.from_offsets(torch.tensor([0, 2, 2**32 + 3]))
    assert wrapped != Structure.from_offsets(torch.tensor([0, 2, 3], dtype=torch.int32))
    assert one != "r0"
    nested = [Structure.from_offsets(torch.tensor(outer), torch.tensor([0, 4, 9])) for outer in ([0, 1, 2], [0, 2, 2])]
    assert nested[0] != nested[1]


def test_shared_offsets_are_not_compared_by_value() -> None:
    offsets = torch.zeros(3, dtype=torch.int64, device="meta")
    assert Structure.from_offsets(offsets) == Structure.from_offsets(offsets)


def test_supplied_metadata_is_used_and_moves_along() -> None:
    offsets = torch.zeros(4, dtype=torch.int64, device="meta")
    structure = Structure.from_offsets(offsets, total=12, max_length=6, min_length=2)
    assert (structure.total_elements(), structure.max_length(), structure.min_length()) == (12, 6, 2)
    assert structure.sparsity() == pytest.approx(4 / 6)
    moved = Structure.from_offsets(torch.tensor([0, 2, 8, 12])).to("meta")
    assert moved.device.type == "meta"
    assert (moved.max_length(), moved.variance(), moved.host_offsets().tolist()) == (6, pytest.approx(8 / 3), [0, 2, 8, 12])


def test_metadata_may_be_supplied_for_every_level() -> None:
    chain = [torch.zeros(n, dtype=torch.int64, device="meta") for n in (3, 6)]
    structure = Structure.from_offsets(*chain, max_length=(4, 9))
    assert (structure.max_length(0), structure.max_length()) == (4, 9)


@pytest.mark.parametrize(
    ("supplied", "message"),
    [
        ({"max_length": 5}, "max_length=5 was given, but the longest row has length 4"),
        ({"min_length": 1}, "min_length=1 was given, but the shortest row has length 0"),
        ({"max_length": (1, 2)}, "max_length was given for 2 levels, but the structure has 1"),
        ({"total": 6}, "offsets must end at the number of values: they end at 7, but the values have 6 positions"),
    ],
)
def test_supplied_metadata_is_checked(supplied: dict[str, int], message: str) -> None:
    with pytest.raises(StructureError) as caught:
        Structure.from_offsets(torch.tensor([0, 3, 3, 7]), **supplied)
    assert str(caught.value) == message


def test_metadata_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    structure = Structure.from_offsets(torch.tensor([0, 3, 3, 7]))
    before = (structure.max_length(), structure.min_length(), structure.variance(), structure.sparsity())
    monkeypatch.setattr(Structure, "host_offsets", None)
    assert (structure.max_length(), structure.min_length(), structure.variance(), structure.sparsity()) == before


def test_derived_arrays_are_made_once() -> None:
    structure = Structure.from_offsets(torch.tensor([0, 3]))
    calls: list[str] = []
    for key in ("a", "b", "a"):
        structure.rows[0].derived(key, lambda key=key: calls.append(key))
    assert calls == ["a", "b"]
    assert structure.lengths() is structure.lengths()


def test_pickles_keep_offsets_and_facts_but_no_derived_arrays() -> None:
    structure = Structure.from_offsets(torch.tensor([0, 3, 3, 7]), total=7)
    structure.rows[0].derived("cannot be pickled", lambda: lambda: 0)
    again = pickle.loads(pickle.dumps(structure))
    assert again == structure
    assert again.knows_total()
    assert again.rows[0].derived("cannot be pickled", lambda: "made again") == "made again"


def test_to_the_same_device_is_itself() -> None:
    structure = Structure.from_offsets(torch.tensor([0, 3]))
    assert structure.to("cpu") is structure


@pytest.mark.parametrize("level", [2, -3])
def test_levels_that_do_not_exist(level: int) -> None:
    structure = Structure.from_offsets(torch.tensor([0, 1]), torch.tensor([0, 1]))
    with pytest.raises(ShapeError, match=rf"level {level} does not exist: the structure has 2, and the outermost"):
        structure.num_rows(level)


def test_structures_are_immutable() -> None:
    structure = Structure.from_offsets(torch.tensor([0, 3]))
    for name in ("offsets", "levels", "device", "anything"):
        with pytest.raises(AttributeError):
            setattr(structure, name, None)


def test_values_are_checked_against_the_structure() -> None:
    structure = Structure.from_offsets(torch.tensor([0, 3]))
    with pytest.raises(ShapeError, match=r"the rows hold 3 positions together, but values of shape \(4, 2\) have 4"):
        structure.check_values(torch.zeros(4, 2))
    with pytest.raises(DeviceError, match="values are on meta, but offsets and lengths are on cpu: move one of them"):
        structure.check_values(torch.zeros(3, device="meta"))


def test_a_total_only_a_copy_could_tell_is_taken_from_the_values() -> None:
    structure = Structure.from_offsets(torch.zeros(4, dtype=torch.int64, device="meta"))
    structure.check_values(torch.zeros(9, device="meta"))
    assert structure.total_elements() == 9
    with pytest.raises(ShapeError):
        structure.check_values(torch.zeros(8, device="meta"))


def test_construction_is_cheap() -> None:
    offsets = torch.arange(0, 1001, 10)

    def build() -> Structure:
        return Structure.from_offsets(offsets, total=1000, max_length=10, min_length=10, validate=False)

    # Two to three microseconds on a quiet machine; the bound leaves room for a busy one and still catches a torch op.
    assert min(timeit.repeat(build, number=500, repeat=20)) / 500 < 10e-6


def test_what_is_known_of_rows_in_place_is_forgotten_back_to_back() -> None:
    """Packed columns take more positions than rows whose columns are in the next dim: bounds of one are none of the other."""
    beside = Structure.from_starts(torch.tensor([1, 2]), torch.tensor([1, 0])).with_columns(torch.tensor([3, 0]), packed=False)
    beside.check_values(torch.zeros(2, 4))
    assert beside.rows[0].known("within", 0) == 2
    packed = beside.back_to_back().rows[0]
    assert packed.end("a test") == 3
    assert packed.known("within", 0) is None and packed.known("columns within", 0) is None


def test_offsets_written_in_place_are_read_again() -> None:
    offsets = torch.tensor([0, 2, 5, 9])
    structure = Structure.from_offsets(offsets)
    other = Structure.from_offsets(torch.tensor([0, 2, 5, 9]))
    assert structure == other and structure.max_length() == 4 and structure.lengths().tolist() == [2, 3, 4]
    offsets.copy_(torch.tensor([0, 7, 7, 9]))
    assert (structure.max_length(), structure.min_length(), structure.total_elements()) == (7, 0, 9)
    assert structure.lengths().tolist() == [7, 0, 2] and structure.sparsity() == 3 / 7
    assert structure != other and structure == Structure.from_offsets(offsets.clone())
    assert structure.host_offsets().tolist() == [0, 7, 7, 9]
    offsets[-1] = 8
    with pytest.raises(ShapeError, match="the rows hold 8 positions together, but values of shape \\(9,\\) have 9"):
        structure.check_values(torch.zeros(9))
    structure.check_values(torch.zeros(8))


def test_inner_offsets_and_starts_written_in_place_are_read_again() -> None:
    inner = torch.tensor([0, 4, 4, 9])
    nested = Structure.from_offsets(torch.tensor([0, 2, 3]), inner)
    assert nested.max_length() == 5
    inner[1] = 1
    assert nested.max_length() == 5 and nested.min_length() == 1 and nested.lengths().tolist() == [1, 3, 5]
    starts = torch.tensor([0, 8])
    gaps = Structure.from_starts(starts, torch.tensor([3, 5]))
    gaps.check_values(torch.zeros(13))
    starts[1] = 10
    with pytest.raises(ShapeError, match="the rows reach position 15"):
        gaps.check_values(torch.zeros(13))


def test_dims_move_up_where_columns_are_packed() -> None:
    """Columns of the next dim take two dims of the values, and one when they are packed."""
    box = Structure.from_lengths(torch.tensor([2, 1])).with_columns(torch.tensor([3, 1]), packed=False)
    both = Structure.independent(box, Structure.from_offsets(torch.tensor([0, 1, 4]), dim=2))
    packed = both.back_to_back()
    assert (both.dims, packed.dims) == ((0, 2), (0, 1))
    assert [rows.storage_dims for rows in packed.rows] == [1, 1] and packed.total_elements() == 7 * 4


def test_rows_with_gaps_are_checked_against_every_values() -> None:
    structure = Structure.from_starts(torch.tensor([0, 8]), torch.tensor([3, 2]))
    for size in (20, 10, 12):
        structure.check_values(torch.zeros(size))
    for size in (9, 0):
        with pytest.raises(ShapeError, match="the rows reach position 10"):
            structure.check_values(torch.zeros(size))


def test_is_freed_with_its_last_reference() -> None:
    """Offsets on a GPU must not wait for the garbage collector."""
    gc.disable()
    try:
        jt = JaggedTensor.from_lengths(torch.zeros(5), torch.tensor([3, 2]))
        gone = [weakref.ref(each) for each in (jt.structure, jt.structure.rows[0], jt.offsets)]
        del jt
        assert [each() for each in gone] == [None] * 3
    finally:
        gc.enable()
