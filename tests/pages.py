"""What pages of documentation show and the compiler makes: compared, or written anew with SERRATE_UPDATE_GOLDEN=1.

In: a file and what it should show. Out: a failure that names what is stale, or the new file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
DUMP = re.compile(r"```text dump:(\w+)\n(.*?)```", re.DOTALL)


def updating() -> bool:
    return bool(os.environ.get("SERRATE_UPDATE_GOLDEN"))


def check_dumps(page: Path, made: dict[str, str]) -> None:
    """Compares every dump of a page with what was made under its name."""
    text = page.read_text()
    if updating():
        page.write_text(DUMP.sub(lambda m: f"```text dump:{m[1]}\n{made[m[1]]}```", text))
        return
    shown = dict(DUMP.findall(text))
    assert set(shown) == set(made)
    for name, dump in made.items():
        if shown[name] != dump:
            pytest.fail(f"dump {name!r} of docs/{page.name} is stale; run the test with SERRATE_UPDATE_GOLDEN=1\n{dump}")


def check_picture(path: Path, svg: str) -> None:
    """Compares a picture with what was drawn."""
    if updating():
        path.write_text(svg)
    elif not path.is_file() or path.read_text() != svg:
        pytest.fail(f"docs/images/{path.name} is stale; run the test with SERRATE_UPDATE_GOLDEN=1 and look at it")
