"""Worked examples on tensors: every one with its numbers, on every backend, against plain torch row by row.

In: small fusions over rows of known lengths. Out: failures that name the backend, the row and the first bad element; and
refusals whose words are not what a user should read.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from serrate import JaggedTensor, ir, jit, ops
from serrate.errors import DomainError, DtypeError, SerrateError, ShapeError, StructureError, StructureMismatch
from serrate.ir import Fusion, combine, partition
from serrate.ir.view import TensorView
from tests.conftest import FULL, INTERPRETED
from tests.engine.oracle import BACKENDS, STRATEGIES, pick

# Triton's interpreter computes where nothing exists, and says so.
pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

Nested = Tensor | Sequence["Nested"]
Body = Callable[..., TensorView]

OFFSETS = torch.tensor([0, 3, 8, 10])
"""Rows of 3, 5 and 2."""
EXPERTS = torch.tensor([0, 127, 127, 325])
RANKS = torch.tensor([[0, 50, 127], [0, 0, 0], [0, 100, 198]])
DEVICES = torch.tensor([[0, 30, 30, 70, 100], [0, 25, 60, 85, 100]])
QUICK = ("reference", "cpp")
"""For examples of hundreds of positions and features, which take Triton's interpreter long."""


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X = numbers(10, 4)
ROWS = X.split([3, 5, 2])


def cut(x: Tensor, offsets: Tensor | Sequence[int], dim: int = 0) -> list[Tensor]:
    bounds = [int(b) for b in offsets]
    return [x.narrow(dim, a, b - a) for a, b in itertools.pairwise(bounds)]


def record(body: Callable[..., Any], *args: Tensor, known: bool = False) -> Fusion:
    """The fusion of a body; extents of dim 0 are known only when run, unless asked otherwise. What is spread must be known."""
    with Fusion("worked") as f:
        inputs = [f.input([None if k == 0 and n != 1 and not known else n for k, n in enumerate(a.shape)], a.dtype) for a in args]
        result = body(*inputs)
        f.output(*(result if isinstance(result, tuple) else (result,)))
    f.verify()
    return f


def agree(
    body: Callable[..., Any],
    want: Any,
    *args: Tensor,
    backends: Sequence[str] = BACKENDS,
    strategies: Sequence[str] = STRATEGIES,
) -> None:
    """The program gives `want` (a tensor, nested rows, or a tuple of results), recorded with known and unknown extents."""
    if INTERPRETED and not FULL:
        # In the short run, each example is run by one of the compiled backends and under one of the strategies.
        here = os.environ["PYTEST_CURRENT_TEST"]
        backends, strategies = ("reference", pick([b for b in backends if b != "reference"], here)), [pick(strategies, here)]
    for known in (False, True):
        f = record(body, *args, known=known)
        for backend in backends if known else ("reference",):
            check(f.compile(backend)(*args), want, f"{backend}, extents {'known' if known else 'unknown'}")
    for strategy in strategies:
        check(f.compile("reference", strategy)(*args), want, f"reference, {strategy}")
    check(f.clone().evaluate(*args), want, "the reference of a clone")


def check(got: Any, want: Any, where: str) -> None:
    if isinstance(want, tuple):
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            check(g, w, f"{where}, result {k}")
        return
    if isinstance(want, list):
        assert isinstance(got, JaggedTensor), f"{where}: expected a JaggedTensor, got {type(got).__name__}"
        got = got.unbind()
    same(got, want, where)


def same(got: Any, want: Any, where: str) -> None:
    """Fails unless nested rows have the same numbers of rows, shapes and elements."""
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m: f"{where}: {m}")
        return
    # Parts of rows come as a ragged tensor of their own.
    parts = got.unbind() if isinstance(got, JaggedTensor) else got
    assert len(parts) == len(want), f"{where}: expected {len(want)} rows, got {len(parts)}"
    for k, (g, w) in enumerate(zip(parts, want, strict=True)):
        same(g, w, f"{where}, row {k}")


def refused(error: type[SerrateError], message: str, body: Callable[..., Any], *args: Tensor, known: bool = True) -> None:
    """The body is refused, when recorded or when run, in these words."""
    with pytest.raises(error, match=message):
        record(body, *args, known=known).evaluate(*args)


def nested(x: TensorView, offsets: TensorView) -> TensorView:
    return ops.as_nested(x, offsets, ragged_dim=0)


def on_rows(body: Callable[..., Any], want: Any, *more: Tensor, **options: Any) -> None:
    """`agree` on rows of 3, 5 and 2 with four features."""
    agree(lambda x, offsets, *rest: body(nested(x, offsets), *rest), want, X, OFFSETS, *more, **options)


# --- what a nested tensor is ---------------------------------------------------------------------------------------------


class TestNesting:
    def test_three_sequences(self) -> None:
        on_rows(lambda x: x, list(ROWS))
        y = record(nested, X, OFFSETS).evaluate(X, OFFSETS)
        assert (y.offsets.tolist(), y.lengths.tolist(), y.values.shape) == ([0, 3, 8, 10], [3, 5, 2], (10, 4))

    def test_tokens_of_three_experts(self) -> None:
        tokens = numbers(325, 512)
        f = record(nested, tokens, EXPERTS)
        y = f.outputs[0]
        assert y.shape == (y.component.extent, y.ragged.name, 512)
        agree(nested, cut(tokens, EXPERTS), tokens, EXPERTS, backends=QUICK)

    def test_a_workflow_of_experts(self) -> None:
        """Flat tokens, nested by expert, processed by each expert's own weight, flat again."""
        tokens, weights = numbers(325, 32), numbers(3, 32, 16)

        def workflow(x: TensorView, offsets: TensorView, w: TensorView) -> TensorView:
            return ops.as_flattened(ops.relu(ops.matmul(nested(x, offsets), w)), component_dim=0, ragged_dim=1)

        want = torch.cat([torch.relu(r @ w) for r, w in zip(cut(tokens, EXPERTS), weights, strict=True)])
        assert want.shape == (325, 16)
        agree(workflow, want, tokens, EXPERTS, weights, backends=QUICK)

    def test_nesting_shares_storage(self) -> None:
        f = record(lambda x, o: (nested(x, o), ops.as_flattened(nested(x, o))), X, OFFSETS)
        assert f.definitions == [], "nothing is computed"
        rows, flat = f.compile("cpp")(X, OFFSETS)
        assert rows.values.data_ptr() == flat.data_ptr() == X.data_ptr()

    def test_partition_and_combine_stand_between_root_and_logical(self) -> None:
        with Fusion() as f:
            x, offsets = f.input((325, 512), torch.float32), f.input((4,), torch.int64)
            y = nested(x, offsets)
            z = ops.as_flattened(ops.set(y))
        assert [d.extent for d in y.domain.root] == [325, 512]
        assert (y.component.extent, y.ragged.extent) == (3, 325)
        made = y.ragged.definition
        assert made is y.component.definition and made is not None
        assert made.label.startswith("partition") and made.inputs[0] is x.domains[0]
        assert [d.extent for d in z.domain.logical] == [325, 512]

    def test_by_lengths(self) -> None:
        lengths = torch.tensor([127, 0, 198])
        tokens = numbers(325, 8)
        agree(lambda x, n: ops.as_nested(x, lengths=n), cut(tokens, EXPERTS), tokens, lengths)

    def test_no_components_at_all(self) -> None:
        none, x = torch.tensor([0]), numbers(0, 4)
        agree(nested, [], x, none)
        agree(lambda x, o: ops.sum(nested(x, o), 1), torch.zeros(0, 4), x, none)
        agree(lambda x, o: ops.sum(nested(x, o), 0), torch.zeros(0, 4), x, none)
        agree(lambda x, o: ops.sum(nested(x, o), (0, 1)), torch.zeros(4), x, none)
        agree(lambda x, o: ops.as_flattened(ops.exp(nested(x, o))), torch.zeros(0, 4), x, none)

    def test_a_one_dimensional_tensor(self) -> None:
        x = numbers(10)
        agree(nested, cut(x, OFFSETS), x, OFFSETS)
        agree(lambda x, o: ops.exp(nested(x, o)), cut(x.exp(), OFFSETS), x, OFFSETS)
        agree(lambda x, o: ops.sum(nested(x, o), 1), torch.stack([r.sum() for r in cut(x, OFFSETS)]), x, OFFSETS)


