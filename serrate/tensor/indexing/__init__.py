"""Parts of a ragged tensor by keys, as in torch: reading them, mostly without a copy, and writing into them.

In: values, their structure and a key. Out: values and structure of what the key names.
"""
