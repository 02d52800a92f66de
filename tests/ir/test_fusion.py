"""Fusions: what is recorded, how it reads, what is live, what is refused. Running them is tested with the engine.

In: small fusions, recorded with operations or by hand. Out: failures of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from serrate.errors import CallError, ShapeError, StructureMismatch, VerificationError
from serrate.frontend import ops
from serrate.ir import Fusion, IterDomain, combine, merge, partition
from serrate.ir.fusion import current_fusion
from serrate.ir.storage import storage_of
from serrate.ir.tile import Store
from serrate.ir.values import Role, call
from serrate.ir.view import TensorView


def rows(f: Fusion) -> TensorView:
    x = f.input((None, 4), torch.float32)
    off = f.input((None,), torch.int64)
    return ops.as_nested(x, off, ragged_dim=0)


def negated(f: Fusion, x: TensorView) -> TensorView:
    """One operation, recorded without the front end."""
    target = f.tensor(x.dtype, x.domains)
    (view,) = f.define([target], x.domains, Store(target, x.domains, call("neg", x.at(x.domains), dtype=x.dtype)))
    return view


def test_inputs_are_arguments_in_order() -> None:
    with Fusion("f") as f:
        x = f.input((None, 4), torch.float32)
        off = f.input((9,), torch.int64)
    assert [v.tensor.name for v in f.inputs] == ["T0", "T1"]
    assert [v.tensor.role for v in f.inputs] == [Role.INPUT, Role.INPUT]
    assert [str(s) for s in x.shape] == ["n0", "4"]
    assert off.shape == (9,)
    assert (x.dtype, x.ndim, str(x)) == (torch.float32, 2, "T0: float32[i.d0{n0}, i.d1{4}]")


def test_operations_are_recorded_in_order() -> None:
    f = Fusion("f")
    x = f.input((8,), torch.float32)
    y = negated(f, x)
    z = negated(f, y)
    f.output(z)
    assert [d.statement.targets for d in f.definitions] == [(y.tensor,), (z.tensor,)]
    assert f.definitions[0].domains == x.domains
    assert f.definition_of(y.tensor) is f.definitions[0]
    assert f.definition_of(x.tensor) is None
    f.verify()


def test_text() -> None:
    f = Fusion("f")
    x = f.input((8,), torch.float32)
    f.output(negated(f, x))
    assert str(f) == ("fusion f\n  input  T0: float32[i.d0{8}]\n  T1: float32[i.d0{8}] = neg(T0[d0])\n  output T1\n")


def test_text_of_rows_and_reductions() -> None:
    with Fusion("f") as f:
        f.output(ops.sum(rows(f), 1))
    assert str(f) == (
        "fusion f\n"
        "  input  T0: float32[i.d0{n0}, i.d1{4}]\n"
        "  input  T1: int64[i.d2{n1}]\n"
        "  T2: float32[i.c0{n1 - 1}, ragged.r0{T1[c + 1] - T1[c]}, i.d1{4}] = view of T0\n"
        "  T3: float32[i.c0{n1 - 1}, i.d1{4}] = sum T2[c0, r0, d1]  over r0\n"
        "  output T3\n"
    )


def test_rows_know_their_component() -> None:
    with Fusion() as f:
        x = rows(f)
        dense = f.input((4,), torch.float32)
    component, ragged, _ = x.domains
    assert (x.component, x.ragged) == (component, ragged)
    assert [str(s) for s in x.shape] == ["n1 - 1", "r0", "4"]
    with pytest.raises(ShapeError, match=r"T3: float32\[i.d3\{4\}\] has no ragged dim"):
        _ = dense.ragged


def test_dead_definitions_are_dropped() -> None:
    f = Fusion()
    x = f.input((8,), torch.float32)
    kept = negated(f, x)
    negated(f, kept)
    unused = negated(f, x)
    last = negated(f, kept)
    f.output(last)
    assert f.live() == [f.definition_of(kept.tensor), f.definition_of(last.tensor)]
    f.output(unused)
    assert [d.statement.targets[0] for d in f.live()] == [kept.tensor, unused.tensor, last.tensor]


def test_what_is_read_through_a_view_is_live() -> None:
    with Fusion() as f:
        x = f.input((None, 4), torch.float32)
        off = f.input((None,), torch.int64)
        y = ops.as_nested(ops.relu(x), off, ragged_dim=0)
        f.output(ops.as_flattened(ops.exp(y)))
    assert len(f.live()) == len(f.definitions) == 2
    f.verify()


def test_an_output_of_another_fusion_is_refused() -> None:
    f, g = Fusion(), Fusion()
    with pytest.raises(ShapeError, match=r"output: T0: float32\[.*\] belongs to another fusion"):
        f.output(g.input((8,), torch.float32))


def test_a_fusion_without_outputs_is_not_run() -> None:
    with Fusion("forgotten") as f:
        f.input((8,), torch.float32) + 1
    for run in (f.compile, lambda: f.evaluate(torch.zeros(8))):
        with pytest.raises(CallError, match=r"forgotten has no outputs: declare its results with f.output\(...\)"):
            run()


def test_names_are_not_used_twice() -> None:
    f = Fusion()
    assert [f.fresh("c"), f.fresh("c"), f.fresh("r"), f.fresh("c")] == ["c0", "c1", "r0", "c2"]


def test_the_fusion_of_the_enclosing_block() -> None:
    with pytest.raises(CallError, match=r"write them inside `with ir\.Fusion"):
        current_fusion()
    with Fusion() as outer:
        with Fusion() as inner:
            assert current_fusion() is inner
        assert current_fusion() is outer
    with pytest.raises(CallError):
        current_fusion()


def test_views_are_found_by_identity() -> None:
    f = Fusion()
    x, y = f.input((8,), torch.float32), f.input((8,), torch.float32)
    assert len({x, y, x}) == 2


def test_unknown_attributes_and_functions_are_refused() -> None:
    x = Fusion().input((8,), torch.float32)
    with pytest.raises(AttributeError, match="a traced tensor has no attribute 'nothing'"):
        _ = x.nothing
    with pytest.raises(CallError, match=r"torch\.linalg\.det is not supported in a traced function"):
        torch.linalg.det(x)  # type: ignore[arg-type]


def test_running_needs_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serrate.ir.hooks._installed", {})
    for run in (Fusion().evaluate, Fusion().compile):
        with pytest.raises(VerificationError, match=r"serrate\.compiled is not imported"):
            run()


def test_text_shows_views_where_they_are_first_read() -> None:
    with Fusion("norm") as f:
        x = rows(f)
        f.output(ops.sub(x, ops.amax(x, 1, keepdim=True)), ops.as_flattened(x))
    assert str(f) == repr(f)
    assert str(f) == (
        "fusion norm\n"
        "  input  T0: float32[i.d0{n0}, i.d1{4}]\n"
        "  input  T1: int64[i.d2{n1}]\n"
        "  T2: float32[i.c0{n1 - 1}, ragged.r0{T1[c + 1] - T1[c]}, i.d1{4}] = view of T0\n"
        "  T3: float32[i.c0{n1 - 1}, i.d1{4}] = max T2[c0, r0, d1]  over r0\n"
        "  T4: float32[i.c0{n1 - 1}, i.o0{1}, i.d1{4}] = view of T3\n"
        "  T5: float32[i.c0{n1 - 1}, ragged.r0{T1[c + 1] - T1[c]}, i.d1{4}] = sub(T2[c0, r0, d1], T4[c0, 0, d1])\n"
        "  T6: float32[i.d0{n0}, i.d1{4}] = view of T0\n"
        "  output T5\n"
        "  output T6\n"
    )


def test_one_handle_for_each_tensor() -> None:
    f = Fusion()
    x = f.input((8,), torch.float32)
    y = negated(f, x)
    assert f.view(x.tensor) is x and f.tensors == (x, y)


class TestTraversal:
    def fusion(self) -> Fusion:
        with Fusion() as f:
            x = rows(f)
            f.output(ops.sub(x, ops.amax(x, 1, keepdim=True)))
        return f

    def names(self, views: Iterable[TensorView]) -> list[str]:
        return [v.tensor.name for v in views]

    def test_tensors_come_after_what_they_are_computed_from(self) -> None:
        assert self.names(self.fusion().tensors) == ["T0", "T1", "T2", "T3", "T4", "T5"]

    def test_producers_and_consumers(self) -> None:
        f = self.fusion()
        views = dict(zip(self.names(f.tensors), f.tensors, strict=True))
        assert self.names(f.producers(views["T5"])) == ["T2", "T4"]
        assert self.names(f.producers(views["T4"])) == ["T3"]
        assert f.producers(views["T0"]) == ()
        assert self.names(f.consumers(views["T2"])) == ["T3", "T5"]
        assert self.names(f.consumers(views["T0"])) == ["T2"]
        assert f.consumers(views["T5"]) == ()

    def test_reaches(self) -> None:
        f = self.fusion()
        views = dict(zip(self.names(f.tensors), f.tensors, strict=True))
        assert f.reaches(views["T0"], views["T5"]) and f.reaches(views["T3"], views["T5"])
        assert not f.reaches(views["T5"], views["T3"]) and not f.reaches(views["T1"], views["T5"])
        assert not f.reaches(views["T5"], views["T5"])


class TestPairing:
    """A component goes with its own rows, after every operation that keeps them."""

    OFFSETS = torch.tensor([0, 2, 2, 5])

    @pytest.mark.parametrize("keep", [ops.set, ops.neg, ops.relu, lambda x: ops.add(x, 1), lambda x: ops.mul(x, x)])
    def test_survives_operations(self, keep: Callable[[TensorView], TensorView]) -> None:
        with Fusion() as f:
            x = rows(f)
            y = keep(x)
            flat = ops.as_flattened(y)
            f.output(flat)
        assert combine(x.component, y.ragged) is x.tensor.memory.logical[0]
        assert flat.domains[0] is combine(y.component, y.ragged)
        assert f.evaluate(torch.ones(5, 4), self.OFFSETS).shape == (5, 4)

    def test_a_component_of_another_partition_is_refused(self) -> None:
        with Fusion() as f:
            nested = ops.set(ops.as_nested(rows(f), f.input((None,), torch.int64)))
        with pytest.raises(StructureMismatch, match=r"combine: i.c1.* is the component of T3, but ragged.r0.* belongs to T1"):
            ops.as_flattened(nested, component_dim=0, ragged_dim=2)

    def both(self) -> Fusion:
        with Fusion() as f:
            f.output(ops.as_flattened(ops.add(rows(f), ops.set(rows(f)))))
        return f

    @pytest.mark.parametrize("clone", [False, True])
    def test_structures_equal_by_value_meet(self, clone: bool) -> None:
        f = self.both().clone() if clone else self.both()
        x = torch.ones(5, 4)
        assert torch.equal(f.evaluate(x, self.OFFSETS, x, self.OFFSETS.clone()), x + x)

    @pytest.mark.parametrize("strategy", ["maskless", "masked", "persistent_dynamic"])
    def test_a_computed_tensor_is_read_at_rows_equal_by_value(self, strategy: str) -> None:
        with Fusion() as f:
            x, first, second = f.input((None,), torch.float32), f.input((None,), torch.int64), f.input((None,), torch.int64)
            f.output(ops.as_flattened(ops.add(ops.as_nested(x, first), ops.as_nested(ops.exp(x), second))))
        x_ = torch.arange(5.0)
        got = f.compile("reference", strategy=strategy)(x_, self.OFFSETS, self.OFFSETS.clone())
        torch.testing.assert_close(got, x_ + x_.exp())

    @pytest.mark.parametrize("clone", [False, True])
    def test_structures_that_differ_are_refused_when_run(self, clone: bool) -> None:
        f = self.both().clone() if clone else self.both()
        x, other = torch.ones(5, 4), torch.tensor([0, 1, 2, 5])
        message = r"add of .*, dim 1: the rows differ: lengths \[2, 0, 3\] and \[1, 1, 3\]"
        with pytest.raises(StructureMismatch, match=message):
            f.evaluate(x, self.OFFSETS, x, other)


def test_drawing_is_the_drawing_modules() -> None:
    with Fusion() as f:
        f.output(ops.exp(rows(f)))
    assert "T3" in f.draw().svg


class TestStorage:
    def test_of_regular_domains_is_themselves(self) -> None:
        a, b = IterDomain(3), IterDomain(4)
        assert storage_of([a, b]) == (a, b)
        assert storage_of([]) == ()

    def test_of_rows_is_what_was_partitioned(self) -> None:
        d, e = IterDomain(10), IterDomain(4)
        c, r = partition(d, [0, 3, 8, 10])
        stored = storage_of([c, r, e])
        assert [s is x for s, x in zip(stored, (d, e), strict=True)] == [True, True]
        assert storage_of([c, e, r])[0] is d

    def test_of_transformed_rows_is_their_total(self) -> None:
        c, r = partition(IterDomain(10), [0, 3, 8, 10])
        assert [s.extent for s in storage_of([c, merge(r, IterDomain(4))])] == [40]

    def test_of_nested_rows_is_one_domain(self) -> None:
        sentence, word = partition(IterDomain(10), [0, 3, 3, 8, 10])
        document, inner = partition(sentence, [0, 1, 4])
        assert [s.extent for s in storage_of([document, combine(inner, word)])] == [10]
        assert [s.extent for s in storage_of([document, inner, word])] == [10]

    def test_rows_without_their_component_have_none(self) -> None:
        r = partition(IterDomain(10), [0, 3, 8, 10])[1]
        with pytest.raises(ShapeError, match="cannot be stored: a ragged dim needs the dims that count its rows"):
            storage_of([r, IterDomain(4)])
