"""What waits in a publisher: what was reported, for its thread, and batches, for the transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

from kvist.errors import InvalidValueError
from kvist.events.engine_events import EngineEvent
from kvist.events.transports import Message, Publication
from kvist.publisher.snapshot import Streams


class Between(NamedTuple):
    """A place in the inbox where something else is to be done."""

    do: Callable[[Streams], None]
    is_done: Future[None]


class Malformed(NamedTuple):
    """An event that could not be read, or not even told whose it is: its rank may be anything."""

    rank: Any
    error: Exception


Item: TypeAlias = EngineEvent | Between | Malformed


class Inbox(deque[Item]):
    """Items in order, put in by one thread and taken out by another; what bounds it, whoever fills it decides.

    A deque, for an engine's thread spares the time for a method of ours.
    """

    def drop(self) -> int:
        """Forget everything; return how many events that were."""
        num_events = 0
        while self:
            item = self.popleft()
            if isinstance(item, Between):
                item.is_done.cancel()
            else:
                num_events += 1
        return num_events


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
