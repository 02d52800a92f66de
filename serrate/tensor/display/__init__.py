"""How ragged tensors are shown: in one line, printed, drawn in a notebook, described in numbers.

In: values, their structure and hints. Out: text, HTML, a `Description`.
"""
