"""Every example kernel, in every form, on every kind of lengths and three tile sizes, against plain torch row by row.

In: examples/*.py with a `check`. Out: a failure for each kernel, kind and tile that gives other numbers, races or reads outside.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from serrate import Kernel
from tests.language.kinds import LENGTHS, TILES, ran

FOLDER = Path(__file__).resolve().parents[2] / "examples"
NAMES = (
    "grouped_gemm",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_flash_attention",
    "jagged_hstu_attention",
    "jagged_layer_norm",
    "jagged_mean",
    "jagged_softmax",
    "jagged_sum",
    "moe_matmul",
)


def example(name: str) -> ModuleType:
    """An example as a module; examples are scripts, not a package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_torch(name: str, kind: str, tile: int | str) -> None:
    torch.manual_seed(0)
    example(name).check(LENGTHS[kind], lambda kernel: ran(kernel, tile, check=True))


def test_all_of_them_are_here() -> None:
    have = [path.stem for path in FOLDER.glob("*.py") if "@serrate.kernel" in path.read_text()]
    assert sorted(have) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_ragged_forms_need_nothing_special(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert "hl.jagged_tile" not in text and "hl.fill" not in text


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_kernel_would_be_seen(name: str) -> None:
    """The check of every example fails for a kernel that returns something else."""

    def spoiled(kernel: Kernel) -> object:
        def run(*args: object) -> object:
            out = kernel(*args)
            return out + 1 if isinstance(out, torch.Tensor) else out.with_values(out.values + 1)

        return run

    with pytest.raises(AssertionError, match="Tensor-likes"):
        example(name).check([3, 0, 2], spoiled)
