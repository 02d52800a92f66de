"""Every mutation names a place that exists, once; otherwise `make mutate` would change nothing, or too much."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.mutation.places import MUTATIONS


@pytest.mark.parametrize("path", sorted({m.path for m in MUTATIONS}))
def test_places_exist(path: str) -> None:
    text = (ROOT / path).read_text()
    found = {m.before: text.count(m.before) for m in MUTATIONS if m.path == path}
    assert set(found.values()) == {1}, {before: count for before, count in found.items() if count != 1}


def test_the_tests_of_mutations_exist() -> None:
    named = {test.partition("::")[0] for m in MUTATIONS for test in m.tests if test.startswith("tests/")}
    missing = {path for path in named if not (ROOT / path).exists()}
    assert not missing
