"""What users call: each entry point turns a call into programs for the engine, and dispatches warm calls.

jit.py            `serrate.jit`: functions over ragged tensors, traced and compiled
eager.py          torch's functions, methods and operators on a `JaggedTensor`
kernel.py         `serrate.kernel`: functions with loops over tiles, compiled (`tiles/`) or interpreted (`interpret/`)
conversions.py    programs that copy rows for the container's own conversions
"""
