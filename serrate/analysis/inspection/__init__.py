"""Analyses for people and for tests: what a program means, worked out apart from the compiler. No stage imports them.

In: domains and programs. Out: which domains share an index (`graph`), how much memory a storage takes and where its holes are
(`allocation`), what holes must hold (`holes`), which loops visit the same positions (`iteration`), and visits counted by brute
force (`brute_force`).
"""
