"""The list of mutations is up to date; `make mutate` runs them."""

from __future__ import annotations

import ast

from tests.mutation.places import MUTATIONS
from tests.mutation.run import ROOT, stale


def test_every_mutation_changes_one_place_of_the_source() -> None:
    assert stale() == []
    assert len(set(MUTATIONS)) == len(MUTATIONS) >= 100


def test_every_mutation_is_a_program() -> None:
    for mutation in MUTATIONS:
        changed = (ROOT / mutation.path).read_text().replace(mutation.before, mutation.after)
        if mutation.path.endswith(".py"):
            ast.parse(changed)
