"""The kernel tracer: turns the device loops of a function into tile programs.

In: a function with loops over tiles, and its arguments. Out: a `TileProgram` (`ir/tile.py`), made by running each
loop once on symbolic tiles. From there on, it is scheduled and lowered like the program of a fusion.

    source.py       splits the function into host code and one function per device loop
    trace.py        the symbolic run: implements `serrate.language` while a loop is traced
    loops.py        loops, branches and carried values; carried.py recognises carried values as reductions
    values.py       symbolic tiles, tile values and tensors
    memory.py       loads and stores
    functions.py    torch functions on tile values, by name; elementwise.py, shaping.py, reducing.py, scans.py, products.py
    races.py        stores that race, whatever the arguments
    read_back.py    loops that access what other iterations store
    proof.py        whether the compiler may choose a tile size
    signature.py    the form of a call; specialise.py finds or makes the program for it
    stage.py        a loop's program, built and bound; sources.py says where its arguments come from
    launch_site.py  a device loop at run time: the fast path of warm calls
    host.py         the kernel's function, with device loops replaced by launches
    aliasing.py     arguments that share memory
"""
