"""Front ends: operations on fusions, and tracing of Python functions; `kernel/` has the front end of tile kernels.

In: users' programs. Out: fusions, and kernels' functions ready to be run by a machine.
"""
