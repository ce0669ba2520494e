"""What every transport does with incoming messages: malformed ones are counted, waiting ones are bounded.

Answers are bounded each, and all of a process together, since many publishers may send too much at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence

from kvist.events.transports import base
from kvist.events.transports.base import Message

_logger = logging.getLogger(__name__)

QUEUE_CAPACITY = 10_000
QUEUE_BYTES = 256 << 20
"""How far a subscriber, to a broker or within the process, may lag before it loses the newest messages."""
MAX_ANSWERS_BYTES = 4 << 30
"""What all answers of a process may take at a time; one that does not fit is asked for again."""


class MalformedCounter:
    """Counts one source's malformed messages and the connections that broke the protocol; logs the first of each."""

    def __init__(self, source: str) -> None:
        self.num = 0
        self.source = source
        self._has_logged_message = False
        self._has_logged_peer = False

    def count_message(self, frame_bytes: Sequence[int]) -> None:
        """Count a skipped message, whose frames have these sizes as far as they are known."""
        self.num += 1
        if not self._has_logged_message:
            self._has_logged_message = True
            max_mib, found = base.MAX_MESSAGE_BYTES >> 20, (len(frame_bytes), list(frame_bytes[:4]))
            text = f"malformed message skipped: not topic, 8 bytes and a payload of at most {max_mib} MiB"
            _logger.warning("%s source=%s num_frames=%d frame_bytes=%s", text, self.source, *found)

    def count_peer(self, reason: str) -> None:
        """Count a peer that broke the protocol, or speaks another one, whose connection is closed."""
        self.num += 1
        if not self._has_logged_peer:
            self._has_logged_peer = True
            _logger.warning("peer left, and tried again: %s source=%s", reason, self.source)


class MessageQueue:
    """Messages that wait in one event loop to be received; when it is full, new ones are dropped."""

    def __init__(self, source: str) -> None:
        self.num_lost = 0
        self._source = source
        self._messages: deque[Message] = deque()
        self._num_bytes = 0
        self._must_return = False
        self._arrived = asyncio.Event()
        self._removed = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        return not self._messages

    def put(self, message: Message) -> None:
        num_bytes = self._num_bytes + len(message.payload)
        if self._messages and (len(self._messages) >= QUEUE_CAPACITY or num_bytes > QUEUE_BYTES):
            self.num_lost += 1
            if self.num_lost == 1:
                _logger.warning("messages lost, for they are not read fast enough source=%s", self._source)
            return
        self._messages.append(message)
        self._num_bytes = num_bytes
        self._arrived.set()

    def wake_receiver(self) -> None:
        """Have `receive` return now, or the next time, though there may be no message."""
        self._must_return = True
        self._arrived.set()

    async def receive(self) -> list[Message]:
        """Wait for at least one message; return at most `MAX_DRAIN`."""
        while not (self._messages or self._must_return):
            self._arrived.clear()
            await self._arrived.wait()
        self._must_return = False
        messages = [self._messages.popleft() for _ in range(min(len(self._messages), base.MAX_DRAIN))]
        self._num_bytes -= sum(len(message.payload) for message in messages)
        self._removed.set()
        return messages

    async def wait_for_room(self) -> None:
        """Wait until fewer than `MAX_DRAIN` messages are here."""
        while len(self._messages) >= base.MAX_DRAIN:
            self._removed.clear()
            await self._removed.wait()


class AnswerBudget:
    """Counts the bytes that all answers take together; safe to use from any thread."""

    def __init__(self) -> None:
        self.num_refused = 0
        self.taken_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int) -> bool:
        """Count so many bytes more if there is room for them; return whether there is."""
        with self._lock:
            if self.taken_bytes + size_bytes > MAX_ANSWERS_BYTES:
                self.num_refused += 1
                _logger.warning("answer refused: all that come in take too much size_bytes=%d", self.taken_bytes)
                return False
            self.taken_bytes += size_bytes
            return True

    def release(self, size_bytes: int) -> None:
        with self._lock:
            self.taken_bytes -= size_bytes


BUDGET = AnswerBudget()


class ReplayAnswer(list[Message]):
    """The messages of one answer, which count in the budget until it is garbage-collected."""

    def __init__(self) -> None:
        super().__init__()
        self._size_bytes = 0

    def reserve(self, size_bytes: int) -> bool:
        """Count so many bytes more; return whether there is room for them, in this answer and beside the others."""
        if self._size_bytes + size_bytes > base.MAX_ANSWER_BYTES or not BUDGET.reserve(size_bytes):
            return False
        self._size_bytes += size_bytes
        return True

    def add(self, message: Message) -> bool:
        """Append a message; return whether there was room for it."""
        has_room = self.reserve(base.MESSAGE_BYTES + len(message.topic) + len(message.payload))
        if has_room:
            self.append(message)
        return has_room

    def __del__(self) -> None:
        BUDGET.release(self._size_bytes)
