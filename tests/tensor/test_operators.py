"""What a container refuses, in Python's operators and by names it does not have: each message says what to do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import serrate
from serrate import JaggedTensor
from serrate.errors import CallError, RaggedSizeError
from serrate.tensor.operators import _ELSEWHERE

BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow, operator.matmul),
    *(operator.and_, operator.or_, operator.xor, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
]


def ragged() -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.arange(5.0), [2, 0, 3])


@pytest.mark.parametrize("function", BINARY)
def test_operators_are_torch_functions(function: Callable[[Any, Any], Any]) -> None:
    jt = ragged()
    for one, other in ((jt, 2), (2, jt), (jt, jt), (jt, torch.ones(5)), (torch.ones(5), jt)):
        with pytest.raises(CallError, match=r"does not take a JaggedTensor outside of serrate\.jit: call it in a function under"):
            function(one, other)


def test_installed_operators_get_their_operands_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "serrate.tensor.jagged._operators", {torch.sub: lambda one, other: (one, other), torch.neg: lambda x: (x,)}
    )
    jt: Any = ragged()
    assert [part is jt for part in jt - 2] == [True, False]
    assert [part is jt for part in 2 - jt] == [False, True]
    assert (-jt)[0] is jt


def test_a_tensor_is_neither_true_nor_equal_but_hashes() -> None:
    jt = ragged()
    with pytest.raises(CallError, match="neither true nor false: ask len"):
        bool(jt)
    assert {jt: 1}[jt] == 1


@pytest.mark.parametrize("name", ["sum", "exp", "data_ptr"])
def test_names_of_torch_lead_to_the_parts_and_to_jit(name: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"no attribute '{name}': its parts are tensors and have it, .* under @serrate\.jit"
    ):
        getattr(ragged(), name)


@pytest.mark.parametrize("name", sorted(_ELSEWHERE))
def test_names_of_others_lead_to_names_here(name: str) -> None:
    jt = ragged()
    with pytest.raises(AttributeError) as caught:
        getattr(jt, name)
    assert str(caught.value).startswith(f"JaggedTensor has no attribute {name!r}: use ")
    # The first word of the advice is something that exists.
    first = _ELSEWHERE[name].split(":")[0].split(" ")[0].rstrip(",")
    eval(first.partition("(")[0].partition("[")[0], {"jt": jt, "torch": torch, "len": len})


def test_other_names_are_missing_as_in_python() -> None:
    assert not hasattr(ragged(), "nonsense")
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$") as caught:
        ragged().nonsense  # type: ignore[attr-defined]  # noqa: B018
    assert caught.value.name == "nonsense"


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: JaggedTensor([[1, 2], [3]]), "a list alone"),  # type: ignore[arg-type]
        (lambda: JaggedTensor(torch.ones(3), torch.tensor([0, 3])), "a Tensor as its structure"),  # type: ignore[arg-type]
        (lambda: JaggedTensor(torch.ones(3), offsets=torch.tensor([0, 3])), "offsets="),  # type: ignore[arg-type]
        (lambda: JaggedTensor(torch.ones(3), ragged().structure, lengths=1), "lengths="),  # type: ignore[arg-type]
    ],
)
def test_the_constructor_leads_to_the_others(make: Callable[[], JaggedTensor], got: str) -> None:
    with pytest.raises(CallError) as caught:
        make()
    assert f"got {got}: use JaggedTensor.from_csr(values, offsets)" in str(caught.value)


@pytest.mark.parametrize("function", [operator.add, operator.sub, operator.mul, operator.floordiv, operator.lt, operator.ge])
def test_ragged_sizes_do_no_arithmetic(function: Callable[[Any, Any], Any]) -> None:
    size = ragged().shape[1]
    for one, other in ((size, 1), (1, size)):
        with pytest.raises(RaggedSizeError, match=r"differs from row to row: use jt\.lengths"):
            function(one, other)


def test_a_program_still_does_all_that() -> None:
    jt: Any = ragged()
    assert serrate.jit(lambda x: (x * 2 + 1).sum(dim=1))(jt).tolist() == [4, 0, 21]
