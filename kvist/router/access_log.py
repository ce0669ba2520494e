"""The access log: one line of JSON for each request.

A thread writes it, as it does the recording of requests: a slow disk delays no request, but may cost lines.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from datetime import UTC, datetime
from random import random
from typing import Generic, TypeVar

import msgspec

from kvist.errors import InvalidValueError
from kvist.http import Request

logger = logging.getLogger(__name__)

MAX_CHARS = 300  # of texts that clients can choose
FLUSH_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 5.0
MAX_WEIGHT = 65_536  # of lines that may wait to be written, some 60 MB; further ones are dropped
_WEIGHT_AT_ONCE = 256  # encoded in 0.1 ms, after which other threads may have the interpreter

Line = TypeVar("Line")


class LineWriter(ABC, Generic[Line]):
    """Writes lines in the order they were put, each second and when it is closed."""

    def __init__(self, name: str) -> None:
        """Start the thread; log messages use the name."""
        self._name = name
        self._lines: deque[tuple[int, Line]] = deque()
        self._weight_put = self._weight_taken = 0
        self._num_overflown = self._num_failed = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvist {name}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Return how many lines were lost, as too many waited or none could be written."""
        return self._num_overflown + self._num_failed

    def close(self) -> None:
        """Write what waits, as far as that can be done within `CLOSE_TIMEOUT_S`."""
        self._is_closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _put(self, line: Line, weight: int = 1) -> None:
        """Queue a line, or drop it where too many wait. Only one thread may call this."""
        if self._weight_put - self._weight_taken >= MAX_WEIGHT:
            self._num_overflown += 1
            return
        self._weight_put += weight
        self._lines.append((weight, line))

    @abstractmethod
    def _write(self, lines: list[Line]) -> None:
        """Write some lines, on the thread; they count as lost if it raises OSError."""

    @abstractmethod
    def _end(self) -> None:
        """Close the file."""

    def _run(self) -> None:
        num_logged, is_last = 0, False
        while not is_last:
            is_last = self._is_closing.wait(FLUSH_INTERVAL_S)
            failure = self._flush()
            if (num_dropped := self.num_dropped) != num_logged:
                reason = failure or "too slow"
                logger.warning("%s dropped lines num_dropped=%d reason=%s", self._name, num_dropped, reason)
                num_logged = num_dropped
        self._end()

    def _flush(self) -> OSError | None:
        """Write the lines that wait; return the error if some could not be written."""
        failure = None
        while self._lines:
            lines, weight = [], 0
            while self._lines and weight < _WEIGHT_AT_ONCE:
                each, line = self._lines.popleft()
                lines.append(line)
                weight += each
            self._weight_taken += weight
            try:
                self._write(lines)
            except OSError as error:
                self._num_failed += len(lines)
                failure = error
        return failure


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, in however many pieces the system takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


_encode_lines = msgspec.json.Encoder().encode_lines


class AccessLog(LineWriter[dict[str, object]]):
    """Appends lines to a file, or to stdout if the path is `-`. When the file is moved away, a new one is begun."""

    def __init__(self, path: str, sample: float) -> None:
        """Log a share of the requests that succeed, and all that fail; raises InvalidValueError."""
        self._path = path
        self._sample = sample
        self._is_torn = False
        try:
            self._descriptor = 1 if path == "-" else self._open()
        except OSError as error:
            raise InvalidValueError("access_log", path, f"a file that can be appended to ({error.strerror})") from None
        super().__init__("access log")

    def write(self, request: Request, request_id: bytes, status: int, error: str | None, **more: object) -> None:
        """Queue a request's line, with `more` fields, or drop it where too many wait. Only one thread may call this."""
        if error is None and random() >= self._sample:
            return
        line = {
            "time": datetime.now(UTC),
            "request_id": request_id.decode("latin-1"),
            "method": request.method,
            "path": request.path[:MAX_CHARS],
            "status": status,
            "error": None if error is None else error[:MAX_CHARS],
        }
        self._put(line | more)

    def _write(self, lines: list[dict[str, object]]) -> None:
        self._follow_path()
        begin, self._is_torn = b"\n" * self._is_torn, True
        write_all(self._descriptor, begin + _encode_lines(lines))
        self._is_torn = False

    def _end(self) -> None:
        if self._path != "-":
            os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)

    def _follow_path(self) -> None:
        """Open a new file if the old one is no longer at its path."""
        try:
            if self._path == "-" or os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                return
        except FileNotFoundError:
            pass
        moved, self._descriptor, self._is_torn = self._descriptor, self._open(), False
        os.close(moved)
