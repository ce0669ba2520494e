"""The outbox: batches on their way to the transport, when it cannot take them at once."""

from __future__ import annotations

from collections import deque

from kvist.errors import InvalidValueError
from kvist.events.transports import Message, Publication


class Outbox:
    """Keeps the newest `capacity` messages in order; beyond them the oldest is dropped and counted.

    A dropped batch is still in the replay buffer, so overload costs a subscriber a range, not a resynchronisation.
    """

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise InvalidValueError("outbox capacity", capacity, "a positive number of messages")
        self._messages: deque[Message] = deque()
        self._capacity = capacity
        self.num_dropped = 0
        self.num_sent = 0
        self.num_sent_bytes = 0

    def __len__(self) -> int:
        """Return how many messages wait."""
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Add a message behind the others; never waits."""
        if len(self._messages) == self._capacity:
            self._messages.popleft()
            self.num_dropped += 1
        self._messages.append(message)

    def flush(self, publication: Publication) -> None:
        """Send what the transport takes, in order, and keep the rest; raises OSError when the transport is broken."""
        while self._messages:
            message = self._messages[0]
            try:
                publication.send(message)
            except BlockingIOError:
                return
            self._messages.popleft()
            self.num_sent += 1
            self.num_sent_bytes += len(message.payload)
