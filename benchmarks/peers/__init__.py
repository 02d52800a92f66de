"""What a user would call instead of serrate.

Comes in: a task. Goes out: ways to do it, torch's own and those of libraries that are installed.
"""

from __future__ import annotations

from benchmarks.peers import libraries, padding, segments
from benchmarks.tasks import Task
from benchmarks.ways import Way


def ways(task: Task, compiled: bool = True) -> list[Way]:
    """Every peer that can do the work; those of torch also by torch.compile if `compiled`."""
    return [*padding.ways(task, compiled), *segments.ways(task, compiled), *libraries.ways(task)]
