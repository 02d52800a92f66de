"""serrate: a ragged-tensor compiler for PyTorch.

In: tensors whose rows have different lengths, and an ordinary-looking program. Out: the program's results, computed
without padding by generated code.
"""

from serrate import analysis, errors, ir
from serrate import eager as _installs_operators  # noqa: F401
from serrate import moves as _installs_movers  # noqa: F401
from serrate.calls import jit
from serrate.frontend import ops
from serrate.kernels import Config, Kernel, kernel
from serrate.modes import batch_invariant
from serrate.tensor import (
    JaggedTensor,
    Structure,
    cat,
    collate,
    load_safetensors,
    no_sync,
    save_safetensors,
    stack,
    wait_for_checks,
)

__version__ = "0.1.0"

__all__ = [
    "Config",
    "JaggedTensor",
    "Kernel",
    "Structure",
    "analysis",
    "batch_invariant",
    "cat",
    "collate",
    "errors",
    "ir",
    "jit",
    "kernel",
    "load_safetensors",
    "no_sync",
    "ops",
    "save_safetensors",
    "stack",
    "wait_for_checks",
]
