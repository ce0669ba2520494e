"""The replay buffer: each rank's last batches, for subscribers that missed some."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

from kvist.errors import InvalidValueError
from kvist.events.transports import Message, ReplayRequest


class ReplayBuffer:
    """Keeps the newest messages of each topic, without a hole: at most `max_batches` of `max_bytes` together.

    The bounds are per topic, so that a busy rank does not push out a quiet one's. Safe to use from several threads.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        if max_batches <= 0:
            raise InvalidValueError("replay max_batches", max_batches, "a positive number of batches")
        if max_bytes <= 0:
            raise InvalidValueError("replay max_bytes", max_bytes, "a positive number of bytes")
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._topics: dict[bytes, _Kept] = {}

    def append(self, message: Message) -> None:
        """Keep a topic's next message; sequences of one topic follow each other."""
        with self._lock:
            kept = self._topics.setdefault(message.topic, _Kept())
            kept.messages.append(message)
            kept.size_bytes += len(message.payload)
            while len(kept.messages) > self._max_batches or kept.size_bytes > self._max_bytes:
                kept.size_bytes -= len(kept.messages.popleft().payload)

    def replay(self, request: ReplayRequest) -> list[Message]:
        """Return what is kept of the topic, or of all without one, from the sequence asked for on."""
        with self._lock:
            topics = filter(None, (self._topics.get(request.topic),)) if request.topic else self._topics.values()
            return [message for kept in topics for message in kept.since(request.start_sequence)]

    @property
    def size_bytes(self) -> int:
        """Return the payload bytes kept, all topics together."""
        with self._lock:
            return sum(kept.size_bytes for kept in self._topics.values())


class _Kept:
    """One topic's messages, oldest first."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.size_bytes = 0

    def since(self, sequence: int) -> list[Message]:
        if not self.messages:
            return []
        return list(islice(self.messages, max(0, sequence - self.messages[0].sequence), None))
