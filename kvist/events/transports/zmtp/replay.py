"""Asking a publisher's replay socket: see `kvist.events.transports.zmq` for its frames."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress

from kvist.events.transports import base
from kvist.events.transports.base import Message, ReplayRequest
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.received import Collected, MalformedCounter
from kvist.events.transports.zmq import END
from kvist.events.transports.zmtp import wire
from kvist.events.transports.zmtp.connection import MAX_FRAMES
from kvist.events.transports.zmtp.link import connect, shake_hands
from kvist.events.transports.zmtp.wire import COMMAND, MORE, PeerError

READ_BYTES = 256 << 10
"""What is read ahead at most; the publisher waits with what is beyond."""


async def ask(
    endpoint: Endpoint, request: ReplayRequest, timeout_s: float, malformed: MalformedCounter
) -> list[Message] | None:
    """Return the answer, over a connection of its own; None if nobody can be asked, or is silent for `timeout_s`."""
    address = endpoint.replay_address
    # An engine that may connect from anywhere has told nobody where it can be asked.
    if address is None or address.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")):
        return None
    try:
        async with asyncio.timeout(base.MAX_ANSWER_S):
            async with asyncio.timeout(timeout_s):
                sock = await connect(address)
                await shake_hands(sock, b"DEALER", (b"ROUTER", b"REP"))
                is_local = sock.family == socket.AF_UNIX
                open_stream = asyncio.open_unix_connection if is_local else asyncio.open_connection
                reader, writer = await open_stream(sock=sock, limit=READ_BYTES)
            try:
                return await _collect(_Router(reader, writer, timeout_s), request, malformed)
            finally:
                writer.transport.abort()  # who does not read what was said to it is not waited for
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, PeerError):  # a timeout is an OSError
        return None


async def _collect(router: _Router, request: ReplayRequest, malformed: MalformedCounter) -> list[Message] | None:
    answer = Collected()
    router.send(_frames(request))
    while True:
        for frames in router.messages():
            if len(frames) >= 3 and frames[-2] == END:
                return answer
            message = message_of(frames[1:] if len(frames) == 4 else frames, malformed)
            if message is not None and not answer.add(message):
                return None
        await router.read()


class _Router:
    """A connection to a ROUTER socket that is ready, as a DEALER has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout_s = timeout_s
        self._received = bytearray()
        self._frames: list[bytes] = []

    async def read(self) -> None:
        """Wait for more; raises OSError at the end, or after silence."""
        try:
            async with asyncio.timeout(self._timeout_s):
                received = await self._receive()
        except TimeoutError:  # it may be this event loop that was late: what is there counts
            async with asyncio.timeout(0):
                received = await self._receive()
        if not received:
            raise ConnectionResetError("the publisher ended the connection")
        self._received += received
        await asyncio.sleep(0)  # others have their turn, however much comes

    async def _receive(self) -> bytes:
        await self._writer.drain()  # who asks for signs of life must take them
        return await self._reader.read(READ_BYTES)

    def send(self, frames: tuple[bytes, ...]) -> None:
        self._writer.writelines(wire.frame(body, MORE) for body in frames[:-1])
        self._writer.write(wire.frame(frames[-1]))

    def messages(self) -> Iterator[list[bytes]]:
        """Yield the frames of each message that is all there; commands are answered."""
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
                    self._writer.write(wire.pong(rest))
                continue
            self._frames.append(body)
            if not header.flags & MORE:
                yield self._frames
                self._frames = []
        del self._received[:at]


def message_of(frames: list[bytes], malformed: MalformedCounter) -> Message | None:
    """Return the message of topic, sequence and payload; None, counted, when they are something else."""
    if len(frames) != 3 or len(frames[1]) != 8 or len(frames[0]) + len(frames[2]) > base.MAX_MESSAGE_BYTES:
        malformed.skip_message([len(frame) for frame in frames])
        return None
    return Message(frames[0], int.from_bytes(frames[1], "big"), frames[2])


def _frames(request: ReplayRequest) -> tuple[bytes, ...]:
    """Return a request's frames: those that an engine does not understand only for who asks with a topic."""
    start = request.start_sequence.to_bytes(8, "big")
    if request.topic is None:
        return b"", start
    return b"", start, request.topic, *(() if request.epoch is None else (request.epoch.to_bytes(8, "big"),))
