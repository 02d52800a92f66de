"""The domains of a tensor: what they are for inputs, views, results, reductions and scheduled tensors, and how they read.

In: small fusions. Out: failures of the record or of its text.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from serrate import ops
from serrate.ir import Fusion, IterDomain, IterType, ParallelType, TensorDomain, partition, split
from serrate.ir.tensor_domain import made_from
from serrate.ir.view import TensorView


def rows(f: Fusion) -> tuple[TensorView, TensorView]:
    x, offsets = f.input((10, 4), torch.float32), f.input((4,), torch.int64)
    return x, ops.as_nested(x, offsets)


def test_an_input_has_one_list_of_domains() -> None:
    x = Fusion().input((10, 4), torch.float32)
    assert x.domain == TensorDomain(x.domains, x.domains, x.domains, x.domains)


def test_a_view_has_the_domains_of_its_base_for_root() -> None:
    f = Fusion()
    x, nested = rows(f)
    assert str(nested.domain) == (
        "root       [i.d0{10}, i.d1{4}]\n"
        "logical    [i.c0{3}, ragged.r0{T1[c + 1] - T1[c]}, i.d1{4}]\n"
        "allocation [i.d0{10}, i.d1{4}]\n"
        "loop       [i.c0{3}, ragged.r0{T1[c + 1] - T1[c]}, i.d1{4}]"
    )
    root, (component, ragged, _) = nested.domain.root, nested.domain.logical
    assert root[0] is x.domains[0]
    made = ragged.definition
    assert made is not None and made is component.definition and made.inputs == (root[0],)
    flat = ops.as_flattened(nested).domain
    assert flat.logical[0] is root[0]


def test_combine_stands_between_root_and_logical() -> None:
    f = Fusion()
    y = ops.exp(rows(f)[1])
    flat = ops.as_flattened(y)
    assert [d.name for d in flat.domain.root] == ["c0", "r0", "d1"]
    assert [d.name for d in flat.domain.logical] == ["d0", "d1"]
    assert [d.name for d in flat.domain.loop] == ["c0", "r0", "d1"], "a view is computed where its base is"


def test_a_reduction_loops_over_what_it_reduces() -> None:
    f = Fusion()
    total = ops.sum(rows(f)[1], 1)
    domain = total.domain
    assert [d.name for d in domain.logical] == ["c0", "d1"]
    assert [d.name for d in domain.loop] == ["c0", "r0", "d1"]
    assert [d.name for d in domain.reduced] == ["r0"]
    assert "loop       [i.c0{3}, r.ragged.r0{T1[c + 1] - T1[c]}, i.d1{4}]" in str(domain)
    assert domain.loop[1].uid == rows_of(total).uid, "the same index, shown as reduced"


def rows_of(view: TensorView) -> IterDomain:
    definition = view.fusion.definition_of(view.tensor)
    assert definition is not None
    return definition.domains[1]


def test_the_schedule_shows_in_loops_and_nowhere_else() -> None:
    f = Fusion()
    total = ops.sum(rows(f)[1], 1)
    before, text = total.domain, str(f)
    total.split(1, 2).parallelize(0, ParallelType.BLOCK_X).parallelize(2, "vectorize")
    after = total.domain
    assert (after.root, after.logical, after.allocation) == (before.root, before.logical, before.allocation)
    assert [str(d.parallel.value) for d in after.loop] == ["block_x", "serial", "vectorize", "serial"]
    assert [d.iter_type for d in after.loop] == [IterType.ITERATION, IterType.REDUCTION, IterType.REDUCTION, IterType.ITERATION]
    assert str(f) == text


def test_it_is_immutable() -> None:
    domain = Fusion().input((3,), torch.float32).domain
    with pytest.raises(dataclasses.FrozenInstanceError):
        domain.loop = ()  # type: ignore[misc]


def test_two_ragged_pairs_and_three_levels_print() -> None:
    rank, expert = partition(IterDomain(8, name="e"), [0, 5, 8], names=("rank", "expert"))
    token = partition(IterDomain(10, name="t"), [0, 1, 2, 3, 4, 5, 6, 8, 10], names=("x", "token"))[1]
    domain = TensorDomain((), (rank, expert, token), (), ())
    assert "logical    [i.rank{2}, ragged.expert{[5, 3]}, ragged.token{[1, 1, 1, 1, 1, 1, 2, 2]}]" in str(domain)


def test_what_a_domain_is_made_from() -> None:
    d, other = IterDomain(12), IterDomain(12)
    outer, _ = split(d, 4)
    inner, _ = split(outer, 2)
    assert made_from(inner, [other, d]) and made_from(d, [d])
    assert not made_from(inner, [other]) and not made_from(d, [inner])
