"""`serrate cache info|clear|export|import`: show and empty the cache folder, and move tuned plans between machines.

In: the current cache folder. Out: a summary, the folder without its compiled programs and tuned plans, an archive of them, or the
folder with those of an archive. Only files that serrate creates are counted and removed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from serrate import settings
from serrate.errors import CacheError
from serrate.runtime import cache_folder
from serrate.tuner import archive
from serrate.tuner.record import FOLDER

_ENTRY_NAME = re.compile(r"[0-9a-f]{16,64}")


@dataclass(frozen=True)
class CacheEntry:
    """One compiled program in the cache: its folder, the number and size of its files, and the time of the last write."""

    path: Path
    files: int
    bytes: int
    modified: float


def entries(cache_dir: Path) -> list[CacheEntry]:
    """The compiled programs under `cache_dir`, oldest first; empty if the folder does not exist.

    >>> entries(Path("/nonexistent"))
    []
    """
    found = (_measure(path) for path in _children(cache_dir / cache_folder.PROGRAMS) if _is_entry(path))
    return sorted((entry for entry in found if entry is not None), key=lambda entry: (entry.modified, entry.path.name))


def remove(path: Path) -> None:
    """Deletes an entry or a leftover.

    Other processes see a program whole or not at all. A loaded program keeps running: its file survives until it is closed.
    """
    try:
        cache_folder.discard(path)
    except FileNotFoundError:
        # Another process removed it in the meantime, which is fine.
        return
    except OSError as error:
        raise CacheError(f"cannot remove {path}: {error.strerror}; check who owns the cache folder") from error


def plans(cache_dir: Path) -> list[Path]:
    """The files of tuned plans under `cache_dir`, with those that interrupted writes left."""
    folders = [path for path in _children(cache_dir / FOLDER) if _is_entry(path)]
    return sorted(
        path for folder in folders for path in _children(folder) if path.suffix == ".json" or path.name.startswith("writing-")
    )


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CacheError(f"cannot read {folder}: {error.strerror}; point SERRATE_CACHE_DIR at a folder you own") from error


def _is_entry(path: Path) -> bool:
    # A link could lead out of the cache folder, and serrate never creates one.
    return _ENTRY_NAME.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def _measure(path: Path) -> CacheEntry | None:
    """The entry at `path`, or None if another process has removed it."""
    try:
        stats = [os.lstat(file) for file in _files(path)]
        modified = max((stat.st_mtime for stat in stats), default=path.stat().st_mtime)
    except FileNotFoundError:
        return None
    return CacheEntry(path, len(stats), sum(stat.st_size for stat in stats), modified)


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names)


def format_bytes(count: int) -> str:
    """A human-readable byte count.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def format_age(seconds: float) -> str:
    """A time span in its largest whole unit.

    >>> format_age(7300)
    '2 hours'
    """
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "under a minute"


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


app = typer.Typer(help="Show, empty, export or import the cache of compiled programs and tuned plans.", no_args_is_help=True)


@app.command()
def info() -> None:
    """Show where compiled programs and tuned plans are kept, their number, size and age."""
    folder = settings.current().cache_dir
    held = entries(folder)
    now = time.time()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("programs", str(len(held)))
    tuned = [found for _, found in archive.records(folder)]
    table.add_row("plans", str(len(tuned)))
    if damaged := sum(map(_is_damaged, held)) + tuned.count(None):
        table.add_row("damaged", f"{damaged}; they are rebuilt when needed")
    table.add_row("files", str(sum(entry.files for entry in held)))
    table.add_row("size", format_bytes(sum(entry.bytes for entry in held)))
    if left := _leftovers(folder):
        table.add_row("leftovers", str(len(left)))
    if held:
        table.add_row("oldest", format_age(now - held[0].modified))
        table.add_row("newest", format_age(now - held[-1].modified))
    # The path is printed outside the table, which would truncate it to the width of the terminal.
    typer.echo(f"cache folder: {folder}" + ("" if folder.exists() else " (not created yet)"))
    Console().print(table)


@app.command()
def clear(yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Delete every compiled program and tuned plan; they are rebuilt when needed."""
    folder = settings.current().cache_dir
    held, tuned, left = entries(folder), plans(folder), _leftovers(folder)
    if not held and not tuned and not left:
        typer.echo(f"nothing to clear in {folder}")
        return
    what = f"{_counted(len(held), 'program')} ({format_bytes(sum(entry.bytes for entry in held))})"
    if tuned:
        what += f", {_counted(len(tuned), 'tuned plan')}"
    if left:
        what += f" and {len(left)} leftover{'' if len(left) == 1 else 's'} of interrupted or failed compilations"
    if not yes:
        typer.confirm(f"Delete {what} from {folder}?", abort=True)
    for path in (*(entry.path for entry in held), *tuned, *left):
        remove(path)
    typer.echo(f"deleted {what} from {folder}")


Programs = Annotated[bool, typer.Option("--programs", help="Compiled programs too. They are machine code for this kind of CPU.")]


@app.command("export")
def export_(path: Annotated[Path, typer.Argument(help="The archive to write.")], programs: Programs = False) -> None:
    """Write tuned plans to one archive, to ship with a model."""
    folder = settings.current().cache_dir
    done = archive.export_archive(folder, path, programs=programs)
    for name in done.unsound:
        typer.echo(f"left out: {name} is damaged", err=True)
    more = f" and {_counted(done.programs, 'compiled program')}" if programs else ""
    typer.echo(f"wrote {_counted(done.records, 'tuned plan')}{more} from {folder} to {path}")


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="An archive of `serrate cache export`.")],
    programs: Programs = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace plans here even if they are newer.")] = False,
) -> None:
    """Add the tuned plans of an archive. The archive is checked first; plans here that are newer stay.

    Compiled programs run as you do: take them only from people you trust.
    """
    folder = settings.current().cache_dir
    done = archive.import_archive(folder, path, programs=programs, replace=replace)
    typer.echo(f"{_counted(done.added, 'tuned plan')} added to {folder}, {done.replaced} replaced, {done.same} already there")
    if done.kept:
        names = ", ".join(sorted(set(done.kept)))
        typer.echo(f"{_counted(len(done.kept), 'plan')} kept because they are newer here ({names}); --replace replaces them")
    if done.elsewhere:
        typer.echo(f"{_counted(done.elsewhere, 'plan')} for other versions of serrate, torch or the compiler: not used here")
    if programs:
        typer.echo(f"{_counted(done.programs, 'compiled program')} added")
    elif done.skipped:
        typer.echo(f"{_counted(done.skipped, 'compiled program')} left out; --programs adds them, if you trust their origin")


def _is_damaged(entry: CacheEntry) -> bool:
    try:
        return cache_folder.get(entry.path.parent, entry.path.name) is None
    except cache_folder.Unsound:
        return True


def _leftovers(cache_dir: Path) -> list[Path]:
    """Leftovers of interrupted and failed compilations; running ones are not included."""
    try:
        return cache_folder.leftovers(cache_dir / cache_folder.PROGRAMS)
    except OSError as error:
        raise CacheError(f"cannot read {cache_dir}: {error.strerror}; point SERRATE_CACHE_DIR at a folder you own") from error
