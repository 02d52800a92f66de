"""The reference interpreter of tile kernels: slow, and right by construction.

In: a kernel's own Python function, and its arguments. Out: what it returns, computed tile by tile on plain torch tensors.
It is the oracle of the compiler, and shares nothing with it but the front end (`frontend/kernel/`).

    interpreter.py runs a function with notes at its loops
    source.py      the function, with a note at every loop: which names are carried, and where an iteration starts
    run.py         one call of a kernel: its loops, and the clock of their iterations; machine.py is what the language asks
    loops.py       what `hl.tile` and `hl.grid` run over; a finished row rests
    axes.py        tiles, and the conditions under which lanes exist
    values.py      `TileValue`: lanes, the tile of each dim, and the conditions
    functions.py   torch functions on tiles: elementwise, reshaping
    reducing.py    reductions, scans and products
    placing.py     which dims an index gives; `memory.py` reads and writes there, `races.py` watches the writes
"""
