"""The inbox: what was reported and waits for the publisher's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

from kvist.events.engine import EngineEvent
from kvist.publisher.snapshot import Streams
from kvist.publisher.unread import Unread

UNREAD_BYTES = 256
"""What an unread message takes beside its payload, at most: small ones alone would take several times any bound."""


class Between(NamedTuple):
    """A place in the inbox where something else is to be done."""

    do: Callable[[Streams], None]
    is_done: Future[None]


class Malformed(NamedTuple):
    """An event that could not be read, or not even told whose it is: its rank may be anything."""

    rank: Any
    error: Exception


Item: TypeAlias = EngineEvent | Unread | Between | Malformed


class Inbox(deque[Item]):
    """Items in order, put in by one thread and taken out by another; what bounds it, whoever fills it decides.

    A deque, for an engine's thread spares the time for a method of ours; only unread messages go through some.
    """

    def __init__(self) -> None:
        super().__init__()
        # Each counted by one thread alone: the bytes that all unread messages so far took, and those taken out.
        self._num_put_bytes = self._num_taken_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return how much memory the unread messages take that wait."""
        return self._num_put_bytes - self._num_taken_bytes

    def put_unread(self, unread: Unread) -> None:
        """Add a message behind the others."""
        self._num_put_bytes += UNREAD_BYTES + len(unread.payload)
        self.append(unread)

    def take(self) -> Item:
        """Return the oldest item; there must be one."""
        item = self.popleft()
        if isinstance(item, Unread):
            self._num_taken_bytes += UNREAD_BYTES + len(item.payload)
        return item

    def drop(self) -> int:
        """Forget everything; return how many events that were, an unread message counting as one."""
        num_events = 0
        while self:
            item = self.take()
            if isinstance(item, Between):
                item.is_done.cancel()
            else:
                num_events += 1
        return num_events
