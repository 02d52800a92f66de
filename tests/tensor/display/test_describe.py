"""`describe`: its numbers against plain Python, its text, its words, and the copy it admits to.

In: random lengths, lengths of known distributions, every composition. Out: failures where a number or word is wrong.
"""

from __future__ import annotations

import io
import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from serrate.errors import SyncError
from serrate.tensor import JaggedTensor, Structure, no_sync
from serrate.tensor.display.describe import bins, fitting
from tests.tensor.models import KINDS, ragged
from tests.tensor.shown import SHOWN, unread

LENGTHS = st.one_of(
    st.lists(st.integers(0, 40), max_size=30),
    st.lists(st.sampled_from([0, 1, 2, 3, 10_000_000]), max_size=9),
    st.lists(st.just(7), max_size=3),
)


def drawn(kind: str, rows: int = 500) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if kind == "equal":
        lengths = torch.full((rows,), 50.0)
    elif kind == "about equal":
        lengths = torch.randn(rows, generator=generator) * 4 + 60
    elif kind == "even":
        lengths = torch.rand(rows, generator=generator) * 200
    elif kind == "exponential":
        lengths = torch.empty(rows).exponential_(1 / 60, generator=generator)
    elif kind == "bimodal":
        lengths = torch.where(torch.rand(rows, generator=generator) < 0.8, 6.0, 300.0) + torch.randn(rows, generator=generator)
    else:
        lengths = torch.randn(rows, generator=generator) * 4 + 60
        lengths[rows // 2] = 40_000
    return lengths.round().clamp(min=0).long()


@given(LENGTHS)
def test_numbers_are_those_of_the_lengths(lengths: list[int]) -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(1).expand(sum(lengths)), lengths)
    found = jt.describe()
    (dim,) = found.dims
    assert (dim.name, dim.dim, dim.holds, dim.rows, dim.total) == ("r0", 1, "positions", len(lengths), sum(lengths))
    assert (dim.min_length, dim.max_length) == (min(lengths, default=0), max(lengths, default=0))
    assert dim.mean_length == pytest.approx(statistics.fmean(lengths) if lengths else 0)
    assert dim.median_length == (statistics.median(lengths) if lengths else 0)
    assert dim.p95_length == (sorted(lengths)[math.ceil(0.95 * len(lengths)) - 1] if lengths else 0)
    assert sum(length <= dim.p95_length for length in lengths) >= 0.95 * len(lengths)
    assert dim.empty_rows == lengths.count(0)
    assert (dim.sparsity, dim.variance) == (pytest.approx(jt.sparsity), pytest.approx(jt.variance))
    assert dim.deviation == pytest.approx(math.sqrt(jt.variance))
    assert found.padded_bytes == 4 * len(lengths) * max(lengths, default=0)
    assert found.value_bytes == 4 * sum(lengths)
    assert found.structure_bytes == 8 * (len(lengths) + 1)
    assert found.saved_bytes == found.padded_bytes - found.value_bytes - found.structure_bytes
    assert found.holes == pytest.approx(1 - dim.sparsity)


@given(LENGTHS)
def test_every_row_is_in_one_bin(lengths: list[int]) -> None:
    found = bins(torch.tensor(sorted(lengths), dtype=torch.int64))
    assert len(found) <= 12
    assert [each.rows for each in found] == [sum(each.low <= length <= each.high for length in lengths) for each in found]
    assert sum(each.rows for each in found) == len(lengths)
    assert all(before.high + 1 == after.low for before, after in itertools.pairwise(found))
    if lengths:
        assert (found[0].low, found[-1].high) == (min(lengths), max(lengths))


@pytest.mark.parametrize("name", SHOWN)
def test_padding_is_what_to_padded_makes(name: str) -> None:
    jt = SHOWN[name][0]
    found, padded = jt.describe(), jt.to_padded()
    assert found.padded_bytes == padded.numel() * padded.element_size()
    assert found.holes == pytest.approx(1 - jt.numel() / padded.numel() if padded.numel() else 0)
    assert found.stored_holes == pytest.approx(1 - jt.numel() / jt.values.numel() if jt.values.numel() else 0)
    assert found.total_elements == jt.total_elements
    assert [dim.dim for dim in found.dims] == list(jt.jagged_dims)
    for level, dim in enumerate(found.dims):
        assert dim.rows == jt.structure.num_rows(level)
        assert dim.max_length == jt.structure.max_length(level)
        assert dim.variance == pytest.approx(jt.structure.variance(level))
    assert f"{dim.name}  dim {dim.dim}: " in str(found)


