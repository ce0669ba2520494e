"""Lines that a thread writes: a slow disk holds no request up, it costs lines."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 5.0
MAX_WEIGHT = 65_536  # of lines that may wait to be written, 60 MB or so; those that come beyond it are dropped
_WEIGHT_AT_ONCE = 256  # made into text in 0.1 ms, after which others may have the interpreter

Line = TypeVar("Line")


class LineWriter(ABC, Generic[Line]):
    """Writes lines in the order they were put, each second and when it is closed."""

    def __init__(self, name: str) -> None:
        """Write from now on; the log calls it by its name."""
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
        """Have a line written soon, or drop it where too much waits. For one thread alone."""
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
        """Let go of the file."""

    def _run(self) -> None:
        num_told, is_last = 0, False
        while not is_last:
            is_last = self._is_closing.wait(FLUSH_INTERVAL_S)
            failure = self._flush()
            if (num_dropped := self.num_dropped) != num_told:
                reason = failure or "too slow"
                logger.warning("%s has lost lines num_dropped=%d reason=%s", self._name, num_dropped, reason)
                num_told = num_dropped
        self._end()

    def _flush(self) -> OSError | None:
        """Write what waits; return why some of it could not be."""
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
    """Write all of it, in however many pieces the system takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
