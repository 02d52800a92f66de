"""Every environment variable serrate reads, with its type, default and whether it changes generated code.

In: the process environment. Out: `current()`, a frozen record read once at import (`reload` reads it again).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from serrate import logs
from serrate.errors import SettingError, choices

LOGS = (*logs.LEVELS, *logs.TOPICS)
BACKENDS = ("reference", "cpp", "triton")
TUNE = ("first_call", "background", "never")
EFFORTS = ("none", "quick", "full")


@dataclass(frozen=True)
class Settings:
    """The settings in force.

    >>> from serrate.settings import current
    >>> current().cache_dir.is_absolute()
    True
    """

    cache_dir: Path
    """`SERRATE_CACHE_DIR`: the directory for compiled programs. Does not change generated code."""

    log: frozenset[str]
    """`SERRATE_LOG`: a comma-separated list of what to log: a level (`debug`, `info`, `warning`, `error`) or topics (`plan`,
    `passes`, `source`, `tune`, `cache`). Does not change generated code."""

    backend: str | None
    """`SERRATE_BACKEND`: `reference`, `cpp` or `triton`, overriding the device's default. Chooses which code is generated."""

    check: bool
    """`SERRATE_CHECK`: 1: tile kernels report racing stores and indices out of bounds. Does not change generated code."""

    cxx: str | None
    """`CXX`: the C++ compiler; by default g++, then clang++. Part of the cache key."""

    tune: str = "first_call"
    """`SERRATE_TUNE`: when programs without a `tune=` argument are tuned: `first_call`, `background` or `never`. Affects which
    code is generated."""

    effort: str = "quick"
    """`SERRATE_EFFORT`: how long they are tuned: `none`, `quick` or `full`. Chooses which code is generated."""

    plans: object = field(default_factory=object, compare=False, repr=False)
    """Part of the key of every binding: replaced when the backend changes, and when tuning replaces a plan that is in use."""


def _read() -> Settings:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = os.environ.get("SERRATE_CACHE_DIR") or str(Path(home) / "serrate")
    log = frozenset(filter(None, (name.strip().lower() for name in os.environ.get("SERRATE_LOG", "").split(","))))
    for name in sorted(log.difference(LOGS)):
        raise SettingError(f"SERRATE_LOG={name} is not a level or topic: {choices(name, LOGS)}")
    backend = os.environ.get("SERRATE_BACKEND") or None
    if backend is not None and backend not in BACKENDS:
        raise SettingError(f"SERRATE_BACKEND={backend} is not a backend: {choices(backend, BACKENDS)}")
    tune, effort = os.environ.get("SERRATE_TUNE") or TUNE[0], os.environ.get("SERRATE_EFFORT") or "quick"
    if tune not in TUNE:
        raise SettingError(f"SERRATE_TUNE={tune}: {choices(tune, TUNE)}")
    if effort not in EFFORTS:
        raise SettingError(f"SERRATE_EFFORT={effort}: {choices(effort, EFFORTS)}")
    check = os.environ.get("SERRATE_CHECK") or "0"
    if check not in ("0", "1"):
        raise SettingError(f"SERRATE_CHECK must be 0 or 1, got {check}")
    return Settings(
        cache_dir=Path(folder).expanduser().absolute(),
        log=log,
        backend=backend,
        check=check == "1",
        cxx=os.environ.get("CXX") or None,
        tune=tune,
        effort=effort,
    )


_current = _read()
logs.configure(_current.log)


def current() -> Settings:
    """The settings read from the environment at import or at the last `reload`."""
    return _current


def reload() -> Settings:
    """Reads the environment again; for tests, and for programs that set variables after importing serrate."""
    global _current
    new = _read()
    # Tests read the environment often, and bindings depend on the backend alone.
    _current = replace(new, plans=_current.plans) if new.backend == _current.backend else new
    logs.configure(_current.log)
    return _current


def replan() -> None:
    """Makes calls look for their plans again: bindings that hold other ones are no longer found."""
    global _current
    _current = replace(_current, plans=object())
