"""Files that are replaced atomically, and folders that one process locks for itself."""

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
    """A file that is complete when it appears, even after a crash; an earlier one stays in place until then.

    End with `commit`, or with `discard` where something failed. All methods block, and raise OSError. Only one writer
    at a time: the unfinished file has a fixed name beside the file's.
    """

    def __init__(self, path: Path) -> None:
        """Only name the file: it is opened, which may block, by the first `write` or `commit`."""
        self._path = path
        self._temporary = path.with_name(f"{path.name}.new")
        self._file: BinaryIO | None = None
        self.size_bytes = 0

    def write(self, piece: bytes) -> None:
        self.size_bytes += self._open().write(piece)

    def commit(self) -> None:
        with self._open() as file:
            file.flush()
            os.fsync(file.fileno())
        self._temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # or a crash may lose the new name
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Remove what was written, if the disk allows; raises nothing."""
        if self._file is None:
            return
        with suppress(OSError):
            self._file.close()  # which may write buffered pieces, and fail again
        with suppress(OSError):
            self._temporary.unlink()

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._file = self._temporary.open("wb")
        return self._file


def write_atomically(path: Path, data: bytes) -> int:
    """Replace a file's contents at once, safe against a crash; return its size in bytes.

    Raises OSError, with the earlier file in place.
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
    """Rename a state file that cannot be used, so that it is not overwritten; logs why, and raises nothing."""
    _logger.error("state cannot be used, starting empty: %s path=%s kept_as=%s", why, path, aside)
    try:
        path.replace(aside)
    except OSError as error:
        _logger.error("state cannot be set aside: %s path=%s", error, path)


def file_stamp(path: Path | None) -> Stamp:
    """Return a value that changes whenever the file does; None where it does not exist or cannot be read."""
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


async def in_thread(write: Callable[..., object], *arguments: object) -> None:
    """Run a write in a thread, and wait for its end even if cancelled, so that it never overlaps the next one."""
    writing = asyncio.create_task(asyncio.to_thread(write, *arguments), name="kvist-write")
    cancelled: asyncio.CancelledError | None = None
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from writing.exception()
    writing.result()


@contextmanager
def exclusive_folder(field: str, folder: Path, name: str = "lock", user: str = "process") -> Iterator[None]:
    """Lock a folder for this process until the context ends; it is created if missing.

    The lock is a file of this `name` in it. Raises InvalidValueError, about `field`, if the folder cannot be written,
    or another process has locked it, which the error names.
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
