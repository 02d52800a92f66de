"""Kernels that read rows of nested rows that do not exist, and count positions under conditions other than `index < end`.

In: kernels as users write them, with every strategy that may apply. The oracle is plain torch, row by row; Triton's interpreter
checks every access to memory.
"""

from __future__ import annotations

import pytest
import torch

import serrate
import serrate.language as hl
from serrate import JaggedTensor

BACKENDS = ["cpp", "triton"]
STRATEGIES = ["maskless", "masked"]
SENTENCES, WORDS = 4, 25


def documents() -> JaggedTensor:
    draw = torch.Generator().manual_seed(0)
    lengths = [[4, 0, 20], [1], [], [25, 2]]
    return JaggedTensor.from_nested_list([[torch.randn(n, generator=draw) for n in each] for each in lengths])


def padded(x: JaggedTensor) -> torch.Tensor:
    wanted = torch.zeros(x.num_groups, SENTENCES, WORDS)
    for g, document in enumerate(x.unbind()):
        for s, sentence in enumerate(document.unbind()):
            wanted[g, s, : len(sentence)] = sentence
    return wanted


def one_by_one(x: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = torch.full((x.num_groups, SENTENCES, WORDS), 7.0), torch.empty(x.num_groups, SENTENCES)
    for g in hl.grid(x.num_groups):
        for s in hl.grid(SENTENCES):
            own = hl.zeros([])
            for w in hl.tile(WORDS):
                out[g, s, w] = x[g, s, w] + 1
                own = own + x[g, s, w].sum(0)
            total[g, s] = own
    return out, total


def in_tiles(x: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, total = torch.full((x.num_groups, SENTENCES, WORDS), 7.0), torch.empty(x.num_groups, SENTENCES)
    for g, s in hl.tile([x.num_groups, SENTENCES]):
        own = hl.zeros([g, s])
        for w in hl.tile(WORDS):
            out[g, s, w] = x[g, s, w] + 1
            own = own + x[g, s, w].sum(2)
        total[g, s] = own
    return out, total


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("written", [one_by_one, in_tiles], ids=lambda f: f.__name__)
def test_sentences_that_do_not_exist_are_not_looked_up(written: object, backend: str, strategy: str) -> None:
    x = documents()
    out, total = serrate.kernel(written, strategy=strategy).on(backend)(x)
    assert torch.equal(out, padded(x) + 1)
    torch.testing.assert_close(total, padded(x).sum(2))


def totals(x: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    best, found = torch.empty(x.num_groups), torch.empty(x.num_groups)
    for g in hl.tile(x.num_groups):
        top, total = hl.full([g], -torch.inf), hl.zeros([g])
        for s in hl.tile(SENTENCES):
            for w in hl.tile(x.max_length):
                top = torch.maximum(top, x[g, s, w].amax((1, 2)))
                total = total + x[g, s, w].sum(2).sum(1)
        best[g], found[g] = top, total
    return best, found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sentences_whose_words_are_counted_may_not_exist(backend: str, strategy: str) -> None:
    x = documents()
    best, total = serrate.kernel(totals, strategy=strategy).on(backend)(x)
    words = [document.values for document in x.unbind()]
    assert best.tolist() == [float(own.max()) if len(own) else -torch.inf for own in words]
    torch.testing.assert_close(total, torch.stack([own.sum() for own in words]))


def differences(x: JaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    total, largest = torch.empty(x.num_rows), torch.empty(x.num_rows)
    for b in hl.tile(x.num_rows):
        own, top = hl.zeros([b]), hl.full([b], -torch.inf)
        for k in hl.tile(x.max_length):
            change = x[b, k] - x[b, k.index - 1]
            own = own + change.sum(1)
            top = torch.maximum(top, change.amax(1))
        total[b], largest[b] = own, top
    return total, largest


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_element_before_the_first_does_not_exist(backend: str, strategy: str) -> None:
    lengths = [3, 0, 1, 70, 2]
    x = JaggedTensor.from_lengths(torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)), lengths)
    total, largest = serrate.kernel(differences, strategy=strategy).on(backend)(x)
    changes = [row.diff() for row in x.unbind()]
    torch.testing.assert_close(total, torch.stack([own.sum() for own in changes]))
    assert largest.tolist() == [float(own.max()) if len(own) else -torch.inf for own in changes]
