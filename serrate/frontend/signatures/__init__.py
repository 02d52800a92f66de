"""torch's signatures: each function takes what torch's function of that name takes, and records operations.

In: nothing. Out: functions, by the kind of operation they are; `serrate.frontend.torch_names` says which names they answer.
"""
