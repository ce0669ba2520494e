"""One connection to a broker, kept up, and the subscriptions over it: the same for both kinds of broker."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import cycle
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from kvist.errors import InvalidValueError
from kvist.events.transports import base
from kvist.events.transports.broker import BrokerUrl, Host

_logger = logging.getLogger(__name__)

REFUSED_RETRY_S, MAX_REFUSED_RETRY_S = 30.0, 300.0
"""The wait before a broker that refused us is tried again: doubled each time, since somebody must change something."""

_MAX_DOUBLINGS = 16
_CANCEL_AGAIN_S = 2.0

ClientT = TypeVar("ClientT")

Receive: TypeAlias = Callable[[str, bytes | None], None]
"""Gets a subject or topic, and what came there; None when the broker says that nobody listens to what was sent."""


class BrokerLink(ABC, Generic[ClientT]):
    """Keeps one connection while entered; `client` is None while there is none.

    Each connection has a client of its own, and goes to the next of the URL's hosts. A broker that is away is tried
    again with back-off, one that refuses us after half a minute or more.
    """

    failures: ClassVar[tuple[type[Exception], ...]]
    """What a client raises when a connection or a broker fails."""

    def __init__(self, url: BrokerUrl, prepare: Callable[[ClientT], Awaitable[None]] | None = None) -> None:
        """`prepare` is called with each new connection first; an error that is none of `failures` ends `running`."""
        self.client: ClientT | None = None
        self.num_connects = 0
        self.problem: str | None = "not connected yet"
        self.forbidden: str | None = None
        """What the broker of this connection does not permit, in words; None while it permits all."""
        self.tried = asyncio.Event()
        """Set once the first attempt to connect has ended, well or not."""
        self._url = url
        self._prepare = prepare
        self._names: dict[Receive, str] = {}  # what each receiver is subscribed to, on every connection
        self._subscriptions: dict[Receive, object] = {}  # those made on this connection
        self.lost = asyncio.Event()
        """Set once the current connection, or the last one, is lost; each connection has an event of its own."""
        self._is_up = asyncio.Event()
        self._num_failures = 0
        self._is_refused = False
        self._failing_since: str | None = None
        self._logged_reason: str | None = None

    @abstractmethod
    def _open(self, host: Host) -> AbstractAsyncContextManager[ClientT]:
        """Connect a client, and disconnect it at the end."""

    @abstractmethod
    async def _wait_closed(self, client: ClientT) -> None:
        """Wait for the end of a connection, and raise what it ended with."""

    @abstractmethod
    def _explain(self, error: Exception) -> tuple[str, bool]:
        """Return why there is no connection, in words, and whether the broker refused us."""

    @abstractmethod
    async def _subscribe(self, client: ClientT, name: str, receive: Receive) -> object:
        """Subscribe to a subject or topic; return what `_unsubscribe` needs."""

    @abstractmethod
    async def _unsubscribe(self, client: ClientT, subscription: Any) -> None:
        """Undo a subscription."""

    async def _confirm_subscriptions(self, client: ClientT) -> None:
        """Wait until the broker knows all subscriptions."""

    @abstractmethod
    async def publish(self, name: str, data: bytes, answer: str = "") -> None:
        """Send, once there is a connection; if nobody listens, brokers that can report it do so under `answer`."""

    async def __aenter__(self) -> Self:
        """Start connecting; returns at once."""
        self.running = asyncio.create_task(self._run(), name=f"kvist-link {self._url.public}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self.running)

    async def wait_connected(self) -> ClientT:
        while self.client is None:
            await self._is_up.wait()
        return self.client

    @asynccontextmanager
    async def subscription(self, name: str, receive: Receive) -> AsyncIterator[None]:
        """Subscribe on every connection to a name, in which the last token may be the broker's wildcard."""
        self._names[receive] = name
        try:
            if self.client is not None:
                self._subscriptions[receive] = await self._subscribe(self.client, name, receive)
                await self._confirm_subscriptions(self.client)
            yield
        finally:
            del self._names[receive]
            subscription = self._subscriptions.pop(receive, None)
            with suppress(*self.failures):
                if self.client is not None and subscription is not None:
                    await self._unsubscribe(self.client, subscription)

    async def use_connections(self, use: Callable[[ClientT], Coroutine[Any, Any, None]]) -> None:
        """Run `use` with each connection until it returns; if it fails on one that stands, try that again later."""
        while True:
            client, lost = await self.wait_connected(), self.lost
            using = asyncio.create_task(use(client), name="kvist-link-use")
            try:
                await wait_first(using, lost.wait())
            finally:
                await cancel_and_wait(using)
            if not using.cancelled() and not isinstance(using.exception(), self.failures):
                return using.result()
            with suppress(TimeoutError):
                async with asyncio.timeout(base.MAX_RECONNECT_S):
                    await lost.wait()

    async def _run(self) -> None:
        for host in cycle(self._url.hosts):
            self.forbidden = None
            try:
                async with self._open(host) as client:
                    await self._set_up(client)
                    await self._keep(client)
            except InvalidValueError:
                raise
            except self.failures as error:
                self._report_failure(host, error)
                self.tried.set()
            await asyncio.sleep(self._retry_s())
            self._num_failures = min(self._num_failures + 1, _MAX_DOUBLINGS)

    async def _set_up(self, client: ClientT) -> None:
        """Prepare a new connection and make all subscriptions on it, also those that come meanwhile."""
        if self._prepare is not None:
            await self._prepare(client)
        self._subscriptions.clear()
        while new := [(receive, name) for receive, name in self._names.items() if receive not in self._subscriptions]:
            for receive, name in new:
                self._subscriptions[receive] = await self._subscribe(client, name, receive)
            await self._confirm_subscriptions(client)

    async def _keep(self, client: ClientT) -> None:
        """Let others use a connection as `client` until it ends."""
        if self._failing_since is not None:
            _logger.info("connected again url=%s", self._url.public)
        self.problem = self.forbidden
        self._failing_since = self._logged_reason = None
        self.client, self.lost = client, asyncio.Event()
        self.num_connects += 1
        self._is_up.set()
        self.tried.set()
        began_s = time.monotonic()
        try:
            await self._wait_closed(client)
        finally:
            self.client = None
            self._is_up.clear()
            self.lost.set()
            if time.monotonic() - began_s > base.MAX_RECONNECT_S:
                self._num_failures = 0

    def _retry_s(self) -> float:
        """Return how long to wait before the next attempt; at random, so that a fleet does not reconnect at once."""
        if self._is_refused:
            return min(REFUSED_RETRY_S * 2.0**self._num_failures, MAX_REFUSED_RETRY_S) * random.uniform(1, 1.5)
        back_off_s = min(base.MIN_RECONNECT_S * 2.0**self._num_failures, base.MAX_RECONNECT_S)
        return back_off_s * random.uniform(0.5, 1.5)

    def _report_failure(self, host: Host, error: Exception) -> None:
        reason, self._is_refused = self._explain(error)
        self._failing_since = self._failing_since or time.strftime("%H:%M:%S UTC", time.gmtime())
        self.problem = f"broker {host}: {reason} (since {self._failing_since})"
        if reason != self._logged_reason:
            _logger.warning("not connected, and tried again: %s url=%s", reason, self._url.public)
        self._logged_reason = reason


async def cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Cancel the task until it ends: up to Python 3.11 `asyncio.wait_for` may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)


async def wait_first(*waits: Coroutine[Any, Any, object] | asyncio.Task[None]) -> None:
    """Wait until one of these is done; tasks are not cancelled."""
    own = [asyncio.create_task(wait, name="kvist-wait") for wait in waits if not isinstance(wait, asyncio.Task)]
    tasks = [wait for wait in waits if isinstance(wait, asyncio.Task)]
    try:
        await asyncio.wait([*own, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()
