"""Fusions: what is recorded, how it reads, what is live, what is refused. Running them is tested with the engine.

In: small fusions, recorded with operations or by hand. Out: failures of the record.
"""

from __future__ import annotations

import pytest
import torch

from serrate.errors import CallError, ShapeError, VerificationError
from serrate.frontend import ops
from serrate.ir import Fusion, IterDomain, combine, merge, partition
from serrate.ir.fusion import current_fusion, storage_of
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


def test_reading_before_defining_is_refused() -> None:
    f = Fusion("f")
    x = f.input((8,), torch.float32)
    y = negated(f, x)
    negated(f, y)
    f.definitions.reverse()
    with pytest.raises(VerificationError, match="f: T1 is read before it is defined"):
        f.verify()


def test_an_output_of_another_fusion_is_refused() -> None:
    f, g = Fusion(), Fusion()
    with pytest.raises(ShapeError, match=r"output: T0: float32\[.*\] belongs to another fusion"):
        f.output(g.input((8,), torch.float32))


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
    with pytest.raises(CallError, match="linalg_det is not an operation on ragged tensors that can be traced"):
        torch.linalg.det(x)  # type: ignore[arg-type]


def test_running_needs_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serrate.ir.fusion._engine", {})
    for run in (Fusion().evaluate, Fusion().compile):
        with pytest.raises(VerificationError, match=r"serrate\.engine is not imported"):
            run()


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
        with pytest.raises(ShapeError, match="has no storage: a ragged dim needs the dim of its components beside it"):
            storage_of([r, IterDomain(4)])
