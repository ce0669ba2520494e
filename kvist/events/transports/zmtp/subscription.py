"""A subscription over TCP or a Unix socket: connects, reconnects, and returns the messages that have come."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, closing

from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.errors import InvalidValueError
from kvist.events.transports import base
from kvist.events.transports.base import Message, ReplayRequest
from kvist.events.transports.block import MessageBlock
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.received import MalformedCounter
from kvist.events.transports.zmtp.connection import OVERHEAD_BYTES, Connection, Inbox
from kvist.events.transports.zmtp.reads import Reads
from kvist.events.transports.zmtp.replay import ask
from kvist.events.transports.zmtp.sockets import accept, connect, listen, shake_hands
from kvist.events.transports.zmtp.wire import PeerError, Splitter

_logger = logging.getLogger(__name__)


class ZmtpSubscription(ComposedContext):
    """A subscriber's end for all topics.

    It reads no further than its inbox holds until that is taken: then the publisher queues, and at its high-water mark
    drops messages for this subscriber. No receive returns messages of two connections.
    """

    is_peer_gone = False
    problem: str | None = None

    def __init__(self, endpoint: Endpoint, splitter: Splitter | None = None, reads: Reads | None = None) -> None:
        """With `reads`, the socket is read together with those of other subscriptions."""
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
        self._splitter, self._shared_reads = splitter, reads
        self._arrived = asyncio.Event()
        self._link: Link | None = None
        self._is_new = False  # the connection, and nobody was told
        self.num_connects = 0

    @property
    def is_caught_up(self) -> bool:
        return self._link is not None and self._link.is_caught_up

    @property
    def num_malformed(self) -> int:
        return self._malformed.num

    async def _open(self, exits: AsyncExitStack) -> None:
        self._listener = exits.enter_context(listen(self._address)) if self._endpoint.is_bound else None
        self._reads = self._shared_reads or exits.enter_context(closing(Reads()))
        tasks = await exits.enter_async_context(BackgroundTasks())
        tasks.create_task(self._stay_connected(), name=f"kvist-zmtp-{self._address}")

    async def receive(self) -> MessageBlock:
        while self._link is None or not (self._link.inbox.num_messages or self._is_new):
            self._arrived.clear()
            await self._arrived.wait()
        self._is_new = False
        return self._link.take()

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        return await ask(self._endpoint, request, timeout_s, self._malformed)

    async def _stay_connected(self) -> None:
        wait_s = base.MIN_RECONNECT_S
        has_logged = False
        while True:
            was_good = False
            try:
                was_good = await self._follow()
            except PeerError as error:
                self._malformed.count_peer(error.reason)
            except OSError as error:
                if not has_logged:
                    _logger.info("not connected, and tried again: %s source=%s", error, self._address)
                has_logged = True
            if was_good:
                wait_s, has_logged = base.MIN_RECONNECT_S, False
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # not all subscribers at once
            wait_s = min(2 * wait_s, base.MAX_RECONNECT_S)

    async def _follow(self) -> bool:
        """Connect, and stay until the connection ends and its messages are taken; return whether the peer ended it."""
        sock = await (connect(self._address) if self._listener is None else accept(self._listener))
        minor_version = await shake_hands(sock, b"SUB", (b"PUB", b"XPUB"))
        inbox = Inbox(base.MAX_MESSAGE_BYTES + OVERHEAD_BYTES)
        connection = Connection(inbox, self._splitter, self._malformed, minor_version)
        self.num_connects += 1
        self._link = Link(sock, connection, self._malformed, self._arrived.set, self._reads)
        self._is_new = True
        self._arrived.set()
        try:
            return await self._link.run()
        finally:
            self._link = None


class Link:
    """Reads from one connection until it ends, or we end it; pauses while the inbox is full."""

    def __init__(
        self,
        sock: socket.socket,
        connection: Connection,
        malformed: MalformedCounter,
        on_messages: Callable[[], None],
        reads: Reads,
    ) -> None:
        """Own the socket, subscribe, and call `on_messages` whenever there are messages to take."""
        self.inbox = connection.inbox
        self._reads = reads
        self._sock = sock
        self._fd = sock.fileno()
        self._connection = connection
        self._malformed = malformed
        self._on_messages = on_messages
        self._is_left = False  # we ended it: the peer broke the protocol or was silent
        self._ended = asyncio.Event()
        self._emptied = asyncio.Event()
        self._num_silent_intervals = 0
        self._is_reading = False
        self._flush()
        self._resume_reading()

    @property
    def is_caught_up(self) -> bool:
        """Whether everything was taken, and there is nothing to read, not even the connection's end."""
        if not self.inbox.is_empty:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def run(self) -> bool:
        """Return once the connection has ended and its messages are taken: whether it was the peer that ended it.

        A peer that is silent for too long is left. The socket is closed in any case.
        """
        self._await_silence()
        try:
            await self._ended.wait()
        finally:
            self._silence.cancel()
            self._close()
        while self.inbox.num_messages:
            self._emptied.clear()
            await self._emptied.wait()
        return not self._is_left

    def take(self) -> MessageBlock:
        """Return the messages that are here, and continue reading if that had to pause."""
        block = self.inbox.take()
        self._advance()
        if not (self._is_reading or self.inbox.is_full or self._ended.is_set()):
            self._read()
            self._resume_reading()
        if self.inbox.num_messages == 0:
            self._emptied.set()
        return block

    def _read(self) -> bool:
        """Read what is there, and return whether there may be more."""
        try:
            space = self.inbox.space()
            num_bytes = self._sock.recv_into(space)
        except BlockingIOError:
            return False
        except PeerError as error:
            self._leave(error.reason)
            return False
        except OSError:
            num_bytes = 0
        if num_bytes == 0:
            self._close()
            return False
        self._num_silent_intervals = 0
        self.inbox.end += num_bytes
        self._advance()
        if self.inbox.is_full:
            self._stop_reading()
        return num_bytes == len(space) and self._is_reading

    def _advance(self) -> None:
        """Process the bytes in the inbox, report its messages, and send answers."""
        if self._is_left:
            return
        try:
            self._connection.advance()
        except PeerError as error:
            self._leave(error.reason)
        if self.inbox.num_messages:
            self._on_messages()
        self._flush()

    def _await_silence(self) -> None:
        self._silence = asyncio.get_running_loop().call_later(base.PING_INTERVAL_S, self._check_silence)

    def _check_silence(self) -> None:
        self._num_silent_intervals += 1  # counted, not timed: any time may pass while this loop does not run
        if self.inbox.is_full:
            self._num_silent_intervals = 0  # it is us who do not read
        is_silent = self._num_silent_intervals * base.PING_INTERVAL_S >= base.PING_TIMEOUT_S
        if is_silent and self._connection.has_pong:
            _logger.info("peer left for its silence, and tried again: source=%s", self._malformed.source)
            self._is_left = True
            self._close()
        else:
            self._connection.ping()
            self._flush()
            self._await_silence()

    def _flush(self) -> None:
        outgoing = self._connection.take_outgoing()
        if not outgoing or self._ended.is_set():
            return
        try:
            num_bytes = self._sock.send(outgoing)
        except BlockingIOError:
            num_bytes = 0
        except OSError:
            return  # the peer is gone: reading ends with what it has sent
        if num_bytes < len(outgoing):
            self._leave("it asks and asks, and reads no answers")

    def _leave(self, reason: str) -> None:
        self._malformed.count_peer(reason)
        self._is_left = True
        self._close()

    def _resume_reading(self) -> None:
        if not (self._is_reading or self.inbox.is_full or self._ended.is_set()):
            self._is_reading = True
            self._reads.add(self._fd, self._read)

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._reads.remove(self._fd)

    def _close(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self._stop_reading()
        self._sock.close()
