"""What docs/tensors.md shows is what tensors print, draw and raise today; SERRATE_UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import builtins
import math
import re
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import serrate
from serrate import JaggedTensor, KeyedJaggedTensor, Structure, errors, no_sync
from serrate.tensor.display.picture import picture
from tests.pages import DOCS, check_dumps, check_picture

PAGE = DOCS / "tensors.md"


def exponential() -> JaggedTensor:
    # Quantiles of the distribution, and no draws of it, which another torch may draw otherwise.
    lengths = torch.tensor([int(-50 * math.log((k + 0.5) / 1000)) for k in range(1000)])
    return JaggedTensor.from_lengths(torch.zeros(int(lengths.sum()), 64), lengths)


def printed() -> str:
    jt = JaggedTensor.from_lengths(torch.arange(40.0) / 4, [3, 0, 20, 1, 5, 9, 2])
    return f">>> jt\n{jt!r}\n>>> print(jt)\n{jt}\n"


def keyed() -> str:
    features = serrate.keyed({"user": [[4, 1], [2]], "item": [[7], []]})
    return f">>> features\n{features!r}\n"


PICTURES = {
    "nested": JaggedTensor.from_lengths(torch.arange(11), (torch.tensor([2, 3]), torch.tensor([4, 4, 1, 0, 2]))),
    "product": JaggedTensor(
        torch.arange(14), Structure.from_lengths(torch.tensor([3, 0, 2])).with_columns(torch.tensor([2, 5, 4]))
    ),
    "padded": JaggedTensor.from_padded(torch.arange(12.0).view(3, 4), [1, 0, 3], format="padded"),
}


def test_texts_are_what_tensors_print() -> None:
    described = f">>> jt.describe()\n{exponential().describe()}\n"
    check_dumps(PAGE, {"printed": printed(), "described": described, "keyed": keyed()})


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_notebooks_draw(name: str) -> None:
    jt = PICTURES[name]
    check_picture(DOCS / "images" / f"{name}.svg", picture(tuple(jt.values.shape), jt.structure))


def test_every_picture_of_the_page_is_drawn_here() -> None:
    assert set(re.findall(r"\(images/(\w+)\.svg\)", PAGE.read_text())) == set(PICTURES)


def test_errors_are_what_the_page_says() -> None:
    rows = re.findall(r"^\| `(\w+(?:Error|Mismatch|Missing|Key))` \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) >= 12
    for name, builtin in rows:
        assert {errors.SerrateError, getattr(builtins, builtin)} < set(getattr(errors, name).__mro__)


KEYED = ("Indexing", "Joining, cutting, reordering")


def tables(heading: str) -> list[list[str]]:
    """The rows of the table under a heading, each cell without its backticks if it is nothing but code."""
    section = re.split(r"^#+ ", PAGE.read_text().split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line.strip("| ") for line in section.splitlines() if line.startswith("| ")]
    return [[re.sub(r"^`([^`]*)`$", r"\1", cell) for cell in line.split(" | ")] for line in lines[2:]]


def fresh() -> dict[str, Any]:
    """The tensors of the page's table of keys, and what its other tables speak of; nobody has read any length yet."""
    offsets, lengths = torch.tensor([0, 3, 5, 9, 12]), torch.tensor([3, 2, 4, 3])
    outer, inner = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 8, 9, 9, 11])
    values, flat = torch.arange(36.0).view(12, 3), torch.arange(11.0)
    jt = JaggedTensor.from_csr(values, offsets, validate=False)
    keyed_lengths = torch.tensor([1, 2, 4, 5])
    return {
        **{"serrate": serrate, "torch": torch, "JaggedTensor": JaggedTensor, "jt": jt, "values": values, "offsets": offsets},
        **{"lengths": lengths, "outer": outer, "inner": inner, "flat": flat, "weights": torch.rand(12)},
        "documents": JaggedTensor.from_csr(flat, (outer, inner), validate=False),
        "by_rank": JaggedTensor.from_csr(torch.arange(6), torch.tensor([[0, 1, 3], [0, 0, 3]]), validate=False),
        "other": JaggedTensor.from_csr(values, offsets.clone(), validate=False),
        "dense": torch.rand(4, 1, 3),
        "mask": jt.with_values(values[:, 0] > 4),
        "rows": torch.tensor([3, 0, 0]),
        "keep": torch.tensor([True, False, True, False]),
        "x": torch.rand(4, 5),
        "dense_mask": torch.rand(4, 5) > 0.5,
        "keys": ["ads", "clicks"],
        "keyed_lengths": keyed_lengths,
        "KeyedJaggedTensor": KeyedJaggedTensor,
        "keyed": KeyedJaggedTensor.from_lengths(["ads", "clicks"], values, keyed_lengths),
        "more": KeyedJaggedTensor.from_lengths(["shops"], values, lengths),
        "parts": {"ads": jt, "clicks": jt},
        "ids": serrate.keyed({"ads": [[0, 2], []], "clicks": [[1], [1]]}),
        "tables": {"ads": torch.rand(3, 4), "clicks": torch.rand(2, 8)},
    }


