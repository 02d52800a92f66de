"""Built programs on disk: content-addressed, private to the user, checked before use.

In: source text and a compiler. Out: loaded functions. An entry is a folder `programs/<digest>/` with the source, the
library and the library's own digest. Entries are made in a temporary folder and renamed, so that a reader never sees
half of one; a library that is not what was written is an error, not a miss.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from serrate import settings
from serrate.errors import CacheError
from serrate.runtime.compiler import Compiler

_loaded: dict[str, Any] = {}


@dataclass(frozen=True)
class Unit:
    """One program to build. The function in `text` is called `name`; it is renamed by digest, so that many share a library."""

    name: str
    text: str

    def digest(self, prelude: str, compiler: Compiler) -> str:
        return hashlib.sha256("\0".join((compiler.key, prelude, self.text)).encode()).hexdigest()[:32]


def folder() -> Path:
    """Where entries are kept; made private to the user if it is not there."""
    path = settings.current().cache_dir / "programs"
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        os.chmod(path, 0o700)
    owner = path.stat().st_uid
    if owner != os.getuid():
        raise CacheError(f"{path} belongs to another user (uid {owner}); name a folder of your own in SERRATE_CACHE_DIR")
    return path


def functions(units: Sequence[Unit], prelude: str, compiler: Compiler) -> list[Any]:
    """The functions of all units, building those that are missing in one translation unit."""
    digests = [unit.digest(prelude, compiler) for unit in units]
    missing = {d: u for d, u in zip(digests, units, strict=True) if d not in _loaded and not (folder() / d).is_dir()}
    if missing:
        _build(missing, prelude, compiler)
    return [_load(d, unit.name) for d, unit in zip(digests, units, strict=True)]


def _symbol(name: str, digest: str) -> str:
    return f"{name}_{digest[:8]}"


def _build(missing: dict[str, Unit], prelude: str, compiler: Compiler) -> None:
    root = folder()
    with FileLock(root / f"{min(missing)}.lock"):
        left = {d: u for d, u in missing.items() if not (root / d).is_dir()}
        if not left:
            return
        texts = {d: u.text.replace(f" {u.name}(", f" {_symbol(u.name, d)}(", 1) for d, u in left.items()}
        work = Path(tempfile.mkdtemp(dir=root, prefix="building-"))
        source, library = work / "program.cpp", work / "program.so"
        source.write_text("\n".join((prelude, *texts.values())))
        compiler.build(source, library)
        check = hashlib.sha256(library.read_bytes()).hexdigest()
        for digest, text in texts.items():
            entry = Path(tempfile.mkdtemp(dir=root, prefix="entry-"))
            (entry / "program.cpp").write_text(f"{prelude}\n{text}")
            os.link(library, entry / "program.so")
            (entry / "sha256").write_text(check)
            try:
                os.rename(entry, root / digest)
            except OSError:
                # Another process made the same entry first: it is the same content.
                shutil.rmtree(entry)
        shutil.rmtree(work)
    (root / f"{min(missing)}.lock").unlink(missing_ok=True)


def _load(digest: str, name: str) -> Any:
    if digest not in _loaded:
        entry = folder() / digest
        try:
            library, wanted = (entry / "program.so").read_bytes(), (entry / "sha256").read_text()
        except OSError as error:
            raise CacheError(f"{entry} is damaged ({error}); run `serrate cache clear`") from error
        if hashlib.sha256(library).hexdigest() != wanted:
            raise CacheError(f"{entry / 'program.so'} is not what was built; run `serrate cache clear`")
        function = getattr(ctypes.CDLL(str(entry / "program.so")), _symbol(name, digest))
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        _loaded[digest] = function
    return _loaded[digest]


def source_path(unit: Unit, prelude: str, compiler: Compiler) -> Path:
    """Where the source of a built unit is kept."""
    return folder() / unit.digest(prelude, compiler) / "program.cpp"