def test_what_a_length_counts() -> None:
    holds = {name: [dim.holds for dim in SHOWN[name][0].describe().dims] for name in ("three levels", "product", "independent")}
    assert holds == {
        "three levels": ["parts", "parts", "positions"],
        "product": ["positions", "columns"],
        "independent": ["positions", "positions"],
    }


@pytest.mark.parametrize(
    ("kind", "word", "reason"),
    [
        ("equal", "uniform", "every row has length 50"),
        ("about equal", "uniform", "rows are about equally long: they deviate from the mean by"),
        ("even", "uniform", "short and long rows alike"),
        ("exponential", "exponential", "many short rows and few long ones"),
        ("bimodal", "bimodal", "% of the rows are about 6 long, the others about 300"),
        ("giant", "giant", "the longest row holds 57% of all"),
    ],
)
def test_words_fit(kind: str, word: str, reason: str) -> None:
    lengths = drawn(kind)
    found = JaggedTensor.from_lengths(torch.zeros(int(lengths.sum())), lengths).describe()
    assert found.dims[0].distribution == word
    assert reason in found.dims[0].reason
    assert f"looks     {word}: {found.dims[0].reason}" in str(found)
    found_as_hint = JaggedTensor.from_lengths(torch.zeros(3), [3]).with_hint(distribution=found.dims[0].distribution)
    assert found_as_hint.hints.distribution == word


def test_few_rows_look_like_nothing() -> None:
    assert fitting(torch.tensor([], dtype=torch.int64)) == (None, "there are no rows")
    assert fitting(torch.tensor([1, 5, 9])) == (None, "too few rows to tell")
    assert fitting(torch.tensor([0, 0, 0]))[0] == "uniform"


def test_a_skewed_histogram_has_bins_that_grow() -> None:
    lengths = [*[3] * 50, 5000]
    (dim,) = JaggedTensor.from_lengths(torch.zeros(1).expand(sum(lengths)), lengths).describe().dims
    assert [(each.low, each.high) for each in dim.histogram][:3] == [(3, 3), (4, 15), (16, 63)]
    assert (dim.histogram[0].rows, dim.histogram[-1].rows) == (50, 1)


def test_text_says_what_padding_costs() -> None:
    jt = JaggedTensor.from_lengths(torch.zeros(2000, 512), torch.tensor([0, 1900, *[1] * 100]))
    text = str(jt.describe())
    assert "JaggedTensor (102, r0, 512)  torch.float32, cpu, csr" in text
    assert "values    3.91 MiB for 2,000 positions, and 824 B of structure" in text
    assert "padded    379 MiB, 99% of it holes: 375 MiB saved" in text
    assert "lengths   min 0, median 1, mean 19.61, p95 1, max 1,900; 1 row empty" in text
    assert "less than here" in str(SHOWN["gaps"][0].describe())
    assert "72 B, 44.4% of it holes, for 5 positions, and 40 B of structure" in str(SHOWN["gaps"][0].describe())


def test_the_text_is_the_same_everywhere() -> None:
    found = SHOWN["nested"][0].describe()
    assert repr(found) == str(found)
    plain, coloured = io.StringIO(), io.StringIO()
    Console(file=plain, width=200).print(found)
    Console(file=coloured, width=200, force_terminal=True, color_system="standard").print(found)
    assert [line.rstrip() for line in plain.getvalue().splitlines()] == str(found).splitlines()
    assert "\x1b[" in coloured.getvalue() and "\x1b[" not in plain.getvalue()


def test_describing_is_a_host_copy() -> None:
    with no_sync(strict=True), pytest.raises(SyncError, match=r"^describe needs lengths on the host"):
        unread("cpu").describe()
    with no_sync(), pytest.raises(SyncError, match=r"^describe needs lengths on the host"):
        unread("meta").describe()
    product = Structure.from_lengths(torch.tensor([2, 1]), validate=False).with_columns(torch.tensor([1, 3]), validate=False)
    with no_sync(strict=True), pytest.raises(SyncError, match=r"^describe needs lengths on the host"):
        JaggedTensor(torch.zeros(5), product).describe()
    jt = unread("cpu")
    jt.unbind()
    with no_sync(strict=True):
        assert jt.describe().dims[0].max_length == 4


@given(ragged(*KINDS))
def test_any_composition_is_described(drawn_one: tuple[JaggedTensor, list[Any]]) -> None:
    jt, _ = drawn_one
    found, padded = jt.describe(), jt.to_padded()
    assert found.padded_bytes == padded.numel() * padded.element_size()
    assert found.total_elements == jt.total_elements
    assert [dim.total for dim in found.dims] == [int(jt.structure.lengths(level).sum()) for level in range(jt.structure.levels)]
    assert len(str(found).splitlines()) > 3
