"""Every allocation names its device: `with torch.device(...)` and `torch.set_default_dtype` change no result.

In: the package's source, and programs that run on CPU tensors under another default device. Out: the allocation, or the program,
that goes by the default.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import serrate
import serrate.language as hl
from serrate import JaggedTensor, Structure, ir, jit, ops
from serrate.compiled import Compiled
from tests.engine import composed

PACKAGE = Path(serrate.__file__).parent
FACTORIES = {
    *("empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "asarray", "linspace", "logspace", "scalar_tensor"),
    *("rand", "randn", "randint", "randperm", "normal", "eye", "empty_strided", "tril_indices", "triu_indices"),
}


def _nameless(tree: ast.AST) -> Iterator[int]:
    """The lines of allocations without a device."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in FACTORIES:
            continue
        ours = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        if ours and not any(k.arg in ("device", None) for k in node.keywords):
            yield node.lineno


def test_allocations_name_their_device() -> None:
    """Except for those of commands, which make tensors of their own."""
    files = [path for path in PACKAGE.rglob("*.py") if "cli" not in path.relative_to(PACKAGE).parts]
    found = {str(path.relative_to(PACKAGE)): list(_nameless(ast.parse(path.read_text()))) for path in files}
    assert not {path: lines for path, lines in found.items() if lines}


def test_the_search_finds_allocations() -> None:
    assert list(_nameless(ast.parse("x = 1\ny = torch.zeros(3)\nz = torch.full((2,), 1, device=y.device)"))) == [2]


# --- running -------------------------------------------------------------------------------------------------------------


def _rows() -> JaggedTensor:
    return JaggedTensor.from_lengths(torch.tensor([[3.0, 1], [1, 5], [2, 2], [9, 4], [0, 7], [8, 8]]), [2, 0, 3, 1])


def _nested() -> JaggedTensor:
    return JaggedTensor.from_csr(torch.arange(6.0), (torch.tensor([0, 1, 3]), torch.tensor([0, 2, 2, 6])))


def _shown(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return [_shown(each) for each in result]
    return repr(result.tolist() if isinstance(result, JaggedTensor | Tensor) else result)


EAGER: dict[str, Callable[[JaggedTensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1) / 3,
    "sum": lambda x: x.sum(1),
    "sum over rows": lambda x: x.sum(0),
    "mean": lambda x: x.mean(1),
    "var": lambda x: x.var(1),
    "softmax": lambda x: torch.softmax(x, 1),
    "sort": lambda x: torch.sort(x, 1),
    "sort of features": lambda x: torch.sort(x, 2),
    "argsort": lambda x: torch.argsort(x, 1),
    "topk": lambda x: torch.topk(x, 2, 1),
    "cumsum": lambda x: torch.cumsum(x, 1),
    "cummax": lambda x: torch.cummax(x, 1).indices,
    "argmax": lambda x: x.argmax(1),
    "padded": lambda x: x.to_padded(7.0),
    "flip": lambda x: torch.flip(x, (1,)),
    "cat": lambda x: torch.cat([x, x], 0),
    "stack": lambda x: torch.stack([x, x], 0),
    "clamp": lambda x: x.clamp(min=2),
    "power": lambda x: x**2,
    "linear": lambda x: torch.nn.functional.linear(x, x.values[:3]),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (2,)),
    "where": lambda x: torch.where(x > 2, x, 0.5),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=False),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
}
CONTAINER: dict[str, Callable[[JaggedTensor], Any]] = {
    "row": lambda x: x[2],
    "rows": lambda x: x[1:3],
    "every other row": lambda x: x[::2],
    "picked rows": lambda x: x[[2, 0]],
    "masked rows": lambda x: x[[True, False, True, False]],
    "unbind": lambda x: x.unbind(),
    "tolist": lambda x: x.tolist(),
    "lengths": lambda x: (x.lengths, x.offsets, x.max_length, x.sparsity, x.variance),
    "from lengths": lambda x: JaggedTensor.from_lengths(x.values, [2, 0, 3, 1]),
    "from offsets": lambda x: JaggedTensor.from_csr(x.values, [0, 2, 2, 5, 6]),
    "from rows": lambda x: JaggedTensor.from_list(list(x.unbind())),
    "from row ids": lambda x: JaggedTensor.from_row_ids(x.values, x.values[:, 0].long() * 0, 2),
    "from padded": lambda x: JaggedTensor.from_padded(x.to_padded(), x.lengths),
    "from starts": lambda x: JaggedTensor.from_starts(x.values, x.offsets[:-1], x.lengths),
    "columns": lambda x: Structure.from_lengths(x.lengths).with_columns(x.lengths).total_elements(),
    "contiguous": lambda x: x[[2, 0]].contiguous(),
    "text": lambda x: (str(x), repr(x), x.describe() if hasattr(x, "describe") else ""),
    "split": lambda x: x.split([1, 3]),
    "nested": lambda x: torch.stack([x, x]),
    "equal": lambda x: torch.equal(x, x),
    "numpy": lambda x: JaggedTensor.from_numpy(x.values.numpy(), x.offsets.numpy()),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*EAGER, *CONTAINER])
