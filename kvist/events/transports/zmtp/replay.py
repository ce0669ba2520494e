"""Asking a publisher's replay socket: see `kvist.events.transports.zmq` for its frames."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress

from kvist.events.transports import base
from kvist.events.transports.base import Message, ReplayRequest
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.received import MalformedCounter, ReplayAnswer
from kvist.events.transports.zmq import END
from kvist.events.transports.zmtp import wire
from kvist.events.transports.zmtp.connection import MAX_FRAMES
from kvist.events.transports.zmtp.sockets import connect, shake_hands
from kvist.events.transports.zmtp.wire import COMMAND, MORE, PeerError

READ_BYTES = 256 << 10
"""What is read at once."""


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
                return await _collect(_Router(sock, timeout_s), request, malformed)
    except (OSError, PeerError):  # a timeout is an OSError
        return None


async def _collect(router: _Router, request: ReplayRequest, malformed: MalformedCounter) -> list[Message] | None:
    answer = ReplayAnswer()
    router.send(_frames(request))
    while True:
        for frames in router.messages():
            if len(frames) >= 3 and frames[-2] == END:
                return answer
            message = _message(frames[1:] if len(frames) == 4 else frames, malformed)
            if message is not None and not answer.add(message):
                return None
        await router.read()


class _Router:
    """A connection, behind the handshake, to a publisher's ROUTER socket."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._unsent = bytearray()
        self._received = bytearray()
        self._frames: list[bytes] = []

    def send(self, frames: tuple[bytes, ...]) -> None:
        """Send a message before the next `read`."""
        self._unsent += b"".join(wire.frame(body, MORE) for body in frames[:-1]) + wire.frame(frames[-1])

    async def read(self) -> None:
        """Send what is unsent and wait for more bytes; raises OSError at the connection's end, or after silence."""
        unsent, self._unsent = bytes(self._unsent), bytearray()
        if unsent:  # a local socket whose peer has closed fails even to send nothing, though it has more to read
            async with asyncio.timeout(self._timeout_s):
                await asyncio.get_running_loop().sock_sendall(self._sock, unsent)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._wait_readable()
        try:  # also after a timeout: it may be this event loop that was late
            received = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            raise TimeoutError("the publisher is silent") from None
        if not received:
            raise ConnectionResetError("the publisher ended the connection")
        self._received += received

    async def _wait_readable(self) -> None:
        loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._sock.fileno(), is_readable.set)
        try:
            await is_readable.wait()
        finally:
            loop.remove_reader(self._sock.fileno())

    def messages(self) -> Iterator[list[bytes]]:
        """Yield the frames of each message that is all there; PINGs are answered."""
        at = 0
        while (header := wire.read_frame_header(self._received, at, len(self._received))) is not None:
            num_bytes = header.num_bytes + sum(map(len, self._frames))
            if num_bytes > base.MAX_MESSAGE_BYTES + len(END) or len(self._frames) > MAX_FRAMES:
                raise PeerError("a reply is larger than any message")
            if header.end > len(self._received):
                break
            body = bytes(self._received[header.start : header.end])
            at = header.end
            if header.flags & COMMAND:
                name, rest = wire.read_command(body)
                if name == b"PING":
                    self._unsent += wire.pong(rest)
                continue
            self._frames.append(body)
            if not header.flags & MORE:
                yield self._frames
                self._frames = []
        del self._received[:at]


def _message(frames: list[bytes], malformed: MalformedCounter) -> Message | None:
    """Return the message of topic, sequence and payload; None, counted, for other frames."""
    if len(frames) != 3 or len(frames[1]) != 8 or len(frames[0]) + len(frames[2]) > base.MAX_MESSAGE_BYTES:
        malformed.count_message([len(frame) for frame in frames])
        return None
    return Message(frames[0], int.from_bytes(frames[1], "big"), frames[2])


def _frames(request: ReplayRequest) -> tuple[bytes, ...]:
    """Return a request's frames; one without a topic has only those that every engine understands."""
    start = request.start_sequence.to_bytes(8, "big")
    if request.topic is None:
        return b"", start
    return b"", start, request.topic, *(() if request.epoch is None else (request.epoch.to_bytes(8, "big"),))
