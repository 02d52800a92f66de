"""Worked examples of domains, each with its numbers and, where it is a refusal, with its words.

In: domains of sequences, experts, ranks and devices. Out: failures of extents, offsets, places and messages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from serrate import ops
from serrate.analysis import visits
from serrate.errors import DomainError, StructureMismatch
from serrate.ir import (
    Fusion,
    IterDomain,
    IterType,
    ParallelType,
    RaggedIterDomain,
    TensorDomain,
    combine,
    merge,
    partition,
    regroup,
    split,
    traverse,
)
from serrate.ir.clone import Cloner
from serrate.ir.expr import Array, const, symbol

TOKENS = [127, 0, 198, 64, 89, 103, 45, 201]


def places(*loops: IterDomain, of: IterDomain) -> list[int]:
    """Where the loops go in a domain, in their order; each place once."""
    counted = visits([of], loops, ())
    assert set(counted.values()) == {1}
    return [place for place in counted if isinstance(place, int)]


class TestSequences:
    """Three sequences of 3, 5 and 2."""

    def made(self) -> RaggedIterDomain:
        return RaggedIterDomain.of([IterDomain(3), IterDomain(5), IterDomain(2)])

    def test_numbers(self) -> None:
        r = self.made()
        assert (r.extent, r.extents, r.offsets) == (10, (3, 5, 2), (0, 3, 8, 10))
        assert [r.extent_for_component(k) for k in range(3)] == [3, 5, 2]
        assert [r.offset_for_component(k) for k in range(3)] == [0, 3, 8]

    def test_a_tensor_of_them(self) -> None:
        r, feature = self.made(), IterDomain(4)
        logical = (r.component, r, feature)
        domain = TensorDomain(logical, logical, logical, logical)
        assert [d.extent for d in domain.logical] == [3, 10, 4]
        assert "logical    [" in str(domain) and "{[3, 5, 2]}, i." in str(domain)

    def test_every_element_has_its_place_in_storage(self) -> None:
        storage = IterDomain(10)
        c, r = partition(storage, [0, 3, 8, 10])
        assert places(c, r, of=storage) == list(range(10))
        by_component = [[o + k for k in range(n)] for o, n in zip((0, 3, 8), (3, 5, 2), strict=True)]
        assert by_component == [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9]]
        for component, wanted in enumerate(by_component):
            here = {c.uid: const(component)}
            found = [c.definition.to_inputs({**here, r.uid: const(k)})[0].value for k in range(len(wanted))]  # type: ignore[union-attr]
            assert found == wanted
        assert visits([storage], [c, r], ()) == dict.fromkeys(range(10), 1)

    def test_split_by_two(self) -> None:
        outer, inner = split(self.made(), 2)
        assert isinstance(outer, RaggedIterDomain) and not inner.is_ragged
        assert (outer.extents, inner.extent) == ((2, 3, 1), 2)

    def test_merged_with_four(self) -> None:
        merged = merge(self.made(), IterDomain(4))
        assert isinstance(merged, RaggedIterDomain)
        assert (merged.extents, merged.extent) == ((12, 20, 8), 40)

    @pytest.mark.parametrize("parallel", list(ParallelType))
    def test_parallelize_reaches_every_component(self, parallel: ParallelType) -> None:
        for r in (self.made(), partition(IterDomain(10), [0, 3, 8, 10])[1], RaggedIterDomain.from_extents([[3], [5, 2]])):
            spread = r.parallelize(parallel)
            assert spread.parallel is parallel and spread.extents == r.extents
            assert [d.parallel for d in spread.nested_domains] == [parallel] * len(r.nested_domains)

    def test_of_components_that_are_ragged(self) -> None:
        inner = [
            RaggedIterDomain.from_extents([50, 77]),
            RaggedIterDomain.from_extents([0, 0]),
            RaggedIterDomain.from_extents([100, 98]),
        ]
        r = RaggedIterDomain.of(inner)
        assert (r.extents, r.extent, r.component.extent) == (((50, 77), (0, 0), (100, 98)), 325, 6)
        assert [d.extent for d in r.nested_domains] == [127, 0, 198]


class TestCreation:
    def test_by_tensors_of_one_dim_or_more(self) -> None:
        for extents, wanted in (
            ([127, 0, 198], (127, 0, 198)),
            ([[30, 0, 40, 30], [25, 35, 25, 15]], ((30, 0, 40, 30), (25, 35, 25, 15))),
            ([[[1], [2]], [[3], [4]]], (((1,), (2,)), ((3,), (4,)))),
        ):
            r = RaggedIterDomain.from_extents(torch.tensor(extents))
            assert (r.extents, r.extent) == (wanted, int(torch.tensor(extents).sum()))

    @pytest.mark.parametrize(
        ("extents", "got"),
        [
            (None, "RaggedIterDomain.from_extents: extents must be integers, got None"),
            (
                torch.tensor([3.0, 5.0]),
                "RaggedIterDomain.from_extents: extents must be integers, one row or more, got torch.float32 of 1 dims",
            ),
            ([3.0, 5.0], "RaggedIterDomain.from_extents: extents must be integers, got [3.0, 5.0]"),
            (torch.tensor([3, -5]), "RaggedIterDomain.from_extents: extents must not be negative, got -5"),
        ],
        ids=["nothing", "a float tensor", "floats", "negative"],
    )
    def test_refused(self, extents: Any, got: str) -> None:
        with pytest.raises(DomainError, match=re.escape(got)):
            RaggedIterDomain.from_extents(extents)

    @pytest.mark.parametrize(
        ("other", "what"),
        [
            (
                IterDomain(5, parallel=ParallelType.THREAD_X),
                "components must have one parallel type, but component 0 has serial and component 1 has thread_x",
            ),
            (
                IterDomain(5, IterType.REDUCTION),
                "components must have one iter type, but component 0 has iteration and component 1 has reduction",
            ),
            (IterDomain(5, start=2), "every component must start at 0, but component 1 starts at 2"),
            (
                IterDomain(5, is_rfactor=True),
                "components must have one rfactor mark, but component 0 has False and component 1 has True",
            ),
            (None, "component 1 must be an IterDomain, got None"),
        ],
        ids=["parallel type", "iter type", "start", "rfactor", "nothing"],
    )
    def test_components_that_differ(self, other: Any, what: str) -> None:
        with pytest.raises(DomainError, match=f"^{re.escape(f'RaggedIterDomain.of: {what}')}$"):
            RaggedIterDomain.of([IterDomain(3), other, IterDomain(2)])

    @pytest.mark.parametrize(
        "make",
        [
            lambda: RaggedIterDomain.of([]),
            lambda: RaggedIterDomain.from_extents([]),
            lambda: RaggedIterDomain.from_extents(torch.zeros(0, dtype=torch.int64)),
            lambda: RaggedIterDomain.from_offsets([0]),
            lambda: partition(IterDomain(0), [0])[1],
            lambda: partition(IterDomain(0), torch.tensor([0]))[1],
        ],
        ids=["components", "extents", "a tensor of extents", "offsets", "partition", "partition by a tensor"],
    )
    def test_no_components_at_all(self, make: Callable[[], RaggedIterDomain]) -> None:
        r = make()
        assert (r.component.extent, r.extent, r.extents, r.offsets, r.nested_domains) == (0, 0, (), (0,), ())
        assert combine(r.component, r).extent == 0
        assert split(r, 2)[0].extent == 0
        assert str(r).startswith("ragged.") and str(r).endswith("{[]}")

    def test_equality_is_by_structure(self) -> None:
        by_components = RaggedIterDomain.of([IterDomain(3), IterDomain(5), IterDomain(2)])
        same = (
            RaggedIterDomain.from_extents([3, 5, 2]),
            RaggedIterDomain.from_extents(torch.tensor([3, 5, 2])),
            RaggedIterDomain.from_offsets([0, 3, 8, 10]),
            partition(IterDomain(10), [0, 3, 8, 10])[1],
        )
        assert all(r == by_components and hash(r) == hash(by_components) for r in same)
        assert by_components != RaggedIterDomain.from_extents([5, 3, 2])
        assert by_components != RaggedIterDomain.from_extents([[3, 5], [2]])
        for r in (by_components, *same):
            assert r != IterDomain(10) and IterDomain(10) != r
            assert r != r.parallelize(ParallelType.UNROLL)

    def test_printing(self) -> None:
        assert str(RaggedIterDomain.from_extents([127, 0, 198], name="t")) == "ragged.t{[127, 0, 198]}"
        assert (
            str(RaggedIterDomain.from_extents([[50, 77], [0, 0], [100, 98]], name="t"))
            == "ragged.t{[[50, 77], [0, 0], [100, 98]]}"
        )
        assert str(RaggedIterDomain.from_extents(Array("counts"), 8, name="t")) == "ragged.t{counts[c]}"

    def test_traversal_reaches_the_tensor_that_extents_come_from(self) -> None:
        with Fusion() as f:
            x, lengths = f.input((None, 4), torch.float32), f.input((None,), torch.int64)
            y = ops.exp(ops.as_nested(x, lengths=lengths))
            total = ops.sum(y, 1)
            f.output(total)
        for domain in (y.ragged, split(y.ragged, 64)[0], combine(y.component, split(y.ragged, 64)[0])):
            assert Array(lengths.tensor.name) in traverse(domain)
        # What computes lengths is needed by all that runs over them.
        with Fusion() as g:
            x, keys = g.input((None, 4), torch.float32), g.input((None,), torch.int64)
            offsets, _ = ops.group_by(keys, 3)
            g.output(ops.sum(ops.as_nested(x, offsets), 1))
        assert g.live()[0].statement.targets[0] is offsets.tensor


class TestExperts:
    """325 tokens by [0, 127, 127, 325]."""

    OFFSETS = (0, 127, 127, 325)

    def test_there_and_back(self) -> None:
        token = IterDomain(325)
        expert, tokens = partition(token, self.OFFSETS)
        assert (expert.extent, tokens.extents, tokens.extent) == (3, (127, 0, 198), 325)
        assert combine(expert, tokens) is token
        again = combine(*partition(IterDomain(325), self.OFFSETS))
        assert (again.extent, again.is_ragged) == (325, False)

    def test_one_expression_with_two_outputs(self) -> None:
        token = IterDomain(325)
        expert, tokens = partition(token, self.OFFSETS)
        made = expert.definition
        assert made is not None and made is tokens.definition
        assert made.inputs[0] is token and made.outputs[0] is expert and made.outputs[1] is tokens
        assert expert.pairing == tokens.pairing

    @pytest.mark.parametrize(
        ("offsets", "message"),
        [
            (None, "partition: offsets must be integers, got None"),
            ([0.0, 127.0, 325.0], "partition: offsets must be integers, got [0.0, 127.0, 325.0]"),
            (torch.tensor([0.0, 325.0]), "partition: offsets must be integers, one row or more, got torch.float32 of 1 dims"),
            ([1, 127, 325], "partition: offsets must start at 0, got [1]"),
            ([0, 200, 127, 325], "partition: offsets must not decrease: offsets[2] = 127 < offsets[1] = 200"),
            ([0, 127, 324], "partition: offsets must end at the extent 325, got 324"),
            (torch.tensor([0, 127, 326]), "partition: offsets must end at the extent 325, got 326"),
        ],
        ids=["nothing", "floats", "a float tensor", "start", "decrease", "end", "past the end"],
    )
    def test_bad_offsets(self, offsets: Any, message: str) -> None:
        with pytest.raises(DomainError, match=f"^{re.escape(message)}$"):
            partition(IterDomain(325), offsets)

    @pytest.mark.parametrize("kind", ["reduction", "broadcast"])
    def test_only_iteration_domains(self, kind: str) -> None:
        domain = IterDomain(325, IterType[kind.upper()], name="t")
        message = f"partition: {domain} is a {kind} domain; only iteration domains can be partitioned"
        with pytest.raises(DomainError, match=f"^{re.escape(message)}$"):
            partition(domain, self.OFFSETS)

    @pytest.mark.parametrize("parallel", [p for p in ParallelType if p is not ParallelType.SERIAL])
    def test_not_after_parallelize(self, parallel: ParallelType) -> None:
        domain = IterDomain(325, name="t").parallelize(parallel)
        message = (
            f"partition: i.t{{325}}.{parallel.value} is already parallelized; partition it first, then parallelize the parts"
        )
        with pytest.raises(DomainError, match=f"^{re.escape(message)}$"):
            partition(domain, self.OFFSETS)

    def test_what_is_not_known_waits_for_the_call(self) -> None:
        n, off = symbol("n"), Array("off")
        component, rows = partition(IterDomain(n), off, 3)
        assert (component.extent, rows.extent) == (3, n)
        with pytest.raises(DomainError, match="must not decrease"):
            partition(IterDomain(n), [0, 5, 3])

    def test_three_levels(self) -> None:
        """Each expert's tokens by rank: [[0, 50, 127], [0, 0, 0], [0, 100, 198]]."""
        token = IterDomain(325)
        expert, tokens = partition(token, self.OFFSETS)
        bounds = [[0, 50, 127], [0, 0, 0], [0, 100, 198]]
        for given in (bounds, torch.tensor(bounds)):
            rank, parts = partition(tokens, given)
            assert (rank.extent, parts.extents, parts.extent) == (2, ((50, 77), (0, 0), (100, 98)), 325)
            hidden = IterDomain(512)
            domain = TensorDomain((token, hidden), (expert, rank, parts, hidden), (token, hidden), (expert, rank, parts, hidden))
            assert [d.extent for d in domain.logical] == [3, 2, 325, 512]
            assert places(expert, rank, parts, of=token) == list(range(325))
            assert combine(rank, parts) is tokens
            assert combine(expert, combine(rank, parts)) is token

    def test_three_levels_refused(self) -> None:
        tokens = partition(IterDomain(325), self.OFFSETS)[1]
        for bounds, message in (
            ([[0, 50, 127], [0, 0, 0]], "expected one row of offsets for each of 3 components, got 2"),
            ([[0, 50, 127], [0, 0], [0, 198]], "every component must have 2 parts, got the offsets [0, 0]"),
            ([[0, 50, 127], [0, 0, 0], [0, 100, 199]], "partition: offsets must end at the extent 198, got 199"),
        ):
            with pytest.raises(DomainError, match=re.escape(message)):
                partition(tokens, bounds)


