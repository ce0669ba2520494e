"""Asking a publisher's replay socket: see `kvist.events.transports.zmq` for its frames."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from kvist.events.transports import base
from kvist.events.transports.base import Message, ReplayRequest
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.received import MalformedCounter, ReplayAnswer
from kvist.events.transports.zmq import END
from kvist.events.transports.zmtp import wire
from kvist.events.transports.zmtp.connection import OVERHEAD_BYTES, Connection, Inbox
from kvist.events.transports.zmtp.sockets import connect, shake_hands
from kvist.events.transports.zmtp.wire import MORE, PeerError

_END_SEQUENCE = int.from_bytes(END, "big")


async def ask(
    endpoint: Endpoint, request: ReplayRequest, timeout_s: float, malformed: MalformedCounter
) -> list[Message] | None:
    """Return the answer, over a connection of its own; None if nobody can be asked, or is silent for `timeout_s`."""
    address = endpoint.replay_address
    # With bind=1 the engine connects from anywhere, and nobody knows where its replay socket is.
    if address is None or address.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")):
        return None
    try:
        async with asyncio.timeout(base.MAX_ANSWER_S):
            async with asyncio.timeout(timeout_s):
                sock = await connect(address)
                await shake_hands(sock, b"DEALER", (b"ROUTER", b"REP"))
            with sock:
                return await _collect(sock, request, timeout_s, malformed)
    except (OSError, PeerError):  # a timeout is an OSError
        return None


async def _collect(
    sock: socket.socket, request: ReplayRequest, timeout_s: float, malformed: MalformedCounter
) -> list[Message] | None:
    answer, inbox = ReplayAnswer(), Inbox(base.MAX_MESSAGE_BYTES + OVERHEAD_BYTES)
    connection = Connection(inbox, None, malformed, request=_encoded(request))
    while True:
        outgoing = connection.take_outgoing()
        if outgoing:  # a local socket whose peer has closed fails even to send nothing, though it has more to read
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_sendall(sock, outgoing)
        num_bytes = await _receive(sock, inbox.space(), timeout_s)
        inbox.end += num_bytes  # which `space` may have changed
        connection.advance()
        while inbox.num_messages:
            for message in inbox.take():
                if message.sequence == _END_SEQUENCE:
                    return answer
                if not answer.add(message):
                    return None
            connection.advance()


async def _receive(sock: socket.socket, space: memoryview, timeout_s: float) -> int:
    """Wait for bytes and return how many came; raises OSError at the connection's end, or after silence."""
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock.fileno(), is_readable.set)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await is_readable.wait()
    finally:
        loop.remove_reader(sock.fileno())
    try:  # also after a timeout: it may be this event loop that was late
        num_bytes = sock.recv_into(space)
    except BlockingIOError:
        raise TimeoutError("the publisher is silent") from None
    if not num_bytes:
        raise ConnectionResetError("the publisher ended the connection")
    return num_bytes


def _encoded(request: ReplayRequest) -> bytes:
    """Return a request's frames; one without a topic has only those that every engine understands."""
    frames = [b"", request.start_sequence.to_bytes(8, "big")]
    if request.topic is not None:
        frames += [request.topic, *(() if request.epoch is None else (request.epoch.to_bytes(8, "big"),))]
    return b"".join(wire.frame(body, MORE) for body in frames[:-1]) + wire.frame(frames[-1])
