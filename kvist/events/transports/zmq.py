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

import zmq

from kvist.errors import InvalidValueError
from kvist.events.transports.base import Message, ReplaySource
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.zmq_replay import ReplayServer, bind

SEND_HWM = 10_000
"""Messages kept for one slow subscriber before it starts to lose them: as many as the replay buffer has for it."""
REPLAY_HWM = 1_000
"""Replies in flight to one client: the replay thread waits for the client beyond that."""
MAX_REQUEST_BYTES = 4096
"""A frame of a replay request."""


class ZmqPublication:
    """The publisher's end: binds a PUB socket for the stream and a ROUTER socket, with its own thread, for replay."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._context = zmq.Context()
        self._stream = self._context.socket(zmq.PUB)
        self._stream.setsockopt(zmq.SNDHWM, SEND_HWM)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, REPLAY_HWM)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        # Mandatory: a full or vanished client is an error here, instead of a reply that silently disappears.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._server: ReplayServer | None = None
        try:
            address = bind(self._stream, endpoint.address)
            replay_address = None if endpoint.replay_address is None else bind(self._router, endpoint.replay_address)
        except InvalidValueError:
            self._context.destroy(linger=0)
            raise
        self._endpoint = Endpoint(address, replay_address)

    @property
    def endpoint(self) -> str:
        """The URL a subscriber connects to, with real port numbers; a wildcard host stays one."""
        return self._endpoint.url

    def serve_replay(self, source: ReplaySource) -> None:
        if self._endpoint.replay_address is not None:
            self._server = ReplayServer(self._context, self._router, source)

    def send(self, message: Message) -> None:
        frames = (message.topic, message.sequence.to_bytes(8, "big"), message.payload)
        try:
            self._stream.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again as error:
            raise BlockingIOError("the stream is full") from error
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot send to {self._endpoint.address}: {error.strerror}") from error

    def close(self, timeout_s: float = 5.0) -> None:
        if self._context.closed:
            return
        if self._server is not None:
            self._server.close()
        self._router.close(linger=0)
        self._stream.close(linger=int(timeout_s * 1000))
        self._context.term()
