"""Failures that are known and not fixed yet, so that the suite is green and a fix is noticed.

In: the name of a case and where it runs. Out: pytest marks; a marked test that passes fails the run, and its line here goes.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest

KNOWN: dict[str, str] = {}
"""Pattern of a name -> what is wrong."""


def unfixed(name: str) -> list[Any]:
    """The marks of a test of that name."""
    return [pytest.mark.xfail(strict=True, reason=why) for pattern, why in KNOWN.items() if fnmatch.fnmatchcase(name, pattern)]
