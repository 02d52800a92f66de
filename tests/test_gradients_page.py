"""The program that docs/gradients.md shows is what is derived today; SERRATE_UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

from typing import Any

import torch

from serrate import JaggedTensor, jit
from serrate.autograd.adjoint import gradients
from serrate.autograd.saved import backward_of
from tests.pages import DOCS, check_dumps

PAGE = DOCS / "gradients.md"


def test_the_backward_program_is_what_is_derived() -> None:
    @jit
    def scaled(jt: Any, weight: Any) -> Any:
        return (jt * weight).sum(1)

    compiled, _ = scaled.compiled(JaggedTensor.from_lengths(torch.ones(5, 4), [3, 0, 2]), torch.ones(4))
    made = backward_of(gradients(compiled.fusion, (0, 2)), [], "auto")
    check_dumps(PAGE, {"backward": str(made.fusion)})
