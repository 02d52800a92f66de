"""Hints: which words are taken, and through what they stay with a tensor.

In: tensors with hints. Out: failures where a wrong word passes or a right one is lost.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from serrate.errors import CallError
from serrate.tensor import JaggedTensor
from serrate.tensor.hints import Hints
from tests.tensor.shown import SHOWN

KEEPERS: dict[str, Callable[[JaggedTensor], JaggedTensor]] = {
    "to dtype": lambda jt: jt.to(torch.float64),
    "to device": lambda jt: jt.to("meta"),
    "clone": lambda jt: jt.clone(),
    "detach": lambda jt: jt.detach(),
    "with_values": lambda jt: jt.with_values(torch.zeros_like(jt.values)),
    "contiguous": lambda jt: jt.contiguous(),
    "to_format": lambda jt: jt.to_format("csr"),
    "requires_grad_": lambda jt: jt.clone().to(torch.float32).requires_grad_(),
    "jt[a:b]": lambda jt: jt[1:],
    "pytree": lambda jt: tree_map(lambda values: values + 1, jt),
}


def hinted(name: str) -> JaggedTensor:
    return SHOWN[name][0].with_hint(distribution="bimodal", access_pattern="random", reuse="low")


@pytest.mark.parametrize("way", KEEPERS)
@pytest.mark.parametrize("name", SHOWN)
def test_hints_stay_with_the_rows(way: str, name: str) -> None:
    assert KEEPERS[way](hinted(name)).hints == Hints("bimodal", "random", "low")


def test_padded_storage_keeps_hints() -> None:
    assert hinted("one level").to_format("padded").hints == Hints("bimodal", "random", "low")


@pytest.mark.parametrize("name", ["nested", "three levels", "independent", "rows of dim 1"])
def test_a_component_keeps_hints(name: str) -> None:
    jt = hinted(name)
    assert jt[0].hints == jt.hints
    assert [part.hints for part in jt] == [jt.hints] * len(jt)


def test_hints_add_up_and_the_last_word_counts() -> None:
    jt = SHOWN["one level"][0]
    assert jt.hints == Hints()
    told = jt.with_hint(distribution="uniform").with_hint(reuse="high")
    assert told.hints == Hints(distribution="uniform", reuse="high")
    assert told.with_hint(distribution="giant").hints.as_dict() == {"distribution": "giant", "reuse": "high"}
    assert told.with_hint().hints == told.hints
    assert jt.hints == Hints()
    assert pickle.loads(pickle.dumps(told.hints)) == told.hints


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"distribution": "normal"},
            "distribution='normal' is not a hint: use one of 'uniform', 'exponential', 'bimodal', 'giant'",
        ),
        ({"access_pattern": 3}, "access_pattern=3 is not a hint: use one of 'row_major', 'random', 'streaming'"),
        ({"reuse": "High"}, "reuse='High' is not a hint: use one of 'low', 'medium', 'high'"),
        ({"re_use": "high"}, "with_hint does not know re_use='high': use distribution=, access_pattern=, reuse="),
        ({"layout": None}, "with_hint does not know layout=None: use distribution=, access_pattern=, reuse="),
    ],
)
def test_wrong_words(words: dict[str, Any], message: str) -> None:
    with pytest.raises(CallError) as caught:
        SHOWN["one level"][0].with_hint(**words)
    assert str(caught.value) == message
    assert isinstance(caught.value, TypeError)


def test_hints_do_not_make_another_structure() -> None:
    jt = SHOWN["nested"][0]
    assert jt.with_hint(reuse="high").structure is jt.structure
    assert jt.with_hint(reuse="high").values is jt.values
