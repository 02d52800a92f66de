"""`python -m tests.language.on_device [NAME...]`: the examples' kernels on a GPU, every strategy and kind of lengths.

In: names of examples; without any, all. Out: nothing, or the first difference from torch. Made to run under compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.language.on_device

Without torch's caching of memory every tensor is an allocation of its own, so that an access past its end is seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "0")

import pytest
import torch

from serrate import JaggedTensor, Kernel
from tests.language.kinds import LENGTHS, ran
from tests.language.test_examples import NAMES, example

STRATEGIES = ("maskless", "masked", "persistent_dynamic cut")


def moved(result: Any, device: str) -> Any:
    return result.to(device) if isinstance(result, torch.Tensor | JaggedTensor) else result


def on_device(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call with arguments on the GPU; its result comes back."""
    return lambda *args: moved(call(*(moved(arg, "cuda") for arg in args)), "cpu")


def main(names: Sequence[str]) -> None:
    for name in names or NAMES:
        for strategy in STRATEGIES:
            for lengths in LENGTHS.values():

                def run(kernel: Kernel, strategy: str = strategy) -> Callable[..., Any]:
                    return on_device(ran(kernel, f"triton {strategy}"))

                try:
                    example(name).check(lengths, run)
                except pytest.skip.Exception as reason:
                    print(f"{name}, {strategy}: {reason}")
                    break
        print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
