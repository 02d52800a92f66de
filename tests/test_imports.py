"""Imports go one way: a module uses its own package and those that come earlier in the order of stages.

In: the source of the package, parsed and not imported. Out: failures that name the file, the line and the import.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "serrate"

ORDER = (
    "version",
    "errors",
    "logs",
    "settings",
    "modes",
    "ir",
    "tensor",
    "frontend",
    "interpret",
    "analysis",
    "draw",
    "schedule",
    "lower",
    "codegen",
    "runtime",
    "tuner",
    "report",
    "autograd",
    "engine",
    "fusion_stage",
    "compiled",
    "tiles",
    "api",
    "nn",
    "distributed",
    "cli",
    "__main__",
)

APART = {
    # The oracle of the compiler: of it, it sees neither what a kernel becomes nor how that is run.
    "interpret": ("errors", "tensor", "frontend.kernel"),
    "frontend.kernel": ("errors", "tensor", "ir"),
}
"""What some parts use beside themselves, where that is less than the order allows."""

ORACLE_IS_USED_BY = ("api",)
"""Who chooses between interpreting and compiling; nobody else knows that there is an interpreter."""

FREE = ("", "language")
"""The public faces, `serrate` itself and `serrate.language`: they gather names from everywhere, and only `cli` uses them."""

THIRD_PARTY = {"filelock"}
"""The packages that `import serrate` loads beside torch; the other dependencies and all extras are loaded where they are used."""

ON_DEMAND = (
    "serrate.cli",
    "serrate.distributed",
    "serrate.draw",
    "serrate.report",
    "serrate.analysis.inspection",
    "serrate.codegen.triton",
    "serrate.runtime.triton",
)
"""The parts of serrate that most programs never use: `import serrate` leaves them alone."""


def rank(unit: str) -> int:
    """The place of a unit (a top-level package or module of serrate) in the order; a face stands just before `cli`."""
    return ORDER.index("cli") - 1 if unit in FREE else ORDER.index(unit)


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path, package: Path = PACKAGE) -> str:
    """`ir` for serrate/ir/expr.py, `errors` for serrate/errors.py, the empty name for serrate/__init__.py."""
    parts = path.relative_to(package).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imported(path: Path, package: Path = PACKAGE) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and path inside serrate of every import in a file, wherever it stands: inside functions and type checks too."""
    here = ("serrate", *path.relative_to(package).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            source = (*base, *(node.module.split(".") if node.module else ()))
            targets = [(*source, alias.name) for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] == "serrate":
                yield node.lineno, target[1:]


def imported_units(path: Path, package: Path = PACKAGE) -> Iterator[tuple[int, str]]:
    """Line and unit of every import of serrate in a file."""
    return ((line, _unit(target, package)) for line, target in imported(path, package))


def _unit(parts: tuple[str, ...], package: Path) -> str:
    # `from serrate import jit` names an attribute of the top module, not a unit.
    if not parts or not ((package / parts[0]).is_dir() or (package / f"{parts[0]}.py").is_file()):
        return ""
    return parts[0]


def violations(path: Path, package: Path = PACKAGE) -> list[str]:
    unit = unit_of(path, package)
    if unit in FREE:
        return []
    return [
        f"{path}:{line}: serrate.{unit} imports serrate{'.' if target else ''}{target}, which comes later in the order"
        for line, target in imported_units(path, package)
        if target != unit and rank(target) >= rank(unit)
    ]


def test_every_unit_has_a_place_in_the_order() -> None:
    assert {unit_of(path) for path in modules()} <= {*ORDER, *FREE}


def test_imports_go_one_way() -> None:
    assert [violation for path in modules() for violation in violations(path)] == []


@pytest.mark.parametrize("part", APART)
def test_parts_that_stand_apart(part: str) -> None:
    allowed = [tuple(name.split(".")) for name in (part, *APART[part])]
    beyond = [
        f"{path}:{line}: {part} imports serrate.{'.'.join(target)}"
        for path in sorted((PACKAGE / Path(*part.split("."))).rglob("*.py"))
        for line, target in imported(path)
        if not any(target[: len(name)] == name for name in allowed)
    ]
    assert beyond == []


def test_the_compiler_does_not_know_its_oracle() -> None:
    users = {unit_of(path) for path in modules() for _, unit in imported_units(path) if unit == "interpret"}
    assert users == {"interpret", *ORACLE_IS_USED_BY}


def test_no_stage_uses_what_is_for_people() -> None:
    users = {
        unit_of(path)
        for path in modules()
        for _, target in imported(path)
        if target[:2] == ("analysis", "inspection") or target[:1] == ("draw",)
    }
    assert users <= {"analysis", "draw", "report", "compiled", *FREE}  # which gives `Fusion.draw` to the IR
    readers = {unit_of(path) for path in modules() for _, unit in imported_units(path) if unit == "report"}
    assert readers == {"report", "engine", "fusion_stage", "compiled", "tiles", "api"}  # who has an `explain`
    inside = [path for path in modules() if unit_of(path) == "analysis" and "inspection" not in path.parts]
    own = [f"{path}:{line}" for path in inside for line, target in imported(path) if target[:2] == ("analysis", "inspection")]
    assert all("analysis/__init__.py" in place for place in own)


def test_front_ends_know_no_backend() -> None:
    ends = ("frontend", "tiles", "language", "api")
    own = [path for path in modules() if unit_of(path) in ends]
    assert [f"{path}:{line}" for path in own for line, unit in imported_units(path) if unit == "codegen"] == []


def test_no_star_imports() -> None:
    stars = [
        f"{path}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    assert stars == []


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import serrate.errors", True),
        ("from serrate.ir import expr", True),
        ("from serrate import ir", True),
        ("from . import guards", True),
        ("from .guards import guards", True),
        ("from ..ir import expr", True),
        ("import torch", True),
        ("import serrate.schedule", False),
        ("from serrate.cli import main", False),
        ("from serrate import codegen", False),
        ("from serrate import jit", False),
        ("import serrate", False),
        ("import serrate.language as hl", False),
        ("from .. import lower", False),
        ("from ..lower.passes import run", False),
        ("def f():\n    import serrate.tuner", False),
    ],
)
def test_the_check_tells_directions_apart(tmp_path: Path, statement: str, allowed: bool) -> None:
    for unit in ORDER:
        (tmp_path / unit).mkdir()
    (tmp_path / "language.py").touch()
    module = tmp_path / "analysis" / "probe.py"
    module.write_text(statement)
    assert (violations(module, tmp_path) == []) is allowed


@pytest.fixture(scope="module")
def brought() -> set[str]:
    """The modules that `import serrate` loads beyond those that `import torch` has already loaded."""
    program = "import sys, torch; before = set(sys.modules); import serrate; print(*(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_import_loads_no_heavy_package(brought: set[str]) -> None:
    packages = {module.partition(".")[0] for module in brought} - sys.stdlib_module_names
    assert {name for name in packages if not name.startswith("_sysconfigdata")} == {"serrate", *THIRD_PARTY}


def test_import_loads_no_further_part_of_torch(brought: set[str]) -> None:
    assert {module for module in brought if module.partition(".")[0] == "torch"} == set()


def test_import_leaves_the_rarely_used_parts_unloaded(brought: set[str]) -> None:
    assert {module for module in brought if module.startswith(ON_DEMAND)} == set()
