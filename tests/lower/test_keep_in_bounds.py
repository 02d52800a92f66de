"""No access of a lowered program leaves its tensor, whatever its arrays of offsets hold by the time it runs.

In: programs of every kind under every strategy. They are prepared with right offsets; then the loop program is run by an
interpreter that refuses any access outside, with offsets that somebody has written to since. Out: the first such access.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import serrate
import serrate.language as hl
from serrate import JaggedTensor, compiled, engine, ir, jit, ops
from serrate.codegen import reference
from serrate.fusion_stage import FusionStage
from serrate.ir.expr import Array, Expr, Less, symbol
from serrate.ir.loops import Assign, Dot, For, Lanes, Load, LoopProgram, Node, Reduce, Running, Write
from serrate.lower import pipeline
from serrate.lower.facts import Facts
from serrate.lower.limits import is_held
from serrate.runtime import dispatch
from serrate.schedule.target import CPU, GPU
from serrate.tiles import stage
from tests.engine import composed
from tests.engine.cases import CASES, NESTED_CASES
from tests.engine.movement_cases import MOVEMENT
from tests.engine.oracle import FULL, ONE_LEVEL, TWO_LEVELS, Case, arguments, recorded

WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("maskless", {"tile": 3}),
    ("maskless", {}),
    ("masked", {"rows": 3, "tile": 2}),
    ("persistent_dynamic", {"chunk": 7, "tile": 3}),
)
TIMES = 3


class Outside(AssertionError):
    """An access outside of its tensor."""


class Strict(reference._Interpreter):
    """The reference, which forgives nothing."""

    def run(self, body: tuple[Node, ...]) -> None:
        for node in body:
            if isinstance(node, For) and int(self.evaluate(node.extent, ())) > 100_000:
                raise Outside(f"{node.symbol} runs {self.evaluate(node.extent, ())} times")
            super().run((node,))

    def block(self, node: Assign | Reduce | Dot | Running | Write) -> None:
        if isinstance(node, Write):
            exists = self.mask(node.guard, node.lanes).expand([lane.size for lane in node.lanes])
            self._check(node.tensor.name, self.tensors[node.tensor], node.index, node.lanes, exists)
        super().block(node)

    def _load(self, v: Load, lanes: Lanes, exists: Tensor) -> Tensor:
        there = (exists & self.mask(v.guard, lanes)).expand([lane.size for lane in lanes])
        self._check(v.tensor.name, self.tensors[v.tensor], v.index, lanes, there)
        return super()._load(v, lanes, exists)

    def _check(self, name: str, memory: Tensor, index: tuple[Expr, ...], lanes: Lanes, there: Tensor) -> None:
        for e, size in zip(index, memory.shape, strict=True):
            places = torch.as_tensor(self.evaluate(e, lanes)).expand(there.shape)[there]
            if places.numel() and not (int(places.min()) >= 0 and int(places.max()) < size):
                raise Outside(f"{name}[{e}] is read or written at {int(places.min())} .. {int(places.max())} of {size}")


def changed(array: Tensor, random: Random) -> Tensor:
    """Offsets, starts or lengths after somebody has written to them."""
    top, info, n = int(array.max()) if len(array) else 0, torch.iinfo(array.dtype), len(array)
    one = array.clone()
    if n:
        one[random.randrange(n)] = random.choice([info.max, info.min, -1, top + 1, 10**6])
    numbers = {
        "near": [random.randrange(-5, top + 20) for _ in range(n)],
        "far": [random.choice([0, info.max, info.min, top, top // 2, 1]) for _ in range(n)],
    }
    made = [array + random.randrange(1, 9), array * 3, array.flip(0), one]
    return random.choice([*made, *(torch.tensor(each, dtype=array.dtype) for each in numbers.values())])


def run_changed(program: LoopProgram, tensors: Any, arrays: Any, symbols: Any) -> None:
    """Runs a program with other numbers in the arrays that callers hold."""
    if not any(is_held(a) for a in program.arrays):
        return
    own = {t: torch.zeros(x.shape, dtype=x.dtype) for t, x in zip(program.tensors, tensors, strict=True)}
    random = Random(str(program))
    for _ in range(TIMES):
        held = zip(program.arrays, arrays, strict=True)
        given = {a: changed(x, random) if is_held(a) and not a.signed else x for a, x in held}
        for kernel in program.kernels:
            Strict(own, given, dict(zip(program.symbols, symbols, strict=True))).run(kernel.body)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever runs in the test runs again with other offsets."""
    plain_run, plain_bound = FusionStage.run, dispatch.bound

    def run(self: Any, call: Any, inputs: Any, ready: Any) -> Any:
        tensors = plain_run(self, call, inputs, ready)
        run_changed(ready.executable.program, tensors, ready.arrays, ready.symbols)
        return tensors

    def bound(ready: Any, sources: Any, tensors: Any, **rest: Any) -> Any:
        program = ready.executable.program
        shapes = [*(t.shape for t in tensors), *(shape for shape, _ in ready.shapes), *(row.shape for row in ready.private)]
        every = [
            torch.empty(tuple(shape), dtype=t.dtype, device="meta") for t, shape in zip(program.tensors, shapes, strict=True)
        ]
        run_changed(program, every, ready.arrays, ready.symbols)
        return plain_bound(ready, sources, tensors, **rest)

    monkeypatch.setattr(FusionStage, "run", run)
    for module in (compiled, stage):
        monkeypatch.setattr(module, "bound", bound)
    with composed.one_thread():
        yield


