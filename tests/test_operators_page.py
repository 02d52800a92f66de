"""What docs/operators.md lists is what there is: every operand of its table meets rows, every name is there, none is missing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from serrate import JaggedTensor
from serrate.ir.view import TensorView
from serrate.tensor.jagged import installed_operators
from tests.pages import DOCS

TEXT = (DOCS / "operators.md").read_text()


def table(heading: str) -> list[list[str]]:
    section = TEXT.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line.strip("| ") for line in section.splitlines() if line.startswith("| ")]
    return [line.split(" | ") for line in lines[2:]]


def names() -> list[str]:
    """The words of code in the first column, without operators and options."""
    code = [word for row in table("Supported functions") for part in re.findall(r"`([^`]+)`", row[0]) for word in part.split()]
    return [word for word in code if re.fullmatch(r"(F\.)?[a-z_]\w*", word)]


@pytest.mark.parametrize("code", [row[0].strip("`") for row in table("Operands")])
def test_operands(code: str) -> None:
    jt = JaggedTensor.from_lengths(torch.rand(6, 2), [4, 0, 2])
    other: Any = eval(code, {"torch": torch, "jt": jt})
    assert (jt + other).structure is jt.structure


@pytest.mark.parametrize("name", names())
def test_names_are_there(name: str) -> None:
    owner, own = (functional, name[2:]) if name.startswith("F.") else (torch, name)
    known = {f for f in (*installed_operators(), *TensorView.operators) if not isinstance(f, str)}
    assert getattr(owner, own, None) in known or hasattr(JaggedTensor, own)


def test_nothing_is_left_out() -> None:
    told = {name.removeprefix("F.") for name in re.findall(r"[A-Za-z_][\w.]*", TEXT)}
    moved = {"cat", "stack", "flatten", "permute", "transpose", "clone", "contiguous", "detach", "dim", "size", "numel"}
    there = {n for n in TensorView.operators if isinstance(n, str) and hasattr(torch.Tensor, n) and hasattr(JaggedTensor, n)}
    aliases = {f"arc{name}" for name in ("sin", "cos", "sinh", "cosh", "tanh", "tan2")}
    aliases |= {"greater_equal", "less_equal", "not_equal", "swapdims", "view", "reshape", "t", "is_floating_point"}
    spelled = {"lt", "le", "gt", "ge", "eq", "ne"}
    assert not there - told - moved - aliases - spelled