class TestTwoDevices:
    """[2, 100, 512] by 2-D offsets on dim 1."""

    OFFSETS = ((0, 30, 30, 70, 100), (0, 25, 60, 85, 100))

    def test_partition_regroup_and_split(self) -> None:
        device, token, hidden = IterDomain(2), IterDomain(100), IterDomain(512)
        expert, tokens = partition(token, self.OFFSETS, under=[device])
        assert [d.extent for d in (device, expert, tokens, hidden)] == [2, 4, 200, 512]
        assert tokens.extents == ((30, 0, 40, 30), (25, 35, 25, 15))
        same, moved = regroup(device, expert, tokens)
        assert same is expert and moved.extents == (55, 35, 65, 45)
        for sizes in (split(expert, 2), split(expert, 2, inner=False)):
            assert [d.extent for d in sizes] == [2, 2]
            assert moved.extents_under(*sizes) == ((55, 35), (65, 45))

    def test_every_token_arrives_once(self) -> None:
        device, token = IterDomain(2), IterDomain(100)
        expert, tokens = partition(token, self.OFFSETS, under=[device])
        moved = regroup(device, expert, tokens)[1]
        counted = visits([device, token], [*split(expert, 2), moved], ())
        assert counted == dict.fromkeys(itertools.product(range(2), range(100)), 1)

    def test_merging_the_devices_with_their_rows_points_elsewhere(self) -> None:
        device = IterDomain(2)
        expert, tokens = partition(IterDomain(100), self.OFFSETS, under=[device])
        with pytest.raises(DomainError, match=r"the outer domain does not own the ragged one, so rows have no common width"):
            merge(device, tokens)
        with pytest.raises(DomainError, match=r"have no common width; use combine"):
            merge(expert, tokens)

    def test_more_leading_dims_than_precede(self) -> None:
        for under in (0, 1):
            offsets: Any = self.OFFSETS if under == 0 else (self.OFFSETS,)
            domain = IterDomain(100, name="t")
            message = f"partition: offsets of i.t{{100}} have {under + 1} leading dims, but {under} precede it"
            with pytest.raises(DomainError, match=re.escape(message)):
                partition(domain, offsets, under=[IterDomain(2)] * under)


