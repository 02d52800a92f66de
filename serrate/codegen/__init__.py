"""Backends: each prints (or runs) one loop program.

In: loop programs. Out: source text and how to call it; the reference backend runs them directly with torch.
"""
