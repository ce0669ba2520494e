"""The file in which a sidecar keeps its state: whole or not there, one sidecar's at a time, set aside if unreadable."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from kvist.errors import InvalidValueError
from kvist.files import write_atomically
from kvist.publisher.state import SidecarState, UnreadableStateError, pack, unpack

_logger = logging.getLogger(__name__)


class StateStore:
    """Keeps the state of the sidecar of one worker in a folder; methods block, and do file I/O."""

    def __init__(self, folder: Path, worker: str) -> None:
        """Make the folder if needed and lock the file; raises InvalidValueError if either is impossible."""
        self.path = folder / f"sidecar-{worker}.state"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / f"{self.path.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidValueError("state_dir", str(folder), f"a folder that can be written ({error})") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InvalidValueError("state_dir", str(folder), f"no other sidecar of worker {worker}") from None

    def load(self) -> SidecarState | None:
        """Return what was saved last, None for nothing; what cannot be read is logged and set aside."""
        try:
            return unpack(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (UnreadableStateError, OSError) as error:
            aside = self.path.with_suffix(".unreadable")
            _logger.error("state cannot be used, starting empty: %s path=%s kept_as=%s", error, self.path, aside)
            self._set_aside(aside)
            return None

    def save(self, state: SidecarState) -> int:
        """Replace what was saved; return the size in bytes. Raises OSError, and what was saved is still there."""
        return write_atomically(self.path, pack(state))

    def close(self) -> None:
        """Let another sidecar have the file."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        """Return the store, whose file is locked."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _set_aside(self, aside: Path) -> None:
        try:
            self.path.replace(aside)
        except OSError as error:
            _logger.error("state cannot be set aside: %s path=%s", error, self.path)
