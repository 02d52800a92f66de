"""Analyses for users and tests, independent of the compiler. No stage imports them.

In: domains and programs. Out: which domains share an index (`graph`), the size of a memory layout and its holes (`allocation`),
what holes must contain (`holes`), which loops visit the same positions (`iteration`), and visits counted by brute force
(`brute_force`).
"""