class TestDimOneOfThree:
    """as_nested on dim 1 of [4, 10, 2]: [4, component, ragged, 2]."""

    X = numbers(4, 10, 2)

    def nested(self, x: TensorView, offsets: TensorView) -> TensorView:
        y = ops.as_nested(x, offsets, ragged_dim=1)
        assert [d.is_ragged for d in y.domains] == [False, False, True, False]
        return y

    def rows(self) -> list[Tensor]:
        return cut(self.X, OFFSETS, 1)

    def test_reductions(self) -> None:
        rows = self.rows()
        each = torch.stack([r.sum(1) for r in rows], 1)
        agree(lambda x, o: ops.sum(self.nested(x, o), 2), each, self.X, OFFSETS)
        agree(lambda x, o: ops.sum(self.nested(x, o), (1, 2)), self.X.sum(1), self.X, OFFSETS, backends=QUICK)
        agree(lambda x, o: ops.sum(self.nested(x, o), 0), [r.sum(0) for r in rows], self.X, OFFSETS, backends=QUICK)
        largest = torch.stack([r.amax((0, 1)) for r in rows])
        agree(lambda x, o: ops.amax(self.nested(x, o), (0, 2)), largest, self.X, OFFSETS, backends=QUICK)

    def test_there_and_back(self) -> None:
        def back(y: TensorView) -> TensorView:
            return ops.as_flattened(y, component_dim=1, ragged_dim=2)

        agree(lambda x, o: back(ops.exp(self.nested(x, o))), self.X.exp(), self.X, OFFSETS)
        want = torch.cat([r.softmax(1) for r in self.rows()], 1)
        agree(lambda x, o: back(ops.softmax(self.nested(x, o), 2)), want, self.X, OFFSETS)
        want = torch.cat([r - r.mean(1, keepdim=True) for r in self.rows()], 1)
        centered = lambda y: back(y - ops.mean(y, 2, keepdim=True))  # noqa: E731
        agree(lambda x, o: centered(self.nested(x, o)), want, self.X, OFFSETS, backends=QUICK)

    def test_as_a_result_with_rows_first(self) -> None:
        want = [r.transpose(0, 1) for r in self.rows()]
        agree(lambda x, o: ops.permute(self.nested(x, o), 1, 2, 0, 3), want, self.X, OFFSETS)

    def test_select(self) -> None:
        agree(lambda x, o: ops.select(self.nested(x, o), 1, 1), self.rows()[1], self.X, OFFSETS, backends=QUICK)
        agree(lambda x, o: ops.select(self.nested(x, o), 0, 2), [r[2] for r in self.rows()], self.X, OFFSETS)

    def test_as_a_result(self) -> None:
        want = [[r[b] for r in self.rows()] for b in range(4)]
        agree(self.nested, want, self.X, OFFSETS)
        exponents = [[r.exp() for r in rows] for rows in want]
        agree(lambda x, o: ops.exp(self.nested(x, o)), exponents, self.X, OFFSETS)
        y = record(self.nested, self.X, OFFSETS).evaluate(self.X, OFFSETS)
        assert (y.structure.dims, y.values.shape, str(y.shape)) == ((1,), (4, 10, 2), "(4, 3, r0, 2)")


# --- operations that keep the structure ----------------------------------------------------------------------------------


class TestElementwise:
    @pytest.mark.parametrize(
        ("operation", "by_torch"),
        [(ops.set, lambda r: r), (ops.relu, torch.relu), (ops.neg, torch.neg), (ops.exp, torch.exp), (ops.abs, torch.abs)],
        ids=["set", "relu", "neg", "exp", "abs"],
    )
    def test_unary(self, operation: Body, by_torch: Callable[[Tensor], Tensor]) -> None:
        def kept(x: TensorView) -> TensorView:
            y = operation(x)
            assert y.domains == x.domains and (y.component, y.ragged) == (x.component, x.ragged)
            return y

        on_rows(kept, [by_torch(r) for r in ROWS])

    @pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "lt"])
    def test_binary(self, name: str) -> None:
        other = numbers(10, 4) + 3
        operation, by_torch = getattr(ops, name), getattr(torch, name)

        def kept(x: TensorView, offsets: TensorView, y: TensorView) -> TensorView:
            z: TensorView = operation(nested(x, offsets), nested(y, offsets))
            assert [d.is_ragged for d in z.domains] == [False, True, False]
            return z

        want = [by_torch(r, s) for r, s in zip(ROWS, cut(other, OFFSETS), strict=True)]
        agree(kept, want, X, OFFSETS, other)

    @pytest.mark.parametrize(
        ("shape", "part"),
        [
            ((4,), lambda e, c: e),
            ((3, 1, 4), lambda e, c: e[c]),
            ((1, 1, 4), lambda e, c: e[0]),
            ((3, 1, 1), lambda e, c: e[c]),
            ((1,), lambda e, c: e),
            ((), lambda e, c: e),
        ],
        ids=["feature", "component", "one for all", "one for each", "one", "scalar tensor"],
    )
    def test_what_broadcasts(self, shape: tuple[int, ...], part: Callable[[Tensor, int], Tensor]) -> None:
        extra = numbers(*shape)
        want = [r * part(extra, c) for c, r in enumerate(ROWS)]
        on_rows(lambda x, e: x * e, want, extra)
        on_rows(lambda x, e: e * x, want, extra)

    def test_a_number(self) -> None:
        on_rows(lambda x: 2.5 - x * 2, [2.5 - r * 2 for r in ROWS])

    def test_structures_equal_by_value(self) -> None:
        def body(x: TensorView, first: TensorView, second: TensorView) -> TensorView:
            return nested(x, first) + ops.set(nested(x, second))

        agree(body, [r * 2 for r in ROWS], X, OFFSETS, OFFSETS.clone())

    def test_structures_that_differ(self) -> None:
        def body(x: TensorView, first: TensorView, second: TensorView) -> TensorView:
            return nested(x, first) + nested(x, second)

        other = torch.tensor([0, 4, 8, 10])
        message = r"add of .*, dim 1: the rows differ: lengths \[3, 5, 2\] and \[4, 4, 2\]"
        for backend in BACKENDS:
            with pytest.raises(StructureMismatch, match=message):
                record(body, X, OFFSETS, other).compile(backend)(X, OFFSETS, other)
        refused(ShapeError, "add of .*, dim 0: the sizes differ: 3 and 2", body, X, OFFSETS, torch.tensor([0, 5, 10]))
        refused(
            SerrateError, "add of .*, dim 0: the sizes differ: 3 and 2", body, X, OFFSETS, torch.tensor([0, 5, 10]), known=False
        )

    def test_a_structure_of_one_component_is_not_spread_over_others(self) -> None:
        def body(x: TensorView, y: TensorView, first: TensorView, second: TensorView) -> TensorView:
            return nested(x, first) + nested(y, second)

        message = r"add of .*, dim 1: the rows differ: lengths \[3, 5, 2\] and \[5\]"
        refused(StructureMismatch, message, body, X, X[:5].clone(), OFFSETS, torch.tensor([0, 5]))

    @pytest.mark.parametrize("shape", [(5,), (4, 1, 4), (2, 1, 4)])
    def test_what_does_not_broadcast(self, shape: tuple[int, ...]) -> None:
        message = rf"add of \(3, r0, 4\) and .*, dim [02]: the sizes differ: [34] and {shape[0]}"
        refused(ShapeError, message, lambda x, o, e: nested(x, o) + e, X, OFFSETS, numbers(*shape))


