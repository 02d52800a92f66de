"""Gradients: backward programs, derived on fusions in reverse mode.

derivatives   the derivative of every elementwise function
reductions    the derivative of every reduction
scans         the derivative of every scan and library call
transpose     the gradient of a read: from the places that a statement read to the tensor that it read from
adjoint       a fusion with gradient definitions appended, in reverse order
saved         forward and backward programs, and which tensors the forward program saves
function      both as one `autograd.Function`
"""
