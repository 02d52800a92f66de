"""Jitted functions called again and again: with other structures, other statics, defaults, and offsets that were written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import serrate
from serrate import JaggedTensor, Structure, settings
from serrate.errors import DtypeError, StructureError
from serrate.runtime.launch import ReferenceExecutable

X = torch.arange(12.0)
BASE = Structure.from_lengths(torch.tensor([2, 1]))


def rectangles(lengths: list[int], counts: list[int]) -> JaggedTensor:
    return JaggedTensor(X[:4], Structure.from_lengths(torch.tensor(lengths)).with_columns(torch.tensor(counts)))


def beside(counts: list[int]) -> JaggedTensor:
    return JaggedTensor(X.view(3, 4), BASE.with_columns(torch.tensor(counts), packed=False))


def gaps(starts: list[int], lengths: list[int]) -> JaggedTensor:
    return JaggedTensor.from_starts(X, torch.tensor(starts), torch.tensor(lengths))


def padded(lengths: list[int]) -> JaggedTensor:
    return JaggedTensor.from_padded(X.view(3, 4), torch.tensor(lengths), format="padded")


# In each line the values have one shape, so that only the rows tell calls apart.
OTHER_ROWS: list[list[Callable[[], JaggedTensor]]] = [
    [lambda: rectangles([2, 1], [1, 2]), lambda: rectangles([1, 2], [2, 1]), lambda: rectangles([0, 2], [9, 2])],
    [lambda: beside([1, 2]), lambda: beside([2, 0]), lambda: beside([0, 4])],
    [lambda: gaps([0, 4], [2, 3]), lambda: gaps([1, 5], [2, 3]), lambda: gaps([1, 5], [3, 2])],
    [lambda: padded([1, 3, 0]), lambda: padded([4, 0, 2])],
]


@pytest.mark.parametrize("makers", OTHER_ROWS, ids=["rectangles", "columns beside", "gaps", "padded"])
def test_what_was_prepared_for_rows_does_not_run_for_others_of_the_same_shape(
    makers: list[Callable[[], JaggedTensor]],
) -> None:
    twice, summed = serrate.jit(lambda jt: jt * 2), serrate.jit(lambda jt: jt.sum(dim=1))
    for make in (*makers, *makers):
        rows = make().unbind()
        assert [row.tolist() for row in twice(make())] == [(row * 2).tolist() for row in rows]
        assert [torch.as_tensor(row).tolist() for row in summed(make())] == [row.sum(0).tolist() for row in rows]


def test_equal_rows_told_by_starts_and_by_offsets_meet() -> None:
    """Padded rows that leave no hole are equal to the same rows back to back, and are described by other tensors."""
    full = JaggedTensor.from_padded(X[:8].view(2, 4), torch.tensor([4, 0]), format="padded")
    packed = JaggedTensor.from_lengths(X[:4], torch.tensor([4, 0]))
    add = serrate.jit(lambda a, b: a + b)
    for a, b in ((full, packed), (packed, full)):
        assert add(a, b).tolist() == [[0, 2, 4, 6], []]


def test_a_zero_has_a_sign_and_every_nan_is_one_number() -> None:
    scaled = serrate.jit(lambda jt, factor: jt * factor)
    jt = JaggedTensor.from_lengths(torch.ones(3), [2, 1])
    assert not scaled(jt, 0.0).values.signbit().any()
    assert scaled(jt, -0.0).values.signbit().all()
    for _ in range(3):
        assert scaled(jt, float("nan")).values.isnan().all()
    assert sum(len(state.kinds) for state in scaled._fast.states) == 3


def test_tensors_of_inference_mode() -> None:
    summed = serrate.jit(lambda jt: jt.sum(dim=1))
    with torch.inference_mode():
        jt = JaggedTensor.from_lengths(torch.ones(3), torch.tensor([2, 1]))
        assert summed(jt).tolist() == [2, 1]
    assert summed(jt).tolist() == [2, 1]
    assert summed(JaggedTensor.from_lengths(torch.ones(3), jt.lengths)).tolist() == [2, 1]


@pytest.mark.parametrize("before", [False, True], ids=["between calls", "before the first"])
@pytest.mark.parametrize("kind", ["offsets", "starts", "columns"])
def test_rows_that_were_written_to_are_checked_again(kind: str, before: bool) -> None:
    numbers = torch.tensor([0, 2, 4])
    if kind == "offsets":
        jt = JaggedTensor.from_csr(X[:4], numbers)
    elif kind == "starts":
        jt = JaggedTensor.from_starts(X[:6], numbers, torch.tensor([2, 1, 2]))
    else:
        jt = JaggedTensor(X[:6], Structure.from_lengths(torch.tensor([2, 1])).with_columns(torch.tensor([2, 2])))
        numbers = jt.offsets
    summed = serrate.jit(lambda jt: jt.sum(dim=1))
    if not before:
        summed(jt)
    numbers[2] = 1000
    with pytest.raises(StructureError):
        summed(jt)


def test_defaults_that_hold_tensors_are_arguments_wherever_they_stand() -> None:
    weight, pair = torch.ones(1), [torch.ones(1)]

    @serrate.jit
    def positional(jt: Any, shift: int = 1, weight: Any = weight, /) -> Any:
        return jt * weight + shift

    @serrate.jit
    def named(jt: Any, *more: Any, weight: Any = weight) -> Any:
        return jt * weight + sum(more)

    @serrate.jit
    def listed(jt: Any, pair: Any = pair) -> Any:
        return jt * pair[0]

    jt = JaggedTensor.from_lengths(torch.ones(3), [2, 1])
    for factor in (1.0, 2.0):
        weight.fill_(factor)
        pair[0] = torch.full((1,), factor)
        assert positional(jt).tolist() == [[factor + 1] * 2, [factor + 1]]
        assert positional(jt, 0).tolist() == [[factor] * 2, [factor]]
        assert named(jt).tolist() == [[factor] * 2, [factor]]
        assert named(jt, torch.ones(1), torch.ones(1)).tolist() == [[factor + 2] * 2, [factor + 2]]
        assert named(jt, weight=torch.zeros(1)).tolist() == [[0, 0], [0]]
        assert listed(jt).tolist() == [[factor] * 2, [factor]]


def test_dtypes_that_programs_do_not_compute_with() -> None:
    jt = JaggedTensor.from_lengths(torch.ones(3, dtype=torch.complex64), [2, 1])
    with pytest.raises(DtypeError, match="is not supported in compiled programs"):
        serrate.jit(lambda jt: jt * 2, backend="cpp")(jt)


@pytest.mark.parametrize("call", [torch.relu, serrate.jit(lambda jt: jt * 3), lambda jt: torch.add(jt, 1)])
def test_a_backend_that_is_set_later_is_used_by_calls_that_were_prepared(
    call: Callable[[JaggedTensor], JaggedTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted: list[str] = []
    run = ReferenceExecutable.__call__

    def noted(self: ReferenceExecutable, *given: Any) -> None:
        interpreted.append(self.program.name)
        run(self, *given)

    monkeypatch.setattr(ReferenceExecutable, "__call__", noted)
    jt = gaps([0, 4], [2, 3])
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setenv("SERRATE_BACKEND", "cpp")
            settings.reload()
            compiled = call(jt).values
            assert not interpreted
            patch.setenv("SERRATE_BACKEND", "reference")
            settings.reload()
            assert torch.equal(call(jt).values, compiled)
            assert len(interpreted) == 1
            interpreted.clear()
        settings.reload()


def test_causal_masks_of_one_shape_and_different_corners() -> None:
    """torch's `CausalBias` is a tensor in name only: what tells two apart is no number in memory."""
    queries, keys = [2, 3], [4, 5]
    q = JaggedTensor.from_lengths(torch.randn(5, 2, 4), torch.tensor(queries))
    k = JaggedTensor.from_lengths(torch.randn(9, 2, 4), torch.tensor(keys))
    v = k.with_values(torch.randn(9, 2, 4))
    attention = torch.nn.functional.scaled_dot_product_attention
    for corner in (causal_lower_right, causal_upper_left, causal_lower_right):
        rows = []
        for x, y, z in zip(*(x.unbind() for x in (q, k, v)), strict=True):
            mask = torch.ones(len(x), len(y), dtype=torch.bool)
            mask = mask.tril(len(y) - len(x) if corner is causal_lower_right else 0)
            rows.append(attention(*(each.transpose(0, 1) for each in (x, y, z)), attn_mask=mask).transpose(0, 1))
        found = attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=corner(3, 5)).transpose(1, 2)
        torch.testing.assert_close(torch.cat([*found.unbind()]), torch.cat(rows))
