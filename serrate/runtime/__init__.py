"""Running programs: binding arguments, compiling and caching, launching kernels.

In: loop programs and the caller's tensors. Out: results.
"""
