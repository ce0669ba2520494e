"""The socket of one connection: handshake, then large reads into the inbox, as many as the consumer keeps up with."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvist.errors import InvalidValueError
from kvist.events.transports import base
from kvist.events.transports.received import MalformedCounter
from kvist.events.transports.zmq import refuse_to_steal
from kvist.events.transports.zmtp import wire
from kvist.events.transports.zmtp.connection import Connection
from kvist.events.transports.zmtp.inbox import Inbox
from kvist.events.transports.zmtp.wire import PeerError

CONNECT_TIMEOUT_S = 5.0
"""How long connecting may take, and then the handshake."""
NAP_S = 0.002
"""A dense stream is read once in so long: many small reads cost more than a few large ones.

All naps of a process end together, so that one turn of the event loop serves many sources.
"""
DENSE_S = 0.0005
"""A stream is dense if its messages are no further apart: a nap puts four of them together, or more."""

_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

_logger = logging.getLogger(__name__)


async def connect(address: str) -> socket.socket:
    """Return a socket connected to a tcp:// or ipc:// address, the first that its name has; raises OSError."""
    if address.startswith("ipc://"):
        return await _connected(socket.socket(socket.AF_UNIX), _path(address))
    host, port, family = _split(address)
    last_error = OSError(f"{host} has no address")
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    for *kind, _, place in addresses:
        try:
            return await _connected(socket.socket(*kind), place)
        except OSError as error:
            last_error = error
    raise last_error


