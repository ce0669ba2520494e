"""The compiled index is cached per user and per version of its source; without a writable directory it still compiles.

Numba notices an edit of a function's own file by its time and size only. The directory used here is named by a hash of
the source, so a stale machine code file is never loaded, whatever a package manager did to the file's time. Directories
of other versions that nobody has used for a month are removed.
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

    `NUMBA_CACHE_DIR` is honoured; otherwise it lies in `XDG_CACHE_HOME`, or in `.cache` of the home directory.
    """
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    try:
        base = _config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(base) / "kvist" / f"{sources[0].stem.strip('_')}-{digest}"
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
    """Return a decorator factory that compiles functions of these sources at once, for one explicit signature each."""
    directory = cache_directory(*sources)

    def jit(signature: str, *, is_inlined: bool = False) -> _Decorator:
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
                    no_cpython_wrapper=function.__name__.startswith("_"),  # a sixth of the time to compile
                )(function)
            finally:
                _config.CACHE_DIR = before
            return compiled

        return decorate

    return jit
