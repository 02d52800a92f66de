"""serrate: a ragged-tensor compiler for PyTorch.

In: tensors whose rows have different lengths, and an ordinary-looking program. Out: the program's results, computed
without padding by generated code.
"""

from serrate import analysis, errors, ir, nn
from serrate.api import conversions as _installs_conversions  # noqa: F401
from serrate.api import eager as _installs_operators  # noqa: F401
from serrate.api.graph_breaks import leave_graphs
from serrate.api.jit import jit
from serrate.api.kernel import Config, Kernel, kernel
from serrate.frontend import ops
from serrate.modes import batch_invariant
from serrate.tensor import (
    JaggedTensor,
    KeyedJaggedTensor,
    Structure,
    cat,
    collate,
    keyed,
    load_safetensors,
    no_sync,
    save_safetensors,
    stack,
    wait_for_checks,
)
from serrate.tuner.policy import tuning
from serrate.version import VERSION

__version__ = VERSION

__all__ = [
    "Config",
    "JaggedTensor",
    "Kernel",
    "KeyedJaggedTensor",
    "Structure",
    "analysis",
    "batch_invariant",
    "cat",
    "collate",
    "errors",
    "ir",
    "jit",
    "kernel",
    "keyed",
    "load_safetensors",
    "nn",
    "no_sync",
    "ops",
    "save_safetensors",
    "stack",
    "tuning",
    "wait_for_checks",
]

leave_graphs([*(globals()[name] for name in __all__), *(getattr(nn, name) for name in nn.__all__)])
