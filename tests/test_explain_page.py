"""What docs/explain.md shows is what `explain` prints today; SERRATE_UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import linecache
import re
from typing import Any

from tests.pages import DOCS, check_dumps

PAGE = DOCS / "explain.md"


def test_what_the_page_shows() -> None:
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    linecache.cache["explain.py"] = (len(block[1]), None, block[1].splitlines(keepends=True), "explain.py")
    made: dict[str, Any] = {}
    exec(compile(block[1].replace("print(report)", ""), "explain.py", "exec"), made)
    text, _, source = str(made["report"]).partition("  source\n")
    assert 'extern "C" void' in source
    check_dumps(PAGE, {"report": text})
