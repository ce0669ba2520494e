"""Sockets of ZMTP connections: connecting, listening, and the handshake."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvist.errors import InvalidValueError
from kvist.events.transports.zmq import refuse_to_steal
from kvist.events.transports.zmtp import wire
from kvist.events.transports.zmtp.wire import PeerError
from kvist.names import look_up

CONNECT_TIMEOUT_S = 5.0
"""How long connecting may take, and then the handshake."""

_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


async def connect(address: str) -> socket.socket:
    """Return a socket connected to a tcp:// or ipc:// address, trying each that its name has; raises OSError."""
    if address.startswith("ipc://"):
        return await _connect(socket.socket(socket.AF_UNIX), _path(address))
    host, port, family = _split(address)
    last_error = OSError(f"{host} has no address")
    for found in await look_up(host, family):
        try:
            return await _connect(socket.socket(family), (found, port))
        except OSError as error:
            last_error = error
    raise last_error


async def _connect(sock: socket.socket, place: Any) -> socket.socket:
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
    """Return the socket of the next client that connects; raises OSError."""
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
    """Do the handshake and return the peer's minor version; nothing behind it is read. On an error, close the socket.

    Raises PeerError for a peer that is no ZMTP 3 socket of these types, OSError for one that is gone or silent.
    """
    loop, received = asyncio.get_running_loop(), b""

    async def receive(num_bytes: int) -> bytes:
        if not (data := await loop.sock_recv(sock, num_bytes)):
            raise ConnectionResetError("the peer ended the connection")
        return data

    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.sock_sendall(sock, wire.GREETING)
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


def _keep_alive(sock: socket.socket) -> None:
    """Send without delay, and let the kernel notice when a peer vanishes that does not answer a PING."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
