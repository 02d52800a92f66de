"""Records: what was measured for which calls, as data; kept in memory and on disk.

In: a key and the result of a search. Out: `Tuning` records, found again by this process and by others. A record is one JSON file,
`tuned/<program>/<bucket>.json` in the cache folder, written to a temporary file and renamed. It contains its whole key and a
digest. A record that is damaged, or that belongs to another key, is reported and measured again, never trusted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from serrate import settings
from serrate.errors import CacheError, CacheWarning
from serrate.runtime import cache_folder
from serrate.runtime.locks import Lock
from serrate.tuner.buckets import Bucket, bucket_from
from serrate.tuner.candidates import Candidate, candidate_of
from serrate.tuner.search import Tried

FOLDER = "tuned"
"""The subfolder of the cache folder with one folder per program."""
SIMILAR = 5
"""The most doublings by which the sizes of two calls may differ, on average, if one is to use the plan of the other."""
FORMAT = 1
"""Part of every key: records of another format are not read."""


@dataclass(frozen=True)
class ProgramKey:
    """Identifies the records of one program."""

    text: str
    """A digest of the program before it is scheduled, with the sizes that are compiled in, and of what the user fixed."""
    arguments: tuple[str, ...]
    """Dtypes and ranks of the tensors."""
    backend: str
    device: str
    """The processor, and how many threads it runs: another one may prefer another plan."""
    compiler: str
    """The versions of serrate, torch and the C++ compiler or Triton: other code may have other times."""
    format: int = FORMAT

    @functools.cached_property
    def digest(self) -> str:
        return _digest(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "arguments": list(self.arguments)}


@dataclass(frozen=True)
class Tuning:
    """The result of tuning a program for one bucket of calls."""

    program: str
    """The name of the program."""
    key: ProgramKey
    bucket: Bucket
    chosen: Candidate
    tried: tuple[Tried, ...] = ()
    """In the order in which they were considered; the first is the choice that is made without measuring."""
    spent: float = 0.0
    """Seconds that the search took, builds included."""
    effort: str = "none"
    source: str = "usual"
    """Where the choice comes from: "measured" by this process, "remembered" from another, "rank 0", "nearest" if it was measured
    for another bucket, or "usual": chosen without measuring."""

    @property
    def gain(self) -> float | None:
        """How many times as fast the chosen plan is as the usual one; None if they were not both timed."""
        times = {each.candidate: each.seconds for each in self.tried}
        usual, chosen = (times.get(self.tried[0].candidate), times.get(self.chosen)) if self.tried else (None, None)
        return None if usual is None or not chosen else usual / chosen

    def as_dict(self) -> dict[str, Any]:
        """As JSON, with the time of every candidate and the reasons why some have none."""
        return {
            "program": self.program,
            "key": self.key.as_dict(),
            "bucket": self.bucket.as_dict(),
            "chosen": self.chosen.as_dict(),
            "tried": [{**asdict(each), "candidate": each.candidate.as_dict()} for each in self.tried],
            "spent": self.spent,
            "effort": self.effort,
        }


def tuning_from(given: Mapping[str, Any], source: str) -> Tuning:
    """A record from JSON; raises an error of Python's own if it is not one."""
    key = given["key"]
    tried = [Tried(candidate_of(t["candidate"]), t["seconds"], int(t["samples"]), str(t["reason"])) for t in given["tried"]]
    return Tuning(
        str(given["program"]),
        ProgramKey(**{**key, "arguments": tuple(key["arguments"])}),
        bucket_from(given["bucket"]),
        candidate_of(given["chosen"]),
        tuple(tried),
        float(given["spent"]),
        str(given["effort"]),
        source,
    )


def _digest(value: object) -> str:
    return _text_digest(json.dumps(value, sort_keys=True))


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def packed(tuning: Tuning) -> bytes:
    """The bytes of a record's file."""
    body = json.dumps(tuning.as_dict(), sort_keys=True)
    return f'{{"digest": "{_text_digest(body)}", "tuning": {body}}}'.encode()


def unpacked(content: bytes, source: str = "remembered") -> Tuning:
    """A record from the bytes of its file; raises ValueError if they are not what was written."""
    try:
        whole = json.loads(content)
        body, wanted = whole["tuning"], whole["digest"]
        if _digest(body) != wanted:
            raise ValueError("its digest does not match")
        return tuning_from(body, source)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a record of the tuner: {error}") from error


