"""What docs/tensors.md shows is what tensors print, draw and raise today; SERRATE_UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import builtins
import math
import re

import pytest
import torch

from serrate import JaggedTensor, Structure, errors
from serrate.tensor.picture import picture
from tests.pages import DOCS, check_dumps, check_picture

PAGE = DOCS / "tensors.md"


def exponential() -> JaggedTensor:
    # Quantiles of the distribution, and no draws of it, which another torch may draw otherwise.
    lengths = torch.tensor([int(-50 * math.log((k + 0.5) / 1000)) for k in range(1000)])
    return JaggedTensor.from_lengths(torch.zeros(int(lengths.sum()), 64), lengths)


def printed() -> str:
    jt = JaggedTensor.from_lengths(torch.arange(40.0) / 4, [3, 0, 20, 1, 5, 9, 2])
    return f">>> jt\n{jt!r}\n>>> print(jt)\n{jt}\n"


PICTURES = {
    "nested": JaggedTensor.from_lengths(torch.arange(11), (torch.tensor([2, 3]), torch.tensor([4, 4, 1, 0, 2]))),
    "product": JaggedTensor(
        torch.arange(14), Structure.from_lengths(torch.tensor([3, 0, 2])).with_columns(torch.tensor([2, 5, 4]))
    ),
    "padded": JaggedTensor.from_padded(torch.arange(12.0).view(3, 4), [1, 0, 3], format="padded"),
}


def test_texts_are_what_tensors_print() -> None:
    check_dumps(PAGE, {"printed": printed(), "described": f">>> jt.describe()\n{exponential().describe()}\n"})


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_notebooks_draw(name: str) -> None:
    jt = PICTURES[name]
    check_picture(DOCS / "images" / f"{name}.svg", picture(tuple(jt.values.shape), jt.structure))


def test_every_picture_of_the_page_is_drawn_here() -> None:
    assert set(re.findall(r"\(images/(\w+)\.svg\)", PAGE.read_text())) == set(PICTURES)


def test_errors_are_what_the_page_says() -> None:
    rows = re.findall(r"^\| `(\w+(?:Error|Mismatch))` \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) >= 7
    for name, builtin in rows:
        assert {errors.SerrateError, getattr(builtins, builtin)} < set(getattr(errors, name).__mro__)
