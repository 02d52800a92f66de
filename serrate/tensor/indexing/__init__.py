"""Indexing as in torch: `jt[key]`, mostly without a copy, and `jt[key] = x`.

In: values, their structure and a key. Out: the selected values and their structure.
"""
