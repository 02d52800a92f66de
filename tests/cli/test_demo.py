"""`serrate demo` and `serrate bench` as a user meets them."""

from __future__ import annotations

from typer.testing import CliRunner

from serrate.cli import app


def test_the_demo_shows_every_way_and_its_error() -> None:
    result = CliRunner().invoke(app, ["demo", "--quick", "--source"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for word in ("serrate", "padded bmm", "NestedTensor", "largest error", "padding would be", 'extern "C"'):
        assert word in result.output


def test_bench_lists_what_there_is_and_refuses_what_there_is_not() -> None:
    listed = CliRunner().invoke(app, ["bench"])
    assert listed.exit_code == 0 and "spine" in listed.output
    peers = CliRunner().invoke(app, ["bench", "--peers"])
    assert peers.exit_code == 0 and "fbgemm" in peers.output
    unknown = CliRunner().invoke(app, ["bench", "nothing"])
    assert unknown.exit_code == 2 and "nothing" in unknown.output