class TestRanksToExperts:
    """Ranks send [[127, 0, 198], [98, 45, 156]]; experts hold [[127, 98], [0, 45], [198, 156]]."""

    def test_regroup_and_partition(self) -> None:
        rank, sent = partition(IterDomain(624), [0, 325, 624])
        expert, tokens = partition(sent, [[0, 127, 127, 325], [0, 98, 143, 299]])
        assert tokens.extents == ((127, 0, 198), (98, 45, 156))
        _, received = regroup(rank, expert, tokens)
        assert received.extents == (225, 45, 354)
        by_rank = partition(received, [[0, 127, 225], [0, 0, 45], [0, 198, 354]])
        assert (by_rank[0].extent, by_rank[1].extents) == (2, ((127, 98), (0, 45), (198, 156)))
        assert [d.extent for d in by_rank[1].nested_domains] == [225, 45, 354]


class TestDevicesOfFiveAndThreeExperts:
    def test_nested(self) -> None:
        """experts=[5, 3] > tokens=[127, 0, 198, 64, 89, 103, 45, 201]."""
        tokens = RaggedIterDomain.from_extents(TOKENS)
        device, experts = partition(tokens.component, [0, 5, 8])
        assert (device.extent, experts.extents, tokens.extent) == (2, (5, 3), sum(TOKENS))
        assert tokens.extents_under(device, experts) == ((127, 0, 198, 64, 89), (103, 45, 201))
        of_device = combine(experts, tokens)
        assert isinstance(of_device, RaggedIterDomain)
        assert (of_device.extents, of_device.component) == ((478, 349), device)

    def test_independent(self) -> None:
        """Two pairs of two different dims: five domains of one tensor."""
        experts, tokens, hidden = IterDomain(8), IterDomain(sum(TOKENS)), IterDomain(512)
        device, of_device = partition(experts, [0, 5, 8])
        expert, of_expert = partition(tokens, [0, *itertools.accumulate(TOKENS)])
        logical = (device, of_device, expert, of_expert, hidden)
        domain = TensorDomain((experts, tokens, hidden), logical, (experts, tokens, hidden), logical)
        assert [d.extent for d in domain.logical] == [2, 8, 8, 827, 512]
        assert [d.extents for d in domain.logical if isinstance(d, RaggedIterDomain)] == [(5, 3), tuple(TOKENS)]
        assert combine(device, of_device) is experts and combine(expert, of_expert) is tokens
        for component, ragged in ((device, of_expert), (expert, of_device)):
            with pytest.raises(StructureMismatch, match=r"combine: .* is the component of .*, but .* belongs to .*"):
                combine(component, ragged)

    def test_routing_by_counts_that_the_program_computes(self) -> None:
        counts = Array("counts")
        r = RaggedIterDomain.from_extents(counts, 8)
        assert [r.extent_for_component(k) for k in (0, 7)] == [counts[0], counts[7]]
        assert str(r.offset_for_component(3)) == "sum(counts[c])[3]"
        known = RaggedIterDomain.from_extents([127, 0, 198, 64, 412, 89, 103, 31])
        assert (known.extent, known.offsets) == (1024, (0, 127, 127, 325, 389, 801, 890, 993, 1024))


