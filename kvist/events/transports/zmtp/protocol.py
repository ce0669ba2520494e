"""The asyncio side of one connection: large reads straight into the inbox, as many as the consumer keeps up with."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

from kvist.events.transports import base
from kvist.events.transports.frames import MalformedCounter
from kvist.events.transports.zmtp.connection import Connection
from kvist.events.transports.zmtp.inbox import Inbox
from kvist.events.transports.zmtp.wire import PeerError

NAP_S = 0.005
"""A busy socket that was emptied is left alone for so long: many small reads cost more than a few large ones.

CPU a message of 930 bytes without a nap and with it, on two cores of a shared virtual machine: 2.6 and 0.75 µs at 80k/s
(compiled splitter); an idle source's message never waits.
"""

_logger = logging.getLogger(__name__)

_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class ZmtpProtocol(asyncio.BufferedProtocol):
    """Feeds a connection until it is lost; stops reading while the inbox is full."""

    def __init__(
        self, connection: Connection, inbox: Inbox, malformed: MalformedCounter, on_messages: Callable[[], None]
    ) -> None:
        """Call `on_messages` whenever there is something to take."""
        loop = asyncio.get_running_loop()
        self.is_given_up = False
        self._lost: asyncio.Future[None] = loop.create_future()
        self._malformed = malformed
        self._connection = connection
        self._inbox = inbox
        self._on_messages = on_messages
        self._loop = loop
        self._space = inbox.space()
        self._heard_at_s = loop.time()
        self._nap: asyncio.TimerHandle | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the peer."""
        self._transport = cast(asyncio.Transport, transport)
        _keep_alive(transport.get_extra_info("socket"))
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio knows no size
        """Return the room in the inbox."""
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        now_s = self._loop.time()
        is_drained = nbytes < len(self._space)
        is_busy = now_s - self._heard_at_s < 2 * NAP_S  # a nap may lie between the last read and this one
        self._heard_at_s = now_s
        self._inbox.filling.end += nbytes
        if is_drained and is_busy:
            self._nap = self._loop.call_later(NAP_S, self._wake)
        self.advance()

    def pause_writing(self) -> None:
        """Give up a peer that asks and asks, and never reads an answer."""
        self._leave("it reads no answers")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - a peer may go for any reason
        """Say so."""
        if self._nap is not None:
            self._nap.cancel()
        if not self._lost.done():
            self._lost.set_result(None)

    # What the subscription calls.

    def advance(self) -> None:
        """Split what is in the inbox, and read on if there is room: called when something came or was taken."""
        if self.is_given_up:
            return
        try:
            self._connection.advance()
            if not self._inbox.is_full:
                self._space = self._inbox.space()
        except PeerError as error:
            self._leave(error.reason)
        self._flush()
        self._read_or_pause()
        if self._inbox.num_messages:
            self._on_messages()

    async def watch(self) -> None:
        """Return once the connection is lost, or was silent for too long; close it in any case."""
        try:
            while not self._lost.done():
                await asyncio.wait([self._lost], timeout=base.PING_INTERVAL_S)
                self._check_silence()
        finally:
            self._transport.abort()
            await self._lost

    def _check_silence(self) -> None:
        now_s = self._loop.time()
        if self._inbox.is_full:
            self._heard_at_s = now_s  # it is us who do not listen
        is_silent = now_s - self._heard_at_s >= base.PING_TIMEOUT_S
        if is_silent and (self._connection.has_pong or not self._connection.is_ready):
            _logger.info("peer left for its silence, and tried again: source=%s", self._malformed.source)
            self._give_up()
        elif self._connection.is_ready:
            self._connection.ping()
            self._flush()

    def _wake(self) -> None:
        self._nap = None
        self._read_or_pause()

    def _read_or_pause(self) -> None:
        if self._transport.is_closing():
            return
        if self._nap is not None or self._inbox.is_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _flush(self) -> None:
        outgoing = self._connection.take_outgoing()
        if outgoing and not self._transport.is_closing():
            self._transport.write(outgoing)

    def _leave(self, reason: str) -> None:
        self._malformed.leave_peer(reason)
        self._give_up()

    def _give_up(self) -> None:
        self.is_given_up = True
        self._transport.abort()


def _keep_alive(sock: socket.socket) -> None:
    """Let the kernel notice a vanished peer that does not know a PING; asyncio has already set TCP_NODELAY."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
