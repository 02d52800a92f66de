"""Clones: the same program of new objects, with its structures and its schedule; dead definitions left out on request.

In: small fusions. Out: failures of identity, pairing or meaning.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serrate import ops
from serrate.errors import DomainError, StructureMismatch
from serrate.ir import Fusion, IterDomain, combine, merge, partition, split
from serrate.ir.clone import Cloner
from serrate.ir.expr import Array
from serrate.ir.values import Tensor
from serrate.ir.view import TensorView
from serrate.tensor import JaggedTensor

OFFSETS = torch.tensor([0, 5, 5, 6, 10])


def values() -> torch.Tensor:
    return torch.arange(40.0).reshape(10, 4) / 7


def softmax() -> tuple[Fusion, TensorView]:
    with Fusion("softmax") as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        y = ops.softmax(ops.as_nested(x, offsets), 1)
        f.output(y)
    return f, y


def data(result: Any) -> torch.Tensor:
    found: torch.Tensor = result.values if isinstance(result, JaggedTensor) else result
    return found


def test_a_clone_reads_the_same_and_shares_nothing() -> None:
    f, _ = softmax()
    g = f.clone()
    assert str(g) == str(f) and g == f and g is not f
    g.verify()
    uids = [{d.uid for t in h.every_tensor() for d in t.logical} for h in (f, g)]
    assert uids[0].isdisjoint(uids[1])
    assert not set(f.every_tensor()) & set(g.every_tensor())
    assert all(view.fusion is g for view in (*g.inputs, *g.outputs, *g.tensors))


def test_a_clone_evaluates_to_the_same() -> None:
    f, _ = softmax()
    assert torch.equal(data(f.clone().evaluate(values(), OFFSETS)), data(f.evaluate(values(), OFFSETS)))
    assert torch.equal(data(f.clone().clone().compile("cpp")(values(), OFFSETS)), data(f.compile("cpp")(values(), OFFSETS)))


def test_a_clone_grows_on_its_own() -> None:
    f, y = softmax()
    g = f.clone()
    before = str(f)
    with g:
        g.output(ops.exp(g.outputs[0]))
    assert str(f) == before and g != f
    names = [t.name for t in g.every_tensor()]
    assert len(names) == len(set(names)), "new tensors do not take names of old ones"
    assert y.fusion is f


def test_pairs_survive() -> None:
    f, y = softmax()
    copy = f.clone().outputs[0]
    assert copy.component.pairing == y.component.pairing and copy.ragged.component is copy.component
    assert combine(copy.component, copy.ragged) is copy.tensor.storage[0]
    # A component of the original counts the rows of the clone: one structure, whoever holds it.
    assert combine(y.component, copy.ragged).extent_expr is not None
    other = partition(IterDomain(10, name="z"), [0, 4, 10])[0]
    with pytest.raises(
        StructureMismatch, match=r"zc\{2\} is the component of offsets\[0, 4, 10\], but ragged.r0.* belongs to T1"
    ):
        combine(other, copy.ragged)


def test_flattening_works_in_a_clone() -> None:
    f, _ = softmax()
    g = f.clone()
    with g:
        g.outputs[:] = [ops.as_flattened(ops.set(ops.exp(g.outputs[0])))]
    assert torch.equal(g.evaluate(values(), OFFSETS), data(f.evaluate(values(), OFFSETS)).exp())


def test_schedules_come_along() -> None:
    f, y = softmax()
    y.split(1, 8).parallelize(0, "grid").parallelize(2, "lanes").parallelize(3, "lanes")
    states = next(t for t in f.tensors if t.tensor.name == "T3")
    partial = states.split(1, 8).rfactor(1)
    partial.parallelize(0, "grid")
    g = f.clone()
    assert g.steps == f.steps
    copy = g.outputs[0]
    assert str(copy.domain) == str(y.domain)
    assert {d.uid for d in copy.loops}.isdisjoint(d.uid for d in y.loops)
    for backend in ("reference", "cpp"):
        torch.testing.assert_close(data(g.compile(backend)(values(), OFFSETS)), data(f.evaluate(values(), OFFSETS)))
    copy.split(1, 2)
    assert len(g.steps) == len(f.steps) + 1


def test_the_same_transform_finds_the_same_copy() -> None:
    a, b = IterDomain(6, name="a"), IterDomain(4, name="b")
    c, r = partition(merge(a, b), [0, 3, 24])
    outer, inner = split(r, 2)
    cloner = Cloner()
    copies = [cloner(d) for d in (a, b, c, r, outer, inner)]
    a2, b2, c2, r2, outer2, inner2 = copies
    assert partition(merge(a2, b2), [0, 3, 24]) == (c2, r2)
    assert merge(a2, b2) is combine(c2, r2)
    assert split(r2, 2)[0] is outer2 and split(r2, 2)[1] is inner2
    assert all(x == y and x.uid != y.uid for x, y in zip(copies, (a, b, c, r, outer, inner), strict=True))


def test_checks_of_a_call_come_along() -> None:
    with Fusion() as f:
        x, first, second = f.input((None,), torch.float32), f.input((None,), torch.int64), f.input((None,), torch.int64)
        f.output(ops.sum(ops.add(ops.as_nested(x, first), ops.as_nested(x, second)), 1))
    g = f.clone()
    with pytest.raises(StructureMismatch, match=r"add of .*, dim 1: the rows differ"):
        g.evaluate(torch.ones(4), torch.tensor([0, 1, 4]), torch.tensor([0, 2, 4]))


class TestSimplified:
    def test_drops_what_no_output_needs(self) -> None:
        with Fusion() as f:
            x = f.input((8,), torch.float32)
            y = ops.exp(x)
            ops.relu(ops.neg(y))
            f.output(ops.abs(y))
        g = f.simplified()
        assert len(f.definitions) == 4 and len(g.definitions) == 2
        assert [v.tensor.name for v in g.inputs] == ["T0"], "arguments stay as they are"
        assert torch.equal(g.evaluate(torch.ones(8)), f.evaluate(torch.ones(8)))
        assert g.simplified() == g and g != f

    def test_drops_the_schedule_of_what_it_drops(self) -> None:
        with Fusion() as f:
            x = f.input((8,), torch.float32)
            unused, y = ops.exp(x), ops.abs(x)
            f.output(y)
        unused.split(0, 4)
        y.split(0, 2)
        assert f.simplified().steps == (("split", ("T2", "d0", 2, 1)),)

    def test_keeps_offsets_that_rows_of_outputs_have(self) -> None:
        with Fusion() as f:
            x, offsets = f.input((10,), torch.float32), f.input((4,), torch.int64)
            computed, unused = ops.set(offsets), ops.set(offsets)
            logical = partition(x.domains[0], Array(computed.tensor.name), 3)
            nested = f.view(Tensor(f.fresh("T"), x.dtype, logical, x.tensor.storage, x.tensor.role, base=x.tensor))
            y = ops.exp(nested)
            f.output(y)
        assert [d.statement.targets for d in f.live()] == [(computed.tensor,), (y.tensor,)]
        assert unused.tensor.name not in {t.name for t in f.simplified().every_tensor()}


def test_domains_that_do_not_pair_are_refused_after_cloning_too() -> None:
    c, r = partition(IterDomain(10), [0, 3, 10])
    cloner = Cloner()
    with pytest.raises(DomainError, match="use combine"):
        merge(cloner(c), cloner(r))