def file_name(bucket: Bucket) -> str:
    """The name of the file of a bucket's record."""
    return f"{_digest(bucket.as_dict())[:16]}.json"


class Records:
    """The records of one program."""

    def __init__(self, key: ProgramKey, folder: Path) -> None:
        self.key, self.place = key, folder
        self.folder = folder / FOLDER / key.digest
        self.gone = False
        self.known: dict[Bucket, Tuning] = {}
        """Replaced and never changed: threads that tune in the background add to it."""
        self._reported: set[Path] = set()
        self._read: dict[Path, int] = {}
        """The modification times of the files that were read."""
        self.load()

    def load(self) -> None:
        """Reads records that other processes have written since the last call."""
        if not self.folder.is_dir():
            return
        try:
            cache_folder.check_private(self.folder)
        except CacheError as error:
            self._report(self.folder, str(error))
            return
        read: dict[Bucket, Tuning] = {}
        for path in sorted(self.folder.glob("*.json")):
            try:
                written = path.stat().st_mtime_ns
                if self._read.get(path) == written:
                    continue
                self._read[path] = written
                found = unpacked(path.read_bytes())
            except (OSError, ValueError) as error:
                self._report(path, str(error))
                continue
            if found.key != self.key or path.name != file_name(found.bucket):
                self._report(path, "it belongs to another program, device or compiler")
            else:
                read[found.bucket] = found
        with _guard:
            self.known = read | self.known

    def _report(self, path: Path, why: str) -> None:
        if path not in self._reported:
            self._reported.add(path)
            warnings.warn(f"{path} is not used ({why}); the program is measured again", CacheWarning, stacklevel=2)

    def nearest(self, bucket: Bucket) -> Tuning | None:
        """The record of the bucket that is most like this one, unless even that is too different to say anything about it."""
        known = list(self.known.values())
        near = [(bucket.distance(each.bucket), k) for k, each in enumerate(known)]
        distance, at = min(near, default=(float("inf"), 0))
        return known[at] if distance <= SIMILAR * max(len(bucket.sizes), 1) else None

    def keep(self, tuning: Tuning) -> None:
        """Keeps a record in memory."""
        with _guard:
            self.known = {**self.known, tuning.bucket: tuning}

    def put(self, tuning: Tuning) -> None:
        """Keeps a record, on disk too if the folder can be written."""
        self.keep(tuning)
        try:
            self._make_folder()
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix="writing-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(packed(tuning))
                os.replace(temporary, self.folder / file_name(tuning.bucket))
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except (OSError, CacheError) as error:
            self._report(self.folder, f"{error}: records are kept only until this process ends")

    def _make_folder(self) -> None:
        cache_folder.make_private(self.folder.parent)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        cache_folder.check_private(self.folder)

    @contextlib.contextmanager
    def measuring(self, bucket: Bucket, patience: float) -> Iterator[bool]:
        """Locks a bucket while it is measured; yields False if another process still holds the lock after `patience` seconds. On
        entry, reads the records of other processes."""
        try:
            self._make_folder()
            lock = FileLock((self.folder / file_name(bucket)).with_suffix(".lock"))
            lock.acquire(timeout=patience)
        except Timeout:
            yield False
            return
        except (OSError, CacheError, NotImplementedError):
            yield True  # no folder, or a file system without locks: nothing to wait for
            return
        try:
            self.load()
            yield True
        finally:
            lock.release()


_records: dict[tuple[ProgramKey, Path], Records] = {}
_guard = Lock()


def records_of(key: ProgramKey) -> Records:
    """The records of a program, shared by everything in this process that runs it."""
    at = (key, settings.current().cache_dir)
    with _guard:
        found = _records.get(at)
        if found is None:
            found = _records[at] = Records(key, at[1])
    return found


def is_current(found: Records) -> bool:
    """Whether these are still the records of their program: the cache folder is the same, and nothing was forgotten."""
    return not found.gone and found.place == settings.current().cache_dir


def forget() -> None:
    """Forgets what this process knows; records on disk are read again."""
    with _guard:
        for each in _records.values():
            each.gone = True
        _records.clear()