@pytest.mark.parametrize(("code", "memory", "host"), [(row[0], *row[2:]) for name in KEYED for row in tables(name)])
def test_keys_share_and_read_what_the_table_says(code: str, memory: str, host: str) -> None:
    names = fresh()
    found = eval(code, names)
    first = found[0] if isinstance(found, tuple) else found
    storage = (first.values if isinstance(first, JaggedTensor) else first).untyped_storage().data_ptr()
    sources = {names[name].values.untyped_storage().data_ptr() for name in ("jt", "documents", "by_rank")}
    assert {"view": True, "copy": False}[memory] is (storage in sources)
    names = fresh()
    with no_sync(strict=True), {"none": nullcontext(), "copy": pytest.raises(errors.SyncError)}[host]:
        eval(code, names)


@pytest.mark.parametrize(
    ("code", "spared"), [(code, row[1]) for row in tables("Host copies") for code in re.findall(r"`([^`]+)`", f"`{row[0]}`")]
)
def test_host_copies_are_made_and_spared_as_the_table_says(code: str, spared: str) -> None:
    names = fresh()
    with no_sync(strict=True), pytest.raises(errors.SyncError):
        eval(code, names)
    names = fresh()
    if spared == "total=":
        code = code.replace(")", ", total=12)")
    elif spared.startswith("`"):
        known = {"`max_length=`": {"max_length": 4}, "`min_length=`": {"min_length": 2}}[spared.split(" ")[0]]
        names["jt"] = JaggedTensor.from_csr(names["values"], names["offsets"], validate=False, **known)
    elif spared.startswith("an earlier copy"):
        names["jt"].unbind(), names["other"].unbind()
    with no_sync(strict=True), pytest.raises(errors.SyncError) if spared.startswith("nothing") else nullcontext():
        eval(code, names)


@pytest.mark.parametrize(("come", "go", "values"), [row[1:] for row in tables("Bridges")])
def test_bridges_share_what_the_table_says(come: str, go: str, values: str) -> None:
    jt = JaggedTensor.from_lengths(torch.arange(7.0), [3, 0, 4])
    names = {"serrate": serrate, "JaggedTensor": JaggedTensor, "jt": jt}
    with warnings.catch_warnings():
        if values == "shared":
            warnings.simplefilter("error")
        else:
            warnings.simplefilter("ignore")
        back = eval(come, {**names, "there": eval(go, names)})
    assert [row.tolist() for row in back] == [[0, 1, 2], [], [3, 4, 5, 6]]
    assert (back.values.data_ptr() == jt.values.data_ptr()) is (values == "shared")


@pytest.mark.parametrize(
    "code", [row[1] for library in ("torch.nested", "TorchRec", "TensorFlow", "Awkward Array") for row in tables(library)]
)
def test_what_is_written_here_instead_runs(code: str) -> None:
    names = fresh()
    if code == "JaggedTensor.from_list(rows)":
        names["rows"] = [torch.rand(2), torch.rand(1)]
    eval(code, names)
