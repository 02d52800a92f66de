"""Verification of fusions: every rule refuses what breaks it, by name.

In: fusions recorded by hand, each wrong in one way. Out: failures to notice.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from serrate import ops
from serrate.errors import VerificationError
from serrate.ir import Fusion, IterDomain, partition
from serrate.ir.tile import Store
from serrate.ir.values import Role, Tensor, call, position, read
from serrate.ir.view import TensorView


def negated(f: Fusion, x: TensorView) -> TensorView:
    target = f.tensor(x.dtype, x.domains)
    (view,) = f.define([target], x.domains, Store(target, x.domains, call("neg", x.at(x.domains), dtype=x.dtype)))
    return view


def refused(f: Fusion, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        f.verify()


def test_reading_what_comes_later() -> None:
    f = Fusion("f")
    x = f.input((8,), torch.float32)
    negated(f, negated(f, x))
    f.verify()
    f.definitions.reverse()
    refused(f, "f: T1 is read before it is defined")


def test_reading_what_never_comes() -> None:
    f = Fusion("f")
    x = f.input((8,), torch.float32)
    negated(f, negated(f, x))
    del f.definitions[0]
    refused(f, "f: T1 is read but never defined")


def test_a_cycle() -> None:
    f = Fusion("f")
    x = f.input((8,), torch.float32)
    y = negated(f, x)
    z = negated(f, y)
    f.definitions[0] = replace(f.definitions[0], statement=Store(y.tensor, y.domains, z.at(z.domains)))
    refused(f, "f: T2 is computed from itself, through T1")


def test_writing_twice_and_writing_an_input() -> None:
    f = Fusion("f")
    x = f.input((8,), torch.float32)
    negated(f, x)
    f.definitions.append(f.definitions[0])
    refused(f, "f: T1 is written, but it is an input or was already written")
    g = Fusion("g")
    x = g.input((8,), torch.float32)
    g.define([x.tensor], x.domains, Store(x.tensor, x.domains, x.at(x.domains)))
    refused(g, "g: T0 is written, but it is an input")


def test_inputs_stand_once() -> None:
    f = Fusion("f")
    f.inputs.append(f.input((8,), torch.float32))
    refused(f, "f: input T0 is declared twice")


def test_outputs_are_written() -> None:
    f, g = Fusion("f"), Fusion("g")
    x = g.input((8,), torch.float32)
    f.outputs.append(negated(g, x))
    refused(f, "f: output T1 is never written")


def test_reads_have_one_domain_for_each_dim() -> None:
    f = Fusion("f")
    x = f.input((8, 2), torch.float32)
    target = f.tensor(x.dtype, x.domains)
    f.define([target], x.domains, Store(target, x.domains, read(x.tensor, x.domains[:1])))
    refused(f, r"f: T0: float32\[.*\] has 2 dims and is read at 1: T0\[d0\]")


def test_only_dims_of_extent_one_are_not_indexed() -> None:
    f = Fusion("f")
    x = f.input((8,), torch.float32)
    target = f.tensor(x.dtype, x.domains)
    f.define([target], x.domains, Store(target, x.domains, read(x.tensor, (None,))))
    refused(f, r"f: T0\[0\] reads all of i.d0\{8\} at 0")


@pytest.mark.parametrize("value", [lambda x, d: read(x.tensor, (d,)), lambda x, d: position(d)])
def test_domains_are_those_the_definition_runs_over(value: object) -> None:
    f = Fusion("f")
    x = f.input((8,), torch.float32)
    target = f.tensor(x.dtype, x.domains)
    made = value(x, IterDomain(8, name="k"))  # type: ignore[operator]
    f.define([target], x.domains, Store(target, x.domains, made))
    refused(f, "needs k, but its definition runs over d0")


def test_rows_are_read_at_rows_of_their_structure() -> None:
    f = Fusion("f")
    d = IterDomain(10, name="d")
    c, r = partition(d, [0, 3, 10], names=("c", "r"))
    other_c, other = partition(d, [0, 4, 10], names=("c1", "r1"))
    x = f.view(Tensor("X", torch.float32, (c, r), (d,), Role.INPUT))
    f.inputs.append(x)
    for domains, at in (((other_c, other), other), ((c, d), d)):
        g = Fusion("f", inputs=[x])
        target = Tensor("Y", torch.float32, domains, (d,))
        g.define([target], (c, *domains), Store(target, domains, read(x.tensor, (c, at))))
        refused(g, r"f: X\[c, .*\] reads rows of ragged.r.* at .*, which has a different structure")


def test_structures_equal_by_value_or_checked_when_run_may_meet() -> None:
    with Fusion() as f:
        x, first, second = f.input((None,), torch.float32), f.input((None,), torch.int64), f.input((None,), torch.int64)
        f.output(ops.sum(ops.add(ops.as_nested(x, first), ops.as_nested(x, second)), 1))
    f.verify()
    f.checks.clear()
    refused(f, "which has a different structure")


def test_rows_stand_behind_their_owner() -> None:
    f = Fusion("f")
    d = IterDomain(10, name="d")
    c, r = partition(d, [0, 3, 10], names=("c", "r"))
    x = f.view(Tensor("X", torch.float32, (c, r), (d,), Role.INPUT))
    f.inputs.append(x)
    target = Tensor("Y", torch.float32, (r, c), (d,))
    f.define([target], (c, r), Store(target, (r, c), x.at((c, r))))
    refused(f, r"f: the ragged dim r of Y: float32\[.*\] must come after the dim of its components")


def test_every_program_of_the_operations_is_one() -> None:
    with Fusion() as f:
        x, offsets = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
        rows = ops.as_nested(x, offsets)
        f.output(
            ops.softmax(rows, 1), ops.layer_norm(rows), ops.mean(rows, (0, 1)), ops.matmul(rows, f.input((4, 4), torch.float32))
        )
    f.verify()
    f.clone().verify()
