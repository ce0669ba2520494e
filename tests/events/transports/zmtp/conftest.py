"""What a publisher says in ZMTP, byte for byte, and a connection that is fed with it."""

from __future__ import annotations

from functools import partial

import pytest
from zmtp_splitter import split

from kvist.events.transports import Message
from kvist.events.transports.received import MalformedCounter
from kvist.events.transports.zmtp.connection import Connection, Inbox
from kvist.events.transports.zmtp.wire import PeerError


class Say:
    """Builds the bytes of a publisher; the flags and lengths may lie."""

    @staticmethod
    def greeting(major: int = 3, minor: int = 1, mechanism: bytes = b"NULL") -> bytes:
        return b"\xff" + bytes(8) + b"\x7f" + bytes((major, minor)) + mechanism.ljust(20, b"\0") + bytes(32)

    @staticmethod
    def frame(body: bytes, flags: int = 0, num_bytes: int | None = None) -> bytes:
        num_bytes = len(body) if num_bytes is None else num_bytes
        if num_bytes > 255 or flags & 2:
            return bytes((flags | 2,)) + num_bytes.to_bytes(8, "big") + body
        return bytes((flags, num_bytes)) + body

    def command(self, name: bytes, body: bytes = b"") -> bytes:
        return self.frame(bytes((len(name),)) + name + body, flags=4)

    def ready(self, socket_type: bytes = b"PUB") -> bytes:
        return self.command(b"READY", b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type)

    def hello(self, minor: int = 1) -> bytes:
        return self.greeting(minor=minor) + self.ready()

    def frames(self, message: Message) -> list[bytes]:
        topic = self.frame(message.topic, flags=1)
        sequence = self.frame(message.sequence.to_bytes(8, "big"), flags=1)
        return [topic, sequence, self.frame(message.payload)]

    def message(self, message: Message) -> bytes:
        return b"".join(self.frames(message))

    def malformed(self, *bodies: bytes) -> bytes:
        return b"".join(self.frame(body, flags=1) for body in bodies[:-1]) + self.frame(bodies[-1])


class Fed:
    """A connection that is fed with bytes, as much at once as there is room for, and emptied when it is full."""

    def __init__(self, max_bytes: int = 1 << 20, minor_version: int = 1, *, splitter) -> None:
        self.inbox = Inbox(max_bytes)
        self.malformed = MalformedCounter("a source")
        self.connection = Connection(self.inbox, splitter, self.malformed, minor_version)
        self.messages: list[Message] = []

    def feed(self, data: bytes, chunk_bytes: int = 1 << 30) -> Fed:
        while data:
            space = self.inbox.space()
            num_bytes = min(len(space), len(data), chunk_bytes)
            space[:num_bytes] = data[:num_bytes]
            data = data[num_bytes:]
            self.inbox.end += num_bytes
            self._advance()
            while (self.inbox.is_full or not data) and self.inbox.num_messages:
                self.messages += self.inbox.take()
                self._advance()
        return self

    def _advance(self) -> None:
        """Let the connection go on; when that ends it, what came before is still there."""
        try:
            self.connection.advance()
        except PeerError:
            if self.inbox.num_messages:
                self.messages += self.inbox.take()
            raise


@pytest.fixture
def say() -> Say:
    return Say()


@pytest.fixture(params=[split, None], ids=["splitter", "frames"])
def new_fed(request):
    """Return what makes connections after the handshake, with a splitter and without."""
    return partial(Fed, splitter=request.param)


@pytest.fixture
def ready(new_fed) -> Fed:
    """Return one of them that has subscribed."""
    fed = new_fed()
    fed.connection.take_outgoing()
    return fed
