"""Measurements of serrate against the hardware limit, hand-written C++ and the alternatives a user has.

In: nothing but the machine. Out: tables, JSON and plots; see `benchmarks.cpu`.
"""
