"""The front end of tile kernels, shared by the interpreter and the compiler.

In: a Python function with loops over tiles. Out: its syntax tree, and the objects the function sees while it runs. The
interpreter (`interpret/`) and the compiler's tracer (`tiles/`) are two machines that implement them, independently of each other.

source.py      the function's syntax tree, and functions compiled from rewritten trees
machine.py     the current machine, its block sizes, and the user's line for errors
values.py      the tensor interface of tiles and their values: operators, methods, indexing
vocabulary.py  the torch functions in the language, and the rules for indices, shapes and products
"""
