"""ZeroMQ sockets as the transports here use them: bound, connected, and read in bulk from an event loop."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TypeAlias

import zmq

from kvist.errors import InvalidValueError
from kvist.events.transports.base import MAX_DRAIN

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[Socket]


class LoopSocket:
    """A socket read in bulk from an event loop: one wake-up for many messages, no future for each.

    ZeroMQ's file descriptor is edge-triggered: it is silent about what was there before, so the socket is emptied, and
    asked once more, before waiting.
    """

    def __init__(self, kind: int) -> None:
        self.socket: Socket = zmq.Context.instance().socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._readable = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fd = int(self.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)

    def has_messages(self) -> bool:
        """Return whether messages can be received at once, and wake who waits for them: nothing else may any more."""
        is_readable = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if is_readable:
            self._readable.set()
        return is_readable

    def _on_readable(self) -> None:
        self.has_messages()

    async def receive(self) -> list[list[bytes]]:
        """Wait for at least one message; return at most `MAX_DRAIN`, each as its frames."""
        while True:
            messages: list[list[bytes]] = []
            with suppress(zmq.Again):
                while len(messages) < MAX_DRAIN:
                    messages.append(self.socket.recv_multipart(zmq.NOBLOCK))
            if messages:
                return messages
            self._readable.clear()
            if not self.has_messages():
                await self._readable.wait()

    def close(self) -> None:
        """Stop listening and close the socket."""
        self._loop.remove_reader(self._fd)
        self.socket.close(linger=0)


def bind(zmq_socket: Socket, address: str) -> str:
    """Bind the socket and return its address with a real port; raises InvalidValueError when it cannot be."""
    _refuse_to_steal(address)
    _allow_ipv6(zmq_socket, address)
    bindable = f"{address.removesuffix(':0')}:*" if address.endswith(":0") else address
    try:
        zmq_socket.bind(bindable)
    except zmq.ZMQError as error:
        raise InvalidValueError("endpoint", address, f"an address that can be bound ({error.strerror})") from error
    return zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _refuse_to_steal(address: str) -> None:
    """Raise if somebody listens at an ipc path: ZeroMQ would take it over without a word."""
    if not address.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe, suppress(FileNotFoundError, ConnectionRefusedError):
        probe.connect(address.removeprefix("ipc://"))
        raise InvalidValueError("endpoint", address, "a path where nobody listens")


def connect(zmq_socket: Socket, address: str) -> None:
    """Connect the socket in the background; raises InvalidValueError when nobody can be there."""
    _allow_ipv6(zmq_socket, address)
    try:
        zmq_socket.connect(address)
    except zmq.ZMQError as error:
        raise InvalidValueError("endpoint", address, f"an address to connect to ({error.strerror})") from error


def _allow_ipv6(zmq_socket: Socket, address: str) -> None:
    """Allow IPv6 where it is written out; a name stays IPv4, for engines listen on that by default."""
    if address.startswith("tcp://["):
        zmq_socket.setsockopt(zmq.IPV6, 1)
