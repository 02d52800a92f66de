"""Host time on a device that is not there: every call goes through, and launches what a GPU would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import host
from benchmarks.options import Options


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="stands in for a GPU only where torch has none")
def test_every_call_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(Options(quick=True, only=("pointwise", "gather of rows", "experts"), out=tmp_path)), capsys.readouterr().out
    lines = json.loads((tmp_path / "host.json").read_text())["lines"]
    launches = {(line["task"], line["call"]): line["launches"] for line in lines}
    assert {kind for task, kind in launches if task == "pointwise"} == {"warm", "construction", "new offsets", "other total"}
    assert all(line["microseconds"] > 0 for line in lines)
    # One kernel, and one more that checks the offsets of a new tensor.
    assert launches["pointwise", "warm"] == launches["pointwise", "new offsets"] == launches["pointwise", "construction"] == 1
    # Three of the program, and one that reports indices out of range.
    assert launches["gather of rows", "warm"] == 4
    # Three to group and invert, one check, one to derive arrays, three of the program.
    assert launches["experts", "warm"] == 8
