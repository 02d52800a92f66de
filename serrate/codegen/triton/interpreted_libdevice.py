"""Replacements, in torch, for the libdevice functions that generated Triton calls: Triton's interpreter does not have them.

In: blocks of the interpreter. Out: a block. Interpreted modules import this module under the name `libdevice`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.language.core import tensor
from triton.runtime.interpreter import TensorHandle

from serrate.codegen.triton.values import LIBDEVICE_BINARY, LIBDEVICE_UNARY


def _computed(function: Callable[..., torch.Tensor], *args: Any) -> Any:
    """A function of torch, of blocks and plain numbers, which broadcast."""
    blocks = [arg for arg in args if isinstance(arg, tensor)]
    first = next((block for block in blocks if block.type.is_block()), blocks[0])
    dtype = first.handle.data.dtype
    data = np.broadcast_arrays(*(np.asarray(arg.handle.data if isinstance(arg, tensor) else arg, dtype) for arg in args))
    found = function(*(torch.from_numpy(each.copy()) for each in data)).numpy()
    return tensor(TensorHandle(found, first.dtype.scalar), first.type)


def __getattr__(name: str) -> Callable[..., Any]:
    if name in LIBDEVICE_UNARY or name in LIBDEVICE_BINARY:
        return functools.partial(_computed, getattr(torch, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
