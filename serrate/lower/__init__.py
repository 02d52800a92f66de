"""Lowering: from a fusion to a naive tile program, and from a scheduled tile program to loops.

In: fusions, tile programs. Out: tile programs, loop programs.
"""