async def _connected(sock: socket.socket, place: Any) -> socket.socket:
    try:
        sock.setblocking(False)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, place)
        _keep_alive(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def listen(address: str) -> socket.socket:
    """Return a socket for `accept`; raises InvalidValueError when nobody can listen at the address."""
    refuse_to_steal(address)
    sock: socket.socket | None = None
    try:
        if address.startswith("ipc://"):
            with suppress(FileNotFoundError, ValueError):  # a name without a file has none to remove
                Path(_path(address)).unlink()
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(_path(address))
            sock.listen()
        else:
            host, port, family = _split(address)
            sock = socket.create_server(("" if host == "*" else host, port), family=family)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise InvalidValueError("endpoint", address, f"an address that can be bound ({error.strerror})") from error
    sock.setblocking(False)
    return sock


async def accept(listener: socket.socket) -> socket.socket:
    """Return a socket of who connects next; raises OSError."""
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    _keep_alive(sock)
    return sock


def _split(address: str) -> tuple[str, int, socket.AddressFamily]:
    """Return host, port and family; a name is looked up as IPv4, for engines listen on that by default."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port), socket.AF_INET6 if host.startswith("[") else socket.AF_INET


def _path(address: str) -> str:
    """Return the path of an ipc:// address; `@` begins a name that is no file, as for ZeroMQ."""
    path = address.removeprefix("ipc://")
    return f"\0{path[1:]}" if path.startswith("@") else path


async def shake_hands(sock: socket.socket, own_type: bytes, peer_types: tuple[bytes, ...]) -> int:
    """Return the minor version of a peer that is ready, of which nothing more was read; a socket that fails is closed.

    Raises PeerError for a peer that is no ZMTP 3 socket of these types, OSError for one that is gone or silent.
    """
    loop, received = asyncio.get_running_loop(), b""

    async def receive(num_bytes: int) -> bytes:
        if not (data := await loop.sock_recv(sock, num_bytes)):
            raise ConnectionResetError("the peer ended the connection")
        return data

    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.sock_sendall(sock, wire.greeting())
            while (minor_version := wire.read_greeting(received)) is None:
                received += await receive(wire.GREETING_BYTES - len(received))
            await loop.sock_sendall(sock, wire.ready(own_type))
            received = b""
            while (header := wire.read_frame_header(received, 0, len(received))) is None:
                received += await receive(1)
            if not header.flags & wire.COMMAND:
                raise PeerError("it sends a message before it is ready")
            while len(received) < header.end:
                received += await receive(header.end - len(received))
        name, body = wire.read_command(received[header.start :])
        if name != b"READY":
            raise PeerError(f"it answers the handshake with {name!r} {body[:100]!r}, not with READY")
        if (socket_type := wire.read_socket_type(body)) not in peer_types:
            raise PeerError(f"its socket is a {socket_type!r}, not a {peer_types[0].decode()}")
    except BaseException:
        sock.close()
        raise
    return minor_version


class Link:
    """Reads for a connection until its peer is gone, or left; stops while the inbox is full.

    A reader on the event loop wakes it at once. A dense stream has none: it is looked at after a nap, which also saves
    the loop's bookkeeping (20 µs each time with asyncio's own transports, which must pause for that).
    """

    def __init__(
        self,
        sock: socket.socket,
        connection: Connection,
        inbox: Inbox,
        malformed: MalformedCounter,
        on_messages: Callable[[], None],
        patience_s: float = 0.0,
    ) -> None:
        """Own the socket, subscribe, and call `on_messages` whenever there is something to take.

        With patience, a message may wait so long for others, at any rate.
        """
        self.is_left = False
        """Whether it was we who ended it: the peer broke the protocol or was silent."""
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._sock = sock
        self._fd = sock.fileno()  # asyncio writes a socket out for each look-up of one, and not a number
        self._connection = connection
        self._inbox = inbox
        self._malformed = malformed
        self._on_messages = on_messages
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._heard_at_s, self._num_silent_looks = self._loop.time(), 0
        self._space = inbox.space()
        self._next_read: asyncio.Handle | None = None
        self._has_reader = False
        self._flush()
        self._await_reader()

    @property
    def is_quiet(self) -> bool:
        """Return whether there is nothing to read, the connection's end included."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def watch(self) -> None:
        """Return once the connection is over, or was silent for too long; close the socket in any case."""
        try:
            while not self._ended.done():
                await asyncio.wait([self._ended], timeout=base.PING_INTERVAL_S)
                self._check_silence()
        finally:
            self._close()

    def on_taken(self) -> None:
        """Go on with what was not split yet, and read on if that had to stop; to be called after each take."""
        self._advance()
        if not (self._has_reader or self._next_read or self._inbox.is_full or self._ended.done()):
            self._read()

    def _read(self) -> None:
        self._next_read = None
        space = self._space
        try:
            num_bytes = self._sock.recv_into(space)
        except BlockingIOError:
            self._await_reader()
            return
        except OSError:
            num_bytes = 0
        if num_bytes == 0:
            self._close()
            return
        now_s = self._loop.time()
        since_s, self._heard_at_s, self._num_silent_looks = now_s - self._heard_at_s, now_s, 0
        num_before = self._connection.num_messages
        self._inbox.end += num_bytes
        self._advance()
        if not self._ended.done():
            num_messages = self._connection.num_messages - num_before
            is_dense = since_s < num_messages * (self._patience_s or DENSE_S)
            self._plan(now_s, is_dense, num_bytes < len(space))

    def _plan(self, now_s: float, is_dense: bool, is_emptied: bool) -> None:
        """Choose what leads to the next read: more bytes, the end of a nap, now, or a take."""
        if self._inbox.is_full:
            self._drop_reader()
        elif not is_dense:
            self._await_reader()
        else:
            self._drop_reader()
            nap_s = self._patience_s or NAP_S
            nap_ends_at_s = (now_s // nap_s + 1) * nap_s
            self._next_read = (
                self._loop.call_at(nap_ends_at_s, self._read) if is_emptied else self._loop.call_soon(self._read)
            )

    def _advance(self) -> None:
        """Split what is in the inbox, tell of it, answer, and find room for more."""
        if self.is_left:
            return
        try:
            self._connection.advance()
            if not (self._inbox.is_full or self._ended.done()):
                self._space = self._inbox.space()
        except PeerError as error:
            self._leave(error.reason)
        if self._inbox.num_messages:
            self._on_messages()
        self._flush()

    def _check_silence(self) -> None:
        self._num_silent_looks += 1  # and not the time: of that any may pass while it is us who do not run
        if self._inbox.is_full:
            self._num_silent_looks = 0  # it is us who do not listen
        is_silent = self._num_silent_looks * base.PING_INTERVAL_S >= base.PING_TIMEOUT_S
        if is_silent and self._connection.has_pong:
            _logger.info("peer left for its silence, and tried again: source=%s", self._malformed.source)
            self.is_left = True
            self._close()
        else:
            self._connection.ping()
            self._flush()

    def _flush(self) -> None:
        outgoing = self._connection.take_outgoing()
        if not outgoing or self._ended.done():
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
        self._malformed.leave_peer(reason)
        self.is_left = True
        self._close()

    def _await_reader(self) -> None:
        if not self._has_reader:
            self._has_reader = True
            self._loop.add_reader(self._fd, self._read)

    def _drop_reader(self) -> None:
        if self._has_reader:
            self._has_reader = False
            self._loop.remove_reader(self._fd)

    def _close(self) -> None:
        if self._ended.done():
            return
        self._ended.set_result(None)
        self._drop_reader()
        if self._next_read is not None:
            self._next_read.cancel()
        self._sock.close()
        self._space = memoryview(b"")  # the inbox may outgrow its room, and give it back


def _keep_alive(sock: socket.socket) -> None:
    """Send answers at once, and let the kernel notice that a peer vanished which does not know a PING."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
