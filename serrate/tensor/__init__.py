"""Ragged tensors: the container, its structure without data, and the switch that forbids hidden host copies.

In: values with offsets, lengths, padding or lists. Out: `JaggedTensor`, `Structure`, `RaggedSize`; `no_sync` and
`wait_for_checks`; `cat` and `stack`; `keyed` features; `collate` for DataLoaders; files of ragged tensors.
"""

from serrate.tensor import torch_functions as _registers_with_torch  # noqa: F401
from serrate.tensor.base import RaggedSize
from serrate.tensor.checks.deferred import wait_for_checks
from serrate.tensor.interop import saving as _registers_with_pickle  # noqa: F401
from serrate.tensor.interop.saving import load_safetensors, save_safetensors
from serrate.tensor.jagged import JaggedTensor
from serrate.tensor.joining import cat, collate, stack
from serrate.tensor.keyed_tensor import KeyedJaggedTensor, keyed
from serrate.tensor.structure import Structure
from serrate.tensor.sync import no_sync

__all__ = [
    "JaggedTensor",
    "KeyedJaggedTensor",
    "RaggedSize",
    "Structure",
    "cat",
    "collate",
    "keyed",
    "load_safetensors",
    "no_sync",
    "save_safetensors",
    "stack",
    "wait_for_checks",
]
