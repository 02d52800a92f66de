"""Front ends: operations on fusions, and tracing of Python functions.

In: users' programs. Out: fusions.
"""
