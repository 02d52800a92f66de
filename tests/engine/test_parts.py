"""Values, lengths, offsets and positions of ragged tensors inside traced functions, against those of the container.

In: rows of one and of two levels, and rows with gaps. Out: failures where a traced function sees other numbers.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from serrate import JaggedTensor, Structure, ir, jit, ops
from serrate.errors import CallError, ShapeError, TraceAttributeError, TraceError
from tests.engine.composed import COMPOSITIONS, tensor_of

ROWS = JaggedTensor.from_lengths(torch.randn(10, 3), [3, 0, 5, 2])
WORDS = JaggedTensor(torch.randn(10, 3), Structure.from_lengths(torch.tensor([2, 0, 2]), torch.tensor([3, 0, 5, 2])))
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpp"])


@BACKENDS
@pytest.mark.parametrize("rows", [ROWS, WORDS], ids=["one level", "two levels"])
def test_parts_are_those_of_the_container(rows: JaggedTensor, backend: str) -> None:
    def parts(x: Any) -> Any:
        return x.values * 2, x.lengths, x.offsets, (x + 1).values, x.with_values(x.values[:, 0] * 3), x.with_values(x.values + 1)

    doubled, lengths, offsets, more, first, other = jit(parts, backend=backend)(rows)
    assert torch.equal(doubled, rows.values * 2) and torch.equal(more, rows.values + 1)
    assert torch.equal(lengths, rows.lengths) and torch.equal(offsets, rows.offsets)
    assert first.structure == rows.structure and torch.equal(first.values, rows.values[:, 0] * 3)
    assert other.structure == rows.structure and torch.equal(other.values, rows.values + 1)


@BACKENDS
def test_parts_meet_rows_again(backend: str) -> None:
    def centred(x: Any) -> Any:
        scaled = x.with_values(x.values / 2)
        return scaled + x - x.sum(1, keepdim=True) / x.lengths[:, None, None]

    for got, row in zip(jit(centred, backend=backend)(ROWS).unbind(), ROWS.unbind(), strict=True):
        torch.testing.assert_close(got, row * 1.5 - row.sum(0, keepdim=True) / max(len(row), 1))


def test_rows_with_gaps_have_values_back_to_back() -> None:
    padded = JaggedTensor.from_padded(torch.randn(4, 6, 3), torch.tensor([3, 0, 5, 2]), format="padded")
    values, offsets = jit(lambda x: (x.values + 0, x.offsets))(padded)
    assert torch.equal(values, torch.cat(padded.unbind())) and offsets.tolist() == [0, 3, 3, 8, 10]


@BACKENDS
def test_positions_and_masks_made_of_them(backend: str) -> None:
    def every(x: Any) -> Any:
        at = ops.position(x, 1)
        last = at == x.lengths[:, None] - 1
        scores = x @ x.transpose(1, 2)
        window = scores.tril().triu(-1)
        return at, torch.where(last.unsqueeze(-1), x, 0.0), window, scores.triu(1), ops.position(x, 2)

    at, ends, window, above, features = jit(every, backend=backend)(ROWS)
    assert features.tolist() == [0, 1, 2]
    for k, row in enumerate(ROWS.unbind()):
        assert at[k].tolist() == list(range(len(row)))
        kept = torch.zeros_like(row)
        kept[-1:] = row[-1:]
        assert torch.equal(ends[k], kept)
        torch.testing.assert_close(window[k], (row @ row.T).tril().triu(-1)) if len(row) else None
        torch.testing.assert_close(above[k], (row @ row.T).triu(1)) if len(row) else None


def test_what_has_no_parts() -> None:
    with pytest.raises(CallError, match=r"values, lengths and offsets are attributes, so write x\.values"):
        jit(lambda x: x.values())(ROWS)
    with pytest.raises(ShapeError, match=re.escape("lengths: (4, 3) is dense; only ragged tensors have lengths")):
        jit(lambda x: x.sum(1).lengths)(ROWS)
    message = "with_values of (4, r0, 3) and (4, 3): the numbers of elements differ: 10 and 4"
    with pytest.raises(ShapeError, match=re.escape(message)):
        jit(lambda x: x.with_values(x.sum(1)))(ROWS)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_offsets_and_lengths_alone(composition: str) -> None:
    """Of programs that read nothing else, so that no row bounds them."""
    jt = tensor_of(composition, "mixed")
    plain = jt if jt.format == "csr" else jt.contiguous()
    for name in ("offsets", "lengths"):
        got = jit(lambda x, name=name: getattr(x, name) + 1, backend="reference")(jt)
        assert torch.equal(got.flatten(), getattr(plain, name).flatten() + 1), name


def test_the_structure_of_a_traced_tensor() -> None:
    words = JaggedTensor.from_lengths(torch.randn(6), [torch.tensor([2, 0, 1]), torch.tensor([3, 1, 2])])

    @jit
    def every(x: JaggedTensor) -> tuple[torch.Tensor, ...]:
        rows = x.structure
        assert rows.levels == 2 and rows == (x * 2).structure
        return rows.lengths(0), rows.lengths(), *rows.offsets, x.sum(2) * rows.num_rows()

    of_documents, of_sentences, documents, sentences, scaled = every(words)
    assert of_documents.tolist() == [2, 0, 1] and of_sentences.tolist() == [3, 1, 2]
    assert documents.tolist() == [0, 2, 2, 3] and sentences.tolist() == [0, 3, 4, 6]
    torch.testing.assert_close(scaled.values, torch.stack([row.sum() * 3 for row in words.values.split([3, 1, 2])]))
    with pytest.raises(TraceAttributeError, match="the structure of a traced tensor has no attribute 'max_length'"):
        jit(lambda x: x * x.structure.max_length())(words)
    with pytest.raises(TraceError, match="whether two structures are equal is not known while tracing"):
        jit(lambda x: x if x.structure == x[:, :, :1].structure else x * 2)(words)


def test_the_device_of_a_call_is_known_while_it_is_traced() -> None:
    def shifted(x: Any, bias: Any) -> Any:
        assert x.is_cpu and not bias.is_cuda and (x * 2).device == bias.device
        return x + torch.arange(3, device=x.device) + bias

    found = jit(shifted)(ROWS, torch.ones(3))
    torch.testing.assert_close(found.values, ROWS.values + torch.tensor([1.0, 2.0, 3.0]))
    with ir.Fusion() as f:
        x = f.input((None, 3), torch.float32)
        with pytest.raises(TraceAttributeError, match="no attribute 'device'"):
            _ = x.device