class TestDims:
    """Operations on the dims beside a component and its rows."""

    WIDE = numbers(10, 4, 2)
    WIDE_ROWS = WIDE.split([3, 5, 2])

    def on_wide_rows(self, body: Body, want: Any) -> None:
        agree(lambda x, o: body(nested(x, o)), want, self.WIDE, OFFSETS)

    def test_broadcast(self) -> None:
        more = numbers(10, 4, 5)
        want = [r[..., None].expand(-1, -1, 5) for r in ROWS]
        agree(lambda x, o, y: ops.broadcast_to(ops.unsqueeze(nested(x, o), 3), nested(y, o)), want, X, OFFSETS, more)
        vector, each = numbers(4), numbers(3, 1, 4)
        want = [vector.expand(len(r), 4) for r in ROWS]
        on_rows(lambda x, v: ops.broadcast_to(v, x), want, vector)
        want = [each[c].expand(len(r), 4) for c, r in enumerate(ROWS)]
        on_rows(lambda x, e: ops.broadcast_to(e, x), want, each)
        refused(ShapeError, "broadcast_to: .* has more dims than", lambda x, o: ops.broadcast_to(nested(x, o), o), X, OFFSETS)

    @pytest.mark.parametrize("dim", [2, 3, -1, -2])
    def test_unsqueeze(self, dim: int) -> None:
        own = dim - 1 if dim > 0 else dim
        on_rows(lambda x: ops.unsqueeze(x, dim), [r.unsqueeze(own) for r in ROWS])
        on_rows(lambda x: ops.exp(ops.unsqueeze(x, dim)), [r.unsqueeze(own).exp() for r in ROWS])

    def test_squeeze(self) -> None:
        thin = numbers(10, 1, 4)
        rows = cut(thin, OFFSETS)
        agree(lambda x, o: ops.squeeze(nested(x, o), 2), [r[:, 0] for r in rows], thin, OFFSETS)
        agree(lambda x, o: ops.squeeze(nested(x, o)), [r[:, 0] for r in rows], thin, OFFSETS)
        agree(lambda x, o: ops.squeeze(ops.exp(nested(x, o)), 2), [r[:, 0].exp() for r in rows], thin, OFFSETS)

    def test_squeeze_leaves_a_single_component_and_a_row_of_one(self) -> None:
        x = numbers(1, 4)
        one = torch.tensor([0, 1])
        for dim in (None, 0, 1):
            agree(lambda x, o, dim=dim: ops.squeeze(nested(x, o), dim), [x], x, one)

    def test_permute_behind_the_rows(self) -> None:
        self.on_wide_rows(lambda x: ops.permute(x, 0, 1, 3, 2), [r.permute(0, 2, 1) for r in self.WIDE_ROWS])
        self.on_wide_rows(lambda x: ops.transpose(x, 2, 3), [r.permute(0, 2, 1) for r in self.WIDE_ROWS])
        self.on_wide_rows(lambda x: ops.permute(ops.exp(x), 0, 1, 3, 2), [r.permute(0, 2, 1).exp() for r in self.WIDE_ROWS])

    @pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1)])
    def test_permute_with_a_dim_before_the_rows(self, order: tuple[int, ...]) -> None:
        component, ragged, dim = (order.index(k) for k in range(3))

        def permuted(x: TensorView) -> TensorView:
            return ops.permute(x, *order)

        def back(x: TensorView) -> TensorView:
            return ops.permute(x, component, ragged, dim)

        sums = torch.stack([r.sum(0) for r in ROWS])
        on_rows(lambda x: ops.sum(permuted(x), ragged), sums if order[0] == 0 else sums.T)
        on_rows(lambda x: ops.sum(permuted(x), dim), [r.sum(1) for r in ROWS])
        on_rows(lambda x: ops.sum(permuted(x), (component, ragged)), X.sum(0))
        on_rows(lambda x: back(ops.exp(permuted(x))), [r.exp() for r in ROWS])
        on_rows(lambda x: back(ops.softmax(permuted(x), ragged)), [r.softmax(0) for r in ROWS])
        on_rows(lambda x: back(ops.softmax(permuted(x), dim)), [r.softmax(1) for r in ROWS])

    def test_rows_stay_behind_their_component(self) -> None:
        message = "permute: dim 1 of .* is ragged and must stay after dim 0, which counts its rows"
        refused(ShapeError, message, lambda x, o: ops.permute(nested(x, o), 1, 0, 2), X, OFFSETS)
        refused(ShapeError, message, lambda x, o: ops.transpose(nested(x, o), 0, 1), X, OFFSETS)
        refused(
            ShapeError,
            r"permute: expected every dim of 3 once, got \[0, 1, 1\]",
            lambda x, o: ops.permute(nested(x, o), 0, 1, 1),
            X,
            OFFSETS,
        )

    def test_regular_dims_may_stand_between_components_and_rows_of_a_result(self) -> None:
        on_rows(lambda x: ops.unsqueeze(x, 1), [r[None] for r in ROWS])
        on_rows(lambda x: ops.permute(x, 0, 2, 1), [r.T for r in ROWS])

    def test_a_dim_before_the_rows_of_a_result(self) -> None:
        on_rows(lambda x: ops.unsqueeze(x, 0), [list(ROWS)])
        on_rows(lambda x: ops.permute(x, 2, 0, 1), [[r[:, k] for r in ROWS] for k in range(4)])


class TestReshape:
    """Across a component and its rows only as_flattened goes; everything else says so."""

    def test_a_dense_tensor_without_elements(self) -> None:
        @jit
        def heads(x: Any, count: int) -> Any:
            return x.reshape(x.shape[0], count, 3) * 2

        for rows in (4, 0, 5, 0):
            assert heads(torch.ones(rows, 6), 2).shape == (rows, 2, 3)
        with pytest.raises(ShapeError, match="the first may be 0 if none is -1"):
            jit(lambda x: x.reshape(0, 2, -1))(torch.ones(0, 6))

    @pytest.mark.parametrize(
        ("body", "error", "message"),
        [
            (
                lambda x: ops.reshape(x, (10, 4)),
                ShapeError,
                r"reshape: .* is ragged; use flatten and unflatten on its regular dims, as_flattened",
            ),
            (lambda x: ops.reshape(x, (3, -1)), ShapeError, r"reshape: .* is ragged"),
            (
                lambda x: ops.unflatten(x, 0, (3, 1)),
                ShapeError,
                "unflatten: dim 0 of .* belongs to rows, which have no common length",
            ),
            (
                lambda x: ops.unflatten(x, 1, (2, -1)),
                ShapeError,
                "unflatten: dim 1 of .* belongs to rows, which have no common length",
            ),
            (
                lambda x: ops.flatten(x, 0, 1),
                SerrateError,
                "flatten: dims 0 and 1 of .* are a component and its rows; use as_flattened",
            ),
            (
                lambda x: ops.flatten(x),
                SerrateError,
                "flatten: dims 0 and 1 of .* are a component and its rows; use as_flattened",
            ),
            (lambda x: ops.flatten(ops.permute(x, 0, 2, 1), 1, 2), SerrateError, "flatten: dim 2 of .* is ragged"),
            (lambda x: ops.flatten(ops.permute(x, 0, 2, 1), 0, 1), SerrateError, "flatten: dim 0 of .* counts rows"),
            (lambda x: ops.flatten(ops.permute(x, 2, 0, 1), 0, 1), SerrateError, "flatten: dim 1 of .* counts rows"),
        ],
        ids=[
            "reshape",
            "reshape -1",
            "unflatten 0",
            "unflatten 1",
            "flatten 0 1",
            "flatten",
            "dim and rows",
            "component and dim",
            "dim and component",
        ],
    )
    def test_refused(self, body: Body, error: type[SerrateError], message: str) -> None:
        refused(error, message, lambda x, o: body(nested(x, o)), X, OFFSETS)

    def test_rows_with_their_features(self) -> None:
        on_rows(lambda x: ops.flatten(x, 1, 2), [r.flatten() for r in ROWS])
        on_rows(lambda x: ops.exp(ops.flatten(x, 1)), [r.flatten().exp() for r in ROWS])
        on_rows(lambda x: ops.sum(ops.flatten(x, 1), 1), torch.stack([r.sum() for r in ROWS]))

    def test_features(self) -> None:
        wide = numbers(10, 4, 2)
        agree(lambda x, o: ops.flatten(nested(x, o), 2), [r.flatten(1) for r in cut(wide, OFFSETS)], wide, OFFSETS)
        on_rows(lambda x: ops.unflatten(x, 2, (2, -1)), [r.unflatten(1, (2, 2)) for r in ROWS])
        turned = [r.transpose(1, 2).flatten(1) for r in cut(wide, OFFSETS)]
        agree(lambda x, o: ops.flatten(ops.permute(nested(x, o), 0, 1, 3, 2), 2), turned, wide, OFFSETS)


# --- reductions ----------------------------------------------------------------------------------------------------------


def across(function: Callable[[Tensor], Tensor], rows: Sequence[Tensor] = ROWS) -> Tensor:
    """For each position, what the rows that reach it give."""
    longest = max(len(r) for r in rows)
    return torch.stack([function(torch.stack([r[k] for r in rows if len(r) > k])) for k in range(longest)])


REDUCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, d: x.sum(d),
    "prod": lambda x, d: x.prod(d),
    "mean": lambda x, d: x.mean(d),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "var": lambda x, d: x.var(d, correction=0),
}


