"""serrate: a ragged-tensor compiler for PyTorch.

In: tensors whose rows have different lengths, and an ordinary-looking program. Out: the program's results, computed
without padding by generated code.
"""

from serrate import analysis, errors, ir
from serrate.engine import jit
from serrate.frontend import ops
from serrate.tensor import JaggedTensor, Structure, cat, no_sync, stack

__version__ = "0.1.0"

__all__ = ["JaggedTensor", "Structure", "analysis", "cat", "errors", "ir", "jit", "no_sync", "ops", "stack"]
