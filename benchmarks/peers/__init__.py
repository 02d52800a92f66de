"""What a user would call instead of serrate.

In: a task. Out: methods for it, from torch and from installed libraries.
"""

from __future__ import annotations

from benchmarks.methods import Method
from benchmarks.peers import libraries, padding, segments
from benchmarks.tasks import Task


def methods(task: Task, compiled: bool = True) -> list[Method]:
    """Every peer that supports the task; torch's also under torch.compile if `compiled`."""
    return [*padding.methods(task, compiled), *segments.methods(task, compiled), *libraries.methods(task)]
