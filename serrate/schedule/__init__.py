"""Schedules: primitives that rewrite tile programs, plans as data, strategies that make plans.

In: naive tile programs. Out: scheduled tile programs and the plans that made them.
"""
