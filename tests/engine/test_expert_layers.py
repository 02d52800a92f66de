"""Layers of experts: rows gathered by the products that need them, gates fused with what they gate, results summed by token.

In: tokens, the experts of each, weights. Out: failures against a loop over tokens in plain torch, and launches beyond three.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

import serrate
from serrate import ir, ops, settings
from serrate.fusion_stage import LibraryStage
from tests.engine.oracle import BACKENDS

Activation = Callable[[Any], Any]
ACTIVATIONS: dict[str, tuple[Activation, Callable[[Tensor], Tensor]]] = {
    "silu": (ops.silu, functional.silu),
    "gelu": (ops.gelu, functional.gelu),
    "relu": (ops.relu, functional.relu),
    "sigmoid": (ops.sigmoid, torch.sigmoid),
}


def layer(experts: int, width: int, hidden: int, top_k: int, dtype: torch.dtype, activation: str = "silu") -> ir.Fusion:
    with ir.Fusion("layer") as f:
        x, weights = f.input((None, width), dtype), f.input((None, top_k), dtype)
        chosen = f.input((None, top_k), torch.int64)
        gate, up = (f.input((experts, width, hidden), dtype) for _ in range(2))
        down = f.input((experts, hidden, width), dtype)
        offsets, order = ops.group_by(ops.flatten(chosen), experts)
        rows = ops.as_nested(ops.index(x, ops.floor_divide(order, top_k)), offsets)
        inner = ACTIVATIONS[activation][0](ops.matmul(rows, gate)) * ops.matmul(rows, up)
        worked = ops.as_flattened(ops.matmul(inner, down))
        back = ops.unflatten(ops.index(worked, ops.invert(order)), 0, (-1, top_k))
        f.output(ops.sum(back * ops.unsqueeze(weights, 2), 1))
    return f


def given(chosen: Tensor, experts: int, width: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weights = random(len(chosen), width), random(*chosen.shape)
    return x, weights, chosen, *(random(experts, width, hidden) / 4 for _ in range(2)), random(experts, hidden, width) / 4


def by_token(args: tuple[Tensor, ...], activation: str = "silu") -> Tensor:
    x, weights, chosen, gate, up, down = (a if a.dtype == torch.int64 else a.double() for a in args)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            inner = ACTIVATIONS[activation][1](x[token] @ gate[expert]) * (x[token] @ up[expert])
            out[token] += weight * (inner.to(args[0].dtype).double() @ down[expert])
    return out


def close(got: Tensor, want: Tensor) -> None:
    rtol, atol = (1e-4, 1e-4) if got.dtype == torch.float32 else (2e-2, 1e-1)
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


def choices(tokens: int, experts: int, top_k: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, experts, (tokens, top_k), generator=generator)


CHOICES: dict[str, tuple[int, Tensor]] = {
    "mixed": (4, choices(75, 4, 2)),
    "empty experts": (9, choices(20, 9, 2) // 4 * 4),
    "one expert": (1, torch.zeros(40, 3, dtype=torch.int64)),
    "all to the last": (5, torch.full((140, 1), 4)),
    "more experts than tokens": (1024, choices(7, 1024, 2)),
    "one token": (3, torch.tensor([[2, 0]])),
    "no tokens": (3, torch.zeros(0, 2, dtype=torch.int64)),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_of_experts(backend: str, name: str) -> None:
    """Odd widths, and groups that begin anywhere."""
    experts, chosen = CHOICES[name]
    width, hidden = (3, 5) if experts > 100 else (37, 29)
    args = given(chosen, experts, width, hidden, torch.float32)
    program = layer(experts, width, hidden, chosen.shape[1], torch.float32).compile(backend)
    close(program(*args), by_token(args))


@pytest.mark.sampled(1)
@pytest.mark.triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gates_in_sixteen_bits(dtype: torch.dtype, activation: str) -> None:
    experts, chosen = CHOICES["mixed"]
    args = given(chosen, experts, 48, 33, dtype)
    program = layer(experts, 48, 33, 2, dtype, activation).compile("triton")
    got = program(*args)
    close(got, by_token(args, activation))
    assert torch.equal(got, program(*args))


def functions_of(source: str) -> list[str]:
    """The kernels of the last stage of a Triton program."""
    return re.findall(r"@triton\.jit\(do_not_specialize.*?(?=\n\n\n@|\Z)", source.split("# layer: ")[-1], re.DOTALL)


@pytest.mark.parametrize("strategy", ["maskless", "persistent_dynamic", None])
def test_an_expert_layer_is_three_launches(strategy: str | None) -> None:
    experts, chosen = CHOICES["mixed"]
    args = given(chosen, experts, 48, 33, torch.bfloat16)
    first, second, third = functions_of(layer(experts, 48, 33, 2, torch.bfloat16).compile("triton", strategy).source(*args))
    assert first.count("tl.dot") == 2 * second.count("tl.dot") > 0 == third.count("tl.dot")
    assert first.count("tl.store") == second.count("tl.store")
    assert "sr_silu" in first


def test_an_expert_layer_is_a_grouping_and_one_program() -> None:
    """Choices are grouped where they are in memory, and tokens are read at the order of the groups divided by `top_k`."""
    stages = layer(4, 48, 33, 2, torch.bfloat16).compile("cpp").stages
    assert [s.function if isinstance(s, LibraryStage) else s.input_names[:3] for s in stages] == [
        "group_and_invert",
        ("T0", "T1", "T3"),
    ]


def test_indices_of_a_group_of_rows_are_read_only_where_rows_are() -> None:
    """Rows side by side end at different places, so the bounds in the mask are lanes too."""
    with ir.Fusion("layer") as f:
        table, index = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        f.output(ops.sum(ops.as_nested(ops.index(table, index), f.input((None,), torch.int64)), 1))
    index, offsets = torch.tensor([1, 0, 2, 2, 1]), torch.tensor([0, 3, 3, 4, 5])
    program, table = f.compile("triton", "masked"), torch.randn(3, 4)
    rows = [table[index[a:b]].sum(0) for a, b in itertools.pairwise(offsets)]
    torch.testing.assert_close(program(table, index, offsets), torch.stack(rows))
    reads = re.findall(r"tl\.load\(\w+_index_at.*", program.source(table, index, offsets))
    assert reads
    assert all(re.search(r"mask=.*r0xi.* < .*_1\[:, None\] - ", line) for line in reads)


def test_indices_are_read_only_where_rows_are() -> None:
    """The last group's block reaches past the end of the indices."""
    experts, chosen = CHOICES["mixed"]
    args = given(chosen, experts, 48, 33, torch.bfloat16)
    source = layer(experts, 48, 33, 2, torch.bfloat16).compile("triton").source(*args)
    reads = re.findall(r"tl\.load\(\w+_index_at.*", source)
    assert reads
    assert all("mask=" in line for line in reads)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_gates_that_are_kept_for_gradients_are_one_launch_too(backend: str) -> None:
    with ir.Fusion("layer") as f:
        x, offsets = f.input((None, 20), torch.float32), f.input((None,), torch.int64)
        rows = ops.as_nested(x, offsets)
        a, b = (ops.matmul(rows, f.input((3, 20, 18), torch.float32)) for _ in range(2))
        f.output(ops.silu(a) * b, a, b)
    generator = torch.Generator().manual_seed(0)
    x, v, w = (torch.randn(*shape, generator=generator) for shape in ((9, 20), (3, 20, 18), (3, 20, 18)))
    bounds = torch.tensor([0, 5, 5, 9])
    program = f.compile(backend)
    got = program(x, bounds, v, w)
    for k in range(3):
        own = x[bounds[k] : bounds[k + 1]]
        for found, want in zip(got, (functional.silu(own @ v[k]) * (own @ w[k]), own @ v[k], own @ w[k]), strict=True):
            torch.testing.assert_close(found.unbind()[k], want, rtol=1e-4, atol=1e-5)
    assert backend == "cpp" or len(functions_of(program.source(x, bounds, v, w))) == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_products_meet_although_others_run_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's indexing checks its indices; both products look up the same rows of a dense tensor."""
    monkeypatch.setenv("SERRATE_BACKEND", "triton")
    settings.reload()

    @serrate.jit
    def layer(x: Any, index: Any, v: Any, w: Any) -> Any:
        return torch.relu(x[index] @ v) * (x[index] @ w)

    generator = torch.Generator().manual_seed(0)
    x, v, w = (torch.randn(*shape, generator=generator) for shape in ((9, 20), (20, 18), (20, 18)))
    index = torch.tensor([3, -1, 8, 3, 0])
    torch.testing.assert_close(layer(x, index, v, w), torch.relu(x[index] @ v) * (x[index] @ w), rtol=1e-4, atol=1e-5)
    dots = [kernel.count("tl.dot") for kernel in functions_of(layer.source(x, index, v, w))]
    assert sum(count > 0 for count in dots) == 1
