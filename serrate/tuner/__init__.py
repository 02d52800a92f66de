"""The tuner: measures plans on the caller's data, and remembers the fastest.

In: a program, the arguments of a call, a budget. Out: the choice of a plan, and a record of what was tried.

| module          | what it is                                                                                          |
| `candidates.py` | the plans that may be tried for a program: strategies, tile sizes, warps                            |
| `search.py`     | which of them are built and timed, in which order, and when to stop                                 |
| `measure.py`    | builds candidates and times them                                                                    |
| `buffers.py`    | the buffers that candidates run on                                                                  |
| `buckets.py`    | which calls share a choice: sizes, density and variance of lengths, hints                           |
| `record.py`     | what was measured, as data; kept in memory and on disk                                              |
| `archive.py`    | records of a cache folder as one file, to ship with a model                                          |
| `policy.py`     | who tunes, when, and for how long                                                                   |
| `tuner.py`      | joins these: the choice for a call                                                                  |

A choice decides speed, never meaning. Between plans, results may differ within the tolerance of their dtype, so a choice once
made for a key stays until the user tunes again.
"""
