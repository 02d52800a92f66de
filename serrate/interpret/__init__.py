"""The reference interpreter of tile kernels: slow, and right by construction.

In: a kernel's own Python function, and its arguments. Out: its result, computed tile by tile on plain torch tensors.
It is the compiler's oracle, and shares only the front end (`frontend/kernel/`) with it.

interpreter.py runs an instrumented function
source.py      instruments every loop of the function: carried names, and where an iteration starts
run.py         one kernel call: its loops, and a clock that orders iterations; machine.py implements the language
loops.py       iteration of `hl.tile` and `hl.grid`; a finished row rests
    axes.py        tiles, and the conditions under which lanes exist
    values.py      `TileValue`: lanes, the tile of each dim, and the conditions
    functions.py   torch functions on tiles: elementwise, reshaping
    reducing.py    reductions, scans and products
    placing.py     the dims of an indexed result; `memory.py` loads and stores, `races.py` checks the stores
"""
