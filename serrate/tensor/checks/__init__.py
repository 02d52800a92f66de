"""Validation of offsets, lengths and values: immediate on a CPU, asynchronous on a device.

In: the user's tensors. Out: nothing, or an error that says what is wrong, what was passed and what to do.
"""
