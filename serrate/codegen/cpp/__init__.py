"""The cpp backend: C++ with OpenMP, one function per program.

In: a loop program. Out: C++ source that needs only `prelude.h`, and the order of its arguments.
"""
