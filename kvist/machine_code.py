"""The cache of the compiled modules' machine code: where it is, and whether it is complete. Imports no Numba.

It is cached per user and per version of its source: a directory's name has a hash of the sources, so stale machine code
is never loaded, even where a package manager changed the files' times. An empty file in it, its stamp, says that all
modules were compiled, for one version of Python and Numba and one kind of CPU, or for all of an architecture where
`NUMBA_CPU_NAME` is `generic`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from kvist.errors import MissingExtraError

PACKAGES = ("kvist.radix.compiled", "kvist.indexer.compiled", "kvist.router.compiled")
"""Every module in these is compiled when it is imported."""

_RADIX, _INDEXER, _ROUTER = (Path(__file__).parent.parent.joinpath(*package.split(".")) for package in PACKAGES)
RADIX_SOURCES = (_RADIX,)
INDEXER_SOURCES = (_INDEXER, _RADIX, Path(__file__).parent / "events/dialects/block_events.py")
"""Functions of the index are inlined into the indexer's, and words of engines are constants there: so a change of these
makes its machine code stale, too."""
ROUTER_SOURCES = (_ROUTER, _ROUTER.parent / "policy")


def cache_directory(*sources: Path) -> Path | None:
    """Return a directory for the machine code of `sources`, or None where none can be written.

    A source is a file, or a folder with all its modules; the directory is named after the first, and its folder. It is
    in `NUMBA_CACHE_DIR`, else in `XDG_CACHE_HOME`, else in `.cache` of the home directory. A read-only directory, as in
    a container, is returned only if its cache is complete.
    """
    try:
        directory = _directory(*sources)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError:
            return directory if directory.is_dir() and find_filled() is not None else None
        return directory
    except (OSError, RuntimeError):  # RuntimeError: no home directory at all
        return None


def find_filled() -> Path | None:
    """Return the directory of all machine code if it is complete for this Python, Numba and CPU, else None.

    Raises MissingExtraError without Numba.
    """
    try:
        stamp = _stamp()
        return stamp.parent.parent if stamp.is_file() else None
    except (OSError, RuntimeError):
        return None


def mark_filled() -> Path | None:
    """Record that every module is compiled, and return their directory; None where it cannot be written."""
    try:
        _stamp().touch()
    except (OSError, RuntimeError):
        return None
    return find_filled()


@contextmanager
def only_one_compiles() -> Iterator[None]:
    """Hold a lock while compiling, so that one process at a time does; a killed one's is released. Raises OSError."""
    with (_directory(*INDEXER_SOURCES) / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def digest_of(*sources: Path) -> str:
    """Return a hash of source files, and of all modules below folders."""
    files = [file for source in sources for file in (sorted(source.rglob("*.py")) if source.is_dir() else [source])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _directory(*sources: Path) -> Path:
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvist" / f"{sources[0].parent.name}-{sources[0].stem}-{digest_of(*sources)}"


def _stamp() -> Path:
    """Return the file that says that all is compiled; its name has a hash of all that Numba keys its cache by."""
    try:
        from llvmlite import binding
    except ModuleNotFoundError:
        raise MissingExtraError("router", "numba") from None
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    settings = [item for item in settings if item[0] != "NUMBA_CACHE_DIR"]
    is_generic = os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic"
    host = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    target = binding.get_process_triple() if is_generic else host
    others = _directory(*ROUTER_SOURCES).name
    key = sys.version, version("numba"), version("llvmlite"), target, settings, others
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return _directory(*INDEXER_SOURCES) / f"compiled-{name}"
