"""Front ends: operations on fusions, and tracing of Python functions; `kernel/` has the front end of tile kernels.

In: users' programs. Out: fusions, and kernel functions ready to run.
"""
