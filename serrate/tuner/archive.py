"""Archives of tuned plans, to ship with a model: results of one machine are reused on others like it.

In: a cache folder. Out: one zip file with the records of the tuner, and with compiled programs if asked; and back. A record is
used only by programs, devices and compilers that it was measured for, so that an archive does no harm where it does not apply.

    manifest.json                     the format, and for every other file its digest and when it was written
    tuned/<program>/<bucket>.json     records
    programs/<digest>/<file>          compiled programs

An archive is checked as a whole before anything is written. Digests detect damage, not malice: compiled programs are machine
code, and are imported only on request. Valid local entries are replaced only by newer ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from serrate.errors import CacheError, CompilerMissing
from serrate.runtime import cache_folder
from serrate.tuner.identity import compiler_identity
from serrate.tuner.record import FOLDER, Tuning, file_name, unpacked

FORMAT = 1
MANIFEST = "manifest.json"
LARGEST = 1 << 28
"""The most bytes of one file of an archive."""
_RECORD = re.compile(rf"{FOLDER}/[0-9a-f]{{32}}/[0-9a-f]{{16}}\.json")
_PROGRAM = re.compile(rf"{cache_folder.PROGRAMS}/[0-9a-f]{{32}}/program\.(cpp|so|py)")


@dataclass(frozen=True)
class Exported:
    """The contents of a new archive."""

    records: int
    programs: int
    unsound: tuple[str, ...]
    """Entries that were skipped because they are damaged."""


@dataclass(frozen=True)
class Imported:
    """The outcome of an import, by kind of entry."""

    added: int
    replaced: int
    """Records that were older here, or damaged."""
    same: int
    kept: tuple[str, ...]
    """Records that are newer here, and were not replaced: the names of their programs."""
    elsewhere: int
    """Records for another version of serrate, torch or a compiler, which are not used here."""
    programs: int
    skipped: int
    """Compiled programs that were not asked for."""


def records(folder: Path) -> Iterator[tuple[Path, Tuning | None]]:
    """The records in a cache folder; None for those that are damaged or foreign."""
    for path in sorted((folder / FOLDER).glob("*/*.json")):
        yield path, _sound(path)


def _sound(path: Path) -> Tuning | None:
    try:
        found = unpacked(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if (path.parent.name, path.name) == (found.key.digest, file_name(found.bucket)) else None


def export_archive(folder: Path, archive: Path, *, programs: bool = False) -> Exported:
    """Writes the records of a cache folder to an archive, and its compiled programs if asked."""
    contents: dict[str, tuple[bytes, float]] = {}
    unsound: list[str] = []
    for path, found in records(folder):
        if found is None:
            unsound.append(str(path))
        else:
            contents[path.relative_to(folder).as_posix()] = path.read_bytes(), path.stat().st_mtime
    kept = len(contents)
    entries = sorted((folder / cache_folder.PROGRAMS).glob("[0-9a-f]*")) if programs else []
    for entry in (path for path in entries if re.fullmatch(r"[0-9a-f]{32}", path.name)):
        try:
            files = cache_folder.get(entry.parent, entry.name) or {}
        except cache_folder.Unsound as reason:
            unsound.append(f"{entry} {reason}")
            continue
        written = entry.stat().st_mtime
        contents |= {f"{cache_folder.PROGRAMS}/{entry.name}/{name}": (data, written) for name, data in files.items()}
    files_ = {name: {"sha256": hashlib.sha256(data).hexdigest(), "written": when} for name, (data, when) in contents.items()}
    _write(
        archive,
        {MANIFEST: json.dumps({"format": FORMAT, "files": files_}, indent=1).encode()} | {n: d for n, (d, _) in contents.items()},
    )
    count = len({PurePosixPath(name).parent for name in contents if _PROGRAM.fullmatch(name)})
    return Exported(kept, count, tuple(unsound))


def _write(archive: Path, contents: dict[str, bytes]) -> None:
    """Writes the archive to a temporary file, and renames it."""
    try:
        handle, temporary = tempfile.mkstemp(dir=archive.absolute().parent, prefix=f"{archive.name}.")
    except OSError as error:
        raise CacheError(f"{archive} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
            for name, data in contents.items():
                # A fixed date: equal contents make equal archives.
                made.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
        os.replace(temporary, archive)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def import_archive(folder: Path, archive: Path, *, programs: bool = False, replace: bool = False) -> Imported:
    """Adds the records of an archive to a cache folder, and its compiled programs if asked. With `replace`, records that are
    newer here are replaced too."""
    contents = _read(archive)
    added = replaced = same = elsewhere = 0
    kept: list[str] = []
    cache_folder.make_private(folder / FOLDER)
    cache_folder.check_private(folder / FOLDER)
    built: dict[str, dict[str, bytes]] = {}
    for name, (data, written) in contents.items():
        if _PROGRAM.fullmatch(name):
            _, digest, file = PurePosixPath(name).parts
            built.setdefault(digest, {})[file] = data
            continue
        record, path = unpacked(data), folder / name
        elsewhere += not _is_for_here(record)
        there = _sound(path) if path.exists() else None
        if there is not None and path.read_bytes() == data:
            same += 1
        elif there is not None and path.stat().st_mtime >= written and not replace:
            kept.append(record.program)
        else:
            added, replaced = (added, replaced + 1) if path.exists() else (added + 1, replaced)
            _put(path, data, written)
    count = 0
    if programs and built:
        home = folder / cache_folder.PROGRAMS
        cache_folder.make_private(home)
        cache_folder.check_private(home)
        for digest, files in built.items():
            count += _put_program(home, digest, files)
    return Imported(added, replaced, same, tuple(kept), elsewhere, count, 0 if programs else len(built))


def _is_for_here(record: Tuning) -> bool:
    """Whether a record is for the versions that are installed here."""
    try:
        return record.key.compiler == compiler_identity(record.key.backend)
    except CompilerMissing:
        return False


def _put(path: Path, data: bytes, written: float) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix="writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.utime(temporary, (written, written))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _put_program(home: Path, digest: str, files: dict[str, bytes]) -> bool:
    """Adds a compiled program, unless there is a sound one."""
    with cache_folder.locked(home, [digest]):
        try:
            if cache_folder.get(home, digest) is not None:
                return False
        except cache_folder.Unsound as reason:
            cache_folder.report(home, digest, reason)
        cache_folder.put(home, digest, dict(files))
    return True


def _read(archive: Path) -> dict[str, tuple[bytes, float]]:
    """The files of an archive with the times when they were written; raises unless all of it is sound."""
    try:
        with zipfile.ZipFile(archive) as opened:
            manifest = json.loads(opened.read(MANIFEST))
            if manifest["format"] != FORMAT:
                raise CacheError(f"{archive} has format {manifest['format']}; this version of serrate reads format {FORMAT}")
            names = [name for name in opened.namelist() if name != MANIFEST]
            listed: dict[str, dict[str, Any]] = manifest["files"]
            if sorted(names) != sorted(listed):
                raise CacheError(f"{archive} does not hold the files that it lists; export it again")
            found = {}
            for name in names:
                if opened.getinfo(name).file_size > LARGEST:
                    raise CacheError(f"{archive}: {name} is larger than {LARGEST >> 20} MiB")
                found[name] = opened.read(name), float(listed[name]["written"])
                if hashlib.sha256(found[name][0]).hexdigest() != listed[name]["sha256"]:
                    raise CacheError(f"{archive}: {name} is damaged; export it again")
    except OSError as error:
        raise CacheError(f"{archive} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zipfile.LargeZipFile, KeyError, TypeError, ValueError, EOFError) as error:
        raise CacheError(f"{archive} is not an archive of `serrate cache export`, or it is damaged: {error}") from error
    for name, (data, _) in found.items():
        if not _PROGRAM.fullmatch(name):
            _require_record(archive, name, data)
    return found


def _require_record(archive: Path, name: str, data: bytes) -> None:
    try:
        record = unpacked(data)
    except ValueError as error:
        raise CacheError(f"{archive}: {name} is damaged ({error}); export it again") from error
    if not _RECORD.fullmatch(name) or name != f"{FOLDER}/{record.key.digest}/{file_name(record.bucket)}":
        raise CacheError(f"{archive}: {name} is not where its record belongs; export it again")
