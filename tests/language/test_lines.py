"""How much shorter kernels are in their jagged form: lines of device loops, counted and shown in docs/kernels.md.

In: examples/*.py. Out: a failure where a jagged form has more than half of its manual form's lines, all together more than a
third, or the table is stale.
"""

from __future__ import annotations

import ast
import linecache
import re
from pathlib import Path
from typing import Any

from tests.pages import DOCS, check_dumps

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def loop_lines(path: Path) -> dict[str, int]:
    """The lines of the loops of every kernel of a file, without blank lines and comments."""
    text = path.read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            spans = [range(s.lineno, (s.end_lineno or s.lineno) + 1) for s in node.body if isinstance(s, ast.For)]
            found[node.name] = sum(lines[n - 1].strip()[:1] not in ("", "#") for span in spans for n in span)
    return found


def counted() -> dict[str, tuple[int, int]]:
    files = {path.stem: loop_lines(path) for path in sorted(EXAMPLES.glob("*.py"))}
    return {name: (found["jagged"], found["manual"]) for name, found in files.items() if {"jagged", "manual"} <= set(found)}


def test_half_of_the_lines_and_a_third_together() -> None:
    found = counted()
    assert len(found) >= 9
    assert [name for name, (jagged, manual) in found.items() if 2 * jagged > manual] == []
    assert 3 * sum(jagged for jagged, _ in found.values()) <= sum(manual for _, manual in found.values())


def page_kernel() -> tuple[Any, Any]:
    """The first kernel of the page, and what it is called with there."""
    text = re.search(r"```python\n(.*?)```", (DOCS / "kernels.md").read_text(), re.DOTALL)
    assert text is not None
    linecache.cache["page.py"] = (len(text[1]), None, text[1].splitlines(keepends=True), "page.py")
    made: dict[str, Any] = {}
    exec(compile(text[1], "page.py", "exec"), made)
    return made["row_norms"], made["jt"]


def test_what_the_page_shows() -> None:
    found = counted()
    kernel, jt = page_kernel()
    rows = [*found.items(), ("together", (sum(j for j, _ in found.values()), sum(m for _, m in found.values())))]
    table = f"{'lines of device loops':<24}{'jagged':>8}{'by hand':>9}\n"
    table += "".join(f"{name:<24}{jagged:>8}{manual:>9}\n" for name, (jagged, manual) in rows)
    (shown,) = kernel.on("reference").variants(jt)
    (stage,) = kernel.explain(jt).stages
    plan = "".join(f"{line}\n" for line in (*stage.plan, *stage.reasons))
    dumps = {"lines": table, "kernel_program": str(shown.program), "kernel_plan": plan}
    check_dumps(DOCS / "kernels.md", dumps)
