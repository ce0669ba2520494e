"""Streams over ZeroMQ, in the frames that vLLM and SGLang use: no broker, one PUB and one ROUTER socket a publisher.

    stream     PUB -> SUB        topic, sequence, payload
    request    DEALER -> ROUTER  b"", start sequence [, topic [, epoch]]
    reply      ROUTER -> DEALER  b"", topic, sequence, payload   to a request with a topic
                                 b"", sequence, payload          to one without: what older clients understand
    end        sequence -1 with an empty payload, framed like the replies

Sequences and epochs are 8 bytes, big-endian. An empty topic in a request means all topics; engines understand only
requests without one. Losses are by high-water mark: a PUB socket drops for the subscriber that is full and never waits.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Self

import zmq

from kvist.errors import InvalidValueError
from kvist.events.transports import base
from kvist.events.transports.base import Message, ReplayRequest, ReplaySource
from kvist.events.transports.endpoint import Endpoint
from kvist.events.transports.received import MalformedCounter, message_of
from kvist.events.transports.zmq_replay import LoopSocket, ReplayClient, ReplayServer, bind, connect

SEND_HWM = 10_000
"""Messages kept for one slow subscriber before it starts to lose them: as many as the replay buffer has for it."""
RECEIVE_HWM = 10_000
"""Messages a subscriber keeps unread; the publisher keeps what does not fit, up to its own mark."""
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
        """Answer replay requests from `source`, in a thread of its own."""
        if self._endpoint.replay_address is not None:
            self._server = ReplayServer(self._context, self._router, source)

    def send(self, message: Message) -> None:
        """Hand the message to the socket; never waits."""
        frames = (message.topic, message.sequence.to_bytes(8, "big"), message.payload)
        try:
            self._stream.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again as error:
            raise BlockingIOError("the stream is full") from error
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot send to {self._endpoint.address}: {error.strerror}") from error

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait up to `timeout_s` for connected subscribers to take what was sent, then release everything."""
        if self._context.closed:
            return
        if self._server is not None:
            self._server.close()
        self._router.close(linger=0)
        self._stream.close(linger=int(timeout_s * 1000))
        self._context.term()


class ZmqSubscription:
    """A subscriber's end: a SUB socket for all topics, and a fresh DEALER socket for each replay."""

    is_peer_gone = False
    problem: str | None = None

    def __init__(self, endpoint: Endpoint) -> None:
        self._num_connects = self._num_handshakes = self._num_disconnects = 0
        # Whether messages of a connection may be handed out beside those of the one that came next.
        self._is_mixed = False
        self._is_waiting = False
        self._endpoint = endpoint
        self._malformed = MalformedCounter(endpoint.address)
        self._replay_client = ReplayClient(endpoint, self._malformed)

    @property
    def num_connects(self) -> int:
        """How often the peer was connected so far; ZeroMQ announces a connection before it hands out what it brings.

        But it also hands out what an earlier one left unread, in any order with that. So a connection that is announced
        while there may be such messages counts again once they are gone.
        """
        with suppress(zmq.Again):
            while True:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
                if int.from_bytes(event[:2], sys.byteorder) == zmq.EVENT_DISCONNECTED:
                    self._num_disconnects += 1
                    continue
                self._num_handshakes += 1
                is_alone = self._is_waiting and not self._stream.has_messages()
                self._is_mixed |= self._num_connects > 0 and not is_alone
                self._num_connects += 1
        return self._num_connects

    @property
    def is_caught_up(self) -> bool:
        """Whether a peer is connected, and nothing is left of what it or others brought."""
        is_connected = self.num_connects > 0 and self._num_handshakes > self._num_disconnects
        return is_connected and not self._is_mixed and not self._stream.has_messages()

    @property
    def num_malformed(self) -> int:
        """How many messages were skipped because their frames are not the transport's."""
        return self._malformed.num

    async def __aenter__(self) -> Self:
        """Connect (or bind, if the endpoint says so) in the background."""
        self._stream = LoopSocket(zmq.SUB)
        self._stream.socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
        self._stream.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._stream.socket.setsockopt(zmq.HEARTBEAT_IVL, int(base.PING_INTERVAL_S * 1000))
        self._stream.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(base.PING_TIMEOUT_S * 1000))
        self._stream.socket.setsockopt(zmq.RECONNECT_IVL, int(base.MIN_RECONNECT_S * 1000))
        self._stream.socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(base.MAX_RECONNECT_S * 1000))
        self._monitor = self._stream.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            if self._endpoint.is_bound:
                bind(self._stream.socket, self._endpoint.address)
            else:
                connect(self._stream.socket, self._endpoint.address)
        except InvalidValueError:
            self._release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the sockets; unread messages are gone."""
        self._release()

    def _release(self) -> None:
        self._stream.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._stream.close()

    async def receive(self) -> list[Message]:
        """Wait for at least one message; return at most `MAX_DRAIN`."""
        while True:
            self._is_waiting = not self._stream.has_messages()
            if self._is_mixed and self._is_waiting:
                self._is_mixed = False
                self._num_connects += 1
            try:
                frames_of_all = await self._stream.receive()
            finally:
                self._is_waiting = False
            received = [message_of(frames, self._malformed) for frames in frames_of_all]
            messages = [message for message in received if message is not None]
            if messages:
                return messages

    async def replay(self, request: ReplayRequest, timeout_s: float) -> list[Message] | None:
        """Ask the publisher's ROUTER socket."""
        return await self._replay_client.replay(request, timeout_s)
