"""Operands of products in Triton: what is computed is rounded to the 16 bits of the other operand, so that matrix units multiply.

The programs are printed as for a device, and not run.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor, settings
from serrate.runtime import triton as runtime


@pytest.fixture
def for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERRATE_BACKEND", "triton")
    settings.reload()
    monkeypatch.setattr(runtime, "_interpreted", lambda: False)
    monkeypatch.setattr(runtime, "_copy_engine", lambda: False)


def dots(function: Any, dtype: torch.dtype) -> list[str]:
    x = JaggedTensor.from_lengths(torch.zeros(70, 64, dtype=dtype), [30, 40])
    return re.findall(r"tl\.dot\(.*", serrate.kernel(config=serrate.Config(strategy="maskless"))(function).source(x))


@pytest.mark.usefixtures("for_a_device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_have_as_many_bits_as_values(dtype: torch.dtype) -> None:
    def weighted(x: JaggedTensor) -> JaggedTensor:
        out = torch.empty_like(x)
        for b in hl.grid(x.num_rows):
            for tile_q in hl.tile(x.max_length):
                acc = hl.zeros([tile_q, 64])
                for tile_k in hl.tile(x.max_length):
                    scores = torch.exp((x[b, tile_q] @ x[b, tile_k].T).to(torch.float32))
                    acc = acc + scores @ x[b, tile_k]
                out[b, tile_q] = acc.to(out.dtype)
        return out

    found = dots(weighted, dtype)
    assert len(found) >= 2 and not any("ieee" in text for text in found)
    assert any(f".to(tl.{str(dtype).removeprefix('torch.')})" in text for text in found)


@pytest.mark.usefixtures("for_a_device")
def test_float32_in_memory_is_not_rounded() -> None:
    def squares(x: JaggedTensor) -> JaggedTensor:
        out = torch.empty_like(x)
        for b in hl.grid(x.num_rows):
            for tile_q in hl.tile(x.max_length):
                acc = hl.zeros([tile_q, 64])
                for tile_k in hl.tile(x.max_length):
                    acc = acc + (x[b, tile_q] @ x[b, tile_k].T) @ x[b, tile_k]
                out[b, tile_q] = acc
        return out

    found = dots(squares, torch.float32)
    assert len(found) >= 2 and all('input_precision="ieee"' in text for text in found)
