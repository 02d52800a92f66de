"""Host copies: who makes them, who needs none, and what `no_sync()` says to those who do.

In: structures whose lengths are unread (on the meta device, or on the CPU under strict rules). Out: failures where a copy
slips through or is refused without need.
"""

from __future__ import annotations

import contextvars
import re
from collections.abc import Callable

import pytest
import torch

import serrate
from serrate.errors import SyncError
from serrate.tensor import JaggedTensor, Structure, no_sync
from serrate.tensor import rows as rows_module
from serrate.tensor.sync import host_copy

CHAIN = (torch.tensor([0, 2, 3]), torch.tensor([0, 3, 3, 7]))


def unread(device: torch.device | str = "cpu") -> JaggedTensor:
    return JaggedTensor.from_csr(torch.zeros(7, 2, device=device), torch.tensor([0, 3, 3, 7], device=device), validate=False)


def nested(device: torch.device | str = "cpu") -> JaggedTensor:
    return JaggedTensor.from_csr(torch.zeros(7, device=device), [level.to(device) for level in CHAIN], validate=False)


def inner(device: torch.device | str = "cpu") -> JaggedTensor:
    return JaggedTensor.from_csr(torch.zeros(2, 7, device=device), CHAIN[1].to(device), dim=1, validate=False)


def with_gaps(device: torch.device | str = "cpu") -> JaggedTensor:
    starts, lengths = (torch.tensor(numbers, device=device) for numbers in ([0, 4, 5], [3, 0, 4]))
    return JaggedTensor.from_starts(torch.zeros(9, device=device), starts, lengths, validate=False)


def padded(device: torch.device | str = "cpu") -> JaggedTensor:
    lengths = torch.tensor([3, 0, 4], device=device)
    structure = Structure.from_lengths(lengths, validate=False)
    return JaggedTensor.from_padded(torch.zeros(3, 4, device=device), structure=structure, format="padded")


def product(device: torch.device | str = "cpu", *, packed: bool = True) -> JaggedTensor:
    lengths, counts = (torch.tensor(numbers, device=device) for numbers in ([3, 1], [2, 4]))
    structure = Structure.from_lengths(lengths, validate=False).with_columns(counts, packed=packed, validate=False)
    return JaggedTensor(torch.zeros((10,) if packed else (4, 4), device=device), structure)


def independent(device: torch.device | str = "cpu") -> JaggedTensor:
    rows, columns = (torch.tensor(numbers, device=device) for numbers in ([3, 1], [2, 4, 1]))
    structure = Structure.independent(
        Structure.from_lengths(rows, validate=False), Structure.from_lengths(columns, dim=1, validate=False)
    )
    return JaggedTensor(torch.zeros(4, 7, device=device), structure)


COMPOSITIONS: dict[str, Callable[..., JaggedTensor]] = {
    "one level": unread,
    "nested": nested,
    "rows of dim 1": inner,
    "gaps": with_gaps,
    "padded": padded,
    "product": product,
    "product of two dims": lambda device="cpu": product(device, packed=False),
    "independent": independent,
}

READERS: dict[str, Callable[[JaggedTensor], object]] = {
    "max_length": lambda jt: jt.max_length,
    "min_length": lambda jt: jt.min_length,
    "sparsity": lambda jt: jt.sparsity,
    "variance": lambda jt: jt.variance,
    "to_padded": lambda jt: jt.to_padded(),
    "unbind": lambda jt: jt.unbind(),
    "to_list": lambda jt: jt.to_list(),
    "describe": lambda jt: jt.describe(),
    "jt[i]": lambda jt: jt[0],
    "jt[a:b]": lambda jt: jt[:1],
    "comparing two structures": lambda jt: jt.structure == unread(jt.device).structure,
    "host_offsets": lambda jt: jt.structure.host_offsets(),
}


@pytest.mark.parametrize("why", READERS)
def test_every_reader_is_refused_by_name(why: str) -> None:
    with no_sync(strict=True), pytest.raises(SyncError) as caught:
        READERS[why](unread())
    assert str(caught.value) == (
        f"{why} needs lengths on the host, and no_sync() forbids the copy from cpu: "
        "do it once beforehand (the result is cached), or pass max_length=, min_length= and total= to the constructor"
    )
    with no_sync(), pytest.raises(SyncError, match="forbids the copy from meta"):
        READERS[why](unread("meta"))
    with no_sync():
        READERS[why](unread())


