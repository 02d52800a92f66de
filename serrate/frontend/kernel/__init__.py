"""The front end of tile kernels: what whoever runs a kernel's function needs, whatever it makes of it.

In: a Python function with loops over tiles. Out: its tree, and the names that the function meets while it runs. The interpreter
(`interpret/`) and the tracer of the compiler (`tiles/`) are two machines behind these names, and know nothing of each other.

    source.py      the function as a tree, and functions of changed trees
    machine.py     which machine is running, its block sizes, and the user's line for errors
    values.py      what tiles and their values have of torch's tensors: operators, methods, indexing
    vocabulary.py  which of torch's functions are part of the language, and what its indices, shapes and products may be
"""
