"""What a ragged tensor is asked for in the words of other libraries: each message says what to write instead."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from serrate import JaggedTensor
from serrate.errors import CallError, RaggedSizeError
from serrate.tensor.foreign_names import _INSTEAD


def ragged() -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.arange(5.0), [2, 0, 3])


def test_a_tensor_is_neither_true_nor_false_but_hashes() -> None:
    jt = ragged()
    with pytest.raises(CallError, match="has no truth value: use len"):
        bool(jt)
    assert {jt: 1}[jt] == 1


@pytest.mark.parametrize("name", ["data_ptr", "unfold"])
def test_names_of_torch_lead_to_the_parts(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': tensors have it; use it on jt\.values"):
        getattr(ragged(), name)


@pytest.mark.parametrize("name", sorted(_INSTEAD))
def test_names_of_others_lead_to_names_here(name: str) -> None:
    jt = ragged()
    with pytest.raises(AttributeError) as caught:
        getattr(jt, name)
    assert str(caught.value).startswith(f"JaggedTensor has no attribute {name!r}: use ")
    # The first word of the advice is something that exists.
    first = _INSTEAD[name].split(":")[0].split(" ")[0].rstrip(",")
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
