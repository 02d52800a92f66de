"""`torch.autocast`: traced functions and eager operations take the dtypes that torch's own take.

In: operations on rows, inside and outside of autocast. Out: failures against plain torch under the same autocast, row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serrate import JaggedTensor, ir, jit, ops
from serrate.frontend import autocast

LENGTHS = [3, 1, 4]
WEIGHT, BIAS = torch.randn(4, 4), torch.randn(4)

# An operation of a row [n, 4], the same operation of rows.
ROWS: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda x: x @ WEIGHT,
    "linear": lambda x: F.linear(x, WEIGHT, BIAS),
    "softmax": lambda x: torch.softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "exp": torch.exp,
    "pow": lambda x: x**2.5,
    "reciprocal": lambda x: 1 / x,
    "sum": lambda x: x.sum(-1),
    "prod": lambda x: x.prod(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "a product in a longer program": lambda x: torch.relu(x @ WEIGHT) * 2 + BIAS,
}


def rows(dtype: torch.dtype) -> JaggedTensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(sum(LENGTHS), 4, generator=generator) + 0.5
    return JaggedTensor.from_lengths(values.to(dtype), torch.tensor(LENGTHS))


def unbound(values: Tensor) -> list[Tensor]:
    return list(values.split(LENGTHS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_as_torch_on_a_cpu(name: str, dtype: torch.dtype, traced: bool) -> None:
    function, jt = ROWS[name], rows(dtype)
    run = jit(function, backend="reference") if traced else function
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            wanted = [function(row) for row in unbound(jt.values)]
        except RuntimeError:
            with pytest.raises(TypeError):
                run(jt)
            return
        got = run(jt)
    for mine, own in zip(got.unbind(), wanted, strict=True):
        assert mine.dtype == own.dtype
        # Intermediates of a program are not rounded where they are not results.
        torch.testing.assert_close(mine.double(), own.double(), atol=2e-2, rtol=2e-2)


def test_attention_and_losses_on_a_cpu() -> None:
    generator = torch.Generator().manual_seed(2)
    x = JaggedTensor.from_lengths(torch.randn(8, 4, generator=generator), torch.tensor(LENGTHS))
    logits, target = rows(torch.bfloat16), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    targets = JaggedTensor.from_lengths(target, torch.tensor(LENGTHS))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = jit(lambda x, y: F.cross_entropy(x, y), backend="reference")(logits, targets)
        assert loss.dtype == F.cross_entropy(logits.values, target).dtype == torch.float32
        got = jit(F.scaled_dot_product_attention, backend="reference")(x, x, x)
    assert got.dtype == torch.bfloat16


def test_the_state_is_part_of_what_is_traced() -> None:
    traces: list[int] = []

    def product(x: Any) -> Any:
        traces.append(1)
        return x @ WEIGHT

    program, jt = jit(product, backend="reference"), rows(torch.float32)
    for _ in range(2):
        assert program(jt).dtype == torch.float32
        assert (jt @ WEIGHT).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert program(jt).dtype == (jt @ WEIGHT).dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                assert program(jt).dtype == (jt @ WEIGHT).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.float16):
            assert program(jt).dtype == (jt @ WEIGHT).dtype == torch.float16
        with torch.autocast("cuda", dtype=torch.float16, enabled=torch.cuda.is_available()):
            assert program(jt).dtype == (jt @ WEIGHT).dtype == torch.float32
    assert len(traces) <= 4


def test_autocast_inside_a_traced_function() -> None:
    @jit(backend="reference")
    def program(x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = x @ WEIGHT
        return inside, x @ WEIGHT

    jt = rows(torch.float32)
    inside, outside = program(jt)
    assert inside.dtype == torch.bfloat16 and outside.dtype == torch.float32
    torch.testing.assert_close(outside.values, jt.values @ WEIGHT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(inside.values, jt.values @ WEIGHT, atol=2e-2, rtol=2e-2)


ON_A_GPU: dict[str, tuple[Callable[[Any], Any], torch.dtype]] = {
    "softmax": (lambda x: torch.softmax(x, 1), torch.float32),
    "F.softmax": (lambda x: F.softmax(x, 1), torch.float32),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), torch.float32),
    "exp": (torch.exp, torch.float32),
    "pow": (lambda x: x**2, torch.float32),
    "sum": (lambda x: x.sum(1), torch.float32),
    "cumsum": (lambda x: torch.cumsum(x, 1), torch.float32),
    "1 / x": (lambda x: 1 / x, torch.float32),
    "x / 2": (lambda x: x / 2, torch.float16),
    "mean": (lambda x: x.mean(1), torch.float16),
    "relu": (torch.relu, torch.float16),
    "add": (lambda x: x + 1, torch.float16),
}


@pytest.mark.parametrize("name", ON_A_GPU)
def test_what_torch_does_in_float32_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked without a GPU: the dtypes of what would be recorded there."""
    function, dtype = ON_A_GPU[name]
    monkeypatch.setattr(autocast, "state", lambda: (None, torch.float16))
    with ir.Fusion() as f:
        x = ops.as_nested(f.input((None, 4), torch.float16), f.input((None,), torch.int64))
        assert function(x).dtype == torch.float16
        f.device = torch.device("cuda")
        assert function(x).dtype == dtype
        assert (ops.cast(x, torch.float32) @ f.input((4, 4), torch.float32)).dtype == torch.float16
