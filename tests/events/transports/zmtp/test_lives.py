"""Random lives of publishers: what is heard of them is what libzmq makes of the very same bytes."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from typing import Any

import pytest
import zmq
from lives import seeds

from kvist.events.transports import Message
from kvist.events.transports.zmtp import wire
from kvist.events.transports.zmtp.wire import COMMAND, LONG, MORE, PeerError

LIVES = seeds(40)


def frame(rng: random.Random, body: bytes, flags: int) -> bytes:
    """Return a frame, of which a short one may be written as a long one is."""
    if len(body) > 255 or rng.randrange(8) == 0:
        return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body
    return bytes((flags, len(body))) + body


def life(rng: random.Random) -> bytes:
    """Return what a publisher says behind its handshake: messages, some of other frames, commands, and what is none."""
    parts: list[bytes] = []
    for _ in range(rng.randint(1, 30)):
        topic, payload = b"t" * rng.choice((0, 6, 255, 300)), rng.randbytes(rng.choice((0, 1, 255, 256, 9000)))
        bodies = [topic, rng.randbytes(8), payload]
        match rng.randrange(12):
            case 0:
                bodies.pop(rng.randrange(3))
            case 1:
                bodies.insert(rng.randrange(4), rng.randbytes(rng.choice((0, 8))))
            case 2:
                bodies[1] = rng.randbytes(rng.choice((0, 7, 9, 300)))
        for idx, body in enumerate(bodies):
            parts.append(frame(rng, body, MORE if idx < len(bodies) - 1 else 0))
            if rng.randrange(12) == 0:
                name, told = rng.choice(((b"PING", b"\0\0c"), (b"PONG", b"c"), (b"NEWS", b"?" * 300)))
                parts.append(frame(rng, bytes((len(name),)) + name + told, COMMAND))
    said = bytearray(b"".join(parts))
    for _ in range(rng.choice((0, 0, 1, 3))):
        at = rng.randrange(len(said) + 1)
        match rng.randrange(3):
            case 0:
                said[at : at + 1] = bytes((rng.choice((0, 1, 2, 3, 4, 5, 6, 8, rng.randrange(256))),))
            case 1:
                del said[at : at + rng.randint(1, 20)]
            case _:
                said[at:at] = rng.randbytes(rng.randint(1, 9))
    if rng.choice((True, False)):
        del said[rng.randrange(len(said) + 1) :]
    return bytes(said)


class Libzmq:
    """A subscriber of libzmq's own, anew for each life."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._listener = socket.create_server(("127.0.0.1", 0))

    def hear(self, said: bytes) -> list[Message]:
        """Return the messages of topic, sequence and payload that it makes of what a publisher says before it goes."""
        with self._context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.RECONNECT_IVL, 100_000)
            subscriber.setsockopt(zmq.RCVHWM, 0)
            subscriber.subscribe(b"")
            subscriber.connect(f"tcp://127.0.0.1:{self._listener.getsockname()[1]}")
            peer, _ = self._listener.accept()
            with peer, suppress(OSError):
                peer.settimeout(60)
                peer.sendall(wire.GREETING + wire.ready(b"PUB"))
                heard = b""
                while not heard.endswith(b"SUBSCRIBE"):  # before, it takes a message for a fault
                    heard += peer.recv(1 << 16)
                peer.sendall(said)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(1 << 16):
                    pass
            messages = []
            with suppress(zmq.Again):
                while True:
                    messages.append(subscriber.recv_multipart(zmq.NOBLOCK))
        told = (each for each in messages if len(each) == 3 and len(each[1]) == 8)
        return [Message(topic, int.from_bytes(sequence, "big"), payload) for topic, sequence, payload in told]

    def close(self) -> None:
        self._listener.close()
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def libzmq() -> Any:
    subscriber = Libzmq()
    yield subscriber
    subscriber.close()


def test_random_publishers_are_heard_as_libzmq_hears_them(libzmq: Libzmq, new_fed: Any) -> None:
    """Of one that is left as it breaks the protocol, which libzmq may not do, all that came before it."""
    for seed in LIVES:
        rng = random.Random(seed)
        said = life(rng)
        fed, has_left = new_fed(), False
        try:
            fed.feed(said, rng.choice((1, 7, 100, 5000, 1 << 20)))
        except PeerError:
            has_left = True
        expected = libzmq.hear(said)
        assert fed.messages == (expected[: len(fed.messages)] if has_left else expected), seed
