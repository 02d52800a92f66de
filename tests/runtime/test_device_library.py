"""Library calls as Triton kernels: under Triton's interpreter, against loops written in Python.

In: keys of all kinds, some outside every group, in several blocks. Out: failures that show other offsets or another order.
"""

from __future__ import annotations

import pytest
import torch

from serrate import ir, ops
from serrate.codegen.triton.grouping import BLOCK
from serrate.runtime import device_library, library
from tests.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="CPU tensors are compiled only by the interpreter")


def keys_of(size: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, (size,), dtype=dtype, generator=torch.Generator().manual_seed(size))


KEYS = {
    "one key": (torch.tensor([0]), 1),
    "one group": (keys_of(30, 0, 1), 1),
    "some": (keys_of(50, 0, 5), 5),
    "int32": (keys_of(70, 0, 8, torch.int32), 8),
    "empty groups": (torch.tensor([9, 2, 9, 2, 2]), 12),
    "outside": (keys_of(200, -3, 9), 6),
    "all outside": (torch.tensor([-1, 7, 3, -(2**60)]), 3),
    "a whole block": (keys_of(BLOCK, 0, 7), 7),
    "a block and one": (keys_of(BLOCK + 1, 0, 7), 7),
    "blocks, some outside": (keys_of(3 * BLOCK + 5, -1, 70), 64),
    "many groups": (keys_of(2 * BLOCK + 9, 0, 1000), 1000),
    "one group of a power of two": (keys_of(90, 0, 16), 16),
}


def grouped(keys: list[int], count: int) -> tuple[list[int], list[int]]:
    order = [k for g in range(count) for k, key in enumerate(keys) if key == g]
    sizes = [sum(key == g for key in keys) for g in range(count)]
    outside = [k for k, key in enumerate(keys) if not 0 <= key < count]
    return [sum(sizes[:g]) for g in range(count + 1)], order + outside


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KEYS)
def test_group_by(name: str) -> None:
    keys, count = KEYS[name]
    offsets, permutation = device_library.group_by(keys, count)
    assert (offsets.tolist(), permutation.tolist()) == grouped(keys.tolist(), count)
    assert offsets.dtype == permutation.dtype == torch.int64
    both = device_library.group_and_invert(keys, count)
    assert torch.equal(both[0], offsets) and torch.equal(both[1], permutation)
    assert [both[2].tolist()[p] for p in permutation.tolist()] == list(range(len(keys)))


def test_what_the_kernels_do_not_take_is_sorted_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    plain = library.group_by
    monkeypatch.setattr(library, "group_by", lambda keys, count: (taken.append(len(keys)), plain(keys, count))[1])
    for keys, count in ((torch.zeros(0, dtype=torch.int64), 3), (keys_of(40, 0, 2000), 2000), (keys_of(80, 0, 3)[::2], 3)):
        offsets, permutation = device_library.group_by(keys, count)
        assert (offsets.tolist(), permutation.tolist()) == grouped(keys.tolist(), count)
        inverse = device_library.group_and_invert(keys, count)[2].tolist()
        assert [inverse[p] for p in permutation.tolist()] == list(range(len(keys)))
    assert taken == [0, 0, 40, 40, 40, 40]


@pytest.mark.parametrize("size", [0, 1, 7, BLOCK, 2 * BLOCK + 3])
def test_invert(size: int) -> None:
    permutation = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    (inverse,) = device_library.invert(permutation)
    assert [inverse.tolist()[p] for p in permutation.tolist()] == list(range(size))


def test_positions_that_are_not_reached() -> None:
    assert device_library.invert(torch.tensor([2, -1, 0, 9, 2 - 5]))[0].tolist() == [2, -1, 4, -1, 1]


def test_programs_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A staged program on the Triton backend groups with the kernels."""
    used: list[str] = []
    for name, own in device_library.FUNCTIONS.items():
        noted = lambda *args, name=name, own=own: (used.append(name), own(*args))[1]  # noqa: E731
        monkeypatch.setitem(device_library.FUNCTIONS, name, noted)
    library._chosen.cache_clear()
    with ir.Fusion() as f:
        x, keys = f.input((None, 2), torch.float32), f.input((None,), torch.int64)
        bounds, places = ops.group_by(keys, 4)
        sums = ops.sum(ops.as_nested(ops.index(x, places), bounds), 1)
        back = ops.invert(places)
        f.output(sums, back, ops.invert(back))
    values, given = torch.arange(20.0).view(10, 2), torch.tensor([3, 0, 1, 3, 3, 1, 0, 0, 2, 1])
    try:
        found, inverse, order = f.compile("triton")(values, given)
    finally:
        library._chosen.cache_clear()
    # The first inverse comes with the groups.
    assert used == ["group_and_invert", "invert"]
    assert found.tolist() == [values[given == g].sum(0).tolist() for g in range(4)]
    assert inverse.tolist() == torch.argsort(torch.argsort(given, stable=True)).tolist()
    assert order.tolist() == torch.argsort(given, stable=True).tolist()
