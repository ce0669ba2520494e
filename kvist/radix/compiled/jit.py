"""Machine code is cached per user and per version of its source; without a writable directory it still compiles.

Numba notices an edit of a function's own file by its time and size only, and none of a function that it calls. The
directory used here is named by a hash of all sources, so stale machine code is never loaded, whatever a package manager
did to the files' times. Directories of other versions that nobody has used for a month are removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

_config: Any = numba.config
_njit: Any = numba.njit
_MAX_UNUSED_S = 30 * 24 * 3600
_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def cache_directory(*sources: Path) -> Path | None:
    """Return a directory for the machine code of `sources` that can be written now, or None where there is none.

    A source is a file, or a folder with all its modules; the directory bears the name of the first, and of its folder.
    `NUMBA_CACHE_DIR` is honoured; otherwise it lies in `XDG_CACHE_HOME`, or in `.cache` of the home directory.
    """
    files = [file for source in sources for file in (sorted(source.glob("*.py")) if source.is_dir() else [source])]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    try:
        base = _config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(base) / "kvist" / f"{sources[0].parent.name}-{sources[0].stem}-{digest}"
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # which also marks the directory as used now
            _remove_unused(directory)
            return directory
    except (OSError, RuntimeError):  # RuntimeError: no home directory at all
        return None


def _remove_unused(directory: Path) -> None:
    """Remove the directories of other versions of these sources that were last used long ago."""
    oldest_s = directory.stat().st_mtime - _MAX_UNUSED_S
    for other in directory.parent.glob(f"{directory.name.rpartition('-')[0]}-*"):
        if other.stat().st_mtime < oldest_s:
            shutil.rmtree(other, ignore_errors=True)


def jit_for(*sources: Path) -> Callable[..., _Decorator]:
    """Return a decorator factory that compiles functions of these sources at once, for one explicit signature each.

    Sources are those that `cache_directory` takes: name every module whose functions are called, too. Only a function
    with `is_entry` may be called from Python: the others take a sixth less time to compile.
    """
    directory = cache_directory(*sources)

    def jit(signature: str, *, is_entry: bool = False, is_inlined: bool = False) -> _Decorator:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            before = _config.CACHE_DIR
            _config.CACHE_DIR = "" if directory is None else str(directory)
            try:
                compiled: Callable[..., Any] = _njit(
                    signature,
                    cache=directory is not None,
                    error_model="numpy",
                    boundscheck=False,
                    forceinline=is_inlined,
                    no_cfunc_wrapper=True,
                    no_cpython_wrapper=not is_entry,
                )(function)
            finally:
                _config.CACHE_DIR = before
            return compiled

        return decorate

    return jit


jit = jit_for(Path(__file__).parent)
