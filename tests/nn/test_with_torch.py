"""Modules under torch's own machinery: gradient scaling, checkpointing, saved states, DDP and FSDP2 with two real processes."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from serrate import JaggedTensor
from serrate import nn as ragged
from serrate.errors import GradientError

ROOT = Path(__file__).resolve().parents[2]


def rows() -> JaggedTensor:
    torch.manual_seed(1)
    return JaggedTensor.from_lengths(torch.randn(10, 8), [3, 0, 5, 2])


def layer() -> ragged.TransformerEncoderLayer:
    torch.manual_seed(0)
    return ragged.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True, is_causal=True)


def test_a_scaler_unscales_the_gradients_it_scaled() -> None:
    one, other = layer(), layer()
    steps = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (one, other)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(one(rows()).values.square().mean()).backward()
    scaler.unscale_(steps[0])
    nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    scaler.step(steps[0])
    other(rows()).values.square().mean().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    steps[1].step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_recomputes_the_same_gradients() -> None:
    module, x = layer(), rows()
    wanted = torch.autograd.grad(module(x).values.square().mean(), list(module.parameters()))
    found = checkpoint(module, x, use_reentrant=False)
    got = torch.autograd.grad(found.values.square().mean(), list(module.parameters()))
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def test_modules_are_copied_and_saved() -> None:
    module, x = layer(), rows()
    held = io.BytesIO()
    torch.save(module.state_dict(), held)
    held.seek(0)
    fresh = copy.deepcopy(module)
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    fresh.load_state_dict(torch.load(held))
    assert torch.equal(fresh(x).values, module(x).values)


def test_weights_that_were_freed_since_the_call_raise() -> None:
    module = nn.Linear(8, 4)
    found = module(rows().requires_grad_())
    module.weight.untyped_storage().resize_(0)
    with pytest.raises(GradientError, match="linear: the memory of a tensor that the backward program needs was freed"):
        found.values.sum().backward()


def test_ragged_tensors_are_taken_apart_as_dataclasses() -> None:
    x = rows()
    other = dataclasses.replace(x, values=x.values * 2)
    assert other.structure is x.structure and torch.equal(other.values, x.values * 2)
    assert [field.name for field in dataclasses.fields(x)] == ["values", "structure", "hints"]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = str(ROOT / "tests" / "nn" / "two_processes.py")
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(tmp_path / "meeting")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(told)
