"""The cache folder: its permissions, its entries, the fallback if it cannot be used, and cleaning up.

In: the settings in force. Out: folders to search, a folder to write to, and entries in it that are written atomically and checked
when they are read.

Anyone who can write to this folder can run code as its owner, so a folder that others can write to is an error, as with ssh keys.
Permissions guard against people, digests against damage: an entry lists the digests of its files, and one that does not match is
reported and made again. A folder that cannot be used (read-only, full, not a folder) is reported, and programs are built in a
temporary folder that is removed when the process ends.

Processes agree through locks in the folder, which the kernel releases when a process is killed. The files of locks are never
deleted while another process could wait for them: it would then hold a lock that nobody else can see.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from serrate import settings
from serrate.errors import CacheError, CacheWarning

PROGRAMS = "programs"
"""The subfolder of the cache folder with one folder per compiled program."""

BUILDING, FAILED, REMOVING = "building-", "failed-", ".removing"
"""The prefixes of folders of builds in progress and of failed builds, and the suffix of entries being deleted."""

MANIFEST = "manifest.json"
"""The file of an entry with the entry's name and the digests of its other files."""

LOCKS = "locks"
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
    for parent in dict.fromkeys((*path.parents, *path.resolve().parents)):
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


class Unsound(Exception):
    """An entry is damaged, or is not what its name says. The message is the reason."""


def put(folder: Path, name: str, files: Mapping[str, bytes | Path]) -> None:
    """Creates the entry `name` atomically; contents given as a path are linked, or copied if links do not work.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     put(Path(folder), "0123", {"a": b"text"})
    ...     get(Path(folder), "0123")
    {'a': b'text'}
    """
    with building(folder) as work:
        entry = work / name
        entry.mkdir()
        digests = {}
        for file, content in files.items():
            if isinstance(content, bytes):
                (entry / file).write_bytes(content)
            else:
                try:
                    os.link(content, entry / file)
                except OSError:
                    shutil.copyfile(content, entry / file)
                content = content.read_bytes()
            digests[file] = hashlib.sha256(content).hexdigest()
        (entry / MANIFEST).write_text(json.dumps({"entry": name, "files": digests}))
        try:
            os.rename(entry, folder / name)
        except OSError:
            # Another process created the same entry first. Names are digests of the inputs, so the entries are equivalent.
            if not (folder / name).is_dir():
                raise


def get(folder: Path, name: str) -> dict[str, bytes] | None:
    """The files of an entry, each compared with its digest; None if there is no such entry. Raises `Unsound` if one does not
    match."""
    entry = folder / name
    try:
        if not stat.S_ISDIR(entry.lstat().st_mode):
            raise Unsound("is not a folder")
        manifest = json.loads((entry / MANIFEST).read_bytes())
        found = {file: (entry / file).read_bytes() for file in manifest["files"] if Path(file).name == file}
        if manifest["entry"] != name:
            raise Unsound(f"is a copy of {manifest['entry']}")
        for file, wanted in manifest["files"].items():
            if file not in found or hashlib.sha256(found[file]).hexdigest() != wanted:
                raise Unsound(f"has a damaged {file}")
    except FileNotFoundError as error:
        # Either it never existed or another process has just removed it.
        if not os.path.lexists(entry):
            return None
        raise Unsound(f"is incomplete: {Path(error.filename).name} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unsound(f"has a damaged {MANIFEST}") from error
    return found


def report(folder: Path, name: str, reason: Unsound) -> None:
    """Warns of an unsound entry and removes it, so that it is made again. The caller holds its lock."""
    warnings.warn(f"{folder / name} {reason}; it is not used, and built again", CacheWarning, stacklevel=2)
    try:
        discard(folder / name)
    except FileNotFoundError:
        return


@contextmanager
def locked(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """Holds the locks of some entries, so that processes and threads that need the same entry wait for one that makes it.

    Entries share 256 locks, taken in order, so that no two processes wait for each other.
    """
    (folder / LOCKS).mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        for part in sorted({name[:2] for name in names}):
            stack.enter_context(FileLock(folder / LOCKS / f"{part}.lock"))
        yield


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """A folder to build in, removed afterwards. While its lock is held, it is not a leftover."""
    lock = None
    while lock is None:
        work = Path(tempfile.mkdtemp(dir=folder, prefix=BUILDING))
        lock = _taken(work)
    try:
        yield work
    finally:
        lock.release()
        shutil.rmtree(work, ignore_errors=True)


def _taken(work: Path) -> FileLock | None:
    """The lock of the folder of a build; None if another process has removed the folder, which it may take for abandoned between
    the creation of the lock's file and the lock."""
    lock = FileLock(work / _BUILD_LOCK)
    try:
        lock.acquire()
    except FileNotFoundError:
        return None
    if (work / _BUILD_LOCK).exists():
        return lock
    lock.release()
    return None


def leftovers(folder: Path, failed_for: float = 0.0) -> list[Path]:
    """Leftovers of interrupted processes: builds that nobody works on, and sources that failed `failed_for` seconds ago."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink():
            continue  # serrate creates no links
        if path.name.startswith(BUILDING):
            with _abandoned(path) as abandoned:
                pass
        elif path.name.startswith(FAILED):
            abandoned = _age(path) >= failed_for
        else:
            abandoned = path.suffix == REMOVING
        if abandoned:
            found.append(path)
    return found


def discard(path: Path) -> None:
    """Deletes a file or folder atomically, as seen from other processes; not a build that another process works on."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
        return
    if path.name.startswith(BUILDING) and path.suffix != REMOVING:
        with _abandoned(path) as abandoned:
            if not abandoned:
                return
            path = _set_aside(path)
    elif path.suffix != REMOVING:
        path = _set_aside(path)
    shutil.rmtree(path)


def _set_aside(path: Path) -> Path:
    return path.rename(path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}{REMOVING}"))


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


@contextmanager
def _abandoned(work: Path) -> Iterator[bool]:
    """Whether no process is using the folder of a build; if so, it stays locked until the end of the `with` statement."""
    # Taking the lock would create the file; a build whose lock does not exist yet has only just begun.
    if not (work / _BUILD_LOCK).exists():
        yield _age(work) > 60
        return
    lock = FileLock(work / _BUILD_LOCK)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
