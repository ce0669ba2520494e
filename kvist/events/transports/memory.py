"""Streams within one process: for tests, and for a router and an engine that share it.

Publications send from any thread; each subscriber has a queue in its own event loop. The contract is the same as a
network's: no listener means the message is gone, and a full queue loses the newest.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Self

from kvist.errors import InvalidValueError
from kvist.events.transports.base import Message, ReplayRequest, ReplaySource
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.received import MessageQueue

# Publications and subscriptions by address: changed under the lock, and read without it, since values are replaced.
_lock = threading.Lock()
_publications: dict[str, MemoryPublication] = {}
_subscriptions: dict[str, tuple[MemorySubscription, ...]] = {}


class MemoryPublication:
    """The publisher's end of a `memory://` endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint.address
        self._source: ReplaySource | None = None
        with _lock:
            if self.endpoint in _publications:
                raise InvalidValueError("endpoint", self.endpoint, "a name that no publication uses")
            _publications[self.endpoint] = self
        for subscription in _subscriptions.get(self.endpoint, ()):
            subscription.num_connects += 1

    def serve_replay(self, source: ReplaySource) -> None:
        self._source = source

    def send(self, message: Message) -> None:
        if _publications.get(self.endpoint) is not self:
            raise BrokenPipeError(f"{self.endpoint} is closed")
        for subscription in _subscriptions.get(self.endpoint, ()):
            subscription.deliver(message)

    def replay(self, request: ReplayRequest) -> list[Message] | None:
        return None if self._source is None else list(self._source.replay(request))

    def close(self, timeout_s: float = 5.0) -> None:  # noqa: ARG002 - nothing is left to drain: the queues have it
        with _lock:
            if _publications.get(self.endpoint) is self:
                del _publications[self.endpoint]


class MemorySubscription:
    """A subscriber's end of a `memory://` endpoint."""

    num_malformed = 0
    is_peer_gone = False
    problem: str | None = None

    def __init__(self, endpoint: Endpoint) -> None:
        self.num_connects = 0
        self._address = endpoint.address
        self._queue = MessageQueue(endpoint.address)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        with _lock:
            _subscriptions[self._address] = (*_subscriptions.get(self._address, ()), self)
        self.num_connects += self._address in _publications
        return self

    async def __aexit__(self, *_: object) -> None:
        with _lock:
            others = tuple(other for other in _subscriptions.pop(self._address) if other is not self)
            if others:
                _subscriptions[self._address] = others

    @property
    def is_caught_up(self) -> bool:
        return self._queue.is_empty and self._address in _publications

    def deliver(self, message: Message) -> None:
        """Queue a message; called by the publication, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put, message)

    async def receive(self) -> list[Message]:
        return await self._queue.receive()

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:  # noqa: ARG002
        publication = _publications.get(self._address)
        return None if publication is None else await asyncio.to_thread(publication.replay, request)
