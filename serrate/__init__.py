"""serrate: a ragged-tensor compiler for PyTorch.

In: tensors whose rows have different lengths, and an ordinary-looking program. Out: the program's results, computed
without padding by generated code.
"""

from serrate import analysis, errors, ir
from serrate.calls import jit
from serrate.frontend import ops
from serrate.tensor import JaggedTensor, Structure, no_sync, wait_for_checks

__version__ = "0.1.0"

__all__ = ["JaggedTensor", "Structure", "analysis", "errors", "ir", "jit", "no_sync", "ops", "wait_for_checks"]
