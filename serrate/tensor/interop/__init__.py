"""Bridges between ragged tensors and what other libraries hold rows in; one module for each.

In: their arrays and tensors, or values with a structure. Out: the other of the two, sharing memory where both formats allow.
The class methods and methods of `JaggedTensor` are the way in; nothing here imports another library before it is needed.
"""
