"""A subscription over TCP or a Unix socket: connects, connects again, and hands out what has come."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Self

from kvist.errors import InvalidValueError, leave_group
from kvist.events.transports import base
from kvist.events.transports.base import Message, ReplayRequest
from kvist.events.transports.block import MessageBlock
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.received import MalformedCounter
from kvist.events.transports.zmtp.connection import Connection
from kvist.events.transports.zmtp.inbox import Inbox
from kvist.events.transports.zmtp.link import Link, accept, connect, listen, shake_hands
from kvist.events.transports.zmtp.replay import ask
from kvist.events.transports.zmtp.wire import PeerError, Splitter

OVERHEAD_BYTES = 64 << 10
"""Room for what may stand in one message beside topic and payload: frame headers, and commands between its frames."""

_logger = logging.getLogger(__name__)


class ZmtpSubscription:
    """A subscriber's end for all topics.

    It reads no further than its inbox holds until that is taken: then the publisher queues, and at its high-water mark
    loses what is for this subscriber. No receive brings messages of two connections.
    """

    is_peer_gone = False
    problem: str | None = None

    def __init__(self, endpoint: Endpoint, splitter: Splitter | None = None, patience_s: float = 0.0) -> None:
        self._malformed = MalformedCounter(endpoint.address)
        self._endpoint, self._address = endpoint, endpoint.address
        if endpoint.scheme == "tcp":
            host, _, port = endpoint.address.removeprefix("tcp://").rpartition(":")
            try:
                host.strip("[]").encode("idna")
            except UnicodeError as error:
                raise InvalidValueError("endpoint", endpoint.address, "a host name that can be looked up") from error
            if not endpoint.is_bound and (host == "*" or port == "0"):
                raise InvalidValueError("endpoint", endpoint.address, "an address to connect to")
        self._splitter, self._patience_s = splitter, patience_s
        self._inbox = Inbox(base.MAX_MESSAGE_BYTES + OVERHEAD_BYTES)
        self._waiter: asyncio.Future[None] | None = None
        self._is_emptied = asyncio.Event()
        self._link: Link | None = None
        self.num_connects = 0
        """How often a publisher was connected so far: that is, it was ready to send."""
        self._tasks = asyncio.TaskGroup()

    @property
    def is_caught_up(self) -> bool:
        """Whether a publisher is connected, nothing of what it sent is unread, and the connection has no end yet."""
        return self._link is not None and self._inbox.is_empty and self._link.is_quiet

    @property
    def num_malformed(self) -> int:
        return self._malformed.num

    async def __aenter__(self) -> Self:
        self._listener = listen(self._address) if self._endpoint.is_bound else None
        await self._tasks.__aenter__()
        self._connecting = self._tasks.create_task(self._stay_connected(), name=f"kvist-zmtp-{self._address}")
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._connecting.cancel()
        try:
            await leave_group(self._tasks, error)
        finally:
            self._inbox.close()
            if self._listener is not None:
                self._listener.close()
            self._link = None
            del self._connecting  # it held this subscription in turn

    async def receive(self) -> MessageBlock:
        if self._inbox.num_messages == 0:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        block = self._inbox.take()
        if self._link is not None:
            self._link.on_taken()
        if self._inbox.num_messages == 0:
            self._is_emptied.set()
        return block

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        return await ask(self._endpoint, request, timeout_s, self._malformed)

    def _arrived(self) -> None:
        """Wake who waits for messages."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _stay_connected(self) -> None:
        wait_s = base.MIN_RECONNECT_S
        has_logged = False
        while True:
            was_good = False
            try:
                was_good = await self._follow()
            except PeerError as error:
                self._malformed.leave_peer(error.reason)
            except OSError as error:
                if not has_logged:
                    _logger.info("not connected, and tried again: %s source=%s", error, self._address)
                has_logged = True
            if was_good:
                wait_s, has_logged = base.MIN_RECONNECT_S, False
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # not all subscribers at once
            wait_s = min(2 * wait_s, base.MAX_RECONNECT_S)

    async def _follow(self) -> bool:
        """Connect, and stay until that has an end and its messages are taken; return whether it was a good one."""
        sock = await (connect(self._address) if self._listener is None else accept(self._listener))
        minor_version = await shake_hands(sock, b"SUB", (b"PUB", b"XPUB"))
        connection = Connection(self._inbox, self._splitter, self._malformed, minor_version)
        self.num_connects += 1
        self._link = link = Link(sock, connection, self._inbox, self._malformed, self._arrived, self._patience_s)
        await link.watch()
        while self._inbox.num_messages:
            self._is_emptied.clear()
            await self._is_emptied.wait()
        self._inbox.reset()
        self._link = None
        return not link.is_left
