"""What a user would call instead of serrate.

In: a task. Out: methods for it, from torch and from installed libraries.
"""

from __future__ import annotations

from benchmarks.peers import libraries, padding, segments
from benchmarks.tasks import Task
from benchmarks.ways import Way


def ways(task: Task, compiled: bool = True) -> list[Way]:
    """Every peer that supports the task; torch's also under torch.compile if `compiled`."""
    return [*padding.ways(task, compiled), *segments.ways(task, compiled), *libraries.ways(task)]
