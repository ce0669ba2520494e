"""`kvist compile`: fill the cache of machine code, so that no service has to at its first start."""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from importlib.util import find_spec

from kvist.errors import KvistError

HELP = "compile the index and the engine's loops ahead of time, as when an image is built"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The index's machine code goes to kvist/ in NUMBA_CACHE_DIR, else XDG_CACHE_HOME, else ~/.cache; what is there "
        "is kept. A service with the same environment variables, version, Python and CPU model then compiles nothing, "
        "and needs only read access. NUMBA_CPU_NAME=generic makes code for every CPU of the architecture."
    )


def run(args: argparse.Namespace) -> int:  # noqa: ARG001
    """Print where the index's machine code is and how long it took; raises KvistError if nowhere."""
    from kvist.indexer.compilation import fill

    started_s = time.monotonic()
    directory = fill()
    if directory is None:
        raise KvistError("no directory for machine code can be written: set NUMBA_CACHE_DIR to one")
    if find_spec("torch") is not None:
        import_module("kvist.kernels._loops")  # which Numba caches by itself
    print(f"kvist compile: machine code is in {directory} after {time.monotonic() - started_s:.1f} s")
    return 0
