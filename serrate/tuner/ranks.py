"""Ranks: under torch.distributed, all ranks use the choices of rank 0.

In: records of rank 0. Out: the same records on the other ranks, through the store of the process group. This uses no
collectives, so ranks whose data differ cannot deadlock.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from serrate.tensor.torch_private import default_store
from serrate.tuner.buckets import Bucket
from serrate.tuner.record import ProgramKey, Tuning, file_name, packed, unpacked

POLL = 0.02
"""Seconds between two looks at the store."""


def _group() -> Any | None:
    """torch.distributed, if there are several ranks."""
    found: Any = sys.modules.get("torch.distributed")
    if found is None or not found.is_available() or not found.is_initialized() or found.get_world_size() < 2:
        return None
    return found


def is_follower() -> bool:
    """Whether this process takes its choices from rank 0."""
    group = _group()
    return group is not None and group.get_rank() != 0


def _names(key: ProgramKey, bucket: Bucket) -> tuple[str, str]:
    """The store keys of a record: one for its bucket, one for the program."""
    return f"serrate/{key.digest}/{file_name(bucket)}", f"serrate/{key.digest}"


def publish(tuning: Tuning) -> bool:
    """Publishes a record of rank 0; returns whether there are other ranks."""
    group = _group()
    store = None if group is None or group.get_rank() != 0 else default_store()
    if store is None:
        return False
    for name in _names(tuning.key, tuning.bucket):
        store.set(name, packed(tuning))
    return True


def received(key: ProgramKey, bucket: Bucket, patience: float) -> Tuning | None:
    """Rank 0's choice for this bucket, or else its latest choice for this program. If rank 0 has not chosen for this program
    yet, waits for at most `patience` seconds, then returns None."""
    store = default_store()
    if store is None:
        return None
    own, last = _names(key, bucket)
    name = own if store.check([own]) else last
    try:
        if name is last and not store.check([last]) and not _arrives(store, last, patience):
            return None
        return unpacked(store.get(name), source="rank 0")
    except (RuntimeError, ValueError):
        # Rank 0 has ended, or its record is not one.
        return None


def _arrives(store: Any, name: str, patience: float) -> bool:
    """Waits for a key. torch's own `wait` prints warnings of sockets that timed out when it has waited long enough."""
    end = time.monotonic() + patience
    while (left := end - time.monotonic()) > 0:
        if store.check([name]):
            return True
        time.sleep(min(POLL, left))
    return False
