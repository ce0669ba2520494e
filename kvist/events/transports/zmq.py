"""Publications over ZeroMQ, in the frames that vLLM and SGLang use: no broker, one PUB and one ROUTER socket each.

    stream     PUB -> SUB        topic, sequence, payload
    request    DEALER -> ROUTER  b"", start sequence [, topic [, epoch]]
    reply      ROUTER -> DEALER  b"", topic, sequence, payload   to a request with a topic
                                 b"", sequence, payload          to one without: what older clients understand
    end        sequence -1 with an empty payload, framed like the replies

Sequences and epochs are 8 bytes, big-endian. An empty topic in a request means all topics; engines understand only
requests without one. Losses are by high-water mark: a PUB socket drops for the subscriber that is full and never waits.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from functools import partial

import zmq

from kvist.errors import InvalidValueError
from kvist.events.transports import base
from kvist.events.transports.base import Message, ReplayRequest, ReplaySource
from kvist.events.transports.endpoint import Endpoint

SEND_HWM = 10_000
"""Messages queued for one slow subscriber before it starts to lose them: as many as the replay buffer keeps."""
REPLAY_HWM = 1_000
"""Replies in flight to one client; with more, the replay thread waits for the client."""
MAX_REQUEST_BYTES = 4096
"""The largest frame of a replay request."""
REPLAY_SEND_TIMEOUT_S = 2.0
"""How long one reply may wait for its client; then the rest of that replay is dropped."""
END = (-1).to_bytes(8, "big", signed=True)

_END_TIMEOUT_S = 1.0


class ZmqPublication:
    """The publisher's end: binds a PUB socket for the stream and a ROUTER socket, with its own thread, for replay."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._context = zmq.Context()
        self._stream = self._context.socket(zmq.PUB)
        self._stream.setsockopt(zmq.SNDHWM, SEND_HWM)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, REPLAY_HWM)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        # Mandatory: a full or vanished client is an error, and not a reply that silently disappears.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDTIMEO, int(REPLAY_SEND_TIMEOUT_S * 1000))
        self._replay_thread: threading.Thread | None = None
        self._is_stopping = False
        try:
            address = bind(self._stream, endpoint.address)
            replay_address = endpoint.replay_address
            if replay_address is not None:
                replay_address = bind(self._router, replay_address, "replay endpoint")
        except InvalidValueError:
            self._context.destroy(linger=0)
            raise
        self._has_replay, self.endpoint = replay_address is not None, Endpoint(address, replay_address).url

    def serve_replay(self, source: ReplaySource) -> None:
        if self._has_replay:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            answer_all = partial(self._answer_all, source)
            self._replay_thread = threading.Thread(target=answer_all, name="kvist-replay", daemon=True)
            self._replay_thread.start()

    def send(self, message: Message) -> None:
        frames = (message.topic, message.sequence.to_bytes(8, "big"), message.payload)
        try:
            self._stream.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again as error:
            raise BlockingIOError("the stream is full") from error
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot send to {self.endpoint}: {error.strerror}") from error

    def close(self, timeout_s: float = 5.0) -> None:
        if self._context.closed:
            return
        if self._replay_thread is not None:  # which may wait for a client that reads nothing
            self._is_stopping = True
            os.eventfd_write(self._stop, 1)
            self._replay_thread.join()
            os.close(self._stop)
        self._router.close(linger=0)
        self._stream.close(linger=int(timeout_s * 1000))
        # Seen once, on a busy machine: libzmq waited for ever here. The caller must not.
        ending = threading.Thread(target=self._context.term, name="kvist-zmq-end", daemon=True)
        ending.start()
        ending.join(timeout_s + _END_TIMEOUT_S)

    def _answer_all(self, source: ReplaySource) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while self._stop not in dict(poller.poll()):
            # A client that is gone or reads nothing gets no more of this answer, and may ask again.
            with suppress(zmq.ZMQError):
                self._answer(source, self._router.recv_multipart())

    def _answer(self, source: ReplaySource, request: list[bytes]) -> None:
        if len(request) not in (3, 4, 5) or any(len(number) != 8 for number in request[2::2]):
            return
        client, start, *rest = request[0], int.from_bytes(request[2], "big"), *request[3:]
        has_topic = len(rest) > 0
        epoch = int.from_bytes(rest[1], "big") if len(rest) == 2 else None
        ends_at_s = time.monotonic() + base.MAX_ANSWER_S
        for message in source.replay(ReplayRequest(rest[0] if has_topic else None, start, epoch)):
            topic = (message.topic,) if has_topic else ()
            self._router.send_multipart((client, b"", *topic, message.sequence.to_bytes(8, "big"), message.payload))
            if self._is_stopping or time.monotonic() >= ends_at_s:  # other clients wait, and this one has given up
                return
        self._router.send_multipart((client, b"", *((b"",) if has_topic else ()), END, b""))


def bind(zmq_socket: zmq.Socket[bytes], address: str, name: str = "endpoint") -> str:
    """Bind the socket and return its address with a real port; raises InvalidValueError of that name if it cannot."""
    refuse_to_steal(address)
    if address.startswith("tcp://["):  # a name stays IPv4, for engines listen on that by default
        zmq_socket.setsockopt(zmq.IPV6, 1)
    bindable = f"{address.removesuffix(':0')}:*" if address.endswith(":0") else address
    try:
        zmq_socket.bind(bindable)
    except zmq.ZMQError as error:
        reason = error.strerror.partition(" (addr=")[0]  # which pyzmq adds
        raise InvalidValueError(name, address, f"an address that can be bound ({reason})") from error
    return zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT)


def refuse_to_steal(address: str) -> None:
    """Raise InvalidValueError if somebody listens at an ipc path, which ZeroMQ would silently take over."""
    if not address.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX) as probe, suppress(FileNotFoundError, ConnectionRefusedError):
        probe.connect(address.removeprefix("ipc://"))
        raise InvalidValueError("endpoint", address, "a path where nobody listens")
