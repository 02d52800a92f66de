"""The public entry points: each turns a call into programs for the engine, and dispatches warm calls.

jit.py            `serrate.jit`: functions over ragged tensors, traced and compiled
eager.py          torch's functions, methods and operators on a `JaggedTensor`
kernel.py         `serrate.kernel`: functions with loops over tiles, compiled (`tiles/`) or interpreted (`interpret/`)
conversions.py    compiled copies for the container's conversions
"""
