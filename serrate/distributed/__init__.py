"""Tensors whose partitions are spread over ranks: layouts, conversions between them with gradients, expert parallelism.

In: local tensors, counts and a `DeviceMesh`. Out: local tensors in another layout.
"""