def _case(case: Case, levels: int, way: tuple[str, dict[str, Any]]) -> None:
    dtype, features = case.dtypes[0], case.features[0]
    program = recorded(case, dtype, features, levels).compile("reference", way[0], **way[1])
    program(*arguments(case, (ONE_LEVEL if levels == 1 else TWO_LEVELS)["mixed"], dtype, features, case.name).call)


SAMPLE = 1 if FULL else 13
CASE_POINTS = [
    (case, levels, way)
    for levels, cases in ((1, CASES), (2, NESTED_CASES), (1, MOVEMENT))
    for case, way in itertools.product(cases.values(), WAYS)
][::SAMPLE]
COMPOSED_POINTS = list(itertools.product(composed.OPERATIONS, composed.COMPOSITIONS, WAYS))[:: 10 * SAMPLE]
CHUNK = 12


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize("part", range(-(-len(CASE_POINTS) // CHUNK)))
@pytest.mark.usefixtures("strict")
def test_operations(part: int, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if target == "gpu" and part % 3 and not FULL:
        pytest.skip("a third of them, unless all are asked for")
    monkeypatch.setitem(engine.BACKENDS, "reference", CPU if target == "cpu" else GPU)
    for case, levels, way in CASE_POINTS[part * CHUNK : (part + 1) * CHUNK]:
        _case(case, levels, way)


@pytest.mark.parametrize("part", range(-(-len(COMPOSED_POINTS) // CHUNK)))
@pytest.mark.usefixtures("strict")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compositions(part: int) -> None:
    for operation, composition, (strategy, options) in COMPOSED_POINTS[part * CHUNK : (part + 1) * CHUNK]:
        dtype = composed.OPERATIONS[operation].dtypes[0]
        dims = composed.choices(operation, composed.tensor_of(composition, "mixed", dtype))[0]
        way = (strategy, tuple(options.items()))
        composed.run(operation, composition, "reference", way, dtype, dims, ["mixed"])


def test_what_the_pass_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the test above finds accesses outside."""
    monkeypatch.setattr(pipeline, "keep_in_bounds", lambda program: program)
    found = 0
    for name in ("sum_rows", "softmax_rows", "add_dense"):
        case = CASES[name]
        dtype, features = case.dtypes[0], case.features[0]
        program = recorded(case, dtype, features).compile("reference", "maskless")
        given = arguments(case, ONE_LEVEL["mixed"], dtype, features, name)
        call = program.binder.bind(given.call)
        ready = program._whole.bound(call)
        tensors = program._whole.run(call, given.call, ready)
        try:
            run_changed(ready.executable.program, tensors, ready.arrays, ready.symbols)
        except Outside:
            found += 1
    assert found == 3


# --- compiled code, with offsets that change behind its back --------------------------------------------------------------


def _writers() -> Mapping[str, Callable[[Tensor, Any], None]]:
    """Ways to write to a tensor that leave no trace."""

    def through_numpy(to: Tensor, numbers: Any) -> None:
        to.numpy()[:] = np.asarray(numbers, dtype=to.numpy().dtype)

    def through_data(to: Tensor, numbers: Any) -> None:
        to.data.copy_(torch.tensor(numbers))

    return {"numpy": through_numpy, "data": through_data}


LATE = ([0, 900, 6], [0, -900, 6], [5, 5, 900], [2**62, 2**62 + 1, -(2**62)], [6, 3, 0], [-1, -1, -1])


@pytest.mark.parametrize("writer", ["numpy", "data"])
def test_traced_functions_survive(writer: str) -> None:
    dense = torch.ones(2, 4, 3)

    @jit
    def program(x: JaggedTensor) -> Any:
        return torch.softmax(x, 1), x.sum(1), x + dense, x.to_padded(), torch.cumsum(x, 1)

    for numbers in LATE:
        offsets = torch.tensor([0, 2, 6])
        jt = JaggedTensor.from_csr(torch.ones(6, 3), offsets)
        first = program(jt)
        _writers()[writer](offsets, numbers)
        program(jt)
        _writers()[writer](offsets, [0, 2, 6])
        for a, b in zip(first, program(jt), strict=True):
            assert torch.equal(*(each.values if isinstance(each, JaggedTensor) else each for each in (a, b)))


def test_rows_made_in_inference_mode_survive() -> None:
    with torch.inference_mode():
        offsets = torch.tensor([0, 2, 6])
        jt = JaggedTensor.from_csr(torch.ones(6, 3), offsets)
        want = jt.sum(dim=1)
        for numbers in LATE:
            offsets.copy_(torch.tensor(numbers))
            jt.sum(dim=1)
        offsets.copy_(torch.tensor([0, 2, 6]))
        assert torch.equal(jt.sum(dim=1), want)


@pytest.mark.parametrize("strategy", ["maskless", "masked", "persistent_dynamic"])
def test_fusions_survive(strategy: str) -> None:
    with ir.Fusion() as f:
        x, offsets = f.input((None, 3), torch.float32), f.input((None,), torch.int64)
        y = ops.as_nested(x, offsets)
        f.output(ops.softmax(y, 1), ops.mean(y, 1))
    program = f.compile("cpp", strategy)
    values = torch.ones(6, 3)
    for numbers in LATE:
        given = torch.tensor([0, 2, 6])
        program(values, given)
        given.numpy()[:] = numbers
        program(values, given)


@pytest.mark.usefixtures("strict")
def test_kernels_survive() -> None:
    @serrate.kernel
    def row_sums(jt: JaggedTensor, out: Tensor) -> None:
        for b in hl.tile(jt.num_rows):
            total = hl.zeros([b, jt.values.shape[1]])
            for t in hl.tile(jt.max_length):
                total = total + jt[b, t, :].sum(1)
            out[b, :] = total

    for numbers in LATE:
        offsets = torch.tensor([0, 2, 6])
        jt = JaggedTensor.from_csr(torch.ones(6, 3), offsets)
        out = torch.empty(2, 3)
        row_sums.on("cpp")(jt, out)
        assert out[:, 0].tolist() == [2, 4]
        offsets.numpy()[:] = numbers
        row_sums.on("cpp")(jt, out)


# --- proofs ---------------------------------------------------------------------------------------------------------------


def test_facts() -> None:
    n, c, r, tile = symbol("n"), symbol("c"), symbol("r"), symbol("i", 0, 7)
    offsets = Array("offsets")
    clamped = [ir.expr.element(offsets, c + k, n) for k in range(2)]
    length = clamped[1] - clamped[0]
    facts = Facts(()).and_(Less(tile + r * 8, length))
    assert facts.prove(n - 1 - (clamped[0] + tile + r * 8))
    assert not facts.prove(n - 2 - (clamped[0] + tile + r * 8))
    assert not Facts(()).and_(Less(r, offsets[c + 1] - offsets[c])).prove(n - 1 - (offsets[c] + r))
    lengths = Array("lengths")
    here = ir.expr.element(lengths, c, n - clamped[0])
    assert Facts(()).and_(Less(r, here)).prove(n - 1 - (clamped[0] + r))
    assert not Facts(()).and_(Less(r, here)).prove(n - 2 - (clamped[0] + r))
    in_parts = Facts(()).and_(Less(r, (n + 7) // 8))
    assert in_parts.prove((n + 7) // 8 - 1 - r) and in_parts.prove(n + 7 - 8 * r - 8)
    assert not in_parts.prove(n - 1 - 8 * r - 7)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_rows_in_private_memory_say_nothing_about_where_groups_begin(backend: str) -> None:
    """Softmax keeps a row in private memory; another result reads the groups of rows by the same offsets."""
    values = torch.randn(12, 3, dtype=torch.float64)
    x = JaggedTensor.from_csr(values, (torch.tensor([0, 1, 1, 4]), torch.tensor([0, 3, 3, 10, 12])))

    def program(x: Any) -> Any:
        return torch.logsumexp(x, (0, 1, 2)), x.argmin(3), torch.softmax(x, 2)

    total, places, weights = jit(program, backend=backend, strategy="maskless")(x)
    torch.testing.assert_close(total, values.logsumexp(0))
    assert torch.equal(places.values, values.argmin(1))
    torch.testing.assert_close(weights.values, torch.cat([part.softmax(0) for part in values.split([3, 0, 7, 2])]))


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_the_longest_row_of_a_product_may_be_the_first(backend: str) -> None:
    """Columns by starts and lengths; the second stage reads the product, but not the columns themselves."""
    rows = [torch.randn(n) for n in (4, 5, 2)]
    columns = [torch.randn(n) for n in (7, 4, 3)]
    gaps = JaggedTensor.from_starts(
        torch.cat([torch.cat([column, torch.zeros(2)]) for column in columns]), torch.tensor([0, 9, 15]), torch.tensor([7, 4, 3])
    )

    def program(x: Any, y: Any) -> Any:
        return torch.sort(x[:, :, None] * y[:, None], dim=1).values[:, :1]

    found = jit(program, backend=backend)(JaggedTensor.from_list(rows), gaps)
    for own, row, column in zip(found.unbind(), rows, columns, strict=True):
        torch.testing.assert_close(own.unbind()[0], (row[:, None] * column).min(0).values)
