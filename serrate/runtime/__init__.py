"""Running programs: arguments bound to symbols, programs built and cached, kernels launched.

In: loop programs and the caller's tensors. Out: results.
"""
