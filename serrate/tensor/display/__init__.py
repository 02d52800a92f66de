"""Display of ragged tensors: one-line repr, printed rows, notebook pictures, statistics.

In: values, their structure and hints. Out: text, HTML, a `Description`.
"""
