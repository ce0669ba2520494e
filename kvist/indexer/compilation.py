"""Compiling without blocking the event loop: another process fills the cache of machine code meanwhile.

`python -m kvist.indexer.compilation` is that process. A thread compiles instead if no machine code can be written, or
if the process failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from kvist.contexts import run_in_daemon_thread
from kvist.errors import MissingExtraError
from kvist.machine_code import (
    INDEXER_SOURCES,
    PACKAGES,
    cache_directory,
    find_filled,
    mark_filled,
    only_one_compiles,
)

_logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", __name__)
"""The process that fills the cache."""
CHILD_NICENESS = 5
_MAX_LOGGED_BYTES = 2000

_is_loaded = False


def compile_all() -> Path | None:
    """Import every compiled module, which compiles what the cache lacks; return its directory if it is complete then.

    Raises MissingExtraError.
    """
    global _is_loaded
    if find_spec("numba") is None:
        raise MissingExtraError("router", "numba")
    for name in PACKAGES:
        package = import_module(name)
        for module in iter_modules(package.__path__):
            import_module(f"{name}.{module.name}")
    _is_loaded = True
    return find_filled() or mark_filled()


def fill() -> Path | None:
    """Compile what the cache lacks, or wait while another process does; return what `compile_all` returns."""
    if (filled := find_filled()) is not None or cache_directory(*INDEXER_SOURCES) is None:
        return filled
    with only_one_compiles():
        return find_filled() or compile_all()


def is_loaded() -> bool:
    """Return whether this process has loaded every compiled module."""
    return _is_loaded


async def load() -> None:
    """Load every compiled module, compiling what the cache lacks, while the event loop runs on.

    If cancelled, it ends the process that compiles. Raises the error of a compilation in this process.
    """
    if is_loaded():
        return
    started_s = time.monotonic()
    is_filled = find_filled() is not None
    if not is_filled:
        directory = cache_directory(*INDEXER_SOURCES)
        shown = None if directory is None else directory.parent
        _logger.info("compiling the index, the service runs without it until then directory=%s", shown)
        if directory is None:
            _logger.warning("no writable cache directory, so the index is compiled at each start: set NUMBA_CACHE_DIR")
        else:
            await _fill_in_child()
    await run_in_daemon_thread(compile_all, "kvist-compile")  # for up to a minute, which no end waits for
    if not is_filled:
        _logger.info("index compiled after %.1f s", time.monotonic() - started_s)


async def _fill_in_child() -> None:
    """Have another process fill the cache; its failure is logged."""
    try:
        child = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the service, which then ends its child
        )
    except OSError as error:
        _logger.error("compiling in a thread, as no process can be started: %s", error)
        return
    try:
        _, errors = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        tail = errors[-_MAX_LOGGED_BYTES:].decode(errors="replace").strip()
        _logger.error("compiling in a thread, as the process for it failed: code=%s %s", child.returncode, tail)


if __name__ == "__main__":
    os.nice(CHILD_NICENESS)
    sys.exit(fill() is None)
