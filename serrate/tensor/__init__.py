"""Ragged tensors: the container, its structure without data, and the switch against hidden host copies.

In: values with offsets, lengths, padding or lists. Out: `JaggedTensor`, `Structure`, `RaggedSize`, `cat`, `stack`, `no_sync`.
"""

from serrate.tensor import pytree as _registers_on_import  # noqa: F401
from serrate.tensor import spellings as _installs_on_import  # noqa: F401
from serrate.tensor.jagged import JaggedTensor
from serrate.tensor.joining import cat, stack
from serrate.tensor.sizes import RaggedSize
from serrate.tensor.structure import Structure
from serrate.tensor.sync import no_sync

__all__ = ["JaggedTensor", "RaggedSize", "Structure", "cat", "no_sync", "stack"]