# Whatever is at a position of dim 0 has all rows of dim 1, so nothing need be known of them to take it.
NEEDLESS = {
    ("rows of dim 1", "jt[i]"),
    ("rows of dim 1", "jt[a:b]"),
    ("rows of dim 1", "unbind"),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("why", [name for name in READERS if name != "comparing two structures"])
def test_every_reader_of_every_composition(why: str, composition: str) -> None:
    make = COMPOSITIONS[composition]
    with no_sync(strict=True):
        jt = make()
        if (composition, why) in NEEDLESS:
            READERS[why](jt)
        else:
            with pytest.raises(SyncError, match=f"^{re.escape(why)} needs lengths on the host"):
                READERS[why](jt)
    READERS[why](jt)
    with no_sync(strict=True):
        # Once read, the lengths are remembered.
        READERS[why](jt)


@pytest.mark.parametrize("composition", ["gaps", "padded", "product of two dims"])
def test_packing_rows_together_needs_their_lengths(composition: str) -> None:
    with no_sync(strict=True):
        jt = COMPOSITIONS[composition]()
        with pytest.raises(SyncError, match=r"^contiguous needs lengths on the host"):
            jt.contiguous()
    jt.contiguous()
    with no_sync(strict=True):
        jt.contiguous()
        assert unread().contiguous().format == "csr"


def test_what_the_first_position_across_rows_needs() -> None:
    @serrate.jit
    def across(jt):  # type: ignore[no-untyped-def]
        return jt.sum(0)

    with no_sync(strict=True), pytest.raises(SyncError, match="needs lengths on the host"):
        across(unread())
    with no_sync(strict=True):
        jt = JaggedTensor.from_csr(torch.ones(7, 2), torch.tensor([0, 3, 3, 7]), max_length=4, min_length=0)
        assert across(jt).shape == (4, 2)


def test_programs_over_rows_need_no_copy() -> None:
    @serrate.jit
    def program(jt, scale):  # type: ignore[no-untyped-def]
        return torch.relu(jt * scale), jt.sum(1)

    with no_sync(strict=True):
        jt = unread()
        same, sums = program(jt, torch.ones(2))
        assert sums.shape == (3, 2) and same.structure is jt.structure


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_what_never_reads_lengths(composition: str) -> None:
    with no_sync(strict=True):
        jt = COMPOSITIONS[composition]()
        assert len(jt) and len(jt.shape) == jt.ndim and jt.num_rows and jt.num_groups and jt.jagged_dims
        assert jt.lengths.numel() and jt.offsets.numel() and jt.starts.numel() and jt.values is not None
        assert "not on the host" in repr(jt) and hash(jt.structure)
        for other in (jt.with_values(jt.values + 1), jt.to(torch.float64), jt.clone(), jt.detach(), jt.with_hint(reuse="high")):
            assert other.structure is jt.structure
        assert jt.structure.agrees(COMPOSITIONS[composition]().structure, "both")


def test_every_length_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []

    def counted(tensor: torch.Tensor, why: str) -> torch.Tensor:
        copied.append(why)
        return host_copy(tensor, why)

    monkeypatch.setattr(rows_module, "host_copy", counted)
    for name, make in COMPOSITIONS.items():
        jt = make()
        for read in READERS.values():
            read(jt)
        jt.contiguous()
        once = len(copied)
        assert once, name
        other = make().structure
        assert jt.structure == other
        compared = len(copied)
        for read in READERS.values():
            read(jt)
        assert jt.structure == other and jt.structure.same_rows(other)
        jt.contiguous()
        # Reading one more structure than this one, and that for the comparison among the readers.
        assert len(copied) - compared <= 1, name
        copied.clear()


def test_construction_and_shape_facts_need_no_copy() -> None:
    with no_sync(strict=True):
        jt = JaggedTensor.from_csr(torch.zeros(7, 2), torch.tensor([0, 3, 3, 7]))
        assert (len(jt), jt.num_rows, jt.total_elements, jt.ndim) == (3, 3, 7, 3)
        assert jt.lengths.tolist() == [3, 0, 4]
        assert "lengths=not on the host" in repr(jt)
        assert hash(jt.structure) and jt.structure == jt.detach().structure
        square = JaggedTensor.from_csr(torch.zeros(7), torch.tensor([[0, 3], [0, 4]]))
        assert square.structure.max_length(0) == 1
        assert JaggedTensor.from_lengths(torch.zeros(7), torch.tensor([3, 0, 4])).offsets.tolist() == [0, 3, 3, 7]


def test_supplied_metadata_spares_the_copy() -> None:
    with no_sync(strict=True):
        jt = JaggedTensor.from_csr(torch.ones(7), torch.tensor([0, 3, 3, 7]), max_length=4, min_length=0)
        assert jt.to_padded().tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
        assert (jt.max_length, jt.min_length, jt.sparsity) == (4, 0, pytest.approx(7 / 12))


def test_rows_given_as_a_list_are_known_on_the_host() -> None:
    with no_sync(strict=True):
        jt = JaggedTensor.from_nested_list([[torch.ones(2), torch.ones(1)], [torch.ones(3)]])
        assert [len(part) for part in jt.unbind()] == [2, 1]
        assert jt[1:].max_length == 3


def test_what_was_read_once_is_remembered() -> None:
    jt = unread()
    jt.unbind()
    with no_sync(strict=True):
        assert jt.max_length == 4
        assert jt[1:].max_length == 4


def test_padded_values_need_their_total() -> None:
    x, lengths = torch.ones(3, 4), torch.tensor([3, 0, 4])
    with no_sync(strict=True):
        with pytest.raises(SyncError, match="from_padded needs lengths on the host"):
            JaggedTensor.from_padded(x, lengths)
        assert JaggedTensor.from_padded(x, lengths, total=7).values.tolist() == [1] * 7
        structure = Structure.from_offsets(torch.tensor([0, 3, 3, 7]), total=7)
        with pytest.raises(SyncError, match="from_padded needs lengths on the host"):
            JaggedTensor.from_padded(x, structure=structure)
        assert JaggedTensor.from_padded(x, structure=structure, total=7).values.tolist() == [1] * 7


def test_validation_by_request_is_a_copy() -> None:
    with no_sync(), pytest.raises(SyncError, match="validating offsets needs lengths on the host"):
        Structure.from_offsets(torch.tensor([0, 1], device="meta"), validate=True)
    with no_sync(), pytest.raises(SyncError, match="validating lengths needs lengths on the host"):
        Structure.from_lengths(torch.tensor([0, 1], device="meta"), validate=True)


def test_the_context_ends_and_nests() -> None:
    tensor = torch.zeros(1)
    with no_sync(strict=True):
        with no_sync(), pytest.raises(SyncError):
            host_copy(tensor, "a test")
        with pytest.raises(SyncError):
            host_copy(tensor, "a test")
    assert host_copy(tensor, "a test") is not None
    with pytest.raises(ZeroDivisionError), no_sync(strict=True):
        _ = 1 / 0
    assert host_copy(tensor, "a test") is not None


def test_the_context_stays_in_its_own() -> None:
    with no_sync(strict=True):
        assert contextvars.Context().run(host_copy, torch.zeros(1), "elsewhere") is not None


@pytest.mark.gpu
def test_nothing_hides_a_copy_from_the_device() -> None:
    offsets = torch.tensor([0, 3, 3, 7], device="cuda")
    square = torch.tensor([[0, 3, 3], [0, 2, 4]], device="cuda")
    values = torch.ones(7, 2, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with no_sync():
            jt = JaggedTensor.from_csr(values, offsets, max_length=4, min_length=0)
            padded = jt.to_padded()
            back = JaggedTensor.from_padded(padded, jt.lengths, total=7)
            back.values.sum().backward()
            assert "not on the host" in repr(JaggedTensor.from_csr(values, square))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert torch.equal(back.values, values) and torch.equal(back.offsets, offsets)
    assert [len(row) for row in jt] == [3, 0, 4]
    with no_sync():
        assert jt[1:].max_length == 4
