"""torch.compile leaves its graph at calls of compiled programs. Other captures, and tensors without memory, raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import serrate
import serrate.language as hl
from serrate import JaggedTensor, errors


@serrate.jit
def pooled(x: Any, weight: Any) -> Any:
    return torch.softmax(x @ weight, dim=1).sum(1)


@serrate.kernel
def doubled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape)
    for tile in hl.tile(x.size(0)):
        out[tile] = x[tile] * 2
    return out


@pytest.fixture
def jt() -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.arange(24.0).view(6, 4) / 24, [2, 0, 4])


def calls(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.sin(doubled(pooled(JaggedTensor.from_csr(torch.relu(values), offsets), torch.eye(4))))


def operators(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    x = JaggedTensor.from_csr(torch.relu(values), offsets)
    (row,) = (x * 2)[1:2].unbind()
    return torch.sin(row.sum() + x.sum(1) + len(x) + x.max_length)


@pytest.mark.parametrize("function", [calls, operators])
def test_torch_compile_runs_programs_between_its_graphs(function: Any) -> None:
    torch.compiler.reset()
    graphs: list[list[Any]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(function, backend=backend)
    for lengths in ([2, 0, 4], [3, 3, 1], [1, 5, 0]):
        values, offsets = torch.randn(sum(lengths), 4), torch.tensor([0, *lengths]).cumsum(0)
        torch.testing.assert_close(compiled(values, offsets), function(values, offsets))
    # Of this package, Dynamo sees nothing. After an operator of a ragged tensor it leaves the rest of a function as it is.
    assert {target for graph in graphs for target in graph} == (
        {torch.relu, torch.eye, torch.sin} if function is calls else {torch.relu}
    )


@pytest.mark.parametrize("call", [lambda x: x * 2, lambda x: pooled(x, torch.eye(4)), lambda x: doubled(x.values)])
def test_make_fx_and_fake_tensors_are_refused(jt: JaggedTensor, call: Any) -> None:
    call(jt)
    with pytest.raises(errors.CallError, match="cannot be captured by make_fx"):
        make_fx(lambda v: call(jt.with_values(v)))(jt.values)
    with FakeTensorMode() as mode, pytest.raises(errors.CallError, match="do not run under FakeTensorMode"):
        call(jt.with_values(mode.from_tensor(jt.values)))
    call(jt)


class Wrapped(torch.Tensor):
    """A tensor that holds another, as a DTensor does, and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("nothing is computed")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("warm", [False, True])
def test_tensors_without_memory_are_refused(jt: JaggedTensor, warm: bool) -> None:
    matrix = torch.eye(4)
    freed = torch.eye(4)
    freed.untyped_storage().resize_(0)
    product = serrate.jit(lambda x, weight: x @ weight)
    scale = serrate.jit(lambda x: x * 2)
    for _ in range(3 if warm else 0):
        product(jt, matrix), scale(matrix), doubled(matrix)
    fake = FakeTensorMode().from_tensor(matrix)
    for each, name in ((Wrapped(matrix), "a Wrapped"), (freed, "a Tensor"), (fake, "a FakeTensor")):
        for call in (lambda x: product(jt, x), scale, doubled):
            with pytest.raises(errors.CallError, match=name + r" of shape \(4, 4\) has elements but no memory"):
                call(each)


def test_empty_tensors_have_no_address_and_need_none(jt: JaggedTensor) -> None:
    empty = JaggedTensor.from_lengths(torch.zeros(0, 4), [0, 0])
    for _ in range(3):
        assert (empty * 2).lengths.tolist() == [0, 0] and pooled(empty, torch.eye(4)).tolist() == [[0.0] * 4] * 2
