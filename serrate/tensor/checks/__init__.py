"""What must hold of offsets, lengths and values: checked at once on a CPU, later on a device.

In: what a user gave. Out: nothing, or an error that says what is wrong, what was got and what to do.
"""
