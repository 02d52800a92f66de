"""Kernels with tunables: the host code runs with the best known values for its arguments.

In: a kernel whose host code has registered tunables, and the arguments of a call. Out: the result of the call. Values are chosen
like plans: from a record, by measuring on copies of the arguments, or the defaults. The tunables of a kernel are known only
after it has run, so the first call uses the defaults and the second is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from serrate.frontend.kernel.tunables import Fragment
from serrate.frontend.leaves import Leaf, leaves_of, mapped
from serrate.runtime.arguments import known_variation
from serrate.schedule.target import CPU
from serrate.tensor import JaggedTensor
from serrate.tensor.hints import NO_HINTS, Hints
from serrate.tuner.buckets import Bucket, bucket_of
from serrate.tuner.candidates import HOST, Candidate, Space
from serrate.tuner.identity import compiler_identity, device_identity
from serrate.tuner.measure import agrees
from serrate.tuner.policy import Policy, paused
from serrate.tuner.record import ProgramKey, Tuning
from serrate.tuner.search import SPENT, reason_of
from serrate.tuner.tuner import ProgramTuner, text_digest

Values = Mapping[str, Any]

_values: ContextVar[Values | None] = ContextVar("serrate_tunables", default=None)

current_values = _values.get
"""The values in force, by name; None for the defaults."""


@contextmanager
def _in_force(values: Values) -> Iterator[None]:
    token = _values.set(values)
    try:
        yield
    finally:
        _values.reset(token)


@dataclass(frozen=True)
class TunableSpace(Space):
    """Values of tunables, by their number: one tunable at a time."""

    counts: tuple[tuple[str, int], ...] = ()
    """The number of values of each tunable."""

    def openings(self, hints: Hints = NO_HINTS) -> list[Candidate]:
        return [self.usual]

    def variants(self, candidate: Candidate) -> list[Candidate]:
        given = dict(candidate.lanes)
        return [
            Candidate(HOST, lanes=tuple((given | {name: k}).items()))
            for name, count in self.counts
            for k in range(count)
            if k != given[name]
        ]

    def sharings(self, candidate: Candidate, hints: Hints = NO_HINTS) -> list[Candidate]:
        return []


class TunableHost:
    """The host code of a kernel, with its tunables chosen for every call."""

    def __init__(
        self, host: Callable[..., Any], name: str, source: str, backend: str, registered: Mapping[str, Fragment], policy: Policy
    ) -> None:
        self.host, self._name, self._source, self._backend, self._policy = host, name, source, backend, policy
        self._registered = dict(registered)
        usual = tuple((n, f.values.index(f.default)) for n, f in self._registered.items())
        counts = tuple((n, len(f.values)) for n, f in self._registered.items())
        self._space = TunableSpace(Candidate(HOST, lanes=usual), CPU, counts=counts)
        self._tuners: dict[tuple[object, ...], ProgramTuner] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.chosen(args, kwargs, measure=True):
            return self.host(*args, **kwargs)

    def chosen(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, measure: bool) -> AbstractContextManager[None]:
        """Within this context, the values for these arguments are in force."""
        return _in_force(self._named(self.tuning(args, kwargs, measure=measure).chosen))

    def _named(self, candidate: Candidate) -> Values:
        return {name: self._registered[name].values[k] for name, k in candidate.lanes}

    def tuning(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, measure: bool) -> Tuning:
        """The tuning record for these arguments."""
        leaves = leaves_of(args, kwargs)
        bucket, tuner = self._bucket(leaves), self._tuner(leaves)
        if not measure or tuner.is_idle():
            return tuner.tuning(bucket, self._space)
        return tuner.tuning(bucket, self._space, lambda _: HostMeasurer(self._run, args, kwargs))

    def _run(self, candidate: Candidate, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # Device loops use their cached or usual plans, so that all values are compared under the same conditions.
        with paused(), _in_force(self._named(candidate)):
            return self.host(*args, **kwargs)

    def _bucket(self, leaves: Sequence[Leaf]) -> Bucket:
        sizes = [size for leaf in leaves for size in (leaf.values if isinstance(leaf, JaggedTensor) else leaf).shape]
        rows = next((leaf for leaf in leaves if isinstance(leaf, JaggedTensor)), None)
        if rows is None:
            return bucket_of(sizes, None)
        return bucket_of([rows.num_rows, *sizes], None, known_variation(*rows.structure.at(-1)), rows.hints)

    def _tuner(self, leaves: Sequence[Leaf]) -> ProgramTuner:
        device = next((leaf.device for leaf in leaves), torch.device("cpu"))
        values = [leaf.values if isinstance(leaf, JaggedTensor) else leaf for leaf in leaves]
        arguments = tuple(f"{str(x.dtype).removeprefix('torch.')}[{x.ndim}]" for x in values)
        at = (arguments, device, torch.get_num_threads())
        found = self._tuners.get(at)
        if found is None:
            text = text_digest(self._source, *sorted(map(str, self._registered.items())))
            key = ProgramKey(text, arguments, self._backend, device_identity(device, at[2]), compiler_identity(self._backend))
            found = self._tuners[at] = ProgramTuner(self._name, key, device, self._policy)
        return found


class HostMeasurer:
    """Runs a whole kernel on copies of the arguments of a call."""

    def __init__(self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._run = run
        self._given = self._copied(args, kwargs)
        self._done: set[Candidate] = set()
        self._wanted: list[torch.Tensor] | None = None

    @staticmethod
    def _copied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        return mapped(tuple(args), _clone), mapped(dict(kwargs), _clone)

    def now(self) -> float:
        return time.perf_counter()

    def is_built(self, candidate: Candidate) -> bool:
        return candidate in self._done

    def build(self, candidates: Sequence[Candidate], seconds: float) -> dict[Candidate, str]:
        """A first call of each, which traces and compiles; its results are compared."""
        failed: dict[Candidate, str] = {}
        end = self.now() + seconds
        for candidate in candidates:
            if self.now() >= end:
                failed[candidate] = SPENT
                continue
            args, kwargs = self._copied(*self._given)
            try:
                with _own_draws(args, kwargs):
                    result = self._run(candidate, args, kwargs)
            except Exception as error:
                # The user's code may reject a value; if it rejects the defaults, the call itself raises the same error.
                failed[candidate] = reason_of(error)
                continue
            changed = [leaf.values if isinstance(leaf, JaggedTensor) else leaf for leaf in leaves_of([result, *args], kwargs)]
            if self._wanted is None:
                self._wanted = changed
            elif len(changed) != len(self._wanted) or not all(map(agrees, changed, self._wanted)):
                failed[candidate] = "its results differ from those of the defaults by more than rounding"
            self._done.add(candidate)
        return failed

    def run(self, candidate: Candidate, repeats: int) -> float:
        seconds = float("inf")
        for _ in range(repeats):
            args, kwargs = self._copied(*self._given)
            with _own_draws(args, kwargs):
                _wait(args)
                start = time.perf_counter()
                self._run(candidate, args, kwargs)
                _wait(args)
                seconds = min(seconds, time.perf_counter() - start)
        return seconds


def _clone(leaf: Leaf) -> Leaf:
    return leaf.with_values(leaf.values.detach().clone()) if isinstance(leaf, JaggedTensor) else leaf.detach().clone()


def _own_draws(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Within this context, random draws leave torch's generators as they were: every run draws the same numbers, and the program
    draws the same ones later whether or not anything was measured."""
    devices = {leaf.device for leaf in leaves_of(args, kwargs) if leaf.device.type == "cuda"}
    return torch.random.fork_rng(sorted({d.index for d in devices}))


def _wait(args: Sequence[Any]) -> None:
    """Waits until a GPU has done its work."""
    if any(leaf.device.type == "cuda" for leaf in leaves_of(args, {})):
        torch.cuda.synchronize()
