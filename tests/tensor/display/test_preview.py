"""The repr: what it says for every composition, how little it reads, and when it says that it cannot.

In: tensors of every composition, large ones, unread ones. Out: failures where the line is wrong, long or costs a copy.
"""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from serrate.tensor import JaggedTensor, no_sync
from tests.tensor.shown import SHOWN, unread

TEXTS = {
    "one level": "(3, r0), dtype=torch.int64, device=cpu, lengths=[2, 0, 3], values=[0, 1, 2, 3, 4])",
    "int32": "(2, r0), dtype=torch.int64, device=cpu, lengths=[2, 1], values=[0, 1, 2])",
    "features": "(2, r0, 2), dtype=torch.int64, device=cpu, lengths=[2, 1], values=[0, 1, 2, 3, 4, 5])",
    "nested": "(2, r0, r1), dtype=torch.int64, device=cpu, lengths=[2, 3] > [4, 4, 1, 0, 2], values=[0, 1, 2, 3, 4, 5, ...])",
    "equal counts": "(2, r0, r1), dtype=torch.int64, device=cpu, lengths=[2, 2] > [1, 2, 0, 1], values=[0, 1, 2, 3])",
    "three levels": (
        "(3, r0, r1, r2), dtype=torch.float32, device=cpu, lengths=[2, 0, 1] > [1, 0, 2] > [2, 1, 3], values=[1, 2, 3, 4, 5, 6])"
    ),
    "rows of dim 1": "(2, 2, r0), dtype=torch.int64, device=cpu, lengths=[1, 2], values=[0, 1, 2, 3, 4, 5])",
    "independent": (
        "(2, r0, 3, r1), dtype=torch.int64, device=cpu, lengths=[2, 1] and [1, 0, 2], values=[0, 1, 2, 3, 4, 5, ...])"
    ),
    "product": "(3, r0, r1), dtype=torch.int64, device=cpu, lengths=[3, 0, 2] x [2, 5, 4], values=[0, 1, 2, 3, 4, 5, ...])",
    "product, columns padded": (
        "(3, r0, r1), dtype=torch.int64, device=cpu, lengths=[3, 0, 2] x [2, 5, 4], "
        "values=[0, 1, 5, 6, 10, 11, ...], format=gaps)"
    ),
    "gaps": "(2, r0), dtype=torch.int64, device=cpu, lengths=[3, 2], values=[1, 2, 3, ...], format=gaps)",
    "padded": "(3, r0), dtype=torch.int64, device=cpu, lengths=[1, 0, 3], values=[0, ...], format=padded)",
    "no rows": "(0, r0), dtype=torch.float32, device=cpu, lengths=[], values=[])",
    "empty rows": "(2, r0), dtype=torch.float32, device=cpu, lengths=[0, 0], values=[])",
}


@pytest.mark.parametrize("name", SHOWN)
def test_repr_of_every_composition(name: str) -> None:
    assert repr(SHOWN[name][0]) == f"JaggedTensor(shape={TEXTS[name]}"


def test_repr_shows_the_beginning_of_everything() -> None:
    jt = JaggedTensor.from_lengths(torch.arange(20.0).reshape(10, 2).requires_grad_(), [1] * 10)
    assert repr(jt.with_hint(reuse="high", distribution="uniform")) == (
        "JaggedTensor(shape=(10, r0, 2), dtype=torch.float32, device=cpu, lengths=[1, 1, 1, 1, 1, 1, 1, 1, ...], "
        "values=[0, 1, 2, 3, 4, 5, ...], hints=(distribution=uniform, reuse=high), requires_grad=True)"
    )


def test_repr_of_large_values_is_short_and_copies_little() -> None:
    wide = torch.zeros(1).expand(1 << 30)  # one number stands for all, so that a copy would take 4 GiB
    jt = JaggedTensor.from_csr(wide.view(1 << 12, 1 << 18), [0, 5, 1 << 12])
    begin = time.process_time()
    assert len(repr(jt)) < 200
    assert len(str(jt)) < 3000
    assert time.process_time() - begin < 1
    assert len(repr(JaggedTensor.from_lengths(torch.randn(10**6), [1000] * 1000))) < 300


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8])
def test_repr_of_every_kind_of_number(dtype: torch.dtype) -> None:
    shown = {torch.bool: "[True, True, True]", torch.complex64: "[1+0j, 1+0j, 1+0j]"}.get(dtype, "[1, 1, 1]")
    assert f"dtype={dtype}, device=cpu, lengths=[1, 2], values={shown})" in repr(
        JaggedTensor.from_lengths(torch.ones(3).to(dtype), [1, 2])
    )


def test_unread_lengths_stay_unread() -> None:
    for jt in (unread("meta"), JaggedTensor.from_csr(torch.zeros(4, device="meta"), torch.zeros(2, 3, device="meta").long())):
        assert "lengths=not on the host, values=not on the host" in repr(jt)
        assert str(jt) == repr(jt)
    with no_sync(strict=True):
        assert "lengths=not on the host, values=not on the host" in repr(unread("cpu"))
        assert str(unread("cpu")) == repr(unread("cpu"))
    with no_sync():
        assert "lengths=[3, 0, 4], values=[0, 0, 0, 0, 0, 0, ...]" in repr(unread("cpu"))


def test_lengths_read_before_are_shown() -> None:
    assert "device=meta, lengths=[1, 2], values=not on the host" in repr(
        JaggedTensor.from_csr(torch.zeros(3, device="meta"), [0, 1, 3])
    )
    jt = unread("cpu")
    jt.unbind()
    with no_sync(strict=True):
        assert "lengths=[3, 0, 4], values=not on the host" in repr(jt)


def test_values_without_numbers() -> None:
    jt = SHOWN["nested"][0]
    assert repr(tree_map(lambda _: None, jt)) == "JaggedTensor(values=None, structure=Structure(2 > 5 > 11))"
    assert str(tree_map(lambda _: None, jt)) == repr(tree_map(lambda _: None, jt))
    fake = jt.with_values(FakeTensorMode().from_tensor(torch.zeros(11)))
    assert "lengths=[2, 3] > [4, 4, 1, 0, 2], values=not on the host" in repr(fake)
    assert str(fake) == repr(fake)
    seen = []
    one = SHOWN["one level"][0]
    torch.func.vmap(lambda values: (seen.append((repr(one.with_values(values)), str(one.with_values(values)))), values)[1])(
        torch.zeros(2, 5)
    )
    assert seen == [(line, line) for line, _ in seen] and "values=not on the host" in seen[0][0]


@given(st.lists(st.integers(0, 20), max_size=30))
def test_shown_lengths_are_the_first(lengths: list[int]) -> None:
    text = repr(JaggedTensor.from_lengths(torch.zeros(sum(lengths)), lengths))
    shown = ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
    assert f"lengths=[{shown}], values=" in text


@pytest.mark.gpu
def test_showing_does_not_wait_for_a_device() -> None:
    jt = unread("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with no_sync():
            assert "lengths=not on the host, values=not on the host" in repr(jt)
            assert str(jt) == repr(jt)
            assert "the lengths are not on the host" in jt._repr_html_()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert "lengths=[3, 0, 4], values=[0, 0, 0, 0, 0, 0, ...]" in repr(jt)
    assert "<svg" in jt._repr_html_() and jt.describe().dims[0].max_length == 4
