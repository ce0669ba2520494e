"""Streams within one process: for tests, and for a router and an engine that share it.

A hub of named endpoints. Publications send from any thread; each subscriber has a queue in its own event loop. It keeps
the same contract as a network: no listener means the message is gone, and a full queue loses the newest.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from kvist.errors import InvalidValueError
from kvist.events.transports.base import MAX_DRAIN, Message, ReplayRequest, ReplaySource
from kvist.events.transports.endpoint import Endpoint

QUEUE_CAPACITY = 10_000
"""Messages a subscriber may lag before it loses the newest."""

Wire = Callable[[Message], Iterable[Message]]
"""What becomes of a message on its way: none for a loss, two for a duplicate, an earlier one for a delay."""


class _Hub:
    """Who is at which address. Nothing is called while the lock is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._publications: dict[str, MemoryPublication] = {}
        self._subscriptions: dict[str, tuple[MemorySubscription, ...]] = {}

    def publish(self, address: str, publication: MemoryPublication) -> None:
        with self._lock:
            if address in self._publications:
                raise InvalidValueError("endpoint", address, "a name that no publication uses")
            self._publications[address] = publication

    def unpublish(self, address: str, publication: MemoryPublication) -> None:
        with self._lock:
            if self._publications.get(address) is publication:
                del self._publications[address]

    def subscribe(self, address: str, subscription: MemorySubscription) -> None:
        with self._lock:
            self._subscriptions[address] = (*self._subscriptions.get(address, ()), subscription)

    def unsubscribe(self, address: str, subscription: MemorySubscription) -> None:
        with self._lock:
            others = tuple(other for other in self._subscriptions[address] if other is not subscription)
            self._subscriptions[address] = others
            if not others:
                del self._subscriptions[address]

    def publication(self, address: str) -> MemoryPublication | None:
        return self._publications.get(address)

    def subscriptions(self, address: str) -> tuple[MemorySubscription, ...]:
        return self._subscriptions.get(address, ())


_hub = _Hub()


class MemoryPublication:
    """The publisher's end of a `memory://` endpoint; `wire` may lose, repeat or delay what is sent."""

    def __init__(self, endpoint: Endpoint, wire: Wire | None = None) -> None:
        self._address = endpoint.address
        self._wire = wire
        self._source: ReplaySource | None = None
        _hub.publish(self._address, self)
        for subscription in _hub.subscriptions(self._address):
            subscription.connected()

    @property
    def endpoint(self) -> str:
        """The URL a subscriber connects to."""
        return self._address

    def serve_replay(self, source: ReplaySource) -> None:
        """Answer replay requests from `source`, in a thread of the subscriber's."""
        self._source = source

    def send(self, message: Message) -> None:
        """Put the message on every subscriber's queue."""
        if _hub.publication(self._address) is not self:
            raise BrokenPipeError(f"{self._address} is closed")
        delivered = (message,) if self._wire is None else tuple(self._wire(message))
        for subscription in _hub.subscriptions(self._address):
            subscription.deliver(delivered)

    def replay(self, request: ReplayRequest) -> list[Message] | None:
        """Return what the replay source has, or None without one."""
        return None if self._source is None else list(self._source.replay(request))

    def close(self, timeout_s: float = 5.0) -> None:  # noqa: ARG002 - nothing is left to drain: the queues have it
        """Leave the endpoint; what was sent is already in the subscribers' queues."""
        _hub.unpublish(self._address, self)


class MemorySubscription:
    """A subscriber's end of a `memory://` endpoint."""

    num_malformed = 0
    is_peer_gone = False
    problem: str | None = None

    def __init__(self, endpoint: Endpoint) -> None:
        self.num_connects = 0
        self._address = endpoint.address
        self._queue: deque[Message] = deque()
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        """Join the endpoint, whether or not a publication is there."""
        self._loop = asyncio.get_running_loop()
        _hub.subscribe(self._address, self)
        if _hub.publication(self._address) is not None:
            self.connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the endpoint."""
        _hub.unsubscribe(self._address, self)

    @property
    def is_caught_up(self) -> bool:
        """Whether a publication is there and the queue empty."""
        return not self._queue and _hub.publication(self._address) is not None

    def connected(self) -> None:
        """Count a publication that came; called by it, from any thread."""
        self.num_connects += 1

    def deliver(self, messages: Iterable[Message]) -> None:
        """Queue messages and lose what does not fit; called by the publication, from any thread."""
        for message in messages:
            if len(self._queue) < QUEUE_CAPACITY:
                self._queue.append(message)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def receive(self) -> list[Message]:
        """Wait for at least one message; return at most `MAX_DRAIN`."""
        while not self._queue:
            self._arrived.clear()
            if not self._queue:
                await self._arrived.wait()
        return [self._queue.popleft() for _ in range(min(len(self._queue), MAX_DRAIN))]

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:  # noqa: ARG002
        """Return what the publication still keeps; None, at once, when there is none."""
        publication = _hub.publication(self._address)
        return None if publication is None else await asyncio.to_thread(publication.replay, request)
