"""Measurements of serrate against the machine's limits, hand-written C++ and what a user would call instead.

Comes in: nothing but the machine. Goes out: tables, JSON and plots; see `benchmarks.cpu`.
"""