class TestCombine:
    def test_sentences_into_their_documents(self) -> None:
        sentence, word = partition(IterDomain(10), [0, 3, 3, 8, 10])
        document, sentences = partition(sentence, [0, 1, 4])
        words = combine(sentences, word)
        assert isinstance(words, RaggedIterDomain)
        assert (words.extents, words.component) == ((3, 7), document)

    @pytest.mark.parametrize("which", [0, 1, 2])
    def test_nothing(self, which: int) -> None:
        pair: list[Any] = list(partition(IterDomain(10), [0, 3, 10]))
        for k in range(2):
            if which in (k, 2):
                pair[k] = None
        with pytest.raises(DomainError, match=r"^combine: expected an IterDomain, got NoneType$"):
            combine(*pair)

    def test_another_partition(self) -> None:
        first = partition(IterDomain(325, name="a"), [0, 127, 127, 325])
        second = partition(IterDomain(325, name="b"), [0, 100, 200, 325])
        message = (
            "combine: i.bc{3} is the component of offsets[0, 100, 200, 325], but ragged.ar{[127, 0, 198]} belongs to "
            "offsets[0, 127, 127, 325]; pass the component it was made with"
        )
        with pytest.raises(StructureMismatch, match=f"^{re.escape(message)}$"):
            combine(second[0], first[1])
        copied = Cloner()
        with pytest.raises(StructureMismatch, match=f"^{re.escape(message)}$"):
            combine(copied(second[0]), copied(first[1]))
        assert combine(copied(first[0]), copied(first[1])).extent == 325

    def test_a_parts_count_without_any_partition(self) -> None:
        rows = partition(IterDomain(10, name="a"), [0, 3, 10])[1]
        message = "combine: i.k{2} is the component of no partition, but ragged.ar{[3, 7]} belongs to offsets[0, 3, 10]"
        with pytest.raises(StructureMismatch, match=re.escape(message)):
            combine(IterDomain(2, name="k"), rows)
