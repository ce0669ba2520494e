"""Answers as they come in: bounded one by one, and all of them together, since many publishers may lie at once."""

from __future__ import annotations

import logging
import threading

from kvist.events.transports import base
from kvist.events.transports.base import Message

_logger = logging.getLogger(__name__)

MAX_ANSWERS_BYTES = 4 << 30
"""What the answers of a process may take at a time; one that does not fit beside the others is asked for again."""


class AnswerBudget:
    """Knows what all answers take together; safe to use from any thread."""

    def __init__(self) -> None:
        self.num_refused = 0
        """Answers given up because they did not fit."""
        self.taken_bytes = 0
        self._lock = threading.Lock()

    def takes(self, size_bytes: int) -> bool:
        """Count so many bytes more, if there is room for them; return whether."""
        with self._lock:
            if self.taken_bytes + size_bytes > MAX_ANSWERS_BYTES:
                self.num_refused += 1
                _logger.warning("answer refused: all that come in take too much size_bytes=%d", self.taken_bytes)
                return False
            self.taken_bytes += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        """Count so many bytes less."""
        with self._lock:
            self.taken_bytes -= size_bytes


BUDGET = AnswerBudget()
"""What all answers of the process share."""


class Collected(list[Message]):
    """The messages of one answer; they count as taken until it is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._size_bytes = 0

    def grows(self, size_bytes: int) -> bool:
        """Count so many bytes more; return whether there is room for them, in this answer and beside the others."""
        if self._size_bytes + size_bytes > base.MAX_ANSWER_BYTES or not BUDGET.takes(size_bytes):
            return False
        self._size_bytes += size_bytes
        return True

    def takes(self, message: Message) -> bool:
        """Append a message; return whether there was room for it."""
        has_room = self.grows(base.MESSAGE_BYTES + len(message.topic) + len(message.payload))
        if has_room:
            self.append(message)
        return has_room

    def __del__(self) -> None:
        BUDGET.give_back(self._size_bytes)
