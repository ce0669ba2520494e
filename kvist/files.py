"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, pieces: Iterable[bytes]) -> int:
    """Write the pieces to a file that has them all when it appears, also after a crash; return their size in bytes.

    What was there stays until then. Raises OSError; what was begun is removed. Pieces may come slowly: nothing waits
    for them but the caller.
    """
    temporary = path.with_name(f"{path.name}.new")
    size_bytes = 0
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                size_bytes += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # or the new name itself may be lost
    finally:
        os.close(folder)
    return size_bytes