class TestReductions:
    def reduce(self, name: str) -> Callable[[TensorView, Any], TensorView]:
        if name == "var":
            return lambda x, dim: ops.var(x, dim, 0)
        return getattr(ops, name)

    @pytest.mark.parametrize("name", REDUCTIONS)
    def test_a_regular_dim(self, name: str) -> None:
        on_rows(lambda x: self.reduce(name)(x, 2), [REDUCTIONS[name](r, 1) for r in ROWS])

    @pytest.mark.parametrize("name", REDUCTIONS)
    def test_the_ragged_dim(self, name: str) -> None:
        on_rows(lambda x: self.reduce(name)(x, 1), torch.stack([REDUCTIONS[name](r, 0) for r in ROWS]))

    @pytest.mark.parametrize("name", REDUCTIONS)
    def test_the_component_dim_alone(self, name: str) -> None:
        """Across rows: positions past a row's length are not counted, so that 4 is the mean of one row."""
        on_rows(lambda x: self.reduce(name)(x, 0), across(lambda s: REDUCTIONS[name](s, 0)))

    @pytest.mark.parametrize("name", REDUCTIONS)
    def test_both(self, name: str) -> None:
        on_rows(lambda x: self.reduce(name)(x, (0, 1)), REDUCTIONS[name](X, 0))

    def test_any_all_and_places(self) -> None:
        positive = [r > 0 for r in ROWS]
        for name, by_torch in (("any", torch.any), ("all", torch.all)):
            operation = getattr(ops, name)
            on_rows(lambda x, f=operation: f(x > 0, 1), torch.stack([by_torch(p, 0) for p in positive]), backends=QUICK)
            on_rows(lambda x, f=operation: f(x > 0, 2), [by_torch(p, 1) for p in positive], backends=QUICK)
            on_rows(lambda x, f=operation: f(x > 0, 0), across(lambda s, f=by_torch: f(s, 0), positive), backends=QUICK)
        on_rows(lambda x: ops.argmax(x, 1), torch.stack([r.argmax(0) for r in ROWS]), backends=QUICK)
        on_rows(lambda x: ops.argmax(x, 2), [r.argmax(1) for r in ROWS], backends=QUICK)
        # The component is named, not its place among those that reach so far.
        reaching = torch.full((3, 5, 4), -torch.inf)
        for c, r in enumerate(ROWS):
            reaching[c, : len(r)] = r
        on_rows(lambda x: ops.argmax(x, 0), reaching.argmax(0))

    def test_with_the_dim_kept(self) -> None:
        on_rows(lambda x: ops.mean(x, 1, keepdim=True), torch.stack([r.mean(0, keepdim=True) for r in ROWS]))
        mean = across(lambda s: s.mean(0))
        on_rows(lambda x: ops.mean(x, 0, keepdim=True), mean[None])
        on_rows(lambda x: x - ops.mean(x, 0, keepdim=True), [r - mean[: len(r)] for r in ROWS])

    def test_everything_and_mixed(self) -> None:
        on_rows(lambda x: ops.sum(x), X.sum())
        on_rows(lambda x: ops.sum(x, (1, 2)), torch.stack([r.sum() for r in ROWS]))
        on_rows(lambda x: ops.sum(x, (0, 2)), across(lambda s: s.sum((0, 1))))

    def test_empty_rows(self) -> None:
        x, offsets = numbers(5, 4), torch.tensor([0, 2, 2, 5])
        rows = cut(x, offsets)
        agree(lambda x, o: ops.sum(nested(x, o), 1), torch.stack([r.sum(0) for r in rows]), x, offsets)
        agree(lambda x, o: ops.mean(nested(x, o), 0), across(lambda s: s.mean(0), rows), x, offsets)

    def test_inside_other_rows_the_component_alone_is_refused(self) -> None:
        message = r"sum: dim 1 of \(.*, r0, 4\) counts the rows of dim 2, which differ in length, .* dims \(0, 1\) together"
        refused(ShapeError, message, lambda x, e, r: ops.sum(three(x, e, r), 1), numbers(325, 4), EXPERTS, RANKS)


# --- rows of other lengths -----------------------------------------------------------------------------------------------


class TestNewLengths:
    """Slices and padding give rows of other lengths, with offsets of their own."""

    @pytest.mark.parametrize("bounds", [(1, None), (None, 2), (-2, None), (2, -1), (3, 2), (7, None)])
    def test_slices_of_rows(self, bounds: tuple[int | None, int | None]) -> None:
        want = [r[slice(*bounds)] for r in ROWS]
        on_rows(lambda x: ops.slice(x, 1, *bounds), want)
        sums = torch.stack([r.exp().sum(0) for r in want])
        on_rows(lambda x: ops.sum(ops.exp(ops.slice(x, 1, *bounds)), 1), sums, backends=QUICK)
        y = record(lambda x, o: ops.slice(nested(x, o), 1, *bounds), X, OFFSETS).evaluate(X, OFFSETS)
        assert y.lengths.tolist() == [len(r) for r in want] and y.values.shape == (sum(map(len, want)), 4)

    @pytest.mark.parametrize("bounds", [(1, None), (-1, None), (0, 2), (5, None)])
    def test_slices_of_components(self, bounds: tuple[int | None, int | None]) -> None:
        on_rows(lambda x: ops.slice(x, 0, *bounds), list(ROWS[slice(*bounds)]), backends=QUICK)

    def test_slices_of_features(self) -> None:
        on_rows(lambda x: ops.slice(x, 2, 1, 3), [r[:, 1:3] for r in ROWS])

    @pytest.mark.parametrize(("before", "after", "value"), [(1, 0, 0.0), (0, 2, 7.0), (2, 1, -1.5)])
    def test_padding_of_rows(self, before: int, after: int, value: float) -> None:
        want = [torch.nn.functional.pad(r, (0, 0, before, after), value=value) for r in ROWS]
        on_rows(lambda x: ops.pad(x, 1, before, after, value), want)
        sums = torch.stack([r.sum(0) for r in want])
        on_rows(lambda x: ops.sum(ops.pad(x, 1, before, after, value), 1), sums, backends=QUICK)

    def test_padding_of_features(self) -> None:
        on_rows(lambda x: ops.pad(x, 2, 1, 2, 3.0), [torch.nn.functional.pad(r, (1, 2), value=3.0) for r in ROWS])

    def test_a_new_structure_does_not_meet_the_old_one(self) -> None:
        message = "add of .*: the rows differ"
        refused(StructureMismatch, message, lambda x, o: nested(x, o) + ops.slice(nested(x, o), 1, 1), X, OFFSETS)
        refused(StructureMismatch, message, lambda x, o: nested(x, o) + ops.pad(nested(x, o), 1, 1, 0), X, OFFSETS)
        with pytest.raises(StructureMismatch, match=r"combine: .* is the component of T1, but .* belongs to"):
            record(lambda x, o: _combined(nested(x, o), ops.slice(nested(x, o), 1, 1)), X, OFFSETS)

    def test_sliced_rows_nest_again(self) -> None:
        groups = torch.tensor([0, 2, 3])
        want = [[ROWS[0][1:], ROWS[1][1:]], [ROWS[2][1:]]]
        agree(lambda x, o, g: nested(ops.slice(nested(x, o), 1, 1), g), want, X, OFFSETS, groups)

    def test_rows_that_are_added_are_empty(self) -> None:
        none = ROWS[0][:0]
        agree(lambda x, o: ops.pad(nested(x, o), 0, 1, 0), [none, *ROWS], X, OFFSETS)
        groups = torch.tensor([0, 1, 3])
        want = [[none, ROWS[0]], [none, ROWS[1], ROWS[2]]]
        agree(lambda x, o, g: ops.pad(nested(nested(x, o), g), 1, 1, 0), want, X, OFFSETS, groups)

    def test_refused(self) -> None:
        message = "pad: sizes must not be negative, got -1 and 0; use slice to remove positions"
        refused(ShapeError, message, lambda x, o: ops.pad(nested(x, o), 1, -1, 0), X, OFFSETS)


def _combined(first: TensorView, second: TensorView) -> TensorView:
    combine(first.component, second.ragged)
    return second


