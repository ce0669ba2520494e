"""The replay buffer: each rank's last batches, for subscribers that missed some."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import NamedTuple

from kvist.errors import InvalidValueError
from kvist.events.transports import Message, ReplayRequest


class Kept(NamedTuple):
    """What is kept of a topic: everything from `first_sequence` on, and how many bytes that is from a sequence on."""

    first_sequence: int
    size_bytes: int


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
        self._topics: dict[bytes, _Topic] = {}
        self._heartbeats: dict[bytes, Message] = {}

    def append(self, message: Message) -> None:
        """Keep a topic's next message; sequences of one topic follow each other."""
        with self._lock:
            topic = self._topics.setdefault(message.topic, _Topic())
            topic.messages.append(message)
            topic.size_bytes += len(message.payload)
            topic.next_sequence = message.sequence + 1
            while len(topic.messages) > self._max_batches or topic.size_bytes > self._max_bytes:
                topic.size_bytes -= len(topic.messages.popleft().payload)

    def note_heartbeat(self, message: Message) -> None:
        """Keep a topic's last heartbeat."""
        with self._lock:
            self._heartbeats[message.topic] = message

    def heartbeats(self, topic: bytes | None = None) -> list[Message]:
        """Return the last heartbeat of each topic, or of one."""
        with self._lock:
            return [message for message in self._heartbeats.values() if topic in (None, message.topic)]

    def kept(self, topic: bytes, start_sequence: int) -> Kept | None:
        """Return what is kept of a topic, counted from a sequence on; None before its first message."""
        with self._lock:
            found = self._topics.get(topic)
            if found is None:
                return None
            messages = found.since(start_sequence)
            first_sequence = found.messages[0].sequence if found.messages else found.next_sequence
            return Kept(first_sequence, sum(len(message.payload) for message in messages))

    def replay(self, request: ReplayRequest) -> list[Message]:
        """Return what is kept of the topic, or of all without one, from the sequence asked for on."""
        with self._lock:
            topics = filter(None, (self._topics.get(request.topic),)) if request.topic else self._topics.values()
            return [message for topic in topics for message in topic.since(request.start_sequence)]

    @property
    def size_bytes(self) -> int:
        """Return the payload bytes kept, all topics together."""
        with self._lock:
            return sum(topic.size_bytes for topic in self._topics.values())


class _Topic:
    """One topic's messages, oldest first."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.size_bytes = 0
        self.next_sequence = 0

    def since(self, sequence: int) -> list[Message]:
        if sequence >= self.next_sequence:  # also a number from a stranger that `islice` would not take
            return []
        if not self.messages:
            return []
        return list(islice(self.messages, max(0, sequence - self.messages[0].sequence), None))