def test_operations_under_another_default(name: str) -> None:
    """The first call under another default device and dtype, then a warm one."""
    operation = {**EAGER, **CONTAINER}[name]
    want = _shown(operation(_rows()))
    given = _rows()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            found = [operation(given), operation(given)]
    finally:
        torch.set_default_dtype(before)
    assert [_shown(each) for each in found] == [want, want]


def test_routing_under_another_default() -> None:
    with ir.Fusion() as f:
        keys, x = f.input((None,), torch.int64), f.input((None,), torch.float32)
        offsets, order = ops.group_by(keys, 3)
        f.output(ops.index(x, order), offsets, ops.invert(ops.invert(order)))
    given = (torch.tensor([2, 0, 2, 1]), torch.arange(4.0))
    for backend in ("reference", "cpp"):
        with torch.device("meta"):
            found = f.compile(backend)(*given)
        assert _shown(found) == ["[1.0, 3.0, 0.0, 2.0]", "[0, 1, 2, 4]", "[1, 3, 0, 2]"]


def test_traced_functions_under_another_default() -> None:
    given = _nested()
    want = [_shown(torch.softmax(given, 2) * 2), _shown(given.sum(2))]
    program = jit(lambda x: (torch.softmax(x, 2) * 2, x.sum(2)))
    with torch.device("meta"):
        found = [program(given), program(given)]
    assert [_shown(each) for each in found] == [want, want]


@pytest.mark.parametrize("backend", ["cpp", "reference", "interpreter"])
def test_kernels_under_another_default(backend: str) -> None:
    @serrate.kernel
    def normalised(jt: JaggedTensor, out: JaggedTensor, scale: float) -> None:
        for b in hl.tile(jt.num_rows):
            top, total = hl.full([b, 2], -1e30), hl.zeros([b, 2])
            for t in hl.tile(jt.max_length):
                here = jt[b, t, :]
                new = torch.maximum(top, here.amax(1))
                total = total * torch.exp(top - new) + torch.exp(here - new[:, None, :]).sum(1)
                top = new
            for t in hl.tile(jt.max_length):
                out[b, t, :] = torch.exp(jt[b, t, :] - top[:, None, :]) / total[:, None, :] * scale

    given = _rows()
    want = torch.cat([torch.softmax(row, 0) * 2.5 for row in given.unbind()])
    for _ in range(3):
        out = given.with_values(torch.empty(6, 2))
        with torch.device("meta"):
            (normalised.interpreted() if backend == "interpreter" else normalised.on(backend))(given, out, 2.5)
        assert torch.allclose(out.values, want)


@pytest.mark.parametrize("operation", list(composed.OPERATIONS))
def test_fusions_under_another_default(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Compiled.__call__

    def call(self: Any, *args: Any) -> Any:
        with torch.device("meta"):
            return plain(self, *args)

    monkeypatch.setattr(Compiled, "__call__", call)
    names = list(composed.COMPOSITIONS)
    composition = names[len(operation) % len(names)]
    dtype = composed.OPERATIONS[operation].dtypes[0]
    dims = composed.choices(operation, composed.tensor_of(composition, "mixed", dtype))[0]
    composed.run(operation, composition, "reference", ("maskless", ()), dtype, dims, ["mixed"])