class TestCat:
    OTHER = numbers(6, 4)
    OTHER_OFFSETS = torch.tensor([0, 1, 1, 6])
    OTHER_ROWS = OTHER.split([1, 0, 5])

    def joined(self, dim: int) -> Callable[..., TensorView]:
        return lambda x, o, y, p: ops.cat([nested(x, o), nested(y, p)], dim)

    def test_along_the_component_dim(self) -> None:
        agree(self.joined(0), [*ROWS, *self.OTHER_ROWS], X, OFFSETS, self.OTHER, self.OTHER_OFFSETS)

    def test_along_the_ragged_dim(self) -> None:
        want = [torch.cat(pair) for pair in zip(ROWS, self.OTHER_ROWS, strict=True)]
        agree(self.joined(1), want, X, OFFSETS, self.OTHER, self.OTHER_OFFSETS)

    def test_along_a_regular_dim(self) -> None:
        wide = numbers(10, 3)
        want = [torch.cat(pair, 1) for pair in zip(ROWS, cut(wide, OFFSETS), strict=True)]
        agree(lambda x, o, y: ops.cat([nested(x, o), nested(y, o)], 2), want, X, OFFSETS, wide)
        agree(self.joined(2), want, X, OFFSETS, wide, OFFSETS.clone())

    def test_of_three_and_what_follows(self) -> None:
        def body(x: TensorView, o: TensorView, y: TensorView, p: TensorView) -> TensorView:
            return ops.sum(ops.exp(ops.cat([nested(x, o), nested(y, p), nested(x, o)], 0)), 1)

        want = torch.stack([r.exp().sum(0) for r in (*ROWS, *self.OTHER_ROWS, *ROWS)])
        agree(body, want, X, OFFSETS, self.OTHER, self.OTHER_OFFSETS)

    def test_refused(self) -> None:
        args = X, OFFSETS, self.OTHER, self.OTHER_OFFSETS
        message = r"cat of .*, dim 1, which is not joined: the rows differ: lengths \[3, 5, 2\] and \[1, 0, 5\]"
        refused(StructureMismatch, message, self.joined(2), *args)
        refused(
            ShapeError,
            "cat of .*, dim 0, which is not joined: the sizes differ: 3 and 1",
            self.joined(1),
            *args[:3],
            torch.tensor([0, 6]),
        )
        message = "cat of .* and .*: tensors must have the same number of dims, and the same dims must be ragged"
        refused(ShapeError, message, lambda x, o, y: ops.cat([nested(x, o), y], 2), X, OFFSETS, numbers(3, 2, 4))
        refused(ShapeError, "cat: needs at least one tensor", lambda x: ops.cat([]), X)


class TestSelect:
    @pytest.mark.parametrize("index", [0, 1, 2, -1])
    def test_a_component(self, index: int) -> None:
        """Component 1 of [3, [3, 5, 2], 4] is [5, 4]."""
        on_rows(lambda x: ops.select(x, 0, index), ROWS[index])
        on_rows(lambda x: ops.sum(ops.exp(ops.select(x, 0, index)), 0), ROWS[index].exp().sum(0))

    def test_as_a_method(self) -> None:
        on_rows(lambda x: x.select(0, 1), ROWS[1], backends=QUICK)
        on_rows(lambda x: torch.select(x, 0, 1), ROWS[1], backends=QUICK)

    def test_its_rows_become_a_regular_dim(self) -> None:
        y = record(lambda x, o: ops.select(nested(x, o), 0, 1), X, OFFSETS, known=True).outputs[0]
        assert [d.is_ragged for d in y.domains] == [False, False]
        assert str(y.domains[0].extent) == "T1[2] - T1[1]"
        assert record(lambda x, o: ops.select(nested(x, o), 0, 1), X, OFFSETS).evaluate(X, OFFSETS).shape == (5, 4)

    def test_other_dims(self) -> None:
        on_rows(lambda x: ops.select(x, 2, 3), [r[:, 3] for r in ROWS])
        on_rows(lambda x: ops.select(x, 1, 1), torch.stack([r[1] for r in ROWS]), backends=QUICK)

    def test_refused(self) -> None:
        message = "select: .* has no position 3 in dim 0"
        refused(ShapeError, message, lambda x, o: ops.select(nested(x, o), 0, 3), X, OFFSETS)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (lambda x: ops.select(x, 1, 1), torch.stack([r[1] for r in ROWS])),
        (lambda x: ops.slice(x, 0, -1), [ROWS[2]]),
        (lambda x: ops.select(x, 1, -1), torch.stack([r[-1] for r in ROWS])),
    ],
    ids=["a position of every row", "the last row", "the last of every row"],
)
def test_places_without_lanes_are_interpreted(body: Body, want: Any) -> None:
    check(record(lambda x, o: body(nested(x, o)), X, OFFSETS, known=True).compile("triton")(X, OFFSETS), want, "triton")


# --- several levels ------------------------------------------------------------------------------------------------------


def three(x: TensorView, experts: TensorView, ranks: TensorView) -> TensorView:
    return ops.as_nested(nested(x, experts), ranks, ragged_dim=1)


class TestExpertsAndRanks:
    """325 tokens, 3 experts of [127, 0, 198], each cut by rank into [[50, 77], [0, 0], [100, 98]]."""

    TOKENS = numbers(325, 16)

    def parts(self) -> list[list[Tensor]]:
        return [cut(rows, bounds) for rows, bounds in zip(cut(self.TOKENS, EXPERTS), RANKS, strict=True)]

    def agree(self, body: Body, want: Any, **options: Any) -> None:
        agree(lambda *args: body(three(*args)), want, self.TOKENS, EXPERTS, RANKS, backends=QUICK, **options)

    def test_structure(self) -> None:
        f = record(three, self.TOKENS, EXPERTS, RANKS, known=True)
        y = f.outputs[0]
        expert, rank, tokens, hidden = y.domains
        assert (expert.extent, rank.extent, hidden.extent, tokens.is_ragged) == (3, 2, 16, True)
        result = f.evaluate(self.TOKENS, EXPERTS, RANKS)
        assert result.lengths.tolist() == [50, 77, 0, 0, 100, 98]
        assert [[len(p) for p in parts] for parts in result.unbind()] == [[50, 77], [0, 0], [100, 98]]
        self.agree(lambda x: x, self.parts())
        self.agree(ops.exp, [[p.exp() for p in parts] for parts in self.parts()])

    def test_reductions(self) -> None:
        self.agree(lambda x: ops.sum(x, 2), torch.stack([torch.stack([p.sum(0) for p in ps]) for ps in self.parts()]))
        self.agree(lambda x: ops.sum(x, (1, 2)), torch.stack([r.sum(0) for r in cut(self.TOKENS, EXPERTS)]))
        self.agree(lambda x: ops.sum(x, (0, 1, 2)), self.TOKENS.sum(0))
        self.agree(lambda x: ops.sum(x, 3), [[p.sum(1) for p in parts] for parts in self.parts()])

    def test_flat_again(self) -> None:
        self.agree(lambda x: ops.as_flattened(ops.exp(x), component_dim=1, ragged_dim=2), cut(self.TOKENS.exp(), EXPERTS))
        self.agree(lambda x: ops.as_flattened(ops.as_flattened(ops.exp(x), component_dim=1, ragged_dim=2)), self.TOKENS.exp())

    def test_by_rank(self) -> None:
        by_rank = [torch.cat([parts[rank] for parts in self.parts()]) for rank in range(2)]
        assert [len(rows) for rows in by_rank] == [150, 175]
        self.agree(ops.regroup, by_rank)

    def test_refused(self) -> None:
        def rows(*offsets: list[int]) -> tuple[Tensor, ...]:
            return self.TOKENS, EXPERTS, torch.tensor(offsets)

        short = rows([0, 50, 127], [0, 0, 0])
        refused(ShapeError, "as_nested: the number of rows of offsets and of components differ: 2 and 3", three, *short)
        refused(
            SerrateError, "as_nested: the number of rows of offsets and of components differ: 2 and 3", three, *short, known=False
        )
        wrong = rows([0, 50, 127], [0, 0, 0], [0, 100, 197])
        refused(StructureError, r"offsets must end at the extent: offsets\[2\] ends at 197, not 198", three, *wrong)
        wrong = rows([0, 50, 127], [0, 0, 0], [0, 200, 198])
        refused(StructureError, r"offsets must not decrease: offsets\[2\]\[2\] = 198 < offsets\[2\]\[1\] = 200", three, *wrong)
        message = r"as_nested: dim 1 of .* is ragged, so offsets need a row for each of its components, \[.*\]; got 1 dims"
        refused(ShapeError, message, three, self.TOKENS, EXPERTS, torch.tensor([0, 325]))
        refused(ShapeError, message.replace("1 dims", "3 dims"), three, self.TOKENS, EXPERTS, RANKS[None])


