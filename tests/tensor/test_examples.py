"""The examples in the docstrings of `serrate.tensor` run and print what they say.

In: the modules of the package. Out: one failure for each module with an example that does not hold.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import serrate.tensor

MODULES = [module.name for module in pkgutil.iter_modules(serrate.tensor.__path__, "serrate.tensor.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serrate.tensor.jagged._operators", {})
    assert doctest.testmod(importlib.import_module(name)).failed == 0
