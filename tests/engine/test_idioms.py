"""Functions of torch that ragged tensors do not have: the code that a message shows does the same, row by row.

In: `IDIOMS`. Out: failures where the code is not in the message, does not run, or differs from plain torch on a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from serrate import JaggedTensor, jit
from serrate.errors import CallError, TraceError
from serrate.tensor.foreign_names import IDIOMS

pytestmark = pytest.mark.usefixtures("reference")

LAYER, RECURRENT = nn.BatchNorm1d(4), nn.GRU(4, 2)
NAMES: dict[str, Any] = {
    "torch": torch,
    "boundaries": torch.tensor([-0.5, 0.0, 0.5]),
    "mask": JaggedTensor.from_lengths(torch.tensor([True, False, True, True, False, True]), [2, 3, 1]),
    "q": 0.25,
    "layer": LAYER,
    "rnn": RECURRENT,
    "JaggedTensor": JaggedTensor,
}
X = JaggedTensor.from_lengths(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), [2, 3, 1])
COUNTS = JaggedTensor.from_lengths(torch.tensor([0, 2, 2, 1, 5, 0]), [2, 3, 1])

ROWS: dict[str, Callable[[Any], Any]] = {
    "roll": lambda r: r.roll(1, 0),
    "logcumsumexp": lambda r: r.logcumsumexp(0),
    "cdist": lambda r: torch.cdist(r, r),
    "searchsorted": lambda r: torch.searchsorted(NAMES["boundaries"], r),
    "unique": lambda r: r.unique(),
    "nonzero": lambda r: r.nonzero(),
    "argwhere": lambda r: torch.argwhere(r),
    "median": lambda r: r.median(0).values,
    "nanmedian": lambda r: r.nanmedian(0).values,
    "mode": lambda r: r.mode(0).values,
    "quantile": lambda r: r.quantile(0.25, dim=0),
    "nanquantile": lambda r: r.nanquantile(0.25, dim=0),
    **dict.fromkeys(("gru", "lstm", "rnn_tanh", "rnn_relu"), lambda r: RECURRENT(r)[0]),
}
"""What the code gives for each row."""
WHOLE: dict[str, Callable[[], Any]] = {
    "masked_select": lambda: X.values[NAMES["mask"].values],
    "bincount": lambda: torch.bincount(COUNTS.values),
    "batch_norm": lambda: X.with_values(F.batch_norm(X.values, None, None, LAYER.weight, LAYER.bias, training=True)),
}
"""What it gives for all of them."""


def shown(name: str) -> str:
    return IDIOMS[name].code


@pytest.mark.parametrize("name", IDIOMS)
def test_the_code_does_the_same(name: str) -> None:
    jt = COUNTS if name == "bincount" else X
    results = [eval(shown(name), {**NAMES, "jt": jt})]
    if IDIOMS[name].traced:
        code = compile(f"lambda jt: {shown(name)}", "<idiom>", "eval")
        results.append(jit(eval(code, {**NAMES}))(jt))
    for result in results:
        if name in WHOLE:
            wanted = WHOLE[name]()
            one, other = (each.values if isinstance(each, JaggedTensor) else each for each in (result, wanted))
            torch.testing.assert_close(one, other)
            continue
        for got, row in zip(result, jt, strict=True):
            torch.testing.assert_close(got, ROWS[name](row), rtol=1e-4, atol=1e-5)


CALLS: dict[str, Callable[[Any], Any]] = {
    "roll": lambda x: torch.roll(x, 1, 1),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "cdist": lambda x: torch.cdist(x, x),
    "searchsorted": lambda x: torch.searchsorted(NAMES["boundaries"], x),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": torch.unique,
    "nonzero": torch.nonzero,
    "argwhere": torch.argwhere,
    "median": lambda x: torch.median(x, 1),
    "nanmedian": lambda x: torch.nanmedian(x, 1),
    "mode": lambda x: torch.mode(x, 1),
    "quantile": lambda x: torch.quantile(x, 0.5, dim=1),
    "nanquantile": lambda x: torch.nanquantile(x, 0.5, dim=1),
    "bincount": torch.bincount,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "gru": nn.GRU(4, 2, batch_first=True),
    "lstm": nn.LSTM(4, 2, batch_first=True),
    "rnn_tanh": nn.RNN(4, 2, batch_first=True),
    "rnn_relu": nn.RNN(4, 2, batch_first=True, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", IDIOMS)
def test_the_message_shows_it(name: str) -> None:
    """The messages only named the values, the rows and the padded tensor."""
    with pytest.raises(CallError, match=f"does not take a JaggedTensor: write {re.escape(shown(name))}"):
        CALLS[name](X)
    with pytest.raises(CallError, match=rf"is not supported in a traced function \(.*\); .*write {re.escape(shown(name))}"):
        jit(CALLS[name])(X)


@pytest.mark.parametrize("name", [name for name in IDIOMS if hasattr(torch.Tensor, name)])
def test_the_message_about_a_method_shows_it(name: str) -> None:
    with pytest.raises(AttributeError, match=f"JaggedTensor has no attribute '{name}': write {re.escape(shown(name))}"):
        getattr(X, name)
    if name != "nonzero":
        with pytest.raises(TraceError, match=f"write {re.escape(shown(name))}"):
            jit(lambda x: getattr(x, name)())(X)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("layer", [nn.GRU(4, 2), nn.LSTM(4, 2), nn.RNN(4, 2)], ids=["gru", "lstm", "rnn"])
def test_recurrent_layers_with_time_first_are_refused_in_the_same_words(layer: nn.Module, traced: bool) -> None:
    """They take the ragged dim for the batch; torch complained about an argument of a function that the user did not call."""
    with pytest.raises(CallError, match=f"recurrent layers do not take ragged tensors.*write {re.escape(shown('gru'))}"):
        (jit(layer) if traced else layer)(X)


@pytest.mark.parametrize("element", [3, 2.0, True, 7, torch.tensor(3), torch.tensor([9])])
def test_elements_are_found_as_in_tensors(element: Any) -> None:
    assert (element in COUNTS) == (element in COUNTS.values)


def test_elements_that_cannot_be_looked_for() -> None:
    with pytest.raises(CallError, match="in: an element of a JaggedTensor is a number, got a str"):
        assert "a" in X  # type: ignore[comparison-overlap, unused-ignore]
    with pytest.raises(TraceError, match=r"contains an element depends on data.*write \(x == element\).any\(\)"):
        jit(lambda x: x * 2 if 5 in x else x)(X)