class TestTwoDevices:
    """[2, 100, 512] by 2-D offsets on dim 1: each device's tokens by expert; then expert first; then two experts a device."""

    TOKENS = numbers(2, 100, 512)

    def parts(self) -> list[list[Tensor]]:
        return [cut(self.TOKENS[g], DEVICES[g]) for g in range(2)]

    def by_expert(self) -> list[Tensor]:
        return [torch.cat([parts[e] for parts in self.parts()]) for e in range(4)]

    @staticmethod
    def nested(x: TensorView, offsets: TensorView) -> TensorView:
        return ops.as_nested(x, offsets, ragged_dim=1)

    def test_by_device_and_expert(self) -> None:
        agree(self.nested, self.parts(), self.TOKENS, DEVICES, backends=QUICK)
        f = record(self.nested, self.TOKENS, DEVICES, known=True)
        device, expert, _, hidden = f.outputs[0].domains
        assert (device.extent, expert.extent, hidden.extent) == (2, 4, 512)
        found = f.evaluate(self.TOKENS, DEVICES)
        assert [[len(p) for p in parts] for parts in found.unbind()] == [[30, 0, 40, 30], [25, 35, 25, 15]]
        sums = torch.stack([torch.stack([p.sum(0) for p in parts]) for parts in self.parts()])
        agree(lambda x, o: ops.sum(self.nested(x, o), 2), sums, self.TOKENS, DEVICES, backends=QUICK)

    def test_expert_first(self) -> None:
        assert [len(rows) for rows in self.by_expert()] == [55, 35, 65, 45]
        agree(lambda x, o: ops.regroup(self.nested(x, o)), self.by_expert(), self.TOKENS, DEVICES, backends=QUICK)

    def test_two_experts_for_each_device(self) -> None:
        """The component split by 2: nested again by offsets of components, and the same in a schedule."""
        want = [self.by_expert()[:2], self.by_expert()[2:]]

        def spread(x: TensorView, offsets: TensorView, devices: TensorView) -> TensorView:
            return ops.as_nested(ops.regroup(self.nested(x, offsets)), devices)

        agree(spread, want, self.TOKENS, DEVICES, torch.tensor([0, 2, 4]), backends=QUICK)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_two_experts_for_each_device_in_a_schedule(self, backend: str) -> None:
        tokens = self.TOKENS[:, :, :8].contiguous()
        with Fusion() as f:
            x, offsets = f.input((2, 100, 8), torch.float32), f.input((2, 5), torch.int64)
            total = ops.sum(ops.regroup(self.nested(x, offsets)), 1)
            f.output(total)
        total.split(0, 2).parallelize(0, "grid")
        assert [d.extent for d in total.loops[:2]] == [2, 2]
        want = torch.stack([rows.sum(0) for rows in self.by_expert()])[:, :8]
        torch.testing.assert_close(f.compile(backend)(tokens, DEVICES), want, rtol=1e-4, atol=1e-4)

    def test_refused(self) -> None:
        x = self.TOKENS
        message = r"as_nested: offsets have 1 leading dims, but 0 precede dim 0 of"
        refused(ShapeError, message, lambda x, o: ops.as_nested(x, o, ragged_dim=0), x, DEVICES)
        message = r"as_nested: offsets have 2 leading dims, but 1 precede dim 1 of"
        refused(ShapeError, message, self.nested, x, DEVICES[None])
        message = "as_nested: the number of rows of offsets and of positions before the dim differ: 1 and 2"
        refused(ShapeError, message, self.nested, x, DEVICES[:1])
        for offsets, message in (
            ([[0, 30, 30, 70, 100], [0, 25, 60, 85, 99]], r"offsets must end at the extent: offsets\[1\] ends at 99, not 100"),
            (
                [[0, 30, 20, 70, 100], [0, 25, 60, 85, 100]],
                r"offsets must not decrease: offsets\[0\]\[2\] = 20 < offsets\[0\]\[1\] = 30",
            ),
            ([[1, 30, 30, 70, 100], [0, 25, 60, 85, 100]], r"offsets must start at 0 in every row: offsets\[0\]\[0\] = 1"),
        ):
            refused(StructureError, message, self.nested, x, torch.tensor(offsets))


class TestTwoLeadingDims:
    """Offsets of three dims on dim 2 of [2, 3, 10, 4]: two parts in each of six runs of ten."""

    X = numbers(2, 3, 10, 4)
    BOUNDS = torch.tensor([[[0, k, 10] for k in (1, 2, 3)], [[0, k, 10] for k in (4, 10, 0)]])

    def parts(self) -> list[list[list[Tensor]]]:
        return [[cut(self.X[a, b], self.BOUNDS[a, b]) for b in range(3)] for a in range(2)]

    @staticmethod
    def nested(x: TensorView, offsets: TensorView) -> TensorView:
        return ops.as_nested(x, offsets, ragged_dim=2)

    def test_reductions(self) -> None:
        sums = torch.stack([torch.stack([torch.stack([p.sum(0) for p in ps]) for ps in rows]) for rows in self.parts()])
        self.agree(lambda x: ops.sum(x, 3), sums)
        self.agree(lambda x: ops.sum(x, (2, 3)), self.X.sum(2))

    def agree(self, body: Body, want: Any, strategies: Sequence[str] = ("maskless", "persistent_dynamic")) -> None:
        agree(lambda x, o: body(self.nested(x, o)), want, self.X, self.BOUNDS, backends=QUICK, strategies=strategies)

    def test_flat_again(self) -> None:
        self.agree(lambda x: ops.as_flattened(ops.exp(x), component_dim=2, ragged_dim=3), self.X.exp())

    def test_in_lanes_of_rows(self) -> None:
        self.agree(lambda x: ops.as_flattened(ops.exp(x), component_dim=2, ragged_dim=3), self.X.exp(), ("masked",))

    def test_as_a_result(self) -> None:
        agree(self.nested, self.parts(), self.X, self.BOUNDS)


class TestRanksToExperts:
    """What two ranks send to three experts, [[127, 0, 198], [98, 45, 156]], arrives rank first and is wanted expert first."""

    TOKENS = numbers(624, 8)
    BY_RANK = torch.tensor([0, 325, 624])
    SENT = torch.tensor([[0, 127, 127, 325], [0, 98, 143, 299]])

    def received(self) -> list[list[Tensor]]:
        sent = [cut(rows, bounds) for rows, bounds in zip(cut(self.TOKENS, self.BY_RANK), self.SENT, strict=True)]
        return [[sent[rank][expert] for rank in range(2)] for expert in range(3)]

    def test_expert_first(self) -> None:
        assert [[len(p) for p in parts] for parts in self.received()] == [[127, 98], [0, 45], [198, 156]]
        want = [torch.cat(parts) for parts in self.received()]
        agree(lambda *args: ops.regroup(three(*args)), want, self.TOKENS, self.BY_RANK, self.SENT, backends=QUICK)

    def test_expert_first_and_ranks_inside(self) -> None:
        inside = torch.tensor([[0, 127, 225], [0, 0, 45], [0, 198, 354]])

        def body(x: TensorView, ranks: TensorView, sent: TensorView, inside: TensorView) -> TensorView:
            return ops.as_nested(ops.set(ops.regroup(three(x, ranks, sent))), inside, ragged_dim=1)

        agree(body, self.received(), self.TOKENS, self.BY_RANK, self.SENT, inside, backends=QUICK)


class TestLevelsOfVaryingLength:
    WORDS, SENTENCES = torch.tensor([0, 3, 3, 8, 10]), torch.tensor([0, 1, 4])

    @staticmethod
    def documents(x: TensorView, words: TensorView, sentences: TensorView) -> TensorView:
        return nested(nested(x, words), sentences)

    def agree(self, body: Body, want: Any) -> None:
        agree(lambda *args: body(self.documents(*args)), want, X, self.WORDS, self.SENTENCES)

    def sentences(self) -> list[list[Tensor]]:
        rows = cut(X, self.WORDS)
        return [rows[:1], rows[1:]]

    def test_nested_data_nests_again(self) -> None:
        self.agree(lambda x: x, self.sentences())
        self.agree(ops.exp, [[s.exp() for s in d] for d in self.sentences()])

    def test_a_third_level(self) -> None:
        library = torch.tensor([0, 0, 2])
        want = [[], self.sentences()]
        agree(lambda x, w, s, b: nested(self.documents(x, w, s), b), want, X, self.WORDS, self.SENTENCES, library)

    def test_sentences_into_their_documents(self) -> None:
        self.agree(lambda x: ops.as_flattened(ops.exp(x), component_dim=1, ragged_dim=2), cut(X.exp(), [0, 3, 10]))
        self.agree(
            lambda x: ops.sum(ops.as_flattened(x, component_dim=1, ragged_dim=2), 1), torch.stack([X[:3].sum(0), X[3:].sum(0)])
        )
        self.agree(lambda x: ops.as_flattened(ops.exp(x)), cut(X.exp(), self.WORDS))

    def test_five_and_three_experts(self) -> None:
        """Two devices with experts=[5, 3] and tokens=[127, 0, 198, 64, 89, 103, 45, 201]."""
        lengths = [127, 0, 198, 64, 89, 103, 45, 201]
        tokens, offsets, experts = (
            numbers(sum(lengths), 8),
            torch.tensor([0, *itertools.accumulate(lengths)]),
            torch.tensor([0, 5, 8]),
        )
        rows = cut(tokens, offsets)
        agree(self.documents, [rows[:5], rows[5:]], tokens, offsets, experts, backends=QUICK)
        sums = [torch.stack([r.sum(0) for r in some]) for some in (rows[:5], rows[5:])]
        agree(lambda *args: ops.sum(self.documents(*args), 2), sums, tokens, offsets, experts, backends=QUICK)
        of_devices = torch.stack([s.sum(0) for s in sums])
        agree(lambda *args: ops.sum(self.documents(*args), (1, 2)), of_devices, tokens, offsets, experts, backends=QUICK)


