"""torch's signatures: each function has the signature of the torch function of that name, and records operations.

In: nothing. Out: functions, grouped by kind of operation; `serrate.frontend.torch_names` registers them under torch's names.
"""
