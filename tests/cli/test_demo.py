"""`serrate demo` as a user meets it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from serrate.cli import app
from serrate.cli.peak import peak_of


@pytest.fixture(scope="module")
def shown() -> str:
    result = CliRunner().invoke(app, ["demo", "--quick", "--source"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


def test_every_way_is_shown_with_its_time_memory_and_error(shown: str) -> None:
    for word in ("serrate", "torch.mm per expert", "padded bmm", "padded + mask", "NestedTensor", "padding would be"):
        assert word in shown
    assert shown.count(" ms ") == 6 and shown.count(" MB │") == 6
    assert "NestedTensor: does not support" in shown


def test_nothing_is_cut_on_a_narrow_terminal(shown: str) -> None:
    tables, _, source = shown.partition("#include")
    assert source or 'extern "C"' in shown
    assert "…" not in tables and all(len(line) <= 80 for line in tables.splitlines() if "│" in line or "█" in line)


def test_a_peak_is_what_is_held_at_most_and_not_only_at_the_end() -> None:
    def wasteful() -> int:
        return len(bytearray(64 << 20))

    peak, size = peak_of(wasteful)
    if peak is None:
        pytest.skip("the system does not say how much memory a process holds")
    # the system counts in steps of its own
    assert peak >= 60 << 20 and size == 64 << 20
    assert (peak_of(lambda: None)[0] or 0) < 16 << 20