class TestIndependentPairs:
    """[devices, experts of each, groups, tokens of each, features]: two dims of storage, each cut by its own offsets."""

    X = numbers(8, 10, 3)
    EXPERTS, TOKENS = torch.tensor([0, 5, 8]), torch.tensor([0, 3, 4, 10])

    def nested(self, x: TensorView, experts: TensorView, tokens: TensorView) -> TensorView:
        y = ops.as_nested(ops.as_nested(x, tokens, ragged_dim=1), experts, ragged_dim=0)
        assert [d.is_ragged for d in y.domains] == [False, True, False, True, False]
        return y

    def agree(self, body: Body, want: Any, **options: Any) -> None:
        agree(lambda *args: body(ops.exp(self.nested(*args))), want, self.X, self.EXPERTS, self.TOKENS, **options)

    def blocks(self) -> list[list[Tensor]]:
        return [cut(rows, self.TOKENS, 1) for rows in cut(self.X.exp(), self.EXPERTS)]

    def test_each_dim_is_reduced_for_itself(self) -> None:
        self.agree(lambda x: ops.sum(x, 3), [torch.stack([b.sum(1) for b in row], 1) for row in self.blocks()])
        both = torch.stack([torch.stack([b.sum((0, 1)) for b in row]) for row in self.blocks()])
        self.agree(lambda x: ops.sum(x, (1, 3)), both, backends=QUICK)
        self.agree(lambda x: ops.sum(x, (0, 1)), cut(self.X.exp().sum(0), self.TOKENS), backends=QUICK)
        self.agree(lambda x: ops.sum(x, (2, 3)), cut(self.X.exp().sum(1), self.EXPERTS), backends=QUICK)

    def test_flat_again(self) -> None:
        self.agree(lambda x: ops.as_flattened(ops.as_flattened(x, component_dim=2, ragged_dim=3)), self.X.exp())
        self.agree(lambda x: ops.as_flattened(x, component_dim=2, ragged_dim=3), cut(self.X.exp(), self.EXPERTS))

    def test_as_a_result(self) -> None:
        want = [[cut(position, self.TOKENS) for position in row] for row in cut(self.X.exp(), self.EXPERTS)]
        self.agree(lambda x: x, want)
        args = self.X, self.EXPERTS, self.TOKENS
        y = record(self.nested, *args).evaluate(*args)
        assert (y.structure.dims, y.values.shape, str(y.shape)) == ((0, 1), (8, 10, 3), "(2, r0, 3, r1, 3)")


# --- lengths that only the program knows -----------------------------------------------------------------------------------


class TestRouting:
    """1024 tokens for 8 experts: lengths are computed by the program, and their offsets are a result the user never asks for."""

    LENGTHS = (127, 0, 198, 64, 412, 89, 103, 31)
    OFFSETS = (0, 127, 127, 325, 389, 801, 890, 993, 1024)

    def logits(self) -> tuple[Tensor, Tensor]:
        """Logits that choose each expert as often as it should be, in an order of chance; and the choices."""
        chosen = torch.repeat_interleave(torch.arange(8), torch.tensor(self.LENGTHS))
        chosen = chosen[torch.randperm(1024, generator=torch.Generator().manual_seed(3))]
        return torch.nn.functional.one_hot(chosen, 8) + numbers(1024, 8).clamp(-0.4, 0.4), chosen

    @staticmethod
    def route(tokens: TensorView, logits: TensorView) -> tuple[TensorView, TensorView]:
        choice = ops.squeeze(ops.topk(logits, 1)[1], 1)
        offsets, order = ops.group_by(choice, 8)
        return nested(ops.index(tokens, order), offsets), order

    def rows(self, tokens: Tensor) -> list[Tensor]:
        _, chosen = self.logits()
        return [tokens[chosen == expert] for expert in range(8)]

    @pytest.mark.parametrize("backend", QUICK)
    def test_counts_and_offsets(self, backend: str) -> None:
        tokens, (logits, _) = numbers(1024, 16), self.logits()
        f = record(lambda x, p: ops.relu(self.route(x, p)[0]), tokens, logits)
        assert len(f.outputs) == 1, "a user sees one tensor"
        found = f.compile(backend)(tokens, logits)
        assert found.shape[0] == 8 and found.lengths.tolist() == list(self.LENGTHS)
        assert found.offsets.tolist() == list(self.OFFSETS)
        same(found.unbind(), [torch.relu(r) for r in self.rows(tokens)], backend)

    @pytest.mark.parametrize("backend", QUICK)
    def test_there_and_back(self, backend: str) -> None:
        """Each expert's weight, and every token back at its place."""
        tokens, weights, (logits, chosen) = numbers(1024, 16), numbers(8, 16, 16), self.logits()

        def body(x: TensorView, p: TensorView, w: TensorView) -> TensorView:
            rows, order = self.route(x, p)
            return ops.index(ops.as_flattened(ops.matmul(rows, w)), ops.invert(order))

        found = record(body, tokens, logits, weights).compile(backend)(tokens, logits, weights)
        want = torch.einsum("td,tde->te", tokens, weights[chosen])
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)

    def test_given_offsets(self) -> None:
        """The same structure by an argument of 9 offsets."""
        tokens = numbers(1024, 512)
        with Fusion() as f:
            x, offsets = f.input((None, 512), torch.float32), f.input((9,), torch.int64)
            y = ops.as_nested(x, offsets, ragged_dim=0)
            f.output(ops.relu(y))
        assert (y.component.extent, y.domains[2].extent) == (8, 512)
        given = torch.tensor(self.OFFSETS)
        for backend in QUICK:
            found = f.compile(backend)(tokens, given)
            assert found.lengths.tolist() == list(self.LENGTHS)
            same(found.unbind(), cut(torch.relu(tokens), given), backend)


# --- which component belongs to which rows -----------------------------------------------------------------------------------


