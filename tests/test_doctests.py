"""Every example in a docstring of the package runs and shows what it says.

In: the modules of serrate. Out: one failure for each module whose examples do something else.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "serrate"


def modules() -> list[str]:
    """Names of the modules whose text holds an example; finding them imports nothing."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>> " in path.read_text():
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def test_there_are_examples() -> None:
    assert {"serrate.ir.transforms", "serrate.analysis.guards"} <= set(modules())


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    if "triton" in name and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0
