"""Tile kernels, compiled: the device loops of a function become a kernel program.

In: a function with loops over tiles, and its arguments. Out: a `KernelProgram` (`ir/kernel.py`), made by running the function's
own loops once with symbolic tiles; `schedule/tiles.py` chooses their sizes, `lower/tiles.py` makes a loop program of it.

    source.py       the function: what stays Python, and one function for each device loop
    trace.py        the loops, branches and carried values of one run with symbols
    values.py       what names stand for in it: tiles, values of tiles, tensors
    memory.py       loads and stores
    functions.py    torch's functions on values
    carried.py      what a loop carries: recognised reductions, and rows that rest
    tidy.py         results that are worked out once, and where they are needed
    forms.py        what a program is made for, and what it is given at every call
    launch.py       calls: which program serves which arguments
    later.py        calls like one before
"""