class TestPairing:
    MESSAGE = r"combine: i\.c.* is the component of {}, but ragged\.r.* belongs to {}; pass the component it was made with"

    def two(self, f: Fusion) -> tuple[TensorView, TensorView]:
        """Two structures of as many components over one dim."""
        x, first, second = f.input((10, 4), torch.float32), f.input((4,), torch.int64), f.input((4,), torch.int64)
        return nested(x, first), nested(x, second)

    def test_the_same_pair_after_set(self) -> None:
        with Fusion() as f:
            x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
            y = nested(x, offsets)
            z = ops.set(y)
            assert combine(y.component, z.ragged) is x.domains[0]
            assert combine(z.component, y.ragged) is x.domains[0]
            f.output(ops.as_flattened(z))
        for backend in BACKENDS:
            same(f.compile(backend)(X, OFFSETS), X, backend)

    @pytest.mark.parametrize(
        "keep",
        [lambda x: x, ops.set, lambda x: ops.set(ops.set(x)), ops.exp, lambda x: x + x, lambda x: ops.softmax(x, 1)],
        ids=["at once", "set", "set twice", "unary", "binary", "softmax"],
    )
    def test_another_component_is_refused(self, keep: Body) -> None:
        with Fusion() as f:
            first, second = self.two(f)
            for a, b, names in ((first, second, ("T1", "T2")), (second, first, ("T2", "T1"))):
                with pytest.raises(StructureMismatch, match=self.MESSAGE.format(*names)):
                    combine(a.component, keep(b).ragged)
                with pytest.raises(StructureMismatch, match=self.MESSAGE.format(*names)):
                    combine(keep(a).component, b.ragged)

    def test_in_a_clone(self) -> None:
        with Fusion() as f:
            f.output(*map(ops.set, self.two(f)))
        first, second = f.clone().outputs
        original = f.outputs[0]
        assert combine(first.component, first.ragged).extent == 10
        assert not combine(original.component, first.ragged).is_ragged, "one structure, whoever holds it"
        for a, b in ((first, second), (original, second)):
            with pytest.raises(StructureMismatch, match=self.MESSAGE.format("T1", "T2")):
                combine(a.component, b.ragged)

    def staged(self, f: Fusion) -> tuple[TensorView, TensorView]:
        """Rows whose offsets an earlier stage computes, and rows whose offsets are given."""
        x, keys, given = f.input((10, 4), torch.float32), f.input((10,), torch.int64), f.input((4,), torch.int64)
        offsets, order = ops.group_by(keys, 3)
        return nested(ops.index(x, order), offsets), nested(x, given)

    def test_across_stages(self) -> None:
        with Fusion() as f:
            rows, _ = self.staged(f)
            kept = ops.set(ops.exp(rows))
            assert combine(rows.component, kept.ragged) is combine(kept.component, rows.ragged)
            f.output(ops.as_flattened(kept), kept, ops.sum(kept, 1))
        keys = torch.tensor([2, 0, 2, 1, 0, 2, 2, 0, 2, 0])
        order = keys.argsort(stable=True)
        flat = X[order].exp()
        rows_ = cut(flat, [0, 4, 5, 10])
        for backend in BACKENDS:
            check(f.compile(backend)(X, keys, OFFSETS), (flat, list(rows_), torch.stack([r.sum(0) for r in rows_])), backend)

    def test_another_component_is_refused_across_stages(self) -> None:
        with Fusion() as f:
            rows, others = self.staged(f)
            kept = ops.set(rows)
            message = r"combine: .* is the component of T2, but ragged\.r0.* belongs to T\d+; pass the component"
            with pytest.raises(StructureMismatch, match=message):
                combine(others.component, kept.ragged)
            f.output(kept, ops.set(others))
        first, second = f.clone().outputs
        with pytest.raises(StructureMismatch, match="pass the component it was made with"):
            combine(second.component, first.ragged)

    def test_rows_from_outside(self) -> None:
        """A ragged argument has no partition that the program wrote, and pairs all the same."""
        first = JaggedTensor.from_list([r.clone() for r in ROWS])
        second = JaggedTensor.from_lengths(X.clone(), torch.tensor([4, 4, 2]))

        @jit
        def flat(a: Any, b: Any) -> Any:
            kept = ops.set(a)
            assert combine(a.component, kept.ragged).is_ragged is False
            with pytest.raises(StructureMismatch, match=r"combine: i\.c0.* is the component of T1, but ragged\.r1.* belongs to"):
                combine(a.component, ops.set(b).ragged)
            return ops.as_flattened(kept * 2)

        same(flat(first, second), X * 2, "jit")

    def test_rows_from_outside_that_share_a_structure(self) -> None:
        first = JaggedTensor.from_list([r.clone() for r in ROWS])
        second = JaggedTensor(X * 3, first.structure)

        @jit
        def added(a: Any, b: Any) -> Any:
            assert not combine(a.component, b.ragged).is_ragged
            return ops.as_flattened(a + b)

        same(added(first, second), X * 4, "jit")

    def test_nothing_is_refused(self) -> None:
        with Fusion() as f:
            y, _ = self.two(f)
        nothing: Any = None
        for pair in ((nothing, y.ragged), (y.component, nothing), (nothing, nothing)):
            with pytest.raises(DomainError, match="combine: expected an IterDomain, got NoneType"):
                combine(*pair)

    def test_regular_rows_are_refused(self) -> None:
        with Fusion() as f:
            y, _ = self.two(f)
        with pytest.raises(
            ShapeError, match=r"as_flattened: dim 2 of \(.*\) is not ragged; flatten makes one dim of regular ones"
        ):
            ops.as_flattened(y, component_dim=0, ragged_dim=2)

    def test_the_outer_component_of_nested_rows_is_refused(self) -> None:
        with Fusion() as f:
            first, _ = self.two(f)
            outer = nested(ops.set(first), f.input((3,), torch.int64))
        with pytest.raises(StructureMismatch, match=self.MESSAGE.format(r"T\d+", "T1")):
            ops.as_flattened(outer, component_dim=0, ragged_dim=2)


# --- what as_nested refuses ------------------------------------------------------------------------------------------------


class TestOffsets:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(
        ("offsets", "message"),
        [
            ([1, 3, 10], r"offsets must start at 0: offsets\[0\] = 1"),
            ([0, 7, 3, 10], r"offsets must not decrease: offsets\[2\] = 3 < offsets\[1\] = 7"),
            ([0, 3, 9], "offsets must end at the number of values: they end at 9, but the values have 10 positions"),
            ([0, 3, 11], "offsets must end at the number of values: they end at 11, but the values have 10 positions"),
        ],
    )
    def test_numbers_are_checked_when_run(self, offsets: list[int], message: str, backend: str) -> None:
        given = torch.tensor(offsets)
        program = record(lambda x, o: ops.sum(nested(x, o), 1), X, given).compile(backend)
        with pytest.raises(StructureError, match=message):
            program(X, given)

    @pytest.mark.parametrize("offsets", [[1, 3, 10], [0, 7, 3, 10], [0, 3, 9]], ids=["start", "decrease", "end"])
    def test_a_refusal_when_run_names_the_function(self, offsets: list[int]) -> None:
        given = torch.tensor(offsets)
        with pytest.raises(StructureError, match="as_nested"):
            record(nested, X, given).evaluate(X, given)

    def test_lengths_are_checked_when_run(self) -> None:
        def body(x: TensorView, n: TensorView) -> TensorView:
            return ops.as_nested(x, lengths=n)

        refused(
            StructureError,
            "must end at the number of values: they end at 9, but the values have 10",
            body,
            X,
            torch.tensor([4, 5]),
        )
        refused(StructureError, "offsets must not decrease", body, X, torch.tensor([11, -1]))

    def test_what_is_no_offsets_is_refused_when_recorded(self) -> None:
        with Fusion() as f:
            x, scores, one = f.input((10, 4), torch.float32), f.input((4,), torch.float32), f.input((), torch.int64)
            for given in ({}, {"offsets": None}):
                with pytest.raises(
                    ShapeError, match="as_nested: pass offsets, or lengths, or starts and lengths; got none of them"
                ):
                    ops.as_nested(x, **given)  # type: ignore[arg-type]
            with pytest.raises(DtypeError, match=re.escape("as_nested: offsets must be int32 or int64, got torch.float32")):
                ops.as_nested(x, scores)
            with pytest.raises(DtypeError, match=re.escape("as_nested: lengths must be int32 or int64, got torch.float32")):
                ops.as_nested(x, lengths=scores)
            with pytest.raises(ShapeError, match=r"as_nested: offsets must have one dim, got \("):
                ops.as_nested(x, one)

    def test_a_schedule_checks_them_at_once(self) -> None:
        with Fusion() as f:
            y = ops.exp(f.input((325, 4), torch.float32))
            f.output(y)
        with pytest.raises(DomainError, match="partition: offsets must end at the extent 325, got 324"):
            y.partition(0, [0, 127, 127, 324])
        y.partition(0, EXPERTS)
        assert str(y.loops[1]) == "ragged.d0r{[127, 0, 198]}"
        tokens = numbers(325, 4)
        for backend in QUICK:
            same(f.compile(backend)(tokens), tokens.exp(), backend)


def test_partition_of_a_component_by_equal_offsets_is_one_structure() -> None:
    """Domains made apart by equal numbers pair; made by other numbers they do not, and both are named."""
    component, _ = partition(ir.IterDomain(10, name="a"), [0, 3, 8, 10])
    _, rows = partition(ir.IterDomain(10, name="b"), [0, 3, 8, 10])
    assert combine(component, rows).extent == 10
    _, others = partition(ir.IterDomain(10, name="b"), [0, 4, 8, 10])
    message = (
        "combine: i.ac{3} is the component of offsets[0, 3, 8, 10], "
        "but ragged.br{[4, 4, 2]} belongs to offsets[0, 4, 8, 10]; pass the component it was made with"
    )
    with pytest.raises(StructureMismatch, match=re.escape(message)):
        combine(component, others)
