"""Built programs on disk: content-addressed, shared by processes, checked before use.

In: source text and a compiler. Out: loaded functions. An entry is a folder `<digest>/` with the source, the library and the
library's digest, so that a damaged library is an error and not a cache miss. `cache_folder` locates the entries and protects them
from other users.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from serrate.errors import CacheError, CompilerError
from serrate.runtime import cache_folder
from serrate.runtime.compiler import Compiler

_loaded: dict[str, Any] = {}
_building = threading.Lock()
"""Threads of one process compile one at a time, so that each finds what the previous one compiled."""


def _after_fork() -> None:
    """After a fork, the parent's thread that held the lock does not exist in the child."""
    global _building
    _building = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


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
    with _building:
        for _ in range(3):
            missing = {d: u for d, u in wanted.items() if d not in _loaded and not _load(d, u.name)}
            if not missing:
                break
            # Entries compiled by another process may be cleared before they are loaded here.
            cache_folder.write(functools.partial(_build, units=missing, prelude=prelude, compiler=compiler))
        else:
            raise CacheError("built programs are deleted as soon as they are written; is something clearing the cache folder?")
    return [_loaded[unit.digest(prelude, compiler)] for unit in units]


def _symbol(name: str, digest: str) -> str:
    return f"{name}_{digest[:8]}"


def _build(folder: Path, units: dict[str, Unit], prelude: str, compiler: Compiler) -> None:
    # Processes that start together need the same programs: one compiles, the others wait.
    lock = folder / f"{min(units)}.lock"
    with FileLock(lock):
        left = {d: u for d, u in units.items() if not (folder / d).is_dir()}
        if left:
            _compile(folder, left, prelude, compiler)
    lock.unlink(missing_ok=True)


def _compile(folder: Path, units: dict[str, Unit], prelude: str, compiler: Compiler) -> None:
    texts = {d: u.text.replace(f" {u.name}(", f" {_symbol(u.name, d)}(", 1) for d, u in units.items()}
    with cache_folder.building(folder) as work:
        source, library = work / "program.cpp", work / "program.so"
        source.write_text("\n".join((prelude, *texts.values())))
        try:
            compiler.build(source, library)
        except CompilerError as error:
            kept = folder / f"{cache_folder.FAILED}{min(units)}.cpp"
            os.replace(source, kept)
            raise CompilerError(f"{error}\nthe source is kept at {kept}") from None
        content = library.read_bytes()
        check = hashlib.sha256(content).hexdigest().encode()
        for digest, text in texts.items():
            source_text = f"{prelude}\n{text}".encode()
            cache_folder.put(folder, digest, {"program.cpp": source_text, "program.so": library, "sha256": check})
            # Loaded immediately: another process may clear the cache at any time.
            _loaded[digest] = _function(folder / digest / "program.so", content, _symbol(units[digest].name, digest))


def _load(digest: str, name: str) -> bool:
    """Loads an entry if one of the folders has it."""
    for place in cache_folder.places():
        entry = place / digest
        if not entry.is_dir():
            continue
        try:
            library, wanted = (entry / "program.so").read_bytes(), (entry / "sha256").read_text()
        except OSError as error:
            if not entry.is_dir():
                return False
            raise CacheError(f"{entry} is damaged ({error}); run `serrate cache clear`") from error
        if hashlib.sha256(library).hexdigest() != wanted:
            raise CacheError(f"{entry / 'program.so'} is not what was built; run `serrate cache clear`")
        _loaded[digest] = _function(entry / "program.so", library, _symbol(name, digest))
        return True
    return False


def _function(path: Path, content: bytes, symbol: str) -> Any:
    function = getattr(_open(path, content), symbol)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    return function


def _open(path: Path, content: bytes) -> ctypes.CDLL:
    """Loads the library at `path`, whose bytes are `content`."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # On a noexec mount, load the library from an anonymous file. Its descriptor stays open: the loader knows libraries by
        # name, and a reused descriptor number would name the library loaded first.
        handle = os.memfd_create(path.parent.name)
        with os.fdopen(handle, "wb", closefd=False) as file:
            file.write(content)
        try:
            return ctypes.CDLL(f"/proc/self/fd/{handle}")
        except OSError as error:
            os.close(handle)
            raise CacheError(f"{path} cannot be loaded ({error}); run `serrate cache clear`") from error
