"""One language: what the compiler takes the interpreter takes, with the same meaning.

In: kernels as users write them, compiled and interpreted with tiles of every size. Out: a failure where one of them refuses, or
gives something else than plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, Kernel

WAYS = ("compiled", 1, 2, "whole")


def ran(kernel: Kernel, way: Any) -> Any:
    return kernel if way == "compiled" else kernel.interpreted(tile=way)


@serrate.kernel
def set_under_a_flag(x: torch.Tensor, flag: bool) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in hl.tile(x.size(0)):
        if flag:
            doubled = x[t] * 2
        if flag:
            out[t] = doubled
        else:
            out[t] = x[t]
    return out


@serrate.kernel
def set_under_a_flag_in_rows(jt: JaggedTensor, flag: bool) -> torch.Tensor:
    out = torch.zeros(jt.num_rows)
    for b in hl.tile(jt.num_rows):
        total = hl.zeros([b])
        for k in hl.tile(jt.max_length):
            if flag:
                part = jt[b, k] * 2
            if flag:
                total = total + part.sum(1)
            else:
                total = total + jt[b, k].sum(1)
        out[b] = total
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flag", [True, False])
def test_names_that_are_set_and_read_under_a_flag(way: Any, flag: bool) -> None:
    x = torch.arange(5.0)
    assert torch.equal(ran(set_under_a_flag, way)(x, flag), x * (2 if flag else 1))
    jt = JaggedTensor.from_lengths(torch.arange(6.0), [1, 0, 3, 2])
    wanted = torch.stack([row.sum() for row in jt.unbind()]) * (2 if flag else 1)
    assert torch.equal(ran(set_under_a_flag_in_rows, way)(jt, flag), wanted)


@serrate.kernel
def grouped_gemm(A_jt: JaggedTensor, B: torch.Tensor) -> torch.Tensor:
    K, N = B.shape
    out = torch.zeros([A_jt.num_groups, A_jt.max_length, N], dtype=torch.promote_types(A_jt.dtype, B.dtype), device=A_jt.device)
    for tile_g in hl.tile(A_jt.num_groups):
        for tile_m, tile_n in hl.tile([A_jt.max_length, N]):
            acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
            for tile_k in hl.tile(K):
                acc = torch.addmm(acc, A_jt[tile_g, tile_m, tile_k], B[tile_k, tile_n])
            out[tile_g, tile_m, tile_n] = acc.to(out.dtype)
    return out


@pytest.mark.parametrize("way", WAYS)
def test_a_carried_value_takes_the_dims_of_what_is_added_to_it(way: Any) -> None:
    A = JaggedTensor.from_lengths(torch.randint(-3, 4, (9, 5)).float(), [2, 0, 3, 4])
    B = torch.randint(-3, 4, (5, 3)).float()
    wanted = torch.zeros(4, 4, 3)
    for g, own in enumerate(A.unbind()):
        wanted[g, : len(own)] = own @ B
    assert torch.equal(ran(grouped_gemm, way)(A, B), wanted)


@serrate.kernel
def chosen(x: torch.Tensor, jt: JaggedTensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in hl.tile(x.size(0)):
        here = torch.where(t.begin >= 0, x[t], 0.0)
        many = torch.where(jt.num_rows > 2, 10.0, 20.0)
        even = torch.where(x[t] > 2, 1, 2)
        out[t] = here + many + even + x[t].where(jt.max_length > 100, -1.0)
    return out


@pytest.mark.parametrize("way", WAYS)
def test_where_takes_conditions_on_numbers(way: Any) -> None:
    x = torch.arange(5.0)
    for lengths, many in (([1, 1], 20), ([1, 1, 0], 10)):
        jt = JaggedTensor.from_lengths(torch.zeros(2), lengths)
        assert torch.equal(ran(chosen, way)(x, jt), x + many + torch.where(x > 2, 1, 2) - 1)


@serrate.kernel
def at_fixed_places(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in hl.tile(x.size(0)):
        out[t] = x[t] + p[1] + p[7] + q[5, 0] + q[1, t]
    return out


@pytest.mark.parametrize("way", WAYS)
def test_reading_outside_of_a_tensor_gives_zero(way: Any) -> None:
    x = torch.arange(5.0)
    for length in (0, 1, 2, 3):
        p, q = torch.arange(1.0, length + 1), torch.arange(4.0).view(2, 2)
        wanted = x + (p[1] if length > 1 else 0)
        wanted[:2] += q[1]
        assert torch.equal(ran(at_fixed_places, way)(x, p, q), wanted)


@serrate.kernel
def with_bias(x: torch.Tensor, bias: torch.Tensor | None = None, scale: float | None = None) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in hl.tile(x.size(0)):
        value = x[t]
        if bias is not None:
            value = value + bias[t]
        if scale is None:
            scale = 2.0
        out[t] = value * scale
    return out


@pytest.mark.parametrize("way", WAYS)
def test_arguments_that_may_be_none(way: Any) -> None:
    x, bias = torch.arange(5.0), torch.ones(5)
    kernel = ran(with_bias, way)
    for _ in range(2):
        assert torch.equal(kernel(x), x * 2)
        assert torch.equal(kernel(x, bias), (x + bias) * 2)
        assert torch.equal(kernel(x, None, 3.0), x * 3)
        assert torch.equal(kernel(x, bias, 3.0), (x + bias) * 3)


@serrate.kernel
def by_keyword(*, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in hl.tile(x.size(0)):
        out[t] = x[t] * scale
    return out


@pytest.mark.parametrize("way", WAYS)
def test_arguments_by_keyword_have_their_defaults(way: Any) -> None:
    x = torch.arange(5.0)
    kernel = ran(by_keyword, way)
    assert torch.equal(kernel(x=x), x * 2) and torch.equal(kernel(scale=3.0, x=x), x * 3)
    with pytest.raises(TypeError, match=r"^by_keyword\(\) missing 1 required keyword-only argument: 'x'"):
        kernel()
