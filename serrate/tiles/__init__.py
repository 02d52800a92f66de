"""Tile kernels, compiled: the device loops of a function become a tile program.

In: a function with loops over tiles, and its arguments. Out: a `TileProgram` (`ir/tile.py`), made by running the function's
own loops once with symbolic tiles. From there on it is a program like any other: a strategy makes a plan of steps for it.

    source.py       the function: what stays Python, and one function for each device loop
    trace.py        one run with symbols: the machine behind `serrate.language`
    loops.py        its loops and branches, and what they carry; carried.py has what that is recognised as
    values.py       what names stand for in it: tiles, values of tiles, tensors
    memory.py       loads and stores
    functions.py    torch's functions on values, by name; elementwise.py, shaping.py, reducing.py, scans.py, products.py, more.py
    proof.py        whether the size of a tile is the compiler's to choose
    launch.py       calls: which program serves which arguments; forms.py, derived.py and later.py say how it gets them
"""
