"""The folder of compiled programs: its permissions, the fallback if it cannot be used, and cleaning up.

In: the settings in force. Out: folders to search, a folder to write to, and atomic entries in it.

Anyone who can write to this folder can run code as its owner, so a folder that others can write to is an error, as with ssh keys.
A folder that cannot be used (read-only, full, not a folder) is reported, and programs are built in a temporary folder that is
removed when the process ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from serrate import settings
from serrate.errors import CacheError, CacheWarning

PROGRAMS = "programs"
"""The subfolder of the cache folder with one folder per compiled program."""

BUILDING, FAILED, REMOVING = "building-", "failed-", ".removing"
"""Prefixes of folders of builds in progress, of failed builds, and of entries being deleted."""

_BUILD_LOCK = "in-use.lock"
_KEEP_FAILED = 24 * 3600
_guard = threading.Lock()
_temporary: dict[int, Path] = {}
_swept: set[Path] = set()


def places() -> list[Path]:
    """The folders that may hold entries: the user's own, and the temporary one of this process if it was needed."""
    own = settings.current().cache_dir / PROGRAMS
    found = [own] if own.is_dir() else []
    for path in found:
        check_private(path)
    temporary = _temporary.get(os.getpid())
    return found if temporary is None else [*found, temporary]


def check_private(path: Path) -> None:
    """Raises if a folder belongs to another user, or if another user can create or replace files in it."""
    status = path.stat()
    if status.st_uid != os.getuid():
        raise CacheError(f"{path} belongs to another user (uid {status.st_uid}); name a folder of your own in SERRATE_CACHE_DIR")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}), who could put programs there that "
            f"you would run; check what it holds, then `chmod go-w {path}`, or name another folder in SERRATE_CACHE_DIR"
        )
    for parent in path.parents:
        mode = parent.stat().st_mode
        # In a sticky folder such as /tmp only the owner of an entry can rename it.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise CacheError(
                f"{parent} can be written by everybody (mode {stat.S_IMODE(mode):04o}), who could exchange {path}; "
                f"`chmod o-w {parent}`, or name another folder in SERRATE_CACHE_DIR"
            )


def make_private(folder: Path) -> None:
    """Creates the folder and the cache folder above it, private from the start."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)


def write(use: Callable[[Path], None]) -> None:
    """Calls `use` with the folder to write to; if the disk fails, with a temporary one instead."""
    folder = settings.current().cache_dir / PROGRAMS
    try:
        make_private(folder)
        check_private(folder)
        _sweep_once(folder)
        use(folder)
    except OSError as error:
        message = (
            f"{folder} cannot be used ({error.strerror or error}); programs built now are kept only until this process ends. "
            "Name a folder that you can write to in SERRATE_CACHE_DIR"
        )
        warnings.warn(message, CacheWarning, stacklevel=2)
        try:
            use(_temporary_folder())
        except OSError as second:
            raise CacheError(
                f"neither {folder} ({error.strerror or error}) nor a temporary folder in {tempfile.gettempdir()} "
                f"({second.strerror or second}) can hold a built program; free some space, or name another folder in "
                "SERRATE_CACHE_DIR or TMPDIR"
            ) from second


def put(folder: Path, name: str, files: Mapping[str, bytes | Path]) -> None:
    """Creates the entry `name` atomically; contents given as a path are linked, or copied if links do not work.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     put(Path(folder), "0123", {"a": b"text"})
    ...     (Path(folder) / "0123" / "a").read_text()
    'text'
    """
    with building(folder) as work:
        entry = work / name
        entry.mkdir()
        for file, content in files.items():
            if isinstance(content, bytes):
                (entry / file).write_bytes(content)
                continue
            try:
                os.link(content, entry / file)
            except OSError:
                shutil.copyfile(content, entry / file)
        try:
            os.rename(entry, folder / name)
        except OSError:
            # Another process created the same entry first. Names are digests of the inputs, so the entries are equivalent.
            if not (folder / name).is_dir():
                raise


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A folder to build in, removed afterwards. While its lock is held, `leftovers` does not list it."""
    work = Path(tempfile.mkdtemp(dir=folder, prefix=BUILDING))
    try:
        with FileLock(work / _BUILD_LOCK):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def leftovers(folder: Path, failed_for: float = 0.0) -> list[Path]:
    """Leftovers of interrupted processes: builds and locks that nobody holds, and sources that failed `failed_for` seconds
    ago."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink():
            continue  # serrate creates no links
        if path.name.startswith(BUILDING):
            abandoned = _is_free(path / _BUILD_LOCK)
        elif path.suffix == ".lock":
            abandoned = _is_free(path)
        elif path.name.startswith(FAILED):
            abandoned = _age(path) >= failed_for
        else:
            abandoned = path.suffix == REMOVING
        if abandoned:
            found.append(path)
    return found


def discard(path: Path) -> None:
    """Deletes a file or folder atomically, as seen from other processes."""
    if path.is_file():
        path.unlink(missing_ok=True)
        return
    if path.suffix != REMOVING:
        doomed = path.with_name(path.name + REMOVING)
        shutil.rmtree(doomed, ignore_errors=True)
        path = path.rename(doomed)
    shutil.rmtree(path)


def _temporary_folder() -> Path:
    with _guard:
        mine = _temporary.get(os.getpid())
        if mine is None or not mine.is_dir():
            mine = Path(tempfile.mkdtemp(prefix="serrate-"))
            _temporary[os.getpid()] = mine
            atexit.register(_remove, mine, os.getpid())
        return mine


def _remove(path: Path, owner: int) -> None:
    # A forked child runs its parent's exit functions too.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _sweep_once(folder: Path) -> None:
    if folder in _swept:
        return
    _swept.add(folder)
    for path in leftovers(folder, _KEEP_FAILED):
        try:
            discard(path)
        except FileNotFoundError:
            continue


def _is_free(lock: Path) -> bool:
    # Taking the lock would create the file; a build whose lock does not exist yet has only just begun.
    if not lock.exists():
        return _age(lock.parent) > 60
    try:
        with FileLock(lock, timeout=0):
            return True
    except (Timeout, OSError):
        return False


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
