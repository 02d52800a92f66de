"""Names say one thing: a class name is used once, and the files that the pages name are there.

In: the source of the package, parsed and not imported; CONTRIBUTING and the architecture page. Out: failures that name places.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.test_imports import FREE, ORDER

ROOT = Path(__file__).resolve().parent.parent

PAGES = ("CONTRIBUTING.md", "docs/architecture.md")


def test_a_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for path in sorted((ROOT / "serrate").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py|\.md))`", (ROOT / page).read_text()))
    assert len(named) > 10
    homes = (ROOT, ROOT / "serrate", ROOT / "tests")
    assert {name for name in named if not any((home / name).exists() for home in homes)} == set()


def test_the_layout_in_contributing_is_the_order_of_imports() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| unit | holds |")[1].split("\n\n")[0]
    rows = [re.findall(r"`([a-z_]+)/?`", line.split("|")[1]) for line in table.splitlines()[2:]]
    units = [unit for row in rows for unit in row]
    there = {path.stem for path in (ROOT / "serrate").iterdir() if path.suffix in ("", ".py")} - {
        "__init__",
        "__pycache__",
        *FREE,
    }
    assert units == [unit for unit in ORDER if unit in there]
