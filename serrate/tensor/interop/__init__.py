"""Conversion from and to other libraries' ragged formats; one module per library.

In: their arrays and tensors, or values with a structure. Out: the other of the two, sharing memory if both formats allow.
Called through the methods of `JaggedTensor`; other libraries are imported only when needed.
"""
