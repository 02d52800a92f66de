"""The choice for a call: remembered, measured now, or made without measuring.

In: a program with its policy, and for every call its bucket and a measurer. Out: a candidate, from the first of these sources:

    1. a record for this bucket, of this process or on disk
    2. if the call may be measured: a search, which starts from the usual choice and from that of the nearest bucket
    3. the record of the nearest bucket; if there is none, the usual choice

With `tune="background"`, calls use 3 until a thread has finished 2.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from serrate import logs, settings
from serrate.errors import CacheWarning
from serrate.runtime.locks import making, searching
from serrate.runtime.progress import is_visible, progress
from serrate.tuner import ranks
from serrate.tuner.buckets import Bucket
from serrate.tuner.candidates import Space
from serrate.tuner.policy import Policy, is_requested, may_measure, measured_again
from serrate.tuner.record import ProgramKey, Records, Tuning, is_current, records_of
from serrate.tuner.search import Effort, Measurer, reason_of

log = logs.logger("tune")

_warned = threading.Event()
"""Set once this process has warned that a call waited for measurements."""

MakeMeasurer = Callable[[bool], Measurer]
"""Makes the measurer for a call; given True, it runs on a copy of the arguments."""


class ProgramTuner:
    """The choices for one program on one device."""

    def __init__(self, name: str, key: ProgramKey, device: torch.device, policy: Policy, shares: int = 1) -> None:
        self.name, self.key, self.device, self.policy = name, key, device, policy
        self._shares = shares
        """How many programs share one budget: the stages of a function."""
        self._pending: set[tuple[int, Bucket]] = set()
        """The buckets that threads are measuring, with their process: a forked child has no such threads."""
        self._published: set[Bucket] = set()
        self._has_waited = False
        """Whether this rank has waited for rank 0's first choice."""
        self._records: Records | None = None

    @property
    def records(self) -> Records:
        """The records of this program."""
        found = self._records
        if found is None or not is_current(found):
            found = self._records = records_of(self.key)
        return found

    def is_idle(self) -> bool:
        """Whether there is no choice to make: there are no records, and nothing is measured now."""
        return self.policy.now() is None and not self.records.known

    def tuning(self, bucket: Bucket, space: Space, make_measurer: MakeMeasurer | None = None) -> Tuning:
        """The record for a call; without a measurer, nothing is measured."""
        known = self.records.known.get(bucket)
        if known is not None and not measured_again((self.key, bucket)):
            self._publish(known)
            return known
        near = self.records.nearest(bucket)
        how = None if make_measurer is None or not may_measure(self.device) else self.policy.now()
        if how is None or make_measurer is None:
            return self._unmeasured(bucket, space, near)
        when, effort = how
        if ranks.is_follower():
            return self._of_rank_zero(bucket, space, near, effort)
        if when == "background":
            self._start(bucket, space, make_measurer, effort, near)
            return self._unmeasured(bucket, space, near)
        if making.is_mine():  # a traced function calls an operator: others would wait for this search
            return self._unmeasured(bucket, space, near)
        return self._measured(bucket, space, make_measurer, effort, near, before=known)

    def _publish(self, tuning: Tuning) -> None:
        if tuning.bucket not in self._published and ranks.publish(tuning):
            self._published.add(tuning.bucket)

    def _unmeasured(self, bucket: Bucket, space: Space, near: Tuning | None) -> Tuning:
        if near is not None:
            return replace(near, bucket=bucket, source="nearest")
        return Tuning(self.name, self.key, bucket, space.usual)

    def _measured(
        self,
        bucket: Bucket,
        space: Space,
        make_measurer: MakeMeasurer,
        effort: Effort,
        near: Tuning | None,
        before: Tuning | None = None,
        waiting: bool = True,
    ) -> Tuning:
        """Measures a bucket, unless another process has done so meanwhile; `before` is a record that is to be replaced. `waiting`
        says whether a call waits for the result."""
        budget = effort.budget(self.device.type) / self._shares
        records = self.records
        with searching, records.measuring(bucket, patience=2 * budget + 2) as mine:
            known = records.known.get(bucket)
            if known is not None and known is not before:
                return known
            if not mine:
                log.warning(
                    "%s: another process has been measuring it for %.0f s; continuing without its result", self.name, 2 * budget
                )
                return self._unmeasured(bucket, space, near)
            start = time.perf_counter()
            first = near.chosen if near is not None else None
            try:
                with progress(f"tuning {self.name}") as report:
                    measurer = make_measurer(False)
                    found = effort.searcher.search(space, measurer, measurer.now() + budget, bucket.hints, first, report)
            except Exception as error:
                # Copies of the arguments may not fit in memory, for instance; the call itself needs no measurement.
                log.warning("%s could not be measured: %s", self.name, reason_of(error), exc_info=log.isEnabledFor(logging.DEBUG))
                return self._unmeasured(bucket, space, near)
            spent = time.perf_counter() - start
            tuning = Tuning(self.name, self.key, bucket, found.chosen, found.tried, spent, effort.name, "measured")
            records.put(tuning)
        self._publish(tuning)
        if waiting and not is_requested():
            self._tell(spent)
        log.info("%s: %s, measured in %.2f s", self.name, found.chosen, spent)
        for each in found.tried:
            measured = "" if each.seconds is None else f" {1e3 * each.seconds:.3f} ms"
            log.debug("  %s:%s%s", each.candidate, measured, f" {each.reason}" if each.reason else "")
        return tuning

    def _tell(self, seconds: float) -> None:
        """Says why a call took long: a warning once per process, unless a status line on the terminal has said it."""
        level = logging.INFO if _warned.is_set() or is_visible() else logging.WARNING
        if level == logging.WARNING:
            _warned.set()
        log.log(
            level,
            "a call of %s waited %.1f s while plans were measured for sizes or row lengths of a new kind; such calls may come at "
            'any step. tune= or SERRATE_TUNE ("background", "never"), effort= or SERRATE_EFFORT ("quick", "none") change it',
            self.name,
            seconds,
        )

    def _of_rank_zero(self, bucket: Bucket, space: Space, near: Tuning | None, effort: Effort) -> Tuning:
        """Rank 0's choice for this bucket, or else for another."""
        patience = 0.0 if self._has_waited else effort.budget(self.device.type)
        tuning = ranks.received(self.key, bucket, patience)
        self._has_waited = True
        if tuning is None:
            return self._unmeasured(bucket, space, near)
        tuning = replace(tuning, bucket=bucket)
        self.records.keep(tuning)
        return tuning

    def _start(self, bucket: Bucket, space: Space, make_measurer: MakeMeasurer, effort: Effort, near: Tuning | None) -> None:
        """Measures a bucket in a separate thread, on a copy of the arguments."""
        pending = (os.getpid(), bucket)
        if pending in self._pending:
            return
        self._pending.add(pending)
        measurer = make_measurer(True)
        used = space.usual if near is None else near.chosen

        def measure() -> None:
            try:
                tuning = self._measured(bucket, space, lambda _: measurer, effort, near, waiting=False)
                if tuning.chosen != used:
                    settings.replan()
            except Exception as error:
                # A background thread cannot raise to the caller; calls continue with their current plan.
                warnings.warn(f"{self.name} could not be tuned in the background: {error}", CacheWarning, stacklevel=1)
            finally:
                self._pending.discard(pending)

        threading.Thread(target=measure, name=f"tuning {self.name}", daemon=True).start()


def text_digest(*parts: object) -> str:
    """A digest of everything that decides which candidates there are and what they do."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]
