"""What was played last, for subscribers that missed some of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvist.errors import InvalidValueError
from kvist.events.restarts import RestartDetector
from kvist.events.transports import Message, ReplayRequest
from kvist.replay.envelope import CanonicalEnvelope, EngineEnvelope, read_envelope


class _Kept(NamedTuple):
    numbering: bytes | None
    epoch: int
    message: Message


class SentBuffer:
    """Keeps the newest numbered messages of one publication, up to `max_bytes`; a `ReplaySource`, safe across threads.

    Unlike a publisher's buffer it takes what was recorded: holes, duplicates, and publishers that were started anew,
    whose earlier messages are of no use to anyone.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes <= 0:
            raise InvalidValueError("replay_bytes", max_bytes, "a positive number of bytes")
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: deque[_Kept] = deque()
        self._size_bytes = 0
        # By numbering: a canonical rank's topic, None for an engine's whole stream.
        self._newest: dict[bytes | None, tuple[int, int]] = {}
        self._last: dict[bytes, Message] = {}
        self._restarts = RestartDetector()
        self.num_asked = 0
        """Requests answered."""

    def append(self, message: Message) -> None:
        """Keep what is sent, unless it takes no number or one that was taken."""
        envelope = read_envelope(message.payload)
        if envelope is None:
            return
        with self._lock:
            is_canonical = isinstance(envelope, CanonicalEnvelope)
            if is_canonical:
                self._last[message.topic] = message
            numbering = message.topic if is_canonical else None
            if not (isinstance(envelope, CanonicalEnvelope) and envelope.is_heartbeat):
                self._keep(numbering, self._epoch(envelope, message), message)

    def replay(self, request: ReplayRequest) -> Iterator[Message]:
        """Yield what is kept of the topic, or of all if empty: of the newest epoch, from the sequence asked for on.

        A request about another epoch is answered from the newest one's beginning. Of all ranks asked for, each has at
        least its last message in the answer, which tells how far it is.
        """
        with self._lock:
            self.num_asked += 1
            kept, newest, last = tuple(self._kept), dict(self._newest), dict(self._last)
        for numbering, epoch, message in kept:
            is_newest = epoch == newest[numbering][0]
            starts_at = request.start_sequence if request.epoch in (None, epoch) else 0
            if is_newest and request.topic in (None, b"", message.topic) and message.sequence >= starts_at:
                last.pop(message.topic, None)
                yield message
        yield from () if request.topic else last.values()

    def last_messages(self) -> list[Message]:
        """Return the last message of each canonical rank: sent again, it tells who lost what was before it."""
        with self._lock:
            return list(self._last.values())

    def _epoch(self, envelope: CanonicalEnvelope | EngineEnvelope, message: Message) -> int:
        if isinstance(envelope, CanonicalEnvelope):
            return envelope.epoch
        return self._restarts.received(message.sequence, message.payload)

    def _keep(self, numbering: bytes | None, epoch: int, message: Message) -> None:
        if (epoch, message.sequence) <= self._newest.get(numbering, (-1, -1)):
            return
        self._newest[numbering] = epoch, message.sequence
        self._kept.append(_Kept(numbering, epoch, message))
        self._size_bytes += len(message.payload)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= len(self._kept.popleft().message.payload)
