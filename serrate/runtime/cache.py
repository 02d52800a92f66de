"""Built programs on disk: content-addressed, shared by processes, checked before use.

In: source text and a compiler. Out: loaded functions. An entry is a folder `<digest>/` with the source and the library;
`cache_folder` locates the entries, checks them, and protects them from other users. A program is built once: threads and
processes that need it wait for the one that builds it. An entry that is damaged, or is not the program that its name says, is
reported and built again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serrate import logs
from serrate.errors import CacheError, CompilerError
from serrate.runtime import cache_folder
from serrate.runtime.compiler import Compiler
from serrate.runtime.progress import progress

log = logs.logger("cache")

_loaded: dict[str, Any] = {}


@dataclass(frozen=True)
class Unit:
    """One program to build. The function in `text` is called `name`; it is renamed by digest, so that many share a library."""

    name: str
    text: str

    def digest(self, prelude: str, compiler: Compiler) -> str:
        return hashlib.sha256("\0".join((compiler.key, prelude, self.text)).encode()).hexdigest()[:32]


def functions(units: Sequence[Unit], prelude: str, compiler: Compiler) -> list[Any]:
    """The functions of all units; missing ones are compiled in one translation unit."""
    wanted = {unit.digest(prelude, compiler): unit for unit in units}
    missing = {d: u for d, u in wanted.items() if d not in _loaded and not _find(d, u.name)}
    if missing:
        cache_folder.write(functools.partial(_build, units=missing, prelude=prelude, compiler=compiler))
    return [_loaded[digest] for digest in (unit.digest(prelude, compiler) for unit in units)]


def _find(digest: str, name: str) -> bool:
    """Loads an entry if one of the folders has a sound one. What is not sound is reported when it is built again."""
    for place in cache_folder.places():
        try:
            if _load(place, digest, name):
                return True
        except cache_folder.Unsound:
            continue
    return False


def _symbol(name: str, digest: str) -> str:
    return f"{name}_{digest[:8]}"


def _build(folder: Path, units: dict[str, Unit], prelude: str, compiler: Compiler) -> None:
    # Processes that start together need the same programs: one compiles, the others wait and find them here.
    with cache_folder.locked(folder, units):
        left = {}
        for digest, unit in units.items():
            try:
                if digest in _loaded or _load(folder, digest, unit.name):
                    continue
            except cache_folder.Unsound as reason:
                cache_folder.report(folder, digest, reason)
            left[digest] = unit
        if left:
            _compile(folder, left, prelude, compiler)


def _compile(folder: Path, units: dict[str, Unit], prelude: str, compiler: Compiler) -> None:
    texts = {d: u.text.replace(f" {u.name}(", f" {_symbol(u.name, d)}(", 1) for d, u in units.items()}
    with cache_folder.building(folder) as work:
        source, library = work / "program.cpp", work / "program.so"
        source.write_text("\n".join((prelude, *texts.values())))
        start = time.perf_counter()
        try:
            with progress(f"compiling {', '.join(u.name for u in units.values())}"):
                compiler.build(source, library)
        except CompilerError as error:
            kept = folder / f"{cache_folder.FAILED}{min(units)}.cpp"
            os.replace(source, kept)
            raise CompilerError(f"{error}\nthe source is kept at {kept}") from None
        log.info("compiled %s in %.2f s", ", ".join(u.name for u in units.values()), time.perf_counter() - start)
        content = library.read_bytes()
        for digest, text in texts.items():
            cache_folder.put(folder, digest, {"program.cpp": f"{prelude}\n{text}".encode(), "program.so": library})
            try:
                # Loaded by its bytes if another process has just cleared the cache.
                _loaded[digest] = _function(folder / digest / "program.so", content, _symbol(units[digest].name, digest))
            except OSError as error:
                raise CacheError(f"{folder / digest / 'program.so'} was just built and cannot be loaded: {error}") from error


def _load(place: Path, digest: str, name: str) -> bool:
    """Loads an entry of a folder; False if the folder does not have it."""
    files = cache_folder.get(place, digest)
    if files is None:
        return False
    try:
        _loaded[digest] = _function(place / digest / "program.so", files["program.so"], _symbol(name, digest))
    except KeyError as error:
        raise cache_folder.Unsound("has no program.so") from error
    except (OSError, AttributeError) as error:
        raise cache_folder.Unsound(f"cannot be loaded ({error})") from error
    return True


def _function(path: Path, content: bytes, symbol: str) -> Any:
    """A function of the library at `path`, whose bytes are `content`. Raises `OSError` if it is not a library, and
    `AttributeError` if it has no such function."""
    try:
        function = getattr(ctypes.CDLL(str(path)), symbol)
    except (OSError, AttributeError):
        # The folder is mounted noexec, or the file was just cleared, or the loader knows what was there before by this name.
        function = getattr(_open_bytes(path.parent.name, content), symbol)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    return function


def _open_bytes(name: str, content: bytes) -> ctypes.CDLL:
    """Loads a library from an anonymous file."""
    handle = os.memfd_create(name)
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(content)
    try:
        # The descriptor stays open: the loader knows libraries by name, and a reused number would name the library loaded first.
        return ctypes.CDLL(f"/proc/self/fd/{handle}")
    except OSError:
        os.close(handle)
        raise
