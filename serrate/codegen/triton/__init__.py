"""Loop programs as Triton.

In: a loop program. Out: Python source of one module, and how to launch its kernels.
"""
