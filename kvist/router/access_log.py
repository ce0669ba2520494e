"""One line of JSON for each request, written by a thread: a slow disk holds no request up, it costs lines."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from datetime import UTC, datetime
from random import random

import msgspec

from kvist.errors import InvalidValueError
from kvist.http import Request

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 5.0
MAX_LINES = 65_536  # that may wait to be written, 60 MB or so; those that come beyond it are dropped
_LINES_AT_ONCE = 256  # made into text in 0.1 ms, after which others may have the interpreter
MAX_CHARS = 300  # of texts that clients have a say in


class AccessLog:
    """Appends lines to a file, or to stdout if that is `-`, each second and when it is closed.

    A file that was moved away is begun anew.
    """

    def __init__(self, path: str, sample: float) -> None:
        """Log such a share of the requests that go well, and all others; raises InvalidValueError."""
        self._path = path
        self._sample = sample
        self._lines: deque[dict[str, object]] = deque()
        self._num_overflown = self._num_failed = 0
        self._is_torn = False
        try:
            self._descriptor = 1 if path == "-" else self._open()
        except OSError as error:
            raise InvalidValueError("access_log", path, f"a file that can be appended to ({error.strerror})") from None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvist-access-log", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Return how many lines were lost, as too many waited or none could be written."""
        return self._num_overflown + self._num_failed

    def write(self, request: Request, request_id: bytes, status: int, error: str | None, **more: object) -> None:
        """Have a line written soon, which also says `more`, or drop it where too many wait. For one thread alone."""
        if error is None and random() >= self._sample:
            return
        if len(self._lines) >= MAX_LINES:
            self._num_overflown += 1
            return
        asked = {"request_id": request_id.decode("latin-1"), "method": request.method, "path": request.path[:MAX_CHARS]}
        told = {"status": status, "error": None if error is None else error[:MAX_CHARS]}
        self._lines.append({"time": datetime.now(UTC), **asked, **told, **more})

    def close(self) -> None:
        """Write what waits, as far as that can be done within `CLOSE_TIMEOUT_S`."""
        self._is_closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        num_told, is_last = 0, False
        while not is_last:
            is_last = self._is_closing.wait(FLUSH_INTERVAL_S)
            failure = self._flush()
            if (num_dropped := self.num_dropped) != num_told:
                logger.warning("access log has lost lines num_dropped=%d reason=%s", num_dropped, failure or "too slow")
                num_told = num_dropped
        if self._path != "-":
            os.close(self._descriptor)

    def _flush(self) -> OSError | None:
        """Write what waits; return why some of it could not be."""
        encoder, failure = msgspec.json.Encoder(), None
        while self._lines:
            lines = [self._lines.popleft() for _ in range(min(len(self._lines), _LINES_AT_ONCE))]
            try:
                self._follow_path()
                data = memoryview(b"\n" * self._is_torn + encoder.encode_lines(lines))
                while data:
                    self._is_torn = True
                    data = data[os.write(self._descriptor, data) :]
                self._is_torn = False
            except OSError as error:
                self._num_failed += len(lines)
                failure = error
        return failure

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)

    def _follow_path(self) -> None:
        """Begin a new file where the old one is no longer in its place."""
        try:
            if self._path == "-" or os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                return
        except FileNotFoundError:
            pass
        moved, self._descriptor, self._is_torn = self._descriptor, self._open(), False
        os.close(moved)
