"""Files that are whole or not there, and folders that one process has for itself."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeAlias

from kvist.errors import InvalidValueError

_logger = logging.getLogger(__name__)

Stamp: TypeAlias = tuple[int, int, int] | None


class AtomicFile:
    """A file that has all its pieces when it appears, also after a crash; what was there stays until then.

    Ends with `commit`, or with `discard` where something failed. All methods block; they raise OSError. One file at a
    time: what is begun has a name beside that of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f"{path.name}.new")
        self._file: BinaryIO | None = None
        self.size_bytes = 0

    def write(self, piece: bytes) -> None:
        """Add a piece."""
        self.size_bytes += self._opened().write(piece)

    def commit(self) -> None:
        """Let the file appear."""
        with self._opened() as file:
            file.flush()
            os.fsync(file.fileno())
        self._temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # or the new name itself may be lost
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Give up what was written, and leave no trace of it if the disk allows; raises nothing."""
        if self._file is None:
            return
        with suppress(OSError):
            self._file.close()  # which may write what is buffered, and fail as before
        with suppress(OSError):
            self._temporary.unlink()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._temporary.open("wb")
        return self._file


def write_atomically(path: Path, data: bytes) -> int:
    """Write a file that is whole when it appears, also after a crash; return its size in bytes.

    What was there stays until then. Raises OSError; what was begun is removed.
    """
    file = AtomicFile(path)
    try:
        file.write(data)
        file.commit()
    except BaseException:
        file.discard()
        raise
    return file.size_bytes


def set_aside(path: Path, aside: Path, why: Exception) -> None:
    """Rename a state that cannot be used, so that nothing overwrites it; logs why, and raises nothing."""
    _logger.error("state cannot be used, starting empty: %s path=%s kept_as=%s", why, path, aside)
    try:
        path.replace(aside)
    except OSError as error:
        _logger.error("state cannot be set aside: %s path=%s", error, path)


def file_stamp(path: Path | None) -> Stamp:
    """Return what changes when the file does; None where there is none, or it cannot be looked at."""
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)


async def in_thread(write: Callable[..., object], *arguments: object) -> None:
    """Write in a thread, to the end however often this is cancelled: or it would go on beside the next to write."""
    writing = asyncio.create_task(asyncio.to_thread(write, *arguments), name="kvist-write")
    cancelled: asyncio.CancelledError | None = None
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        writing.result()
    else:
        with suppress(OSError):
            writing.result()
        raise cancelled


@contextmanager
def exclusive_folder(field: str, folder: Path, name: str = "lock", user: str = "process") -> Iterator[None]:
    """Have a folder, made if it is not there, for this process alone until the context ends.

    That holds among those who lock a file of this name in it. Raises InvalidValueError, about `field`, if the folder
    cannot be written, or naming the process that has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidValueError(field, str(folder), f"a folder that can be written ({error})") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace") or "unknown"
            expected = f"a folder that no other {user} uses, as pid {holder} does"
            raise InvalidValueError(field, str(folder), expected) from None
        os.truncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock)
